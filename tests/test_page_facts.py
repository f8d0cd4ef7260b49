"""Holds sentences of the pages, where they state a number or a name without a command, to what they speak of."""

import json
import re
from pathlib import Path

import pytest

from golden.gptq_grid import SHRINKS
from models.quality import read_comparison
from tests.helpers import run_export

ROOT = Path(__file__).resolve().parent.parent
QUALITY = read_comparison(ROOT / "docs" / "quality.json").rows


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def section(name: str, heading: str) -> str:
    """What stands below a heading of a page, up to the next heading of any rank."""
    return re.split(r"^#+ ", page(name).split(f"# {heading}\n")[1], maxsplit=1, flags=re.M)[0]


@pytest.mark.parametrize("name", ["README.md", "cpu-kernels.md"])
def test_a_chunk_has_as_many_tokens_as_the_glossaries_say(name):
    (row,) = re.findall(r"^\| chunk \|.*$", page(name), re.M)
    usual, *named = re.split(r"`(runq\w*)`", row)
    named = dict(zip(named[::2], named[1::2], strict=True))
    programs = ROOT.glob("runq*.cpp" if name == "cpu-kernels.md" else "runq*.c*")
    for program in programs:
        sizes = re.findall(r"^constexpr int max_chunk = (\d+);", program.read_text(encoding="utf-8"), re.M)
        assert sizes and re.findall(r"\d+", named.get(program.stem, usual)) == sizes, program.stem


def test_goldens_with_a_checksum_of_the_file_are_those_that_the_contract_names():
    (row,) = re.findall(r"^\| `file_crc32` \((.*?)\)", page("numerics.md"), re.M)
    without = {
        path.name.split(".")[1]
        for path in (ROOT / "golden" / "data").glob("*.json")
        if "file_crc32" not in json.loads(path.read_text(encoding="utf-8"))
    }
    assert (row, without) == ("all but Q8", {"q8"})


def test_moe_alone_takes_no_gguf_file(tmp_path):
    assert "Every exporter but `moe` takes one" in page("gguf.md")
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    for scheme in ("q8", "w8a8", "awq", "gptq", "moe"):
        text = tmp_path / "text.txt"
        text.write_text("text")
        done = run_export(scheme, file, tmp_path / "out.bin", *([] if scheme == "q8" else ["--calib", text]))
        assert done.returncode == 1
        assert ("takes Hugging Face directories" in done.stderr) == (scheme == "moe")


def test_gptq_tries_as_many_ranges_as_the_page_says():
    (narrower,) = re.findall(r"and (\d+) narrower ones", page("gptq.md"))
    assert SHRINKS[0] == 1 and len(SHRINKS) - 1 == int(narrower)


def added(name: str) -> str:
    """How much larger the perplexity of a row of docs/quality.md is than that of fp32, as the pages write it."""
    (row,) = (row for row in QUALITY if row.name == name)
    times = row.perplexity / QUALITY[0].perplexity
    percent = 100 * (times - 1)
    return f"{percent:.2g} %" if percent < 100 else f"{percent:.0f} %" if times < 10 else f"{times:,.0f} times"


def test_what_the_quality_table_is_said_to_say():
    """Rows are named in italics, the next number with a percent sign is the row's."""
    said = re.findall(r"\*([^*]+)\*(?!\*)[^*]*?([\d.]+ %|[\d.,]+ times)", section("quality.md", "What the table says"))
    assert len(said) >= 6
    assert [(name, added(name)) for name, _ in said] == said


def test_what_gptq_costs_a_model():
    table = section("gptq.md", "What it costs a model").split("\n\n")[1]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", table, re.M)
    assert len(rows) == 7
    for name, plain, gptq in rows:
        assert (plain, gptq) == (added(f"Plain rounding, {name}"), added(f"GPTQ, {name}")), name
