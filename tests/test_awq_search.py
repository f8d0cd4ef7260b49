"""AWQ: the search for scales and for clipping, alone and in whole models."""

import shutil
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from safetensors.numpy import save_file

from export.awq import export_awq
from formats.checkpoint import Checkpoint, tensor_shapes
from golden.awq import AWQ, GROUP_SIZES, HEAD_DIMS, group_range, quantize
from golden.awq_search import RATIOS, SHRINKS, SWEEPS, choose_scale, clip, error_of_outputs, factors, rounded, spaced
from golden.calibration import Inputs, calibration_samples, observe
from golden.channel_scaling import CONSUMERS, PLACE_READ_BY, PLACES, describe, describe_errors, share, spread
from golden.forward import Fp32, forward, hf_name
from golden.perplexity import encode, perplexity
from golden.smooth import Smoothed
from golden.trace import Recorder, relative_error
from models.outliers import copy_with_outliers
from tests.helpers import (
    F16,
    F32,
    F64,
    FULL,
    MODELS,
    TINY,
    calibrate,
    calibration,
    plain_int4,
    stands_for,
)
from tests.hf_fixtures import FIXTURES, FOLDER

# ---- scales


def test_factors_by_hand():
    mean = np.array([4.0, 1.0, 0.25, 0.0], F32)
    assert factors(mean, 0.0).tolist() == [1, 1, 1, 1]
    assert factors(mean, 0.5).tolist() == [2, 1, 0.5, 1]  # the largest and the smallest are each other's inverse
    assert factors(mean * 100, 0.5) == pytest.approx(factors(mean, 0.5))
    assert factors(np.zeros(3, F32), 0.5).tolist() == [1, 1, 1]
    assert (RATIOS[0], RATIOS[-1], len(RATIOS)) == (0, 0.95, 20)
    assert SHRINKS[0] == (1, 1)
    assert len(set(SHRINKS)) == len(SHRINKS) == 31


def test_means_are_those_of_the_plain_forward_pass():
    checkpoint = Checkpoint(FOLDER / "llama-gqa-tied")
    rng = np.random.default_rng(7)
    samples = [rng.integers(0, checkpoint.config.vocab_size, n) for n in (30, 21, 5)]
    found = {}
    for _, seen in observe(checkpoint, samples, 10**6, with_products=True):
        found |= seen
    for name, inputs in found.items():
        if name == "norm":
            assert inputs.products is None
        else:
            rows = inputs.rows.astype(F64)
            assert inputs.products == pytest.approx(rows.T @ rows, rel=1e-9, abs=1e-12)
        assert inputs.mean == pytest.approx(np.abs(inputs.rows).mean(axis=0, dtype=F64), rel=1e-6), name
        assert inputs.mean.dtype == F32


def test_rounded_is_what_quantizing_gives():
    weight = np.random.default_rng(8).standard_normal((30, 256)).astype(F32)
    weight[3, :128] = 0
    weight[4, :128] = np.abs(weight[4, :128])
    for group_size in GROUP_SIZES:
        found = rounded(weight.copy(), group_size)
        assert np.array_equal(found.astype(F16), stands_for(plain_int4(weight, group_size)))


class Layer:
    """Weights of one layer, as `choose_scale` asks for them."""

    def __init__(self, **weights):
        self._weights = {name.replace("_proj", "").replace("__", "."): w for name, w in weights.items()}

    def vector(self, name):
        return self._weights[name.removeprefix("layers.0.").removesuffix("_proj")]


def output_error(x, weight, group_size, s=1):
    """Of the product, with the weight rounded after scaling: relative, by norm."""
    matrix = plain_int4((weight * s).astype(F32), group_size)
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
    low, high = clip(weight, x.T.astype(F64) @ x, 128)
    assert (high <= 1.2).all()
    assert (low >= -1.2).all()
    error = relative_error(x @ weight.T, x @ stands_for(quantize(weight, low, high)).T.astype(F64))
    assert error < 0.7 * output_error(x, weight, 128)
    x[:, [5, 90]] *= 1e4  # now they are what counts
    low, high = clip(weight, x.T.astype(F64) @ x, 128)
    assert (high > 1.9).all()


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_each_group_gets_the_range_that_is_best_for_its_row(group_size, scaled):
    """Group by group, twice through the row, by the error of its outputs with everything else as it is."""
    rng = np.random.default_rng(12)
    weight = (rng.standard_normal((600, 256)) * rng.standard_exponential((600, 256))).astype(F32)  # long tails
    x = (rng.standard_normal((100, 256)) + rng.standard_normal(256)).astype(F32)
    s = rng.uniform(0.5, 2, 256).astype(F32) if scaled else np.ones(256, F32)
    weight *= s
    low, high = clip(weight, x.T.astype(F64) @ x, group_size, s if scaled else None)
    full_low, full_high = group_range(weight, group_size)
    assert 0.5 <= (high / full_high).min() < 0.85
    assert (high / full_high).max() == 1
    assert not np.allclose(low / full_low, high / full_high)

    def error(row, ranges):
        q = quantize(weight[row : row + 1], *(np.array([ends], F32) for ends in zip(*ranges, strict=True)))
        stands = ((q.codes.reshape(*q.zeros.shape, -1) - q.zeros[..., None].astype(F64)) * q.scales[..., None]).ravel()
        return float((((x / s.astype(F64)) @ (stands - weight[row])) ** 2).sum())

    for row in (0, 299, 511, 512, 599):
        ranges = list(zip(full_low[row], full_high[row], strict=True))
        for g in list(range(len(ranges))) * SWEEPS:
            trials = [(full_low[row, g] * F32(a), full_high[row, g] * F32(b)) for a, b in SHRINKS]
            ranges[g] = min(trials, key=lambda trial: error(row, [*ranges[:g], trial, *ranges[g + 1 :]]))
        assert error(row, ranges) == pytest.approx(error(row, list(zip(low[row], high[row], strict=True))), rel=1e-9)
        assert ranges == list(zip(low[row], high[row], strict=True))


@pytest.mark.parametrize("scaled", [False, True])
def test_the_error_of_outputs_is_that_on_the_text(scaled):
    rng = np.random.default_rng(13)
    weight, x = rng.standard_normal((24, 128)).astype(F32), rng.standard_normal((90, 128))
    s = rng.uniform(0.5, 2, 128).astype(F32) if scaled else None
    matrix = plain_int4(weight if s is None else weight * s, 64)
    stands = stands_for(matrix).astype(F64) / (1 if s is None else s)
    found = error_of_outputs(weight if s is None else weight * s, matrix, x.T @ x, s)
    assert found == pytest.approx(relative_error(x @ weight.T, x @ stands.T), rel=2e-3)  # fp16 weights in `stands`
    assert error_of_outputs(np.zeros_like(weight), matrix, x.T @ x) == 0


# ---- whole layers and models


@cache
def model_with_outliers(name):
    """A directory, which is there as long as it is not forgotten."""
    folder = TemporaryDirectory()
    copy_with_outliers(MODELS / name, Path(folder.name) / "model")
    return folder, Path(folder.name) / "model"


@cache
def exported(name, outliers, **options):
    """What the exporter returns for a tiny model, with outliers or as it is, and its file's reader; each once."""
    hf_dir = model_with_outliers(name)[1] if outliers else MODELS / name
    with TemporaryDirectory() as folder:
        how = options if options.get("rtn") else options | calibration(4, 128)
        found = export_awq(hf_dir, Path(folder) / "m.bin", progress=False, **how)
        return found, AWQ(Path(folder) / "m.bin")


@pytest.mark.parametrize(
    ("name", "outliers"),
    [(name, outliers) for name in TINY for outliers in (False, True) if FULL or outliers or name == TINY[0]],
)
def test_awq_beats_plain_rounding_in_layer_error(name, outliers):
    """Each layer alone, from the unquantized model's own input, on text that was not calibrated on."""
    hf_dir = model_with_outliers(name)[1] if outliers else MODELS / name
    checkpoint = Checkpoint(hf_dir)
    config = checkpoint.config
    schemes = [exported(name, outliers, rtn=True)[1], exported(name, outliers)[1]]
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
def test_scaling_alone_changes_nothing(name):
    checkpoint, samples = calibrate(name)
    found, _ = exported(name, False)
    assert len(found.strength) == 4 * checkpoint.config.n_layers
    assert found.s.keys() == {place for place, ratio in found.strength.items() if ratio}
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
    assert found.errors.keys() == {f"layers.{i}.{c}" for i in range(checkpoint.config.n_layers) for c in PLACE_READ_BY}
    assert all(0.005 < error < 0.2 for error in found.errors.values())
    lines = list(describe_errors(found, verbose=True))
    assert len(lines) == len(PLACE_READ_BY) * (1 + checkpoint.config.n_layers)
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


@pytest.mark.parametrize("name", TINY if FULL else TINY[:1])
def test_perplexity_with_outliers(tmp_path, name):
    """`python -m models.compare_schemes` in short: calibrated on little, on part of the held-out text.

    With FULL=1 of both models, calibrated as for the golden files, and on four times as much text.
    """
    length = 16000 if FULL else 4000
    _, hf_dir = model_with_outliers(name)
    checkpoint = Checkpoint(hf_dir)
    ids, bos = encode(hf_dir, (MODELS / "held_out.txt").read_text()[:length])
    found = []
    for options in (None, {"rtn": True}, {}, {"group_size": 64}):
        scheme = Fp32(checkpoint) if options is None else exported(name, True, **options)[1]
        if FULL and options is not None and "rtn" not in options:
            export_awq(hf_dir, tmp_path / "m.bin", progress=False, **options, **calibration(16, 256))
            scheme = AWQ(tmp_path / "m.bin")
        found.append(perplexity(partial(forward, checkpoint.config, scheme), ids, bos, 512)[0])
    fp32, rtn, awq, awq_64 = found
    assert rtn > 1.05 * fp32
    assert awq < 1.03 * fp32
    assert awq_64 < 1.03 * fp32
