"""AutoAWQ's checkpoints: read, written, and refused by name."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from export.awq import export_awq
from export.gptq import export_gptq
from formats import foreign
from formats.checkpoint import ModelError
from formats.gptq import MatrixFormat
from golden.awq import AWQ, GROUP_SIZES, Packed, group_range, pack, pack_matrix, quantize, unpack
from golden.forward import forward, hf_name, permute_rows
from golden.gptq import GPTQ, stands_for
from tests.helpers import CALIBRATION, F16, F32, MODELS, TINY, export_tiny

METHODS = " or ".join(map(json.dumps, foreign.METHODS))

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
        ({"quant_method": "aqlm"}, f'quantization_config.quant_method is "aqlm", supported is {METHODS}'),
        ({"quant_method": None}, f"quantization_config.quant_method is null, supported is {METHODS}"),
        ({"version": "gemv"}, 'quantization_config.version is "gemv", supported is "gemm"'),
        ({"version": "marlin"}, 'quantization_config.version is "marlin", supported is "gemm"'),
        ({"bits": 8}, "quantization_config.bits is 8, supported is 4"),
        ({"zero_point": False}, "quantization_config.zero_point is false, supported is true"),
        ({"zero_point": 1}, "quantization_config.zero_point is 1, supported is true"),
        ({"group_size": 16}, "quantization_config.group_size is 16, supported is 32 or 64 or 128"),
        ({"group_size": -1}, "quantization_config.group_size is -1, supported is 32 or 64 or 128"),
        ({"group_size": "64"}, 'quantization_config.group_size is "64", supported is 32 or 64 or 128'),
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
        {"modules_to_not_convert": ["self_attn.k_proj"]},  # which is quantized, as the tensors say
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


def test_a_matrix_that_is_skipped(tmp_path):
    """It is rounded: to 4 bits as all of an AWQ file, to 8 bits in a GPTQ file, where others keep their codes."""
    hf_dir, config, values = autoawq_checkpoint(tmp_path / "hf")
    key, weight = "model.layers.1.self_attn.k_proj.", np.random.default_rng(1).normal(0, 0.1, (64, 128)).astype(F16)
    values = {name: value for name, value in values.items() if not name.startswith(key)} | {f"{key}weight": weight}
    save_file(values, hf_dir / "model.safetensors")
    config["quantization_config"]["modules_to_not_convert"] = ["layers.1.self_attn.k_proj"]
    (hf_dir / "config.json").write_text(json.dumps(config))
    options = {"with_tokenizer": False, "progress": False}
    export_awq(hf_dir, tmp_path / "m.bin", hf_out=tmp_path / "again", **options)
    scheme, (low, high) = AWQ(tmp_path / "m.bin"), group_range(weight.astype(F32), 64)
    expected = pack_matrix(quantize(weight.astype(F32), low, high))
    assert all(map(np.array_equal, scheme.matrix("layers.1.attn.k_proj"), expected))
    fields = json.loads((tmp_path / "again" / "config.json").read_text())["quantization_config"]
    assert fields["modules_to_not_convert"] is None  # all are quantized there
    export_gptq(hf_dir, tmp_path / "g.bin", **options)
    model = GPTQ(tmp_path / "g.bin")
    assert (model.layout.of("layers.0.attn.k_proj"), model.layout.of("layers.0.attn.q_proj")) == (
        MatrixFormat(8, 64), MatrixFormat(4, 64)
    )  # fmt: skip
    found = stands_for(model.stored("layers.1.attn.k_proj"))
    assert np.abs(found - permute_rows(weight.astype(F32), 32)).max() < np.abs(weight).max() / 200
    kept = scheme.matrix("layers.0.attn.k_proj")
    codes, zeros = unpack(kept.qweight).T.astype(int), np.repeat(unpack(kept.qzeros).T.astype(int), 64, axis=1)
    assert np.array_equal(model.stored("layers.0.attn.k_proj").codes, permute_rows(codes - zeros, 32))


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
