"""AWQ: the file byte by byte, the command line, and what is refused or interrupted."""

import json
import re
import shutil
import struct
import weakref
import zlib
from functools import partial

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from export.awq import export_awq
from formats.checkpoint import Checkpoint, ModelError
from golden import awq_search, smooth
from golden import calibration as observing
from golden.awq import AWQ, GROUP_SIZES
from golden.channel_scaling import PLACES, ChannelScaling
from golden.forward import Fp32, forward
from tests.helpers import (
    CALIBRATION,
    F16,
    F32,
    MODELS,
    TINY,
    calibrate,
    export_tiny,
    one_layer,
    plain_int4,
    run_export,
    with_header_field,
)
from tests.hf_fixtures import FOLDER

# ---- the file


def take(data, position, dtype, *shape):
    """An array at a byte of the file, and the byte behind it."""
    n = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(data[position : position + n], dtype).reshape(shape), position + n


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("name", TINY)
def test_the_file_byte_by_byte(tmp_path, name, group_size):
    """Header and order of the tensors as the format's own description has them, read with struct and numpy."""
    out = tmp_path / "m.bin"
    export_tiny(MODELS / name, out, rtn=True, group_size=group_size)
    data, checkpoint = out.read_bytes(), Checkpoint(MODELS / name)
    c, fp32 = checkpoint.config, Fp32(checkpoint)
    magic, version, *dims = struct.unpack_from("<Ii7i", data, 0)
    assert (magic, version) == (0x616B3438, 5)
    assert dims == [c.dim, c.hidden_dim, c.n_layers, c.n_heads, c.n_kv_heads, c.vocab_size, c.max_seq_len]
    assert struct.unpack_from("<Bii", data, 0x24) == (int(c.tied), c.head_dim, group_size)
    assert data[0x2D:0x40] == bytes(19)
    arch, head_dim, ext_group, eps, theta = struct.unpack_from("<Iiiff", data, 0x44)
    assert (arch, head_dim, ext_group) == ({"llama": 1, "qwen3": 2}[c.arch], c.head_dim, group_size)
    assert (eps, theta) == (F32(c.norm_eps), F32(c.rope_theta))
    offset, size, checksum, activations = struct.unpack_from("<QQIi", data, 0xA0)
    assert (offset + size, activations) == (len(data), 0)
    assert data[0xB8:0x100] == bytes(72)
    assert checksum == zlib.crc32(data[offset:], zlib.crc32(data[:0xB0] + bytes(4) + data[0xB4:0x100]))

    position, layers = 256, range(c.n_layers)

    def vectors(part, length):
        nonlocal position
        for i in layers:
            found, position = take(data, position, "<f2", length)
            assert np.array_equal(found, fp32.vector(f"layers.{i}.{part}").astype(F16)), part

    vectors("attn.norm", c.dim)
    vectors("ffn.norm", c.dim)
    found, position = take(data, position, "<f2", c.dim)
    assert np.array_equal(found, fp32.vector("norm").astype(F16))
    found, position = take(data, position, "<f2", c.vocab_size, c.dim)
    assert np.array_equal(found, fp32.vector("embed").astype(F16))
    for part in ("attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.o_proj",
                 "ffn.gate_proj", "ffn.down_proj", "ffn.up_proj"):  # fmt: skip
        for i in layers:
            weight = fp32.vector(f"layers.{i}.{part}")
            n_out, n_in = weight.shape
            expected = plain_int4(weight, group_size)
            qweight, position = take(data, position, "<u4", n_in, n_out // 8)
            qzeros, position = take(data, position, "<u4", n_in // group_size, n_out // 8)
            scales, position = take(data, position, "<f2", n_in // group_size, n_out)
            for channel, nibble in enumerate((0, 4, 1, 5, 2, 6, 3, 7)):
                assert np.array_equal((qweight >> (4 * nibble)) & 15, expected.codes.T[:, channel::8])
                assert np.array_equal((qzeros >> (4 * nibble)) & 15, expected.zeros.T[:, channel::8])
            assert np.array_equal(scales, expected.scales.T)
    if not c.tied:
        found, position = take(data, position, "<f2", c.vocab_size, c.dim)
        assert np.array_equal(found, fp32.vector("classifier").astype(F16))
    if c.arch == "qwen3":
        vectors("attn.q_norm", c.head_dim)
        vectors("attn.k_norm", c.head_dim)
    assert position == offset


def test_a_file_without_extension_is_a_qwen3(tmp_path):
    """As another program writes it: nothing behind byte 0x2D of the header, no tokenizer."""
    out, foreign = tmp_path / "m.bin", tmp_path / "foreign.bin"
    ours = export_tiny(MODELS / "tiny-qwen3", out, rtn=True)
    data = out.read_bytes()
    (offset,) = struct.unpack_from("<Q", data, 0xA0)
    foreign.write_bytes(data[:0x2D] + bytes(256 - 0x2D) + data[256:offset])
    theirs = AWQ(foreign)
    c = theirs.config
    assert (c.arch, c.head_dim, c.norm_eps, c.rope_theta, c.rope_scaling) == ("qwen3", 64, 1e-6, 1e6, None)
    assert theirs.group_size == 128
    tokens = np.arange(5)
    assert np.array_equal(forward(c, theirs, tokens), forward(ours.config, ours, tokens))
    foreign.write_bytes(foreign.read_bytes()[:-2])
    with pytest.raises(ModelError, match="too soon"):
        AWQ(foreign)


def test_a_file_that_is_no_awq_file_is_refused(tmp_path):
    out = tmp_path / "m.bin"
    export_tiny(MODELS / "tiny-llama", out, rtn=True, with_tokenizer=False)
    data = out.read_bytes()

    def refused(text, changed):
        out.write_bytes(changed)
        with pytest.raises(ModelError) as error:
            AWQ(out)
        assert str(error.value).startswith(f"{out}: ")
        assert text in str(error.value)
        assert "\n" not in str(error.value)

    header_with = partial(with_header_field, data)
    refused("too short", data[:100])
    refused("is a w8a8 file, expected awq", struct.pack("<I", 0x616B3838) + data[4:])
    refused("version 4", header_with(4, 4))
    refused("checksum", data[:0x10] + b"\5" + data[0x11:])
    refused(f"the header says {len(data)}", data[:-4])
    refused("too soon", header_with(0x10, 5))  # another layer
    refused("weights end at byte", header_with(0x10, 3))
    refused("head_dim is 64 at 0x25 and 32 at 0x48", header_with(0x25, 64))
    refused("group_size 96", header_with(0x29, 96))
    refused("group_size 0", header_with(0x29, 0))


# ---- the command line


def test_command_line(tmp_path):
    """Of a model of one layer: the search takes most of the time."""
    model, out = one_layer("tiny-llama", tmp_path / "model"), tmp_path / "out.bin"
    short = ("--calib", CALIBRATION, "--samples", 2, "--seq-len", 32)
    done = run_export("awq", model, out, *short, "--quiet")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.count("\n") == 1
    assert AWQ(out).group_size == 128
    searched = out.read_bytes()
    run_export("awq", model, out, *short, "--quiet")
    assert out.read_bytes() == searched
    done = run_export("awq", model, out, *short, "--quiet", "--verbose", "--group-size", 64)
    assert AWQ(out).group_size == 64
    assert sum(line.startswith(p) for line in done.stderr.splitlines() for p in PLACES) == 4
    assert done.stderr.count("  layers.") == 4 + 7  # ratios of places, errors of matrices
    done = run_export("awq", model, out, "--rtn", "--no-tokenizer", "--hf-out", tmp_path / "hf")
    assert done.returncode == 0
    assert struct.unpack_from("<QQ", out.read_bytes(), 0xA0) == (out.stat().st_size, 0)
    assert (tmp_path / "hf" / "tokenizer.json").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "model", "out.bin"]


CALIB = ("--calib", CALIBRATION)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ((), "AWQ needs a text to calibrate with: --calib TEXT (or --rtn for plain rounding)"),
        ((*CALIB, "--rtn"), "--calib and --rtn exclude each other"),
        (("--rtn", "--samples", 16), "--samples and --rtn exclude each other"),
        (("--rtn", "--seq-len", 64), "--seq-len and --rtn exclude each other"),
        ((*CALIB, "--group-size", 32), "--group-size is 32, expected 64 or 128"),
        (("--rtn", "--group-size", 0), "--group-size is 0, expected 64 or 128"),
        ((*CALIB, "--samples", 0), "--samples is 0, expected 1 or more"),
        ((*CALIB, "--seq-len", 513), "--seq-len is 513, expected 2 to the model's 512"),
        (("--calib", "absent.txt"), "absent.txt: no such file"),
    ],
)
def test_options_that_cannot_be_are_one_line_and_write_nothing(tmp_path, options, text):
    done = run_export("awq", MODELS / "tiny-llama", tmp_path / "out.bin", *options)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"export: {text}\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("factors", "text"),
    [
        (
            {"layers.0.mlp.up_proj": 2.0**30, "layers.0.mlp.down_proj": 2.0**-30},
            "tensor model.layers.0.mlp.up_proj.weight comes to weights of",
        ),
        (
            {"layers.0.mlp.up_proj": 2.0**14, "layers.0.mlp.down_proj": 2.0**-14},
            "activations of layers.0.ffn.swiglu come to",
        ),
        ({"norm": 2.0**14}, "activations of norm come to"),
    ],
)
def test_models_beyond_fp16_are_one_line_after_calibration(tmp_path, factors, text):
    """The search goes through such numbers without a word, and the end says where they are. Layers stay the same."""
    hf_dir = one_layer("tiny-llama", tmp_path / "hf")
    weights = load_file(hf_dir / "model.safetensors")
    for name, factor in factors.items():
        key = f"model.{name}.weight"
        weights[key] = weights[key].astype(F32) * F32(factor)
    save_file(weights, hf_dir / "model.safetensors")
    done = run_export("awq", hf_dir, tmp_path / "out.bin", *CALIB, "--samples", 2, "--seq-len", 32, "--quiet")
    assert done.returncode == 1
    line = re.fullmatch(re.escape(f"export: {hf_dir}: {text} ") + r"(\S+), fp16 ends at 65504\n", done.stderr)
    assert line, done.stderr
    assert float(line[1]) > 65504
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_models_that_cannot_be_are_refused(tmp_path):
    def refused(hf_dir, text, **options):
        with pytest.raises(ModelError) as error:
            export_awq(hf_dir, tmp_path / "out.bin", rtn=True, with_tokenizer=False, progress=False, **options)
        assert text in str(error.value)
        assert "\n" not in str(error.value)
        assert not (tmp_path / "out.bin").exists()

    refused(tmp_path / "absent", "absent: no such directory")
    hint = "; the largest power of two that would do is 64"
    refused(FOLDER / "llama-gqa-tied", "hidden_size is 64, not a multiple of --group-size 128" + hint)
    config = FOLDER / "llama-gqa-tied" / "config.json"
    refused(FOLDER / "llama-gqa-tied", f"{config}: head_dim is 16, expected 32, 64, 96 or 128", group_size=64)
    hf_dir = shutil.copytree(FOLDER / "qwen3-gqa-untied", tmp_path / "hf")
    weights = load_file(hf_dir / "model.safetensors")
    narrow = dict(weights)
    for key in weights:
        if "gate_proj" in key or "up_proj" in key:
            narrow[key] = weights[key][:96]
        if "down_proj" in key:
            narrow[key] = np.ascontiguousarray(weights[key][:, :96])
    config = hf_dir / "config.json"
    text = config.read_text()
    config.write_text(json.dumps(json.loads(text) | {"intermediate_size": 96}))
    save_file(narrow, hf_dir / "model.safetensors")
    with pytest.raises(ModelError) as error:
        export_awq(hf_dir, tmp_path / "out.bin", rtn=True, group_size=64, with_tokenizer=False, progress=False)
    assert str(error.value) == f"{config}: intermediate_size is 96, not a multiple of --group-size 64"  # 32 is none
    config.write_text(text)
    for key, value, text in (
        ("layers.1.mlp.up_proj.weight", 1e6, "up_proj.weight comes to weights of 1e+06, fp16 ends at 65504"),
        ("layers.0.input_layernorm.weight", 7e4, "input_layernorm.weight comes to a value of 70000"),
        ("embed_tokens.weight", -1e5, "embed_tokens.weight comes to a value of 100000, fp16 ends at 65504"),
        ("norm.weight", 65520.0, "model.norm.weight comes to a value of 65520, fp16 ends at 65504"),
        ("layers.1.self_attn.k_norm.weight", 3e38, "self_attn.k_norm.weight comes to a value of 3e+38"),
    ):
        key = "model." + key
        changed = weights[key].astype(F32)
        changed.flat[3] = value
        save_file(weights | {key: changed}, hf_dir / "model.safetensors")
        refused(hf_dir, text, group_size=64)
    changed = weights["model.embed_tokens.weight"].astype(ml_dtypes.bfloat16)
    changed[2, 3] = 1e5
    save_file(weights | {"model.embed_tokens.weight": changed}, hf_dir / "model.safetensors")
    refused(hf_dir, "embed_tokens.weight comes to a value of 99840, fp16 ends at 65504", group_size=64)


@pytest.mark.parametrize(("where", "function"), [(observing, "forward_layer"), (awq_search, "quantize")])
def test_an_interrupted_export_keeps_the_old_file(tmp_path, monkeypatch, where, function):
    out = tmp_path / "out.bin"
    out.write_bytes(b"old")

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(where, function, interrupted)
    with pytest.raises(KeyboardInterrupt):
        export_tiny(MODELS / "tiny-llama", out, hf_out=tmp_path / "hf")
    assert out.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["out.bin"]


def test_only_one_layer_is_in_memory(tmp_path, monkeypatch):
    alive, original = [], Checkpoint.stored
    monkeypatch.setattr(Checkpoint, "stored", lambda self, name: alive.append(name) or original(self, name))
    seen = []
    choose = awq_search.choose_scales
    monkeypatch.setattr("export.awq.choose_scales", lambda *a: seen.append(len(a[3]._weights)) or choose(*a))
    export_tiny(MODELS / "tiny-llama", tmp_path / "m.bin")
    assert seen == [9, 9, 9, 9]  # seven matrices and two norms
    layers = [name for name in alive if ".layers." in name]
    assert len(layers) == len(set(layers)) == 4 * 9  # each is read once


@pytest.mark.parametrize("scheme", ["awq", "w8a8"])
def test_a_layers_weights_are_gone_before_the_next_ones_are_read(tmp_path, monkeypatch, scheme):
    loaded = []  # layer and matrix
    load, layer_of = Fp32.load, lambda name: name.split(".")[1] if name.startswith("layers.") else name

    def watched(self, name):
        weight = load(self, name)
        alive = {layer for layer, array in loaded if array() is not None}
        assert alive <= {layer_of(name)}
        loaded.append((layer_of(name), weakref.ref(weight)))
        return weight

    monkeypatch.setattr(Fp32, "load", watched)
    if scheme == "awq":
        export_tiny(MODELS / "tiny-llama", tmp_path / "m.bin")
    else:
        smooth.find_smoothing(*calibrate("tiny-llama"), "auto")
    assert [layer for layer, _ in loaded] == ["embed", *sorted("0123" * 9), "norm"]


def test_smoothing_is_advised_where_there_is_smoothing():
    checkpoint = Checkpoint(MODELS / "tiny-llama")
    found = ChannelScaling({"layers.0.attn.norm": np.full(128, 1e-39, F32)})
    for load, text in (
        (lambda name: found.weight(checkpoint.config, name, Fp32(checkpoint).vector(name)), ""),
        (
            lambda name: smooth.load_smoothed(checkpoint, name, found, False),
            "; another --alpha, or --no-smooth, may do",
        ),
    ):
        with pytest.raises(ModelError) as error:
            load("layers.0.attn.norm")
        assert str(error.value) == "smoothing takes layers.0.attn.norm beyond fp32" + text
