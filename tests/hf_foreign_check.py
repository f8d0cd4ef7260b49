"""Reads what other packages quantize, and compares the weights and the logits with what those packages make of it.

    python -m tests.hf_foreign_check [KIND...]

Needs torch, transformers and compressed-tensors; kinds whose package is missing are left out: bitsandbytes, auto-round,
gptqmodel, llmcompressor and modelopt. Each quantizes a tiny model, or of the FP8 blocks of official Qwen3 directories,
which transformers only makes on a GPU, a few lines here. For each kind:

    matrices   the package's own code dequantizes every matrix. What the exporters read has to be the same to the bit,
               rounded to fp16 where that code computes in fp16
    logits     of transformers on those weights, in fp32, against the reference on the weights that are read; and the
               perplexity of either, and of the program on a file that is exported: of codes that are kept, or Q8
"""

import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from formats.interpreter import need

if __name__ == "__main__":
    need("numpy", "ml_dtypes", "jinja2", "tokenizers", "torch", "transformers", "compressed_tensors")

import numpy as np
from packaging.version import Version

from formats.checkpoint import DENSE, SPARSE
from formats.source import open_model
from golden.forward import Fp32, forward
from tests.hf_in_check import copy_tokenizer, dequantized
from tests.hf_out_check import EXACT, HALF, MODELS, SAME, compare, texts

ROOT = MODELS.parent
Matrices = dict[str, Any]  # torch tensors in fp32 by Hugging Face's names


class Kind(NamedTuple):
    """How a directory is made, and what its matrices stand for by the package's own code."""

    package: str
    make: Callable[[Path, Path], None]  # of a source, a directory
    matrices: Callable[[Path], Iterator[tuple[str, np.ndarray]]]
    scheme: str = "q8"
    source: str = "tiny-qwen3"


def plain(source: Path, **options: Any) -> Any:
    """The model as transformers loads it."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(source, device_map="cpu", **({"dtype": torch.bfloat16} | options))


# ---- bitsandbytes


def bitsandbytes(**options: Any) -> Callable[[Path, Path], None]:
    def make(source: Path, out: Path) -> None:
        from transformers import BitsAndBytesConfig

        plain(source, quantization_config=BitsAndBytesConfig(**options)).save_pretrained(out)

    return make


def of_bitsandbytes(hf_dir: Path) -> Iterator[tuple[str, np.ndarray]]:
    import torch
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    for name, module in plain(hf_dir, dtype=torch.float32).named_modules():
        if isinstance(module, Linear4bit):
            module.weight.quant_state.dtype = torch.float32  # not rounded to that of the model
            yield f"{name}.weight", dequantize_4bit(module.weight.data, module.weight.quant_state).numpy()
        elif isinstance(module, Linear8bitLt):
            scales = (module.weight.SCB if module.weight.SCB is not None else module.state.SCB)[:, None]
            yield f"{name}.weight", (module.weight.data.float() * (scales * 7.874015718698502e-3)).numpy()


# ---- FP8 of official Qwen3 directories


def fp8(block: tuple[int, int]) -> Callable[[Path, Path], None]:
    def make(source: Path, out: Path) -> None:
        import torch
        from safetensors.torch import load_file, save_file

        tensors = load_file(source / "model.safetensors")
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            rows, columns = tensors[name].shape
            blocks = tensors[name].float().reshape(rows // block[0], block[0], columns // block[1], block[1])
            scales = (blocks.abs().amax((1, 3)) / 448).to(torch.bfloat16)
            codes = blocks / scales.float()[:, None, :, None]
            tensors[name] = codes.reshape(rows, columns).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scales
        out.mkdir()
        save_file(tensors, out / "model.safetensors", {"format": "pt"})
        config = json.loads((source / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                                         "weight_block_size": list(block)}  # fmt: skip
        (out / "config.json").write_text(json.dumps(config))

    return make


def of_transformers_fp8(hf_dir: Path) -> Iterator[tuple[str, np.ndarray]]:
    import torch
    from transformers import FineGrainedFP8Config

    model = plain(hf_dir, dtype=torch.float32, quantization_config=FineGrainedFP8Config(dequantize=True))
    for name, value in model.state_dict().items():
        if name.endswith("_proj.weight"):
            yield name, value.numpy()


# ---- compressed-tensors, by llmcompressor


def llmcompressor(ignore: tuple[str, ...] = (), **recipe: Any) -> Callable[[Path, Path], None]:
    """recipe: of QuantizationModifier; with `actorder`, of GPTQModifier. Of some, activations are to be calibrated."""

    def make(source: Path, out: Path) -> None:
        from datasets import Dataset
        from llmcompressor import oneshot
        from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier

        modifier = GPTQModifier if "actorder" in recipe else QuantizationModifier
        kinds = {} if "config_groups" in recipe else {"targets": "Linear"}
        model = plain(source)
        columns = {"input_ids": [ids[:128].tolist() for ids in texts(source)]}
        oneshot(model=model, recipe=modifier(ignore=["lm_head", *ignore], **kinds, **recipe),
                dataset=Dataset.from_dict(columns), num_calibration_samples=len(columns["input_ids"]),
                max_seq_length=128, tokenizer=tokenizer(source))  # fmt: skip
        model.save_pretrained(out, save_compressed=True)

    return make


def tokenizer(source: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(source)


def groups(**bits: int) -> dict[str, Any]:
    """A group of matrices, by a part of their names, for each number of bits."""
    return {
        part: {"targets": [f"re:.*{part}.*"], "weights": {"num_bits": n, "type": "int", "symmetric": True,
                                                          "strategy": "group", "group_size": 64}}
        for part, n in bits.items()
    }  # fmt: skip


# ---- AutoRound, GPTQModel, Model Optimizer


def auto_round(packing: str, scheme: str = "W4A16", **options: Any) -> Callable[[Path, Path], None]:
    def make(source: Path, out: Path) -> None:
        import torch
        from auto_round import AutoRound

        quantizer = AutoRound(plain(source, dtype=torch.float32), tokenizer(source), scheme=scheme, iters=0,
                              group_size=64, device_map="cpu", disable_opt_rtn=True, **options)  # fmt: skip
        quantizer.quantize_and_save(str(out), format=f"auto_round:{packing}")
        (made,) = out.iterdir()  # a folder with a name of its own
        for file in made.iterdir():
            file.rename(out / file.name)
        made.rmdir()

    return make


def of_modules(hf_dir: Path) -> Iterator[tuple[str, np.ndarray]]:
    """What the modules make of a unit matrix: their weights, in the type in which they compute."""
    import torch

    for name, module in plain(hf_dir, dtype=torch.float32).named_modules():
        if hasattr(module, "qweight"):
            with torch.no_grad():
                n_in = module.infeatures if hasattr(module, "infeatures") else module.in_features
                yield f"{name}.weight", module(torch.eye(n_in)).T.float().numpy()


def gptqmodel(**options: Any) -> Callable[[Path, Path], None]:
    def make(source: Path, out: Path) -> None:
        os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # it wants more than one
        from gptqmodel import GPTQModel, QuantizeConfig

        config = QuantizeConfig(group_size=64, pack_impl="original", **options)
        model = GPTQModel.load(str(source), config, device="cpu")
        model.quantize([{"input_ids": [ids.tolist()], "attention_mask": [[1] * len(ids)]} for ids in texts(source)])
        model.save(str(out))

    return make


def of_gptqmodel(hf_dir: Path) -> Iterator[tuple[str, np.ndarray]]:
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
    import torch
    from gptqmodel import BACKEND, GPTQModel

    # transformers does not follow `dynamic`.
    loaded = GPTQModel.load(str(hf_dir), device="cpu", backend=BACKEND.GPTQ_TORCH, dtype=torch.float16)
    for name, module in loaded.model.named_modules():
        if hasattr(module, "dequantize_weight"):
            yield f"{name}.weight", module.dequantize_weight().T.float().numpy()


def modelopt(config: str) -> Callable[[Path, Path], None]:
    def make(source: Path, out: Path) -> None:
        import modelopt.torch.quantization as mtq
        import torch
        from modelopt.torch.export import export_hf_checkpoint

        model = plain(source)
        mtq.quantize(model, getattr(mtq, config), lambda m: m(torch.from_numpy(texts(source)[0])[None]))
        export_hf_checkpoint(model, export_dir=str(out))

    return make


def of_modelopt(hf_dir: Path) -> Iterator[tuple[str, np.ndarray]]:
    import torch
    from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor
    from safetensors.torch import load_file

    tensors = load_file(hf_dir / "model.safetensors")
    for name in [name for name in tensors if f"{name}_scale" in tensors]:
        codes, scale = tensors[name], tensors[f"{name}_scale"]
        if codes.dtype == torch.uint8:
            quantized = NVFP4QTensor(torch.Size((len(codes), 2 * codes.shape[1])), torch.float32, codes)
            double = tensors[f"{name}_scale_2"]
            value = quantized.dequantize(torch.float32, scale=scale, double_scale=double, block_sizes={-1: 16})
        else:
            value = FP8QTensor(codes.shape, torch.float32, codes).dequantize(torch.float32, scale=scale.float())
        yield name, value.numpy()


RULES = {r"-:.*layers\.1\.mlp\.down.*": {}, r"+:.*v_proj": {"bits": 8, "group_size": 32}}
KINDS = {
    "AutoRound as GPTQ": Kind("auto_round", auto_round("auto_gptq"), of_modules, "gptq"),
    "AutoRound as AWQ": Kind("auto_round", auto_round("auto_awq", sym=False), of_modules, "gptq", "tiny-llama"),
    "AutoRound of 3 bits": Kind("auto_round", auto_round("auto_gptq", "W3A16"), of_modules, "gptq"),
    "GPTQ with rules by module": Kind("gptqmodel", gptqmodel(bits=4, desc_act=True, dynamic=RULES), of_gptqmodel,
                                      "gptq"),
    "GPTQ of 3 bits": Kind("gptqmodel", gptqmodel(bits=3), of_gptqmodel, "gptq", "tiny-llama"),
    "FP8 of modelopt": Kind("modelopt", modelopt("FP8_DEFAULT_CFG"), of_modelopt),
    "NVFP4 of modelopt": Kind("modelopt", modelopt("NVFP4_DEFAULT_CFG"), of_modelopt),
    "bitsandbytes nf4": Kind("bitsandbytes", bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4",
                                                          bnb_4bit_use_double_quant=True), of_bitsandbytes),
    "bitsandbytes fp4": Kind("bitsandbytes", bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="fp4"),
                             of_bitsandbytes, source="tiny-llama"),
    "bitsandbytes int8": Kind("bitsandbytes", bitsandbytes(load_in_8bit=True), of_bitsandbytes),
    "FP8, a scale per row": Kind("llmcompressor", llmcompressor(scheme="FP8_DYNAMIC"), dequantized),
    "FP8, a scale per matrix": Kind("llmcompressor", llmcompressor(scheme="FP8"), dequantized, source="tiny-llama"),
    "FP8 in blocks": Kind("llmcompressor", llmcompressor(scheme="FP8_BLOCK"), dequantized),
    "NVFP4": Kind("llmcompressor", llmcompressor(scheme="NVFP4"), dequantized),
    "MXFP4": Kind("llmcompressor", llmcompressor(scheme="MXFP4A16"), dequantized),
    "MXFP8": Kind("llmcompressor", llmcompressor(scheme="MXFP8A16"), dequantized),
    "4 and 8 bits": Kind("llmcompressor", llmcompressor(config_groups=groups(attn=8, mlp=4)), dequantized, "gptq"),
    "4 bits in scattered groups": Kind("llmcompressor<0.13", llmcompressor(config_groups=groups(proj=4),
                                                                           actorder="group"), dequantized, "gptq"),
    "4 bits but for a layer": Kind("llmcompressor", llmcompressor(("re:.*layers.1.*",), scheme="W4A16"),
                                   dequantized, "gptq"),
    "W8A8 but for a layer": Kind("llmcompressor", llmcompressor(("re:.*layers.1.*",), scheme="W8A8"),
                                 dequantized, "w8a8"),
    "FP8 blocks of Qwen3": Kind("transformers", fp8((128, 64)), of_transformers_fp8),
}  # fmt: skip


# ---- the comparison


def perplexity(logits: list[np.ndarray], samples: list[np.ndarray]) -> float:
    """Of each sample's ids behind its first."""
    losses = []
    for of_sample, ids in zip(logits, samples, strict=True):
        x = of_sample[:-1].astype(np.float64)
        x -= x.max(axis=1, keepdims=True)
        losses.append(np.log(np.exp(x).sum(axis=1)) - x[np.arange(len(x)), ids[1:]])
    return float(np.exp(np.concatenate(losses).mean()))


def same(ours: np.ndarray, theirs: np.ndarray) -> bool:
    """Whether two matrices are equal; those of a module that computes in fp16, rounded to that."""
    in_half = theirs.astype(np.float16)
    half = np.array_equal(in_half, theirs) and np.array_equal(ours.astype(np.float16), in_half)
    return half or np.array_equal(ours, theirs)


def program_perplexity(hf_dir: Path, folder: Path, scheme: str) -> str:
    """What the program says of the held-out text with the file that the exporter makes, by plain rounding."""
    file, options = folder / "m.bin", {"moe": ["--no-smooth"]}.get(scheme, [])
    command = [sys.executable, "-m", "export", scheme, hf_dir, file, "--quiet", *options]
    subprocess.run(list(map(str, command)), cwd=ROOT, check=True)
    program = ROOT / {"q8": "runq"}.get(scheme, f"runq_{scheme}")
    done = subprocess.run([program, file, "--ppl", MODELS / "held_out.txt"], capture_output=True, text=True, check=True)
    return done.stdout.split(" over")[0]


def check(title: str, kind: Kind) -> bool:
    """Whether a directory of a kind is read as its package reads it."""
    import torch

    source = MODELS / kind.source
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        hf_dir = folder / "hf"
        kind.make(source, hf_dir)
        copy_tokenizer(source, hf_dir)
        checkpoint, theirs = open_model(hf_dir, archs=(*DENSE, *SPARSE)), dict(kind.matrices(hf_dir))
        equal = sum(same(checkpoint.tensor(name), value) for name, value in theirs.items())
        exact = all(np.array_equal(checkpoint.tensor(name), value) for name, value in theirs.items())
        complete = theirs.keys() == checkpoint.forms.keys()
        model = plain(source, dtype=torch.float32, attn_implementation="eager").eval()
        values = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in theirs.items()}
        model.load_state_dict(values, strict=False)
        samples = texts(hf_dir)
        with torch.no_grad():
            logits = [model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0].numpy() for ids in samples]
        ours = [forward(checkpoint.config, Fp32(checkpoint), ids) for ids in samples]
        figures = compare(logits, Fp32(checkpoint), checkpoint.config, samples)
        print(f"{title}: {equal} of {len(theirs)} matrices equal to the bit; logits within {figures.largest:.1e}; "
              f"perplexity {perplexity(logits, samples):.4f}, ours {perplexity(ours, samples):.4f}; "
              f"{kind.scheme}: {program_perplexity(hf_dir, folder, kind.scheme)}", flush=True)  # fmt: skip
    return complete and equal == len(theirs) and figures.largest <= (EXACT if exact else HALF) and figures.same >= SAME


def is_there(package: str) -> bool:
    """Whether a package is installed, "NAME<1.2": in an older version."""
    name, _, end = package.partition("<")
    return find_spec(name) is not None and (not end or Version(version(name)) < Version(end))


def main() -> int:
    """See the module's docstring. Exit code 1 if something is not as it should be."""
    warnings.simplefilter("ignore")
    right = True
    for name in sys.argv[1:] or KINDS:
        if not is_there(KINDS[name].package):
            print(f"{name}: left out, there is no {KINDS[name].package}")
            continue
        right = check(name, KINDS[name]) and right
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
