"""The exporter: what it writes is what the reference quantizes, and what it refuses leaves nothing behind."""

import json
import os
import resource
import shutil
import struct
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import export.int8
from export.q8 import export_q8
from formats.checkpoint import Checkpoint, ModelError
from formats.tensors import HEADER_SIZE, matrix_shapes, norm_shapes
from golden.forward import load_weight
from golden.q8 import Q8, quantize
from tests.gguf_fixture import write_gguf
from tests.helpers import GOLDEN_FILES, MODELS, launch_export, run_export

TINY = [MODELS / "tiny-llama", MODELS / "tiny-qwen3"]


@pytest.mark.parametrize("hf_dir", TINY, ids=lambda p: p.name)
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_the_file_holds_what_the_reference_quantizes(tmp_path, hf_dir, group_size):
    """Read the whole file with nothing but struct and numpy, in the order that docs/model-files.md gives."""
    out = tmp_path / "model.bin"
    export_q8(hf_dir, out, group_size, progress=False)
    data = out.read_bytes()
    checkpoint = Checkpoint(hf_dir)
    c, q8 = checkpoint.config, Q8(checkpoint, group_size)

    assert struct.unpack_from("<Ii7iBi", data) == (
        0x616B3432, 2, c.dim, c.hidden_dim, c.n_layers, c.n_heads, c.n_kv_heads, c.vocab_size, c.max_seq_len,
        int(c.tied), group_size,
    )  # fmt: skip
    arch, head_dim, ext_group, eps, theta = struct.unpack_from("<Iiiff", data, 0x44)
    assert (arch, head_dim, ext_group) == ({"llama": 1, "qwen3": 2}[c.arch], c.head_dim, group_size)
    assert (eps, theta) == (np.float32(c.norm_eps), np.float32(c.rope_theta))
    scaling = struct.unpack_from("<Ifffi", data, 0x58)
    s = c.rope_scaling
    assert scaling == (
        (1, s.factor, s.low_freq_factor, s.high_freq_factor, s.original_max_position_embeddings)
        if s
        else (0, 0, 0, 0, 0)
    )
    tokenizer_offset, tokenizer_size = struct.unpack_from("<QQ", data, 0xA0)
    assert tokenizer_offset + tokenizer_size == len(data)

    position = HEADER_SIZE
    for name, _ in norm_shapes(c):
        expected = load_weight(checkpoint, name, interleaved=True).tobytes()
        assert data[position : position + len(expected)] == expected, name
        position += len(expected)
    for name, _ in matrix_shapes(c):
        for part in q8.matrix(name):
            assert data[position : position + part.nbytes] == part.tobytes(), name
            position += part.nbytes
    assert position == tokenizer_offset


def test_a_matrix_is_quantized_in_blocks_of_rows(tmp_path, monkeypatch):
    """Of 16 million weights each, so that no tiny model has two: here of two rows, and one at the end."""
    weight = np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32)
    monkeypatch.setattr(export.int8, "BLOCK_VALUES", 128)
    with (tmp_path / "f").open("wb") as f:
        export.int8.write_matrix(f, weight, 32)
    codes, scales = quantize(weight, 32)
    assert (tmp_path / "f").read_bytes() == codes.tobytes() + scales.tobytes()


def test_sampling_defaults_and_ids_come_from_generation_config(tmp_path):
    hf_dir = shutil.copytree(TINY[0], tmp_path / "hf")
    for generation, expected in [
        ({"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20}, (0.7, 0.8, 20, 0.0, 0.0)),
        ({"do_sample": True, "temperature": 0.7}, (0.7, 1.0, 50, 0.0, 0.0)),  # transformers' own default for top_k
        ({"do_sample": False, "temperature": 0.7}, (0.0, 1.0, 0, 0.0, 0.0)),
        ({}, (0.0, 1.0, 0, 0.0, 0.0)),
        ({"do_sample": True, "min_p": 0.05, "repetition_penalty": 1.1}, (1.0, 1.0, 50, 0.05, 1.1)),
        ({"repetition_penalty": 1.0, "min_p": None}, (0.0, 1.0, 0, 0.0, 0.0)),
    ]:
        ids = {"bos_token_id": 3, "eos_token_id": [5, 9]}
        (hf_dir / "generation_config.json").write_text(json.dumps(generation | ids))
        export_q8(hf_dir, tmp_path / "out.bin", progress=False)
        data = (tmp_path / "out.bin").read_bytes()
        temperature, top_p, top_k = struct.unpack_from("<ffi", data, 0x94)
        min_p, penalty = struct.unpack_from("<ff", data, 0xB8)
        assert (round(temperature, 5), round(top_p, 5), top_k, round(min_p, 5), round(penalty, 5)) == expected
        assert struct.unpack_from("<iiiii", data, 0x6C) == (3, 3, 5, 9, 2047)  # the last is the tokenizer's
    (hf_dir / "generation_config.json").write_text(json.dumps({"eos_token_id": 4000}))
    with pytest.raises(
        ModelError, match=r"generation_config.json: eos_token_id is 4000, expected an id below vocab_size"
    ):
        export_q8(hf_dir, tmp_path / "out.bin", progress=False)


def test_what_generation_config_asks_for_and_no_program_does_is_named(tmp_path):
    hf_dir = shutil.copytree(TINY[0], tmp_path / "hf")

    def export(**generation):
        (hf_dir / "generation_config.json").write_text(json.dumps(generation))
        return run_export("q8", hf_dir, tmp_path / "out.bin", "--quiet")

    off = {"typical_p": 1.0, "no_repeat_ngram_size": 0, "num_beams": 1, "suppress_tokens": None, "stop_strings": []}
    assert "warning" not in export(do_sample=True, **off).stderr
    done = export(do_sample=True, typical_p=0.9, no_repeat_ngram_size=3, forced_bos_token_id=0, bad_words_ids=[[1]])
    assert done.returncode == 0
    assert done.stderr.splitlines()[0] == (
        f"export: warning: {hf_dir / 'generation_config.json'}: not followed, unlike in transformers: "
        "no_repeat_ngram_size 3, bad_words_ids [[1]], forced_bos_token_id 0, typical_p 0.9"
    )
    assert "warning" not in export(do_sample=False, typical_p=0.9).stderr  # counts only when tokens are drawn
    assert len(export(suppress_tokens=list(range(2000))).stderr.splitlines()[0]) < 500 + len(str(tmp_path))
    for field, value in [("repetition_penalty", 0), ("repetition_penalty", "1.1"), ("min_p", 1.5)]:
        done = export(**{field: value})
        assert done.returncode == 1
        assert f"generation_config.json: {field} is {json.dumps(value)}, expected" in done.stderr


@pytest.mark.parametrize(
    ("group_size", "text"),
    [
        (96, "hidden_size is 128, not a multiple of --group-size 96; the largest power of two that would do is 128"),
        (256, "hidden_size is 128, not a multiple of --group-size 256; the largest power of two that would do is 128"),
        (6, "--group-size is 6, expected a multiple of 4; 128 would do"),
        (0, "--group-size is 0, expected a multiple of 4; 128 would do"),
        (-64, "--group-size is -64, expected a multiple of 4; 128 would do"),
    ],
)
def test_group_sizes_that_do_not_divide_are_refused(tmp_path, group_size, text):
    with pytest.raises(ModelError) as error:
        export_q8(TINY[0], tmp_path / "out.bin", group_size, progress=False)
    assert text in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("model", ["directory", "model.gguf"])
@pytest.mark.parametrize("out", [None, "a model file", "text", "fifo"])
def test_arguments_that_are_exchanged(tmp_path, model, out):
    model = TINY[0] if model == "directory" else write_gguf(TINY[0], tmp_path / model)
    path = tmp_path / "model.bin"
    if out == "fifo":
        os.mkfifo(path)
    elif out is not None:
        path.write_bytes((GOLDEN_FILES / "tiny-llama.q8.bin").read_bytes() if out == "a model file" else b"text")
    before = model.stat().st_ino, model.stat().st_mtime_ns
    done = run_export("q8", path, model)
    assert (done.returncode, done.stdout) == (2, "")
    seems = f"{model} is a model, {path} is none: they seem exchanged, expected MODEL OUT.bin"
    assert done.stderr == f"export: {seems}\n"
    assert (model.stat().st_ino, model.stat().st_mtime_ns) == before


def test_command_line_gives_one_line_and_leaves_nothing(tmp_path):
    done = run_export("q8", tmp_path / "absent", tmp_path / "out.bin")
    assert done.returncode == 1
    assert done.stderr == f"export: {tmp_path / 'absent'}: no such directory\n"
    for absent in ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B/", "https://huggingface.co/Qwen/Qwen3-0.6B"):
        for options in (["q8"], ["awq", "--rtn"], ["gptq", "--rtn"], ["moe", "--no-smooth"]):
            done = run_export(*options, absent, tmp_path / "out.bin")
            assert (done.returncode, done.stdout) == (1, "")
            assert done.stderr == (
                f"export: {Path(absent)}: no such directory; a model of Hugging Face has to be downloaded first: "
                ".venv/bin/hf download Qwen/Qwen3-0.6B --local-dir qwen3-0.6b\n"
            )
    for absent in ("models/tiny-lama", "-Qwen/x", "Qwen/a b", "a/b/c", "Qwen"):  # a slip, or what no model is called
        done = run_export("q8", "--", absent, tmp_path / "out.bin")
        assert (done.returncode, done.stderr) == (1, f"export: {absent}: no such directory\n")
    done = run_export("q8", TINY[0], tmp_path / "no" / "out.bin", "--quiet")
    assert done.returncode == 1
    assert done.stderr == f"export: {tmp_path / 'no' / 'out.bin'}: cannot write: No such file or directory\n"
    done = run_export("q8", TINY[0], tmp_path, "--quiet")
    assert done.stderr == f"export: {tmp_path}: is a directory\n"
    assert not list(tmp_path.iterdir())
    done = run_export("q8", TINY[0], tmp_path / "out.bin", "--quiet")
    assert done.returncode == 0
    assert done.stdout == ""
    assert [p.name for p in tmp_path.iterdir()] == ["out.bin"]


def test_an_interrupted_export_keeps_the_old_file(tmp_path, monkeypatch):
    out = tmp_path / "out.bin"
    out.write_bytes(b"old")
    calls = []

    def failing(*args):
        calls.append(args)
        if len(calls) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr("export.int8.write_matrix", failing)
    with pytest.raises(KeyboardInterrupt):
        export_q8(TINY[0], out, progress=False)
    assert out.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["out.bin"]


@pytest.mark.parametrize("scheme", [("q8",), ("w8a8", "--no-smooth"), ("awq", "--rtn")])
def test_a_full_disk_is_one_line_and_keeps_the_old_file(tmp_path, scheme):
    """Stood in for by a limit on the length of files."""
    out = tmp_path / "out.bin"
    out.write_bytes(b"old")
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (100_000, 100_000))
    done = launch_export(scheme[0], TINY[0], out, "--quiet", *scheme[1:], preexec_fn=limit)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"export: {out}: cannot write: File too large\n"
    assert out.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["out.bin"]


def test_a_file_without_tokenizer(tmp_path):
    export_q8(TINY[0], tmp_path / "out.bin", with_tokenizer=False, progress=False)
    data = (tmp_path / "out.bin").read_bytes()
    assert struct.unpack_from("<QQ", data, 0xA0) == (len(data), 0)
