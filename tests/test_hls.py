"""hw/hls/layer.h: its loops are the program's, and its test bench sees what is wrong."""

import subprocess

import pytest

from tests.helpers import DATA, ROOT
from tests.test_plain import CXX, lifted

LAYER = ROOT / "hw" / "hls" / "layer.h"
FLAGS = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-ffp-contract=off"]


def test_loops_are_the_programs_word_for_word():
    functions, text = lifted("runq"), LAYER.read_text()
    for name in functions.keys() - {"rmsnorm", "hadamard"}:  # the latter is in no layer
        assert functions[name] in text, name
    assert functions["rmsnorm"].replace("double", "NORM_T").count("NORM_T") == 4


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """A folder with the golden headers."""
    folder = tmp_path_factory.mktemp("hls")
    trace = DATA / "tiny-llama.q8.decode.trace.safetensors"
    model = ROOT / "build" / "models" / "tiny-llama.q8.bin"
    for name, steps, file in (("weights", [], model), ("steps", ["layers.0.ffn.residual"], trace)):
        command = [
            ROOT / ".venv/bin/python",
            "-m",
            "golden",
            "hex",
            "layers.1.*",
            *steps,
            "--file",
            file,
            "--format",
            "c",
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        (folder / f"{name}.h").write_text(done.stdout)
    return folder


def run_bench(folder, text):
    (folder / "hw" / "hls").mkdir(parents=True, exist_ok=True)
    (folder / "hw" / "hls" / "layer.h").write_text(text)
    source = ROOT / "hw" / "hls" / "layer_test.cpp"
    subprocess.run([CXX, *FLAGS, f"-I{folder}", source, "-o", folder / "bench"], check=True)
    return subprocess.run([folder / "bench"], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("right", "wrong", "named"),
    [
        ("", "", None),
        ("amax / 127.0f", "amax / 126.0f", "key"),
        ("h / (N_HEADS / N_KV_HEADS)", "h % N_KV_HEADS", "output"),
        ("pos + 1, HEAD_DIM", "pos, HEAD_DIM", "output"),
        ("gate[i] / (1.0f", "gate[i] / (2.0f", "output"),
        ("out[i] = x[i] + proj[i]", "out[i] = proj[i]", "output"),
    ],
)
def test_the_test_bench_finds_a_mistake(bench, right, wrong, named):
    text = LAYER.read_text()
    assert not right or text.count(right) == 1
    done = run_bench(bench, text.replace(right, wrong) if right else text)
    assert done.returncode == (named is not None), done.stdout
    if named:
        assert f"{named}: " in next(line for line in done.stdout.splitlines() if "too far" in line)
