"""What engines compute from a directory of `export w8a8 --hf-out` or `export moe --hf-out`: the file with their rules.

    python -m tests.served     held-out perplexity of both tiny models under each rule, as Markdown

They differ from runq_w8a8 and runq_moe in two points. Embedding and classifier are those of the unquantized model, and
activations are rounded as the engine rounds them; docs/serving.md compares the rules.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from formats.checkpoint import Checkpoint
from formats.source import Source
from golden.forward import F32, F64, Fp32, Scheme, Step, forward, hf_name
from golden.gptq import GPTQ
from golden.moe import MoE
from golden.perplexity import encode, perplexity
from golden.q8 import dequantize, quantize
from golden.routing import by_expert
from golden.w8a8 import W8A8, quantize_static

# x (n, k) fp32 and its static scale, None if each token has its own -> what its codes stand for, (n, k) fp32
Rounding = Callable[[np.ndarray, np.float32 | None], np.ndarray]


def as_runq(x: np.ndarray, scale: np.float32 | None) -> np.ndarray:
    """scale = amax / 127, code = rint(x * (127 / amax)); static: rint(x * (1 / scale)), from -127 to 127.

    With scales of their own for all tokens, this is vLLM's rule too (csrc/quantization: dynamic_scaled_int8_quant).
    """
    return dequantize(quantize(x, x.shape[1]) if scale is None else quantize_static(x, scale))


def as_compressed_tensors(x: np.ndarray, scale: np.float32 | None) -> np.ndarray:
    """scale = amax / 127.5, code = rint(x / scale), from -128 to 127 (compressed_tensors.quantization)."""
    scales = np.abs(x).max(axis=1, keepdims=True) / F32(127.5) if scale is None else F32(scale)
    scales = np.where(scales == 0, np.finfo(F32).eps, scales)
    return np.clip(np.rint(x / scales), -128, 127).astype(F32) * scales


def unrounded(x: np.ndarray, _scale: np.float32 | None) -> np.ndarray:
    """Activations as they are: weights alone are quantized."""
    return x


class Served:
    """The scheme for golden.forward, from the model file that was written beside the directory. Experts are int8.

    n_parts: processes that share a matrix; each rounds its part of a token for o_proj and down_proj by itself.
    """

    interleaved = True

    def __init__(self, model: W8A8 | MoE | GPTQ, checkpoint: Source, rounding: Rounding, n_parts: int = 1):
        self._model, self._checkpoint, self._rounding, self._n_parts = model, checkpoint, rounding, n_parts
        self._static = model.activation_scales if isinstance(model, W8A8) else {}

    def _table(self, name: str) -> np.ndarray:
        return self._checkpoint.tensor(hf_name(self._model.config, name))

    def vector(self, name: str) -> np.ndarray:
        return self._model.vector(name)

    def steps(self, step: Step) -> Step:
        return step

    def embedding(self, tokens: np.ndarray) -> np.ndarray:
        return self._table("embed")[tokens]

    def activation(self, _step: Step, name: str, x: np.ndarray) -> np.ndarray:
        if name == "norm":
            return x
        n_parts = self._n_parts if name.endswith((".mix", ".swiglu")) else 1
        parts = [self._rounding(part, self._static.get(name)) for part in np.split(x, n_parts, axis=1)]
        return np.concatenate(parts, axis=1)

    def linear(self, x: np.ndarray, name: str, _step: Step) -> np.ndarray:
        weight = self._table(name) if name == "classifier" else dequantize(self._model.matrix(name))
        return (x.astype(F64) @ weight.astype(F64).T).astype(F32)

    def expert_activation(self, _step: Step, _name: str, x: np.ndarray) -> np.ndarray:
        return self._rounding(x.reshape(-1, x.shape[-1]), None)

    def expert_linear(self, x: np.ndarray, rows: np.ndarray, experts: np.ndarray, name: str, _step: Step) -> np.ndarray:
        def product(chosen: np.ndarray, expert: int) -> np.ndarray:
            codes, scales = self._model.experts(name, slice(expert, expert + 1))
            weight = codes[0].astype(F64) * scales[0][:, None]
            return (x[chosen].astype(F64) @ weight.T).astype(F32)

        return by_expert(rows, experts, product)


ROOT = Path(__file__).resolve().parent.parent
MODELS = ("tiny-llama", "tiny-qwen3")
VARIANTS = {"dynamic": "w8a8", "static": "w8a8-static"}


def main(files: Path = ROOT / "build" / "models") -> int:
    """See the module's docstring. Takes the files of `make test-models`."""
    text = (ROOT / "models" / "held_out.txt").read_text(encoding="utf-8")
    figures: dict[str, list[float]] = {}
    names = [f"{model}.{variant}.bin" for model in MODELS for variant in VARIANTS.values()]
    if missing := [name for name in names if not (files / name).is_file()]:
        sys.exit(f"{files} has no {', '.join(missing)}. Please type: make test-models")

    def measure(name: str, scheme: Scheme) -> None:
        ids, bos = encode(checkpoint.path, text)
        found, _ = perplexity(partial(forward, config, scheme), ids, bos, config.max_seq_len)
        figures.setdefault(name, []).append(found)

    for model in MODELS:
        checkpoint = Checkpoint(ROOT / "models" / model)
        config = checkpoint.config
        measure("fp32", Fp32(checkpoint))
        for kind, variant in VARIANTS.items():
            file = W8A8(files / f"{model}.{variant}.bin")
            measure(f"{kind}, runq_w8a8", file)
            for rule, rounding in (("runq_w8a8", as_runq), ("compressed-tensors", as_compressed_tensors)):
                measure(f"{kind}, served, rounded as by {rule}", Served(file, checkpoint, rounding))
    print("| held-out perplexity | `tiny-llama` | `tiny-qwen3` |", "|---|---|---|", sep="\n")
    for name, (llama, qwen3) in figures.items():
        print(f"| {name} | {llama:.5f} | {qwen3:.5f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
