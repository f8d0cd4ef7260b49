"""models/approximations.py: each approximation by hand and in its place, the tables, the command line."""

import re
from functools import partial

import numpy as np
import pytest

from formats.checkpoint import Checkpoint
from golden.forward import forward
from golden.perplexity import encode
from golden.q8 import Q8, quantize
from golden.trace import Recorder, relative_error
from models import approximations
from models.approximations import (
    Approximate,
    bf16,
    codes_by_reciprocal,
    exp_table,
    gated,
    norm_in_fp32,
    norm_of_x,
    print_costs,
    print_ranges,
    probabilities,
    sigmoid_table,
    variants,
)
from models.quality import InFp32
from tests.helpers import F32, MODELS, TINY

TOKENS = 24


@pytest.fixture(scope="module", params=TINY)
def model(request):
    """Checkpoint, some token ids, and every step of the exact run."""
    checkpoint = Checkpoint(MODELS / request.param)
    ids, bos = encode(checkpoint.path, (MODELS / "held_out.txt").read_text()[:400])
    exact = Recorder()
    forward(checkpoint.config, InFp32(Q8(checkpoint)), np.array(ids[:TOKENS]), exact)
    return checkpoint, ids[:TOKENS], bos, exact.tensors


def run(checkpoint, ids, approximations_of):
    """Every step, with these approximations in place."""
    approximate, seen = Approximate(approximations_of), Recorder()
    forward(
        checkpoint.config,
        InFp32(Q8(checkpoint)),
        np.array(ids),
        lambda name, value: seen(name, approximate(name, value)),
    )
    return seen.tensors


# ---- by hand


def test_a_table_of_exponentials():
    exp = exp_table(4)  # a step is 1
    x = np.array([0, -0.4, -0.6, -1, -15.4, -15.6, -16, -40, -1e30], F32)
    expected = [1, 1, np.exp(-1), np.exp(-1), np.exp(-15), 0, 0, 0, 0]
    assert exp(x) == pytest.approx(expected, rel=1e-6)
    x = -np.linspace(0, 15, 1000, dtype=F32)
    errors = [np.abs(exp_table(bits)(x) / np.exp(x) - 1).max() for bits in (8, 10, 12)]
    assert errors == pytest.approx([8 / 2**8, 8 / 2**10, 8 / 2**12], rel=0.05)  # half a step


def test_a_table_of_sigmoids():
    sigmoid = sigmoid_table(4)  # a step is 1; the middles are +-0.5, +-1.5, ...
    x = np.array([0, 0.99, 1, -0.01, -7.99, 7.99, -8, 8, 100], F32)
    middles = np.array([0.5, 0.5, 1.5, -0.5, -7.5, 7.5])
    assert sigmoid(x) == pytest.approx([*(1 / (1 + np.exp(-middles))), 0, 1, 1], rel=1e-6)


def test_codes_by_a_reciprocal():
    """127 / 3 and 127 * (1 / 3) are two numbers in fp32, and 1.5 lies where they make two codes of it."""
    assert F32(127) / F32(3) != F32(127) * (F32(1) / F32(3))
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2000, 64)).astype(F32)
    a = Approximate({})
    a.last["attn.norm"] = x
    codes, exact = codes_by_reciprocal(a, "layers.3.attn.norm.q", x), quantize(x, 64).codes
    assert codes.dtype == np.int8
    assert np.abs(codes.astype(int) - exact).max() <= 1
    assert (codes != exact).mean() < 1e-4
    a.last["norm"] = np.zeros((1, 64), F32)
    assert not codes_by_reciprocal(a, "norm.q", x).any()


def test_bf16_has_eight_bits():
    assert bf16(np.array([1 + 2**-8, 1 + 2**-7, 257], F32)).tolist() == [1, 1 + 2**-7, 256]


# ---- in their places


def test_an_exact_approximation_changes_nothing(model):
    """What takes the place of a step has the right inputs: with exact functions it is that step."""
    checkpoint, ids, _, exact = model
    with np.errstate(over="ignore"):
        steps = run(checkpoint, ids, {
            "attn.probs": lambda *a: probabilities(np.exp, False, *a),
            "swiglu": lambda *a: gated(lambda x: 1 / (1 + np.exp(-x)), *a),
        })  # fmt: skip
    assert steps.keys() == exact.keys()
    for name in ("layers.0.attn.probs", "layers.0.ffn.swiglu"):
        assert relative_error(exact[name], steps[name]) < 1e-6
        assert not np.array_equal(exact[name], steps[name])  # they are in fp32


def test_norms_in_fp32_are_those_of_the_residual_stream(model):
    checkpoint, ids, _, exact = model
    norm = partial(norm_in_fp32, checkpoint.config, Q8(checkpoint))
    for about, name in (
        ({"attn.norm": norm}, "layers.0.attn.norm"),
        ({"ffn.norm": norm}, "layers.0.ffn.norm"),
        ({"norm": norm_of_x(norm)}, "norm"),
    ):
        steps = run(checkpoint, ids, about)
        assert next(step for step in exact if not np.array_equal(exact[step], steps[step])) == name
        assert relative_error(exact[name], steps[name]) < 1e-6


def test_every_row_of_the_table_changes_its_steps(model):
    checkpoint, ids, _, exact = model
    changed = {}
    for name, scheme, step in variants(checkpoint.config, checkpoint):
        seen = Recorder()

        def both(step_name, value, step=step, seen=seen):
            value = step(step_name, value)
            seen(step_name, value)
            return value

        forward(checkpoint.config, InFp32(scheme), np.array(ids), both)
        # Up to the first step that differs, the runs are one.
        changed[name] = next((s for s in exact if not np.array_equal(exact[s], seen.tensors[s])), None)
    # A code that falls on the other side comes first in one model, a probability in the other.
    assert changed.pop("reciprocals: softmax and quantizing") in ("layers.0.attn.norm.q", "layers.0.attn.probs")
    exponentials = [f"exp of softmax, table of {bits} bits" for bits in (8, 10, 12)]
    sigmoids = [f"sigmoid, table of {bits} bits" for bits in (8, 10, 12)]
    assert changed == {
        "exact": None,
        "noise of 1e-6": "layers.0.attn.q_proj",
        **dict.fromkeys(exponentials, "layers.0.attn.probs"),
        **dict.fromkeys(sigmoids, "layers.0.ffn.swiglu"),
        "bf16 scales: activations": "layers.0.attn.norm.s",
        "bf16 scales: weights": "embed",
        "RMSNorm in fp32": "layers.0.attn.norm",
    }


# ---- tables


def test_coarse_tables_cost_more(model, capsys, monkeypatch):
    checkpoint, ids, bos, _ = model
    rows = [
        ("exact", {}),
        ("3 bits", {"attn.probs": lambda *a: probabilities(exp_table(3), False, *a)}),
        ("1 bit", {"swiglu": lambda *a: gated(sigmoid_table(1), *a)}),
    ]
    monkeypatch.setattr(
        approximations, "variants", lambda *_: [(name, Q8(checkpoint), Approximate(about)) for name, about in rows]
    )
    print_costs(checkpoint.config, checkpoint, ids, bos, 512)
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"exact +\d\.\d{{4}} +\+0\.00% +0\.0e\+00   of {TOKENS - (bos is None)} tokens", lines[0])
    kl = [float(line.split()[-1]) for line in lines[1:]]
    assert all(value > 1e-3 for value in kl), lines


def test_ranges(model, capsys):
    checkpoint, ids, _, exact = model
    print_ranges(checkpoint.config, checkpoint, ids, None, 512)
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()[1:]}
    fp32 = [name for name, value in exact.items() if value.dtype == F32]
    assert {re.sub(r"^layers\.\d+\.", "", name) for name in fp32} == rows.keys()
    assert rows["attn.probs"][0] == "1"
    largest = [np.abs(exact[f"layers.{i}.ffn.swiglu"]).max() for i in range(checkpoint.config.n_layers)]
    value, layer, median, bits = map(float, rows["ffn.swiglu"])
    assert (value, layer) == (pytest.approx(max(largest), rel=1e-3), np.argmax(largest))
    assert bits == pytest.approx(np.log2(value / median), abs=0.1)


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["nowhere", "Makefile"], 1, "approximations: nowhere: "),
        ([str(MODELS / "tiny-llama"), "nowhere"], 1, "approximations: nowhere: no such file"),
        ([str(MODELS / "tiny-llama"), "Makefile", "--tokens", "1"], 2, "--tokens: 1, expected 2 and up"),
    ],
)
def test_what_cannot_be_measured(monkeypatch, capsys, arguments, code, complaint):
    monkeypatch.setattr("sys.argv", ["approximations", *arguments])
    try:
        found = approximations.main()
    except SystemExit as error:
        found = error.code
    err = capsys.readouterr().err
    assert found == code
    assert complaint in err
