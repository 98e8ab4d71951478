"""What a sweep wrote: runs as a table, doses and responses, and tests of what was claimed."""

from __future__ import annotations

import gzip
import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropelens.scores.provenance import facts, tagged

if TYPE_CHECKING:
    import pandas as pd
    from plotly.graph_objects import Figure

FORMAT = 1
NAME = "lesions.jsonl"
Number = float | int


@dataclass(frozen=True, eq=False)
class LesionResults:
    """The runs of a sweep.

    Attributes:
        header: The model, the settings and the versions, and the tasks.
        runs: A mapping a run, as it was written: the healthy model's have no layers and a std of 0.
    """

    header: dict[str, Any]
    runs: tuple[dict[str, Any], ...]

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LesionResults:
        """Returns what `lesion_sweep` wrote, a last line that was broken off left out.

        Args:
            path: The file, its folder, or the file compressed with gzip.

        Raises:
            OSError: If there is no such file.
            ValueError: If it holds something else.
        """
        path = Path(path)
        path = path / NAME if path.is_dir() else path
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        header, runs, _ = parse(data, path)
        if header is None:
            raise ValueError(f"{path} holds no sweep of lesions: make one with lesion_sweep")
        return cls(header, tuple(runs))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the runs in a file of their own, compressed if its name ends in .gz; whole or not at all."""
        path = Path(path)
        lines = [json.dumps(x, allow_nan=False, ensure_ascii=False) for x in (self.header, *self.runs)]
        data = "".join(line + "\n" for line in lines).encode()
        unfinished = path.with_name(f".{path.name}.partial")
        unfinished.write_bytes(gzip.compress(data, 9, mtime=0) if path.suffix == ".gz" else data)
        os.replace(unfinished, path)

    @property
    def made_from(self) -> dict[str, Any]:
        """What these runs are of, as figures of them say: see `ropelens.plots.provenance`."""
        tasks, settings = self.header["tasks"], self.header["settings"]
        return facts("LesionResults", self.header["model"], tasks, runs=len(self.runs), settings=settings)

    @property
    def limit(self) -> float:
        """The healthy loss, in nats a token, up to which a text is taken to have survived."""
        return float(self.header["settings"]["limit"])

    @property
    def n_layers(self) -> int:
        return int(self.header["model"]["shape"][0])

    def healthy(self, task: str) -> tuple[dict[str, Any], ...]:
        """Returns the runs of a task without a lesion."""
        return tuple(run for run in self.runs if run["task"] == task and not run["layers"])

    def to_frame(self) -> pd.DataFrame:
        """Returns a row a run: task, kind, layers, bands, target, std, seed, then all that was read off it.

        `loss` is the mean over tokens under the healthy model (nats), `excess` what that is above the
        healthy model's own text; `layers` is text, as "0" or "0-3", and "" of the healthy model.
        """
        import pandas as pd

        rows = []
        for run in self.runs:
            row = {name: run[name] for name in ("task", "kind", "bands", "target", "std", "seed", "loss")}
            row["layers"] = layers_label(run["layers"])
            row |= {name: run["readings"][name] for name in run["readings"]}
            for turn in ("introspection", "correction"):
                found = run.get(turn) or {}
                row |= {f"{turn}_{name}": found[name] for name in ("verdict", "score") if name in found}
            rows.append(row)
        frame = pd.DataFrame(rows)
        own: Any = {task: mean(run["loss"] for run in self.healthy(task)) for task in frame["task"].unique()}
        frame["loss"] = frame["loss"].astype(float)
        return frame.assign(excess=frame["loss"] - frame["task"].map(own))

    def dose_response(self, value: str = "loss", confidence: float = 0.95) -> pd.DataFrame:
        """The mean of a column of `to_frame` at each dose, with its interval over seeds.

        Returns:
            A row for each task, layers, bands and std, first the healthy model's at a std of 0: mean, low,
            high (of Student's t; NaN with a single seed), n (seeds), survived.
        """
        import pandas as pd

        frame: Any = self.to_frame()
        rows = []
        control = frame[frame["layers"] == ""]
        hurt = frame[frame["layers"] != ""]
        for (task, layers, bands), curve in hurt.groupby(["task", "layers", "bands"], sort=False):
            doses = [(0.0, control[control["task"] == task]), *curve.groupby("std")]
            for std, runs in doses:
                found = [float(x) for x in runs[value] if x is not None and not math.isnan(float(x))]
                middle, low, high = interval(found, confidence)
                alive = std == 0 or self._alive(runs)
                row = {"task": task, "layers": layers, "bands": bands, "std": float(std)}
                rows.append(
                    row | {"mean": middle, "low": low, "high": high, "n": len(found), "survived": alive}
                )
        return tagged(pd.DataFrame(rows), self.made_from)

    def survived(self) -> pd.DataFrame:
        """The largest std up to which the text survives, at each task, layers and bands.

        A dose is survived if the mean over seeds of the healthy loss is at most the sweep's limit, and the
        texts do not repeat themselves beyond `max_repeats` (unless the healthy model's own do).

        Returns:
            A row for each: task, layers, bands, std (0: not even the smallest), highest (the largest std
            that was tried) and open (whether that was survived too, so that more may be).
        """
        import pandas as pd

        rows = []
        curves: Any = self.dose_response().query("std > 0")
        for (task, layers, bands), curve in curves.groupby(["task", "layers", "bands"], sort=False):
            doses = curve.sort_values("std")
            alive = doses["survived"].astype(int).cumprod().astype(bool)
            reached = float(doses["std"][alive].max()) if alive.any() else 0.0
            row = {"task": task, "layers": layers, "bands": bands, "std": reached}
            rows.append(row | {"highest": float(doses["std"].max()), "open": bool(alive.all())})
        return tagged(pd.DataFrame(rows), self.made_from)

    def claims(
        self,
        *,
        early: Iterable[int] = (1, 2, 3),
        middle: Iterable[int] | None = None,
        late: Iterable[int] | None = None,
        margin: float = 0.5,
    ) -> pd.DataFrame:
        """Tests what a study of an 8B model observed, on the runs of single layers here.

        - "layer 0 is more robust than early layers": the excess loss of layer 0 less that of the early
          layers, over the tasks, bands and doses that both have; shown if the interval lies below 0.
        - "fast bands are harmless in late layers": the excess loss with the fastest bands of late layers
          hurt; shown if the interval lies below `margin` nats.
        - "slow bands matter in late layers": the same of the slowest; shown if it lies above 0.
        - "middle errors are consistent": the share of names that took one replacement, middle layers less
          all others; shown if the interval lies above 0.

        Seeds are the draws: everything else is averaged first, and the interval (95%, Student's t) and the
        two-sided p are those of the seeds' means. Few seeds can show only what is large.

        Args:
            early: Layers to compare layer 0 with.
            middle: By default the middle third of the layers.
            late: By default the last third.
            margin: In nats a token.

        Returns:
            A row a claim: claim, estimate, low, high, p, n (seeds), shown (NA where it was not tested).
        """
        import pandas as pd

        frame: Any = self.to_frame()
        hurt = frame[frame["layers"].str.fullmatch(r"\d+")].assign(
            layer=lambda f: f["layers"].astype(int), end=lambda f: f["bands"].str.partition(":")[0]
        )
        third = self.n_layers / 3
        late_set = set(range(math.ceil(2 * third), self.n_layers) if late is None else late)
        middle_set = set(range(math.ceil(third), math.ceil(2 * third)) if middle is None else middle)
        cell = ["task", "bands", "std", "seed"]
        zero = hurt[hurt["layer"] == 0].set_index(cell)["excess"]
        others = hurt[hurt["layer"].isin(set(early) - {0})].groupby(cell)["excess"].mean()
        robust = (zero - others).dropna().groupby("seed").mean()
        last = hurt[hurt["layer"].isin(late_set)]
        fast, slow = (
            last[last["end"] == end].groupby("seed")["excess"].mean() for end in ("fastest", "slowest")
        )
        named = hurt.assign(
            share=pd.to_numeric(
                hurt.get("names_consistency", pd.Series(math.nan, hurt.index)), errors="coerce"
            ),
            inside=hurt["layer"].isin(middle_set),
        ).dropna(subset="share")
        by_seed = named.groupby(["seed", "inside"])["share"].mean().unstack()
        both = True in by_seed and False in by_seed
        consistent = (by_seed[True] - by_seed[False]).dropna() if both else by_seed.sum(axis=1)[:0]
        tested = [
            ("layer 0 is more robust than early layers", robust, lambda low, high: high < 0),
            ("fast bands are harmless in late layers", fast, lambda low, high: high < margin),
            ("slow bands matter in late layers", slow, lambda low, high: low > 0),
            ("middle errors are consistent", consistent, lambda low, high: low > 0),
        ]
        rows = []
        for claim, values, shown in tested:
            values = values.dropna()
            estimate, low, high = interval([float(v) for v in values], 0.95)
            found = shown(low, high) if len(values) > 1 else pd.NA
            row = {"claim": claim, "estimate": estimate, "low": low, "high": high}
            rows.append(row | {"p": _p(values.tolist()), "n": len(values), "shown": found})
        return pd.DataFrame(rows).astype({"shown": "boolean"})

    def plot(self, **kwargs: Any) -> Figure:
        """Returns doses and responses; see `ropelens.plots.dose_responses`."""
        from ropelens.plots.lesions import dose_responses

        return dose_responses(self.dose_response(), limit=self.limit, **kwargs)

    def _alive(self, runs: pd.DataFrame) -> bool:
        task = runs["task"].iloc[0]
        own = mean(run["readings"]["repeats"] for run in self.healthy(task))
        return survives(
            runs["loss"], runs["repeats"], own, self.limit, float(self.header["settings"]["max_repeats"])
        )


def survives(
    losses: Iterable[Number | None],
    repeats: Iterable[Number],
    own_repeats: Number,
    limit: Number,
    most: Number,
) -> bool:
    """Whether texts, one a seed, are still those of a working model. One without tokens is not."""
    losses = [math.inf if x is None or math.isnan(x) else x for x in losses]
    looping = mean(repeats) > most and not own_repeats > most
    return mean(losses) <= limit and not looping


def parse(data: bytes, path: Path) -> tuple[dict[str, Any] | None, list[dict[str, Any]], int]:
    """Returns the header, the runs, and how many bytes of a file are whole lines.

    Raises:
        ValueError: If a line before the last is broken, or the file is of another kind.
    """
    header, runs, whole = None, [], 0
    lines = data.split(b"\n")
    for number, line in enumerate(lines):
        last = number >= len(lines) - 2 and not any(lines[number + 1 :])
        ended = number < len(lines) - 1
        try:
            found = json.loads(line) if line else None
        except ValueError as error:
            if last:
                break
            raise ValueError(f"{path}: line {number + 1} is broken, and not the last: {error}") from error
        if not ended or found is None:
            break
        if isinstance(found, dict) and found.get("lesions") == FORMAT:
            header = found  # again where tasks came in later
        elif header is not None and isinstance(found, dict) and "task" in found:
            runs.append(found)
        else:
            raise ValueError(f"{path} holds no sweep of lesions of format {FORMAT}")
        whole += len(line) + 1
    return header, runs, whole


def layers_label(layers: Iterable[int]) -> str:
    """Returns layers as text: "3", "0-3" for all of them, else "1, 5"."""
    layers = list(layers)
    if len(layers) > 1 and layers == list(range(layers[0], layers[-1] + 1)):
        return f"{layers[0]}-{layers[-1]}"
    return ", ".join(map(str, layers))


def mean(values: Iterable[Number | None]) -> float:
    """The mean of what is a number; NaN of nothing."""
    found = [float(x) for x in values if x is not None and not math.isnan(x)]
    return sum(found) / len(found) if found else math.nan


def interval(values: list[float], confidence: float) -> tuple[float, float, float]:
    """Returns the mean and the ends of Student's interval, NaN of fewer than two values."""
    from scipy.stats import t

    n, middle = len(values), mean(values)
    if n < 2:
        return middle, math.nan, math.nan
    spread = math.sqrt(sum((v - middle) ** 2 for v in values) / (n - 1) / n)
    reach = float(t.ppf((1 + confidence) / 2, n - 1)) * spread
    return middle, middle - reach, middle + reach


def _p(values: list[float]) -> float:
    from scipy.stats import ttest_1samp

    if len(values) < 2 or len(set(values)) < 2:
        return math.nan
    found: Any = ttest_1samp(values, 0.0)
    return float(found.pvalue)
