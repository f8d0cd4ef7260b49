"""AWQ: packing and rounding by hand, the search for scales and clipping, the file byte by byte, AutoAWQ's checkpoints,
goldens and traces, and what is refused."""

import json
import re
import resource
import shutil
import struct
import subprocess
import sys
import warnings
import weakref
import zlib
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from export.__main__ import main
from export.awq import export_awq
from golden import awq_search, smooth
from golden.awq import (
    AWQ,
    GROUP_SIZES,
    HEAD_DIMS,
    NIBBLE,
    Packed,
    dequantize,
    group_range,
    matmul,
    pack,
    pack_matrix,
    quantize,
    unpack,
)
from golden.awq_search import RATIOS, SHRINKS, choose_scale, clip, factors, rounded, spaced
from golden.checkpoint import Checkpoint, ModelError, tensor_shapes
from golden.forward import Fp32, forward, hf_name
from golden.make import AWQ_MATMULS, AWQ_VARIANTS, Noisy, awq_op_vectors, export_variant
from golden.perplexity import encode, perplexity
from golden.smooth import CONSUMERS, PLACES, Inputs, Smoothed, calibration_samples, describe, observe, share, spread
from golden.trace import Recorder, compare, relative_error, replay, step_order, write_trace
from models.outliers import copy_with_outliers
from tests.hf_fixtures import FIXTURES, FOLDER

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / "models"
DATA = ROOT / "golden" / "data"
CALIBRATION = MODELS / "calibration.txt"
TINY = ("tiny-llama", "tiny-qwen3")
F16, F32, F64 = np.float16, np.float32, np.float64


# ---- packing


def test_packing_is_autoawqs_order():
    """Spelled out as AutoAWQ does: bit 4 i of a word takes channel [0, 2, 4, 6, 1, 3, 5, 7][i] of its eight."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    codes = np.random.default_rng(0).integers(0, 16, (7, 40))
    words = pack(codes)
    assert (words.shape, words.dtype) == ((7, 5), np.int32)
    for row in range(7):
        for word in range(5):
            expected = 0
            for i in range(8):
                expected |= int(codes[row, 8 * word + order[i]]) << (4 * i)
            assert int(words[row, word]) & 0xFFFFFFFF == expected
    assert [order[n] for n in NIBBLE] == list(range(8))


def test_packing_and_weights_are_what_autoawq_itself_makes():
    """tests/autoawq_fixture.py ran AutoAWQ's own code."""
    theirs = load_file(FOLDER / "autoawq.safetensors")
    weight, scales = theirs["weight"], theirs["scales"]
    zeros = unpack(theirs["qzeros"])
    steps = weight.T.reshape(len(scales), -1, len(weight)) / scales[:, None].astype(F32)
    codes = (np.rint(steps) + zeros[:, None]).astype(np.uint8).reshape(weight.T.shape)
    assert np.array_equal(pack(codes), theirs["qweight"])
    assert np.array_equal(pack(zeros), theirs["qzeros"])
    w16 = dequantize(Packed(theirs["qweight"], theirs["qzeros"], scales))
    assert np.array_equal(w16.view(np.uint16), theirs["dequantized"].view(np.uint16))


def test_packing_by_hand():
    """Channels 0..7 with codes 0..7: from the highest nibble, 7 5 3 1 6 4 2 0."""
    assert pack(np.arange(8)[None]).view(np.uint32)[0, 0] == 0x75316420
    assert pack(np.array([[0, 15, 0, 0, 0, 0, 0, 0]])).view(np.uint32)[0, 0] == 0x000F0000
    assert pack(np.array([[0, 0, 0, 0, 0, 0, 0, 15]]))[0, 0] == -(1 << 28)


def test_unpacking_is_the_inverse():
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 16, (33, 136)).astype(np.uint8)
    assert np.array_equal(unpack(pack(codes)), codes)
    words = rng.integers(-(2**31), 2**31, (5, 9)).astype(np.int32)
    assert np.array_equal(pack(unpack(words)), words)
    assert np.array_equal(unpack(words[:, ::2]), unpack(words.copy()[:, ::2].copy()))  # strided, as a slice of a file


# ---- quantizing


def group_of(*values):
    """A matrix of one group of 64 that begins with the values; the rest are zeros."""
    weight = np.zeros((1, 64), F32)
    weight[0, : len(values)] = values
    return weight


def plain(weight, group_size=64):
    return quantize(weight, *group_range(weight, group_size))


def stands_for(matrix):
    """What a quantized matrix is, (n_out, n_in) fp16, computed weight by weight."""
    size = matrix.codes.shape[1] // matrix.scales.shape[1]
    scales = np.repeat(matrix.scales, size, axis=1).astype(F64)
    zeros = np.repeat(matrix.zeros, size, axis=1).astype(int)
    return ((matrix.codes.astype(int) - zeros) * scales).astype(F16)


def test_quantize_by_hand():
    q = plain(group_of(-2.0, 13.0, 0.5, 1.5, 2.5, -0.5, -1.5))  # scale 1, zero point 2; ties go to even
    assert (q.scales.tolist(), q.zeros.tolist()) == ([[1.0]], [[2]])
    assert q.codes[0, :8].tolist() == [0, 15, 2, 4, 4, 2, 0, 2]
    q = plain(group_of(-0.15, 0.0, 0.15))
    assert q.scales[0, 0] == F16(F32(0.3) / F32(15))  # fp16's scale is a little off 0.02
    assert q.zeros[0, 0] == 7  # 7.5 of these scales, a little less
    codes = np.rint(F32([-0.15, 0, 0.15]) / F32(q.scales[0, 0])) + 7
    assert q.codes[0, :3].tolist() == np.clip(codes, 0, 15).tolist()


def test_codes_are_those_of_the_stored_scale():
    """Rounded by the fp16 scale: with the fp32 one, some would differ."""
    weight = np.random.default_rng(2).standard_normal((64, 512)).astype(F32)
    q = plain(weight, 128)
    groups = weight.reshape(64, 4, 128)
    low, high = groups.min(axis=-1), groups.max(axis=-1)
    assert np.array_equal(q.scales, ((high - low) / F32(15)).astype(F16))
    scales = q.scales.astype(F32)
    zeros = np.clip(np.rint(-low / scales), 0, 15)
    assert np.array_equal(q.zeros, zeros)
    for scale, same in ((scales, True), ((high - low) / F32(15), False)):
        codes = np.clip(np.rint(groups / scale[..., None]) + zeros[..., None], 0, 15).reshape(weight.shape)
        assert np.array_equal(q.codes, codes) == same
    error = np.abs(stands_for(q).astype(F32) - weight).reshape(groups.shape).max(axis=-1)
    assert (error <= 1.01 * scales).all()  # half a step; at the ends, where the zero point is rounded, up to one
    assert np.median(error / scales) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize(
    ("values", "scale", "zero"),
    [
        (np.zeros(64), 0.0, 0),
        (np.full(64, -0.0), 0.0, 0),
        (np.full(64, 3.75), 0.25, 0),  # constant: code 15
        (np.full(64, -3.75), 0.25, 15),  # code 0
        (np.linspace(1, 3.75, 64), 0.25, 0),  # of one sign: the range goes on to 0
        (np.linspace(-3.75, -1, 64), 0.25, 15),
        (np.full(64, 1e-10), 0.0, 0),  # no fp16 scale
        (np.full(64, -1e-40), 0.0, 0),
        (np.where(np.arange(64) % 2, 15 * 2.0**-24, 0), 2.0**-24, 0),  # fp16's smallest
        (np.where(np.arange(64) % 2, 60000.0, 0), 4000.0, 0),
    ],
)
def test_groups_out_of_the_ordinary(values, scale, zero):
    q = plain(values.astype(F32)[None])
    assert (q.scales[0, 0], q.zeros[0, 0]) == (F16(scale), zero)
    assert q.codes.max() <= 15
    w16 = dequantize(pack_matrix(plain(np.tile(values.astype(F32), (8, 1)))))
    assert np.isfinite(w16).all()
    assert np.abs(w16[:, 0] - values).max() <= max(0.5 * float(F16(scale)) * 1.001, 1e-9)
    if len(set(values.tolist())) == 1 and scale:
        assert (w16 == F16(values[0])).all()


@pytest.mark.parametrize("value", [65600.0, -70000.0, 1e30, 3e38])
def test_weights_beyond_fp16_are_an_overflow(value):
    with pytest.raises(OverflowError, match="weights of"):
        plain(group_of(value, 1.0))


# ---- dequantizing and products


@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_dequantization_to_the_bit(group_size):
    """Against fp16((q - z) * s) one number at a time, in Python's own arithmetic."""
    rng = np.random.default_rng(3)
    k, n = 2 * group_size, 24
    codes, zeros = rng.integers(0, 16, (k, n)), rng.integers(0, 16, (2, n))
    scales = (rng.uniform(0.5, 2, (2, n)) * 10.0 ** rng.integers(-8, 4, (2, n))).astype(F16)
    w16 = dequantize(Packed(pack(codes), pack(zeros), scales))
    assert (w16.shape, w16.dtype) == ((k, n), F16)
    for i in range(k):
        for j in range(n):
            exact = (int(codes[i, j]) - int(zeros[i // group_size, j])) * float(scales[i // group_size, j])
            assert w16[i, j].tobytes() == F16(exact).tobytes() or (w16[i, j] == 0 == F16(exact))


def test_a_quantized_matrix_survives_packing():
    weight = np.random.default_rng(4).standard_normal((40, 256)).astype(F32)
    q = plain(weight, 128)
    packed = pack_matrix(q)
    assert [(p.shape, p.dtype) for p in packed] == [((256, 5), np.int32), ((2, 5), np.int32), ((2, 40), F16)]
    assert np.array_equal(dequantize(packed), stands_for(q).T)


def test_products_sum_without_rounding():
    rng = np.random.default_rng(5)
    x, w = rng.standard_normal((3, 256)).astype(F16), rng.standard_normal((256, 16)).astype(F16)
    expected = [[sum(float(a) * float(b) for a, b in zip(row, column, strict=True)) for column in w.T] for row in x]
    assert np.array_equal(matmul(x, w), np.array(expected).astype(F32))


# ---- scales


def test_factors_by_hand():
    mean = np.array([4.0, 1.0, 0.25, 0.0], F32)
    assert factors(mean, 0.0).tolist() == [1, 1, 1, 1]
    assert factors(mean, 0.5).tolist() == [2, 1, 0.5, 1]  # the largest and the smallest are each other's inverse
    assert factors(mean * 100, 0.5) == pytest.approx(factors(mean, 0.5))
    assert factors(np.zeros(3, F32), 0.5).tolist() == [1, 1, 1]
    assert (RATIOS[0], RATIOS[-1], len(RATIOS)) == (0, 0.95, 20)
    assert (SHRINKS[0], SHRINKS[-1]) == (1, 0.5)


def test_means_are_those_of_the_plain_forward_pass():
    checkpoint = Checkpoint(FOLDER / "llama-gqa-tied")
    rng = np.random.default_rng(7)
    samples = [rng.integers(0, checkpoint.config.vocab_size, n) for n in (30, 21, 5)]
    found = {}
    for _, seen in observe(checkpoint, samples, 10**6):
        found |= seen
    for name, inputs in found.items():
        assert inputs.mean == pytest.approx(np.abs(inputs.rows).mean(axis=0, dtype=F64), rel=1e-6), name
        assert inputs.mean.dtype == F32


def test_rounded_is_what_quantizing_gives():
    weight = np.random.default_rng(8).standard_normal((30, 256)).astype(F32)
    weight[3, :128] = 0
    weight[4, :128] = np.abs(weight[4, :128])
    for group_size in GROUP_SIZES:
        found = rounded(weight.copy(), group_size)
        assert np.array_equal(found.astype(F16), stands_for(plain(weight, group_size)))


class Layer:
    """Weights of one layer, as `choose_scale` asks for them."""

    def __init__(self, **weights):
        self._weights = {name.replace("_proj", "").replace("__", "."): w for name, w in weights.items()}

    def vector(self, name):
        return self._weights[name.removeprefix("layers.0.").removesuffix("_proj")]


def output_error(x, weight, group_size, s=1):
    """Of the product, with the weight rounded after scaling: relative, by norm."""
    matrix = plain((weight * s).astype(F32), group_size)
    return relative_error(x @ weight.T, (x / s) @ stands_for(matrix).astype(F64).T)


def test_a_planted_outlier_is_found_and_protected():
    """One input channel is 60 times as large as the others. Its scale goes up, and the error down."""
    rng = np.random.default_rng(9)
    config = Checkpoint(MODELS / "tiny-llama").config
    x = rng.standard_normal((300, 128)).astype(F32)
    x[:, 37] *= 60
    gate, up = (rng.standard_normal((64, 128)).astype(F32) for _ in range(2))
    inputs = Inputs(np.abs(x).max(axis=0), np.abs(x).mean(axis=0), x)
    ratio, s = choose_scale(config, "layers.0.ffn.norm", inputs, Layer(ffn__gate=gate, ffn__up=up), 128)
    assert ratio > 0.3
    assert s.argmax() == 37
    assert s[37] > 4 * np.delete(s, 37).max()
    for weight in (gate, up):
        assert output_error(x, weight, 128, s) < 0.5 * output_error(x, weight, 128)
        column = rounded((weight * s).astype(F32), 128)[:, 37] / s[37] - weight[:, 37]
        unscaled = rounded(weight.copy(), 128)[:, 37] - weight[:, 37]
        assert np.abs(column).mean() < 0.4 * np.abs(unscaled).mean()


def test_even_channels_are_left_alone():
    rng = np.random.default_rng(10)
    x = np.where(rng.random((200, 128)) < 0.5, -1, 1).astype(F32)  # the same mean everywhere
    config = Checkpoint(MODELS / "tiny-llama").config
    inputs = Inputs(np.abs(x).max(axis=0), np.abs(x).mean(axis=0), x)
    layer = Layer(ffn__gate=rng.standard_normal((16, 128)).astype(F32), ffn__up=np.ones((16, 128), F32))
    assert choose_scale(config, "layers.0.ffn.norm", inputs, layer, 128) == (0.0, None)


def test_large_matrices_are_judged_by_some_of_their_rows():
    weight = np.arange(50)[:, None]
    assert spaced(weight, 50) is weight
    assert spaced(weight, 8).ravel().tolist() == [0, 7, 14, 21, 28, 35, 42, 49]


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("name", TINY)
def test_the_ratio_with_the_smallest_error_is_taken(name, group_size):
    checkpoint, samples = calibrate(name)
    config = checkpoint.config
    for weights, seen in observe(checkpoint, samples, 64):
        if "norm" in seen:
            continue
        for step, inputs in seen.items():
            place = step.split(".", 2)[-1]
            matrices = [weights.vector(step.removesuffix(place) + c) for c in CONSUMERS[place]]
            mean = share(config, place, inputs.mean)
            errors = []
            for ratio in RATIOS:
                s = spread(config, place, factors(mean, ratio))
                x = inputs.rows.astype(F64)
                errors.append(
                    sum(
                        (((x / s) @ rounded((w * s).astype(F32), group_size).T.astype(F64) - x @ w.T) ** 2).sum()
                        for w in matrices
                    )
                )
            ratio, s = choose_scale(config, step, inputs, weights, group_size)
            assert errors[RATIOS.index(ratio)] <= min(errors) * (1 + 1e-4), step
            assert (s is None) == (ratio == 0)
            if place == "attn.mix" and s is not None:
                assert s.shape == (config.kv_dim,)  # shared by the query heads of a kv head


# ---- clipping


def test_clipping_gives_up_weights_that_hardly_matter():
    """Two large weights meet inputs that are nearly 0: the others get a grid that is twice as fine."""
    rng = np.random.default_rng(11)
    weight = rng.uniform(-1, 1, (8, 128)).astype(F32)
    weight[:, 5], weight[:, 90] = 2, -2
    x = rng.standard_normal((256, 128)).astype(F32)
    x[:, [5, 90]] *= 1e-3
    low, high = clip(weight, x, 128)
    assert (high <= 1.2).all()
    assert (low >= -1.2).all()
    error = relative_error(x @ weight.T, x @ stands_for(quantize(weight, low, high)).T.astype(F64))
    assert error < 0.7 * output_error(x, weight, 128)
    x[:, [5, 90]] *= 1e4  # now they are what counts
    low, high = clip(weight, x, 128)
    assert (high > 1.9).all()


@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_each_group_gets_its_best_range(group_size):
    rng = np.random.default_rng(12)
    weight = (rng.standard_normal((600, 128)) * rng.standard_exponential((600, 128))).astype(F32)  # long tails
    x = rng.standard_normal((100, 128)).astype(F32)
    low, high = clip(weight, x, group_size)
    full_low, full_high = group_range(weight, group_size)
    share_of_range = high / full_high
    assert 0.5 <= share_of_range.min() < 0.85
    assert share_of_range.max() == 1
    assert np.allclose(low / full_low, share_of_range)
    for row in (0, 299, 511, 512, 599):
        for g in range(128 // group_size):
            columns = slice(g * group_size, (g + 1) * group_size)
            w, errors = weight[row : row + 1, columns], []
            for shrink in SHRINKS:
                q = quantize(
                    w,
                    full_low[row : row + 1, g : g + 1] * F32(shrink),
                    full_high[row : row + 1, g : g + 1] * F32(shrink),
                )
                d = (q.codes.astype(F64) - q.zeros) * q.scales.astype(F64) - w
                errors.append(float(((x[:, columns] @ d.T) ** 2).sum()))
            best = SHRINKS[int(np.argmin(errors))]
            assert share_of_range[row, g] == pytest.approx(best), (row, g)


# ---- whole layers and models


def calibrate(name):
    checkpoint = Checkpoint(MODELS / name)
    return checkpoint, calibration_samples(checkpoint.path, checkpoint.config, CALIBRATION.read_text(), 4, 128)


def calibration(n_samples, seq_len):
    """Options of `export_awq`."""
    return {"calibration": CALIBRATION, "n_samples": n_samples, "seq_len": seq_len}


def export_tiny(hf_dir, out, **options):
    export_awq(hf_dir, out, progress=False, **({} if options.get("rtn") else calibration(4, 128)), **options)
    return AWQ(out)


@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize("name", TINY)
def test_awq_beats_plain_rounding_in_layer_error(tmp_path, name, outliers):
    """Each layer alone, from the unquantized model's own input, on text that was not calibrated on."""
    hf_dir = MODELS / name
    if outliers:
        hf_dir = tmp_path / "model"
        copy_with_outliers(MODELS / name, hf_dir)
    checkpoint = Checkpoint(hf_dir)
    config = checkpoint.config
    schemes = [export_tiny(hf_dir, tmp_path / f"{rtn}.bin", rtn=rtn) for rtn in (True, False)]
    text = (MODELS / "held_out.txt").read_text()[:3000]
    (tokens,) = calibration_samples(hf_dir, config, text, 1, 200)
    exact = Recorder()
    forward(config, Fp32(checkpoint), tokens, exact)
    errors = np.zeros((2, config.n_layers))
    for which, scheme in enumerate(schemes):
        for i in range(config.n_layers):
            before = "embed" if i == 0 else f"layers.{i - 1}.ffn.residual"

            def step(step_name, value, i=i, before=before):
                return exact.tensors[before] if step_name == before else value

            found = Recorder()
            forward(config, scheme, tokens, lambda n, v, s=step, f=found: s(n, f(n, v)))
            after, x = (t[f"layers.{i}.ffn.residual"] for t in (exact.tensors, found.tensors))
            errors[which, i] = relative_error(after - exact.tensors[before], x - exact.tensors[before])
    plain_rounding, awq = errors
    assert awq.mean() < (0.65 if outliers else 0.95) * plain_rounding.mean()
    assert (awq < plain_rounding * (0.75 if outliers else 1.1)).all(), errors


@pytest.mark.parametrize("name", TINY)
def test_scaling_alone_changes_nothing(tmp_path, name):
    checkpoint, samples = calibrate(name)
    found = export_awq(checkpoint.path, tmp_path / "m.bin", CALIBRATION, n_samples=4, seq_len=128, progress=False)
    assert len(found.alphas) == 4 * checkpoint.config.n_layers
    assert found.s.keys() == {place for place, ratio in found.alphas.items() if ratio}
    plain_logits = forward(checkpoint.config, Fp32(checkpoint), samples[0])
    scaled = forward(checkpoint.config, Smoothed(checkpoint, found), samples[0])
    assert np.abs(scaled - plain_logits).max() <= 1e-4 * np.abs(plain_logits).max()
    largest = {}
    for sample in samples:
        recorder = Recorder()
        forward(checkpoint.config, Smoothed(checkpoint, found), sample, recorder)
        largest |= {name: max(largest.get(name, 0), np.abs(recorder.tensors[name]).max()) for name in found.largest}
    assert len(largest) == 4 * checkpoint.config.n_layers + 1
    assert found.largest == pytest.approx(largest, rel=1e-5)
    lines = list(describe(found, verbose=True, what="ratio"))
    assert sum(line.split()[:2] == [place, "ratio"] for line in lines for place in PLACES) == 4


@pytest.mark.parametrize("name", [*TINY, *(name for name, c in FIXTURES.items() if c["head_dim"] in HEAD_DIMS)])
def test_logits_are_those_of_the_dequantized_model(tmp_path, name):
    """The dequantized weights as an ordinary Hugging Face model in fp32: what differs is the fp16 in between."""
    source = (MODELS if name in TINY else FOLDER) / name
    export_awq(source, tmp_path / "m.bin", rtn=True, group_size=64, with_tokenizer=False, progress=False)
    scheme, weights = AWQ(tmp_path / "m.bin"), {}
    for hf, shape in tensor_shapes(scheme.config).items():
        step = next(s for s in all_steps(scheme.config) if hf_name(scheme.config, s) == hf)
        value = scheme.weight(step).T if len(shape) == 2 and step != "embed" else scheme.tensor(step)
        weights[hf] = np.ascontiguousarray(value)
        assert (weights[hf].shape, weights[hf].dtype) == (shape, F16)
    hf_dir = tmp_path / "hf"
    hf_dir.mkdir()
    shutil.copy(source / "config.json", hf_dir)
    save_file(weights, hf_dir / "model.safetensors")
    checkpoint, tokens = Checkpoint(hf_dir), np.arange(20) * 7
    exact, found = forward(checkpoint.config, Fp32(checkpoint), tokens), forward(scheme.config, scheme, tokens)
    assert 1e-6 < np.abs(found - exact).max() / np.abs(exact).max() < 5e-3


def all_steps(config):
    yield from ("embed", "norm", "classifier")
    for i in range(config.n_layers):
        parts = ("norm", "q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
        yield from (f"layers.{i}.attn.{p}" for p in parts)
        yield from (f"layers.{i}.ffn.{p}" for p in ("norm", "gate_proj", "up_proj", "down_proj"))


@pytest.mark.parametrize("name", TINY)
def test_perplexity_with_outliers(tmp_path, name):
    """On part of the held-out text, calibrated as for the golden files: `python -m models.compare_schemes` in short."""
    hf_dir = tmp_path / "model"
    copy_with_outliers(MODELS / name, hf_dir)
    checkpoint = Checkpoint(hf_dir)
    ids, bos = encode(hf_dir, (MODELS / "held_out.txt").read_text()[:16000])
    found = []
    for options in (None, {"rtn": True}, {}, {"group_size": 64}):
        scheme = Fp32(checkpoint)
        if options is not None:
            options = options if "rtn" in options else options | calibration(16, 256)
            export_awq(hf_dir, tmp_path / "m.bin", progress=False, **options)
            scheme = AWQ(tmp_path / "m.bin")
        found.append(perplexity(partial(forward, checkpoint.config, scheme), ids, bos, 512)[0])
    fp32, rtn, awq, awq_64 = found
    assert rtn > 1.05 * fp32
    assert awq < 1.03 * fp32
    assert awq_64 < 1.03 * fp32


# ---- the file


def take(data, position, dtype, *shape):
    """An array at a byte of the file, and the byte behind it."""
    n = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(data[position : position + n], dtype).reshape(shape), position + n


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("name", TINY)
def test_the_file_byte_by_byte(tmp_path, name, group_size):
    """Header and order of the tensors as the format's own description has them, read with struct and numpy."""
    out = tmp_path / "m.bin"
    export_tiny(MODELS / name, out, rtn=True, group_size=group_size)
    data, checkpoint = out.read_bytes(), Checkpoint(MODELS / name)
    c, fp32 = checkpoint.config, Fp32(checkpoint)
    magic, version, *dims = struct.unpack_from("<Ii7i", data, 0)
    assert (magic, version) == (0x616B3438, 5)
    assert dims == [c.dim, c.hidden_dim, c.n_layers, c.n_heads, c.n_kv_heads, c.vocab_size, c.max_seq_len]
    assert struct.unpack_from("<Bii", data, 0x24) == (int(c.tied), c.head_dim, group_size)
    assert data[0x2D:0x40] == bytes(19)
    arch, head_dim, ext_group, eps, theta = struct.unpack_from("<Iiiff", data, 0x44)
    assert (arch, head_dim, ext_group) == ({"llama": 1, "qwen3": 2}[c.arch], c.head_dim, group_size)
    assert (eps, theta) == (F32(c.norm_eps), F32(c.rope_theta))
    offset, size, checksum, activations = struct.unpack_from("<QQIi", data, 0xA0)
    assert (offset + size, activations) == (len(data), 0)
    assert data[0xB8:0x100] == bytes(72)
    assert checksum == zlib.crc32(data[offset:], zlib.crc32(data[:0xB0] + bytes(4) + data[0xB4:0x100]))

    position, layers = 256, range(c.n_layers)

    def vectors(part, length):
        nonlocal position
        for i in layers:
            found, position = take(data, position, "<f2", length)
            assert np.array_equal(found, fp32.vector(f"layers.{i}.{part}").astype(F16)), part

    vectors("attn.norm", c.dim)
    vectors("ffn.norm", c.dim)
    found, position = take(data, position, "<f2", c.dim)
    assert np.array_equal(found, fp32.vector("norm").astype(F16))
    found, position = take(data, position, "<f2", c.vocab_size, c.dim)
    assert np.array_equal(found, fp32.vector("embed").astype(F16))
    for part in ("attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.o_proj",
                 "ffn.gate_proj", "ffn.down_proj", "ffn.up_proj"):  # fmt: skip
        for i in layers:
            weight = fp32.vector(f"layers.{i}.{part}")
            n_out, n_in = weight.shape
            expected = plain(weight, group_size)
            qweight, position = take(data, position, "<u4", n_in, n_out // 8)
            qzeros, position = take(data, position, "<u4", n_in // group_size, n_out // 8)
            scales, position = take(data, position, "<f2", n_in // group_size, n_out)
            for channel, nibble in enumerate((0, 4, 1, 5, 2, 6, 3, 7)):
                assert np.array_equal((qweight >> (4 * nibble)) & 15, expected.codes.T[:, channel::8])
                assert np.array_equal((qzeros >> (4 * nibble)) & 15, expected.zeros.T[:, channel::8])
            assert np.array_equal(scales, expected.scales.T)
    if not c.tied:
        found, position = take(data, position, "<f2", c.vocab_size, c.dim)
        assert np.array_equal(found, fp32.vector("classifier").astype(F16))
    if c.arch == "qwen3":
        vectors("attn.q_norm", c.head_dim)
        vectors("attn.k_norm", c.head_dim)
    assert position == offset


def test_a_file_without_extension_is_a_qwen3(tmp_path):
    """As another program writes it: nothing behind byte 0x2D of the header, no tokenizer."""
    out, foreign = tmp_path / "m.bin", tmp_path / "foreign.bin"
    ours = export_tiny(MODELS / "tiny-qwen3", out, rtn=True)
    data = out.read_bytes()
    (offset,) = struct.unpack_from("<Q", data, 0xA0)
    foreign.write_bytes(data[:0x2D] + bytes(256 - 0x2D) + data[256:offset])
    theirs = AWQ(foreign)
    c = theirs.config
    assert (c.arch, c.head_dim, c.norm_eps, c.rope_theta, c.rope_scaling) == ("qwen3", 64, 1e-6, 1e6, None)
    assert theirs.group_size == 128
    tokens = np.arange(5)
    assert np.array_equal(forward(c, theirs, tokens), forward(ours.config, ours, tokens))
    foreign.write_bytes(foreign.read_bytes()[:-2])
    with pytest.raises(ModelError, match="too soon"):
        AWQ(foreign)


def test_a_file_that_is_no_awq_file_is_refused(tmp_path):
    out = tmp_path / "m.bin"
    export_tiny(MODELS / "tiny-llama", out, rtn=True, with_tokenizer=False)
    data = out.read_bytes()

    def refused(text, changed):
        out.write_bytes(changed)
        with pytest.raises(ModelError) as error:
            AWQ(out)
        assert str(error.value).startswith(f"{out}: ")
        assert text in str(error.value)
        assert "\n" not in str(error.value)

    def header_with(where, value):
        head = bytearray(data[:256])
        struct.pack_into("<i", head, where, value)
        struct.pack_into("<I", head, 0xB0, 0)
        struct.pack_into("<I", head, 0xB0, zlib.crc32(head))
        return bytes(head) + data[256:]

    refused("too short", data[:100])
    refused("magic 0x616b3838", struct.pack("<I", 0x616B3838) + data[4:])
    refused("version 4", header_with(4, 4))
    refused("checksum", data[:0x10] + b"\5" + data[0x11:])
    refused(f"the header says {len(data)}", data[:-4])
    refused("too soon", header_with(0x10, 5))  # another layer
    refused("weights end at byte", header_with(0x10, 3))
    refused("head_dim is 64 at 0x25 and 32 at 0x48", header_with(0x25, 64))
    refused("group_size 96", header_with(0x29, 96))
    refused("group_size 0", header_with(0x29, 0))


# ---- AutoAWQ's checkpoints


def autoawq_checkpoint(folder, name="qwen3", group_size=64, seed=0):
    """A directory as AutoAWQ leaves it, with random codes, that owes nothing to the exporter."""
    rng = np.random.default_rng(seed)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 160,
             "max_position_embeddings": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
             "head_dim": 32}  # fmt: skip
    quantization = {"bits": 4, "group_size": group_size, "modules_to_not_convert": None, "quant_method": "awq",
                    "version": "gemm", "zero_point": True}  # fmt: skip
    config = sizes | {"model_type": name, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False,
                      "torch_dtype": "float16", "quantization_config": quantization}  # fmt: skip
    tensors = {"model.embed_tokens.weight": (160, 128), "model.norm.weight": (128,), "lm_head.weight": (160, 128)}
    for i in range(2):
        p = f"model.layers.{i}."
        tensors |= {p + "input_layernorm.weight": (128,), p + "post_attention_layernorm.weight": (128,)}
        if name == "qwen3":
            tensors |= {p + "self_attn.q_norm.weight": (32,), p + "self_attn.k_norm.weight": (32,)}
        for part, n_in, n_out in (
            ("self_attn.q_proj", 128, 128), ("self_attn.k_proj", 128, 64), ("self_attn.v_proj", 128, 64),
            ("self_attn.o_proj", 128, 128), ("mlp.gate_proj", 128, 256), ("mlp.up_proj", 128, 256),
            ("mlp.down_proj", 256, 128),
        ):  # fmt: skip
            tensors[p + part + ".qweight"] = (n_in, n_out // 8)
            tensors[p + part + ".qzeros"] = (n_in // group_size, n_out // 8)
            tensors[p + part + ".scales"] = (n_in // group_size, n_out)
    values = {}
    for key, shape in tensors.items():
        if key.endswith(("qweight", "qzeros")):
            values[key] = rng.integers(-(2**31), 2**31, shape).astype(np.int32)
        else:
            values[key] = (rng.uniform(0.5, 1.5, shape) * (0.01 if key.endswith("scales") else 1)).astype(F16)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(values, folder / "model.safetensors")
    return folder, config, values


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_an_autoawq_checkpoint_goes_through_bit_for_bit(tmp_path, name, group_size):
    hf_dir, config, values = autoawq_checkpoint(tmp_path / "hf", name, group_size)
    export_awq(hf_dir, tmp_path / "m.bin", hf_out=tmp_path / "again", with_tokenizer=False, progress=False)
    scheme = AWQ(tmp_path / "m.bin")
    assert scheme.group_size == group_size
    packed = scheme.matrix("layers.1.ffn.down_proj")
    for part in Packed._fields:
        assert np.array_equal(getattr(packed, part), values[f"model.layers.1.mlp.down_proj.{part}"])
    assert np.isfinite(forward(scheme.config, scheme, np.arange(9))).all()
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == values.keys()
    for key, value in values.items():
        assert again[key].dtype == value.dtype, key
        assert again[key].tobytes() == value.tobytes(), key
    assert json.loads((tmp_path / "again" / "config.json").read_text()) == config


def test_norms_and_tables_in_bf16_become_fp16(tmp_path):
    hf_dir, _, values = autoawq_checkpoint(tmp_path / "hf")
    keys = ("model.norm.weight", "model.layers.1.input_layernorm.weight", "model.embed_tokens.weight", "lm_head.weight")
    changed = {key: values[key].astype(ml_dtypes.bfloat16) for key in keys}
    changed["model.embed_tokens.weight"][3, :2] = 1e-6, -3e-8  # fp16 has fewer bits for these, and none
    save_file(values | changed, hf_dir / "model.safetensors")
    export_awq(hf_dir, tmp_path / "m.bin", with_tokenizer=False, progress=False)
    scheme = AWQ(tmp_path / "m.bin")
    for name in ("norm", "layers.1.attn.norm", "embed", "classifier"):
        assert np.array_equal(scheme.tensor(name), changed[hf_name(scheme.config, name)].astype(F32).astype(F16)), name


def test_an_autoawq_checkpoint_in_shards_with_an_fp32_norm(tmp_path):
    hf_dir, _, values = autoawq_checkpoint(tmp_path / "hf")
    export_awq(hf_dir, tmp_path / "one.bin", with_tokenizer=False, progress=False)
    (hf_dir / "model.safetensors").unlink()
    values["model.norm.weight"] = values["model.norm.weight"].astype(F32)
    names, weight_map = sorted(values), {}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"model-0000{i + 1}-of-00002.safetensors"
        save_file({n: values[n] for n in part}, hf_dir / file)
        weight_map |= dict.fromkeys(part, file)
    (hf_dir / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    export_awq(hf_dir, tmp_path / "two.bin", with_tokenizer=False, progress=False)
    assert (tmp_path / "one.bin").read_bytes() == (tmp_path / "two.bin").read_bytes()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"quant_method": "gptq"}, 'quantization_config.quant_method is "gptq", supported is "awq"'),
        ({"quant_method": None}, 'quantization_config.quant_method is null, supported is "awq"'),
        ({"version": "gemv"}, 'quantization_config.version is "gemv", supported is "gemm"'),
        ({"version": "marlin"}, 'quantization_config.version is "marlin", supported is "gemm"'),
        ({"bits": 8}, "quantization_config.bits is 8, supported is 4"),
        ({"zero_point": False}, "quantization_config.zero_point is false, supported is true"),
        ({"zero_point": 1}, "quantization_config.zero_point is 1, supported is true"),
        ({"group_size": 32}, "quantization_config.group_size is 32, supported is 64 or 128"),
        ({"group_size": -1}, "quantization_config.group_size is -1, supported is 64 or 128"),
        ({"group_size": "64"}, 'quantization_config.group_size is "64", supported is 64 or 128'),
        *(
            (
                {"modules_to_not_convert": modules},
                f"quantization_config.modules_to_not_convert is {json.dumps(modules)}, "
                "supported are names of modules outside the layers",
            )
            for modules in (
                ["self_attn.k_proj"],
                ["lm_head", "mlp"],
                ["model.layers.1.mlp"],
                ["layers"],
                [3],
                "lm_head",
            )
        ),
    ],
)
def test_other_quantized_checkpoints_are_refused_by_name(tmp_path, changes, text):
    hf_dir, config, _ = autoawq_checkpoint(tmp_path / "hf")
    config["quantization_config"] |= changes
    (hf_dir / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError) as error:
        export_awq(hf_dir, tmp_path / "m.bin", with_tokenizer=False, progress=False)
    assert str(error.value) == f"{hf_dir / 'config.json'}: {text}"
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize(
    "changes",
    [
        {"version": "GEMM"},
        {"version": None},
        {"version": ..., "zero_point": ..., "modules_to_not_convert": ...},  # absent
        {"modules_to_not_convert": ["lm_head"]},
        {"modules_to_not_convert": ["lm_head", "model.embed_tokens", "model.norm"]},
        {"modules_to_not_convert": []},
    ],
)
def test_what_the_quantization_config_need_not_say(tmp_path, changes):
    hf_dir, config, _ = autoawq_checkpoint(tmp_path / "hf")
    export_awq(hf_dir, tmp_path / "full.bin", with_tokenizer=False, progress=False)
    changed = config["quantization_config"] | changes
    config["quantization_config"] = {field: value for field, value in changed.items() if value is not ...}
    (hf_dir / "config.json").write_text(json.dumps(config))
    export_awq(hf_dir, tmp_path / "m.bin", with_tokenizer=False, progress=False)
    assert (tmp_path / "m.bin").read_bytes() == (tmp_path / "full.bin").read_bytes()


def test_broken_autoawq_checkpoints_are_refused(tmp_path):
    hf_dir, config, values = autoawq_checkpoint(tmp_path / "hf")
    key = "model.layers.1.mlp.up_proj."

    def refused(text, values, **options):
        save_file(values, hf_dir / "model.safetensors")
        with pytest.raises(ModelError) as error:
            export_awq(hf_dir, tmp_path / "m.bin", with_tokenizer=False, progress=False, **options)
        assert text in str(error.value)
        assert str(error.value).count("\n") == 0
        assert [p.name for p in tmp_path.iterdir()] == ["hf"]

    refused(f"tensor {key}qzeros is missing", {k: v for k, v in values.items() if k != key + "qzeros"})
    refused(f"tensor {key}qweight has shape (64, 32)", values | {key + "qweight": values[key + "qweight"][:64].copy()})
    refused(
        f"tensor {key}qweight has type I64, supported are I32",
        values | {key + "qweight": values[key + "qweight"].astype(np.int64)},
    )
    refused(
        f"tensor {key}scales has type F32, supported are F16",
        values | {key + "scales": values[key + "scales"].astype(F32)},
    )
    refused(
        f"tensor {key}scales has values that are not finite",
        values | {key + "scales": np.full_like(values[key + "scales"], np.inf)},
    )
    refused(
        "tensor model.norm.weight comes to a value of 70000, fp16 ends at 65504",
        values | {"model.norm.weight": np.full(128, 70000, F32)},
    )
    refused(
        "tensor model.embed_tokens.weight comes to a value of 99840, fp16 ends at 65504",
        values | {"model.embed_tokens.weight": np.full((160, 128), 1e5, ml_dtypes.bfloat16)},
    )
    scales = values[key + "scales"].copy()
    scales[1, 5] = 60000
    refused(f"{hf_dir}: tensor {key}scales comes to weights of ", values | {key + "scales": scales})
    for extra in (key + "bias", key + "g_idx", key + "weight", "model.layers.2.mlp.up_proj.qweight", "lm_head.qweight"):
        file = hf_dir / "model.safetensors"
        refused(f"{file}: tensor {extra} is not supported", values | {extra: np.zeros(8, np.int32)})
    without = {k: v for k, v in values.items() if k != "lm_head.weight"}
    refused("tensor lm_head.qweight is not supported", without | {"lm_head.qweight": np.zeros(8, np.int32)})
    refused("is quantized already, --calib would change nothing", values, calibration=CALIBRATION)
    refused("is quantized already, --samples would change nothing", values, n_samples=64)
    refused("is quantized already, --seq-len would change nothing", values, seq_len=64)
    refused("is quantized already, --rtn would change nothing", values, rtn=True)
    refused("is quantized already, --group-size would change nothing", values, group_size=128)
    done = run_export("q8", hf_dir, tmp_path / "m.bin")
    assert done.returncode == 1
    assert 'quantization_config.quant_method is "awq": expected unquantized weights' in done.stderr
    del config["quantization_config"]
    (hf_dir / "config.json").write_text(json.dumps(config))
    refused(f"{hf_dir / 'config.json'}: quantization_config is missing, though there is a tensor model.", values)


def test_scales_are_judged_with_their_zero_points(tmp_path):
    """8000 * max(z, 15 - z) is within fp16 for the zero point 8, and beyond for 6."""
    hf_dir, _, values = autoawq_checkpoint(tmp_path / "hf")
    key = "model.layers.0.self_attn.v_proj."
    values[key + "scales"][0, 3] = 8000
    zeros = unpack(values[key + "qzeros"])
    for zero in (8, 6):
        zeros[0, 3] = zero
        save_file(values | {key + "qzeros": pack(zeros)}, hf_dir / "model.safetensors")
        if zero == 8:
            export_awq(hf_dir, tmp_path / "m.bin", with_tokenizer=False, progress=False)
            assert np.isfinite(AWQ(tmp_path / "m.bin").weight("layers.0.attn.v_proj")).all()
    with pytest.raises(ModelError) as error:
        export_awq(hf_dir, tmp_path / "m.bin", with_tokenizer=False, progress=False)
    assert str(error.value) == f"{hf_dir}: tensor {key}scales comes to weights of 72000, fp16 ends at 65504"


@pytest.mark.parametrize("name", TINY)
def test_what_we_quantize_reads_back_as_autoawq(tmp_path, name):
    """--hf-out writes a directory that export takes as AutoAWQ's, to the same file and the same directory."""
    export_tiny(MODELS / name, tmp_path / "m.bin", hf_out=tmp_path / "hf", group_size=64)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config.pop("quantization_config") == {
        "bits": 4, "group_size": 64, "modules_to_not_convert": None, "quant_method": "awq", "version": "gemm",
        "zero_point": True,
    }  # fmt: skip
    assert config == json.loads((MODELS / name / "config.json").read_text()) | {"torch_dtype": "float16"}
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "hf" / file).read_bytes() == (MODELS / name / file).read_bytes()
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    assert {str(t.dtype) for t in tensors.values()} == {"float16", "int32"}
    assert tensors["model.layers.0.self_attn.k_proj.qzeros"].shape == (2, 8 if name == "tiny-llama" else 16)
    assert ("lm_head.weight" in tensors) == (name == "tiny-qwen3")
    export_awq(tmp_path / "hf", tmp_path / "again.bin", hf_out=tmp_path / "again", progress=False)
    assert (tmp_path / "again.bin").read_bytes() == (tmp_path / "m.bin").read_bytes()
    for file in (tmp_path / "hf").iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()


# ---- golden files and traces


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The exported file behind each golden trace."""
    folder = tmp_path_factory.mktemp("awq")
    for name in TINY:
        for variant in AWQ_VARIANTS:
            export_variant(MODELS / name, CALIBRATION, variant, folder / f"{name}.{variant}.bin")
    return folder


@pytest.mark.parametrize("variant", AWQ_VARIANTS)
@pytest.mark.parametrize("name", TINY)
def test_stored_traces_are_what_the_reference_computes(files, name, variant):
    scheme = AWQ(files / f"{name}.{variant}.bin")
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
def test_the_golden_generation_is_clear(files, name, variant):
    """All 64 tokens of the second prompt stay the same when every result is off by a little."""
    scheme = AWQ(files / f"{name}.{variant}.bin")
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


def test_traces_have_fp16_where_it_is_rounded(files):
    scheme = AWQ(files / "tiny-qwen3.awq.bin")
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


def broken(trace, step, change):
    trace = dict(trace)
    trace[step] = change(trace[step].copy())
    return trace


def test_diff_names_what_is_wrong(files):
    scheme = AWQ(files / "tiny-llama.awq.bin")
    trace = load_file(DATA / "tiny-llama.awq.trace.safetensors")
    run = partial(forward, scheme.config, scheme)

    def first_bad(reports):
        return next((r.name for r in reports if not r.ok), None)

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


def test_a_noisy_pass_is_within_the_contract(files):
    """Every result off by a few units, probabilities by fp16's: what another implementation's trace looks like."""
    for name in TINY:
        scheme = AWQ(files / f"{name}.awq.bin")
        trace = load_file(DATA / f"{name}.awq.trace.safetensors")
        for seed in range(5):
            recorder = Recorder()
            tokens = recorder("tokens", trace["tokens"])
            forward(scheme.config, Noisy(scheme, seed), tokens, recorder)
            assert all(r.ok for r in compare(trace, recorder.tensors))
            assert all(r.ok for r in replay(partial(forward, scheme.config, scheme), recorder.tensors))


def test_stored_op_vectors_cover_every_shape():
    stored = load_file(DATA / "ops.safetensors")
    assert awq_op_vectors(np.random.default_rng(4)).keys() <= stored.keys()
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


def run_golden(*args):
    return subprocess.run([sys.executable, "-m", "golden", *map(str, args)], cwd=ROOT, capture_output=True, text=True)


def test_golden_commands_take_a_file(files, tmp_path):
    file, trace = files / "tiny-llama.awq.bin", DATA / "tiny-llama.awq.trace.safetensors"
    done = run_golden("diff", trace, trace, "--model", file)
    assert (done.returncode, done.stderr) == (0, "")
    assert "within the contract" in done.stdout
    assert run_golden("diff", trace, trace, "--model", files / "tiny-llama.awq-g64.bin").returncode == 1
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


# ---- the command line


def run_export(*args):
    command = [sys.executable, "-m", "export", *map(str, args)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_command_line(tmp_path):
    out, short = tmp_path / "out.bin", ("--calib", CALIBRATION, "--samples", 2, "--seq-len", 32)
    done = run_export("awq", MODELS / "tiny-llama", out, *short, "--quiet")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.count("\n") == 1
    assert AWQ(out).group_size == 128
    searched = out.read_bytes()
    run_export("awq", MODELS / "tiny-llama", out, *short, "--quiet")
    assert out.read_bytes() == searched
    done = run_export("awq", MODELS / "tiny-llama", out, *short, "--quiet", "--verbose", "--group-size", 64)
    assert AWQ(out).group_size == 64
    assert sum(line.startswith(p) for line in done.stderr.splitlines() for p in PLACES) == 4
    assert done.stderr.count("  layers.") == 16
    done = run_export("awq", MODELS / "tiny-llama", out, "--rtn", "--no-tokenizer", "--hf-out", tmp_path / "hf")
    assert done.returncode == 0
    assert struct.unpack_from("<QQ", out.read_bytes(), 0xA0) == (out.stat().st_size, 0)
    assert (tmp_path / "hf" / "tokenizer.json").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "out.bin"]


CALIB = ("--calib", CALIBRATION)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ((), "AWQ needs a text to calibrate with: --calib TEXT (or --rtn for plain rounding)"),
        ((*CALIB, "--rtn"), "--calib and --rtn exclude each other"),
        (("--rtn", "--samples", 16), "--samples and --rtn exclude each other"),
        (("--rtn", "--seq-len", 64), "--seq-len and --rtn exclude each other"),
        ((*CALIB, "--group-size", 32), "--group-size is 32, expected 64 or 128"),
        (("--rtn", "--group-size", 0), "--group-size is 0, expected 64 or 128"),
        ((*CALIB, "--samples", 0), "--samples is 0, expected 1 or more"),
        ((*CALIB, "--seq-len", 513), "--seq-len is 513, expected 2 to the model's 512"),
        (("--calib", "absent.txt"), "absent.txt: no such file"),
        (("--rtn", "--hf-out", "models"), "models: exists already"),
        (("--rtn", "--hf-out", "absent/hf"), "absent/hf: cannot write: absent is no directory"),
    ],
)
def test_options_that_cannot_be_are_one_line_and_write_nothing(tmp_path, options, text):
    done = run_export("awq", MODELS / "tiny-llama", tmp_path / "out.bin", *options)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"export: {text}\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("factors", "text"),
    [
        (
            {"layers.2.mlp.up_proj": 2.0**30, "layers.2.mlp.down_proj": 2.0**-30},
            "tensor model.layers.2.mlp.up_proj.weight comes to weights of",
        ),
        (
            {"layers.2.mlp.up_proj": 2.0**14, "layers.2.mlp.down_proj": 2.0**-14},
            "activations of layers.2.ffn.swiglu come to",
        ),
        ({"norm": 2.0**14}, "activations of norm come to"),
    ],
)
def test_models_beyond_fp16_are_one_line_after_calibration(tmp_path, factors, text):
    """The search goes through such numbers without a word, and the end says where they are. Layers stay the same."""
    hf_dir = shutil.copytree(MODELS / "tiny-llama", tmp_path / "hf")
    weights = load_file(hf_dir / "model.safetensors")
    for name, factor in factors.items():
        key = f"model.{name}.weight"
        weights[key] = weights[key].astype(F32) * F32(factor)
    save_file(weights, hf_dir / "model.safetensors")
    done = run_export("awq", hf_dir, tmp_path / "out.bin", *CALIB, "--samples", 2, "--seq-len", 32, "--quiet")
    assert done.returncode == 1
    line = re.fullmatch(re.escape(f"export: {hf_dir}: {text} ") + r"(\S+), fp16 ends at 65504\n", done.stderr)
    assert line, done.stderr
    assert float(line[1]) > 65504
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_models_that_cannot_be_are_refused(tmp_path):
    def refused(hf_dir, text, **options):
        with pytest.raises(ModelError) as error:
            export_awq(hf_dir, tmp_path / "out.bin", rtn=True, with_tokenizer=False, progress=False, **options)
        assert text in str(error.value)
        assert "\n" not in str(error.value)
        assert not (tmp_path / "out.bin").exists()

    refused(tmp_path / "absent", "absent: no such directory")
    hint = "; the largest power of two that would do is 64"
    refused(FOLDER / "llama-gqa-tied", "hidden_size is 64, not a multiple of --group-size 128" + hint)
    config = FOLDER / "llama-gqa-tied" / "config.json"
    refused(FOLDER / "llama-gqa-tied", f"{config}: head_dim is 16, expected 32, 64, 96 or 128", group_size=64)
    hf_dir = shutil.copytree(FOLDER / "qwen3-gqa-untied", tmp_path / "hf")
    weights = load_file(hf_dir / "model.safetensors")
    narrow = dict(weights)
    for key in weights:
        if "gate_proj" in key or "up_proj" in key:
            narrow[key] = weights[key][:96]
        if "down_proj" in key:
            narrow[key] = np.ascontiguousarray(weights[key][:, :96])
    config = hf_dir / "config.json"
    text = config.read_text()
    config.write_text(json.dumps(json.loads(text) | {"intermediate_size": 96}))
    save_file(narrow, hf_dir / "model.safetensors")
    with pytest.raises(ModelError) as error:
        export_awq(hf_dir, tmp_path / "out.bin", rtn=True, group_size=64, with_tokenizer=False, progress=False)
    assert str(error.value) == f"{config}: intermediate_size is 96, not a multiple of --group-size 64"  # 32 is none
    config.write_text(text)
    for key, value, text in (
        ("layers.1.mlp.up_proj.weight", 1e6, "up_proj.weight comes to weights of 1e+06, fp16 ends at 65504"),
        ("layers.0.input_layernorm.weight", 7e4, "input_layernorm.weight comes to a value of 70000"),
        ("embed_tokens.weight", -1e5, "embed_tokens.weight comes to a value of 100000, fp16 ends at 65504"),
        ("norm.weight", 65520.0, "model.norm.weight comes to a value of 65520, fp16 ends at 65504"),
        ("layers.1.self_attn.k_norm.weight", 3e38, "self_attn.k_norm.weight comes to a value of 3e+38"),
    ):
        key = "model." + key
        changed = weights[key].astype(F32)
        changed.flat[3] = value
        save_file(weights | {key: changed}, hf_dir / "model.safetensors")
        refused(hf_dir, text, group_size=64)
    changed = weights["model.embed_tokens.weight"].astype(ml_dtypes.bfloat16)
    changed[2, 3] = 1e5
    save_file(weights | {"model.embed_tokens.weight": changed}, hf_dir / "model.safetensors")
    refused(hf_dir, "embed_tokens.weight comes to a value of 99840, fp16 ends at 65504", group_size=64)


@pytest.mark.parametrize(("where", "function"), [(smooth, "forward_layer"), (awq_search, "quantize")])
def test_an_interrupted_export_keeps_the_old_file(tmp_path, monkeypatch, where, function):
    out = tmp_path / "out.bin"
    out.write_bytes(b"old")

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(where, function, interrupted)
    with pytest.raises(KeyboardInterrupt):
        export_tiny(MODELS / "tiny-llama", out, hf_out=tmp_path / "hf")
    assert out.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["out.bin"]


def test_only_one_layer_is_in_memory(tmp_path, monkeypatch):
    alive, original = [], Checkpoint.stored
    monkeypatch.setattr(Checkpoint, "stored", lambda self, name: alive.append(name) or original(self, name))
    seen = []
    choose = awq_search.choose_scales
    monkeypatch.setattr("export.awq.choose_scales", lambda *a: seen.append(len(a[3]._weights)) or choose(*a))
    export_tiny(MODELS / "tiny-llama", tmp_path / "m.bin")
    assert seen == [9, 9, 9, 9]  # seven matrices and two norms
    layers = [name for name in alive if ".layers." in name]
    assert len(layers) == len(set(layers)) == 4 * 9  # each is read once


@pytest.mark.parametrize("scheme", ["awq", "w8a8"])
def test_a_layers_weights_are_gone_before_the_next_ones_are_read(tmp_path, monkeypatch, scheme):
    loaded = []  # layer and matrix
    load, layer_of = Fp32.load, lambda name: name.split(".")[1] if name.startswith("layers.") else name

    def watched(self, name):
        weight = load(self, name)
        alive = {layer for layer, array in loaded if array() is not None}
        assert alive <= {layer_of(name)}
        loaded.append((layer_of(name), weakref.ref(weight)))
        return weight

    monkeypatch.setattr(Fp32, "load", watched)
    if scheme == "awq":
        export_tiny(MODELS / "tiny-llama", tmp_path / "m.bin")
    else:
        smooth.find_smoothing(*calibrate("tiny-llama"), "auto")
    assert [layer for layer, _ in loaded] == ["embed", *sorted("0123" * 9), "norm"]


def test_smoothing_is_advised_where_there_is_smoothing():
    checkpoint = Checkpoint(MODELS / "tiny-llama")
    found = smooth.Smoothing({"layers.0.attn.norm": np.full(128, 1e-39, F32)})
    for load, text in (
        (lambda name: found.weight(checkpoint.config, name, Fp32(checkpoint).vector(name)), ""),
        (
            lambda name: smooth.load_smoothed(checkpoint, name, found, False),
            "; another --alpha, or --no-smooth, may do",
        ),
    ):
        with pytest.raises(ModelError) as error:
            load("layers.0.attn.norm")
        assert str(error.value) == "smoothing takes layers.0.attn.norm beyond fp32" + text


# ---- two results, of which the second may fail


def test_the_directory_cannot_be_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for out, hf_out in (("m.bin", "m.bin"), ("m.bin", tmp_path / "m.bin")):
        with pytest.raises(ModelError) as error:
            export_awq(MODELS / "tiny-llama", Path(out), rtn=True, hf_out=Path(hf_out), progress=False)
        assert str(error.value) == "m.bin: is the model file, --hf-out needs another place"
    assert not list(tmp_path.iterdir())


def test_an_interrupt_says_which_of_the_two_was_not_written(tmp_path, monkeypatch, capsys):
    out, hf_out = tmp_path / "m.bin", tmp_path / "hf"
    monkeypatch.setattr("warnings.showwarning", warnings.showwarning)  # `main` has its own
    monkeypatch.setattr(sys, "argv", ["export", "awq", str(MODELS / "tiny-llama"), str(out), "--rtn", "--quiet",
                                      "--hf-out", str(hf_out)])  # fmt: skip

    def interrupted(*_):
        raise KeyboardInterrupt

    for where, text in (
        ("export.awq.quantize_scaled", f"{out} was not written"),
        ("export.autoawq.write_array", f"{hf_out} was not written, {out} was"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(where, interrupted)
            assert main() == 130
        assert capsys.readouterr().err == f"export: interrupted, {text}\n"
        assert list(tmp_path.iterdir()) == ([] if "awq.quant" in where else [out])
    AWQ(out)


def test_a_full_disk_while_the_directory_is_written(tmp_path):
    """Stood in for by a limit on the length of files, between the model file's and that of model.safetensors."""
    options = ("awq", MODELS / "tiny-llama", tmp_path / "m.bin", "--rtn", "--no-tokenizer", "--quiet")
    assert run_export(*options).returncode == 0
    size = (tmp_path / "m.bin").stat().st_size
    command = [sys.executable, "-m", "export", *map(str, options), "--hf-out", tmp_path / "hf"]
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (size, size))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, preexec_fn=limit)
    assert done.returncode == 1
    assert done.stderr == (
        f"export: {tmp_path / 'hf'}: cannot write: File too large; {tmp_path / 'm.bin'} was written\n"
    )
    assert [p.name for p in tmp_path.iterdir()] == ["m.bin"]
