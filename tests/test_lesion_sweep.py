"""Sweeps of a tiny model: the same texts on every host, files that go on, turns, and what is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

import ropelens as rl
from lesion_example import tokenizer
from ropelens.hosts import host_of
from ropelens.hosts.load import has_hooked_transformer, hooked_from
from ropelens.lesions import Task
from ropelens.lesions.generating import Chat, generate, token_losses
from ropelens.lesions.results import NAME, LesionResults, parse
from ropelens.lesions.sweep import NO_TEMPLATE, TOO_LONG, _Sweep

HOSTS = ("transformers", "bridge", "hooked") if has_hooked_transformer() else ("transformers", "bridge")
STORY = "w7 w11 w13 w17"
TASKS = (
    Task("tell", "continuation", "w5 w6 w7"),
    Task("again", "repetition", f"w5 {STORY}", STORY, ("w11",)),
)
QUICK = {
    "layers": [0, 1],
    "bands": ["slowest:50%"],
    "stds": [0.5, 4],
    "seeds": [0, 1],
    "max_tokens": 6,
    "answer_tokens": 4,
    "limit": 1000,
    "progress": False,
}


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def make(host: str = "transformers", chat: bool = True) -> Any:
    plain = tiny.plain("llama", dtype=torch.float32)
    model = (
        plain
        if host == "transformers"
        else tiny.bridge(plain)
        if host == "bridge"
        else hooked_from(plain, None)
    )
    setattr(model, "_tokenizer" if host == "bridge" else "tokenizer", tokenizer(chat))
    return model


@pytest.fixture(scope="module")
def model() -> Any:
    return make()


@pytest.fixture(scope="module")
def found(model, tmp_path_factory) -> tuple[Path, LesionResults]:
    out = tmp_path_factory.mktemp("sweep")
    return out, rl.lesion_sweep(model, TASKS, out=out, **QUICK)


def key(run: dict) -> tuple:
    return run["task"], tuple(run["layers"]), run["bands"], run["std"], run["seed"]


def texts(runs: Any) -> dict[tuple, list]:
    return {key(run): [run["ids"], run["introspection"], run["correction"]["text"]] for run in runs}


# Generation -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["weights", "both"])
def test_texts_are_the_same_on_every_host_cached_or_not(target: str):
    prompts, made = [[5, 6, 7, 8], [9, 10]], []  # of two lengths: the shorter has pads on its left
    for host in HOSTS:
        seen = host_of(make(host))
        with rl.lesion(seen.model, [0, 1], "slowest:50%", std=1.0, seed=4, target=target):
            made += [generate(seen, prompts, 12, cached=cached) for cached in (True, False)]
            drawn = {"temperature": 1.0, "seeds": [3, 4]}
            drawn_made = [generate(seen, prompts, 12, cached=cached, **drawn) for cached in (True, False)]
        assert drawn_made[0] == drawn_made[1]
        made.append(drawn_made[0])
    assert all(len(row) == 12 for row in made[0])
    assert made[0] == made[1]
    assert all(made[i : i + 3] == made[:3] for i in range(0, len(made), 3))


def test_pads_that_cannot_be_hidden_are_refused():
    seen = host_of(tiny.plain("llama"))  # in float64, whose masks overflow in the library's float32 softmax
    with pytest.raises(ValueError, match=r"^the logits after a text of 2 tokens with pads before it"):
        generate(seen, [[5, 6, 7, 8], [9, 10]], 2)


def test_no_noise_changes_no_token(model):
    seen = host_of(model)
    clean = generate(seen, [[5, 6, 7]], 12)
    for target in ("weights", "both"):
        with rl.lesion(model, [0, 1], "slowest:50%", std=0, target=target):
            assert generate(seen, [[5, 6, 7]], 12) == clean
        with rl.lesion(model, [0, 1], "slowest:50%", std=1, target=target):
            assert generate(seen, [[5, 6, 7]], 12) != clean


def test_generation_takes_the_likeliest_token(model):
    seen, ids = host_of(model), [5, 6, 7]
    for token in generate(seen, [[5, 6, 7]], 5)[0]:
        logits = seen.run(torch.tensor([ids]), None)
        assert token == int(logits[0, -1].argmax())
        ids = [*ids, token]
    first = generate(seen, [[5, 6, 7]], 5)[0]
    assert generate(seen, [[5, 6, 7]], 5, stop=frozenset({first[2]}))[0] == first[: first.index(first[2])]


def test_drawn_tokens_follow_the_probabilities(model):
    seen = host_of(model)
    expected = seen.run(torch.tensor([[5, 6, 7]]), None)[0, -1].softmax(-1)
    n = 2000
    drawn = generate(seen, [[5, 6, 7]] * n, 1, temperature=1.0, seeds=range(n))
    counts = torch.bincount(torch.tensor([row[0] for row in drawn]), minlength=tiny.VOCAB) / n
    # Five standard errors of each frequency.
    assert ((counts - expected).abs() <= 5 * (expected * (1 - expected) / n).sqrt() + 1 / n).all()


def test_losses_are_those_of_each_text_alone(model):
    seen, prompts, rows = host_of(model), [[5, 6], [7, 8, 9]], [[10, 11, 12], [13]]
    together = token_losses(seen, prompts, rows)
    for prompt, row, losses in zip(prompts, rows, together, strict=True):
        logits = seen.run(torch.tensor([[*prompt, *row]]), None)[0].log_softmax(-1)
        expected = [-float(logits[len(prompt) - 1 + i, token]) for i, token in enumerate(row)]
        assert losses == pytest.approx(expected, rel=1e-4)
    assert token_losses(seen, [[5, 6]], [[]]) == [[]]


def test_pieces_add_up_to_the_text(smollm2_tokenizer):
    chat = Chat(smollm2_tokenizer)
    text = "Naïve café: 東京 🙂\n\n  <b>x</b>"
    ids = smollm2_tokenizer.encode(text)
    pieces = chat.pieces(ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == text == chat.text(ids)
    assert "\ufffd" not in "".join(pieces)


@pytest.fixture
def smollm2_tokenizer() -> Any:
    from transformers import AutoTokenizer

    from ropelens.hosts.load import smollm2_folder

    return AutoTokenizer.from_pretrained(smollm2_folder())


# Sweeps -----------------------------------------------------------------------------------------------


def test_a_sweep_runs_everything_once(found):
    _, results = found
    keys = [key(run) for run in results.runs]
    expected = {(task.name, (), "", 0.0, 0) for task in TASKS} | {
        (task.name, (layer,), "slowest:50%", std, seed)
        for task in TASKS
        for layer in (0, 1)
        for std in (0.5, 4.0)
        for seed in (0, 1)
    }
    assert set(keys) == expected
    assert len(keys) == len(expected)


def test_a_run_says_what_was_done_and_read(found, model):
    _, results = found
    run = next(r for r in results.runs if key(r) == ("again", (1,), "slowest:50%", 4.0, 1))
    chat, host = Chat(model.tokenizer), host_of(model)
    prompt = chat.prompt([{"role": "user", "content": TASKS[1].prompt}])
    assert prompt == [int(word[1:]) for word in f"w58 w5 {STORY} w60".split()]
    with rl.lesion(model, 1, "slowest:50%", std=4.0, seed=1):
        ids = generate(host, [prompt], 6, stop=frozenset({2}))[0]
        talk = [*prompt[:-1], 59, *ids, 58, *([0] * 8), 60]  # the question's eight words are unknown
        answer = generate(host, [talk], 4, stop=frozenset({2}))[0]
    assert run["ids"] == ids
    assert run["introspection"]["text"] == chat.text(answer)
    assert run["losses"] == pytest.approx(token_losses(host, [prompt], [ids])[0], abs=1e-3)
    assert run["loss"] == pytest.approx(sum(run["losses"]) / len(ids), abs=1e-3)
    assert "".join(run["tokens"]) == run["text"] == chat.text(ids)
    control = results.healthy("again")[0]
    assert run["readings"]["distance_to_healthy"] > 0
    assert ids[: run["readings"]["first_divergence"]] == control["ids"][: run["readings"]["first_divergence"]]
    assert {"fidelity", "names_verdict", "repeats", "surprising", "headers"} <= set(run["readings"])
    assert 0 <= run["correction"]["score"] <= 1
    assert results.header["versions"]["torch"] == torch.__version__.split("+")[0] or "+" in torch.__version__


def test_seeds_one_by_one_are_the_batch(found, model, tmp_path):
    alone = rl.lesion_sweep(model, TASKS[:1], out=tmp_path, **{**QUICK, "seeds": [1]})
    together = texts(found[1].runs)
    for place, text in texts(alone.runs).items():
        if place[1]:
            assert together[place] == text


@pytest.mark.parametrize("target", ["weights", "both"])
def test_all_layers_bands_and_seeds_in_a_batch_are_each_alone(model, tmp_path, target):
    one, many = (
        rl.lesion_sweep(
            model,
            TASKS,
            out=tmp_path / str(n),
            **{**QUICK, "layers": [0, 1, (0, 1)], "target": target},
            batch=n,
        )
        for n in (1, 3)
    )
    assert texts(one.runs) == texts(many.runs)
    assert len({tuple(run["ids"]) for run in many.runs}) > 2  # lesions differ


def test_a_sweep_is_the_same_on_every_host(found, tmp_path):
    for host in HOSTS[1:]:
        other = rl.lesion_sweep(make(host), TASKS[:1], out=tmp_path / host, **{**QUICK, "layers": [1]})
        expected = texts(found[1].runs)
        assert all(expected[place] == text for place, text in texts(other.runs).items())


def test_a_sweep_goes_on_where_it_stopped(found, model, tmp_path):
    out, results = found
    data = (out / NAME).read_bytes()
    lines = data.splitlines(keepends=True)
    path = tmp_path / NAME
    for kept in (b"".join(lines[:4]), b"".join(lines[:6])[:-9], lines[0][:20], data):
        path.write_bytes(kept)
        again = rl.lesion_sweep(model, TASKS, out=tmp_path, **QUICK)
        assert texts(again.runs) == texts(results.runs)
        assert len(again.runs) == len(results.runs)
    assert path.read_bytes() == data


def test_a_sweep_can_be_widened(model, tmp_path):
    rl.lesion_sweep(model, TASKS[:1], out=tmp_path, **{**QUICK, "layers": [1], "seeds": [0]})
    wider = rl.lesion_sweep(model, TASKS, out=tmp_path, **{**QUICK, "layers": [1]})
    assert len({key(run) for run in wider.runs}) == len(wider.runs) == 2 * (1 + 4)
    assert [task["name"] for task in wider.header["tasks"]] == ["tell", "again"]


def test_other_settings_models_and_tasks_are_refused(found, model):
    out, _ = found
    before = (out / NAME).read_bytes()
    for change, message in (
        ({"max_tokens": 7}, r"holds a sweep with max_tokens=6, got 7"),
        ({"target": "both"}, r"holds a sweep with target='weights', got 'both'"),
    ):
        with pytest.raises(ValueError, match=message):
            rl.lesion_sweep(model, TASKS, out=out, **{**QUICK, **change})
    other = make()
    other.model.layers[0].self_attn.q_proj.weight.data.mul_(2)
    with pytest.raises(ValueError, match="holds a sweep of another model"):
        rl.lesion_sweep(other, TASKS, out=out, **QUICK)
    with pytest.raises(ValueError, match="holds another task 'tell'"):
        rl.lesion_sweep(model, [Task("tell", "continuation", "w9")], out=out, **QUICK)
    assert (out / NAME).read_bytes() == before


def test_doses_end_beyond_the_limit(model, tmp_path):
    low = rl.lesion_sweep(model, TASKS[:1], out=tmp_path, **{**QUICK, "limit": 0.001})
    assert {run["std"] for run in low.runs} == {0.0, 0.5}


def test_without_a_chat_template_turns_are_skipped_and_said_so(tmp_path):
    results = rl.lesion_sweep(make(chat=False), TASKS[:1], out=tmp_path, **{**QUICK, "layers": [1]})
    for run in results.runs:
        assert run["introspection"] == run["correction"] == {"skipped": NO_TEMPLATE}


def test_turns_too_long_for_the_context_are_skipped(model, tmp_path):
    long = Task("long", "continuation", " ".join(["w9"] * 110))
    results = rl.lesion_sweep(model, [long], out=tmp_path, **{**QUICK, "layers": [1], "stds": [0.5]})
    assert all(run["introspection"] == {"skipped": TOO_LONG} for run in results.runs)
    longer = Task("longer", "continuation", " ".join(["w9"] * 127))
    with pytest.raises(ValueError, match="'longer': its prompt of 129 tokens leaves no room"):
        rl.lesion_sweep(model, [longer], out=tmp_path / "b", **QUICK)


def test_a_long_text_does_not_keep_the_others_of_its_batch_from_their_turns(model):
    settings = {"temperature": 0, "introspect": True, "correct": True, "answer_tokens": 4, "max_tokens": 6}
    sweep = _Sweep(host_of(model), Chat(model.tokenizer), frozenset({2}), settings, None, 2)  # pyright: ignore
    short, long = [9, 10, 11], [9] * 115
    found = sweep._turns(TASKS[0], [long, short], [0, 1])
    alone = sweep._turns(TASKS[0], [short], [1])
    for turn in ("introspection", "correction"):
        assert found[turn] == [{"skipped": TOO_LONG}, alone[turn][0]]
        assert "text" in alone[turn][0]


def test_a_lesion_can_be_lifted_before_the_turns(model, tmp_path):
    settings = {**QUICK, "layers": [1], "stds": [4], "seeds": [1], "lift": True}
    run = rl.lesion_sweep(model, TASKS[:1], out=tmp_path, **settings).runs[-1]
    chat, host = Chat(model.tokenizer), host_of(model)
    prompt = chat.prompt([{"role": "user", "content": TASKS[0].prompt}])
    talk = [*prompt[:-1], 59, *run["ids"], 58, *([0] * 8), 60]
    assert run["introspection"]["text"] == chat.text(generate(host, [talk], 4, stop=frozenset({2}))[0])


def test_drawn_texts_have_a_control_for_each_seed(model, tmp_path):
    settings = {
        **QUICK,
        "layers": [1],
        "stds": [0.5],
        "temperature": 1.0,
        "introspect": False,
        "correct": False,
    }
    results = rl.lesion_sweep(model, TASKS[:1], out=tmp_path, **settings)
    assert [key(run)[-1] for run in results.healthy("tell")] == [0, 1]
    ids = [run["ids"] for run in results.healthy("tell")]
    assert ids[0] != ids[1]
    assert "introspection" not in results.runs[0]


BAD = [
    ({"stds": [-1]}, "expected a std of 0 or more"),
    ({"stds": [float("nan")]}, "expected a std of 0 or more"),
    ({"bands": ["slowest:9"]}, "expected at most 4 bands"),
    ({"bands": ["lowest:1"]}, "expected bands as"),
    ({"layers": [2]}, "expected layers from 0 to 1, got 2"),
    ({"layers": []}, "expected at least one of each of layers"),
    ({"max_tokens": 0}, "expected max_tokens of at least 1"),
    ({"limit": 0}, "expected a limit above 0"),
    ({"temperature": float("nan")}, "a temperature of 0 or more"),
    ({"tasks": []}, "expected tasks with names of their own"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_input_is_refused_before_anything_runs(model, tmp_path, change: dict, message: str):
    with pytest.raises(ValueError, match=message):
        rl.lesion_sweep(model, **{"tasks": TASKS, "out": tmp_path / "o", **QUICK, **change})
    assert not (tmp_path / "o").exists()


def test_two_sweeps_do_not_write_to_one_file(found, model):
    import fcntl

    out, results = found
    with open(out / NAME, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another sweep is writing to"):
            rl.lesion_sweep(model, TASKS, out=out, **QUICK)
    assert len(parse((out / NAME).read_bytes(), out)[1]) == len(results.runs)


def test_lines_are_json_that_anybody_reads(found):
    out, _ = found
    for line in (out / NAME).read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
