"""Loss by position in the context, and the in-context-learning score."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from ropelens.data import Windows
from ropelens.data import windows as windows_of
from ropelens.hosts import Host, host_of
from ropelens.hosts.tokens import Tokens
from ropelens.scores.provenance import facts, tagged

if TYPE_CHECKING:
    import pandas as pd

BLOCK = 2**22  # logits at a time in float64


@dataclass(frozen=True, eq=False)
class PositionLosses:
    """The loss of every token, given all before it in its window, in nats.

    Attributes:
        values: Column p is the token at position p, counted from 0; column 0, before which there is
            nothing, is NaN.
        documents: Which document each window is from; windows of one document are not independent.
        made_from: What it was measured on, for `ropelens.plots.provenance`.
    """

    values: Float64[Tensor, "window pos"]
    documents: tuple[str, ...]
    made_from: dict[str, Any] = field(default_factory=dict)

    @property
    def mean(self) -> Float64[Tensor, " pos"]:
        """The loss at each position, in nats."""
        return self.values.mean(0)

    @property
    def stderr(self) -> Float64[Tensor, " pos"]:
        """The standard error of `mean` over documents; NaN with fewer than two."""
        return clustered_stderr(self.values, self.documents)

    def to_frame(self) -> pd.DataFrame:
        """One row a position from 1 on: position, loss, stderr."""
        import pandas as pd

        positions = range(1, self.values.shape[1])
        frame = pd.DataFrame({"position": positions, "loss": self.mean[1:], "stderr": self.stderr[1:]})
        return tagged(frame, self.made_from)


class InContextLearning(NamedTuple):
    """An in-context-learning score in nats, negative where context helps, and its standard error."""

    score: float
    stderr: float


def loss_by_position(
    model: Any,
    windows: Windows | Int64[Tensor, "batch pos"],
    *,
    batch: int = 4,
    progress: bool = False,
) -> PositionLosses:
    """Loss by position: how well the model predicts a token that has so many tokens before it.

    `-log P(token p | tokens 0 to p-1)`, for every window and position. Source: Elhage et al. 2021 and
    Olsson et al. 2022, transformer-circuits.pub.

    Args:
        model: A HookedTransformer, a TransformerBridge or a transformers model.
        windows: From `rl.windows`, a document a window, or token ids.
        batch: Windows that the model runs at once.
        progress: Whether to show a bar that counts windows.

    Returns:
        Losses in nats, a row a window; `.mean` and `.stderr` by position.

    Raises:
        ValueError: If windows hold several documents, or are longer than the model's context.

    Example:
        ```python
        losses = rl.circuits.loss_by_position(model, tokens)
        losses.to_frame()  # one row a position
        ```
    """
    from tqdm import tqdm

    host = host_of(model)
    rows, names, losses = [], [], []
    for ids, name in tqdm(single_documents(windows), desc="loss by position", disable=not progress):
        rows.append(ids)
        names.append(name)
        if len(rows) == batch:
            losses.append(losses_of(host, torch.stack(rows)))
            rows = []
    if rows:
        losses.append(losses_of(host, torch.stack(rows)))
    data = Tokens(windows, None).digest if isinstance(windows, Tensor) else windows.fingerprint
    known = facts("PositionLosses", host.fingerprint, data, windows=sum(map(len, losses)))
    return PositionLosses(torch.cat(losses), tuple(names), known)


def in_context_learning_score(
    losses: PositionLosses, early: int = 50, late: int = 500, *, width: int = 0
) -> InContextLearning:
    """The in-context-learning score: the loss at a late position minus the loss at an early one.

    Negative is good: with more context the model predicts better. Source: Olsson et al. 2022, who take
    tokens 50 and 500.

    Args:
        losses: From `loss_by_position`.
        early: A position, counted from 0.
        late: A later one.
        width: Average each loss over so many positions on either side too.

    Returns:
        The score in nats and its standard error over documents.

    Raises:
        ValueError: If the windows have no such positions.

    Example:
        >>> import torch
        >>> values = torch.tensor([[float("nan"), 3.0, 2.5, 2.0], [float("nan"), 3.2, 2.5, 2.2]]).double()
        >>> score = in_context_learning_score(PositionLosses(values, ("a", "b")), early=1, late=3)
        >>> round(score.score, 6), round(score.stderr, 6)
        (-1.0, 0.0)
    """
    n = losses.values.shape[1]
    if not 1 <= early - width < late - width or not late + width < n:
        raise ValueError(
            f"expected 1 <= early < late < {n}, the tokens in a window, with the width about each, got early "
            f"{early}, late {late}, width {width}: choose positions that the windows have"
        )
    first, last = (losses.values[:, p - width : p + width + 1].mean(1, keepdim=True) for p in (early, late))
    change = last - first
    return InContextLearning(change.mean().item(), clustered_stderr(change, losses.documents).item())


def clustered_stderr(
    values: Float64[Tensor, "window column"], documents: tuple[str, ...]
) -> Float64[Tensor, " column"]:
    """Returns the standard error of the mean over windows, those of a document taken together.

    `sqrt(G/(G-1) * sum over documents of (sum of its windows' deviations)^2) / n`, G documents.
    """
    _, group = _numbered(documents)
    n_groups = int(group.max()) + 1
    if n_groups < 2:
        return torch.full((values.shape[1],), float("nan"), dtype=torch.float64)
    deviations = values - values.mean(0)
    sums = torch.zeros(n_groups, values.shape[1], dtype=torch.float64).index_add_(0, group, deviations)
    return (n_groups / (n_groups - 1) * sums.square().sum(0)).sqrt() / len(values)


def single_documents(
    windows: Windows | Int64[Tensor, "batch pos"],
) -> Iterator[tuple[Int64[Tensor, " pos"], str]]:
    """Yields the token ids and the document's name of each window.

    Raises:
        ValueError: If `windows` is of another kind, or one of them holds several documents.
    """
    if isinstance(windows, Tensor):
        windows = windows_of(windows)
    if not isinstance(windows, Windows):
        raise ValueError(
            "expected windows from ropelens.windows or token ids of shape [batch, pos], got "
            f"{type(windows).__name__}"
        )
    for window in windows:
        if len(window.lengths) > 1:
            raise ValueError(
                f"expected one document a window, got {len(window.lengths)} in window {window.index}: a "
                'position would count tokens of others; make them with fit="split" or "clip"'
            )
        yield window.ids, window.documents[0]


def losses_of(host: Host, ids: Int64[Tensor, "batch pos"]) -> Float64[Tensor, "batch pos"]:
    """Returns the loss of every token; NaN at position 0."""
    if host.context is not None and ids.shape[1] > host.context:
        raise ValueError(
            f"expected windows of at most {host.context} tokens, the context of this model, got "
            f"{ids.shape[1]}: make shorter ones"
        )
    ids = ids.to(host.device)
    with torch.no_grad():
        logits = host.run(ids, None)
    assert logits is not None
    return token_losses(logits, ids).cpu()


def token_losses(
    logits: Float[Tensor, "batch pos token"], ids: Int64[Tensor, "batch pos"]
) -> Float64[Tensor, "batch pos"]:
    """Returns `-log softmax(logits at p-1)[token p]` at every p from 1 on; NaN at position 0."""
    flat, target = logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten().to(logits.device)
    step = max(1, BLOCK // logits.shape[-1])
    parts = [
        torch.nn.functional.cross_entropy(x.double(), y, reduction="none")
        for x, y in zip(flat.split(step), target.split(step), strict=True)
    ]
    losses = torch.cat(parts).view(len(ids), -1)
    return torch.nn.functional.pad(losses, (1, 0), value=float("nan"))


def _numbered(documents: tuple[str, ...]) -> tuple[list[str], Int64[Tensor, " window"]]:
    names = list(dict.fromkeys(documents))
    number = {name: i for i, name in enumerate(names)}
    return names, torch.tensor([number[name] for name in documents])
