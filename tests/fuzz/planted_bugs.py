"""Each harness finds, from its stored inputs, a bug that is planted in a copy of what it is about.

Run by `make test-fuzz`, as every harness has to be compiled with clang once more: FUZZ names the harnesses, and
FUZZ_COMPILE is the compiler with its flags and libraries.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.fuzz.run import longest, stored

ROOT = Path(__file__).resolve().parents[2]
N_RUNS = 200_000  # executions within which the bug has to be found

# A file, and what to replace in it by what.
NO_LIMIT_OF_BOS = ("engine/model/model_file.h", '("bos_id", 0x6C, -1, c.vocab_size - 1)',
                   '("bos_id", 0x6C, -1, 1 << 24)')  # fmt: skip
ONE_PAGE_SHORT = (
    "engine/cpu/kv_cache.h",
    "(size_t(context) + page - 1) / page * page",
    "(1 + (size_t(context) - 1) / (2 * page)) * page",
)
BUGS = {
    "chat": ("engine/text/utf8.h", "while (!s.empty() && is_space(utf8_first(s).code))",
             "while (is_space(utf8_first(s).code))"),
    "encode": ("engine/text/tokenizer.h", "if (next[left] != none) previous", "previous"),
    "options": ("engine/app/options.h", "if (i + 1 >= argc) fail", "if (i >= argc) fail"),
    "section_built": ("engine/text/tokenizer.h", "start > 0 && is_word_char", "is_word_char"),
    "section_raw": ("engine/text/vocabulary.h", "uint32_t(id) < token_flags_.size() && ", ""),
    "plain_forward_runq_w8a8": ("runq_w8a8.cpp", "keys = std::make_unique_for_overwrite<T[]>(at(c.n_layers, 0));",
                                "keys = std::make_unique_for_overwrite<T[]>(at(c.n_layers, 0) - 1);"),
    "forward_runq_moe": ("runq_moe.cpp", "while (end < n_pairs && ", "while ("),
    "forward_runq_awq": ("runq_awq.cu", "all_values(size_t(c.n_layers) * layer_size())",
                         "all_values(size_t(c.n_layers) * layer_size() - 1)"),
}  # fmt: skip
BUG_OF_KIND = {"load": NO_LIMIT_OF_BOS, "forward": ONE_PAGE_SHORT}  # of a program that is not in BUGS
# In the one file of any program.
PLAIN_BUGS = {
    "plain_load": ('("bos_id", 0x6C, -1, c.vocab_size - 1)', '("bos_id", 0x6C, -1, 1 << 24)'),
    "plain_forward": ("keys = std::make_unique_for_overwrite<float[]>(at(c.n_layers, 0));",
                      "keys = std::make_unique_for_overwrite<float[]>(at(c.n_layers, 0) - 1);"),
}  # fmt: skip


def bug_of(name: str) -> tuple[str, str, str]:
    """The bug planted for a harness: its own, or the one for any program."""
    kind, _, program = name.partition("_runq")
    if kind in PLAIN_BUGS and name not in BUGS:
        return (f"runq{program}.cpp", *PLAIN_BUGS[kind])
    return BUGS.get(name) or BUG_OF_KIND[kind]


def copy_sources(folder: Path) -> None:
    """What a harness is compiled from."""
    for file in ROOT.glob("runq*.c*"):
        shutil.copy(file, folder)
    for name in ("engine", "simt", "tests/fuzz"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("corpus"))
    shutil.copy(ROOT / "tests" / "section.h", folder / "tests")


def test_every_harness_has_a_bug_planted():
    harnesses = re.findall(r"\w+", os.environ["FUZZ_ALL"])
    assert set(BUGS) <= set(harnesses)
    assert all(bug_of(name) for name in harnesses)


@pytest.mark.parametrize("name", os.environ.get("FUZZ", "").split())
def test_it_finds_the_bug(tmp_path, name):
    path, old, new = bug_of(name)
    copy_sources(tmp_path)
    source = (tmp_path / path).read_text()
    assert source.count(old) == 1, old
    (tmp_path / path).write_text(source.replace(old, new))

    kind, _, program = name.removeprefix("plain_").partition("_runq")
    words = os.environ["FUZZ_COMPILE"].split()
    if name.startswith("plain_"):
        words.append("-DPLAIN")
    if program or kind in ("load", "forward"):
        program = next(p.name for p in ROOT.glob(f"runq{program}.c*"))
        words.append(f'-DPROGRAM="{program}"')
    else:
        kind = name
    compiler, *flags = words
    subprocess.run([compiler, f"tests/fuzz/{kind}.cpp", *flags, "-o", "harness"], cwd=tmp_path, check=True)

    corpus = tmp_path / "corpus"
    for folder in stored(name):
        if folder.is_dir():
            shutil.copytree(folder, corpus, dirs_exist_ok=True)
    # A loaded machine is no find: no limit of time for an input that it comes to.
    limits = (f"-runs={N_RUNS}", "-max_total_time=900", "-timeout=1200", f"-max_len={longest(name)}", "-len_control=0")
    done = subprocess.run(
        [tmp_path / "harness", *limits, "-seed=1", f"-artifact_prefix={tmp_path}/", corpus],
        cwd=ROOT, capture_output=True, check=False,
    )  # fmt: skip
    log = done.stderr.decode(errors="replace")
    assert done.returncode != 0, f"no find: {log[-1000:]}"
    assert list(tmp_path.glob("crash-*")), log[-1000:]
