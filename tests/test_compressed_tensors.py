"""What `export w8a8 --hf-out` writes, without torch: tests/hf_out_check.py loads it with the libraries themselves."""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from export.compressed_tensors import quantization_config
from export.w8a8 import export_w8a8
from formats.checkpoint import Checkpoint, ModelError
from formats.tensors import matrix_shapes, norm_shapes
from golden.forward import Fp32, forward, hf_name, permute_rows, unpermute_rows
from golden.trace import relative_error
from golden.w8a8 import W8A8
from tests.helpers import CALIBRATION, F32, MODELS, TINY, calibration, run_export
from tests.hf_fixtures import FOLDER
from tests.served import Served, unrounded

PLACES = {  # by the matrix of a layer: the place whose static scale its input has, in the order of a layer's scales
    "self_attn.q_proj": 0, "self_attn.k_proj": 0, "self_attn.v_proj": 0, "self_attn.o_proj": 1,
    "mlp.gate_proj": 2, "mlp.up_proj": 2, "mlp.down_proj": 3,
}  # fmt: skip


@pytest.fixture(scope="module", params=[(name, static) for name in TINY for static in (False, True)],
                ids=lambda p: p[0] + ("-static" if p[1] else ""))  # fmt: skip
def exported(request, tmp_path_factory):
    """Where the model lies, the model file, and the directory beside it."""
    name, static = request.param
    folder = tmp_path_factory.mktemp("exported")
    export_w8a8(MODELS / name, folder / "m.bin", **calibration(4, 128), static=static, hf_out=folder / "hf",
                progress=False)  # fmt: skip
    return MODELS / name, W8A8(folder / "m.bin"), folder / "hf"


def from_pairs(rows, head_dim):
    """Row i of a head in Hugging Face's order is row 2i of the file, row i + head_dim / 2 is row 2i + 1."""
    order = [head + j for head in range(0, len(rows), head_dim) for first in (0, 1)
             for j in range(first, head_dim, 2)]  # fmt: skip
    return rows[order]


def test_unpermute_rows_by_hand():
    rows = np.array([0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11])
    assert unpermute_rows(rows, 6).tolist() == list(range(12))
    assert from_pairs(rows, 6).tolist() == list(range(12))
    matrix = np.arange(60).reshape(12, 5)
    assert np.array_equal(unpermute_rows(permute_rows(matrix, 4), 4), matrix)


def test_the_model_file_is_the_same_without_a_directory(exported, tmp_path):
    source, model, hf_dir = exported
    export_w8a8(source, tmp_path / "m.bin", **calibration(4, 128), static=model.static, progress=False)
    assert (tmp_path / "m.bin").read_bytes() == (hf_dir.parent / "m.bin").read_bytes()


def test_every_tensor_row_by_row(exported):
    source, model, hf_dir = exported
    c, tensors, original = model.config, load_file(hf_dir / "model.safetensors"), Checkpoint(source)
    for name, _ in norm_shapes(c):
        stored = tensors.pop(hf_name(c, name))
        expected = model.vector(name)
        if name.endswith(("q_norm", "k_norm")):
            expected = from_pairs(expected, c.head_dim)
        assert stored.dtype == F32
        assert np.array_equal(stored, expected), name
    for name, (n_out, n_in) in matrix_shapes(c):
        key = hf_name(c, name)
        weight = tensors.pop(key)
        if name in ("embed", "classifier"):
            assert weight.dtype == ml_dtypes.bfloat16
            assert weight.tobytes() == original.stored(key).tobytes()
            continue
        scale, matrix = tensors.pop(key + "_scale"), model.matrix(name)
        codes, scales = matrix
        if name.endswith(("q_proj", "k_proj")):
            codes, scales = from_pairs(codes, c.head_dim), from_pairs(scales, c.head_dim)
        assert (weight.dtype, weight.shape) == (np.int8, (n_out, n_in))
        assert (scale.dtype, scale.shape) == (F32, (n_out, 1))
        assert np.array_equal(weight, codes), name
        assert np.array_equal(scale, scales), name
        if model.static:
            layer, place = key.split(".")[2], PLACES[key.split(".", 3)[3].removesuffix(".weight")]
            found = tensors.pop(key.removesuffix("weight") + "input_scale")
            assert (found.dtype, found.shape) == (F32, (1,))
            assert found[0] == list(model.activation_scales.values())[4 * int(layer) + place], name
    assert not tensors


def test_dequantized_it_is_the_model(exported, tmp_path):
    """A plain Llama or Qwen3 of codes times scales computes what the model file does: rows and factors go together."""
    source, model, hf_dir = exported
    tensors = load_file(hf_dir / "model.safetensors")
    plain = {
        key: (value * tensors[key + "_scale"]).astype(F32) if value.dtype == np.int8 else value
        for key, value in tensors.items()
        if not key.endswith("_scale")
    }
    config = json.loads((hf_dir / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(plain, tmp_path / "model.safetensors")
    checkpoint, tokens = Checkpoint(tmp_path), np.arange(100, 140)
    found = forward(model.config, Fp32(checkpoint), tokens)
    expected = forward(model.config, Served(model, Checkpoint(source), unrounded), tokens)
    assert relative_error(expected, found) < 1e-5
    exact = forward(model.config, Fp32(Checkpoint(source)), tokens)
    assert 1e-4 < relative_error(exact, found) < 0.1  # and near the model itself, whose weights are not rounded


def test_the_other_files(exported):
    source, model, hf_dir = exported
    config = json.loads((hf_dir / "config.json").read_text())
    assert config.pop("quantization_config") == quantization_config(model.static)
    assert config == json.loads((source / "config.json").read_text())
    files = {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert {p.name for p in hf_dir.iterdir()} == files | {"config.json", "model.safetensors"}
    for file in files:
        assert (hf_dir / file).read_bytes() == (source / file).read_bytes()


def same_where_said(said, known):
    """Whether every field of `said` has the same value in `known`, objects within objects alike."""
    if isinstance(said, dict) and isinstance(known, dict):
        return said.keys() <= known.keys() and all(same_where_said(said[key], known[key]) for key in said)
    return type(said) is type(known) and said == known


@pytest.mark.parametrize("static", [False, True])
def test_the_configuration_is_what_compressed_tensors_would_write(static):
    """The stored one is that library's own preset "W8A8" and its static variant, with all its fields and defaults."""
    known = json.loads((FOLDER / "compressed_tensors.json").read_text())
    assert same_where_said(quantization_config(static), known["static" if static else "dynamic"])
    assert not same_where_said(quantization_config(static), known["dynamic" if static else "static"])


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_tables_keep_their_type_and_rows_of_zeros_get_a_scale(tmp_path, dtype):
    """Engines divide by scales, and 0 / 0 is no number; whatever the scale, the weights stay 0."""
    source = FOLDER / "qwen3-gqa-untied"
    hf_dir = shutil.copytree(source, tmp_path / "source")
    tensors = {key: value.astype(dtype) for key, value in load_file(source / "model.safetensors").items()}
    key = "model.layers.1.mlp.up_proj.weight"
    tensors[key][5] = 0
    save_file(tensors, hf_dir / "model.safetensors")
    export_w8a8(hf_dir, tmp_path / "m.bin", alpha=None, hf_out=tmp_path / "hf", with_tokenizer=False, progress=False)
    assert W8A8(tmp_path / "m.bin").matrix("layers.1.ffn.up_proj").scales[5] == 0
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert found[key + "_scale"][5] == 1
    assert not found[key][5].any()
    assert all((value > 0).all() for name, value in found.items() if name.endswith("_scale"))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert found[name].dtype == dtype
        assert np.array_equal(found[name], tensors[name])


def test_a_place_that_calibration_saw_at_rest_gets_a_scale(tmp_path):
    """With an up_proj of zeros nothing reaches down_proj, and its static scale in the model file is 0."""
    hf_dir = shutil.copytree(MODELS / "tiny-llama", tmp_path / "source")
    tensors = load_file(hf_dir / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"][:] = 0
    save_file(tensors, hf_dir / "model.safetensors")
    export_w8a8(hf_dir, tmp_path / "m.bin", **calibration(1, 32), alpha=None, static=True, hf_out=tmp_path / "hf",
                progress=False)  # fmt: skip
    assert W8A8(tmp_path / "m.bin").activation_scales["layers.2.ffn.swiglu"] == 0
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert found["model.layers.2.mlp.down_proj.input_scale"].tolist() == [1]


def test_blocks_have_no_such_format(tmp_path):
    done = run_export("w8a8", MODELS / "tiny-llama", tmp_path / "m.bin", "--calib", CALIBRATION, "--block", 32,
                      "--hf-out", tmp_path / "hf")  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "export: --hf-out has one scale for a whole row, --block 32 has more: use --block 0\n"
    assert not list(tmp_path.iterdir())


def test_command_line(tmp_path):
    short = ("--calib", CALIBRATION, "--samples", 2, "--seq-len", 32, "--act", "static", "--no-tokenizer", "--quiet")
    done = run_export("w8a8", "models/tiny-llama", tmp_path / "m.bin", *short, "--hf-out", tmp_path / "hf")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.count("\n") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "m.bin"]
    assert (tmp_path / "hf" / "tokenizer.json").exists()
    assert "model.layers.3.mlp.down_proj.input_scale" in load_file(tmp_path / "hf" / "model.safetensors")
    with pytest.raises(ModelError, match="exists already"):
        export_w8a8(MODELS / "tiny-llama", tmp_path / "m.bin", alpha=None, hf_out=tmp_path / "hf", progress=False)


def test_a_classifier_that_config_calls_tied_and_is_not(tmp_path):
    """The exporter takes the classifier's own weights; to an engine config.json has to say so."""
    source = FOLDER / "llama-contradictory"
    assert json.loads((source / "config.json").read_text())["tie_word_embeddings"]
    export_w8a8(source, tmp_path / "m.bin", alpha=None, hf_out=tmp_path / "hf", with_tokenizer=False, progress=False)
    assert not json.loads((tmp_path / "hf" / "config.json").read_text())["tie_word_embeddings"]
    classifier = load_file(tmp_path / "hf" / "model.safetensors")["lm_head.weight"]
    assert np.array_equal(classifier, load_file(source / "model.safetensors")["lm_head.weight"])
