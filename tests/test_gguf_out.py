"""`--gguf-out`: a model file as a GGUF file. tests/llama_cpp_check.py runs such files in llama.cpp."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, dequantize
from safetensors.numpy import load_file, save_file

from export import gguf_out
from export.gptq import Options, export_gptq
from export.moe import export_ladder, export_moe
from export.q8 import export_q8
from export.tokenizer import tokenizer_section
from formats.moe import MoeLayout
from formats.source import generation_of, open_gguf, open_model
from formats.tensors import matrix_shapes, norm_shapes
from golden.awq import unpack
from golden.forward import hf_name
from golden.schemes import read_file
from tests.gguf_fixture import all_experts, write_gguf
from tests.helpers import F16, F32, GOLDEN_FILES, MODELS, TINY, run_export

# Kinds of the layers' matrices of the files behind the goldens.
KINDS = {"q8": "Q8_0", "w8a8": "Q8_0", "w8a8-block32": "Q8_0", "awq": "Q4_1", "awq-g64": "Q4_1", "gptq-w8": "Q8_0",
         "gptq-w4": "Q4_1", "gptq-sparse": "F16"}  # fmt: skip
IN_LAYERS = {"attn.q_proj": "attn_q", "attn.k_proj": "attn_k", "attn.v_proj": "attn_v", "attn.o_proj": "attn_output",
             "ffn.gate_proj": "ffn_gate", "ffn.up_proj": "ffn_up", "ffn.down_proj": "ffn_down",
             "attn.norm": "attn_norm", "ffn.norm": "ffn_norm", "attn.q_norm": "attn_q_norm",
             "attn.k_norm": "attn_k_norm"}  # fmt: skip
OUTSIDE = {"embed": "token_embd", "norm": "output_norm", "classifier": "output"}


def written(source, model_file, out):
    """The GGUF file of a model file, as the gguf package reads it."""
    gguf_out.write_gguf(gguf_out.prepare(source, model_file, out, True), source, model_file, out)
    return {tensor.name: tensor for tensor in GGUFReader(out).tensors}


def gguf_name(name):
    if name in OUTSIDE:
        return OUTSIDE[name] + ".weight"
    _, layer, part = name.split(".", 2)
    return f"blk.{layer}.{IN_LAYERS[part]}.weight"


def in_order(scheme, name, rows):
    """Rows of q and k, one by one: pairs for llama, halves for the others."""
    if not name.endswith(("q_proj", "k_proj", "q_norm", "k_norm")):
        return rows
    c, stored = scheme.config, np.arange(len(rows)).reshape(-1, scheme.config.head_dim)
    pairs = [i // 2 + i % 2 * c.head_dim // 2 for i in range(c.head_dim)]  # which of the halves is at i of the pairs
    in_halves = stored[:, np.argsort(pairs)] if scheme.interleaved else stored
    return rows[(in_halves[:, pairs] if c.arch == "llama" else in_halves).reshape(-1)]


def expected(scheme, name, kind):
    """What a matrix has to stand for, with what the GGUF file rounds."""
    if kind == "F16":
        whole = scheme.vector if hasattr(scheme, "tensor") and "layers" not in name else scheme.dense  # AWQ's embedding
        return whole(name).astype(F16).astype(F32)
    if kind == "Q8_0":
        m = scheme.matrix(name)
        codes, scales, zeros = m.codes, m.scales, None
    elif hasattr(scheme, "orders"):
        m = scheme.stored(name)
        codes, scales, zeros = m.codes, m.scales, m.zeros
    else:
        m = scheme.matrix(name)
        codes, scales, zeros = unpack(m.qweight).T, m.scales.T, unpack(m.qzeros).T
    scales = scales.astype(F16).astype(F32)[..., None]
    codes = codes.astype(F32).reshape(*scales.shape[:2], -1)
    if kind == "Q4_0":
        codes = codes - F32(8)
    low = 0 if kind != "Q4_1" else (-zeros.astype(F32)[..., None] * scales).astype(F16).astype(F32)
    return (codes * scales + low).reshape(len(codes), -1)


def check(scheme, tensors):
    """Every tensor is what the model file says, bit for bit. Returns the kinds of the matrices."""
    kinds = {}
    for name, shape in (*norm_shapes(scheme.config), *matrix_shapes(scheme.config)):
        tensor = tensors[gguf_name(name)]
        assert tuple(tensor.shape[::-1]) == shape
        kinds[name] = kind = tensor.tensor_type.name
        right = scheme.vector(name) if kind == "F32" else expected(scheme, name, kind)
        found = dequantize(tensor.data, GGMLQuantizationType[kind]).reshape(shape)
        assert np.array_equal(found, in_order(scheme, name, right)), name
    return kinds


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("variant", KINDS)
def test_tensors_are_those_of_the_model_file(tmp_path, name, variant):
    model_file = GOLDEN_FILES / f"{name}.{variant}.bin"
    scheme = read_file(model_file)
    kinds = check(scheme, written(MODELS / name, model_file, tmp_path / "m.gguf"))
    assert {kind for key, kind in kinds.items() if key.endswith("_proj")} == {KINDS[variant]}
    assert kinds["embed"] == ("F16" if "awq" in variant else "Q4_1" if variant == "gptq-w4" else "Q8_0")


def test_zero_points_of_8_become_q4_0(tmp_path):
    out = tmp_path / "m.bin"
    export_gptq(MODELS / "tiny-qwen3", out, bits={"attn": 4, "ffn": 2}, group=32, progress=False,
                options=Options(rtn=True, symmetric=True))  # fmt: skip
    kinds = check(read_file(out), written(MODELS / "tiny-qwen3", out, tmp_path / "m.gguf"))
    assert kinds["layers.1.attn.k_proj"] == "Q4_0"
    assert kinds["layers.1.ffn.up_proj"] == "F16"


def test_gathered_inputs_go_back_to_their_places(tmp_path):
    model_file = GOLDEN_FILES / "random-llama.gptq-order.bin"
    scheme = read_file(model_file)
    name, place = "layers.1.ffn.down_proj", "layers.1.ffn.swiglu"
    writer = gguf_out.prepare(MODELS / "random-llama", model_file, tmp_path / "m.gguf", False)
    gguf_out.write_gguf(writer, MODELS / "random-llama", model_file, tmp_path / "m.gguf")
    (tensor,) = (t for t in GGUFReader(tmp_path / "m.gguf").tensors if t.name == gguf_name(name))
    order, gathered = scheme.orders[place], scheme.dense(name)
    assert not np.array_equal(order, np.arange(len(order)))
    for k in range(len(order)):
        assert np.array_equal(tensor.data[:, order[k]], gathered[:, k].astype(F16))


@pytest.mark.parametrize("name", TINY)
def test_what_is_read_back_is_the_model(tmp_path, name):
    """Config, ends of a text, sampling, tokenizer and chat template: of a directory, and of what was made of it."""
    source, model_file = MODELS / name, GOLDEN_FILES / f"{name}.q8.bin"
    written(source, model_file, tmp_path / "m.gguf")
    written(tmp_path / "m.gguf", model_file, tmp_path / "again.gguf")
    for out in (tmp_path / "m.gguf", tmp_path / "again.gguf"):
        found, model = open_gguf(out), open_model(source)
        assert found.config == replace(model.config, norm_eps=float(F32(model.config.norm_eps)))
        own, theirs = generation_of(model), found.generation
        assert sorted(theirs.eos_ids) == sorted(own.eos_ids)
        assert theirs.eos_ids[0] == own.eos_ids[0]
        assert (theirs.bos_id, theirs.top_k) == (own.bos_id, own.top_k)
        assert np.allclose((theirs.temperature, theirs.top_p), (own.temperature, own.top_p))
        assert tokenizer_section(out, model.config.vocab_size) == tokenizer_section(source, model.config.vocab_size)


def test_exported_again_it_has_the_same_codes(tmp_path):
    """Groups of 32 are Q8_0's own blocks: only scales are rounded."""
    done = run_export("q8", MODELS / "tiny-llama", tmp_path / "m.bin", "--group-size", "32", "--gguf-out",
                      tmp_path / "m.gguf")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stderr.splitlines()[-2:]] == [
        str(tmp_path / "m.bin"), str(tmp_path / "m.gguf"),
    ]  # fmt: skip
    export_q8(tmp_path / "m.gguf", tmp_path / "again.bin", 32, progress=False)
    first, second = read_file(tmp_path / "m.bin"), read_file(tmp_path / "again.bin")
    for name, _ in matrix_shapes(first.config):
        assert np.array_equal(first.matrix(name).codes, second.matrix(name).codes), name
        assert np.allclose(first.matrix(name).scales, second.matrix(name).scales, rtol=2**-11, atol=2**-25), name


# ---- experts


@pytest.mark.parametrize(
    ("layout", "kinds"),
    [(MoeLayout("a8w8", 0), ("Q8_0", "Q8_0")), (MoeLayout("a8w4", 64), ("Q8_0", "Q4_0")),
     (MoeLayout("a8w4", 0, pure=True), ("Q4_0", "Q4_0")), (MoeLayout("mxfp8", 32, pure=True), ("F16", "F16")),
     ("ladder", ("Q8_0", "Q8_0"))],
)  # fmt: skip
def test_experts(tmp_path, layout, kinds):
    source, out = all_experts(MODELS / "tiny-qwen3-moe", tmp_path / "hf"), tmp_path / "m.bin"
    if layout == "ladder":
        export_ladder(source, out, rtn=True, progress=False)
    else:
        export_moe(source, out, layout, alpha=None, progress=False)
    scheme, tensors = read_file(out), written(source, out, tmp_path / "m.gguf")
    assert tuple(tensors[f"blk.0.{name}.weight"].tensor_type.name for name in ("attn_q", "ffn_up_exps")) == kinds
    c = scheme.config
    assert np.array_equal(tensors["blk.1.ffn_gate_inp.weight"].data, scheme.vector("layers.1.moe.router"))
    for part, names in (("gate_up_proj", ("ffn_gate_exps", "ffn_up_exps")), ("down_proj", ("ffn_down_exps",))):
        found = [tensors[f"blk.1.{name}.weight"] for name in names]
        right = gguf_out.dense(scheme, f"layers.1.moe.{part}").reshape(c.moe.n_experts, -1, found[0].shape[0])
        for tensor, rows in zip(found, np.split(right, len(names), axis=1), strict=True):
            values = dequantize(tensor.data, tensor.tensor_type).reshape(rows.shape)
            assert np.allclose(values, rows, rtol=2**-11, atol=2**-25)
    pure = gguf_out.dense(scheme, "layers.0.attn.v_proj")
    tensor = tensors["blk.0.attn_v.weight"]
    assert np.allclose(dequantize(tensor.data, tensor.tensor_type).reshape(pure.shape), pure, rtol=2**-11, atol=2**-25)


# ---- what cannot be said


def copy_with(name, out, **fields):
    shutil.copytree(MODELS / name, out)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | fields))
    return out


def refused(tmp_path, scheme, source, *options):
    """The one line of an export that writes nothing."""
    done = run_export(scheme, source, tmp_path / "m.bin", "--gguf-out", tmp_path / "m.gguf", *options)
    assert done.returncode == 1
    assert not (tmp_path / "m.bin").exists()
    assert not (tmp_path / "m.gguf").exists()
    (line,) = done.stderr.splitlines()
    return line


def test_models_that_llama_cpp_would_run_as_others_are_refused(tmp_path):
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 128}  # fmt: skip
    scaled = copy_with("tiny-qwen3", tmp_path / "scaled", rope_scaling=llama3)
    assert "which llama.cpp has for llama alone, not for qwen3" in refused(tmp_path, "q8", scaled)
    no_smooth = ("--no-smooth",)
    assert "layer 0 without experts" in refused(tmp_path, "moe", MODELS / "tiny-qwen3-moe", *no_smooth)
    source = all_experts(MODELS / "tiny-qwen3-moe", tmp_path / "experts")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"norm_topk_prob": False}))
    assert "norm_topk_prob false" in refused(tmp_path, "moe", source, *no_smooth)


def test_a_pre_tokenizer_without_a_name_is_refused(tmp_path):
    source = copy_with("tiny-qwen3", tmp_path / "hf")
    text = (source / "tokenizer.json").read_text()
    (source / "tokenizer.json").write_text(text.replace(r"|\\p{N}|", r"|\\p{N}{1,2}|"))
    assert "pre_tokenizer" in (line := refused(tmp_path, "q8", source))
    assert "has no name in llama.cpp that is known here" in line
    done = run_export("q8", source, tmp_path / "m.bin", "--gguf-out", tmp_path / "m.gguf", "--no-tokenizer")
    assert done.returncode == 0, done.stderr


def test_places_that_cannot_be_are_refused(tmp_path):
    source = MODELS / "tiny-llama"
    done = run_export("q8", source, tmp_path / "m.bin", "--gguf-out", tmp_path / "m.bin")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        1, f"export: {tmp_path / 'm.bin'}: is the model file, --gguf-out needs another place"
    )  # fmt: skip
    done = run_export("q8", source, tmp_path / "m.bin", "--gguf-out", tmp_path / "none" / "m.gguf")
    assert "is no directory" in done.stderr
    assert list(tmp_path.iterdir()) == []
    gguf = write_gguf(source, tmp_path / "in.gguf", "BF16")
    done = run_export("q8", gguf, tmp_path / "m.bin", "--gguf-out", gguf)
    assert "is the same file as the input" in done.stderr


def test_scales_beyond_fp16_are_refused_and_the_model_file_stays(tmp_path):
    source = copy_with("tiny-llama", tmp_path / "hf")
    tensors = load_file(source / "model.safetensors")
    name = hf_name(open_model(source).config, "layers.0.ffn.up_proj")
    tensors[name] = tensors[name] * np.float32(1e9).astype(tensors[name].dtype)
    save_file(tensors, source / "model.safetensors")
    done = run_export("q8", source, tmp_path / "m.bin", "--gguf-out", tmp_path / "m.gguf", "--quiet")
    assert done.returncode == 1
    assert "layers.0.ffn.up_proj has" in done.stderr
    assert f"fp16 ends at 65504; {tmp_path / 'm.bin'} was written" in done.stderr
    assert not (tmp_path / "m.gguf").exists()
