"""What the paths of the attention-only teaching models contribute: from `tools/teaching_models.py paths`."""

from __future__ import annotations

import pandas as pd
from common import DOCS, TEACHING_NAMES, table
from plotly.graph_objects import Figure

PAGE = DOCS / "results" / "paths.md"
DATA = DOCS / "data" / "paths"
TEXTS = ("prose", "repeated")
WORDS = ("the direct path", "paths through one head", "paths through two heads")


def read(kind: str) -> pd.DataFrame:
    return pd.read_csv(DATA / f"{kind}.csv")


def tables() -> dict[str, str]:
    return {
        "orders": orders(read("orders")),
        "layers": by_text(
            read("layers"),
            ["layer", "order"],
            lambda r: f"{r.order} head{'s' * (r.order > 1)}, the last in layer {r.layer}",
        ),
        "heads": heads(read("heads")),
        "virtual": by_text(
            read("virtual"),
            ["first_layer", "first_head", "layer", "head"],
            lambda r: f"{r.first_layer}.{r.first_head}, then {r.layer}.{r.head}",
        ),
        "bigrams": bigrams(read("bigrams")),
    }


def with_error(mean: float, error: float) -> str:
    return f"{mean:.3f} ± {error:.3f}"


def orders(rows: pd.DataFrame) -> str:
    lines = []
    for (name, order), part in rows.groupby(["model", "order"]):
        both = part.set_index("text").loc[list(TEXTS)]
        cells = [
            cell
            for r in both.itertuples()
            for cell in (f"{r.loss:.3f}", with_error(r.marginal, r.stderr) if order else "")
        ]
        lines.append([f"{TEACHING_NAMES[name]}: {WORDS[order]}", *cells])
    header = ["with, in turn", "prose", "which changes it by", "repeated", "which changes it by"]
    return table(header, lines)


def by_text(rows: pd.DataFrame, keys: list[str], say) -> str:
    lines = []
    for (name, *_), part in rows.groupby(["model", *keys]):
        both = part.set_index("text").loc[list(TEXTS)]
        first = next(both.itertuples())
        cells = [with_error(r.importance, r.stderr) for r in both.itertuples()]
        lines.append([f"{TEACHING_NAMES[name]}: {say(first)}", *cells])
    return table(["without", "prose", "repeated"], lines)


def heads(rows: pd.DataFrame) -> str:
    lines = []
    for (name, layer, head), part in rows.groupby(["model", "layer", "head"]):
        both = part.set_index("text").loc[list(TEXTS)]
        cells = [with_error(r.importance, r.stderr) for r in both.itertuples()]
        lines.append(
            [
                f"{TEACHING_NAMES[name]}: {layer}.{head}",
                *cells,
                *(f"{r.positional:.2f}" for r in both.itertuples()),
            ]
        )
    return table(["without", "prose", "repeated", "positional, prose", "positional, repeated"], lines)


def bigrams(rows: pd.DataFrame) -> str:
    columns = ("unigram", "token_1", "bigram", "token_2", "direct", "correlation")
    lines = [[TEACHING_NAMES[r["model"]], *(f"{r[c]:.2f}" for c in columns)] for _, r in rows.iterrows()]
    header = [
        "",
        "unigram entropy",
        "loss, token 1",
        "bigram entropy",
        "loss, token 2",
        "direct path",
        "correlation",
    ]
    return table(header, lines)


def figures() -> dict[str, Figure]:
    return {}
