"""tools/corpora.py, without the network: what becomes of what it fetched."""

import importlib.util
import zlib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def corpora() -> Any:
    spec = importlib.util.spec_from_file_location("corpora", ROOT / "tools" / "corpora.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def serialised(lines: list[str]) -> bytes:
    """A character vector as R's lazy-load database holds it."""

    def number(n: int) -> bytes:
        return n.to_bytes(4, "big")

    data = b"X\n" + number(3) + number(0x40201) + number(0x30500) + number(5) + b"UTF-8"
    data += number(16) + number(len(lines))
    for line in lines:
        data += number(0x40009) + number(len(line.encode())) + line.encode()
    return number(len(data)) + zlib.compress(data)


def test_novels(corpora: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    data = tmp_path / "unpacked" / "usr" / "lib" / "R" / "site-library" / "books" / "data"
    data.mkdir(parents=True)
    books = [["", "AN ODD BOOK", "", "Chapter é"], ["Another", "line"]]
    (data / "Rdata.rdb").write_bytes(b"".join(map(serialised, books)))
    (tmp_path / "books.deb").touch()
    monkeypatch.setattr(corpora, "call", lambda *command, folder: None)
    found = list(corpora.novels(tmp_path))
    assert found == [("an-odd-book", "AN ODD BOOK\n\nChapter é\n"), ("another", "Another\nline\n")]


def test_plays_lose_their_marks(corpora: Any):
    play = "# Hamlet\n\n**BERNARDO**  \nWho's there? _\\[Aside_\n"
    assert corpora.plain(play) == "Hamlet\n\nBERNARDO\nWho's there? [Aside\n"


def test_a_folder_is_whole_or_not_there(corpora: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(folder: Path):
        yield "one", "text"
        raise OSError("the network is gone")

    monkeypatch.setattr(corpora, "CORPORA", {"good": lambda folder: [("one", "é")], "bad": broken})
    with pytest.raises(OSError, match="the network is gone"):
        corpora.main(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["good"]
    assert (tmp_path / "good" / "one.txt").read_text() == "é"


def test_a_missing_or_failing_tool_is_named(corpora: Any, tmp_path: Path):
    with pytest.raises(SystemExit, match=r"^corpora: no-such-tool is needed to fetch this text: install it"):
        corpora.call("no-such-tool", "pack", folder=tmp_path)
    with pytest.raises(SystemExit, match=r"^corpora: `ls none` failed: .*none"):
        corpora.call("ls", "none", folder=tmp_path)
