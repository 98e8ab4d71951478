"""The host protocol: all that the rest of ropelens knows of a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from ropelens.bands import Bands
from ropelens.hosts.layer import Certificate, LayerClaim, LayerView, Rotation

CONFIG = "ropelens_inv_freq"  # where a transformers config keeps frequencies that were set
Consumer = Callable[[int, Tensor, Tensor, Tensor, Tensor], None]
"""Takes (layer, q, k, mask, sound) of one layer in one forward pass.

`q [batch, query, head, d_head]` and `k [batch, key, kv_head, d_head]` are post-rotary and detached,
`mask [batch, key]` is True where a token is real, and `sound []` whether the model attends with
just these queries and keys under the certified mask. With a key-value cache a pass may have fewer
queries than keys: they are the last ones, and each row goes on with the text of the pass before.
"""

Edit = Callable[[Tensor, Int64[Tensor, "batch pos"]], Tensor]
"""Takes post-rotary queries (or keys) `[batch, pos, head, d_head]` and returns those to attend with.

The second argument is the absolute position of each row, as the model turned it; at pads, which
nothing attends to, it means nothing.
"""


@runtime_checkable
class Turned(Protocol):
    """Frequencies that were set in a model."""

    @property
    def key(self) -> object:
        """Equal for equal frequencies."""
        ...


class Host(ABC):
    """A model seen through the points that ropelens reads and edits.

    Subclasses say how a library runs the model, what it claims about a layer, and how its queries
    and keys are reached. `certificate` is set once the claims have been checked, and `certified_turning`
    to what `turning_now` was then.
    """

    kind: str
    model: Any
    certificate: Certificate
    certified_turning: Turned | None = None

    def __init__(self, model: Any) -> None:
        self.model = model

    # The model --------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def n_layers(self) -> int: ...

    @property
    @abstractmethod
    def context(self) -> int | None:
        """The longest sequence that the model takes, in tokens."""
        ...

    @property
    def steady(self) -> int | None:
        """The longest text that turns with the certified frequencies; None if every text does."""
        return None

    @property
    @abstractmethod
    def embedding(self) -> Float[Tensor, "token d_model"]: ...

    @property
    @abstractmethod
    def module(self) -> torch.nn.Module:
        """What holds the weights and buffers."""
        ...

    @abstractmethod
    def run(
        self, ids: Int64[Tensor, "batch pos"], mask: Bool[Tensor, "batch pos"] | None, logits: bool = True
    ) -> Float[Tensor, "batch pos token"] | None:
        """Runs the model; pads are where `mask` is False. Without `logits`, none are computed."""
        ...

    # What is certified ------------------------------------------------------------------------------

    @abstractmethod
    def settings(self) -> tuple[object, ...]:
        """What the attention depends on besides the weights: a certificate holds while it stays."""
        ...

    @abstractmethod
    def probe(self, ids: Int64[Tensor, "batch pos"]) -> list[LayerView]:
        """Runs the bare model, the user's own hooks laid aside, and returns what each layer shows.

        Raises:
            ValueError: Naming the first layer that shows nothing.
        """
        ...

    @abstractmethod
    def probe_turns(self, token: int, n: int) -> list[LayerView]:
        """As `probe`, of one token at each position from 0 to n-1, so that only the rotation differs."""
        ...

    @abstractmethod
    def claim(self, layer: int, view: LayerView) -> LayerClaim:
        """Returns what the host says of the layer's scores."""
        ...

    @abstractmethod
    def rotations(self, layer: int, view: LayerView) -> list[Rotation]:
        """Returns the rotations that the layer may use."""
        ...

    # What is observed and edited ----------------------------------------------------------------------

    @abstractmethod
    def observing(self, layers: Sequence[int], consume: Consumer) -> AbstractContextManager[None]:
        """Calls `consume` once for each of the layers in every forward pass inside the block."""
        ...

    @abstractmethod
    def editing(
        self, queries: Mapping[int, Edit] | None = None, keys: Mapping[int, Edit] | None = None
    ) -> AbstractContextManager[None]:
        """Makes the given layers attend with edited queries and keys inside the block.

        With a key-value cache some hosts show an edit new keys only, others all keys again. Each key is
        edited once before it is attended to, so an edit may depend on nothing but a row and its position.

        Raises:
            ValueError: If the positions cannot be told.
        """
        ...

    @abstractmethod
    def turn(self, rows: Sequence[Float64[Tensor, " band"] | None]) -> Callable[[], None]:
        """Makes each layer rotate with other frequencies, at any length; returns what undoes it.

        Angles are computed as the model computes them. What was certified before does not hold then.

        Args:
            rows: Radians per token of each layer's bands; None leaves a layer as it is.
        """
        ...

    @abstractmethod
    def turning_now(self) -> Turned | None:
        """Returns what stands for the frequencies that were set last; None if the model has its own."""
        ...

    @abstractmethod
    def fast(self) -> AbstractContextManager[None]:
        """Computes attention outputs the fastest exact way that the host has, inside the block."""
        ...

    @abstractmethod
    def alone(self) -> AbstractContextManager[None]:
        """Lays the user's own hooks aside inside the block, so that the bare model can be measured."""
        ...

    @contextmanager
    def turning(self, rows: Sequence[Float64[Tensor, " band"] | None]) -> Iterator[None]:
        """As `turn`, inside the block."""
        undo = self.turn(rows)
        try:
            yield
        finally:
            undo()

    @property
    def text_config(self) -> Any:
        """The transformers config of the language model; None if there is none."""
        return None

    @property
    def asked(self) -> object | None:
        """The frequencies that the model's config asks for; None if it has its own."""
        return getattr(self.text_config, CONFIG, None)

    def turn_for_good(self, rows: Sequence[Float64[Tensor, " band"] | None]) -> None:
        """As `turn`, and has the model's config ask for them, where it has one."""
        self.turn(rows)
        if self.text_config is not None:
            setattr(self.text_config, CONFIG, [None if row is None else row.tolist() for row in rows])

    # What follows from it -----------------------------------------------------------------------------

    def require_steady(self, n: int) -> None:
        """Refuses a text that the model would turn with other frequencies than the certified ones.

        Raises:
            ValueError: If `n` tokens are more than `steady`, or other frequencies were set meanwhile.
        """
        if self.turning_now() is not self.certified_turning:
            raise ValueError(
                "the model's frequencies were set or reset after this measurement began: begin it inside the "
                "block of ropelens.frequencies"
            )
        if self.steady is not None and n > self.steady:
            raise ValueError(
                f"expected at most {self.steady} tokens, got {n}: this model's scaling turns longer texts "
                "with other frequencies than those that its bands are named by"
            )

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def vocab_size(self) -> int:
        return self.embedding.shape[0]

    @property
    def bands(self) -> Bands:
        return self.certificate.bands

    @property
    def fingerprint(self) -> dict[str, object]:
        return self.certificate.fingerprint
