"""Learning curves: over the checkpoints of a training."""

import math

import pytest
import tiny
import torch
from double import Double

from attention_only import attention_only
from ropelens.circuits import (
    LearningCurve,
    in_context_learning_score,
    learning_curve,
    loss_by_position,
    loss_surface,
    phase_change,
    training,
)
from ropelens.circuits.training import steps_of


@pytest.fixture(autouse=True)
def double():
    with Double():
        yield


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


def test_what_has_been_measured_of_a_checkpoint_on_a_text_is_not_measured_again(tmp_path, monkeypatch):
    ids = tiny.ids(batch=3, pos=20)
    models = {step: attention_only(2, seed=step) for step in (0, 7)}
    options = {"early": 3, "late": 15, "width": 2, "progress": False}
    measured: list[object] = []
    measure = training._measured

    def counted(source, *given):
        measured.append(source)
        return measure(models[7] if source == tmp_path else source, *given)

    monkeypatch.setattr(training, "_measured", counted)
    learning_curve({0: models[0]}, ids, out=tmp_path, **options)
    both = learning_curve(models, ids, out=tmp_path, **options)
    assert len(measured) == 2
    for _ in range(2):  # a folder is told by its name
        assert torch.equal(learning_curve({7: tmp_path}, ids, out=tmp_path, **options).score, both.score[1:])
    assert measured == [models[0], models[7], tmp_path]

    # another model at the same step, and the same tokens in another order, are something else
    other = learning_curve({0: models[7]}, ids, out=tmp_path, **options)
    assert torch.equal(other.score, both.score[1:])
    turned = learning_curve({0: models[0]}, ids.flip(1), out=tmp_path, **options)
    assert len(measured) == 5
    assert float(turned.loss[0, 1:].mean()) == pytest.approx(
        float(loss_by_position(models[0], ids.flip(1)).mean[1:].mean())
    )


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
