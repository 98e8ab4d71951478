"""AblationCurve: losses of every document at every point, and what is read off them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from ropelens.scores import provenance, saving

if TYPE_CHECKING:
    import pandas as pd
    from plotly.graph_objects import Figure


@dataclass(frozen=True)
class Point:
    """One ablation: which score chose the bands, where they competed, and what share is gone."""

    score: str
    scope: str
    fraction: float


@dataclass(frozen=True, eq=False)
class AblationCurve:
    """The loss of a model as bands are taken away, document by document.

    A loss is the sum over the tokens of all documents, over their number. Its standard error is over
    documents: the sum of a document's losses and its number of tokens are one draw.

    Attributes:
        points: What was taken away at each row of `sums`.
        sums: Loss summed over the tokens of each document between two positions, in nats.
        counts: How many tokens these are.
        edges: The positions between which tokens are summed apart, ascending from 1.
        documents: Hashes of the documents.
        mode: How bands were taken away.
        facts: What was measured and how; anything JSON can hold.
    """

    points: tuple[Point, ...]
    sums: Float64[Tensor, "point document span"]
    counts: Int64[Tensor, "document span"]
    edges: tuple[int, ...]
    documents: tuple[str, ...]
    mode: str
    facts: dict[str, Any]

    def __repr__(self) -> str:
        return (
            f"AblationCurve({self.mode}: {len(self.points)} points, {len(self.documents):,} documents, "
            f"{int(self.counts.sum()):,} tokens)"
        )

    @property
    def made_from(self) -> dict[str, Any]:
        """What these losses are of, as figures of them say: see `ropelens.plots.provenance`."""
        known = {k: v for k, v in self.facts.items() if k not in ("model", "data")}
        text = {"data": self.facts.get("data"), "documents": self.documents}
        more = {"mode": self.mode, "settings": known}
        return provenance.facts("AblationCurve", self.facts.get("model", {}), text, **more)

    def to_frame(self) -> pd.DataFrame:
        """One row a point: score, scope, fraction, loss (nats a token), stderr (over documents)."""
        import pandas as pd

        frame = pd.DataFrame([vars(point) for point in self.points])
        means, errors = self._mean(self.sums.sum(-1))
        frame = frame.assign(loss=means.numpy(), stderr=errors.numpy())
        return provenance.tagged(frame, self.made_from)

    def rises(self) -> pd.DataFrame:
        """One row a point with something removed: score, scope, fraction, rise over nothing, stderr."""
        import pandas as pd

        rows = []
        for point, sums in zip(self.points, self.sums, strict=True):
            if point.fraction == 0:
                continue
            bare = self.sums[self._row(point.score, point.scope, 0.0)]
            rise, error = self._mean((sums - bare).sum(-1)[None])
            rows.append(vars(point) | {"rise": float(rise), "stderr": float(error)})
        return provenance.tagged(pd.DataFrame(rows), self.made_from)

    @property
    def baseline(self) -> tuple[float, float]:
        """The loss with nothing taken away, and its standard error."""
        row = next(n for n, point in enumerate(self.points) if point.fraction == 0)
        means, errors = self._mean(self.sums[row].sum(-1)[None])
        return float(means), float(errors)

    def by_position(self) -> pd.DataFrame:
        """As `to_frame`, apart for tokens between positions: first, last, loss, rise over nothing removed.

        A token's position counts from 0; first and last are included.
        """
        import pandas as pd

        ends = [*(edge - 1 for edge in self.edges[1:]), None]
        rows = []
        for point, sums in zip(self.points, self.sums, strict=True):
            bare = self.sums[self._row(point.score, point.scope, 0.0)]
            for span, (first, last) in enumerate(zip(self.edges, ends, strict=True)):
                counts = self.counts[:, span]
                if not counts.any():
                    continue
                loss, error = _clustered(sums[:, span][None], counts)
                rise, rise_error = _clustered((sums - bare)[:, span][None], counts)
                rows.append(
                    vars(point)
                    | {"first": first, "last": last, "loss": float(loss), "stderr": float(error)}
                    | {"rise": float(rise), "rise_stderr": float(rise_error)}
                )
        return pd.DataFrame(rows)

    def area(self) -> pd.DataFrame:
        """The area under each curve's rise over nothing removed: score, scope, area, stderr, upto.

        By the trapezium rule from fraction 0 to the last, in nats a token; smaller is better. Curves
        compare where `upto`, their last fraction, is the same.
        """
        import pandas as pd

        rows = []
        for score, scope in self._curves():
            at = self._of(score, scope)
            x = torch.tensor([self.points[n].fraction for n in at], dtype=torch.float64)
            weights = torch.zeros_like(x)
            weights[:-1] += x.diff() / 2
            weights[1:] += x.diff() / 2
            totals = self.sums[at].sum(-1)
            area, error = self._mean((weights[:, None] * (totals - totals[:1])).sum(0)[None])
            row = {"score": score, "scope": scope, "area": float(area), "stderr": float(error)}
            rows.append(row | {"upto": float(x[-1])})
        return pd.DataFrame(rows)

    def removable(self, rises: Sequence[float | int] = (0.05, 0.1, 0.25, 0.5)) -> pd.DataFrame:
        """The share of bands that can go before the loss rises by so much.

        Columns: score, scope, rise, fraction, ends. Where the curve first crosses, between points on a
        straight line. Where it never does, the last fraction that was measured, and `ends` is True: it is
        at least that.

        Args:
            rises: In nats a token.
        """
        import pandas as pd

        rows = []
        for score, scope in self._curves():
            at = self._of(score, scope)
            x = [self.points[n].fraction for n in at]
            means, _ = self._mean(self.sums[at].sum(-1))
            rise_at = (means - means[0]).tolist()
            for rise in rises:
                over = next((n for n, y in enumerate(rise_at) if y >= rise), None)
                fraction = x[-1]
                if over is not None and over > 0:
                    low, high = rise_at[over - 1], rise_at[over]
                    fraction = x[over - 1] + (x[over] - x[over - 1]) * (rise - low) / (high - low)
                row = {"score": score, "scope": scope, "rise": rise, "fraction": fraction}
                rows.append(row | {"ends": over is None})
        return pd.DataFrame(rows)

    def paired(
        self, a: str | Sequence[str], b: str | Sequence[str], confidence: float = 0.95
    ) -> pd.DataFrame:
        """The loss under one score minus that under another, on the same documents.

        Columns: scope, fraction, difference (nats a token; negative where `a` chose better), stderr
        (over documents), low, high (the confidence interval, of Student's t).

        Args:
            a: A score's name, or several (such as one for each seed), averaged.
            b: The same.
            confidence: Of the interval.

        Raises:
            ValueError: If they share no point, or there are fewer than two documents.
        """
        import pandas as pd
        from scipy.stats import t

        first, second = ([names] if isinstance(names, str) else list(names) for names in (a, b))
        n = len(self.documents)
        if n < 2:
            raise ValueError(f"an interval needs at least 2 documents, and these losses are of {n}")
        found = {(p.score, p.scope, p.fraction): row for row, p in enumerate(self.points)}
        rows = []
        for scope, fraction in dict.fromkeys((p.scope, p.fraction) for p in self.points):
            if any((name, scope, fraction) not in found for name in (*first, *second)):
                continue
            sums = [
                torch.stack([self.sums[found[name, scope, fraction]].sum(-1) for name in names]).mean(0)
                for names in (first, second)
            ]
            mean, error = (float(x) for x in self._mean((sums[0] - sums[1])[None]))
            reach = float(t.ppf((1 + confidence) / 2, n - 1)) * error
            row = {"scope": scope, "fraction": fraction, "difference": mean, "stderr": error}
            rows.append(row | {"low": mean - reach, "high": mean + reach})
        if not rows:
            raise ValueError(f"expected scores with points in common, got {a!r} and {b!r}")
        return pd.DataFrame(rows)

    def plot(self, **kwargs: Any) -> Figure:
        """Returns the loss against the fraction removed; see `ropelens.plots.ablation_curves`."""
        from ropelens.plots.ablation import ablation_curves

        return ablation_curves(self.to_frame(), **kwargs)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes one safetensors file, whole or not at all."""
        tensors = {"sums": self.sums, "counts": self.counts}
        facts = {"points": [vars(p) for p in self.points], "edges": self.edges, "documents": self.documents}
        saving.write(path, "AblationCurve", tensors, facts | {"mode": self.mode, "facts": self.facts})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> AblationCurve:
        """Returns what `save` wrote.

        Raises:
            OSError: If there is no such file.
            ValueError: If it is truncated or holds something else.
        """
        tensors, facts = saving.read(path, "AblationCurve")
        return cls(
            points=tuple(Point(**p) for p in facts["points"]),
            **tensors,
            edges=tuple(facts["edges"]),
            documents=tuple(facts["documents"]),
            mode=facts["mode"],
            facts=facts["facts"],
        )

    def _curves(self) -> list[tuple[str, str]]:
        return list(dict.fromkeys((point.score, point.scope) for point in self.points))

    def _of(self, score: str, scope: str) -> list[int]:
        at = [n for n, p in enumerate(self.points) if (p.score, p.scope) == (score, scope)]
        return sorted(at, key=lambda n: self.points[n].fraction)

    def _row(self, score: str, scope: str, fraction: float) -> int:
        return next(n for n, p in enumerate(self.points) if p == Point(score, scope, fraction))

    def _mean(self, sums: Float64[Tensor, "row document"]) -> tuple[Tensor, Tensor]:
        return _clustered(sums, self.counts.sum(-1))


def _clustered(
    sums: Float64[Tensor, "row document"], counts: Int64[Tensor, " document"]
) -> tuple[Float64[Tensor, " row"], Float64[Tensor, " row"]]:
    """Returns sums over counts, and the standard error of that ratio with documents as draws.

    Documents without a token here, as beyond the end of a short one, are no draws; NaN of fewer than two.
    """
    total, n = counts.sum(), int((counts > 0).sum())
    mean = sums.sum(1) / total
    spread = (sums - mean[:, None] * counts).square().sum(1)
    return mean, (spread * n / (n - 1)).sqrt() / total if n > 1 else torch.full_like(mean, torch.nan)
