"""hw/chip_program.py, and a whole token on hw/rtl/chip_axi.sv.

`make build/hw/chip-4x4/chip_run` builds what the story takes, which needs Verilator.
"""

import shutil
import subprocess

import numpy as np
import pytest

from bench.systolic import Array, Stream, decode_beats
from golden.q8 import quantize
from golden.schemes import read_file
from hw.chip_program import STEPS, TOKEN, Step, build, pack_matrix, pack_rows
from tests.helpers import FULL, ROOT

MODELS = ROOT / "build" / "models"


def test_an_instruction_has_its_fields():
    step = Step("attend", "", n=32, a=0x120, b=3, out=0xA0, group=64, groups=2, row=9, memory=0x1200054000,
                step=0x10000, constant=1.0, index=TOKEN, kv=3, to_memory=True)  # fmt: skip
    assert [f"{word:08x}" for word in step.words()] == [
        "002001d8", "00030120", "004000a0", "00090002", "00054000", "00000012", "00010000", "3f800000"
    ]  # fmt: skip


def test_a_matrix_is_the_stream_of_the_array():
    """For 4 outputs and a group: 16 bytes of scales, then the outputs' codes of each input. Zeros fill a tile."""
    w = quantize(np.arange(-6 * 32, 6 * 32, dtype=np.float32).reshape(6, 64), 32)
    stream = pack_matrix(w, 4)
    assert len(stream) == 4 * decode_beats(Array(4, 4), 64, 6, 32, Stream())
    tiles = stream.reshape(2, 2, 16 + 4 * 32)  # rows of tiles, groups
    for row in range(8):
        for group in range(2):
            tile = tiles[row // 4, group]
            scales, codes = tile[:16].view(np.float32), tile[16:].view(np.int8).reshape(32, 4)
            expected = (
                (w.scales[row, group], w.codes[row, 32 * group :][:32]) if row < 6 else (0, np.zeros(32, np.int8))
            )
            assert scales[row % 4] == expected[0] and (codes[:, row % 4] == expected[1]).all()
    rows = pack_rows(w).reshape(6, 2, 36)
    assert (rows[5, 1, :4].view(np.float32) == w.scales[5, 1]).all()
    assert (rows[5, 1, 4:].view(np.int8) == w.codes[5, 32:]).all()


@pytest.mark.parametrize(
    ("name", "kv"),
    [("tiny-llama.q8", "fp32"), ("tiny-llama.q8", "q8"), ("tiny-qwen3.q8", "fp32"), ("tiny-llama.w8a8", "int8")],
)
def test_a_program_stays_within_its_memories(name, kv):
    model = read_file(MODELS / f"{name}.bin")
    image = build(model, 16, 16, kv)
    c = image.config
    kinds = [step.kind for step in image.steps]
    assert kinds.count("multiply") == 7 * c.n_layers + 1 and kinds.count("attend") == c.n_heads * c.n_layers
    assert kinds[-1] == "end" and set(kinds) == set(STEPS)
    words = image.memory[image.program :].view(np.uint32)
    assert [int(w) for w in words[:8]] == image.steps[0].words()
    for step in image.steps:
        assert max(step.a, step.b, step.out) + step.n <= 2048 or step.to_memory
        assert step.memory < len(image.memory) and step.step < 1 << (24 if step.index else 32)


def test_what_the_chip_does_not_run_is_refused():
    with pytest.raises(ValueError, match="expected dynamic scales"):
        build(read_file(MODELS / "tiny-llama.w8a8-static.bin"), 16, 16)
    with pytest.raises(ValueError, match="no multiple of 48 rows"):
        build(read_file(MODELS / "tiny-llama.q8.bin"), 48, 16)


@pytest.mark.skipif(shutil.which("verilator") is None, reason="needs verilator: make chip-story installs it")
@pytest.mark.skipif(
    " " in str(ROOT), reason="needs a directory whose path has no space, as the make files of Verilator do"
)
def test_the_story_of_a_token():
    """Two ids, a trace, and the clocks of the model; with FULL=1 of both models, and from a memory that pauses."""
    made = subprocess.run(["make", "-s", "chip-quick"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stdout + made.stderr
    assert "2 ids are the golden's" in made.stdout
    assert "golden diff: all 112 steps are within their tolerances" in made.stdout
    if FULL:
        story = ["make", "-s", "chip-story", "ARRAY=4x4", "STORY=--ids 2 --pauses 0.3"]
        done = subprocess.run(story, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "golden diff: all 148 steps are within their tolerances" in done.stdout
