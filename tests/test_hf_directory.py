"""--hf-out: a directory beside the model file. Two results, of which the second may fail."""

import resource
import sys
import warnings
from functools import partial
from pathlib import Path

import pytest

from export.__main__ import main
from export.awq import export_awq
from export.w8a8 import export_w8a8
from formats.checkpoint import ModelError
from golden.schemes import read_file
from tests.helpers import MODELS, launch_export, run_export

PLAIN = {"awq": "--rtn", "w8a8": "--no-smooth"}  # options that spare the calibration
EXPORT = {"awq": partial(export_awq, rtn=True), "w8a8": partial(export_w8a8, alpha=None)}
pytestmark = pytest.mark.parametrize("scheme", PLAIN)


@pytest.mark.parametrize(
    ("hf_out", "text"),
    [
        ("models", "models: exists already"),
        ("README.md", "README.md: exists already"),
        ("absent/hf", "absent/hf: cannot write: absent is no directory"),
    ],
)
def test_a_directory_that_cannot_be_is_one_line_and_nothing_is_written(tmp_path, scheme, hf_out, text):
    done = run_export(scheme, MODELS / "tiny-llama", tmp_path / "m.bin", PLAIN[scheme], "--hf-out", hf_out)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"export: {text}\n"
    assert not list(tmp_path.iterdir())


def test_a_link_to_nowhere_exists(tmp_path, scheme):
    (tmp_path / "hf").symlink_to(tmp_path / "absent")
    with pytest.raises(ModelError) as error:
        EXPORT[scheme](MODELS / "tiny-llama", tmp_path / "m.bin", hf_out=tmp_path / "hf", progress=False)
    assert str(error.value) == f"{tmp_path / 'hf'}: exists already"
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_the_directory_cannot_be_the_file(tmp_path, monkeypatch, scheme):
    monkeypatch.chdir(tmp_path)
    for out, hf_out in (("m.bin", "m.bin"), ("m.bin", tmp_path / "m.bin")):
        with pytest.raises(ModelError) as error:
            EXPORT[scheme](MODELS / "tiny-llama", Path(out), hf_out=Path(hf_out), progress=False)
        assert str(error.value) == "m.bin: is the model file, --hf-out needs another place"
    assert not list(tmp_path.iterdir())


def test_an_interrupt_says_which_of_the_two_was_not_written(tmp_path, monkeypatch, capsys, scheme):
    out, hf_out = tmp_path / "m.bin", tmp_path / "hf"
    monkeypatch.setattr("warnings.showwarning", warnings.showwarning)  # `main` has its own
    monkeypatch.setattr(sys, "argv", ["export", scheme, str(MODELS / "tiny-llama"), str(out), PLAIN[scheme], "--quiet",
                                      "--hf-out", str(hf_out)])  # fmt: skip

    def interrupted(*_):
        raise KeyboardInterrupt

    for where, text in (
        ({"awq": "export.awq.quantize_scaled", "w8a8": "export.int8.quantize"}[scheme], f"{out} was not written"),
        ("export.hf_directory.write_array", f"{hf_out} was not written, {out} was"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(where, interrupted)
            assert main() == 130
        assert capsys.readouterr().err == f"export: interrupted, {text}\n"
        assert list(tmp_path.iterdir()) == ([] if "quantize" in where else [out])
    read_file(out)


def test_a_full_disk_while_the_directory_is_written(tmp_path, scheme):
    """Stood in for by a limit on the length of files, between the model file's and that of model.safetensors."""
    options = (scheme, MODELS / "tiny-llama", tmp_path / "m.bin", PLAIN[scheme], "--no-tokenizer", "--quiet")
    assert run_export(*options).returncode == 0
    size = (tmp_path / "m.bin").stat().st_size
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (size, size))
    done = launch_export(*options, "--hf-out", tmp_path / "hf", preexec_fn=limit)
    assert done.returncode == 1
    assert done.stderr == (
        f"export: {tmp_path / 'hf'}: cannot write: File too large; {tmp_path / 'm.bin'} was written\n"
    )
    assert [p.name for p in tmp_path.iterdir()] == ["m.bin"]
