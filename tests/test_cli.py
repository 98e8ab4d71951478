"""The command line: what it prints, writes and refuses. The model is tiny and random."""

import io
import json
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
import typer
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

    all_special_ids = ()

    def __len__(self) -> int:
        return 128

    def encode(self, text: str) -> list[int]:
        return self(text)["input_ids"]

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
    assert {"activation.safetensors", "attribution.safetensors", "entropy.safetensors", "heads.csv"} <= {
        path.name for path in out.iterdir()
    }
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
    assert "loading smollm2-135m as a hooked model" in result.stderr
    assert "100%" in result.stderr  # the bar over layers
    assert "The sharpest heads of each layer" in result.stdout
    assert f"The explorer is {out / 'index.html'}: open it in a browser" in result.stdout.replace("\n", " ")
    page = (out / "index.html").read_text(encoding="utf-8")
    assert "<dd>ropelens demo --tokens 160 --host hooked</dd>" in page
    assert entropy.data in page
    attention = (out / "data" / "attention.js").read_text(encoding="utf-8")
    assert f"The first time it ended at {repeat.earlier}; of all heads, this one" in attention


def test_demo_shows_the_head_that_was_asked_for(run, tmp_path: Path) -> None:
    assert run("demo", "--out", tmp_path, "--tokens", 128, "--layer", 3, "--head", 1).exit_code == 0
    attribution = BandAttribution.load(tmp_path / "attribution.safetensors")
    assert (attribution.layer, attribution.head) == (3, 1)


@pytest.mark.parametrize(
    ("status", "args", "message"),
    [
        (1, ["--layer", "4"], "ropelens: expected a layer from 0 to 3, got 4"),
        (1, ["--head", "-1"], "ropelens: expected a head from 0 to 1, got -1"),
        (
            1,
            ["--tokens", "300"],
            "ropelens: expected at most 256 tokens, the context of this model, got 300: cut",
        ),
        (1, ["--tokens", "9000000"], "ropelens: expected --tokens of at most "),
        (2, ["--tokens", "5"], "Invalid value for '--tokens': "),
        (2, ["--host", "mine"], "'mine' is not one of 'bridge', 'hooked'."),
    ],
)
def test_bad_arguments_are_one_sentence_and_a_status(run, tmp_path, status: int, args, message: str) -> None:
    result = run("demo", "--out", tmp_path, *args)
    assert result.exit_code == status
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_is_refused_before_any_work(run, tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("ropelens.hosts.load.load", lambda name, host: pytest.fail("loaded a model first"))
    result = run("demo", "--out", tmp_path / "file")
    assert result.exit_code == 1
    assert result.stderr.startswith("ropelens: expected --out to be a folder, but ")
    assert result.stderr.endswith("file is a file: choose another\n")


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (KeyboardInterrupt(), 130, "ropelens: interrupted\n"),
        (OSError("no model\nhere"), 1, "ropelens: no model here\n"),
        (ImportError("please install gguf"), 1, "ropelens: please install gguf\n"),
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


def test_report_of_a_folder_says_what_is_there_and_what_is_missing(run, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    example_scores("entropy").save(folder / "entropy.safetensors")
    result = run("report", folder, "-o", tmp_path / "site")
    assert result.exit_code == 0, result.output
    said = result.stdout.replace("\n", " ")
    assert "Found entropy on 100 tokens. Not there: activation (ropelens collect" in said
    assert f"The explorer is {tmp_path / 'site' / 'index.html'}: open it in a browser" in said
    assert (tmp_path / "site" / "head.html").exists()


def test_report_of_a_model_measures_it_and_keeps_what_it_measured(run, tmp_path: Path) -> None:
    result = run("report", "tiny", "-o", tmp_path / "site", "--tokens", 128, "--name", "Tiny")
    assert result.exit_code == 0, result.output
    out = tmp_path / "site"
    kept = {path.name for path in out.iterdir() if path.suffix in (".safetensors", ".csv")}
    assert kept == {"entropy.safetensors", "activation.safetensors", "heads.csv"}
    attention = (out / "data" / "attention.js").read_text()
    assert "ropelens report tiny --tokens 128 --name Tiny -o" in attention
    assert "The keeper of the light" in "".join(json.loads(attention[25:-3])["texts"][0])
    again = run("report", out, "--model", "tiny", "-o", tmp_path / "again")  # what it kept is a run
    assert again.exit_code == 0, again.output


@pytest.mark.parametrize(
    ("args", "status", "message"),
    [
        (["{}", "-o", "{}/site"], 1, "ropelens: expected results in {}, found none: make some with ropelens"),
        (
            ["{}/no", "--model", "x", "-o", "{}/site"],
            2,
            "ropelens: expected a folder of results with --model",
        ),
        (["{}", "-o", "{}"], 1, "ropelens: expected --out to be a new folder, an empty one or a report, got"),
        (["{}", "-o", "{}/notes"], 1, "ropelens: expected --out to be a folder, but {}/notes is a file"),
    ],
)
def test_report_refuses_in_one_sentence(run, tmp_path: Path, args, status: int, message: str) -> None:
    (tmp_path / "notes").write_text("mine")
    result = run("report", *(arg.replace("{}", str(tmp_path)) for arg in args))
    assert result.exit_code == status
    assert message.replace("{}", str(tmp_path)) in result.stderr
    assert "Traceback" not in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


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
        "Files:",
        "For scripts:",
        "Exit status:",
        "  1    a file, a model or the data",
        "130  interrupted",
        "  demo      Measure",
    ):
        assert part in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 110


def commands() -> dict[str, typer.core.TyperCommand]:
    """Every command by its name, as "collect" or "pretrain run"."""

    def below(group, before: str):
        for name, command in group.commands.items():
            if hasattr(command, "commands"):
                yield from below(command, f"{before}{name} ")
            else:
                yield before + name, command

    return dict(below(typer.main.get_command(app), ""))


COMMANDS = commands()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_manual_page_and_something_for_scripts(name: str) -> None:
    done = CliRunner().invoke(app, [*name.split(), "--help"])
    assert done.exit_code == 0
    command = COMMANDS[name]
    options = {option for parameter in command.params for option in parameter.opts}
    assert options & {"--json", "--out"}, "neither JSON nor files"
    about = (command.help or "").strip()
    assert about.splitlines()[0].endswith("."), "the list of commands shows its first line"
    assert len(about.splitlines()) > 2
    for parameter in command.params:
        assert getattr(parameter, "help", "") or parameter.name == "help", parameter.name
    page = CliRunner().invoke(app, ["--help"]).stdout
    assert f"ropelens {name.split()[0]} " in page, "the manual page has an example of each command"


def complete(line: str) -> list[str]:
    words = line.split(" ")
    environment = {
        "_ROPELENS_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
    }
    return CliRunner().invoke(app, prog_name="ropelens", env=environment).stdout.split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ropelens col", ["collect"]),
        ("ropelens collect --host ", ["transformers", "bridge", "hooked"]),
        ("ropelens collect --metrics ", ["entropy", "activation", "norm_product", "fisher", "taylor"]),
        ("ropelens collect --metrics entropy,f", ["entropy,fisher"]),
        ("ropelens collect --model attn", ["attn-only-1l", "attn-only-2l"]),
        ("ropelens collect --dtype b", ["bfloat16"]),
        ("ropelens inspect sm", ["smollm2-135m"]),
        ("ropelens ablate --scopes layer,h", ["layer,head"]),
        ("ropelens ablate --mode d", ["derotate"]),
        ("ropelens lesion --bands slow", ["slowest:20%"]),
        ("ropelens lesion --target q", ["queries"]),
        ("ropelens pretrain e", ["experiment"]),
        ("ropelens pretrain run s", ["study-100m", "small-10m"]),
        ("ropelens pretrain experiment --arms original,learned-", ["original,learned-shared"]),
        ("ropelens inspect ./no-name-of-ours", []),  # the shell completes files
    ],
)
def test_the_shell_completes(line: str, expected: list[str]) -> None:
    assert complete(line) == expected


def test_completion_scripts_are_shown_for_every_shell(monkeypatch) -> None:
    for shell in ("bash", "zsh", "fish"):
        monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
        done = subprocess.run(
            [sys.executable, "-m", "ropelens", "--show-completion", shell], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert "_ROPELENS_COMPLETE=complete_" in done.stdout


def test_values_that_complete_are_those_that_are_known() -> None:
    from ropelens.cli import values
    from ropelens.hooks import ACCUMULATORS
    from ropelens.hosts.load import TEACHING
    from ropelens.pretrain import ARMS, CONFIGS

    assert tuple(ARMS) == values.ARMS
    assert tuple(CONFIGS) == values.CONFIGS
    assert (*ACCUMULATORS, "fisher", "taylor") == values.METRICS
    assert set(TEACHING) < set(values.MODELS)


@pytest.mark.parametrize(
    ("args", "status"),
    [
        (["--help"], 0),
        (["nonsense"], 2),
        (["collect"], 2),  # options are missing
        (["inspect", "no/such/model"], 1),
        (["merge", "no-such-folder", "-o", "new"], 1),
        (["lesion", "--layers", "x", "-o", "new"], 2),
        (["pretrain", "run", "huge", "--data", "x", "-o", "new"], 2),
    ],
)
def test_exit_statuses(args: list[str], status: int, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, args)
    assert done.exit_code == status, done.output
    assert "Traceback" not in done.output
    assert not list(tmp_path.iterdir())


def test_version_and_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ropelens", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"ropelens {rl.__version__}\n"
