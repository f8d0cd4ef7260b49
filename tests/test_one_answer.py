"""One answer: files of random models, run in every form, give the same bits in every step, and the same digest.

Sizes, formats and options are drawn. The reference is golden/; the forms are the plain programs, those over the engine,
and those of ONE_ANSWER: `NAME=COMMAND` behind `;`, with PROGRAM for the program's name, such as
`arm=qemu-aarch64 build/arm/PROGRAM`. With FULL=1 200 models.
"""

import os
import platform
import random
import re
import shlex
import shutil
import subprocess

import numpy as np
import pytest

from golden.attention_int8 import attention_int8
from golden.forward import forward
from golden.fp32 import digest
from golden.schemes import read_file
from golden.trace import Recorder, compare, read_trace
from golden.w8a8 import W8A8
from models.random_models import write_model
from tests.helpers import FULL, ROOT, run_export

FORMS = {
    "plain": "build/plain/PROGRAM",
    "engine": "./PROGRAM",
    "one thread": "./PROGRAM -j 1",
    "mapped": "./PROGRAM --mmap",
}
FORMS |= dict(form.split("=", 1) for form in os.environ.get("ONE_ANSWER", "").split(";") if form)
PORTABLE = ROOT / "build" / "portable" / platform.machine()


def forms_of(kind):
    """FORMS; of runq_gptq the program for any processor, too, on x86 also where there is neither AVX2 nor fma."""
    forms, portable = dict(FORMS), f"{PORTABLE}/PROGRAM"
    if kind == "gptq" and PORTABLE.exists():
        forms["portable"] = portable
        if platform.machine() == "x86_64" and shutil.which("qemu-x86_64"):
            forms["without AVX2"] = f"qemu-x86_64 -cpu Nehalem {portable}"
    return forms


def command(form, kind, *args):
    """The words of a form's command, with the program's arguments right behind it."""
    program = {"q8": "runq", "moe": "runq_moe"}.get(kind, f"runq_{kind}")
    words = shlex.split(form.replace("PROGRAM", program))
    at = 1 + next(i for i, word in enumerate(words) if word.endswith(program))
    return [*words[:at], *map(str, args), *words[at:]]


def drawn(seed):
    """The fields of a config.json, and the scheme with its options."""
    draw = random.Random(seed)
    scheme = draw.choice(["q8", "w8a8", "gptq", "moe", "moe"])
    head_dim = draw.choice([8, 12, 16, 20, 24, 32, 40, 64, 80, 128])
    n_kv_heads, per_kv = draw.choice([1, 2, 3]), draw.choice([1, 2, 3, 4, 8])
    n_heads = n_kv_heads * per_kv
    options, unit = [], 64
    if scheme == "q8":
        unit = draw.choice([32, 64, 96])
        options = ["--group-size", str(unit)]
    elif scheme == "w8a8":
        unit = draw.choice([32, 4, 4])
        options = ["--no-smooth", *(["--block", "32"] if unit == 32 else [])]
    elif scheme == "gptq":
        bits = draw.choice(["8", "6", "5", "4", "nl4", "2", "embed=8,attn=4,ffn=2,classifier=6"])
        options = ["--rtn", "--bits", bits, *(["--sparse", "2:4"] if bits == "4" and draw.random() < 0.5 else [])]
        unit = 128
    else:
        kind = draw.choice(["a8w8", "a8w4", "a8w4", "mxfp8", "ladder"])
        unit = {"a8w8": 4, "mxfp8": 32, "ladder": 128}.get(kind, 64)
        options = ["--no-smooth", "--format", kind]
        if kind == "a8w4":
            unit = draw.choice([32, 64, 128])
            options += ["--group", str(draw.choice([0, unit]))]
        if kind == "ladder":
            options = ["--format", kind, "--rtn", "--bits", draw.choice(["2", "4", "nl4", "5", "6", "8"])]
        elif kind != "a8w8" and draw.random() < 0.5:
            options[0] = "--pure"

    def size(least):
        return unit * -(-least // unit)

    while n_heads * head_dim % unit:  # o_proj reads whole groups
        n_heads += n_kv_heads
    if scheme != "moe" and draw.random() < 0.2:
        options.append("--rotate")
    fields = {
        "model_type": {"moe": "qwen3_moe"}.get(scheme, draw.choice(["llama", "qwen3"])),
        "num_hidden_layers": draw.choice([2, 3]), "vocab_size": draw.choice([64, 97, 300]),
        "max_position_embeddings": 512, "num_attention_heads": n_heads, "num_key_value_heads": n_kv_heads,
        "head_dim": head_dim, "hidden_size": size(draw.choice([64, 76, 140, 256])),
        "intermediate_size": size(draw.choice([76, 140, 192, 320])), "tie_word_embeddings": draw.random() < 0.5,
        "rms_norm_eps": draw.choice([1e-5, 1e-6]), "rope_theta": draw.choice([10000.0, 500000.0, 1000000.0]),
    }  # fmt: skip
    if scheme == "moe":
        n_experts = draw.choice([2, 6, 16, 128])
        fields |= {
            "num_experts": n_experts, "num_experts_per_tok": min(n_experts, draw.choice([1, 2, 3, 8])),
            "moe_intermediate_size": size(draw.choice([48, 64, 100])), "norm_topk_prob": draw.random() < 0.7,
            "decoder_sparse_step": 1, "mlp_only_layers": draw.choice([[], [0]]),
        }  # fmt: skip
    else:
        kinds = [None, {"rope_type": "linear", "factor": 2.0},
                 {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
                 {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                  "original_max_position_embeddings": 128}]  # fmt: skip
        fields["rope_scaling"] = draw.choice(kinds)
    return fields, scheme, options, draw.choice([3, 40, 131, 300])


def digest_of(done):
    return re.search(r"^digest +([0-9a-f]{16})$", done.stderr, re.M)[1]


@pytest.mark.parametrize("seed", range(200 if FULL else 12))
def test_every_form_gives_the_same_bits(tmp_path, seed):
    fields, kind, options, n_tokens = drawn(seed)
    write_model(tmp_path / "model", fields, seed)
    path = tmp_path / "m.bin"
    made = run_export(kind, tmp_path / "model", path, "--no-tokenizer", "--quiet", *options)
    assert made.returncode == 0, (made.stderr, fields, options)
    tokens = np.random.default_rng(seed).integers(0, fields["vocab_size"], n_tokens)
    more, scheme = [], read_file(path)
    if kind == "w8a8" and seed % 3 == 0:
        more, scheme = ["--attn", "int8"], W8A8(path, attention_int8)
    recorder = Recorder()
    logits = forward(scheme.config, scheme, recorder("tokens", tokens.astype(np.int32)), recorder)
    args = [path, "--ids", ",".join(map(str, tokens)), "-n", 1, "-t", 0, "--print-ids", "--digest", *more]
    for name, form in forms_of(kind).items():
        words = command(form, kind, *args, "--trace", tmp_path / "t")
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (name, done.stderr, fields, options)
        wrong = [(r.name, r.note) for r in compare(recorder.tensors, read_trace(tmp_path / "t")) if not r.ok]
        assert wrong == [], (name, fields, options)
        assert digest_of(done) == f"{digest(logits[-1:]):016x}", name


@pytest.mark.parametrize(("kind", "seed"), [("q8", 0), ("w8a8", 1), ("gptq", 2)])
def test_every_form_draws_the_same_text(tmp_path, kind, seed):
    """Also with a cache in fewer bits, over the engine: for any threads, chunks and guesses."""
    fields = drawn(seed)[0] | {"model_type": "llama", "hidden_size": 384, "intermediate_size": 384, "head_dim": 24,
                               "num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 300}  # fmt: skip
    write_model(tmp_path / "model", fields, seed)
    options = {"w8a8": ["--no-smooth"], "gptq": ["--rtn"]}.get(kind, [])
    assert (
        run_export(kind, tmp_path / "model", tmp_path / "m.bin", "--no-tokenizer", "--quiet", *options).returncode == 0
    )
    forms = forms_of(kind)

    def run(form, *more):
        args = [tmp_path / "m.bin", "--ids", "1,2,3,4,5", "-n", 90, "--print-ids", "--digest", *more]
        done = subprocess.run(command(form, kind, *args), cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout, digest_of(done)

    for sampling in (["-t", 0], ["-t", 0.7, "-s", 4], ["-t", 1, "-k", 12, "-s", 5], ["-t", 1.3, "-p", 0.7, "-s", 6]):
        found = {run(form, *sampling) for form in (*forms.values(), "./PROGRAM --lookup 5")}
        assert len(found) == 1, sampling
    others = [form for name, form in forms.items() if name not in FORMS]
    for kv in ("f16", "q8"):
        found = {
            run(form, "-t", 1, "-s", 1, "--kv", kv)
            for form in ("./PROGRAM -j 1", "./PROGRAM -j 3", "./PROGRAM --lookup 5", *others)
        }
        assert len(found) == 1, kv
