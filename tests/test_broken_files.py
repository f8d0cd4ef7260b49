"""Changed copies of model files: a program refuses them with one line, or runs where the change does no harm.

Hundreds of each go through the command line of a program in one process, built under AddressSanitizer and UBSan
(tests/fuzz/command_line.h). One of each kind is also given to the program itself. The lines, word by word, are those
of tests/model_file_test.cpp.
"""

import os
import random
import re
import struct
import subprocess
from typing import NamedTuple

import numpy as np
import pytest

from formats.model_file import read_format, read_header
from formats.schemes import GPTQ_FILE
from formats.tensors import with_offsets
from golden.schemes import SCHEMES
from golden.trace import read_trace
from tests.helpers import FULL, GOLDEN_FILES, ROOT, run_golden, seal
from tests.test_runq import runq

PROGRAM = {v: reference.format.program for reference in SCHEMES.values() for v in reference.variants}
# Files to change: of every program, and of every way to store its weights.
MODELS = ["tiny-llama.q8", "tiny-qwen3.q8", "tiny-llama.w8a8-static", "tiny-qwen3.w8a8-block32",
          "tiny-llama.awq", "tiny-qwen3.awq-g64", "tiny-llama.gptq-w4", "tiny-qwen3.gptq-ladder",
          "tiny-llama.gptq-sparse", "tiny-qwen3-moe.moe-a8w8", "tiny-qwen3-moe.moe-a8w4-pure",
          "tiny-qwen3-moe.moe-mxfp8", "tiny-qwen3-moe.moe-ladder"]  # fmt: skip
N = 400 if FULL else 120  # changed copies of a file
RUN = ["-i", "Once <|eot_id|>upon\n", "-t", "0", "-j", "1", "-n", "2"]
# An emulated GPU takes half a second for a token: one file in 16 is run, for one. The others end when they are
# loaded, as a context of one token is too short for the prompt.
EMULATED = {"runq_awq": 16}
RUN_EMULATED = ["-i", "Once", "-t", "0", "-j", "1", "-n", "1"]
LOAD = [*RUN, "-c", "1"]

HEADER_FIELDS = [(o, 4) for o in range(0, 0x24, 4)] + [(0x24, 1), (0x25, 4)] + [(o, 4) for o in range(0x40, 0xA0, 4)]
HEADER_FIELDS += [(0xA0, 8), (0xA8, 8), (0xB4, 4)]
OWN_FIELDS = [(o, 4) for o in range(0xB8, 0x100, 4)] + [(o, 1) for o in range(0xC0, 0xE8)]
INTERESTING = [0, 1, -1, 2, 3, 7, 63, 65, 127, 255, 256, 4096, 65535, 1 << 20, 1 << 24, (1 << 31) - 1, -(1 << 31)]
WHOLE = ("<i4", "|i1", "|u1")  # tensors of whole numbers, which could become addresses; MXFP8 is not whole
KINDS = ["truncate", "truncate", "extend", "foreign", "header bits", "header field", "tokenizer bits",
         "tokenizer field", "sealed header field", "sealed header field", "sealed own field", "sealed header bits",
         "sealed tokenizer bits", "sealed tokenizer field", "weights"]  # fmt: skip


class Case(NamedTuple):
    kind: str
    what: str  # was done
    data: bytes

    @property
    def may_run(self):
        """The checksum holds, as it is not over the weights, or was made to: the change may do no harm."""
        return self.kind.startswith("sealed") or self.kind == "weights"


def mutate(original, tensors, rng):
    """A broken copy of a model file. tensors: those whose values may change."""
    data = bytearray(original)
    offset = struct.unpack_from("<Q", data, 0xA0)[0]
    kind = rng.choice(KINDS)
    what = kind

    def put(at, size):
        nonlocal what
        value = rng.choice([*INTERESTING, rng.getrandbits(31)])
        data[at : at + size] = (value & ((1 << (8 * size)) - 1)).to_bytes(size, "little")
        what += f" at {at:#x}: {value}"

    if kind == "truncate":
        size = rng.choice([rng.randrange(300), rng.randrange(len(data)), rng.randrange(offset, len(data))])
        del data[size:]
        what += f" to {size}"
    elif kind == "extend":
        data += rng.randbytes(rng.randrange(1, 2000))
    elif kind == "foreign":
        data[:] = rng.choice([b"", b"GGUF" + rng.randbytes(400), rng.randbytes(5000), b"\0" * 256, b"{}\n"])
    elif kind == "weights":
        tensor = rng.choice(tensors)
        for _ in range(rng.choice([1, 2, 8])):
            at = rng.randrange(tensor.offset, tensor.end)
            put(at, min(rng.choice([1, 4]), tensor.end - at))
    elif "header field" in kind:
        put(*rng.choice(HEADER_FIELDS))
    elif "own field" in kind:
        put(*rng.choice(OWN_FIELDS))
    elif "field" in kind:
        put(rng.choice([offset + rng.randrange(0, 64) // 4 * 4, rng.randrange(offset, len(data) - 4)]), 4)
    else:
        low, high = (0, 256) if "header" in kind else (offset, len(data))
        for _ in range(rng.choice([1, 1, 2, 8])):
            at = rng.randrange(low, high)
            data[at] ^= 1 << rng.randrange(8)
            what += f" {at:#x}"
    if kind.startswith("sealed"):
        seal(data)
    return Case(kind, what, bytes(data))


NOT_BITS = ("order", "mask", "dense_layers")  # tensors that say where something is: checked, and refused
# A NaN with a low bit; the int8 that has no opposite.
EXTREMES = {"<f4": b"\x01\0\xc0\x7f", "<i4": b"\x80", "<f2": b"\x01\x7e", "|i1": b"\x80", "|u1": b"\x80"}


def with_any_bits(path, kind, rng):
    """A model file whose weights are bits of a kind: random, all extremes, or random in the norms alone."""
    data = bytearray(path.read_bytes())
    head = read_header(path, read_format(path))
    for tensor in with_offsets(head.tensors(), alignment=head.file_format.alignment):
        last = tensor.name.split(".")[-1]
        if last in NOT_BITS or (kind == "norms" and not last.endswith("norm")):
            continue
        size = tensor.end - tensor.offset
        if kind == "extremes":
            value = EXTREMES[tensor.dtype]
            data[tensor.offset : tensor.end] = value * (size // len(value))
        else:
            data[tensor.offset : tensor.end] = rng.randbytes(size)
    return bytes(data)


ANY_BITS = [name for name in MODELS if FULL or name != "tiny-qwen3.awq-g64"]


@pytest.mark.parametrize("name", [*ANY_BITS, "random-llama.gptq-order"])
def test_weights_of_any_bits_become_numbers(tmp_path, name):
    """Under AddressSanitizer and UBSan such a file generates ids of its vocabulary, up to what is not finite."""
    path = ROOT / "build" / "models" / f"{name}.bin"
    program = PROGRAM["gptq-w4" if "gptq" in name else name.split(".")[1]]
    vocab_size = read_header(path, read_format(path)).config.vocab_size
    ids = ["5", "-n", "1"] if program in EMULATED else ["5,6,7", "-n", "3"]
    loader, rng = (
        Loader(program, ["--ids", *ids, "-j", "1", "-s", "1", "--print-ids"], tmp_path / "log"),
        random.Random(5),
    )
    kinds = ("random", "extremes", "norms")
    for kind in kinds[:1] if program in EMULATED and not FULL else kinds:
        outcome = loader.run(with_any_bits(path, kind, rng))
        if outcome is None:
            pytest.fail(f"{kind}: exit code {loader.close()}")
        if outcome.code == 1:
            assert b"is the first step that is not finite: " in outcome.err, (kind, outcome.err)
            continue
        assert outcome.code == 0, (kind, outcome.err)
        new = [int(i) for i in outcome.out.split(b",")]
        assert len(new) <= int(ids[-1]) and all(0 <= i < vocab_size for i in new), kind
    assert loader.close()[0] == 0


# Bytes 2 and 3 of a row of a mask, and what is said of them.
BAD_MASKS = {
    "5 and 3 in two bytes": ((0x37, 0x13), "3 of columns 16 to 19"),
    "3 and 1 in a byte": ((0x5A, 0x1E), "3 of columns 24 to 27"),
    "5 of 8": ((0x7C, 0x33), "3 of columns 20 to 23"),
    "none": ((0, 0), "0 of columns 16 to 19"),
    "all": ((0x33, 0xFF), "4 of columns 24 to 27"),
}
READERS = {
    "packed": ("runq_gptq", "FILE", "--ids", "1", "-n", "1"),
    "mapped": ("runq_gptq", "FILE", "--ids", "1", "-n", "1", "--mmap"),
    "ppl": ("runq_gptq", "FILE", "--ppl", "README.md"),
    "golden ppl": ("golden", "ppl", "models/tiny-llama", "README.md", "--file", "FILE"),
    "golden diff": ("golden", "diff", "--model", "FILE", *["golden/data/tiny-llama.gptq-sparse.trace.safetensors"] * 2),
    "golden hex": ("golden", "hex", "--file", "FILE", "--unpack", "layers.1.ffn.up_proj.mask"),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("ones", BAD_MASKS)
def test_a_mask_that_is_not_two_of_four_is_refused(tmp_path, ones, reader):
    """The instructions of one processor and another would read other weights in it."""
    path, (values, kept) = tmp_path / "m.bin", BAD_MASKS[ones]
    data = bytearray((GOLDEN_FILES / "tiny-llama.gptq-sparse.bin").read_bytes())
    head = read_header(GOLDEN_FILES / "tiny-llama.gptq-sparse.bin", GPTQ_FILE)
    tensors = {t.name: t for t in with_offsets(head.tensors(), alignment=head.file_format.alignment)}
    mask = tensors["layers.1.ffn.up_proj.mask"]
    for row in (5, 200):
        at = mask.offset + row * mask.shape[1] + 2
        data[at : at + 2] = bytes(values)
    path.write_bytes(data)
    program, *args = (str(path) if word == "FILE" else word for word in READERS[reader])
    done = run_golden(*args) if program == "golden" else runq(path, *args[1:], program=program, text=True)
    line = f"{path}: layers.1.ffn.up_proj.mask: row 5 keeps {kept}, expected 2 of each 4\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"{program}: {line}")


# Files of every program, and of every way to code activations.
OVERFLOWING = ("tiny-llama.q8", "tiny-qwen3.w8a8", "tiny-llama.w8a8-static", "tiny-qwen3.gptq-w4", "tiny-llama.awq",
               "tiny-qwen3-moe.moe-a8w8", "tiny-qwen3-moe.moe-a8w4-pure", "tiny-qwen3-moe.moe-mxfp8",
               "tiny-qwen3-moe.moe-ladder")  # fmt: skip
TASKS = {
    "greedy": ("-i", "Once upon", "-t", 0, "-n", 3),
    "drawn": ("--ids", "1,2,3", "-t", 1, "-s", 1, "-n", 3, "--print-ids"),
    "guessed": ("--ids", "1,2,3", "-t", 0, "-n", 3, "--lookup", 4, "--print-ids"),
    "chat": ("--mode", "chat", "-t", 0, "-n", 3),
    "ppl": ("--ppl", "models/calibration.txt", "--ctx", 24),
}


def run_changed(name, change, out, *args):
    """Runs a copy of a model file in which `change` has changed the tensors: exit code, output, error line."""
    path, data = GOLDEN_FILES / f"{name}.bin", np.fromfile(GOLDEN_FILES / f"{name}.bin", np.uint8)
    head = read_header(path, read_format(path))
    tensors = with_offsets(head.tensors(), alignment=head.file_format.alignment)
    change({t.name: data[t.offset : t.end].view(t.dtype).reshape(t.shape) for t in tensors})
    data.tofile(out)
    done = runq(out, *args, program=head.file_format.program, input="Hello\n", text=True)
    return done.returncode, done.stdout, done.stderr.replace(str(out), "FILE")


def not_finite(name, position, step):
    """The error line; the sign may be any."""
    path = GOLDEN_FILES / f"{name}.bin"
    program = read_format(path).program
    kind = "fp16, which ends at 65504" if program == "runq_awq" and step != "embed" else "fp32"
    return f"{program}: FILE: position {position}: {step} is the first step that is not finite: inf in {kind}\n"


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", OVERFLOWING)
def test_the_first_step_that_is_not_finite_ends_a_run(tmp_path, name, task):
    """A norm multiplies by the largest number that there is. Codes of int8 would hide what comes of it."""

    def change(tensors):
        norm = tensors["layers.2.ffn.norm"]
        norm[:] = np.finfo(norm.dtype).max

    code, out, err = run_changed(name, change, tmp_path / "m.bin", *TASKS[task])
    assert (code, err.replace("-inf", "inf")) == (1, not_finite(name, 0, "layers.2.ffn.norm"))
    assert out == {"greedy": "Once upon\n", "ppl": ""}.get(task, "\n")


@pytest.mark.parametrize("name", ["tiny-qwen3.q8", "tiny-qwen3.awq"])
@pytest.mark.parametrize("prompt", ["5,6", "5,6,7,8"])
def test_the_position_is_that_of_the_token(tmp_path, name, prompt):
    """Behind what was generated, and in a prompt whose other tokens go through together with it."""
    path, options = GOLDEN_FILES / f"{name}.bin", ("--ids", prompt, "-t", 0, "-n", 4, "--print-ids")
    done = runq(path, *options, program=read_format(path).program, text=True)
    ids = [*map(int, prompt.split(",")), *map(int, done.stdout.split(","))]
    bad = ids[4] if prompt == "5,6" else 7
    position = ids.index(bad)

    def change(tensors):
        tensors["embed" if "embed" in tensors else "embed.scales"][bad] = np.inf

    code, out, err = run_changed(name, change, tmp_path / "m.bin", *options)
    assert (code, err.replace("-inf", "inf").replace("nan", "inf")) == (1, not_finite(name, position, "embed"))
    assert out == ",".join(map(str, ids[2 : position + 1] if prompt == "5,6" else [])) + "\n"


@pytest.mark.parametrize("options", [("--kv", "q8"), ("--kv", "f16"), ("--mmap",)])
def test_keys_that_are_not_finite_end_a_run(tmp_path, options):
    """Of one head and channel, whose codes in the KV cache would hide it."""

    def change(tensors):
        tensors["layers.1.attn.k_proj.scales"].reshape(-1)[40] = np.nan

    _, _, err = run_changed("tiny-llama.q8", change, tmp_path / "m.bin", *TASKS["drawn"], *options)
    assert err.replace("nan", "inf") == not_finite("tiny-llama.q8", 0, "layers.1.attn.k_proj")


@pytest.mark.parametrize("part", ["q_proj", "k_proj", "v_proj"])
def test_attention_in_int8_does_not_hide_what_is_not_finite(tmp_path, part):
    def change(tensors):
        tensors[f"layers.1.attn.{part}.scales"].reshape(-1)[5] = np.nan

    _, _, err = run_changed("tiny-llama.w8a8", change, tmp_path / "m.bin", *TASKS["drawn"], "--attn", "int8")
    assert err.replace("nan", "inf") == not_finite("tiny-llama.w8a8", 0, f"layers.1.attn.{part}")


@pytest.mark.parametrize("name", ["tiny-llama.q8", "tiny-llama.awq"])
def test_a_trace_of_a_run_that_was_not_finite_is_written(tmp_path, name):
    def change(tensors):
        tensors["layers.2.ffn.norm"][:] = np.inf

    command = (*TASKS["drawn"], "--trace", tmp_path / "t.safetensors")
    code, _, err = run_changed(name, change, tmp_path / "m.bin", *command)
    assert (code, err.replace("-inf", "inf")) == (1, not_finite(name, 0, "layers.2.ffn.norm"))
    trace = read_trace(tmp_path / "t.safetensors")
    assert trace["tokens"].tolist() == [1, 2, 3]
    assert np.isfinite(trace["layers.2.attn.residual"]).all()
    assert not np.isfinite(trace["layers.2.ffn.norm"]).any()


@pytest.mark.parametrize("name", OVERFLOWING[1:])  # Q8 is what it makes of a checkpoint
def test_the_reference_says_the_first_step_that_is_not_finite(tmp_path, name):
    def change(tensors):
        norm = tensors["layers.2.ffn.norm"]
        norm[:] = np.finfo(norm.dtype).max

    run_changed(name, change, tmp_path / "m.bin", "--info")
    (tmp_path / "text").write_text("Once upon a time there was a cat.")
    done = run_golden("ppl", ROOT / "models" / name.split(".")[0], tmp_path / "text", "--file", tmp_path / "m.bin")
    line = not_finite(name, 0, "layers.2.ffn.norm").split(": ", 2)[2]
    assert done.stderr.replace("-inf", "inf") == f"golden: {tmp_path / 'm.bin'}: {line}"
    assert (done.returncode, done.stdout) == (1, "")


def broken_copies(path, n):
    """n changed copies of a model file, always the same ones."""
    original, rng = path.read_bytes(), random.Random(17)
    head = read_header(path, read_format(path))
    tensors = [
        tensor
        for tensor in with_offsets(head.tensors(), alignment=head.file_format.alignment)
        if tensor.dtype in WHOLE and not (path.stem.endswith("mxfp8") and "." in tensor.name)
    ]
    cases = (mutate(original, tensors, rng) for _ in range(n))
    return (case for case in cases if case.data != original)


class Outcome(NamedTuple):
    code: int
    out: bytes
    err: bytes


class Loader:
    """A program's command line, in one process for many files."""

    def __init__(self, program, options, log):
        env = os.environ | {"ASAN_OPTIONS": "exitcode=99:allocator_may_return_null=1:max_allocation_size_mb=4000",
                            "UBSAN_OPTIONS": "halt_on_error=1:exitcode=99", "OMP_NUM_THREADS": "1"}  # fmt: skip
        self.log = log.open("w+b")
        self.process = subprocess.Popen(
            [ROOT / "build" / "fuzz" / f"replay_{program}", "command_line", *options],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, env=env, cwd=ROOT,
        )  # fmt: skip

    def run(self, data):
        """What the program makes of a file; None if this ended the process."""
        answer, files = self.process.stdout, self.process.stdin
        try:
            files.write(struct.pack("<Q", len(data)) + data)
            files.flush()
            (code,) = struct.unpack("<i", answer.read(4))
            out, err = (answer.read(struct.unpack("<Q", answer.read(8))[0]) for _ in range(2))
        except (BrokenPipeError, struct.error):
            return None
        return Outcome(code, out, err)

    def close(self):
        """How the process ended: exit code and the sanitizers' report."""
        self.process.communicate()
        self.log.seek(0)
        return self.process.returncode, self.log.read().decode(errors="replace")


def verdict(outcome, case, program, path):
    """Whether a file was "refused" by exit code 1 and one line, or "ran" where it may; otherwise what happened.

    path: a regular expression.
    """
    error = outcome.err.decode(errors="replace")
    if outcome.code == 1 and re.fullmatch(f"{program}: {path}: .+\n", error) and not outcome.out:
        return "refused"
    if outcome.code == 0 and case.may_run:
        return "ran"
    if outcome.code == 2 and case.may_run and "tokens long, the context only" in error:
        return "ran"  # a whole file, only with a context too short for the prompt
    return f"exit {outcome.code}: {outcome.out[:80]} {error[-1500:]}"


@pytest.mark.parametrize("name", MODELS)
def test_broken_files_end_with_one_line_and_never_crash(tmp_path, name):
    program = PROGRAM[name.split(".")[1]]
    path = ROOT / "build" / "models" / f"{name}.bin"
    verdicts, launched = [], set()
    every = EMULATED.get(program, 1)
    runner = Loader(program, RUN if every == 1 else RUN_EMULATED, tmp_path / "log")
    others = runner if every == 1 else Loader(program, LOAD, tmp_path / "log of those that are loaded")
    for i, case in enumerate(broken_copies(path, N)):
        loader = runner if i % every == 0 else others
        outcome = loader.run(case.data)
        if outcome is None:
            pytest.fail(f"{case.what}: exit code {loader.close()}")
        verdicts.append(verdict(outcome, case, program, r"/proc/self/fd/\d+"))
        assert verdicts[-1] in ("refused", "ran"), (case.what, verdicts[-1])
        if case.kind not in launched and verdicts[-1] == "refused":  # the program itself says the same
            launched.add(case.kind)
            (tmp_path / "broken.bin").write_bytes(case.data)
            done = runq(tmp_path / "broken.bin", *RUN, program=program)
            itself = Outcome(done.returncode, done.stdout, done.stderr)
            shown = re.sub(rb"/proc/self/fd/\d+", os.fsencode(tmp_path / "broken.bin"), outcome.err)
            assert itself == outcome._replace(err=shown), case.what
    assert {loader.close()[0] for loader in (runner, others)} == {0}  # nothing leaked
    assert launched >= set(KINDS) - {"weights"}  # of weights, orders of channels and the like are refused
    assert verdicts.count("refused") >= N // 2, f"{verdicts.count('refused')} refused"
    assert verdicts.count("ran") >= N // 20, f"{verdicts.count('ran')} ran"
