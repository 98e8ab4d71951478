"""lesion_sweep: tasks x layers x bands x doses x seeds, each run written as it ends."""

from __future__ import annotations

import fcntl
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from ropelens.hosts import Host, host_of
from ropelens.interventions.lesion import Target, hurt, hurt_rows, plan_of
from ropelens.lesions.code import read_code
from ropelens.lesions.generating import Chat, generate, stop_tokens, token_losses
from ropelens.lesions.readings import (
    SURPRISING,
    edit_distance,
    fidelity,
    first_divergence,
    loop_length,
    names_replaced,
    repeated_share,
    spread_of_errors,
    style,
    surprising_share,
    verdict,
)
from ropelens.lesions.results import FORMAT, NAME, LesionResults, mean, parse, survives
from ropelens.lesions.tasks import Task, default_tasks, unique
from ropelens.scores import same_model

QUESTION = "Does your previous output make sense to you?"
CORRECTION = "Please write it once more, and correct all mistakes."
NO_TEMPLATE = "the tokenizer has no chat template"
TOO_LONG = "the conversation is longer than the model's context"


def lesion_sweep(
    model: Any,
    tasks: Iterable[Task] | None = None,
    *,
    layers: Iterable[int | Sequence[int]],
    out: str | os.PathLike[str],
    bands: Iterable[str] = ("slowest:20%", "fastest:20%"),
    stds: Iterable[float | int] = (1.0, 2.0, 4.0, 8.0, 16.0),
    seeds: Iterable[int] = (0, 1, 2),
    target: Target = "weights",
    limit: float | int = 4.0,
    max_repeats: float | int = 0.8,
    max_tokens: int = 250,
    answer_tokens: int = 160,
    temperature: float | int = 0.0,
    introspect: bool = True,
    correct: bool = True,
    lift: bool = False,
    run_code: bool = True,
    batch: int = 16,
    tokenizer: Any = None,
    progress: bool = True,
) -> LesionResults:
    """Lets a model talk with noise in some bands of a layer, asks it about that, and scores the text.

    For each task, layers and bands the noise rises step by step until, on average over seeds, the text
    costs the healthy model more than `limit` nats a token, or repeats itself. The healthy model answers the
    same, as the control. With a chat template two more turns follow, under the same lesion: "Does your
    previous output make sense to you?", and a request to write it again.

    Every run is appended to `out/lesions.jsonl` as it ends; called again, the sweep goes on from there, also
    with more tasks, layers, bands, doses or seeds. A last line that was broken off is done again.

    Args:
        model: A HookedTransformer, a TransformerBridge or a transformers model.
        tasks: What to ask for; a repetition, a continuation and a coding task by default.
        layers: One or several layers for each lesion.
        out: The folder.
        bands: As text, as in `lesion`.
        stds: The doses.
        seeds: Of the noise, and of drawn tokens.
        target: As in `lesion`.
        limit: Nats a token under the healthy model.
        max_repeats: The share of 4-grams that were there before, from which on a text loops.
        max_tokens: Of the text, and of its correction.
        answer_tokens: Of the introspection.
        temperature: 0: the likeliest token each time.
        introspect: Whether to ask whether the output made sense.
        correct: Whether to ask for a correction.
        lift: Whether the lesion is lifted before these turns.
        run_code: Whether code that is written is run with its check, in a restricted subprocess (which
            stops accidents and is no sandbox).
        batch: How many runs, of any layers, bands and seeds, are made at a time. One at a time on a
            HookedTransformer whose weights are hurt: its projections are no layers of their own.
        tokenizer: `model.tokenizer` by default.
        progress: Whether to show a bar that counts runs, and the time left.

    Returns:
        All runs in the folder.

    Raises:
        ValueError: If lesions, doses or tasks are not usable, or the folder holds a sweep of another model or
            with other settings.

    Example:
        ```python
        found = rl.lesion_sweep(model, layers=[0, 15, 29], out="runs/lesions")
        found.survived()  # the std that each layer survives
        ```
    """
    host = host_of(model)
    tokenizer = tokenizer or getattr(model, "tokenizer", None)
    if tokenizer is None:
        raise ValueError("this model has no tokenizer: pass tokenizer=")
    asked = unique(default_tasks() if tasks is None else tasks)
    groups = [(group,) if isinstance(group, int) else tuple(group) for group in layers]
    bands, seeds = list(dict.fromkeys(bands)), list(dict.fromkeys(seeds))
    stds = sorted({float(std) for std in stds})
    if not (groups and bands and seeds and stds):
        raise ValueError("expected at least one of each of layers, bands, stds and seeds")
    if any(not isinstance(b, str) for b in bands):
        raise ValueError('expected bands as text, as "slowest:12", so that they can be written down')
    for limit_name, n in (
        ("max_tokens", max_tokens),
        ("answer_tokens", answer_tokens),
        ("batch", batch),
    ):
        if n < 1:
            raise ValueError(f"expected {limit_name} of at least 1, got {n}")
    if not limit > 0 or not 0 <= temperature < math.inf:
        raise ValueError(
            f"expected a limit above 0 and a temperature of 0 or more, got {limit}, {temperature}"
        )
    for group in groups:
        for band in bands:
            for std in stds:  # all are checked before the first run
                plan_of(host, group, band, std, seeds, target)
    groups = list(dict.fromkeys(plan_of(host, group, bands[0], 0, 0, target).layers for group in groups))
    settings = {
        "target": target,
        "limit": limit,
        "max_repeats": max_repeats,
        "max_tokens": max_tokens,
        "answer_tokens": answer_tokens,
        "temperature": temperature,
        "introspect": introspect,
        "correct": correct,
        "lift": lift,
        "run_code": run_code,
    }
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    with _Writer(folder / NAME).held(_header(host, settings, asked)) as writer:
        alone = target == "weights" and host.kind == "HookedTransformer"
        sweep = _Sweep(
            host, Chat(tokenizer), stop_tokens(model, tokenizer), settings, writer, 1 if alone else batch
        )
        total = len(asked) * (1 + len(groups) * len(bands) * len(stds)) * len(seeds)
        with tqdm(total=total, unit="run", disable=not progress, smoothing=0.05) as bar:
            for task in asked:
                controls = sweep.control(task, seeds)
                bar.update(len(seeds))
                curves = [(group, band) for group in groups for band in bands]
                sweep.curves(task, controls, curves, stds, seeds, bar)
    return LesionResults.load(folder)


@dataclass(frozen=True)
class _Dose:
    layers: tuple[int, ...]
    bands: str
    std: float


@dataclass
class _Sweep:
    host: Host
    chat: Chat
    stop: frozenset[int]
    settings: dict[str, Any]
    writer: _Writer
    batch: int

    def control(self, task: Task, seeds: list[int]) -> dict[int, dict[str, Any]]:
        """Returns the healthy model's run for each seed: one for all, unless tokens are drawn."""
        drawn = seeds if self.settings["temperature"] else seeds[:1]
        found = {r["seed"]: r for r in self.writer.runs if r["task"] == task.name and not r["layers"]}
        if not self.settings["temperature"] and found:
            drawn = []
        todo = [seed for seed in drawn if seed not in found]
        if todo:
            for run in self._runs(task, {}, [(_Dose((), "", 0.0), seed) for seed in todo]):
                self.writer.add(run)
                found[run["seed"]] = run
        first = next(iter(found.values()))
        return {seed: found.get(seed, first) for seed in seeds}

    def curves(
        self,
        task: Task,
        controls: dict[int, dict[str, Any]],
        curves: list[tuple[tuple[int, ...], str]],
        stds: Sequence[float],
        seeds: list[int],
        bar: Any,
    ) -> None:
        """Raises the dose, of all layers and bands at once, until texts are not those of a working model."""
        own = mean(run["readings"]["repeats"] for run in controls.values())
        limits = self.settings["limit"], self.settings["max_repeats"]
        for std in stds:
            doses = [_Dose(*curve, std) for curve in curves]
            asked = [(dose, seed) for dose in doses for seed in seeds]
            known = {
                (_Dose(tuple(run["layers"]), run["bands"], run["std"]), run["seed"]): run
                for run in self.writer.runs
                if run["task"] == task.name
            }
            todo = [run for run in asked if run not in known]
            bar.update(len(asked) - len(todo))
            for start in range(0, len(todo), self.batch):
                rows = todo[start : start + self.batch]
                bar.set_description(f"{task.name}, {std:g}", refresh=False)
                for row, run in zip(rows, self._runs(task, controls, rows), strict=True):
                    self.writer.add(run)
                    known[row] = run
                bar.update(len(rows))
            left = []
            for dose in doses:
                runs = [known[dose, seed] for seed in seeds]
                repeats = [run["readings"]["repeats"] for run in runs]
                if survives([run["loss"] for run in runs], repeats, own, *limits):
                    left.append((dose.layers, dose.bands))
            curves = left
            bar.total -= (len(doses) - len(left)) * len([other for other in stds if other > std]) * len(seeds)

    def _runs(
        self, task: Task, controls: dict[int, dict[str, Any]], rows: list[tuple[_Dose, int]]
    ) -> Iterator[dict[str, Any]]:
        """Yields a run for each dose and seed, all made as one batch."""
        start, settings = time.perf_counter(), self.settings
        seeds = [seed for _, seed in rows]
        prompt = self.chat.prompt([{"role": "user", "content": task.prompt}])
        room = self._room(len(prompt))
        if room < 1:
            raise ValueError(
                f"task {task.name!r}: its prompt of {len(prompt)} tokens leaves no room in the context"
            )
        with self._hurt(rows):
            texts = self._generate([prompt] * len(rows), min(settings["max_tokens"], room), seeds)
            answers = None if settings["lift"] else self._turns(task, texts, seeds)
        if answers is None:
            answers = self._turns(task, texts, seeds)
        losses = token_losses(self.host, [prompt] * len(rows), texts)
        seconds = round((time.perf_counter() - start) / len(rows), 2)
        for row, (dose, seed) in enumerate(rows):
            text = self.chat.text(texts[row])
            control = controls.get(seed)
            run = {
                "task": task.name,
                "kind": task.kind,
                "layers": list(dose.layers),
                "bands": dose.bands,
                "target": settings["target"],
                "std": dose.std,
                "seed": seed,
                "text": text,
                "loss": _number(mean(losses[row])),
                "readings": self._readings(task, text, texts[row], losses[row], control),
            }
            for name, turn in answers.items():
                run[name] = self._scored(task, name, turn[row], text, control)
            yield run | {
                "tokens": self.chat.pieces(texts[row]),
                "ids": texts[row],
                "losses": [round(x, 3) for x in losses[row]],
                "seconds": seconds,
            }

    def _generate(self, prompts: list[list[int]], n_tokens: int, seeds: list[int]) -> list[list[int]]:
        temperature = self.settings["temperature"]
        return generate(self.host, prompts, n_tokens, stop=self.stop, temperature=temperature, seeds=seeds)

    @contextmanager
    def _hurt(self, rows: list[tuple[_Dose, int]]) -> Iterator[None]:
        target = self.settings["target"]
        plans = [
            plan_of(self.host, dose.layers, dose.bands, dose.std, seed, target)
            for dose, seed in rows
            if dose.layers
        ]
        if not plans:  # the control
            yield
            return
        with hurt(self.host, plans[0]) if len(plans) == 1 else hurt_rows(self.host, plans):
            yield

    def _room(self, used: int) -> int:
        longest = [n for n in (self.host.context, self.host.steady) if n is not None]
        return min(longest) - used if longest else 10**9

    def _turns(self, task: Task, texts: list[list[int]], seeds: list[int]) -> dict[str, list[dict[str, Any]]]:
        """Returns what the model says when it is asked about its text, and its correction."""
        settings = self.settings
        talks = [
            [{"role": "user", "content": task.prompt}, {"role": "assistant", "content": self.chat.text(text)}]
            for text in texts
        ]
        found: dict[str, list[dict[str, Any]]] = {}
        for name, wanted, question, n_tokens in (
            ("introspection", settings["introspect"], QUESTION, settings["answer_tokens"]),
            ("correction", settings["correct"], CORRECTION, settings["max_tokens"]),
        ):
            if not wanted:
                continue
            if not self.chat.has_turns:
                found[name] = [{"skipped": NO_TEMPLATE} for _ in texts]
                continue
            for talk in talks:
                talk.append({"role": "user", "content": question})
            prompts = [self.chat.prompt(talk) for talk in talks]
            fits = [self._room(len(prompt)) >= n_tokens for prompt in prompts]
            found[name] = [{"skipped": TOO_LONG} for _ in texts]
            if not any(fits):
                continue
            # The lesion is on as many rows as there are texts: one that does not fit only holds its place.
            place = prompts[fits.index(True)]
            held = [prompt if fit else place for prompt, fit in zip(prompts, fits, strict=True)]
            for row, ids in enumerate(self._generate(held, n_tokens, seeds)):
                if fits[row]:
                    found[name][row] = {"text": self.chat.text(ids)}
                    talks[row].append({"role": "assistant", "content": found[name][row]["text"]})
        return found

    def _readings(
        self,
        task: Task,
        text: str,
        ids: list[int],
        losses: list[float],
        control: dict[str, Any] | None,
    ) -> dict[str, Any]:
        found: dict[str, Any] = {
            "n_tokens": len(ids),
            "surprising": _number(surprising_share(losses)),
            "surprising_spread": _number(spread_of_errors([loss > SURPRISING for loss in losses])),
            "repeats": _number(repeated_share(ids)),
            "loop": loop_length(ids),
            **{name: _number(value) for name, value in style(text).items()},
        }
        if task.kind == "repetition":
            found["fidelity"] = _number(fidelity(task.reference, text))
            named = names_replaced(task.reference, text, task.names)
            found |= {f"names_{k}": _number(v) if isinstance(v, float) else v for k, v in named.items()}
        if task.kind == "code":
            found |= asdict(read_code(text, task.check, self.settings["run_code"]))
        if control is not None:
            found["first_divergence"] = first_divergence(ids, control["ids"])
            found["distance_to_healthy"] = edit_distance(ids, control["ids"])
        return found

    def _scored(
        self, task: Task, name: str, turn: dict[str, Any], text: str, control: dict[str, Any] | None
    ) -> dict[str, Any]:
        if "skipped" in turn:
            return turn
        if name == "introspection":
            return {**turn, "verdict": verdict(turn["text"])}
        # Against what is right: the reference, else what the healthy model wrote, else the text itself.
        right = task.reference or (text if control is None else control["text"])
        before, after = fidelity(right, text), fidelity(right, turn["text"])
        return {**turn, "score": _number(after), "before": _number(before)}


class _Writer:
    """The file of a sweep: a header, then a run a line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs: list[dict[str, Any]] = []

    @contextmanager
    def held(self, header: dict[str, Any]) -> Iterator[_Writer]:
        """Goes on with the file, which no other sweep may write to meanwhile."""
        with open(self.path, "a+b") as self._file:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ValueError(f"another sweep is writing to {self.path}: choose another folder") from error
            self._file.seek(0)
            known, self.runs, whole = parse(self._file.read(), self.path)
            if known is None:
                self._file.truncate(0)
                self._write(header)
            else:
                _require_same(self.path, known, header)
                self._file.truncate(whole)  # what was broken off is done again
                tasks = {task["name"]: task for task in (*known["tasks"], *header["tasks"])}
                if len(tasks) > len(known["tasks"]):
                    self._write({**known, "tasks": list(tasks.values())})
            yield self

    def add(self, run: dict[str, Any]) -> None:
        self.runs.append(run)
        self._write(run)

    def _write(self, line: dict[str, Any]) -> None:
        text = json.dumps(line, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        self._file.write(text.encode("utf-8", "replace") + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def _header(host: Host, settings: dict[str, Any], tasks: tuple[Task, ...]) -> dict[str, Any]:
    packages = ("ropelens", "torch", "transformers", "transformer-lens")
    model = host.model
    name = getattr(getattr(model, "config", None), "name_or_path", "") or getattr(
        getattr(model, "cfg", None), "model_name", ""
    )
    return {
        "lesions": FORMAT,
        "name": Path(str(name)).name,
        "model": host.fingerprint,
        "host": host.kind,
        "dtype": str(host.embedding.dtype).removeprefix("torch."),
        "settings": settings,
        "tasks": [task.to_dict() for task in tasks],
        "versions": {package: version(package) for package in packages},
    }


def _require_same(path: Path, known: dict[str, Any], now: dict[str, Any]) -> None:
    why = same_model(known["model"], now["model"])
    if why:
        raise ValueError(f"{path} holds a sweep of another model ({why}): choose another folder")
    for name, value in now["settings"].items():
        if known["settings"].get(name) != value:
            raise ValueError(
                f"{path} holds a sweep with {name}={known['settings'].get(name)!r}, got {value!r}: choose "
                "another folder, or the same settings"
            )
    before = {task["name"]: task for task in known["tasks"]}
    for task in now["tasks"]:
        if before.get(task["name"], task) != task:
            raise ValueError(f"{path} holds another task {task['name']!r}: give this one another name")


def _number(value: float | int) -> float | None:
    return None if math.isnan(value) else round(float(value), 4)
