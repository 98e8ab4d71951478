"""Other frequencies against the original ones: what an experiment with small models showed.

docs/data/frequencies/manifest.json is the one that `ropelens pretrain experiment` wrote.
"""

from __future__ import annotations

import math
from itertools import combinations

from common import DOCS, table
from plotly.graph_objects import Figure

from ropelens.plots import activation_shares, frequency_ladders, loss_curves, paired_differences
from ropelens.pretrain import PretrainConfig
from ropelens.pretrain.analysis import STUDY, read
from ropelens.pretrain.manifest import Manifest

PAGE = DOCS / "results" / "frequencies.md"
DATA = DOCS / "data" / "frequencies" / "manifest.json"


def tables() -> dict[str, str]:
    found = read(DATA)
    facts = found.asked["config"]
    config = PretrainConfig(**(facts | {"betas": tuple(facts["betas"])}))
    seeds = found.runs.seed.nunique()
    setting = [
        ("parameters", f"{config.n_parameters():,}"),
        ("layers, heads, width", f"{config.layers}, {config.heads}, {config.width}"),
        ("bands a head", f"{config.d_head // 2}"),
        ("vocabulary, context", f"{config.vocab_size:,}, {config.context}"),
        ("training tokens a run", f"{config.steps * config.batch * config.context:,}"),
        ("tokens held out", f"{Manifest.read(DATA).data['held_out'] * config.context:,}"),
        ("complete seeds", f"{seeds}"),
        ("trained models", f"{len(found.runs) + 1}"),
    ]
    rows = found.table()
    arms = [
        (
            arm,
            f"{row.difference:+.4f}",
            f"{row.low:+.4f} to {row.high:+.4f}" if math.isfinite(row.low) else "none with one seed",
            f"{row.detectable:.4f}" if math.isfinite(row.detectable) else "any",
            f"{row.reached} of {row.seeds}",
            "-" if math.isnan(row.saved) else f"{row.saved:.1%}",
        )
        for arm, row in rows.iterrows()
    ]
    words = "".join(f"- **{arm}**: {row.verdict}.\n" for arm, row in rows.iterrows())
    even = [("original", f"{found.runs[found.runs.arm == 'original'].evenness.mean():.3f}", "-", "-")]
    for arm, row in rows.iterrows():
        mean = found.runs[found.runs.arm == arm].evenness.mean()
        interval = f"{row.evenness_low:+.3f} to {row.evenness_high:+.3f}"
        finite = math.isfinite(row.evenness_low)
        even.append(
            (arm, f"{mean:.3f}", f"{row.evenness:+.3f}", interval if finite else "none with one seed")
        )
    control = [
        (
            f"{arm} - {other}",
            f"{pair.mean:+.4f}",
            f"{pair.interval[0]:+.4f} to {pair.interval[1]:+.4f}",
            f"{pair.detectable:.4f}",
            pair.verdict(),
        )
        for arm, other in combinations(found.arms, 2)
        for pair in [found.paired(arm, against=other)]
    ]
    wide = found.runs.pivot(index="seed", columns="arm", values="loss")
    names = found.asked["arms"]
    losses = [(seed, *(f"{row[arm]:.4f}" for arm in names)) for seed, row in wide.iterrows()]
    return {
        "setting": table(["", "value"], setting),
        "words": words,
        "arms": table(["arm", "difference", "95% interval", "detectable", "reached", "training saved"], arms),
        "control": table(["arms", "difference", "95% interval", "detectable", "in words"], control),
        "evenness": table(["arm", "evenness", "difference", "95% interval"], even),
        "losses": table(["seed", *names], losses),
    }


def figures() -> dict[str, Figure]:
    found = read(DATA)
    differences = {arm: found.paired(arm) for arm in found.arms}
    first = int(found.runs.seed.min())
    drawn = found.arms[0]
    shares = {"before (bootstrap)": found.activation[0, "original"]}
    for arm in found.asked["arms"]:
        each = [v / v.sum(-1, keepdim=True) for (s, a), v in found.activation.items() if a == arm and s > 0]
        shares[arm] = sum(each[1:], each[0]) / len(each)
    return {
        "frequencies-paired": paired_differences(
            {arm: p.differences for arm, p in differences.items()},
            {arm: p.interval for arm, p in differences.items()},
            effect=STUDY,
        ),
        "frequencies-curves": loss_curves(found.curves),
        "frequencies-ladders": frequency_ladders(
            found.inv_freq[first, drawn], found.inv_freq[first, "original"]
        ),
        "frequencies-shares": activation_shares(shares),
    }
