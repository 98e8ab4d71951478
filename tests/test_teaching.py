"""The attention-only teaching models: their training, and those that come with the package."""

import dataclasses
import shutil

import pytest
import torch
from safetensors.torch import load_file

import ropelens as rl
from ropelens.circuits import LearningCurve, head_scores, path_importance, phase_change
from ropelens.hosts.load import TEACHING, has_hooked_transformer, teaching_folder
from ropelens.pretrain.teaching import TEACHING_MODELS, Recipe, Rows, repeated, train_teaching_model

SMALL = Recipe(
    n_layers=2,
    d_model=16,
    n_heads=2,
    n_vocab=64,
    context=32,
    rows=4,
    repeated_rows=2,
    periods=(4, 8),
    steps=4,
    warmup=1,
    kept=((10, 2),),
    saved=2,
)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpora")
    for i in range(4):
        words = [f"the {name} sat on the mat number {i}." for name in ("cat", "dog", "owl", "fox")]
        (folder / f"{i}.txt").write_text("\n".join(words * 20))
    return folder


@pytest.fixture(scope="module")
def trained(corpora, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    train_teaching_model(SMALL, corpora, out)
    return out


def weights(folder):
    return load_file(folder / "model.safetensors")


@pytest.mark.filterwarnings("ignore")
def test_a_training_that_was_interrupted_ends_the_same(trained, corpora, tmp_path):
    out = tmp_path / "again"
    shutil.copytree(trained, out)
    shutil.rmtree(out / "state" / "checkpoint-4")
    shutil.rmtree(out / "checkpoints" / "4")
    last = train_teaching_model(SMALL, corpora, out)
    found, expected = weights(last), weights(trained / "checkpoints" / "4")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not list(out.rglob("*.unfinished"))


def test_what_is_kept_is_a_model_of_attention_alone(trained):
    assert sorted(p.name for p in (trained / "checkpoints").iterdir()) == ["0", "2", "4"]
    first, last = (weights(trained / "checkpoints" / step) for step in ("0", "4"))
    moved = {name for name in last if not torch.equal(first[name], last[name])}
    assert not any("mlp" in name or "v_proj.bias" in name for name in moved)
    assert {name for name in last if "mlp" in name and last[name].any()} == set()
    assert any("q_proj.bias" in name for name in moved)
    model = rl.load(trained / "checkpoints" / "4", host="transformers")
    assert model.tokenizer.encode("the")[0] == model.tokenizer.bos_token_id == 0
    assert path_importance(model, torch.randint(64, (1, 32))).other == 0


def test_rows_are_prose_and_repeated_prose_in_the_share_that_is_said():
    prose = torch.cat([torch.zeros(50, 1), torch.arange(1, 50 * 31 + 1).view(50, 31)], 1).long()
    rows = Rows(SMALL, prose)
    assert len(rows) == 16
    seen = [rows[i]["input_ids"] for i in range(16)]
    is_prose = [bool((prose == row).all(1).any()) for row in seen]
    assert is_prose == [False, False, True, True] * 4
    assert all(torch.equal(a, Rows(SMALL, prose)[i]["input_ids"]) for i, a in enumerate(seen))
    for row in seen[::4]:
        period = next(p for p in range(1, 32) if row[1 + p] == row[1])
        assert 4 <= period <= 8
        assert torch.equal(row[1 + period :], row[1:-period])
    assert len({int(row[1]) for row in seen}) == 16  # no window twice before all have been read


def test_periods_are_spread_over_their_range():
    ids = torch.arange(32)
    found = [int(repeated(ids, (4, 8), seed)[1:].unique().numel()) for seed in range(200)]
    assert set(found) == {4, 5, 6, 7, 8}
    assert min(found.count(p) for p in range(4, 9)) > 20


def test_no_corpora_are_named(tmp_path):
    with pytest.raises(ValueError, match="run `make corpora` first"):
        train_teaching_model(SMALL, tmp_path, tmp_path / "out")


# Those that come with the package ---------------------------------------------------------------


@pytest.mark.parametrize("name", TEACHING)
def test_they_are_small_and_made_by_their_recipe(name):
    folder = teaching_folder(name)
    assert sum(p.stat().st_size for p in folder.iterdir()) < 4_000_000
    recipe, config = TEACHING_MODELS[name], rl.load(name, host="transformers").config
    assert (config.num_hidden_layers, config.hidden_size) == (recipe.n_layers, recipe.d_model)
    assert (config.vocab_size, config.max_position_embeddings) == (recipe.n_vocab, recipe.context)
    one, two = (dataclasses.replace(TEACHING_MODELS[n], n_layers=0) for n in TEACHING)
    assert one == two


@pytest.mark.parametrize("name", TEACHING)
def test_every_host_carries_them(name):
    ids = torch.randint(2, 512, (1, 40), generator=torch.Generator().manual_seed(0))
    hosts = ("transformers", "bridge", "hooked") if has_hooked_transformer() else ("transformers", "bridge")
    models = [rl.load(name, host=host) for host in hosts]
    with torch.no_grad():
        logits = [getattr(out, "logits", out) for out in (model(ids) for model in models)]
    spread = float(logits[0].max() - logits[0].min())
    for other in logits[1:]:
        assert float((other - logits[0]).abs().max()) < 1e-4 * spread
    assert all(model.tokenizer.encode("the cat")[0] == 0 for model in models)


def test_two_layers_have_an_induction_head_and_one_has_none():
    two, one = (head_scores(rl.load(f"attn-only-{n}l", host="transformers"), length=256) for n in (2, 1))
    (layer, head) = two.top("induction", 1)[0]
    assert layer == 1
    assert float(two["induction"][layer, head]) > 0.2
    assert two.top("previous_token", 1)[0][0] == 0
    assert float(two["previous_token"].max()) > 0.4
    assert float(one["induction"].max()) < 0.05


def test_the_measured_trainings_show_it():
    two, one = (LearningCurve.load(f"attn-only-{n}l") for n in (2, 1))
    change = phase_change(two, "induction")
    assert change.after > 0.2
    assert change.start > 300
    assert change.end / change.start < 3
    assert float(one.induction.max()) < 0.05
    copies = two.to_frame()["second_copy"]
    assert copies.iloc[-1] < copies.max() - 1
