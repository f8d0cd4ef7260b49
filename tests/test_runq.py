"""The programs as a user runs them: golden ids, traces, perplexity, files of llama2.c."""

import json
import os
import struct
import subprocess
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from golden.attention_int8 import attention_int8
from golden.forward import forward
from golden.make import LATE_TRACES
from golden.schemes import RANDOM_MODELS, SCHEMES, goldens, random_goldens, read_file
from golden.trace import Recorder, compare, read_trace
from golden.w8a8 import W8A8
from models.agreement import disagreements
from models.stories import stories
from tests.helpers import FULL

ROOT = Path(__file__).resolve().parent.parent
# Every kind of model file of every CPU program, and the program.
PROGRAM = {
    variant: reference.format.program
    for reference in SCHEMES.values()
    for variant in reference.variants
    if (ROOT / f"{reference.format.program}.cpp").is_file()
}
PROGRAM |= {variant: SCHEMES[scheme].format.program for scheme, variant in RANDOM_MODELS.values()}
N_STEPS = 60  # a trace of a tiny model has more; a scheme that quantizes nothing has the fewest
MODELS = [f"{model}.{variant}" for model, variant, _ in goldens() if variant in PROGRAM]
RANDOM = [f"{model}.{variant}" for model, variant, _ in random_goldens()]  # these have traces alone
LATE = [(name, which) for name, traces in LATE_TRACES.items() for which in traces if name in MODELS]
BIN = {name: ROOT / "build" / "models" / f"{name}.bin" for name in MODELS + RANDOM}


def program_of(name):
    """The program that runs a model's scheme."""
    return PROGRAM[name.rsplit(".", 1)[-1]]


def golden_json(name):
    return json.loads((ROOT / "golden" / "data" / f"{name}.json").read_text())


def generations(name):
    """The golden generations: what the program has to say, id by id."""
    return golden_json(name)["generations"]


def runq(path, *args, program=None, timeout=120, **kwargs):
    """Runs the program of a model file of build/models, or the one named."""
    program = program or program_of(path.stem)
    command = [str(ROOT / program), str(path), *map(str, args)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, timeout=timeout, check=False, **kwargs)


@pytest.mark.parametrize("name", MODELS)
def test_greedy_ids_from_text_are_the_goldens(name):
    for golden in generations(name):
        done = runq(BIN[name], "-i", golden["prompt"], "-t", 0, "-n", 64, "--print-ids")
        assert done.returncode == 0
        assert [int(i) for i in done.stdout.decode().split(",")] == golden["new_ids"]


@pytest.mark.parametrize("name", MODELS)
def test_guessing_from_the_text_changes_nothing_but_the_number_of_passes(name):
    """A whole story, in which names come back, greedy and drawn."""
    for sampling in (["-t", "0"], ["-t", "0.8", "-s", "5"]):
        args = [BIN[name], "-i", "Once upon a time", "-n", "200", "-j", "1", "--print-ids", *sampling]
        plain, guessing = runq(*args), runq(*args, "--lookup", "7")
        assert guessing.returncode == 0, guessing.stderr
        assert guessing.stdout == plain.stdout
        assert b"tokens a pass" not in plain.stderr
        # A drawn story may have no guess that is right.
        assert b"tokens a pass" in guessing.stderr or sampling[1] != "0"


@pytest.mark.parametrize("name", ["tiny-llama.q8", "tiny-qwen3.q8"])
def test_names_and_pronouns_agree_in_stories(name):
    """As `make run` tells them, with ten seeds."""
    for seed in range(1, 11):
        story = runq(BIN[name], "-i", "Once upon a time", "-s", seed).stdout.decode()
        assert len(story) > 200
        assert [place for one in story.split("\n\n") for place in disagreements(one)] == [], story


def test_an_empty_prompt_begins_a_story():
    beginnings = {tuple(story.text.split()[:3]) for story in islice(stories(30), 2000)}
    for seed in range(1, 11):
        story = runq(BIN["tiny-llama.q8"], "-i", "", "-n", 12, "-s", seed).stdout.decode()
        assert tuple(story.split()[:3]) in beginnings, story


@pytest.mark.parametrize("name", MODELS + RANDOM)
@pytest.mark.parametrize("threads", [1, 3])
def test_trace_against_the_golden_trace(tmp_path, name, threads):
    golden = read_trace(ROOT / "golden" / "data" / f"{name}.trace.safetensors")
    ids = ",".join(map(str, golden["tokens"]))
    # The prompt at once: its tokens are run; the new id is printed but not run.
    runq(BIN[name], "--ids", ids, "-n", 1, "-t", 0, "-j", threads, "--trace", tmp_path / "t", "--print-ids")
    found = read_trace(tmp_path / "t")
    reports = compare(golden, found)
    assert len(reports) > N_STEPS
    assert all(r.ok for r in reports), [r for r in reports if not r.ok]


@pytest.mark.parametrize("name", MODELS)
def test_a_mapped_file_gives_the_same_trace(tmp_path, name):
    """To the bit, in a prompt and in a token after it: weights are packed, or not."""
    args = [BIN[name], "-i", "Once upon a time", "-n", 2, "-t", 0, "--trace", tmp_path / "packed", "--trace-from", 0]
    runq(*args)
    args[args.index(tmp_path / "packed")] = tmp_path / "mapped"
    runq(*args, "--mmap")
    packed, mapped = read_trace(tmp_path / "packed"), read_trace(tmp_path / "mapped")
    assert packed.keys() == mapped.keys() and len(packed) > N_STEPS
    assert not [key for key in packed if not np.array_equal(packed[key], mapped[key], equal_nan=True)]


@pytest.mark.parametrize(("name", "which"), LATE)
def test_late_positions(tmp_path, name, which):
    """Behind tokens that the program runs itself."""
    golden = read_trace(ROOT / "golden" / "data" / f"{name}.{which}.trace.safetensors")
    ids, position = ",".join(map(str, golden["tokens"])), golden["positions"][0]
    runq(BIN[name], "--ids", ids, "-n", 1, "-t", 0, "--trace", tmp_path / "t", "--trace-from", position, "--print-ids")
    found = read_trace(tmp_path / "t")
    assert np.array_equal(found["positions"], golden["positions"])
    reports = compare(golden, found)
    assert len(reports) > 80
    assert all(r.ok for r in reports), [r for r in reports if not r.ok]


def reference_trace(name, tokens, **options):
    """What the reference computes for these tokens."""
    scheme, recorder = read_file(BIN[name]) if not options else W8A8(BIN[name], **options), Recorder()
    forward(scheme.config, scheme, recorder("tokens", tokens), recorder)
    return recorder.tensors


@pytest.mark.parametrize("name", MODELS)
def test_a_long_trace_is_equal_to_the_bit(tmp_path, name):
    runq(BIN[name], "-i", generations(name)[-1]["prompt"], "-n", 60, "-t", 0, "--trace", tmp_path / "t")
    trace = read_trace(tmp_path / "t")
    assert len(trace["tokens"]) >= 60
    reports = compare(reference_trace(name, trace["tokens"]), trace)
    assert all(r.ok for r in reports), [r for r in reports if not r.ok]


# Of long tests: one file of each kind, with FULL=1 of each model.
KINDS = list({name.split(".")[1]: name for name in reversed(MODELS)}.values())


@pytest.mark.parametrize("name", MODELS if FULL else KINDS)
def test_perplexity_is_near_that_of_fp32(name):
    """Within 0.2 %; 0.4 % with static scales, which clip what calibration has not seen; with int4 experts 0.5 %,
    with all else in int4, too, 2.5 %.

    GPTQ's fewer bits cost more.
    """
    golden = golden_json(name)["held_out"]
    done = runq(BIN[name], "--ppl", ROOT / "models" / "held_out.txt")
    words = done.stdout.decode().split()
    assert words[0] == "perplexity"
    assert int(words[3]) == golden["tokens"]
    if "moe-a8w4" in name:
        assert float(words[1]) == pytest.approx(golden["fp32"], rel=25e-3 if name.endswith("pure") else 5e-3)
    elif not name.endswith(("gptq-w4", "ladder", "gptq-sparse")):
        assert float(words[1]) == pytest.approx(golden["fp32"], rel=4e-3 if name.endswith("static") else 2e-3)
    assert float(words[1]) == pytest.approx(golden[name.split(".")[1]], abs=5.1e-5)


@pytest.mark.parametrize(
    ("program", "model"),
    [
        ("runq_w8a8", "tiny-llama"),
        ("runq_w8a8", "tiny-qwen3"),
        ("build/plain/runq_w8a8", "tiny-qwen3"),
        *([("build/plain/runq_w8a8", "tiny-llama")] if FULL else []),
    ],
)
def test_attention_in_int8_is_equal_to_the_bit(tmp_path, model, program):
    """A text of 300 tokens, in chunks; and the golden's trace, ids and perplexity."""
    path, name = BIN[f"{model}.w8a8"], f"{model}.w8a8-attn8"
    run = partial(runq, path, "--attn", "int8", program=program)
    text = (ROOT / "models" / "held_out.txt").read_text().split("\n\n")
    (tmp_path / "prompt").write_text("\n\n".join(text[:5])[:900])
    run("-f", tmp_path / "prompt", "-n", 1, "--trace", tmp_path / "t")
    trace = read_trace(tmp_path / "t")
    assert len(trace["tokens"]) > 150
    reports = compare(reference_trace(f"{model}.w8a8", trace["tokens"], attend=attention_int8), trace)
    assert all(r.ok for r in reports), [r for r in reports if not r.ok]
    assert {"layers.0.attn.weights.q", "layers.0.attn.q_rope.q", "layers.3.attn.v_proj.s"} <= trace.keys()

    golden = read_trace(ROOT / "golden" / "data" / f"{name}.trace.safetensors")
    ids = ",".join(map(str, golden["tokens"]))
    for threads in (1, 3):
        run("--ids", ids, "-n", 1, "-t", 0, "-j", threads, "--trace", tmp_path / "t")
        reports = compare(golden, read_trace(tmp_path / "t"))
        assert len(reports) > 80
        assert all(r.ok for r in reports), [r for r in reports if not r.ok]

    generation = golden_json(name)["generations"][-1]
    done = run("-i", generation["prompt"], "-t", 0, "-n", 64, "--print-ids")
    assert [int(i) for i in done.stdout.decode().split(",")] == generation["new_ids"]
    held_out = golden_json(name)["held_out"]
    done = run("--ppl", ROOT / "models" / "held_out.txt")
    assert float(done.stdout.decode().split()[1]) == pytest.approx(held_out["w8a8-attn8"], abs=5.1e-5)
    assert held_out["w8a8-attn8"] == pytest.approx(golden_json(f"{model}.w8a8")["held_out"]["w8a8"], rel=5e-3)


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-qwen3"])
def test_attention_in_int8_does_not_depend_on_chunks_and_threads(model):
    """A story at once, guessed at, and on other numbers of threads: the same ids."""
    args = [BIN[f"{model}.w8a8"], "--attn", "int8", "-i", "Once upon a time", "-t", 0, "-n", 250, "--print-ids"]
    ids = runq(*args, "-j", 1).stdout
    assert ids.count(b",") > 100
    assert runq(*args, "-j", 3).stdout == ids
    assert runq(*args, "-j", 2, "--lookup", 6).stdout == ids


KV_BITS = {"f32": 32, "f16": 16, "q8": 8}


KV_MODELS = ["tiny-llama.q8", "tiny-qwen3.w8a8", "tiny-llama.gptq-w4", "tiny-qwen3-moe.moe-a8w8"]


@pytest.mark.parametrize(
    ("name", "kv"),
    [(name, kv) for name in KV_MODELS for kv in KV_BITS if FULL or name == KV_MODELS[0] or kv == "q8"],
)
def test_formats_of_the_kv_cache(name, kv):
    """Perplexity over windows of the whole context, against a cache in fp32; and the bytes of a position.

    Each format in one program, q8 in each; with FULL=1 each in each.
    """
    golden = golden_json(name)["held_out"]
    done = runq(BIN[name], "--kv", kv, "--ppl", ROOT / "models" / "held_out.txt")
    limit = {"f32": 5e-5, "f16": 7e-4, "q8": 5e-3}[kv]
    assert float(done.stdout.decode().split()[1]) == pytest.approx(golden[name.split(".")[1]], rel=limit)

    info = dict(line.split(maxsplit=1) for line in runq(BIN[name], "--kv", kv, "--info").stdout.decode().splitlines())
    head_dim = int(info["head_dim"])
    heads = 2 * int(info["n_layers"]) * int(info["n_kv_heads"])
    scale = 4 if kv == "q8" else 0
    assert int(info["kv_bytes_per_position"]) == heads * (head_dim * KV_BITS[kv] // 8 + scale)


@pytest.mark.parametrize("kv", KV_BITS)
def test_a_format_of_the_kv_cache_gives_the_same_ids_for_any_chunks_and_threads(kv):
    args = [BIN["tiny-llama.q8"], "--kv", kv, "-i", "Once upon a time", "-t", 0, "-n", 250, "--print-ids"]
    ids = runq(*args, "-j", 1).stdout
    assert ids.count(b",") > 100
    assert runq(*args, "-j", 3).stdout == ids
    assert runq(*args, "-j", 2, "--lookup", 6).stdout == ids


def test_attention_in_int8_has_a_cache_of_its_own():
    refused = runq(BIN["tiny-llama.w8a8"], "--attn", "int8", "--kv", "f16", "-n", 1)
    assert refused.returncode == 2
    assert b"--kv: has no meaning with --attn int8" in refused.stderr


def test_build_without_tokenizer(tmp_path):
    name = "tiny-llama.q8"
    program = program_of(name)
    kernels = [f"build/lib/engine/cpu/{part}.o" for part in ("attention", "quant_matmul")]  # they know of no text
    subprocess.run(
        [os.environ.get("CXX", "g++"), "-std=c++20", "-O0", "-march=native", "-pthread", "-DNO_TOKENIZER", "-DENGINE",
         "-I.", f"{program}.cpp", "engine/app/cli.cpp", "engine/app/line_editor.cpp", *kernels,
         "-o", tmp_path / program],
        cwd=ROOT, check=True,
    )  # fmt: skip
    golden = generations(name)[-1]
    ids = ",".join(map(str, golden["prompt_ids"]))
    command = [tmp_path / program, BIN[name], "-t", "0", "-n", "8", "--print-ids"]
    done = subprocess.run([*command, "--ids", ids], capture_output=True, check=True)
    assert done.stdout.decode() == ",".join(map(str, golden["new_ids"][:8])) + "\n"
    done = subprocess.run([*command, "-i", "Once"], capture_output=True, check=False)
    assert done.returncode != 0
    assert done.stderr.count(b"\n") == 1


# ---- files of other programs


def test_a_file_of_llama2_c_runs_on_ids(tmp_path):
    """Version 2 of llama2.c: the same weights, no extension block, no tokenizer."""
    data = bytearray(BIN["tiny-llama.q8"].read_bytes())
    offset = struct.unpack_from("<Q", data, 0xA0)[0]
    data[0x40:0x100] = bytes(0xC0)
    (tmp_path / "foreign.bin").write_bytes(data[:offset])
    golden = generations("tiny-llama.q8")[-1]
    ids = ",".join(map(str, golden["prompt_ids"]))
    done = runq(tmp_path / "foreign.bin", "--ids", ids, "-t", 0, "-n", 8, "--print-ids", program="runq")
    assert done.returncode == 0
    assert len(done.stdout.decode().split(",")) == 8
    done = runq(tmp_path / "foreign.bin", "-i", "Once", program="runq")
    assert done.returncode == 2
    assert done.stderr.count(b"\n") == 1
    # The unscaled theta gives other logits; theta is read from the command line too.
    traces = []
    for i, extra in enumerate(([], ["--rope-theta", "10000"])):
        ids = ["--ids", "5,6,7,8", "-n", 1, "-t", 0]
        runq(tmp_path / "foreign.bin", *ids, "--trace", tmp_path / f"t{i}", *extra, program="runq")
        traces.append(read_trace(tmp_path / f"t{i}")["logits"])
    assert np.abs(traces[0] - traces[1]).max() > 1e-4
