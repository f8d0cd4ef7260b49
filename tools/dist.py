"""Packs a release: python3 tools/dist.py ARCHIVE --time SECONDS --system NAME --sources FOLDER FILE...

ARCHIVE (.tar.gz or .zip) gets one folder of its own name with the files: back ends in backends/, licences in licences/,
all else beside each other. Its bytes depend on the files' bytes, their names and the time alone. Standard library only.
"""

import argparse
import gzip
import io
import os
import struct
import sys
import tarfile
import time
import zipfile
from pathlib import Path

# What is linked into the programs of a system besides their own code: a file of the licences' folder, and where its
# text is. {sources} has PCRE2 and utf8proc as they came.
COMMON = {"pcre2.txt": "{sources}/pcre2/LICENCE", "utf8proc.txt": "{sources}/utf8proc/LICENSE.md"}
GNU = {
    "gcc.txt": "/usr/share/doc/gcc-12-base/copyright",
    "glibc.txt": "/usr/share/doc/libc6/copyright",
    "GPL-3.txt": "/usr/share/common-licenses/GPL-3",
    "LGPL-2.1.txt": "/usr/share/common-licenses/LGPL-2.1",
}
ZIG_LIB = "build/zig/lib/python3*/site-packages/ziglang"
ZIG = {
    "zig.txt": f"{ZIG_LIB}/LICENSE",
    "libcxx.txt": f"{ZIG_LIB}/lib/libcxx/LICENSE.TXT",
    "libcxxabi.txt": f"{ZIG_LIB}/lib/libcxxabi/LICENSE.TXT",
    "libunwind.txt": f"{ZIG_LIB}/lib/libunwind/LICENSE.TXT",
}
MINGW = {"mingw.txt": f"{ZIG_LIB}/lib/libc/mingw/COPYING"}
LICENCES = {"linux": COMMON | GNU, "macos": COMMON | ZIG, "windows": COMMON | ZIG | MINGW}

README = """\
Small programs that run language models with quantized weights, and a tiny model for each.

    {run} model.bin -i "Once upon a time"
    {run} --help

Each of runq, runq_w8a8, runq_gptq and runq_moe runs the model file that is called like it. For models of your own, and
for what the programs compute, see the project's pages. What else is in here stands in licences/licences.md.
"""


def licence_text(pattern: str, sources: str) -> bytes:
    """The text of a licence. Raises OSError if there is none."""
    path = pattern.format(sources=sources)
    found = sorted(Path().glob(path)) if not path.startswith("/") else [Path(path)]
    if not found:
        raise FileNotFoundError(f"{path}: a licence that is not there")
    return found[0].read_bytes()


def without_time(program: bytes) -> bytes:
    """A program or library for Windows without the time of linking, which zig's linker cannot leave out.

    Microsoft's "PE Format": the offset of the signature is at 0x3C; behind it the COFF header, its time 4 bytes in.
    """
    (at,) = struct.unpack_from("<I", program, 0x3C)
    if program[at : at + 4] != b"PE\0\0":
        raise ValueError("no program or library for Windows")
    return program[: at + 8] + bytes(4) + program[at + 12 :]


def members(system: str, sources: str, files: list[Path]) -> dict[str, tuple[bytes, int]]:
    """Bytes and mode of every file of the release, by its name in the folder."""
    kind = system.split("-")[0]
    found = {}
    for path in files:
        data = path.read_bytes()
        if path.suffix in (".exe", ".dll"):
            try:
                data = without_time(data)
            except (ValueError, struct.error) as error:
                raise OSError(f"{path}: {error}") from error
        program = path.parts[0] == "build"
        folder = "backends/" if path.parent.name == "backends" else "licences/" if path.name == "licences.md" else ""
        found[folder + path.name] = (data, 0o755 if program else 0o644)
    for name, pattern in LICENCES[kind].items():
        found[f"licences/{name}"] = (licence_text(pattern, sources), 0o644)
    run = "runq.exe" if kind == "windows" else "./runq"
    found["README.txt"] = (README.format(run=run).encode(), 0o644)
    return dict(sorted(found.items()))


def tar_gz(folder: str, files: dict[str, tuple[bytes, int]], seconds: int) -> bytes:
    """An archive of them, owned by nobody in particular."""
    tar_bytes = io.BytesIO()
    with tarfile.open(fileobj=tar_bytes, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, (data, mode) in files.items():
            info = tarfile.TarInfo(f"{folder}/{name}")
            info.size, info.mode, info.mtime = len(data), mode, seconds
            tar.addfile(info, io.BytesIO(data))
    return gzip.compress(tar_bytes.getvalue(), 9, mtime=0)


def zipped(folder: str, files: dict[str, tuple[bytes, int]], seconds: int) -> bytes:
    """The same as a ZIP file, which has no times before 1980."""
    moment = max(time.gmtime(seconds)[:6], (1980, 1, 1, 0, 0, 0))
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, (data, mode) in files.items():
            info = zipfile.ZipInfo(f"{folder}/{name}", moment)
            info.external_attr, info.create_system = (0o100000 | mode) << 16, 3
            archive.writestr(info, data, zipfile.ZIP_DEFLATED, 9)
    return out.getvalue()


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description="Packs a release.")
    parser.add_argument("archive", type=Path)
    parser.add_argument("--time", type=int, required=True)
    parser.add_argument("--system", required=True)
    parser.add_argument("--sources", required=True)
    parser.add_argument("files", nargs="+", type=Path)
    args = parser.parse_args()
    name = args.archive.name
    folder, pack = (name[:-4], zipped) if name.endswith(".zip") else (name.removesuffix(".tar.gz"), tar_gz)
    part = args.archive.with_name(name + ".part")
    try:
        part.write_bytes(pack(folder, members(args.system, args.sources, args.files), args.time))
        os.replace(part, args.archive)
    except OSError as error:
        print(f"{args.archive}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
