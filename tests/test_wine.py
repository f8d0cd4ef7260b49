"""The programs for Windows under Wine, held to what those for Linux print: make test-windows.

Those for macOS are looked at from outside: nothing here runs them.
"""

import atexit
import functools
import json
import os
import re
import shutil
import struct
import subprocess
import time

import pytest

from tests.helpers import ROOT
from tests.test_chat import Terminal

# zig's and the distribution's compiler.
KINDS = ("windows", "windows-mingw")
MODELS = {
    "runq": "tiny-llama.q8",
    "runq_w8a8": "tiny-llama.w8a8",
    "runq_gptq": "tiny-llama.gptq-ladder",
    "runq_moe": "tiny-qwen3-moe.moe-a8w8",
}
RUNS = [(kind, program) for kind in KINDS for program in MODELS]
WINE = next((path for path in map(shutil.which, ("wine64", "/usr/lib/wine/wine64")) if path), None)
NAME = "модель ü.bin"

needs_wine = pytest.mark.skipif(WINE is None, reason="needs wine: apt-get install wine64")


def model(program):
    return ROOT / "build" / "models" / f"{MODELS[program]}.bin"


def exe(kind, program="runq"):
    path = ROOT / "build" / "desks" / kind / f"{program}.exe"
    if not path.exists():
        pytest.skip(f"needs make {kind}")
    return path


def environment():
    prefix = ROOT / "build" / "wine"
    prefix.mkdir(parents=True, exist_ok=True)
    return {
        "PATH": os.environ["PATH"], "HOME": str(prefix), "LC_ALL": "C.UTF-8", "WINEPREFIX": str(prefix),
        "WINEDEBUG": "-all", "WINEDLLOVERRIDES": "mscoree,mshtml=", "TERM": os.environ.get("TERM", "xterm"),
    }  # fmt: skip


@functools.cache
def keep_wine_running():
    """A process that waits until the tests end. While one runs, Wine's servers do, and the next starts at once.

    Otherwise each would start them and hand them its standard output, which then stays open until they end, three
    seconds later.
    """
    waiting = subprocess.Popen(
        [WINE, "cmd"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment()
    )
    waiting.stdout.readline()  # what it says when all of them run
    atexit.register(waiting.stdin.close)


def wine(kind, program, *args, cwd=ROOT, **options):
    keep_wine_running()
    command = [WINE, exe(kind, program), *map(str, args)]
    # Each of our programs prints something. Beside busy processes Wine at times ends one before it has begun.
    for _ in range(3):
        done = subprocess.run(
            command, cwd=cwd, capture_output=True, env=environment(), timeout=300, check=False, **options
        )
        if done.stdout or done.stderr:
            break
    return done


def linux(program, *args, cwd=ROOT, **options):
    return subprocess.run(
        [ROOT / program, *map(str, args)], cwd=cwd, capture_output=True, timeout=300, check=False, **options
    )


@needs_wine
@pytest.mark.parametrize(("kind", "program"), RUNS)
@pytest.mark.parametrize("threads", [1, 2])
def test_ids_are_the_goldens(kind, program, threads):
    golden = json.loads((ROOT / "golden" / "data" / f"{MODELS[program]}.json").read_text())["generations"][-1]
    done = wine(kind, program, model(program), "-i", golden["prompt"], "-t", 0, "-n", 64, "-j", threads, "--print-ids")
    assert done.returncode == 0, done.stderr
    assert [int(i) for i in done.stdout.split(b",")] == golden["new_ids"]
    assert f", {threads} thread".encode() in done.stderr


@needs_wine
@pytest.mark.parametrize("kind", KINDS)
def test_a_back_end_is_loaded(kind):
    golden = json.loads((ROOT / "golden" / "data" / f"{MODELS['runq_gptq']}.json").read_text())["generations"][-1]
    args = ["-i", golden["prompt"], "-t", 0, "-n", 64, "--print-ids", "--backend", "avx2"]
    done = wine(kind, "runq_gptq", model("runq_gptq"), *args)
    assert done.returncode == 0, done.stderr
    assert [int(i) for i in done.stdout.split(b",")] == golden["new_ids"]
    assert b"back end avx2" in done.stderr


@needs_wine
@pytest.mark.parametrize("kind", KINDS)
def test_names_and_texts_in_unicode(kind, tmp_path):
    shutil.copy(model("runq"), tmp_path / NAME)
    (tmp_path / "текст.txt").write_text("Zoë sagte: „Grüße“ 😀\n", encoding="utf-8", newline="")
    text = (tmp_path / "текст.txt").read_bytes()
    for args in (["-i", "Zoë et 日本 😀"], ["-f", "текст.txt"], ["-f", "-"]):
        words = [NAME, *args, "-t", 0, "-n", 8]
        there, here = (
            wine(kind, "runq", *words, cwd=tmp_path, input=text),
            linux("runq", *words, cwd=tmp_path, input=text),
        )
        assert there.returncode == 0, there.stderr.decode()
        assert there.stdout == here.stdout
    words = [NAME, "--ppl", "текст.txt"]
    there, here = wine(kind, "runq", *words, cwd=tmp_path), linux("runq", *words, cwd=tmp_path)
    found, expected = (float(done.stdout.split()[1]) for done in (there, here))
    assert found == pytest.approx(expected, rel=1e-5)  # another processor's kernels add up in another order


def bad_files(folder):
    """Command lines that fail, and what is there for them."""
    good = model("runq").read_bytes()
    (folder / "empty.bin").touch()
    (folder / "short.bin").write_bytes(good[:-1])
    (folder / "flipped.bin").write_bytes(good[:5] + bytes([good[5] ^ 1]) + good[6:])
    (folder / "a.gguf").write_bytes(b"GGUF" + bytes(100))
    (folder / "folder").mkdir()
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").touch()
    shutil.copy(model("runq"), folder / NAME)
    shutil.copy(model("runq_moe"), folder / "moe.bin")
    for path in (
        "empty.bin",
        "short.bin",
        "flipped.bin",
        "a.gguf",
        "folder",
        "hf",
        "gone/missing.bin",
        "moe.bin",
        "ничего.bin",
    ):
        yield [path, "-i", "x"]
    yield ["missing.bin", "-i", "x"]
    yield [NAME, "--file", "missing.txt"]
    yield [NAME, "--file", "folder/missing.txt"]
    yield [NAME, "--ids", "1", "--trace", "gone/out.safetensors"]
    yield [NAME, "--ids", "1", "--trace", "folder"]
    yield [NAME, "--ids", "1", "--trace", NAME]
    yield [NAME, "--ids", "1", "--trace", f"folder/../{NAME}"]
    yield [NAME, "--no-such-option"]
    yield [NAME, "--ids", "99999"]
    yield []


@needs_wine
@pytest.mark.parametrize("kind", KINDS)
def test_threads_end(kind):
    """Threads that fell asleep a moment ago are woken at the end: where they were not, one start in ten hung."""
    for _ in range(40):
        done = wine(kind, "runq", model("runq"), "--ids", 99999, "-j", 2)
        assert done.returncode == 2, done.stderr


@needs_wine
@pytest.mark.parametrize("kind", KINDS)
def test_error_lines_are_those_of_linux(kind, tmp_path):
    names = sorted(path.name for path in tmp_path.iterdir())
    for args in bad_files(tmp_path):
        there, here = wine(kind, "runq", *args, cwd=tmp_path), linux("runq", *args, cwd=tmp_path)
        line = there.stderr.decode().replace("Z:" + str(tmp_path).replace("/", "\\"), str(tmp_path))
        assert line == here.stderr.decode(), args
        assert (there.returncode, there.stdout) == (here.returncode, b""), args
        names = names or sorted(path.name for path in tmp_path.iterdir())
        assert sorted(path.name for path in tmp_path.iterdir()) == names  # nothing half-written


@needs_wine
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_is_replaced_as_a_whole(kind, tmp_path):
    out = tmp_path / "след.safetensors"
    out.write_bytes(b"before")
    args = [model("runq"), "--ids", "1,2,3", "-n", 1, "-t", 0, "--trace"]
    done = wine(kind, "runq", *args, out.name, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    linux("runq", *args, "linux", cwd=tmp_path)
    assert out.stat().st_size == (tmp_path / "linux").stat().st_size
    assert {path.name for path in tmp_path.iterdir()} == {out.name, "linux"}


@needs_wine
@pytest.mark.parametrize("kind", KINDS)
def test_chat_through_a_pipe(kind):
    lines = "Grüß Gott, Zoë!\r\n\nOnce upon a time 😀\nlast"
    args = [model("runq"), "-m", "chat", "-t", 0, "-n", 12]
    there, here = wine(kind, "runq", *args, input=lines.encode()), linux("runq", *args, input=lines.encode())
    assert there.returncode == 0, there.stderr
    assert there.stdout == here.stdout
    assert there.stdout.count(b"\n") >= 3


@needs_wine
@pytest.mark.parametrize("kind", KINDS)
def test_output_that_nobody_reads_any_more(kind):
    command = [WINE, exe(kind), model("runq"), "-i", "Once upon a time", "-t", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(300) == 0


@needs_wine
@pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")
@pytest.mark.parametrize("kind", KINDS)
def test_chat_on_a_console(kind, tmp_path):
    chat = Terminal(tmp_path, WINE, exe(kind), model("runq"), "-m", "chat", "-t", 0, "-n", 12, **environment())
    try:
        chat.wait_for(r"^> *$")
        chat.tmux("send-keys", "-t", "chat", "-l", "Grüße, Zoë")
        chat.type("Enter")
        chat.wait_for(r"^> Grüße, Zoë\n.+\n> *$")
        # Windows ends the wait for a line at Ctrl-C. Wine goes on until there is one, and the handler of Ctrl-C runs in
        # a thread of its own, perhaps after that line.
        hint = "Ctrl-D or /bye ends the conversation"
        chat.type("C-c")
        deadline = time.monotonic() + 300
        while hint not in chat.screen() and time.monotonic() < deadline:
            chat.type("Enter")
            time.sleep(0.5)
        chat.wait_for(f"^{hint}")
        chat.say("/save беседа.json")
        chat.wait_for("messages are in беседа.json")
        chat.type("C-d", "Enter")
        assert chat.code() == 0
    finally:
        chat.close()
    saved = next(folder / "беседа.json" for folder in (tmp_path, ROOT) if (folder / "беседа.json").exists())
    messages = json.loads(saved.read_text(encoding="utf-8"))
    saved.unlink()
    here = linux("runq", model("runq"), "-m", "chat", "-t", 0, "-n", 12, input="Grüße, Zoë".encode())
    assert [m["role"] for m in messages] == ["user", "assistant"]
    assert messages[0]["content"] == "Grüße, Zoë"
    assert messages[1]["content"] == here.stdout.decode().rstrip("\n")


@pytest.mark.parametrize(("kind", "program"), RUNS)
def test_windows_programs_need_nothing_beside_them(kind, program):
    """Only libraries that Windows has."""
    if shutil.which("x86_64-w64-mingw32-objdump") is None:
        pytest.skip("needs g++-mingw-w64-x86-64-posix")
    printed = subprocess.run(
        ["x86_64-w64-mingw32-objdump", "-p", exe(kind, program)], capture_output=True, text=True, check=True
    ).stdout
    libraries = {name.lower() for name in re.findall(r"DLL Name: (\S+)", printed)}
    system = {"kernel32.dll", "shell32.dll", "msvcrt.dll", "ntdll.dll", "api-ms-win-core-synch-l1-2-0.dll"}
    assert libraries
    assert {name for name in libraries if not name.startswith("api-ms-win-crt-")} <= system


def linked_with(path):
    """The shared libraries that a Mach-O file names in its load commands: Apple's mach-o/loader.h."""
    data = path.read_bytes()
    magic, _, _, _, n_commands = struct.unpack_from("<5I", data)
    assert magic == 0xFEEDFACF
    names, at = set(), 32
    for _ in range(n_commands):
        command, size = struct.unpack_from("<2I", data, at)
        if command & 0x7FFFFFFF in (0x0C, 0x18, 0x1F):  # LC_LOAD_DYLIB and its weak and re-exporting kinds
            (where,) = struct.unpack_from("<I", data, at + 8)
            names.add(data[at + where : at + size].split(b"\0")[0].decode())
        at += size
    return names


@pytest.mark.parametrize("program", MODELS)
def test_macos_programs_by_what_they_are_linked_with(program):
    path = ROOT / "build" / "desks" / "macos" / program
    if not path.exists():
        pytest.skip("needs make macos")
    kind = subprocess.run(["file", "-b", path], capture_output=True, text=True, check=True).stdout
    assert kind.startswith("Mach-O 64-bit arm64 executable")
    assert linked_with(path) == {"/usr/lib/libSystem.B.dylib"}
