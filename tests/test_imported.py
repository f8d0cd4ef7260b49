"""Checkpoints of compressed-tensors into model files, code for code: W8A8 for runq_w8a8, packed ones for runq_gptq.

tests/hf/imported has what llmcompressor wrote, with transformers' logits (tests/imported_fixtures.py). Others are
written here, by export/compressed_tensors.py or by `packed` below.
"""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from export.gptq import export_gptq
from export.w8a8 import export_w8a8, import_w8a8, is_int8
from formats.checkpoint import Checkpoint
from formats.compressed_config import READERS
from formats.errors import ModelError
from formats.foreign import storage_of
from formats.gptq import MatrixFormat
from formats.packing import PACK_QUANTIZED, Packing
from formats.tensors import matrix_shapes, norm_shapes
from golden.forward import forward, hf_name, load_weight, permute_rows, rmsnorm
from golden.gptq import GPTQ, stands_for
from golden.q8 import dequantize, quantize
from golden.w8a8 import W8A8, static_places
from tests.helpers import CALIBRATION, F16, F32, MODELS, calibration, run_export
from tests.hf_fixtures import FOLDER
from tests.imported_fixtures import IMPORTED, MADE
from tests.served import Served, as_compressed_tensors, unrounded

BF16 = ml_dtypes.bfloat16
LLAMA = FOLDER / "llama-scaled-rope"  # rows of 64 and 128, heads of 32
ROTATED = ("attn.q_proj", "attn.k_proj")


def read(hf_dir, out):
    """The model file of a directory of either kind, and how the directory is packed."""
    packing = storage_of(hf_dir).form("")
    if not is_int8(hf_dir):
        export_gptq(hf_dir, out, with_tokenizer=False, progress=False)
        return GPTQ(out), packing
    act = "dynamic" if packing.static else None  # there is no tokenizer to calibrate with
    import_w8a8(hf_dir, out, act, with_tokenizer=False, progress=False)
    return W8A8(out), packing


# ---- what llmcompressor writes


@pytest.mark.parametrize("name", MADE)
def test_logits_are_those_of_transformers(tmp_path, name):
    """With the library's own rounding of activations, and with embedding and classifier as they are."""
    model, packing = read(IMPORTED / name, tmp_path / "m.bin")
    expected, checkpoint = load_file(IMPORTED / name / "expected.safetensors"), Checkpoint(IMPORTED / name, packing)
    served = Served(model, checkpoint, as_compressed_tensors if isinstance(model, W8A8) else unrounded)
    if packing.static:
        served._static = input_scales(IMPORTED / name, model.config)
    logits = forward(model.config, served, expected["tokens"])
    error = np.abs(logits - expected["logits"]).max(axis=1) / np.abs(expected["logits"]).max()
    assert np.median(error) < 1e-5
    # Of int8 activations, a code may round the other way.
    assert error.max() < (2e-2 if isinstance(model, W8A8) and not packing.static else 1e-5)


def input_scales(hf_dir, config):
    """The static scales of a directory by place: of the matrix that reads it first."""
    tensors = load_file(hf_dir / "model.safetensors")
    first = {"attn.norm": "self_attn.q_proj", "attn.mix": "self_attn.o_proj",
             "ffn.norm": "mlp.gate_proj", "ffn.swiglu": "mlp.down_proj"}  # fmt: skip
    return {
        place: tensors[f"model.layers.{place.split('.')[1]}.{first[place.split('.', 2)[2]]}.input_scale"].astype(F32)[0]
        for place in static_places(config)[:-1]
    }


# ---- W8A8


@pytest.fixture(scope="module", params=["dynamic", "static"])
def written(request, tmp_path_factory):
    """A model file, and the directory that was written beside it."""
    folder = tmp_path_factory.mktemp("w8a8")
    export_w8a8(MODELS / "tiny-qwen3", folder / "m.bin", **calibration(2, 64), static=request.param == "static",
                hf_out=folder / "hf", progress=False)  # fmt: skip
    return folder


def imported(hf_dir, out, *options):
    """What the command line makes of a directory."""
    done = run_export("w8a8", hf_dir, out, "--quiet", *options)
    assert (done.returncode, done.stdout) == (0, "")
    return W8A8(out)


def test_w8a8_out_and_in_again(written, tmp_path):
    first = W8A8(written / "m.bin")
    text = ("--calib", CALIBRATION, "--samples", 2, "--seq-len", 64) if first.static else ()
    second = imported(written / "hf", tmp_path / "again.bin", *text, "--hf-out", tmp_path / "out")
    assert second.static == first.static
    for name, _ in norm_shapes(first.config):
        assert np.array_equal(first.vector(name), second.vector(name)), name
    for name, _ in matrix_shapes(first.config):
        for a, b in zip(first.matrix(name), second.matrix(name), strict=True):
            assert np.array_equal(a, b), name
    *scales, last = first.activation_scales.items() if first.static else [None]
    assert scales == list(second.activation_scales.items())[:-1]
    if first.static:  # that of the classifier's input is measured again, on the model with rounded weights
        assert second.activation_scales["norm"] == pytest.approx(last[1], rel=0.02)
    # Out again: the same directory.
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", written / "hf"))
    assert ours.keys() == theirs.keys()
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)
    assert (tmp_path / "out" / "config.json").read_text() == (written / "hf" / "config.json").read_text()


def test_static_scales_may_be_left_out(written, tmp_path):
    model = imported(written / "hf", tmp_path / "m.bin", "--act", "dynamic")
    assert not model.static
    name = "layers.1.attn.k_proj"
    assert np.array_equal(model.matrix(name).codes, W8A8(written / "m.bin").matrix(name).codes)


def changed(source, out, change=None, config=None):
    """A copy of a directory with its tensors, and its config.json, changed by functions of them."""
    shutil.copytree(source, out)
    if change:
        tensors = load_file(out / "model.safetensors")
        change(tensors)
        save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, out / "model.safetensors")
    if config:
        fields = json.loads((out / "config.json").read_text())
        config(fields["quantization_config"])
        (out / "config.json").write_text(json.dumps(fields))
    return out


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_codes_of_the_whole_range_and_scales_of_every_type(tmp_path, dtype):
    """-128 among them, which the package's rule gives; the classifier and the embedding are rounded."""
    rng, drawn = np.random.default_rng(1), {}

    def draw(tensors):
        for name in [n for n in tensors if n.endswith("weight_scale")]:
            weight = name.removesuffix("_scale")
            tensors[weight] = rng.integers(-128, 128, tensors[weight].shape).astype(np.int8)
            tensors[name] = rng.uniform(0.001, 0.02, tensors[name].shape).astype(dtype)
            tensors[name][:2] = 0
            drawn[weight] = tensors[weight], tensors[name].astype(F32)

    source = changed(IMPORTED / "qwen3-w8a8", tmp_path / "hf", draw)
    model, packing = read(source, tmp_path / "m.bin")
    config, checkpoint = model.config, Checkpoint(source, packing)
    for name, (_, n_in) in matrix_shapes(config):
        if not name.startswith("layers."):
            expected = quantize(load_weight(checkpoint, name, interleaved=True), n_in)
        else:
            expected = drawn[hf_name(config, name)]
            if name.endswith(ROTATED):
                expected = [permute_rows(rows, config.head_dim) for rows in expected]
        for ours, theirs in zip(model.matrix(name), expected, strict=True):
            assert np.array_equal(ours, theirs), name
    assert min(codes.min() for codes, _ in drawn.values()) == -128


def test_what_the_classifiers_input_needs_is_measured_on_the_dequantized_model(tmp_path):
    """With all weights of the layers taken to 0 the classifier reads the normed embedding, whatever the codes were."""
    hf_dir = tmp_path / "first"
    export_w8a8(MODELS / "tiny-llama", tmp_path / "m.bin", **calibration(2, 32), static=True, hf_out=hf_dir,
                progress=False)  # fmt: skip

    def silent(tensors):
        for name in [n for n in tensors if n.endswith("weight_scale")]:
            tensors[name][:] = 0

    source = changed(hf_dir, tmp_path / "hf", silent)
    text = ("--calib", CALIBRATION, "--samples", 2, "--seq-len", 32)
    model = imported(source, tmp_path / "2.bin", *text)
    embedding = Checkpoint(MODELS / "tiny-llama").tensor("model.embed_tokens.weight")
    normed = rmsnorm(embedding, model.vector("norm"), model.config.norm_eps)
    largest = np.abs(normed).max(axis=1) / F32(127)  # by token
    assert np.isclose(largest, model.activation_scales["norm"], rtol=1e-5).any()


def test_the_early_name_of_the_configuration(tmp_path):
    """It is read, named in messages, and does not come out again."""
    source = changed(IMPORTED / "qwen3-w8a8", tmp_path / "hf")
    fields = json.loads((source / "config.json").read_text())
    fields["compression_config"] = fields.pop("quantization_config")
    (source / "config.json").write_text(json.dumps(fields))
    options = ("--no-tokenizer", "--quiet")
    done = run_export("w8a8", source, tmp_path / "m.bin", *options, "--hf-out", tmp_path / "out")
    assert done.returncode == 0
    read(IMPORTED / "qwen3-w8a8", tmp_path / "expected.bin")
    assert (tmp_path / "m.bin").read_bytes() == (tmp_path / "expected.bin").read_bytes()
    assert "compression_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    fields["compression_config"]["format"] = "marlin-24"
    (source / "config.json").write_text(json.dumps(fields))
    done = run_export("w8a8", source, tmp_path / "n.bin", *options)
    assert done.stderr.startswith(f'export: {source}/config.json: compression_config.format is "marlin-24", ')


# ---- packed weights


def words(codes, bits):
    """Codes of a row in int32 words, the first lowest; rows are padded to whole words."""
    per_word = 32 // bits
    padded = np.pad(codes.astype(np.int64), ((0, 0), (0, -codes.shape[1] % per_word)))
    values = (padded.reshape(len(codes), -1, per_word) << (bits * np.arange(per_word))).sum(axis=2)
    return values.astype(np.uint32).view(np.int32)


def packed(source, out, bits, group, symmetric, dtype=BF16, seed=0):
    """Writes a "pack-quantized" directory of random codes; returns them by matrix: codes, zero points, scales."""
    rng, drawn, tensors = np.random.default_rng(seed), {}, load_file(source / "model.safetensors")
    config = Checkpoint(source).config
    for step, (n_out, n_in) in matrix_shapes(config):
        if not step.startswith("layers."):
            continue
        name, n_groups = hf_name(config, step), n_in // (group or n_in)
        codes = rng.integers(0, 1 << bits, (n_out, n_in))
        zeros = np.full((n_out, n_groups), 1 << (bits - 1))
        if not symmetric:
            zeros = rng.integers(0, 1 << bits, zeros.shape)
            tensors[f"{name}_zero_point"] = words(zeros.T, bits).T
        scales = rng.uniform(0.001, 0.02, zeros.shape).astype(dtype)
        del tensors[name]
        tensors |= {f"{name}_packed": words(codes, bits), f"{name}_scale": scales,
                    f"{name}_shape": np.array([n_out, n_in])}  # fmt: skip
        drawn[step] = codes, zeros, scales.astype(F32)
    out.mkdir()
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, out / "model.safetensors")
    fields = json.loads((source / "config.json").read_text())
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "dynamic": False,
               "strategy": "group" if group else "channel", "group_size": group or None}  # fmt: skip
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    fields["quantization_config"] = {"quant_method": "compressed-tensors", "format": PACK_QUANTIZED,
                                     "config_groups": {"group_0": scheme}, "ignore": ["lm_head"]}  # fmt: skip
    (out / "config.json").write_text(json.dumps(fields))
    return drawn


# Rows of 128 alone, so that a group of 128 fits: queries, and what down_proj reads, are as long as the model is wide.
WIDE = MODELS / "tiny-qwen3"
PACKED = [(bits, group, symmetric) for bits in (4, 8) for group in (0, 32, 64, 128) for symmetric in (True, False)
          if bits == 4 or symmetric]  # fmt: skip


@pytest.mark.parametrize(("bits", "group", "symmetric"), PACKED)
def test_packed_codes_zero_points_and_scales_are_those_of_the_checkpoint(tmp_path, bits, group, symmetric):
    source = WIDE if group == 128 else LLAMA
    drawn = packed(source, tmp_path / "hf", bits, group, symmetric)
    model, _ = read(tmp_path / "hf", tmp_path / "m.bin")
    config = model.config
    assert model.layout.of("layers.0.attn.q_proj") == MatrixFormat(bits, group)
    for step, parts in drawn.items():
        codes, zeros, scales = (permute_rows(a, config.head_dim) if step.endswith(ROTATED) else a for a in parts)
        found = model.stored(step)
        if bits == 8:
            assert np.array_equal(found.codes, codes - 128), step
        else:
            assert np.array_equal(found.codes, codes), step
            assert np.array_equal(found.zeros, zeros), step
        assert np.array_equal(found.scales.astype(F32), scales), step


def test_words_of_the_package_are_read(tmp_path):
    """A matrix of llmcompressor's checkpoint, unpacked bit by bit in Python."""
    name = "llama-w4a16-asym"
    tensors, (model, _) = load_file(IMPORTED / name / "model.safetensors"), read(IMPORTED / name, tmp_path / "m.bin")
    stem = "model.layers.1.self_attn.o_proj.weight"
    packed_rows, zero_words, shape = (tensors[f"{stem}_{part}"] for part in ("packed", "zero_point", "shape"))
    n_out, n_in = shape.tolist()
    found = model.stored("layers.1.attn.o_proj")
    for i in range(0, n_out, 7):
        row = [int(packed_rows[i, j // 8]) >> 4 * (j % 8) & 15 for j in range(n_in)]
        assert found.codes[i].tolist() == row
        assert found.zeros[i].tolist() == [int(zero_words[i // 8, g]) >> 4 * (i % 8) & 15 for g in range(n_in // 64)]


def test_scales_that_are_no_fp16_numbers(tmp_path):
    """Small ones are rounded, with a warning; others are refused, as the file would stand for other weights."""
    packed(LLAMA, tmp_path / "hf", 4, 64, True)
    name = "model.layers.1.mlp.down_proj.weight_scale"

    def small(tensors):
        tensors[name][3, 1] = BF16(1e-6)

    changed(tmp_path / "hf", tmp_path / "small", small)
    done = run_export("gptq", tmp_path / "small", tmp_path / "m.bin", "--quiet", "--no-tokenizer")
    assert done.stderr.startswith(
        f"export: warning: {tmp_path}/small: 1 scales below 2^-14 are rounded to fp16, by at most 2^-25\n"
    )
    found = GPTQ(tmp_path / "m.bin").stored("layers.1.ffn.down_proj").scales[3, 1]
    assert found != 0
    assert abs(float(found) - float(BF16(1e-6))) <= 2.0**-25

    def third(tensors):
        tensors[name] = tensors[name].astype(F32)
        tensors[name][3, 1] = 1 / 3

    changed(tmp_path / "hf", tmp_path / "third", third)
    with pytest.raises(ModelError) as error:
        export_gptq(tmp_path / "third", tmp_path / "n.bin", with_tokenizer=False, progress=False)
    text = "has 0.333333343, which is no fp16 number: not supported"
    assert str(error.value) == f"{tmp_path}/third: tensor {name} {text}"


def test_rows_of_8_bits_keep_scales_of_any_type(tmp_path):
    drawn = packed(LLAMA, tmp_path / "hf", 8, 0, True, dtype=F32)
    model, _ = read(tmp_path / "hf", tmp_path / "m.bin")
    step = "layers.0.ffn.up_proj"
    assert np.array_equal(model.stored(step).scales, drawn[step][2])


def test_what_a_packed_model_stands_for_comes_out_as_a_gptq_checkpoint(tmp_path):
    packed(LLAMA, tmp_path / "hf", 4, 64, True)
    export_gptq(tmp_path / "hf", tmp_path / "m.bin", hf_out=tmp_path / "out", with_tokenizer=False, progress=False)
    export_gptq(tmp_path / "out", tmp_path / "again.bin", with_tokenizer=False, progress=False)
    assert (tmp_path / "m.bin").read_bytes() == (tmp_path / "again.bin").read_bytes()


def test_a_group_whose_inputs_are_scattered(tmp_path):
    """`actorder: group`: weight_g_idx has the group of each input. -1 throughout: there is no order."""
    drawn, order = packed(LLAMA, tmp_path / "hf", 4, 64, True), np.random.default_rng(0).permutation(128)

    def scatter(tensors):
        for step in drawn:
            if step.endswith("down_proj"):
                tensors[f"{hf_name(config, step)}_g_idx"] = (order // 64).astype(np.int32)
            elif step.endswith("o_proj"):
                tensors[f"{hf_name(config, step)}_g_idx"] = np.full(len(order), -1, np.int32)

    config = Checkpoint(LLAMA).config
    source = changed(tmp_path / "hf", tmp_path / "group", scatter, at("weights.actorder", "group"))
    model, packing = read(source, tmp_path / "m.bin")
    step = "layers.1.ffn.down_proj"
    codes, zeros, scales = drawn[step]
    weight = ((codes - zeros[:, order // 64]) * scales[:, order // 64]).astype(F32)
    assert np.array_equal(Checkpoint(source, packing).tensor(hf_name(config, step)), weight)
    gathered = model.orders["layers.1.ffn.swiglu"]
    assert np.array_equal(stands_for(model.stored(step)), weight[:, gathered])
    assert np.array_equal(model.orders["layers.1.attn.mix"], np.arange(config.q_dim))


def test_a_matrix_that_is_ignored(tmp_path):
    """It is rounded as an unquantized model's, and the others keep their codes."""
    weight = np.random.default_rng(0).normal(0, 0.1, (64, 64)).astype(F32)

    def plain(tensors):
        without(f"{K}.weight_scale")(tensors)
        tensors[f"{K}.weight"] = weight

    source = changed(IMPORTED / "qwen3-w8a8", tmp_path / "hf", plain)
    model, _ = read(source, tmp_path / "m.bin")
    found, expected = model.matrix("layers.1.attn.k_proj"), quantize(weight, 64)
    assert np.array_equal(found.codes, permute_rows(expected.codes, model.config.head_dim))
    before, _ = read(IMPORTED / "qwen3-w8a8", tmp_path / "before.bin")
    for ours, theirs in zip(model.matrix(step := "layers.1.attn.q_proj"), before.matrix(step), strict=True):
        assert np.array_equal(ours, theirs)


def test_groups_of_modules(tmp_path):
    """A module has the form of the group that names it, by a regular expression or whole; others that of "Linear"."""
    packed(LLAMA, tmp_path / "hf", 4, 64, True)
    group = json.loads((tmp_path / "hf" / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    eight = group | {"targets": ["re:.*down_proj"], "weights": group["weights"] | {"num_bits": 8}}
    whole = group | {"targets": [Q], "weights": group["weights"] | {"strategy": "channel", "group_size": None}}
    source = changed(tmp_path / "hf", tmp_path / "two", None, at("config_groups", {"a": group, "b": eight, "c": whole}))
    form = storage_of(source).form
    assert [(form(m).bits, form(m).group_size) for m in (K, "model.layers.0.mlp.down_proj", Q)] == [
        (4, 64), (8, 64), (4, 0)
    ]  # fmt: skip


# ---- what cannot be repacked


def at(path, value):
    """A change of quantization_config: the field at a path, such as weights.num_bits, becomes a value."""

    def apply(config):
        fields = config["config_groups"]["group_0"] if path.split(".")[0] in GROUP_FIELDS else config
        *inside, last = path.split(".")
        for name in inside:
            fields = fields[name]
        fields[last] = value

    return apply


def tensor(name, change):
    def apply(tensors):
        tensors[name] = change(tensors[name])

    return apply


def without(name):
    def apply(tensors):
        del tensors[name]

    return apply


GROUP_FIELDS = ("weights", "input_activations", "output_activations", "targets")
GROUP = "quantization_config.config_groups.group_0"
Q, K = ("model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.k_proj")
FORMATS = " or ".join(map(json.dumps, (*READERS, "mixed-precision")))
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}

# kind -> the directory, and changes of its tensors or its config, with what the line says behind the path.
BAD_W8A8 = {
    "another format": (None, at("format", "marlin-24"), f'quantization_config.format is "marlin-24", supported is '
                       f"{FORMATS}"),
    "fp8 weights": (None, at("weights", FP8), f'{GROUP}.weights.type is "float", supported is "int"'),
    "blocks": (None, at("weights.strategy", "block"), f'{GROUP}.weights.strategy is "block", supported is "channel"'),
    "groups": (None, at("weights.group_size", 128), f"{GROUP}.weights.group_size is 128, supported is -1"),
    "4 bits": (None, at("weights.num_bits", 4), f"{GROUP}.weights.num_bits is 4, supported is 8"),
    "asymmetric weights": (None, at("weights.symmetric", False), f"{GROUP}.weights.symmetric is false, supported is "
                           "true"),
    "dynamic weights": (None, at("weights.dynamic", True), f"{GROUP}.weights.dynamic is true, supported is false"),
    "an order of activations": (None, at("weights.actorder", "group"), f'{GROUP}.weights.actorder is "group", '
                                'supported is false or "weight" or "static"'),
    "unquantized activations": (None, at("input_activations", None), f"{GROUP}.input_activations.num_bits is null, "
                                "supported is 8"),
    "asymmetric activations": (None, at("input_activations.symmetric", False), f"{GROUP}.input_activations.symmetric "
                               "is false, supported is true"),
    "activations in groups": (None, at("input_activations.strategy", "group"), f"{GROUP}.input_activations.strategy "
                              'is "group", supported is "token"'),
    "quantized outputs": (None, at("output_activations", {"num_bits": 8}), f"{GROUP}.output_activations is "
                          '{"num_bits": 8}: not supported'),
    "an unknown field": (None, at("weights.rotation", "hadamard"), f'{GROUP}.weights.rotation is "hadamard": this '
                         "field is not supported"),
    "an unknown field on top": (None, at("extra", [1]), "quantization_config.extra is [1]: this field is not "
                                "supported"),
    "transforms": (None, at("transform_config", {"config_groups": {"u": 1}}), "quantization_config.transform_config."
                   'config_groups is {"u": 1}: not supported'),
    "sparse codes": (None, at("sparsity_config", {"format": "sparse-24-bitmask"}), "quantization_config."
                     'sparsity_config.format is "sparse-24-bitmask", supported is "dense"'),
    "no groups": (None, at("config_groups", {}), "quantization_config.config_groups is {}: expected at least one"
                  " group"),
    "not compressed": (None, at("quantization_status", "initialized"), "quantization_config.quantization_status is "
                       '"initialized", supported is "compressed" or "frozen"'),
    "scales of another shape": (tensor(f"{K}.weight_scale", lambda s: s[:, 0]), None, f"tensor {K}.weight_scale has "
                                "shape (64,), config.json implies (64, 1)"),
    "codes of another type": (tensor(f"{K}.weight", lambda w: w.astype(np.int32)), None, f"tensor {K}.weight has type "
                              "I32, supported are I8"),
    "negative scales": (tensor(f"{K}.weight_scale", lambda s: -s), None, f"tensor {K}.weight_scale has -"),
    "a scale that is no number": (tensor(f"{K}.weight_scale", lambda s: s * F32(np.nan)), None, f"tensor "
                                  f"{K}.weight_scale has values that are not finite"),
    "a zero point": (lambda t: t.update({f"{K}.weight_zero_point": np.ones((64, 1), np.int8)}), None,
                     f"tensor {K}.weight_zero_point is not zero: not supported"),
    "a quantized classifier": (lambda t: t.update({"lm_head.weight_scale": np.ones((160, 1), F32)}), None,
                               "tensor lm_head.weight has type BF16, supported are I8"),
}  # fmt: skip
BAD_PACKED = {
    "3 bits": (None, at("weights.num_bits", 3), f"{GROUP}.weights.num_bits is 3, supported is 4 or 8"),
    "groups of 16": (None, at("weights.group_size", 16), f"{GROUP}.weights.group_size is 16, supported is 32 or 64 or "
                     "128"),
    "one scale": (None, at("weights.strategy", "tensor"), f'{GROUP}.weights.strategy is "tensor", supported is '
                  '"group" or "channel"'),
    "int8 activations": (None, at("input_activations", {"num_bits": 8}), f"{GROUP}.input_activations is "
                         '{"num_bits": 8}: not supported'),
    "an unknown order": (None, at("weights.actorder", "input"), f'{GROUP}.weights.actorder is "input", supported is '
                         'false or "group" or "weight" or "static"'),
    "other groups than it says": (None, at("weights.group_size", 64), "tensor model.layers.0.self_attn.q_proj."
                                  "weight_scale has shape (128, 2), config.json implies (128, 1)"),
    "scattered groups": (lambda t: t.update({f"{K}.weight_g_idx": np.zeros(64, np.int32)}), None,
                         f"tensor {K}.weight_g_idx does not have 32 inputs in each group"),
    "another shape than it says": (tensor(f"{K}.weight_shape", lambda s: s + 1), None, f"tensor {K}.weight_shape is "
                                   "[65, 65], expected [64, 64]"),
}  # fmt: skip
BAD = {("qwen3-w8a8", name): case for name, case in BAD_W8A8.items()}
BAD |= {("qwen3-w4a16-g32", name): case for name, case in BAD_PACKED.items()}


@pytest.mark.parametrize("case", BAD, ids=lambda case: f"{case[0]}: {case[1]}")
def test_what_cannot_be_repacked_is_one_line_with_file_field_and_value(tmp_path, case):
    change, config, says = BAD[case]
    source = changed(IMPORTED / case[0], tmp_path / "hf", change, config)
    done = run_export("w8a8" if "w8a8" in case[0] else "gptq", source, tmp_path / "m.bin", "--quiet", "--no-tokenizer")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"export: {source}")
    assert f": {says}" in done.stderr
    assert done.stderr.endswith(f": {says}\n") or says.endswith("-")
    assert not (tmp_path / "m.bin").exists()


def test_static_scales_of_one_input_are_the_same(tmp_path):
    name = "llama-w8a8-static"
    for part, value, says in (
        (K, 2.0, f"tensor {K}.input_scale is 2, {Q}.input_scale of the same input "),
        (Q, 0.0, f"tensor {Q}.input_scale is 0, expected a positive number\n"),
    ):
        source = changed(IMPORTED / name, tmp_path / part, tensor(f"{part}.input_scale", lambda s, v=value: s * 0 + v))
        done = run_export("w8a8", source, tmp_path / "m.bin", "--calib", CALIBRATION, "--no-tokenizer", "--quiet")
        assert done.returncode == 1
        assert done.stderr.startswith(f"export: {source}: {says}")
        assert not (tmp_path / "m.bin").exists()


@pytest.mark.parametrize(
    ("scheme", "name", "options", "says"),
    [
        ("w8a8", "qwen3-w8a8", ["--calib", CALIBRATION], "is quantized already, --calib would change nothing"),
        ("w8a8", "qwen3-w8a8", ["--samples", "3"], "is quantized already, --samples would change nothing"),
        ("w8a8", "qwen3-w8a8", ["--alpha", "0.4"], "is quantized already, --alpha would change nothing"),
        ("w8a8", "qwen3-w8a8", ["--no-smooth"], "is quantized already, --no-smooth would change nothing"),
        ("w8a8", "qwen3-w8a8", ["--block", "32"], "is quantized already, --block would change nothing"),
        ("w8a8", "qwen3-w8a8", ["--act", "static"], "is quantized for dynamic activations, --act static is not"),
        ("w8a8", "llama-w8a8-static", [], "has static scales, but none for the input of the classifier: --calib TEXT"),
        ("gptq", "qwen3-w4a16-g32", ["--group", "32"], "is quantized already, --group would change nothing"),
    ],
)  # fmt: skip
def test_options_that_do_not_go_with_a_quantized_checkpoint(tmp_path, scheme, name, options, says):
    done = run_export(scheme, IMPORTED / name, tmp_path / "m.bin", *options, "--quiet", "--no-tokenizer")
    assert done.returncode == 1
    assert done.stderr.startswith(f"export: {IMPORTED / name}: {says}")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "m.bin").exists()


def test_a_packing_says_which_tensors_there_are():
    parts = {part: shape for part, shape, _, needed in Packing(PACK_QUANTIZED, 4, 32, False).parts(12, 96) if needed}
    assert parts == {
        "weight_packed": (12, 12), "weight_scale": (12, 3), "weight_shape": (2,), "weight_zero_point": (2, 3)
    }  # fmt: skip


def test_dequantized_weights_are_codes_times_scales(tmp_path):
    model, packing = read(IMPORTED / "qwen3-w8a8", tmp_path / "m.bin")
    source, step = Checkpoint(IMPORTED / "qwen3-w8a8", packing), "layers.1.attn.k_proj"
    assert np.array_equal(load_weight(source, step, interleaved=True), dequantize(model.matrix(step)))
