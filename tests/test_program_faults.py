"""What hostile files, small memory, signals and terminals do to the programs: one clear line, and nothing worse.

The control groups of containers are in tests/machine_test.cpp, on folders that stand for them.
"""

import json
import os
import pty
import re
import resource
import signal
import struct
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from formats import gptq, moe
from formats.checkpoint import Config, Moe
from formats.gptq import GptqLayout, MatrixFormat
from formats.model_file import FileHeader, Generation, header
from formats.moe import MoeLayout
from formats.schemes import FORMATS, GPTQ_FILE, MOE_FILE
from formats.tensors import weights_end
from tests.helpers import ROOT, default_signals, seal
from tests.test_cli import is_asleep, waiting_to_write

FORMAT = {f.program: f for f in FORMATS.values()}
PROGRAMS = list(FORMAT)
VARIANT = {"gptq": "tiny-llama.gptq-w4", "moe": "tiny-qwen3-moe.moe-a8w8"}  # that stands for a scheme; or tiny-llama's
TINY = {
    f.program: ROOT / "build" / "models" / f"{VARIANT.get(f.scheme, f'tiny-llama.{f.scheme}')}.bin"
    for f in FORMATS.values()
}
LLAMA = TINY["runq"]
MAX_CONTEXT = 1 << 24


def run(program, *args, stdin=b"", timeout=300, **kwargs):
    """A program's run: its streams as bytes."""
    command = [ROOT / program, *(a if isinstance(a, bytes) else str(a) for a in args), "-j", "1"]
    return subprocess.run(command, input=stdin, capture_output=True, timeout=timeout, check=False, **kwargs)


def run_measured(tmp_path, program, *args, stdin=subprocess.DEVNULL, **kwargs):
    """A run, and the most memory that it ever had, in bytes.

    A small process starts it and waits: what a process has used counts for what it becomes, and this one is large.
    """
    wait = (
        "import os, resource, subprocess, sys\n"
        "code = subprocess.call(sys.argv[2:])\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=open(sys.argv[1], 'w'))\n"
        "sys.exit(code if code >= 0 else 128 - code)\n"
    )
    command = [sys.executable, "-S", "-c", wait, tmp_path / "kib", ROOT / program, *map(str, args), "-j", "1"]
    done = subprocess.run(command, stdin=stdin, capture_output=True, timeout=300, check=False, **kwargs)
    return done, int((tmp_path / "kib").read_text()) * 1024


def refused(done, code):
    """The one line of an error, with nothing printed before it."""
    assert done.returncode == code, (done.returncode, done.stderr)
    assert done.stdout == b""
    text = done.stderr.decode()
    assert text.count("\n") == 1, text
    assert text.endswith("\n"), text
    return text


def write_model(path, program, experts=None, **dims):
    """A model file of zeros, without a tokenizer."""
    file_format = FORMAT[program]
    group_size = {"q8": 4, "awq": 64, "gptq": 64}.get(file_format.scheme, 0)
    small = {"dim": 4, "hidden_dim": 4, "head_dim": 2, "n_heads": 2}
    if group_size == 64:
        small = {"dim": 64, "hidden_dim": 64, "head_dim": 32, "n_heads": 2}
    config = Config(
        arch="llama", n_layers=1, n_kv_heads=1, vocab_size=8, max_seq_len=MAX_CONTEXT, tied=True,
        norm_eps=1e-5, rope_theta=1e4, rope_scaling=None, **small,
    )  # fmt: skip
    group_size = dims.pop("group_size", group_size)
    config, layout, own = Config(**(vars(config) | dims)), None, b""
    if file_format is GPTQ_FILE:
        layout = GptqLayout((MatrixFormat(8),) * 9)
        own = gptq.pack_layout(layout)
    elif file_format is MOE_FILE:
        config, layout = replace(config, arch="qwen3_moe", moe=experts or Moe(2, 1, 4, True, ())), MoeLayout("a8w8", 0)
        own = moe.pack_layout(config, layout)
    tensors = FileHeader(config, group_size, 0, 0, file_format, layout).tensors()
    end = weights_end(tensors, file_format.alignment)
    path.write_bytes(header(config, Generation(temperature=0.0), file_format, group_size, end, b"", own=own))
    os.truncate(path, end)
    return path


# ----------------------------------------------------------------------------
# Memory


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_small_file_takes_little_memory_whatever_its_header_says(tmp_path, program):
    """A context of 16 million positions in a file of some KB: memory comes as positions are used."""
    path = write_model(tmp_path / "small.bin", program)
    assert path.stat().st_size < (1 << 15)
    args = [path, "-c", MAX_CONTEXT, "--ids", "1,2,3", "-n", 3, "--print-ids"]
    done, memory = run_measured(tmp_path, program, *args)
    if done.returncode:
        assert re.search(r"needs [\d.]+ GB of memory, [\d.]+ [GM]B are available", refused(done, 1))
    else:
        assert len(done.stdout.split(b",")) == 3
    assert memory < 300e6


@pytest.mark.parametrize(
    ("options", "name"), [(("-f", "/dev/zero"), "--file: the prompt"), (("-i", "-"), "--prompt: the prompt")]
)
def test_a_text_without_end_is_refused_while_it_is_read(tmp_path, options, name):
    with Path("/dev/zero").open("rb") as endless:
        done, memory = run_measured(tmp_path, "runq", LLAMA, *options, stdin=endless)
    line = refused(done, 2)
    assert line == f"runq: {name} is longer than 16777216 bytes, the most that is held in memory at once\n"
    assert memory < 200e6


def too_long_for_perplexity(path, line):
    """The bytes of a text that there is memory for, as the error line has it."""
    return int(re.fullmatch(
        rf"runq: --ppl: '{path}' is longer than (\d+) bytes, for which there is not enough memory\n", line
    )[1])  # fmt: skip


@pytest.mark.parametrize("path", ["/dev/zero", "-"])
def test_perplexity_of_a_text_without_end(tmp_path, path):
    """What there is memory to encode, and no more, is read."""
    with Path("/dev/zero").open("rb") as endless:
        room = with_address_space(1 << 10)
        done, memory = run_measured(tmp_path, "runq", LLAMA, "--ppl", path, stdin=endless, **room)
    assert 1 << 22 < too_long_for_perplexity(path, refused(done, 1)) < 1 << 23
    assert memory < 100e6


def test_perplexity_of_a_long_text(tmp_path):
    """Longer than a prompt may be, if there is memory: in a context of 1 nothing of it is scored."""
    path = tmp_path / "text"
    path.write_bytes(b"one red ball\n" * 1_400_000)
    assert path.stat().st_size > 1 << 24
    line = refused(run("runq", LLAMA, "--ppl", path, "-c", 1), 1)
    if "not enough memory" in line:
        assert too_long_for_perplexity(path, line) < path.stat().st_size
    else:
        assert re.fullmatch(rf"runq: --ppl: '{path}' is \d{{7}} tokens long, too short with a context of 1\n", line)


@pytest.mark.parametrize("option", ["--ppl", "-i"])
def test_ctrl_c_ends_the_reading_of_a_text(option):
    command = [ROOT / "runq", LLAMA, option, "-", "-j", "1"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=default_signals
    )
    process.stdin.write(b"a" * 100_000)  # more than a pipe holds: it has begun to read
    process.stdin.flush()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=300) == -signal.SIGINT
    assert process.stdout.read() + process.stderr.read() == b""
    process.stdin.close()


def test_of_a_line_that_is_too_long_for_a_chat_nothing_is_kept(tmp_path):
    with (tmp_path / "lines").open("w+b") as lines:
        lines.write(b"Hi\n")
        lines.truncate(150_000_000)  # zeros
        lines.seek(0, 2)
        lines.write(b"\nHi\n")
        lines.seek(0)
        done, memory = run_measured(tmp_path, "runq", LLAMA, "-m", "chat", "-n", 1, stdin=lines)
    assert (done.returncode, done.stdout.count(b"\n")) == (0, 2)
    assert done.stderr.startswith(b"--mode chat: a line of standard input is longer than ")
    assert done.stderr.count(b"longer than") == 1
    assert memory < 100e6


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_no_machine_has_is_refused_with_the_numbers(tmp_path, program):
    path = write_model(tmp_path / "deep.bin", program, n_layers=256, n_heads=256, n_kv_heads=256)
    assert path.stat().st_size < 1 << 30
    sizes = [path, "-c", MAX_CONTEXT, "--bench", f"{MAX_CONTEXT - 1},1"]
    done, memory = run_measured(tmp_path, program, *sizes)
    line = refused(done, 1)
    assert line.startswith(f"{program}: {path}: needs ")
    number = r"([\d.]+) GB"
    needed, available, cache = re.search(
        rf"needs {number} of memory, {number} are available: {number} for the keys and values of positions 0 to "
        rf"{MAX_CONTEXT - 1}(?:, .*)?; .* takes? less\n",
        line,
    ).groups()
    assert float(needed) >= float(cache) > 1000 > float(available)
    assert memory < 300e6


def limited(limits, *args):
    """A run under limits of the system: {resource: bytes}."""

    def start():
        for kind, most in limits.items():
            resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))

    command = [ROOT / "runq", *map(str, args)]
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, timeout=300, check=False, preexec_fn=start
    )


def test_a_file_that_may_not_grow_is_one_line(tmp_path):
    path = tmp_path / "trace"
    done = limited({resource.RLIMIT_FSIZE: 4096}, LLAMA, "--ids", "1,2,3", "-n", 1, "--trace", path)
    assert (done.returncode, done.stderr.decode()) == (1, f"runq: {path}: cannot write: File too large\n")
    assert list(tmp_path.iterdir()) == []


def test_statistics_have_the_threads_that_there_are():
    """Address space for some of the stacks."""
    limits = {resource.RLIMIT_STACK: 64 << 20, resource.RLIMIT_AS: 600 << 20}
    done = limited(limits, LLAMA, "--ids", "1,2,3", "-n", 4, "--print-ids", "-j", 64)
    assert done.returncode == 0, done.stderr
    assert 1 < int(re.search(rb", (\d+) threads,", done.stderr)[1]) < 12


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_large_file_that_is_no_model_is_not_read(tmp_path, program):
    path = tmp_path / "large.bin"
    path.write_bytes(b"GGUF")
    os.truncate(path, 6 << 30)
    done, memory = run_measured(tmp_path, program, path, "--ids", "1")
    assert "is a GGUF file; make a model file of it: .venv/bin/python -m export" in refused(done, 1)
    assert memory < 300e6


def test_a_model_of_the_wrong_length_is_not_read(tmp_path):
    """A good header, and 6 GB more of weights than it implies."""
    path = write_model(tmp_path / "long.bin", "runq")
    data = bytearray(path.read_bytes())
    (offset,) = struct.unpack_from("<Q", data, 0xA0)
    struct.pack_into("<Q", data, 0xA0, offset + (6 << 30))
    seal(data)
    path.write_bytes(data)
    os.truncate(path, offset + (6 << 30))
    done, memory = run_measured(tmp_path, "runq", path, "--ids", "1")
    assert f"weights are {offset - 256 + (6 << 30)} bytes, but the header implies {offset - 256}" in refused(done, 1)
    assert memory < 300e6


def test_an_address_space_that_is_too_small_is_one_line(tmp_path):
    """ulimit -v: what the system refuses, it refuses in one line with the file's name."""
    path = write_model(tmp_path / "small.bin", "runq", head_dim=64)
    limit = lambda: resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))  # noqa: E731
    line = refused(run("runq", path, "--ids", "1", "-c", 1 << 24, preexec_fn=limit), 1)
    assert f"{path}: not enough memory for the keys of 16777216 positions (--ctx)" in line


@pytest.mark.parametrize(
    ("program", "model"),
    [("runq", "tiny-llama.q8"), ("runq_w8a8", "tiny-llama.w8a8"), ("runq_gptq", "tiny-llama.gptq-w4"),
     ("runq_awq", "tiny-llama.awq"), ("runq_moe", "tiny-qwen3-moe.moe-a8w8")],
)  # fmt: skip
def test_with_any_address_space_a_program_runs_or_says_in_one_line_why_not(program, model):
    codes = []
    for megabytes in (7, 9, 12, 16, 24, 40, 70, 120, 250, 500):
        limit = partial(resource.setrlimit, resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))
        command = [ROOT / program, ROOT / "build" / "models" / f"{model}.bin", "-i", "Once", "-n", "2", "-j", "2"]
        done = subprocess.run(command, capture_output=True, timeout=300, check=False, preexec_fn=limit)
        if b"error while loading shared libraries" in done.stderr:
            continue  # the system could not even start it
        codes.append(done.returncode)
        assert done.returncode in (0, 1), (megabytes, done.stderr)
        if done.returncode == 1:
            assert re.fullmatch(rb"%s: .+\n" % program.encode(), done.stderr), (megabytes, done.stderr)
    assert codes[0] == 1
    assert codes[-1] == 0


def with_address_space(megabytes):
    """Options of run() for a limit as `ulimit -v` sets it."""
    limit = (megabytes << 20, megabytes << 20)
    return {"preexec_fn": partial(resource.setrlimit, resource.RLIMIT_AS, limit)}


@pytest.mark.parametrize("option", ["--no-fuse", "--trace"])
def test_experts_step_by_step_are_counted(tmp_path, option):
    """A file of 7 MB whose 1,024 experts are all active, in 400 MB: what the fused operator does not keep takes 805."""
    path = write_model(tmp_path / "wide.bin", "runq_moe", experts=Moe(1024, 1024, 128, True, ()), dim=16)
    args = [path, "-c", 512, "--ids", ",".join(["1"] * 512), "-n", 1]
    option = [option, tmp_path / "trace"] if option == "--trace" else [option]
    line = refused(run("runq_moe", *args, *option, **with_address_space(400)), 1)
    assert re.fullmatch(
        rf"runq_moe: {path}: needs \d+\.\d MB of memory, [\d.]+ MB are available: "
        r"[89]\d\d.\d MB for a chunk of 512 tokens\n",
        line,
    )
    assert [p.name for p in tmp_path.iterdir()] == ["wide.bin"]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_trace_that_has_no_room_is_refused_before_the_prompt_runs(tmp_path, program):
    dims = {"dim": 256, "hidden_dim": 1024, "n_heads": 8, "head_dim": 32, "n_layers": 4}
    group_size = {"group_size": 64} if program == "runq" else {}
    path = write_model(tmp_path / "model.bin", program, experts=Moe(2, 2, 1024, True, ()), **dims, **group_size)
    args = [path, "-c", 2000, "--ids", ",".join(["1"] * 1999), "-n", 1, "--trace", tmp_path / "trace"]
    room = with_address_space(220 if program == "runq_awq" else 350)  # whose traces have no scores
    line = refused(run(program, *args, **room), 1)
    assert re.search(
        r"needs [\d.]+ [MG]B of memory, [\d.]+ MB are available: [\d.]+ [MG]B for the trace of positions 0 to 1998.*"
        r"; --trace-from takes less\n",
        line,
    )
    assert [p.name for p in tmp_path.iterdir()] == ["model.bin"]
    few = [path, "-c", 2000, "--ids", "1,1,1", "-n", 2, "--print-ids", "--trace", tmp_path / "trace"]
    assert run(program, *few, **room).returncode == 0


# ----------------------------------------------------------------------------
# Files


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_fifo_as_a_model_is_refused_and_not_waited_for(tmp_path, program):
    os.mkfifo(tmp_path / "fifo")
    assert "fifo: not a regular file" in refused(run(program, tmp_path / "fifo", "--ids", "1"), 1)


def test_a_fifo_as_a_prompt_is_read(tmp_path):
    os.mkfifo(tmp_path / "prompt")
    writer = threading.Thread(target=lambda: (tmp_path / "prompt").write_text("Once upon"))
    writer.start()
    done = run("runq", LLAMA, "-f", tmp_path / "prompt", "-n", 1, "-t", 0)
    writer.join()
    assert done.stdout.startswith(b"Once upon")


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_pointer_of_git_lfs_is_named(tmp_path, program):
    path = tmp_path / "model.bin"
    path.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 1162285\n")
    assert f"{path}: a Git LFS pointer" in refused(run(program, path, "--ids", "1"), 1)


IDS = ("--ids", "5,6,7", "-t", 0, "-j", 1, "--print-ids")


@pytest.mark.parametrize(
    ("program", "mapped"),
    [(program, mapped) for program in PROGRAMS for mapped in (["--mmap"], []) if mapped == [] or program != "runq_awq"],
)
def test_a_model_that_is_replaced_during_a_run(tmp_path, program, mapped):
    """Another file takes its name, as `make` and the exporter write one: the run goes on with what it has opened."""
    path = tmp_path / "model.bin"
    path.write_bytes(TINY[program].read_bytes())
    n = 3 if program == "runq_awq" else 40
    whole = run(program, path, *mapped, *IDS, "-n", n)
    assert whole.returncode == 0
    process, pipe = waiting_to_write(path, *mapped, *IDS, "-n", n, program=program)
    (tmp_path / "other").write_bytes(bytes(path.stat().st_size))
    (tmp_path / "other").replace(path)
    with os.fdopen(pipe, "rb") as out:
        text = out.read().lstrip(b".")
    process.communicate(timeout=300)
    assert (process.returncode, text) == (0, whole.stdout)


@pytest.mark.parametrize("program", ["runq_gptq", "runq_moe"])
def test_a_model_that_is_packed_and_then_cut_off(tmp_path, program):
    """Of the file itself a run then reads a row of the embedding per token, and no more: it ends well, or by a line."""
    path = tmp_path / "model.bin"
    path.write_bytes(TINY[program].read_bytes())
    whole = run(program, path, *IDS, "-n", 40)
    process, pipe = waiting_to_write(path, *IDS, "-n", 40, program=program)
    os.truncate(path, 4096)
    with os.fdopen(pipe, "rb") as out:
        text = out.read().lstrip(b".")
    _, errors = process.communicate(timeout=300)
    assert whole.stdout.startswith(text.rstrip(b"\n"))
    if process.returncode:
        assert process.returncode == 1
        assert errors == f"{program}: {path}: the file has become shorter during the run\n".encode()


@pytest.mark.parametrize("program", ["runq", "runq_w8a8"])
def test_a_model_that_is_cut_off_during_a_run(tmp_path, program):
    path = tmp_path / "model.bin"
    path.write_bytes(TINY[program].read_bytes())
    arguments = ("--mmap", "--ids", "5,6,7", "-n", 0, "-j", 1, "--print-ids")
    process, pipe = waiting_to_write(path, *arguments, program=program)
    os.truncate(path, 4096)
    with os.fdopen(pipe, "rb") as out:
        out.read()
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 1
    assert errors == f"{program}: {path}: the file has become shorter during the run\n".encode()


def test_another_bus_error_kills_as_ever(tmp_path):
    process, pipe = waiting_to_write(LLAMA, "--ids", "5,6,7", "-n", 0, "-j", 1, "--print-ids")
    process.send_signal(signal.SIGBUS)
    _, errors = process.communicate(timeout=300)
    os.close(pipe)
    assert process.returncode == -signal.SIGBUS
    assert errors == b""


# ----------------------------------------------------------------------------
# --trace


def test_a_trace_replaces_regular_files_only(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/dev/null")
    for path, reason in [
        ("/dev/null", "not a regular file"),
        (tmp_path / "link", "not a regular file"),
        (tmp_path / "fifo", "not a regular file"),
        (tmp_path, "Is a directory"),
        (tmp_path / "none" / "x", "No such file or directory"),
    ]:
        line = refused(run("runq", LLAMA, "--ids", "5", "-n", 1, "--trace", path), 1)  # before the run
        assert line == f"runq: {path}: cannot write: {reason}\n"
    assert Path("/dev/null").is_char_device()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fifo", "link"]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_trace_does_not_replace_what_is_read(tmp_path, program):
    model = tmp_path / "model.bin"
    model.write_bytes(TINY[program].read_bytes())
    (tmp_path / "link").symlink_to(model)
    (tmp_path / "hard").hardlink_to(model)
    for name in ("model.bin", "./model.bin", "link", "hard"):
        done = run(program, model, "--ids", "5", "-n", 1, "--trace", f"{tmp_path}/{name}")
        assert f"--trace: '{tmp_path}/{name}' would replace the file that is read, '{model}'" in refused(done, 2)
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("Once")
    assert "would replace" in refused(run(program, model, "-f", prompt, "-n", 1, "--trace", prompt), 2)
    assert model.read_bytes() == TINY[program].read_bytes()
    assert prompt.read_text() == "Once"


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_a_run_that_is_ended_leaves_no_half_trace(tmp_path, kind):
    path = tmp_path / "trace"
    process, pipe = waiting_to_write(LLAMA, "--ids", "5,6", "-n", 0, "-j", 1, "--print-ids", "--trace", path)
    process.send_signal(kind)
    with os.fdopen(pipe, "rb") as out:
        out.read()
    process.communicate(timeout=300)
    if kind == signal.SIGINT:  # ends cleanly: the trace is that of the tokens so far
        assert process.returncode == 130
        assert list(tmp_path.iterdir()) == [path]
    else:
        assert process.returncode == -kind
        assert list(tmp_path.iterdir()) == []


# ----------------------------------------------------------------------------
# Signals, chat, terminals


def in_phase(phase, tmp_path):
    """A runq that is in a phase: "load", "prefill", "decode" or "chat"; and its pipe, of which nothing is read.

    In "load" it stands still until SIGCONT.
    """
    model, trace = tmp_path / "model.bin", ["--trace", tmp_path / "trace"]
    if phase == "decode":
        return waiting_to_write(LLAMA, "--ids", "5,6", "-n", 0, "-j", 1, "--print-ids", *trace)
    args = {"chat": [LLAMA, "-m", "chat"], "load": [model, "--ids", "1"],
            "prefill": [model, "--ids", ",".join(["1"] * 20000), "-c", 20000]}[phase]  # fmt: skip
    if phase != "chat":
        size = {"dim": 512, "hidden_dim": 4096, "n_layers": 32 if phase == "load" else 4, "vocab_size": 512}
        write_model(model, "runq", group_size=64, n_heads=8, head_dim=64, **size)
    command = [ROOT / "runq", *map(str, args), "-j", "1", *(map(str, trace) if phase == "load" else [])]
    while True:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=default_signals
        )
        deadline = time.monotonic() + 300
        while not has_begun(phase, process, model) and time.monotonic() < deadline:
            time.sleep(0.0005)
        if phase != "load":
            return process, None
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        if not hears_ctrl_c(process):  # and not later than this phase
            return process, None
        process.kill()
        process.communicate()


def has_begun(phase, process, model):
    if phase == "load":  # it has opened the file
        return str(model) in Path(f"/proc/{process.pid}/maps").read_text()
    return hears_ctrl_c(process) and (phase == "prefill" or is_asleep(process))  # in a chat until somebody types


def hears_ctrl_c(process):
    """Whether it catches SIGINT, as it does from just before the prompt runs."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return bool(int(re.search(r"SigCgt:\s*(\w+)", status)[1], 16) & 1 << (signal.SIGINT - 1))


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("phase", ["load", "prefill", "decode", "chat"])
def test_a_signal_ends_every_phase(tmp_path, phase, kind):
    """Ctrl-C ends what runs after the present chunk or token, with statistics; all else ends as by the system."""
    process, pipe = in_phase(phase, tmp_path)
    process.send_signal(kind)
    process.send_signal(signal.SIGCONT)
    if pipe is not None:
        with os.fdopen(pipe, "rb") as out:
            out.read()
    _, errors = process.communicate(timeout=300)
    heard = kind == signal.SIGINT and phase != "load"
    assert process.returncode == (130 if heard else -kind)
    prefilled = re.search(rb"prefill   (\d+) tokens", errors)
    assert prefilled is None or int(prefilled[1]) < 20000
    assert (b"runq: " in errors or b"run  " not in errors) != heard
    left = {path.name for path in tmp_path.iterdir()} - {"model.bin"}
    assert left == ({"trace"} if heard and phase == "decode" else set())


def test_ctrl_c_in_a_prompt_is_heard_after_a_chunk():
    """In the emulator a chunk of 64 tokens takes long enough to be sure that the signal comes within the prompt."""
    ids = ",".join(["7"] * 500)
    command = [ROOT / "runq_awq", TINY["runq_awq"], "--ids", ids, "-n", "1", "-j", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=default_signals)
    deadline = time.monotonic() + 300
    while not hears_ctrl_c(process) and time.monotonic() < deadline:
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    _, statistics = process.communicate(timeout=300)
    assert process.returncode == 130
    prefilled = re.search(rb"prefill   (\d+) tokens", statistics)
    assert prefilled is None or int(prefilled[1]) < 500


def test_a_chat_without_a_token_is_refused(tmp_path):
    """All pieces of the template are empty, and it trims messages: a blank one gives no tokens."""
    data = bytearray(LLAMA.read_bytes())
    (start,) = struct.unpack_from("<Q", data, 0xA0)
    section = data[start:]
    (chat_size,) = struct.unpack_from("<I", section, 40)
    assert len(section) == struct.unpack_from("<I", section, 8)[0]
    empty = struct.pack("<14I", 2, *[0] * 13)
    section = section[:-chat_size] + empty
    struct.pack_into("<I", section, 8, len(section))
    struct.pack_into("<I", section, 40, len(empty))
    data[start:] = section
    struct.pack_into("<Q", data, 0xA8, len(section))
    seal(data)
    path = tmp_path / "model.bin"
    path.write_bytes(data)
    line = refused(run("runq", path, "-m", "chat", "--print-ids", stdin=b"  \n"), 2)
    assert line.startswith("runq: --mode chat: the prompt is empty")
    assert run("runq", path, "-m", "chat", "-n", 2, "--print-ids", stdin=b"hi\n").returncode == 0


def on_a_terminal(*args):
    """What runq writes to a terminal."""
    ours, its = pty.openpty()
    process = subprocess.Popen([ROOT / "runq", *args, "-j", "1"], stdout=its, stderr=subprocess.PIPE)
    os.close(its)
    shown = b""
    try:
        while part := os.read(ours, 1 << 16):
            shown += part
    except OSError:  # the other end was closed
        pass
    os.close(ours)
    process.communicate(timeout=300)
    assert process.returncode == 0
    return shown.replace(b"\r\n", b"\n")


def test_a_terminal_does_not_obey_what_a_model_says():
    prompt = b"\x1b]0;title\x07 \x1b[2J\x7f\xc2\x9b1m\tin\nline"
    args = [LLAMA, "-i", prompt, "-n", "1", "-t", "0"]
    safe = rb"\x1b]0;title\x07 \x1b[2J\x7f\x9b1m" + b"\tin\nline"
    assert on_a_terminal(*args).startswith(safe)
    assert run("runq", *args).stdout.startswith(prompt)
    # The same as tokens, as generated ones are printed.
    vocabulary = json.loads((ROOT / "models/tiny-llama/tokenizer.json").read_text())["model"]["vocab"]
    escape = vocabulary[chr(256 + 0x1B)]  # as byte-level BPE writes the byte 1B
    assert on_a_terminal(LLAMA, "--ids", str(escape), "-n", "1", "-t", "0").startswith(rb"\x1b")


def test_an_error_line_has_no_control_characters(tmp_path):
    name = b"a\x1b[31m\n\x7f\xc2\x9b\x9b\xc3\xa9"
    done = run("runq", os.fsencode(tmp_path) + b"/" + name)
    assert done.stderr == (
        b"runq: " + os.fsencode(tmp_path) + rb"/a\x1b[31m\x0a\x7f\x9b\x9b" + b"\xc3\xa9: cannot open: "
        b"No such file or directory\n"
    )
