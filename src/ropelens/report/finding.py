"""Saved results of one model, found in a folder by what the files hold."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropelens.interventions import AblationCurve
from ropelens.lesions import LesionResults
from ropelens.scores import BandAttribution, BandScores, same_model

if TYPE_CHECKING:
    import pandas as pd

    from ropelens.circuits import PositionalKernel
    from ropelens.report.attention import AttentionGrid

METRICS = ("entropy", "activation", "norm_product", "fisher", "taylor")
LESIONS = (".jsonl", ".jsonl.gz")


@dataclass
class Results:
    """What a report shows, of one model.

    Attributes:
        name: What to call the model.
        scores: Band scores by the name to show, those of most tokens first.
        curves: Ablation curves by the name of their file.
        attributions: Single queries that were saved.
        lesions: A sweep.
        heads: A row a head, with the scores of `HeadScores.to_frame`.
        head_bands: A row a head and band, as of `HeadBands.to_frame`; a column "kind" tells scores apart.
        kernel: Positional kernels of all heads.
        grid: Attention of some heads, every query, by band.
        models: The fingerprint of the model, and the file that it is of.
        load_as: The name that `ropelens.load` knows the model by, where a file says it.
        commands: The commands that made the results, where known.
    """

    name: str = ""
    scores: dict[str, BandScores] = field(default_factory=dict)
    curves: dict[str, AblationCurve] = field(default_factory=dict)
    attributions: list[BandAttribution] = field(default_factory=list)
    lesions: LesionResults | None = None
    heads: pd.DataFrame | None = None
    head_bands: pd.DataFrame | None = None
    kernel: PositionalKernel | None = None
    grid: AttentionGrid | None = None
    models: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    load_as: str = ""
    commands: list[str] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, int]:
        """How many layers and heads the model has."""
        for scores in self.scores.values():
            return scores.values.shape[0], scores.values.shape[1]
        return tuple(self.models[0][1]["shape"][:2]) if self.models else (0, 0)

    def see(self, where: str, fingerprint: dict[str, Any]) -> None:
        """Takes note of a result's model.

        Raises:
            ValueError: If it is another one than that of the results before.
        """
        if not fingerprint:
            return
        if self.models:
            first, known = self.models[0]
            if why := same_model(known, fingerprint):
                raise ValueError(
                    f"expected results of one model, but {first} and {where} are of different ones ({why}): "
                    "put them into folders of their own"
                )
        self.models.append((where, fingerprint))

    def found(self) -> list[str]:
        """Says what is there, a phrase each."""
        said = []
        for name, scores in self.scores.items():
            documents = f" of {scores.n_documents:,} documents" if scores.n_documents > 1 else ""
            said.append(f"{name} on {scores.n_tokens:,} tokens{documents}")
        if self.attributions:
            n = len(self.attributions)
            said.append(f"the attention of {n} saved quer{'y' if n == 1 else 'ies'}")
        if self.grid is not None:
            said.append(
                f"the attention of {len(self.grid.heads)} heads on {len(self.grid.tokens)} tokens, by band"
            )
        said += ["positional kernels"] * (self.kernel is not None)
        said += ["scores of heads"] * (self.heads is not None)
        said += ["bands of heads' scores"] * (self.head_bands is not None)
        if self.curves:
            said.append(f"{len(self.curves)} ablation curve{'s' * (len(self.curves) > 1)}")
        if self.lesions is not None:
            said.append(f"a sweep of {len(self.lesions.runs):,} lesions")
        return said

    def missing(self) -> dict[str, str]:
        """Says what is not there, and which command makes it."""
        model = self.load_as or "NAME"
        collect = "ropelens collect --data 'texts/*.txt' --out RUN"
        again = f"ropelens report RUN --model {model} -o SITE"
        metrics = {scores.metric for scores in self.scores.values()}
        lacking = {
            "entropy": ("entropy" not in metrics, collect),
            "activation": ("activation" not in metrics, collect),
            "attention by token": (self.grid is None and not self.attributions, again),
            "positional kernels": (self.kernel is None, again),
            "scores of heads": (self.heads is None, again),
            "ablation curves": (not self.curves, "ropelens ablate RUN --data 'texts/*.txt' -o RUN/ablation"),
            "lesions": (self.lesions is None, "ropelens lesion --layers 0..3 --out RUN/lesions"),
        }
        return {name: command for name, (absent, command) in lacking.items() if absent}


def find_results(folder: str | os.PathLike[str]) -> Results:
    """Returns the results of one model that lie in a folder and the folders in it.

    Files are known by what they hold: what `BandScores`, `BandAttribution`, `AblationCurve` and
    `LesionResults` saved, and tables (.csv) with columns layer, head and scores of heads, or layer, head,
    band and attribution. All others are left alone.

    Raises:
        ValueError: If there are none, or they are of different models.
    """
    folder = Path(folder)
    results = Results()
    found: list[tuple[Path, BandScores]] = []
    for path in _files(folder):
        where = str(path.relative_to(folder))
        if path.suffix == ".safetensors":
            kind = _kind(path)
            if kind == "BandScores":
                scores = BandScores.load(path)
                results.see(where, scores.model)
                found.append((path, scores))
            elif kind == "BandAttribution":
                results.attributions.append(BandAttribution.load(path))
                results.see(where, results.attributions[-1].model)
            elif kind == "AblationCurve":
                curve = AblationCurve.load(path)
                results.see(where, curve.facts.get("model", {}))
                results.curves[_label(path.stem, results.curves, where)] = curve
        elif path.name.endswith(LESIONS) and results.lesions is None and _is_sweep(path):
            results.lesions = LesionResults.load(path)
            results.see(where, results.lesions.header["model"])
            results.load_as = results.load_as or str(results.lesions.header.get("name") or "")
        elif path.name == "run.json":
            run = _json(path)
            results.load_as = results.load_as or str(run.get("model_name") or "")
            results.commands += [run["command"]] if run.get("command") else []
        elif path.suffix == ".csv":
            _take_table(results, path)
    for name, scores in _named(folder, found):
        results.scores[name] = scores
    if not results.found():
        raise ValueError(
            f"expected results in {folder}, found none: make some with ropelens collect, ablate or lesion"
        )
    _check_tables(results)
    results.name = results.load_as or "the model"
    return results


def has_results(folder: Path) -> bool:
    """Whether a folder holds any result at all."""
    return any(_kind(p) if p.suffix == ".safetensors" else p.name.endswith(LESIONS) for p in _files(folder))


def _files(folder: Path) -> Iterator[Path]:
    """All files in reading order, without those that runs keep to go on from."""
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder).parts
        if path.is_file() and not any(name.startswith(".") or name == "checkpoints" for name in inside):
            yield path


def _kind(path: Path) -> str:
    """The kind of result in a safetensors file; "" if it is none of ours."""
    try:
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        return json.loads(header["__metadata__"]["ropelens"])["kind"]
    except (ValueError, KeyError, TypeError, OverflowError, MemoryError):
        return ""


def _is_sweep(path: Path) -> bool:
    import gzip

    with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
        return b'"lesions"' in file.readline(2**20)


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _take_table(results: Results, path: Path) -> None:
    import pandas as pd

    try:
        columns = set(pd.read_csv(path, nrows=0).columns)
    except ValueError:
        return
    if not {"layer", "head"} <= columns:
        return
    if "band" in columns and {"wavelength", "score", "attribution", "change"} <= columns:
        results.head_bands = pd.read_csv(path) if results.head_bands is None else results.head_bands
    elif columns & {"induction", "previous_token"} and "band" not in columns:
        results.heads = pd.read_csv(path) if results.heads is None else results.heads


def _check_tables(results: Results) -> None:
    n_layers, n_heads = results.shape
    for frame in (results.heads, results.head_bands):
        if frame is None or not n_layers:
            continue
        layer, head = (max(frame[name].tolist()) for name in ("layer", "head"))
        if layer >= n_layers or head >= n_heads:
            raise ValueError(
                f"expected results of one model, but a table has layer {layer}, head {head}, and the scores "
                f"{n_layers} layers of {n_heads} heads: put them into folders of their own"
            )


def _named(folder: Path, found: list[tuple[Path, BandScores]]) -> Iterator[tuple[str, BandScores]]:
    """The scores of most tokens by their metric's name, in the usual order; then all others by their "
    "files'."""
    found = sorted(found, key=lambda pair: -pair[1].n_tokens)
    metrics = sorted({scores.metric for _, scores in found}, key=lambda m: (*METRICS, m).index(m))
    first = {metric: next(pair for pair in found if pair[1].metric == metric) for metric in metrics}
    yield from ((metric, scores) for metric, (_, scores) in first.items())
    for path, scores in found:
        if path != first[scores.metric][0]:
            where = path.relative_to(folder).with_suffix("")
            yield f"{scores.metric}, {where if where.stem == scores.metric else where.stem}", scores


def _label(name: str, taken: Any, where: str) -> str:
    return where if name in taken else name
