"""Holds sentences of the pages, where they state a number or a name without a command, to what they speak of."""

import json
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from bench.random_checkpoint import config_of
from formats.gptq import MatrixFormat
from formats.tensors import matrix_shapes
from golden.gptq_grid import SHRINKS
from golden.gptq_quantize import round_matrix
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
        (sizes,) = re.findall(r"^constexpr int max_chunk = (.*);", program.read_text(encoding="utf-8"), re.M)
        assert re.findall(r"\d+", named.get(program.stem, usual)) == re.findall(r"\d+", sizes), program.stem


def test_goldens_with_a_checksum_of_the_file_are_those_that_the_contract_names():
    (row,) = re.findall(r"^\| `file_crc32` \((.*?)\)", page("numerics.md"), re.M)
    without = {
        path.name.split(".")[1]
        for path in (ROOT / "golden" / "data").glob("*.json")
        if "file_crc32" not in json.loads(path.read_text(encoding="utf-8"))
    }
    assert (row, without) == ("all but Q8", {"q8"})


def test_each_promise_about_untrusted_files_names_tests_that_there_are():
    promises = re.findall(r"^- \*\*(.+?)\.\*\*", section("security.md", "What is promised"), re.M)
    table = section("security.md", "The test of each promise")
    rows = {
        row: re.findall(r"`(tests/\w+)\.(py|cpp)::([^`]+)`", tests)
        for row, tests in re.findall(r"^\| (.+?) \| (`.+) \|$", table, re.M)
    }
    assert set(promises) <= set(rows)
    assert {"any bits: they become numbers", "complete or not there"} <= set(rows)
    for tests in rows.values():
        assert tests
        for path, language, name in tests:
            source = (ROOT / f"{path}.{language}").read_text(encoding="utf-8")
            begin = f"def {name}(" if language == "py" else f'TEST_CASE("{name}")'
            assert begin in source, f"{path}: {name}"


def test_what_make_builds_that_make_run_has_not():
    def built(*goals: str) -> tuple[set[str], set[str]]:
        """Programs and model files of the root folder."""
        listing = subprocess.run(["make", "-nB", *goals], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        return set(re.findall(r" -o (runq\w*)(?!\S)", listing)), set(
            re.findall(r"^cp \S+ (model\w*\.bin)$", listing, re.M)
        )

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "| `make` | builds all programs and a model for each |" in text
    assert "| `make run` | builds `model.bin` and `runq` over the engine, " in text
    assert [len(names) for names in built("all")] == 2 * [len([*ROOT.glob("runq*.c*")])]
    assert built("run") == built("runq", "model.bin") == ({"runq"}, {"model.bin"})


def test_every_exporter_takes_a_gguf_file(tmp_path):
    assert "Every exporter takes one" in page("gguf.md")
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    for scheme in ("q8", "w8a8", "awq", "gptq", "moe"):
        text = tmp_path / "text.txt"
        text.write_text("text")
        done = run_export(scheme, file, tmp_path / "out.bin", *([] if scheme == "q8" else ["--calib", text]))
        assert (done.returncode, "too short for a GGUF file" in done.stderr) == (1, True)


def test_gptq_tries_as_many_ranges_as_the_page_says():
    (narrower,) = re.findall(r"and (\d+) narrower ones", page("gptq.md"))
    assert SHRINKS[0] == 1 and len(SHRINKS) - 1 == int(narrower)


def test_sym_puts_zero_points_of_4_bits_at_8_and_changes_no_other_format():
    """GPTQ's formats that the exporter writes, of `--sym` in docs/gptq.md."""
    weight = np.random.default_rng(0).standard_normal((4, 128)).astype(np.float32) + np.float32(0.3)
    for form in (
        MatrixFormat(8),
        MatrixFormat(4, 64),
        MatrixFormat(4, 64, sparse=True),
        MatrixFormat(2, 64, two_level=True),
    ):
        plain, symmetric = (round_matrix(weight, form, symmetric=s) for s in (False, True))
        if form.bits == 4:
            assert (symmetric.zeros == 8).all() and not (plain.zeros == 8).all()
        else:
            assert np.array_equal(plain.codes, symmetric.codes) and np.array_equal(plain.scales, symmetric.scales)
            assert form.bits == 8 or np.array_equal(plain.zeros, symmetric.zeros)


def test_multiply_adds_of_a_long_prompt():
    """Attention in int8 of docs/performance.md: per token of a prompt of 2,048, half of which it sees on average."""
    config = config_of("qwen3-0.6b")
    in_attention = config.n_layers * config.n_heads * config.head_dim * 2 * 1024
    layers = [shape for name, shape in matrix_shapes(config) if name.startswith("layers.")]
    in_matrices = sum(rows * columns for rows, columns in layers)
    said = (
        f"{in_attention / 1e6:.0f} M multiply-adds in fp32 per token, and the products with weights have "
        f"{in_matrices / 1e6:.0f} M in int8"
    )
    assert said in one_line(section("performance.md", "Attention in int8"))


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


def one_line(text: str) -> str:
    return " ".join(text.split())


def test_how_many_ids_of_the_real_model_are_judged():
    goldens = json.loads((ROOT / "golden" / "real" / "smollm2.q8.json").read_text(encoding="utf-8"))["generations"]
    leads = [lead for golden in goldens for lead in golden["leads"]]
    judged = sum(lead >= 0.05 for lead in leads)
    assert f"In Q8 {judged} of the {len(leads)} ids are judged." in one_line(page("real-model.md"))


def medians(text: str) -> list[tuple[str, list[float]]]:
    """The rows of a table of speeds, `| name | median (least to greatest) | ... |`: names and medians."""
    rows = re.findall(r"^\| ([^|]+) \|((?: [\d.]+ \([^|]*\) \|)+)$", text, re.M)
    return [(name, [float(n) for n in re.findall(r"\| ?([\d.]+) \(", "|" + cells)]) for name, cells in rows]


def ratios(table: list[tuple[str, list[float]]], column: int) -> list[float]:
    """By how much each of our rows is faster than the fastest of those that follow it, which are other programs'."""
    found, others = [], []
    for name, speeds in [*reversed(table)]:
        if not name.startswith("`runq"):
            others.append(speeds[column])
        elif others:
            found.insert(0, speeds[column] / max(others))
            others = []
    return found


def test_how_much_faster_than_other_programs():
    """The pages' `1.3 times as fast` and `1.4 to 1.5 times` follow from the medians of their tables."""
    gptq, moe, side = (
        section(*where)
        for where in (("gptq.md", "How fast it is"), ("moe.md", "How fast it is"), ("performance.md", "Side by side"))
    )
    fewer_bits = medians(section("measurements.md", "Fewer bits"))
    (_, *prefill), (_, four, two) = (ratios(fewer_bits, column) for column in (0, 1))  # the first row is of runq
    assert (
        f"decodes {four:.1f} times as fast with 4 bits and {two:.1f} times with 2; "
        f"prefill is {min(prefill):.1f} to {max(prefill):.1f} times as fast with both." in one_line(gptq)
    )
    prefill, decode = (ratios(medians(moe), column) for column in (0, 1))
    assert len(prefill) == len(decode) == 3
    assert f"is {min(prefill):.1f} to {max(prefill):.1f} times as fast as the fastest" in one_line(moe)
    assert f"makes {min(decode):.1f} to {max(decode):.1f} times as many tokens/s" in one_line(moe)
    (_, w8a8), (_, q8), (_, other) = medians(side)
    first, second = (f"{ours[0] / other[0]:.1f} times" for ours in (q8, w8a8))
    assert f"`runq` is {first} as fast as ik_llama.cpp, and `runq_w8a8` {second}." in one_line(side)
    assert f"Here it is {w8a8[1] / q8[1]:.1f} times as fast" in one_line(side)


def library_sources():
    """What every program over the engine is linked with: LIBRARY in mk/build.mk."""
    return re.search(r"^LIBRARY +:= (.*)$", (ROOT / "mk/build.mk").read_text(), re.M)[1].split()


def test_no_include_points_up():
    """Folders of engine/, each above those before it, as contributing.md says; nothing of simt/ includes any."""
    order = ["os", "text", "model", "cpu", "app", "backend", "gpu"]
    for path in sorted((ROOT / "engine").glob("*/*")) + sorted((ROOT / "simt").iterdir()):
        for folder in re.findall(r'#include "engine/(\w+)/', path.read_text(encoding="utf-8")):
            above = path.parent.name == "simt" or order.index(folder) > order.index(path.parent.name)
            assert not above, f"{path.relative_to(ROOT)} includes {folder}/"


def test_the_house_stays_small():
    """The limits of contributing.md's table of sizes, which only a new scheme may raise."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    engine = [path for path in tracked if path.startswith("engine/")]
    words = {path: len((ROOT / path).read_text(encoding="utf-8").split()) for path in tracked if path.endswith(".md")}
    sources = ["runq.cpp", *library_sources()]
    listed = subprocess.run(
        ["g++", "-std=c++20", "-march=x86-64-v3", "-DENGINE", "-DLINE_EDITOR", "-DINT8_ALONE", "-I.", "-MM", *sources],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    of_runq = sorted(set(re.findall(r"engine/\S+", listed)))
    found = {
        "files in git": len(tracked),
        "files in `mk/`": sum(path.startswith("mk/") for path in tracked),
        "files of `engine/`": len(engine),
        "of these, files that `./runq` is made of": len(of_runq),
        "lines of `engine/`": sum((ROOT / path).read_text(encoding="utf-8").count("\n") for path in engine),
        "of these, lines that `./runq` is made of": sum(
            (ROOT / path).read_text(encoding="utf-8").count("\n") for path in of_runq
        ),
        "words of `README.md`": words["README.md"],
        "words of `docs/`, without measurements.md and gpu-results.md": sum(
            n
            for path, n in words.items()
            if path.startswith("docs/") and path not in ("docs/measurements.md", "docs/gpu-results.md")
        ),
    }
    rows = re.findall(r"^\| ([^|]+) \| ([\d,]+) \|$", section("contributing.md", "Sizes"), re.M)
    limits = {name: int(limit.replace(",", "")) for name, limit in rows}
    assert limits.keys() == found.keys()
    assert {name: n for name, n in found.items() if n > limits[name]} == {}
