"""AWQ: golden vectors, and what `golden diff` notices in fp16 traces."""

import json
from functools import partial

import numpy as np
import pytest
from safetensors.numpy import load_file

from golden.awq import AWQ, Packed, dequantize, pack, unpack
from golden.forward import forward
from golden.make import Noisy
from golden.op_vectors_awq import AWQ_MATMULS
from golden.trace import Recorder, compare, replay, step_order, write_trace
from tests.helpers import (
    AWQ_VARIANTS,
    CALIBRATION,
    DATA,
    F16,
    F32,
    F64,
    FULL,
    GOLDEN_FILES,
    MODELS,
    TINY,
    assert_golden_file,
    broken,
    first_bad,
    run_golden,
)

# ---- golden files and traces


# The exporter's own work is done again for one file; with FULL=1 for all.
ANEW = [("tiny-llama", "awq")]


@pytest.mark.parametrize(("name", "variant"), [(n, v) for n in TINY for v in AWQ_VARIANTS] if FULL else ANEW)
def test_the_exporter_writes_the_golden_file(tmp_path, name, variant):
    assert_golden_file(name, variant, tmp_path)


@pytest.mark.parametrize("variant", AWQ_VARIANTS)
@pytest.mark.parametrize("name", TINY)
def test_stored_traces_are_what_the_reference_computes(name, variant):
    scheme = AWQ(GOLDEN_FILES / f"{name}.{variant}.bin")
    stored = load_file(DATA / f"{name}.{variant}.trace.safetensors")
    golden_json = json.loads((DATA / f"{name}.{variant}.json").read_text())
    recorder = Recorder()
    tokens = recorder("tokens", stored["tokens"])
    assert tokens.tolist() == golden_json["trace_ids"]
    logits = forward(scheme.config, scheme, tokens, recorder)
    reports = compare(stored, recorder.tensors)
    assert len(reports) > 4 * 15
    assert all(r.ok for r in reports), [r for r in reports if not r.ok]
    assert all(r.ok for r in replay(partial(forward, scheme.config, scheme), stored))
    assert np.abs(logits - stored["logits"]).max() <= 1e-2 * np.abs(stored["logits"]).max()
    assert golden_json["held_out"][variant] == pytest.approx(golden_json["held_out"]["fp32"], rel=0.03)


@pytest.mark.parametrize("variant", AWQ_VARIANTS)
@pytest.mark.parametrize("name", TINY)
def test_the_golden_generation_is_clear(name, variant):
    """All 64 tokens of the second prompt stay the same when every result is off by a little."""
    scheme = AWQ(GOLDEN_FILES / f"{name}.{variant}.bin")
    generations = json.loads((DATA / f"{name}.{variant}.json").read_text())["generations"]
    assert len(generations) == 2
    assert min(generations[1]["leads"]) > 0.01
    for g in generations:
        ids = np.array(g["prompt_ids"] + g["new_ids"])
        assert len(g["new_ids"]) == len(g["leads"]) == 64
        exact, noisy = (forward(scheme.config, s, ids) for s in (scheme, Noisy(scheme, 100)))
        assert exact.argmax(axis=-1)[len(g["prompt_ids"]) - 1 : -1].tolist() == g["new_ids"]
        off = np.abs(noisy - exact).max(axis=-1) / np.abs(exact).max(axis=-1)
        assert 1e-5 < off.max() < 1e-2
        if g is generations[1]:
            assert noisy.argmax(axis=-1)[len(g["prompt_ids"]) - 1 : -1].tolist() == g["new_ids"]


def test_traces_have_fp16_where_it_is_rounded():
    scheme = AWQ(GOLDEN_FILES / "tiny-qwen3.awq.bin")
    trace = load_file(DATA / "tiny-qwen3.awq.trace.safetensors")
    halves = {name for name, value in trace.items() if value.dtype == F16}
    parts = ("attn.norm", "attn.q_rope", "attn.k_rope", "attn.mix", "ffn.norm", "ffn.swiglu")
    assert halves == {"norm"} | {f"layers.{i}.{part}" for i in range(4) for part in parts}
    others = {"tokens", "embed", "logits"} | {
        f"layers.{i}.{part}"
        for i in range(4)
        for part in ("attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.q_norm", "attn.k_norm", "attn.o_proj",
                     "attn.residual", "ffn.gate_proj", "ffn.up_proj", "ffn.down_proj", "ffn.residual")
    }  # fmt: skip
    assert trace.keys() - halves == others
    recorder = Recorder()
    forward(scheme.config, scheme, trace["tokens"], recorder)
    assert [n for n in sorted(trace, key=step_order) if n != "tokens"] == list(recorder.tensors)
    # values go into the cache as fp16, whatever the trace shows
    v = trace["layers.2.attn.v_proj"]
    assert not np.array_equal(v, v.astype(F16))
    first = trace["layers.2.attn.mix"][0].reshape(2, 2, 64)  # a token alone mixes its own values only
    assert np.array_equal(first, np.repeat(v[0].astype(F16).reshape(2, 1, 64), 2, axis=1))


def test_diff_names_what_is_wrong():
    scheme = AWQ(GOLDEN_FILES / "tiny-llama.awq.bin")
    trace = load_file(DATA / "tiny-llama.awq.trace.safetensors")
    run = partial(forward, scheme.config, scheme)

    def one_unit(x):
        x.ravel()[::7] = np.nextafter(x.ravel()[::7], F16(np.inf))
        return x

    assert first_bad(compare(trace, trace)) is None
    for step, change in [
        ("layers.2.ffn.norm", lambda x: (x * F16(1.002)).astype(F16)),
        ("layers.1.attn.q_rope", lambda x: x[:, ::-1].copy()),
        ("layers.0.attn.mix", lambda x: (x * F16(1.003)).astype(F16)),
        ("layers.3.ffn.down_proj", lambda x: x * F32(1.0001)),
        ("layers.1.attn.v_proj", lambda x: x.astype(F16).astype(F32)),
        ("layers.1.attn.k_rope", lambda x: x.astype(F32)),
        ("logits", lambda x: x * F32(1.02)),
    ]:
        other = broken(trace, step, change)
        assert first_bad(compare(trace, other)) == step
        assert first_bad(replay(run, other)) == step
    # Rounded the other way here and there: no mistake, and what follows need only be close.
    flipped = broken(trace, "layers.1.ffn.norm", one_unit)
    assert first_bad(compare(trace, flipped)) is None
    later = broken(flipped, "layers.3.ffn.down_proj", lambda x: x * F32(1.001))
    assert first_bad(compare(trace, later)) is None
    assert first_bad(replay(run, later)) == "layers.1.ffn.gate_proj"


def test_a_noisy_pass_is_within_the_contract():
    """Every result off by a few units, probabilities by fp16's: what another implementation's trace looks like."""
    for name in TINY:
        scheme = AWQ(GOLDEN_FILES / f"{name}.awq.bin")
        trace = load_file(DATA / f"{name}.awq.trace.safetensors")
        for seed in range(5):
            recorder = Recorder()
            tokens = recorder("tokens", trace["tokens"])
            forward(scheme.config, Noisy(scheme, seed), tokens, recorder)
            assert all(r.ok for r in compare(trace, recorder.tensors))
            assert all(r.ok for r in replay(partial(forward, scheme.config, scheme), recorder.tensors))


def test_stored_op_vectors_cover_every_shape():
    stored = load_file(DATA / "ops.safetensors")
    assert {m for m, *_ in AWQ_MATMULS} >= {1, 2, 15, 16, 17, 64, 100}
    assert {n for _, n, *_ in AWQ_MATMULS} >= {8, 24}
    assert {k == g for _, _, k, g in AWQ_MATMULS} == {True, False}
    for m, n, k, g in AWQ_MATMULS:
        p = f"awq_matmul.{m}x{n}x{k}g{g}."
        matrix = Packed(*(stored[p + part] for part in Packed._fields))
        assert np.array_equal(dequantize(matrix), stored[p + "w16"])
        assert (stored[p + "x"].dtype, stored[p + "x"].shape) == (F16, (m, k))
        exact = stored[p + "x"].astype(F64) @ stored[p + "w16"].astype(F64)
        assert np.array_equal(stored[p + "out"], exact.astype(F32))
    codes = unpack(stored["awq_dequantize.qweight"]).astype(int)
    zeros, scales = unpack(stored["awq_dequantize.qzeros"]).astype(int), stored["awq_dequantize.scales"]
    assert len(set(zip(codes.ravel(), np.broadcast_to(zeros, codes.shape).ravel(), strict=True))) == 256
    expected = ((codes - zeros) * scales.astype(F64)).astype(F16)
    assert np.array_equal(stored["awq_dequantize.w16"], expected)
    assert np.isfinite(expected).all()
    assert np.array_equal(pack(stored["awq_pack.codes"]), stored["awq_pack.packed"])
    with np.errstate(over="ignore"):
        assert np.array_equal(stored["half.x"].astype(F16), stored["half.out"])


def test_golden_commands_take_a_file(tmp_path):
    file, trace = GOLDEN_FILES / "tiny-llama.awq.bin", DATA / "tiny-llama.awq.trace.safetensors"
    done = run_golden("diff", trace, trace, "--model", file)
    assert (done.returncode, done.stderr) == (0, "")
    assert "are equal to the bit" in done.stdout
    assert run_golden("diff", trace, trace, "--model", GOLDEN_FILES / "tiny-llama.awq-g64.bin").returncode == 1
    assert run_golden("diff", trace, DATA / "tiny-llama.q8.trace.safetensors").returncode == 1
    write_trace(tmp_path / "wrong", broken(load_file(trace), "layers.2.attn.mix", lambda x: -x))
    done = run_golden("diff", trace, tmp_path / "wrong", "--model", file)
    assert done.returncode == 1
    assert "the first at layers.2.attn.mix" in done.stdout
    (tmp_path / "text").write_text(CALIBRATION.read_text()[:2000])
    values = []
    for more in ([], ["--file", file]):
        done = run_golden("ppl", MODELS / "tiny-llama", tmp_path / "text", *more)
        assert done.returncode == 0, done.stderr
        values.append(float(done.stdout.split()[1]))
    assert values[0] != values[1] == pytest.approx(values[0], rel=0.05)
