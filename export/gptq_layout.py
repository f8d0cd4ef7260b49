"""Which format each kind of matrix of a GPTQ file gets (--bits, --group, --sparse), and what it adds up to.

The default is a ladder: 2 bits where most weights are (feed-forward), 4 where they are harder to round (attention), 8
where they are only looked up (embedding).
"""

import math
from collections.abc import Iterator

from formats.checkpoint import Config
from formats.errors import ModelError
from formats.gptq import KINDS, ROW_UNIT, GptqLayout, MatrixFormat, gptq_tensors
from formats.source import Source
from formats.tensors import matrix_shapes

PLACES = {
    "embed": ("embed",),
    "attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "ffn": ("gate_proj", "down_proj", "up_proj"),
    "classifier": ("classifier",),
}
LADDER = {"embed": 8, "attn": 4, "ffn": 2, "classifier": 4}
LAYERS = ("attn", "ffn")
BITS = (2, 4, 8)
GROUPS = (32, 64, 128)
SPARSE_GROUPS = (64, 128)
COMPONENTS = {"embed": "embedding", "attn": "attention", "ffn": "feed-forward", "classifier": "classifier"}


def parse_bits(text: str | None) -> dict[str, int]:
    """`--bits`: one number for all places, or `PLACE=BITS,...` for some. Raises ModelError."""
    bits = {}
    for part in text.split(",") if text is not None else ():
        place, equals, number = part.partition("=")
        if not equals:
            place, number = "", part
        if number not in map(str, BITS) or (place and place not in PLACES) or place in bits:
            expected = f"{', '.join(map(str, BITS))}, or PLACE=BITS,... with places {', '.join(PLACES)}"
            raise ModelError(f"--bits is {text}, expected {expected}")
        bits[place] = int(number)
    if "" in bits and len(bits) > 1:
        raise ModelError(f"--bits is {text}: one number for all, or one for each place")
    return dict.fromkeys(PLACES, bits[""]) if "" in bits else bits


def check_dimensions(checkpoint: Source) -> None:
    """Refuses matrices whose rows are not whole vectors of 64 weights."""
    c = checkpoint.config
    rows = {"hidden_size": c.dim, "intermediate_size": c.hidden_dim, "num_attention_heads * head_dim": c.q_dim}
    for name, n in rows.items():
        if n % ROW_UNIT:
            raise ModelError(f"{checkpoint.config_path}: {name} is {n}, expected a multiple of {ROW_UNIT}")


def choose_layout(config: Config, bits: dict[str, int], group: int | None, sparse: bool) -> GptqLayout:
    """The format of every kind of matrix. Raises ModelError for options that do not go together.

    bits: by place, those of LADDER for the others; where the embedding is the classifier, the embedding's count. group:
    at 4 bits, and in layers at 8; None: 128 where that divides rows, otherwise 64; at 8 bits a row. sparse: 2:4 in
    layers at 4 bits.
    """
    if group is not None and group not in GROUPS:
        raise ModelError(f"--group is {group}, expected {', '.join(map(str, GROUPS))}")
    if sparse and group is not None and group not in SPARSE_GROUPS:
        raise ModelError(f"--group is {group}, with --sparse expected {' or '.join(map(str, SPARSE_GROUPS))}")
    chosen = LADDER | bits
    if sparse and all(chosen[place] != 4 for place in LAYERS):
        raise ModelError("--sparse 2:4 is for 4 bits: --bits attn=4 or ffn=4")
    columns = {name.rsplit(".", 1)[-1]: n_in for name, (_, n_in) in matrix_shapes(config)}
    formats = []
    for kind in KINDS:
        place = next(place for place, kinds in PLACES.items() if kind in kinds)
        if kind == "classifier" and config.tied:
            formats.append(formats[0])
            continue
        n_in = columns[kind]
        own = group if group is not None else 128 if n_in % 128 == 0 else 64
        if group is not None and n_in % group:
            raise ModelError(f"--group is {group}, {kind} has rows of {n_in}; 64 divides them")
        if chosen[place] == 2:
            formats.append(MatrixFormat(2, 64, two_level=True))
        elif chosen[place] == 4:
            formats.append(MatrixFormat(4, own, sparse=sparse and place in LAYERS))
        else:
            formats.append(MatrixFormat(8, group if group is not None and place in LAYERS else 0))
    return GptqLayout(tuple(formats))


def budget_forms(config: Config, kind: str, group: int | None) -> list[MatrixFormat]:
    """The formats of which --budget chooses one for a kind of matrix. group: the only one at 4 bits, if it is given."""
    columns = next(n_in for name, (_, n_in) in matrix_shapes(config) if name.rsplit(".", 1)[-1] == kind)
    groups = [g for g in (GROUPS if group is None else (group,)) if columns % g == 0]
    return [MatrixFormat(8), *(MatrixFormat(4, g) for g in groups), MatrixFormat(2, 64, two_level=True)]


def component(name: str) -> str:
    """The component of a tensor of a file, by its name."""
    for place, kinds in PLACES.items():
        if any(part in kinds for part in name.split(".")):
            return COMPONENTS[place]
    return "orders" if name.endswith(".order") else "norms"


def component_sizes(config: Config, layout: GptqLayout) -> dict[str, tuple[int, int]]:
    """Weights and bytes of each component of a file, in the order of the file; norms and orders have no weights."""
    n_bytes: dict[str, int] = {}
    for tensor in gptq_tensors(config, layout):
        n_bytes[component(tensor.name)] = n_bytes.get(component(tensor.name), 0) + tensor.n_bytes
    n_weights = dict.fromkeys(n_bytes, 0)
    for name, shape in matrix_shapes(config):
        n_weights[component(name)] += math.prod(shape)
    return {what: (n_weights[what], size) for what, size in n_bytes.items()}


def describe_sizes(config: Config, layout: GptqLayout) -> Iterator[str]:
    """A line per component: how it is stored, its weights, their bits each with scales and zero points, and MB."""
    sizes = component_sizes(config, layout)
    stored: dict[str, list[str]] = {"norms": ["fp32"], "orders": ["int32"]}
    for name, _ in matrix_shapes(config):
        form = str(layout.of(name)) + (", also the classifier" if name == "embed" and config.tied else "")
        if form not in stored.setdefault(component(name), []):
            stored[component(name)].append(form)

    def line(what: str, n_weights: int, n_bytes: int, how: str) -> str:
        bits = f"{8 * n_bytes / n_weights:6.3f}" if n_weights else " " * 6
        millions = f"{n_weights / 1e6:8.1f}" if n_weights else " " * 8
        return f"{what:<12} {millions} {bits} {n_bytes / 1e6:9.2f}  {how}".rstrip()

    yield f"{'':<12} {'M':>8} {'bits':>6} {'MB':>9}"
    for what, (n_weights, n_bytes) in sizes.items():
        yield line(what, n_weights, n_bytes, "; ".join(stored[what]))
    yield line("total", *map(sum, zip(*sizes.values(), strict=True)), "")
