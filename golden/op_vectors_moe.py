"""Golden vectors of what a mixture of experts adds: MXFP8, the router's choice, the sum of what experts make, and the
fused operator in each format."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import numpy as np

from formats.gptq import MatrixFormat
from golden.forward import F32, F64, swiglu
from golden.gptq import Matrix, expand_parts, pack_matrix
from golden.grouped import (
    Experts,
    Int4Experts,
    Int8Experts,
    assist_matrix,
    empty_like,
    expert_matmul,
    expert_sums,
    group_starts,
    grouped_matmul_swiglu_quant,
    msd_split,
    output_group,
    quantize_like,
)
from golden.mx import E4M3, E5M2, MX, SCALE_BIAS, SCALE_NAN, Element, element_values, encode_elements, quantize_mx
from golden.op_cases import EXACT, OpVectors
from golden.op_vectors_gptq import format_name, random_matrix, random_table
from golden.q8 import Quantized, rows_of
from golden.routing import combine, route

M, E, K, N = 7, 4, 64, 64  # rows, experts, input channels, output channels where operands are not smaller
ENDS = np.array([0, 3, 3, 6], np.int32)  # of each expert's rows: two experts without rows, and a row of nobody
NOISE, NOISY_RUNS = 3e-6, 8  # of a row's largest value: more than another order of additions changes
UNTOUCHED = 0x55  # the bytes of `out` before the call


def add_moe(vectors: OpVectors, rng: np.random.Generator) -> None:
    """All cases of the mixture of experts."""
    add_mx(vectors, rng)
    add_route(vectors, rng)
    codes = np.arange(-128, 128).astype(np.int8)
    high, low = msd_split(codes)
    vectors.add("msd_split", "msd_split", {"codes": codes}, {"high": (high, EXACT), "low": (low, EXACT)})
    add_int8(vectors, rng)
    add_int4(vectors, rng)
    add_mxfp8(vectors, rng)
    add_mx_specials(vectors, rng)
    add_combine(vectors, rng)


# ----------------------------------------------------------------------------
# MXFP8


def mx_edges(rng: np.random.Generator, block: int, element: Element) -> np.ndarray:
    """Rows of 128 values that probe the quantizer, fp32."""
    n = 128
    i = np.arange(n)
    step = 2.0**-element.mantissa_bits
    largest = np.where(i % block == 1, element.largest, 0)  # scale 1
    values = element_values(element)
    finite = np.sort(values[np.isfinite(values)]).astype(F64)
    middles = np.resize((finite[1:] + finite[:-1]) / 2, n)
    ties = np.where(i % block == 1, element.largest, middles)
    edge = element.largest * np.linspace(0.98, 1.142, n)  # the largest element, and as far as the scale stays the same
    rows = [
        rng.standard_normal(n),
        rng.standard_normal(n) * np.exp2(rng.uniform(-30, 30, n)),
        np.zeros(n),
        np.full(n, -0.0),
        ties,
        np.nextafter(ties.astype(F32), F32(np.inf)),
        np.nextafter(ties.astype(F32), F32(-np.inf)),
        np.where(i % 2, edge, -edge),
        np.where(i % block == 3, 3e38, rng.standard_normal(n)),  # one huge value
        np.where(i // block == 1, 0.0, rng.standard_normal(n)),  # one block of zeros
        largest
        + np.where(i % block > 1, (1 + step * (i % 16) / 2) * 2.0 ** (1 - element.bias - i % 5), 0),  # subnormal
        rng.standard_normal(n) * 1e-38,  # the scale reaches its smallest
        rng.standard_normal(n) * 1e-42,
        np.exp2(i % 16 - 8.0),  # powers of two: log2 is whole
        np.nextafter(np.exp2(i // block + 3.0).astype(F32), F32(0)),  # and just below
        np.where(i % block == 5, np.inf, rng.standard_normal(n)),
        np.where(i == block, np.nan, rng.standard_normal(n)),
    ]
    return np.array(rows).astype(F32)


def add_mx(vectors: OpVectors, rng: np.random.Generator) -> None:
    """What elements and scales mean, and quantizing."""
    for element in (E4M3, E5M2):
        codes = np.arange(256, dtype=np.uint8)
        values = element_values(element)
        finite = np.isfinite(values)
        outputs = {"values": (values[finite], EXACT)}
        vectors.add(f"mx_values.{element.name}", "mx_values", {"codes": codes[finite]}, outputs, element=element.name)
        for block in (32, 64):
            x = mx_edges(rng, block, element)
            mx = quantize_mx(x, block, element)
            outputs = {"codes": (mx.codes, EXACT), "scales": (mx.scales, EXACT)}
            name = f"mx_quantize.{element.name}b{block}"
            vectors.add(name, "mx_quantize", {"x": x}, outputs, element=element.name, block=block)


# ----------------------------------------------------------------------------
# The router's choice


def add_route(vectors: OpVectors, rng: np.random.Generator) -> None:
    """The best of the router's logits and their weights: ties, all experts, one expert."""
    logits = rng.standard_normal((6, 16)).astype(F32)
    logits[1, [2, 5, 11]] = 4.0  # equal ones, all chosen
    logits[2, [1, 3, 9, 14]] = logits[2].max() + 1  # more equal ones than are chosen, where three are
    logits[3] = 0.25
    logits[4] = np.where(np.arange(16) % 2, -90.0, 90.0)  # half of the probabilities are 0 in fp32
    logits[5] = np.arange(16) * 2.0**-24  # their probabilities are equal in fp32, the logits are not
    for n_active in (1, 3, 16):
        for normalize in (False, True):
            chosen, weights = route(logits, n_active, normalize)
            outputs = {"experts": (chosen, EXACT), "weights": (weights, EXACT)}
            name = f"route.{n_active}{'n' if normalize else ''}"
            vectors.add(name, "route", {"logits": logits}, outputs, n_active=n_active, norm_topk_prob=normalize)


def add_combine(vectors: OpVectors, rng: np.random.Generator) -> None:
    """The weighted sum of each token's experts; as many as there are, and one."""
    for k in (1, 3, 8):
        chosen, weights = route(rng.standard_normal((5, 8)).astype(F32), k, normalize=False)
        outputs = (rng.standard_normal((5, k, 24)) * np.exp(rng.uniform(-3, 3, (5, k, 1)))).astype(F32)
        inputs = {"outputs": outputs, "experts": chosen, "weights": weights}
        out = combine(outputs, chosen, weights)
        vectors.add(f"moe_combine.{k}", "moe_combine", inputs, {"out": (out, EXACT)})


# ----------------------------------------------------------------------------
# The operator


def is_clear(product: np.ndarray, x: Quantized | MX, group: int) -> bool:
    """Whether results stay the same codes under noise as large as another order of additions makes, and larger."""
    rng, half = np.random.default_rng(0), product.shape[1] // 2
    sizes = np.where(np.isfinite(product), np.abs(product), 0)  # NaN and infinities are so in any order
    size = NOISE * sizes.max(axis=1, keepdims=True, initial=0) * (product != 0)

    def codes(values: np.ndarray) -> np.ndarray:
        return quantize_like(swiglu(values[:, :half], values[:, half:]), x, group).codes

    with np.errstate(invalid="ignore"):
        noisy = ((product + size * rng.standard_normal(product.shape)).astype(F32) for _ in range(NOISY_RUNS))
        return all(np.array_equal(codes(values), codes(product)) for values in noisy)


def add_case(
    vectors: OpVectors,
    case: str,
    x: Quantized | MX,
    weight: Experts,
    group_list: np.ndarray = ENDS,
    kind: str = "cumsum",
    exact: bool = False,
    stored: dict[str, np.ndarray] | None = None,
    **parameters: object,
) -> bool:
    """One call of the operator, with its fp32 results before they are quantized, unless some of them are no numbers.

    stored: a ladder's weights as a file has them, by their parts' names.
    exact: fp32 arithmetic gives the same in any order, so results may lie in the middle of two codes. Otherwise, if
    one comes near it, nothing is added and the answer is False.
    """
    starts, n = group_starts(group_list, kind, len(weight.codes), len(x.codes)), weight.codes.shape[1]
    product, sums = np.zeros((starts[-1], n), F32), []
    for i, (start, end) in enumerate(pairwise(starts)):
        product[start:end] = expert_matmul(rows_of(x, slice(start, end)), weight, i)
        if isinstance(weight, Int4Experts | Quantized):
            sums.append(expert_sums(rows_of(x, slice(start, end)), weight, i))
    group = output_group(x, weight)
    if not exact and not is_clear(product, x, group):
        return False

    before = empty_like(x, n // 2, group)
    for array in before[:2]:
        array.view(np.uint8)[...] = UNTOUCHED
    out = before._replace(codes=before.codes.copy(), scales=before.scales.copy())
    grouped_matmul_swiglu_quant(x, weight, group_list, kind, out)
    stored = stored or {"codes": weight.codes, "scales": weight.scales}
    inputs = {"x.codes": x.codes, "x.scales": x.scales} | {f"weight.{part}": v for part, v in stored.items()}
    inputs |= {"group_list": group_list, "before.codes": before.codes, "before.scales": before.scales}
    outputs = {
        "out.codes": (out.codes, EXACT),
        "out.scales": (out.scales, EXACT),
    }
    if np.isfinite(product).all():
        hidden = swiglu(product[:, : n // 2], product[:, n // 2 :])
        outputs |= {"product": (product, EXACT), "hidden": (hidden, EXACT)}
    if sums:
        outputs["sums"] = np.concatenate(sums), EXACT
    if isinstance(weight, Int4Experts):
        outputs["assist"] = weight.assist, EXACT
    ops = {Int8Experts: "grouped_a8w8", Int4Experts: "grouped_a8w4", MX: "grouped_mxfp8", Quantized: "ladder_experts"}
    op = ops[type(weight)]
    vectors.add(f"{op}.{case}", op, inputs, outputs, group_list_type=kind, **parameters)
    return True


def until_clear(add: Callable[[], bool]) -> None:
    """Calls `add`, which draws its operands anew each time, until it has added a case."""
    while not add():
        pass


def int8_rows(rng: np.random.Generator, m: int = M, k: int = K // 2) -> Quantized:
    """Tokens with a scale each, codes down to -128."""
    return Quantized(rng.integers(-128, 128, (m, k)).astype(np.int8), rng.uniform(0.5, 2, (m, 1)).astype(F32) / 64)


def add_int8(vectors: OpVectors, rng: np.random.Generator) -> None:
    """A8W8."""

    def experts(n_experts: int = E, n: int = N // 2, k: int = K // 2) -> Int8Experts:
        scales = rng.uniform(0.5, 2, (n_experts, n)).astype(F32) / 256
        return Int8Experts(rng.integers(-127, 128, (n_experts, n, k)).astype(np.int8), scales)

    def edges() -> bool:
        x, weight = int8_rows(rng), experts()
        x.codes[0], x.codes[1] = 0, -128  # a token of zeros: scale 0, codes 0
        x.codes[2, 5:] = 0
        weight.codes[1, :3], weight.codes[1, 17] = -128, 0
        weight.scales[3, [8, 24]] = 50  # one output that outweighs the rest
        return add_case(vectors, "edges", x, weight)

    counts = np.diff(ENDS, prepend=0).astype(np.int32)
    until_clear(lambda: add_case(vectors, "cumsum", int8_rows(rng), experts()))
    until_clear(lambda: add_case(vectors, "count", int8_rows(rng), experts(), counts, "count"))
    ends = np.array([2, 2, 5], np.int32)
    until_clear(lambda: add_case(vectors, "odd", int8_rows(rng, 5, 33), experts(3, 22, 33), ends))
    until_clear(edges)

    # First half 64, which swish leaves as it is; second half 127 and odd halves: all that is quantized is k / 2.
    x, w = np.zeros((4, K), np.int8), np.zeros((N, K), np.int8)
    x[:, 0], x[:, 1], x[:, 2] = 64, [1, -1, 1, -1], [1, -1, 1, -1]
    w[: N // 2, 0] = 2
    w[N // 2 :, 1] = np.arange(N // 2) * 2 - N // 2 + 1
    w[N // 2, 1:3] = 127
    operands = Quantized(x, np.ones((4, 1), F32)), Int8Experts(w[None], np.full((1, N), 0.5, F32))
    add_case(vectors, "ties", *operands, np.array([4], np.int32), exact=True)


def add_int4(vectors: OpVectors, rng: np.random.Generator) -> None:
    """A8W4: a scale per output channel, or per group of 32 along K."""

    def experts(n_groups: int) -> Int4Experts:
        codes = rng.integers(-8, 8, (E, N // 2, K)).astype(np.int8)
        scales = (
            (rng.uniform(0.5, 2, (E, N // 2, n_groups)) / 16).astype(np.float16 if n_groups > 1 else F32).astype(F32)
        )
        return Int4Experts(codes, scales, assist_matrix(codes, scales))

    def edges() -> bool:
        x, weight = int8_rows(rng, k=K), experts(2)
        x.codes[0], x.codes[1], x.codes[2] = 0, -128, 127
        weight.codes[1, : N // 8], weight.codes[1, N // 4 : 3 * N // 8] = -8, 7
        weight.scales[3, 5, 1] = 0
        return add_case(vectors, "edges", x, weight._replace(assist=assist_matrix(weight.codes, weight.scales)))

    until_clear(lambda: add_case(vectors, "channel", int8_rows(rng, k=K), experts(1)))
    until_clear(lambda: add_case(vectors, "groups", int8_rows(rng, k=K), experts(2)))
    until_clear(edges)


LADDER = (
    (MatrixFormat(8), 64), (MatrixFormat(4, 32), 64), (MatrixFormat(4, 64), 192),
    (MatrixFormat(2, 64, two_level=True), 192), (MatrixFormat(4, 64, sparse=True), 128),
    (MatrixFormat(4, 32, int8_scales=True), 64), (MatrixFormat(5, 64, int8_scales=True), 192),
)  # fmt: skip


def with_usual_scales(m: Matrix, rng: np.random.Generator) -> Matrix:
    """A random matrix whose weights are as large as a model's are."""
    scales = rng.uniform(0.5, 2, m.scales.shape) / 2**m.form.bits / 8
    if m.form.two_level or m.form.int8_scales:
        return m._replace(row_scales=(scales[:, 0] / 32).astype(F32))
    return m._replace(scales=scales.astype(m.scales.dtype))


def add_ladder_case(
    vectors: OpVectors, rng: np.random.Generator, form: MatrixFormat, k: int, n: int = 2 * N, ends: np.ndarray = ENDS
) -> bool:
    """Experts of n x k weights as a ladder's file has them; all tokens have groups of activations.

    A row of nobody comes behind the last expert's, if `ends` are ENDS.
    """
    group, n_experts, n_rows = 32 if form.group == 32 else 64, len(ends), M if ends is ENDS else int(ends[-1])
    m = with_usual_scales(random_matrix(rng, form, n_experts * n, k), rng)
    stored = {part: v.reshape(n_experts, n, *v.shape[1:]) for part, v in pack_matrix(m).items() if part != "table"}
    if form.has_table:  # each expert has another
        stored = {"table": np.stack([random_table(rng, form.bits) for _ in range(n_experts)])} | stored
    x = Quantized(
        rng.integers(-127, 128, (n_rows, k)).astype(np.int8),
        (rng.uniform(0.5, 2, (n_rows, k // group)) / 64).astype(F32),
    )
    weight, kind = expand_parts(stored, form, group), format_name(form)
    return add_case(
        vectors, f"{kind}.{k}", x, weight, ends, stored=stored, bits=form.bits, group=form.group, sparse=form.sparse,
        two_level=form.two_level, int8_scales=form.int8_scales, group_size=group,
    )  # fmt: skip


def add_ladder(vectors: OpVectors, rng: np.random.Generator) -> None:
    """Experts of some formats, with K columns of each."""
    for form, k in LADDER:
        until_clear(partial(add_ladder_case, vectors, rng, form, k))


def mx_operands(rng: np.random.Generator, element: Element, block: int, k: int, n: int) -> tuple[MX, MX]:
    """Tokens (M, k) and experts (E, n, k)."""
    x = quantize_mx(rng.standard_normal((M, k)).astype(F32) * F32(3), block, element)
    w = quantize_mx(rng.standard_normal((E * n, k)).astype(F32) * F32(0.2), block, element)
    return x, MX(w.codes.reshape(E, n, k), w.scales.reshape(E, n, -1), element)


def add_mxfp8(vectors: OpVectors, rng: np.random.Generator) -> None:
    """MXFP8: both elements, blocks of 32 and 64."""

    def edges() -> bool:
        x, weight = mx_operands(rng, E4M3, 32, K, N)
        x.codes[0], x.scales[0] = 0x80, 0  # a token of zeros
        x.codes[1, 3], x.scales[1, 0] = 0x7E, 140  # one huge value
        x.scales[3, 1] = SCALE_NAN  # no number, nor is any result of this token
        weight.scales[3, 5, 0] = 0  # 2^-127: nothing beside the other block
        weight.codes[3, 6] = 0x80
        return add_case(vectors, "edges", x, weight, element="e4m3", block=32)

    for element, block, k, n in ((E4M3, 32, K, N), (E5M2, 32, K // 2, N), (E4M3, 64, K, 2 * N)):

        def add(element: Element = element, block: int = block, k: int = k, n: int = n) -> bool:
            x, weight = mx_operands(rng, element, block, k, n)
            return add_case(vectors, f"{element.name}b{block}", x, weight, element=element.name, block=block)

        until_clear(add)
    until_clear(edges)

    # First half 128; second half 17 to 31, in the middle of two elements, the last of them beyond the largest.
    x, w = np.zeros((4, K), F32), np.zeros((N, K), F32)
    x[:, 0], x[:, 1], x[:, 2] = 64, [1, -1, 1, -1], [1, -1, 1, -1]
    w[: N // 2, 0] = 2
    w[N // 2 : 3 * N // 4, 1] = 16
    w[N // 2 :, 2] = np.arange(N // 2) % 8 * 2 + 1
    ones = partial(np.full, fill_value=SCALE_BIAS, dtype=np.uint8)
    tokens = MX(encode_elements(x, E4M3), ones((4, K // 32)))
    weight = MX(encode_elements(w, E4M3)[None], ones((1, N, K // 32)))
    add_case(vectors, "ties", tokens, weight, np.array([4], np.int32), exact=True, element="e4m3", block=32)


def add_mx_specials(vectors: OpVectors, rng: np.random.Generator) -> None:
    """What is no finite number, in places of its own: NaN among elements and scales, and E5M2's infinity.

    Rows 0 to 2 are expert 1's, rows 3 to 5 expert 3's. A result has two blocks: one may have numbers where the
    other has none.
    """
    half = N  # gates come before it, what goes up behind it

    def operands(element: Element) -> tuple[MX, MX]:
        return mx_operands(rng, element, 32, K, 2 * half)

    def nan() -> bool:
        x, w = operands(E4M3)
        x.codes[2, 7] = 0x7F  # in an activation: all of row 2
        x.codes[5, 40] = 0xFF
        w.codes[1, 9, 33] = 0xFF  # in a gate: block 0 of expert 1's rows
        w.scales[3, half + 40, 1] = SCALE_NAN  # a scale in what goes up: block 1 of expert 3's rows
        return add_case(vectors, "e4m3nan", x, w, element="e4m3", block=32)

    def infinity() -> bool:
        x, w = operands(E5M2)
        x.codes[0, 5] = 0x7C  # row 0 of expert 1, whose gates take it with positive weights: all of it is infinite
        w.codes[1, :half, 5] = w.codes[1, :half, 5] & 0x7F | 1
        w.codes[1, half:, 5] |= 1  # not 0, which would make it NaN
        w.codes[3, half + 3, 20] = 0xFC  # in what goes up: block 0 of expert 3's rows
        x.codes[3:, 20] |= 1
        return add_case(vectors, "e5m2infinity", x, w, element="e5m2", block=32)

    def nan_of_e5m2() -> bool:
        x, w = operands(E5M2)
        x.codes[0, 5], x.codes[1, 6], x.codes[2, 7] = 0x7D, 0xFE, 0x7F
        w.codes[3, 9, 33], w.codes[3, half + 40, 2] = 0x7E, 0xFD
        return add_case(vectors, "e5m2nan", x, w, element="e5m2", block=32)

    until_clear(nan)
    until_clear(infinity)
    until_clear(nan_of_e5m2)
