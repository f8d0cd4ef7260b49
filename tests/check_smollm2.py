"""Every program on a real model, SmolLM2, against golden/real: `make test-real`.

The name keeps it out of `make test`, which needs no network. Files that are calibrated depend on the text, which is the
documentation of the Python at hand: where a file is not the one behind its goldens, its tests are skipped and say so.
"""

import json
import os
import subprocess
import zlib

import numpy as np
import pytest

from export.tokenizer import tokenizer_section
from formats.source import open_gguf
from golden.perplexity import load_tokenizer
from golden.real import CHAT, MODEL, PROMPTS, QUESTIONS
from golden.schemes import SCHEMES
from golden.trace import read_trace
from tests.helpers import ROOT
from tests.test_tokenizer import FIXED_STRINGS, Pair, random_strings, tool

__all__ = ["tool"]  # a fixture
FILES = ROOT / "build" / "models"
GGUF = FILES / f"{MODEL}.gguf"
REFERENCE = {variant: reference for reference in SCHEMES.values() for variant in reference.variants}
GOLDENS = {path.name.split(".")[1]: path for path in sorted((ROOT / "golden" / "real").glob("*.json"))}
VARIANTS = [variant for variant in GOLDENS if variant != "fp32"]
# Leads below these are not determined: rounding of codes, and in AWQ of fp16, moves logits by as much.
UNCLEAR = {"q8": 5e-3, "w8a8": 5e-3, "awq": 2e-2}
NORM_TOLERANCE = {"q8": 5e-3, "w8a8": 5e-3, "awq": 1e-2}


def golden(variant):
    """The goldens and the file of a variant; skips the test where the file is another."""
    expected, file = json.loads(GOLDENS[variant].read_text()), FILES / f"{MODEL}.{variant}.bin"
    if zlib.crc32(file.read_bytes()) != expected["file_crc32"]:
        assert variant != "q8"  # depends on nothing but the GGUF file
        pytest.skip(f"{file.name} is not the file of the goldens: this Python's documentation is another text")
    return expected, file


def run(variant, file, *args):
    command = [ROOT / REFERENCE[variant].format.program, file, "-t", "0", *args]
    environment = {"OMP_WAIT_POLICY": "passive", **os.environ}
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True, env=environment).stdout


def check_ids(variant, generation, printed):
    """Equal up to the first id whose lead does not determine it."""
    found = [int(i) for i in printed.split(",")]
    limit = UNCLEAR[REFERENCE[variant].format.scheme]
    n = next((i for i, lead in enumerate(generation["leads"]) if lead < limit), len(generation["leads"]))
    assert found[:n] == generation["new_ids"][:n]
    return n


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_ids_are_the_goldens(variant):
    """All of them; a program that is emulated on a CPU takes seconds for an id, so 8 of one prompt."""
    expected, file = golden(variant)
    emulated = not (ROOT / f"{REFERENCE[variant].format.program}.cpp").is_file()
    clear = 0
    for g in expected["generations"][-1:] if emulated else expected["generations"]:
        ids, n = ",".join(map(str, g["prompt_ids"])), 8 if emulated else len(g["new_ids"])
        g = g | {"new_ids": g["new_ids"][:n], "leads": g["leads"][:n]}
        clear += check_ids(variant, g, run(variant, file, "--ids", ids, "-n", n, "--print-ids"))
    assert clear > (1 if emulated else 15)


@pytest.mark.parametrize("variant", VARIANTS)
def test_norms_of_every_step_are_the_goldens(tmp_path, variant):
    expected, file = golden(variant)
    ids = ",".join(map(str, expected["generations"][0]["prompt_ids"]))
    run(variant, file, "--ids", ids, "-n", 1, "--trace", tmp_path / "trace")
    trace, limit = read_trace(tmp_path / "trace"), NORM_TOLERANCE[REFERENCE[variant].format.scheme]
    floats = {n for n, v in trace.items() if v.dtype.kind == "f" and not n.endswith(".s")}
    assert floats == expected["norms"].keys()
    for name, norm in expected["norms"].items():
        assert np.linalg.norm(trace[name].astype(float)) == pytest.approx(norm, rel=limit), name


def test_programs_make_the_prompts_themselves():
    """Text and chat turns through the program's own tokenizer and template: the same ids come out."""
    expected, file = golden("q8")
    for i, question in enumerate(QUESTIONS):
        assert check_ids("q8", expected["generations"][i], run("q8", file, "-m", "chat", "-i", question, "-n", 48,
                                                               "--print-ids")) > 0  # fmt: skip
    for g in expected["generations"][len(QUESTIONS) :]:
        assert check_ids("q8", g, run("q8", file, "-i", g["prompt"], "-n", 48, "--print-ids")) > 0


def test_prompts_are_those_of_the_chat_template():
    import jinja2

    files, tokenizer = open_gguf(GGUF).tokenizer_files(), load_tokenizer(GGUF)
    template = jinja2.Environment().from_string(files.config["chat_template"])
    for variant, prompt in ((v, p) for v in GOLDENS for p in range(len(PROMPTS))):
        g = json.loads(GOLDENS[variant].read_text())["generations"][prompt]
        assert g["prompt"] == PROMPTS[prompt]
        assert g["prompt_ids"] == tokenizer.encode(g["prompt"]).ids
    for question in QUESTIONS:
        message = [{"role": "user", "content": question}]
        assert template.render(messages=message, add_generation_prompt=True) == CHAT.format(question)


def test_vocabulary_is_exact(tmp_path, tool):
    files = open_gguf(GGUF).tokenizer_files()
    (tmp_path / "tokenizer.json").write_text(json.dumps(files.tokenizer))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(files.config))
    pair = Pair(tmp_path, tmp_path, tool)
    assert pair.section.read_bytes() == tokenizer_section(GGUF, pair.vocab_size)
    added = [token["content"] for token in files.tokenizer["added_tokens"]]
    pair.check(FIXED_STRINGS + random_strings(7, 20000, added))
