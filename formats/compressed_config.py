"""What `quantization_config` says of a checkpoint of compressed-tensors.

Read are the fields that the package writes up to version 0.20. One that is not known here is refused unless it is
empty, since it may change what the codes mean. So is everything that is not described in formats/packing.py: a line
names the file, the field and its value.
"""

import re
from collections.abc import Callable

from formats.fields import Fields
from formats.packing import INT_QUANTIZED, MXFP4, MXFP8, NVFP4, PACK_QUANTIZED, Form, Packing, fp8

GROUPS = (32, 64, 128)

_INFORMATION = ("quant_method", "quantization_status", "global_compression_ratio", "version", "ignore")
_GROUP = ("targets", "weights", "input_activations", "output_activations", "format")
# Where codes and scales come from, which changes nothing about what they stand for.
_ORIGIN = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
_NUMBERS = ("num_bits", "type", "symmetric", "strategy", "group_size", "dynamic", "actorder", "block_structure")


def is_empty(value: object) -> bool:
    """Whether a value says nothing."""
    return value is None or value is False or value in ([], {})


def refuse_others(fields: Fields, known: tuple[str, ...]) -> None:
    """Raises ModelError for a field that is not known and not empty."""
    for field, value in fields.values.items():
        if field not in known and not is_empty(value):
            fields.refuse(field, "this field is not supported")


def require_empty(fields: Fields, *names: str) -> None:
    """Raises ModelError if one of these fields says something."""
    for field in names:
        if not is_empty(fields.values.get(field)):
            fields.refuse(field, "not supported")


def read_groups(found: Fields) -> Callable[[str], Form]:
    """The form of a module's matrix. found: `quantization_config`. Raises ModelError for what is not supported."""
    found.one_of("quantization_status", ("compressed", "frozen"), "compressed")
    refuse_others(found, (*_INFORMATION, "format", "config_groups", "kv_cache_scheme", "sparsity_config",
                          "transform_config"))  # fmt: skip
    found.one_of("format", (*READERS, "mixed-precision"))
    found.object("sparsity_config").one_of("format", ("dense",), "dense")
    require_empty(found.object("transform_config"), *found.object("transform_config").values)
    groups = found.object("config_groups")
    if not groups.values:
        found.refuse("config_groups", "expected at least one group")
    rules = [(group.values.get("targets"), _read_group(found, group)) for group in map(groups.object, groups.values)]

    def form(module: str) -> Form:
        """Of the group with the module's name among its targets, otherwise of the one for all linear modules."""
        named = [form for targets, form in rules if is_target(module, targets)]
        return (named + [form for targets, form in rules if is_target("Linear", targets)] + [rules[0][1]])[0]

    return form


def is_target(module: str, targets: object) -> bool:
    """Whether a group's targets name a module, as a whole or by a regular expression behind "re:"."""
    names = [target for target in targets if isinstance(target, str)] if isinstance(targets, list) else []
    return any(
        re.match(name.removeprefix("re:"), module) if name.startswith("re:") else name == module for name in names
    )


def _read_group(found: Fields, group: Fields) -> Form:
    """The form of a group's matrices, by its format or that of all."""
    refuse_others(group, _GROUP)
    require_empty(group, "output_activations")
    form = (group if group.values.get("format") is not None else found).one_of("format", tuple(READERS))
    weights = group.object("weights")
    refuse_others(weights, (*_NUMBERS, *_ORIGIN))
    weights.one_of("dynamic", (False,), False)
    return READERS[form](group, weights)


def _read_int8(group: Fields, weights: Fields) -> Packing:
    """int8 weights with a scale per row, int8 activations with a scale per token, or with one per matrix input."""
    weights.one_of("type", ("int",), "int")
    weights.one_of("num_bits", (8,), 8)
    weights.one_of("symmetric", (True,), True)
    weights.one_of("strategy", ("channel",))
    weights.one_of("actorder", (False, "weight", "static"), False)
    require_empty(weights, "block_structure")
    weights.one_of("group_size", (-1,), -1)
    inputs = group.object("input_activations")
    refuse_others(inputs, (*_NUMBERS, *_ORIGIN))
    inputs.one_of("type", ("int",), "int")
    inputs.one_of("num_bits", (8,), None if not inputs.values else 8)
    inputs.one_of("symmetric", (True,), True)
    dynamic = inputs.flag("dynamic")
    inputs.one_of("strategy", ("token",) if dynamic else ("tensor",))
    require_empty(inputs, "group_size", "actorder", "block_structure")
    return Packing(INT_QUANTIZED, 8, 0, static=not dynamic)


def _read_packed(group: Fields, weights: Fields) -> Packing:
    """Weights of 4 or 8 bits in int32 words, an fp16 scale per group or per row; activations as they are."""
    require_empty(group, "input_activations")
    weights.one_of("type", ("int",), "int")
    # "group" scatters a group's inputs over the row; in the order "weight" (or "static") they stay neighbours.
    weights.one_of("actorder", (False, "group", "weight", "static"), False)
    require_empty(weights, "block_structure")
    bits = weights.one_of("num_bits", (4, 8))
    symmetric = weights.flag("symmetric", True)
    if bits == 8:  # codes less a zero point need not fit int8
        weights.one_of("symmetric", (True,), True)
    if weights.one_of("strategy", ("group", "channel")) == "group":
        return Packing(PACK_QUANTIZED, bits, weights.one_of("group_size", GROUPS), symmetric)
    weights.one_of("group_size", (-1,), -1)
    return Packing(PACK_QUANTIZED, bits, 0, symmetric)


def _read_float(_group: Fields, weights: Fields) -> Form:
    """FP8 with a scale for a matrix, a row, or a block. Activations, which such models quantize, stay as they are."""
    weights.one_of("type", ("float",))
    weights.one_of("num_bits", (8,))
    weights.one_of("symmetric", (True,), True)
    strategy = weights.one_of("strategy", ("tensor", "channel", "block"))
    if strategy != "block":
        return fp8(int(strategy == "channel"), 0)
    return fp8(*weights.pair("block_structure"))


# What each format is, by the package's name for it.
READERS: dict[str, Callable[[Fields, Fields], Form]] = {
    INT_QUANTIZED: _read_int8,
    PACK_QUANTIZED: _read_packed,
    "float-quantized": _read_float,
    "naive-quantized": lambda g, w: (_read_float if w.values.get("type") == "float" else _read_int8)(g, w),
    "nvfp4-pack-quantized": lambda _group, _weights: NVFP4,
    "mxfp4-pack-quantized": lambda _group, _weights: MXFP4,
    "mxfp8-quantized": lambda _group, _weights: MXFP8,
}
