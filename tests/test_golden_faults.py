"""What the reference makes of bad traces, models, texts and disks.

The promise: exit code 0, 1 or 3 with a report on standard output, or 1 with one line on standard error; no traceback,
and nothing is left behind.
"""

import errno
import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import golden.__main__
import golden.make
import golden.real
from export.q8 import export_q8
from formats.checkpoint import Checkpoint
from golden.forward import forward
from golden.op_cases import OpVectors
from golden.q8 import Q8
from golden.schemes import SCHEMES
from golden.trace import Recorder
from tests.gguf_fixture import write_gguf
from tests.helpers import DATA, F32, MODELS, ROOT
from tests.malformed import LFS_POINTER, small_model

GROUP = ("--group-size", "32")
LINE = re.compile(r"golden: [^\x00-\x1f\x7f-\x9f]+\n")
OPS = DATA / "ops.safetensors"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small model; a test that changes it puts it back."""
    return small_model(MODELS / "tiny-llama", tmp_path_factory.mktemp("small") / "model")


@pytest.fixture(scope="module")
def good(model):
    """The trace of a few tokens of it."""
    checkpoint, recorder = Checkpoint(model), Recorder()
    tokens = recorder("tokens", np.array([1, 2, 3, 4, 5], np.int32))
    forward(checkpoint.config, Q8(checkpoint, 32), tokens, recorder)
    return {name: np.ascontiguousarray(value) for name, value in recorder.tensors.items()}


@pytest.fixture
def run(capfd):
    """Runs a command of the reference in this process: exit code, standard output, standard error."""

    def run(*args):
        code = golden.__main__.main([str(arg) for arg in args])
        return code, *capfd.readouterr()

    return run


def refused(done, text=""):
    """The command printed one line and nothing else."""
    code, out, err = done
    assert (code, out) == (1, ""), done
    assert LINE.fullmatch(err), err
    assert text in err
    return err


# ---- traces


def as_fifo(path):
    os.mkfifo(path)


def as_device(path):
    path.symlink_to("/dev/zero")


def header_of(text):
    return struct.pack("<Q", len(text)) + text


FILES = {
    "missing": (lambda _: None, "no such file"),
    "directory": (lambda path: path.mkdir(), "is a directory"),
    "FIFO": (as_fifo, "is a FIFO"),
    "device": (as_device, "is a character device"),
    "Git LFS": (LFS_POINTER, "is a Git LFS pointer"),
    "empty": (b"", "not a safetensors file"),
    "text": (b"a" * 100, "not a safetensors file"),
    "long header": (struct.pack("<Q", 1 << 40) + b"{}", "not a safetensors file"),
    "deep header": (header_of(b"[" * 100_000), "not a safetensors file"),
    "cases": (header_of(b'{"__metadata__": {"cases": "{\\"a\\": 5}"}}'), "cases"),
    "deep cases": (header_of(b'{"__metadata__": {"cases": "' + b"[" * 9999 + b'"}}'), "cases"),
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_no_trace(tmp_path, model, good, run, name):
    content, text = FILES[name]
    trace, bad = tmp_path / "good", tmp_path / "bad"
    save_file(good, trace)
    content(bad) if callable(content) else bad.write_bytes(content)
    refused(run("diff", bad, trace), text)
    if "cases" not in name:  # which only the reference's file has
        refused(run("diff", trace, bad), text)
        refused(run("diff", trace, bad, "--model", model, *GROUP), text)
        refused(run("accept", bad, "--model", model, *GROUP), text)


TOKENS = {
    "too large": (np.array([1, 9999], np.int32), "token 9999 is no id below the model's vocab_size"),
    "negative": (np.array([-1, 2], np.int32), "token -1 is no id below the model's vocab_size"),
    "huge": (np.array([2**64 - 1], np.uint64), "token 18446744073709551615 is no id below"),
    "floats": (np.array([1, 2], F32), "tokens are float32 (2,), expected a list of whole numbers"),
    "none": (np.array([], np.int32), "no tokens, expected 1 to the model's context, 64"),
    "too many": (np.ones(65, np.int32), "65 tokens, expected 1 to the model's context, 64"),
    "a number": (np.array(1, np.int32), "tokens are int32 (), expected a list of whole numbers"),
    "three dimensions": (np.ones((1, 1, 2), np.int32), "tokens are int32 (1, 1, 2), expected a list of whole numbers"),
    "missing": (None, "the trace has no tokens"),
}


@pytest.mark.parametrize("name", TOKENS)
def test_tokens_that_no_model_has_run(tmp_path, model, good, run, name):
    tokens, text = TOKENS[name]
    rest = {name: value for name, value in good.items() if name != "tokens"}
    save_file(rest | ({} if tokens is None else {"tokens": tokens}), tmp_path / "bad")
    refused(run("diff", tmp_path / "bad", tmp_path / "bad", "--model", model, *GROUP), text)
    text = "has no tensor 'tokens'" if tokens is None else text
    refused(run("accept", tmp_path / "bad", "--model", model, *GROUP), text)


def test_a_trace_with_nothing_to_judge_does_not_pass(tmp_path, model, good, run):
    for name, tensors in (("empty", {}), ("tokens", {"tokens": good["tokens"]})):
        save_file(tensors, tmp_path / name)
        code, out, err = run("diff", tmp_path / name, tmp_path / name)
        assert (code, "nothing to judge" in out, err) == (1, True, "")
    code, out, err = run("diff", tmp_path / "tokens", tmp_path / "tokens", "--model", model, *GROUP)
    assert (code, "nothing to judge" in out, err) == (1, True, "")


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2", "bool"])
def test_types_that_no_step_has(tmp_path, model, good, run, kind):
    dtype = bool if kind == "bool" else getattr(ml_dtypes, kind)
    save_file(good | {"embed": good["embed"].astype(dtype)}, tmp_path / "bad")
    save_file(good, tmp_path / "good")
    for how in (("bad", "good"), ("good", "bad"), ("good", "bad", "--model", model, *GROUP)):
        refused(run("diff", *(tmp_path / name for name in how[:2]), *how[2:]), "tensor embed has type ")


def changes(good):
    """Traces that can be read and are wrong."""
    for name, value in good.items():
        if name == "tokens":
            continue
        for what, other in (
            ("no values", value[:0]),
            ("no dimensions", value.reshape(-1)[0].reshape(())),
            ("one more dimension", value[None]),
            ("flat", value.reshape(-1)),
            ("transposed", value.T),
            ("one dimension more behind", value[..., None]),
            ("a row less", value[:-1]),
            ("no columns", value[..., :0]),
            ("int64", value.astype(np.int64)),
            ("bf16", value.astype(ml_dtypes.bfloat16)),
            ("zeros", np.zeros_like(value)),
            ("NaN", np.full_like(value, np.nan) if value.dtype.kind == "f" else value + value.dtype.type(1)),
            ("infinity", np.full_like(value, np.inf) if value.dtype.kind == "f" else ~value),
        ):
            yield f"{name}: {what}", {name: np.ascontiguousarray(other)}


def test_steps_that_are_wrong_are_reported(tmp_path, model, good, run):
    """Never a pass, never more than a report or a line."""
    first = {name: value for name, value in good.items() if ".1." not in name}
    wrong = {}
    save_file(first, tmp_path / "good")
    for name, change in list(changes(first))[::3]:  # of thirteen changes to each step, others from step to step
        save_file(first | change, tmp_path / "bad")
        for how in (("good", "bad"), ("bad", "good"), ("good", "bad", "--model", model, *GROUP)):
            done = code, out, err = run("diff", *(tmp_path / file for file in how[:2]), *how[2:])
            is_line = LINE.fullmatch(err) and err.startswith(
                (f"golden: {tmp_path / 'good'}: ", f"golden: {tmp_path / 'bad'}: ")
            )
            if code != 1 or bool(out) == bool(err) or (err and not is_line):
                wrong[name, how] = done
    assert not wrong


@pytest.mark.parametrize("what", ["flat", "transposed", "one dimension more behind", "one more dimension"])
def test_a_step_of_another_shape(tmp_path, good, run, what):
    """With as many values as there should be."""
    name = "layers.0.attn.norm.s"
    change = dict(changes({name: good[name]}))[f"{name}: {what}"]
    save_file(good | change, tmp_path / "bad")
    save_file(good, tmp_path / "good")
    code, out, err = run("diff", tmp_path / "good", tmp_path / "bad")
    assert (code, err) == (1, "")
    assert f"float32 {change[name].shape}, expected float32 {good[name].shape}" in out
    assert f"the first at {name}" in out


def test_names_of_steps_do_nothing_to_a_terminal(tmp_path, good, run):
    save_file(good, tmp_path / "good")
    save_file(good | {"\x1b[2J\nembed": good["embed"]}, tmp_path / "bad")
    for how in (("good", "bad"), ("bad", "good")):
        code, out, err = run("diff", *(tmp_path / file for file in how))
        assert (code != 0, err) == (True, "")
        assert "\x1b" not in out
        assert r"\x1b[2J\nembed" in out


def test_a_product_of_op_vectors_that_is_wrong_is_refused(tmp_path, run):
    """`golden passes`: never anything but files or a line that names file and tensor."""
    product = {"m.x.codes": np.ones((4, 64), np.int8), "m.x.scales": np.ones((4, 2), F32),
               "m.w.codes": np.ones((3, 64), np.int8), "m.w.scales": np.ones((3, 2), F32),
               "m.out": np.ones((4, 3), F32)}  # fmt: skip
    cases = {"m": {"op": "matmul", "inputs": [], "outputs": {"out": 0}}}
    done = {}

    def write(what, tensors):
        save_file(tensors, tmp_path / "ops", {"cases": json.dumps(cases)})
        out = tmp_path / what
        done[what] = run("passes", "m", "--file", tmp_path / "ops", "--tile", "16x16", "--out", out)
        assert done[what][0] == (0 if out.exists() else 1)

    write("good", product)
    for name in list(product)[:4]:
        write(f"{name}: missing", {key: value for key, value in product.items() if key != name})
        for what, change in changes({name: product[name]}):
            write(what, product | change)
    assert done.pop("good")[::2] == (0, "")
    may_be = {f"{name}: zeros" for name in product}
    may_be |= {f"m.{x}.codes: {what}" for x in "xw" for what in ("NaN", "infinity")}  # of integers, other ones
    for what, (code, out, err) in done.items():
        if what in may_be:
            assert (code, err) == (0, ""), what
        else:
            assert (code, out, err.count("\n")) == (1, "", 1), (what, err)
            assert err.startswith(f"golden: {tmp_path / 'ops'}: "), err
            assert what.split(".")[1] in err  # x or w


# ---- options, models, texts


@pytest.mark.parametrize("size", ["0", "-32", "6", "48", "100000000000000000000"])
@pytest.mark.parametrize("command", ["diff", "accept", "ppl"])
def test_group_sizes(tmp_path, model, good, run, command, size):
    save_file(good, tmp_path / "good")
    (tmp_path / "text").write_text("Once upon a time")
    args = {
        "diff": (tmp_path / "good", tmp_path / "good", "--model", model),
        "accept": (tmp_path / "good", "--model", model),
        "ppl": (model, tmp_path / "text", "--scheme", "q8"),
    }[command]
    refused(run(command, *args, "--group-size", size), "--group-size")


@pytest.mark.parametrize("size", ["1", "0", "-5", "65", "100000000000000000000"])
def test_contexts(tmp_path, model, run, size):
    (tmp_path / "text").write_text("Once upon a time")
    refused(run("ppl", model, tmp_path / "text", "--ctx", size), f"--ctx is {size}, expected 2 to the model's 64")


TEXTS = {
    "missing": (None, "no such file"),
    "empty": (b"", "no token to score"),
    "not UTF-8": (b"Once\r\n\xff", "not UTF-8 at byte 6\n"),
    "UTF-16": ("Once".encode("utf-16"), "not UTF-8 at byte 0; it looks like UTF-16\n"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_texts(tmp_path, model, run, name):
    content, text = TEXTS[name]
    if content is not None:
        (tmp_path / "text").write_bytes(content)
    refused(run("ppl", model, tmp_path / "text"), text)


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b'{"a": "b"}', b'{"a": NaN}', b"[" * 100_000, b"\xff"])
def test_profiles(tmp_path, good, run, content):
    save_file(good, tmp_path / "good")
    if content is not None:
        (tmp_path / "profile").write_bytes(content)
    refused(run("diff", tmp_path / "good", tmp_path / "good", "--profile", tmp_path / "profile"))


MODEL_FILES = {
    "missing": (None, "no such "),
    "empty": (b"", "0 bytes"),
    "Git LFS": (LFS_POINTER, "Git LFS pointer"),
    "not a model": (b"\x7fELF" + bytes(300), "magic"),
    "only a header": ((MODELS.parent / "build" / "models" / "tiny-llama.w8a8.bin"), ""),
}


@pytest.mark.parametrize("name", MODEL_FILES)
def test_model_files(tmp_path, good, run, name):
    content, text = MODEL_FILES[name]
    save_file(good, tmp_path / "good")
    path = tmp_path / "model.bin"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.read_bytes()[:256])
    refused(run("diff", tmp_path / "good", tmp_path / "good", "--model", path), text)
    refused(run("accept", tmp_path / "good", "--model", path), text)
    (tmp_path / "text").write_text("Once upon a time")
    refused(run("ppl", MODELS / "tiny-llama", tmp_path / "text", "--file", path), text)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors.index.json"])
def test_models_without_a_file(tmp_path, model, run, file):
    (tmp_path / "text").write_text("Once upon a time")
    aside = (model / file).rename(tmp_path / file)
    try:
        refused(run("ppl", model, tmp_path / "text"))
    finally:
        aside.rename(model / file)
    assert run("ppl", model, tmp_path / "text")[0] == 0


# ---- what is written


def full(_descriptor):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def few_vectors(monkeypatch):
    """Vectors that take no time."""

    def vectors():
        v = OpVectors()
        v.tensors["a"] = np.zeros(4, F32)
        return v

    monkeypatch.setattr(golden.make, "op_vectors", vectors)
    monkeypatch.setattr(golden.make, "goldens", lambda *_: [])


def test_make_with_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch, few_vectors, run):
    (tmp_path / "ops.safetensors").write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", full)
    refused(run("make", "--out", tmp_path), "ops.safetensors: cannot write: No space left on device")
    assert [p.name for p in tmp_path.iterdir()] == ["ops.safetensors"]
    assert (tmp_path / "ops.safetensors").read_bytes() == b"old"


def test_make_without_models_or_a_folder(tmp_path, monkeypatch, few_vectors, run):
    (tmp_path / "file").write_bytes(b"")
    refused(run("make", "--out", tmp_path / "file"), "file")
    monkeypatch.setattr(golden.make, "goldens", lambda *_: [("tiny-llama", "q8", SCHEMES["q8"])])
    refused(run("make", "--out", tmp_path / "out", "--models", tmp_path / "none"), "none/tiny-llama: no such directory")


@pytest.fixture
def real_files(tmp_path, model, monkeypatch):
    """A small model in the place of the real one, and a prompt that takes no time."""
    files = tmp_path / "files"
    files.mkdir()
    gguf = write_gguf(model, files / "smollm2.gguf")
    export_q8(gguf, files / "smollm2.q8.bin", 32, progress=False)
    monkeypatch.setattr(golden.real, "PROMPTS", ("Once",))
    monkeypatch.setattr(golden.real, "NEW_TOKENS", 2)
    return files


def test_real_with_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch, real_files, run):
    out = tmp_path / "out"
    args = ("real", "--files", real_files, "--out", out, "--only", "fp32")
    assert run(*args)[0] == 0
    old = (out / "smollm2.fp32.json").read_bytes()
    assert json.loads(old)["generations"]
    monkeypatch.setattr(os, "fsync", full)
    refused(run(*args), "smollm2.fp32.json: cannot write: No space left on device")
    assert [p.name for p in out.iterdir()] == ["smollm2.fp32.json"]
    assert (out / "smollm2.fp32.json").read_bytes() == old


def test_real_without_its_files(tmp_path, real_files, run):
    refused(run("real", "--files", tmp_path / "none", "--out", tmp_path / "out"), "none/smollm2.gguf")
    (real_files / "smollm2.q8.bin").write_bytes(b"none")
    refused(run("real", "--files", real_files, "--out", tmp_path / "out", "--only", "fp32"), "runq: ")
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("how", [(), ("-v",)])
def test_a_report_that_cannot_be_written_is_one_line(how):
    trace = DATA / "tiny-llama.q8.trace.safetensors"
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with Path("/dev/full").open("w") as nowhere:
        done = subprocess.run(
            [sys.executable, "-m", "golden", "diff", trace, trace, *how],
            cwd=ROOT, stdout=nowhere, stderr=subprocess.PIPE, text=True, check=False, env=buffered,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "golden: [Errno 28] No space left on device\n")
