"""The benchmark's parts on tiny models and on figures made up here. No test looks at how fast anything is."""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from bench import ladder, versions
from bench.random_checkpoint import MODELS, config_of
from bench.roofline import roofline, spread_out, ticks
from bench.run import Work, closing_line, measure, parse_bench, spread, summarize, table, work_of
from formats.checkpoint import Moe, tensor_shapes
from formats.model_file import read_header
from formats.tensors import HEADER_SIZE, matrix_shapes, weights_end
from golden.awq import AWQ
from golden.forward import forward, ignore
from golden.gptq import GPTQ
from golden.moe import MoE
from golden.w8a8 import W8A8
from models.by_rule import MOE_SCHEMES, SCHEMES, write_model
from tests.helpers import run_here

ROOT = Path(__file__).resolve().parent.parent
LIMITS = ROOT / "build" / "limits"
IN_TURNS = ROOT / "build" / "in_turns"
PROGRAMS = {
    "q8": ROOT / "runq",
    "w8a8": ROOT / "runq_w8a8",
    "gptq": ROOT / "runq_gptq",
}  # by the scheme of the files that they run
SHAPES = ["llama-3.2-1b", "qwen3-0.6b"]
HERE = {"cwd": ROOT, "capture_output": True, "text": True, "check": False}


def tiny(name, scheme="q8"):
    """A real model's config with every size made small."""
    hidden_dim = 256 if scheme == "awq" or scheme.startswith("gptq") else 192  # these have groups of 128
    return replace(
        config_of(name), dim=128, hidden_dim=hidden_dim, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=32,
        vocab_size=320, max_seq_len=64,
    )  # fmt: skip


def output(*command, **options):
    done = subprocess.run(
        [str(c) for c in command], capture_output=True, text=True, timeout=120, check=False, cwd=ROOT, **options
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def info(program, path):
    return dict(re.findall(r"^(\w+) +(.*)$", output(program, path, "--info"), re.M))


@pytest.fixture(
    scope="module",
    params=[(scheme, shape) for scheme in PROGRAMS for shape in SHAPES],
    ids=lambda p: "-".join(p),
)
def model(request, tmp_path_factory):
    """(scheme, config, path) of a tiny model file."""
    scheme, shape = request.param
    config = tiny(shape, scheme)
    path = tmp_path_factory.mktemp("bench") / "tiny.bin"
    write_model(config, path, scheme, progress=False)
    return scheme, config, path


# ----------------------------------------------------------------------------
# Models


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", MODELS)
def test_shapes_are_those_of_the_checkpoint(name, scheme):
    c = config_of(name)
    shapes = tensor_shapes(c)
    expected = sum(int(np.prod(s)) for s in shapes.values() if len(s) == 2)
    assert sum(int(np.prod(shape)) for _, shape in matrix_shapes(c)) == expected
    w = work_of(c, scheme)
    table = c.vocab_size * c.dim
    if not c.tied:  # the embedding is only looked up
        expected -= table
    assert w.layer_macs + w.classifier_macs == expected
    assert w.classifier_macs == table
    if scheme == "awq":  # four bits and a group's share of a zero point and an fp16 scale; the classifier in fp16
        assert w.layer_bytes + w.classifier_bytes == (expected - table) * (4 + 20 / 128) / 8 + 2 * table
    elif scheme.startswith("gptq"):
        assert w.layer_bytes + w.classifier_bytes == gptq_bytes(c, scheme)
    else:  # Q8: four bytes for each 64 weights. W8A8: four for each row.
        rows = sum(s[0] for s in shapes.values() if len(s) == 2) - (0 if c.tied else c.vocab_size)
        extra = {"q8": expected // 16, "w8a8": 4 * rows}[scheme]
        assert w.layer_bytes + w.classifier_bytes == expected + extra
    assert w.kv_bytes == 2 * c.n_layers * c.kv_dim * (2 if scheme == "awq" else 4)


def gptq_bytes(c, scheme):
    """Of all matrices but an embedding that is only looked up: bits per weight, bytes per row, and bytes of a table."""
    eight, four, two, sparse = (8, 4, 0), (4 + 20 / 128, 0, 0), (2 + 8 / 64, 4, 0), (3 + 20 / 128, 0, 0)
    nl4, five, six = (4 + 8 / 64, 4, 16), (5 + 8 / 64, 4, 32), (6 + 8 / 64, 4, 0)
    table, attention, feed_forward = {
        "gptq": (eight, four, two),
        "gptq-8": (eight, eight, eight),
        "gptq-4": (four, four, four),
        "gptq-2": (two, two, two),
        "gptq-nl4": (nl4, nl4, nl4),
        "gptq-5": (five, five, five),
        "gptq-6": (six, six, six),
        "gptq-sparse": (four, sparse, sparse),
    }[scheme]
    total = 0
    for name, (n_out, n_in) in matrix_shapes(c):
        if name != "embed" or c.tied:
            bits, row, values = attention if ".attn." in name else feed_forward if ".ffn." in name else table
            total += n_out * (n_in * bits / 8 + row) + values
    return total


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", SHAPES)
def test_files_are_as_long_as_counted(tmp_path, shape, scheme):
    config = tiny(shape, scheme)
    write_model(config, tmp_path / "m", scheme, progress=False)
    w = work_of(config, scheme)
    size = (tmp_path / "m").stat().st_size
    storage = SCHEMES[scheme]
    gaps = size - (HEADER_SIZE + w.layer_bytes + w.classifier_bytes + norm_bytes(config, 2 if scheme == "awq" else 4))
    assert 0 <= gaps < len(storage.tensors(config)) * storage.format.alignment  # none if that is 1
    assert size == weights_end(storage.tensors(config), storage.format.alignment)
    header = read_header(tmp_path / "m", storage.format)
    assert (header.group_size, header.activations, header.weights_end) == (storage.group_size, 0, size)
    assert storage.group_size == {"q8": 64, "w8a8": 0, "awq": 128}.get(scheme, 64)
    assert [getattr(header.config, f) for f in ("arch", "dim", "hidden_dim", "head_dim", "vocab_size", "tied")] == [
        config.arch, 128, config.hidden_dim, 32, 320, True,
    ]  # fmt: skip


def norm_bytes(config, value=4):
    return ((2 * 2 + 1) * 128 + (2 * 2 * 32 if config.arch == "qwen3" else 0)) * value


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("name", "reader"), [("w8a8", W8A8), ("awq", AWQ), ("gptq", GPTQ), ("gptq-sparse", GPTQ)])
def test_the_reference_reads_the_file_and_activations_keep_their_size(tmp_path, name, reader, shape, tied):
    config = replace(tiny(shape, name), tied=tied)
    write_model(config, tmp_path / "m", name, progress=False)
    scheme = reader(tmp_path / "m")
    sizes = {}

    def step(name, value):
        sizes[name] = float(np.sqrt(np.mean(value.astype(np.float64) ** 2)))
        return ignore(name, value)

    logits = forward(scheme.config, scheme, np.arange(8), step)
    assert logits.shape == (8, 320)
    assert np.isfinite(logits).all()
    assert len(set(logits.argmax(axis=-1))) > 1
    assert all(0.05 < size < 20 for name, size in sizes.items() if name.endswith(("proj", "norm", "residual", "mix")))


def test_the_program_reads_the_file_and_counts_as_the_benchmark_does(model):
    scheme, config, path = model
    said = info(PROGRAMS[scheme], path)
    assert said["arch"] == config.arch
    assert [int(said[f]) for f in ("dim", "n_layers", "head_dim", "vocab_size")] == [128, 2, 32, 320]
    assert said["tokenizer"] == "no"
    assert int(said["file_bytes"]) == path.stat().st_size == HEADER_SIZE + int(said["weight_bytes"])
    w = work_of(config, scheme)
    assert int(said["weight_bytes_per_token"]) == w.layer_bytes + w.classifier_bytes + norm_bytes(config)
    assert int(said["kv_bytes_per_position"]) == w.kv_bytes


def test_activations_stay_finite(model):
    scheme, _, path = model
    ids = output(PROGRAMS[scheme], path, "--ids", "1,2,3", "-n", 20, "-t", 0, "--print-ids").strip().split(",")
    # Were there a NaN, every token would be the same.
    assert len(ids) == 20
    assert len(set(ids)) > 1


@pytest.mark.parametrize("scheme", PROGRAMS)
def test_a_separate_classifier(tmp_path, scheme):
    config = replace(tiny("llama-3.2-1b", scheme), tied=False)
    write_model(config, tmp_path / "m", scheme, progress=False)
    assert info(PROGRAMS[scheme], tmp_path / "m")["shared_classifier"] == "no"


@pytest.mark.parametrize("scheme", MOE_SCHEMES)
def test_a_mixture_of_experts(tmp_path, scheme):
    """The program reads it, and counts of the experts the active ones: an eighth here."""
    found = config_of("qwen3-30b-a3b", layers=3)
    assert (found.n_layers, found.q_dim, found.kv_dim, found.moe) == (3, 4096, 512, Moe(128, 8, 768, True, ()))
    moe = replace(found.moe, n_experts=16, n_active=2, hidden_dim=128, dense_layers=(1,))
    config = replace(found, dim=128, hidden_dim=256, n_heads=4, n_kv_heads=2, head_dim=32, vocab_size=320,
                     max_seq_len=64, moe=moe)  # fmt: skip
    write_model(config, tmp_path / "m", scheme, progress=False)
    said = info(ROOT / "runq_moe", tmp_path / "m")
    assert int(said["file_bytes"]) == (tmp_path / "m").stat().st_size
    read = MoE(tmp_path / "m")
    assert read.config.moe == moe

    expert, rows = 3 * 128 * 128, 3 * 128  # weights of an expert
    # a8w8: fp32 scales of rows. a8w4: fp16 scales of groups of 64; the assist matrix is not read. Ladders: a fp16
    # scale and a byte of zero points for 128 weights, which are a row here, or in two levels a byte for 64 weights.
    per_expert = {"a8w8": expert + 4 * rows, "a8w4": expert // 2 + expert // 64 * 2, "moe-4": expert // 2 + 3 * rows,
             "moe-ladder": expert // 4 + expert // 64 + 4 * rows, "moe-sparse": expert * 3 // 8 + 3 * rows}  # fmt: skip
    expert_bytes = per_expert[scheme.removesuffix("-pure")]

    def others(rows: int, columns: int) -> int:
        n = rows * columns
        if scheme.startswith("moe-"):
            groups = n // 128
            zeros = rows * -(-columns // 256)
            return n * 3 // 8 + 2 * groups + zeros if scheme == "moe-sparse" else n // 2 + 2 * groups + zeros
        return n // 2 + n // 64 * 2 if scheme.endswith("-pure") else n + 4 * rows

    attention = 3 * (2 * others(128, 128) + 2 * others(64, 128))
    dense = 2 * others(256, 128) + others(128, 256)
    classifier, norms = others(320, 128), 4 * ((2 * 3 + 1) * 128 + 2 * 3 * 32)
    table = 3  # bytes that say which layers are dense
    of_experts = 2 * (2 * expert_bytes + 4 * 16 * 128)  # and routers
    assert int(said["weight_bytes_per_token"]) == attention + dense + classifier + norms + table + of_experts

    sizes = {}

    def step(name, value):
        sizes[name] = float(np.sqrt(np.mean(value.astype(np.float64) ** 2)))
        return ignore(name, value)

    logits = forward(read.config, read, np.arange(8), step)
    assert np.isfinite(logits).all()
    assert all(0.05 < sizes[f"layers.2.moe.{step}"] < 20 for step in ("router", "gate_up_proj", "down_proj", "mix"))


def test_schemes_of_the_other_kind_of_model_are_refused(tmp_path):
    for options, text in (
        (
            ("--like", "qwen3-30b-a3b", "--scheme", "q8"),
            "--scheme is q8, a mixture of experts has a8w8, a8w4, a8w4-pure, moe-ladder",
        ),
        (("--like", "qwen3-0.6b", "--scheme", "a8w4"), "--scheme is a8w4, a model without experts has q8, w8a8"),
        (("--like", "qwen3-0.6b", "--layers", "0"), "--layers is 0, expected 1 to 4096"),
    ):
        done = run_here("models.by_rule", *options, tmp_path / "m")
        assert done.returncode == 2
        assert text in done.stderr
        assert not list(tmp_path.iterdir())


def test_a_model_is_made_with_numpy_alone(tmp_path):
    """On a machine that has none of the other packages."""
    blocked = ["tqdm", "safetensors", "ml_dtypes", "tokenizers", "jinja2"]
    code = f"""
import sys
sys.modules.update(dict.fromkeys({blocked}))  # importing None is an ImportError
from dataclasses import replace
from pathlib import Path
from models.by_rule import write_model
from bench.random_checkpoint import config_of
config = replace(config_of("qwen3-8b"), dim=128, hidden_dim=256, n_layers=1, n_heads=2, n_kv_heads=1, vocab_size=64)
write_model(config, Path(sys.argv[1]), "awq")
"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "m"], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert AWQ(tmp_path / "m").config.n_layers == 1


# ----------------------------------------------------------------------------
# Measuring


@pytest.mark.parametrize("threads", [[], [3]])
def test_limits(threads):
    """On one core, so that three threads take no longer than one, which is what it takes of itself there."""
    one_core = partial(os.sched_setaffinity, 0, [min(os.sched_getaffinity(0))])
    said = json.loads(output(LIMITS, *threads, preexec_fn=one_core))
    assert said["threads"] == (threads[0] if threads else 1)
    assert said["kernel"] in said["peak_gmac_per_s"]
    assert "portable" in said["peak_gmac_per_s"]
    assert all(v > 0 for v in [said["read_gb_per_s"], *said["peak_gmac_per_s"].values()])


def test_limits_refuses_nonsense():
    for arguments in (["0"], ["x"], ["1", "2"]):
        done = subprocess.run([LIMITS, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert done.stderr == "usage: limits [THREADS]\n"


def test_in_turns():
    head, *lines = output(IN_TURNS, "tiny", 3, 2).splitlines()
    assert head == "tiny, 2 threads, medians of 3 rounds (quartiles)"
    # 2 layers of 4 x 128 x 128 (k and v: half) and 3 x 128 x 384 codes; 2048 keys and values of 2 heads
    weights = 2 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 128 * 384)
    rows = 2 * (128 + 2 * 64 + 128 + 2 * 384 + 128)
    sizes = {
        "products q8": weights + weights / 64 * 4,
        "products w8a8": weights + rows * 4,
        "attention": 2 * 2 * 2048 * 2 * 32 * 4,
    }
    number = r"([\d.]+)"
    for line, (name, n_bytes) in zip(lines, sizes.items(), strict=True):
        found = re.fullmatch(
            rf"{name} +{number} MB +{number} ms, +{number} ms to read it, ratio {number} \({number}-{number}\)", line
        )
        assert found, line
        size, mine, plain, ratio, low, high = map(float, found.groups())
        assert size == round(n_bytes / 1e6, 3)
        assert mine > 0
        assert plain > 0
        assert low <= ratio <= high


def test_in_turns_refuses_nonsense():
    for arguments in ([], ["gpt-2"], ["tiny", "0"], ["tiny", "1", "0"], ["tiny", "1", "1", "1"]):
        done = subprocess.run([IN_TURNS, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert done.stderr == "usage: in_turns llama-3.2-1b|qwen3-0.6b [ROUNDS [THREADS]]\n"


def test_what_bench_prints_is_understood(model):
    scheme, _, path = model
    text = output(PROGRAMS[scheme], path, "--bench", "4,2", "-j", 1)
    found = parse_bench(text)
    assert {k: s.tokens for k, s in found.items()} == {"prefill": 4, "decode": 2}
    for s in found.values():
        assert s.tokens_per_s > 0
        assert s.memory_gb > 0
        assert s.matmul + s.attention <= s.seconds + 2e-6  # each is rounded
    assert re.search(r"^prefill .*, [\d.]+ GMAC/s, at most \d+ tokens at a time$", text, re.M)
    assert found["prefill"].chunk >= 1
    assert list(parse_bench(output(PROGRAMS[scheme], path, "--bench", "0,2", "-j", 1))) == ["decode"]


BENCH = """\
prefill 512 tokens: 100.00 tokens/s, 97.00 GMAC/s, at most 256 tokens at a time
decode 24 tokens: 20.00 tokens/s, 26.00 GB/s, 95% of the 27.00 GB/s that 2 threads read between the tokens
prefill took 5.1200 s: matmul 4.0960, attention 0.7680, rest 0.2560
decode took 1.2000 s: matmul 1.0800, attention 0.0600, rest 0.0600
memory 1.500 GB at its peak
"""
WORK = Work(
    layer_macs=10**9, layer_bytes=17 * 10**9 // 16, classifier_macs=10**8, classifier_bytes=10**8, kv_bytes=10**5
)


def machine(read=40.0, peak=200.0):
    return {
        "cpu": "A & B <CPU>", "threads": 2, "kernel": "avx2",
        "read_gb_per_s": spread([read]), "peak_gmac_per_s": spread([peak]),
    }  # fmt: skip


def rows(model="some-model"):
    slow, fast = (
        parse_bench(BENCH),
        parse_bench(BENCH.replace("20.00 t", "22.00 t").replace("100.00 t", "110.00 t").replace("27.00", "54.00")),
    )
    return [
        summarize(model, phase, 512, [slow[phase], fast[phase], slow[phase]], WORK, machine())
        for phase in ("prefill", "decode")
    ]


def test_figures():
    prefill, decode = rows()
    assert prefill["tokens_per_s"] == {"median": 100, "min": 100, "max": 110}
    # 512 tokens in 5.12 s: two passes over the layers, the classifier once
    assert prefill["gb_per_s"]["median"] == pytest.approx((2 * 17 / 16 + 0.1) / 5.12)
    assert prefill["gmac_per_s"]["median"] == pytest.approx((512 * 1 + 0.1) / 5.12)
    assert prefill["percent_of_peak"]["median"] == pytest.approx(50, rel=0.01)
    assert prefill["macs_per_byte"] == pytest.approx(512.1 / (2 * 17 / 16 + 0.1))
    assert prefill["matmul_percent"]["median"] == pytest.approx(80)
    assert prefill["rest_percent"]["median"] == pytest.approx(5)
    assert prefill["memory_gb"]["median"] == 1.5
    # Behind 512 positions, 24 tokens read 513 to 536 of them: 524.5 on average.
    bytes_per_token = 17 / 16 + 0.1 + 524.5e-4
    assert decode["gb_per_s"]["median"] == pytest.approx(bytes_per_token * 20)
    assert decode["percent_of_read"] == pytest.approx(
        {
            "median": 100 * bytes_per_token * 20 / 27,
            "min": 100 * bytes_per_token * 22 / 54,
            "max": 100 * bytes_per_token * 20 / 27,
        }
    )
    assert decode["gmac_per_s"]["median"] == pytest.approx(1.1 * 20)
    assert decode["attention_per_kv_read"]["median"] == pytest.approx(0.06 / (24 * 524.5e-4 / 27))


def test_table():
    text = table("some_program", machine(), rows("one") + rows("two"), 3)
    assert text.startswith("some_program: A & B <CPU>, 2 threads, kernel avx2\n")
    for line in (
        r"reads +40.0 GB/s \(40.0-40.0\)",
        r"prefill +512 +100.0 +\(100.0-110.0\) +0.4 +2 +100.0 +50 +80.0 +15.0 +5.0 +1.50",
        r"decode +512 +20.00 +\(20.00-22.00\) +24.3 +90 +22.0 +11 +90.0 +5.0 +5.0 +1.50",
        r"Attention at context 512 takes 1.29 times as long as reading the KV cache.",
    ):
        assert re.search(f"^{line}$", text, re.M), text
    assert text.endswith("Decode at context 512, of the read bandwidth: one 90 % (49-90), two 90 % (49-90)")
    assert closing_line(rows("m")[1:]) == "Decode at context 512, of the read bandwidth: m 90 % (49-90)"


def test_a_program_that_does_not_say_where_its_time_went():
    text = "".join(line + "\n" for line in BENCH.splitlines() if "took" not in line and "memory" not in line)
    row = summarize("m", "decode", 16, [parse_bench(text)["decode"]], WORK, machine())
    assert "matmul_percent" not in row
    assert re.search(r" - +- +- +-$", table("p", machine(), [row], 1), re.M)


def test_the_whole_measurement(model, tmp_path):
    scheme, config, path = model
    limits = tmp_path / "limits"
    limits.write_text(
        """#!/bin/sh
        echo "{\\"threads\\": $1, \\"kernel\\": \\"k\\", \\"read_gb_per_s\\": 9, \\"peak_gmac_per_s\\": {\\"k\\": 70}}"
        """
    )
    limits.chmod(0o755)
    cases = [(1, 0, ("prefill",)), (8, 2, ("prefill", "decode")), (0, 2, ("decode",), 20)]
    found, found_rows = measure(
        {"tiny": path}, {"tiny": work_of(config, scheme)}, 2, 1, PROGRAMS[scheme], limits, cases
    )
    assert found["threads"] == 1
    assert found["read_gb_per_s"] == {"median": 9, "min": 9, "max": 9}
    assert [(r["phase"], r["tokens"]) for r in found_rows] == [
        *(("prefill", 1), ("prefill", 8)),
        *(("decode", 8), ("decode", 20)),
    ]
    results = json.loads(json.dumps({"machine": found, "rows": found_rows}))
    assert "decode    8" in table("p", results["machine"], results["rows"], 2)
    ElementTree.fromstring(roofline(results))


# ----------------------------------------------------------------------------
# Drawing


def test_roofline(tmp_path):
    results = {"machine": machine(), "rows": rows("one") + rows("two")}
    svg = ElementTree.fromstring(roofline(results))
    words = [e.text for e in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert words.count("decode 512") == words.count("prefill 512") == 2
    assert {"one", "two", "reads 40.0 GB/s", "multiplies 200 GMAC/s"} <= set(words)
    assert any(w.startswith("A & B <CPU>") for w in words)

    (tmp_path / "results.json").write_text(json.dumps(results))
    output(sys.executable, "-m", "bench.roofline", tmp_path / "results.json", tmp_path / "out.svg")
    assert (tmp_path / "out.svg").read_text() == roofline(results)


def test_labels_do_not_lie_on_each_other():
    """Decode at a long context reads the KV cache, too: it stands to the left of the others, at nearly their height."""
    places = [("one", "prefill 1", 0.94, 38.5), ("two", "prefill 1", 0.94, 39.1)]
    places += [("one", "prefill 128", 96, 517), ("two", "prefill 128", 90, 402)]
    places += [("one", "decode 16", 0.94, 39.6), ("one", "decode 512", 0.92, 41.0), ("one", "decode 2048", 0.85, 38.1)]
    places += [("two", "decode 16", 0.93, 37.2), ("two", "decode 512", 0.79, 33.0), ("two", "decode 2048", 0.54, 23.0)]
    close = [
        {"model": model, "phase": label.split()[0], "tokens": label.split()[1], "macs_per_byte": x,
         "gmac_per_s": {"median": y}}
        for model, label, x, y in places
    ]  # fmt: skip
    limits = machine() | {"read_gb_per_s": {"median": 51.0}, "peak_gmac_per_s": {"median": 981.4}}
    svg = ElementTree.fromstring(roofline({"machine": limits, "rows": close}))
    labels = [e for e in svg.iter("{http://www.w3.org/2000/svg}text") if re.fullmatch(r"[a-z]+ \d+", e.text)]
    corners = [(float(e.get("x")), float(e.get("y")), 7 * len(e.text)) for e in labels]
    assert len(corners) == len(places)
    for (x, y, width), (x2, y2, width2) in itertools.combinations(corners, 2):
        assert x + width <= x2 or x2 + width2 <= x or abs(y - y2) >= 12


def test_ticks():
    assert ticks(0.9, 25) == [1, 2, 5, 10, 20]


@pytest.mark.parametrize(
    ("heights", "expected"),
    [
        ([0, 100], [0, 100]),
        ([10, 12], [6, 16]),
        ([0, 0, 0], [-10, 0, 10]),
        ([0, 10, 12, 100], [-8 / 3, 22 / 3, 52 / 3, 100]),
    ],
)
def test_labels_move_apart(heights, expected):
    assert spread_out(heights, 10) == pytest.approx(expected)


def test_versions_a_ratio_above_1_is_a_faster_version():
    starts = [versions.start_of(pairs) for pairs in ([(2, 1), (4, 2), (9, 3)], [(3, 1)], [(1, 2)])]
    assert starts[0] == versions.Start(2, (4, 2))
    row = versions.line(versions.Case(1, 2), starts)
    assert row == "decode, -j 2       2.000 (0.500-3.000)  4000.00 ms -> 2000.00 ms"


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_versions_loads_two_and_runs_them_in_turns(monkeypatch):
    """One version twice, compiled without optimization, since no figure matters."""
    monkeypatch.setenv("MAKEFLAGS", "")
    monkeypatch.setenv("CXXFLAGS", "-O0")
    library = versions.build(ROOT, "runq", "test")
    libraries = library, Path(shutil.copy(library, library.with_name("copy_" + library.name)))
    command = ["runq", str(ROOT / "build" / "models" / "tiny-llama.q8.bin"), "--kv", "q8"]
    for n_tokens, name in ((1, "decode, -j 1"), (9, "prefill 9, -j 1")):
        case = versions.Case(n_tokens, threads=1)
        row = versions.line(case, versions.compare(libraries, command, case, n_starts=2, seconds=0.1))
        found = re.fullmatch(rf"{name} +([\d.]+) \(([\d.]+)-([\d.]+)\)  ([\d.]+) ms -> ([\d.]+) ms", row)
        assert found, row
        ratio, least, greatest, before, after = map(float, found.groups())
        assert 0 < least <= ratio <= greatest
        assert before > 0
        assert after > 0
    for arguments, n_tokens, error in (
        (command, 5000, "test_runq.so: the context is shorter than 5064"),
        ([*command[:2], "--kv", "f64"], 1, "test_runq.so: --kv"),
        (["runq", "README.md"], 1, "test_runq.so: README.md"),
        (command, -1, "prefill -1, -j 1: the process was ended"),
    ):
        with pytest.raises(ValueError, match=re.escape(error)):
            versions.compare(libraries, arguments, versions.Case(n_tokens, 1), 1, 0.1)


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_versions_refuses_what_is_none(tmp_path):
    command = [sys.executable, "-m", "bench.versions"]
    for arguments, error in (
        (
            ["no-such-commit", "runq", "README.md"],
            "'no-such-commit' is neither a folder with this project's files nor a commit of it",
        ),
        ([".", "runq", "no-such-file"], "[Errno 2] No such file or directory: 'no-such-file'"),
    ):
        done = subprocess.run([*command, *arguments], **HERE)
        assert done.returncode == 1
        assert done.stderr == f"bench.versions: {error}\n"
    done = subprocess.run([*command, ".", "runq", "README.md", "--starts", "0"], **HERE)
    assert done.returncode == 2
    assert "argument --starts: invalid positive value: '0'" in done.stderr

    large = tmp_path / "large.bin"
    with large.open("wb") as f:
        f.truncate(1 << 42)
    with pytest.raises(ValueError, match=r"large.bin: two copies need 10262.1 GB, .* are available"):
        versions.check_memory(["runq", str(large)])
    versions.check_memory(["runq", str(large), "--mmap"])


# ----------------------------------------------------------------------------
# bench.ladder


def test_ladder_reads_the_speeds_that_either_form_prints():
    alone = "prefill 128 tokens, 10.9 tokens/s\ndecode  7 tokens, 7.2 tokens/s\n"
    engine = "prefill   128 tokens in 0.80 s, 159.5 tokens/s\ndecode    7 tokens in 0.40 s, 17.5 tokens/s, 23.2 GB/s\n"
    assert ladder.speeds(alone) == {"prefill": 10.9, "decode": 7.2}
    assert ladder.speeds(engine) == {"prefill": 159.5, "decode": 17.5}


def test_ladder_takes_medians_of_ratios_in_a_round():
    """The machine is twice as fast in the second round, and a factor of 3 stays one."""
    n = len(ladder.FORMS)
    rounds = [[dict.fromkeys(ladder.PHASES, speed * 3.0**i) for i in range(n)] for speed in (10, 20, 11)]
    lines = ladder.table(128, rounds, 2).splitlines()
    assert lines[0].split()[:4] == ["prompt", "of", "128", "tokens"]
    assert lines[2].split() == ["plain", "11.0", "11.0"]
    assert lines[3].split()[-3:] == ["33.0", "3.00", "3.00"]
    assert lines[4].split()[-3:] == ["99.0", "3.00", "9.00"]
    assert lines[-2].startswith("+ 2 threads ")
    assert lines[-1].split()[-2:] == ["243.00", "243.00"]  # of the first in both columns


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux, which is asked for its cores")
def test_ladder_runs_every_form(tmp_path):
    options = ["--prompts", "4", "--tokens", "2", "--rounds", "1", "--threads", "2"]
    done = run_here("bench.ladder", "--model", ROOT / "model.bin", *options)
    assert done.returncode == 0, done.stderr
    assert [line[:22].strip() for line in done.stdout.splitlines()[2:8]] == [
        "plain", "+ vector instructions", "+ packing", "+ attention's tiles", "+ 2 threads", "plain, 2 threads",
    ]  # fmt: skip
    wrong = run_here("bench.ladder", "--model", tmp_path / "none", "--rounds", "1")
    assert wrong.returncode == 1
    assert "build/plain/runq: exit code 1: runq: " in wrong.stderr


def test_the_loop_in_place_of_attention_gives_the_same_ids():
    ids = ["--ids", ",".join(map(str, range(1, 200))), "-n", "20", "-t", "0", "--print-ids"]
    found = {
        subprocess.run([ROOT / name, ROOT / "model.bin", *ids], capture_output=True, check=True).stdout
        for name in ("runq", "build/ladder/runq")
    }
    assert len(found) == 1


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["no-such.bin"], "memory_limit: no-such.bin: no such file"),
        (["README.md", "--steps", "1"], "--rounds and --shares have to be 1 or more, --steps 2 or more"),
        (["README.md"], r"memory_limit: (README.md, exit code 1: .*magic is|there is no memory control group here)"),
    ],
)
def test_memory_limit_says_in_one_line_what_is_wrong(args, line):
    command = [sys.executable, "-m", "bench.memory_limit", *args]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (1, 2)
    assert re.search(line, done.stderr.splitlines()[-1])
    assert "Traceback" not in done.stderr
