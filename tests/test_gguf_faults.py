"""What the exporter makes of GGUF files that are changed at random, or have any value in any field.

The promise is that of tests/test_export_faults.py: exit code 0 means that the program opens the file and generates;
anything else is one line, without a traceback, and nothing is left behind. The cases are the same every time.
"""

import os
import struct

import numpy as np
import pytest

from formats.checkpoint import RopeScaling, read_config
from formats.gguf_model import rope_divisors
from tests.gguf_fixture import metadata_of, write_gguf
from tests.helpers import MODELS
from tests.malformed import small_model
from tests.test_export_faults import AWQ, Q8, W8A8, broken_promise, exported

EXTREMES = (0, 1, 2, 255, 65535, 2**31 - 1, 2**31, 2**32 - 1)
VALUES = (("UINT32", 0), ("UINT32", 1), ("UINT32", 2**32 - 1), ("INT32", -1), ("UINT64", 2**63), ("INT64", -(2**63)),
          ("FLOAT32", float("nan")), ("FLOAT32", float("inf")), ("FLOAT64", 1e300), ("FLOAT32", 1e-30),
          ("FLOAT32", -1.0), ("FLOAT32", 3e9), ("BOOL", True), ("STRING", ""), ("STRING", "x\n\x1b[2J"))  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_model(MODELS / "tiny-llama", tmp_path_factory.mktemp("small") / "model")


@pytest.fixture(autouse=True)
def _no_sync(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)


def check(tmp_path, cases):
    """The promise holds for GGUF files, given by name and content or as a function that writes one."""
    (tmp_path / "out").mkdir()
    wrong, out = {}, tmp_path / "out" / "out.bin"
    for i, (name, content) in enumerate(cases):
        path = tmp_path / f"{i}.gguf"  # each its own: what is opened is kept by name, size and time
        content(path) if callable(content) else path.write_bytes(content)
        if found := broken_promise(Q8, path, out):
            wrong[name] = found
        path.unlink()
    assert not wrong


def changed(good, header, rng):
    """A few bytes of the header changed, a number in it made extreme, the file cut off, or bytes of tensors changed."""
    data, kind = bytearray(good), rng.integers(8)
    if kind == 0:
        return bytes(data[: rng.integers(len(data))])
    low, high = (header, len(data)) if kind == 1 else (0, header)
    for at in rng.integers(low, high - 4, rng.integers(1, 4)):
        if kind < 4:
            data[at] = rng.integers(256)
        else:
            struct.pack_into("<I", data, at, EXTREMES[rng.integers(len(EXTREMES))])
    return bytes(data)


def test_changed_bytes(small, tmp_path):
    good = write_gguf(small, tmp_path / "good").read_bytes()
    header = good.rindex(b"weight") + 64
    rng = np.random.default_rng(0)
    check(tmp_path, [("unchanged", good)] + [(f"change {i}", changed(good, header, rng)) for i in range(100)])


def test_any_value_in_any_field(small, tmp_path):
    def with_value(key, value):
        return lambda path: write_gguf(small, path, **{key.replace(".", "__"): value})

    _, metadata = metadata_of(small)
    keys = [key for key, value in metadata.items() if not isinstance(value, list | str)]
    cases = [(f"{key}: {value}", with_value(key, value)) for key in keys for value in VALUES][::4]
    alike = with_value("llama.rope.freq_base", 1.0)  # all frequencies, of which rope_freqs.weight has divisors
    check(tmp_path, [*cases, ("frequencies alike", alike)])


@pytest.mark.parametrize("bad", [0, -1, 1e-30, 1e7, 3e38], ids=str)
def test_any_factor_of_a_frequency(small, tmp_path, bad):
    def with_factors(factors):
        return lambda path: write_gguf(small, path, tensors={"rope_freqs.weight": factors})

    good = np.linspace(1, 8, 16).astype(np.float32)
    cases = [("all", np.full(16, bad, np.float32))]
    for i in (0, 8, 15):
        cases.append((f"at {i}", np.where(np.arange(16) == i, np.float32(bad), good)))
        cases.append((f"from {i}", np.where(np.arange(16) >= i, np.float32(bad), np.float32(1))))
    if bad > 0:  # what llama3's rescaling by such a factor gives
        freq = read_config(small).rope_theta ** (-np.arange(16) / 16)
        cases.append(("rescaling", rope_divisors(RopeScaling(bad, 1.0, 4.0, 8192), freq).astype(np.float32)))
    check(tmp_path, [(name, with_factors(factors)) for name, factors in cases])


@pytest.mark.parametrize("scheme", [Q8, W8A8, AWQ], ids=lambda s: s[0])
def test_no_file_of_a_split_model_is_overwritten(small, tmp_path, scheme):
    write_gguf(small, tmp_path / "m.gguf", parts=4)
    files = sorted(tmp_path.glob("m-*.gguf"))
    (tmp_path / "link").symlink_to(files[2])
    content = [file.read_bytes() for file in files]
    for out, same in (
        (files[0], files[0]),
        (files[1], files[1]),
        (files[-1], files[-1]),
        (tmp_path / "link", files[2]),
    ):
        assert exported(scheme, files[1], out) == (1, [f"export: {out}: is the same file as the input {same}"])
    assert [file.read_bytes() for file in files] == content
    assert broken_promise(scheme, files[1], tmp_path / "out.bin") is None
