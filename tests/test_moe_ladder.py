"""The ladder on experts: model files, the reference, GPTQ of each expert, and checkpoints that others quantized."""

import json
from functools import partial

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from export.gptq_layout import choose_expert_layout
from export.moe import export_ladder
from formats.checkpoint import SPARSE, Checkpoint, ModelError
from formats.gptq import MatrixFormat
from formats.model_file import read_header
from formats.moe import LADDER_KINDS, expert_shapes, moe_tensors
from formats.schemes import MOE_FILE
from formats.source import open_model
from formats.tensors import matrix_shapes, with_offsets
from golden.calibration import read_samples
from golden.forward import Fp32, forward, load_expert, load_weight
from golden.gptq import expand, unpack_matrix
from golden.gptq_experts import hessian
from golden.gptq_quantize import column_order, curvature, quantize_matrix, round_best, round_matrix
from golden.grouped import grouped_matmul_swiglu_quant
from golden.hex_tensors import read_tensors
from golden.moe import MoE
from golden.q8 import Quantized
from golden.trace import Recorder, compare, replay
from models.random_models import random_gptq
from tests.helpers import MODELS, run_export
from tests.ladder_cases import CASES, TOKENS, write_case
from tests.test_moe import small_model, with_header, with_tokenizer

WIDE = {"hidden_size": 128, "moe_intermediate_size": 64, "head_dim": 32, "intermediate_size": 192}
TINY = MODELS / "tiny-qwen3-moe"
LADDERS = {  # options of the exporter
    "ladder": {},
    "8": {"bits": dict.fromkeys(("embed", "attn", "ffn", "experts", "classifier"), 8)},
    "8-64": {"bits": {"attn": 8, "ffn": 8, "experts": 8}, "group": 64},
    "4": {"bits": {"experts": 4, "embed": 4}},
    "4-32": {"bits": {"experts": 4}, "group": 32},
    "2": {"bits": dict.fromkeys(("embed", "attn", "ffn", "experts", "classifier"), 2)},
    "sparse": {"bits": {"gate_up": 4, "down": 2}, "sparse": True},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Three layers, the second dense; five experts, three active."""
    return small_model(tmp_path_factory.mktemp("ladder") / "model", **WIDE)


def exported(model, out, **options):
    """A file by plain rounding."""
    export_ladder(model, out, **options, rtn=True, with_tokenizer=False, progress=False)
    return out


def stands_for(q):
    return (q.codes.reshape(*q.scales.shape, -1) * q.scales[..., None]).reshape(q.codes.shape)


# ---- model files


@pytest.mark.parametrize("which", LADDERS)
def test_a_file_has_every_matrix_rounded_in_its_format(model, tmp_path, which):
    """Of each expert at its own place, gate's rows before up's."""
    scheme, checkpoint = MoE(exported(model, tmp_path / "m.bin", **LADDERS[which])), Checkpoint(model, archs=SPARSE)
    options = {"group": None, "sparse": False, "bits": {}} | LADDERS[which]
    layout = choose_expert_layout(checkpoint.config, **options)
    assert (scheme.layout, scheme.group_size) == (layout, 32 if which == "4-32" else 64)
    load = partial(load_weight, checkpoint, interleaved=True)
    weights = {name: [load(name)] for name, _ in matrix_shapes(scheme.config)}
    for name, (n, *_) in expert_shapes(scheme.config):
        weights[name] = [load_expert(load, name, expert) for expert in range(n)]
    for name, of_experts in weights.items():
        found = scheme.experts(name)
        assert len(found.codes) == len(of_experts)
        for i, weight in enumerate(of_experts):
            expected = expand(round_matrix(weight, layout.of(name)), scheme.group_size)
            assert np.array_equal(found.codes[i], expected.codes), (name, i)
            assert np.array_equal(found.scales[i], expected.scales), (name, i)


def test_the_formats_of_a_ladder(model):
    two, four = MatrixFormat(2, 64, two_level=True), MatrixFormat(4, 128)
    config = Checkpoint(model, archs=SPARSE).config
    by_kind = dict(zip(LADDER_KINDS, choose_expert_layout(config, {}, None, False).formats, strict=True))
    assert by_kind == {
        "embed": MatrixFormat(8), "attn": four, "ffn": MatrixFormat(4, 64), "gate_up_proj": two, "down_proj": two,
        "classifier": four,
    }  # fmt: skip
    layout = choose_expert_layout(config, {"experts": 4, "down": 8}, 64, True)
    assert layout.formats[1:] == (*[MatrixFormat(4, 64, sparse=True)] * 3, MatrixFormat(8, 64), MatrixFormat(4, 64))


def test_the_tensors_of_a_file(model, tmp_path):
    path = exported(model, tmp_path / "m.bin", **LADDERS["sparse"])
    head, data, position = read_header(path, MOE_FILE), path.read_bytes(), 256
    tensors = list(with_offsets(moe_tensors(head.config, head.layout), alignment=64))
    for tensor in tensors:
        assert tensor.offset % 64 == 0
        assert not any(data[position : tensor.offset])
        position = tensor.end
    assert position == head.weights_end == len(data)
    assert [(t.name[9:], t.dtype, t.shape) for t in tensors if t.name.startswith("layers.2.moe.")] == [
        ("moe.router", "<f4", (5, 128)),
        ("moe.gate_up_proj.mask", "|u1", (5, 128, 16)), ("moe.gate_up_proj.codes", "|u1", (5, 128, 32)),
        ("moe.gate_up_proj.scales", "<f2", (5, 128, 1)), ("moe.gate_up_proj.zeros", "|u1", (5, 128, 1)),
        ("moe.down_proj.codes", "|u1", (5, 128, 16)), ("moe.down_proj.groups", "|u1", (5, 128, 1)),
        ("moe.down_proj.row_scales", "<f4", (5, 128)),
    ]  # fmt: skip


def test_a_model_without_dense_layers_takes_any_width_of_them(tmp_path):
    model = small_model(tmp_path / "model", **WIDE | {"intermediate_size": 48, "mlp_only_layers": []})
    scheme = MoE(exported(model, tmp_path / "m.bin"))
    assert scheme.layout.formats[2] == scheme.layout.formats[1]
    assert scheme.config.hidden_dim == 48


@pytest.mark.parametrize(
    ("values", "options", "text"),
    [
        ({"hidden_size": 96}, {}, "hidden_size is 96, expected a multiple of 64"),
        ({"moe_intermediate_size": 96}, {}, "moe_intermediate_size is 96, expected a multiple of 64"),
        ({"intermediate_size": 96}, {}, "intermediate_size is 96, expected a multiple of 64"),
        ({"head_dim": 24}, {}, "num_attention_heads * head_dim is 96, expected a multiple of 64"),
        ({}, {"group": 128, "bits": {"experts": 4}}, "--group is 128, ffn has rows of 192; 64 divides them"),
        ({}, {"group": 48}, "--group is 48, expected 32, 64, 128"),
        ({"tie_word_embeddings": True}, {"bits": {"classifier": 4}}, "the classifier is the embedding and has its"),
        ({}, {"sparse": True, "bits": {"attn": 8, "ffn": 8}}, "--sparse 2:4 is for 4 bits"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(tmp_path, values, options, text):
    model = small_model(tmp_path / "model", **WIDE | values)
    with pytest.raises(ModelError) as error:
        exported(model, tmp_path / "m.bin", **options)
    assert text in str(error.value)
    assert not (tmp_path / "m.bin").exists()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--format", "ladder"], "GPTQ needs a text to calibrate with: --calib TEXT (or --rtn for plain rounding)"),
        (["--format", "ladder", "--rtn", "--calib", "text"], "--calib and --rtn exclude each other"),
        (["--format", "ladder", "--rtn", "--pure"], "--pure does not go with --format ladder: leave it out"),
        (["--format", "ladder", "--rtn", "--no-smooth"], "--no-smooth does not go with --format ladder: leave it out"),
        (["--format", "a8w4", "--bits", "4"], "--bits does not go with --format a8w4: leave it out"),
        (["--rtn"], "--rtn does not go with --format a8w8: leave it out"),
        (["--format", "ladder", "--rtn", "--bits", "expert=4"], "--bits is expert=4, expected 2, 4, nl4, 5, 6, "),
    ],
)  # fmt: skip
def test_options_that_do_not_go_together(model, tmp_path, options, text):
    done = run_export("moe", model, tmp_path / "m.bin", "--no-tokenizer", *options)
    assert done.returncode == 1
    assert done.stderr.startswith(f"export: {text}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("offset", "value", "text"),
    [
        (0xD4, 32, "group is 32, ladder has 0"),
        (0xD8, 1, "pure is 1, but all of ladder has formats of its own: expected 0"),
        (0xDC, 3 | 64 << 16, "embed has bits 3, flags 0, group 64: not supported"),
        (0xE8, 2 | 1 << 8 | 64 << 16, "gate_up_proj has bits 2, flags 1, group 64: not supported"),
        (0xE8, 4 | 128 << 16, "layers.0.moe.down_proj has 64 columns, expected groups of 128"),
        (0xE0, 4 | 32 << 16, "group_size is 64, expected 32"),
        (0xF4, 1, "a reserved byte of the header is not 0"),
        (0xC0, 0, "a reserved byte of the header is not 0"),
        (0xCC, 96, "layers.0.moe.down_proj has 96 columns, expected a multiple of 64"),
    ],
)
def test_headers_that_no_program_runs_are_refused(model, tmp_path, offset, value, text):
    path = with_header(exported(model, tmp_path / "m.bin"), offset + 4 * ("down_proj has 64" in text), value)
    with pytest.raises(ModelError) as error:
        MoE(path)
    assert text in str(error.value)


def test_a_mask_that_keeps_three_of_four_is_refused(model, tmp_path):
    path = exported(model, tmp_path / "m.bin", **LADDERS["sparse"])
    head, data = read_header(path, MOE_FILE), bytearray(path.read_bytes())
    places = with_offsets(moe_tensors(head.config, head.layout), alignment=64)
    (place,) = (t for t in places if t.name == "layers.2.moe.gate_up_proj.mask")
    data[place.offset + 16 * (3 * 128 + 7)] = 0b0111_0011  # row 7 of expert 3
    path.write_bytes(data)
    with pytest.raises(ModelError) as error:
        MoE(path)
    why = "layers.2.moe.gate_up_proj.mask: row 391 keeps 3 of columns 4 to 7, expected 2 of each 4"
    assert str(error.value).endswith(why)


@pytest.mark.parametrize("which", ["ladder", "4", "sparse"])
def test_codes_zero_points_and_masks_unpacked(model, tmp_path, which):
    """As `golden hex --unpack` has them, of all experts."""
    path = exported(model, tmp_path / "m.bin", **LADDERS[which])
    scheme, file, name = MoE(path), read_tensors(path, unpack=True), "layers.2.moe.gate_up_proj"
    form, packed = scheme.layout.of(name), read_tensors(path)
    for expert in range(5):
        stored = {part.rpartition(".")[2]: v().array[expert] for part, v in packed.tensors.items() if name in part}
        m = unpack_matrix(stored, form)
        found = {part.rpartition(".")[2]: v().array[expert] for part, v in file.tensors.items() if name in part}
        assert np.array_equal(found["codes"].ravel(), (m.codes if m.kept is None else m.codes[m.kept]).ravel())
        assert m.kept is None or np.array_equal(found["mask"], m.kept)
        assert form.two_level or np.array_equal(found["zeros"], m.zeros)
    assert file.tensors[f"{name}.codes"]().type == f"uint{form.bits}"


# ---- the forward pass


@pytest.mark.parametrize("which", LADDERS)
def test_a_file_computes_nearly_what_its_weights_do(model, tmp_path, which):
    """Activations are int8 in groups; most tokens go to the same experts."""
    scheme, checkpoint = MoE(exported(model, tmp_path / "m.bin", **LADDERS[which])), Checkpoint(model, archs=SPARSE)
    weights, tokens = dequantized(checkpoint, scheme), np.arange(2, 22)
    exact, found = (forward(checkpoint.config, s, tokens) for s in (weights, scheme))
    error = np.median(np.linalg.norm(exact - found, axis=1) / np.linalg.norm(exact, axis=1))
    assert 1e-4 < error < 0.05


def dequantized(checkpoint, scheme):
    """The model with the weights that a file's stand for."""
    weights = Fp32(checkpoint, interleaved=True)
    for name, _ in matrix_shapes(checkpoint.config):
        weights._weights[name] = stands_for(scheme.experts(name))[0]
    weights._weights.setdefault("classifier", weights._weights["embed"])
    for name, _ in expert_shapes(checkpoint.config):
        layer, part = name.rsplit(".", 1)
        for i, weight in enumerate(stands_for(scheme.experts(name))):
            parts = dict(zip(("gate", "up"), np.split(weight, 2), strict=True)) if "gate" in part else {"down": weight}
            weights._weights |= {f"{layer}.{i}.{half}_proj": w for half, w in parts.items()}
    return weights


@pytest.mark.parametrize("which", LADDERS)
def test_the_steps_are_the_fused_operator_of_the_sorted_rows(model, tmp_path, which):
    """Codes and scales to the bit: from a trace's codes, sorted by expert."""
    scheme, recorder = MoE(exported(model, tmp_path / "m.bin", **LADDERS[which])), Recorder()
    forward(scheme.config, scheme, np.arange(3, 15), recorder)
    t = recorder.tensors
    expert = t["layers.0.moe.experts"].ravel()
    token, order = np.repeat(np.arange(12), 3), np.argsort(expert, kind="stable")
    x = Quantized(t["layers.0.ffn.norm.q"][token[order]], t["layers.0.ffn.norm.s"][token[order]])
    counts = np.bincount(expert, minlength=5)
    out = grouped_matmul_swiglu_quant(x, scheme.experts("layers.0.moe.gate_up_proj"), counts, "count")
    assert out.scales.shape == (36, 64 // scheme.group_size)
    assert np.array_equal(out.codes, t["layers.0.moe.swiglu.q"].reshape(36, -1)[order])
    assert np.array_equal(out.scales, t["layers.0.moe.swiglu.s"].reshape(36, -1)[order])


@pytest.mark.parametrize("which", ["ladder", "4-32", "sparse"])
def test_traces_of_a_file_are_judged(tmp_path, which):
    """`golden diff`, with a model and without; layer 1, whose accumulators a trace has, has experts here."""
    model = small_model(tmp_path / "model", **WIDE | {"mlp_only_layers": [0]})
    scheme, recorder = MoE(exported(model, tmp_path / "m.bin", **LADDERS[which])), Recorder()
    recorder("tokens", np.arange(3, 9))
    forward(scheme.config, scheme, np.arange(3, 9), recorder)
    trace, groups = recorder.tensors, 128 // scheme.group_size
    assert trace["layers.1.moe.gate_up_proj.acc"].shape == (6, 3, 128, groups)
    assert trace["layers.1.attn.q_proj.acc"].shape == (6, 128, groups)
    assert trace["layers.1.moe.swiglu.s"].shape == (6, 3, groups // 2)

    def bad(**changes):
        changed = trace | {f"layers.1.moe.{name}": value for name, value in changes.items()}
        return [r.name for r in replay(partial(forward, scheme.config, scheme), changed) if not r.ok]

    assert bad() == []
    assert all(r.ok for r in compare(trace, trace))
    assert bad(down_proj=trace["layers.1.moe.down_proj"] * 1.001)[:1] == ["layers.1.moe.down_proj"]
    sums = trace["layers.1.moe.gate_up_proj.acc"].copy()
    sums[1, 2, 3, 0] += 1
    assert bad(**{"gate_up_proj.acc": sums})[:1] == ["layers.1.moe.gate_up_proj.acc"]


# ---- GPTQ of each expert


def test_an_expert_without_a_token_is_rounded_to_nearest_on_searched_grids():
    """And the fewer it sees, the less they count: each column has half a token of its own."""
    rng = np.random.default_rng(0)
    weight, form = rng.standard_normal((8, 128)).astype(np.float32), MatrixFormat(2, 64, two_level=True)
    x = rng.standard_normal((40, 128)).astype(np.float32)
    assert np.allclose(hessian(x[:0], 3.0), 192 * np.eye(128))
    assert np.allclose(hessian(x, 3.0) - hessian(x[:0], 3.0), x.T @ x, atol=1e-4)
    found, plain = quantize_matrix(weight, curvature(hessian(x[:0], 3.0)), form), round_best(weight, form)
    assert all(np.array_equal(a, b) for a, b in zip(found, plain, strict=True) if a is not None)
    assert not np.array_equal(quantize_matrix(weight, curvature(hessian(x, 3.0)), form).codes, plain.codes)


def test_experts_are_quantized_for_the_tokens_that_they_see(tmp_path):
    """Each by an H from its own tokens, in the stream of what is quantized before."""
    model, text = with_tokenizer(tmp_path, **WIDE | {"num_hidden_layers": 2, "num_experts": 9, "mlp_only_layers": []})
    _, layout, seen = export_ladder(model, tmp_path / "m.bin", text, 1, 64, progress=False)
    scheme, checkpoint, recorder = MoE(tmp_path / "m.bin"), Checkpoint(model, archs=SPARSE), Recorder()
    weights = dequantized(checkpoint, scheme)
    weights._weights["embed"] = load_weight(checkpoint, "embed", interleaved=True)  # H is of the unquantized embedding
    (sample,) = read_samples(checkpoint, text, 1, 64)
    forward(checkpoint.config, weights, sample, recorder)
    load, t = partial(load_weight, checkpoint, interleaved=True), recorder.tensors
    for layer in ("layers.0.", "layers.1."):
        experts, normed, hidden = (t[layer + name] for name in ("moe.experts", "ffn.norm", "moe.swiglu"))
        assert np.array_equal(seen[layer + "moe.router"], np.bincount(experts.ravel(), minlength=9))
        for e in range(9):
            token, place = np.nonzero(experts == e)
            for part, rows, everything in (("gate_up", normed[token], normed), ("down", hidden[token, place], hidden)):
                h = hessian(rows, np.square(everything, dtype=np.float64).mean())
                assert same(scheme, layout, f"{layer}moe.{part}_proj", e, load, h), (layer, part, e)


def same(scheme, layout, name, expert, load, h):
    """Whether nearly all codes of an expert are those of GPTQ with this H: sums may round otherwise."""
    form = layout.of(name)
    inputs = curvature(h, column_order(np.diag(h), form))
    expected = expand(quantize_matrix(load_expert(load, name, expert), inputs, form), scheme.group_size)
    found = scheme.experts(name, slice(expert, expert + 1))
    return (found.codes[0] != expected.codes).mean() < 0.002


def test_the_exporter_says_how_many_tokens_experts_saw(tmp_path):
    model, text = with_tokenizer(tmp_path, **WIDE)
    options = ("--format", "ladder", "--calib", text, "--samples", 1, "--seq-len", 32, "--no-tokenizer")
    done = run_export("moe", model, tmp_path / "m.bin", *options)
    assert done.returncode == 0
    table = done.stderr.partition("tokens of an expert")[2].splitlines()
    assert table[0].split() == ["fewest", "median", "most", "fewer", "than", "64"]
    assert [line.split()[0] for line in table[1:3]] == ["layers.0", "layers.2"]
    assert all(line.endswith("5 of 5") for line in table[1:3])
    assert "experts" in done.stderr.partition("tokens of an expert")[0]


# ---- checkpoints that others quantized


def gptq_checkpoint(folder, scattered=False):
    """A mixture of experts in GPTQ's 4 bits, groups of 64; attention of layer 2 is not quantized."""
    small_model(folder, **WIDE)
    config, rng, tensors = json.loads((folder / "config.json").read_text()), np.random.default_rng(1), {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, value in load_file(path).items():
            module = name.removesuffix(".weight")
            if value.ndim < 2 or ".layers." not in name or name.endswith("mlp.gate.weight") or ".2.self_attn" in name:
                tensors[name] = value
                continue
            g_idx = np.arange(value.shape[1]) // 64
            parts = random_gptq(rng, value.shape[0], rng.permutation(g_idx) if scattered else g_idx)
            tensors |= {f"{module}.{part}": v for part, v in parts.items()}
        path.unlink()
    (folder / "model.safetensors.index.json").unlink()
    save_file(tensors, folder / "model.safetensors")
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": scattered, "sym": False}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return folder


def test_gptq_comes_in_code_for_code(tmp_path):
    """What a file's experts stand for is what the checkpoint's do, to the bit; attention has room for fp32's 8 bits."""
    model = gptq_checkpoint(tmp_path / "model")
    _, layout, _ = export_ladder(model, tmp_path / "m.bin", with_tokenizer=False, progress=False)
    four = MatrixFormat(4, 64)
    assert layout.formats == (MatrixFormat(8), MatrixFormat(8, 64), four, four, four, MatrixFormat(8))
    scheme, checkpoint = MoE(tmp_path / "m.bin"), open_model(model, archs=SPARSE)
    load = partial(load_weight, checkpoint, interleaved=True)
    names = [name for name, _ in matrix_shapes(scheme.config) if name.startswith("layers.") and ".2.attn" not in name]
    assert len(names) == 4 * 2 + 3
    assert all(np.array_equal(stands_for(scheme.experts(name))[0], load(name)) for name in names)
    for name, (n, *_) in expert_shapes(scheme.config):
        found = stands_for(scheme.experts(name))
        assert all(np.array_equal(found[i], load_expert(load, name, i)) for i in range(n)), name


def test_scattered_groups_are_rounded_anew_and_it_says_why(tmp_path):
    model = gptq_checkpoint(tmp_path / "model", scattered=True)
    done = run_export("moe", model, tmp_path / "m.bin", "--format", "ladder", "--rtn", "--no-tokenizer", "--quiet")
    assert done.returncode == 0
    why = "its groups are scattered over the inputs (desc_act), which a file with experts cannot say"
    assert done.stderr.splitlines()[:2] == [
        f"export: warning: {model}: {why}",
        f"export: warning: {model}: gptq of 4 bits in groups of 64: weights are codes times scales, and rounded anew",
    ]
    assert MoE(tmp_path / "m.bin").layout.of("layers.0.moe.down_proj").bits == 2


@pytest.mark.parametrize("option", ["--rtn", "--group 64", "--sparse 2:4", "--bits experts=4", "--samples 3"])
def test_codes_that_are_kept_leave_nothing_to_choose(tmp_path, option):
    model = gptq_checkpoint(tmp_path / "model")
    done = run_export("moe", model, tmp_path / "m.bin", "--format", "ladder", "--no-tokenizer", *option.split())
    said = option.split("=")[0] if "=" in option else option.split()[0]
    expected = f"export: {model}: is quantized already, {said} would change nothing: leave it out\n"
    assert (done.returncode, done.stderr) == (1, expected)


# ---- random models


@pytest.mark.parametrize("which", range(len(CASES)))
def test_random_mixtures(tmp_path, which):
    """Of other shapes, with experts that no token goes to, or one that every token goes to."""
    n_experts, n_active, routing, options = CASES[which]
    model, recorder = write_case(tmp_path / "model", which), Recorder()
    scheme, checkpoint = MoE(exported(model, tmp_path / "m.bin", **options)), Checkpoint(model, archs=SPARSE)
    tokens = np.arange(TOKENS)
    exact = forward(checkpoint.config, dequantized(checkpoint, scheme), tokens)
    found = forward(checkpoint.config, scheme, tokens, recorder)
    error = np.median(np.linalg.norm(exact - found, axis=1) / np.linalg.norm(exact, axis=1))
    assert 1e-4 < error < 0.05
    seen = np.bincount(recorder.tensors["layers.1.moe.experts"].ravel(), minlength=n_experts)
    if routing == "empty":
        assert not seen[n_experts // 2 :].any() or n_active > n_experts // 2
    if routing == "all":
        assert seen[0] == TOKENS
    assert all(r.ok for r in replay(partial(forward, scheme.config, scheme), recorder.tensors | {"tokens": tokens}))
