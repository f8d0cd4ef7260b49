"""Which format each kind of matrix of a GPTQ file gets (--bits, --group, --sparse), and what it adds up to.

The default is a ladder: 2 bits where most weights are (feed-forward), 4 where they are harder to round (attention), 8
where they are only looked up (embedding).
"""

import math
from collections.abc import Collection, Iterable, Iterator, Sequence

from formats.checkpoint import Config
from formats.errors import ModelError
from formats.gptq import KINDS, ROW_UNIT, GptqLayout, MatrixFormat, gptq_tensors
from formats.moe import LADDER as MOE_LADDER
from formats.moe import LADDER_KINDS, MoeLayout, expert_shapes, ladder_kind, moe_tensors
from formats.source import Source
from formats.tensors import matrix_shapes

PLACES = {
    "embed": ("embed",),
    "attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "ffn": ("gate_proj", "down_proj", "up_proj"),
    "classifier": ("classifier",),
}
LADDER = {"embed": 8, "attn": 4, "ffn": 2, "classifier": 4}
# Of a mixture of experts: ffn is dense layers; experts stands for both of their places that are not given.
EXPERTS, EXPERT_PLACES = "experts", ("gate_up", "down")
EXPERT_LADDER = LADDER | {"ffn": 4, EXPERTS: 2}
PLACES_WITH_EXPERTS = (*EXPERT_LADDER, *EXPERT_PLACES)
TABLES = ("embed", "classifier")
NL4 = "nl4"  # 4 bits by a table
BITS = {"2": 2, "4": 4, NL4: NL4, "5": 5, "6": 6, "8": 8}
Bits = dict[str, int | str]  # by place
GROUPS = (32, 64, 128)
INT8_SCALES_GROUP = 64  # of formats with int8 scales, if none is given
SPARSE_GROUPS = (64, 128)
COMPONENTS = {"embed": "embedding", "attn": "attention", "ffn": "feed-forward", "classifier": "classifier"}


def parse_bits(text: str | None, places: Collection[str] = tuple(PLACES)) -> Bits:
    """`--bits`: one of BITS for all places, or `PLACE=BITS,...` for some. Raises ModelError."""
    bits: Bits = {}
    for part in text.split(",") if text is not None else ():
        place, equals, number = part.partition("=")
        if not equals:
            place, number = "", part
        if number not in BITS or (place and place not in places) or place in bits:
            expected = f"{', '.join(BITS)}, or PLACE=BITS,... with places {', '.join(places)}"
            raise ModelError(f"--bits is {text}, expected {expected}")
        bits[place] = BITS[number]
    if "" in bits and len(bits) > 1:
        raise ModelError(f"--bits is {text}: one number for all, or one for each place")
    return dict.fromkeys(places, bits[""]) if "" in bits else bits


def row_lengths(config: Config) -> dict[str, int]:
    """The lengths of rows of matrices, by the fields of config.json that say them."""
    c, rows = config, {"hidden_size": config.dim, "num_attention_heads * head_dim": config.q_dim}
    if c.moe is None or c.moe.dense_layers:
        rows["intermediate_size"] = c.hidden_dim
    return rows if c.moe is None else rows | {"moe_intermediate_size": c.moe.hidden_dim}


def check_dimensions(checkpoint: Source) -> None:
    """Refuses matrices whose rows are not whole vectors of 64 weights."""
    for name, n in row_lengths(checkpoint.config).items():
        if n % ROW_UNIT:
            raise ModelError(f"{checkpoint.config_path}: {name} is {n}, expected a multiple of {ROW_UNIT}")


def choose_formats(
    kinds: Iterable[tuple[str, int | str, Sequence[int]]], tied: bool, group: int | None, sparse: bool
) -> tuple[MatrixFormat, ...]:
    """The format of every kind of matrix. Raises ModelError for options that do not go together.

    kinds: of each its name, bits, and the lengths of its rows; of a kind that a model has not none, its format is that
    of the kind before. Where the embedding is the classifier (tied), both have one format. group: at 4 to 6 bits, and
    in layers at 8; None: 128 where that divides rows at 4 bits, otherwise 64; at 8 bits a row. sparse: 2:4 in layers at
    4 bits.
    """
    kinds = list(kinds)
    if group is not None and group not in GROUPS:
        raise ModelError(f"--group is {group}, expected {', '.join(map(str, GROUPS))}")
    if sparse and group is not None and group not in SPARSE_GROUPS:
        raise ModelError(f"--group is {group}, with --sparse expected {' or '.join(map(str, SPARSE_GROUPS))}")
    if sparse and all(bits != 4 for kind, bits, _ in kinds if kind not in TABLES):
        raise ModelError("--sparse 2:4 is for 4 bits: --bits attn=4 or ffn=4")
    formats: list[MatrixFormat] = []
    for kind, bits, lengths in kinds:
        if not lengths or (kind == "classifier" and tied):
            formats.append(formats[0 if kind == "classifier" else -1])
            continue
        own = group if group is not None else 64 if any(n % 128 for n in lengths) else 128
        if found := [n for n in lengths if n % own and group is not None]:
            raise ModelError(f"--group is {group}, {kind} has rows of {found[0]}; 64 divides them")
        if bits == 2:
            formats.append(MatrixFormat(2, 64, two_level=True))
        elif bits in (NL4, 5, 6):
            formats.append(MatrixFormat(4 if bits == NL4 else bits, group or INT8_SCALES_GROUP, int8_scales=True))
        elif bits == 4:
            formats.append(MatrixFormat(4, own, sparse=sparse and kind not in TABLES))
        else:
            formats.append(MatrixFormat(8, group if group is not None and kind not in TABLES else 0))
    return tuple(formats)


def choose_layout(config: Config, bits: Bits, group: int | None, sparse: bool) -> GptqLayout:
    """The format of every kind of matrix of a dense model. bits: by place, those of LADDER for the others.

    group, sparse, errors: see `choose_formats`.
    """
    chosen = LADDER | bits
    columns = {name.rsplit(".", 1)[-1]: [n_in] for name, (_, n_in) in matrix_shapes(config)}
    place_of = {kind: place for place, kinds in PLACES.items() for kind in kinds}
    kinds = ((kind, chosen[place_of[kind]], columns.get(kind, [])) for kind in KINDS)
    return GptqLayout(choose_formats(kinds, config.tied, group, sparse))


def choose_expert_layout(config: Config, bits: Bits, group: int | None, sparse: bool) -> MoeLayout:
    """The same of a mixture of experts, whose ladder is EXPERT_LADDER."""
    chosen = EXPERT_LADDER | bits
    chosen = dict.fromkeys(EXPERT_PLACES, chosen[EXPERTS]) | chosen
    columns: dict[str, list[int]] = {kind: [] for kind in LADDER_KINDS}
    for name, (*_, n_in) in (*matrix_shapes(config), *expert_shapes(config)):
        columns[ladder_kind(name)].append(n_in)
    kinds = ((kind, chosen[kind.removesuffix("_proj")], lengths) for kind, lengths in columns.items())
    return MoeLayout(MOE_LADDER, 0, formats=choose_formats(kinds, config.tied, group, sparse))


def budget_forms(config: Config, kind: str, group: int | None) -> list[MatrixFormat]:
    """The formats of which --budget chooses one for a kind of matrix. group: the only one at 4 to 6 bits, if given."""
    columns = next(n_in for name, (_, n_in) in matrix_shapes(config) if name.rsplit(".", 1)[-1] == kind)
    groups = [g for g in (GROUPS if group is None else (group,)) if columns % g == 0]
    by_table = [MatrixFormat(4, g, int8_scales=True) for g in groups]
    uniform = [MatrixFormat(bits, group or INT8_SCALES_GROUP, int8_scales=True) for bits in (6, 5)]
    return [MatrixFormat(8), *uniform, *by_table, MatrixFormat(2, 64, two_level=True)]


def component(name: str) -> str:
    """The component of a tensor of a file, by its name."""
    if ".moe." in name:
        return "routers" if name.endswith(".router") else EXPERTS
    for place, kinds in PLACES.items():
        if any(part in kinds for part in name.split(".")):
            return COMPONENTS[place]
    return "orders" if name.endswith(".order") else "norms"


def component_sizes(config: Config, layout: GptqLayout | MoeLayout) -> dict[str, tuple[int, int]]:
    """Weights and bytes of each component of a file, in the order of the file; norms and the like have no weights."""
    n_bytes: dict[str, int] = {}
    for tensor in (moe_tensors if isinstance(layout, MoeLayout) else gptq_tensors)(config, layout):
        n_bytes[component(tensor.name)] = n_bytes.get(component(tensor.name), 0) + tensor.n_bytes
    n_weights = dict.fromkeys(n_bytes, 0)
    for name, shape in (*matrix_shapes(config), *expert_shapes(config)):
        n_weights[component(name)] += math.prod(shape)
    return {what: (n_weights[what], size) for what, size in n_bytes.items()}


def token_sizes(config: Config, layout: MoeLayout) -> tuple[float, float, float]:
    """What one token reads of a mixture of experts: weights, bytes, and weights of 2 bits.

    Of the experts those that are active, of the embedding nothing unless it is the classifier, of all else everything.
    """
    n_weights = n_bytes = n_low = 0.0
    share = {EXPERTS: config.moe.n_active / config.moe.n_experts, COMPONENTS["embed"]: float(config.tied)}
    for what, (n, size) in component_sizes(config, layout).items():
        n_weights, n_bytes = n_weights + share.get(what, 1) * n, n_bytes + share.get(what, 1) * size
    for name, shape in (*matrix_shapes(config), *expert_shapes(config)):
        n_low += share.get(component(name), 1) * math.prod(shape) * (layout.of(name).bits == 2)
    return n_weights, n_bytes, n_low


def describe_sizes(config: Config, layout: GptqLayout | MoeLayout) -> Iterator[str]:
    """A line per component: how it is stored, its weights, their bits each with scales and zero points, and MB.

    Of a mixture of experts also what a token reads.
    """
    sizes = component_sizes(config, layout)
    stored: dict[str, list[str]] = {"norms": ["fp32"], "routers": ["fp32"], "orders": ["int32"]}
    for name, _ in (*matrix_shapes(config), *expert_shapes(config)):
        form = str(layout.of(name)) + (", also the classifier" if name == "embed" and config.tied else "")
        if form not in stored.setdefault(component(name), []):
            stored[component(name)].append(form)

    def line(what: str, n_weights: float, n_bytes: float, how: str) -> str:
        bits = f"{8 * n_bytes / n_weights:6.3f}" if n_weights else " " * 6
        millions = f"{n_weights / 1e6:8.1f}" if n_weights else " " * 8
        return f"{what:<12} {millions} {bits} {n_bytes / 1e6:9.2f}  {how}".rstrip()

    yield f"{'':<12} {'M':>8} {'bits':>6} {'MB':>9}"
    for what, (n_weights, n_bytes) in sizes.items():
        yield line(what, n_weights, n_bytes, "; ".join(stored[what]))
    yield line("total", *map(sum, zip(*sizes.values(), strict=True)), "")
    if isinstance(layout, MoeLayout):
        n_weights, n_bytes, n_low = token_sizes(config, layout)
        yield line("for a token", n_weights, n_bytes, f"{n_low / n_weights:.0%} of the weights have 2 bits")
