"""From text to tokens: what is accepted, and one sentence for each thing that is not."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import tiny
import torch

import ropelens as rl
from ropelens.hosts import Host, host_of
from ropelens.hosts.tokens import Tokens, _checked_mask, token_strings, tokens_of


class Words:
    """A tokenizer as far as ropelens knows one: a word of n letters is token n, after token 1."""

    def encode(self, text: str) -> list[int]:
        return [1, *(len(word) for word in text.split())]

    def decode(self, ids: list[int]) -> str:
        return "".join(f"<{i}>" for i in ids)


@pytest.fixture(scope="module")
def host() -> Host:
    return host_of(tiny.bridge(tiny.plain("llama")))


def test_strings_go_through_the_tokenizer_and_are_padded_on_the_right(host: Host):
    tokens = tokens_of(host, ["three words here", "one"], tokenizer=Words())
    assert tokens.ids.tolist() == [[1, 5, 5, 4], [1, 3, 0, 0]]
    assert tokens.mask is not None
    assert tokens.mask.tolist() == [[True] * 4, [True, True, False, False]]
    assert [document.tolist() for document in tokens.documents()] == [[[1, 5, 5, 4]], [[1, 3]]]
    assert tokens.n_documents == 2


@pytest.mark.parametrize("text", ["two words", ["two words"], ["two words", "and more"]])
def test_texts_of_one_length_need_no_mask(host: Host, text: str | list[str]):
    assert tokens_of(host, text, tokenizer=Words()).mask is None


def test_the_models_tokenizer_is_the_default(host: Host, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host.model, "tokenizer", Words(), raising=False)
    assert tokens_of(host, "two words").ids.tolist() == [[1, 3, 5]]
    assert token_strings(host, torch.tensor([1, 3])) == ("<1>", "<3>")


def test_token_strings_without_a_tokenizer_are_ids(host: Host):
    assert token_strings(host, torch.tensor([1, 30])) == ("1", "30")


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_token_ids_of_any_integer_type(host: Host, dtype: torch.dtype):
    ids = tiny.ids(2, 5)
    tokens = tokens_of(host, ids.to(dtype))
    assert torch.equal(tokens.ids, ids)
    assert tokens.mask is None


@pytest.mark.parametrize("mask", [[[1, 1, 1, 1]], [[True] * 4], [[1.0] * 4]])
def test_a_mask_that_hides_nothing_is_none(host: Host, mask: list[Any]):
    assert tokens_of(host, tiny.ids(1, 4), torch.tensor(mask)).mask is None


def test_digest_tells_documents_apart_whatever_their_padding(host: Host):
    a, b, pads = tiny.ids(1, 4), tiny.ids(1, 6, seed=2), torch.zeros(1, 2, dtype=torch.int64)
    ones = torch.ones(1, 4, dtype=torch.int64)
    right = tokens_of(host, torch.cat([a, pads], 1), torch.cat([ones, pads], 1))
    left = tokens_of(host, torch.cat([pads + 7, a], 1), torch.cat([pads, ones], 1))
    alone = tokens_of(host, a)
    assert right.digest == left.digest == alone.digest
    assert len(alone.digest) == 32
    others = [b, a.flip(1), torch.cat([a, a]), torch.cat([a, a], 1)]
    assert len({alone.digest, *(tokens_of(host, other).digest for other in others)}) == 5


def test_digest_of_strings_is_that_of_their_tokens(host: Host):
    texts = tokens_of(host, ["three words here", "one"], tokenizer=Words())
    ids = torch.tensor([[1, 5, 5, 4], [9, 9, 1, 3]])
    same = tokens_of(host, ids, torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]]))
    assert texts.digest == same.digest


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected text, got an empty string or list"),
        ("  \n", "expected text, got an empty string or list"),
        ([], "expected text, got an empty string or list"),
        (["fine words", ""], "expected text, got an empty string or list"),
        (
            torch.zeros(1, 0, dtype=torch.int64),
            r"expected at least one text of 2 tokens, got .* shape \[1, 0\]",
        ),
        (
            torch.zeros(0, 4, dtype=torch.int64),
            r"expected at least one text of 2 tokens, got .* shape \[0, 4\]",
        ),
        (
            torch.tensor([[5]]),
            "expected at least 2 tokens in every text, got 1: one token has nothing to attend",
        ),
        (
            torch.tensor([[5, 61]]),
            "expected token ids from 0 to 60, got 61: were they made by another model's",
        ),
        (
            torch.tensor([[5, -1]]),
            "expected token ids from 0 to 60, got -1: were they made by another model's",
        ),
        ("two " + "a" * 61, "expected token ids from 0 to 60, got 61: were they made by another model's"),
        (
            torch.ones(1, 129, dtype=torch.int64),
            "expected at most 128 tokens, the context of this model, got 129",
        ),
        ("word " * 128, "expected at most 128 tokens, the context of this model, got 129: cut the text into"),
    ],
)
def test_bad_text(host: Host, text: Any, message: str):
    with pytest.raises(ValueError, match=f"^{message}"):
        tokens_of(host, text, tokenizer=Words())


def test_strings_without_a_tokenizer(host: Host):
    message = "^this model has no tokenizer: pass tokenizer=, or token ids instead of text$"
    with pytest.raises(ValueError, match=message):
        tokens_of(host, "two words")


def test_a_tokenizer_that_makes_one_token_of_a_text(host: Host):
    class Silent(Words):
        def encode(self, text: str) -> list[int]:
            return [len(word) for word in text.split()]

    with pytest.raises(ValueError, match=r"^expected at least 2 tokens in every text, got 1"):
        tokens_of(host, ["two words", "one"], tokenizer=Silent())


ZERO = torch.zeros(1, 4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("text", "mask", "message"),
    [
        (
            ZERO,
            torch.ones(1, 3),
            r"expected an attention mask of the shape of the tokens, \[1, 4\], got \[1, 3\]",
        ),
        (ZERO, torch.ones(4), r"expected an attention mask of the shape of the tokens, \[1, 4\], got \[4\]"),
        (
            ZERO,
            torch.tensor([[1, 0, 1, 1]]),
            "expected one unbroken run of real .* mask of row 0 has gaps: pad on",
        ),
        (
            ZERO.expand(2, 4),
            torch.tensor([[1, 1, 1, 0], [1, 0, 0, 1]]),
            "expected one unbroken .* row 1 has gaps",
        ),
        (ZERO, torch.tensor([[0, 0, 0, 1]]), "expected at least 2 tokens in every text, got 1"),
        (ZERO, torch.zeros(1, 4), "expected at least 2 tokens in every text, got 0"),
        ("two words", torch.ones(1, 3), "an attention mask goes with token ids; strings are padded for you"),
    ],
)
def test_bad_masks(host: Host, text: Any, mask: torch.Tensor, message: str):
    with pytest.raises(ValueError, match=f"^{message}"):
        tokens_of(host, text, mask, Words())


FLOATS = torch.tensor([[5.0, 6.0]])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (FLOATS, "expected integer token ids, got a tensor of torch.float32"),
        (FLOATS.bfloat16(), "expected integer token ids, got a tensor of torch.bfloat16"),
        (FLOATS > 5, "expected integer token ids, got a tensor of torch.bool"),
        (torch.tensor([5, 6]), r"expected token ids of shape \[batch, pos\], got \[2\]"),
        (torch.tensor([[[5, 6]]]), r"expected token ids of shape \[batch, pos\], got \[1, 1, 2\]"),
        (7, "expected a string, a list of strings or a tensor of token ids, got int"),
        (None, "expected a string, a list of strings or a tensor of token ids, got NoneType"),
        ([5, 6], "expected a string, a list of strings or a tensor of token ids, got list"),
        (["fine words", 7], "expected a string, a list of strings or a tensor of token ids, got list"),
    ],
)
def test_wrong_types(host: Host, text: Any, message: str):
    # The tests enforce annotations before the function sees anything; users meet the function itself.
    with pytest.raises(ValueError, match=f"^{message}"):
        inspect.unwrap(tokens_of)(host, text, None, Words())


def test_a_mask_that_is_no_tensor(host: Host):
    with pytest.raises(ValueError, match=r"^expected an attention mask as a tensor, got list$"):
        inspect.unwrap(_checked_mask)(ZERO, [[1, 1, 1, 1]])


@pytest.mark.parametrize("measure", [rl.band_entropy, rl.band_activation, rl.band_fisher])
def test_every_metric_checks_its_text(host: Host, measure: Any):
    with pytest.raises(ValueError, match=r"^expected at least 2 tokens in every text, got 1"):
        measure(host.model, torch.tensor([[5]]))


def test_pads_may_hold_any_token_of_the_vocabulary(host: Host):
    mask = torch.tensor([[1, 1, 1, 0]])
    filled = [torch.tensor([[5, 6, 7, pad]]) for pad in (0, 60)]
    tokens = [tokens_of(host, ids, mask) for ids in filled]
    assert isinstance(tokens[0], Tokens)
    assert tokens[0].digest == tokens[1].digest
