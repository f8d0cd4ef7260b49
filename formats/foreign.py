"""Quantized directories of others: what each method's `quantization_config` says of the forms of matrices.

METHODS has a row for each `quant_method`: it looks at the fields that change what tensors stand for, and gives the form
(formats/packing.py) of a module's matrix. Which modules are quantized is not read: the tensors that are there say it.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from formats.checkpoint import check_directory
from formats.compressed_config import read_groups
from formats.errors import ModelError, shown
from formats.fields import Fields
from formats.files import read_json
from formats.packing import INT8_ROWS, MODELOPT_NVFP4, Form, Levels, Packing, fp8

GPTQ_BITS, GROUPS = (2, 3, 4, 8), (16, 32, 64, 128, 256, 512, 1024)


# Files that early versions wrote in the place of the field: where it is in there, and whose they are.
EARLY_FILES = {"hf_quant_config.json": ("quantization", "modelopt"), "quantize_config.json": ("", "gptq")}


class Storage(NamedTuple):
    """How a directory's matrices are stored: the form of a module's, such as model.layers.0.mlp.up_proj."""

    form: Callable[[str], Form]
    method: str


def quantization_field(config: dict) -> str:
    """Which field of config.json says how weights are quantized: early compressed-tensors has a name of its own."""
    old = "compression_config" in config and "quantization_config" not in config
    return "compression_config" if old else "quantization_config"


def quantization_of(hf_dir: Path) -> Fields | None:
    """`quantization_config` of a directory, None for unquantized weights. Raises ModelError if it is no object."""
    path = Path(hf_dir) / "config.json"
    check_directory(Path(hf_dir))
    config = read_json(path)
    if isinstance(config.get("quantization"), dict):
        raise ModelError(f"{path}: quantization is of MLX: take the model that this one was made of")
    name = quantization_field(config)
    if (found := config.get(name)) is None:
        for file, (field, method) in EARLY_FILES.items():
            if path.with_name(file).exists():
                path = path.with_name(file)
                fields = Fields(path, read_json(path))
                found, name = {"quant_method": method} | (fields.object(field) if field else fields).values, field
                break
    if found is None:
        return None
    if not isinstance(found, dict):
        raise ModelError(f"{path}: {name} is {shown(found)}, expected an object")
    return Fields(path, found, f"{name}." if name else "")


def storage_of(hf_dir: Path) -> Storage | None:
    """How the matrices of a directory are stored, None: as floating-point numbers. Raises ModelError."""
    found = quantization_of(hf_dir)
    if found is None:
        return None
    if found.values.get("quant_method") is None and found.values.get("quant_algo"):
        found.values["quant_method"] = "modelopt"
    method = found.one_of("quant_method", tuple(METHODS))
    form = METHODS[method](found)
    return Storage(form if callable(form) else lambda _module: form, method)


# ----------------------------------------------------------------------------
# Methods


def _gptq(found: Fields) -> Callable[[str], Form]:
    """AutoGPTQ, GPTQModel. `dynamic` has regular expressions of modules, with values for those that differ.

    AutoRound has such names in `extra_config`.
    """
    name = "checkpoint_format" if found.values.get("checkpoint_format") is not None else "format"
    convention = found.one_of(name, ("gptq", "gptq_v2"), "gptq")
    found.one_of("pack_dtype", ("int32",), "int32")
    rules = found.object("dynamic" if found.values.get("extra_config") is None else "extra_config")

    def packing(fields: Fields) -> Packing:
        bits, group = fields.one_of("bits", GPTQ_BITS), fields.one_of("group_size", (*GROUPS, -1))
        return Packing("gptq", bits, max(group, 0), fields.flag("sym"), added=int(convention == "gptq"))

    def form(module: str) -> Form:
        own = next((pattern for pattern in rules.values if re.match(pattern.removeprefix("+:"), module)), None)
        values = found.values if own is None else found.values | rules.object(own).values
        return packing(Fields(found.path, values, found.inside if own is None else f"{rules.inside}{own}."))

    form("")
    return form


def _awq(found: Fields) -> Form:
    """AutoAWQ."""
    found.one_of("version", ("gemm",), "gemm")
    found.one_of("zero_point", (True,), True)
    return Packing("awq", found.one_of("bits", (4,)), found.one_of("group_size", (32, 64, 128)), symmetric=False)


def _auto_round(found: Fields) -> Callable[[str], Form]:
    """AutoRound, which packs as AutoGPTQ or as AutoAWQ does."""
    packing = found.one_of("packing_format", tuple(f"auto_round{end}" for end in ("", ":auto_gptq", ":gptqmodel",
                           ":auto_awq", ":awq")), "auto_round:auto_gptq")  # fmt: skip
    found.one_of("data_type", ("int",), "int")
    if packing.endswith("awq"):
        form = _awq(Fields(found.path, {k: v for k, v in found.values.items() if k in ("bits", "group_size")},
                           found.inside))  # fmt: skip
        return lambda _module: form
    return _gptq(found)


def _fp8(found: Fields) -> Form:
    """The method `fp8` of transformers, vLLM and the official Qwen3 directories."""
    found.one_of("fmt", ("e4m3",), "e4m3")
    if found.values.get("weight_block_size") is None:
        return fp8(0, 0)
    return fp8(*found.pair("weight_block_size"), "weight_scale_inv")


def _modelopt(found: Fields) -> Form:
    """NVIDIA's Model Optimizer."""
    algorithm = found.one_of("quant_algo", ("fp8", "fp8_per_channel_per_token", "nvfp4"))
    return {"fp8": fp8(0, 0), "nvfp4": MODELOPT_NVFP4}.get(algorithm, fp8(1, 0))


def _bitsandbytes(found: Fields) -> Form:
    """bitsandbytes, whose quant_state says the rest."""
    if found.flag("load_in_8bit"):
        return INT8_ROWS
    found.one_of("load_in_4bit", (True,), False)
    found.one_of("bnb_4bit_quant_storage", ("uint8",), "uint8")
    return Levels()


METHODS: dict[str, Callable[[Fields], Form | Callable[[str], Form]]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": read_groups,
    "auto-round": _auto_round,
    "fp8": _fp8,
    "fbgemm_fp8": lambda _found: fp8(1, 0),
    "modelopt": _modelopt,
    "bitsandbytes": _bitsandbytes,
}
