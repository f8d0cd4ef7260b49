"""The numpy reference: against transformers' stored logits, against itself, and what `golden diff` notices."""

import dataclasses
import json
import struct

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from formats.checkpoint import DENSE, SPARSE, Checkpoint, ModelError
from golden.forward import Fp32, forward, load_weight, permute_rows, rmsnorm, rope
from golden.fp32 import scaled_sum
from golden.perplexity import perplexity, windows
from golden.q8 import Q8, Quantized, accumulators, dequantize, matmul, quantize
from golden.schemes import SCHEMES, read_file
from golden.trace import (
    Recorder,
    Tolerances,
    at_positions,
    compare,
    judge_step,
    read_tolerances,
    relative_error,
    replay,
    step_order,
)
from tests.helpers import DATA, F32, GOLDEN_FILES, ROOT, run_golden, with_header_field
from tests.hf_fixtures import FIXTURES, FOLDER, MOE_FIXTURES


@pytest.mark.parametrize("name", FIXTURES | MOE_FIXTURES)
def test_fp32_forward_agrees_with_transformers(name):
    checkpoint = Checkpoint(FOLDER / name, archs=(*DENSE, *SPARSE))
    expected = load_file(FOLDER / name / "expected.safetensors")
    logits = forward(checkpoint.config, Fp32(checkpoint), expected["tokens"])
    assert np.abs(expected["logits"]).max() > 1  # the tolerance below means something
    assert np.abs(logits - expected["logits"]).max() <= 1e-4


class NotPermuted(Fp32):
    """Rotates adjacent pairs of rows that are in Hugging Face's order."""

    def load(self, name):
        return load_weight(self._checkpoint, name, interleaved=False)


@pytest.mark.parametrize("name", FIXTURES)
def test_rotating_adjacent_pairs_of_permuted_rows_is_the_same_rotation(name):
    checkpoint = Checkpoint(FOLDER / name)
    tokens = load_file(FOLDER / name / "expected.safetensors")["tokens"]
    halves = forward(checkpoint.config, Fp32(checkpoint), tokens)
    pairs = forward(checkpoint.config, Fp32(checkpoint, interleaved=True), tokens)
    assert relative_error(halves, pairs) < 1e-6
    mixed = forward(checkpoint.config, NotPermuted(checkpoint, interleaved=True), tokens)
    assert relative_error(halves, mixed) > 1e-2


def test_every_part_of_the_config_matters(tmp_path):
    """The fixtures would notice a reference that ignores a field."""
    for name, field, value in [
        ("llama-scaled-rope", "rope_scaling", None),
        ("llama-gqa-tied", "rope_theta", 10000.0),
        ("llama-gqa-tied", "rms_norm_eps", 1e-2),
        ("qwen3-gqa-untied", "rope_theta", 500000.0),
        ("qwen3-moe-2-of-8", "norm_topk_prob", False),
        ("qwen3-moe-2-of-8", "num_experts_per_tok", 1),
        ("qwen3-moe-listed-dense", "norm_topk_prob", True),
    ]:
        source = FOLDER / name
        config = json.loads((source / "config.json").read_text()) | {field: value}
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
        checkpoint = Checkpoint(tmp_path, archs=(*DENSE, *SPARSE))
        expected = load_file(source / "expected.safetensors")
        logits = forward(checkpoint.config, Fp32(checkpoint), expected["tokens"])
        assert np.abs(logits - expected["logits"]).max() > 1e-3, (name, field)


def test_rope_keeps_lengths_and_depends_on_distance_only():
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 1, 1, 8)).astype(F32)
    angle = np.array([0.3, 0.1, 0.05, 0.01])
    for interleaved in (False, True):

        def at(x, position, interleaved=interleaved):
            return rope(x, np.cos(position * angle)[None], np.sin(position * angle)[None], interleaved)

        assert np.linalg.norm(at(q, 7)) == pytest.approx(np.linalg.norm(q), rel=1e-6)
        assert (at(q, 9) * at(k, 4)).sum() == pytest.approx(float((at(q, 25) * at(k, 20)).sum()), rel=1e-4)


def test_permute_rows_by_hand():
    rows = np.arange(12).reshape(12, 1)  # two heads of 6: halves (0, 1, 2) and (3, 4, 5)
    assert permute_rows(rows, 6).ravel().tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


def test_rmsnorm_by_hand():
    out = rmsnorm(np.array([[3.0, 4.0]], F32), np.array([2.0, 1.0], F32), 0.0)
    assert out[0].tolist() == pytest.approx([6 / 12.5**0.5, 4 / 12.5**0.5])


# ---- quantizing


def test_quantize_by_hand():
    x = np.array([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -127.0, 126.6]], F32)  # scale 1: ties go to even
    q = quantize(x, 8)
    assert q.codes.tolist() == [[127, 0, 2, 2, 0, -2, -127, 127]]
    assert q.scales.tolist() == [[1.0]]
    q = quantize(np.zeros((2, 16), F32), 8)
    assert not q.codes.any()
    assert q.scales.tolist() == [[0, 0], [0, 0]]
    q = quantize(np.full((1, 8), 1e-38, F32), 8)  # 127 / amax is no fp32 number
    assert not q.codes.any()
    assert q.scales.tolist() == [[0]]


@pytest.mark.parametrize(("bits", "codes"), [(2, [1, 0, -1, 0]), (3, [3, 2, -3, 0]), (4, [7, 4, -7, -1])])
def test_quantize_in_fewer_bits(bits, codes):
    q = quantize(np.array([[2.0, 1.0, -2.0, -0.25]], F32), 4, bits)  # 1.0 lies half way: to even
    assert q.codes.tolist() == [codes]
    assert q.scales.tolist() == [[float(F32(2) / F32(2 ** (bits - 1) - 1))]]


@pytest.mark.parametrize("group_size", [4, 32, 64, 128])
def test_quantization_error_is_at_most_half_a_step(group_size):
    x = (np.random.default_rng(1).standard_normal((50, 256)) * 10.0 ** np.arange(-25, 25)[:, None]).astype(F32)
    q = quantize(x, group_size)
    assert q.codes.min() >= -127
    step = np.repeat(q.scales, group_size, axis=1)
    assert (np.abs(dequantize(q) - x) <= 0.5 * step * (1 + 1e-5)).all()
    assert (np.abs(q.codes.reshape(50, -1, group_size)).max(axis=-1) == 127).all()  # the largest uses the whole range


def test_accumulators_are_exact_integers():
    rng = np.random.default_rng(3)
    for group_size, n in ((64, 256), (4096, 8192)):  # within, and beyond, what fp32 sums exactly
        x = Quantized(rng.integers(-127, 128, (3, n)).astype(np.int8), np.ones((3, n // group_size), F32))
        w = Quantized(np.full((2, n), 127, np.int8), np.ones((2, n // group_size), F32))
        expected = (
            (x.codes[:, None, :].astype(np.int64) * w.codes[None].astype(np.int64))
            .reshape(3, 2, -1, group_size)
            .sum(axis=-1)
        )
        assert np.array_equal(accumulators(x, w), expected)
    assert relative_error(dequantize(x) @ dequantize(w).T, matmul(x, w)) < 1e-6


@pytest.mark.parametrize("group_size", [32, 64, 384])
def test_matmul_has_the_same_bits_in_parts(monkeypatch, group_size):
    rng = np.random.default_rng(3)
    x, w = (quantize(rng.standard_normal((n, 384), np.float32), group_size) for n in (7, 50))
    whole = scaled_sum(accumulators(x, w), w.scales, x.scales)
    sizes = []
    monkeypatch.setattr("golden.q8.accumulators", lambda x, w: sizes.append(len(x.codes)) or accumulators(x, w))
    for rows in (100, 3, 2, 1):
        monkeypatch.setattr("golden.q8.MATMUL_VALUES", rows * w.scales.size)
        assert matmul(x, w).tobytes() == whole.tobytes()
    assert sizes == [7, 3, 3, 1, 2, 2, 2, 1, *[1] * 7]


# ---- golden files


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen3"])
@pytest.mark.parametrize("source", ["directory", "file"])
def test_stored_traces_are_what_the_reference_computes(name, source):
    checkpoint = Checkpoint(ROOT / "models" / name)
    scheme = Q8(checkpoint) if source == "directory" else read_file(GOLDEN_FILES / f"{name}.q8.bin")
    stored = load_file(DATA / f"{name}.q8.trace.safetensors")
    recorder = Recorder()
    tokens = recorder("tokens", stored["tokens"])
    forward(checkpoint.config, scheme, tokens, recorder)
    reports = compare(stored, recorder.tensors)
    assert len(reports) > 4 * 20
    assert all(r.ok for r in reports), [r for r in reports if not r.ok]


@pytest.mark.parametrize("size", [0, -64, 48])
def test_a_q8_file_whose_rows_are_no_whole_groups_is_refused(tmp_path, size):
    data = (GOLDEN_FILES / "tiny-llama.q8.bin").read_bytes()
    end = int.from_bytes(data[0xA0:0xA8], "little")
    blank = data[:0xA0] + struct.pack("<QI", end, 0) + data[0xAC:end]  # no tokenizer
    (tmp_path / "m.bin").write_bytes(with_header_field(blank, 0x25, size))
    done = run_golden("diff", DATA / "tiny-llama.q8.trace.safetensors", DATA / "tiny-llama.q8.trace.safetensors",
                      "--model", tmp_path / "m.bin")  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"golden: {tmp_path / 'm.bin'}: group_size {size} does not divide embed's 128 columns\n"


# ---- golden diff


def a_trace():
    return load_file(DATA / "tiny-llama.q8.trace.safetensors")


def replayed(trace):
    checkpoint = Checkpoint(ROOT / "models" / "tiny-llama")
    scheme = Q8(checkpoint)
    return replay(lambda tokens, step: forward(checkpoint.config, scheme, tokens, step), trace)


def first_bad(reports):
    return next((r.name for r in reports if not r.ok), None)


def test_diff_finds_nothing_between_equal_traces():
    assert first_bad(compare(a_trace(), a_trace())) is None
    assert first_bad(replayed(a_trace())) is None


@pytest.mark.parametrize(
    ("step", "change"),
    [
        ("layers.2.attn.k_rope", lambda x: x * F32(1.0001)),
        ("layers.0.attn.norm.q", lambda x: np.where(np.arange(x.size).reshape(x.shape) == 5, x + 1, x).astype(np.int8)),
        ("layers.3.ffn.swiglu.s", lambda x: x * F32(1.000001)),
        ("logits", lambda x: np.where(x > 0, np.nan, x).astype(F32)),
        ("layers.1.attn.probs", lambda x: np.ascontiguousarray(x[:, ::-1])),
        ("layers.1.ffn.down_proj.acc", lambda x: x + (np.arange(x.size).reshape(x.shape) == 7).astype(np.int32)),
        ("tokens", lambda x: x + 1),
    ],
)
def test_diff_names_the_first_step_that_is_wrong(step, change):
    broken = a_trace()
    broken[step] = change(broken[step])
    assert first_bad(compare(a_trace(), broken)) == step
    if step != "tokens":
        assert first_bad(replayed(broken)) == step


@pytest.mark.parametrize(("step", "at"), [("layers.0.attn.q_proj", 3), ("layers.3.ffn.swiglu.s", 1), ("logits", -1)])
def test_one_unit_in_the_last_place_is_named_and_counted(step, at):
    broken = a_trace()
    broken[step] = broken[step].copy()
    value = broken[step].reshape(-1)
    value[at] = np.nextafter(value[at], F32(np.inf))
    for reports in (compare(a_trace(), broken), replayed(broken)):
        (bad,) = (r for r in reports if r.name == step)
        assert not bad.ok
        assert bad.note == f"1 of {value.size} differ, by up to 1 units in the last place"


def test_zeros_of_two_signs_differ():
    a, b = np.array([0.0, 1.0], F32), np.array([-0.0, 1.0], F32)
    assert not judge_step("x", a, b, 0).ok
    assert judge_step("x", a, a.copy(), 0).ok


def test_a_step_with_a_limit_of_its_own_may_differ():
    step, other = "layers.1.ffn.down_proj.acc", a_trace()
    other[step] = other[step] + (np.arange(other[step].size).reshape(other[step].shape) == 7).astype(np.int32)
    assert first_bad(compare(a_trace(), other)) == step
    assert first_bad(compare(a_trace(), other, Tolerances({step: 0.01}))) is None


def test_the_last_pattern_that_matches_counts():
    limits = read_tolerances(None, ["ffn.*=0.01", "ffn.up_proj=0.0001"])
    assert [limits.of(f"layers.0.ffn.{step}", 0) for step in ("up_proj", "gate_proj")] == [0.0001, 0.01]


def test_a_step_that_the_reference_has_not_is_named():
    trace = a_trace() | {"layers.0.attn.bias": np.zeros(1, F32)}
    assert first_bad(compare(a_trace(), trace)) == first_bad(replayed(trace)) == "layers.0.attn.bias"


def test_accumulators_are_of_one_layer_and_add_up_to_the_products():
    trace = a_trace()
    matrices = Q8(Checkpoint(ROOT / "models" / "tiny-llama"))
    inputs = {"q_proj": "attn.norm", "k_proj": "attn.norm", "v_proj": "attn.norm", "o_proj": "attn.mix"}
    inputs |= {"gate_proj": "ffn.norm", "up_proj": "ffn.norm", "down_proj": "ffn.swiglu"}
    steps = sorted(name for name in trace if name.endswith(".acc"))
    assert len(steps) == 7
    for step in steps:
        _, layer, block, name, _ = step.split(".")
        assert layer == "1"
        base = f"layers.1.{inputs[name]}"
        x, w = Quantized(trace[base + ".q"], trace[base + ".s"]), matrices.matrix(f"layers.1.{block}.{name}")
        assert np.array_equal(trace[step], accumulators(x, w))
        out = (trace[step] * (x.scales[:, None].astype(np.float64) * w.scales[None])).sum(axis=-1)
        assert relative_error(trace[f"layers.1.{block}.{name}"], out.astype(F32)) < 1e-6


# ---- a late decode step


def a_late_trace():
    return load_file(DATA / "tiny-llama.q8.decode.trace.safetensors")


def test_the_late_trace_is_behind_a_page_chunks_and_the_original_context():
    trace, config = a_late_trace(), Checkpoint(ROOT / "models" / "tiny-llama").config
    (position,) = trace["positions"]
    assert position == len(trace["tokens"]) - 1
    assert position > 256 + 32  # beyond a page of the KV cache (engine/cpu/kv_cache.h) and a block of keys
    assert position > 2 * 128  # and two chunks of a prompt
    assert position > 2 * config.rope_scaling.original_max_position_embeddings
    assert trace["layers.0.attn.probs"].shape == (1, config.n_heads, position + 1)
    assert trace["layers.0.attn.k_rope"].shape[0] == position + 1
    assert trace["layers.1.attn.q_proj.acc"].shape[0] == 1


def test_late_steps_are_judged_from_the_traces_own_keys_and_values():
    """With the model everything is exact, earlier tokens' keys and values, too."""
    assert first_bad(replayed(a_late_trace())) is None
    past = a_late_trace()
    step = "layers.2.attn.v_proj"
    past[step] = past[step] * np.where(np.arange(301) < 300, F32(1.03), F32(1))[:, None]
    # What attention makes of it is another mix, and not the stored one.
    assert [r.name for r in replayed(past) if not r.ok][:2] == [step, "layers.2.attn.mix"]
    for step, change in [
        ("layers.3.attn.k_rope", lambda x: x * np.where(np.arange(len(x)) == 300, F32(1.001), F32(1))[:, None, None]),
        ("layers.1.attn.scores", lambda x: x + (np.arange(x.size).reshape(x.shape) == 290) * F32(0.01)),
        ("layers.1.ffn.up_proj.acc", lambda x: x + (np.arange(x.size).reshape(x.shape) == 7).astype(np.int32)),
        ("norm.q", lambda x: x + (np.arange(x.size).reshape(x.shape) == 7).astype(np.int8)),
    ]:
        broken = a_late_trace()
        broken[step] = change(broken[step])
        assert first_bad(replayed(broken)) == step


def test_late_traces_side_by_side():
    assert first_bad(compare(a_late_trace(), a_late_trace())) is None
    broken = a_late_trace()
    early = np.where(np.arange(301) < 300, F32(1.001), F32(1))[:, None]
    for step, change in (("layers.2.ffn.down_proj", F32(1.0001)), ("layers.0.attn.v_proj", early)):
        broken[step] = broken[step] * change
        assert first_bad(compare(a_late_trace(), broken)) == step


def test_a_port_without_rope_scaling_shows_late():
    """The keys' and queries' angles, behind the original context."""
    checkpoint = Checkpoint(ROOT / "models" / "tiny-llama")
    config = dataclasses.replace(checkpoint.config, rope_scaling=None)
    trace, recorder = a_late_trace(), Recorder()
    recorder("tokens", trace["tokens"])
    forward(config, Q8(checkpoint), trace["tokens"], recorder)
    wrong = at_positions(recorder.tensors, trace["positions"])
    assert first_bad(compare(trace, wrong)) == "layers.0.attn.q_rope"
    assert first_bad(replayed(wrong)) == "layers.0.attn.q_rope"


@pytest.mark.parametrize(
    ("positions", "text"),
    [
        ([5, 4], "positions are not ascending numbers from 0 to 5"),
        ([4, 4], "positions are not ascending numbers from 0 to 5"),
        ([4, 6], "positions are not ascending numbers from 0 to 5"),
        ([-1], "positions are not ascending numbers from 0 to 5"),
        ([], "expected a list of whole numbers"),
        ([1.0], "positions are float64 (1,), expected a list of whole numbers"),
    ],
)
def test_positions_are_checked(tmp_path, positions, text):
    save_file(a_trace() | {"positions": np.array(positions)}, tmp_path / "t")
    for a, b in ((DATA / "tiny-llama.q8.trace.safetensors", tmp_path / "t"), (tmp_path / "t", tmp_path / "t")):
        done = run_golden("diff", a, b)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith(f"golden: {tmp_path / 't'}: ")
        assert text in done.stderr


def test_golden_data_stays_small():
    assert sum(path.stat().st_size for path in DATA.iterdir()) < 3.2e6 * len(SCHEMES)


# ---- golden diff names what is wrong


def test_diff_names_missing_steps_and_wrong_shapes():
    broken = a_trace()
    del broken["layers.0.attn.mix"]
    assert first_bad(compare(a_trace(), broken)) == "layers.0.attn.mix"
    broken = a_trace()
    broken["embed"] = broken["embed"][:, :-1]
    assert first_bad(compare(a_trace(), broken)) == "embed"
    assert first_bad(replayed(broken)) == "embed"


def test_replay_judges_each_operation_from_the_traces_own_inputs():
    """An error in one step is not reported again for the steps that follow it correctly."""
    checkpoint = Checkpoint(ROOT / "models" / "tiny-llama")
    recorder = Recorder()

    def broken_step(name, value):
        return recorder(name, value * F32(1.001) if name == "layers.1.attn.v_proj" else value)

    tokens = recorder("tokens", a_trace()["tokens"])
    forward(checkpoint.config, Q8(checkpoint), tokens, broken_step)
    assert [r.name for r in replayed(recorder.tensors) if not r.ok] == ["layers.1.attn.v_proj"]


def test_steps_are_listed_in_the_order_of_computation():
    names = sorted(a_trace(), key=step_order)
    recorder = Recorder()
    checkpoint = Checkpoint(ROOT / "models" / "tiny-llama")
    forward(checkpoint.config, Q8(checkpoint), np.array([1, 2]), recorder)
    assert [n for n in names if n != "tokens"] == list(recorder.tensors)


def test_diff_command(tmp_path):
    trace = DATA / "tiny-llama.q8.trace.safetensors"
    done = run_golden("diff", trace, trace)
    assert done.returncode == 0
    assert "are equal to the bit" in done.stdout
    broken = a_trace()
    broken["layers.2.ffn.norm"] = broken["layers.2.ffn.norm"] * F32(1.01)
    save_file(broken, tmp_path / "broken")
    for model in (ROOT / "models" / "tiny-llama", GOLDEN_FILES / "tiny-llama.q8.bin"):
        assert run_golden("diff", trace, trace, "--model", model).returncode == 0
        done = run_golden("diff", trace, tmp_path / "broken", "--model", model)
        assert done.returncode == 1
        assert "the first at layers.2.ffn.norm" in done.stdout
    done = run_golden("diff", trace, trace, "--model", model, "--attn", "int8")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"golden: {model}: is a q8 file, expected w8a8\n"
    for bad in (tmp_path / "absent", ROOT / "Makefile"):
        done = run_golden("diff", trace, bad)
        assert done.returncode == 1
        assert done.stderr.startswith(f"golden: {bad}: ")
        assert done.stderr.count("\n") == 1


# ---- perplexity


def test_perplexity_by_hand():
    assert [w.tolist() for w in windows([1, 2, 3, 4, 5], None, 2)] == [[1, 2], [3, 4], [5]]
    assert [w.tolist() for w in windows([1, 2, 3, 4, 5], 9, 3)] == [[9, 1, 2], [9, 3, 4], [9, 5]]
    p = np.array([0.5, 0.25, 0.25])

    def logits(ids):
        return np.tile(np.log(p).astype(F32), (len(ids), 1))

    value, n = perplexity(logits, [0, 1, 0, 0], None, 4)
    assert n == 3
    assert value == pytest.approx((0.25 * 0.5 * 0.5) ** (-1 / 3), rel=1e-6)
    with pytest.raises(ValueError, match="no token to score"):
        perplexity(logits, [1], None, 4)


# ---- directories that are refused


def config_of(name="llama-gqa-tied", **changes):
    return json.loads((FOLDER / name / "config.json").read_text()) | changes


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_type": "mistral"}, 'model_type is "mistral": supported are llama and qwen3'),
        ({"attention_bias": True}, "attention_bias is true: not supported"),
        ({"use_sliding_window": True, "max_window_layers": 1}, "use_sliding_window is true: not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "only full_attention is supported"),
        ({"layer_types": 5}, "layer_types is 5: only full_attention is supported"),
        ({"layer_types": [["a"], 5]}, "only full_attention is supported"),
        ({"rope_scaling": "x"}, 'rope_scaling is "x": expected an object'),
        ({"rope_parameters": [1]}, "rope_parameters is [1]: expected an object"),
        ({"rope_theta": float("inf")}, "rope_theta is Infinity: expected a positive number"),
        ({"quantization_config": "awq"}, 'quantization_config is "awq": expected an object'),
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu": only silu is supported'),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, 'rope_scaling.rope_type is "longrope"'),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, 'rope_scaling.rope_type is "dynamic"'),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor is missing"),
        ({"quantization_config": {"quant_method": "awq"}}, 'quant_method is "awq"'),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": -64}, "hidden_size is -64: expected a positive whole number"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3: does not divide num_attention_heads 4"),
        ({"hidden_size": 32}, "config.json implies"),
    ],
)
def test_configs_that_cannot_run_are_refused_by_name(tmp_path, changes, text):
    (tmp_path / "config.json").write_text(json.dumps(config_of(**changes)))
    (tmp_path / "model.safetensors").write_bytes((FOLDER / "llama-gqa-tied" / "model.safetensors").read_bytes())
    with pytest.raises(ModelError) as error:
        Checkpoint(tmp_path)
    assert text in str(error.value)
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


def test_both_layouts_of_the_rope_fields_are_read(tmp_path):
    """transformers 4 writes rope_theta and rope_scaling, transformers 5 one object rope_parameters."""
    config = config_of("llama-scaled-rope")
    expected = Checkpoint(FOLDER / "llama-scaled-rope").config
    parameters = config.pop("rope_scaling") | {"rope_theta": config.pop("rope_theta")}
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_parameters": parameters}))
    weights = (FOLDER / "llama-scaled-rope" / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights)
    assert Checkpoint(tmp_path).config == expected


def test_bad_weights_are_refused(tmp_path):
    source = FOLDER / "llama-gqa-tied"
    weights = load_file(source / "model.safetensors")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())

    def refused(text):
        with pytest.raises(ModelError) as error:
            checkpoint = Checkpoint(tmp_path)
            checkpoint.tensor("model.norm.weight")
        assert text in str(error.value)

    refused("model.safetensors: no such file")
    (tmp_path / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    refused("model.safetensors: ")
    save_file({k: v for k, v in weights.items() if "layers.1.mlp.up" not in k}, tmp_path / "model.safetensors")
    refused("tensor model.layers.1.mlp.up_proj.weight is missing")
    save_file(weights | {"model.norm.weight": np.ones(64, np.int32)}, tmp_path / "model.safetensors")
    refused("has type I32, supported are F32, F16 and BF16")
    save_file(weights | {"model.norm.weight": np.full(64, np.nan, F32)}, tmp_path / "model.safetensors")
    refused("has values that are not finite")
    (tmp_path / "model.safetensors").unlink()  # it would be taken alone
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(weights, "absent.safetensors")})
    )
    refused("absent.safetensors: no such file")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": 5}}))
    refused("index.json: weight_map.model.norm.weight is 5, expected the name of a file")


def test_tensors_that_would_be_left_out_are_refused(tmp_path):
    source = FOLDER / "llama-gqa-tied"
    weights = load_file(source / "model.safetensors")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())

    def opened(*extra):
        values = {name: np.zeros(2, F32) for name in extra}
        if "lm_head.weight" in extra:
            values["lm_head.weight"] = weights["model.embed_tokens.weight"]
        save_file(weights | values, tmp_path / "model.safetensors")
        return Checkpoint(tmp_path)

    opened("model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq", "lm_head.weight", "extra")
    layer = "model.layers.1."
    for name in (layer + "self_attn.q_proj.bias", layer + "mlp.up_proj.g_idx", "model.layers.2.x", "lm_head.bias"):
        with pytest.raises(ModelError) as error:
            opened(name)
        assert str(error.value) == f"{tmp_path / 'model.safetensors'}: tensor {name} is not supported"
    with pytest.raises(ModelError) as error:
        opened(layer + "mlp.up_proj.g_idx", layer + "mlp.up_proj.qweight")
    assert str(error.value) == (
        f"{tmp_path / 'config.json'}: quantization_config is missing, though there is a tensor "
        f"{layer}mlp.up_proj.qweight (older versions of AutoAWQ wrote quant_config.json instead)"
    )


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_shards_and_types(tmp_path, dtype):
    """fp32, fp16 and bf16, in two shards, give the values of one file."""
    source = FOLDER / "qwen3-gqa-untied"
    weights = {
        k: v.astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))
        for k, v in load_file(source / "model.safetensors").items()
    }
    names = sorted(weights)
    weight_map = {}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"model-0000{i + 1}-of-00002.safetensors"
        save_file({n: weights[n] for n in part}, tmp_path / file)
        weight_map |= dict.fromkeys(part, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    checkpoint = Checkpoint(tmp_path)
    for name in names:
        value = checkpoint.tensor(name)
        assert value.dtype == F32
        assert np.array_equal(value, weights[name].astype(F32))
