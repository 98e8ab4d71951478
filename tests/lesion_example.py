"""A tokenizer of 61 words for the tiny models, and a small sweep worked out by hand."""

from __future__ import annotations

from typing import Any

import tiny

from ropelens.lesions.results import FORMAT, LesionResults

HOSTILE = "<img src=x onerror=\"document.title='owned'\">"
TEMPLATE = (
    "{% for m in messages %}{{ 'w58 ' if m['role'] == 'user' else 'w59 ' }}{{ m['content'] + ' ' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}w60{% endif %}"
)


def tokenizer(chat: bool = True) -> Any:
    """Words w3 to w60 by number; all others are w0, and token 2 ends a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"w0": 0, "<s>": 1, "</s>": 2} | {f"w{n}": n for n in range(3, tiny.VOCAB)}
    inner = Tokenizer(models.WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    found = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", unk_token="w0")
    found.chat_template = TEMPLATE if chat else None
    return found


def run(layers: list[int], bands: str, std: float, seed: int, loss: float | None, **changes: Any) -> dict:
    tokens = changes.pop("tokens", ["the ", "cat ", f"{std:g}"])
    readings = {"n_tokens": len(tokens), "repeats": 0.0, "surprising": 0.0, **changes.pop("readings", {})}
    return {
        "task": "tell",
        "kind": "continuation",
        "layers": layers,
        "bands": bands,
        "target": "weights",
        "std": std,
        "seed": seed,
        "text": "".join(tokens),
        "loss": loss,
        "readings": readings,
        "introspection": {"text": "Yes.", "verdict": "yes"},
        "correction": {"text": "the cat", "score": 0.5, "before": 0.25},
        "tokens": tokens,
        "ids": list(range(len(tokens))),
        "losses": [1.0] * len(tokens),
        "seconds": 1.0,
        **changes,
    }


def results(runs: list[dict]) -> LesionResults:
    header = {
        "lesions": FORMAT,
        "name": "tiny <model>",
        "model": {"shape": [9, 1, 1, 8], "embedding": "ab", "signature": [1.0] * 9},
        "host": "transformers",
        "dtype": "float32",
        "settings": {
            "target": "weights",
            "limit": 4.0,
            "max_repeats": 0.8,
            "max_tokens": 3,
            "answer_tokens": 3,
            "temperature": 0,
            "lift": False,
        },
        "tasks": [{"name": "tell", "kind": "continuation", "prompt": f"Tell {HOSTILE}"}],
        "versions": {"ropelens": "0"},
    }
    return LesionResults(header, tuple(runs))


SLOW, FAST = "slowest:20%", "fastest:20%"


def example() -> LesionResults:
    """Layers 0, 1 and 8: losses are 1 + std * (3 - seed) / 2 times a factor of the layer."""
    healthy = run([], "", 0.0, 0, 1.0, tokens=["the ", "cat ", "sat"])
    runs = [healthy]
    for layer, bands, factor in ((0, SLOW, 0.5), (1, SLOW, 1.0), (8, SLOW, 2.0), (8, FAST, 0.01)):
        for std in (1.0, 2.0):
            for seed in (0, 1, 2):
                loss = 1 + factor * std * (1 + (seed - 1) / 10)
                tokens = ["the ", HOSTILE, "</script>", f" {std:g}"] if layer == 1 else None
                given = {"tokens": tokens, "losses": [0.5, 9.0, 6.0, 0.1]} if tokens else {}
                runs.append(run([layer], bands, std, seed, loss, **given))
    return results(runs)
