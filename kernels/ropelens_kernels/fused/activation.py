"""Band activation on a GPU: tiles of pairs, and block sums of harmonics."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Launches go to the tensors' device, which need not be the current one. The first axis of a grid holds rows
# and tiles together, since the others end at 65,535.
WIDTH = 64  # positions in a tile, and in a block of the harmonics
BANDS = 8  # bands in a program of the harmonics


@triton.jit
def pairs_kernel(
    q, k, out, heads, group, bands, queries, keys, offset, window,
    q_row, q_band, q_xy, k_row, k_band, k_xy,
    WIDTH: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """Sums |q.k| over a tile of queries of one band and the keys they see (NEAR: of their own tile).

    q and k are planes [batch * head, band, 2, time]; time is contiguous. One program per (row of q and
    tile, band) writes out[row, band, tile].
    """
    tiles = tl.cdiv(queries, WIDTH)
    tile, row, band = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(1)
    key_row = (row // heads) * (heads // group) + (row % heads) // group
    place = tl.arange(0, WIDTH)
    p = tile * WIDTH + place
    q_at = q + row * q_row + band * q_band + p
    q0 = tl.load(q_at, mask=p < queries, other=0.0)
    q1 = tl.load(q_at + q_xy, mask=p < queries, other=0.0)
    position = p + offset
    last = tl.minimum(tile * WIDTH + WIDTH + offset, keys)
    first = tl.maximum(tile * WIDTH + offset - window + 1, 0) // WIDTH * WIDTH
    if NEAR:
        first = tile * WIDTH + offset
    total = tl.zeros((WIDTH, WIDTH), dtype=tl.float32)
    for start in range(first, last, WIDTH):
        i = start + place
        k_at = k + key_row * k_row + band * k_band + i
        k0 = tl.load(k_at, mask=i < keys, other=0.0)
        k1 = tl.load(k_at + k_xy, mask=i < keys, other=0.0)
        x = tl.abs(q0[:, None] * k0[None, :] + q1[:, None] * k1[None, :])
        distance = position[:, None] - i[None, :]
        total += tl.where((distance >= 0) & (distance < window), x, 0.0)
    tl.store(out + (row * bands + band) * tiles + tile, tl.sum(tl.sum(total, 1), 0))


@triton.jit
def harmonics_kernel(
    x, out, bands, time, x_row, x_band, x_xy, out_term,
    M: tl.constexpr, WIDTH: tl.constexpr, BANDS: tl.constexpr,
):  # fmt: skip
    """Writes block sums of |x| cos 2j phi and |x| sin 2j phi, j = 0..M: out[term, xy, row, band, block]."""
    blocks = tl.cdiv(time, WIDTH)
    block, row = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    band = tl.program_id(1) * BANDS + tl.arange(0, BANDS)
    t = block * WIDTH + tl.arange(0, WIDTH)
    mask = (band[:, None] < bands) & (t[None, :] < time)
    at = x + row * x_row + band[:, None] * x_band + t[None, :]
    a = tl.load(at, mask=mask, other=0.0)
    b = tl.load(at + x_xy, mask=mask, other=0.0)
    size = tl.sqrt(a * a + b * b)
    inverse = tl.where(size > 0, 1.0 / tl.maximum(size, 1e-37), 0.0)
    turn_cos, turn_sin = (a * a - b * b) * inverse * inverse, 2 * a * b * inverse * inverse
    cos, sin = size, tl.zeros_like(size)
    to = out + (row * bands + band) * blocks + block
    inside = band < bands
    for j in range(M + 1):
        tl.store(to + (2 * j) * out_term, tl.sum(cos, 1), mask=inside)
        tl.store(to + (2 * j + 1) * out_term, tl.sum(sin, 1), mask=inside)
        cos, sin = cos * turn_cos - sin * turn_sin, sin * turn_cos + cos * turn_sin


def pairwise_planes(q, k, group, window=None, near=False):
    """Returns sum |q.k| [batch, head, band] of planes q [batch, head, band, 2, time] and k likewise."""
    (batch, heads, bands, _, queries), keys = q.shape, k.shape[-1]
    q, k = q.flatten(0, 1), k.flatten(0, 1)
    tiles = triton.cdiv(queries, WIDTH)
    out = torch.full((batch * heads, bands, tiles), torch.nan, dtype=torch.float32, device=q.device)
    if bands:
        with torch.cuda.device_of(q):
            pairs_kernel[(tiles * batch * heads, bands)](
                q, k, out, heads, group, bands, queries, keys, keys - queries, window or keys,
                *q.stride()[:3], *k.stride()[:3], WIDTH=WIDTH, NEAR=near,
            )  # fmt: skip
    return out.sum(-1, dtype=torch.float64).view(batch, heads, bands)


def block_sums(x, m):
    """Returns the harmonics' block sums [term, 2, batch, head, band, block] of planes x."""
    batch, heads, bands, _, time = x.shape
    x = x.flatten(0, 1)
    blocks = triton.cdiv(time, WIDTH)
    out = torch.full(
        (m + 1, 2, batch * heads, bands, blocks), torch.nan, dtype=torch.float32, device=x.device
    )
    if bands:
        with torch.cuda.device_of(x):
            harmonics_kernel[(blocks * batch * heads, triton.cdiv(bands, BANDS))](
                x, out, bands, time, *x.stride()[:3], out.stride(1), M=m, WIDTH=WIDTH, BANDS=BANDS
            )
    return out.view(m + 1, 2, batch, heads, bands, blocks)


def far_terms(q, k, m, group):
    """Returns sum |q||k| cos 2j(phi_q - phi_k) [term, batch, head, band] over pairs of different blocks."""
    f, g = block_sums(q, m), block_sums(k, m)
    past = g.double().cumsum(-1).roll(1, -1)
    past[..., 0] = 0
    return (f * past.repeat_interleave(group, 3)).sum((1, 5), dtype=torch.float64)
