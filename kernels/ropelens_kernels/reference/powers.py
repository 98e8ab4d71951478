"""Sums over keys of `exp(t l)` at the nodes t of a power rule, and sums over nodes: eager or compiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from ropelens_kernels.reference.quadrature import NARROW, powers


class PowerRules:
    """The rules of `powers()` for blocks of logits, whose maximum is 0.

    Eager, the powers of a block are stored once, in memory that every block uses again. Compiled, they
    are made twice, but never leave the registers.
    """

    def __init__(self, like: Tensor, compiled: bool = False) -> None:
        self._compiled, self._wide = compiled, False
        self._power = like.new_empty(0)
        self._room = like.new_empty(0)
        self._tensors = [
            (like.new_tensor((0, *rule.nodes)) / rule.whole, like.new_tensor(rule.weights))
            for rule in (powers(False), powers(True))
        ]

    def sums(
        self, logits: Float[Tensor, "row key"], spread: float
    ) -> tuple[
        Float[Tensor, " point"],
        Float[Tensor, " point"],
        Float[Tensor, "row node"],
        Float[Tensor, "row 1"],
    ]:
        """Returns nodes and weights with t = 0 first, `sum exp(t l)` for t > 0, and `sum l exp(l)`.

        Args:
            spread: How far the logits of a row spread at most: this chooses the rule.
        """
        self._wide = spread > NARROW
        t, dt = self._tensors[self._wide]
        if self._compiled:
            by_node, mean = _compiled(self._wide)[0](logits)
            return t, dt, by_node, mean
        self._power = self._powers(logits)
        mean = torch.linalg.vecdot(self._power[-1], logits)[:, None]
        return t, dt, self._power.sum(-1).T, mean

    def weighted(
        self, logits: Float[Tensor, "row key"], weights: Float[Tensor, "row set point"]
    ) -> Float[Tensor, "row set key"]:
        """Returns `sum over nodes of weight * exp(t l)`, after `sums` of the same logits."""
        if self._compiled:
            return torch.stack(_compiled(self._wide)[1](logits, weights), 1)
        return torch.baddbmm(weights[:, :, :1], weights[:, :, 1:], self._power.transpose(0, 1))

    def _powers(self, logits: Float[Tensor, "row key"]) -> Float[Tensor, "node row key"]:
        rule = powers(self._wide)
        need = rule.n_places * logits.numel()
        if len(self._room) < need:
            self._room = logits.new_empty(need * 9 // 8)  # later blocks differ a little
        power = self._room[:need].view(rule.n_places, *logits.shape)
        each = power.unbind(0)
        torch.mul(logits, 1 / rule.whole, out=each[rule.unit]).exp_()
        for place, a, b in rule.chain:
            torch.mul(each[a], each[b], out=each[place])
        return power[rule.n_helpers :]


@cache
def _compiled(wide: bool) -> tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., list[Tensor]]]:
    """The two passes over a block's logits, as torch.compile makes them: once a process and rule."""
    rule = powers(wide)

    def each(logits: Tensor) -> list[Tensor]:
        places = {rule.unit: torch.exp(logits * (1 / rule.whole))}
        for place, a, b in rule.chain:
            places[place] = places[a] * places[b]
        return [places[place] for place in range(rule.n_helpers, rule.n_places)]

    def sums(logits: Tensor) -> tuple[Tensor, Tensor]:
        power = each(logits)
        by_node = torch.stack([x.sum(-1) for x in power], -1)
        return by_node, (power[-1] * logits).sum(-1, keepdim=True)

    def weighted(logits: Tensor, weights: Tensor) -> list[Tensor]:
        power, sets = each(logits), []
        for w in weights.unbind(1):
            total = w[:, :1]
            for node, x in enumerate(power, 1):
                total = total + w[:, node : node + 1] * x
            sets.append(total)
        return sets

    return torch.compile(sums, dynamic=True), torch.compile(weighted, dynamic=True)
