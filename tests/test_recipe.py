"""The recipe for a new scheme in docs/contributing.md, followed to the letter in a copy of the tree.

The blocks of its section `Add a scheme` are the scheme. The comment in front of each says where it goes:

    <!-- recipe: new PATH -->                           a new file
    <!-- recipe: change PATH -->                        a file that is there, by a block of the kind diff
    <!-- recipe: beginning of PATH, a copy of OTHER --> PATH is OTHER with this in place of its first comment
    <!-- recipe: section "TITLE" of PATH -->            in place of that section

A section of a C++ source begins with a line `// ---` and one with its title. In a diff, groups of lines between blank
lines are looked for one by one: lines marked `-` or with a space stand in the file one after the other, in one place.
A line that ends in ` ...` stands for one that begins so.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from formats.checkpoint import Checkpoint
from tests.helpers import DATA, ROOT, TINY
from tests.pages import source_files
from tests.test_docs import Block, blocks, sourced

PAGE = "docs/contributing.md"
TITLE = "## Add a scheme\n"
MOST_CHANGED = 7  # files of the tree that a new scheme may change
N_NEW = 32  # tokens to generate
RULE = "// " + "-" * 76


# ----------------------------------------------------------------------------
# Following the page


def section_of_page() -> str:
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    return TITLE + page.split(TITLE)[1].split("\n## ")[0]


def recipe(page: str) -> list[tuple[Block, str]]:
    """The blocks that make the scheme, and where each goes."""
    found = list(sourced(page, "recipe"))
    assert len(found) == page.count("<!-- recipe:"), "a recipe comment stands before no block"
    code = [b for b in blocks(page) if b.language in ("cpp", "python", "diff", "make", "markdown")]
    assert len(code) == len(found), "a block of code has no recipe comment"
    return found


def is_line(shown: str, line: str) -> bool:
    return line.startswith(shown.removesuffix("...")) if shown.endswith(" ...") else line == shown


def patched(text: str, diff: str, where: str) -> str:
    """The text with the changes of a diff block."""
    lines = text.split("\n")
    for hunk in filter(None, re.split(r"\n\n+", diff.strip("\n"))):
        marked = hunk.split("\n")
        assert all(line[0] in " +-" for line in marked), f"{where}: a line of the diff has no mark: {hunk}"
        old = [line[1:] for line in marked if line[0] != "+"]
        places = [
            i
            for i in range(len(lines) - len(old) + 1)
            if all(is_line(shown, line) for shown, line in zip(old, lines[i : i + len(old)], strict=True))
        ]
        assert old and len(places) == 1, f"{where}: these lines are there {len(places)} times, not once:\n{hunk}"
        at, new = places[0], []
        for line in marked:
            if line[0] == "+":
                new.append(line[1:])
            else:
                new += [lines[at]] if line[0] == " " else []
                at += 1
        lines[places[0] : at] = new
    return "\n".join(lines)


def with_section(text: str, title: str | None, new: str, where: str) -> str:
    """A C++ source with a section in place of the one whose title begins so. None: of its first comment."""
    if title is None:
        return new + text[text.index("\n\n") + 1 :]
    first, *sections = re.split(rf"(?m)^(?={RULE}$)", text)
    chosen = [i for i, section in enumerate(sections) if section.split("\n")[1].startswith("// " + title)]
    assert len(chosen) == 1, f"{where}: {len(chosen)} sections are called {title}"
    sections[chosen[0]] = new + "\n"
    return "".join([first, *sections])


def follow(page: str, tree: Path) -> None:
    """Does in the tree what the page says."""
    for block, what in recipe(page):
        where = f"{PAGE}: {what}"
        if m := re.fullmatch(r"new (\S+)", what):
            assert not (tree / m[1]).exists(), f"{where}: it is there"
            (tree / m[1]).write_text(block.text, encoding="utf-8")
            continue
        if m := re.fullmatch(r"beginning of (\S+), a copy of (\S+)", what):
            path, text = m[1], with_section((tree / m[2]).read_text(encoding="utf-8"), None, block.text, where)
        elif m := re.fullmatch(r'section "(.+)" of (\S+)', what):
            path, text = m[2], with_section((tree / m[2]).read_text(encoding="utf-8"), m[1], block.text, where)
        else:
            m = re.fullmatch(r"change (\S+)", what)
            assert m and block.language == "diff", f"{where}: not understood"
            path, text = m[1], patched((tree / m[1]).read_text(encoding="utf-8"), block.text, where)
        (tree / path).write_text(text, encoding="utf-8")


def changed_files(tree: Path) -> set[str]:
    """Sources that are others in the tree."""
    return {
        name
        for name in source_files()
        if not (tree / name).is_file() or (tree / name).read_bytes() != (ROOT / name).read_bytes()
    }


# ----------------------------------------------------------------------------
# The scheme


def run(tree: Path, *command: object, timeout: float = 900) -> str:
    """Standard output of a command in the tree, which has to succeed."""
    environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    environment["OPENBLAS_NUM_THREADS"] = "1"  # matrices are small, and the compiler runs beside
    done = subprocess.run(
        list(map(str, command)), cwd=tree, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A copy of the sources, in which the page was followed."""
    folder = tmp_path_factory.mktemp("recipe") / "tree"
    for name in source_files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    (folder / ".venv").symlink_to(ROOT / ".venv")
    follow(section_of_page(), folder)
    return folder


def test_the_page_names_the_files_that_a_scheme_changes(tree):
    changed = changed_files(tree)
    (names,) = re.findall(r"has changed \w+ existing files: ([^.]*(?:\.\w+[^.]*)*?)\. ", section_of_page())
    assert set(re.findall(r"`([^`]+)`", names)) == changed
    assert len(changed) <= MOST_CHANGED


def copy_named(page: str, tree: Path, to: Path) -> None:
    """Copies what the page changes, and makes the folders of what it adds."""
    for _, what in recipe(page):
        for name in re.findall(r"\S+\.\w+|Makefile", what):
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            if (tree / name).is_file():
                shutil.copy2(tree / name, to / name)


def test_the_next_scheme_comes_in_by_the_same_lines(tree, tmp_path):
    page = section_of_page().replace("f32", "g32").replace("F32", "G32")
    copy_named(page, tree, tmp_path)
    follow(page, tmp_path)
    names = re.findall(r"\w+(?=_FILE,\n)", (tmp_path / "formats" / "schemes.py").read_text())
    assert names.index("F32") == names.index("G32") + 1


@pytest.fixture(scope="module")
def made(tree) -> Path:
    """The tree with the program, its tests, the tiny models' files and their golden vectors."""
    targets = ["runq_f32", "build/runq_f32_test"]
    # What is compiled already need not be again, unless something that it is made of has changed.
    for path in [*(ROOT / "build" / "lib" / "engine").rglob("*.o"), *(ROOT / "build" / "deps").iterdir(),
                 *(ROOT / "build" / name for name in ("main.o", "flags", "packages", "packages-test"))]:  # fmt: skip
        copy = tree / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy)
    corpus = tree / "tests" / "fuzz" / "corpus"
    for harness in ("load", "forward"):
        shutil.copy(corpus / f"{harness}_runq.zip", corpus / f"{harness}_runq_f32.zip")
    files = [tree / "build" / "models" / f"{name}.f32.bin" for name in TINY]
    files[0].parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(1) as compiler:
        compiled = compiler.submit(run, tree, "make", *targets)
        for name, file in zip(TINY, files, strict=True):
            run(tree, sys.executable, "-m", "export", "f32", tree / "models" / name, file, "--quiet")
            # Of the held-out text the story whose beginning has a clear continuation in Q8: all would take minutes.
            prompt = json.loads((DATA / f"{name}.q8.json").read_text())["generations"][-1]["prompt"]
            stories = (ROOT / "models" / "held_out.txt").read_text(encoding="utf-8").split("\n\n")
            chosen = next(story for story in stories if " ".join(story.split()).startswith(prompt))
            (tree / "models" / "held_out.txt").write_text(chosen, encoding="utf-8")
            run(tree, sys.executable, "-m", "golden", "make", "--only", "f32", "--model", name)
        compiled.result()
    return tree


def test_the_readme_has_the_length_of_the_program(tree):
    (length,) = re.findall(r"^\| `runq_f32` \| ([\d,]+) \|", (tree / "README.md").read_text(encoding="utf-8"), re.M)
    assert int(length.replace(",", "")) == (tree / "runq_f32.cpp").read_text(encoding="utf-8").count("\n")


def test_golden_make_leaves_the_others_as_they_are(made):
    changed = {path.name for path in (made / "golden" / "data").iterdir()} - {path.name for path in DATA.iterdir()}
    assert changed == {f"{name}.f32.{kind}" for name in TINY for kind in ("json", "trace.safetensors")}
    assert not {name for name in changed_files(made) if name.startswith("golden/data/")}


@pytest.mark.parametrize("name", TINY)
def test_the_program_generates_what_the_reference_does(made, name):
    for golden in json.loads((made / "golden" / "data" / f"{name}.f32.json").read_text())["generations"]:
        file = f"build/models/{name}.f32.bin"
        printed = run(made, "./runq_f32", file, "-i", golden["prompt"], "-t", 0, "-n", N_NEW, "--print-ids")
        n = min(N_NEW, next((i for i, lead in enumerate(golden["leads"]) if lead < 2e-3), N_NEW))  # its order is free
        assert n > 0
        assert [int(i) for i in printed.split(",")][:n] == golden["new_ids"][:n]


def test_a_gguf_file_has_the_weights_in_fp16(tree, tmp_path):
    model, gguf = tree / "models" / "tiny-qwen3", tmp_path / "f32.gguf"
    run(tree, sys.executable, "-m", "export", "f32", model, tmp_path / "f32.bin", "--gguf-out", gguf, "--quiet")
    stored = {tensor.name: tensor.data for tensor in GGUFReader(gguf).tensors}
    for name, hf_name in (("token_embd", "embed_tokens"), ("blk.1.ffn_down", "layers.1.mlp.down_proj")):
        weight = Checkpoint(model).tensor(f"model.{hf_name}.weight")
        np.testing.assert_array_equal(stored[f"{name}.weight"], weight.astype(np.float16))


def test_the_tests_of_the_program_pass(made):
    run(made, "build/runq_f32_test")


@pytest.mark.parametrize(
    ("file", "chosen"),
    [
        ("test_formats.py", "every_scheme or import or (f32 and (list or same_tensors))"),  # --info among them
        ("test_program_faults.py", "runq_f32"),
        ("test_runq.py", "f32 and (ids_from_text or golden_trace or mapped or guessing)"),
        ("test_fuzz.py", "every_harness or small"),
        ("test_docs.py", "its_length or links or way_through or (files and (README or f32))"),
    ],
)
def test_the_tests_of_the_tree_take_it_in(made, file, chosen):
    told = run(made, sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"tests/{file}", "-k", chosen)
    assert re.search(r"\d+ passed|^\.+ ", told, re.M)


# ----------------------------------------------------------------------------
# A page that is wrong


@pytest.mark.parametrize(
    ("right", "wrong", "complaint"),
    [
        ("-    quantize(s.xq, s.attn_out,", "-    quantise(s.xq, s.attn_out,", "are there 0 times"),
        ('section "Q8: the arithmetic"', 'section "Q9: the arithmetic"', "0 sections are called"),
        ("recipe: new golden/f32.py", "recipe: new golden/q8.py", "it is there"),
        ("recipe: change Makefile", "recipe: chance Makefile", "not understood"),
        ("<!-- recipe: new export/f32.py -->\n", "", "no recipe comment"),
    ],
)
def test_a_page_that_is_wrong_is_noticed(tree, tmp_path, right, wrong, complaint):
    page = section_of_page()
    assert page.count(right) == 1
    copy_named(page, ROOT, tmp_path)
    (tmp_path / "golden" / "q8.py").write_text("")
    with pytest.raises(AssertionError, match=complaint):
        follow(page.replace(right, wrong), tmp_path)
