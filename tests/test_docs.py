"""Holds README.md, docs/*.md and models/README.md to the code and to the golden vectors.

    python -m tests.test_docs --update    writes the numbers anew, from golden/data and the code

In the documents, a comment in front of a fenced block says where the block comes from:

    <!-- excerpt: PATH -->                      lines of a file of this repository, verbatim
    <!-- trace: NAME STEP INDEX... -->          the first values of a step in golden/data/NAME.trace.safetensors,
                                                at each index: a token, or token,head
    <!-- ids: NAME -->                          --ids in the block are those of golden/data/NAME's trace
    <!-- output: COMMAND -->                    what the command prints; a line `...` stands for any lines
    <!-- recipe: WHAT -->                       a part of the new scheme that tests/test_recipe.py puts together
    <!-- equation -->                           an equation, which the book sets (tools/book/equations.py)

Blocks marked `pycon` are Python sessions and are run, those of one document in one namespace. In blocks marked `sh`
the targets, options, modules and files have to exist. So do the ends of relative links, and files, functions, types
and variables named in `code`. A table whose columns begin with `program` and `lines` has the lengths of the sources.
tests/pages.py runs the blocks marked `sh`.
"""

import doctest
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from formats.checkpoint import Checkpoint
from formats.tensors import matrix_shapes
from golden.forward import hf_name
from tests.helpers import run_here

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [
    *map(Path, ("README.md", "models/README.md")),
    *sorted(p.relative_to(ROOT) for p in ROOT.glob("docs/*.md")),
]
N_VALUES = 6  # of a row in a trace block


# ----------------------------------------------------------------------------
# Reading a document


@dataclass
class Block:
    """A fenced block of a document."""

    language: str
    source: str  # the comment in front of it, without <!-- and -->; empty if there is none
    text: str  # the lines between the fences, each with its line break
    line: int  # number of the first of them, from 1
    start: int  # where the text lies in the document
    end: int


FENCE = re.compile(r"(?:^<!--\s*(?P<source>.*?)\s*-->\n+)?^```(?P<language>[^\n`]*)\n(?P<text>.*?)^```$", re.M | re.S)


def blocks(document: str) -> list[Block]:
    return [
        Block(
            m["language"], m["source"] or "", m["text"], document.count("\n", 0, m.start("text")) + 1, *m.span("text")
        )
        for m in FENCE.finditer(document)
    ]


def sourced(document: str, kind: str) -> Iterator[tuple[Block, str]]:
    """The blocks whose comment begins with `kind`, and what follows it."""
    for block in blocks(document):
        if block.source.startswith(kind + ":"):
            yield block, block.source[len(kind) + 1 :].strip()


def prose(document: str) -> str:
    """The document without its fenced blocks."""
    return FENCE.sub("", document)


# ----------------------------------------------------------------------------
# What a block should hold. Each check returns complaints, one line each.


def check_comments(document: str) -> list[str]:
    """Comments that no block follows, and code that comes from nowhere."""
    meant = len(re.findall(r"^<!--\s*(?:excerpt|trace|ids|output):", document, re.M))
    bad = [
        f"line {b.line}: a block of {b.language} without an excerpt comment"
        for b in blocks(document)
        if b.language in ("cpp", "python") and not b.source.startswith(("excerpt:", "recipe:", "needs: torch"))
    ]
    if meant != sum(1 for kind in ("excerpt", "trace", "ids", "output") for _ in sourced(document, kind)):
        bad.append("a comment with excerpt, trace, ids or output stands before no block")
    return bad


def check_excerpts(document: str) -> list[str]:
    bad = []
    for block, path in sourced(document, "excerpt"):
        file = ROOT / path
        if not file.is_file():
            bad.append(f"line {block.line}: there is no {path}")
        elif "\n" + block.text not in "\n" + file.read_text(encoding="utf-8"):
            bad.append(f"line {block.line}: these lines are not in {path}")
    return bad


@cache
def trace(name: str) -> dict[str, np.ndarray]:
    return load_file(ROOT / "golden" / "data" / f"{name}.trace.safetensors")


def trace_text(source: str) -> str:
    """The block for `NAME STEP INDEX...`: the tensor's shape, then a line for each index."""
    name, step, *indices = source.split()
    tensor = trace(name)[step]
    lines = [f"{step} {tensor.shape} {tensor.dtype}"]
    for index in indices:
        at = tuple(int(i) for i in index.split(","))
        values = tensor[at].reshape(-1)
        where = f"token {at[0]}" + (f", head {at[1]}" if len(at) > 1 else "")
        if step.endswith((".scores", ".probs")):
            values = values[: at[0] + 1]  # the positions that this token sees
        shown = "".join(f" {v:>10}" if v.dtype.kind == "i" else f" {v:>10.4g}" for v in values[:N_VALUES])
        lines.append(f"  {where}{shown}{' ...' if len(values) > N_VALUES else ''}")
    return "\n".join(lines) + "\n"


def check_traces(document: str) -> list[str]:
    return [
        f"line {block.line}: golden/data has other numbers for {source}"
        for block, source in sourced(document, "trace")
        if block.text != trace_text(source)
    ]


def with_trace_ids(script: str, name: str) -> str:
    """The commands with the tokens of a golden trace as their --ids."""
    return re.sub(r"--ids [\d,]+", "--ids " + ",".join(str(i) for i in trace(name)["tokens"]), script)


def check_ids(document: str) -> list[str]:
    return [
        f"line {block.line}: the trace of {name} has other ids"
        for block, name in sourced(document, "ids")
        if block.text != with_trace_ids(block.text, name)
    ]


def output_text(command: str) -> str:
    """Standard output of a command line, run in the repository's root with this Python in front."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path}
    run = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return run.stdout if run.returncode == 0 else f"exit code {run.returncode}: {run.stderr}"


def matches(shown: str, printed: str) -> bool:
    """Whether the shown lines are the printed ones, `...` standing for any number of them."""
    pattern = "".join(r"(?:.*\n)*" if line == "..." else re.escape(line) + "\n" for line in shown.splitlines())
    return re.fullmatch(pattern, printed) is not None


def refreshed(shown: str, printed: str) -> str:
    """The printed lines. With `...` among the shown ones, those that begin with the same words as the shown ones."""
    lines = shown.splitlines()
    found = {line.split()[0]: line for line in printed.splitlines() if line.split()} | {"...": "..."}
    if "..." not in lines or any(line.split()[0] not in found for line in lines if line.split()):
        return printed
    return "".join((found[line.split()[0]] if line.split() else "") + "\n" for line in lines)


def check_outputs(document: str) -> list[str]:
    return [
        f"line {block.line}: `{command}` prints something else:\n{printed}"
        for block, command in sourced(document, "output")
        if not matches(block.text, printed := output_text(command))
    ]


class SessionRunner(doctest.DocTestRunner):
    """Runs Python sessions and keeps what each example printed."""

    def __init__(self) -> None:
        super().__init__(verbose=False, optionflags=doctest.ELLIPSIS)
        self.wrong: list[tuple[doctest.Example, str]] = []

    def report_start(self, out, test, example):
        pass

    def report_failure(self, out, test, example, got):
        self.wrong.append((example, got))

    def report_unexpected_exception(self, out, test, example, exc_info):
        self.wrong.append((example, f"{exc_info[0].__name__}: {exc_info[1]}\n"))


def run_sessions(document: str) -> list[tuple[Block, doctest.Example, str]]:
    """The examples of the document's sessions that print something else than shown, and what they print."""
    found, names = [], {}
    here = Path.cwd()
    os.chdir(ROOT)
    try:
        for block in blocks(document):
            if block.language != "pycon":
                continue
            examples = doctest.DocTestParser().get_examples(block.text)
            runner = SessionRunner()
            test = doctest.DocTest(examples, names, "session", None, 0, block.text)
            runner.run(test, clear_globs=False, out=lambda _: None)
            names = test.globs
            found += [(block, example, got) for example, got in runner.wrong]
    finally:
        os.chdir(here)
    return found


def check_sessions(document: str) -> list[str]:
    return [
        f"line {block.line + example.lineno}: prints something else:\n{got}"
        for block, example, got in run_sessions(document)
    ]


# ----------------------------------------------------------------------------
# Commands, files and links

FOLDERS = "bench|docs|engine|export|formats|golden|hw|mk|models|ptx|simt|tests|tools"


@cache
def makefiles() -> str:
    """The Makefile and its parts, with the lists of programs in place of their names."""
    text = "\n".join(p.read_text(encoding="utf-8") for p in [ROOT / "Makefile", *sorted(ROOT.glob("mk/*.mk"))])
    for name, words in re.findall(r"^((?:CUDA_|INT8_)?PROGRAMS) *:= *(.*)$", text, re.M):
        text = text.replace(f"$({name})", words)
        for pattern in re.findall(rf"\$\({name}:%=([^)]*)\)", text):
            text = text.replace(f"$({name}:%={pattern})", " ".join(pattern.replace("%", w) for w in words.split()))
    return text


def make_targets() -> set[str]:
    makefile = makefiles()
    rules = re.findall(r"^([\w./% -]+):(?!=)", makefile, re.M)
    phony = re.findall(r"^\.PHONY:(.*)$", makefile, re.M)
    variants = re.findall(r"^EXPORT_([\w-]+) *:=", makefile, re.M)
    models = re.findall(r"^TINY\w* *:= *(.*)$", makefile, re.M)
    exported = {f"build/models/{name}.{v}.bin" for names in models for name in names.split() for v in variants}
    return {word for rule in rules + phony for word in rule.split()} | exported


def commands(script: str) -> Iterator[list[str]]:
    """The simple commands of a shell block, as words."""
    script = re.sub(r"\\\n", " ", script)
    for line in script.splitlines():
        line = re.sub(r"(^|\s)#.*", "", line)
        line = re.sub(r'"[^"]*"|\'[^\']*\'', "TEXT", line)
        for part in re.split(r"&&|\|\||[|;]", line):
            if words := part.split():
                yield words


@cache
def help_of(module: str, command: str) -> set[str]:
    """The options of a sub-command, as it lists them itself; empty if there is no such command."""
    done = run_here(module, command, "--help")
    return set(re.findall(r"(?<!\S)--?[\w-]+", done.stdout.replace(",", " "))) if done.returncode == 0 else set()


def check_command(words: list[str]) -> list[str]:
    bad = []
    options = {w.split("=")[0] for w in words if re.match(r"--?[a-zA-Z]", w)}
    if words[0] == "make":
        targets = make_targets()
        bad += [f"make has no target {w}" for w in words[1:] if "=" not in w and w[0] != "-" and w not in targets]
        makefile = makefiles()
        names = [w.split("=")[0] for w in words[1:] if "=" in w]
        bad += [f"the Makefile knows no {name}" for name in names if not re.search(rf"\b{name}\b", makefile)]
    elif re.fullmatch(r"\./runq\w*", words[0]):
        sources = [
            ROOT / "engine" / "app" / "options.h",
            ROOT / "engine" / "app" / "model.h",
            *ROOT.glob(words[0][2:] + ".c*"),
        ]  # programs on a CPU, and each of them, may have their own
        known = "".join(path.read_text(encoding="utf-8") for path in sources)
        bad += [f"{words[0]} has no option {o}" for o in options if f'"{o}"' not in known]
    elif re.search(r"(^|/)python3?$", words[0]) and "-m" in words:
        words = words[words.index("-m") :]
        module = ROOT / words[1].replace(".", "/")
        file = module / "__main__.py" if module.is_dir() else module.with_suffix(".py")
        if not file.is_file():
            if words[1] not in ("pytest", "pip", "venv", "sglang.launch_server"):
                bad.append(f"there is no module {words[1]}")
        elif module.is_dir():
            known = help_of(words[1], words[2])
            if not known:
                bad.append(f"{words[1]} has no command {words[2]}")
            bad += [f"{words[1]} {words[2]} has no option {o}" for o in options - {"-m"} if o not in known]
        else:
            source = file.read_text(encoding="utf-8")
            bad += [f"{words[1]} has no option {o}" for o in options - {"-m"} if f'"{o}"' not in source]
    bad += [f"there is no {w}" for w in words if re.match(rf"({FOLDERS})/", w) and not (ROOT / w).exists()]
    return bad


def check_commands(document: str) -> list[str]:
    return [
        f"line {block.line}: {complaint}"
        for block in blocks(document)
        if block.language == "sh"
        for words in commands(block.text)
        for complaint in check_command(words)
    ]


SOURCES = (".c", ".cpp", ".cu", ".cuh", ".h", ".mk", ".py", ".sv", ".toml")


@cache
def sources() -> list[Path]:
    """Sources of the repository."""
    found = [*ROOT.iterdir(), *(path for folder in FOLDERS.split("|") for path in (ROOT / folder).rglob("*"))]
    return [path for path in found if path.suffix in SOURCES or path.name == "Makefile"]


def check_files(document: str) -> list[str]:
    """Files that the text names as `folder/file`, and sources that it names as `file`."""
    text = prose(document)
    named = set(re.findall(rf"`((?:{FOLDERS})/[\w./-]+\.\w+)`", text))
    bad = [f"there is no {name}" for name in sorted(named) if not (ROOT / name).exists()]
    alone = set(re.findall(r"`([\w.-]+)`", text))
    return bad + [
        f"there is no source {name}"
        for name in sorted(alone)
        if Path(name).suffix in SOURCES and name not in {path.name for path in sources()} | NOT_OURS
    ]


# What the pages name of other programs: llama2.c, transformers, vLLM; and contributing.md's example.
NOT_OURS = {
    *("runq.c", "token_embedding_table", "rms_att_weight", "rms_ffn_weight", "rms_final_weight"),
    *("key_cache", "value_cache", "past_key_values", "hidden_states", "attn_weights", "apply_rotary_pos_emb"),
    *("dynamic_scaled_int8_quant", "static_scaled_int8_quant"),
    *("runq_f32", "EXPORT_f32", "load_runq_f32", "forward_runq_f32"),
}


@cache
def source_words() -> frozenset[str]:
    """Every identifier of the sources, this file's excepted."""
    texts = (path.read_text(encoding="utf-8") for path in sources() if path != Path(__file__).resolve())
    return frozenset(word for text in [makefiles(), *texts] for word in re.findall(r"[A-Za-z_]\w*", text))


def check_names(document: str) -> list[str]:
    """Functions, types and variables that the text names: `f()`, `with_underscore`, `CamelCase`, `Type.member`."""
    looks_like_one = re.compile(r"[a-z]\w*\(\)|\w*[A-Za-z]_\w+(?:\(\))?|(?:[A-Z]+[a-z0-9]+){2,}|[A-Z]\w*\.[a-z]\w*")
    named = {name for name in re.findall(r"`([\w.()]+)`", prose(document)) if looks_like_one.fullmatch(name)}
    words = {word: name for name in named for word in re.findall(r"\w+", name)}
    return [
        f"the sources have no {word}, of `{words[word]}`"
        for word in sorted(words)
        if word not in source_words() and word not in NOT_OURS
    ]


def anchors(document: str) -> set[str]:
    """The anchors that GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.*)$", prose(document), re.M)
    return {re.sub(r"[^\w\- ]", "", h.replace("`", "")).strip().lower().replace(" ", "-") for h in headings}


def check_links(document: str, folder: Path) -> list[str]:
    bad = []
    targets = re.findall(r"\]\(([^)\s]+)\)", prose(document)) + re.findall(r'(?:src|href)="([^"]+)"', prose(document))
    for target in targets:
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = folder / path if path else None
        if file is not None and not file.exists():
            bad.append(f"the link to {target} leads nowhere")
        elif anchor and anchor not in anchors(file.read_text(encoding="utf-8") if file else document):
            bad.append(f"the link to {target} names no heading")
    return bad


PROGRAMS_TABLE = re.compile(r"^\| program \| lines \|.*\n(?:\|.*\n)+", re.M)
PROGRAM_LINES = re.compile(r"^\| `(?P<program>\w+)` \| (?P<lines>[\d,]+) \|", re.M)


def lengths(document: str) -> list[tuple[re.Match, str]]:
    """The rows of tables of programs with their lengths, and what each length is."""
    rows = []
    for table in PROGRAMS_TABLE.finditer(document):
        for row in PROGRAM_LINES.finditer(document, *table.span()):
            (source,) = (path for end in ("cpp", "cu") if (path := ROOT / f"{row['program']}.{end}").is_file())
            rows.append((row, f"{source.read_text(encoding='utf-8').count(chr(10)):,}"))
    return rows


def check_lengths(document: str) -> list[str]:
    return [
        f"{row['program']} has {length} lines, not {row['lines']}"
        for row, length in lengths(document)
        if row["lines"] != length
    ]


# ----------------------------------------------------------------------------
# The tests

CHECKS = [
    check_comments,
    check_excerpts,
    check_traces,
    check_ids,
    check_outputs,
    check_sessions,
    check_commands,
    check_files,
    check_names,
    check_lengths,
]


def read(path: Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("path", DOCUMENTS, ids=str)
def test_document(path: Path, check):
    complaints = check(read(path))
    assert not complaints, "\n".join([f"{path}:", *complaints])


def test_glossary_has_the_names_of_hugging_face():
    """Where a row names one step that has a weight, its second cell is the weight's name in a checkpoint."""
    config = Checkpoint(ROOT / "models" / "tiny-qwen3").config  # it has head norms, and its own classifier
    found = {}
    for row in re.findall(r"^\|(.*)\|$", read(Path("docs/README.md")), re.M):
        cells = [re.findall(r"`([^`]+)`", cell) for cell in re.split(r" *(?<!\\)\| *", row)]
        if len(cells) == 4 and len(cells[1]) == len(cells[2]) == 1:
            found[cells[2][0]] = cells[1][0]
    matrices = {name.removeprefix("layers.0.") for name, _ in matrix_shapes(config) if not name.startswith("layers.1")}
    weights = {"attn.norm", "ffn.norm", "norm", "attn.q_norm", "attn.k_norm", *matrices}
    weights = {name for name in weights if not name.startswith("layers.")}
    assert weights <= found.keys()
    for name in weights:
        step = f"layers.0.{name}" if name.startswith(("attn.", "ffn.")) else name
        assert hf_name(config, step).removeprefix("model.layers.0.") == found[name] + ".weight"


def test_the_way_through_the_pages_has_every_page():
    linked = set(re.findall(r"\]\(([\w-]+\.md)", read(Path("docs/README.md"))))
    assert linked == {path.name for path in DOCUMENTS if path.parent.name == "docs"} - {"README.md"}


@pytest.mark.parametrize("path", DOCUMENTS, ids=str)
def test_links(path: Path):
    complaints = check_links(read(path), (ROOT / path).parent)
    assert not complaints, "\n".join([f"{path}:", *complaints])


def test_every_program_has_its_length_in_the_readme():
    programs = {path.stem for path in ROOT.glob("runq*.c*")}
    assert programs == {row["program"] for row, _ in lengths(read(Path("README.md")))}


def test_each_thing_is_found_in_one_file_or_two():
    """The table `Where to look` of contributing.md; that its files are there, check_files sees."""
    table = read(Path("docs/contributing.md")).split("## Where to look\n")[1].split("\n## ")[0]
    rows = [row.strip("|").split(" | ") for row in re.findall(r"^\|.*\|$", table, re.M)][2:]
    assert len(rows) >= 20
    for thing, places in rows:
        assert 1 <= len(re.findall(r"`[\w/]+\.\w+`", places)) <= 2, thing


def test_links_of_sources():
    """Pages and their headings that comments name: `docs/page.md`, `docs/page.md#heading`."""
    for source in sources():
        if source != Path(__file__).resolve():
            for page, anchor in re.findall(
                r"(?<![\w/])(docs/[\w-]+\.md)(?:#([\w-]+))?", source.read_text(encoding="utf-8")
            ):
                assert (ROOT / page).is_file(), f"{source}: {page}"
                assert not anchor or anchor in anchors(read(Path(page))), f"{source}: {page}#{anchor}"


def test_figures(tmp_path: Path):
    subprocess.run([sys.executable, ROOT / "docs" / "figures.py", tmp_path], check=True)
    for drawn in tmp_path.iterdir():
        assert drawn.read_bytes() == (ROOT / "docs" / drawn.name).read_bytes(), f"docs/{drawn.name}: draw it again"


# Each of these drifts has to be noticed.
FIRST_LINE = (ROOT / "runq.cpp").read_text(encoding="utf-8").splitlines()[0]
N_LINES = len((ROOT / "runq.cpp").read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize(
    ("check", "good", "drifted"),
    [
        (check_comments, "<!-- excerpt: Makefile -->\n```make\nx\n```\n", "-->\n~-->\nwords\n"),
        (check_comments, "<!-- excerpt: runq.cpp -->\n```cpp\nx\n```\n", "excerpt: runq.cpp~runq.cpp"),
        (check_excerpts, f"<!-- excerpt: runq.cpp -->\n```cpp\n{FIRST_LINE}\n```\n", "//~ runq"),
        (check_sessions, "```pycon\n>>> 127 * 127\n16129\n```\n", "16129~16130"),
        (check_sessions, "```pycon\n>>> x = 3\n```\nand\n```pycon\n>>> x\n3\n```\n", "x = 3~x = 4"),
        (check_outputs, "<!-- output: printf 'a\\nb\\nc\\n' -->\n```text\na\n...\nc\n```\n", "\na\n~\nz\n"),
        (check_commands, "```sh\nmake run\n```\n", "run~walk"),
        (check_commands, "```sh\nmake CXX=g++\n```\n", "CXX~CXXX"),
        (check_commands, "```sh\nmake build/models/tiny-llama.gptq-w8.bin\n```\n", "w8~w9"),
        (check_commands, "```sh\n./runq model.bin --trace x.safetensors\n```\n", "--trace~--traces"),
        (check_commands, "```sh\n./runq_awq model.bin --matmul plain\n```\n", "runq_awq~runq"),
        (check_commands, "```sh\npython -m golden diff a b\n```\n", "diff~differ"),
        (check_commands, "```sh\npython -m golden diff a b --model c\n```\n", "--model ~--modell "),
        (check_commands, "```sh\ncat engine/app/trace.h\n```\n", "trace.h~traces.h"),
        (check_files, "in `engine/app/trace.h`", "trace.h~traces.h"),
        (check_files, "in `trace.h`", "trace.h~traces.h"),
        (check_lengths, f"| program | lines |\n|---|---|\n| `runq` | {N_LINES:,} |\n", f"{N_LINES:,}~{N_LINES + 1:,}"),
        (check_names, "`with_best_isa`", "best~worst"),
        (check_names, "`attend()`", "attend~attended"),
        (check_names, "`QuantRows.sums`", "Quant~Quint"),
        (lambda d: check_links(d, ROOT), "[x](Makefile)", "Makefile~Makefiles"),
        (lambda d: check_links(d, ROOT), "# One two\n[x](#one-two)", "#one-two~#one-three"),
    ],
)
def test_drift_is_noticed(check, good: str, drifted: str):
    old, new = drifted.split("~")
    assert old in good
    assert check(good) == []
    assert len(check(good.replace(old, new))) == 1


def test_trace_drift_is_noticed():
    source = "tiny-llama.q8 embed 1"
    good = f"<!-- trace: {source} -->\n```text\n{trace_text(source)}```\n"
    assert check_traces(good) == []
    digit = good.rfind("...") - 2
    assert len(check_traces(good[:digit] + str((int(good[digit]) + 1) % 10) + good[digit + 1 :])) == 1


# ----------------------------------------------------------------------------
# --update


def updated(document: str) -> str:
    """The document with its traces, outputs and sessions written anew. Excerpts are for a person to look at."""
    edits = [(b.start, b.end, trace_text(source)) for b, source in sourced(document, "trace")]
    edits += [(b.start, b.end, with_trace_ids(b.text, name)) for b, name in sourced(document, "ids")]
    for block, command in sourced(document, "output"):
        if not matches(block.text, printed := output_text(command)):
            edits.append((block.start, block.end, refreshed(block.text, printed)))
    edits += [(*row.span("lines"), length) for row, length in lengths(document)]
    for block, example, got in run_sessions(document):
        lines = block.text.splitlines(keepends=True)
        first = example.lineno + example.source.count("\n")
        start = block.start + len("".join(lines[:first]))
        end = start + len("".join(lines[first : first + example.want.count("\n")]))
        edits.append((start, end, got))
    for start, end, text in sorted(edits, reverse=True):
        document = document[:start] + text + document[end:]
    return document


def main() -> int:
    if sys.argv[1:] != ["--update"]:
        print(__doc__)
        return 2
    for path in DOCUMENTS:
        old = read(path)
        new = updated(old)
        if new != old:
            (ROOT / path).write_text(new, encoding="utf-8")
            print(f"{path}: updated")
    return 0


if __name__ == "__main__":
    sys.exit(main())
