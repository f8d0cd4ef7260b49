"""A GGUF file as a Hugging Face directory: `--hf-out` from one, and `python -m export.dequantized`."""

import json
import stat
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from export.awq import export_awq
from export.dequantized import main, write_dequantized
from export.gguf_files import config_json, metadata_files
from export.gptq import Options, export_gptq
from export.tokenizer import tokenizer_section
from export.w8a8 import export_w8a8
from formats.checkpoint import Checkpoint, read_config, tensor_shapes
from formats.model_file import read_generation
from formats.source import open_model
from golden.w8a8 import W8A8
from tests.gguf_fixture import write_gguf
from tests.helpers import F16, F32, MODELS, TINY, launch, run_export, run_here
from tests.hf_fixtures import FIXTURES, FOLDER
from tests.test_tokenizer import FIXED_STRINGS, Pair, added_contents, random_strings, tool  # noqa: F401

OTHER_FILES = {"config.json", "generation_config.json", "special_tokens_map.json", "tokenizer.json",
               "tokenizer_config.json"}  # fmt: skip


@pytest.fixture(scope="module", params=TINY)
def written(request, tmp_path_factory):
    """A model's own directory, its GGUF file in BF16, and the directory that is made of that."""
    folder = tmp_path_factory.mktemp("gguf")
    gguf = write_gguf(MODELS / request.param, folder / "m.gguf", "BF16")
    write_dequantized(gguf, folder / "hf")
    return MODELS / request.param, gguf, folder / "hf"


# ---- what is written is what the file says


def test_tensors_are_those_of_the_directory_behind_the_file(written):
    source, _, hf_dir = written
    expected, found = Checkpoint(source), load_file(hf_dir / "model.safetensors")
    assert found.keys() == tensor_shapes(expected.config).keys()
    for name, value in found.items():
        assert value.dtype == (F32 if value.ndim == 1 else ml_dtypes.bfloat16), name
        assert np.array_equal(value.astype(F32), expected.tensor(name)), name


def test_config_and_generation_are_those_of_the_file(written):
    """norm_eps, which a GGUF file has in fp32, comes in the digits that config.json had."""
    source, gguf, hf_dir = written
    assert read_config(hf_dir) == read_config(source)
    config = json.loads((hf_dir / "config.json").read_text())
    own = json.loads((source / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16"
    assert config["architectures"] == own["architectures"]
    generation, expected = read_generation(hf_dir, config["vocab_size"]), open_model(gguf).generation
    close = {name: pytest.approx(value) for name, value in vars(expected).items() if isinstance(value, float)}
    assert vars(generation) == vars(expected) | close
    assert generation == read_generation(source, config["vocab_size"])


@pytest.mark.parametrize("name", FIXTURES)
def test_every_kind_of_config_comes_back(tmp_path, name):
    """GQA and MHA, tied and untied, wide heads, scaled RoPE, both architectures."""
    model = open_model(write_gguf(FOLDER / name, tmp_path / "m.gguf"))
    (tmp_path / "config.json").write_text(json.dumps(config_json(model)))
    found = read_config(tmp_path)
    assert F32(found.norm_eps) == F32(model.config.norm_eps)
    assert F32(found.rope_theta) == F32(model.config.rope_theta)
    assert replace(found, norm_eps=0, rope_theta=0) == replace(model.config, norm_eps=0, rope_theta=0)


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_1"])
def test_the_type_of_what_is_stored(tmp_path, kind):
    gguf = write_gguf(MODELS / "tiny-llama", tmp_path / "m.gguf", kind)
    write_dequantized(gguf, tmp_path / "hf")
    model, found = open_model(gguf), load_file(tmp_path / "hf" / "model.safetensors")
    for name, value in found.items():
        assert value.dtype == (F16 if kind == "F16" and value.ndim == 2 else F32), name
        assert np.array_equal(value.astype(F32), model.tensor(name)), name
    expected = "float16" if kind == "F16" else "float32"
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["torch_dtype"] == expected


# ---- tokenizers


def test_ids_are_those_of_the_program(written, tmp_path, tool):  # noqa: F811
    """`tokenizers` reads the directory's tokenizer.json; the program, the section in a model file of the GGUF file."""
    _, gguf, hf_dir = written
    vocab_size = open_model(gguf).config.vocab_size
    pair = Pair(hf_dir, tmp_path, tool, vocab_size)
    section = tokenizer_section(gguf, vocab_size)
    assert tokenizer_section(hf_dir, vocab_size) == section
    pair.section.write_bytes(section)
    texts = FIXED_STRINGS + random_strings(11, 2000, added_contents(pair.hf))
    for bos in (False, True):
        pair.check(texts, bos)


def test_ids_behind_a_gap(tmp_path):
    """`tokenizers` numbers added tokens itself unless they are in the vocabulary, where they are put here."""
    vocab = json.loads((MODELS / "tiny-qwen3" / "tokenizer.json").read_text())["model"]["vocab"]
    names = [*vocab, "[unused]", "<|late|>"]  # 2043 tokens, an id that nothing has, and one behind the gap
    gguf = write_gguf(MODELS / "tiny-qwen3", tmp_path / "m.gguf", tokenizer__ggml__tokens=names,
                      tokenizer__ggml__token_type=[1] * len(vocab) + [5, 3],
                      **{f"tokenizer__ggml__{name}_token_id": None for name in ("eos", "eot", "padding")})  # fmt: skip
    write_dequantized(gguf, tmp_path / "hf")
    tokenizer = Tokenizer.from_file(str(tmp_path / "hf" / "tokenizer.json"))
    assert tokenizer.encode("<|late|>[unused]").ids == [len(vocab) + 1, *tokenizer.encode("[unused]").ids]
    assert tokenizer.id_to_token(len(vocab)) is None


def test_special_tokens_and_template(written):
    source, _, hf_dir = written
    expected, found = (json.loads((folder / "tokenizer_config.json").read_text()) for folder in (source, hf_dir))
    assert found["chat_template"] == expected["chat_template"]
    for name in ("bos_token", "pad_token"):
        assert found.get(name) == expected[name]
    vocab = Tokenizer.from_file(str(hf_dir / "tokenizer.json")).get_vocab()
    assert vocab[found["eos_token"]] == read_generation(hf_dir, len(vocab)).eos_ids[0]
    assert found["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert found["model_max_length"] == read_config(source).max_seq_len
    special = json.loads((hf_dir / "special_tokens_map.json").read_text())
    assert special == {name: value for name, value in found.items() if name.endswith("_token")}


def test_a_greedy_model_without_template_and_ends(tmp_path):
    """What metadata leave out, files leave out."""
    left_out = [f"general__sampling__{name}" for name in ("temp", "top_p", "top_k")]
    left_out += [f"tokenizer__ggml__{name}_token_id" for name in ("eos", "eot", "padding")]
    gguf = write_gguf(MODELS / "tiny-qwen3", tmp_path / "m.gguf", tokenizer__chat_template=None,
                      **dict.fromkeys(left_out))  # fmt: skip
    files = {name: json.loads(content) for name, content in metadata_files(open_model(gguf)).items()}
    assert "chat_template" not in files["tokenizer_config.json"]
    assert files["special_tokens_map.json"] == {}
    generation = files["generation_config.json"]
    assert generation["do_sample"] is False
    assert generation.keys() == {"bos_token_id", "eos_token_id", "do_sample"}


# ---- --hf-out


EXPORTS = {
    "w8a8": lambda source, out, hf_out: export_w8a8(source, out, alpha=None, hf_out=hf_out, progress=False),
    "awq": lambda source, out, hf_out: export_awq(source, out, group_size=64, rtn=True, hf_out=hf_out, progress=False),
    "gptq": lambda source, out, hf_out: export_gptq(
        source, out, bits={"attn": 4, "ffn": 4}, group=64, options=Options(rtn=True, first_zero=1), hf_out=hf_out,
        progress=False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("scheme", EXPORTS)
def test_hf_out_writes_the_tensors_that_the_directory_behind_the_file_gives(written, tmp_path, scheme):
    """Norms, which GGUF files have in fp32, are the same numbers."""
    source, gguf, hf_dir = written
    for model, name in ((source, "1"), (gguf, "2")):
        EXPORTS[scheme](model, tmp_path / f"{name}.bin", tmp_path / name)
    expected, found = (load_file(tmp_path / name / "model.safetensors") for name in ("1", "2"))
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert value.shape == expected[name].shape
        assert np.array_equal(value.astype(F32), expected[name].astype(F32)), name
    assert {file.name for file in (tmp_path / "2").iterdir()} == OTHER_FILES | {"model.safetensors"}
    for file in OTHER_FILES - {"config.json"}:
        assert (tmp_path / "2" / file).read_bytes() == (hf_dir / file).read_bytes()
    configs = [json.loads((tmp_path / name / "config.json").read_text())["quantization_config"] for name in ("1", "2")]
    assert configs[0] == configs[1]
    config = read_config(tmp_path / "2", quantized=True)
    assert config == read_config(source)


def test_the_directory_comes_in_again(written, tmp_path):
    """From a GGUF file to a directory for engines, and from there to the model file that was written beside it."""
    _, gguf, _ = written
    export_w8a8(gguf, tmp_path / "m.bin", alpha=None, hf_out=tmp_path / "hf", progress=False)
    done = run_export("w8a8", tmp_path / "hf", tmp_path / "again.bin", "--quiet")
    assert (done.returncode, done.stdout) == (0, "")
    first, second = W8A8(tmp_path / "m.bin"), W8A8(tmp_path / "again.bin")
    name = "layers.0.attn.q_proj"
    assert np.array_equal(first.matrix(name).codes, second.matrix(name).codes)
    assert (tmp_path / "m.bin").read_bytes() == (tmp_path / "again.bin").read_bytes()


def test_who_may_read_the_file_may_read_the_directory(tmp_path):
    gguf = write_gguf(MODELS / "tiny-llama", tmp_path / "m.gguf")
    for mode, expected in ((0o644, 0o755), (0o600, 0o700), (0o640, 0o750), (0o444, 0o755)):
        gguf.chmod(mode)
        write_dequantized(gguf, tmp_path / f"{mode:o}")
        assert stat.S_IMODE((tmp_path / f"{mode:o}").stat().st_mode) == expected


# ---- what cannot be written


INEXPRESSIBLE = [
    ({"tokenizer__ggml__model": "llama"}, "tokenizer.ggml.model is 'llama': SentencePiece is not supported, only gpt2"),
    ({"tokenizer__ggml__model": None}, "tokenizer.ggml.model is missing"),
    ({"tokenizer__ggml__pre": "tekken"}, "tokenizer.ggml.pre is 'tekken': known are"),
]


@pytest.mark.parametrize("no_tokenizer", [False, True])
@pytest.mark.parametrize(("metadata", "text"), INEXPRESSIBLE)
def test_a_vocabulary_that_cannot_be_expressed_is_one_line(tmp_path, metadata, text, no_tokenizer):
    """A model file may do without a tokenizer, the directory may not."""
    gguf = write_gguf(MODELS / "tiny-llama", tmp_path / "m.gguf", **metadata)
    done = run_export("w8a8", gguf, tmp_path / "m.bin", "--no-smooth", "--quiet", "--hf-out", tmp_path / "hf",
                      *["--no-tokenizer"] * no_tokenizer)  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"export: {gguf}: {text}")
    assert done.stderr.count("\n") == 1
    done = run_here("export.dequantized", gguf, tmp_path / "hf")
    assert done.stderr.startswith(f"dequantized: {gguf}: {text}")
    assert done.stderr.count("\n") == 1
    assert [file.name for file in tmp_path.iterdir()] == ["m.gguf"]


def test_sources_and_places_that_do_not_go(written, tmp_path):
    source, gguf, hf_dir = written
    for first, out, text in (
        (source, tmp_path / "x", f"{source}: expected a GGUF file"),
        (tmp_path / "none.gguf", tmp_path / "x", f"{tmp_path}/none.gguf: no such file"),
        (gguf, hf_dir, f"{hf_dir}: exists already"),
        (gguf, tmp_path / "a" / "b", f"{tmp_path}/a/b: cannot write: {tmp_path}/a is no directory"),
    ):
        done = run_here("export.dequantized", first, out)
        assert (done.returncode, done.stderr) == (1, f"dequantized: {text}\n")
    assert not list(tmp_path.iterdir())


def test_an_interrupt_leaves_nothing(written, tmp_path, monkeypatch, capsys):
    _, gguf, _ = written

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("export.hf_directory.write_array", interrupted)
    assert main([str(gguf), str(tmp_path / "hf")]) == 130
    assert capsys.readouterr().err == f"dequantized: interrupted, {tmp_path}/hf was not written\n"
    assert not list(tmp_path.iterdir())


def test_the_command_line(written, tmp_path):
    _, gguf, hf_dir = written
    done = launch("export.dequantized", gguf, tmp_path / "hf")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    for file in hf_dir.iterdir():
        assert (tmp_path / "hf" / file.name).read_bytes() == file.read_bytes()
