"""Which engines take what --hf-out writes: the line that says so, and that the usual command writes what is served.

tests/serve_check.py asks vLLM itself.
"""

import json
import re

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from export.engines import gptq_refused
from export.gptq import Options, export_gptq
from formats.checkpoint import Checkpoint
from formats.gptq import MatrixFormat
from golden.forward import ignore
from golden.w8a8 import W8A8
from tests.helpers import F32, GOLDEN_FILES, MODELS, ROOT, run_export
from tests.served import Served, as_runq

QWEN = MODELS / "tiny-qwen3"
FOUR = ("--bits", 4, "--group", 64)
MIDDLE = 0x77777777  # eight zero points of 8 in a word, each stored as one less


def gptq(tmp_path, *options, source=QWEN):
    """A directory by the command line: its tensors, its quantization_config, and what was said."""
    done = run_export("gptq", source, tmp_path / "m.bin", *options, "--hf-out", tmp_path / "hf")
    assert done.returncode == 0, done.stderr
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    return tensors, json.loads((tmp_path / "hf" / "config.json").read_text())["quantization_config"], done.stderr


def zero_points(tensors):
    return np.unique(np.concatenate([t.reshape(-1) for name, t in tensors.items() if name.endswith("qzeros")]))


def warnings_in(said):
    return [line for line in said.splitlines() if line.startswith("export: warning: ")]


def test_a_directory_of_gptq_is_symmetric_unless_asked_otherwise(tmp_path):
    tensors, config, said = gptq(tmp_path, "--rtn", *FOUR)
    assert config["sym"] is True
    assert zero_points(tensors).tolist() == [MIDDLE]
    assert f"{tmp_path / 'hf'}: vLLM takes it on a GPU and on a CPU\n" in said
    assert not warnings_in(said)


def test_zero_points_of_their_own_are_a_warning(tmp_path):
    tensors, config, said = gptq(tmp_path, "--rtn", *FOUR, "--no-sym", "--quiet")
    assert config["sym"] is False
    assert len(zero_points(tensors)) > 1
    assert warnings_in(said) == [
        "export: warning: --hf-out: 4 bits in groups of 64, zero points of their own: vLLM refuses it, it takes what "
        "--sym writes; transformers with gptqmodel takes it"
    ]


def test_without_a_directory_codes_are_what_they_were(tmp_path):
    """--sym is for engines: runq_gptq takes zero points of their own, which lose less."""
    for name, options in (("m.bin", ()), ("no.bin", ("--no-sym",)), ("sym.bin", ("--sym",))):
        assert run_export("gptq", QWEN, tmp_path / name, "--rtn", *FOUR, *options).returncode == 0
    plain, no, sym = ((tmp_path / name).read_bytes() for name in ("m.bin", "no.bin", "sym.bin"))
    assert plain == no != sym


def test_eight_bits_are_a_warning(tmp_path):
    _, config, said = gptq(tmp_path, "--rtn", "--bits", 8, "--group", 64, "--quiet")
    assert config["sym"] is True
    assert len(warnings_in(said)) == 1
    assert "8 bits in groups of 64: vLLM takes it on a GPU; on a CPU it takes 4 bits alone" in said


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_repacked_checkpoint_says_what_its_zero_points_are(tmp_path, symmetric):
    """Whatever the checkpoint itself says of them."""
    (tmp_path / "first").mkdir()
    _, config, _ = gptq(tmp_path / "first", "--rtn", *FOUR, "--sym" if symmetric else "--no-sym")
    assert config["sym"] is symmetric
    _, again, said = gptq(tmp_path, "--quiet", source=tmp_path / "first" / "hf")
    assert again == config
    assert len(warnings_in(said)) == (not symmetric)


def test_scattered_groups_are_a_warning(tmp_path):
    def scatter(tensors):
        groups = {}
        for name in [name for name in tensors if name.endswith("g_idx")]:
            n = len(tensors[name])
            groups.setdefault(n, np.random.default_rng(n).permutation(tensors[name]))
            tensors[name] = groups[n]

    (tmp_path / "first").mkdir()
    gptq(tmp_path / "first", "--rtn", *FOUR)
    source = tmp_path / "first" / "hf"
    tensors = load_file(source / "model.safetensors")
    scatter(tensors)
    save_file(tensors, source / "model.safetensors")
    _, config, said = gptq(tmp_path, "--quiet", source=source)
    assert (config["sym"], config["desc_act"]) == (True, True)
    assert "scattered groups (desc_act): vLLM refuses it; transformers with gptqmodel takes it" in warnings_in(said)[0]


def test_experts_in_int8_are_a_warning_before_anything_is_written(tmp_path):
    options = ("--no-smooth", "--quiet", "--hf-out", tmp_path / "hf")
    done = run_export("moe", MODELS / "tiny-qwen3-moe", tmp_path / "m.bin", *options)
    assert "on a CPU it has no such kernel" in done.stderr.splitlines()[0]


@pytest.mark.parametrize(("scheme", "option"), [("w8a8", "--no-smooth"), ("awq", "--rtn")])
def test_the_others_say_who_takes_them(tmp_path, scheme, option):
    done = run_export(scheme, MODELS / "tiny-llama", tmp_path / "m.bin", option, "--hf-out", tmp_path / "hf")
    assert f"{tmp_path / 'hf'}: vLLM takes it on a GPU and on a CPU\n" in done.stderr


FORMATS = {
    (MatrixFormat(4, 64), True, False): None,
    (MatrixFormat(4, 0), True, True): None,  # one group: nothing is scattered
    (MatrixFormat(4, 64), False, False): "zero points of their own",
    (MatrixFormat(4, 64), True, True): "desc_act",
    (MatrixFormat(8, 64), True, False): "on a CPU",
    (MatrixFormat(2, 64), False, False): "it takes 4 and 8",
}


@pytest.mark.parametrize("case", FORMATS, ids=str)
def test_what_vllm_refuses_of_gptq(case):
    found, says = gptq_refused(*case), FORMATS[case]
    assert found is None if says is None else says in found


def test_the_pages_own_commands_write_what_is_served(tmp_path):
    """Those of docs/serving.md that export, with a tiny model and a short calibration."""
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    commands = re.findall(r"^\.venv/bin/python -m export (gptq|w8a8|awq) .*--hf-out \S+$", page, re.M)
    assert sorted(set(commands)) == ["awq", "gptq", "w8a8"]
    (options,) = re.findall(r"-m export gptq \S+ \S+ --calib text\.txt (.*) --hf-out", page)
    short = ("--calib", MODELS / "calibration.txt", "--samples", 1, "--seq-len", 64)
    tensors, config, said = gptq(tmp_path, *short, *options.split())
    assert config["sym"] is True
    assert zero_points(tensors).tolist() == [MIDDLE]
    assert not warnings_in(said)


def test_no_sym_would_change_nothing_of_a_quantized_checkpoint(tmp_path):
    export_gptq(QWEN, tmp_path / "m.bin", bits={"attn": 4, "ffn": 4}, group=64, options=Options(rtn=True, first_zero=1),
                hf_out=tmp_path / "hf", progress=False)  # fmt: skip
    for option in ("--sym", "--no-sym"):
        done = run_export("gptq", tmp_path / "hf", tmp_path / "again.bin", option, "--quiet")
        assert done.returncode == 1
        assert f"is quantized already, {option} would change nothing" in done.stderr


def test_processes_that_share_a_matrix_round_their_parts_by_themselves():
    """o_proj and down_proj alone: all others have whole tokens in each process."""
    source = Checkpoint(QWEN)
    halves = Served(W8A8(GOLDEN_FILES / "tiny-qwen3.w8a8.bin"), source, as_runq, n_parts=2)
    x = np.random.default_rng(0).normal(size=(3, 256)).astype(F32) * np.repeat([1, 10], 128).astype(F32)
    for name in ("layers.0.attn.mix", "layers.0.ffn.swiglu"):
        expected = np.concatenate([as_runq(x[:, :128], None), as_runq(x[:, 128:], None)], axis=1)
        assert np.array_equal(halves.activation(ignore, name, x), expected)
        assert not np.array_equal(expected, as_runq(x, None))
    assert np.array_equal(halves.activation(ignore, "layers.0.attn.norm", x), as_runq(x, None))
