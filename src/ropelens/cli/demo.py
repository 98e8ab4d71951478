"""`ropelens demo`: all heads of SmolLM2-135M, in the terminal and as a page."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ropelens.cli.sentence import one_sentence

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor

    from ropelens.hosts import Hook, LensHost
    from ropelens.report import Repeat
    from ropelens.scores import BandScores

MODEL = "smollm2-135m"
HostName = Literal["bridge", "hooked"]


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the pages and the scores.")] = Path("results/demo"),
    tokens: Annotated[int, typer.Option(min=128, help="Length of the text, in tokens.")] = 2048,
    host: Annotated[HostName, typer.Option(help="Which of TransformerLens's models.")] = "bridge",
    layer: Annotated[int | None, typer.Option(help="Layer of the attention to show.")] = None,
    head: Annotated[int | None, typer.Option(help="Head of the attention to show.")] = None,
) -> None:
    """Measure all heads of SmolLM2-135M on Python's own documentation.

    Prints the sharpest heads of each layer with the wavelengths that sharpen them, and writes
    the explorer (index.html opens in any browser; it needs no network) with entropy.safetensors,
    activation.safetensors, attribution.safetensors and heads.csv beside it.

    Among the attention shown is that of the token where the longest phrase ends that the text
    repeats, in the head that looks most at what followed the phrase the first time.
    """
    with one_sentence():
        _demo(out, tokens, host, layer, head)


def _demo(out: Path, n_tokens: int, host_name: HostName, layer: int | None, head: int | None) -> None:
    from ropelens.report.site import check_replaceable

    check_replaceable(out)  # now, rather than after minutes of work
    _say(f"loading {MODEL} as a {host_name} model, and checking that its attention can be rebuilt")
    import torch

    from ropelens.hooks import observe
    from ropelens.hosts import LensHost, host_of
    from ropelens.hosts.load import load
    from ropelens.hosts.tokens import tokens_of
    from ropelens.measure import band_attribution
    from ropelens.plots.scores import check_index
    from ropelens.report import Results, choose_head, choose_repeat, complete, write_report

    model = load(MODEL, host=host_name)
    seen_by = host_of(model)
    assert isinstance(seen_by, LensHost)  # both that it offers are
    check_index("layer", layer, seen_by.n_layers)
    n_heads = seen_by.certificate.layers[0].n_heads
    check_index("head", head, n_heads)
    ids = documentation(model.tokenizer, n_tokens)
    text = tokens_of(seen_by, torch.tensor([ids]))

    _say(f"entropy and activation of every band, on {n_tokens:,} tokens")
    repeat = choose_repeat(ids)
    followed = torch.zeros(seen_by.n_layers, n_heads, dtype=torch.float64)
    looks = seen_by.attached(_attention_hooks(seen_by, repeat.query, repeat.earlier + 1, followed))
    with torch.no_grad(), looks, observe(model, ("entropy", "activation"), progress=True) as seen:
        seen_by.run(text.ids, None, logits=False)
    entropy = seen.result("entropy", data=text.digest)
    activation = seen.result("activation", data=text.digest)

    heads = "all heads" if layer is None and head is None else "the heads asked for"
    layer, head = choose_head(followed, layer, head)
    _say(f"attention of layer {layer}, head {head} at token {repeat.query}, by band")
    attribution = band_attribution(model, text.ids, layer=layer, head=head, query=repeat.query)
    attribution = replace(attribution, settings=attribution.settings | {"why": _why(repeat, heads)})

    results = Results(
        name="SmolLM2-135M",
        scores={"entropy": entropy, "activation": activation},
        attributions=[attribution],
        load_as=MODEL,
    )
    results = complete(results, model, text.ids, say=_say, progress=True)
    _say("writing the pages")
    saved = {"entropy": entropy, "activation": activation, "attribution": attribution}
    page = write_report(
        out,
        results,
        facts=_provenance(entropy, host_name, n_tokens),
        command=f"ropelens demo --tokens {n_tokens} --host {host_name}",
        keep={f"{name}.safetensors": result for name, result in saved.items()} | {"heads.csv": results.heads},
    )
    _print(sharpest_table(entropy))
    typer.echo(f"The explorer is {page}: open it in a browser, it needs no network.")
    typer.echo(
        f"The scores beside it load with ropelens.BandScores.load({str(out / 'entropy.safetensors')!r})."
    )


def _attention_hooks(host: LensHost, query: int, key: int, into: Tensor) -> list[tuple[str, Hook]]:
    """Hooks that write the attention from one query to one key, for every layer and head."""

    def hook_of(layer: int) -> Hook:
        def keep(scores: Tensor, hook: object) -> None:
            into[layer] = scores[0, :, query].detach().double().softmax(-1)[:, key].cpu()

        return keep

    return [(host.points(layer)[2], hook_of(layer)) for layer in range(host.n_layers)]


def _why(repeat: Repeat, heads: str) -> str:
    if not repeat.length:
        return ""
    return (
        f"Here ends the longest phrase that the text repeats, {repeat.length} tokens. The first time it "
        f"ended at {repeat.earlier:,}; of {heads}, this one looks most at what followed there, at "
        f"{repeat.earlier + 1:,}."
    )


def documentation(tokenizer: object, n_tokens: int) -> list[int]:
    """The first tokens of Python's own documentation: its topics, in sorted order."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids: Sequence[int] = tokenizer(text[: 12 * n_tokens])["input_ids"]  # pyright: ignore
    if len(ids) < n_tokens:
        raise ValueError(
            f"expected --tokens of at most {len(ids):,}, the length of the text, got {n_tokens:,}"
        )
    return list(ids[:n_tokens])


def _provenance(entropy: BandScores, host_name: HostName, n_tokens: int) -> dict[str, str]:
    via = "TransformerBridge" if host_name == "bridge" else "HookedTransformer"
    python = ".".join(map(str, sys.version_info[:3]))
    libraries = ", ".join(f"{name} {version(name)}" for name in ("transformer-lens", "transformers", "torch"))
    return {
        "Model": f"SmolLM2-135M-Instruct through {via}",
        "Weights": f"embedding {entropy.model.get('embedding', 'unknown')}",
        "Text": f"the first {n_tokens:,} tokens of pydoc_data.topics (Python {python}), sorted",
        "Text, digest": entropy.data,
        "Versions": f"ropelens {version('ropelens')}, {libraries}",
    }


def sharpest_table(entropy: BandScores, n_heads: int = 2) -> Table:
    """Returns a table of each layer's heads with the lowest entropy, and what lowers it."""
    from rich import box
    from rich.table import Table

    from ropelens.plots.style import tokens_label
    from ropelens.report import lowest_heads

    table = Table(
        title="The sharpest heads of each layer",
        caption="nats: entropy below even attention, per query. wavelengths: of the bands that lower "
        "it most, in tokens, with their share of all lowering.",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        caption_justify="left",
    )
    table.add_column("layer", justify="right")
    for _ in range(min(n_heads, entropy.values.shape[1])):
        table.add_column("head", justify="right", style="bold")
        table.add_column("nats", justify="right")
        table.add_column("wavelengths")
    for layer in range(entropy.bands.n_layers):
        cells = [str(layer)]
        for found in lowest_heads(entropy, n_heads, layer=layer, n_carriers=2):
            carriers = ", ".join(f"{tokens_label(w)} {share:.0%}" for w, share in found.carriers)
            cells += [str(found.head), f"{found.drop:.2f}", carriers]
        table.add_row(*cells)
    return table


def _print(table: Table) -> None:
    from rich.console import Console

    Console().print(table)


def _say(doing: str) -> None:
    typer.echo(doing, err=True)
