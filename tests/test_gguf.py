"""GGUF files in the place of Hugging Face directories: every type of tensor, tokenizers, split files, bad files."""

import json
import os
import re
import struct
import subprocess
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from gguf import GGMLQuantizationType, dequantize
from tokenizers import Tokenizer

from export.awq import export_awq
from export.q8 import export_q8
from export.w8a8 import export_w8a8
from formats.checkpoint import Checkpoint, ModelError, RopeScaling, tensor_shapes
from formats.gguf_file import TYPES
from formats.gguf_model import GGUFModel, find_rope_scaling, gguf_name, rope_divisors
from formats.gguf_tokenizer import END_TOKENS
from formats.source import open_model
from golden.forward import Fp32, forward, rope_frequencies
from golden.perplexity import load_tokenizer
from tests.gguf_fixture import ENCODERS, NOT_ENCODED, encode, rope_factors, widened, write_gguf
from tests.helpers import F32, MODELS, ROOT, TINY, calibration, launch_export, run_export, run_golden
from tests.hf_fixtures import FIXTURES, FOLDER
from tests.test_tokenizer import FIXED_STRINGS, random_strings

EXACT = ("F32", "BF16")  # types that hold the tiny models' bf16
EXPORTS = {
    "q8": export_q8,
    "w8a8": partial(export_w8a8, **calibration(2, 32)),
    "awq": partial(export_awq, rtn=True),
}


@pytest.fixture(scope="session")
def ggufs(tmp_path_factory):
    """GGUF files of the tiny models in fp32, by name."""
    folder = tmp_path_factory.mktemp("gguf")
    return {name: write_gguf(MODELS / name, folder / f"{name}.gguf") for name in TINY}


@pytest.fixture(scope="session")
def wide(tmp_path_factory):
    """tiny-llama with rows of whole blocks of 256."""
    return widened(MODELS / "tiny-llama", tmp_path_factory.mktemp("wide") / "hf")


# ---- the same as the directory


@pytest.mark.parametrize("scheme", EXPORTS)
@pytest.mark.parametrize("name", TINY)
def test_the_export_is_that_of_the_directory(tmp_path, ggufs, name, scheme):
    """Byte for byte: weights, config, tokenizer, chat template, ids and sampling defaults."""
    for source, out in ((MODELS / name, "hf.bin"), (ggufs[name], "gguf.bin")):
        EXPORTS[scheme](source, tmp_path / out, progress=False)
    assert (tmp_path / "gguf.bin").read_bytes() == (tmp_path / "hf.bin").read_bytes()


@pytest.mark.parametrize("name", FIXTURES)
def test_config_and_tensors_are_those_of_the_directory(tmp_path, name):
    """GQA and MHA, tied and untied, wide heads, scaled RoPE, both architectures."""
    expected = Checkpoint(FOLDER / name)
    model = open_model(write_gguf(FOLDER / name, tmp_path / "m.gguf"))
    close = replace(model.config, norm_eps=expected.config.norm_eps)
    assert close == expected.config
    assert model.config.norm_eps == pytest.approx(expected.config.norm_eps, rel=1e-7)
    for tensor in tensor_shapes(expected.config):
        assert np.array_equal(model.tensor(tensor), expected.tensor(tensor)), tensor


def test_the_reference_runs_gguf_files(tmp_path, ggufs):
    text = tmp_path / "text"
    text.write_text((MODELS / "held_out.txt").read_text()[:600])
    lines = [run_golden("ppl", source, text, "--ctx", 64).stdout for source in (MODELS / TINY[0], ggufs[TINY[0]])]
    assert lines[0] == lines[1] != ""


# ---- types of tensors


def stored_values(weight, kind, n_heads=0):
    """What a type leaves of a matrix, (n_out, n_in) fp32; with n_heads, of one whose rows the file has in pairs."""
    order = np.arange(len(weight))
    if n_heads:
        order = order.reshape(n_heads, 2, -1).transpose(0, 2, 1).ravel()  # row i of the file is row order[i]
    data = np.ascontiguousarray(encode(weight[order], kind))
    values = np.empty_like(weight)
    values[order] = dequantize(data, GGMLQuantizationType[kind])
    return values


def story_of(source, folder):
    """What a Q8 file of a model writes, and its perplexity on some held-out stories."""
    out, text = folder / "m.bin", folder / "text"
    export_q8(source, out, progress=False)
    text.write_text((MODELS / "held_out.txt").read_text()[:1500])
    options = [["-i", "Once upon a time", "-t", "0", "-n", "32"], ["--ppl", text]]
    run = [subprocess.run([ROOT / "runq", out, "-j", "1", *o], capture_output=True, text=True, check=True).stdout
           for o in options]  # fmt: skip
    return run[0], float(run[1].split()[1])


@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind not in NOT_ENCODED])
def test_every_type_is_read_and_tells_a_story(tmp_path, wide, kind):
    """Values are those that the package makes of the bytes; what is written through runq is close to the directory."""
    source = wide if ENCODERS.get(kind, (0,))[0] == 256 else MODELS / "tiny-llama"
    expected = Checkpoint(source)
    c = expected.config
    gguf = write_gguf(source, tmp_path / "m.gguf", kind)
    model = open_model(gguf)
    for part, n_heads in (("self_attn.q_proj", c.n_heads), ("self_attn.k_proj", c.n_kv_heads), ("mlp.down_proj", 0)):
        name = f"model.layers.1.{part}.weight"
        found, weight = model.tensor(name), expected.tensor(name)
        assert np.array_equal(found, stored_values(weight, kind, n_heads)), part
        bits = 10 if "F" in kind else int(kind.strip("IQ")[0])
        assert np.linalg.norm(found - weight) < 2 * 2.0**-bits * np.linalg.norm(weight)
        if kind in EXACT:
            assert np.array_equal(found, weight)
    (story, before), (found, after) = story_of(source, tmp_path), story_of(gguf, tmp_path)
    assert len(found.split()) > 20
    assert after < before * {2: 20, 3: 1.3, 4: 1.1}.get(bits, 1.03)  # a model this small loses much in 2 bits
    if kind in EXACT:
        assert (story, before) == (found, after)


@pytest.mark.parametrize("kind", NOT_ENCODED)
def test_blocks_of_types_without_an_encoder(tmp_path, wide, kind):
    """Random ones, in the place of a matrix."""
    name, weight = "model.layers.1.mlp.down_proj.weight", np.zeros((256, 512), F32)
    gguf = write_gguf(wide, tmp_path / "m.gguf", "F16", {gguf_name(name): weight}, {gguf_name(name): kind})
    found = open_model(gguf).tensor(name)
    assert found.std() > 0
    assert np.array_equal(found, dequantize(encode(weight, kind), GGMLQuantizationType[kind]))


def test_a_matrix_in_nvfp4_has_a_scale_of_its_own(tmp_path, wide):
    """As the converter writes it for NVFP4 of modelopt; input_scale is of activations."""
    name, weight = "blk.1.ffn_down.weight", np.zeros((256, 512), F32)

    def written(kind="NVFP4", **scales):
        scales = {name.replace("weight", key): np.array(value, F32) for key, value in scales.items()}
        return open_model(write_gguf(wide, tmp_path / "m.gguf", "F16", {name: weight} | scales, {name: kind}))

    def found(**scales):
        return written(**scales).tensor("model.layers.1.mlp.down_proj.weight")

    assert np.array_equal(found(scale=[0.375], input_scale=[7.0]), F32(0.375) * found())
    for text, options in (
        ("blk.1.ffn_down.scale has shape (2,), the metadata implies (1,)", {"scale": [1.0, 2.0]}),
        ("blk.1.ffn_down.scale is not supported", {"kind": "F16", "scale": [0.5]}),
    ):
        with pytest.raises(ModelError, match=re.escape(text)):
            written(**options)
    with pytest.raises(ModelError, match=re.escape(f"{name} has values that are not finite")):
        found(scale=[3e38])


def test_widened_computes_the_same(wide):
    tokens = np.arange(40) * 7
    for source, expected in ((wide, MODELS / "tiny-llama"),):
        checkpoints = [Checkpoint(path) for path in (source, expected)]
        a, b = (forward(c.config, Fp32(c), tokens) for c in checkpoints)
        assert np.abs(a - b).max() < 1e-4


# ---- RoPE


@pytest.mark.parametrize("head_dim", [16, 32, 64, 128])
@pytest.mark.parametrize("theta", [1e4, 5e5, 1e6])
@pytest.mark.parametrize(
    "numbers", [(8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192), (2.5, 1.0, 8.0, 2048), (4.0, 2.0, 6.0, 4096)]
)
def test_rope_scaling_comes_back(head_dim, theta, numbers):
    """The numbers themselves where low is 1, otherwise others that scale every frequency alike."""
    config = replace(open_model(FOLDER / "llama-scaled-rope").config, head_dim=head_dim, rope_theta=theta)
    scaling = RopeScaling(*numbers)
    divisors = rope_factors(replace(config, rope_scaling=scaling))
    found = find_rope_scaling(divisors, head_dim, theta)
    between = int(((divisors > 1) & (divisors < scaling.factor)).sum())
    if found is None or (between < 2 and scaling.high_freq_factor != 4):
        assert between < 2  # too few points on the straight line
        return
    frequencies = [rope_frequencies(replace(config, rope_scaling=s)) for s in (scaling, found)]
    assert np.allclose(*frequencies, rtol=1e-5, atol=0)
    if scaling.low_freq_factor == 1:
        assert found == scaling


@pytest.mark.parametrize("i", range(16))
def test_one_frequency_that_does_not_fit_is_refused(tmp_path, i):
    """As are other rescalings: linear, by a table of their own."""
    config = Checkpoint(FOLDER / "llama-scaled-rope").config
    factors = rope_factors(config)
    factors[i] *= np.float32(1.001)
    gguf = write_gguf(FOLDER / "llama-scaled-rope", tmp_path / "m.gguf", tensors={"rope_freqs.weight": factors})
    with pytest.raises(ModelError, match=r"m.gguf: tensor rope_freqs.weight does not hold the factors of a rescaling"):
        open_model(gguf)
    assert find_rope_scaling(np.full(16, 4.0, np.float32), 32, 1e4) is None
    assert find_rope_scaling(np.linspace(1, 4, 16, dtype=np.float32), 32, 1e4) is None
    divisors = rope_divisors(config.rope_scaling, 5e5 ** (-np.arange(0, 32, 2) / 32))
    assert np.allclose(divisors, rope_factors(config), rtol=1e-5)


# ---- tokenizers


@pytest.mark.parametrize("name", TINY)
def test_the_tokenizer_is_that_of_the_directory(ggufs, name):
    ours, theirs = load_tokenizer(ggufs[name]), Tokenizer.from_file(str(MODELS / name / "tokenizer.json"))
    added = [token.content for token in theirs.get_added_tokens_decoder().values()]
    texts = [t.decode("utf-8", errors="replace") for t in FIXED_STRINGS[:40] + random_strings(3, 2000, added)]
    for special in (False, True):
        found, expected = (t.encode_batch_fast(texts, add_special_tokens=special) for t in (ours, theirs))
        assert [e.ids for e in found] == [e.ids for e in expected]


def test_digits_pattern_is_the_sequence_that_it_stands_for():
    """`smollm`: Sequence[Digits(individual), ByteLevel], one after the other, in one pattern."""
    from tokenizers import Regex, pre_tokenizers

    from formats.gguf_tokenizer import PRE_TOKENIZERS

    both = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                    pre_tokenizers.ByteLevel(add_prefix_space=False)])  # fmt: skip
    split = pre_tokenizers.Split(Regex(PRE_TOKENIZERS["smollm"].pattern), "isolated")
    one = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    gpt2 = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PRE_TOKENIZERS["gpt-2"].pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])  # fmt: skip
    for text in (t.decode("utf-8", errors="replace") for t in FIXED_STRINGS + random_strings(5, 4000, [])):
        assert one.pre_tokenize_str(text) == both.pre_tokenize_str(text), text
        assert gpt2.pre_tokenize_str(text) == pre_tokenizers.ByteLevel(False).pre_tokenize_str(text), text


def test_added_tokens_among_the_others_are_in_the_vocabulary_too(tmp_path):
    """As in SmolLM2, whose first 17 ids are control tokens. Unused ids are nothing."""
    names = ["<|end|>", "a", "b", "ab", "<tool>", "unused"]
    gguf = write_gguf(FOLDER / "llama-gqa-tied", tmp_path / "m.gguf", tokenizer__ggml__model="gpt2",
                      tokenizer__ggml__pre="smollm", tokenizer__ggml__tokens=names,
                      tokenizer__ggml__token_type=[3, 1, 1, 1, 4, 5], tokenizer__ggml__merges=["a b"])  # fmt: skip
    files = open_model(gguf).tokenizer_files()
    assert files.tokenizer["model"]["vocab"] == {"<|end|>": 0, "a": 1, "b": 2, "ab": 3, "<tool>": 4}
    assert [(t["id"], t["special"]) for t in files.tokenizer["added_tokens"]] == [(0, True), (4, False)]
    assert load_tokenizer(gguf).encode("ab<tool>a<|end|>").ids == [3, 4, 1, 0]


# ---- split files


def test_a_split_model_is_read_from_any_of_its_files(tmp_path):
    write_gguf(MODELS / "tiny-llama", tmp_path / "m.gguf", parts=12)
    files = sorted(tmp_path.glob("m-*.gguf"))
    assert len(files) == 4
    assert files[0].name == "m-00001-of-00004.gguf"
    expected = Checkpoint(MODELS / "tiny-llama")
    for file in (files[0], files[2]):
        model = GGUFModel(file)
        for name in tensor_shapes(expected.config):
            assert np.array_equal(model.tensor(name), expected.tensor(name)), name
    files[2].rename(tmp_path / "elsewhere.gguf")
    for file in (files[0], files[1]):
        with pytest.raises(ModelError, match=r"one of 4 files, missing beside it: m-00003-of-00004.gguf$"):
            GGUFModel(file)
    with pytest.raises(ModelError, match=r"elsewhere.gguf: split.count is 4: expected 1, by the name of the file"):
        GGUFModel(tmp_path / "elsewhere.gguf")
    (tmp_path / files[2].name).write_bytes(files[1].read_bytes())
    with pytest.raises(ModelError, match=r"m-00003-of-00004.gguf: split.no is 1: expected 2, by the name of the file"):
        GGUFModel(files[0])


# ---- what is refused


REFUSED_METADATA = [
    ({"general__architecture": "gpt2"}, "general.architecture is 'gpt2': supported are llama and qwen3"),
    ({"arch__block_count": None}, "llama.block_count is missing"),
    ({"arch__block_count": "four"}, "llama.block_count is 'four': expected a whole number from 1 to 65535"),
    ({"arch__block_count": 0}, "llama.block_count is 0: expected a whole number from 1 to 65535"),
    ({"arch__block_count": ("INT32", -4)}, "llama.block_count is -4: expected a whole number"),
    ({"arch__block_count": ("UINT64", 2**60)}, "llama.block_count is 1152921504606846976: expected"),
    ({"arch__block_count": 5}, "tensor blk.4.attn_norm.weight is missing"),
    ({"arch__block_count": 3}, "tensor blk.3.attn_k.weight is not supported"),
    ({"arch__block_count": True}, "llama.block_count is True: expected a whole number"),
    ({"arch__embedding_length": 96}, "tensor token_embd.weight has shape (2048, 128), the metadata implies (2048, 96)"),
    ({"arch__attention__head_count_kv": 3}, "llama.attention.head_count_kv is 3: does not divide the 4 query heads"),
    ({"arch__attention__head_count_kv": [2, 2, 2, 2]}, "llama.attention.head_count_kv is [2, 2, 2, 2]: expected"),
    ({"arch__attention__key_length": 31, "arch__attention__value_length": None, "arch__rope__dimension_count": None},
     "heads of 31 values, RoPE needs an even number"),
    ({"arch__rope__dimension_count": 16}, "llama.rope.dimension_count is 16: expected 32, the length of a head"),
    ({"arch__rope__freq_base": "x"}, "llama.rope.freq_base is 'x': expected a number"),
    ({"arch__rope__freq_base": ("FLOAT32", float("nan"))}, "llama.rope.freq_base is nan: expected a number"),
    ({"arch__attention__layer_norm_rms_epsilon": ("FLOAT32", 0.0)}, "expected a positive number"),
    ({"arch__rope__scaling__type": "longrope"}, "llama.rope.scaling.type is 'longrope': supported are none, linear,"),
    ({"arch__rope__scaling__type": "yarn", "arch__rope__scaling__factor": ("FLOAT32", 0.5)},
     "llama.rope.scaling.factor is 0.5: expected 1 to 1e+06"),
    ({"arch__attention__sliding_window": 64}, "llama.attention.sliding_window is 64: not supported"),
    ({"arch__expert_count": 8}, "llama.expert_count is 8: not supported"),
    ({"arch__vocab_size": 2047}, "llama.vocab_size is 2047: token_embd.weight has 2048 rows"),
    ({"tokenizer__ggml__model": "llama"}, "tokenizer.ggml.model is 'llama': SentencePiece is not supported, only gpt2"),
    ({"tokenizer__ggml__model": "bert"}, "tokenizer.ggml.model is 'bert': supported is gpt2"),
    ({"tokenizer__ggml__pre": "tekken"}, "tokenizer.ggml.pre is 'tekken': known are llama-bpe, llama3, llama-v3"),
    ({"tokenizer__ggml__pre": None}, "tokenizer.ggml.pre is missing"),
    ({"tokenizer__ggml__add_bos_token": "yes"}, "tokenizer.ggml.add_bos_token is 'yes': expected true or false"),
    ({"tokenizer__ggml__add_eos_token": True}, "tokenizer.ggml.add_eos_token is True: not supported"),
    ({"tokenizer__ggml__bos_token_id": 2048}, "tokenizer.ggml.bos_token_id is 2048: expected a whole number from 0"),
    ({"tokenizer__ggml__bos_token_id": 7}, "tokenizer.ggml.bos_token_id is 7: add_bos_token needs a token of type"),
    ({"tokenizer__ggml__tokens": ["a"]}, "1 tokens and 2048 types, the embedding has 2048 rows"),
    ({"tokenizer__ggml__tokens": ["a"] * 2048}, "the name 'a' of token 1 is that of 0, too"),
    ({"tokenizer__ggml__tokens": ["a", "", *map(str, range(2046))]}, "the name '' of token 1 is empty"),
    ({"tokenizer__ggml__token_type": [6] * 2048}, "type 6 of token 0 is not supported"),
    ({"tokenizer__ggml__token_type": ["a"] * 2048}, "expected a list of whole numbers"),
    ({"tokenizer__ggml__merges": ["a"]}, "'a' at 0 is not a pair of tokens that make a third"),
    ({"tokenizer__ggml__merges": ["a zzz"]}, "'a zzz' at 0 is not a pair of tokens that make a third"),
    ({"tokenizer__ggml__merges": [1]}, "tokenizer.ggml.merges is [1]: expected a list of texts"),
    ({"tokenizer__chat_template": 5}, "tokenizer.chat_template is 5: expected text"),
    ({"general__sampling__top_p": ("FLOAT32", 1.5)}, "general.sampling.top_p is 1.5: expected a number from 0 to 1"),
]  # fmt: skip


@pytest.mark.parametrize(("metadata", "text"), REFUSED_METADATA, ids=lambda v: v[:40] if isinstance(v, str) else "")
def test_metadata_that_cannot_be_used_is_refused_in_one_line(tmp_path, metadata, text):
    gguf = write_gguf(MODELS / "tiny-llama", tmp_path / "m.gguf", **metadata)
    with pytest.raises(ModelError) as error:
        open_model(gguf).tokenizer_files()
    assert str(error.value).startswith(f"{gguf}: ")
    assert text in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400 + len(str(gguf))


def test_tensors_that_cannot_be_used_are_refused(tmp_path):
    def refused(text, **options):
        with pytest.raises(ModelError) as error:
            open_model(write_gguf(MODELS / "tiny-llama", tmp_path / "m.gguf", **options))
        assert text in str(error.value)

    refused("tensor blk.0.ffn_up.weight is missing", tensors={"blk.0.ffn_up.weight": None})
    refused("tensor token_embd.weight is missing", tensors={"token_embd.weight": None})
    refused("tensor blk.0.attn_q.bias is not supported", tensors={"blk.0.attn_q.bias": np.zeros(128, np.float32)})
    refused("tensor blk.0.ffn_norm.weight has shape (64,), the metadata implies (128,)",
            tensors={"blk.0.ffn_norm.weight": np.zeros(64, np.float32)})  # fmt: skip
    name, zeros = "blk.0.ffn_up.weight", np.zeros((384, 256), np.float32)
    refused("has type I8, supported are F32, F16, BF16, Q8_0", tensors={name: zeros}, types={name: "I8"})
    refused("general.alignment is 48, expected a power of two", general__alignment=48)
    weight = np.full((384, 128), np.nan, np.float32)
    gguf = write_gguf(MODELS / "tiny-llama", tmp_path / "m.gguf", tensors={"blk.2.ffn_up.weight": weight})
    done = run_export("q8", gguf, tmp_path / "out.bin", "--quiet")
    line = f"export: {gguf}: tensor blk.2.ffn_up.weight has values that are not finite\n"
    assert (done.returncode, done.stderr) == (1, line)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.gguf"]


def test_files_that_are_no_gguf_are_refused(tmp_path, ggufs):
    good = ggufs["tiny-llama"].read_bytes()
    path = tmp_path / "m.gguf"

    def refused(data, text):
        path.write_bytes(data)
        with pytest.raises(ModelError) as error:
            GGUFModel(path)
        assert str(error.value).startswith(f"{path}: ")
        assert text in str(error.value)

    def with_u32(at, value):
        return good[:at] + struct.pack("<I", value) + good[at + 4 :]

    def with_u64(at, value):
        return good[:at] + struct.pack("<Q", value) + good[at + 8 :]

    refused(b"", "neither a Hugging Face directory nor a GGUF file, it begins with b''")
    refused(b"PK\3\4 and so on, a zip file", r"it begins with b'PK\x03\x04'")
    refused(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "a Git LFS pointer")
    refused(good[:20], "20 bytes, too short for a GGUF file")
    refused(with_u32(4, 1), "GGUF version 1, supported are 2 and 3")
    refused(with_u32(4, 4), "GGUF version 4, supported are 2 and 3")
    refused(with_u32(4, 3 << 24), "a big-endian GGUF file")
    refused(with_u64(8, 2**60), "tensor_count is 1152921504606846976, more than")
    refused(with_u64(16, 2**60), "kv_count is 1152921504606846976, more than")
    refused(with_u64(24, 2**60), "a metadata key takes 1152921504606846976 bytes at byte 32")
    refused(good[:-1], f"ends at byte {len(good)}, the file has {len(good) - 1}")
    refused(good[: len(good) // 2], f"the file has {len(good) // 2}")
    key = good.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens")  # then type, type of items, count
    refused(with_u64(key + 8, 2**40), "tokenizer.ggml.tokens: 1099511627776 values, expected at most")
    refused(with_u64(key + 8, 1 << 21), "tokenizer.ggml.")  # reads on into other things
    refused(with_u32(key, 99), "tokenizer.ggml.tokens: a value of type 99, which GGUF does not have")
    refused(with_u32(key + 4, 9), "tokenizer.ggml.tokens: an array of values of type 9 is not supported")
    text = good.index(b"begin_of_text")
    refused(good[:text] + b"\xff" + good[text + 1 :], "is not UTF-8")
    name = good.index(b"blk.0.ffn_up.weight") + len(b"blk.0.ffn_up.weight")  # then dimensions, type, offset
    refused(with_u32(name, 9), "tensor blk.0.ffn_up.weight has 9 dimensions, expected 1 to 4")
    refused(with_u64(name + 4, 2**62), "ends at byte")
    refused(with_u64(name + 4, 0), "has shape (384, 0), expected rows of blocks of 1")
    refused(with_u32(name + 20, 999), "tensor blk.0.ffn_up.weight has type 999, which is not known")
    refused(with_u32(name + 20, 12), "has shape (384, 128), expected rows of blocks of 256")
    refused(with_u64(name + 24, 2**62), "tensor blk.0.ffn_up.weight ends at byte")
    refused(good.replace(b"llama.block_count", b"llama.vocab_sizee"[:17]), "llama.block_count is missing")
    refused(good.replace(b"blk.0.ffn_up.weight", b"blk.1.ffn_up.weight"), "tensor blk.1.ffn_up.weight is there twice")


def test_broken_files_never_do_more_than_one_line(tmp_path, ggufs):
    """Bytes of the header changed at random, and the file cut anywhere: a ModelError, or a file that is still good."""
    good = ggufs["tiny-qwen3"].read_bytes()
    header = good.index(b"output_norm.weight") + 64
    rng = np.random.default_rng(0)
    path = tmp_path / "m.gguf"
    refused = 0
    for _ in range(60):
        data = bytearray(good)
        for at in rng.integers(0, header, 3):
            data[at] = rng.integers(256)
        path.write_bytes(bytes(data[: rng.integers(len(data))]) if rng.random() < 0.3 else data)
        try:
            GGUFModel(path).tokenizer_files()
        except ModelError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 15


def test_what_is_neither_file_nor_directory_is_refused(tmp_path, ggufs):
    def line(path, run=run_export, **options):
        done = run("q8", path, tmp_path / "out.bin", **options)
        assert done.returncode == 1
        return done.stderr

    os.mkfifo(tmp_path / "fifo.gguf")  # who opens it waits
    text = f"export: {tmp_path}/fifo.gguf: neither a directory nor a regular file\n"
    assert line(tmp_path / "fifo.gguf", launch_export, timeout=60) == text
    assert line(tmp_path / "none.gguf") == f"export: {tmp_path}/none.gguf: no such file\n"
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "m.gguf").write_bytes(b"")
    text = f"export: {folder}: no config.json, but GGUF files: give one of them, such as {folder}/m.gguf\n"
    assert line(folder) == text


def test_names_cover_every_tensor():
    for name in FIXTURES:
        config = Checkpoint(FOLDER / name).config
        names = [gguf_name(tensor) for tensor in tensor_shapes(config)]
        assert len(set(names)) == len(names)


def ends_of(tmp_path, added, **metadata):
    """The ids at which tiny-qwen3 ends, with other added tokens: {name: type} behind the vocabulary's 2043 tokens."""
    tokenizer = json.loads((MODELS / "tiny-qwen3" / "tokenizer.json").read_text())["model"]["vocab"]
    tokens, types = [*tokenizer, *added], [1] * len(tokenizer) + list(added.values())
    keys = {f"tokenizer__ggml__{key}_token_id": None for key in ("eos", "eot", "padding")} | metadata
    gguf = write_gguf(MODELS / "tiny-qwen3", tmp_path / "m.gguf", tokenizer__ggml__tokens=tokens,
                      tokenizer__ggml__token_type=types, **keys)  # fmt: skip
    return open_model(gguf).generation.eos_ids


def test_control_tokens_end_a_text_by_their_names(tmp_path):
    """Not tokens of other types with such a name, nor other control tokens."""
    assert ends_of(tmp_path, {"<|endoftext|>": 3, "<|im_start|>": 3, "<|im_end|>": 3, "a<eos>": 3}) == [2043, 2045]
    assert ends_of(tmp_path, {"<|im_end|>": 4, "</s>": 1, "<|eot_id|>": 5, "<|file_sep|>": 3}) == [2046]
    assert ends_of(tmp_path, {}) == []


def test_the_page_lists_the_names_that_end_a_text():
    page = (ROOT / "docs" / "gguf.md").read_text()
    listed = page.split("that have one of these names:")[1].split("(llama.cpp")[0]
    assert sorted(re.findall(r"`([^`]+)`", listed)) == sorted(END_TOKENS)


def test_ids_of_the_metadata_end_a_text_whatever_their_tokens_are(tmp_path):
    ids = {"tokenizer__ggml__eos_token_id": 2044, "tokenizer__ggml__fim_pad_token_id": 7}
    assert ends_of(tmp_path, {"<|end|>": 3, "<stop>": 4, "<EOT>": 3}, **ids) == [2044, 7, 2043, 2045]


def test_more_ends_than_the_header_has_room_for_are_refused(tmp_path):
    names = sorted(END_TOKENS)
    eight = dict.fromkeys(names[:5], 3)
    of_metadata = {f"tokenizer__ggml__{kind}_token_id": i for i, kind in enumerate(("eos", "eot", "eom"))}
    assert len(ends_of(tmp_path, eight, **of_metadata)) == 8
    text = r"m.gguf: a text ends at 9 ids \(0, 1, 2, 7, 2043, .*\), at most 8 fit the header$"
    with pytest.raises(ModelError, match=text):
        ends_of(tmp_path, eight, **of_metadata, tokenizer__ggml__fim_sep_token_id=7)


def test_sampling_defaults(tmp_path):
    """general.sampling, with transformers' own default for top_k; greedy without."""
    keys = {f"general__sampling__{key}": None for key in ("temp", "top_p", "top_k")}
    for given, expected in (
        ({}, (0.0, 1.0, 0, 0.0)),
        ({"general__sampling__temp": 0.7}, (0.7, 1.0, 50, 0.0)),
        ({"general__sampling__top_p": 0.9, "general__sampling__top_k": 5}, (1.0, 0.9, 5, 0.0)),
        ({"general__sampling__min_p": ("FLOAT32", 0.05)}, (1.0, 1.0, 50, 0.05)),
    ):
        g = open_model(write_gguf(MODELS / "tiny-llama", tmp_path / "m.gguf", **keys | given)).generation
        assert (round(g.temperature, 5), round(g.top_p, 5), g.top_k, round(g.min_p, 5)) == expected
        assert (g.bos_id, g.eos_ids) == (2043, [2044, 2047])
    assert json.loads((MODELS / "tiny-llama" / "generation_config.json").read_text())["eos_token_id"] == [2044, 2047]
