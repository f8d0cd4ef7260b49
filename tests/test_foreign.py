"""Directories of others that say one thing and mean another, or store what they have in forms of their own."""

import json
import re
import shutil
import struct
import warnings
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from gguf import GGUFWriter
from safetensors.numpy import load_file, save_file

from export.gptq import Options, export_gptq
from export.tokenizer import text_of, tokenizer_section
from formats import safetensors
from formats.checkpoint import SPARSE, Checkpoint, read_config, tensor_shapes
from formats.errors import ModelError
from formats.gguf_model import gguf_name
from formats.packing import pack_words, unpack_words
from formats.source import open_model
from formats.tensors import HEADER_SIZE, Tensor
from tests.helpers import F32, MODELS, run_export
from tests.hf_fixtures import FOLDER

LLAMA, QWEN, MOE = MODELS / "tiny-llama", MODELS / "tiny-qwen3", MODELS / "tiny-qwen3-moe"
NORM = "model.norm.weight"


def changed(source, out, tensors=None, file="config.json", **fields):
    """A copy of a directory. tensors: changes the dict of its tensors. fields: of a JSON file; ... takes one out."""
    shutil.copytree(source, out)
    if tensors:
        found = load_file(out / "model.safetensors")
        tensors(found)
        save_file({name: np.ascontiguousarray(value) for name, value in found.items()}, out / "model.safetensors")
    found = json.loads((out / file).read_text()) | fields
    (out / file).write_text(json.dumps({name: value for name, value in found.items() if value is not ...}))
    return out


# ---- which file, which end


@pytest.mark.parametrize("shards", [True, False])
def test_a_single_file_goes_before_an_index(tmp_path, shards):
    """As in transformers: whoever merges shards into one file may leave the index, and shards of older weights."""
    source = shutil.copytree(LLAMA, tmp_path / "hf")
    tensors = load_file(source / "model.safetensors")
    index = source / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}))
    if shards:
        save_file({name: -value for name, value in tensors.items()}, source / "model-00001-of-00001.safetensors")
    with pytest.warns(UserWarning, match=r"index.json: not followed, as there is a model.safetensors$"):
        found = Checkpoint(source)
    assert np.array_equal(found.stored(NORM), tensors[NORM])


def test_a_text_ends_where_its_tokenizer_and_its_template_say(tmp_path):
    """Of a fine-tune whose eos_token_id is the base model's."""
    ends = json.loads((QWEN / "generation_config.json").read_text())["eos_token_id"]  # <|im_end|>, <|endoftext|>
    changed(QWEN, tmp_path / "base", file="generation_config.json", eos_token_id=ends[1])
    changed(tmp_path / "base", tmp_path / "turn", file="tokenizer_config.json", eos_token="<|endoftext|>")
    changed(tmp_path / "base", tmp_path / "token", file="tokenizer_config.json", chat_template=...)
    changed(tmp_path / "turn", tmp_path / "neither", file="tokenizer_config.json", chat_template=...)
    for name, expected in (("base", ends[::-1]), ("turn", ends[::-1]), ("token", ends[::-1]), ("neither", ends[1:])):
        assert text_of(Checkpoint(tmp_path / name))[0].eos_ids == expected, name
    assert text_of(Checkpoint(tmp_path / "turn"), with_tokenizer=False)[0].eos_ids == ends[1:]


# ---- GPTQ's zero points


def plus_one(tensors):
    """From zero - 1, as AutoGPTQ stores zero points, to what the version 2 stores."""
    for name in [name for name in tensors if name.endswith("qzeros")]:
        tensors[name] = pack_words(unpack_words(tensors[name].T, 4) + np.uint8(1), 4).T


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_version_of_zero_points(tmp_path, symmetric):
    """Symmetric ones tell it, whatever config.json says; of others it is taken from there, by either field."""
    export_gptq(
        QWEN, tmp_path / "m.bin", bits={"attn": 4, "ffn": 4}, group=64, hf_out=tmp_path / "v1", progress=False,
        options=Options(rtn=True, symmetric=symmetric, first_zero=1),
    )  # fmt: skip
    said = json.loads((tmp_path / "v1" / "config.json").read_text())["quantization_config"]
    new = said | {"checkpoint_format": None, "format": "gptq_v2"}
    sources = {"v1": (tmp_path / "v1", False)}
    sources["v2"] = changed(tmp_path / "v1", tmp_path / "v2", plus_one, quantization_config=new), False
    if symmetric:
        sources["8"] = changed(tmp_path / "v1", tmp_path / "8", plus_one), True
        sources["7"] = changed(tmp_path / "v1", tmp_path / "7", quantization_config=new), True
    for name, (source, warned) in sources.items():
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            export_gptq(source, tmp_path / f"{name}.bin", progress=False)
        assert (tmp_path / f"{name}.bin").read_bytes() == (tmp_path / "v1.bin").read_bytes(), name
        texts = [str(w.message) for w in found if "zero points" in str(w.message)]
        version = "gptq_v2" if name == "8" else "gptq"
        says = f"{source}: its zero points are those of {version}, config.json says otherwise: read as they are"
        assert texts == [says] * warned


# ---- what stands in another place


def test_an_embedding_that_is_stored_as_the_classifier(tmp_path):
    def moved(tensors):
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    found = Checkpoint(changed(LLAMA, tmp_path / "hf", moved))
    assert found.config.tied
    assert np.array_equal(
        found.stored("model.embed_tokens.weight"), Checkpoint(LLAMA).stored("model.embed_tokens.weight")
    )


def test_experts_in_one_tensor(tmp_path):
    """As transformers 5 has them in memory: gate's rows before up's, for all experts of a layer."""
    names = sorted(name for name in load_file(MOE / "model.safetensors") if ".experts." in name)

    def fused(tensors):
        layers = {name.split(".experts.")[0] for name in names}
        for layer in layers:
            of = {
                p: [tensors.pop(f"{layer}.experts.{e}.{p}_proj.weight") for e in range(8)]
                for p in ("gate", "up", "down")
            }
            both = [np.concatenate(pair) for pair in zip(of["gate"], of["up"], strict=True)]
            tensors |= {
                f"{layer}.experts.gate_up_proj": np.stack(both),
                f"{layer}.experts.down_proj": np.stack(of["down"]),
            }

    source = changed(MOE, tmp_path / "hf", fused)
    found, expected = Checkpoint(source, archs=SPARSE), Checkpoint(MOE, archs=SPARSE)
    assert all(np.array_equal(found.stored(name), expected.stored(name)) for name in names)

    def cut(tensors):
        name = "model.layers.1.mlp.experts.gate_up_proj"
        tensors[name] = tensors[name][:, 1:]

    with pytest.raises(ModelError, match="gate_up_proj has shape"):
        Checkpoint(changed(source, tmp_path / "cut", cut), archs=SPARSE)


@pytest.mark.parametrize(
    ("fields", "taken"),
    [
        ({"max_window_layers": 4}, True),  # all of them are full attention
        ({"max_window_layers": 3}, False),
        ({"max_window_layers": 0, "sliding_window": None}, True),
        ({"max_window_layers": 0, "layer_types": ["full_attention"] * 4}, True),
    ],
)
def test_sliding_windows_that_no_layer_has(tmp_path, fields, taken):
    source = changed(QWEN, tmp_path / "hf", **({"use_sliding_window": True, "sliding_window": 64} | fields))
    if taken:
        assert read_config(source) == read_config(QWEN)
    else:
        with pytest.raises(ModelError, match="use_sliding_window is true: not supported"):
            read_config(source)


def test_the_original_context_outside_of_rope_scaling(tmp_path):
    """It goes before the one inside, as in transformers."""
    source = changed(LLAMA, tmp_path / "hf", original_max_position_embeddings=64)
    assert read_config(source).rope_scaling.original_max_position_embeddings == 64


def test_added_tokens_beyond_the_embedding(tmp_path):
    """They are left out, with a warning: transformers loads them, and fails where one is used."""
    tokenizer = json.loads((QWEN / "tokenizer.json").read_text())
    token = {"id": 2048, "content": "<|new|>", "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True}  # fmt: skip
    added = tokenizer["added_tokens"] + [token, token | {"id": 2049, "content": "<|other|>"}]
    source = changed(QWEN, tmp_path / "hf", file="tokenizer.json", added_tokens=added)
    with pytest.warns(UserWarning, match='beyond the model\'s 2048 ids, left out: "<\\|new\\|>", "<\\|other'):
        section = tokenizer_section(source, 2048)
    assert section == tokenizer_section(QWEN, 2048)


def test_a_quantized_classifier(tmp_path):
    """Whatever is read of it are its weights."""
    codes, scales = {}, {}

    def fp8(tensors):
        for name in [name for name in tensors if name.endswith("_proj.weight") or name == "lm_head.weight"]:
            scales[name] = (np.abs(tensors[name].astype(F32)).max(axis=1, keepdims=True) / F32(448)).astype(F32)
            codes[name] = (tensors[name].astype(F32) / scales[name]).astype(ml_dtypes.float8_e4m3fn)
            tensors |= {name: np.zeros(1, F32), f"{name}_scale": scales[name]}

    source = changed(QWEN, tmp_path / "hf", fp8, quantization_config={"quant_method": "fbgemm_fp8"})
    tensors = load_file(source / "model.safetensors") | codes
    contents = [Tensor(name, "|i1" if name in codes else value.dtype.str if value.dtype.kind == "f" else "bfloat16",
                       value.shape) for name, value in tensors.items()]  # fmt: skip
    header = safetensors.header(contents).replace(b'"I8"', b'"F8_E4M3"')
    header = struct.pack("<Q", len(header) - 8) + header[8:]
    (source / "model.safetensors").write_bytes(header + b"".join(value.tobytes() for value in tensors.values()))
    found = open_model(source)
    for name in codes:
        assert np.array_equal(found.tensor(name), codes[name].astype(F32) * scales[name]), name
    for scheme, *bits in (("awq",), ("gptq", "--bits", "4")):
        done = run_export(scheme, source, tmp_path / "m.bin", *bits, "--rtn", "--quiet", "--hf-out", tmp_path / scheme)
        assert done.returncode == 0
        assert f"export: warning: {source}: FP8 per row: weights are codes times scales" in done.stderr
        written = load_file(tmp_path / scheme / "model.safetensors")["lm_head.weight"]
        assert np.allclose(written, found.tensor("lm_head.weight"), rtol=1e-3, atol=1e-6)


# ---- what is refused, with what to do


@pytest.mark.parametrize(
    ("files", "gone", "says"),
    [
        (["pytorch_model.bin"], ["model.safetensors"], "model.safetensors: no such file; there is pytorch_model.bin"),
        (["model-00001-of-00002.safetensors"], ["model.safetensors"],
         "model.safetensors: no such file; there is model-00001-of-00002.safetensors, shards"),
        (["adapter_config.json", "adapter_model.safetensors"], ["config.json", "model.safetensors"],
         "config.json: no such file; there is adapter_config.json, a LoRA adapter, which is merged into"),
        (["consolidated.00.pth", "params.json"], ["config.json", "model.safetensors"],
         "config.json: no such file; there is consolidated.00.pth, Meta's own format: take the Hugging Face directory"),
        ([], ["model.safetensors"], "model.safetensors: no such file\n"),
    ],
)  # fmt: skip
def test_another_format_than_hugging_faces(tmp_path, files, gone, says):
    source = shutil.copytree(LLAMA, tmp_path / "hf")
    for file in gone:
        (source / file).unlink()
    for file in files:
        (source / file).write_text("{}")
    done = run_export("q8", source, tmp_path / "m.bin", "--quiet")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith(f"export: {source}/{says}")


def test_half_a_download(tmp_path):
    source = shutil.copytree(LLAMA, tmp_path / "hf")
    names = load_file(source / "model.safetensors")
    (source / "model.safetensors").rename(source / "model-00001-of-00002.safetensors")
    weight_map = dict.fromkeys(names, "model-00001-of-00002.safetensors")
    weight_map |= {NORM: "model-00002-of-00002.safetensors"}
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    says = "model-00002-of-00002.safetensors: no such file, though the index names it: the download is not complete"
    with pytest.raises(ModelError, match=re.escape(f"{source}/{says}")):
        Checkpoint(source)


def test_mlx(tmp_path):
    source = changed(LLAMA, tmp_path / "hf", quantization={"group_size": 64, "bits": 4})
    with pytest.raises(ModelError, match="quantization is of MLX: take the model that this one was made of"):
        open_model(source)


def test_the_file_of_early_autogptq(tmp_path):
    """It says what `quantization_config` does."""
    export_gptq(QWEN, tmp_path / "m.bin", bits={"attn": 4, "ffn": 4}, group=64, hf_out=tmp_path / "hf", progress=False,
                options=Options(rtn=True, symmetric=True, first_zero=1))  # fmt: skip
    early = changed(tmp_path / "hf", tmp_path / "early", quantization_config=...)
    (early / "quantize_config.json").write_text(
        json.dumps({"bits": 4, "group_size": 64, "desc_act": False, "sym": True})
    )
    for source, out in ((tmp_path / "hf", "m.bin"), (early, "early.bin")):
        export_gptq(source, tmp_path / out, progress=False)
    assert (tmp_path / "early.bin").read_bytes() == (tmp_path / "m.bin").read_bytes()


# ---- mixtures of experts


def test_int8_experts_are_kept_code_for_code(tmp_path):
    """Also codes of -128, which compressed-tensors' rule gives, and which no rounding here does."""
    options = ("--no-smooth", "--quiet")
    assert run_export("moe", MOE, tmp_path / "m.bin", *options, "--hf-out", tmp_path / "hf").returncode == 0

    def lowest(tensors):
        for name in [name for name in tensors if tensors[name].dtype == np.int8]:
            tensors[name][:, ::7] = -128

    source = changed(tmp_path / "hf", tmp_path / "low", lowest)
    done = run_export("moe", source, tmp_path / "low.bin", *options, "--hf-out", tmp_path / "again")
    assert (done.returncode, done.stderr.count("warning: " + str(source))) == (0, 0)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "again", source))
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)


def write_moe_gguf(hf_dir, out):
    """A directory without tokenizer as llama.cpp's converter writes it: a layer's experts in one tensor."""
    c, source, writer = (
        Checkpoint(hf_dir, archs=SPARSE).config,
        Checkpoint(hf_dir, archs=SPARSE),
        GGUFWriter(out, "qwen3moe"),
    )
    for key, value in {"context_length": c.max_seq_len, "embedding_length": c.dim, "block_count": c.n_layers,
                       "feed_forward_length": c.hidden_dim, "attention.head_count": c.n_heads,
                       "attention.head_count_kv": c.n_kv_heads, "attention.key_length": c.head_dim,
                       "expert_count": c.moe.n_experts, "expert_used_count": c.moe.n_active,
                       "expert_feed_forward_length": c.moe.hidden_dim}.items():  # fmt: skip
        writer.add_uint32(f"qwen3moe.{key}", value)
    writer.add_float32("qwen3moe.rope.freq_base", c.rope_theta)
    writer.add_float32("qwen3moe.attention.layer_norm_rms_epsilon", c.norm_eps)
    written = {}
    for name in tensor_shapes(c):
        written.setdefault(gguf_name(name), []).append(source.tensor(name))
    for name, values in written.items():
        writer.add_tensor(name, np.stack(values) if "_exps" in name else values[0])
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
    return out


def test_a_mixture_of_experts_in_gguf(tmp_path):
    hf_dir = FOLDER / "qwen3-moe-2-of-8"
    gguf = write_moe_gguf(hf_dir, tmp_path / "m.gguf")
    found, expected = open_model(gguf, SPARSE), Checkpoint(hf_dir, archs=SPARSE)
    assert replace(found.config, norm_eps=expected.config.norm_eps) == expected.config
    assert all(np.array_equal(found.tensor(name), expected.tensor(name)) for name in tensor_shapes(expected.config))
    for source, out in ((gguf, "gguf.bin"), (hf_dir, "hf.bin")):
        done = run_export("moe", source, tmp_path / out, "--no-smooth", "--no-tokenizer", "--quiet")
        assert done.returncode == 0
    ours, theirs = ((tmp_path / out).read_bytes()[HEADER_SIZE:] for out in ("gguf.bin", "hf.bin"))
    assert ours == theirs
    done = run_export("q8", gguf, tmp_path / "m.bin", "--quiet")
    assert done.stderr == (f"export: {gguf}: general.architecture is 'qwen3moe': supported are llama and qwen3; "
                           "python -m export moe takes it\n")  # fmt: skip
