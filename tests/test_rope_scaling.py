"""YaRN and linear RoPE scaling: against transformers, from a config to a program, and out to GGUF and back."""

import json
import shutil
import struct
import subprocess
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file

from export.awq import export_awq
from export.gguf_files import config_json
from export.gptq import Options, export_gptq
from export.moe import export_moe
from export.q8 import export_q8
from export.w8a8 import export_w8a8
from formats.checkpoint import DENSE, SPARSE, Checkpoint, ModelError, read_config
from formats.model_file import read_header
from formats.moe import MoeLayout
from formats.schemes import FORMATS
from formats.source import open_gguf
from golden.forward import Fp32, forward
from golden.schemes import read_file
from golden.trace import Recorder, read_trace
from tests.gguf_fixture import write_gguf
from tests.helpers import F32, FULL, MODELS, ROOT, run_export
from tests.hf_fixtures import FOLDER, ROPE_SCALINGS, with_rope_scaling

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "factor": 4.0}
EXPORTS = {
    "q8": ("tiny-qwen3", export_q8),
    "w8a8": ("tiny-llama", lambda *paths, **o: export_w8a8(*paths, alpha=None, **o)),
    "gptq": ("tiny-llama", lambda *paths, **o: export_gptq(*paths, options=Options(rtn=True), **o)),
    "moe": ("tiny-qwen3-moe", lambda *paths, **o: export_moe(*paths, MoeLayout("a8w8", 0), alpha=None, **o)),
    "awq": ("tiny-llama", lambda *paths, **o: export_awq(*paths, rtn=True, **o)),
}


def scaled(name, out, scaling, **fields):
    """A copy of a tiny model with another rope_scaling."""
    shutil.copytree(MODELS / name, out)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"rope_scaling": scaling} | fields))
    return out


@pytest.mark.parametrize("name", ROPE_SCALINGS)
def test_logits_are_those_of_transformers(tmp_path, name):
    """At six positions from the first to four times the original context."""
    tokens, positions = with_rope_scaling(name, tmp_path / "hf")
    checkpoint = Checkpoint(tmp_path / "hf")
    expected = load_file(FOLDER / "rope_scalings.safetensors")[name]
    logits = forward(checkpoint.config, Fp32(checkpoint), tokens)[positions]
    assert np.abs(logits - expected).max() <= 1e-5 * np.abs(expected).max()


# Each program with YaRN, and runq with the other, too; with FULL=1 each with both.
SCALED = [
    (scheme, scaling) for scheme in EXPORTS for scaling in (YARN, LINEAR) if FULL or scheme == "q8" or scaling == YARN
]


@pytest.mark.parametrize(("scheme", "scaling"), SCALED)
def test_programs_rotate_as_the_reference(tmp_path, scheme, scaling):
    """Both forms of each program; the file says what config.json does. 0x30 has YaRN's factor, 0 in other files."""
    model, export = EXPORTS[scheme]
    source, out = scaled(model, tmp_path / "hf", scaling), tmp_path / "m.bin"
    export(source, out, progress=False)
    config = read_config(source, archs=(*DENSE, *SPARSE))
    found = read_header(out, FORMATS[scheme]).config
    s = config.rope_scaling
    assert found.rope_scaling == replace(s, attention_factor=float(F32(s.attention_factor)))
    file = read_file(out)
    ids = np.arange(300) * 7 % 2000  # beyond the original context
    recorder = Recorder()
    forward(file.config, file, ids[:64] if scheme == "awq" else ids, recorder)
    n = len(recorder.tensors["layers.0.attn.q_rope"])
    for program in (ROOT / FORMATS[scheme].program, ROOT / "build" / "plain" / FORMATS[scheme].program):
        command = [program, out, "--ids", ",".join(map(str, ids[:n])), "-n", 1, "--trace", tmp_path / "trace"]
        subprocess.run(list(map(str, command)), check=True, capture_output=True)
        trace = read_trace(tmp_path / "trace")
        for step in ("layers.0.attn.q_rope", "layers.0.attn.k_rope"):
            right = recorder.tensors[step].reshape(n, -1)
            error = np.abs(trace[step].reshape(n, -1) - right).max() / np.abs(right).max()
            assert error <= (1e-3 if scheme == "awq" else 1e-5), (program, step)


def test_old_files_stay_as_they_were(tmp_path):
    for name in ("tiny-llama", "tiny-qwen3"):
        export_q8(MODELS / name, tmp_path / "m.bin", progress=False)
        assert (tmp_path / "m.bin").read_bytes()[0x2D:0x40] == bytes(19)


def test_the_original_context_is_that_of_transformers(tmp_path):
    """Outside of rope_scaling it goes before the one inside; without either it is the context."""
    inside = {name: value for name, value in YARN.items() if name != "original_max_position_embeddings"}
    for i, (scaling, fields, context) in enumerate(
        ((YARN, {"original_max_position_embeddings": 64}, 64), (YARN, {}, 128), (inside, {}, 512))
    ):
        found = read_config(scaled("tiny-llama", tmp_path / str(i), scaling, **fields)).rope_scaling
        assert found.original_max_position_embeddings == context


def test_info_has_the_rescaling(tmp_path):
    export_q8(scaled("tiny-llama", tmp_path / "hf", YARN), tmp_path / "m.bin", progress=False)
    done = subprocess.run([ROOT / "runq", tmp_path / "m.bin", "--info"], capture_output=True, text=True, check=True)
    assert (
        "rope_scaling            yarn, factor 4, low_freq_factor 28, high_freq_factor 32, "
        "original_max_position_embeddings 128, attention_factor 1.13863\n" in done.stdout
    )


def test_headers_that_cannot_be_are_refused(tmp_path):
    export_q8(scaled("tiny-qwen3", tmp_path / "hf", YARN), tmp_path / "m.bin", progress=False)
    data = (tmp_path / "m.bin").read_bytes()
    program = ROOT / "runq"
    for offset, value, text in (
        (0x58, struct.pack("<i", 4), "rope_scaling type is 4, expected 0 to 3"),
        (0x30, bytes(4), "attention_factor is 0"),
        (0x30, struct.pack("<f", np.nan), "attention_factor is nan"),
    ):
        (tmp_path / "bad.bin").write_bytes(data[:offset] + value + data[offset + 4 :])
        done = subprocess.run([program, tmp_path / "bad.bin", "--info"], capture_output=True, text=True, check=False)
        assert (done.returncode, text in done.stderr) == (1, True), done.stderr


@pytest.mark.parametrize(
    ("scaling", "fields", "text"),
    [
        ({"rope_type": "yarn"}, {}, "rope_scaling.factor is missing"),
        (YARN | {"beta_fast": 1, "beta_slow": 32}, {}, "give the pairs 3 and 0, expected a first and a later one"),
        (YARN | {"attention_factor": 0}, {}, "attention_factor is 0: expected a positive number"),
        (YARN | {"truncate": 1}, {}, "truncate is 1: expected true or false"),
        (YARN, {"rope_theta": 1.0}, "rope_theta is 1, YaRN needs more than 1"),
        (LINEAR | {"factor": "4"}, {}, 'rope_scaling.factor is "4": expected a positive number'),
        (LINEAR | {"rope_type": "dynamic"}, {}, "dynamic's frequencies depend on how a prompt was split"),
    ],
)
def test_configs_that_cannot_be_are_refused(tmp_path, scaling, fields, text):
    with pytest.raises(ModelError) as error:
        read_config(scaled("tiny-llama", tmp_path / "hf", scaling, **fields))
    assert text in str(error.value)


# ---- GGUF


@pytest.mark.parametrize("scaling", [YARN, YARN | {"attention_factor": 1.3}, LINEAR])
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen3"])
def test_gguf_out_and_back(tmp_path, name, scaling):
    source = scaled(name, tmp_path / "hf", scaling)
    done = run_export("q8", source, tmp_path / "m.bin", "--gguf-out", tmp_path / "m.gguf", "--quiet")
    assert done.returncode == 0, done.stderr
    own, model = read_config(source).rope_scaling, open_gguf(tmp_path / "m.gguf")
    found = model.config.rope_scaling
    assert found == replace(own, attention_factor=found.attention_factor)
    assert np.isclose(found.attention_factor, own.attention_factor, rtol=1e-6)
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "config.json").write_text(json.dumps(config_json(model)))
    assert read_config(tmp_path / "again").rope_scaling == found


def test_gguf_of_others(tmp_path):
    """A file without original_context_length has its context; a factor of 1 is none."""
    source, keys = MODELS / "tiny-qwen3", ("arch__rope__scaling__type", "arch__rope__scaling__factor")
    found = open_gguf(write_gguf(source, tmp_path / "a.gguf", **dict(zip(keys, ("yarn", 2.0), strict=True))))
    assert found.config.rope_scaling.original_max_position_embeddings == 512
    assert np.isclose(found.config.rope_scaling.attention_factor, 0.1 * np.log(2) + 1)
    for kind in ("yarn", "linear"):
        file = write_gguf(source, tmp_path / f"{kind}.gguf", **dict(zip(keys, (kind, 1.0), strict=True)))
        assert open_gguf(file).config.rope_scaling is None


def test_yarn_that_llama_cpp_does_not_read_is_refused(tmp_path):
    source = scaled("tiny-qwen3", tmp_path / "hf", YARN | {"beta_fast": 8})
    done = run_export("q8", source, tmp_path / "m.bin", "--gguf-out", tmp_path / "m.gguf")
    assert done.returncode == 1
    assert "rope_scaling yarn with beta_fast, beta_slow or truncate other than" in done.stderr
    assert not (tmp_path / "m.bin").exists()
