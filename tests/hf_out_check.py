"""Loads what --hf-out writes with libraries that others wrote, on a CPU, and compares with the numpy reference.

    python -m tests.hf_out_check

Needs torch, transformers, compressed-tensors and accelerate; for AWQ also gptqmodel, for GPTQ gptqmodel and optimum,
without which these parts are left out. Both tiny models are exported, W8A8 with dynamic and with static scales, AWQ in
groups of 64 and 128, GPTQ with 4 bits in groups of 64; the mixture of experts in A8W8. For each directory:

    matrices   each quantized matrix of the loaded model, over the texts below. W8A8: its outputs against the product
               that the reference computes from the same inputs by compressed-tensors' rule (tests/served.py), relative
               by norm. AWQ and GPTQ: its weights, dequantized by gptqmodel's own code, have to be the reference's to
               the bit, as fp16.
               A8W8: transformers does not load int8 experts. compressed-tensors itself dequantizes each module, by what
               config.json says of it, and transformers loads the result, an unquantized Qwen3-MoE.
    logits     the largest difference over the largest logit, the median of the tokens' largest, and the share of
               tokens with the same most probable successor; against the reference with the library's rule, and
               against the program's own arithmetic

A code that the package rounds the other way changes logits, not the matrices' figures, which start anew from
the same inputs. So these decide; for logits there are bounds that a misplaced row or factor would exceed.
"""

import json
import shutil
import sys
import tempfile
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from formats.interpreter import need

if __name__ == "__main__":
    need("numpy", "ml_dtypes", "jinja2", "tokenizers", "torch", "transformers", "compressed_tensors", "accelerate")

import numpy as np

from export.awq import export_awq
from export.gptq import Options, export_gptq
from export.moe import export_moe
from export.w8a8 import export_w8a8
from formats.checkpoint import SPARSE, Checkpoint, Config
from formats.moe import MoeLayout
from golden.awq import AWQ, dequantize
from golden.channel_scaling import input_of
from golden.forward import F64, Scheme, forward, hf_name, in_halves
from golden.gptq import GPTQ, stands_for
from golden.moe import MoE
from golden.q8 import dequantize as dequantize_int8
from golden.trace import relative_error
from golden.w8a8 import W8A8
from tests.served import Served, as_compressed_tensors, unrounded

MODELS = Path(__file__).resolve().parent.parent / "models"
TINY = ("tiny-llama", "tiny-qwen3")
CALIBRATION = {"calibration": MODELS / "calibration.txt", "n_samples": 16, "seq_len": 256}
N_TEXTS, N_TOKENS = 5, 200  # beginnings of held-out stories
CLOSE = 1e-5  # of a product, by norm
FLIPS, SAME = 0.1, 0.95  # of logits where codes may round the other way; share of equal top tokens
HALF = 1e-2  # of logits where values are rounded to fp16
GROUP = 64  # of GPTQ
EXACT = 1e-4  # of logits where nothing is rounded but to fp32


def texts(hf_dir: Path) -> list[np.ndarray]:
    """Token ids as transformers makes them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(hf_dir)
    stories = (MODELS / "held_out.txt").read_text(encoding="utf-8").split("\n\n")
    return [np.array(tokenizer(story).input_ids[:N_TOKENS]) for story in stories[:N_TEXTS]]


def load(hf_dir: Path, **config_changes: str):
    """The model as transformers loads it, activations in fp32. config_changes: of its quantization_config."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(hf_dir)
    config.quantization_config |= config_changes
    return AutoModelForCausalLM.from_pretrained(
        hf_dir, config=config, dtype=torch.float32, attn_implementation="eager", device_map="cpu"
    ).eval()


def logits_and_products(model, samples: list[np.ndarray], names: list[str]):
    """The logits of each sample, (n, vocab_size), and inputs and outputs of the named modules over all samples."""
    import torch

    seen = {name: ([], []) for name in names}

    def keep(name: str):
        def hook(_module, inputs, output) -> None:
            seen[name][0].append(inputs[0][0].numpy())
            seen[name][1].append(output[0].numpy())

        return hook

    hooks = [model.get_submodule(name).register_forward_hook(keep(name)) for name in names]
    with torch.no_grad():
        logits = [model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0].numpy() for ids in samples]
    for hook in hooks:
        hook.remove()
    return logits, {name: (np.concatenate(x), np.concatenate(y)) for name, (x, y) in seen.items()}


class Figures(NamedTuple):
    """How two sets of logits differ."""

    largest: float  # difference, over the largest logit
    median: float  # of the tokens' largest differences, over the same
    same: float  # share of tokens with the same most probable successor


def compare(logits: list[np.ndarray], scheme: Scheme, config: Config, samples: list[np.ndarray]) -> Figures:
    """The logits of each sample against the reference's."""
    a, b = np.concatenate(logits), np.concatenate([forward(config, scheme, ids) for ids in samples])
    of_tokens = np.abs(a - b).max(axis=1) / np.abs(b).max()
    same = (a.argmax(axis=1) == b.argmax(axis=1)).mean()
    return Figures(float(of_tokens.max()), float(np.median(of_tokens)), float(same))


def report(title: str, matrices: str, figures: dict[str, Figures]) -> None:
    """One line on the matrices, one for each comparison of logits."""
    print(f"{title}: {matrices}")
    for name, f in figures.items():
        print(f"    logits against {name}: {f.largest:.1e}, median {f.median:.1e}, same top token {100 * f.same:.1f} %")


def layer_matrices(config: Config) -> list[str]:
    """Step names of the quantized matrices."""
    parts = (
        "attn.q_proj",
        "attn.k_proj",
        "attn.v_proj",
        "attn.o_proj",
        "ffn.gate_proj",
        "ffn.up_proj",
        "ffn.down_proj",
    )
    return [f"layers.{i}.{part}" for i in range(config.n_layers) for part in parts]


def check_w8a8(name: str, static: bool, folder: Path) -> bool:
    """Whether a compressed-tensors directory is what the reference says."""
    import torch

    source, hf_dir = MODELS / name, folder / "hf"
    export_w8a8(source, folder / "m.bin", **CALIBRATION, static=static, hf_out=hf_dir, progress=False)
    reference, checkpoint, samples, model = W8A8(folder / "m.bin"), Checkpoint(source), texts(hf_dir), load(hf_dir)
    config = reference.config
    steps = {hf_name(config, step).removesuffix(".weight"): step for step in layer_matrices(config)}
    n_int8 = sum(module.weight.dtype == torch.int8 for module in model.modules() if isinstance(module, torch.nn.Linear))
    logits, products = logits_and_products(model, samples, list(steps))

    worst = 0.0
    for module, (x, y) in products.items():
        step = steps[module]
        weight = in_halves(config, step, dequantize_int8(reference.matrix(step))).astype(F64)
        static_scale = reference.activation_scales.get(input_of(step))
        expected = as_compressed_tensors(x, static_scale).astype(F64) @ weight.T
        worst = max(worst, relative_error(expected, y))

    kind = "static" if static else "dynamic"
    figures = {
        "the reference with compressed-tensors' rule": compare(
            logits, Served(reference, checkpoint, as_compressed_tensors), config, samples
        ),
        "runq_w8a8's arithmetic": compare(logits, reference, config, samples),
    }
    report(f"{name}, W8A8 {kind}", f"{n_int8} matrices in int8, each product within {worst:.1e}", figures)
    by_rule, by_program = figures.values()
    close = by_rule.largest <= FLIPS and by_rule.same >= SAME and by_program.same >= SAME
    return n_int8 == len(steps) and worst <= CLOSE and close


def check_awq(name: str, group_size: int, folder: Path) -> bool:
    """Whether an AutoAWQ directory is what the reference says."""
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    source, hf_dir = MODELS / name, folder / "hf"
    export_awq(source, folder / "m.bin", **CALIBRATION, group_size=group_size, hf_out=hf_dir, progress=False)
    # The plain kernel; others are compiled when they are first used, and round in other places.
    reference, samples, model = AWQ(folder / "m.bin"), texts(hf_dir), load(hf_dir, backend="torch_awq")
    config, equal = reference.config, 0
    steps = {hf_name(config, step).removesuffix(".weight"): step for step in layer_matrices(config)}
    for module, step in steps.items():
        loaded = model.get_submodule(module)
        weight = dequantize_gemm(loaded.qweight, loaded.qzeros, loaded.scales.half(), 4, group_size).numpy()
        equal += weight.tobytes() == dequantize(reference.matrix(step)).tobytes()
    logits, _ = logits_and_products(model, samples, [])
    figures = {"the reference": compare(logits, reference, config, samples)}
    report(f"{name}, AWQ, groups of {group_size}", f"{equal} of {len(steps)} matrices equal to the bit", figures)
    return equal == len(steps) and figures["the reference"].largest <= HALF


def check_gptq(name: str, bits: int, folder: Path) -> bool:
    """Whether a GPTQ directory is what the reference says. An engine does not round activations, runq_gptq does."""
    source, hf_dir = MODELS / name, folder / "hf"
    export_gptq(
        source, folder / "m.bin", **CALIBRATION, bits={"attn": bits, "ffn": bits}, group=GROUP,
        options=Options(symmetric=False, first_zero=1), hf_out=hf_dir, progress=False,
    )  # fmt: skip
    reference, samples, model = GPTQ(folder / "m.bin"), texts(hf_dir), load(hf_dir, backend="gptq_torch")
    config, equal = reference.config, 0
    steps = {hf_name(config, step).removesuffix(".weight"): step for step in layer_matrices(config)}
    for module, step in steps.items():
        weight = model.get_submodule(module).dequantize_weight().T.contiguous().numpy()
        expected = in_halves(config, step, stands_for(reference.stored(step))).astype(np.float16)
        equal += weight.tobytes() == expected.tobytes()
    logits, _ = logits_and_products(model, samples, [])
    figures = {
        "the reference with activations as they are": compare(
            logits, Served(reference, Checkpoint(source), unrounded), config, samples
        ),
        "runq_gptq's arithmetic": compare(logits, reference, config, samples),
    }
    report(f"{name}, GPTQ, {bits} bits", f"{equal} of {len(steps)} matrices equal to the bit", figures)
    half, by_program = figures.values()
    return equal == len(steps) and half.largest <= HALF and by_program.same >= SAME


def decompress(hf_dir: Path, out: Path) -> int:
    """Writes what compressed-tensors makes of a directory, without quantization; returns the number of int8 matrices.

    A module is quantized if it has a scale; that compressed-tensors would say so too is checked.
    """
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.utils import is_match
    from safetensors.torch import load_file, save_file

    shutil.copytree(hf_dir, out)
    config = json.loads((out / "config.json").read_text())
    found = QuantizationConfig.model_validate(config.pop("quantization_config"))
    (out / "config.json").write_text(json.dumps(config))
    (scheme,) = found.config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(found.format)
    tensors, plain, n_int8 = load_file(hf_dir / "model.safetensors"), {}, 0
    for name in [name for name in tensors if name.endswith(".weight")]:
        module = name.removesuffix(".weight")
        parts = {
            part: tensors[f"{module}.{part}"] for part in ("weight", "weight_scale") if f"{module}.{part}" in tensors
        }
        linear = torch.nn.Linear(1, 1) if name.endswith(("_proj.weight", ".gate.weight", "lm_head.weight")) else None
        if (linear is not None and is_match(module, linear, scheme.targets, found.ignore)) != (len(parts) == 2):
            raise ValueError(f"{name} has {sorted(parts)}, not what quantization_config says")
        n_int8 += len(parts) == 2
        plain[name] = compressor.decompress(parts, scheme)["weight"] if len(parts) == 2 else parts["weight"]
    save_file(plain, out / "model.safetensors")
    return n_int8


def check_moe(name: str, layout: MoeLayout, folder: Path) -> bool:
    """Whether a compressed-tensors directory of a mixture of experts is what the reference says."""
    import torch
    from transformers import AutoModelForCausalLM

    source, hf_dir = MODELS / name, folder / "hf"
    export_moe(source, folder / "m.bin", layout, alpha=0.5, **CALIBRATION, hf_out=hf_dir, progress=False)
    n_int8 = decompress(hf_dir, folder / "plain")
    model = AutoModelForCausalLM.from_pretrained(folder / "plain", dtype=torch.float32, attn_implementation="eager")
    reference, checkpoint, samples = MoE(folder / "m.bin"), Checkpoint(source, archs=SPARSE), texts(hf_dir)
    config = reference.config
    logits, _ = logits_and_products(model.eval(), samples, [])
    figures = {
        "the reference with activations as they are": compare(
            logits, Served(reference, checkpoint, unrounded), config, samples
        ),
        "runq_moe's arithmetic": compare(logits, reference, config, samples),
    }
    report(f"{name}, A8W8", f"{n_int8} matrices in int8", figures)
    exact, by_program = figures.values()
    assert config.moe is not None
    sparse = sum(config.has_experts(i) for i in range(config.n_layers))
    expected = 4 * config.n_layers + 3 * (config.n_layers - sparse + sparse * config.moe.n_experts)
    return n_int8 == expected and exact.largest <= EXACT and by_program.same >= SAME


def main() -> int:
    """See the module's docstring. Exit code 1 if something is not as it should be."""
    warnings.simplefilter("ignore")
    checks = [(check_w8a8, name, static) for name in TINY for static in (False, True)]
    checks.append((check_moe, "tiny-qwen3-moe", MoeLayout("a8w8", 0)))
    if find_spec("gptqmodel"):
        checks += [(check_awq, name, group_size) for name in TINY for group_size in (64, 128)]
    else:
        print("AWQ is left out: there is no gptqmodel")
    if find_spec("gptqmodel") and find_spec("optimum"):
        checks += [(check_gptq, name, 4) for name in TINY]
    else:
        print("GPTQ is left out: there is no gptqmodel or no optimum")
    right = True
    for check, name, variant in checks:
        with tempfile.TemporaryDirectory() as folder:
            right = check(name, variant, Path(folder)) and right
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
