"""What SmolLM2-135M does without some of its bands. The data are those of `make ablation-study`."""

from __future__ import annotations

import pandas as pd
from common import DOCS, table
from plotly.graph_objects import Figure
from safetensors.torch import load_file

import ropelens as rl
from ropelens.plots.ablation import ablation_curves, scatter_of

PAGE = DOCS / "results" / "ablation.md"
DATA = DOCS / "data" / "ablation"
MISSING = "Not recorded yet: `make ablation-study` goes on.\n"


def curve(name: str) -> rl.AblationCurve | None:
    path = DATA / f"{name}.safetensors"
    return rl.AblationCurve.load(path) if path.exists() else None


def few(found: rl.AblationCurve) -> bool:
    """Whether there are too few points for a curve."""
    return len({point.fraction for point in found.points}) < 4


def tables() -> dict[str, str]:
    made = {"thirds": thirds(), "losses": losses(), "areas": areas(), "paired": paired(), "heads": heads()}
    made |= {"agreement": agreement(), "cuts": cuts(), "text": text()}
    return made | {"groups": groups(), "ranks": ranks()}


def text() -> str:
    whole = curve("thirds-zero")
    assert whole is not None
    loss, error = whole.baseline
    n = int(whole.counts.sum())
    return (
        f"{len(whole.documents)} documents, {n:,} predicted tokens; with nothing removed the loss is "
        f"{loss:.3f} ± {error:.3f} nats a token (standard error over documents).\n"
    )


def thirds() -> str:
    """The rise of the loss without half of the bands of a third of the layers."""
    rows = []
    for half, name in (("faster", "thirds"), ("slower", "slow")):
        modes = [curve(f"{name}-{mode}") for mode in ("zero", "derotate")]
        if any(mode is None for mode in modes):
            continue
        rises = [mode.rises().set_index("score") for mode in modes if mode is not None]
        for third in rises[0].index:
            cells = [f"{r['rise'][third]:.3f} ± {r['stderr'][third]:.3f}" for r in rises]
            rows.append([f"{half} half, {third} layers", *cells])
    return table(["", "zeroed", "derotated"], rows)


def losses() -> str:
    found = curve("curve")
    if found is None:
        return MISSING
    frame = found.to_frame()
    wide = frame.pivot(index="score", columns="fraction", values="loss").loc[frame["score"].unique()]
    errors = frame.pivot(index="score", columns="fraction", values="stderr")
    rows = [
        [score, *(f"{wide[f][score]:.2f} ± {errors[f][score]:.2f}" for f in wide.columns)]
        for score in wide.index
    ]
    return table(["score", *(f"{f:.0%}" for f in wide.columns)], rows)


def areas() -> str:
    found = curve("curve")
    if found is None or few(found):
        return MISSING
    area = found.area().set_index("score")
    gone = found.removable().pivot(index="score", columns="rise", values="fraction")
    ends = found.removable().pivot(index="score", columns="rise", values="ends")
    rows = []
    for score in area.index:
        cells = [f"{'over ' if ends[r][score] else ''}{gone[r][score]:.0%}" for r in gone.columns]
        rows.append([score, f"{area['area'][score]:.3f} ± {area['stderr'][score]:.3f}", *cells])
    upto = f"{area['upto'].max():.0%}"
    return table(["score", f"area to {upto}", *(f"+{r:g} nats" for r in gone.columns)], rows)


def paired() -> str:
    """Activation against every other score, on the same documents."""
    found = curve("curve")
    if found is None:
        return MISSING
    names = list(dict.fromkeys(point.score for point in found.points))
    seeds = [name for name in names if name.startswith("random")]
    others: list[tuple[str, str | list[str]]] = [
        (name, name) for name in names if name != "activation" and name not in seeds
    ]
    others.append((f"random, {len(seeds)} seed{'s' if len(seeds) > 1 else ''}", seeds))
    rows = []
    for label, other in others:
        frame = found.paired("activation", other)
        for row in frame[frame["fraction"] > 0].itertuples():
            interval = f"{row.low:+.3f} to {row.high:+.3f}"
            rows.append([label, f"{row.fraction:.0%}", f"{row.difference:+.3f}", interval])
    return table(["activation minus", "removed", "nats a token", "95% interval"], rows)


def heads() -> str:
    found = curve("heads")
    if found is None:
        return MISSING
    frame = found.to_frame()
    wide = frame.pivot(index="score", columns="fraction", values="loss")
    rows = [[score, *(f"{wide[f][score]:.2f}" for f in wide.columns)] for score in wide.index]
    return table(["score, within each head", *(f"{f:.0%}" for f in wide.columns)], rows)


def agreement() -> str:
    path = DATA / "agreement.csv"
    if not path.exists():
        return MISSING
    frame = pd.read_csv(path)
    rows = []
    for (a, b), pair in frame.groupby(["a", "b"], sort=False):
        whole, layers = pair[pair["layer"].isna()].iloc[0], pair[pair["layer"].notna()]
        interval = f"{whole.r2:.3f} ({whole.r2_low:.3f} to {whole.r2_high:.3f})"
        spread = f"{layers['r2'].min():.2f} to {layers['r2'].max():.2f}"
        rows.append([f"{a}, {b}", interval, f"{whole.spearman:.3f}", spread])
    return table(["scores", "R² (95% over heads)", "Spearman", "R² of single layers"], rows)


def cuts() -> str:
    found = curve("cuts")
    if found is None:
        return MISSING
    frame = found.rises()
    rows = [
        [row.score, f"{row.fraction:.0%}", f"{row.rise:.3f} ± {row.stderr:.3f}"] for row in frame.itertuples()
    ]
    return table(["bands without rotation", "share", "rise (nats a token)"], rows)


def groups() -> str:
    """The loss without the heads of one area, beside as many at random."""
    found = curve("areas")
    if found is None:
        return MISSING
    sizes = pd.read_csv(DATA / "areas.csv")["area"].value_counts()
    rises = found.rises().set_index("score")
    rows = []
    for area in sorted(sizes.index):
        name = f"area {area}"
        drawn = [other for other in rises.index if other.startswith(f"{name}, random")]
        row = found.paired(name, drawn).iloc[-1]
        rows.append(
            [
                str(area),
                sizes[area],
                f"{rises['rise'][name]:.2f} ± {rises['stderr'][name]:.2f}",
                f"{rises['rise'][drawn].mean():.2f}",
                f"{row['difference']:+.2f} ({row['low']:+.2f} to {row['high']:+.2f})",
            ]
        )
    return table(
        ["area", "heads", "rise without it", "without as many at random", "difference, 95% interval"], rows
    )


def ranks() -> str:
    """Spearman's correlation of each score with what single bands' removal does, by head."""
    path = DATA / "ranks.csv"
    if not path.exists():
        return MISSING
    frame = pd.read_csv(path)
    names = list(frame["score"].unique())
    wide = frame.pivot(index=["layer", "head"], columns="score", values="spearman")
    rows = [
        [f"{layer}.{head}", *(f"{row[name]:+.2f}" for name in names)]
        for (layer, head), row in wide.iterrows()
    ]
    return table(["head", *names], rows)


def figures() -> dict[str, Figure]:
    made = {}
    if (found := curve("curve")) is not None and not few(found):
        made["ablation"] = ablation_curves(found.to_frame())
    path = DATA / "importance.safetensors"
    if path.exists():
        importance = load_file(path)
        made["ablation_agreement"] = scatter_of(
            importance["activation"], importance["entropy"], ("activation", "entropy")
        )
    return made
