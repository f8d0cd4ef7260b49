"""What several programs have in common is equal in them, and tools/sections.py keeps it so."""

import shutil
import subprocess
import sys
from itertools import pairwise

import pytest

from tests.helpers import ROOT


def section(name, text):
    return f"// ---- section {name} ----------\n{text}// ---- end of {name} ------\n"


@pytest.fixture
def tree(tmp_path):
    """A folder under git with the tool and three programs, two of which have copies."""
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "sections.py", tmp_path / "tools")
    header, rope = section("the header", "int header;\n"), section("rope", "int rope;\n\n// (turns)\n")
    (tmp_path / "runq.cpp").write_text("// runq\n" + header + "int own;\n")
    (tmp_path / "runq_gptq.cpp").write_text("// gptq\n" + rope + "int between;\n" + header)
    (tmp_path / "runq_awq.cu").write_text(header + rope + "// the end\n")
    git = ["git", "-c", "user.name=n", "-c", "user.email=e", "-C", tmp_path]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *words], check=True)
    return tmp_path


def run(tree, *options):
    """Exit code, and lines of both streams."""
    command = [sys.executable, tree / "tools" / "sections.py", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, (done.stdout + done.stderr).splitlines()


def change(path, old, new):
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def contents(tree):
    return {path.name: path.read_text() for path in tree.glob("runq*")}


def test_the_programs_have_equal_sections():
    assert run(ROOT, "--check") == (0, [])


def test_equal_sections_are_left_alone(tree):
    before = contents(tree)
    assert run(tree, "--check") == (0, [])
    assert run(tree) == (0, [])
    assert contents(tree) == before


def test_a_master_goes_into_all_copies_and_nothing_else_changes(tree):
    expected = contents(tree)
    for old, new in (("int header;", "int header = 1;  // \\1"), ("int rope;", "")):
        first = "runq.cpp" if "header" in old else "runq_gptq.cpp"
        change(tree / first, old, new)
        expected = {name: text.replace(old, new) for name, text in expected.items()}
    code, lines = run(tree, "--check")
    assert code == 1
    assert lines == [
        "runq_gptq.cpp: section the header is not that of runq.cpp",
        "runq_awq.cu: section the header is not that of runq.cpp",
        "runq_awq.cu: section rope is not that of runq_gptq.cpp",
    ]
    assert run(tree) == (0, ["runq_gptq.cpp", "runq_awq.cu"])
    assert contents(tree) == expected
    assert run(tree, "--check") == (0, [])


def test_a_master_may_change_again_before_anything_is_committed(tree):
    lines = ["int header;", "int header = 1;", "int header = 2;", "int header;"]
    for old, new in pairwise(lines):
        change(tree / "runq.cpp", old, new)
        assert run(tree) == (0, ["runq_gptq.cpp", "runq_awq.cu"])
        assert new in (tree / "runq_awq.cu").read_text()


def test_an_edited_copy_is_not_lost(tree):
    change(tree / "runq_awq.cu", "int header;", "int mine;")
    change(tree / "runq_gptq.cpp", "int rope;", "int turned;")
    before = contents(tree)
    for _ in range(2):
        assert run(tree) == (1, ["runq_awq.cu: section the header was edited here; its master is in runq.cpp"])
        assert contents(tree) == before
    change(tree / "runq_awq.cu", "int mine;", "int header;")
    assert run(tree) == (0, ["runq_awq.cu"])
    assert "int turned;" in (tree / "runq_awq.cu").read_text()


def test_a_copy_that_was_edited_as_its_master_was_is_no_mistake(tree):
    for file in ("runq.cpp", "runq_awq.cu"):
        change(tree / file, "int header;", "int header = 1;")
    assert run(tree) == (0, ["runq_gptq.cpp"])


def test_a_copy_that_is_not_committed_yet_is_not_lost(tree):
    (tree / "runq_moe.cpp").write_text(section("rope", "int other;\n"))
    assert run(tree) == (1, ["runq_moe.cpp: section rope was edited here; its master is in runq_gptq.cpp"])


MARKERS = {
    "no end at all": ("// ---- end of the header ------\n", "", "runq_gptq.cpp:8: section the header does not end"),
    "no end": ("// ---- end of rope ------\n", "", "runq_gptq.cpp:7: section the header begins inside section rope"),
    "no beginning": ("// ---- section rope ----------\n", "", "runq_gptq.cpp:5: section rope ends and has not begun"),
    "another name": ("// ---- end of rope ", "// ---- end of r ", "runq_gptq.cpp:6: section r ends and has not begun"),
    "twice": ("int between;\n", section("rope", ""), "runq_gptq.cpp:7: section rope begins a second time"),
    "one inside another": ("int rope;\n", section("x", ""), "runq_gptq.cpp:3: section x begins inside section rope"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MARKERS)
def test_markers_that_are_no_pairs(tree, mistake):
    old, new, line = MARKERS[mistake]
    change(tree / "runq_gptq.cpp", old, new)
    before = contents(tree)
    for options in ((), ("--check",)):
        code, lines = run(tree, *options)
        assert code == 1
        assert line in lines
        assert all(found.startswith("runq_gptq.cpp:") for found in lines)
    assert contents(tree) == before


def test_another_option(tree):
    assert run(tree, "--chekc")[0] == 2
