"""hw/rtl under the programs: stories, the cycles that the RTL counts, and the pictures that are drawn from it.

`make rtl-quick` builds what these take, which needs Verilator.
"""

import json
import os
import platform
import shutil
import subprocess

import pytest

from bench.systolic import Array, Stream, core_cycles, decode_beats, decode_cycles
from hw import story, wave
from tests.helpers import FULL, ROOT

ARRAY = "16x16" if FULL else "8x8"  # QUICK_ARRAY of mk/hw.mk
CORE = ROOT / "build" / "hw" / f"axi-{ARRAY}"


@pytest.fixture(scope="module")
def core():
    """Builds the core, the programs on it, and the wave of one tile."""
    if shutil.which("verilator") is None:
        pytest.skip("needs verilator: make rtl-story installs it")
    if " " in str(ROOT):
        pytest.skip("needs a directory whose path has no space, as the make files of Verilator do")
    built = subprocess.run(["make", "-s", "rtl-quick"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("test", ["matmul_axi_test", "system_test"])
def test_the_core_through_its_ports(test):
    done = subprocess.run([CORE / test], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("name", story.PROGRAMS)
def test_stories_begin_as_the_golden_does(name):
    """Two ids, with FULL=1 all sixteen; every product in RTL takes as many cycles as the model says."""
    n_ids = 16 if FULL else 2
    golden = json.loads((ROOT / "golden" / "data" / f"tiny-llama.{story.PROGRAMS[name][0]}.json").read_text())
    ids, entries, _ = story.tell(name, ARRAY, n_ids, 1)
    assert ids == golden["generations"][0]["new_ids"][:n_ids]
    assert {e["command"] for e in entries} == {"quantize", "multiply"}
    layers, places, matrices = 4, 4, 7
    assert sum(e["command"] == "multiply" for e in entries) == n_ids * (layers * matrices + 1)
    assert sum(e["command"] == "quantize" for e in entries) >= n_ids * (layers * places + 1)
    assert story.table(entries, 100)[1] == 0


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("every", [1, 2, 3])
def test_cycles_of_many_tokens_and_slow_memory(every, tmp_path):
    """A prompt of 35 tokens, in products of 16 and 3; a beat of weights comes in every first, second or third cycle."""
    log = tmp_path / "log"
    prompt = ",".join(map(str, range(1, 36)))
    env = os.environ | {"RTL_LOG": str(log), "RTL_WEIGHT_EVERY": str(every), "RUNQ_BACKENDS": str(CORE / "backends")}
    program = ROOT / "build" / "portable" / platform.machine() / "runq_gptq"
    model = ROOT / "build" / "models" / "tiny-llama.gptq-ladder.bin"
    command = [program, model, "--ids", prompt, "--backend", "rtl", "-t", "0", "-n", "2", "--print-ids"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    products = [e for e in entries if e["command"] == "multiply"]
    assert {e["n_tokens"] for e in products} == {16, 3, 1}
    assert {e["weight_every"] for e in products} == {every}
    assert {story.stream_of(e).rows_per_beat for e in products} == {1, 2, 4}
    assert [e["sum_cycles"] for e in products] == [story.expected(e) for e in products]
    # A cycle more would be seen.
    products[5]["sum_cycles"] += 1
    assert story.table(entries, 100)[1] == 1


def test_a_story_with_other_ids_or_cycles_fails(monkeypatch, capsys):
    golden = json.loads((ROOT / "golden" / "data" / "tiny-llama.q8.json").read_text())["generations"][0]["new_ids"]
    shapes = story.layer_shapes(story.read_config(ROOT / "models" / "tiny-llama"))
    log = []
    for _ in range(2):
        for m, k in shapes.values():
            log.append({"command": "multiply", "rows": 16, "cols": 16, "weight_every": 1, "n_tokens": 1, "n_outputs": m,
                        "n_inputs": k, "group_size": 64, "cycles": 1, "seconds": 1.0,
                        "weight_beats": decode_beats(Array(16, 16), k, m, 64, Stream()),
                        "sum_cycles": core_cycles(Array(16, 16), 1, k, m, 64, Stream())})  # fmt: skip

    def tells(ids, entries):
        monkeypatch.setattr(story, "tell", lambda *_: (ids, entries, 1.0))
        monkeypatch.setattr("sys.argv", ["story", "--ids", "2", "--programs", "q8"])
        return story.main()

    assert tells(golden[:2], log) == 0
    assert tells([golden[0], golden[1] + 1], log) == 1
    assert "NOT the golden's" in capsys.readouterr().out
    assert tells(golden[:2], log[1:8] + log[1:]) == 0  # both tokens have a classifier
    assert tells(golden[:2], [e for e in log if e["n_inputs"] != 384]) == 1  # products that ran elsewhere
    log[3]["sum_cycles"] -= 1
    assert tells(golden[:2], log) == 1


def test_a_story_without_products_says_why(monkeypatch):
    with pytest.raises(
        RuntimeError, match="axi-4x12-scalers3 is not there: make rtl-story ARRAY=4x12 SCALERS=3 builds it"
    ):
        story.tell("q8", "4x12", 2, 1, 3)
    monkeypatch.setattr(story, "built", lambda *_: story.Path("hw"))
    monkeypatch.setattr(story.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, "480,258\n", ""))
    with pytest.raises(RuntimeError, match="no product ran on the array of 16x16: its rows have to divide the groups"):
        story.tell("q8", "16x16", 2, 1)


def test_fewer_scalers_take_longer():
    """With groups of 32 and 16 tokens each column has a sum to scale in half of the clocks."""
    sizes = (Array(8, 32), 16, 512, 256, 32, Stream())
    took = {n: core_cycles(*sizes, n) for n in (0, 1, 2, 4, 8, 16)}
    assert took[0] == took[4]
    assert took[1] > 1.9 * took[2] > 3.6 * took[4] > 6 * took[8]
    assert took[8] > took[16] > 0.98 * took[8]  # the stream is the limit
    beats = decode_beats(Array(8, 32), 512, 256, 32, Stream())
    entry = {"rows": 8, "cols": 32, "n_tokens": 16, "n_inputs": 512, "n_outputs": 256, "group_size": 32}
    entry |= {"weight_every": 1, "weight_beats": beats, "scalers": 2}
    assert story.expected(entry) == took[2]


# rows, cols, inputs, outputs, group, stream
DECODES = [
    (16, 16, 128, 128, 64, Stream()),
    (16, 16, 128, 40, 32, Stream()),
    (8, 32, 384, 96, 384, Stream()),
    (8, 8, 128, 64, 64, Stream(beat_cycles=3)),
    (16, 16, 128, 64, 64, Stream(5, 2, 2)),
    (16, 16, 256, 64, 64, Stream(5, 4, 1)),
    (4, 8, 64, 64, 64, Stream(5, 2, 3)),
]


@pytest.mark.parametrize(("rows", "cols", "k", "m", "group", "stream"), DECODES)
def test_the_formula_for_a_token_is_what_the_core_takes(rows, cols, k, m, group, stream):
    array = Array(rows, cols)
    assert decode_cycles(array, k, m, group, stream) == core_cycles(array, 1, k, m, group, stream)


@pytest.mark.skipif(not FULL, reason="needs FULL=1, which make test-all sets: a model that writes its signals")
@pytest.mark.usefixtures("core")
def test_the_wave_diagram_is_the_simulations():
    vcd = ROOT / "build" / "hw" / "wave" / "tile.vcd"
    assert wave.lanes(wave.read_vcd(vcd)) == json.loads((ROOT / "docs" / "rtl-wave.json").read_text())
