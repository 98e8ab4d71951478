"""The command line: what it prints, writes and refuses. The model is tiny and random."""

import io
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import ropelens as rl
from report_example import example_scores
from ropelens.cli import app
from ropelens.cli.demo import sharpest_table
from ropelens.report import choose_repeat
from ropelens.scores import BandAttribution, BandScores


class Letters:
    """A tokenizer with one token a character."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) % 128 for letter in text]}

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


@pytest.fixture(scope="module")
def tiny():
    """A TransformerBridge of 4 layers x 2 heads x 4 bands."""
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        architectures=["LlamaForCausalLM"],
        attn_implementation="eager",
    )
    model = build_bridge_from_module(
        LlamaForCausalLM(config).eval(), "LlamaForCausalLM", hf_config=config, model_name="tiny"
    )
    model.tokenizer = Letters()
    return model


@pytest.fixture
def run(tiny, monkeypatch):
    monkeypatch.setattr("ropelens.hosts.load.load", lambda name, host: tiny)
    return lambda *args: CliRunner().invoke(app, [str(a) for a in args])


def test_demo_writes_scores_and_a_page(run, tiny, tmp_path: Path) -> None:
    result = run("demo", "--out", tmp_path / "new" / "demo", "--tokens", 160, "--host", "hooked")
    assert result.exit_code == 0, result.output
    out = tmp_path / "new" / "demo"
    assert sorted(path.name for path in out.iterdir()) == [
        "activation.safetensors",
        "attribution.safetensors",
        "entropy.safetensors",
        "index.html",
        "plotly.min.js",
    ]
    entropy = BandScores.load(out / "entropy.safetensors")
    activation = BandScores.load(out / "activation.safetensors")
    attribution = BandAttribution.load(out / "attribution.safetensors")
    assert entropy.values.shape == activation.values.shape == (4, 2, 4)
    assert (entropy.n_tokens, entropy.metric, activation.metric) == (160, "entropy", "activation")
    assert entropy.data == activation.data != ""
    ids = Letters()("\n\n".join(topics[name] for name in sorted(topics)))["input_ids"][:160]
    repeat = choose_repeat(ids)
    assert attribution.query == repeat.query
    assert repeat.length >= 3
    # no other head of the model looks more at what followed the phrase the first time
    looks = [
        rl.band_attribution(tiny, torch.tensor([ids]), layer=x, head=y, query=repeat.query).pattern[
            repeat.earlier + 1
        ]
        for x in range(4)
        for y in range(2)
    ]
    assert attribution.pattern[repeat.earlier + 1].item() == pytest.approx(max(looks).item())
    assert attribution.pattern.sum().item() == pytest.approx(1, abs=1e-6)
    assert "[1/4] loading smollm2-135m as a hooked model" in result.stderr
    assert "100%" in result.stderr  # the bar over layers
    assert "The sharpest heads of each layer" in result.stdout
    assert f"The page is {out / 'index.html'}: open it in a browser" in result.stdout.replace("\n", " ")
    page = (out / "index.html").read_text(encoding="utf-8")
    assert "<dd>ropelens demo --tokens 160 --host hooked</dd>" in page
    assert entropy.data in page
    assert f"The first time it ended at {repeat.earlier}; of all heads, this one" in page


def test_demo_shows_the_head_that_was_asked_for(run, tmp_path: Path) -> None:
    assert run("demo", "--out", tmp_path, "--tokens", 128, "--layer", 3, "--head", 1).exit_code == 0
    attribution = BandAttribution.load(tmp_path / "attribution.safetensors")
    assert (attribution.layer, attribution.head) == (3, 1)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--layer", "4"], "ropelens: expected a layer from 0 to 3, got 4"),
        (["--head", "-1"], "ropelens: expected a head from 0 to 1, got -1"),
        (
            ["--tokens", "300"],
            "ropelens: expected at most 256 tokens, the context of this model, got 300: cut",
        ),
        (["--tokens", "9000000"], "ropelens: expected --tokens of at most "),
        (["--tokens", "5"], "Invalid value for '--tokens': "),
        (["--host", "mine"], "'mine' is not one of 'bridge', 'hooked'."),
    ],
)
def test_bad_arguments_are_one_sentence_and_status_2(run, tmp_path, args: list[str], message: str) -> None:
    result = run("demo", "--out", tmp_path, *args)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_is_refused_before_any_work(run, tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("ropelens.hosts.load.load", lambda name, host: pytest.fail("loaded a model first"))
    result = run("demo", "--out", tmp_path / "file")
    assert result.exit_code == 2
    assert result.stderr.startswith("ropelens: expected --out to be a folder, but ")
    assert result.stderr.endswith("file is a file or lies below one\n")


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (KeyboardInterrupt(), 130, "ropelens: interrupted\n"),
        (OSError("no model\nhere"), 2, "ropelens: no model here\n"),
        (ImportError("please install gguf"), 2, "ropelens: please install gguf\n"),
    ],
)
def test_interruptions_and_missing_models(run, tmp_path, monkeypatch, error, status, message) -> None:
    def fail(name: str, host: str) -> None:
        raise error

    monkeypatch.setattr("ropelens.hosts.load.load", fail)
    result = run("demo", "--out", tmp_path)
    assert result.exit_code == status
    assert result.stderr.endswith(message)
    assert "Traceback" not in result.output


def test_our_own_mistakes_stay_visible(run, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("ropelens.hosts.load.load", lambda name, host: 1 / 0)
    assert isinstance(run("demo", "--out", tmp_path).exception, ZeroDivisionError)


def test_table_names_the_sharpest_heads_of_every_layer() -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(sharpest_table(example_scores("entropy")))
    rows = [line.split() for line in console.export_text().splitlines()]
    # layer 3, head 2: -(320 + ... + 327) over 100 queries; the slowest band lowers it most
    assert ["3", "2", "-25.88", "20k", "13%,", "6.3k", "13%", "1", "-25.08"] in [row[:9] for row in rows]
    assert sum(row[:1] == [str(n)] for n in range(4) for row in rows) == 4


def test_help_reads_like_a_manual_and_loads_nothing_heavy() -> None:
    code = (
        "import sys; from ropelens.cli import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'plotly', 'pandas', 'transformer_lens', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n")
    for part in (
        "Which RoPE frequencies",
        "Examples:",
        "Exit status:",
        "130  interrupted",
        "  demo      Measure",
    ):
        assert part in done.stdout


def test_version_and_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ropelens", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"ropelens {rl.__version__}\n"
