"""Losses by position, in-context learning, and both over the checkpoints of a training."""

import math

import numpy as np
import pytest
import tiny
import torch
from attention_only import attention_only
from double import Double

import ropelens as rl
from ropelens.circuits import (
    LearningCurve,
    PositionLosses,
    in_context_learning_score,
    learning_curve,
    loss_by_position,
    loss_surface,
    phase_change,
)
from ropelens.circuits.training import steps_of


@pytest.fixture(autouse=True)
def double():
    with Double():
        yield


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_losses_are_those_of_prefixes_run_one_by_one(batch):
    model = tiny.plain("llama").requires_grad_(False)
    ids = tiny.ids(batch=3, pos=9)
    found = loss_by_position(model, ids, batch=batch)
    assert found.values[:, 0].isnan().all()
    for row in range(3):
        for p in range(1, 9):
            logits = model(ids[row : row + 1, :p]).logits[0, -1]
            expected = -logits.log_softmax(-1)[ids[row, p]]
            assert float(found.values[row, p]) == pytest.approx(float(expected), abs=1e-10)


def test_every_host_gives_the_same_losses():
    ids = tiny.ids(batch=2, pos=9)
    expected = loss_by_position(attention_only(2), ids).values
    found = loss_by_position(tiny.bridge(attention_only(2)), ids).values
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9, equal_nan=True)


def losses(values, documents=None):
    values = torch.tensor(values, dtype=torch.float64)
    return PositionLosses(values, documents or tuple(map(str, range(len(values)))))


def test_errors_are_over_documents():
    values = [[math.nan, 1.0], [math.nan, 3.0], [math.nan, 2.0], [math.nan, 6.0]]
    alone = losses(values)
    assert float(alone.stderr[1]) == pytest.approx(np.std([1, 3, 2, 6], ddof=1) / 2)
    # windows twice over, of the same documents, say no more than once
    twice = losses(values * 2, tuple("abcd") * 2)
    assert float(twice.stderr[1]) == pytest.approx(float(alone.stderr[1]))
    assert losses(values, tuple("aaaa")).stderr.isnan().all()


def test_the_score_is_late_minus_early():
    values = [[math.nan, 5.0, 4.0, 3.0, 2.0], [math.nan, 6.0, 4.0, 2.0, 1.0]]
    score = in_context_learning_score(losses(values), early=1, late=4)
    assert score == (-4.0, pytest.approx(1.0))
    wide = in_context_learning_score(losses(values), early=2, late=3, width=1).score
    assert wide == pytest.approx((3 + 7 / 3) / 2 - (4 + 4) / 2)


@pytest.mark.parametrize(("early", "late", "width"), [(0, 3, 0), (3, 3, 0), (1, 5, 0), (1, 3, 1)])
def test_positions_that_windows_lack_are_named(early, late, width):
    with pytest.raises(ValueError, match="expected 1 <= early < late < 5"):
        in_context_learning_score(losses([[math.nan, 1, 2, 3, 4]]), early, late, width=width)


def test_windows_of_several_documents_are_refused():
    class Letters:
        bos_token_id = None

        def encode(self, text, **options):
            return [ord(c) % 50 for c in text]

        def get_vocab(self):
            return {}

    packed = rl.windows(["abc", "defgh"], Letters(), context=8, fit="pack")
    with pytest.raises(ValueError, match="expected one document a window, got 2"):
        loss_by_position(tiny.plain("llama"), packed)


def test_windows_beyond_the_context_are_refused():
    with pytest.raises(ValueError, match="expected windows of at most 64 tokens"):
        loss_by_position(attention_only(1), torch.zeros(1, 65, dtype=torch.int64))


def test_derivatives_of_a_surface_that_is_known():
    steps, pos = torch.tensor([0, 1, 2, 4, 8, 16]), torch.arange(1, 65).double()
    log_step = steps.clamp(min=1).double().log()
    loss = 3 - 0.5 * pos.log()[None] * log_step[:, None] - 0.2 * log_step[:, None]
    loss = torch.cat([torch.full((6, 1), math.nan).double(), loss], 1)
    found = loss_surface(steps, loss, n_positions=12)
    assert found.steps.tolist() == [1, 2, 4, 8, 16]
    torch.testing.assert_close(
        found.by_position, (-0.5 * log_step[1:, None]).expand(-1, len(found.positions)), rtol=0, atol=1e-12
    )
    expected = (-0.5 * found.positions.log() - 0.2).expand(5, -1)
    torch.testing.assert_close(found.by_training, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.mixed, torch.full_like(found.mixed, -0.5), rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="at least 2 checkpoints"):
        loss_surface(steps[:2], loss[:2])


def curve_of(steps, score, loss):
    n = len(steps)
    return LearningCurve(
        steps=torch.tensor(steps),
        loss=torch.tensor(loss, dtype=torch.float64)[:, None].expand(n, 5).clone(),
        stderr=torch.zeros(n, 5).double(),
        score=torch.tensor(score, dtype=torch.float64),
        score_stderr=torch.zeros(n).double(),
        induction=torch.zeros(n, 2, 2).double(),
        previous_token=torch.zeros(n, 2, 2).double(),
        copies=torch.zeros(n, 2).double(),
        bands=torch.zeros(n, 2, 2, 4).double(),
        settings={"early": 2, "late": 3, "width": 0},
    )


def test_the_phase_change_is_where_it_was_put():
    steps = list(range(0, 2001, 50))
    done = [1 / (1 + math.exp(-(s - 830) / 40)) for s in steps]
    trend = [5 - 0.3 * math.log(max(s, 1)) for s in steps]
    curve = curve_of(steps, [-0.4 * d for d in done], [t - 0.5 * d for t, d in zip(trend, done, strict=True)])
    found = phase_change(curve)
    assert found.step == pytest.approx(830, abs=10)
    width = 40 * math.log(9)
    assert found.start == pytest.approx(830 - width, abs=25)
    assert found.end == pytest.approx(830 + width, abs=25)
    assert (found.before, found.after) == (pytest.approx(0, abs=1e-6), pytest.approx(-0.4, abs=1e-3))
    assert found.bump == pytest.approx(0.4, abs=0.05)  # 0.8 of 0.5 lies between a tenth and nine tenths
    assert abs(found.plateau) < 0.1
    with pytest.raises(ValueError, match="expected a score that changes"):
        phase_change(curve_of(steps, [0.0] * len(steps), trend))
    with pytest.raises(ValueError, match="at least 5 checkpoints"):
        phase_change(curve_of([0, 1], [0.0, 1.0], [5.0, 4.0]))


def test_a_change_that_does_not_last_is_not_the_one():
    steps = list(range(20))
    score = [0.0] * 4 + [-0.9] + [0.0] * 5 + [-1.0] * 10
    assert 9 < phase_change(curve_of(steps, score, [1.0] * 20)).step <= 10


def test_the_curve_of_a_training(tmp_path):
    ids = tiny.ids(batch=3, pos=20)
    for seed, step in enumerate((0, 7, 30)):
        attention_only(2, seed=seed).save_pretrained(tmp_path / "run" / f"checkpoint-{step}")
    models = {7: attention_only(2, seed=1), 0: attention_only(2, seed=0), 30: attention_only(2, seed=2)}
    options = {"early": 3, "late": 15, "width": 2, "progress": False}
    curve = learning_curve(models, ids, **options)
    assert curve.steps.tolist() == [0, 7, 30]
    direct = loss_by_position(models[7], ids)
    torch.testing.assert_close(curve.loss[1], direct.mean, rtol=0, atol=1e-12, equal_nan=True)
    assert float(curve.score[1]) == pytest.approx(in_context_learning_score(direct, 3, 15, width=2).score)
    assert curve.bands.shape == (3, 2, 2, 4)
    frame = curve.to_frame()
    assert frame["score"].tolist() == pytest.approx((frame["loss_late"] - frame["loss_early"]).tolist())

    curve.save(tmp_path / "curve.safetensors")
    again = LearningCurve.load(tmp_path / "curve.safetensors")
    torch.testing.assert_close(again.loss, curve.loss, rtol=1e-6, atol=0, equal_nan=True)
    assert again.settings == curve.settings

    # a checkpoint that has been measured is not measured again, others are
    kept = tmp_path / "kept"
    learning_curve({0: models[0], 7: models[7]}, ids, out=kept, **options)
    wrong = {0: models[30], 7: models[30], 30: models[30]}
    resumed = learning_curve(wrong, ids, out=kept, **options)
    torch.testing.assert_close(resumed.score, curve.score, rtol=0, atol=1e-12)


def test_steps_are_told_by_names(tmp_path):
    hub = ["EleutherAI/pythia-70m@step512", "EleutherAI/pythia-70m@step64"]
    assert steps_of(hub) == {64: hub[1], 512: hub[0]}
    for name in ("checkpoint-2", "10", "optimizer-3"):
        (tmp_path / name).mkdir()
    for name in ("checkpoint-2", "10"):
        (tmp_path / name / "config.json").touch()
    assert list(steps_of(tmp_path)) == [2, 10]
    with pytest.raises(ValueError, match="a training step in the name a/b, got none"):
        steps_of(["a/b"])
    with pytest.raises(ValueError, match="two of step 5"):
        steps_of(["x5", "y5"])
    with pytest.raises(ValueError, match="expected checkpoints, got none"):
        steps_of(tmp_path / "2")


def test_other_files_are_no_learning_curve(tmp_path):
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="expected a learning curve"):
        LearningCurve.load(tmp_path / "x.safetensors")
