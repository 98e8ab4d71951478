"""Collection: the same numbers as the one-call metrics, in one process or many, whole or in pieces."""

import gc
import json
import multiprocessing
import os
import socket
from dataclasses import fields

import pytest
import tiny
import torch

import ropelens as rl
from ropelens.data import Cursor, Window, Windows, windows
from ropelens.hosts import host_of
from ropelens.scores import BandScores
from ropelens.streaming import merge_runs
from ropelens.streaming.source import source_of

METRICS = ("entropy", "activation", "norm_product", "fisher")


def rows(ids: torch.Tensor, shard: tuple[int, int] = (0, 1)) -> Windows:
    return windows(ids, shard=shard)


@pytest.fixture(scope="module")
def model():
    return tiny.bridge(tiny.plain("gemma2"))


def close(a: BandScores, b: BandScores, rtol: float = 1e-10) -> None:
    """Everything that two scores hold is the same, the data they name too."""
    assert (a.metric, a.n_queries, a.n_tokens, a.n_documents, a.data, a.settings) == (
        b.metric,
        b.n_queries,
        b.n_tokens,
        b.n_documents,
        b.data,
        b.settings,
    )
    for name in (f.name for f in fields(BandScores)):
        mine, theirs = getattr(a, name), getattr(b, name)
        assert type(mine) is type(theirs), name
        if isinstance(mine, torch.Tensor):
            torch.testing.assert_close(mine, theirs, rtol=rtol, atol=1e-12, equal_nan=True)


def test_collect_is_the_sum_of_the_one_call_metrics(model) -> None:
    ids = tiny.ids(batch=5, pos=24)
    scores = rl.collect(model, ids, ("entropy", "activation", "fisher"), seed=3, progress=False)
    assert list(scores) == ["entropy", "activation", "fisher"]
    one = {
        "entropy": rl.band_entropy(model, ids),
        "activation": rl.band_activation(model, ids),
        "fisher": rl.band_fisher(model, ids, seed=3),
    }
    for metric, expected in one.items():
        found = scores[metric]
        torch.testing.assert_close(found.values, expected.values, rtol=1e-10, atol=1e-12, equal_nan=True)
        torch.testing.assert_close(found.stderr(), expected.stderr(), rtol=1e-8, atol=1e-12, equal_nan=True)
        assert (found.n_tokens, found.n_documents) == (expected.n_tokens, expected.n_documents) == (120, 5)


@pytest.mark.parametrize("family", ["llama3", "mistral", "glm"])
def test_every_host_gives_the_same_numbers_and_stays_as_it_was(family) -> None:
    ids = tiny.ids(batch=3, pos=24)
    plain = tiny.plain(family)
    before = plain.config._attn_implementation
    fast = rl.collect(plain, ids, METRICS, progress=False)
    assert plain.config._attn_implementation == before
    bridge = rl.collect(tiny.bridge(tiny.plain(family)), ids, METRICS, progress=False)
    for metric in METRICS:
        torch.testing.assert_close(
            fast[metric].values, bridge[metric].values, rtol=1e-4, atol=1e-6, equal_nan=True
        )  # eager attention takes its softmax in float32
        assert fast[metric].data == bridge[metric].data


def test_fisher_of_a_document_does_not_depend_on_the_others(model) -> None:
    ids = tiny.ids(batch=4, pos=24)
    whole = rl.collect(model, ids, ("fisher",), seed=3, n_samples=2, progress=False)["fisher"]
    rest = rl.collect(model, rows(ids, (1, 2)), ("fisher",), seed=3, n_samples=2, progress=False)["fisher"]
    odd = [
        rl.collect(model, rows(ids, (n, 4)), ("fisher",), seed=3, n_samples=2, progress=False)["fisher"]
        for n in (1, 3)
    ]
    torch.testing.assert_close(odd[0].values + odd[1].values, rest.values, rtol=1e-10, atol=0, equal_nan=True)
    assert (whole.values > rest.values).any()
    assert torch.isfinite(whole.sampling_stderr()[whole.exists]).all()


# --- several documents in a window -------------------------------------------------------------------


LENGTHS = ((10, 9, 5), (24,), (1, 3, 20), (12, 12))


class Packed(Windows):
    """Windows of 24 tokens with several documents each, one of them of a single token."""

    def read(self, start: Cursor | None = None):
        for n in range(4):
            yield Window(self.source[n], LENGTHS[n], ("",) * len(LENGTHS[n]), n, Cursor(0, n + 1, 0, n + 1))


def packed() -> Packed:
    return Packed(tiny.ids(batch=4), None, 24, "pack", (0, 1), None)


@pytest.mark.parametrize("family", ["gemma2", "llama"])
@pytest.mark.parametrize("batch", [1, 3])
def test_documents_in_a_window_are_measured_alone(family, batch) -> None:
    model = tiny.bridge(tiny.plain(family))
    stream = packed()
    metrics = ("entropy", "activation", "fisher")
    scores = rl.collect(model, stream, metrics, batch=batch, progress=False)
    documents = [d for n in range(4) for d in stream.source[n].split(list(LENGTHS[n]))]
    alone = [
        rl.collect(model, Windows(d[None], None, len(d), "clip", (0, 1), None), metrics[:2], progress=False)
        for d in documents
    ]
    for metric in metrics[:2]:
        found, one = scores[metric], [a[metric] for a in alone]
        assert (found.n_documents, found.n_tokens) == (9, 96)
        assert found.n_pairs.tolist() == sum(a.n_pairs for a in one).tolist()
        for name in ("values", "rest", "squares"):
            expected = sum(getattr(a, name) for a in one)
            torch.testing.assert_close(getattr(found, name), expected, rtol=1e-9, atol=1e-12, equal_nan=True)
        assert found.data == f"{sum(int(a.data, 16) for a in one) % 16**32:032x}"
    assert (scores["fisher"].n_documents, scores["fisher"].n_tokens) == (9, 96)
    first = rl.band_fisher(model, documents[0][None])  # the label seeds of a first document are its window's
    single = rl.collect(model, documents[0][None], ("fisher",), progress=False)["fisher"]
    torch.testing.assert_close(single.values, first.values, rtol=1e-10, atol=0, equal_nan=True)


# --- shards and processes ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def single(model):
    return rl.collect(model, tiny.ids(batch=7), METRICS, seed=2, progress=False)


def shards(model, out, n: int, **changes) -> list:
    outs = [out / f"{i}" for i in range(n)]
    for i in range(n):
        part = rows(tiny.ids(batch=7), (i, n))
        rl.collect(model, part, METRICS, outs[i], **{"seed": 2, "progress": False, **changes})
    return outs


@pytest.mark.parametrize("n", [2, 3])
def test_shards_merged_are_the_single_run(model, single, tmp_path, n) -> None:
    outs = shards(model, tmp_path, n)
    merged = merge_runs([*reversed(outs)], tmp_path / "all")
    for metric in METRICS:
        close(merged[metric], single[metric])
        close(BandScores.load(tmp_path / "all" / f"{metric}.safetensors", model), single[metric])
    facts = json.loads((tmp_path / "all" / "run.json").read_text())
    assert (facts["tokens"], facts["windows"], facts["documents"]) == (168, 7, 7)
    assert (facts["digest"], facts["merged_from"]) == (single["entropy"].data, n)
    assert facts["settings"] == {
        "tol": 1e-3,
        "batch": 1,
        "n_samples": 1,
        "seed": 2,
        "shard": [0, 1],
        "processes": 1,
        "dtype": "float64",
        "host": "TransformerBridge",
    }


def test_tokens_are_those_of_all_shards(model, tmp_path) -> None:
    few = rl.collect(model, tiny.ids(batch=7), METRICS, seed=2, tokens=100, progress=False)
    merged = merge_runs(shards(model, tmp_path, 3, tokens=100), tmp_path / "all")
    close(merged["activation"], few["activation"])
    assert few["activation"].n_tokens == 5 * 24


def test_what_cannot_be_merged(model, tmp_path) -> None:
    zero, one, two = shards(model, tmp_path, 3)

    def refused(outs, message, into="all") -> None:
        with pytest.raises(ValueError, match=message):
            merge_runs(outs, tmp_path / into)
        assert not (tmp_path / "all").exists()

    refused([zero], r"^expected the folders of at least 2 shards to merge, got 1$")
    refused([zero, two], r"^expected all 3 shards, but 1/3 is missing: name their folders too$")
    refused([zero, one, two, one], r"1 and .*1 are both shard 1/3$")
    refused([zero, one, two], r"0 holds a run already: choose another folder to merge into$", into="0")
    refused([zero, tmp_path / "none"], r"none cannot be merged: there is no run; run its ropelens collect to")
    rl.collect(model, rows(tiny.ids(batch=7), (1, 2)), METRICS, tmp_path / "half", seed=2, progress=False)
    refused([zero, one, tmp_path / "half"], r"half is shard 1/2, but .*0 is one of 3 shards$")
    other = tmp_path / "other"
    rl.collect(model, rows(tiny.ids(batch=7), (2, 3)), METRICS, other, tol=1e-4, seed=2, progress=False)
    refused([zero, one, other], r"other is not of the same run as .*0: its setting tol is 0.0001, not 0.001$")
    (two / "run.json").unlink()
    refused([zero, one, two], r"2 cannot be merged: its run is not finished; run its ropelens collect to the")


def process(model, out, rank: int, port: int, answers) -> None:
    os.environ |= {"RANK": f"{rank}", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    scores = rl.collect(model, tiny.ids(batch=7), METRICS, out, seed=2, progress=False)
    answers.put((rank, {metric: (s.values.tolist(), s.data) for metric, s in scores.items()}))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_two_processes_are_the_single_run(model, single, tmp_path) -> None:
    context = multiprocessing.get_context("fork")
    for _ in range(2):  # the second time, from what lies there
        answers, port = context.Queue(), free_port()
        children = [context.Process(target=process, args=(model, tmp_path, r, port, answers)) for r in (0, 1)]
        for child in children:
            child.start()
        both = dict(answers.get(timeout=60) for _ in children)
        for child in children:
            child.join()
            assert child.exitcode == 0
        for metric in METRICS:
            close(BandScores.load(tmp_path / f"{metric}.safetensors", model), single[metric])
            assert [rank[metric][1] for rank in both.values()] == [single[metric].data] * 2
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["rank0", "rank1"]
    with pytest.raises(ValueError, match=r" holds another run: its setting processes is 2, not 1; choose"):
        rl.collect(model, tiny.ids(batch=7), METRICS, tmp_path, seed=2, progress=False)


def test_a_shard_cannot_be_shared_out_again(model, monkeypatch) -> None:
    with pytest.raises(ValueError, match=r"^expected all windows, got shard 1/3: torchrun's processes share"):
        source_of(rows(tiny.ids(), (1, 3)), (0, 2))


def test_a_shard_without_windows_is_refused(model) -> None:
    with pytest.raises(ValueError, match=r"^expected at least one window of 24 tokens, but shard 7/8 of the"):
        rl.collect(model, rows(tiny.ids(batch=7), (7, 8)), progress=False)


# --- what lies in the folder, and what a run costs ---------------------------------------------------


def test_the_folder_of_a_run(model, tmp_path, capfd) -> None:
    rl.collect(model, tiny.ids(batch=3), ("entropy",), tmp_path, tokens=48)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoints", "entropy.safetensors", "run.json"]
    facts = json.loads((tmp_path / "run.json").read_text())
    assert sorted(facts) == [
        "data",
        "digest",
        "documents",
        "ended_early",
        "format",
        "metrics",
        "model",
        "seconds",
        "settings",
        "tokens",
        "tokens_asked",
        "versions",
        "windows",
    ]
    assert (facts["tokens"], facts["windows"], facts["tokens_asked"]) == (48, 2, 48)
    assert facts["versions"]["ropelens"] == rl.__version__
    assert str(tmp_path) not in (tmp_path / "run.json").read_text()
    bar = capfd.readouterr().err
    assert "collect: 100%" in bar
    assert "48.0/48.0" in bar
    assert "tok/s" in bar


def bytes_alive() -> int:
    return sum(t.nbytes for t in gc.get_objects() if issubclass(type(t), torch.Tensor))


class Counting(Windows):
    """Windows that note how many bytes of tensors are alive when some are asked for."""

    def read(self, start: Cursor | None = None):
        for window in super().read(start):
            if window.index in (2, 9):
                gc.collect()
                self.counts.alive = [*getattr(self.counts, "alive", []), bytes_alive()]
            yield window


def test_memory_does_not_grow_with_the_tokens(model, tmp_path) -> None:
    stream = Counting(tiny.ids(batch=12), None, 24, "clip", (0, 1), None)
    rl.collect(model, stream, METRICS, tmp_path, checkpoint_every=0.0, progress=False)
    early, late = stream.counts.alive
    assert late <= early


def test_a_state_is_restored_and_reduced_as_it_was(model) -> None:
    ids = tiny.ids(batch=4)
    certificate = host_of(model).certificate
    with torch.no_grad():
        parts = []
        for rows in (ids[:3], ids[3:]):
            acc = rl.EntropyAccumulator()
            model.run_with_hooks(rows, fwd_hooks=rl.entropy_hooks(model, acc))
            parts.append(acc)
    a, b = (part.state() for part in parts)
    combine = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
    both = rl.EntropyAccumulator()
    both.restore({name: combine[both.reduction(name)](a[name], b[name]) for name in a}, certificate)
    torch.testing.assert_close(both.result().values, rl.band_entropy(model, ids).values, equal_nan=True)
    residual = torch.maximum(parts[0].result().residual, parts[1].result().residual)
    assert torch.equal(both.result().residual, residual)
    other = host_of(tiny.bridge(tiny.plain("gemma2", seed=5))).certificate
    with pytest.raises(ValueError, match=r"^this accumulator already holds another model's entropy \("):
        both.restore(a, other)
