"""A reader who has typed `make` can type the commands of each page: tests/pages.py."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT
from tests.pages import check_markers, copy_made, is_run, run_page
from tests.served import main as served
from tests.test_docs import DOCUMENTS, blocks, read

GIT = shutil.which("git") and subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True).returncode == 0
LIMIT = 300  # seconds for a command; where the machine does nothing else they take a few


@pytest.mark.skipif(not GIT, reason="needs git, and a clone instead of a copy")
@pytest.mark.parametrize("page", DOCUMENTS, ids=str)
def test_quick_commands_run_after_make(page: Path, tmp_path: Path):
    complaints = check_markers(read(page))
    assert not complaints, "\n".join([f"{page}:", *complaints])
    if not any(is_run(block, ()) for block in blocks(read(page))):
        return
    done = run_page(read(page), copy_made(tmp_path), (), LIMIT)
    wrong = [f"{where}: {complaint}" for where, complaint, _ in done if complaint]
    assert not wrong, "\n".join([f"{page}:", *wrong])


@pytest.mark.parametrize(
    ("document", "complaint"),
    [
        ("```sh\ntrue\n```\n", ""),
        ("```sh\ntrue\nfalse\n```\n", "exit code 1"),
        ("```sh\nfalse | true\n```\n", "exit code 1"),
        ("```sh\ncat mine.bin\n```\n", "exit code 1\n    cat: mine.bin: No such file or directory"),
        ("<!-- exits: 0 1 -->\n```sh\ntrue\nfalse\n```\n", ""),
        ("<!-- exits: 1 1 -->\n```sh\ntrue\nfalse\n```\n", "exit code 0"),
        ("<!-- exits: 1 -->\n```sh\npython3 -c 'import nothing_of_this_name'\n```\n", "a traceback"),
        ("```sh\ntouch a\ntest -e a && \\\n    rm a\n```\nand\n```sh\n# as above\ntest ! -e a\n```\n", ""),
        ("```sh\nsleep 60\n```\n", "not done after 1 s"),
        ("```sh\nread -r line\n```\n", "exit code 1"),  # nobody is at the terminal
        ("<!-- needs: yours -->\n```sh\ncat mine.bin\n```\n", ""),
        ("<!-- needs: network -->\n```sh\ncat mine.bin\n```\n", "exit code 1"),
        ("<!-- needs: network yours -->\n```sh\ncat mine.bin\n```\n", ""),
    ],
)
def test_what_fails_is_noticed(document: str, complaint: str, tmp_path: Path):
    limit = 1 if "sleep" in document else LIMIT
    found = [text for _, text, _ in run_page(document, tmp_path, ("network",), limit) if text]
    assert (found[0] if found else "").startswith(complaint)
    assert bool(found) == bool(complaint)


@pytest.mark.parametrize(
    ("good", "drifted"),
    [
        ("<!-- needs: network -->\n```sh\ntrue\n```\n", "network~networks"),
        ("<!-- needs: network -->\n```sh\ntrue\n```\n", " network~"),
        ("<!-- needs: network -->\n```sh\ntrue\n```\n", "sh~text"),
        ("<!-- exits: 0 1 -->\n```sh\ntrue\nfalse\n```\n", "0 1~1"),
        ("<!-- exits: 1 -->\n```sh\nfalse\n```\n", "1~one"),
    ],
)
def test_markers_that_say_nothing(good: str, drifted: str):
    old, new = drifted.split("~")
    assert check_markers(good) == []
    assert len(check_markers(good.replace(old, new, 1))) == 1


# Without their packages, these say in one line what is missing and what to type. -S: a Python that has no packages.
TOOLS = {
    "tests.hf_fixtures": "numpy, safetensors, torch, transformers",
    "tests.hf_out_check": "numpy, ml_dtypes, jinja2, tokenizers, torch, transformers, compressed_tensors, accelerate",
    "tests.hf_in_check": "numpy, ml_dtypes, jinja2, tokenizers, torch, transformers, compressed_tensors, accelerate",
    "tests.hf_smollm2": "numpy, gguf, pytest, tokenizers, torch, transformers",
    "tests.imported_fixtures": "numpy, safetensors, torch, transformers, compressed_tensors, llmcompressor",
    "tests.llama_cpp_check": "numpy, ml_dtypes, jinja2, tokenizers, gguf, torch, transformers, accelerate, cyllama",
    "tests.mx_check": "numpy, torch, torchao",
    "tests.gptq_fixture": "numpy, torch, transformers",
    "tests.autoawq_fixture": "numpy, torch, accelerate",
    "tests.compressed_tensors_fixture": "torch, compressed_tensors",
    "tests.sampling_fixture": "numpy, torch, transformers",
    "models.train": "jinja2, tokenizers, torch, transformers",
    "formats.interpreter torch": "torch",
}


def test_serve_check_says_what_to_type_where_there_is_no_engine():
    done = subprocess.run([sys.executable, "-S", "-m", "tests.serve_check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == (
        f"{sys.executable} has no vllm, openai, jinja2, gguf, ml_dtypes. Please type: "
        "make serve-check PYTHON_SERVE=/path/to/python, with one that has (docs/serving.md)\n"
    )


def refused(command: list[str], missing: str):
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("make: ***")]
    assert done.returncode != 0
    assert len(lines) == 1, done.stderr
    assert f" has no {missing}. Please type: python3 -m venv .venv-torch && " in lines[0]
    assert "torch" in lines[0].split(" -r requirements.txt ")[1].split("; ")[0].split()


@pytest.mark.parametrize("tool", TOOLS)
def test_tools_say_which_packages_they_need(tool: str):
    refused([sys.executable, "-S", "-m", *tool.split()], TOOLS[tool])


def test_make_test_hf_says_which_packages_it_needs():
    refused(
        ["make", "--no-print-directory", "test-hf", f"PYTHON_HF='{sys.executable}' -S"],
        "numpy, safetensors, ml_dtypes, jinja2, tokenizers, torch, transformers, compressed_tensors, accelerate",
    )


def test_served_names_the_command_that_makes_its_files(tmp_path: Path):
    for name in ("tiny-llama.w8a8.bin", "tiny-llama.w8a8-static.bin", "tiny-qwen3.w8a8.bin"):
        (tmp_path / name).touch()
    with pytest.raises(SystemExit) as end:
        served(tmp_path)
    assert end.value.code == f"{tmp_path} has no tiny-qwen3.w8a8-static.bin. Please type: make test-models"
