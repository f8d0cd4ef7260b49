"""GGUF files as llama.cpp's converter writes them: the model files, and what they say to the end of the story."""

import json
import shutil
import subprocess

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from export.q8 import export_q8
from formats.checkpoint import RopeScaling
from formats.gguf_model import find_rope_scaling
from tests.gguf_converter import convert, llama3_divisors
from tests.helpers import MODELS, ROOT

CONTEXT = 512  # of the tiny models
PROMPTS = ("Once upon a time", "Tom had a red ball.", "The dog")


def changed(name, out, **fields):
    """A copy of a tiny model, with fields of its config.json changed."""
    shutil.copytree(MODELS / name, out)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | fields))
    return out


def scaled_llama(out, **fields):
    """tiny-llama, whose RoPE has another original context than the converter takes without this field."""
    return changed("tiny-llama", out, original_max_position_embeddings=128, **fields)


def long_heads(out):
    """tiny-llama with heads of 96 values that computes the same: 64 of them are 0.

    Of 96 values the pair 3i is rotated as pair i of 32 is, so that values i and i + 16 of a head go to 3i and 3i + 48.
    Scores are divided by sqrt(96) instead of sqrt(32), and queries are larger by as much.
    """
    scaled_llama(out, head_dim=96)
    where = np.concatenate([3 * np.arange(16), 48 + 3 * np.arange(16)])
    weights = load_file(out / "model.safetensors")
    for name, value in weights.items():
        weights[name] = value = value.astype(np.float32)
        rows = value.T if name.endswith("o_proj.weight") else value
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight")):
            wide = np.zeros((len(rows) // 32, 96, rows.shape[1]), np.float32)
            wide[:, where] = rows.reshape(-1, 32, rows.shape[1])
            wide *= np.sqrt(np.float32(3)) if name.endswith("q_proj.weight") else 1
            wide = wide.reshape(-1, rows.shape[1])
            weights[name] = np.ascontiguousarray(wide.T if name.endswith("o_proj.weight") else wide)
    save_file(weights, out / "model.safetensors")
    return out


DIRECTORIES = {
    "llama": (scaled_llama, "BF16"),
    "llama-heads-of-96": (long_heads, "F32"),
    "qwen3": (lambda out: changed("tiny-qwen3", out), "BF16"),
}


@pytest.fixture(scope="session", params=DIRECTORIES)
def both(request, tmp_path_factory):
    """Q8 files of a directory and of its GGUF file."""
    make, kind = DIRECTORIES[request.param]
    folder = tmp_path_factory.mktemp("converted")
    hf_dir = make(folder / "hf")
    for source, out in ((hf_dir, "hf.bin"), (convert(hf_dir, folder / "m.gguf", kind), "gguf.bin")):
        export_q8(source, folder / out, progress=False)
    return folder / "hf.bin", folder / "gguf.bin"


def new_ids(model, prompt):
    """What follows a prompt, greedily, up to the end of the context."""
    command = [ROOT / "runq", model, "-i", prompt, "-t", "0", "-n", "0", "-j", "1", "--print-ids"]
    return [int(i) for i in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split(",")]


def eos_ids(model):
    printed = subprocess.run([ROOT / "runq", model, "--info"], capture_output=True, text=True, check=True).stdout
    return {
        int(i) for i in next(line for line in printed.splitlines() if line.startswith("eos_ids")).split()[1].split(",")
    }


def test_ids_are_the_same_to_the_end_of_the_story(both):
    from_hf, from_gguf = both
    assert eos_ids(from_gguf) == eos_ids(from_hf)
    for prompt in PROMPTS:
        expected = new_ids(from_hf, prompt)
        assert len(expected) < CONTEXT - 16  # the story ends before the context does
        assert expected[-1] in eos_ids(from_hf)
        assert new_ids(from_gguf, prompt) == expected


def test_model_files_are_the_same_but_for_the_order_of_the_ends(both):
    files = [bytearray(path.read_bytes()) for path in both]
    for data in files:
        data[0x74:0x94], data[0xB0:0xB4] = bytes(32), bytes(4)  # eos_ids, and the checksum over the header
    assert files[0] == files[1]


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("factor", [8.0, 32.0])  # of Llama 3.1 and 3.3, and of 3.2
def test_the_converters_divisors_are_read_back_as_they_were(head_dim, factor):
    numbers = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = {"head_dim": head_dim, "rope_theta": 500000.0, "rope_scaling": numbers | {"rope_type": "llama3"}}
    scaling = RopeScaling(**numbers, original_max_position_embeddings=8192)
    assert find_rope_scaling(llama3_divisors(config), head_dim, 500000.0) == scaling
