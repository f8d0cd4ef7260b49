"""What `make dist` made: make test-dist. Built twice, equal bytes; the programs run where nothing else is."""

import hashlib
import io
import os
import re
import shutil
import subprocess
import tarfile
import zipfile

import pytest

from tests.helpers import ROOT
from tests.test_wine import WINE, environment

DIST = ROOT / "dist"
PROGRAMS = {
    "runq": "model.bin",
    "runq_w8a8": "model_w8a8.bin",
    "runq_gptq": "model_gptq.bin",
    "runq_moe": "model_moe.bin",
}
SYSTEMS = ("linux-x86_64", "linux-aarch64", "macos-arm64", "windows-x86_64")
STORY = ["-i", "Once upon a time", "-t", "0", "-n", "64"]


def archive(system):
    found = sorted(DIST.glob(f"runq-*-{system}.*"))
    if not found:
        pytest.skip("needs make dist")
    return found[-1]


def unpacked(system, folder):
    """The one folder of a release."""
    path = archive(system)
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as z:
            z.extractall(folder)
    else:
        with tarfile.open(path) as tar:
            tar.extractall(folder, **({"filter": "tar"} if hasattr(tarfile, "tar_filter") else {}))  # Python 3.11.4
    (inside,) = folder.iterdir()
    return inside


def story(program):
    """What the program of this checkout prints."""
    done = subprocess.run([ROOT / program, ROOT / PROGRAMS[program], *STORY], capture_output=True, check=True)
    return done.stdout


@pytest.mark.parametrize("system", SYSTEMS)
def test_what_a_release_has(system, tmp_path):
    path, folder = archive(system), unpacked(system, tmp_path)
    assert f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}" in (DIST / "SHA256SUMS").read_text()
    suffix = ".exe" if system.startswith("windows") else ""
    for program, model in PROGRAMS.items():
        assert os.access(folder / (program + suffix), os.X_OK) or suffix
        assert (folder / model).read_bytes() == (ROOT / model).read_bytes()
    texts = {path.name for path in (folder / "licences").iterdir()}
    assert {"licences.md", "pcre2.txt", "utf8proc.txt"} < texts
    assert ("glibc.txt" if system.startswith("linux") else "libcxx.txt") in texts
    assert "MIT" in (folder / "LICENSE").read_text()
    for path in folder.rglob("*"):
        if path.is_file() and path.parent.name != "licences":
            assert str(ROOT).encode() not in path.read_bytes(), (
                f"{path.name} has the name of the folder it was built in"
            )


@pytest.mark.parametrize("system", SYSTEMS)
def test_archives_say_nothing_of_who_made_them(system):
    path = archive(system)
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as z:
            entries = [(i.filename, i.date_time) for i in z.infolist()]
    else:
        assert path.read_bytes()[4:8] == bytes(4)  # no time in the head of gzip
        with tarfile.open(path) as tar:
            members = tar.getmembers()
        assert {(m.uid, m.gid, m.uname, m.gname) for m in members} == {(0, 0, "", "")}
        entries = [(m.name, m.mtime) for m in members]
    assert entries == sorted(entries)
    assert len({time for _, time in entries}) == 1


def run_alone(folder, program, *runner):
    """The program in a root folder that has nothing but it and its model."""
    root = folder / "root"
    root.mkdir()
    for name in (program, PROGRAMS[program]):
        shutil.copy(folder / name, root / name)
    inside = []
    if runner:
        shutil.copy(shutil.which(runner[0]), root / "qemu")
        inside = ["/qemu", *runner[1:]]
    return subprocess.run(
        ["unshare", "-r", "chroot", root, *inside, f"/{program}", f"/{PROGRAMS[program]}", *STORY],
        capture_output=True, check=False, env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
    )  # fmt: skip


@pytest.mark.skipif(
    subprocess.run(["unshare", "-r", "true"], capture_output=True, check=False).returncode != 0,
    reason="needs unshare -r",
)
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("system", ["linux-x86_64", "linux-aarch64"])
def test_a_program_for_linux_needs_nothing(system, program, tmp_path):
    folder = unpacked(system, tmp_path)
    runner = []
    if system == "linux-aarch64" and os.uname().machine != "aarch64":
        runner = ["qemu-aarch64-static"]
        if shutil.which(runner[0]) is None:
            pytest.skip("needs qemu-user-static")
    done = run_alone(folder, program, *runner)
    assert done.returncode == 0, done.stderr
    assert done.stdout == story(program)


@pytest.mark.parametrize(("cpu", "kernel"), [("Nehalem", "portable"), ("Haswell", "avx2")])
@pytest.mark.parametrize("program", PROGRAMS)
def test_one_file_for_any_x86(program, cpu, kernel, tmp_path):
    """Processors that lack instructions of this one's."""
    emulator = shutil.which("qemu-x86_64-static") or shutil.which("qemu-x86_64")
    if emulator is None:
        pytest.skip("needs qemu-user")
    folder = unpacked("linux-x86_64", tmp_path)
    done = subprocess.run(
        [emulator, "-cpu", cpu, folder / program, folder / PROGRAMS[program], *STORY], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == story(program)
    assert kernel in re.search(r"(?m)^run +(.*?), \d thread", done.stderr.decode())[1]


@pytest.mark.parametrize(("cpu", "kernel"), [("cortex-a53", "neon"), ("neoverse-n1", "dotprod"), ("max", "i8mm")])
def test_one_file_for_any_arm(cpu, kernel, tmp_path):
    if shutil.which("qemu-aarch64-static") is None:
        pytest.skip("needs qemu-user-static")
    folder = unpacked("linux-aarch64", tmp_path)
    done = subprocess.run(
        ["qemu-aarch64-static", "-cpu", cpu, folder / "runq", folder / "model.bin", *STORY],
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == story("runq")
    assert kernel in re.search(r"(?m)^run +(.*?), \d thread", done.stderr.decode())[1]


@pytest.mark.skipif(WINE is None, reason="needs wine: apt-get install wine64")
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_for_windows(program, tmp_path):
    folder = unpacked("windows-x86_64", tmp_path)
    done = subprocess.run(
        [WINE, folder / f"{program}.exe", PROGRAMS[program], *STORY], capture_output=True, check=False, cwd=folder,
        env=environment(), timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == story(program)
    if program == "runq_gptq":  # it is for any processor, and takes a back end beside it
        assert re.search(rb"(?m)^run +back end avx", done.stderr), done.stderr


def test_built_again_in_another_folder(tmp_path):
    """Another checkout, another path, no file and no cache of this one's; at another time."""
    archives = {system: archive(system) for system in SYSTEMS}
    tree = tmp_path / "elsewhere"
    subprocess.run(["git", "clone", "--quiet", "--local", ROOT, tree], check=True)
    dirty = subprocess.run(
        ["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert dirty == "", "what is not committed is not in the other folder"
    (tree / "build").mkdir()
    # Compilers are shared, but not what zig remembers of them.
    shutil.copytree(
        ROOT / "build" / "zig", tree / "build" / "zig", symlinks=True, ignore=shutil.ignore_patterns("cache")
    )
    built = subprocess.run(
        ["make", f"-j{os.cpu_count()}", "dist"], cwd=tree, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr[-2000:]
    for system, path in archives.items():
        assert (tree / "dist" / path.name).read_bytes() == path.read_bytes(), (
            f"{system}: {first_difference(path, tree)}"
        )


def first_difference(path, tree):
    """The files of an archive that differ."""

    def contents(data):
        if path.suffix == ".zip":
            with zipfile.ZipFile(io.BytesIO(data)) as z:
                return {name: z.read(name) for name in z.namelist()}
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            return {m.name: tar.extractfile(m).read() for m in tar.getmembers()}

    one, two = contents(path.read_bytes()), contents((tree / "dist" / path.name).read_bytes())
    return sorted(name for name in one.keys() | two.keys() if one.get(name) != two.get(name))
