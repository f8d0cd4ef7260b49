"""The program itself, from outside: what it prints, where, and with which exit code.

tests/cli_test.cpp has the exact line of every bad option; here the whole program runs on real files.
"""

import array
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers import default_signals

ROOT = Path(__file__).parents[1]
RUNQ = ROOT / "runq"
LLAMA = ROOT / "build/models/tiny-llama.q8.bin"
QWEN3 = ROOT / "build/models/tiny-qwen3.q8.bin"
STORY = "Once upon a time"


def run(*args, stdin=b"", **kwargs):
    """Run runq; its streams come back as bytes."""
    command = [RUNQ, *(a if isinstance(a, bytes | Path) else str(a) for a in args)]
    return subprocess.run(command, input=stdin, capture_output=True, timeout=300, check=False, **kwargs)


def ok(*args, **kwargs):
    """Standard output of a run that must succeed; on one thread, which a busy machine hardly slows down."""
    result = run(*args, *([] if "-j" in args else ["-j", 1]), **kwargs)
    assert result.returncode == 0, result.stderr
    return result.stdout.decode()  # always valid UTF-8


def refused(result, code):
    """The one line of an error, with nothing printed before it."""
    assert result.returncode == code, (result.returncode, result.stderr)
    assert result.stdout == b""
    text = result.stderr.decode(errors="replace")
    assert text.endswith("\n"), text
    assert text.count("\n") == 1, text
    assert text.startswith("runq: "), text
    return text


def ids_of(text):
    assert re.fullmatch(r"(\d+(,\d+)*)?\n", text), text
    return [int(i) for i in text.strip().split(",") if i]


def comma(ids):
    return ",".join(map(str, ids))


def info(model):
    return dict(line.split(maxsplit=1) for line in ok(model, "--info").splitlines())


def eos_ids(model):
    return {int(i) for i in info(model)["eos_ids"].split(",")}


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """The tiny Llama as llama2.c would have written it: no extension block and no tokenizer."""
    data = bytearray(LLAMA.read_bytes())
    (tokenizer_offset,) = struct.unpack_from("<Q", data, 0xA0)
    data[0x40:0x100] = bytes(0xC0)
    path = tmp_path_factory.mktemp("foreign") / "foreign.bin"
    path.write_bytes(data[:tokenizer_offset])
    return path


# ----------------------------------------------------------------------------
# What is refused


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ([], "no model file"),
        (["MODEL", "--frobnicate"], "--frobnicate"),
        (["MODEL", "-z"], "-z"),
        (["MODEL", "--tmep", "0"], "unknown option '--tmep'; did you mean '--temp'?"),
        (["MODEL", "another.bin"], "another.bin"),
        (["MODEL", "-n"], "-n: needs a value"),
        (["MODEL", "-i", "x", "--steps"], "--steps: needs a value"),
        (["MODEL", "-n", "5x"], "'5x'"),
        (["MODEL", "-n", "-1"], "'-1'"),
        (["MODEL", "-n", "99999999999999999999"], "'99999999999999999999'"),
        (["MODEL", "-t", "nan"], "'nan'"),
        (["MODEL", "-t", "101"], "'101'"),
        (["MODEL", "-t", ""], "-t: ''"),
        (["MODEL", "-p", "1.5"], "'1.5'"),
        (["MODEL", "--top-p=-0.5"], "--top-p: '-0.5'"),
        (["MODEL", "-k", "-2"], "'-2'"),
        (["MODEL", "-j", "0"], "'0'"),
        (["MODEL", "-j", "5000"], "'5000'"),
        (["MODEL", "-c", "0"], "'0'"),
        (["MODEL", "-c", "513"], "513 is more than the model's max_seq_len, 512"),
        (["MODEL", "-s", "abc"], "'abc'"),
        (["MODEL", "-m", "talk"], "'talk'"),
        (["MODEL", "-r", "yes"], "'yes'"),
        (["MODEL", "--rope-theta", "-1"], "'-1'"),
        (["MODEL", "--ids", "1,a"], "'1,a'"),
        (["MODEL", "--ids", "1,2048"], "2048 is outside the vocabulary, 0 to 2047"),
        (["MODEL", "--bench", "10"], "'10'"),
        (["MODEL", "--bench", "0,0"], "'0,0'"),
        (["MODEL", "--bench", "1,2,3,4"], "'1,2,3,4'"),
        (["MODEL", "--bench", "8,4,501"], "8 + 4 tokens behind 501 do not fit in the context of 512"),
        (["MODEL", "--kv", "int4"], "--kv: 'int4' is not one of f32, f16, q8"),
        (["MODEL", "--bench", "500,13"], "500 + 13 tokens do not fit in the context of 512"),
        (["MODEL", "--print-ids=1"], "--print-ids"),
        (["MODEL", "-i", "x", "-f", "y"], "--file: cannot be used together with --prompt"),
        (["MODEL", "-i", "x", "--ids", "1"], "--ids: cannot be used together with --prompt"),
        (["MODEL", "--info", "--ppl", "x"], "--ppl: cannot be used together with --info"),
        (["MODEL", "--bench", "1,1", "--trace", "x"], "--trace: cannot be used together with --bench"),
    ],
)
def test_bad_usage(args, named):
    line = refused(run(*[LLAMA if a == "MODEL" else a for a in args]), 2)
    assert named in line


def test_bad_files(tmp_path):
    good = LLAMA.read_bytes()
    files = {
        "empty": b"",
        "short": good[:100],
        "header-only": good[:256],
        "half": good[: len(good) // 2],
        "one-byte-short": good[:-1],
        "one-byte-long": good + b"\0",
        "zeros": bytes(len(good)),
        "text": b"This is not a model. " * 100,
        "another-version": good[:4] + struct.pack("<i", 3) + good[8:],
        "awq": struct.pack("<I", 0x616B3438) + good[4:],
    }
    for name, data in files.items():
        path = tmp_path / f"{name}.bin"
        path.write_bytes(data)
        for args in (["-i", "x"], ["--info"], ["-m", "chat"]):
            assert str(path) in refused(run(path, *args), 1)
    assert "cannot open" in refused(run(tmp_path / "missing.bin"), 1)
    assert "is a directory, expected a model file" in refused(run(tmp_path), 1)
    assert r"a\x0ab" in refused(run(tmp_path / "a\nb"), 1)


def test_file_of_another_program(foreign):
    assert "no tokenizer: use --ids" in refused(run(foreign, "-i", "hello"), 2)
    assert "no tokenizer" in refused(run(foreign, "-m", "chat"), 2)
    assert "no tokenizer" in refused(run(foreign, "--ppl", foreign), 2)
    refused(run(foreign), 2)  # nothing to start from
    ids = ids_of(ok(foreign, "--ids", "1,2,3", "-n", 4, "-t", 0))  # ids come out without being asked for
    assert len(ids) == 4
    fields = info(foreign)
    assert fields["tokenizer"] == "no"
    assert fields["chat_template"] == "no"
    assert fields["arch"] == "llama"


@pytest.mark.parametrize("model", [LLAMA, QWEN3])
def test_a_prompt_longer_than_the_context_is_refused_with_both_lengths(model):
    for source in (["-i", "red " * 600], ["--ids", comma(range(513))]):
        line = refused(run(model, *source), 2)
        length = int(re.search(r"the prompt is (\d+) tokens long, the context only 512", line)[1])
        assert length > 512
    assert "513 tokens" in line
    assert "the prompt is 5 tokens long, the context only 4" in refused(run(model, "-c", 4, "--ids", "1,2,3,4,5"), 2)
    # As long as the context is not longer than it: nothing more fits, and that is all.
    assert ok(model, "-c", 5, "--ids", "1,2,3,4,5", "--print-ids") == "\n"
    if info(model)["chat_template"] == "yes":
        line = refused(run(model, "-m", "chat", "-i", "red " * 600), 2)
        assert "the context only 512" in line


def test_prompt_files(tmp_path):
    assert str(tmp_path / "none.txt") in refused(run(LLAMA, "-f", tmp_path / "none.txt"), 1)
    assert "Is a directory" in refused(run(LLAMA, "-f", tmp_path), 1)
    path = tmp_path / "prompt.txt"
    greedy = ["-n", 8, "-t", 0]
    expected = ok(LLAMA, "-i", STORY, *greedy)
    for text in (STORY, STORY + "\n"):
        path.write_text(text)
        assert ok(LLAMA, "-f", path, *greedy) == expected
        assert ok(LLAMA, "-i", "-", *greedy, stdin=text.encode()) == expected
    assert ok(LLAMA, "-i", "-", *greedy, stdin=(STORY + "\n\n").encode()).startswith(STORY + "\n")


# ----------------------------------------------------------------------------
# What is printed


def test_help_and_version():
    for args in (["-h"], ["--help"], ["model.bin", "-n", "5", "-h"]):
        result = run(*args)
        assert result.returncode == 0
        assert result.stderr == b""
        text = result.stdout.decode()
        assert text.startswith("runq: ")
        assert all(len(line) <= 80 for line in text.splitlines())
    for args in (["-V"], ["--version"]):
        result = run(*args)
        assert result.returncode == 0
        assert result.stderr == b""
        assert re.fullmatch(rb"runq \d+\.\d+\.\d+\n", result.stdout)


def test_info():
    result = run(LLAMA, "--info", "-c", 100, "-j", 1, "--rope-theta", 12345)
    assert result.returncode == 0
    assert result.stderr == b""
    fields = dict(line.split(maxsplit=1) for line in result.stdout.decode().splitlines())
    header = struct.unpack_from("<7i", LLAMA.read_bytes(), 8)
    names = ["dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "max_seq_len"]
    assert [int(fields[n]) for n in names] == list(header)
    assert int(fields["file_bytes"]) == LLAMA.stat().st_size
    assert fields["context"] == "100"
    head_dim = int(fields["head_dim"])
    assert int(fields["kv_cache_bytes"]) == 100 * int(fields["kv_bytes_per_position"])
    assert int(fields["kv_bytes_per_position"]) % (2 * header[2] * header[4] * head_dim) == 0
    assert int(fields["weight_bytes"]) < LLAMA.stat().st_size
    assert fields["rope_theta"] == "12345"
    assert fields["tokenizer"] == "yes"
    assert fields["threads"] == "1"
    assert {"arch", "scheme", "kernel", "shared_classifier", "group_size", "norm_eps", "rope_scaling", "bos_id",
            "eos_ids", "temperature", "top_k", "top_p", "chat_template"} <= fields.keys()  # fmt: skip


def test_text_on_stdout_and_statistics_on_stderr():
    result = run(LLAMA, "-i", STORY, "-n", 20, "-t", 0.8, "-s", 7, "-j", 1)
    assert result.returncode == 0
    assert result.stdout.decode().startswith(STORY)
    assert result.stdout.endswith(b"\n")
    text = result.stderr.decode()
    for word in ("llama", "1 thread,", "context 512", "seed 7", "prefill", "decode", "tokens/s", "GB/s", "peak memory"):
        assert word in text
    assert text.count("\n") <= 6
    assert b"tokens/s" not in result.stdout


def test_the_seed_that_is_printed_gives_the_same_text_again():
    args = [LLAMA, "-i", STORY, "-n", 40, "-t", 1.5, "-k", 0, "-p", 1, "--print-ids"]
    first = run(*args)
    seed = re.search(rb"seed (\d+)", first.stderr)[1].decode()
    assert ok(*args, "-s", seed).encode() == first.stdout
    assert ok(*args, "-s", int(seed) + 1).encode() != first.stdout


def test_cutting_to_one_token_is_greedy():
    args = [LLAMA, "-i", STORY, "-n", 20, "--print-ids"]
    greedy = ok(*args, "-t", 0)
    assert ok(*args, "-t", 1, "-k", 1) == greedy
    assert ok(*args, "-t", 1, "-p", 0) == greedy
    assert ok(*args, "-t", 1, "-k", 0, "-p", 1, "--min-p", 1) == greedy
    assert ok(*args, "-t", 0, "--repetition-penalty", 1) == greedy
    assert ok(*args, "-t", 0, "-j", 2) == greedy
    assert ok(*args, "-t", 0, "-j", 1) == greedy


def test_a_repetition_penalty_holds_for_temperature_0_too():
    args = [LLAMA, "-i", STORY, "-n", 60, "-t", 0, "--print-ids"]

    def repeats(*options):
        ids = ok(*args, *options).split(",")
        return len(ids) - len(set(ids))

    assert repeats("--repetition-penalty", 100) < repeats("--repetition-penalty", 1.3) < repeats()


@pytest.mark.parametrize("model", [LLAMA, QWEN3])
def test_ids_that_were_printed_can_be_fed_back(model):
    greedy = [model, "-t", 0]
    prompt = [5, 300, 41]
    ids = ids_of(ok(*greedy, "--ids", comma(prompt), "-n", 12, "--print-ids"))
    assert 0 < len(ids) <= 12
    for k in range(1, len(ids)):
        rest = ok(*greedy, "--ids", comma(prompt + ids[:k]), "-n", 12 - k, "--print-ids")
        assert ids_of(rest) == ids[k:]
    # As text, a prompt of ids is shown just as the tokens would have been when they were generated.
    text = ok(*greedy, "--ids", comma(prompt), "-n", len(ids))
    assert ok(*greedy, "--ids", comma(prompt + ids[:-1]), "-n", 1) == text


@pytest.mark.parametrize("model", [LLAMA, QWEN3])
def test_where_generation_ends(model):
    eos = eos_ids(model)
    ended = 0
    for seed in range(8):
        args = [model, "--ids", "5,6,7", "-t", 1, "-s", seed, "-c", 120]
        ids = ids_of(ok(*args, "-n", 0, "--print-ids"))
        assert not eos & set(ids[:-1])
        assert len(ids) == 117 or ids[-1] in eos
        ended += ids[-1] in eos
        assert ids_of(ok(*args, "-n", 5, "--print-ids")) == ids[:5]
        assert "<|" not in ok(*args, "-n", 0)  # special tokens are not printed
    assert ended > 0
    assert len(ids_of(ok(model, "--ids", "5,6,7", "-t", 100, "-k", 0, "-p", 1, "-s", 1, "--print-ids"))) <= 256


@pytest.mark.parametrize("model", [LLAMA, QWEN3])
def test_without_a_prompt(model):
    bos = info(model)["bos_id"]
    for args in ([], ["-i", ""], ["-f", "/dev/null"], ["-i", "-"]):
        if bos == "none":
            assert "the prompt is empty" in refused(run(model, *args), 2)
        else:
            expected = ok(model, "--ids", bos, "-n", 10, "-t", 0)
            assert ok(model, *args, "-n", 10, "-t", 0) == expected


@pytest.mark.parametrize("model", [LLAMA, QWEN3])
def test_any_characters_are_a_prompt(model):
    args = [model, "-n", 3, "-t", 0]
    for prompt in ("naïve 漢字 🙂", "--temp", "\ufffd"):
        assert ok(*args, "--prompt", prompt).startswith(prompt)
    assert ok(*args, "-i", "-", stdin=b"a\0b\n").startswith("a\0b")


# Each way to give a text, as far as it may stand behind the model: (options, standard input) of these bytes.
GIVEN = {
    "--prompt: the text": lambda data, path: (["-i", data], b""),
    "--prompt: '-'": lambda data, path: (["-i", "-"], data),
    "--file: 'PATH'": lambda data, path: (["-f", path], b""),
    "--system: the text": lambda data, path: (["-m", "chat", "-i", "x", "-y", data], b""),
    "--mode chat: a line of standard input": lambda data, path: (["-m", "chat"], b"x\n" + data + b"\ny\n"),
    "--ppl: 'PATH'": lambda data, path: (["--ppl", path], b""),
}


@pytest.mark.parametrize("name", GIVEN)
def test_one_rule_for_all_texts(tmp_path, name):
    """UTF-8, CR LF is LF, a byte order mark in front goes; a CR by itself stays."""
    path = tmp_path / "text"

    def given(data):
        path.write_bytes(data)
        options, stdin = GIVEN[name](data, path)
        return run(LLAMA, "-n", 2, "-t", 0, "-j", 1, *options, stdin=stdin)

    def outcome(data):
        """What is printed, and how many tokens were run."""
        result = given(data)
        assert result.returncode == 0, result.stderr
        return result.stdout, re.search(rb"prefill +(\d+)", result.stderr)[1]

    plain = outcome(b"one red ball, a day")
    assert outcome(b"\xef\xbb\xbfone red ball, a day") == plain
    assert outcome(b"one \xef\xbb\xbfred ball, a day") != plain
    assert outcome(b"one red\r ball, a day") != plain
    if "line" not in name:
        assert outcome(b"one\r\n\r\nred ball\r\n.") == outcome(b"one\n\nred ball\n.")

    said = name.replace("PATH", str(path)) + " is not UTF-8 at byte "
    code = 2 if name.endswith(": the text") else 1
    for data, at in ((b"cut \xe2\x82", 4), (b"one\r\ntwo \xff", 9), (b"\xef\xbb\xbf\xed\xa0\x80", 3)):
        if "line" in name:
            data = data.replace(b"\r\n", b"  ")
        result = given(data)
        assert (result.returncode, result.stderr.decode()) == (code, f"runq: {said}{at}\n")
    for encoding in ("utf-16", "utf-16-be"):
        data = "Ünder".encode(encoding)
        if name not in ("--system: the text", "--prompt: the text"):  # an argument has no zero bytes
            assert given(data).stderr.decode() in (f"runq: {said}{at}; it looks like UTF-16\n" for at in (0, 1))


def test_what_is_typed_is_not_utf8():
    """On a terminal that is one line, and the chat goes on."""
    ours, theirs = pty.openpty()
    os.write(ours, b"a \xe2 b\nTell me a story.\n\x04")
    command = [RUNQ, LLAMA, "-m", "chat", "-t", "0", "-n", "3", "-j", "1", "--print-ids"]
    environment = {**os.environ, "TERM": "dumb"}
    result = subprocess.run(command, stdin=theirs, capture_output=True, check=False, timeout=300, env=environment)
    os.close(theirs)
    os.close(ours)
    assert result.returncode == 0
    assert len(result.stdout.splitlines()) == 1
    assert b"> this message is not UTF-8 at byte 2\n> > \n" in result.stderr


@pytest.mark.parametrize("kind", ["a pipe", "a file"])
def test_standard_input_that_is_not_read_is_said(tmp_path, kind):
    """One line, and the run goes on; nothing of it where there is nothing to be read, or a prompt."""
    said = b"standard input is not read: with -i - it is the prompt\n"

    def errors(data, *options):
        if kind == "a pipe":
            stdin, end = os.pipe()
            os.write(end, data)  # which stays open: nobody may wait for more
        else:
            (tmp_path / "text").write_bytes(data)
            stdin, end = os.open(tmp_path / "text", os.O_RDONLY), None
        command = [RUNQ, LLAMA, "-n", "3", "-j", "1", *options]
        result = subprocess.run(command, stdin=stdin, capture_output=True, check=True, timeout=300)
        for fd in (stdin, end):
            if fd is not None:
                os.close(fd)
        return result.stderr

    assert errors(b"Once upon a time\n").startswith(said)
    assert said not in errors(b"")
    for options in (("-i", "x"), ("--ids", "1"), ("--info",), ("--bench", "1,1")):
        assert said not in errors(b"Once upon a time\n", *options)


def test_trace(tmp_path):
    path = tmp_path / "run.safetensors"
    ids = ids_of(ok(LLAMA, "--ids", "5,6,7", "-n", 2, "-t", 0, "--print-ids", "--trace", path))
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    tensor = header["logits"]
    logits = array.array("f", data[8 + length :][slice(*tensor["data_offsets"])])
    vocab = int(info(LLAMA)["vocab_size"])
    last = logits[-vocab:]
    assert max(range(vocab), key=last.__getitem__) == ids[-1]
    assert list(tmp_path.iterdir()) == [path]

    result = run(LLAMA, "--ids", "5", "-n", 1, "--trace", tmp_path / "none" / "x")
    assert result.returncode == 1
    assert result.stderr.count(b"\n") == 1
    assert str(tmp_path / "none" / "x").encode() in result.stderr


# ----------------------------------------------------------------------------
# --ppl, --bench


@pytest.mark.parametrize("model", [LLAMA, QWEN3])
def test_perplexity(model, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("Once upon a time there was a small red ball. It was in the garden. " * 20)
    pattern = r"perplexity (\d+\.\d+) over (\d+) tokens \(windows of (\d+)\)\n"
    scored = {}
    for context in (16, 100, 512):
        value, n, window = re.fullmatch(pattern, ok(model, "--ppl", path, "-c", context)).groups()
        assert int(window) == context
        assert 1 < float(value) < 2048
        scored[context] = int(n)
        assert ok(model, "--ppl", "-", "-c", context, stdin=path.read_bytes()).startswith(f"perplexity {value} ")
    if info(model)["bos_id"] == "none":
        # The first token of each window has nothing before it.
        n = scored[512] + -(-(scored[512] + 1) // 512)
        assert scored == {c: n - -(-n // c) for c in scored}
    else:
        assert len(set(scored.values())) == 1

    # Line breaks of Windows, and what an editor there puts in front: the same text to both.
    text = "Once upon a time\n\nthere was a ball.\n"
    path.write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    ours = ok(model, "--ppl", path)
    reference = ["ppl", ROOT / "models" / model.stem.removesuffix(".q8"), path, "--scheme", "q8", "--digest"]
    golden = subprocess.run(
        [sys.executable, "-m", "golden", *reference], cwd=ROOT, capture_output=True, check=True, timeout=300
    ).stdout.decode()
    found = re.search(b"^digest +([0-9a-f]{16})$", run(model, "--ppl", path, "--digest").stderr, re.M)[1].decode()
    assert golden == f"{ours}digest {found}\n"
    path.write_text(text)
    assert ok(model, "--ppl", path) == ours

    path.write_text("")
    assert "too short" in refused(run(model, "--ppl", path), 1)
    assert "No such file" in refused(run(model, "--ppl", tmp_path / "none"), 1)


def test_bench():
    text = ok(LLAMA, "--bench", "32,16", "-j", 2)
    assert re.fullmatch(
        r"prefill 32 tokens: [\d.]+ tokens/s, [\d.]+ GMAC/s, at most \d+ tokens at a time\n"
        r"decode 16 tokens: [\d.]+ tokens/s, [\d.]+ GB/s, "
        r"\d+% of the [\d.]+ GB/s that 2 threads read between the tokens( \(above 100%[^\n]*\))?\n"
        r"prefill took [\d.]+ s: [^\n]*matmul[^\n]*attention[^\n]*rest[^\n]*\n"
        r"decode took [\d.]+ s: [^\n]*matmul[^\n]*attention[^\n]*rest[^\n]*\n"
        r"memory [\d.]+ GB at its peak\n",
        text,
    )
    assert "decode" not in ok(LLAMA, "--bench", "512,0")
    assert "prefill" not in ok(LLAMA, "--bench=0,4")


@pytest.mark.parametrize("kv", ["f32", "q8"])
def test_bench_behind_made_up_positions(kv):
    """Decode reads their keys and values: what it counts for a token grows by as much."""

    def decode(depth):
        text = ok(LLAMA, "--kv", kv, "--bench", f"0,8,{depth}")
        rate = re.search(r"^decode 8 tokens: ([\d.]+) tokens/s, ([\d.]+) GB/s", text, re.M)
        return float(rate[2]) / float(rate[1]) * 1e9

    per_position = int(
        dict(line.split(maxsplit=1) for line in ok(LLAMA, "--kv", kv, "--info").splitlines())["kv_bytes_per_position"]
    )
    assert decode(500) - decode(0) == pytest.approx(500 * per_position, rel=0.05)


# ----------------------------------------------------------------------------
# Chat


@pytest.fixture(params=[LLAMA, QWEN3], ids=["llama", "qwen3"])
def chat(request):
    return [request.param, "-m", "chat", "-t", 0, "-j", 1]


def test_chat_answers_every_line(chat):
    lines = b"Tell me a story.\n\nWho are you?\n"
    result = run(*chat, "-n", 30, stdin=lines)
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith(b"\n")
    assert b"> " not in result.stderr  # the marker is for terminals
    assert b"Tell me a story." not in result.stderr
    assert b"<|" not in result.stdout
    assert b"decode" in result.stderr

    turns = ok(*chat, "-n", 30, "--print-ids", stdin=lines).splitlines()
    assert len(turns) == 2  # the empty line is not a turn
    eos = eos_ids(chat[0])
    for turn in turns:
        ids = [int(i) for i in turn.split(",")]
        assert len(ids) == 30 or ids[-1] in eos

    # The first message may come from -i or -f, and then standard input goes on.
    assert ok(*chat, "-n", 30, "-i", "Tell me a story.", stdin=b"Who are you?").encode() == result.stdout
    assert len(ok(*chat, "--print-ids", "-i", "Hello", stdin=b"").splitlines()) == 1
    assert ok(*chat, stdin=b"") == ""


def test_chat_options_reach_the_prompt(chat):
    def prefill(*args):
        result = run(*chat, "-n", 1, "-i", "Tell me a story.", *args)
        assert result.returncode == 0
        return int(re.search(rb"prefill   (\d+) tokens", result.stderr)[1])

    plain = prefill()
    assert prefill("-y", "You tell short stories.") > plain
    # Qwen3 without thinking starts its answer with an empty thought.
    assert (prefill("-r", 0) > plain) == (chat[0] == QWEN3)


def test_chat_runs_only_what_is_new(chat):
    def prefill(stdin):
        return int(re.search(rb"prefill   (\d+) tokens", run(*chat, "-n", 1, stdin=stdin).stderr)[1])

    one = prefill(b"Tell me a story.\n")
    two = prefill(b"Tell me a story.\nTell me a story.\n")
    assert two < 2 * one + 8  # and not the whole conversation again, which would make it 3 times one


def test_chat_goes_on_when_the_context_is_full(chat):
    result = run(*chat, "-c", 128, "-n", 30, stdin=b"Tell me a story.\n" * 8)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) >= 8
    assert result.stderr.count(b"the context of 128 tokens is full: the oldest turn") >= 2


# ----------------------------------------------------------------------------
# Signals and broken outputs


def full_pipe():
    """A pipe with room for no more than a few bytes: who writes to it waits for us to read."""
    read_end, write_end = os.pipe()
    size = fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, 4096)
    os.write(write_end, b"." * (size - 4))
    return read_end, write_end, size


def waiting_to_write(*args, program="runq", start=default_signals):
    """A program that has begun to print, and cannot go on. start: called before the child becomes the program.

    With one thread (-j 1) it takes every signal before it does anything else.
    """
    read_end, write_end, size = full_pipe()
    command = [ROOT / program, *map(str, args)]
    process = subprocess.Popen(command, stdout=write_end, stderr=subprocess.PIPE, preexec_fn=start)
    os.close(write_end)
    waiting = array.array("i", [0])
    deadline = time.monotonic() + 300
    while not (waiting[0] > size - 4 and is_asleep(process)) and time.monotonic() < deadline:
        fcntl.ioctl(read_end, 0x541B, waiting)  # FIONREAD: bytes in the pipe
        time.sleep(0.01)
    assert waiting[0] > size - 4
    return process, read_end


def is_asleep(process):
    """Whether its first thread waits for something."""
    return Path(f"/proc/{process.pid}/stat").read_text().rsplit(") ", 1)[1].startswith("S")


def send_and_wait(process, number):
    """Sends a signal, and returns once the process has taken it."""
    process.send_signal(number)
    status, bit = Path(f"/proc/{process.pid}/status"), 1 << (number - 1)
    while any(int(mask, 16) & bit for mask in re.findall(r"(?:SigPnd|ShdPnd):\s*(\w+)", status.read_text())):
        time.sleep(0.001)


def test_ctrl_c_ends_a_run_with_its_statistics():
    process, pipe = waiting_to_write(
        LLAMA, "--ids", "5,6,7", "-n", 0, "-t", 100, "-p", 1, "-k", 0, "-s", 1, "-j", 1, "--print-ids"
    )
    send_and_wait(process, signal.SIGINT)
    assert process.poll() is None
    with os.fdopen(pipe, "rb") as out:
        text = out.read().lstrip(b".")
    _, statistics = process.communicate(timeout=300)
    assert process.returncode == 130
    assert text.endswith(b"\n")
    assert 1 <= len(ids_of(text.decode())) < 10  # of the hundreds that it would have been
    assert b"prefill" in statistics


def test_a_second_ctrl_c_kills():
    process, pipe = waiting_to_write(LLAMA, "--ids", "5,6,7", "-n", 0, "-j", 1, "--print-ids")
    for _ in range(2):
        send_and_wait(process, signal.SIGINT)
    process.communicate(timeout=300)
    os.close(pipe)
    assert process.returncode == -signal.SIGINT


def test_ctrl_c_is_ignored_where_it_was_ignored_from_the_start():
    """As a script starts what it runs in the background: the run goes on to its end."""
    process, pipe = waiting_to_write(
        LLAMA, "--ids", "5,6,7", "-n", 40, "-t", 100, "-p", 1, "-k", 0, "-s", 1, "-j", 1, "--print-ids",
        start=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )  # fmt: skip
    for _ in range(2):
        process.send_signal(signal.SIGINT)
    with os.fdopen(pipe, "rb") as out:
        text = out.read().lstrip(b".")
    process.communicate(timeout=300)
    assert process.returncode == 0
    assert len(ids_of(text.decode())) == 40


def test_ctrl_c_ends_a_chat_that_waits_for_input(chat):
    process = subprocess.Popen(
        [RUNQ, *map(str, chat), "-n", "5", "-j", "1", "--print-ids"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=default_signals,
    )
    process.stdin.write(b"Hello\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    assert len(ids_of(answer.decode())) >= 1
    while not is_asleep(process):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    # Not communicate(), which would close standard input and so end the chat in the other way.
    assert process.wait(timeout=300) == 130
    assert b"prefill" in process.stderr.read()
    process.stdin.close()


@pytest.mark.parametrize("ignored", [False, True], ids=["default", "ignored"])
def test_a_reader_that_goes_away_is_no_error(ignored):
    read_end, write_end = os.pipe()
    os.close(read_end)
    # Python ignores SIGPIPE; a child that keeps that sees EPIPE instead of being killed.
    process = subprocess.Popen(
        [RUNQ, LLAMA, "-i", STORY], stdout=write_end, stderr=subprocess.PIPE, restore_signals=not ignored
    )
    os.close(write_end)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == (0 if ignored else -signal.SIGPIPE)
    assert errors == b""


@pytest.mark.parametrize(
    "args", [["-h"], ["-V"], ["MODEL", "--info"], ["MODEL", "-i", STORY], ["MODEL", "--bench", "4,0"]]
)
def test_output_that_cannot_be_written(args):
    command = [RUNQ, *(LLAMA if a == "MODEL" else a for a in args)]
    with Path("/dev/full").open("wb") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False, timeout=300)
    assert result.returncode == 1
    assert result.stderr == b"runq: cannot write the output: No space left on device\n"
    result = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *command], stderr=subprocess.PIPE, check=False, timeout=300)
    assert result.returncode == 1
    assert result.stderr == b"runq: cannot write the output: Bad file descriptor\n"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_file_does_not_become_a_standard_stream_that_is_closed(tmp_path, closed):
    """The trace is what it is with all streams open, and nothing but the trace."""
    traces = [tmp_path / "open.safetensors", tmp_path / "closed.safetensors"]
    for trace, streams in zip(traces, ("", closed), strict=True):
        command = [RUNQ, LLAMA, "-i", "Once", "-t", "0", "-n", "3", "--trace", trace]
        command = ["sh", "-c", f'"$@" {streams}', "sh", *command]
        subprocess.run(command, capture_output=True, check=False, timeout=300)
    if ">&-" not in closed.split():  # otherwise the run ends where it cannot print, and leaves no trace
        assert traces[1].read_bytes() == traces[0].read_bytes()
    else:
        assert not traces[1].exists()


def test_a_chat_without_standard_input_does_not_read_the_model_as_words():
    """Descriptor 0 must not be that of the mapped file, whose header would be what the user seems to say."""
    command = [RUNQ, LLAMA, "-m", "chat", "--mmap"]
    nobody, closed = (
        subprocess.run(["sh", "-c", f'"$@" {streams}', "sh", *command], capture_output=True, check=False, timeout=300)
        for streams in ("</dev/null", "<&-")
    )
    assert nobody.returncode == closed.returncode == 0
    assert closed.stdout == nobody.stdout


def test_no_standard_error_is_no_error():
    command = ["sh", "-c", '"$@" 2>&-', "sh", RUNQ, LLAMA, "-i", STORY, "-t", "0", "-n", "5"]
    result = subprocess.run(command, stdout=subprocess.PIPE, check=False, timeout=300)
    assert result.returncode == 0
    assert result.stdout.decode().startswith(STORY)
