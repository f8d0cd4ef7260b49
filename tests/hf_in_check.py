"""Imports what llmcompressor quantizes, and compares the model files with transformers and compressed-tensors.

    python -m tests.hf_in_check [DIR [KIND...]]

Needs torch, transformers, compressed-tensors and llmcompressor (tested: 0.14.0.1, which takes transformers up to 5.17),
and `make runq_w8a8 runq_gptq`. DIR is an unquantized Hugging Face directory, such as `python -m export.dequantized`
writes; without it the tiny models are taken. llmcompressor makes of each a directory of every kind of KINDS, or of
those that are named, in bf16. For each directory:

    matrices   the package's own code unpacks and dequantizes every matrix of the layers. What a model file stands for
               has to be the same to the bit, with rows of q and k back in halves and scales widened to fp32.
    logits     of the dequantized model, in transformers, against the reference that has the file's matrices, and
               embedding, classifier and activations as they are (tests/served.py); and against the program's own
               arithmetic. As in tests/hf_out_check.py. W8A8 is also loaded as it is, with activations quantized, and
               compared with the reference that rounds them as the package does. There a code may round the other way,
               which in a large model moves all logits; so they are only printed where a DIR is given.
    ids        greedy continuations of the dequantized model, each id against the reference's choice behind the same
               prefix; and how many the program itself has in common with them before the first that differs
"""

import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from formats.interpreter import need

if __name__ == "__main__":
    need("numpy", "ml_dtypes", "jinja2", "tokenizers", "torch", "transformers", "compressed_tensors", "accelerate")

import numpy as np

from export.gptq import export_gptq
from export.w8a8 import import_w8a8, is_int8
from formats.checkpoint import Checkpoint
from formats.foreign import storage_of
from formats.packing import INT_QUANTIZED, Packing
from golden.forward import forward, hf_name, in_halves
from golden.gptq import GPTQ, stands_for
from golden.q8 import dequantize
from golden.w8a8 import W8A8
from tests.hf_out_check import (
    EXACT,
    FLIPS,
    MODELS,
    N_TEXTS,
    N_TOKENS,
    SAME,
    TINY,
    compare,
    layer_matrices,
    report,
    texts,
)
from tests.served import Served, as_compressed_tensors, unrounded

ROOT = MODELS.parent
N_SAMPLES, SEQ_LEN = 8, 256
OF_DIR = (2, 100)  # texts and tokens, for which numpy takes a minute or more with a real model
N_PROMPT, N_CONTINUED = 20, 40  # ids of a text that are given, and that follow
QUANTIZED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
STATIC = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False}


def weights(bits: int, group: int | None, symmetric: bool = True) -> dict[str, Any]:
    strategy = "group" if group else "channel"
    return {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy, "group_size": group}


# How each kind of directory is quantized: None is llmcompressor's own preset, otherwise weights and activations.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any] | None] | None] = {
    "w8a8": None,
    "w8a8-static": (weights(8, None), STATIC),
    "w4a16": (weights(4, 64), None),
    "w4a16-g32": (weights(4, 32), None),
    "w4a16-asym": (weights(4, 64, symmetric=False), None),
    "w4a16-channel": (weights(4, None), None),
    "w8a16": (weights(8, None), None),
}
CALIBRATED = ("w8a8-static", "w4a16")


def quantize(source: Path, kind: str, out: Path, tokens: np.ndarray) -> None:
    """Writes `out`, a checkpoint of one of KINDS. tokens: ids to calibrate with, (n, length); w4a16 is by GPTQ."""
    import torch
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    modifier = GPTQModifier if kind == "w4a16" else QuantizationModifier
    if (scheme := KINDS[kind]) is None:
        recipe = modifier(targets="Linear", scheme="W8A8", ignore=["lm_head"])
    else:
        group = {"targets": ["Linear"], "weights": scheme[0], "input_activations": scheme[1]}
        recipe = modifier(config_groups={"group_0": group}, ignore=["lm_head"])
    calibration = {}
    if kind in CALIBRATED:
        columns = {"input_ids": tokens.tolist(), "attention_mask": np.ones_like(tokens).tolist()}
        calibration = {"dataset": Dataset.from_dict(columns), "max_seq_length": tokens.shape[1],
                       "num_calibration_samples": len(tokens),
                       # It asks for one, and has no use for it: these are ids.
                       "tokenizer": AutoTokenizer.from_pretrained(MODELS / TINY[0])}  # fmt: skip
    oneshot(model=model, recipe=recipe, **calibration)
    model.save_pretrained(out, save_compressed=True)
    copy_tokenizer(source, out)


def copy_tokenizer(source: Path, out: Path) -> None:
    """The files that a package which saves a model leaves out."""
    for pattern in ("tokenizer*", "generation_config.json"):
        for file in source.glob(pattern):
            (out / file.name).write_bytes(file.read_bytes())


def imported(hf_dir: Path, out: Path) -> tuple[W8A8 | GPTQ, Packing]:
    """The model file that the exporter makes of a directory of any kind."""
    storage = storage_of(hf_dir)
    assert storage is not None
    packing = storage.form("")
    assert isinstance(packing, Packing)
    if not is_int8(hf_dir):
        export_gptq(hf_dir, out, progress=False)
        return GPTQ(out), packing
    text = {"calibration": MODELS / "calibration.txt", "n_samples": N_SAMPLES, "seq_len": SEQ_LEN}
    import_w8a8(hf_dir, out, **(text if packing.static else {}), progress=False)
    return W8A8(out), packing


def dequantized(hf_dir: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Name and values, fp32, of each matrix that has a scale, as the package compressed-tensors dequantizes it."""
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.nvfp4 import base as nvfp4
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.utils import match_name
    from safetensors.torch import load_file

    config = json.loads((hf_dir / "config.json").read_text())["quantization_config"]
    found = QuantizationConfig.model_validate(config)
    tensors = load_file(hf_dir / "model.safetensors")
    for name in [name for name in tensors if name.endswith(".weight_scale")]:
        module = name.removesuffix(".weight_scale")
        schemes = found.config_groups.values()
        scheme = next(s for s in schemes for target in s.targets if target == "Linear" or match_name(module, target))
        compressor = BaseCompressor.get_value_from_registry(scheme.format or found.format)
        parts = {key.removeprefix(f"{module}."): t for key, t in tensors.items() if key.startswith(f"{module}.")}
        if parts["weight_scale"].is_floating_point() and parts["weight_scale"].element_size() > 1:
            parts["weight_scale"] = parts["weight_scale"].to(torch.float32)
        nvfp4.unpack_fp4_from_uint8 = partial(unpack_fp4_from_uint8, dtype=torch.float32)  # bf16 would be rounded
        yield f"{module}.weight", compressor.decompress(parts, scheme)["weight"].float().numpy()


def equal_matrices(hf_dir: Path, model: W8A8 | GPTQ) -> int:
    """How many matrices of the layers stand for the same numbers, to the bit."""
    theirs, equal = dict(dequantized(hf_dir)), 0
    for step in layer_matrices(model.config):
        ours = dequantize(model.matrix(step)) if isinstance(model, W8A8) else stands_for(model.stored(step))
        equal += np.array_equal(in_halves(model.config, step, ours), theirs[hf_name(model.config, step)])
    return equal


def write_dequantized(hf_dir: Path, out: Path) -> None:
    """Writes the plain model that a directory stands for, as the package dequantizes it, in fp32."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(hf_dir / "model.safetensors")
    plain = {name: value.float() for name, value in tensors.items() if name.split(".")[-2] not in QUANTIZED}
    plain |= {name: torch.from_numpy(value) for name, value in dequantized(hf_dir)}
    out.mkdir()
    save_file(plain, out / "model.safetensors", {"format": "pt"})
    config = json.loads((hf_dir / "config.json").read_text())
    del config["quantization_config"]
    (out / "config.json").write_text(json.dumps(config))


def loaded(hf_dir: Path) -> Any:
    """The directory as transformers loads it, in fp32."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        hf_dir, dtype=torch.float32, attn_implementation="eager", device_map="cpu"
    ).eval()


def logits_of(model: Any, samples: list[np.ndarray]) -> list[np.ndarray]:
    import torch

    with torch.no_grad():
        return [model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0].float().numpy() for ids in samples]


def continued(model: Any, prompt: list[int]) -> list[int]:
    """N_CONTINUED ids, greedy, whatever ends the text."""
    import torch

    with torch.no_grad():
        out = model.generate(torch.tensor([prompt]), max_new_tokens=N_CONTINUED, min_new_tokens=N_CONTINUED,
                             do_sample=False, repetition_penalty=1.0, eos_token_id=None)  # fmt: skip
    return out[0, len(prompt) :].tolist()


def program_ids(file: Path, program: str, prompt: list[int]) -> list[int]:
    command = [ROOT / program, file, "--ids", ",".join(map(str, prompt)), "-n", N_CONTINUED, "-t", "0", "--print-ids"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
    return [int(i) for i in done.stdout.split(",")]


def in_common(a: list[int], b: list[int]) -> int:
    """Ids before the first that differs."""
    return next((i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), min(len(a), len(b)))


def check(title: str, hf_dir: Path, folder: Path, size: tuple[int, int] = (N_TEXTS, N_TOKENS)) -> bool:
    """Whether the model file of a directory is what the two libraries say. size: texts, and tokens of each."""
    reference, packing = imported(hf_dir, folder / "m.bin")
    config, checkpoint = reference.config, Checkpoint(hf_dir, packing)
    samples = [ids[: size[1]] for ids in texts(hf_dir)[: size[0]]]
    n_matrices, equal = len(layer_matrices(config)), equal_matrices(hf_dir, reference)

    write_dequantized(hf_dir, folder / "plain")
    model, rule = loaded(folder / "plain"), Served(reference, checkpoint, unrounded)
    logits = logits_of(model, samples)
    int8 = packing.method == INT_QUANTIZED
    program = "runq_w8a8" if int8 else "runq_gptq"
    exact = compare(logits, rule, config, samples)
    by_program = compare(logits, reference, config, samples)
    figures = {"the reference with activations as they are": exact, f"{program}'s arithmetic": by_program}
    close = exact.largest <= EXACT and exact.same >= SAME
    if int8:
        as_library = Served(reference, checkpoint, as_compressed_tensors)
        rounded = compare(logits_of(loaded(hf_dir), samples), as_library, config, samples)
        figures["the reference with compressed-tensors' rule, activations quantized"] = rounded
        close = close and (size == OF_DIR or (rounded.largest <= FLIPS and rounded.same >= SAME))
    close = close and (size == OF_DIR or by_program.same >= SAME)
    same, chosen, together = 0, 0, []
    for ids in samples:
        prompt = ids[:N_PROMPT].tolist()
        theirs = continued(model, prompt)
        ours = forward(config, rule, np.array(prompt + theirs[:-1]))[len(prompt) - 1 :].argmax(axis=1)
        same, chosen = same + int((ours == theirs).sum()), chosen + len(theirs)
        together.append(in_common(program_ids(folder / "m.bin", program, prompt), theirs))
    report(title, f"{equal} of {n_matrices} matrices equal to the bit", figures)
    print(f"    greedy ids: the reference chooses {same} of {chosen}; {program} has the first {together} of "
          f"{N_CONTINUED} in common", flush=True)  # fmt: skip
    return equal == n_matrices and close and same == chosen


def calibration_tokens(hf_dir: Path) -> np.ndarray:
    """Ids to calibrate with, (N_SAMPLES, SEQ_LEN)."""
    from transformers import AutoTokenizer

    text = (MODELS / "calibration.txt").read_text(encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(hf_dir)(text).input_ids
    return np.array(ids[: N_SAMPLES * SEQ_LEN]).reshape(N_SAMPLES, SEQ_LEN)


def main() -> int:
    """See the module's docstring. Exit code 1 if something is not as it should be."""
    if not find_spec("llmcompressor"):
        print("what llmcompressor makes is left out: there is no llmcompressor")
        return 0
    warnings.simplefilter("ignore")
    right = True
    size = OF_DIR if sys.argv[1:] else (N_TEXTS, N_TOKENS)
    for source in map(Path, sys.argv[1:2] or [MODELS / name for name in TINY]):
        tokens = calibration_tokens(source)
        for kind in sys.argv[2:] or KINDS:
            with tempfile.TemporaryDirectory() as folder:
                quantize(source, kind, Path(folder) / "hf", tokens)
                right = check(f"{source.name}, {kind}", Path(folder) / "hf", Path(folder), size) and right
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
