"""What a hurt model is asked to do."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

KINDS = ("repetition", "continuation", "code")


@dataclass(frozen=True)
class Task:
    """One thing to ask of a model.

    Attributes:
        name: What it is called in results.
        kind: "repetition" (write `reference` again), "continuation" (go on with a text) or "code" (write
            Python).
        prompt: What the model is asked.
        reference: What a perfect answer is, where there is one.
        names: Names in the reference whose replacement is followed.
        check: Python that is run after the code: it raises where the code is wrong.
    """

    name: str
    kind: str
    prompt: str
    reference: str = ""
    names: tuple[str, ...] = ()
    check: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(
                f"task {self.name!r}: expected a kind from {', '.join(KINDS)}, got {self.kind!r}"
            )
        if not self.name or not self.prompt.strip():
            raise ValueError(f"expected a task with a name and a prompt, got {self.name!r}, {self.prompt!r}")
        if self.kind == "repetition" and not self.reference.strip():
            raise ValueError(f"task {self.name!r}: expected a reference, the text that is to be repeated")

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self) | {"names": list(self.names)}


STORY = (
    "Marta Velasco kept bees on the roof of the old post office. Every Thursday her neighbour, Doctor "
    "Okafor, climbed the iron stairs with two cups of coffee and asked how the bees were. In April a "
    "swarm left, and Marta followed it through the streets of Lindham with a basket. She found it on "
    "the bell of the school, where a boy called Tobias was counting the bees aloud. Doctor Okafor held "
    "the ladder, Tobias held the basket, and Marta talked to the queen until the swarm came down. "
    "Tobias has visited the roof every Thursday since."
)
SENTENCE = (
    "The lighthouse at Carrow Point had been dark for eleven years when a light was seen in it again. "
    "Nobody in the village owned a key."
)
CODE_CHECK = """
assert count_words("the cat and the dog") == {"the": 2, "cat": 1, "and": 1, "dog": 1}
assert count_words("") == {}
assert count_words("a a a") == {"a": 3}
"""


def default_tasks() -> tuple[Task, ...]:
    """Returns a repetition, a continuation and a coding task."""
    return (
        Task(
            "repetition",
            "repetition",
            f"Repeat the following text exactly, word for word:\n\n{STORY}",
            STORY,
            ("Marta", "Okafor", "Tobias", "Lindham"),
        ),
        Task("continuation", "continuation", f"Continue this story:\n\n{SENTENCE}"),
        Task(
            "code",
            "code",
            "Write a Python function count_words(text) that returns a dictionary with how often each word "
            "occurs in the text. Words are separated by spaces.",
            check=CODE_CHECK.strip(),
        ),
    )


def read_tasks(path: str | os.PathLike[str]) -> tuple[Task, ...]:
    """Returns the tasks of a YAML or JSON file: a list of mappings with the attributes of `Task`.

    Raises:
        OSError: If there is no such file.
        ValueError: If it holds something else.
    """
    import yaml

    text = Path(path).read_text(encoding="utf-8")
    try:
        found = json.loads(text) if str(path).endswith(".json") else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path} is no YAML or JSON: {' '.join(str(error).split())}") from error
    if not isinstance(found, list) or not found or not all(isinstance(task, dict) for task in found):
        raise ValueError(f"{path}: expected a list of tasks, each with name, kind and prompt")
    return tasks_of(found, str(path))


def tasks_of(found: Iterable[Mapping[str, Any]], where: str = "tasks") -> tuple[Task, ...]:
    """Returns tasks from mappings."""
    known = {field.name for field in fields(Task)}
    tasks = []
    for number, given in enumerate(found):
        unknown, missing = set(given) - known, {"name", "kind", "prompt"} - set(given)
        if unknown or missing:
            what = f"unknown {sorted(unknown)}" if unknown else f"no {', '.join(sorted(missing))}"
            raise ValueError(f"{where}: task {number} has {what}; a task has {', '.join(sorted(known))}")
        names = given.get("names", ())
        values = {k: v for k, v in given.items() if k != "names"}
        if not all(isinstance(v, str) for v in (*values.values(), *names)) or isinstance(names, str):
            raise ValueError(f"{where}: task {number}: expected texts, and names as a list of texts")
        tasks.append(Task(**values, names=tuple(names)))
    return unique(tasks)


def unique(tasks: Iterable[Task]) -> tuple[Task, ...]:
    """Returns tasks as they are.

    Raises:
        ValueError: If there is none, or two have one name.
    """
    tasks = tuple(tasks)
    names = [task.name for task in tasks]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"expected tasks with names of their own, got {names}")
    return tasks
