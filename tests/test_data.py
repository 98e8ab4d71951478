"""From documents to windows: which tokens, in which order, and going on from every one of them."""

from __future__ import annotations

import gzip
import hashlib
import inspect
import json
import pydoc_data.topics
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ropelens as rl
from ropelens.data import Cursor, Window, Windows
from ropelens.hosts.load import smollm2_folder

FITS = ("clip", "split", "pack")
ALPHABET = "abcdefgh"


def letters(before: str = "", after: str = "", bos: str | None = "<s>") -> Any:
    """A tokenizer with one token a letter: a = 3, b = 4, ..., and <s> = 1, </s> = 2 where asked for."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *ALPHABET])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    single = " ".join(filter(None, [before, "$A", after]))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, unk_token="<unk>")


PLAIN = letters()
TEXTS = ["abcdefg", "", "hg", "abcabcabcabca", "d", "efghefghe"]


def ids_of(text: str) -> list[int]:
    return [3 + ALPHABET.index(letter) for letter in text]


def definition(
    texts: list[str], context: int, fit: str, before: list[int], after: list[int]
) -> list[tuple[list[int], list[int]]]:
    """The windows and their lengths, by the rules in words."""
    found = []
    documents = [ids_of(text) for text in texts if text]
    if fit == "clip":
        for ids in documents:
            whole = before + ids + after
            if len(whole) >= context:
                found.append((whole[:context], [context]))
    elif fit == "split":
        size = context - len(before)
        for ids in documents:
            rest = ids + after
            while len(rest) >= size:
                found.append((before + rest[:size], [context]))
                rest = rest[size:]
    else:
        stream = [(i, number) for number, ids in enumerate(documents) for i in before + ids + after]
        for start in range(0, len(stream) - context + 1, context):
            window = stream[start : start + context]
            owners = [number for _, number in window]
            lengths = [owners.count(number) for number in sorted(set(owners))]
            found.append(([i for i, _ in window], lengths))
    return found


def seen(stream: Any) -> list[tuple[list[int], list[int]]]:
    return [(window.ids.tolist(), list(window.lengths)) for window in stream]


def same(a: Window, b: Window) -> bool:
    rest = [(w.lengths, w.documents, w.index, w.after) for w in (a, b)]
    return torch.equal(a.ids, b.ids) and rest[0] == rest[1]


@settings(deadline=None, max_examples=60)
@given(
    texts=st.lists(st.text(ALPHABET, max_size=14), min_size=1, max_size=6),
    context=st.integers(2, 6),
    fit=st.sampled_from(FITS),
    special=st.sampled_from([("", ""), ("<s>", ""), ("", "</s>"), ("<s>", "</s>")]),
    n=st.integers(1, 3),
)
def test_windows_are_those_of_the_definition_resumed_anywhere_in_any_shard(texts, context, fit, special, n):
    before, after = ([{"<s>": 1, "</s>": 2}[token]] if token else [] for token in special)
    wanted = definition(texts, context, fit, before, after)
    tokenizer = TOKENIZERS[special]
    stream = rl.windows(texts, tokenizer, context=context, fit=fit)
    if not wanted:
        with pytest.raises(ValueError, match="gave no window"):
            list(stream)
        return
    whole = list(stream)
    assert seen(whole) == wanted
    assert [window.index for window in whole] == list(range(len(whole)))
    for k, window in enumerate(whole):
        rest = list(stream.read(Cursor(**json.loads(json.dumps(asdict(window.after))))))
        assert len(rest) == len(whole) - k - 1
        assert all(map(same, rest, whole[k + 1 :]))
    for i in range(n):
        part = rl.windows(texts, tokenizer, context=context, fit=fit, shard=(i, n))
        assert all(map(same, part, whole[i::n]))
        assert len(list(part)) == len(whole[i::n])
        for k, window in enumerate(whole[i::n]):
            assert [w.index for w in part.read(window.after)] == [w.index for w in whole[i::n][k + 1 :]]


TOKENIZERS = {(b, a): letters(b, a) for b in ("", "<s>") for a in ("", "</s>")}


def folder_of(tmp_path: Path) -> Path:
    """TEXTS and more, in every format; the order of the names is that of the letters in them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.txt").write_text("abcdefgabc")
    rows = [{"text": text, "n": 1} for text in TEXTS]
    (folder / "b.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    (folder / "c.json").write_text(json.dumps(rows[:3]))
    pq.write_table(pa.table({"n": [1, 2, 3], "text": TEXTS[3:]}), folder / "d.parquet", row_group_size=2)
    (folder / "deep" / "e.txt.gz").write_bytes(gzip.compress(b"hgfedcba"))
    (folder / "deep" / "f.jsonl.gz").write_bytes(gzip.compress(b'{"text": "aaaabbbb"}\n{"text": null}\n'))
    (folder / "g.jsonl").write_text("")
    (folder / ".hidden.txt").write_text("cccccccc")
    (folder / "notes.md").write_text("cccccccc")
    return folder


IN_FOLDER = ["abcdefgabc", *TEXTS, *TEXTS[:3], *TEXTS[3:], "hgfedcba", "aaaabbbb"]


@pytest.mark.parametrize("fit", FITS)
def test_files_of_every_format(tmp_path: Path, fit: Any):
    stream = rl.windows(str(folder_of(tmp_path)), PLAIN, context=4, fit=fit)
    whole = list(stream)
    assert seen(whole) == definition(IN_FOLDER, 4, fit, [], [])
    for k, window in enumerate(whole):
        assert all(map(same, stream.read(window.after), whole[k + 1 :])), k
        assert len(list(stream.read(window.after))) == len(whole) - k - 1
    assert {window.after.shard for window in whole} >= {0, 1, 2, 3}


def test_paths_globs_and_single_files(tmp_path: Path):
    folder = folder_of(tmp_path)
    one = [window.ids.tolist() for window in rl.windows(folder / "a.txt", PLAIN, context=4, fit="split")]
    assert one == [ids_of("abcd"), ids_of("efga")]
    two = rl.windows(str(folder / "**" / "*.txt*"), PLAIN, context=4)
    assert [window.ids.tolist() for window in two] == [ids_of("abcd"), ids_of("hgfe")]
    listed = rl.windows([folder / "deep" / "e.txt.gz", folder / "a.txt"], PLAIN, context=4)
    assert [window.ids.tolist() for window in listed] == [ids_of("hgfe"), ids_of("abcd")]


def test_another_column(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"id": 1, "body": "abcd"}\n')
    stream = rl.windows(tmp_path / "a.jsonl", PLAIN, context=4, text_column="body")
    assert [window.ids.tolist() for window in stream] == [ids_of("abcd")]


def test_generators_are_read_once_and_kept():
    stream = rl.windows((text for text in TEXTS), PLAIN, context=4)
    assert seen(stream) == seen(stream) == definition(TEXTS, 4, "clip", [], [])


def test_documents_are_told_apart_by_their_whole_text(tmp_path: Path):
    hashes = [hashlib.sha256(text.encode()).hexdigest()[:32] for text in TEXTS if text]
    packed = list(rl.windows(TEXTS, PLAIN, context=16, fit="pack"))
    assert packed[0].lengths == (7, 2, 7)
    assert packed[0].documents == (hashes[0], hashes[1], hashes[2])
    assert packed[1].documents == (hashes[2], hashes[3], hashes[4])
    backwards = rl.windows(TEXTS[::-1], PLAIN, context=4)
    forwards = rl.windows(TEXTS, PLAIN, context=4)
    assert [w.documents for w in backwards] == [w.documents for w in forwards][::-1]
    (tmp_path / "a.txt").write_text(TEXTS[0])
    assert next(iter(rl.windows(tmp_path, PLAIN, context=4))).documents == (hashes[0],)


@pytest.mark.parametrize(
    ("own", "bos", "first"),
    [
        ("", None, []),
        ("", True, [1]),
        ("", False, []),
        ("<s>", None, [1]),
        ("<s>", True, [1]),
        ("<s>", False, []),
    ],
)
def test_bos(own: str, bos: bool | None, first: list[int]):
    for fit in FITS:
        stream = rl.windows(["abcdefghab", "gh"], TOKENIZERS[own, ""], context=4, fit=fit, bos=bos)
        assert seen(stream) == definition(["abcdefghab", "gh"], 4, fit, first, [])


def test_ready_ids():
    ids = torch.arange(12).view(4, 3)
    stream = rl.windows(ids.int(), shard=(1, 2))
    windows = list(stream)
    assert [window.ids.tolist() for window in windows] == [[3, 4, 5], [9, 10, 11]]
    assert [window.index for window in windows] == [1, 3]
    assert [window.index for window in stream.read(windows[0].after)] == [3]
    assert windows[0].documents != windows[1].documents
    assert stream.describe() == "4 ready windows of 3 tokens"


def test_limit_counts_the_tokens_of_all_shards():
    texts = ["abcdabcdabcdabcd"] * 3
    stream = rl.windows(texts, PLAIN, context=4, fit="split", limit=17)
    assert stream.n_windows == 5
    assert [window.index for window in stream] == [0, 1, 2, 3, 4]
    parts = [rl.windows(texts, PLAIN, context=4, fit="split", limit=17, shard=(i, 2)) for i in (0, 1)]
    assert [[window.index for window in part] for part in parts] == [[0, 2, 4], [1, 3]]
    last = list(stream)[-1]
    assert list(stream.read(last.after)) == []
    longer = rl.windows(texts, PLAIN, context=4, fit="split", limit=21)
    assert [window.index for window in longer.read(last.after)] == [5]
    assert rl.windows(texts, PLAIN, context=4).n_windows is None


def test_nothing_is_read_past_the_limit(tmp_path: Path):
    (tmp_path / "a.txt").write_text("abcd")
    (tmp_path / "b.jsonl").write_text("not JSON")
    assert len(list(rl.windows(tmp_path, PLAIN, context=4, limit=4))) == 1


def test_fingerprint_follows_what_decides_the_windows(tmp_path: Path):
    folder = folder_of(tmp_path)

    def fingerprint(source: Any = folder, tokenizer: Any = PLAIN, **options: Any) -> str:
        return json.dumps(rl.windows(source, tokenizer, **{"context": 4, **options}).fingerprint)

    first = fingerprint()
    assert first == fingerprint(limit=100, shard=(1, 2))
    PLAIN(["ab", "abc"], padding=False, truncation=True, max_length=2)  # leaves a mark on the tokenizer
    assert first == fingerprint()
    others = [
        fingerprint(tokenizer=TOKENIZERS["<s>", ""]),
        fingerprint(bos=True),
        fingerprint(context=5),
        fingerprint(fit="pack"),
        fingerprint(text_column="n"),
        fingerprint(source=TEXTS),
        fingerprint(source=TEXTS[1:]),
        fingerprint(source=torch.zeros(2, 4, dtype=torch.int64)),
        fingerprint(source=torch.ones(2, 4, dtype=torch.int64)),
    ]
    (folder / "a.txt").write_text("abcdefgabd")
    others.append(fingerprint())
    assert len({first, *others}) == 11


def test_describe():
    assert rl.windows(TEXTS, PLAIN, context=4).describe() == "6 texts, clipped to 4 tokens"
    split = rl.windows(TEXTS, PLAIN, context=1024, fit="split", bos=True)
    assert split.describe() == "6 texts, split into 1,024 tokens, each window after [1]"


def test_bytes_that_are_no_utf8_are_replaced_counted_and_said_once(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"ab\xffcd")
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "a\xe9b"}\n{"text": "ab\\ud800c"}\n{"text": "abcd"}\n')
    stream = rl.windows(tmp_path, PLAIN, context=3)
    with pytest.warns(UserWarning, match="document 0 of shard 0 holds bytes that are no UTF-8") as said:
        found = list(stream)
    assert len(said) == 1
    assert [window.ids.tolist() for window in found] == [[3, 4, 0], [3, 0, 4], [3, 4, 0], [3, 4, 5]]
    assert stream.counts.replaced == 3
    assert stream.counts.documents == 4


def test_counts():
    stream = rl.windows(TEXTS, PLAIN, context=5)
    list(stream)
    assert asdict(stream.counts) == {"documents": 6, "empty": 1, "short": 2, "replaced": 0, "longest": 2}


@pytest.mark.parametrize(
    ("texts", "fit", "message"),
    [
        (
            TEXTS,
            "clip",
            "6 texts gave no window of 100 tokens: 6 documents were read and dropped, 1 of them empty, the "
            'longest of 13 tokens: choose a shorter context, or fit="pack"',
        ),
        (TEXTS, "pack", "6 texts gave .* 6 documents were read, 32 tokens in all: choose a shorter context"),
        (["", ""], "split", "2 texts gave .* 2 documents were read, none with any text"),
    ],
)
def test_a_source_that_yields_nothing(texts: list[str], fit: Any, message: str):
    with pytest.raises(ValueError, match=f"^{message}$"):
        list(rl.windows(texts, PLAIN, context=100, fit=fit))


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ([], {}, "expected at least one document, got an empty list"),
        (["a", 7], {}, "expected a list of strings, got a int in it"),
        (7, {}, "expected a path, a hub dataset, strings or a tensor of token ids, got int"),
        (
            "The cat sat",
            {},
            "expected a file, folder, glob or hub dataset, .* called 'The cat sat'",
        ),
        ("none.txt", {}, "there is no file or folder none.txt"),
        ("./none", {}, "there is no file or folder ./none"),
        (Path("none"), {}, "there is no file or folder none"),
        ("none/*.txt", {}, r"no file matches none/\*.txt"),
        (TEXTS, {"context": None}, "expected context=, at least 2 tokens a window, got None"),
        (TEXTS, {"context": 1}, "expected context=, at least 2 tokens a window, got 1"),
        (TEXTS, {"tokenizer": None}, "expected a tokenizer for text: pass model.tokenizer, or token ids"),
        (TEXTS, {"fit": "stretch"}, 'expected fit="clip", "split" or "pack", got \'stretch\''),
        (TEXTS, {"shard": (2, 2)}, r"expected shard=\(i, n\) with 0 <= i < n, got \(2, 2\)"),
        (TEXTS, {"limit": 0}, "expected a limit of at least 1 token, got 0"),
        (
            TEXTS,
            {"tokenizer": letters(bos=None), "bos": True},
            "this tokenizer has no BOS token: leave bos=None, or set tokenizer.bos_token",
        ),
        (torch.zeros(2, 4), {}, "expected integer token ids, got a tensor of torch.float32"),
        (torch.zeros(4, dtype=torch.int64), {}, r"expected token ids of shape \[batch, pos\], .* got \[4\]"),
        (torch.zeros(2, 5, dtype=torch.int64), {}, "expected rows of 4 token ids, the context .* got 5"),
    ],
)
def test_bad_arguments(source: Any, options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=f"^{message}"):
        inspect.unwrap(rl.windows)(source, **{"tokenizer": PLAIN, "context": 4, **options})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"title": "x", "body": "y"}', "there is no column 'text' in .*a.jsonl: .* title, body"),
        (
            "a.json",
            '[{"body": "y"}]',
            "there is no column 'text' in .*a.json: choose .* among body",
        ),
        ("a.jsonl", '{"text": "abcd"}\n{"text', r"expected JSON in .*a.jsonl, line 2: "),
        ("a.jsonl", '"abcd"', "expected JSON objects in .*a.jsonl, got a str"),
        ("a.jsonl", '{"text": 7}', "expected text in column 'text' of .*a.jsonl, got int"),
        ("a.csv", "text", r"expected \*.txt, .*, got .*a.csv"),
        ("a.jsonl", "", ".*a.jsonl gave no window of 4 tokens: 0 documents were read, none with any text"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: str, message: str):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=f"^{message}"):
        list(rl.windows(tmp_path / name, PLAIN, context=4))


def test_parquet_without_the_column(tmp_path: Path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"id": [1], "body": ["abcd"]}), tmp_path / "a.parquet")
    with pytest.raises(
        ValueError, match=r"^there is no column 'text' in .*: choose text_column= among id, body$"
    ):
        list(rl.windows(tmp_path / "a.parquet", PLAIN, context=4))


def test_an_empty_folder(tmp_path: Path):
    with pytest.raises(ValueError, match=r"^expected files in .*, \*\.txt, .*, found none$"):
        rl.windows(tmp_path, PLAIN, context=4)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch):
    """A hub that has one dataset, TEXTS in three shards, and writes down what it was asked."""
    import datasets
    import huggingface_hub

    asked: list[Any] = []

    def info(self: Any, name: str, revision: str | None = None) -> Any:
        return SimpleNamespace(sha=f"sha of {revision or 'main'}")

    def load(name: str, config: str | None, **options: Any) -> Any:
        asked.append((name, config, options))
        rows = [{"text": text, "n": 1} for text in TEXTS]
        return datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=3)

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", info)
    monkeypatch.setattr(datasets, "load_dataset", load)
    return asked


@pytest.mark.parametrize("fit", FITS)
def test_a_hub_dataset_is_streamed_shard_by_shard(hub: list[Any], fit: Any):
    stream = rl.windows("owner/name:config@v1", PLAIN, context=4, fit=fit, split="validation")
    options = {"split": "validation", "streaming": True, "revision": "sha of v1"}
    assert hub == [("owner/name", "config", options)]
    whole = list(stream)
    assert seen(whole) == definition(TEXTS, 4, fit, [], [])
    for k, window in enumerate(whole):
        assert all(map(same, stream.read(window.after), whole[k + 1 :]))
        assert len(list(stream.read(window.after))) == len(whole) - k - 1
    assert {window.after.shard for window in whole} == {0, 1, 2}
    assert stream.fingerprint["source"] == {
        "hub": "owner/name:config",
        "revision": "sha of v1",
        "split": "validation",
        "column": "text",
        "shards": 3,
    }


def test_a_hub_dataset_without_the_column(hub: list[Any]):
    with pytest.raises(ValueError, match=r"^there is no column 'body' in owner/name: .* among text, n$"):
        rl.windows("owner/name", PLAIN, context=4, text_column="body")


def test_a_name_that_is_nowhere():
    message = r"^'owner/name' is neither a file, folder or glob here nor a dataset that the hub gives: "
    with pytest.raises(ValueError, match=message):
        rl.windows("owner/name", PLAIN, context=4)


@pytest.fixture(scope="module")
def smollm2_tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_folder())


@pytest.mark.real
@pytest.mark.parametrize("context", [2, 64, 1024])
def test_clipping_reads_a_prefix_and_finds_the_tokens_of_the_whole(smollm2_tokenizer: Any, context: int):
    topics = [text for text in pydoc_data.topics.topics.values() if len(text) > 2000]
    whole = "\n".join(topics)
    texts = [
        *topics,
        whole,
        whole.replace(" ", ""),
        whole[::-1],
        "é漢字🙂" * 5000,
        "\n" * 20_000,
        " a" * 9000,
    ]
    found = [window.ids.tolist() for window in rl.windows(texts, smollm2_tokenizer, context=context)]
    encoded = [smollm2_tokenizer.encode(text, verbose=False) for text in texts]
    assert found == [ids[:context] for ids in encoded if len(ids) >= context]


@pytest.mark.real
@pytest.mark.parametrize("text", ["a" * 1_000_000, "abcdefghij" * 100_000], ids=["one letter", "ten"])
def test_a_million_letters_without_a_space(smollm2_tokenizer: Any, text: str):
    for fit in FITS:
        start = time.perf_counter()
        window = next(iter(rl.windows([text], smollm2_tokenizer, context=2048, fit=fit)))
        assert window.ids.tolist() == smollm2_tokenizer.encode(text, verbose=False)[:2048]
        assert time.perf_counter() - start < 60  # it takes 1 s; what hangs takes hours


def test_the_types_say_what_comes():
    stream = rl.windows(TEXTS, PLAIN, context=4)
    assert isinstance(stream, Windows)
    window = next(iter(stream))
    assert isinstance(window, Window)
    assert window.ids.dtype == torch.int64
