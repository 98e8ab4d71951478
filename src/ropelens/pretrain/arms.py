"""The arms of the experiment: what each trains with."""

from __future__ import annotations

import torch
from jaxtyping import Float64
from torch import Tensor

from ropelens.interventions import resample_frequencies
from ropelens.pretrain.configs import PretrainConfig
from ropelens.scores import BandScores

ORIGINAL = "original"
ARMS = {
    ORIGINAL: "the ladder base^(-2b/d), the same for every layer",
    "resampled": "drawn for each layer in proportion to measured activation",
    "quantile": "the same density without chance: its quantiles",
    "shuffled": "drawn from the same activations, permuted over the bands of each layer",
    "one-set": "drawn once from the activation summed over layers, the same for all",
    "partial-10": "10% of the bands rotate, on a ladder of their own from 1 to the base",
    "partial-75": "75% of the bands rotate, likewise",
    "learned": "the ladder, then trained with the weights, for each layer",
    "learned-shared": "the ladder, then trained with the weights, one for all layers",
}
LEARNED = {"learned": "layer", "learned-shared": "shared"}


def check_arms(arms: list[str]) -> None:
    """Raises a ValueError unless these are arms, the original among them, none twice."""
    wrong = next((arm for arm in arms if arm not in ARMS), None)
    if wrong is not None:
        raise ValueError(f"expected arms out of {', '.join(ARMS)}, got {wrong!r}")
    if ORIGINAL not in arms or len(set(arms)) < len(arms) or len(arms) < 2:
        raise ValueError(
            f"expected {ORIGINAL!r} and at least one other arm, each once, got {', '.join(arms)}"
        )


def frequencies_of(
    arm: str, config: PretrainConfig, activation: BandScores, seed: int
) -> Float64[Tensor, "layer band"] | None:
    """Returns the frequencies of an arm; None where the model's own are left, or learned from there.

    Args:
        activation: Measured on the bootstrap model.
    """
    if arm == ORIGINAL or arm in LEARNED:
        return None
    if arm == "partial-10":
        return partial_rotary(config, 0.10)
    if arm == "partial-75":
        return partial_rotary(config, 0.75)
    options = {"quantile": {"method": "quantile"}, "shuffled": {"shuffle": True}, "one-set": {"per": "model"}}
    return resample_frequencies(activation, seed=seed, **options.get(arm, {}))


def partial_rotary(config: PretrainConfig, share: float) -> Float64[Tensor, "layer band"]:
    """Returns frequencies of which a share rotates, as `partial_rotary_factor` of transformers' models.

    `round(share * n)` bands turn with `base ** (-b / that many)`, the rest not at all.
    """
    n_bands = config.d_head // 2
    n = max(1, round(share * n_bands))
    ladder = config.base ** (-torch.arange(n, dtype=torch.float64) / n)
    return torch.cat([ladder, torch.zeros(n_bands - n, dtype=torch.float64)]).repeat(config.layers, 1)
