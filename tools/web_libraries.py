"""The sources of PCRE2 and utf8proc, for the programs in WebAssembly: python3 tools/web_libraries.py FOLDER

Debian has no such packages for that processor. So FOLDER/pcre2 and FOLDER/utf8proc get what Debian 12's own packages
are compiled from, the archives of its mirrors, whose hashes are below. snapshot.debian.org keeps every archive that
Debian ever had, for when these are no longer on the mirrors. Standard library only: no environment is needed.
"""

import hashlib
import io
import shutil
import sys
import tarfile
import urllib.request
from pathlib import Path

MIRRORS = (
    "http://deb.debian.org/debian",
    "https://snapshot.debian.org/archive/debian/20240101T000000Z",
)
ARCHIVES = {
    "pcre2": (
        "pool/main/p/pcre2/pcre2_10.42.orig.tar.gz",
        "c33b418e3b936ee3153de2c61cc638e7e4fe3156022a5c77d0711bcbb9d64f1f",
    ),
    "utf8proc": (
        "pool/main/u/utf8proc/utf8proc_2.8.0.orig.tar.gz",
        "a0a60a79fe6f6d54e7d411facbfcc867a6e198608f2cd992490e46f04b1bcecc",
    ),
}
SECONDS = 60  # until a mirror that says nothing is given up


class FetchError(Exception):
    """An archive cannot be had; the text says why, in one line."""


def download(path: str, sha256: str) -> bytes:
    """The archive, from the first mirror that has it. Raises FetchError."""
    why = ""
    for mirror in MIRRORS:
        try:
            with urllib.request.urlopen(f"{mirror}/{path}", timeout=SECONDS) as answer:
                archive = answer.read()
        except OSError as error:
            why = f"{mirror}/{path}: {error}"
            continue
        digest = hashlib.sha256(archive).hexdigest()
        if digest == sha256:
            return archive
        why = f"{mirror}/{path}: its SHA-256 is {digest}, expected {sha256}"
    raise FetchError(why)


def unpack(archive: bytes, folder: Path) -> None:
    """What the archive's one folder holds, as `folder`. An old one is replaced, a half-written one never stays."""
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(part, filter="data")
    (inside,) = part.iterdir()
    shutil.rmtree(folder, ignore_errors=True)
    inside.rename(folder)
    part.rmdir()


def main() -> int:
    """Returns the exit code."""
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    try:
        for name, (path, sha256) in ARCHIVES.items():
            unpack(download(path, sha256), out / name)
    except FetchError as error:
        print(f"cannot download the sources of {name}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
