"""GPTQ and AutoAWQ checkpoints into a GPTQ file, code for code, and out of it."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from export.awq import export_awq
from export.gptq import Options, export_gptq
from formats.checkpoint import Checkpoint
from formats.errors import ModelError
from formats.foreign import storage_of
from formats.gptq import MatrixFormat
from formats.packing import pack_words, unpack_words
from golden import awq
from golden.forward import forward, hf_name, permute_rows
from golden.gptq import GPTQ, expand, stands_for
from tests.helpers import F16, F32, MODELS, ROOT, run_export

THEIRS = load_file(ROOT / "tests" / "hf" / "gptq.safetensors")  # tests/gptq_fixture.py
QWEN = MODELS / "tiny-qwen3"
NAME = "layers.1.attn.q_proj"


# ---- words, as AutoGPTQ has them


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("case", ["", "-order"])
def test_words_are_auto_gptqs(bits, case):
    t = {part: THEIRS[f"w{bits}{case}.{part}"] for part in ("weight", "qweight", "qzeros", "scales", "g_idx")}
    codes, zeros = unpack_words(t["qweight"], bits), unpack_words(t["qzeros"].T, bits).T.astype(int) + 1
    weight = (codes - zeros[t["g_idx"]]) * t["scales"].astype(F32)[t["g_idx"]]
    assert np.array_equal(weight.T, t["weight"])
    assert np.array_equal(pack_words(codes, bits), t["qweight"])
    assert np.array_equal(pack_words((zeros - 1).T, bits).T, t["qzeros"])


# ---- directories


def changed(source, out, change, config=None):
    """A copy of a directory with its tensors and its quantization_config changed."""
    shutil.copytree(source, out)
    tensors = load_file(out / "model.safetensors")
    change(tensors)
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, out / "model.safetensors")
    fields = json.loads((out / "config.json").read_text())
    fields["quantization_config"] |= config or {}
    (out / "config.json").write_text(json.dumps(fields))
    return out


def nothing(_tensors):
    pass


@pytest.fixture(scope="module", params=["4", "4 sparse", "8"])
def written(request, tmp_path_factory):
    """A model file and the checkpoint that was written beside it, by plain rounding."""
    folder = tmp_path_factory.mktemp("gptq")
    bits, sparse = int(request.param[0]), "sparse" in request.param
    export_gptq(
        QWEN, folder / "m.bin", bits={"attn": bits, "ffn": bits}, group=64, sparse=sparse,
        options=Options(rtn=True, symmetric=False, first_zero=1), hf_out=folder / "hf", progress=False,
    )  # fmt: skip
    return folder


def test_out_and_in_again(written, tmp_path):
    first = GPTQ(written / "m.bin")
    export_gptq(written / "hf", tmp_path / "again.bin", progress=False)
    second = GPTQ(tmp_path / "again.bin")
    assert not second.layout.has_order
    for part in ("attn.q_proj", "attn.v_proj", "ffn.down_proj"):
        a, b = first.stored(f"layers.2.{part}"), second.stored(f"layers.2.{part}")
        assert np.array_equal(stands_for(a), stands_for(b))
        assert np.array_equal(a.scales, b.scales)
        if a.kept is None:
            assert np.array_equal(a.codes, b.codes)
    assert second.layout.of("embed") == second.layout.of("classifier") == MatrixFormat(8)
    assert np.array_equal(first.vector("layers.3.attn.q_norm"), second.vector("layers.3.attn.q_norm"))
    config = json.loads((written / "hf" / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["checkpoint_format"], config["group_size"]) == ("gptq", "gptq", 64)


def test_the_checkpoint_stands_for_what_the_file_does(written):
    """By the definition of a GPTQ checkpoint, with rows in Hugging Face's order."""
    tensors, model = load_file(written / "hf" / "model.safetensors"), GPTQ(written / "m.bin")
    bits = model.layout.of(NAME).bits
    stem = hf_name(model.config, NAME).removesuffix("weight")
    codes = unpack_words(tensors[stem + "qweight"], bits).astype(int)
    zeros = unpack_words(tensors[stem + "qzeros"].T, bits).T.astype(int) + 1
    weight = (codes - zeros[tensors[stem + "g_idx"]]) * tensors[stem + "scales"].astype(F32)[tensors[stem + "g_idx"]]
    assert np.array_equal(permute_rows(weight.T.astype(F32), model.config.head_dim), stands_for(model.stored(NAME)))
    source = Checkpoint(QWEN)
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.layers.0.self_attn.q_norm.weight"):
        assert np.array_equal(tensors[name], source.stored(name))


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """A checkpoint of 4 bits in groups of 64, and its file."""
    folder = tmp_path_factory.mktemp("four")
    export_gptq(
        QWEN, folder / "m.bin", bits={"attn": 4, "ffn": 4}, group=64,
        options=Options(rtn=True, symmetric=False, first_zero=1), hf_out=folder / "hf", progress=False,
    )  # fmt: skip
    return folder


def test_both_conventions_of_the_zero_point(four, tmp_path):
    def plus_one(tensors):
        for name in tensors:
            if name.endswith("qzeros"):
                tensors[name] = pack_words(unpack_words(tensors[name].T, 4) + np.uint8(1), 4).T

    v2 = changed(four / "hf", tmp_path / "v2", plus_one, {"checkpoint_format": "gptq_v2"})
    assert storage_of(v2).form("").added == 0
    for source, out in ((four / "hf", tmp_path / "1.bin"), (v2, tmp_path / "2.bin")):
        export_gptq(source, out, progress=False)
    assert (tmp_path / "1.bin").read_bytes() == (tmp_path / "2.bin").read_bytes()


def scattered(tensors):
    """Groups of the inputs that gate and up, and q, k and v, share; their codes stay where the inputs are."""
    rng = np.random.default_rng(0)
    for places in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("down_proj",)):
        for layer in range(4):
            names = [n for n in tensors if n.endswith("g_idx") and f".{layer}." in n and n.split(".")[-2] in places]
            shuffled = rng.permutation(tensors[names[0]])
            for name in names:
                tensors[name] = shuffled


def test_scattered_groups_are_gathered(four, tmp_path):
    source = changed(four / "hf", tmp_path / "hf", scattered, {"desc_act": True})
    export_gptq(source, tmp_path / "m.bin", progress=False)
    model, tensors = GPTQ(tmp_path / "m.bin"), load_file(source / "model.safetensors")
    assert model.layout.has_order
    assert np.array_equal(model.orders["layers.0.attn.mix"], np.arange(model.config.q_dim))
    for name, place in (("layers.1.attn.v_proj", "attn.norm"), ("layers.2.ffn.down_proj", "ffn.swiglu")):
        stem = hf_name(model.config, name).removesuffix("weight")
        codes, g_idx = unpack_words(tensors[stem + "qweight"], 4).astype(int), tensors[stem + "g_idx"]
        zeros = unpack_words(tensors[stem + "qzeros"].T, 4).T.astype(int) + 1
        weight = ((codes - zeros[g_idx]) * tensors[stem + "scales"].astype(F32)[g_idx]).T
        order = model.orders[name.rsplit(".", 2)[0] + "." + place]
        assert np.array_equal(stands_for(model.stored(name)), weight[:, order].astype(F32))
    # And the pass: gathered activations against gathered codes. Without the order it is another model.
    tokens = np.arange(100, 108)
    steps = {}
    logits = forward(model.config, model, tokens, lambda name, value: steps.setdefault(name, value))
    assert np.array_equal(steps["layers.1.ffn.norm.gathered"],
                          steps["layers.1.ffn.norm"][:, model.orders["layers.1.ffn.norm"]])  # fmt: skip
    assert "layers.1.ffn.norm.q" not in steps
    model.orders = {place: np.arange(len(order)) for place, order in model.orders.items()}
    assert not np.allclose(forward(model.config, model, tokens), logits, rtol=0.1)
    # Out again: the same tensors.
    export_gptq(source, tmp_path / "m2.bin", hf_out=tmp_path / "out", progress=False)
    again = load_file(tmp_path / "out" / "model.safetensors")
    assert again.keys() == tensors.keys()
    assert all(np.array_equal(again[name], tensors[name]) for name in tensors)


def test_an_autoawq_checkpoint_code_for_code(tmp_path):
    export_awq(QWEN, tmp_path / "awq.bin", group_size=64, rtn=True, hf_out=tmp_path / "hf", progress=False)
    export_gptq(tmp_path / "hf", tmp_path / "m.bin", progress=False)
    theirs, model = awq.AWQ(tmp_path / "awq.bin"), GPTQ(tmp_path / "m.bin")
    for name in (NAME, "layers.0.ffn.down_proj"):
        packed, found = theirs.matrix(name), model.stored(name)
        codes, zeros, scales = awq.unpack(packed.qweight).T, awq.unpack(packed.qzeros).T, packed.scales.T
        if name == NAME:
            codes, zeros, scales = (permute_rows(a, model.config.head_dim) for a in (codes, zeros, scales))
        assert np.array_equal(found.codes, codes)
        assert np.array_equal(found.zeros, zeros)
        assert np.array_equal(found.scales, scales)


@pytest.mark.parametrize("group", [64, -1])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_other_widths_and_whole_rows(four, tmp_path, bits, group):
    rng = np.random.default_rng(bits)

    def other(tensors):
        for name in [n for n in tensors if n.endswith("qweight")]:
            stem, (words, n_out) = name.removesuffix("qweight"), tensors[name].shape
            n_in = 8 * words
            n_groups = n_in // group if group > 0 else 1
            zeros = np.full((n_out, n_groups), 128) if bits == 8 else rng.integers(1, 2**bits, (n_out, n_groups))
            tensors[stem + "qweight"] = pack_words(rng.integers(0, 2**bits, (n_in, n_out)), bits)
            tensors[stem + "qzeros"] = pack_words(zeros - 1, bits).T
            tensors[stem + "scales"] = rng.uniform(0.001, 0.01, (n_groups, n_out)).astype(F16)
            tensors[stem + "g_idx"] = (np.arange(n_in) // (n_in // n_groups)).astype(np.int32)

    source = changed(four / "hf", tmp_path / "hf", other, {"bits": bits, "group_size": group})
    export_gptq(source, tmp_path / "m.bin", hf_out=tmp_path / "out", progress=False)
    model, tensors = GPTQ(tmp_path / "m.bin"), load_file(source / "model.safetensors")
    assert model.layout.of(NAME) == MatrixFormat(bits, max(group, 0))
    name = "layers.3.ffn.up_proj"
    stem = hf_name(model.config, name).removesuffix("weight")
    codes, g_idx = unpack_words(tensors[stem + "qweight"], bits).astype(int), tensors[stem + "g_idx"]
    zeros = unpack_words(tensors[stem + "qzeros"].T, bits).T.astype(int) + 1
    assert np.array_equal(expand(model.stored(name), 64).codes, (codes - zeros[g_idx]).T)
    again = load_file(tmp_path / "out" / "model.safetensors")
    assert all(np.array_equal(again[n], tensors[n]) for n in tensors)


def test_rules_by_module(four, tmp_path):
    """`dynamic`: other bits and groups; "-:" is a module that is not quantized, as the tensors say."""
    rng = np.random.default_rng(0)
    name, eight = "model.layers.0.self_attn.v_proj.", {}

    def other(tensors):
        n_out = tensors[name + "scales"].shape[1]
        eight["codes"] = rng.integers(0, 256, (128, n_out))
        eight["scales"] = rng.uniform(0.001, 0.01, (4, n_out)).astype(F16)
        tensors[name + "qweight"] = pack_words(eight["codes"], 8)
        tensors[name + "qzeros"] = pack_words(np.full((n_out, 4), 127), 8).T
        tensors[name + "scales"] = eight["scales"]
        tensors[name + "g_idx"] = (np.arange(128) // 32).astype(np.int32)

    rules = {"-:.*lm_head": {}, r"+:.*\.0\..*v_proj": {"bits": 8, "group_size": 32}}
    source = changed(four / "hf", tmp_path / "hf", other, {"dynamic": rules})
    export_gptq(source, tmp_path / "m.bin", progress=False)
    model, before = GPTQ(tmp_path / "m.bin"), GPTQ(four / "m.bin")
    assert model.layout.of("layers.1.attn.v_proj") == MatrixFormat(8, 32)  # one for all of a kind
    assert model.layout.of("layers.0.attn.k_proj") == MatrixFormat(4, 64)
    expected = (eight["codes"] - 128) * np.repeat(eight["scales"].astype(F32), 32, axis=0)
    assert np.array_equal(stands_for(model.stored("layers.0.attn.v_proj")), expected.T.astype(F32))
    step = "layers.1.attn.v_proj"
    assert np.array_equal(stands_for(model.stored(step)), stands_for(before.stored(step)))


# ---- what cannot be repacked


def with_tensor(part, change, layer=1, matrix="self_attn.k_proj"):
    def apply(tensors):
        name = f"model.layers.{layer}.{matrix}.{part}"
        tensors[name] = change(tensors.get(name))

    return apply


BAD = {
    "a zero point of 16": (with_tensor("qzeros", lambda t: np.full_like(t, -1)), {}, "has a zero point of 16"),
    "a bias": (with_tensor("bias", lambda _: np.ones(128, F16)), {}, "k_proj.bias is not zero"),
    "uneven groups": (with_tensor("g_idx", lambda t: 0 * t), {}, "g_idx does not have 64 inputs in each group"),
    "another order than q": (
        with_tensor("g_idx", lambda t: t[::-1]), {}, "g_idx differs from that of attn.q_proj, which reads the same",
    ),
    "5 bits": (nothing, {"bits": 5}, "quantization_config.bits is 5, supported is 2 or 3 or 4 or 8"),
    "groups of 48": (nothing, {"group_size": 48}, "group_size is 48, supported is 16 or 32 or 64 or 128 or 256"),
    "sym: true and others": (nothing, {"sym": True}, "qzeros has zero points beside the middle code, though"),
    "marlin": (nothing, {"checkpoint_format": "marlin"}, 'checkpoint_format is "marlin"'),
    "other bits by module": (
        nothing, {"dynamic": {"+:.*o_proj": {"bits": 8}}}, "o_proj.qweight has shape (32, 128), config.json im",
    ),
    "a bad rule": (nothing, {"dynamic": {".*": {"bits": 5}}}, "quantization_config.dynamic..*.bits is 5, supported is"),
    "another method": (nothing, {"quant_method": "aqlm"}, 'quant_method is "aqlm", supported is "gptq" or "awq"'),
    "other groups than it says": (nothing, {"group_size": 128}, "has shape (2, 32), config.json implies (1, 32)"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_repacked_is_refused_by_name(four, tmp_path, case):
    change, config, says = BAD[case]
    source = changed(four / "hf", tmp_path / "hf", change, config)
    with pytest.raises(ModelError) as error:
        export_gptq(source, tmp_path / "m.bin", progress=False)
    assert says in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "m.bin").exists()


def test_negative_scales_stay(four, tmp_path):
    """AutoRound has them, so that the largest weight of a group gets the code that is one further from the middle."""
    source = changed(four / "hf", tmp_path / "hf", with_tensor("scales", lambda t: -t))
    export_gptq(source, tmp_path / "m.bin", progress=False)
    export_gptq(four / "hf", tmp_path / "expected.bin", progress=False)
    for name, sign in (("layers.1.attn.k_proj", -1), ("layers.1.attn.q_proj", 1)):
        expected = GPTQ(tmp_path / "expected.bin").stored(name)
        assert np.array_equal(stands_for(GPTQ(tmp_path / "m.bin").stored(name)), sign * stands_for(expected))


def test_a_bias_of_zeros_is_left_out(four, tmp_path):
    source = changed(four / "hf", tmp_path / "hf", with_tensor("bias", lambda _: np.zeros(128, F16)))
    export_gptq(source, tmp_path / "m.bin", progress=False)


def test_a_format_that_a_checkpoint_cannot_express(tmp_path):
    for bits, says in (
        ({}, "one format for all layers, here are 2 bits in groups of 64, two-level; 4 bits in groups of 128"),
        ({"attn": 2}, "cannot express 2 bits in groups of 64, two-level"),
        ({"attn": 8, "ffn": 8}, "has fp16 scales, 8 bits per row has fp32's: give --group"),
    ):
        with pytest.raises(ModelError, match=says):
            export_gptq(QWEN, tmp_path / "m.bin", bits=bits, options=Options(rtn=True), hf_out=tmp_path / "hf")
    assert not list(tmp_path.iterdir())


def test_options_that_change_nothing_for_a_quantized_checkpoint(four, tmp_path):
    for options in (["--group", 64], ["--bits", 4], ["--calib", "x"]):
        done = run_export("gptq", four / "hf", tmp_path / "m.bin", *options, "--quiet")
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1
        assert f"is quantized already, {options[0]}" in done.stderr
