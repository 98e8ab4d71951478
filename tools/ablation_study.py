"""`make ablation-study`: what SmolLM2-135M does without some of its bands, for docs/results/ablation.md.

Bands are scored on speeches, and the loss is measured on excerpts of 32 other documents: 25 later
speeches and 7 novels. It takes hours on two cores; stopped at any time, the same command goes on. What is
ready lies in docs/data/ablation after each stage, and `make results` makes the page of it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

import ropelens as rl

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "docs" / "data" / "ablation"
FRACTIONS = (0.1, 0.25, 0.4, 0.55, 0.7, 0.9)
SCORED = ("activation", "entropy", "norm_product")
GRADIENTS = ("fisher", "taylor")
SEEDS = range(3)
THIRDS = {"early": range(10), "middle": range(10, 20), "late": range(20, 30)}
CUTS = (64, 1024, 16384)
SINGLE = ((11, 1), (16, 0), (18, 6))  # two previous-token heads, one of induction
N_AREAS = 4


def main() -> None:
    """Runs all stages that are not done yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpora", type=Path, default=ROOT / "corpora", help="what `make corpora` fetched")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "ablation", help="folder of the run")
    parser.add_argument("--scores", type=Path, help="folder of activation, entropy and norm_product")
    parser.add_argument("--data", type=Path, default=DATA, help="folder for what the page is made of")
    args = parser.parse_args()
    args.data.mkdir(parents=True, exist_ok=True)
    model = rl.load("smollm2-135m", host="transformers")
    texts = rl.windows(list(evaluated(args.corpora)), model.tokenizer, context=512)
    points = args.out / "points"

    def keep(name: str, curve: rl.AblationCurve) -> None:
        curve.save(args.data / f"{name}.safetensors")
        print(f"{name}: {curve}", flush=True)

    for mode in ("zero", "derotate"):
        keep(
            f"thirds-{mode}",
            rl.ablation_losses(model, thirds(model, "fastest:50%"), texts, points, mode=mode),
        )

    scores = measured(model, args)
    random = {f"random {seed}": rl.random_scores(scores["activation"], seed) for seed in SEEDS}
    rl.agreement(scores).to_csv(args.data / "agreement.csv", index=False)
    both = {name: scores[name].importance().nan_to_num(0).half() for name in ("activation", "entropy")}
    save_file(both, args.data / "importance.safetensors")
    some = {"activation": scores["activation"], "entropy": scores["entropy"], "random 0": random["random 0"]}
    keep("curve", rl.ablation_curve(model, some, texts, [0.4], out=points))
    some = {**{name: scores[name] for name in SCORED}, **random}
    keep("curve", rl.ablation_curve(model, some, texts, [0.4], out=points))
    keep("curve", rl.ablation_curve(model, some, texts, FRACTIONS, out=points))

    scores |= gradients(model, args)
    rl.agreement(scores).to_csv(args.data / "agreement.csv", index=False)
    keep("curve", rl.ablation_curve(model, {**scores, **random}, texts, FRACTIONS, out=points))
    heads = {name: scores[name] for name in ("activation", "entropy")}
    keep("heads", rl.ablation_curve(model, heads, texts, FRACTIONS, "head", out=points))
    keep("cuts", rl.derotation_curve(model, texts, CUTS, points))
    for mode in ("zero", "derotate"):
        masks = thirds(model, "slowest:50%")
        keep(f"slow-{mode}", rl.ablation_losses(model, masks, texts, points, mode=mode))

    fewer = torch.stack([window.ids for window in texts])[::4, :128]
    found = rl.areas(scores["activation"], N_AREAS)
    found.to_frame().to_csv(args.data / "areas.csv", index=False)
    keep("areas", rl.area_losses(model, found, fewer, args.out / "short"))
    effects = rl.band_effects(model, fewer, SINGLE, args.out / "short")
    effects.to_csv(args.data / "effects.csv", index=False, float_format="%.6g")
    ranks = rl.effect_ranks(effects, {name: scores[name] for name in (*SCORED, *GRADIENTS)})
    ranks.to_csv(args.data / "ranks.csv", index=False, float_format="%.6g")


def evaluated(corpora: Path) -> Iterator[str]:
    """The texts that the loss is measured on: 25 late speeches, and 7 novels from their middles on."""
    for path in speeches(corpora)[-25:]:
        yield path.read_text()
    for path in [*sorted((corpora / "austen").glob("*.txt")), corpora / "moby-dick" / "moby-dick.txt"]:
        text = path.read_text()
        start = text.find("\n\n", len(text) // 2)
        yield text[start:].lstrip()


def speeches(corpora: Path) -> list[Path]:
    """All State of the Union speeches in order of their years."""
    found = sorted((corpora / "sotu").glob("*.txt"))
    if not found:
        raise SystemExit(f"no speeches in {corpora}: run `make corpora` first")
    return found


def measured(model, args: argparse.Namespace) -> dict[str, rl.BandScores]:
    """Scores from forward passes, on the first speeches."""
    if args.scores is not None:
        return {name: rl.BandScores.load(args.scores / f"{name}.safetensors", model) for name in SCORED}
    windows = rl.windows(speeches(args.corpora)[:150], model.tokenizer, context=2048)
    return rl.collect(model, windows, SCORED, args.out / "scores", tokens=65_536, checkpoint_every=60)


def gradients(model, args: argparse.Namespace) -> dict[str, rl.BandScores]:
    """Scores from backward passes, on the first speeches."""
    windows = rl.windows(speeches(args.corpora)[:150], model.tokenizer, context=2048)
    return rl.collect(model, windows, GRADIENTS, args.out / "gradients", tokens=16_384, checkpoint_every=1)


def thirds(model, bands: str) -> dict[str, torch.Tensor]:
    """Half of the bands of each third of the layers."""
    return {name: rl.bands_where(model, bands, layers=layers) for name, layers in THIRDS.items()}


if __name__ == "__main__":
    main()
