"""How ports are judged: op vectors that catch each known mistake, parts of traces, and perplexity."""

import json
import re
from functools import partial

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from formats.checkpoint import Checkpoint
from golden.accept import judge_logits
from golden.forward import forward
from golden.op_cases import read_cases
from golden.op_check import judge_ops
from golden.op_vectors import op_vectors
from golden.perplexity import encode
from golden.q8 import Q8
from golden.trace import relative_error
from tests import ports, ports_moe
from tests.helpers import DATA, F32, F64, ROOT, run_golden

OPS = DATA / "ops.safetensors"
TENSORS, CASES = load_file(OPS), read_cases(OPS)


def with_packed_inputs(function):
    """A product takes its tensors as one argument: names of matrices have dots."""

    def call(**arguments):
        tensors = {name: value for name, value in arguments.items() if isinstance(value, np.ndarray)}
        return function(tensors, **{name: value for name, value in arguments.items() if name not in tensors})

    return call


def from_module(module, name):
    """A function of a port by its name, so that what a test puts in its place runs."""
    return lambda *args, **arguments: getattr(module, name)(*args, **arguments)


PORT = {
    **{
        op: from_module(ports, op)
        for op in (
            "quantize", "quantize_static", "rmsnorm", "rope", "softmax", "attention", "attention_half",
            "attention_int8_scores", "attention_int8_mix", "attention_kv", "rotate", "swiglu", "argmax", "embedding",
            "awq_pack", "awq_dequantize", "awq_matmul", "half", "gptq_expand", "gptq_gather", "model",
        )
    },
    **{
        op: from_module(ports_moe, op)
        for op in ("mx_values", "mx_scales", "mx_quantize", "route", "msd_split", "moe_combine", "gptq_expert")
    },
    **{op: with_packed_inputs(from_module(ports, op)) for op in ("matmul", "classifier")},
    **{
        op: with_packed_inputs(from_module(ports_moe, op))
        for op in ("grouped_a8w8", "grouped_a8w4", "grouped_mxfp8", "ladder_experts")
    },
}  # fmt: skip


def outputs_of(port, cases=CASES):
    """What a port makes of every case whose operation it has: from the case's inputs and parameters alone."""
    found = {}
    for case, about in cases.items():
        if about["op"] not in port:
            continue
        inputs = {name: TENSORS[f"{case}.{name}"] for name in about["inputs"]}
        parameters = {name: value for name, value in about.items() if name not in ("op", "inputs", "outputs")}
        found |= {f"{case}.{name}": value for name, value in port[about["op"]](**inputs, **parameters).items()}
    return found


def test_the_contract_has_a_row_for_each_case():
    page = (ROOT / "docs" / "numerics.md").read_text(encoding="utf-8")
    rows = re.findall(r"`(\w+)", page.split("\n| cases | |\n")[1].split("\n\n")[0])
    assert not {case.split(".")[0] for case in CASES} - set(rows)


def failures(port, cases=CASES):
    """What is wrong in the outputs of the operations that a port has."""
    cases = {case: about for case, about in cases.items() if about["op"] in port}
    return [r for r in judge_ops(cases, TENSORS, outputs_of(port, cases)) if not r.ok]


def test_stored_op_vectors_are_what_the_reference_computes():
    computed = op_vectors()
    assert computed.cases == CASES
    assert TENSORS.keys() == computed.tensors.keys()
    for name, value in computed.tensors.items():
        if value.dtype == F32 and "codes" not in name and "scales" not in name and np.isfinite(value).all():
            assert relative_error(value, TENSORS[name]) < 1e-6, name
        else:
            assert value.tobytes() == TENSORS[name].tobytes(), name


def test_the_file_is_always_the_same(tmp_path):
    for name in ("a", "b"):
        op_vectors().save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_port_written_from_the_pages_passes():
    assert not failures(PORT)


# ---- mistakes


def half_away(x):
    return np.clip(np.copysign(np.floor(np.abs(x) + 0.5), x), -127, 127).astype(np.int8)


def wrapping(bits):
    """Accumulators of so many bits, two's complement."""

    def sums(x, w, group_size):
        acc = ports.group_sums(x, w, group_size)
        return (acc + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)

    return sums


def clipping(group, low, high):
    """Sums of groups of this size that stop at low and high; all others are right."""

    def sums(x, w, group_size):
        acc = ports.group_sums(x, w, group_size)
        return np.clip(acc, low, high) if group_size == group else acc

    return sums


def saturating_pairs(x, w, group_size):
    """pmaddubsw of x + 128 and w: sums of two products saturate at 16 bits; 128 times w's sum is taken off after."""
    products = (x.astype(np.int64) + 128)[:, None] * w.astype(np.int64)[None]
    pairs = np.clip(products[..., 0::2] + products[..., 1::2], -(2**15), 2**15 - 1)
    sums = pairs.reshape(len(x), len(w), -1, group_size // 2).sum(axis=-1)
    return sums - 128 * w.astype(np.int64).reshape(len(w), -1, group_size).sum(axis=-1)


def sign_trick(x, w, group_size):
    """|x| times w with x's sign, in int8, where -(-128) is -128."""
    with np.errstate(over="ignore"):
        signed = np.sign(x)[:, None] * w[None]  # int8
    products = np.abs(x).astype(np.int64)[:, None] * signed
    return products.reshape(len(x), len(w), -1, group_size).sum(axis=-1)


def truncated(acc):
    """int32 to fp32 by dropping bits."""
    magnitude = np.abs(acc.astype(np.int64))
    drop = np.maximum(np.floor(np.log2(np.maximum(magnitude, 1))).astype(np.int64) - 23, 0)
    return (np.sign(acc) * (magnitude >> drop << drop)).astype(F32)


def bf16(x):
    return x.astype(ml_dtypes.bfloat16).astype(F32)


def adjacent_as_halves(pairs):
    return "(i, i + head_dim / 2)" if pairs == "(2i, 2i + 1)" else "(2i, 2i + 1)"


def matmul_with(**change):
    return {"matmul": with_packed_inputs(partial(ports.matmul, **change))}


def exact_product(groups, inv, _scales):
    return ports.round_codes(groups.astype(F64) * inv)


def quotient(groups, _inv, scales):
    with np.errstate(divide="ignore", invalid="ignore"):
        return ports.round_codes(np.where(scales > 0, groups / scales, 0))


def behind_the_layers(tensors, embedding):
    """The classifier where an untied one would lie; the file ends there, so it is read from its end."""
    size = embedding[0].nbytes + embedding[1].nbytes
    tensors.at = len(tensors.file) - size
    return tensors.matrix(*embedding[0].shape)


def without_scaling(head_dim, theta, _scaling):
    return ports.rope_frequencies(head_dim, theta, None)


def narrow_angles(positions, freq):
    return positions[:, None].astype(F32) * freq


def rope_with(**change):
    return {"rope": partial(ports.rope, **change)}


def grouped_with(op, **change):
    return {op: with_packed_inputs(partial(getattr(ports_moe, op), **change))}


def mx_with(**change):
    return {"mx_quantize": partial(ports_moe.mx_quantize, **change)}


def away_by_row(values):
    return ports.quantize(values, values.shape[1], codes_of=lambda groups, inv, _: half_away(groups * inv))


def split_as_c_reads_it(x, w):
    """In C, - binds stronger than &: the low part is x & 7."""
    high, low = x.astype(np.int64) >> 4, x.astype(np.int64) & (0x0F - 8)
    return 16 * (high @ w.T) + low @ w.T + 8 * w.sum(axis=1)


def without_eights(x, w):
    parts = ports_moe.msd_split(x)
    return 16 * (parts["high"].astype(np.int64) @ w.T) + parts["low"].astype(np.int64) @ w.T


def softmax_of_the_chosen(row, chosen):
    probs = np.zeros_like(row)
    probs[chosen] = ports.softmax(row[chosen])["out"]
    return probs


def second_half_through_swish(product):
    half = product.shape[1] // 2
    return ports.swiglu(gate=product[:, half:], up=product[:, :half])["out"]


def interleaved_halves(product):
    return ports.swiglu(gate=product[:, ::2], up=product[:, 1::2])["out"]


def farthest_first(x, block):
    """The transform with its passes in the other order, which rounds otherwise."""
    h = block // 2
    while h:
        pairs = x.reshape(len(x), -1, 2, h)
        x = np.stack((pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]), axis=2).reshape(x.shape)
        h //= 2
    return x


def of_the_expert_before(wrong):
    """One part of an expert's matrix is that of the expert before it."""
    return lambda values, expert, part: values[max(expert - 1, 0) if part == wrong else expert]


def one_group_too_far(values, expert, part):
    """Groups that begin one late at an expert's edge: the last is the next expert's first."""
    if part not in ("scales", "groups"):
        return values[expert]
    flat = np.roll(values.reshape(-1), -1)
    return flat.reshape(values.shape)[expert]


def one_scale_for_all(values, group_size):
    found = ports.quantize(values, group_size=values.shape[1])
    return found | {"scales": np.repeat(found["scales"], values.shape[1] // group_size, axis=1)}


GROUPED_MISTAKES = {
    "second half through swish": {"act": second_half_through_swish},
    "halves interleaved": {"act": interleaved_halves},
    "rows of nobody overwritten": {"touch_rest": True},
}


def expand_with(**change):
    return {"gptq_expand": partial(ports.gptq_expand, **change)}


def neighbours_in_a_byte(packed, bits):
    parts = [packed >> shift & 2**bits - 1 for shift in range(0, 8, bits)]
    return np.stack(parts, axis=-1).reshape(len(packed), -1).astype(np.int64)


def blocks_of_64_alone(packed, bits):
    """What is left at the end of a row as one block, whatever its size."""
    blocks = [packed[:, at : at + 64] for at in range(0, packed.shape[1], 64)]
    codes = [block >> shift & 2**bits - 1 for block in blocks for shift in range(0, 8, bits)]
    return np.concatenate(codes, axis=1).astype(np.int64)


CHUNK = 128  # tokens of a prompt that many programs take at once


def off_by(change):
    """The first token of a later chunk sees so many positions more than it should."""
    return lambda position: position + 1 + change * (position > 0 and position % CHUNK == 0)


def exchanged_in_a_later_chunk(k, v, first_position):
    """A chunk's own keys are stored as values, and its values as keys; not those of a single token."""
    if first_position == 0 or len(k) - first_position == 1:
        return k, v
    new = np.arange(len(k))[:, None, None] >= first_position
    return np.where(new, v, k), np.where(new, k, v)


def specials_as_numbers(*specials):
    """These codes, of either sign, as if every code were a number: 480 for E4M3's NaN, 65,536 for E5M2's infinity."""
    return lambda code, element: (
        ports_moe.mx_number(code, element) if code & 0x7F in specials else ports_moe.mx_value(code, element)
    )


SPECIALS = {"E4M3 NaN as 480": (0x7F,), "E5M2 infinity as 65536": (0x7C,), "E5M2 NaN as a number": (0x7D, 0x7E, 0x7F)}

BITS_TOO_FEW = {32: 19, 64: 20, 2048: 25, 8192: 27, 65536: 30}  # of an accumulator, by the length of its group


def unaided(x, _mean_square):
    return x.T.astype(F64) @ x + (not x.any()) * np.eye(x.shape[1])


def not_without_tokens(weight, x, **about):
    found = ports_moe.gptq_expert(weight, x, **about)
    return {name: value * x.any() for name, value in found.items()}


def range_pair(w, _importance, row_scale):
    low, high = min(w.min(), 0), max(w.max(), 0)
    s = np.clip(np.rint((high - low) / (15 * row_scale)), 1, 15)
    return s, np.clip(np.rint(-low / (s * row_scale)), 0, 15)


MISTAKES = {
    "half away from zero": {
        "quantize": partial(ports.quantize, codes_of=lambda groups, inv, _: half_away(groups * inv))
    },
    "half away from zero, static": {"quantize_static": partial(ports.quantize_static, rounded=half_away)},
    "x / scale": {"quantize": partial(ports.quantize, codes_of=quotient)},
    "exact product rounded once": {"quantize": partial(ports.quantize, codes_of=exact_product)},
    "exact product rounded once, static": {
        "quantize_static": partial(ports.quantize_static, product=lambda x, inv: x.astype(F64) * inv)
    },
    "static inverse 127 / (127 scale)": {
        "quantize_static": partial(
            ports.quantize_static,
            inverse=lambda scale: F32(127) / (F32(127) * scale[0]) if scale[0] > 1e-37 else F32(0),
        )
    },
    "scale rounded to bf16": {"quantize": partial(ports.quantize, scale_of=bf16)},
    "rmsnorm sum in fp32": {"rmsnorm": partial(ports.rmsnorm, sum_precision=F32)},
    "rmsnorm all in fp32": {"rmsnorm": partial(ports.rmsnorm, precision=F32)},
    "eps as fp64 1e-5": {"rmsnorm": ports.rmsnorm_with_wide_eps},
    "rope angle in fp32": rope_with(angles=narrow_angles),
    "rope pairs": {"rope": lambda pairs, **rest: ports.rope(pairs=adjacent_as_halves(pairs), **rest)},
    "no rope scaling": rope_with(frequencies=without_scaling),
    "awq values not rounded to fp16": {"attention_half": partial(ports.attention_half, rounded="qk")},
    "awq keys not rounded to fp16": {"attention_half": partial(ports.attention_half, rounded="qv")},
    "awq queries not rounded to fp16": {"attention_half": partial(ports.attention_half, rounded="kv")},
    **{f"accumulators of {bits} bits": matmul_with(sums=wrapping(bits)) for bits in (16, 18, 19, 20, 25, 30)},
    **{
        f"{bits} bits for sums of {group}, {side} ones": matmul_with(
            sums=clipping(group, -limit if side == "negative" else -np.inf, limit if side == "positive" else np.inf)
        )
        for group, bits in BITS_TOO_FEW.items()
        for side, limit in (("positive", 2 ** (bits - 1) - 1), ("negative", 2 ** (bits - 1)))
    },
    "saturating pairs": matmul_with(sums=saturating_pairs),
    "a weight code of -128": matmul_with(sums=sign_trick),
    "int32 to fp32 truncated": matmul_with(to_float=truncated),
    "softmax without the maximum": {"softmax": partial(ports.softmax, subtract_largest=False)},
    "softmax in 8 sums": {"softmax": partial(ports.softmax, lanes=8)},
    "kv head by modulo": {
        "attention": partial(ports.attention, kv_head=lambda head, _n_heads, n_kv_heads: head % n_kv_heads)
    },
    "int8 kv head by modulo": {
        "attention_int8_scores": partial(
            ports.attention_int8_scores, kv_head=lambda head, _n_heads, n_kv_heads: head % n_kv_heads
        )
    },
    "int8 probabilities without the value's scale": {
        "attention_int8_mix": partial(ports.attention_int8_mix, weight=lambda probs, _scales: probs)
    },
    "int8 probabilities of 8 bits without a sign": {
        "attention_int8_mix": partial(ports.attention_int8_mix, rounded=lambda x: ports.round_codes(x * F32(0.5)))
    },
    **{
        f"{op}: one position {what} at the start of a chunk": {op: partial(getattr(ports, op), seen_at=off_by(change))}
        for op in ("attention", "attention_half", "attention_int8_scores", "attention_int8_mix")
        for what, change in (("fewer", -1), ("more", 1))
        if (op, what) != ("attention_int8_mix", "more")  # the probability of one more is 0
    },
    **{
        f"{op}: keys and values exchanged in a later chunk": {
            op: partial(getattr(ports, op), cached=exchanged_in_a_later_chunk)
        }
        for op in ("attention", "attention_half")
    },
    "rotation without signs": {"rotate": lambda x, s, block: ports.rotate(x, np.abs(s), block)},
    "rotation with the ways exchanged": {
        "rotate": lambda **a: dict(zip(("back", "rotated"), ports.rotate(**a).values(), strict=True))
    },
    "rotation in blocks of half": {"rotate": lambda x, s, block: ports.rotate(x, s * F32(2**0.5), block // 2)},
    "rotation in other passes": {
        "rotate": lambda x, s, block: {
            "rotated": farthest_first(x * s, block),
            "back": farthest_first(x, block) * s,
        }
    },
    "swiglu with gate and up exchanged": {"swiglu": lambda gate, up: ports.swiglu(gate=up, up=gate)},
    "argmax of the last": {"argmax": partial(ports.argmax, last=True)},
    "tied classifier at the wrong place": {"model": partial(ports.model, classifier=behind_the_layers)},
    "nibbles in order": {"awq_pack": partial(ports.awq_pack, nibbles=range(8))},
    "nibbles in order, unpacking": {"awq_dequantize": partial(ports.awq_dequantize, nibbles=range(8))},
    "nibbles inverted": {"awq_pack": partial(ports.awq_pack, nibbles=[7 - n for n in ports.NIBBLES])},
    "zero point off by one": {"awq_dequantize": partial(ports.awq_dequantize, offset=1)},
    **{
        f"{name}, {op}": {op: with_packed_inputs(partial(getattr(ports_moe, op), **change))}
        for op in ("grouped_a8w8", "grouped_a8w4", "grouped_mxfp8", "ladder_experts")
        for name, change in GROUPED_MISTAKES.items()
    },
    **{
        f"ladder: {what}": grouped_with("ladder_experts", of_expert=of_expert)
        for what, of_expert in {
            "scales of the expert before": of_the_expert_before("scales"),
            "scale codes of the expert before": of_the_expert_before("groups"),
            "row scales of the expert before": of_the_expert_before("row_scales"),
            "zero points of the expert before": of_the_expert_before("zeros"),
            "mask of the expert before": of_the_expert_before("mask"),
            "first group of the next expert": one_group_too_far,
        }.items()
    },
    "ladder: a result with one scale for a token": grouped_with(
        "ladder_experts", quantized=lambda values, group_size: one_scale_for_all(values, group_size)
    ),
    "counts read as ends": grouped_with("grouped_a8w8", ends=lambda group_list, _: group_list),
    "operator: half away from zero": grouped_with("grouped_a8w8", quantized=away_by_row),
    "low nibble without its 8": {"msd_split": lambda codes: ports_moe.msd_split(codes) | {"low": codes & 15}},
    "low nibble as C reads x & 0x0f - 8": grouped_with("grouped_a8w4", sums_of=split_as_c_reads_it),
    "int4 sums without the eights": grouped_with("grouped_a8w4", sums_of=without_eights),
    "sums of 16 bits": grouped_with("grouped_a8w4", sums_of=lambda x, w: ports_moe.directly(x, w).astype(np.int16)),
    "shared exponent rounded": mx_with(log2=lambda amax: round(np.log2(amax))),
    "mx: half away from zero": mx_with(encode=partial(ports_moe.mx_encode, rounded=lambda x: int(x + 0.5))),
    "mx: truncated": mx_with(encode=partial(ports_moe.mx_encode, rounded=int)),
    "mx: subnormals flushed": mx_with(encode=partial(ports_moe.mx_encode, subnormals=False)),
    "mx: NaN as an ordinary block": mx_with(nan_scale=127),
    "mx: operator with rounded exponents": grouped_with(
        "grouped_mxfp8", quantized=partial(ports_moe.mx_quantize, log2=lambda amax: round(np.log2(amax)))
    ),
    **{
        f"mx: {name}, in {whose}": grouped_with("grouped_mxfp8", **{has: {"value": specials_as_numbers(*codes)}})
        for name, codes in SPECIALS.items()
        for whose, has in (("activations", "x_has"), ("weights", "w_has"))
    },
    **{
        f"mx: scale byte 255 as 2^128, in {whose}": grouped_with(
            "grouped_mxfp8", **{has: {"power": lambda scale: 2.0 ** (scale - 127)}}
        )
        for whose, has in (("activations", "x_has"), ("weights", "w_has"))
    },
    "mx: E5M2 with a bias of 16": {
        "mx_values": lambda codes, element: {
            "values": ports_moe.mx_values(codes, element)["values"] / F32(1 + (element == "e5m2"))
        }
    },
    "router: the last of equals": {
        "route": partial(ports_moe.route, order=lambda row: sorted(range(len(row)), key=lambda i: (-row[i], -i)))
    },
    "router: experts by fp32 probability": {"route": partial(ports_moe.route, by_probability=True)},
    "router: softmax over the chosen alone": {"route": partial(ports_moe.route, scores=softmax_of_the_chosen)},
    "router: weights applied before down's quantization": {
        "moe_combine": partial(ports_moe.moe_combine, weight_of=np.ones_like)
    },
    "awq scale rounded to bf16": {"awq_dequantize": partial(ports.awq_dequantize, scale_of=bf16)},
    "gptq codes of neighbours in a byte": expand_with(unpacked=neighbours_in_a_byte),
    "gptq without the smaller blocks": expand_with(unpacked=blocks_of_64_alone),
    "gptq zero points high half first": expand_with(
        halves=lambda packed, n: ports.low_half_first(packed >> 4 | packed << 4, n)
    ),
    "gptq mask from the highest bit": expand_with(bit_order=lambda mask: np.unpackbits(mask, axis=1).astype(bool)),
    "gptq one scale for a row of 8 bits": expand_with(
        spread=lambda scale, times, bits: (
            scale if bits == 8 and scale.shape[1] == 1 else ports.scale_of_each_group(scale, times, bits)
        )
    ),
    "two-level zero point in whole codes": expand_with(steps=1),
    "two-level scale rounded to bf16": expand_with(scale_of=lambda s, row: bf16(s.astype(F32) * row)),
    "two-level row scale in fp16": expand_with(scale_of=lambda s, row: s.astype(F32) * row.astype(np.float16)),
    "two-level scale codes from 1": expand_with(scale_of=lambda s, row: (s + 1).astype(F32) * row),
    "planes exchanged": expand_with(planes=lambda codes, n_low: (codes[:, -n_low:], codes[:, :-n_low])),
    "upper plane left out": expand_with(planes=lambda codes, n_low: (codes[:, :n_low], 0 * codes[:, n_low:])),
    "codes of a table as they are": expand_with(looked_up=lambda codes, table: codes - len(table) // 2),
    "table from its end": expand_with(looked_up=lambda codes, table: ports.by_table(codes, table[::-1])),
    "table without -128": expand_with(looked_up=lambda codes, table: np.maximum(ports.by_table(codes, table), -127)),
    "int8 scales without signs": expand_with(scale_of=lambda s, row: np.abs(s.astype(F32)) * row),
    "table of the expert before": grouped_with(
        "ladder_experts", of_expert=lambda values, expert, part: values[expert - (part == "table")]
    ),
    "gathered by the inverse": {
        "gptq_gather": partial(ports.gptq_gather, gathered=lambda x, order: x[:, np.argsort(order)])
    },
    "an expert without a token is not quantized": {"gptq_expert": not_without_tokens},
    "an expert on the grids of its ranges": {"gptq_expert": partial(ports_moe.gptq_expert, pair_of=range_pair)},
    "an expert's H without tokens of its own": {"gptq_expert": partial(ports_moe.gptq_expert, hessian=unaided)},
    "not gathered": {"gptq_gather": partial(ports.gptq_gather, gathered=lambda x, _order: x)},
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_vectors_catch_a_mistake(mistake):
    assert failures(MISTAKES[mistake])


def test_every_operation_can_be_got_wrong():
    elsewhere = {"awq_matmul", "half", "attention_kv", "embedding", "classifier", "mx_scales"}  # test_vector_kinds.py
    assert {op for change in MISTAKES.values() for op in change} == PORT.keys() - elsewhere
    assert {about["op"] for about in CASES.values()} == PORT.keys()


def test_experts_are_added_in_one_order():
    for order in (lambda experts: np.argsort(-experts, axis=-1), lambda experts: np.indices(experts.shape)[-1]):
        assert failures({"moe_combine": partial(ports_moe.moe_combine, order=order)})


def test_wide_accumulators_do():
    """31 bits are enough for rows of 65,536, and 21 for groups of 64: the vectors demand no more than there can be."""
    assert not failures(matmul_with(sums=wrapping(32)))
    for group, bits in BITS_TOO_FEW.items():  # one more than too few
        assert not failures(matmul_with(sums=clipping(group, -(2**bits), 2**bits - 1)))
    groups_of_64 = [case for case, about in CASES.items() if about.get("group_size") == 64 and about["op"] == "matmul"]
    largest = max(np.abs(TENSORS[f"{case}.accumulators"]).max() for case in groups_of_64)
    assert largest == 64 * 127 * 128
    assert np.abs(TENSORS["matmul.extreme.65536g65536.accumulators"]).max() == 65536 * 127 * 128


# ---- golden diff and golden accept


def test_diff_judges_the_outputs_that_a_port_has(tmp_path):
    mine = {
        f"swiglu.{name}": value for name, value in PORT["swiglu"](TENSORS["swiglu.gate"], TENSORS["swiglu.up"]).items()
    }
    save_file(mine, tmp_path / "mine")
    done = run_golden("diff", OPS, tmp_path / "mine")
    assert done.returncode == 3
    assert "1 of " in done.stdout
    assert "missing: quantize.16.codes, " in done.stdout
    save_file(outputs_of(PORT), tmp_path / "mine")
    assert run_golden("diff", OPS, tmp_path / "mine").returncode == 0
    save_file({"swiglu.out": mine["swiglu.out"] * F32(1.0001)}, tmp_path / "mine")
    done = run_golden("diff", OPS, tmp_path / "mine")
    assert done.returncode == 1
    assert "the first at swiglu.out" in done.stdout
    assert run_golden("diff", OPS, tmp_path / "mine", "--tolerance", "swiglu.*=1e-3").returncode == 3
    save_file({"swiglu.output": mine["swiglu.out"]}, tmp_path / "mine")
    assert run_golden("diff", OPS, tmp_path / "mine").returncode == 1


TRACE = DATA / "tiny-llama.q8.trace.safetensors"
MODEL = ("--model", ROOT / "models" / "tiny-llama")


@pytest.mark.parametrize("how", [(), MODEL])
def test_diff_of_a_trace_with_three_tensors(tmp_path, how):
    trace = load_file(TRACE)
    three = {name: trace[name] for name in ("tokens", "layers.1.attn.q_proj", "layers.2.ffn.norm.q")}
    save_file(three, tmp_path / "three")
    done = run_golden("diff", TRACE, tmp_path / "three", *how)
    assert done.returncode == 3, done.stderr
    assert f"{len(trace) - 3} missing: embed, layers.0.attn.norm, ..., logits" in done.stdout
    assert "are there, all equal to the bit" in done.stdout
    save_file(three | {"layers.1.attn.q_proj": three["layers.1.attn.q_proj"] * F32(1.001)}, tmp_path / "three")
    done = run_golden("diff", TRACE, tmp_path / "three", *how)
    assert done.returncode == 1
    assert "the first at layers.1.attn.q_proj" in done.stdout
    save_file({"tokens": trace["tokens"], "layers.9.attn.q_proj": trace["layers.1.attn.q_proj"]}, tmp_path / "three")
    assert run_golden("diff", TRACE, tmp_path / "three", *how).returncode == 1


@pytest.mark.parametrize("how", [(), MODEL])
def test_a_port_that_approximates_has_limits_of_its_own(tmp_path, how):
    trace = load_file(TRACE)
    for name in trace:
        if name.endswith("ffn.up_proj"):
            trace[name] = bf16(trace[name])
    save_file(trace, tmp_path / "mine")
    (tmp_path / "profile.json").write_text(json.dumps({"ffn.up_proj": 4e-3, "ffn.swiglu*": 5e-3}))
    assert run_golden("diff", TRACE, tmp_path / "mine", *how).returncode == 1
    assert run_golden("diff", TRACE, tmp_path / "mine", *how, "--profile", tmp_path / "profile.json").returncode == 0
    done = run_golden("diff", TRACE, tmp_path / "mine", *how, "--tolerance", "layers.*.ffn.up_proj=1e-4")
    assert done.returncode == 1
    assert "the first at layers.0.ffn.up_proj" in done.stdout
    done = run_golden(
        "diff",
        TRACE,
        tmp_path / "mine",
        *how,
        "--profile",
        tmp_path / "profile.json",
        "--tolerance",
        "ffn.up_proj=1e-5",
    )
    assert done.returncode == 1  # the option counts


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("x", "--tolerance: 'x', expected STEP=VALUE"),
        ("a=b", "--tolerance: a is 'b', expected a number of 0 or more"),
        ("a=-1", "--tolerance: a is -1.0, expected a number of 0 or more"),
        ("a=nan", "--tolerance: a is nan, expected a number of 0 or more"),
    ],
)
def test_bad_tolerances_are_one_line(option, text):
    done = run_golden("diff", TRACE, TRACE, "--tolerance", option)
    assert (done.returncode, done.stderr) == (1, f"golden: {text}\n")


def test_accept_compares_perplexities(tmp_path):
    checkpoint = Checkpoint(ROOT / "models" / "tiny-llama")
    ids, _ = encode(checkpoint.path, (ROOT / "models" / "held_out.txt").read_text())
    tokens = np.array(ids[:240], np.int32).reshape(2, 120)
    logits = np.stack([forward(checkpoint.config, Q8(checkpoint), window) for window in tokens])
    verdict = judge_logits(partial(forward, checkpoint.config, Q8(checkpoint)), tokens, logits)
    assert (verdict.n_scored, verdict.loss, verdict.kl, verdict.same_top) == (238, 0, 0, 1)

    def accept(**tensors):
        save_file(tensors, tmp_path / "mine")
        return run_golden("accept", tmp_path / "mine", *MODEL)

    done = accept(tokens=tokens, logits=bf16(logits))
    assert done.returncode == 0, done.stderr
    assert "over 238 tokens" in done.stdout
    done = accept(tokens=tokens, logits=logits * F32(0.5))
    assert done.returncode == 1
    assert "above the limit of 1.00%" in done.stdout
    for tensors, text in (
        ({"tokens": tokens}, "has no tensor 'logits'"),
        ({"tokens": tokens[0], "logits": logits}, "tokens int32 (120,) do not go with logits"),
        ({"tokens": tokens[0, :9], "logits": logits[0, :9]}, "tokens: 8 to score, at least 100 are needed"),
        ({"tokens": tokens, "logits": logits * np.inf}, "not finite"),
        ({"tokens": tokens, "logits": logits[..., :-1]}, "a vocabulary of 2047, the model has 2048"),
    ):
        done = accept(**{name: np.ascontiguousarray(value) for name, value in tensors.items()})
        assert done.returncode == 1
        assert text in done.stderr
        assert done.stderr.count("\n") == 1
