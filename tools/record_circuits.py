"""Measures the heads of SmolLM2-135M for docs/results/circuits.md, into docs/data/circuits.

Five minutes on a quiet core. Each file is written when it is whole, and not again while it is there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from tqdm.auto import tqdm

import ropelens as rl
from ropelens.circuits.heads import attention_to_targets
from ropelens.circuits.patterns import attention_at, attention_without, each_layer
from ropelens.hosts import host_of

DATA = Path(__file__).resolve().parent.parent / "docs" / "data" / "circuits"
TOP, N_BANDS, CHOICES = 10, (4, 8), 20
KINDS = ("induction", "previous_token")
Heads = list[tuple[int, int]]


def main() -> None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    model = rl.load("smollm2-135m", host="transformers")
    DATA.mkdir(parents=True, exist_ok=True)
    heads = once("heads", lambda: measure_heads(model))
    top = {kind: best(heads, kind) for kind in KINDS}
    bands = once("bands", lambda: measure_bands(model, top))
    once("ablation", lambda: ablate_alone(model, bands))
    once("circuit", lambda: ablate_together(model, bands, top))


def once(name: str, make: Callable[[], pd.DataFrame]) -> pd.DataFrame:
    """Returns what the file holds, made first where it is not there."""
    path = DATA / f"{name}.csv"
    if not path.exists():
        partial = path.with_suffix(".partial")
        make().to_csv(partial, index=False, float_format="%.5g")
        os.replace(partial, path)
        print(f"docs/data/circuits/{path.name}", flush=True)
    return pd.read_csv(path)


def best(heads: pd.DataFrame, kind: str) -> Heads:
    rows = heads.nlargest(TOP, kind)
    return list(zip(rows["layer"].tolist(), rows["head"].tolist(), strict=True))


def measure_heads(model: Any) -> pd.DataFrame:
    """All heads: scores on 4 x 512 tokens, prefix matching by length, eigenvalue scores, and rest."""
    circuits = rl.circuits
    scores = circuits.head_scores(model, progress=True)
    frame = scores.to_frame()
    matched = circuits.prefix_matching(model, progress=True)
    for name in matched.by_sequence:
        frame[name] = matched[name].flatten().numpy()
    frame["induction_stderr"] = scores.stderr("induction").flatten().numpy()
    qk = circuits.qk_eigenvalues(model, distance=range(1, 256))
    frame["qk_direct"] = circuits.eigenvalue_score(qk).flatten().numpy()
    before = scores.top("previous_token", TOP)
    through = circuits.qk_eigenvalues(model, distance=range(1, 256), through=before)
    frame["qk_through"] = circuits.eigenvalue_score(through).flatten().numpy()
    composed = circuits.k_composition(model, senders=before).nan_to_num(nan=-1).flatten(0, 1)
    strongest = composed.max(0)
    frame["k_composition"] = strongest.values.flatten().numpy()
    n_heads = scores["induction"].shape[1]
    frame["k_sender"] = [f"{i // n_heads}.{i % n_heads}" for i in strongest.indices.flatten().tolist()]
    frame.loc[frame["k_composition"] < 0, ["k_composition", "k_sender"]] = None, ""
    rest = circuits.no_op_report(model, circuits.repeated_tokens(model, n_sequences=2, length=256).ids)
    frame["first_value"] = rest["first_value"].to_numpy()
    return frame


def measure_bands(model: Any, top: dict[str, Heads]) -> pd.DataFrame:
    """The strongest heads of each kind: what each band carries, and the score without it."""
    found = []
    for kind, heads in top.items():
        bands = rl.circuits.head_bands(model, kind, heads=heads, n_sequences=8, progress=True)
        found.append(bands.to_frame().assign(kind=kind))
    return pd.concat(found)


def carrying(bands: pd.DataFrame, kind: str, layer: int, head: int, n: int) -> list[int]:
    rows = bands[(bands["kind"] == kind) & (bands["layer"] == layer) & (bands["head"] == head)]
    return rows.nlargest(n, "attribution")["band"].tolist()


def others(own: list[int], n_bands: int, n: int, generator: torch.Generator) -> list[int]:
    left = [band for band in range(n_bands) if band not in own]
    return [left[i] for i in torch.randperm(len(left), generator=generator)[:n].tolist()]


def ablate_alone(model: Any, bands: pd.DataFrame) -> pd.DataFrame:
    """One head at a time: its score without the bands that carry it, and without as many others.

    The bands are those of `bands`, measured on other sequences; `CHOICES` draws of the others.
    """
    host = host_of(model)
    text = rl.circuits.repeated_tokens(model, n_sequences=16, length=256, seed=1)
    rows, generator = [], torch.Generator().manual_seed(0)
    measured = sorted(set(zip(bands["layer"], bands["kind"], bands["head"], strict=True)))
    asked = {layer: [(kind, head) for at, kind, head in measured if at == layer] for layer, *_ in measured}

    def take(layer: int, q: torch.Tensor, k: torch.Tensor) -> None:
        spec = host.certificate.layers[layer]
        pairs = spec.rotation.pairs
        for kind, head in asked[layer]:
            kv_head = head // (q.shape[2] // k.shape[2])
            one, target = (q[:, :, [head]], k[:, :, [kv_head]]), text.targets[kind]
            intact = attention_at(*one, spec, {kind: target})[kind][0]
            for n in N_BANDS:
                own = carrying(bands, kind, layer, head, n)
                drawn = [others(own, len(pairs), n, generator) for _ in range(CHOICES)]
                parts = [pairs[chosen].flatten() for chosen in (own, *drawn)]
                left = attention_without(*one, spec, target, parts)[:, 0]
                for sequence in range(len(text.ids)):
                    without = left[1:, sequence]
                    rows.append(
                        {
                            "kind": kind,
                            "layer": layer,
                            "head": head,
                            "n_bands": n,
                            "sequence": sequence,
                            "intact": float(intact[sequence]),
                            "without_own": float(left[0, sequence]),
                            "without_others": float(without.mean()),
                            "others_lower": int((without < left[0, sequence]).sum()),
                        }
                    )

    each_layer(host, text.ids, take, layers=list(asked), progress=True)
    return pd.DataFrame(rows)


def ablate_together(model: Any, bands: pd.DataFrame, top: dict[str, Heads], n: int = 8) -> pd.DataFrame:
    """All of the strongest heads of a kind at once, in the running model.

    What is left of the induction heads' scores and of the loss on the second copy: with the previous-token
    heads' bands ablated, through the circuit alone.
    """
    host = host_of(model)
    text = rl.circuits.repeated_tokens(model, n_sequences=6, length=96, seed=2)
    targets = {"induction": text.targets["induction"]}
    generator = torch.Generator().manual_seed(1)
    own = {(kind, *head): carrying(bands, kind, *head, n) for kind in KINDS for head in top[kind]}
    pairs = host.bands.pairs
    runs: list[tuple[str, str, dict[tuple[int, int], list[int]]]] = [("none", "none", {})]
    for kind in KINDS:
        runs.append((kind, "own", {head: own[kind, *head] for head in top[kind]}))
        for draw in range(4):
            drawn = {h: others(own[kind, *h], host.bands.n_bands, n, generator) for h in top[kind]}
            runs.append((kind, f"others {draw}", drawn))
    rows = []
    for kind, choice, chosen in tqdm(runs, "runs"):
        edits = {}
        for layer in {layer for layer, _ in chosen}:
            mask = torch.ones(host.certificate.layers[layer].n_heads, host.certificate.layers[layer].d_head)
            for (at, head), which in chosen.items():
                if at == layer:
                    mask[head, pairs[layer, which].flatten()] = 0
            edits[layer] = lambda q, positions, mask=mask: q * mask
        with host.editing(queries=edits):
            scores = attention_to_targets(host, text.ids, targets)["induction"]
            with torch.no_grad():
                logits = host.run(text.ids, None)
        assert logits is not None
        second = slice(text.ids.shape[1] // 2, -1)
        loss = torch.nn.functional.cross_entropy(
            logits[:, second].transpose(1, 2), text.ids[:, 1:][:, second.start :], reduction="none"
        ).mean(1)
        induction = torch.stack([scores[layer, head] for layer, head in top["induction"]]).mean(0)
        for sequence in range(len(text.ids)):
            rows.append(
                {
                    "ablated_in": kind,
                    "choice": choice,
                    "sequence": sequence,
                    "induction": float(induction[sequence]),
                    "loss_second_copy": float(loss[sequence]),
                }
            )
    return pd.DataFrame(rows)


if __name__ == "__main__":
    sys.exit(main())
