"""runq_awq as a user runs it: golden ids, traces, perplexity, foreign files, --matmul. In the emulator."""

import re
import shutil
import struct
import subprocess
from functools import partial

import numpy as np
import pytest

from golden.awq import AWQ
from golden.forward import forward
from golden.perplexity import encode, perplexity
from golden.trace import compare, read_trace, replay
from tests.helpers import FULL, ROOT, seal
from tests.test_runq import golden_json, runq

MODELS = [f"{model}.{scheme}" for model in ("tiny-llama", "tiny-qwen3") for scheme in ("awq", "awq-g64")]
WHOLE = MODELS if FULL else ["tiny-llama.awq", "tiny-qwen3.awq-g64"]  # each architecture and each group size once
BIN = {name: ROOT / "build" / "models" / f"{name}.bin" for name in MODELS}


def awq(name, *args, **kwargs):
    return runq(BIN.get(name, name), *args, program="runq_awq", **kwargs)


@pytest.mark.parametrize("name", MODELS)
def test_greedy_ids_from_text_are_the_goldens(name):
    """The last prompt was chosen for its leads: rounding decides none of its ids.

    The first 24 of two files and 8 of the other two, with FULL=1 all 64; the C++ tests compare all.
    """
    n = 64 if FULL else 24 if name in WHOLE else 8
    golden = golden_json(name)["generations"][-1]
    assert len(golden["new_ids"]) == 64
    done = awq(name, "-i", golden["prompt"], "-t", 0, "-n", n, "--print-ids")
    assert done.returncode == 0
    assert done.stdout.decode() == ",".join(map(str, golden["new_ids"][:n])) + "\n"
    # Drawn from a distribution in which nothing else has a chance: logits come to the host then.
    n = 12 if FULL else 6
    done = awq(name, "-i", golden["prompt"], "-t", 1, "-k", 1, "-n", n, "--print-ids", "--matmul=plain")
    assert done.stdout.decode() == ",".join(map(str, golden["new_ids"][:n])) + "\n"


@pytest.mark.parametrize("name", MODELS)
def test_traces(tmp_path, name):
    golden = read_trace(ROOT / "golden" / "data" / f"{name}.trace.safetensors")
    ids = ",".join(map(str, golden["tokens"]))
    awq(name, "--ids", ids, "-n", 1, "-t", 0, "--trace", tmp_path / "t", "--print-ids")
    reports = compare(golden, read_trace(tmp_path / "t"))
    assert len(reports) > 60
    assert all(r.ok for r in reports), [r for r in reports if not r.ok]
    # A longer run, prompt and then single tokens: each operation from its own inputs.
    prompt = golden_json(name)["generations"][-1]["prompt"]
    awq(name, "-i", prompt, "-n", 24 if name in WHOLE else 6, "-t", 0, "--trace", tmp_path / "t")
    scheme = AWQ(BIN[name])
    trace = read_trace(tmp_path / "t")
    reports = replay(partial(forward, scheme.config, scheme), trace)
    assert len(trace["tokens"]) >= (32 if name in WHOLE else 14)
    assert all(r.ok for r in reports), [r for r in reports if not r.ok]


def test_a_late_decode_step(tmp_path):
    name = "tiny-llama.awq"
    golden = read_trace(ROOT / "golden" / "data" / f"{name}.decode.trace.safetensors")
    ids, position = ",".join(map(str, golden["tokens"])), golden["positions"][0]
    awq(name, "--ids", ids, "-n", 1, "-t", 0, "--trace", tmp_path / "t", "--trace-from", position, "--print-ids")
    found, scheme = read_trace(tmp_path / "t"), AWQ(BIN[name])
    for reports in (compare(golden, found), replay(partial(forward, scheme.config, scheme), found)):
        assert len(reports) > 60
        assert all(r.ok for r in reports), [r for r in reports if not r.ok]


def test_a_wrong_trace_is_found(tmp_path):
    """The tolerances above are no formality: a thousandth of one key is seen."""
    name = MODELS[0]
    awq(name, "-i", "Once upon a time", "-n", 4, "-t", 0, "--trace", tmp_path / "t")
    scheme, trace = AWQ(BIN[name]), read_trace(tmp_path / "t")
    trace["layers.1.attn.k_rope"] = (trace["layers.1.attn.k_rope"] * 1.002).astype(np.float16)
    reports = replay(partial(forward, scheme.config, scheme), trace)
    assert [r.name for r in reports if not r.ok] == ["layers.1.attn.k_rope"]


@pytest.mark.parametrize("name", ["tiny-llama.awq", "tiny-qwen3.awq"])
def test_perplexity_is_the_references(tmp_path, name):
    """In two windows of more than a chunk, the last cut off by the text's end; with FULL=1 in four of 100 tokens."""
    length, context = (1500, 100) if FULL else (500, 70)
    text = (ROOT / "models" / "held_out.txt").read_text()[:length]
    (tmp_path / "text").write_text(text)
    hf_dir = ROOT / "models" / name.split(".")[0]
    scheme = AWQ(BIN[name])
    ids, bos = encode(hf_dir, text)
    value, n = perplexity(partial(forward, scheme.config, scheme), ids, bos, context)
    assert n > context > 64
    words = awq(name, "--ppl", tmp_path / "text", "-c", context).stdout.decode().split()
    assert words[0] == "perplexity"
    assert int(words[3]) == n
    assert float(words[1]) == pytest.approx(value, rel=2e-3)


def test_a_file_without_extension_runs_on_ids_as_qwen3(tmp_path):
    """What other programs write: KuiperLLama's version 5."""
    name = "tiny-qwen3.awq"
    data = bytearray(BIN[name].read_bytes())
    offset = struct.unpack_from("<Q", data, 0xA0)[0]
    data[0x40:0x100] = bytes(0xC0)
    (tmp_path / "foreign.bin").write_bytes(data[:offset])
    golden = golden_json(name)["generations"][-1]
    ids = ",".join(map(str, golden["prompt_ids"]))
    done = awq(tmp_path / "foreign.bin", "--ids", ids, "-t", 0, "-n", 12, "--print-ids")
    assert done.stdout.decode() == ",".join(map(str, golden["new_ids"][:12])) + "\n"
    done = awq(tmp_path / "foreign.bin", "-i", "Once")
    assert done.returncode == 2
    assert done.stderr.count(b"\n") == 1


def test_info_and_options():
    done = awq("tiny-llama.awq", "--info")
    fields = dict(line.split(None, 1) for line in done.stdout.decode().splitlines())
    assert fields["kernel"] == "emulated on the CPU (simt)"
    assert fields["group_size"] == "128"
    assert fields["scheme"] == "AWQ: int4 groups of 128, fp16 activations"
    done = awq("tiny-llama.awq", "--matmul", "cublas")
    assert (done.returncode, done.stderr) == (2, b"runq_awq: --matmul: 'cublas' is not one of fused, plain\n")
    done = runq(BIN["tiny-llama.awq"], "--matmul", "fused", program="runq")
    assert (done.returncode, done.stderr) == (2, b"runq: unknown option '--matmul'\n")
    assert b"--matmul" in awq("tiny-llama.awq", "--help").stdout
    assert b"--matmul" not in runq(BIN["tiny-llama.awq"], "--help", program="runq").stdout
    done = runq(BIN["tiny-llama.awq"], program="runq")
    assert done.returncode == 1
    assert done.stderr.endswith(b"(an AWQ file: use runq_awq)\n")
    done = awq("tiny-llama.awq", "-i", "Once", "-n", 2, "-c", 40, "-j", 1)
    assert b"of the device" in done.stderr
    done = awq("tiny-llama.awq", "--bench", "20,2")
    assert done.stdout.startswith(b"prefill 20 tokens: ")


def test_a_cache_that_does_not_fit_is_refused_with_the_numbers(tmp_path):
    data = bytearray(BIN["tiny-qwen3.awq"].read_bytes())
    struct.pack_into("<i", data, 0x20, 1 << 24)  # max_seq_len
    seal(data)
    (tmp_path / "long.bin").write_bytes(data)
    context = (1 << 24) - 1
    done = awq(tmp_path / "long.bin", "-i", "Once", "-c", context, "-n", 1)
    cache = 4 * 2 * 128 * 2 * context / 1e9
    if done.returncode == 0:
        pytest.skip(f"needs a machine that has no {cache:.0f} GB of free memory")
    assert done.returncode == 1
    text = done.stderr.decode()
    assert f": {cache:.2f} GB for the keys and values of positions 0 to {context - 1}, " in text
    assert text.endswith("; a smaller --ctx takes less\n")
    assert text.count("\n") == 1


# ---- the file alone, without the engine, through the emulator


def plain(name, *args, **options):
    """Runs build/plain/runq_awq (mk/build.mk)."""
    command = [str(ROOT / "build" / "plain" / "runq_awq"), str(BIN.get(name, name)), *map(str, args)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=False, timeout=300, **options)


def test_alone_the_line_in_the_file_compiles_it(tmp_path):
    """Where nothing but the file and simt/ is; as it stands with FULL=1, otherwise with fewer optimizations."""
    source = (ROOT / "runq_awq.cu").read_text()
    (line,) = re.findall(r"^//     (g\+\+ .*)$", source, re.M)
    (tmp_path / "runq_awq.cu").write_text(source)
    shutil.copytree(ROOT / "simt", tmp_path / "simt")
    assert "-O3" in line
    line = line if FULL else line.replace("-O3", "-O1")
    done = subprocess.run(line, shell=True, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    golden = golden_json(WHOLE[0])["generations"][-1]
    command = [tmp_path / "runq_awq", BIN[WHOLE[0]], "-i", golden["prompt"], "-t", "0", "-n", "4", "--print-ids"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == ",".join(map(str, golden["new_ids"][:4])) + "\n"


@pytest.mark.parametrize("name", WHOLE)
def test_alone_ids_and_trace_are_the_goldens(tmp_path, name):
    golden = golden_json(name)["generations"][-1]
    for options in (["-n", 12], ["-n", 4, "--matmul", "plain"]):
        done = plain(name, "-i", golden["prompt"], "-t", 0, *options, "--print-ids")
        assert done.stdout.decode() == ",".join(map(str, golden["new_ids"][: options[1]])) + "\n", done.stderr
    expected = read_trace(ROOT / "golden" / "data" / f"{name}.trace.safetensors")
    ids = ",".join(map(str, expected["tokens"]))
    assert plain(name, "--ids", ids, "-n", 1, "-t", 0, "--trace", tmp_path / "plain").returncode == 0
    awq(name, "--ids", ids, "-n", 1, "-t", 0, "--trace", tmp_path / "engine")
    found, engine = read_trace(tmp_path / "plain"), read_trace(tmp_path / "engine")
    reports = compare(expected, found)
    assert len(reports) > 60
    assert all(r.ok for r in reports), [r for r in reports if not r.ok]
    kinds = [{key: (x.dtype, x.shape) for key, x in trace.items()} for trace in (found, engine)]
    assert kinds[0] == kinds[1]


def test_alone_perplexity_is_the_engines(tmp_path):
    (tmp_path / "text").write_text((ROOT / "models" / "held_out.txt").read_text()[:300])
    args = [WHOLE[0], "--ppl", tmp_path / "text", "-c", 70]
    alone, engine = plain(*args).stdout.split(), awq(*args).stdout.split()
    assert alone[0] == engine[0] == b"perplexity"
    assert alone[3] == engine[3]
    assert float(alone[1]) == pytest.approx(float(engine[1]), rel=2e-4)


def test_alone_a_file_without_extension_runs(tmp_path):
    data = bytearray(BIN["tiny-qwen3.awq"].read_bytes())
    end = struct.unpack_from("<Q", data, 0xA0)[0]
    data[0x40:0x100] = bytes(0xC0)
    (tmp_path / "foreign.bin").write_bytes(data[:end])
    golden = golden_json("tiny-qwen3.awq")["generations"][-1]
    ids = ",".join(map(str, golden["prompt_ids"]))
    done = plain(tmp_path / "foreign.bin", "--ids", ids, "-t", 0, "-n", 4, "--print-ids")
    assert done.stdout.decode() == ",".join(map(str, golden["new_ids"][:4])) + "\n", done.stderr


@pytest.mark.parametrize(
    ("code", "change", "options"),
    [
        (1, None, []),
        (1, (0, b"nope"), []),
        (1, (0x29, b"\0\0\0\0"), []),
        (1, (0x48, b"\x21"), []),
        (1, (0x0C, b"\xff"), []),
        (2, (0, b""), ["--matmul", "cublas"]),
        (2, (0, b""), ["-c", "2"]),
        (2, (0, b""), ["-c", "99999999"]),
    ],
)
def test_alone_a_mistake_is_one_line(tmp_path, code, change, options):
    data = bytearray(BIN[MODELS[0]].read_bytes())
    at, new = change or (0, b"")
    data[at : at + len(new)] = new
    (tmp_path / "m.bin").write_bytes(data[: len(data) if change else 3000])
    done = plain(tmp_path / "m.bin", "--ids", "1,2,3", "-n", 1, *options)
    assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (code, b"", 1), done
    assert done.stderr.startswith(b"runq_awq: ")
