"""Goldens at the size of real models: every program, over the engine and alone, gives the digests of golden/sizes."""

import json
import os
import re
import subprocess
from contextlib import ExitStack
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest

import golden.forward
import golden.gptq
from formats.gptq import FORMATS
from golden.digests import StepDigests, digests_of, read_digests
from golden.forward import forward
from golden.fp32 import F32, digest, splitmix64
from golden.trace import read_trace
from models.by_rule import floats, int8, token_ids, words
from models.sizes import CASES, GOLDENS, crc32, golden_of
from tests.helpers import FULL, ROOT, run_here

# Cases that the plain programs run, which are slow: one of each.
PLAIN = (
    "qwen3-0.6b.q8-g32",
    "llama-3.2-1b.w8a8-g32",
    "qwen3-0.6b.gptq-1",
    "qwen3-30b-a3b.a8w4-row",
    "qwen3-30b-a3b.ladder-0",
)
SHOWN = [name for name, case in CASES.items() if FULL or not case.takes_long]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The file of a case, made when it is asked for; only the last is kept."""
    path = tmp_path_factory.mktemp("sizes") / "model.bin"
    made = []

    def file_of(name):
        if made != [name]:
            CASES[name].write(path)
            made[:] = [name]
        return path

    return file_of


def golden_file(name):
    return json.loads(GOLDENS.read_text())[name]


@pytest.mark.parametrize("name", SHOWN)
def test_every_form_gives_the_digests(tmp_path, model, name):
    case, golden = CASES[name], golden_file(name)
    path = model(name)
    assert crc32(path) == golden["file_crc32"]
    with path.open("rb") as f:
        assert (f.read(256).hex(), case.n_prompt) == (golden["header"], golden["n_prompt"])
    ids = ",".join(map(str, token_ids(case.n_prompt, case.config.vocab_size)))
    trace = tmp_path / "t"
    options = ["--ids", ids, "-n", case.n_new, "-t", 0, "--print-ids", "--digest", "--trace", trace, *case.options]
    begins_at_0 = not case.n_before and "--kv" not in options  # which is all that the plain programs have
    for folder in (".", "build/plain") if (FULL and begins_at_0) or name in PLAIN else (".",):
        done = subprocess.run(
            [f"{folder}/{case.program}", path, *map(str, options)], cwd=ROOT, capture_output=True, text=True,
            check=False, env=os.environ | {"OMP_WAIT_POLICY": "passive"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert [int(i) for i in done.stdout.strip().split(",")] == golden["ids"], folder
        assert re.search(r"^digest +([0-9a-f]{16})$", done.stderr, re.M)[1] == golden["logits"], folder
        found = digests_of(read_trace(trace), case.n_before)
        wrong = [step for step, value in golden["steps"].items() if found.get(step) != value]
        assert (wrong[:1], len(found)) == ([], len(golden["steps"])), folder
        trace.unlink()


def test_every_case_has_a_golden_and_every_format_a_case():
    assert set(json.loads(GOLDENS.read_text())) == set(CASES)
    dense = {form for name, case in CASES.items() if ".gptq-" in name for form in case.storage.layout.formats[1:]}
    experts = {form for name, case in CASES.items() if ".ladder-" in name for form in case.storage.layout.formats[3:5]}
    assert dense == experts == FORMATS


def test_splitmix64():
    """The first numbers of the generator from seed 0, which others list (seed 0: state grows by the odd constant)."""
    seeds = np.arange(3, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert [hex(x) for x in splitmix64(seeds)] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4", "0x6c45d188009454f"]


def test_values_of_the_rule():
    """As docs/model-files.md has them."""
    assert int8(np.array([0, 127, 128, 255], np.uint8)).tolist() == [0, 127, -127, -1]
    u = np.array([0x04000000, 0x84400000, 0x00400000], np.uint32)
    assert floats(u, -1).tolist() == [0.5, 0.75, 0.75]
    assert floats(u, -1, signed=True).tolist() == [0.5, -0.75, 0.75]
    assert floats(u, -1, outliers=True).tolist() == [0.5, 0.75, 6.0]
    assert floats(np.array([0x0401, 0x0200], np.uint16), 0, outliers=True).tolist() == [1 + 2**-10, 12.0]
    assert words(1, 5, 6) == splitmix64(np.array([(1 << 40) + 5], np.uint64))


def test_digests_are_those_of_the_page():
    """Written once more, value by value; a sequence in two passes is as one."""
    rng = np.random.default_rng(0)
    found, values, scores = StepDigests(), rng.standard_normal((5, 3)).astype(F32), rng.standard_normal((5, 2, 5))
    scores = scores.astype(F32)
    for part in (slice(0, 2), slice(2, 5)):
        found("layers.0.attn.norm", values[part])
        found("layers.0.attn.scores", scores[part, :, : part.stop])

    def mix(x):
        return int(splitmix64(np.array([x % 2**64], np.uint64))[0])

    def bits(x):
        return int(F32(x).view(np.uint32))

    plain = by_key = 0
    for t in range(5):
        plain = mix(plain ^ sum(mix((i << 32) + bits(x)) for i, x in enumerate(values[t])) % 2**64)
        seen = scores[t, :, : t + 1].reshape(-1)
        by_key = mix(by_key ^ sum(mix((i << 32) + bits(x)) for i, x in enumerate(seen)) % 2**64)
    assert found.hex() == {"layers.0.attn.norm": f"{plain:016x}", "layers.0.attn.scores": f"{by_key:016x}"}


# ----------------------------------------------------------------------------
# Judging a port


def test_diff_and_step(tmp_path):
    """A port that wrote digests, one of which is wrong, then that step's numbers."""
    name = "qwen3-30b-a3b.ladder-0"
    steps, _ = read_digests(GOLDENS, name)
    mine = tmp_path / "mine.json"

    def diff(found):
        mine.write_text(json.dumps(found))
        return run_here("golden", "diff", GOLDENS, mine, "--case", name)

    done = diff({name: {"steps": steps}})
    assert (done.returncode, done.stdout) == (0, f"all {len(steps)} steps are equal to the bit\n")
    done = diff({name: {"steps": steps | {"layers.1.attn.mix": "0" * 16}}})
    assert done.returncode == 1
    assert "the first at layers.1.attn.mix" in done.stdout
    for nothing in ([], {}, {name: {}}, {name: {"steps": []}}):
        done = diff(nothing)
        assert done.returncode == 1
        assert done.stderr == f"golden: {mine}: has no case {name} with steps, each with its digest\n"
    done = run_here("models.sizes", "write", "qwen3", tmp_path / "m.bin")
    assert done.returncode == 1
    assert done.stderr.startswith("sizes: qwen3: no such case; there are qwen3-0.6b.q8, ")
    for step, code in (("embed", 0), ("layers.7.attn.mix", 1)):
        done = run_here("models.sizes", "step", name, step, tmp_path / "s")
        assert done.returncode == code, done.stderr
    assert digests_of({"embed": read_trace(tmp_path / "s")["embed"]}) == {"embed": steps["embed"]}


def test_a_program_without_such_positions_prints_nothing_before_it_says_so():
    path = ROOT / "build" / "models" / "tiny-llama.awq.bin"
    options = ["--cache-rule", "3", "--ids", "1", "-n", "2"]
    done = subprocess.run(["./runq_awq", path, *options], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "runq_awq: --cache-rule: this program has none\n")


# ----------------------------------------------------------------------------
# Mistakes that the toy goldens do not find


def first_half(q, k):
    return attention_dots(q[..., :64], k[..., :64])


def of_four(x, n_heads):
    """Keys or values repeated as if never more than four query heads read one of them."""
    return x[:, np.minimum(np.arange(n_heads) // 4, x.shape[1] - 1)]


def without_384(x, cos, sin, interleaved):
    found = rope(x, cos, sin, interleaved)
    return np.where((np.arange(len(x)) == 384)[:, None, None], x, found)


def in_four_bits(logits, n_active, normalize):
    chosen, weights = route(logits, n_active, normalize)
    return chosen & 15, weights


def neighbours_table(parts, form, group):
    return expand_parts({**parts, "table": np.roll(parts["table"], 1)} if "table" in parts else parts, form, group)


def last_logit(x, w, name, step):
    out = traced_matmul(x, w, name, step)
    return np.where((np.arange(len(w.codes)) == len(w.codes) - 1) & (name == "classifier"), out * F32(1.003), out)


def at_128_alone(gate, up):
    return np.where((np.arange(len(gate)) == 128)[:, None], gate, swiglu(gate, up))


def of_the_group_before(form, m, activation_group):
    """`expand` that takes each group's scale from the one before, or each row's, in one format."""
    found = expand(m, activation_group)
    scales = np.roll(found.scales, 1, axis=0 if m.form.group == 0 else 1)
    return found._replace(scales=scales) if m.form == form else found


def rounded_scales(x):
    return dequantize(x._replace(scales=x.scales.astype(np.float16).astype(F32)))


attention_dots, rope, route = golden.forward.attention_dots, golden.forward.rope, golden.forward.route
expand, expand_parts, dequantize = golden.gptq.expand, golden.gptq.expand_parts, golden.q8.dequantize
swiglu, traced_matmul = golden.forward.swiglu, golden.q8.traced_matmul
MISTAKES = {
    "elements beyond 64 of a head are left out": (
        "qwen3-0.6b.q8", 20, {"golden.forward.attention_dots": first_half}),
    "of five query heads the last reads the next key head": (
        "qwen3-14b.q8", 20, {"golden.forward.attention_dots": lambda q, k: attention_dots(q, of_four(k, q.shape[1]))}),
    "expert ids below 16": ("qwen3-30b-a3b.ladder-0", 20, {"golden.forward.route": in_four_bits}),
    "position 384 is not rotated": ("qwen3-0.6b.q8-400", 390, {"golden.forward.rope": without_384}),
    "the table of a neighbour": ("qwen3-30b-a3b.ladder-9", 20, {"golden.moe.expand_parts": neighbours_table}),
    "the last logit is 0.3 % off": ("qwen3-0.6b.q8-g32", 4, {"golden.q8.traced_matmul": last_logit}),
    "position 128 alone": ("qwen3-0.6b.q8", 130, {"golden.forward.swiglu": at_128_alone}),
    **{f"{form}, scales of the group before": (
        f"qwen3-0.6b.gptq-{i}", 12, {"golden.gptq.expand": partial(of_the_group_before, form)})
       for i in range(4) for form in sorted(set(CASES[f"qwen3-0.6b.gptq-{i}"].storage.layout.formats))},
    "the embedding's scales in fp16": ("qwen3-0.6b.q8", 20, {"golden.q8.dequantize": rounded_scales}),
}  # fmt: skip


@pytest.mark.parametrize("mistake", [m for m, (_, n, _) in MISTAKES.items() if FULL or (n < 100 and "bits" not in m)])
def test_a_mistake_changes_a_digest(model, mistake):
    """The reference itself, with the mistake, over the first tokens of the case."""
    name, n, patches = MISTAKES[mistake]
    case = CASES[name]
    path, tokens = model(name), np.array(token_ids(n, case.config.vocab_size))
    found = []
    for faulty in (False, True):
        with ExitStack() as stack:
            for target, function in patches.items() if faulty else ():
                stack.enter_context(patch(target, function))
            digests = StepDigests()
            forward(case.config, case.read(path), tokens, digests)
            found.append(digests.hex())
    assert found[0] != found[1]


@pytest.mark.parametrize("name", SHOWN if FULL else ["qwen3-30b-a3b.ladder-0"])
def test_goldens_are_what_the_reference_says(model, name):
    golden = golden_of(CASES[name], model(name))
    assert golden == golden_file(name)
    assert len(set(golden["ids"])) > 2  # the model has not collapsed
    assert golden["logits"] != f"{digest(np.empty(0)):016x}"
