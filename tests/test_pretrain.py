"""Pretraining and the experiment: the same but for frequencies, resumed exactly, and honest about chance."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoTokenizer
from typer.testing import CliRunner

import ropelens as rl
from pretrain_example import HELD_OUT, MINI, corpus_of, write_text
from ropelens.cli import app
from ropelens.pretrain import ARMS, CONFIGS, Corpus, analyse, experiment, pretrain
from ropelens.pretrain.arms import check_arms, partial_rotary
from ropelens.pretrain.manifest import Manifest
from ropelens.pretrain.training import _arguments, adamw, last_checkpoint, on_one_gpu

QUIET: dict[str, Any] = {"progress": False}
ARMS_OF = ["original", "resampled", "learned"]
ASKED: dict[str, Any] = {"arms": ARMS_OF, "seeds": 1, "held_out": HELD_OUT, **QUIET}
LADDER = rl.Bands.uniform(2, 16, base=10_000.0).inv_freq


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def done(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A finished experiment of three arms and one seed."""
    out, lines = tmp_path_factory.mktemp("experiment"), []
    manifest = experiment(MINI, str(text), out, say=lines.append, **ASKED)
    return SimpleNamespace(out=out, lines=lines, manifest=manifest, corpus=corpus_of(text, out))


def test_arms_differ_in_frequencies_only(done: Any):
    runs = done.manifest.runs
    one, two, three = (runs[f"seed-1/{arm}"] for arm in ASKED["arms"])
    for key in ("weights", "order", "setting", "tokens"):
        assert one[key] == two[key] == three[key]
    assert runs["bootstrap"]["weights"] != one["weights"]
    assert runs["bootstrap"]["order"] != one["order"]
    freq = {arm: torch.tensor(runs[f"seed-1/{arm}"]["inv_freq"]).double() for arm in ASKED["arms"]}
    torch.testing.assert_close(freq["original"], LADDER, rtol=1e-6, atol=0)
    assert set(freq["resampled"].flatten().tolist()) <= set(freq["original"][0].tolist())
    assert not torch.equal(freq["resampled"], freq["original"])
    activation = rl.BandScores.load(done.out / "bootstrap" / "activation.safetensors")
    assert torch.equal(freq["resampled"], rl.resample_frequencies(activation, seed=1))
    assert len({one["loss"], two["loss"], three["loss"]}) == 3


@pytest.mark.parametrize("key", ["weights", "order", "setting"])
def test_a_manifest_of_arms_that_differ_otherwise_is_refused(done: Any, tmp_path: Path, key: str):
    facts = json.loads((done.out / "manifest.json").read_text())
    facts["runs"]["seed-1/resampled"][key] = "another"
    (tmp_path / "manifest.json").write_text(json.dumps(facts))
    with pytest.raises(ValueError, match=f"seed-1/resampled and seed-1/original differ in their {key}"):
        Manifest.read(tmp_path / "manifest.json")


def test_parameters_speed_and_time_are_said_before_it_starts(done: Any):
    n = MINI.n_parameters()
    assert n == sum(p.numel() for p in MINI.build(0).parameters())
    pattern = (
        rf"mini: {n / 1e6:.1f}M parameters; 0.0M tokens in 12 steps a run; [\d,]+ tokens/s in each of 1 "
    )
    assert re.match(pattern + r"process\(es\): about .+ for 4 run\(s\)", done.lines[0])
    assert done.lines[1] == "1/4 bootstrap"


def test_a_finished_experiment_returns_at_once(done: Any, text: Path):
    lines: list[str] = []
    again = experiment(MINI, str(text), done.out, say=lines.append, **ASKED)
    assert lines == []
    assert again.runs == json.loads(json.dumps(done.manifest.runs))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arms": ["original", "shuffled"]}, "an experiment with other arms"),
        ({"config": replace(MINI, lr=1e-3)}, "with other configuration (its lr is 0.01, not 0.001)"),
        ({"source": ["another text"]}, "an experiment with other documents"),
        ({"held_out": 4}, "an experiment with other blocks held out"),
        ({"arms": ["resampled"]}, "expected 'original' and at least one other arm, each once, got resampled"),
        ({"seeds": 0}, "expected at least 1 seed, got 0"),
    ],
)
def test_other_data_arms_or_settings_are_refused(done: Any, text: Path, change: dict[str, Any], message: str):
    arguments = {"config": MINI, "source": str(text), "out": done.out, **ASKED} | change
    with pytest.raises(ValueError, match=re.escape(message)):
        experiment(**arguments)


SLOW = """
import sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
from pretrain_example import MINI, corpus_of
from ropelens.pretrain import training
saved = training.Clock.on_save
def on_save(self, *args, **others):
    saved(self, *args, **others)
    time.sleep(600)
training.Clock.on_save = on_save
corpus = corpus_of(Path({text!r}), Path({out!r}))
training.pretrain(MINI, corpus, {run!r}, seed=1, checkpoints=3, progress=False)
"""


def test_a_run_killed_in_the_middle_of_an_arm_resumes_to_the_same_loss(done: Any, text: Path, tmp_path: Path):
    """Killed once its first checkpoint is there; a later, unfinished one must not be gone on from."""
    run = tmp_path / "run"
    code = SLOW.format(tests=str(Path(__file__).parent), text=str(text), out=str(done.out), run=str(run))
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    deadline = time.monotonic() + 300
    while last_checkpoint(run / "checkpoints") is None:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    last = last_checkpoint(run / "checkpoints")
    assert last is not None
    step = int(last.name.rpartition("-")[2])
    assert 0 < step < MINI.steps
    (run / "checkpoints" / f"checkpoint-{MINI.steps - 1}").mkdir()
    resumed = pretrain(MINI, done.corpus, run, seed=1, checkpoints=3, **QUIET)
    whole = done.manifest.runs["seed-1/original"]
    assert resumed.loss == whole["loss"]
    assert resumed.curve == whole["curve"]
    assert resumed.train == whole["train"]
    assert not (run / "checkpoints").exists()


RANKED = """
import sys
from pretrain_example import HELD_OUT, MINI
from ropelens.cli import app
from ropelens.pretrain import CONFIGS
CONFIGS["tiny-1m"] = MINI
app(["pretrain", "experiment", "tiny-1m", "--held-out", str(HELD_OUT), "--json", *sys.argv[1:]])
"""


@pytest.mark.slow
def test_two_processes_train_and_measure_as_one_does(done: Any, text: Path, tmp_path: Path):
    """Each takes a micro-batch of the two that a batch has; they train as one process that takes both."""
    script, out = tmp_path / "ranked.py", tmp_path / "out"
    script.write_text(RANKED)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", script),
        *("--data", text, "--out", out, "--arms", ",".join(ARMS_OF), "--seeds", 1),
    ]
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    ran = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env=environment, timeout=600
    )
    assert ran.returncode == 0, ran.stderr
    (resampled, learned) = json.loads(ran.stdout)  # printed once
    assert (resampled["arm"], learned["arm"]) == ("resampled", "learned")
    two = Manifest.read(out / "manifest.json")
    assert list(two.runs) == list(done.manifest.runs)
    for name, run in done.manifest.runs.items():
        found = two.runs[name]
        assert (found["weights"], found["order"]) == (run["weights"], run["order"])
        # Means over the same numbers in another order, in float32: a loss has 24 bits.
        for key in ("curve", "train"):
            np.testing.assert_allclose(found[key], run[key], rtol=1e-5, err_msg=f"{name} {key}")
        np.testing.assert_allclose(found["activation"], run["activation"], rtol=1e-4, err_msg=name)


@pytest.mark.parametrize("held_out", [7, 128])
def test_no_block_is_counted_twice(held_out: int, tmp_path: Path):
    args = _arguments(MINI, tmp_path, 0, 1, compile=False, held_out=held_out)
    assert args.per_device_eval_batch_size == {7: 1, 128: 4}[held_out]


def test_a_process_without_torchrun_takes_one_gpu(tmp_path: Path):
    """Eight would take eight micro-batches a step, and as many times the tokens."""
    args = _arguments(MINI, tmp_path, 0, 1, compile=False, held_out=8)
    args._n_gpu = 8
    assert args.train_batch_size == 8 * MINI.micro_batch
    assert on_one_gpu(args).train_batch_size == MINI.micro_batch


def test_losses_are_logged_for_tensorboard(done: Any):
    """Where they outlast the checkpoints; one entry an evaluation."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for name, run in done.manifest.runs.items():
        events = EventAccumulator(str(done.out / name / "tensorboard")).Reload()
        logged = [event.value for event in events.Scalars("eval/loss")]
        np.testing.assert_allclose(logged, [loss for _, loss in run["curve"]], rtol=1e-6)


def test_the_original_frequencies_given_explicitly_train_the_same_way(done: Any, tmp_path: Path):
    explicit = torch.tensor(done.manifest.runs["seed-1/original"]["inv_freq"], dtype=torch.float64)
    trained = pretrain(MINI, done.corpus, tmp_path, seed=1, inv_freq=explicit, **QUIET)
    assert trained.curve == done.manifest.runs["seed-1/original"]["curve"]
    assert trained.train == done.manifest.runs["seed-1/original"]["train"]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"seed": 2}, "data, or order of them"),
        ({"config": replace(MINI, lr=1.0)}, "configuration"),
        ({"inv_freq": LADDER / 2}, "frequencies"),
        ({"learn": "layer"}, "learn"),
    ],
)
def test_a_folder_with_another_training_is_refused(done: Any, change: dict[str, Any], what: str):
    arguments = {"config": MINI, "corpus": done.corpus, "out": done.out / "seed-1" / "original", "seed": 1}
    assert pretrain(**arguments, **QUIET).loss == done.manifest.runs["seed-1/original"]["loss"]
    with pytest.raises(ValueError, match=f"holds a training with another {what}: choose another folder"):
        pretrain(**(arguments | change), **QUIET)


def test_learned_frequencies_move_and_come_back_with_the_model(done: Any):
    found = torch.tensor(done.manifest.runs["seed-1/learned"]["inv_freq"]).double()
    assert (found / LADDER - 1).abs().max() > 1e-3
    model = rl.load(done.out / "seed-1" / "learned" / "model", host="transformers")
    torch.testing.assert_close(rl.Bands.of(model).inv_freq, found, rtol=1e-6, atol=0)
    ids = done.corpus.held_out()
    with torch.no_grad():
        loss = float(model(ids, labels=ids).loss)
    assert loss == pytest.approx(done.manifest.runs["seed-1/learned"]["loss"], abs=1e-5)


def test_a_shared_row_is_one_for_all_layers(done: Any, tmp_path: Path):
    tok = AutoTokenizer.from_pretrained(done.out / "tokenizer")
    short = replace(MINI, tokens=2 * 8 * 32)
    pretrain(short, done.corpus, tmp_path, learn="shared", tokenizer=tok, **QUIET)
    found = rl.Bands.of(rl.load(tmp_path / "model", host="transformers")).inv_freq
    assert torch.equal(found[0], found[1])
    assert not torch.allclose(found, LADDER, rtol=1e-4)


def test_the_analysis_of_the_runs(done: Any):
    found = analyse(done.manifest)
    runs = done.manifest.runs
    row = found.table().loc["resampled"]
    assert row.difference == runs["seed-1/resampled"]["loss"] - runs["seed-1/original"]["loss"]
    assert row.detectable == float("inf")
    assert row.verdict.startswith("not resolvable at this size")
    assert found.curves.groupby("arm").size().eq(12).all()
    assert found.arms == ["resampled", "learned"]
    with pytest.raises(ValueError, match="expected an arm out of resampled, learned, got 'original'"):
        found.paired("original")
    other = runs["seed-1/resampled"]["loss"] - runs["seed-1/learned"]["loss"]
    assert found.paired("resampled", against="learned").differences == (other,)
    with pytest.raises(ValueError, match="expected against= out of original, resampled, learned, got 'none'"):
        found.paired("resampled", against="none")


def test_too_few_data_say_how_many_epochs_it_would_take(done: Any, tmp_path: Path):
    n = done.corpus.n_blocks
    config = replace(MINI, tokens=10 * n * 32)
    message = f"would take {config.steps * 8 / n:.1f} epochs of them: pass repeat=True"
    with pytest.raises(ValueError, match=re.escape(message)):
        pretrain(config, done.corpus, tmp_path, **QUIET)
    with pytest.raises(ValueError, match="expected blocks of 64 tokens, the context of mini, got 32"):
        pretrain(replace(MINI, context=64), done.corpus, tmp_path, repeat=True, **QUIET)


def test_the_order_is_of_whole_epochs_each_shuffled_and_of_the_seed(done: Any):
    n = done.corpus.n_blocks
    order = done.corpus.order(2 * n + 3, seed=1)
    assert len(order) == 2 * n + 3
    for epoch in (order[:n], order[n : 2 * n]):
        assert np.array_equal(np.sort(epoch), np.arange(n))
    assert not np.array_equal(order[:n], order[n : 2 * n])
    assert np.array_equal(order, done.corpus.order(2 * n + 3, seed=1))
    assert not np.array_equal(order, done.corpus.order(2 * n + 3, seed=2))


def test_blocks_are_those_of_the_windows_and_none_is_held_out_and_trained_on(tmp_path: Path):
    """Blocks 0 and 50 are held out of 60; token ids are the number of the block."""
    ids = torch.arange(60)[:, None].expand(60, 4).contiguous()
    corpus = Corpus.of(rl.windows(ids), tmp_path, blocks=58, held_out=2, progress=False)
    assert corpus.held_out()[:, 0].tolist() == [0, 50]
    trained = [int(corpus.block(i)[0]) for i in range(corpus.n_blocks)]
    assert sorted(trained) == sorted({*range(60)} - {0, 50})


def test_blocks_go_on_where_they_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ropelens.pretrain.corpus.PART", 8)
    ids = torch.arange(60)[:, None].expand(60, 4).contiguous()
    Corpus.of(rl.windows(ids), tmp_path / "a", blocks=10, held_out=1, progress=False)
    more = Corpus.of(rl.windows(ids), tmp_path / "a", blocks=38, held_out=2, progress=False)
    once = Corpus.of(rl.windows(ids), tmp_path / "b", blocks=38, held_out=2, progress=False)
    assert more.fingerprint == once.fingerprint
    assert [int(more.block(i)[0]) for i in range(more.n_blocks)] == [*range(1, 40)]
    with pytest.raises(ValueError, match="holds blocks of other documents"):
        Corpus.of(rl.windows(ids + 1), tmp_path / "a", blocks=10, held_out=1, progress=False)


def test_partial_rotary_by_hand():
    found = partial_rotary(replace(MINI, width=80, heads=2), 0.10)
    assert found.shape == (2, 20)
    assert found[0].tolist() == [1.0, 0.01] + [0.0] * 18
    assert (partial_rotary(MINI, 0.75)[1] > 0).tolist() == [True] * 6 + [False] * 2


@pytest.mark.parametrize(
    ("arms", "message"),
    [
        (["original", "better"], "expected arms out of original, resampled, quantile"),
        (["resampled", "shuffled"], "expected 'original' and at least one other arm"),
        (["original", "resampled", "resampled"], "each once"),
    ],
)
def test_arms_that_cannot_be_asked(arms: list[str], message: str):
    check_arms([*ARMS])
    with pytest.raises(ValueError, match=message):
        check_arms(arms)


def test_all_weights_but_embeddings_decay():
    model = MINI.build(0)
    args: Any = SimpleNamespace(weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95, learning_rate=1e-3)
    args.device = torch.device("cpu")
    decayed, free = adamw(model, args).param_groups
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.1, 0.0)
    assert free["params"] == [model.model.embed_tokens.weight]
    assert len(decayed["params"]) + 1 == len([*model.parameters()])


@pytest.mark.slow
def test_the_studys_model_trains():
    """Its parameters by hand; two steps on 64 tokens; AdamW's two moments a parameter and no more."""
    config = CONFIGS["study-100m"]
    per_layer = 4 * 768 * 768 + 3 * 768 * 2048 + 2 * 768
    expected = 50_257 * 768 + 10 * per_layer + 768
    assert config.n_parameters() == expected == 109_392_384
    assert config.steps * config.batch * config.context == pytest.approx(2e9, rel=3e-4)
    model = config.build(0)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    args: Any = SimpleNamespace(weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95, learning_rate=6e-4)
    args.device = torch.device("cpu")
    optimizer, losses = adamw(model, args), []
    ids = torch.randint(50_257, (1, 64), generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        found = model(ids, labels=ids)
        assert found.logits.shape == (1, 64, 50_257)
        found.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(found.loss.detach()))
    assert losses[0] == pytest.approx(np.log(50_257), abs=0.5)
    assert losses[1] < losses[0] - 0.5
    moments = [s for state in optimizer.state.values() for s in state.values() if s.numel() > 1]
    assert sum(s.numel() for s in moments) == 2 * expected


@pytest.mark.parametrize(
    ("status", "arguments", "message"),
    [
        (
            2,
            ["run", "huge", "--data", "x.txt"],
            "expected a configuration out of study-100m, small-10m, tiny-1m, got huge",
        ),
        (1, ["run", "tiny-1m", "--data", "no-such.txt"], "there is no file or folder no-such.txt"),
        (1, ["experiment", "tiny-1m", "--data", "x.txt", "--arms", "original"], "at least one other arm"),
        (
            2,
            ["experiment", "tiny-1m", "--data", "x.txt", "--arms", "magic"],
            "expected --arms with names from",
        ),
    ],
)
def test_the_command_says_what_is_wrong(status: int, arguments: list[str], message: str, tmp_path: Path):
    found = CliRunner().invoke(app, ["pretrain", *arguments, "--out", str(tmp_path / "out")])
    assert found.exit_code == status
    assert message in found.stderr


def test_the_command_prints_json_and_nothing_else(monkeypatch, tmp_path: Path):
    table = pd.DataFrame(
        {"difference": [-0.5], "verdict": ["seen"]}, index=pd.Index(["shuffled"], name="arm")
    )

    def train_on(*args, **options):
        print("speed and projected time")
        return SimpleNamespace(loss=2.5, tokens=10, seconds=1.5)

    def experiment(*args, say, **options):
        say("1/2 original")

    monkeypatch.setattr("ropelens.pretrain.train_on", train_on, raising=False)
    monkeypatch.setattr("ropelens.pretrain.experiment", experiment, raising=False)
    monkeypatch.setattr(
        "ropelens.pretrain.analyse", lambda manifest: SimpleNamespace(table=lambda: table), raising=False
    )
    given = ["tiny-1m", "--data", "x.txt", "--out", str(tmp_path), "--json"]
    done = CliRunner().invoke(app, ["pretrain", "run", *given])
    assert json.loads(done.stdout) == {
        "loss": 2.5,
        "tokens": 10,
        "seconds": 1.5,
        "model": str(tmp_path / "model"),
    }
    assert "projected time" in done.stderr
    done = CliRunner().invoke(app, ["pretrain", "experiment", *given])
    assert json.loads(done.stdout) == [{"arm": "shuffled", "difference": -0.5, "verdict": "seen"}]
    assert "1/2 original" in done.stderr
