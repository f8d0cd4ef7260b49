"""What `quantization_config` says of a checkpoint of compressed-tensors, as far as it can be repacked.

Read are the fields that the package writes up to version 0.20. One that is not known here is refused unless it is
empty, since it may change what the codes mean. So is everything that a model file cannot hold: a line names the file,
the field and its value.
"""

from formats.fields import Fields
from formats.packing import INT_QUANTIZED, PACK_QUANTIZED, Packing

TAKEN_BY = {INT_QUANTIZED: "w8a8", PACK_QUANTIZED: "gptq"}  # which exporter repacks a format
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


def check_format(fields: Fields, expected: str) -> None:
    """Raises ModelError for another format than the caller repacks, and names the exporter that does."""
    found = fields.values.get("format")
    if found != expected:
        other = TAKEN_BY.get(found) if isinstance(found, str) else None
        hint = f"; python -m export {other} takes it" if other else ""
        fields.refuse("format", f'supported is "{expected}"{hint}')


def read_packing(found: Fields, form: str) -> Packing:
    """How a checkpoint's matrices are stored. form: the format that the caller repacks.

    found: `quantization_config`. Raises ModelError for another format and for what cannot be repacked.
    """
    found.one_of("quant_method", ("compressed-tensors",))
    check_format(found, form)
    found.one_of("quantization_status", ("compressed", "frozen"), "compressed")
    refuse_others(found, (*_INFORMATION, "format", "config_groups", "kv_cache_scheme", "sparsity_config",
                          "transform_config"))  # fmt: skip
    require_empty(found, "kv_cache_scheme")
    found.object("sparsity_config").one_of("format", ("dense",), "dense")
    require_empty(found.object("transform_config"), *found.object("transform_config").values)

    groups = found.object("config_groups")
    if len(groups.values) != 1:
        found.refuse("config_groups", f"{len(groups.values)} groups, supported is one")
    (name,) = groups.values
    group = groups.object(name)
    refuse_others(group, _GROUP)
    require_empty(group, "output_activations")
    if group.values.get("format") is not None:
        check_format(group, form)
    weights = group.object("weights")
    refuse_others(weights, (*_NUMBERS, *_ORIGIN))
    weights.one_of("type", ("int",), "int")
    weights.one_of("dynamic", (False,), False)
    # "group" scatters a group's inputs over the row; in the order "weight" (or "static") they stay neighbours.
    weights.one_of("actorder", (False, "weight", "static"), False)
    require_empty(weights, "block_structure")
    if form == INT_QUANTIZED:
        return _read_int8(group, weights)
    return _read_packed(group, weights)


def _read_int8(group: Fields, weights: Fields) -> Packing:
    """int8 weights with a scale per row, int8 activations with a scale per token, or with one per matrix input."""
    weights.one_of("num_bits", (8,), 8)
    weights.one_of("symmetric", (True,), True)
    weights.one_of("strategy", ("channel",))
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
    bits = weights.one_of("num_bits", (4, 8))
    symmetric = weights.flag("symmetric", True)
    if bits == 8:  # codes less a zero point need not fit int8
        weights.one_of("symmetric", (True,), True)
    if weights.one_of("strategy", ("group", "channel")) == "group":
        return Packing(PACK_QUANTIZED, bits, weights.one_of("group_size", GROUPS), symmetric)
    weights.one_of("group_size", (-1,), -1)
    return Packing(PACK_QUANTIZED, bits, 0, symmetric)
