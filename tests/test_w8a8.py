"""W8A8: smoothing against the unsmoothed model and by hand, the exported file, static scales, and what is refused."""

import json
import shutil
import struct
import zlib
from functools import partial

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from export.rotation import rotated
from export.w8a8 import export_w8a8
from formats.checkpoint import Checkpoint, ModelError
from formats.tensors import HEADER_SIZE, matrix_shapes, norm_shapes
from golden import calibration as observing
from golden.calibration import calibration_samples, observe
from golden.channel_scaling import (
    CONSUMERS,
    DIVIDED_BY,
    PLACE_READ_BY,
    PLACES,
    ChannelScaling,
    describe,
    share,
    spread,
)
from golden.forward import Fp32, forward
from golden.op_vectors_int8 import edge_groups
from golden.perplexity import encode, windows
from golden.q8 import dequantize, quantize
from golden.smooth import ALPHAS, SEARCH_ROWS, Smoothed, factors, find_smoothing, load_smoothed, rounded
from golden.trace import Recorder, compare, relative_error, replay, write_trace
from golden.w8a8 import STATIC_PLACES, W8A8, quantize_static, static_scale
from tests.helpers import (
    CALIBRATION,
    DATA,
    F32,
    FULL,
    GOLDEN_FILES,
    MODELS,
    ROOT,
    TINY,
    W8A8_VARIANTS,
    assert_golden_file,
    broken,
    calibrate,
    calibration,
    first_bad,
    run_export,
    run_golden,
    with_header_field,
)
from tests.hf_fixtures import FIXTURES, FOLDER


def samples_for(name):
    """The checkpoint and a few short samples: of stories, or of random ids where there is no tokenizer."""
    if name in TINY:
        return calibrate(name, 3, 40)
    checkpoint = Checkpoint(FOLDER / name)
    rng = np.random.default_rng(7)
    return checkpoint, [rng.integers(0, checkpoint.config.vocab_size, n) for n in (30, 21, 5)]


# ---- calibration


@pytest.mark.parametrize("name", ["tiny-llama", "qwen3-gqa-untied"])
def test_statistics_are_those_of_the_plain_forward_pass(name):
    checkpoint, samples = samples_for(name)
    expected = {}
    for sample in samples:
        recorder = Recorder()
        forward(checkpoint.config, Fp32(checkpoint), sample, recorder)
        for step, value in recorder.tensors.items():
            if step == "norm" or step.split(".", 2)[-1] in PLACES:
                expected.setdefault(step, []).append(value)
    found = {}
    for _, seen in observe(checkpoint, samples, n_rows=10**6):
        found |= seen
    assert list(found) == list(expected)  # in the order of computation
    assert len(found) == 4 * checkpoint.config.n_layers + 1
    for step, values in expected.items():
        rows = np.concatenate(values)
        assert np.array_equal(found[step].largest, np.abs(rows).max(axis=0)), step
        assert np.array_equal(found[step].rows, rows), step


def test_rows_are_spread_over_all_samples():
    checkpoint, samples = samples_for("llama-gqa-tied")
    n = sum(map(len, samples))
    every = next(seen["layers.0.attn.norm"].rows for _, seen in observe(checkpoint, samples, n) if "norm" not in seen)
    few = next(seen["layers.0.attn.norm"].rows for _, seen in observe(checkpoint, samples, 4) if "norm" not in seen)
    assert np.array_equal(few, every[[0, 18, 37, 55]])  # of 56


def test_only_one_layer_is_in_memory():
    checkpoint, samples = samples_for("tiny-llama")
    alive = []
    original = checkpoint.tensor
    checkpoint.tensor = lambda name: alive.append(name) or original(name)
    for i, (_, seen) in enumerate(observe(checkpoint, samples)):
        if "norm" not in seen:
            assert {n.split(".")[2] for n in alive if ".layers." in n} == {str(i)}
            assert len(alive) == len(set(alive))  # each weight is read once
            alive.clear()
    checkpoint, samples = samples_for("tiny-llama")
    kept = [weights._weights.keys() for weights, _ in observe(checkpoint, samples)]
    assert [len(k) for k in kept] == [9, 9, 9, 9, 1]  # seven matrices and two norms; the final norm


def test_samples_are_the_windows_of_perplexity():
    hf_dir, text = MODELS / "tiny-llama", CALIBRATION.read_text()
    config = Checkpoint(hf_dir).config
    samples = calibration_samples(hf_dir, config, text, 3, 50)
    ids, bos = encode(hf_dir, text)
    assert bos is not None
    assert [s.tolist() for s in samples] == [w.tolist() for w in windows(ids, bos, 50)][:3]
    assert [len(s) for s in samples] == [50, 50, 50]
    assert all(s[0] == bos for s in samples)
    samples = calibration_samples(MODELS / "tiny-qwen3", config, text, 2, 50)
    assert np.concatenate(samples).tolist() == encode(MODELS / "tiny-qwen3", text)[0][:100]


# ---- factors


def test_factors_by_hand():
    x, w = np.array([4.0, 0.25, 9.0, 0.0], F32), np.array([1.0, 4.0, 0.25, 2.0], F32)
    assert factors(x, w, 0.5).tolist() == [2.0, 0.25, 6.0, 1.0]  # sqrt(x / w); 1 where x is always 0
    assert factors(x, w, 1.0).tolist() == [4.0, 0.25, 9.0, 1.0]
    assert factors(x, w, 0.0).tolist() == [1.0, 0.25, 4.0, 1.0]
    assert factors(x, w, 0.5).dtype == F32
    # maxima are kept at 1e-5 or above, and so is s
    assert factors(np.array([1e-9], F32), np.array([1.0], F32), 1.0)[0] == F32(1e-5)
    assert factors(np.array([1.0], F32), np.array([0.0], F32), 0.5)[0] == F32(1e5**0.5)
    assert factors(np.array([1e-9], F32), np.array([100.0], F32), 0.5)[0] == F32((1e-5 / 100) ** 0.5)
    assert factors(np.array([1e-9], F32), np.array([1e9], F32), 0.5)[0] == F32(1e-5)


def test_query_heads_of_a_kv_head_share_factors():
    config = Checkpoint(FOLDER / "llama-gqa-tied").config  # 4 query heads, 2 kv heads, head_dim 16
    largest = np.arange(64, dtype=F32)
    shared = share(config, "attn.mix", largest)
    assert shared.tolist() == [*range(16, 32), *range(48, 64)]  # heads 0 and 1, heads 2 and 3
    wide = spread(config, "attn.mix", shared)
    assert wide.tolist() == [*range(16, 32), *range(16, 32), *range(48, 64), *range(48, 64)]
    assert share(config, "ffn.norm", largest) is largest
    assert spread(config, "ffn.norm", largest) is largest


@pytest.mark.parametrize("name", ["tiny-llama", "llama-wide-heads", "llama-mha-untied"])
def test_factors_come_from_both_maxima_over_all_consumers(name):
    checkpoint, samples = samples_for(name)
    config, fp32 = checkpoint.config, Fp32(checkpoint)
    largest = {}
    for _, seen in observe(checkpoint, samples):
        largest |= {step: inputs.largest for step, inputs in seen.items()}
    smoothing = find_smoothing(checkpoint, samples, 0.3)
    for i in range(config.n_layers):
        layer = f"layers.{i}."
        for place, consumers in CONSUMERS.items():
            x = largest[layer + place]
            w = np.abs(np.concatenate([fp32.vector(layer + c) for c in consumers])).max(axis=0)
            s = smoothing.s[layer + place]
            if place == "attn.mix":
                group = config.n_heads // config.n_kv_heads
                assert s.shape == (config.kv_dim,)
                for channel in range(config.kv_dim):
                    g, d = divmod(channel, config.head_dim)
                    reading = [(g * group + j) * config.head_dim + d for j in range(group)]
                    expected = max(x[reading]) ** np.float64(0.3) / max(w[reading]) ** np.float64(0.7)
                    assert s[channel] == pytest.approx(expected, rel=1e-6)
            else:
                assert s == pytest.approx(x.astype(float) ** 0.3 / w.astype(float) ** 0.7, rel=1e-6)
            assert smoothing.strength[layer + place] == 0.3


# ---- the smoothed model


@pytest.mark.parametrize("alpha", [0.5, 0.9])
@pytest.mark.parametrize("name", [*TINY, *FIXTURES])
def test_smoothing_changes_nothing_without_quantization(name, alpha):
    checkpoint, samples = samples_for(name)
    smoothing = find_smoothing(checkpoint, samples, alpha)
    tokens = np.random.default_rng(3).integers(0, checkpoint.config.vocab_size, 24)
    plain = forward(checkpoint.config, Fp32(checkpoint), tokens)
    for interleaved in (False, True):
        scheme = Smoothed(checkpoint, smoothing, interleaved)
        smoothed = forward(checkpoint.config, scheme, tokens)
        assert np.abs(smoothed - plain).max() <= 1e-4 * np.abs(plain).max()
    for part in (*DIVIDED_BY, *(c for consumers in CONSUMERS.values() for c in consumers)):
        weight = f"layers.{checkpoint.config.n_layers - 1}.{part}"
        changed = scheme.vector(weight)
        assert relative_error(Fp32(checkpoint, interleaved=True).vector(weight), changed) > 0.05, part


@pytest.mark.parametrize("part", [*DIVIDED_BY, *PLACE_READ_BY])
def test_every_folding_is_needed(part, monkeypatch):
    checkpoint, samples = samples_for("llama-gqa-tied")
    smoothing = find_smoothing(checkpoint, samples)
    tokens = samples[0]
    plain = forward(checkpoint.config, Fp32(checkpoint), tokens)
    original = ChannelScaling.weight
    monkeypatch.setattr(
        ChannelScaling, "weight", lambda self, c, name, w: w if name.endswith(part) else original(self, c, name, w)
    )
    smoothed = forward(checkpoint.config, Smoothed(checkpoint, smoothing), tokens)
    assert np.abs(smoothed - plain).max() > 1e-2 * np.abs(plain).max()


def test_a_weight_is_rounded_once():
    """v has factors on both sides: fp32(w * s / t), not two roundings."""
    checkpoint, samples = samples_for("tiny-llama")
    smoothing = find_smoothing(checkpoint, samples)
    w = Fp32(checkpoint).vector("layers.2.attn.v_proj").astype(np.float64)
    s, t = (smoothing.s["layers.2." + place].astype(np.float64) for place in ("attn.norm", "attn.mix"))
    found = load_smoothed(checkpoint, "layers.2.attn.v_proj", smoothing, interleaved=True)
    assert found.dtype == F32
    assert np.array_equal(found, (w / t[:, None] * s).astype(F32))
    norm = Fp32(checkpoint).vector("layers.2.attn.norm").astype(np.float64)
    assert np.array_equal(load_smoothed(checkpoint, "layers.2.attn.norm", smoothing, True), (norm / s).astype(F32))
    for untouched in ("norm", "embed", "classifier"):
        plain = Fp32(checkpoint).vector(untouched)
        assert np.array_equal(load_smoothed(checkpoint, untouched, smoothing, True), plain)


def test_smoothing_evens_out_a_channel(tmp_path):
    """One channel 100 times as large as the others costs W8A8 its precision, and smoothing gives it back."""
    hf_dir = shutil.copytree(MODELS / "tiny-llama", tmp_path / "hf")
    weights = load_file(hf_dir / "model.safetensors")
    for i in range(4):
        up, down = f"model.layers.{i}.mlp.up_proj.weight", f"model.layers.{i}.mlp.down_proj.weight"
        weights[up] = weights[up].copy()
        weights[down] = weights[down].copy()
        weights[up][::37] *= 128  # a power of two: the model stays exactly the same
        weights[down][:, ::37] /= 128
    save_file(weights, hf_dir / "model.safetensors")
    tokens = np.array(encode(hf_dir, CALIBRATION.read_text())[0][500:600])
    plain = forward(Checkpoint(hf_dir).config, Fp32(Checkpoint(hf_dir)), tokens)

    calibrated = calibration(4, 64)

    def error(**options):
        export_w8a8(hf_dir, tmp_path / "out.bin", progress=False, **options)
        scheme = W8A8(tmp_path / "out.bin")
        return relative_error(plain, forward(scheme.config, scheme, tokens))

    unsmoothed, smoothed, auto = error(alpha=None), error(**calibrated), error(**calibrated, alpha="auto")
    assert unsmoothed > 5 * smoothed
    assert unsmoothed > 5 * auto
    assert smoothed < 0.1


# ---- alpha auto


@pytest.mark.parametrize("group_size", [0, 32])
def test_rounded_is_what_quantizing_gives(group_size):
    for n in (64, 384):
        x = edge_groups(np.random.default_rng(1), n)
        assert np.array_equal(rounded(x.copy(), group_size), dequantize(quantize(x, group_size or x.shape[-1])))


@pytest.mark.parametrize(("group_size", "static"), [(0, False), (32, False), (0, True)])
@pytest.mark.parametrize("name", ["tiny-llama", "llama-gqa-tied"])
def test_auto_takes_the_smallest_error_of_each_place(name, group_size, static):
    """Judged by the quantizers of the file, code by code, on all rows that calibration kept."""
    checkpoint, samples = samples_for(name)
    config = checkpoint.config
    smoothing = find_smoothing(checkpoint, samples, "auto", group_size, static)
    assert len(smoothing.strength) == 4 * config.n_layers
    observed = {}
    for weights, seen in observe(checkpoint, samples, SEARCH_ROWS):
        observed |= {step: (inputs, weights) for step, inputs in seen.items() if step != "norm"}
    for step, (inputs, weights) in observed.items():
        place = step.split(".", 2)[-1]
        matrices = [weights.vector(step.removesuffix(place) + c).astype(np.float64) for c in CONSUMERS[place]]
        w_max = share(config, place, np.abs(np.concatenate(matrices)).max(axis=0))
        x_max = share(config, place, inputs.largest)

        def error(s, inputs=inputs, matrices=matrices):
            x = (inputs.rows / s).astype(F32)
            if static:
                xq = quantize_static(x, static_scale((inputs.largest.astype(float) / s).max()))
            else:
                xq = quantize(x, group_size or x.shape[1])
            wqs = (quantize((w * s).astype(F32), group_size or x.shape[1]) for w in matrices)
            exact = (inputs.rows.astype(np.float64) @ w.T for w in matrices)
            products = (dequantize(xq).astype(np.float64) @ dequantize(wq).T for wq in wqs)
            return sum(float(((p - e) ** 2).sum()) for p, e in zip(products, exact, strict=True))

        errors = {None: error(np.ones(1))}
        errors |= {a: error(spread(config, place, factors(x_max, w_max, a)).astype(float)) for a in ALPHAS}
        chosen = smoothing.strength[step]
        assert (chosen is None) == (step not in smoothing.s)
        if chosen is not None:
            assert smoothing.s[step] == pytest.approx(factors(x_max, w_max, chosen), rel=1e-6)
        assert errors[chosen] <= errors[None] * (1 + 1e-5)
        assert errors[chosen] <= min(errors.values()) * (1 + 1e-3)


def test_weights_that_smoothing_takes_out_of_range_are_refused():
    checkpoint, _ = samples_for("llama-gqa-tied")
    s = np.full(64, 1e-5, F32)
    with pytest.raises(ModelError, match=r"smoothing takes layers.0.attn.norm beyond fp32"):
        ChannelScaling({"layers.0.attn.norm": s}).weight(
            checkpoint.config, "layers.0.attn.norm", np.full(64, 1e36, F32)
        )


def test_describe():
    chosen = ChannelScaling(
        strength={"layers.0.attn.norm": 0.5, "layers.1.attn.norm": 0.75, "layers.2.attn.norm": None}
    )
    assert next(iter(describe(chosen))) == "attn.norm  alpha median 0.62, 0.50 to 0.75; 1 of 3 layers not smoothed"
    assert any("layers.2.attn.norm" in line and "not smoothed" in line for line in describe(chosen, verbose=True))


# ---- static scales


def test_quantize_static_by_hand():
    x = np.array([[0.5, 1.5, 2.5, -0.5, 127.4, 128.0, -1e30, 0.0]], F32)
    q = quantize_static(x, F32(1))
    assert q.codes.tolist() == [[0, 2, 2, 0, 127, 127, -127, 0]]
    assert q.scales.tolist() == [[1.0]]
    q = quantize_static(np.concatenate([x, x]), F32(2))
    assert q.codes.tolist() == [[0, 1, 1, 0, 64, 64, -127, 0]] * 2
    assert q.scales.tolist() == [[2.0], [2.0]]
    assert not quantize_static(x, F32(0)).codes.any()
    assert not quantize_static(x, F32(1e-39)).codes.any()  # 1 / scale is no fp32 number
    assert static_scale(254.0) == 2
    assert static_scale(0.0) == 0
    assert static_scale(1e-38) == 0


def test_static_scales_are_the_largest_smoothed_activations(tmp_path):
    for name, alpha in (("tiny-llama", 0.5), ("tiny-qwen3", None)):
        checkpoint = Checkpoint(MODELS / name)
        smoothing = export_w8a8(
            checkpoint.path, tmp_path / "out.bin", CALIBRATION, alpha, 3, 40, static=True, progress=False
        )
        samples = calibration_samples(checkpoint.path, checkpoint.config, CALIBRATION.read_text(), 3, 40)
        recorders = [Recorder() for _ in samples]
        for sample, recorder in zip(samples, recorders, strict=True):
            forward(checkpoint.config, Smoothed(checkpoint, smoothing), sample, recorder)
        scheme = W8A8(tmp_path / "out.bin")
        assert list(scheme.activation_scales)[:5] == [*(f"layers.0.{p}" for p in PLACES), "layers.1.attn.norm"]
        assert len(scheme.activation_scales) == 17
        for step, scale in scheme.activation_scales.items():
            largest = max(np.abs(r.tensors[step]).max() for r in recorders)
            assert scale == pytest.approx(largest / 127, rel=1e-5), step
            assert scale == F32(smoothing.largest[step]) / F32(127)
        recorder = Recorder()
        forward(scheme.config, scheme, samples[0], recorder)
        for step, scale in scheme.activation_scales.items():
            assert recorder.tensors[step + ".s"].tolist() == [[float(scale)]] * len(samples[0])
    assert STATIC_PLACES == PLACES


# ---- the file


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("variant", W8A8_VARIANTS)
def test_the_file_holds_the_quantized_smoothed_weights(tmp_path, name, variant):
    """Read the whole file with nothing but struct and numpy, then by W8A8."""
    options, out = W8A8_VARIANTS[variant], tmp_path / "model.bin"
    checkpoint = rotated(Checkpoint(MODELS / name), options.get("rotate"))
    smoothing = export_w8a8(checkpoint.path, out, CALIBRATION, 0.5, 2, 32, progress=False, **options)
    data, c = out.read_bytes(), checkpoint.config
    block, static = options.get("block", 0), options.get("static", False)

    assert struct.unpack_from("<Ii7iBi", data) == (
        0x616B3838, 1, c.dim, c.hidden_dim, c.n_layers, c.n_heads, c.n_kv_heads, c.vocab_size, c.max_seq_len,
        int(c.tied), block,
    )  # fmt: skip
    assert struct.unpack_from("<i", data, 0x4C) == (block,)
    offset, size, checksum, activations = struct.unpack_from("<QQIi", data, 0xA0)
    assert (offset + size, activations) == (len(data), int(static))
    assert data[0xB8:0x100] == bytes(72)
    assert checksum == zlib.crc32(data[offset:], zlib.crc32(data[:0xB0] + bytes(4) + data[0xB4:0x100]))

    scheme, position = W8A8(out), HEADER_SIZE
    assert (scheme.group_size, scheme.static) == (block, static)
    for norm, _ in norm_shapes(c):
        expected = load_smoothed(checkpoint, norm, smoothing, interleaved=True)
        assert data[position : position + expected.nbytes] == expected.tobytes(), norm
        assert np.array_equal(scheme.vector(norm), expected)
        position += expected.nbytes
    if static:
        n = 4 * c.n_layers + 1
        assert np.frombuffer(data, "<f4", n, position).tolist() == list(scheme.activation_scales.values())
        position += 4 * n
    for matrix, _ in matrix_shapes(c):
        weight = load_smoothed(checkpoint, matrix, smoothing, interleaved=True)
        for part, found in zip(quantize(weight, block or weight.shape[1]), scheme.matrix(matrix), strict=True):
            assert data[position : position + part.nbytes] == part.tobytes(), matrix
            assert np.array_equal(found, part)
            position += part.nbytes
    assert position == offset
    f = scheme.config
    assert (f.norm_eps, f.rope_theta) == (F32(c.norm_eps), F32(c.rope_theta))
    assert {**f.__dict__, "norm_eps": 0, "rope_theta": 0} == {**c.__dict__, "norm_eps": 0, "rope_theta": 0}


def test_a_file_that_is_no_w8a8_file_is_refused(tmp_path):
    out = tmp_path / "model.bin"
    export_w8a8(MODELS / "tiny-llama", out, alpha=None, with_tokenizer=False, progress=False)
    data = out.read_bytes()
    end = len(data)

    def refused(text, changed):
        out.write_bytes(changed)
        with pytest.raises(ModelError) as error:
            W8A8(out)
        assert str(error.value).startswith(f"{out}: ")
        assert text in str(error.value)

    header_with = partial(with_header_field, data)
    refused("too short", data[:100])
    refused("is a q8 file, expected w8a8", struct.pack("<I", 0x616B3432) + data[4:])
    refused("checksum", data[:0x10] + b"\5" + data[0x11:])
    refused(f"the header says {end}", data[:-4])
    refused("too soon", header_with(0x10, 5))  # another layer
    refused("weights end at byte", header_with(0x10, 3))
    refused("too soon", header_with(0xB4, 1))  # static scales that are not there
    refused("does not divide", header_with(0x25, 48))
    with pytest.raises(ModelError, match=r"absent: no such file"):
        W8A8(tmp_path / "absent")


# ---- golden files and traces


# The exporter's own work is done again for one file; with FULL=1 for all.
ANEW = [("tiny-qwen3", "w8a8-static")]


@pytest.mark.parametrize(("name", "variant"), [(n, v) for n in TINY for v in W8A8_VARIANTS] if FULL else ANEW)
def test_the_exporter_writes_the_golden_file(tmp_path, name, variant):
    assert_golden_file(name, variant, tmp_path)


@pytest.mark.parametrize("variant", W8A8_VARIANTS)
@pytest.mark.parametrize("name", TINY)
def test_stored_traces_are_what_the_reference_computes(name, variant):
    scheme = W8A8(GOLDEN_FILES / f"{name}.{variant}.bin")
    stored = load_file(DATA / f"{name}.{variant}.trace.safetensors")
    golden = json.loads((DATA / f"{name}.{variant}.json").read_text())
    recorder = Recorder()
    tokens = recorder("tokens", stored["tokens"])
    assert tokens.tolist() == golden["trace_ids"]
    forward(scheme.config, scheme, tokens, recorder)
    reports = compare(stored, recorder.tensors)
    assert len(reports) > 4 * 20
    assert all(r.ok for r in reports), [r for r in reports if not r.ok]
    assert all(r.ok for r in replay(partial(forward, scheme.config, scheme), stored))
    assert golden["held_out"][variant] == pytest.approx(golden["held_out"]["fp32"], rel=0.02)


def test_stored_op_vectors_cover_rows_and_static_scales():
    stored = load_file(DATA / "ops.safetensors")
    assert {f"quantize.row{n}.codes" for n in (64, 384, 2048)} <= stored.keys()
    for case in ("one", "tenth", "zero", "tiny", "two"):
        x, scale, codes = (stored[f"quantize_static.{case}.{part}"] for part in ("x", "scale", "codes"))
        assert np.array_equal(quantize_static(x, scale[0]).codes, codes)
        assert codes.any() == (case not in ("zero",))
    assert np.abs(stored["matmul.extreme.2048g2048.accumulators"]).max() == 2048 * 127 * 128


@pytest.mark.parametrize("variant", W8A8_VARIANTS)
def test_diff_names_what_is_wrong(variant):
    scheme = W8A8(GOLDEN_FILES / f"tiny-llama.{variant}.bin")
    trace = load_file(DATA / f"tiny-llama.{variant}.trace.safetensors")

    def one_code(codes):
        codes[1, 3] += 1 if codes[1, 3] < 127 else -1
        return codes

    run = partial(forward, scheme.config, scheme)
    assert first_bad(compare(trace, trace)) is None
    for step, change in [
        ("layers.2.attn.mix.q", one_code),
        ("layers.1.ffn.swiglu.s", lambda s: s * F32(1.000001)),
        ("layers.3.ffn.down_proj", lambda x: x * F32(1.0001)),
    ]:
        other = broken(trace, step, change)
        assert first_bad(compare(trace, other)) in (step, step.replace(".s", ".q"))
        assert first_bad(replay(run, other)) == step


def test_golden_commands_take_a_file(tmp_path):
    file, trace = GOLDEN_FILES / "tiny-llama.w8a8.bin", DATA / "tiny-llama.w8a8.trace.safetensors"
    done = run_golden("diff", trace, trace, "--model", file)
    assert (done.returncode, done.stderr) == (0, "")
    assert "are equal to the bit" in done.stdout
    done = run_golden("diff", trace, trace, "--model", GOLDEN_FILES / "tiny-llama.w8a8-static.bin")
    assert done.returncode == 1
    (tmp_path / "text").write_text(CALIBRATION.read_text()[:2000])
    values = []
    for more in ([], ["--file", file], ["--file", GOLDEN_FILES / "tiny-llama.w8a8-static.bin"]):
        done = run_golden("ppl", MODELS / "tiny-llama", tmp_path / "text", *more)
        assert done.returncode == 0, done.stderr
        values.append(float(done.stdout.split()[1]))
    assert len(set(values)) == 3
    assert values[1] == pytest.approx(values[0], rel=0.02)
    done = run_golden("ppl", FOLDER / "llama-gqa-tied", tmp_path / "text", "--file", file)
    assert done.stderr == f"golden: {FOLDER / 'llama-gqa-tied' / 'tokenizer.json'}: no such file\n"
    for bad in (ROOT / "Makefile", tmp_path / "absent"):
        done = run_golden("diff", trace, trace, "--model", bad)
        assert done.returncode == 1
        assert done.stderr.startswith(f"golden: {bad}: ")
        assert done.stderr.count("\n") == 1


def test_a_trace_of_another_scheme_is_told_apart(tmp_path):
    """Dynamic and static traces of the same model do not pass for each other."""
    static = load_file(DATA / "tiny-llama.w8a8-static.trace.safetensors")
    scheme, recorder = W8A8(GOLDEN_FILES / "tiny-llama.w8a8.bin"), Recorder()
    recorder("tokens", static["tokens"])
    forward(scheme.config, scheme, static["tokens"], recorder)
    write_trace(tmp_path / "dynamic", recorder.tensors)
    trace = DATA / "tiny-llama.w8a8-static.trace.safetensors"
    for a, b in ((trace, tmp_path / "dynamic"), (tmp_path / "dynamic", trace)):
        assert run_golden("diff", a, b).returncode == 1


# ---- the command line


export = partial(run_export, "w8a8")


def test_command_line(tmp_path):
    out = tmp_path / "out.bin"
    short = ("--calib", CALIBRATION, "--samples", 2, "--seq-len", 32)
    done = export(MODELS / "tiny-llama", out, *short, "--quiet")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.count("\n") == 1
    assert (W8A8(out).group_size, W8A8(out).static) == (0, False)
    half = out.read_bytes()
    export(MODELS / "tiny-llama", out, *short, "--quiet", "--alpha", "0.50")
    assert out.read_bytes() == half
    export(MODELS / "tiny-llama", out, *short, "--quiet", "--alpha", "0.8")
    assert out.read_bytes() != half
    done = export(MODELS / "tiny-llama", out, *short, "--alpha", "auto", "--verbose", "--act", "static", "--quiet")
    assert done.returncode == 0
    assert sum(line.startswith(p) for line in done.stderr.splitlines() for p in PLACES) == 4
    assert done.stderr.count("  layers.") == 16
    assert W8A8(out).static
    done = export(MODELS / "tiny-llama", out, "--no-smooth", "--block", 32, "--no-tokenizer", "--quiet")
    assert done.returncode == 0
    assert W8A8(out).group_size == 32
    assert struct.unpack_from("<QQ", out.read_bytes(), 0xA0) == (out.stat().st_size, 0)
    assert [p.name for p in tmp_path.iterdir()] == ["out.bin"]


CALIB = ("--calib", CALIBRATION)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ((), "smoothing needs a text to calibrate with: --calib TEXT"),
        (("--no-smooth", "--act", "static"), "--act static needs a text to calibrate with: --calib TEXT"),
        ((*CALIB, "--block", 32, "--act", "static"), "--act static has one scale for a whole row, --block 32 has more"),
        ((*CALIB, "--block", 64), "--block is 64, expected 0 or 32"),
        ((*CALIB, "--alpha", "1.5"), "--alpha is 1.5, expected 0 to 1, or auto"),
        ((*CALIB, "--alpha", "nan"), "--alpha is nan, expected 0 to 1, or auto"),
        ((*CALIB, "--alpha", "best"), "--alpha is best, expected 0 to 1, or auto"),
        ((*CALIB, "--alpha", "0.5", "--no-smooth"), "--alpha and --no-smooth exclude each other"),
        ((*CALIB, "--no-smooth"), "--calib would change nothing with --no-smooth and dynamic activations"),
        (("--no-smooth", "--samples", 4), "--samples would change nothing with --no-smooth and dynamic activations"),
        (("--no-smooth", "--seq-len", 64), "--seq-len would change nothing with --no-smooth and dynamic activations"),
        ((*CALIB, "--samples", 0), "--samples is 0, expected 1 or more"),
        ((*CALIB, "--seq-len", 1), "--seq-len is 1, expected 2 to the model's 512"),
        ((*CALIB, "--seq-len", 513), "--seq-len is 513, expected 2 to the model's 512"),
        (("--calib", "absent.txt"), "absent.txt: no such file"),
        (("--calib", "models"), "models: Is a directory"),
        (("--calib", "/dev/null"), "the calibration text is empty"),
        (("--calib", "golden/data/ops.safetensors"), "golden/data/ops.safetensors: not UTF-8 at byte"),
    ],
)
def test_options_that_cannot_be_are_one_line_and_write_nothing(tmp_path, options, text):
    done = export(MODELS / "tiny-llama", tmp_path / "out.bin", *options)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("export: " + text)
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_models_that_cannot_be_are_refused(tmp_path):
    def refused(hf_dir, text, calibration=CALIBRATION, **options):
        with pytest.raises(ModelError) as error:
            export_w8a8(hf_dir, tmp_path / "out.bin", calibration, progress=False, **options)
        assert text in str(error.value)
        assert "\n" not in str(error.value)
        assert not (tmp_path / "out.bin").exists()

    no_tokenizer = FOLDER / "llama-gqa-tied"
    refused(no_tokenizer, "tokenizer.json: no such file, and calibration needs", with_tokenizer=False)
    export_w8a8(no_tokenizer, tmp_path / "ids.bin", alpha=None, with_tokenizer=False, progress=False)

    hf_dir = shutil.copytree(no_tokenizer, tmp_path / "hf")
    (hf_dir / "tokenizer.json").write_text("{}")
    refused(hf_dir, f"{hf_dir / 'tokenizer.json'}: ", with_tokenizer=False)
    shutil.copy(MODELS / "tiny-llama" / "tokenizer.json", hf_dir)  # 2048 tokens, the model has 160
    refused(hf_dir, "vocab_size is 160", with_tokenizer=False)

    config = json.loads((no_tokenizer / "config.json").read_text()) | {"intermediate_size": 126}
    weights = load_file(no_tokenizer / "model.safetensors")
    for name in weights:
        if "gate_proj" in name or "up_proj" in name:
            weights[name] = weights[name][:126]
        if "down_proj" in name:
            weights[name] = np.ascontiguousarray(weights[name][:, :126])
    (hf_dir / "config.json").write_text(json.dumps(config))
    save_file(weights, hf_dir / "model.safetensors")
    refused(hf_dir, "intermediate_size is 126, expected a multiple of 4", None, alpha=None)
    refused(hf_dir, "intermediate_size is 126, not a multiple of --block 32", None, alpha=None, block=32)


def test_a_short_text_is_a_warning_with_both_numbers(tmp_path):
    (tmp_path / "short.txt").write_text("Once upon a time there was a girl named Mia.")
    done = export(MODELS / "tiny-llama", tmp_path / "out.bin", "--calib", tmp_path / "short.txt", "--quiet")
    assert done.returncode == 0
    n = 1 + len(encode(MODELS / "tiny-llama", (tmp_path / "short.txt").read_text())[0])
    first, second = done.stderr.splitlines()
    assert first.startswith(f"export: warning: the calibration text gives {n} ids, 16 samples of 512 would take 8192")
    assert second.startswith(str(tmp_path / "out.bin"))


def test_an_interrupted_calibration_leaves_the_old_file(tmp_path, monkeypatch):
    out = tmp_path / "out.bin"
    out.write_bytes(b"old")

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(observing, "forward_layer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export_w8a8(MODELS / "tiny-llama", out, CALIBRATION, n_samples=2, seq_len=32, progress=False)
    assert out.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["out.bin"]
