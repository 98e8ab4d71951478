"""What an experiment was asked for and how far it is, in one file that is always whole."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ropelens.scores import saving

FORMAT = 1
NAME = "manifest.json"
SAME = ("weights", "order", "setting", "tokens")  # in all arms of a seed


class Manifest:
    """The runs of an experiment that are done, by name, with what each came to.

    Attributes:
        asked: Configuration, arms, blocks held out, documents.
        data: The fingerprint of the blocks; None until they are there.
        runs: By name ("bootstrap", "seed-1/original", ...): all of `Trained`, arm, seed, inv_freq,
            drawn_from (which run's activation, and its hash), and the trained model's own activation
            [layer, band] on the blocks held out, with its evenness.
    """

    def __init__(self, path: Path, asked: dict[str, Any], data: Any, runs: dict[str, Any]) -> None:
        self.path, self.asked, self.data, self.runs = path, asked, data, runs
        self.check()

    @classmethod
    def open(cls, out: Path, asked: dict[str, Any]) -> Manifest:
        """Returns the manifest of a folder, a new one if there is none.

        Raises:
            ValueError: If the folder holds another experiment.
        """
        path, asked = out / NAME, saving.as_json(asked, "arguments")
        if not path.exists():
            return cls(path, asked, None, {})
        found = cls.read(path)
        for key, what in (("config", "configuration"), ("arms", "arms"), ("documents", "documents")):
            if found.asked[key] != asked[key]:
                raise ValueError(
                    f"{out} holds an experiment with other {what} ({_short(found.asked[key], asked[key])}): "
                    "choose another folder"
                )
        if found.asked != asked:
            raise ValueError(f"{out} holds an experiment with other blocks held out: choose another folder")
        return found

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Returns a manifest from its file, checked.

        Raises:
            ValueError: If its format is another one, or arms of a seed differ in more than frequencies.
        """
        facts = json.loads(Path(path).read_text())
        if facts.get("format") != FORMAT:
            raise ValueError(f"{path} has format {facts.get('format')}, and this ropelens reads {FORMAT}")
        return cls(Path(path), facts["asked"], facts["data"], facts["runs"])

    def require_data(self, fingerprint: dict[str, Any]) -> None:
        """Notes the blocks that are trained on, or checks that they are still the same."""
        fingerprint = saving.as_json(fingerprint, "the data")
        if self.data is None:
            self.data = fingerprint
        elif self.data != fingerprint:
            raise ValueError(f"{self.path.parent} holds an experiment on other blocks: choose another folder")

    def add(self, name: str, facts: dict[str, Any]) -> None:
        """Adds a run that is done, and writes the file."""
        self.runs = {**self.runs, name: facts}
        self.check()
        versions = {p: version(p) for p in ("ropelens", "torch", "transformers")}
        facts = {"format": FORMAT, "asked": self.asked, "data": self.data, "runs": self.runs}
        saving.write_bytes(self.path, json.dumps(facts | {"versions": versions}).encode())

    def check(self) -> None:
        """Raises a ValueError if two arms of a seed differ in more than their frequencies."""
        first: dict[int, tuple[str, dict[str, Any]]] = {}
        for name, run in self.runs.items():
            if name == "bootstrap":
                continue
            other, facts = first.setdefault(run["seed"], (name, run))
            for key in SAME:
                if facts[key] != run[key]:
                    raise ValueError(
                        f"{name} and {other} differ in their {key}, and not in frequencies only: "
                        f"{run[key]} against {facts[key]}"
                    )

    @property
    def seeds(self) -> list[int]:
        """The seeds with all arms done."""
        arms = self.asked["arms"]
        found = sorted({run["seed"] for name, run in self.runs.items() if name != "bootstrap"})
        return [seed for seed in found if all(f"seed-{seed}/{arm}" in self.runs for arm in arms)]


def _short(mine: Any, theirs: Any) -> str:
    if isinstance(mine, dict) and isinstance(theirs, dict):
        key = next(k for k in sorted({*mine, *theirs}) if mine.get(k) != theirs.get(k))
        return f"its {key} is {str(mine.get(key))[:60]}, not {str(theirs.get(key))[:60]}"
    return f"{str(mine)[:80]}, not {str(theirs)[:80]}"
