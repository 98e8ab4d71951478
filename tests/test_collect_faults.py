"""What goes wrong in runs of days: kills, full disks, damaged files, another run's folder."""

import multiprocessing
import os
import resource
import signal
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import pytest
import tiny
import torch

import ropelens as rl
from ropelens.hosts import LensHost, host_of
from ropelens.scores import BandScores
from ropelens.streaming import checkpoints
from ropelens.streaming.checkpoints import RunFolder

IDS = tiny.ids(batch=20, pos=24)


@pytest.fixture(scope="module")
def model():
    model = tiny.bridge(tiny.plain("llama"))
    host_of(model)  # certified once, before any fork
    return model


@pytest.fixture(scope="module")
def uninterrupted(model):
    return rl.collect(model, IDS, progress=False)


def collect(model, out, ids=IDS, **changes):
    return rl.collect(model, ids, out=out, progress=False, **{"checkpoint_every": 0.0, **changes})


def written(out: Path) -> list[int]:
    """The number of windows in each checkpoint."""
    return [int(path.stem) for path in RunFolder(out).paths()]


def same_bits(a: BandScores, b: BandScores) -> bool:
    pairs = [(getattr(a, f.name), getattr(b, f.name)) for f in fields(BandScores)]
    tensors = all(
        torch.equal(x.nan_to_num(9.0), y.nan_to_num(9.0)) for x, y in pairs if isinstance(x, torch.Tensor)
    )
    return tensors and (a.n_queries, a.n_documents, a.data) == (b.n_queries, b.n_documents, b.data)


@contextmanager
def hooked(model, hook):
    """A hook of the user's on the queries of the last layer."""
    host = host_of(model)
    assert isinstance(host, LensHost)
    with host.attached([("blocks.1.attn.hook_rot_q", hook)]):
        yield


def in_a_child(model, out, when: int, number: signal.Signals) -> int | None:
    """Runs collect in another process, which gets a signal when a checkpoint of `when` windows appears."""
    child = multiprocessing.get_context("fork").Process(target=collect, args=(model, out))
    child.start()
    while child.is_alive() and max(written(out), default=0) < when:
        pass
    os.kill(child.pid, number)
    child.join()
    return child.exitcode


# --- stopped and resumed -----------------------------------------------------------------------------


def test_killed_three_times_the_scores_are_the_same_bits(model, uninterrupted, tmp_path) -> None:
    reached = []
    for when in (3, 7, 12):
        assert in_a_child(model, tmp_path, when, signal.SIGKILL) == -signal.SIGKILL
        reached.append(max(written(tmp_path)))
    assert 3 <= reached[0] < reached[1] < reached[2] < 20
    assert not (tmp_path / "entropy.safetensors").exists()
    scores = collect(model, tmp_path)
    for metric in ("entropy", "activation"):
        assert same_bits(scores[metric], uninterrupted[metric])
        assert same_bits(BandScores.load(tmp_path / f"{metric}.safetensors", model), uninterrupted[metric])
    assert written(tmp_path) == [19, 20]
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_the_window(model, uninterrupted, tmp_path, capfd, number) -> None:
    def stop(*_):
        if max(written(tmp_path)) == 4:
            signal.raise_signal(number)

    with pytest.MonkeyPatch.context() as patch:
        save = RunFolder.save
        patch.setattr(RunFolder, "save", lambda *args: (save(*args), stop()))
        with pytest.raises(KeyboardInterrupt) as stopped:
            collect(model, tmp_path)
    assert str(stopped.value) == (
        "interrupted after 5 windows (120 tokens): run the same again, it goes on from the checkpoint in "
        f"{tmp_path}"
    )
    assert capfd.readouterr().err == "stopping after this window; once more to stop now\n"
    assert written(tmp_path) == [4, 5]
    assert same_bits(collect(model, tmp_path)["entropy"], uninterrupted["entropy"])


def test_a_second_signal_drops_the_window(model, uninterrupted, tmp_path) -> None:
    seen = []

    def twice(q, hook) -> None:
        seen.append(1)
        if len(seen) == 4:  # in the last layer of the fourth window
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    with (
        hooked(model, twice),
        pytest.raises(KeyboardInterrupt, match=r"^interrupted after 3 windows \(72 tokens\): run the same"),
    ):
        collect(model, tmp_path, checkpoint_every=1000)
    assert written(tmp_path) == [0, 3]
    assert same_bits(collect(model, tmp_path)["activation"], uninterrupted["activation"])


def test_without_a_folder_nothing_is_kept(model, monkeypatch) -> None:
    monkeypatch.setattr("ropelens.streaming.run.digest_of", lambda window: signal.raise_signal(2) or 0)
    with pytest.raises(
        KeyboardInterrupt, match=r"^interrupted after 1 windows \(24 tokens\): nothing was kep"
    ):
        rl.collect(model, IDS, progress=False)


def test_a_complete_run_returns_at_once_and_goes_on_when_asked_for_more(model, uninterrupted, tmp_path):
    first = collect(model, tmp_path, tokens=200)  # 8.3 windows
    assert first["entropy"].n_tokens == 9 * 24
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(host_of(model)), "run", lambda *args, **kwargs: pytest.fail("ran the model"))
        assert same_bits(collect(model, tmp_path, tokens=200)["entropy"], first["entropy"])
    with pytest.raises(ValueError, match=r" holds 216 tokens already, more than were asked for: ask for at "):
        collect(model, tmp_path, tokens=100)
    assert same_bits(collect(model, tmp_path)["entropy"], uninterrupted["entropy"])


def test_data_that_ends_early_is_a_warning(model, uninterrupted, tmp_path) -> None:
    with pytest.warns(UserWarning, match=r"^the data ended after 480 tokens, before the 500 that were asked"):
        scores = collect(model, tmp_path, tokens=500)
    assert same_bits(scores["entropy"], uninterrupted["entropy"])


# --- damage ------------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)


def change_a_count(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'\\"windows\\": 5', b'\\"windows\\": 4'))


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.fixture
def half_way(model, tmp_path):
    """A folder with checkpoints of 4 and 5 windows."""
    with pytest.MonkeyPatch.context() as patch:
        save = RunFolder.save
        patch.setattr(RunFolder, "save", lambda s, n, c: (save(s, n, c), n == 4 and signal.raise_signal(2)))
        with pytest.raises(KeyboardInterrupt):
            collect(model, tmp_path)
    assert written(tmp_path) == [4, 5]
    return tmp_path


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, change_a_count, empty])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(model, uninterrupted, half_way, damage) -> None:
    damage(RunFolder(half_way).paths()[-1])
    with pytest.warns(UserWarning, match=r"00005\.safetensors is damaged \(.*\): going on from the checkp"):
        scores = collect(model, half_way, checkpoint_every=1000)
    assert same_bits(scores["entropy"], uninterrupted["entropy"])
    assert written(half_way) == [4, 20]


def test_damaged_checkpoints_alone_are_refused(model, half_way) -> None:
    for path in RunFolder(half_way).paths():
        truncate(path)
    with (
        pytest.warns(UserWarning, match="is damaged"),
        pytest.raises(ValueError, match=r"^every checkpoint in .* is damaged: delete .* to start again$"),
    ):
        collect(model, half_way)


# --- another run's folder ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"ids": tiny.ids(batch=20, pos=24, seed=9)}, "its data source sha256 is '"),
        ({"ids": IDS[:, :20]}, "its data context is 24, not 20"),
        ({"metrics": ("entropy",)}, "its metrics are entropy, activation, not entropy"),
        ({"tol": 1e-4}, "its setting tol is 0.001, not 0.0001"),
        ({"batch": 2}, "its setting batch is 1, not 2"),
    ],
)
def test_another_run_is_refused(model, half_way, changes, why) -> None:
    with pytest.raises(
        ValueError, match=r" holds another run: .*; choose another folder, or delete that"
    ) as e:
        collect(model, half_way, **changes)
    assert f"{half_way} holds another run: {why}" in str(e.value)
    assert written(half_way) == [4, 5]


def test_another_model_is_refused(half_way) -> None:
    other = tiny.bridge(tiny.plain("llama", seed=1))
    with pytest.raises(
        ValueError, match=r" holds another run: it measures another model \(the embeddings dif"
    ):
        collect(other, half_way)


def test_another_format_is_refused(model, half_way, monkeypatch) -> None:
    monkeypatch.setattr(checkpoints, "FORMAT", 2)
    with pytest.raises(
        ValueError, match=r"has checkpoint format 1\.1, but this ropelens goes on from 1\.2: fi"
    ):
        collect(model, half_way)


def test_two_runs_in_one_folder_at_once_are_refused(model, tmp_path) -> None:
    with (
        RunFolder(tmp_path).held(),
        pytest.raises(
            ValueError, match=r"^another run is writing to .*: wait until it ends, or choose anoth"
        ),
    ):
        collect(model, tmp_path)
    collect(model, tmp_path, ids=IDS[:2])


def test_scores_without_checkpoints_are_not_overwritten(model, tmp_path) -> None:
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(
        ValueError, match=r" holds scores, but no checkpoint to go on from: choose another fol"
    ):
        collect(model, tmp_path)


# --- the disk ----------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_made_is_found_before_the_model_runs(tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ValueError, match=r"^expected a folder to write to, but .*file.* is a file or lies bel"
    ):
        collect(None, tmp_path / "file" / "run")


def test_a_full_disk_is_found_before_the_model_runs(tmp_path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limit[1]))
    try:
        with pytest.raises(
            OSError, match=r" cannot be written to \(File too large\): free space there, or ch"
        ):
            collect(None, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert not list(tmp_path.rglob("*.partial"))


def test_a_disk_that_fills_up_keeps_the_last_checkpoint(model, uninterrupted, tmp_path) -> None:
    def full(path, content):
        if path.name.startswith("000000000006"):
            raise OSError(28, "No space left on device")
        write(path, content)

    with pytest.MonkeyPatch.context() as patch:
        write = checkpoints.saving.write_bytes
        patch.setattr(checkpoints.saving, "write_bytes", full)
        with pytest.raises(
            OSError, match=r"^no checkpoint could be written to .* \(No space left on device\): "
        ):
            collect(model, tmp_path)
    assert written(tmp_path) == [4, 5]
    assert same_bits(collect(model, tmp_path)["entropy"], uninterrupted["entropy"])


# --- the model and the data --------------------------------------------------------------------------


def test_nan_names_layer_and_window_and_keeps_what_came_before(model, uninterrupted, tmp_path) -> None:
    seen = []

    def spoil(q, hook):
        seen.append(1)
        return q * torch.nan if len(seen) == 7 else None

    with (
        hooked(model, spoil),
        pytest.raises(ValueError, match=r"^window 6: layer 1: expected finite numbers, got NaN or inf"),
    ):
        collect(model, tmp_path, checkpoint_every=1000)
    assert written(tmp_path) == [0, 6]
    assert same_bits(collect(model, tmp_path)["entropy"], uninterrupted["entropy"])


def test_scores_that_are_not_those_of_q_and_k_stop_the_run_at_the_next_checkpoint(model, tmp_path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ropelens.hosts.lens.is_sound", lambda *args: torch.tensor(False))
        with pytest.raises(ValueError, match=r"^layer 0: the model's scores are not those of its queries"):
            collect(model, tmp_path)
    assert written(tmp_path) == [0]


def test_tokens_of_another_vocabulary_name_the_window(model, tmp_path) -> None:
    ids = IDS.clone()
    ids[3, 5] = 61
    with pytest.raises(
        ValueError, match=r"^window 3: expected token ids from 0 to 60, got 61: .*; what came be"
    ):
        collect(model, tmp_path, ids=ids)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"metrics": ("entropy", "magic")},
            r"^expected metrics from entropy, activation, norm_product, fisher, taylor, got \('entr",
        ),
        (
            {"metrics": "entropy"},
            r"^expected metrics from entropy, activation, norm_product, fisher, taylor, got 'entropy'$",
        ),
        ({"tokens": 0}, r"^expected tokens to be at least 1, got 0$"),
        ({"batch": 0}, r"^expected batch to be at least 1, got 0$"),
        ({"checkpoint_every": -1}, r"^expected checkpoint_every to be a number of seconds, got -1$"),
        ({"ids": torch.zeros(3)}, r"^expected integer token ids, got a tensor of torch.float32$"),
        ({"ids": ["text"]}, r"^expected windows from ropelens.windows or token ids .*, got list$"),
        (
            {"ids": tiny.ids(pos=200)},
            r"^expected windows of at most 128 tokens, the context of this model, g",
        ),
    ],
)
def test_bad_arguments(model, changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        collect(model, None, **changes)
