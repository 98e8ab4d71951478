"""What an experiment shows: differences to the original frequencies, seed by seed, and how sure they are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from ropelens.pretrain.arms import ORIGINAL
from ropelens.pretrain.manifest import Manifest
from ropelens.scores import BandScores

if TYPE_CHECKING:
    import pandas as pd

STUDY = 0.0089  # nats that the study with 100M parameters gained


@dataclass(frozen=True)
class Paired:
    """Differences of one arm to the original, a seed each.

    Attributes:
        differences: The arm's value minus the original's.
        mean: Their mean.
        interval: Its confidence interval, by Student's t; infinite with a single seed.
        detectable: The smallest true difference that a two-sided t-test at `1 - confidence` finds with a
            probability of 80%, if differences spread as they did; infinite with a single seed.
    """

    differences: tuple[float, ...]
    mean: float
    interval: tuple[float, float]
    detectable: float

    @classmethod
    def of(cls, differences: Any, confidence: float = 0.95, power: float = 0.8) -> Paired:
        """Returns the statistics of differences.

        Example:
            >>> found = Paired.of([1.0, 2.0, 3.0])  # t(0.975, 2) = 4.303, standard error 1/sqrt(3)
            >>> [round(x, 3) for x in (found.mean, *found.interval)]
            [2.0, -0.484, 4.484]
        """
        from scipy import optimize, stats

        values = np.asarray(differences, dtype=float)
        n, mean = len(values), float(values.mean())
        if n < 2:
            return cls(tuple(values.tolist()), mean, (-math.inf, math.inf), math.inf)
        error = float(values.std(ddof=1)) / math.sqrt(n)
        limit = float(stats.t.ppf((1 + confidence) / 2, n - 1))
        # The noncentral t by its definition: a normal over the root of a chi-square's mean, at its quantiles.
        spread = np.sqrt(stats.chi2.ppf((np.arange(2000) + 0.5) / 2000, n - 1) / (n - 1))

        def missing(shift: float) -> float:
            found = stats.norm.cdf(shift - limit * spread) + stats.norm.cdf(-shift - limit * spread)
            return float(found.mean()) - power

        detectable = optimize.root_scalar(missing, bracket=(0.0, 100 * limit)).root * error
        return cls(tuple(values.tolist()), mean, (mean - limit * error, mean + limit * error), detectable)

    def verdict(self, effect: float = STUDY) -> str:
        """Returns in words what the differences show.

        Args:
            effect: A size of interest, in the same unit.
        """
        low, high = self.interval
        if high < 0 or low > 0:
            return f"seen: {'lower' if high < 0 else 'higher'}, by {abs(self.mean):.4f}"
        if self.detectable <= effect:
            return f"not seen: a difference of {effect:.4f} would have been found"
        return (
            f"not resolvable at this size: differences below {self.detectable:.4f} are within the spread "
            "over seeds"
        )


def evenness(activation: BandScores) -> Float64[Tensor, " layer"]:
    """Returns how evenly a layer's activation spreads over its bands: 0 (one band has all) to 1 (all alike).

    The entropy of each band's share, summed over heads, over the logarithm of the number of bands
    (Pielou's evenness). NaN for a layer with fewer than 2 bands.
    """
    total = activation.values.abs().nan_to_num(0.0).sum(1)
    share = total / total.sum(-1, keepdim=True)
    entropy = -torch.special.xlogy(share, share).sum(-1)
    n = activation.bands.exists.sum(-1).double()
    return torch.where(n > 1, entropy / n.log(), math.nan)


def tokens_to_reach(curve: list[list[float | int]], loss: float) -> float | int:
    """Returns the tokens at which a loss curve first comes down to a loss; NaN if it never does.

    Between two evaluations the curve is a straight line.
    """
    before: list[float | int] | None = None
    for tokens, value in curve:
        if value <= loss:
            if before is None or before[1] <= value:
                return tokens
            share = (before[1] - loss) / (before[1] - value)
            return before[0] + share * (tokens - before[0])
        before = [tokens, value]
    return math.nan


class Analysis:
    """The runs of an experiment as tables; `analyse` makes it.

    Attributes:
        runs: One row a run: seed, arm, loss, tokens_to_reach (the original's final loss, of the same
            seed), saved (the share of training that spares), evenness (mean over layers).
        curves: One row an evaluation: seed, arm, tokens, loss.
        inv_freq: By seed and arm, the frequencies [layer, band] trained with (learned: come to).
        activation: Likewise, the trained model's activation [layer, band], summed over heads; the
            bootstrap model's is that of seed 0.
        asked: What the experiment was asked for.
    """

    def __init__(
        self,
        runs: pd.DataFrame,
        curves: pd.DataFrame,
        inv_freq: dict[tuple[int, str], Tensor],
        activation: dict[tuple[int, str], Tensor],
        asked: dict[str, Any],
    ) -> None:
        self.runs, self.curves, self.asked = runs, curves, asked
        self.inv_freq, self.activation = inv_freq, activation

    @property
    def arms(self) -> list[str]:
        """All arms but the original."""
        return [arm for arm in self.asked["arms"] if arm != ORIGINAL]

    def paired(self, arm: str, value: str = "loss", *, against: str = ORIGINAL) -> Paired:
        """Returns the differences of an arm to the original, or to another arm, in a column of `runs`.

        Raises:
            ValueError: If there is no such arm or column.

        Example:
            ```python
            found.paired("resampled", against="shuffled").interval  # the knowledge without the repetitions
            ```
        """
        others = [a for a in self.asked["arms"] if a != against]
        if arm not in others or value not in self.runs:
            raise ValueError(f"expected an arm out of {', '.join(others)}, got {arm!r} ({value})")
        if against not in self.asked["arms"]:
            raise ValueError(f"expected against= out of {', '.join(self.asked['arms'])}, got {against!r}")
        table = self.runs.pivot(index="seed", columns="arm", values=value)
        return Paired.of(table[arm] - table[against])

    def table(self, effect: float = STUDY) -> pd.DataFrame:
        """Returns one row an arm, its difference to the original in nats and what that shows.

        `low` and `high` are the 95% interval, not adjusted for the number of arms; `detectable` is as in
        `Paired`; `reached` counts the seeds in which the arm came down to the original's final loss, and
        `saved` is the mean share of the training that this spared, if all did; `evenness` is the
        difference in `evenness`, with its interval.
        """
        import pandas as pd

        rows = []
        for arm in self.arms:
            loss, spread = self.paired(arm), self.paired(arm, "evenness")
            saved = self.runs[self.runs.arm == arm].saved
            reached = int(saved.notna().sum())
            rows.append(
                {
                    "arm": arm,
                    "seeds": len(loss.differences),
                    "difference": loss.mean,
                    "low": loss.interval[0],
                    "high": loss.interval[1],
                    "detectable": loss.detectable,
                    "reached": reached,
                    "saved": saved.mean() if reached == len(saved) else math.nan,
                    "evenness": spread.mean,
                    "evenness_low": spread.interval[0],
                    "evenness_high": spread.interval[1],
                    "verdict": loss.verdict(effect),
                }
            )
        return pd.DataFrame(rows).set_index("arm")


def analyse(manifest: Manifest) -> Analysis:
    """Returns the tables of an experiment, of its complete seeds.

    Raises:
        ValueError: If no seed is complete.
    """
    import pandas as pd

    if not manifest.seeds:
        raise ValueError(f"expected a seed with all arms trained in {manifest.path}, found none yet")
    runs, curves = [], []
    done = {(0, ORIGINAL): manifest.runs["bootstrap"]}
    for seed in manifest.seeds:
        target = manifest.runs[f"seed-{seed}/{ORIGINAL}"]["loss"]
        for arm in manifest.asked["arms"]:
            run = manifest.runs[f"seed-{seed}/{arm}"]
            reached = tokens_to_reach(run["curve"], target)
            runs.append(
                {
                    "seed": seed,
                    "arm": arm,
                    "loss": run["loss"],
                    "tokens_to_reach": reached,
                    "saved": 1 - reached / run["tokens"],
                    "evenness": run["evenness"],
                }
            )
            curves += [{"seed": seed, "arm": arm, "tokens": t, "loss": loss} for t, loss in run["curve"]]
            done[seed, arm] = run
    inv_freq, activation = (
        {key: torch.tensor(run[name], dtype=torch.float64) for key, run in done.items()}
        for name in ("inv_freq", "activation")
    )
    return Analysis(pd.DataFrame(runs), pd.DataFrame(curves), inv_freq, activation, manifest.asked)


def read(path: str | Path) -> Analysis:
    """Returns the tables of an experiment from its `manifest.json`."""
    return analyse(Manifest.read(Path(path)))
