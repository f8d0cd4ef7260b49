"""compressed-tensors checkpoints: a Hugging Face directory with int8 matrices, as vLLM and transformers read it.

What is in such a directory beside the norms and the tables, for each matrix of a layer:

    model.layers.0.self_attn.q_proj.weight        int8 (n_out, n_in)
    model.layers.0.self_attn.q_proj.weight_scale  fp32 (n_out, 1)
    model.layers.0.self_attn.q_proj.input_scale   fp32 (1,), with static scales only

and in config.json `quantization_config`: the format "int-quantized" of the package compressed-tensors.

Weights are symmetric with a scale per row, activations symmetric with a scale per token or one per tensor. Embedding
and classifier are those of the unquantized model: engines quantize neither. Smoothing is in the norms and weights.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from export.hf_directory import read_source_config, write_directory
from formats.checkpoint import Checkpoint, Config
from formats.tensors import Tensor, matrix_shapes, norm_shapes
from golden.channel_scaling import PLACE_READ_BY
from golden.forward import F32, ROTATED, hf_name, unpermute_rows
from golden.w8a8 import W8A8


def quantization_config(static: bool) -> dict[str, Any]:
    """What config.json says of the quantization, in fields that compressed-tensors has had since 0.9."""
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
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def in_halves(config: Config, name: str, values: np.ndarray) -> np.ndarray:
    """The values of a step's weight, or of its scales, with the rows of q and k as Hugging Face has them."""
    return unpermute_rows(values, config.head_dim) if name.split(".", 2)[-1] in ROTATED else values


def nonzero(scales: np.ndarray) -> np.ndarray:
    """The scales with 1 for 0, fp32. All codes under a scale of 0 are 0, and engines divide by scales."""
    return np.where(scales == 0, F32(1), scales)


def type_name(values: np.ndarray) -> str:
    """The type of floating-point values as `Tensor` has it."""
    return "bfloat16" if values.dtype.name == "bfloat16" else values.dtype.str


def contents(model: W8A8, checkpoint: Checkpoint) -> Iterator[tuple[Tensor, Callable[[], np.ndarray]]]:
    """Every tensor of the directory, in Hugging Face's names, and what gives its values."""
    c = model.config
    for name, shape in norm_shapes(c):
        yield Tensor(hf_name(c, name), "<f4", shape), partial(in_halves, c, name, model.vector(name))
    for name, shape in matrix_shapes(c):
        weight, part = hf_name(c, name), name.split(".", 2)[-1]
        if part not in PLACE_READ_BY:  # embedding, classifier
            yield Tensor(weight, type_name(checkpoint.stored(weight)), shape), partial(checkpoint.stored, weight)
            continue
        codes, scales = model.matrix(name)
        yield Tensor(weight, "|i1", shape), partial(in_halves, c, name, codes)
        yield Tensor(f"{weight}_scale", "<f4", (shape[0], 1)), partial(in_halves, c, name, nonzero(scales))
        if model.static:
            scale = nonzero(model.activation_scales[name.removesuffix(part) + PLACE_READ_BY[part]]).reshape(1)
            yield Tensor(weight.removesuffix("weight") + "input_scale", "<f4", (1,)), scale.copy


def write_compressed_tensors(checkpoint: Checkpoint, model_file: Path, hf_out: Path) -> None:
    """Writes `hf_out`, which must not exist, from a model file with whole rows and what it was made from.

    Codes and scales are those of the file, to the bit; rows of q and k are in Hugging Face's order.
    """
    model = W8A8(model_file)
    config = read_source_config(checkpoint.path, model.config.tied)
    config["quantization_config"] = quantization_config(model.static)
    tensors, loads = zip(*contents(model, checkpoint), strict=True)
    load = {tensor.name: values for tensor, values in zip(tensors, loads, strict=True)}
    write_directory(checkpoint.path, hf_out, config, tensors, lambda name: load[name]())
