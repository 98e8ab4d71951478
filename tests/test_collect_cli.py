"""`ropelens collect` and `ropelens merge`: what they print, write and refuse. The model is tiny."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from typer.testing import CliRunner

import ropelens as rl
from ropelens.cli import app
from ropelens.scores import BandScores
from ropelens.streaming import run as runs
from test_data import letters

TEXTS = [letter * n for letter, n in zip("abcdefghij", (40, 24, 70, 9, 31, 24, 55, 28, 90, 33), strict=True)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a model of 2 layers, its tokenizer of a token a letter, and ten documents."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny.plain("llama", dtype=torch.float32).save_pretrained(folder / "model")
    letters().save_pretrained(folder / "model")
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return folder


@pytest.fixture(scope="module")
def loaded(folder):
    return rl.load(folder / "model", host="transformers")


@pytest.fixture
def run(folder, loaded, monkeypatch):
    monkeypatch.setattr("ropelens.hosts.load.load", lambda name, **options: loaded)
    data = ["--data", folder / "texts.jsonl", "--model", folder / "model", "--context", 24]

    def invoke(command, *args):
        given = [command, *(data if command == "collect" else []), *args]
        return CliRunner().invoke(app, [str(arg) for arg in given])

    return invoke


def test_collect_writes_scores_and_says_where(run, loaded, tmp_path) -> None:
    result = run("collect", "--out", tmp_path / "new" / "run", "--tokens", 100)
    assert result.exit_code == 0, result.output
    out = tmp_path / "new" / "run"
    assert result.stdout.splitlines()[0].startswith("120 tokens in 5 windows, ")
    assert result.stdout.splitlines()[1:] == [f"  {out / m}.safetensors" for m in ("entropy", "activation")]
    stream = rl.windows([*TEXTS], loaded.tokenizer, context=24)
    again = rl.collect(loaded, stream, tokens=100, progress=False)
    for metric in ("entropy", "activation"):
        assert torch.equal(BandScores.load(out / f"{metric}.safetensors").values, again[metric].values)
    facts = json.loads(run("collect", "--out", out, "--tokens", 100, "--json").stdout)
    assert facts == json.loads((out / "run.json").read_text())
    assert facts["tokens"] == 120
    assert "texts.jsonl" in json.dumps(facts["data"])
    assert str(tmp_path) not in json.dumps(facts)


def test_documents_packed_and_split(run, loaded, tmp_path) -> None:
    tokens = sum(map(len, TEXTS))
    for how, n_windows in (("pack", tokens // 24), ("split", sum(len(text) // 24 for text in TEXTS))):
        facts = json.loads(run("collect", "--out", tmp_path / how, f"--{how}", "--json").stdout)
        assert (facts["windows"], facts["data"]["fit"]) == (n_windows, how)
    assert facts["documents"] == n_windows
    packed = json.loads((tmp_path / "pack" / "run.json").read_text())
    stream = rl.windows([*TEXTS], loaded.tokenizer, context=24, fit="pack")
    assert packed["documents"] == sum(len(window.lengths) for window in stream) > packed["windows"]


def test_shards_and_merge(run, tmp_path) -> None:
    for i in range(2):
        assert run("collect", "--out", tmp_path / f"{i}", "--shard", f"{i}/2").exit_code == 0
    result = run("merge", tmp_path / "0", tmp_path / "1", "-o", tmp_path / "all")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("216 tokens in 9 windows, ")
    assert run("collect", "--out", tmp_path / "one").exit_code == 0
    merged, one = (BandScores.load(tmp_path / name / "entropy.safetensors") for name in ("all", "one"))
    torch.testing.assert_close(merged.values, one.values, rtol=1e-10, atol=0)
    assert (merged.data, merged.n_documents) == (one.data, one.n_documents)
    again = run("merge", tmp_path / "0", tmp_path / "1", "-o", tmp_path / "all")
    assert (again.exit_code, again.stderr) == (
        1,
        f"ropelens: {tmp_path / 'all'} holds a run already: choose another folder to merge into\n",
    )


@pytest.mark.filterwarnings("default::UserWarning")
def test_a_source_that_ends_early_is_a_warning_and_no_failure(run, tmp_path) -> None:
    result = run("collect", "--out", tmp_path, "--tokens", 1000, "--json")
    assert result.exit_code == 0
    told = "ropelens: warning: the data ended after 216 tokens, before the 1,000 that were asked for\n"
    assert result.stderr.endswith(told)
    facts = json.loads(result.stdout)
    assert (facts["tokens"], facts["tokens_asked"], facts["ended_early"]) == (216, 1000, True)


def test_an_interruption_says_how_to_go_on(run, tmp_path, monkeypatch) -> None:
    digest_of = runs.digest_of

    def interrupted(window):
        if window.index == 3:
            signal.raise_signal(signal.SIGINT)
        return digest_of(window)

    monkeypatch.setattr(runs, "digest_of", interrupted)
    result = run("collect", "--out", tmp_path)
    assert result.exit_code == 130
    assert result.stderr.endswith(
        "ropelens: interrupted after 4 windows (96 tokens): run the same again, it goes on from the "
        f"checkpoint in {tmp_path}\n"
    )


@pytest.mark.parametrize(
    ("status", "args", "message"),
    [
        (2, ["--shard", "2/2"], "ropelens: expected --shard I/N with I from 0 to N - 1, as 0/4, got '2/2'\n"),
        (2, ["--shard", "1"], "ropelens: expected --shard I/N with I from 0 to N - 1, as 0/4, got '1'\n"),
        (2, ["--pack", "--split"], "ropelens: expected --pack or --split, not both\n"),
        (
            2,
            ["--metrics", "entropy,magic"],
            "ropelens: expected --metrics with names from entropy, activation, norm_product, fisher, taylor, "
            "got magic\n",
        ),
        (2, ["--metrics", ","], "fisher, taylor, got ,\n"),
        (
            1,
            ["--context", "200"],
            "ropelens: expected windows of at most 128 tokens, the context of this model",
        ),
        (
            1,
            ["--context", "100"],
            "texts.jsonl gave no window of 100 tokens: 10 documents were read and dropped",
        ),
        (1, ["--data", "nowhere.txt"], "ropelens: there is no file or folder nowhere.txt\n"),
        (1, ["--tol", "-1"], "ropelens: window 0: layer 0: expected a positive tolerance, got -1.0"),
    ],
)
def test_what_cannot_be_done_is_one_sentence_and_a_status(run, tmp_path, status, args, message) -> None:
    result = run("collect", "--out", tmp_path / "run", *args)
    assert result.exit_code == status, result.output
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert not list((tmp_path / "run").glob("*.safetensors"))


def test_folder_and_data_are_looked_at_before_the_model(run, tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("ropelens.hosts.load.load", lambda *_, **__: pytest.fail("loaded a model first"))
    result = run("collect", "--out", tmp_path / "file")
    assert result.exit_code == 1
    assert result.stderr.startswith("ropelens: expected a folder to write to, but ")
    result = run("collect", "--out", tmp_path / "run", "--data", "nowhere/*.txt")
    assert result.exit_code == 1
    assert result.stderr == "ropelens: no file matches nowhere/*.txt\n"


@pytest.mark.slow
def test_torchrun_shares_the_windows_out(run, folder, tmp_path) -> None:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"),
        *("-m", "ropelens", "collect", "--data", folder / "texts.jsonl", "--model", folder / "model"),
        *("--context", 24, "--out", tmp_path / "two", "--json"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert (facts["windows"], facts["settings"]["processes"]) == (9, 2)
    assert run("collect", "--out", tmp_path / "one").exit_code == 0
    for metric in ("entropy", "activation"):
        two, one = (BandScores.load(tmp_path / name / f"{metric}.safetensors") for name in ("two", "one"))
        torch.testing.assert_close(two.values, one.values, rtol=1e-10, atol=0)
        assert two.data == one.data


def test_help_is_a_manual_page() -> None:
    for command, parts in (
        (
            "collect",
            ("OUT/run.json", "status 130", "torchrun --nproc-per-node 8", "--checkpoint-every SECONDS"),
        ),
        ("merge", ("Add up the shards of a run.", "-o, --out", "all N of them")),
    ):
        text = CliRunner().invoke(app, [command, "--help"]).stdout
        for part in parts:
            assert part in text
