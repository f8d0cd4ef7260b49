"""The sources of PCRE2 and utf8proc, to compile them for systems that have no packages of them.

python3 tools/library_sources.py FOLDER

FOLDER/pcre2 and FOLDER/utf8proc get what Debian 12 compiles its packages of: the archives of its mirrors, by their
hashes. snapshot.debian.org keeps every archive that Debian ever had. Standard library only: no environment is needed.
"""

import hashlib
import io
import shutil
import sys
import tarfile
import urllib.request
from pathlib import Path

MIRRORS = ("http://deb.debian.org/debian", "https://snapshot.debian.org/archive/debian/20240101T000000Z")
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


def download(path: str, sha256: str) -> bytes:
    """The archive, from the first mirror that has it. Raises OSError with one line."""
    reasons = []
    for mirror in MIRRORS:
        url = f"{mirror}/{path}"
        try:
            with urllib.request.urlopen(url, timeout=SECONDS) as answer:
                archive = answer.read()
        except OSError as error:
            reasons.append(f"{url}: {error}")
            continue
        digest = hashlib.sha256(archive).hexdigest()
        if digest == sha256:
            return archive
        reasons.append(f"{url}: its SHA-256 is {digest}, expected {sha256}")
    raise OSError("; ".join(reasons))


def unpack(archive: bytes, folder: Path) -> None:
    """The one folder of the archive becomes `folder`, in place of what is there."""
    part = folder.with_name(folder.name + ".part")
    for old in (part, folder):
        shutil.rmtree(old, ignore_errors=True)
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        # Before Python 3.11.4 there is no filter. What is in the archive is known by its hash.
        tar.extractall(part, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (inside,) = part.iterdir()
    inside.rename(folder)
    part.rmdir()


def main() -> int:
    """Returns the exit code."""
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    for name, (path, sha256) in ARCHIVES.items():
        try:
            unpack(download(path, sha256), out / name)
        except OSError as error:
            print(f"cannot get the sources of {name}: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
