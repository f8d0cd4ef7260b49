"""Mixtures of experts: config, forward pass, model files and their export."""

import json
import shutil
import struct
import zlib
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from export.moe import export_moe
from formats.checkpoint import DENSE, SPARSE, Checkpoint, ModelError, read_config, tensor_shapes
from formats.model_file import read_header
from formats.moe import MoeLayout, moe_tensors
from formats.schemes import MOE_FILE
from formats.tensors import with_offsets
from golden.forward import Fp32, forward, hf_name
from golden.grouped import assist_matrix, grouped_matmul_swiglu_quant
from golden.int4 import quantize_int4
from golden.moe import MoE
from golden.mx import MX
from golden.q8 import Quantized
from golden.routing import combine
from golden.smooth import Smoothed
from golden.trace import Recorder, compare, relative_error, replay, step_order
from models import compare_schemes
from tests.helpers import MODELS, run_export
from tests.hf_fixtures import FOLDER, MOE_FIXTURES
from tests.served import Served, unrounded

MODEL = FOLDER / "qwen3-moe-2-of-8"


def changed(folder, values):
    """config.json of MODEL with other values; None takes a field out."""
    config = json.loads((MODEL / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return read_config(folder, archs=SPARSE)


# ---- config.json


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"num_experts": None}, "num_experts is missing"),
        ({"num_experts": 0}, "num_experts is 0: expected a positive whole number"),
        ({"num_experts": 1025}, "num_experts is 1025: expected 1 to 1024"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9: there are 8 experts"),
        ({"moe_intermediate_size": 5121}, "moe_intermediate_size is 5121: expected 1 to 5120"),
        ({"mlp_only_layers": [2]}, "mlp_only_layers is [2]: expected a list of layers, 0 to 1"),
        ({"mlp_only_layers": 1}, "mlp_only_layers is 1: expected a list"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0: expected a positive whole number"),
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1: expected true or false"),
    ],
)
def test_a_config_that_no_program_runs_is_refused(tmp_path, values, text):
    with pytest.raises(ModelError) as error:
        changed(tmp_path, values)
    assert text in str(error.value)


def test_which_layers_are_dense(tmp_path):
    def dense(**values):
        return changed(tmp_path, {"num_hidden_layers": 5} | values).moe.dense_layers

    assert dense() == ()
    assert dense(mlp_only_layers=[3, 1]) == (1, 3)
    assert dense(decoder_sparse_step=2) == (0, 2, 4)
    assert dense(decoder_sparse_step=2, mlp_only_layers=[1]) == (0, 1, 2, 4)
    assert dense(mlp_only_layers=None) == ()


def test_heads_are_of_dim_over_heads_unless_said(tmp_path):
    assert changed(tmp_path, {"head_dim": None}).head_dim == 8


def test_who_runs_dense_models_alone_refuses_by_name():
    with pytest.raises(ModelError) as error:
        Checkpoint(MODEL)
    assert str(error.value) == (
        f'{MODEL / "config.json"}: model_type is "qwen3_moe": supported are llama and qwen3; '
        "python -m export moe takes it"
    )
    with pytest.raises(ModelError) as error:
        Checkpoint(FOLDER / "qwen3-mha-tied", archs=SPARSE)
    assert 'model_type is "qwen3": supported is qwen3_moe' in str(error.value)


def test_tensors_of_a_checkpoint():
    config = read_config(FOLDER / "qwen3-moe-listed-dense", archs=SPARSE)
    shapes = tensor_shapes(config)
    assert shapes["model.layers.0.mlp.gate.weight"] == (5, 32)
    assert shapes["model.layers.0.mlp.experts.4.down_proj.weight"] == (32, 16)
    assert shapes["model.layers.1.mlp.gate_proj.weight"] == (64, 32)
    assert "model.layers.1.mlp.gate.weight" not in shapes
    assert "model.layers.0.self_attn.q_norm.weight" in shapes


# ---- the forward pass


@pytest.mark.parametrize("name", MOE_FIXTURES)
def test_tokens_do_not_depend_on_those_behind_them(name):
    checkpoint = Checkpoint(FOLDER / name, archs=(*DENSE, *SPARSE))
    tokens = np.arange(1, 13)
    whole = forward(checkpoint.config, Fp32(checkpoint), tokens)
    part = forward(checkpoint.config, Fp32(checkpoint), tokens[:5])
    assert np.array_equal(whole[:5], part)


def test_steps_stand_in_the_order_of_computation():
    checkpoint, recorder = Checkpoint(FOLDER / "qwen3-moe-listed-dense", archs=SPARSE), Recorder()
    forward(checkpoint.config, Fp32(checkpoint), np.arange(4), recorder)
    names = list(recorder.tensors)
    assert names == sorted(names, key=step_order)
    assert recorder.tensors["layers.0.moe.experts"].shape == (4, 3)
    assert recorder.tensors["layers.0.moe.gate_up_proj"].shape == (4, 3, 32)
    assert "layers.1.moe.router" not in names
    assert "layers.1.ffn.swiglu" in names


def test_experts_are_added_by_index():
    """Whatever order their weights have: the sum is the same to the bit."""
    rng = np.random.default_rng(0)
    outputs, weights = rng.standard_normal((1, 4, 8)).astype(np.float32), rng.random((1, 4)).astype(np.float32)
    chosen = np.array([[6, 1, 7, 3]])
    order = [2, 0, 3, 1]
    assert np.array_equal(
        combine(outputs, chosen, weights), combine(outputs[:, order], chosen[:, order], weights[:, order])
    )


# ---- model files


TEXT = "Once upon a time there lived a girl."
LAYOUTS = [
    MoeLayout("a8w8", 0), MoeLayout("a8w4", 0), MoeLayout("a8w4", 32), MoeLayout("mxfp8", 32),
    MoeLayout("a8w4", 0, pure=True), MoeLayout("a8w4", 32, pure=True), MoeLayout("mxfp8", 32, pure=True),
]  # fmt: skip


def layout_name(layout):
    """For the names of tests and files."""
    return f"{layout.format}-{layout.group}" + "-pure" * layout.pure


def small_model(folder, seed=0, **values):
    """A Hugging Face directory with random weights, whose rows every format takes; in two shards."""
    folder.mkdir(exist_ok=True)
    source = json.loads((FOLDER / "qwen3-moe-listed-dense" / "config.json").read_text())
    config = source | {"moe_intermediate_size": 32, "hidden_size": 64, "eos_token_id": 1} | values
    (folder / "config.json").write_text(json.dumps(config))
    shapes = tensor_shapes(read_config(folder, archs=SPARSE))
    rng = np.random.default_rng(seed)
    tensors = {
        name: (rng.standard_normal(shape) * (0.15 if len(shape) > 1 else 0.2) + (len(shape) == 1)).astype(np.float32)
        for name, shape in shapes.items()
    }
    names, weight_map = sorted(tensors), {}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"model-{i + 1}-of-2.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("moe") / "model")


def exported(model, out, layout):
    export_moe(model, out, layout, alpha=None, with_tokenizer=False, progress=False)
    return out


@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_name)
def test_a_file_computes_nearly_what_the_model_does(model, tmp_path, layout):
    scheme = MoE(exported(model, tmp_path / "m.bin", layout))
    checkpoint = Checkpoint(model, archs=SPARSE)
    assert replace(scheme.config, norm_eps=1e-6) == checkpoint.config  # fp32 in the file
    assert scheme.layout == layout
    tokens = np.arange(2, 22)
    exact, found = (forward(checkpoint.config, s, tokens) for s in (Fp32(checkpoint), scheme))
    # Of most tokens: one whose experts are nearly equally good may go to another.
    error = np.median(np.linalg.norm(exact - found, axis=1) / np.linalg.norm(exact, axis=1))
    limits = {"a8w8": 0.06, "a8w4": 0.3, "mxfp8": 0.1}
    if layout.pure:  # embedding and attention, which all tokens go through, are rounded more coarsely
        limits = {"a8w4": 0.5, "mxfp8": 0.2}
    assert error < limits[layout.format]
    assert error > 1e-4  # it is quantized


@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_name)
def test_tensors_lie_at_multiples_of_64_and_what_lies_between_is_zero(model, tmp_path, layout):
    path = exported(model, tmp_path / "m.bin", layout)
    head, data = read_header(path, MOE_FILE), path.read_bytes()
    position = 256
    for tensor in with_offsets(moe_tensors(head.config, head.layout), alignment=64):
        assert tensor.offset % 64 == 0
        assert not any(data[position : tensor.offset])
        position = tensor.end
    assert position == head.weights_end == len(data)


@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_name)
def test_the_steps_are_the_fused_operator_of_the_sorted_rows(model, tmp_path, layout):
    """Codes and scales to the bit: from a trace's codes, sorted by expert."""
    scheme, recorder = MoE(exported(model, tmp_path / "m.bin", layout)), Recorder()
    forward(scheme.config, scheme, np.arange(3, 15), recorder)
    t = recorder.tensors
    expert = t["layers.0.moe.experts"].ravel()
    token = np.repeat(np.arange(12), 3)
    order = np.argsort(expert, kind="stable")
    kind = MX if layout.format == "mxfp8" else Quantized
    x = kind(t["layers.0.ffn.norm.q"][token[order]], t["layers.0.ffn.norm.s"][token[order]])
    counts = np.bincount(expert, minlength=5)
    out = grouped_matmul_swiglu_quant(x, scheme.experts("layers.0.moe.gate_up_proj"), counts, "count")
    assert np.array_equal(out.codes, t["layers.0.moe.swiglu.q"].reshape(36, -1)[order])
    assert np.array_equal(out.scales, t["layers.0.moe.swiglu.s"].reshape(36, -1)[order])


def test_experts_of_a_file_are_the_quantized_weights(model, tmp_path):
    """Each expert in its place, gate's rows before up's; the assist matrix is that of the codes."""
    checkpoint = Checkpoint(model, archs=SPARSE)
    scheme = MoE(exported(model, tmp_path / "m.bin", MoeLayout("a8w4", 32)))
    weight = scheme.experts("layers.2.moe.gate_up_proj")
    for expert in range(5):
        parts = [f"model.layers.2.mlp.experts.{expert}.{part}_proj.weight" for part in ("gate", "up")]
        w = np.concatenate([checkpoint.tensor(name) for name in parts])
        values = weight.codes[expert].reshape(64, 2, 32) * weight.scales[expert][..., None]
        amax = np.abs(w).reshape(64, 2, 32).max(axis=-1, keepdims=True)
        assert (np.abs(values - w.reshape(64, 2, 32)) <= 0.21 * amax).all()
        assert np.allclose(weight.assist[expert], 8 * values.sum(axis=(1, 2)), atol=1e-4)
    assert np.array_equal(weight.assist, assist_matrix(weight.codes, weight.scales))


def with_tokenizer(folder, **values):
    """A small model with a tokenizer, and a text to calibrate it with."""
    model = small_model(folder / "model", vocab_size=2048, **values)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODELS / "tiny-qwen3" / name, model / name)
    (folder / "text").write_text(TEXT * 20)
    return model, folder / "text"


def test_smoothing_changes_nothing_but_the_rounding(tmp_path):
    """The smoothed model without quantization is the model; experts are smoothed with int8 alone."""
    model, text = with_tokenizer(tmp_path)
    checkpoint, tokens = Checkpoint(model, archs=SPARSE), np.arange(2, 22)
    exact = forward(checkpoint.config, Fp32(checkpoint), tokens)
    for layout, smoothed in ((LAYOUTS[0], True), (LAYOUTS[2], False)):
        found = export_moe(model, tmp_path / "m.bin", layout, text, 0.5, 2, 64, progress=False)
        assert ("layers.0.ffn.norm" in found.s) == smoothed
        assert "layers.1.ffn.norm" in found.s  # a dense layer
        assert "layers.1.ffn.swiglu" in found.s
        again = forward(checkpoint.config, Smoothed(checkpoint, found), tokens)
        assert np.abs(again - exact).max() < 1e-4 * np.abs(exact).max()
        logits = forward(checkpoint.config, MoE(tmp_path / "m.bin"), tokens)
        assert np.linalg.norm(logits - exact) < 0.3 * np.linalg.norm(exact)


def test_quantize_int4_is_better_than_the_largest_alone():
    rng = np.random.default_rng(3)
    w = rng.standard_normal((64, 128)).astype(np.float32)
    w[0, :64] = 0
    for group in (0, 32, 64):
        codes, scales = quantize_int4(w, group)
        size = group or 128
        assert (codes.min(), codes.max()) == (-8, 7)
        assert not codes[0, : min(size, 64)].any() or group == 0
        values = codes.reshape(64, -1, size) * scales[..., None]
        plain = np.abs(w).reshape(64, -1, size).max(axis=-1, keepdims=True) / 7
        rounded = np.where(plain > 0, np.rint(w.reshape(64, -1, size) / np.where(plain > 0, plain, 1)), 0) * plain
        error, largest_alone = (np.square(v - w.reshape(values.shape)).sum() for v in (values, rounded))
        assert error < 0.95 * largest_alone


@pytest.mark.parametrize(
    ("layout", "values", "text"),
    [
        (MoeLayout("a8w8", 32), {}, "--group is 32, a8w8 has 0"),
        (MoeLayout("a8w4", 48), {}, "--group is 48, a8w4 has 0 or 32 or 64 or 128"),
        (MoeLayout("mxfp8", 0), {}, "--group is 0, mxfp8 has a multiple of 32 up to 1024"),
        (MoeLayout("a8w4", 64), {}, "moe_intermediate_size is 32, a8w4 takes a multiple of 64 here"),
        (MoeLayout("mxfp8", 96), {}, "hidden_size is 64, mxfp8 takes a multiple of 96 here"),
        (MoeLayout("a8w4", 32, pure=True), {"head_dim": 6}, "num_attention_heads * head_dim is 24, a8w4 takes"),
        (MoeLayout("mxfp8", 32, pure=True), {"intermediate_size": 48}, "intermediate_size is 48, mxfp8 takes"),
        (MoeLayout("a8w8", 0, pure=True), {}, "--pure would change nothing with --format a8w8"),
        (MoeLayout("a8w4", 0), {"moe_intermediate_size": 24}, "moe_intermediate_size is 24, a8w4 takes a multiple of"),
    ],
)  # fmt: skip
def test_layouts_that_do_not_fit_are_refused_before_anything_is_written(tmp_path, layout, values, text):
    model = small_model(tmp_path / "model", **values)
    with pytest.raises(ModelError) as error:
        exported(model, tmp_path / "m.bin", layout)
    assert text in str(error.value)
    assert not (tmp_path / "m.bin").exists()


# ---- Hugging Face directories


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A model, its smoothed A8W8 file, and the directory beside it."""
    folder = tmp_path_factory.mktemp("served")
    model, text = with_tokenizer(folder)
    export_moe(model, folder / "m.bin", LAYOUTS[0], text, 0.5, 2, 64, folder / "hf", progress=False)
    return model, MoE(folder / "m.bin"), folder / "hf"


def test_a_directory_has_the_codes_of_the_file(served):
    """Of each expert under its own name, gate and up apart; routers are as in the file, smoothed and not quantized."""
    source, file, hf_dir = served
    tensors, layers = load_file(hf_dir / "model.safetensors"), [0, 2]
    assert tensors.keys() > load_file(source / "model-1-of-2.safetensors").keys()
    for layer in layers:
        router = tensors[f"model.layers.{layer}.mlp.gate.weight"]
        assert router.dtype == np.float32
        assert np.array_equal(router, file.vector(f"layers.{layer}.moe.router"))
        assert not np.array_equal(
            router, Checkpoint(source, archs=SPARSE).tensor(f"model.layers.{layer}.mlp.gate.weight")
        )
        gate_up, down = (file.experts(f"layers.{layer}.moe.{part}_proj") for part in ("gate_up", "down"))
        for e in range(5):
            for part, values, rows in (
                ("gate", gate_up, slice(0, 32)), ("up", gate_up, slice(32, 64)), ("down", down, slice(0, 64)),
            ):  # fmt: skip
                name = f"model.layers.{layer}.mlp.experts.{e}.{part}_proj.weight"
                codes, scales = tensors[name], tensors[f"{name}_scale"]
                assert (codes.dtype, scales.dtype, scales.shape) == (np.int8, np.float32, (len(codes), 1))
                assert np.array_equal(codes, values.codes[e, rows]), name
                assert np.array_equal(scales[:, 0], values.scales[e, rows]), name
    codes, _ = file.matrix("layers.1.ffn.up_proj")  # of the dense layer
    assert np.array_equal(tensors["model.layers.1.mlp.up_proj.weight"], codes)
    assert tensors[hf_name(file.config, "classifier")].dtype == np.float32
    config = json.loads((hf_dir / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["lm_head", *(f"model.layers.{layer}.mlp.gate" for layer in layers)]


def test_a_directory_dequantized_is_the_model(served, tmp_path):
    source, file, hf_dir = served
    tensors = load_file(hf_dir / "model.safetensors")
    scaled = {key: v * tensors[f"{key}_scale"] if v.dtype == np.int8 else v for key, v in tensors.items()}
    save_file({key: v for key, v in scaled.items() if not key.endswith("_scale")}, tmp_path / "model.safetensors")
    config = json.loads((hf_dir / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint, tokens = Checkpoint(tmp_path, archs=SPARSE), np.arange(2, 22)
    found = forward(checkpoint.config, Fp32(checkpoint), tokens)
    original = Checkpoint(source, archs=SPARSE)
    expected = forward(file.config, Served(file, original, unrounded), tokens)
    assert relative_error(expected, found) < 1e-5
    assert relative_error(forward(original.config, Fp32(original), tokens), found) > 1e-4  # it is quantized


def test_a_pure_file_without_dense_layers_takes_any_width_of_them(tmp_path):
    model = small_model(tmp_path / "model", intermediate_size=48, mlp_only_layers=[])
    scheme = MoE(exported(model, tmp_path / "m.bin", MoeLayout("mxfp8", 32, pure=True)))
    assert scheme.config.hidden_dim == 48


def test_pure_files_are_not_smoothed(model, tmp_path):
    for option, said in (
        (("--calib", "text"), "--calib"),
        (("--alpha", "0.4"), "--alpha"),
        (("--samples", 2), "--samples"),
        (("--no-smooth",), "--no-smooth"),
    ):
        done = run_export("moe", model, tmp_path / "m.bin", "--format", "a8w4", "--group", 32, "--pure", *option)
        assert done.returncode == 1
        assert done.stderr == f"export: {said} would change nothing with --pure: leave it out\n"
        assert not list(tmp_path.iterdir())


def test_a_directory_has_int8_experts(model, tmp_path):
    done = run_export("moe", model, tmp_path / "m.bin", "--no-smooth", "--format", "mxfp8", "--no-tokenizer",
                      "--hf-out", tmp_path / "hf")  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "export: --hf-out has int8 experts, --format mxfp8 has others: use --format a8w8\n"
    assert not list(tmp_path.iterdir())


# ---- comparing the formats


def test_compare_schemes_has_a_row_for_each_format(tmp_path, monkeypatch):
    unsmoothed = {
        k: v if "--pure" in v or "--rtn" in v else [v[0], "--no-smooth", *v[-2:]]
        for k, v in compare_schemes.MOE_VARIANTS.items()
        if "ladder" not in v or "--rtn" in v
    }
    monkeypatch.setattr(compare_schemes, "MOE_VARIANTS", unsmoothed)
    (name, config, exact), *rows = compare_schemes.schemes(MODELS / "tiny-qwen3-moe", tmp_path)
    assert (name, type(exact)) == ("fp32", Fp32)
    assert [(name, layout_name(scheme.layout)) for name, _, scheme in rows] == [
        ("A8W8", "a8w8-0"), ("A8W4, groups of 64", "a8w4-64"), ("A8W4, pure", "a8w4-64-pure"),
        ("MXFP8, blocks of 32", "mxfp8-32"), ("MXFP8, pure", "mxfp8-32-pure"),
        *((f"Ladder, {name}, plain rounding", "ladder-0") for name in compare_schemes.LADDERS),
    ]  # fmt: skip
    assert [str(scheme.layout.of("layers.1.moe.down_proj")) for _, _, scheme in rows[5:]] == [
        "8 bits per row", "4 bits in groups of 64", "4 bits in groups of 64, 2:4 sparse",
        "2 bits in groups of 64, two-level",
    ]  # fmt: skip
    tokens = np.arange(2, 10)
    expected = forward(config, exact, tokens)
    errors = [relative_error(expected, forward(c, scheme, tokens)) for _, c, scheme in rows]
    assert 1e-3 < errors[0] < errors[1] < errors[2] < 0.8


# ---- headers


def with_header(path, offset, value):
    """The file with an int32 of the header changed, its checksum made right."""
    data = bytearray(path.read_bytes())
    struct.pack_into("<i", data, offset, value)
    data[0xB0:0xB4] = bytes(4)
    (end,) = struct.unpack_from("<Q", data, 0xA0)
    struct.pack_into("<I", data, 0xB0, zlib.crc32(data[end:], zlib.crc32(data[:256])))
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("offset", "value", "text"),
    [
        (0x44, 2, "arch is 2, expected one of [3]"),
        (0xC0, 4, "format is 4, expected 0 to 3"),
        (0xC4, 0, "n_experts is 0, expected 1 to 1024"),
        (0xC8, 6, "n_active is 6, there are 5 experts"),
        (0xCC, 5121, "moe_hidden_dim is 5121, expected 1 to 5120"),
        (0xD0, 2, "norm_topk_prob is 2, expected 0 or 1"),
        (0xD4, 32, "group is 32, a8w8 has 0"),
        (0xD8, 2, "pure is 2, expected 0 or 1"),
        (0xD8, 1, "pure is 1, but all of a8w8 is int8: expected 0"),
        (0xDC, 1, "a reserved byte of the header is not 0"),
        (0xC4, 4, "weights end at byte"),
    ],
)
def test_headers_that_no_program_runs_are_refused(model, tmp_path, offset, value, text):
    path = with_header(exported(model, tmp_path / "m.bin", LAYOUTS[0]), offset, value)
    with pytest.raises(ModelError) as error:
        MoE(path)
    assert text in str(error.value)


def test_a_table_of_dense_layers_with_other_bytes_is_refused(model, tmp_path):
    path = exported(model, tmp_path / "m.bin", LAYOUTS[0])
    data = bytearray(path.read_bytes())
    assert data[256:259] == b"\x00\x01\x00"
    data[258] = 2
    path.write_bytes(data)
    with pytest.raises(ModelError, match="dense_layers has other bytes than 0 and 1"):
        MoE(path)


@pytest.mark.parametrize("layout", LAYOUTS[::3], ids=lambda layout: layout.format)
def test_traces_of_a_file_are_judged(model, tmp_path, layout):
    """`golden diff`, with a model and without: a wrong operation of the experts is named."""
    scheme, recorder = MoE(exported(model, tmp_path / "m.bin", layout)), Recorder()
    recorder("tokens", np.arange(3, 9))
    forward(scheme.config, scheme, np.arange(3, 9), recorder)
    trace = recorder.tensors

    def bad(**changes):
        changed = trace | {f"layers.2.moe.{name}": value for name, value in changes.items()}
        return [r.name for r in replay(partial(forward, scheme.config, scheme), changed) if not r.ok]

    assert bad() == []
    assert bad(mix=trace["layers.2.moe.mix"] * 1.001)[:1] == ["layers.2.moe.mix"]
    assert bad(experts=trace["layers.2.moe.experts"][:, ::-1])[0] == "layers.2.moe.experts"
    flipped = trace["layers.2.moe.swiglu.q"].copy()
    flipped[0, 0, 0] ^= 1
    assert bad(**{"swiglu.q": flipped})[0] == "layers.2.moe.swiglu.q"
    assert all(r.ok for r in compare(trace, trace))
    wrong = [r for r in compare(trace, trace | {"layers.2.moe.swiglu.q": flipped}) if not r.ok]
    assert [(r.name, r.note) for r in wrong] == [("layers.2.moe.swiglu.q", f"1 of {flipped.size} differ")]
