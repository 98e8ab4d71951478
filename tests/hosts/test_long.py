"""Long contexts: no table of positions by positions, angles that stay exact, wavelengths that line up."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import families
import pytest
import tiny
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ropelens as rl
from ropelens.hosts.load import hooked_from

LONG = 131_072


class Largest(TorchDispatchMode):
    """Keeps the size of the largest tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        sizes = [x.untyped_storage().nbytes() for x in tree_leaves(made) if isinstance(x, torch.Tensor)]
        self.bytes = max([self.bytes, *sizes])
        return made


@pytest.mark.parametrize("host", tiny.HOSTS)
def test_a_128k_context_costs_no_table_of_its_square(host: str):
    from transformers import MistralConfig, MistralForCausalLM

    extra = {"max_position_embeddings": LONG, "head_dim": 8, "sliding_window": 4096}
    plain = MistralForCausalLM(MistralConfig(**(families.SMALL | extra))).eval()
    model = plain if host == "transformers" else tiny.bridge(plain) if host == "bridge" else None
    with Largest() as largest:
        model = hooked_from(plain, None) if model is None else model
        rl.Bands.of(model)
        rl.band_entropy(model, tiny.ids())
        rl.band_activation(model, tiny.ids())
    # What grows with the context is at most a float32 angle for each position and dim: 2**22 bytes. What
    # the kernels need is for 24 tokens. A mask of positions by positions takes 2**34 at a byte each.
    assert 0 < largest.bytes <= 4 * families.D_HEAD * LONG


def test_a_bf16_model_keeps_its_angles_at_position_100000(tmp_path: Path):
    """As loaded; cast afterwards, its frequencies are rounded, and that is what is shown."""
    from transformers import AutoModelForCausalLM

    full = tiny.plain("llama", dtype=torch.float32)
    full.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, attn_implementation="eager")
    freq = rl.Bands.of(model).inv_freq[1]
    torch.testing.assert_close(freq, torch.tensor(families.ladder()).double(), rtol=2**-22, atol=0)
    cos, sin = model.model.rotary_emb(torch.zeros(1, 1, 8).bfloat16(), torch.tensor([[100_000]]))
    angle = 100_000 * freq
    # A float32 angle of 1e5 is right to 2**-8, and the table has 8 bits.
    for table, expected in ((cos, angle.cos()), (sin, angle.sin())):
        torch.testing.assert_close(table[0, 0, :4].double(), expected, rtol=0, atol=2**-7)
    rounded = rl.Bands.of(full.bfloat16()).inv_freq[1]
    assert rounded.tolist() == torch.tensor(families.ladder()).bfloat16().double().tolist()


@pytest.mark.parametrize("host", ["transformers", "bridge"])
def test_wavelengths_line_up_across_layers_of_two_bases(host: str):
    model = tiny.plain("gemma3")
    model = model if host == "transformers" else tiny.bridge(model)
    bands = rl.Bands.of(model)
    assert bands.exists.all()
    for layer, base in enumerate((1e4, 1e6)):
        expected = [2 * math.pi * base ** (b / 4) for b in range(4)]
        assert bands.wavelength[layer].tolist() == pytest.approx(expected, rel=1e-6)
    frame = rl.band_entropy(model, tiny.ids()).to_frame()
    shown = frame[(frame["head"] == 0) & (frame["band"] == 3)].set_index("layer")["wavelength"]
    assert shown.loc[1] == pytest.approx(shown.loc[0] * 1e6**0.75 / 1e4**0.75, rel=1e-6)
