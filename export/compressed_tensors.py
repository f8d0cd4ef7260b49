"""compressed-tensors checkpoints: a Hugging Face directory with int8 matrices, as vLLM and transformers read it.

What is in such a directory beside the norms and the tables, for each matrix of a layer:

    model.layers.0.self_attn.q_proj.weight        int8 (n_out, n_in)
    model.layers.0.self_attn.q_proj.weight_scale  fp32 (n_out, 1)
    model.layers.0.self_attn.q_proj.input_scale   fp32 (1,), with static scales only

An expert's matrices are model.layers.0.mlp.experts.5.gate_proj, up_proj and down_proj. In config.json,
`quantization_config` has the format "int-quantized" of the package compressed-tensors.

`Int8Matrices` reads such directories, `write_compressed_tensors` writes them; formats/compressed_config.py has what
config.json may say in one that others made.

Weights are symmetric with a scale per row, activations symmetric with a scale per token or one per tensor. Embedding,
classifier and routers are not quantized: engines do not either. The first two are those of the unquantized model.
Smoothing is in the norms, weights and routers.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from export.hf_directory import Content, as_stored, part_name, read_source_config, write_directory
from formats.checkpoint import Checkpoint
from formats.errors import ModelError
from formats.moe import expert_shapes, router_shapes
from formats.source import Source
from formats.tensors import Tensor, matrix_shapes, norm_shapes
from golden.channel_scaling import CONSUMERS, PLACE_READ_BY, input_of
from golden.forward import F32, hf_name, in_halves, in_pairs
from golden.grouped import Int8Experts
from golden.moe import MoE
from golden.q8 import Quantized
from golden.w8a8 import W8A8

# ----------------------------------------------------------------------------
# In


class Int8Matrices:
    """The matrices of a checkpoint of compressed-tensors in the format "int-quantized", with rotated rows in pairs."""

    def __init__(self, checkpoint: Checkpoint):
        self.path, self.config = checkpoint.path, checkpoint.config
        self._checkpoint = checkpoint

    def has(self, name: str) -> bool:
        """Whether a matrix is one of them."""
        return hf_name(self.config, name) in self._checkpoint.forms

    def _part(self, name: str, part: str) -> np.ndarray:
        return self._checkpoint.stored(part_name(self.config, name, part))

    def _refuse(self, name: str, part: str, what: str) -> ModelError:
        return ModelError(f"{self.path}: tensor {part_name(self.config, name, part)} {what}")

    def _check_zero_point(self, name: str, part: str) -> None:
        stored = part_name(self.config, name, part)
        if self._checkpoint.has(stored) and self._checkpoint.stored(stored).any():
            raise self._refuse(name, part, "is not zero: not supported")

    def matrix(self, name: str) -> Quantized:
        """A matrix of a layer as it is stored, scales widened to fp32. Raises ModelError for a negative scale."""
        codes, scales = self._part(name, "weight"), self._part(name, "weight_scale").astype(F32)
        if (scales < 0).any():
            raise self._refuse(name, "weight_scale", f"has {scales.min():g}, expected no negative values")
        self._check_zero_point(name, "weight_zero_point")
        return Quantized(in_pairs(self.config, name, codes), in_pairs(self.config, name, scales))

    def input_scale(self, place: str) -> np.float32:
        """The static scale of a place of a layer. Raises ModelError unless all that read it have the same, above 0."""
        layer, _, part = place.removeprefix("layers.").partition(".")
        first, *others = (f"layers.{layer}.{consumer}" for consumer in CONSUMERS[part])
        scale = self._part(first, "input_scale").astype(F32)[0]
        if not scale > 0:
            raise self._refuse(first, "input_scale", f"is {scale:g}, expected a positive number")
        for name in others:
            found = self._part(name, "input_scale").astype(F32)[0]
            if found != scale:
                of_first = part_name(self.config, first, "input_scale")
                raise self._refuse(name, "input_scale", f"is {found:g}, {of_first} of the same input {scale:g}")
        for name in (first, *others):
            self._check_zero_point(name, "input_zero_point")
        return scale


# ----------------------------------------------------------------------------
# Out


def quantization_config(static: bool, unquantized: Sequence[str] = ()) -> dict[str, Any]:
    """What config.json says of the quantization, in fields that compressed-tensors has had since 0.9.

    unquantized: modules that stay as they are, besides the classifier: routers.
    """
    int8 = {"num_bits": 8, "type": "int", "symmetric": True, "group_size": None}
    activations = {"strategy": "tensor", "dynamic": False} if static else {"strategy": "token", "dynamic": True}
    group = {
        "targets": ["Linear"],
        "weights": int8 | {"strategy": "channel", "dynamic": False},
        "input_activations": int8 | activations,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", *unquantized],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def nonzero(scales: np.ndarray) -> np.ndarray:
    """The scales with 1 for 0, fp32. All codes under a scale of 0 are 0, and engines divide by scales."""
    return np.where(scales == 0, F32(1), scales)


def contents(model: W8A8 | MoE, checkpoint: Source) -> Iterator[Content]:
    """Every tensor of the directory. A MoE's experts are int8."""
    c = model.config
    for name, shape in norm_shapes(c):
        yield Tensor(hf_name(c, name), "<f4", shape), partial(in_halves, c, name, model.vector(name))
    for name, shape in matrix_shapes(c):
        weight, part = hf_name(c, name), name.split(".", 2)[-1]
        if part not in PLACE_READ_BY:  # embedding, classifier
            yield as_stored(checkpoint, weight, weight)
            continue
        codes, scales = model.matrix(name)
        yield Tensor(weight, "|i1", shape), partial(in_halves, c, name, codes)
        yield Tensor(f"{weight}_scale", "<f4", (shape[0], 1)), partial(in_halves, c, name, nonzero(scales))
        if isinstance(model, W8A8) and model.static:
            scale = nonzero(model.activation_scales[input_of(name)]).reshape(1)
            yield Tensor(part_name(c, name, "input_scale"), "<f4", (1,)), scale.copy
    if isinstance(model, MoE):
        yield from expert_contents(model)


def expert_contents(model: MoE) -> Iterator[Content]:
    """Routers, and the matrices of each expert: gate and up, which lie in one in the model file, are two."""
    c = model.config
    for name, shape in router_shapes(c):
        yield Tensor(hf_name(c, name), "<f4", shape), partial(model.vector, name)
    for name, (n_experts, n_out, n_in) in expert_shapes(c):
        layer, part = name.rsplit(".", 1)
        halves = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
        rows = n_out // len(halves)
        for expert in range(n_experts):
            weights = model.experts(name, slice(expert, expert + 1))
            assert isinstance(weights, Int8Experts)
            for i, half in enumerate(halves):
                codes, scales = (values[0, i * rows : (i + 1) * rows] for values in weights)
                weight = hf_name(c, f"{layer}.{expert}.{half}")
                yield Tensor(weight, "|i1", (rows, n_in)), partial(np.asarray, codes)
                yield Tensor(f"{weight}_scale", "<f4", (rows, 1)), partial(np.reshape, nonzero(scales), (rows, 1))


def write_compressed_tensors(checkpoint: Source, model_file: Path, hf_out: Path) -> None:
    """Writes `hf_out`, which must not exist, from a model file and the directory or GGUF file that it was made from.

    The model file is W8A8 with whole rows, or MoE with int8 experts. Codes and scales are those of the file, to the
    bit; rows of q and k are in Hugging Face's order.
    """
    model = W8A8(model_file) if checkpoint.config.moe is None else MoE(model_file)
    routers = [] if isinstance(model, W8A8) else [name for name, _ in router_shapes(model.config)]
    modules = [hf_name(model.config, name).removesuffix(".weight") for name in routers]
    config = read_source_config(checkpoint.path, model.config.tied)
    config["quantization_config"] = quantization_config(isinstance(model, W8A8) and model.static, modules)
    write_directory(checkpoint.path, hf_out, config, contents(model, checkpoint))
