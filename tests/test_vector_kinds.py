"""Mistakes by the kinds that docs/numerics.md lists, one function of a port replaced, and the op vectors that show
each.

A port's functions call each other, so that a wrong softmax is in attention and in whole models as well.
"""

import re
from contextlib import ExitStack
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest

from tests import ports, ports_moe
from tests.helpers import F16, F32, F64, ROOT
from tests.test_op_vectors import CASES, PORT, away_by_row, failures, half_away, quotient

SMALLEST_NORMAL = np.finfo(F32).tiny
PAGE = 256  # positions of a page of the KV cache


def named(changes, cases):
    """Those of some cases that a port fails. changes: module, name of a function, replacement."""
    with ExitStack() as stack:
        for owner, function, replacement in changes:
            stack.enter_context(patch.object(owner, function, replacement))
        found = failures(PORT, {case: CASES[case] for case in cases})
    names = {report.name for report in found}
    return [case for case in cases if any(f"{case}.{output}" in names for output in CASES[case]["outputs"])]


def wrong(**functions):
    return [(ports, name, replacement) for name, replacement in functions.items()]


def with_change(name, module=ports, **change):
    """A function of a port with other arguments."""
    return [(module, name, partial(getattr(module, name), **change))]


# ---- rounding


def half_up(x):
    return np.clip(np.floor(x + F32(0.5)), -127, 127).astype(np.int8)


def truncated_half(x):
    """To fp16 towards zero."""
    with np.errstate(over="ignore"):
        rounded = x.astype(F16)
    return np.where(np.abs(rounded.astype(F64)) > np.abs(x), np.nextafter(rounded, F16(0)), rounded)


def half_of_half_away(x):
    """To fp16, halves away from zero."""
    down = truncated_half(x)
    with np.errstate(over="ignore"):
        up = np.nextafter(down, np.copysign(F16(np.inf), down))
    middle = (down.astype(F64) + up.astype(F64)) / 2
    return np.where(np.abs(x) >= np.abs(middle), up, down)


def kept_by(**change):
    """A cache in int8 whose quantizer has a mistake."""

    def kept_q8(x):
        q = ports.quantize(x.reshape(len(x), -1), x.shape[-1], **change)
        return q["codes"].reshape(x.shape), q["scales"]

    return kept_q8


def kept_by_position(x):
    q = ports.quantize(x.reshape(len(x), -1), x[0].size)
    return q["codes"].reshape(x.shape), np.repeat(q["scales"], x.shape[1], axis=1)


def scales_of_a_page_again(x):
    codes, scales = KEPT_Q8(x)
    return codes, np.concatenate([scales[:PAGE], scales[: len(scales) - PAGE]]) if len(scales) > PAGE else scales


KEPT_Q8, SWIGLU, GROUP_INVERSES = (
    ports.kept_q8, ports.swiglu, ports.group_inverses
)  # fmt: skip
ATTENTION, MATMUL, EMBEDDING, ARGMAX, ROPE = ports.attention, ports.matmul, ports.embedding, ports.argmax, ports.rope


# ---- numbers at the edge of what is normal


def flushed(x):
    return np.where(np.abs(x) < SMALLEST_NORMAL, F32(0), x)


def without_small_groups(x, group_size):
    """Groups whose scale would be subnormal are zeros."""
    groups, amax, inv = GROUP_INVERSES(x, group_size)
    return groups, amax, np.where(amax / F32(127) < SMALLEST_NORMAL, F32(0), inv)


def inverse_capped(x, group_size):
    """127 / amax that is infinite becomes the largest number."""
    groups, amax, inv = GROUP_INVERSES(x, group_size)
    return groups, amax, np.where((inv == 0) & (amax > 0), np.finfo(F32).max, inv)


def flushing_product(inputs, group_size):
    return MATMUL(inputs | {"w.scales": flushed(inputs["w.scales"])}, group_size)


def inverse_of_normal(scale):
    return ports.static_inverse(scale) if scale[0] >= SMALLEST_NORMAL else F32(0)


def squares_in_fp32(x, weight, eps):
    with np.errstate(over="ignore"):
        mean = (x * x).astype(F64).mean(axis=-1, keepdims=True)
    return {"out": (weight.astype(F64) * (x / np.sqrt(mean + F64(F32(eps))))).astype(F32)}


def silu_ends_at(least):
    return wrong(swiglu=lambda gate, up: {"out": np.where(gate < least, F32(0), SWIGLU(gate, up)["out"])})


# ---- positions


def softmax_with(largest=lambda x: x, summed=lambda e: e, cap=np.inf):
    """Softmax whose maximum and whose sum are of some of the scores, and whose exp goes no further than e^cap."""

    def softmax(x):
        with np.errstate(over="ignore", invalid="ignore"):
            e = np.exp(np.minimum(x - largest(x).max(axis=-1, keepdims=True), F32(cap)))
            total = summed(e).sum(axis=-1, keepdims=True)
            return {"out": (e / np.maximum(total, SMALLEST_NORMAL)).astype(F32)}

    return wrong(softmax=softmax)


def first(n):
    return lambda x: x[..., :n]


def seen_by(wrong_length, change):
    """A token that sees so many positions sees more or fewer, in every kind of attention."""

    def seen_at(position):
        return position + 1 + change * wrong_length(position + 1)

    names = ("attention", "attention_half", "attention_int8_scores", "attention_int8_mix")
    return wrong(**{name: partial(getattr(ports, name), seen_at=seen_at) for name in names})


def third_page_as_second(k, v, _first_position):
    at = np.arange(len(k))
    at[2 * PAGE :] -= PAGE
    return k[at], v[at]


def int8_scores_of_two_pages(q_codes, q_scales, k_codes, k_scales, first_position):
    k, s = third_page_as_second(k_codes, k_scales, first_position)
    return INT8_SCORES(q_codes, q_scales, k, s, first_position)


def int8_mix_of_two_pages(probs, v_codes, v_scales, first_position):
    v, s = third_page_as_second(v_codes, v_scales, first_position)
    return INT8_MIX(probs, v, s, first_position)


INT8_SCORES, INT8_MIX = ports.attention_int8_scores, ports.attention_int8_mix


def amax_of_the_first_page(probs, v_codes, v_scales, first_position):
    """The scale of weights is that of the first 256 positions' largest."""
    heads = probs.shape[1] // v_codes.shape[1]
    amax = (probs * np.repeat(v_scales, heads, axis=1).T)[..., :PAGE].max(axis=-1)
    out = INT8_MIX(probs, v_codes, v_scales, first_position)
    return out | {"weight_scales": amax / F32(127)}


def mix_in_bits(bits):
    """Sums over positions of so many bits."""

    def mix(*arguments, **named):
        out = INT8_MIX(*arguments, **named)
        sums = (out["sums"] + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)
        return out | {"sums": sums, "out": sums.astype(F32) * out["weight_scales"][..., None]}

    return wrong(attention_int8_mix=mix)


def short_positions(positions, *rest, **named):
    return ROPE(positions.astype(np.int16), *rest, **named)


# ---- tables


def row_of(changed):
    return wrong(embedding=lambda tokens, **rest: EMBEDDING(changed(tokens), **rest))


def last_of_equals(logits):
    return ARGMAX(logits, last=True)


def outputs_in_eights(inputs, group_size):
    """What lies beyond a multiple of 8 outputs is not computed."""
    product = MATMUL(inputs, group_size)
    product["out"][:, product["out"].shape[1] // 8 * 8 :] = 0
    return product


def running_fp32(x, w, group_size):
    """Accumulators that are fp32 numbers."""
    products = x.astype(F32)[:, None] * w.astype(F32)[None]
    return np.cumsum(products.reshape(len(x), len(w), -1, group_size), axis=-1, dtype=F32)[..., -1]


# ---- codes of a format


def signed_nibbles(nibbles):
    return np.where(nibbles > 7, nibbles.astype(int) - 16, nibbles)


def power_but(byte, value):
    """E8M0 with another meaning of one byte."""
    return [(ports_moe, "mx_power", lambda scale: value if scale == byte else POWER(scale))]


POWER, GPTQ_EXPAND, AWQ_DEQUANTIZE = ports_moe.mx_power, ports.gptq_expand, ports.awq_dequantize


def without_the_least(**arguments):
    """-128 among a file's int8 codes becomes -127."""
    codes = arguments.pop("codes")
    return GPTQ_EXPAND(codes=np.maximum(codes, -127) if arguments["bits"] == 8 else codes, **arguments)


def truncated_product(s, row):
    return truncated_to_fp32(s.astype(F64) * row.astype(F64))


def truncated_to_fp32(x):
    rounded = x.astype(F32)
    return np.where(rounded > x, np.nextafter(rounded, F32(0)), rounded)


def truncated_weights(qweight, qzeros, scales, group_size):
    codes, zeros = ports.awq_unpack(qweight), ports.awq_unpack(qzeros)
    at = np.arange(len(codes)) // group_size
    return {"w16": truncated_half(((codes - zeros[at]) * scales.astype(F32)[at]).astype(F32))}


# ---- experts


def one_scale(hidden):
    """A token's experts share the scale of their hidden values."""
    q = ports.quantize(hidden.reshape(len(hidden), -1), hidden[0].size)
    return q["codes"].reshape(hidden.shape), np.repeat(q["scales"][:, None], hidden.shape[1], axis=1)


def dequantized(normed):
    return ports.quantize(normed, normed.shape[-1])["dequantized"]


HALVES = {
    "int8 attention's weights: half up": (
        with_change("attention_int8_mix", rounded=half_up), ["attention_int8.halves.mix", "attention_int8.ties.mix"],
    ),
    "--kv q8: half away from zero": (
        wrong(kept_q8=kept_by(codes_of=lambda groups, inv, _: half_away(groups * inv))),
        ["attention_kv.q8.at256", "attention_kv.q8.edges"],
    ),
    "--kv q8: x / scale": (
        wrong(kept_q8=kept_by(codes_of=quotient)), ["attention_kv.q8.at256", "attention_kv.q8.edges"],
    ),
    "--kv f16: truncated": (
        wrong(kept_half=truncated_half), ["attention_kv.f16.at256", "attention_kv.f16.edges"],
    ),
    "fp16: half away from zero": (
        wrong(kept_half=half_of_half_away, half=lambda x: {"out": half_of_half_away(x)}),
        ["half", "attention_kv.f16.edges"],
    ),
    "A8W4's second quantizer: half away from zero": (
        with_change("grouped_a8w4", ports_moe, quantized=away_by_row), ["grouped_a8w4.ties", "grouped_a8w4.groupties"],
    ),
    "heads of 20: half away from zero": (
        wrong(quantize=partial(ports.quantize, codes_of=lambda groups, inv, _: half_away(groups * inv))),
        ["quantize.heads", "attention_kv.q8.edges", "quantize.ties"],
    ),
    "AWQ's weights truncated to fp16": (
        wrong(awq_dequantize=truncated_weights), ["awq_dequantize", "awq_matmul.1x136x256g64"],
    ),
    "two-level scale truncated to fp32": (
        with_change("gptq_expand", scale_of=truncated_product), ["gptq_expand.w2xg64.576", "gptq_expand.w2xg64.1024"],
    ),
}  # fmt: skip

CODES = {
    "E8M0 byte 0 as 2^-126": (power_but(0, 2.0**-126), ["mx_scales", "grouped_mxfp8.scales"]),
    "E8M0 byte 0 as 0": (power_but(0, 0.0), ["mx_scales", "grouped_mxfp8.scales"]),
    "E8M0 byte 254 as infinity": (power_but(254, np.inf), ["mx_scales", "grouped_mxfp8.scales"]),
    "int4 with a sign, AWQ": (
        wrong(awq_unpack=lambda words, nibbles=ports.NIBBLES: signed_nibbles(AWQ_UNPACK(words, nibbles))),
        ["awq_dequantize", "awq_matmul.1x8x128g128"],
    ),
    "zero points with a sign, GPTQ": (
        with_change("gptq_expand", halves=lambda packed, n: signed_nibbles(ports.low_half_first(packed, n))),
        ["gptq_expand.w4g0.192", "gptq_expand.w4sg64.576"],
    ),
    "a weight code of -128 as -127": (wrong(gptq_expand=without_the_least), ["gptq_expand.w8g64.192"]),
}  # fmt: skip
AWQ_UNPACK = ports.awq_unpack

TABLES = {
    "embedding: row id + 1 from 32768 on": (
        row_of(lambda ids: np.minimum(ids + (ids >= 2**15), 70000)), ["embedding.32", "embedding.64"],
    ),
    "embedding: row id of 16 bits": (row_of(lambda ids: ids & 0xFFFF), ["embedding.32", "embedding.64"]),
    "chosen ids of 16 bits": (
        wrong(argmax=lambda logits: {"ids": ARGMAX(logits)["ids"] & 0xFFFF}), ["classifier"],
    ),
    "ties to the higher index": (
        wrong(argmax=last_of_equals)
        + with_change("route", ports_moe, order=lambda row: sorted(range(len(row)), key=lambda i: (-row[i], -i))),
        ["argmax", "route.3", "classifier"],
    ),
    "no outputs beyond a multiple of 8": (
        wrong(matmul=outputs_in_eights), ["matmul.3x17x128g64", "matmul.subnormal", "classifier"],
    ),
    "positions of 16 bits": (wrong(rope=short_positions), ["rope.plain", "rope.tiny", "rope_halves.plain"]),
}  # fmt: skip

OPTIONS = {
    "--kv q8: one scale for a position": (
        wrong(kept_q8=kept_by_position), ["attention_kv.q8.at256", "attention_kv.q8.edges"],
    ),
    "--kv q8: scales of the first page again": (wrong(kept_q8=scales_of_a_page_again), ["attention_kv.q8.at256"]),
    "--attn int8: sums over positions of 20 bits": (
        mix_in_bits(20),
        ["attention_int8.decode.mix", "attention_int8.at256.mix", "attention_int8.at512.mix"],
    ),
    "--attn int8: scale of weights from the first page": (
        wrong(attention_int8_mix=amax_of_the_first_page), ["attention_int8.at512.mix"],
    ),
}  # fmt: skip

POSITIONS = {
    "softmax: maximum of the first 256": (
        softmax_with(largest=first(PAGE)), ["softmax.long", "attention.at512", "attention_half.at512"],
    ),
    "softmax: maximum of the first 256, exp capped": (
        softmax_with(largest=first(PAGE), cap=88), ["softmax.long", "attention.at512", "attention_half.at512"],
    ),
    "softmax: maximum of the first 16": (softmax_with(largest=first(16)), ["softmax.long", "attention.at512"]),
    "softmax: sum of the first 256": (
        softmax_with(summed=first(PAGE)), ["attention.decode", "softmax.long", "attention.at512"],
    ),
    "a third page of keys and values is the second": (
        wrong(
            attention=partial(ATTENTION, cached=third_page_as_second),
            attention_half=partial(ports.attention_half, cached=third_page_as_second),
            attention_int8_scores=int8_scores_of_two_pages,
            attention_int8_mix=int8_mix_of_two_pages,
        ),
        ["attention.at512", "attention_half.at512", "attention_int8.at512.scores", "attention_int8.at512.mix"],
    ),
    "one position fewer where a length is an odd multiple of 64": (
        seen_by(lambda n: n % 128 == 64, -1),
        ["attention.prompt", "attention_int8.prompt.scores", "attention_int8.prompt.mix"],
    ),
    "one position more behind a block of 16": (
        seen_by(lambda n: n % 16 == 1 and n > 1, 1), ["attention.prompt", "attention_int8.prompt.scores"],
    ),
}  # fmt: skip

LIMITS = {
    "subnormal scales flushed to zero": (
        with_change("quantize", scale_of=flushed), ["quantize.limits", "quantize.rowlimits", "attention_kv.q8.edges"],
    ),
    "groups whose scale is subnormal are zeros": (
        wrong(group_inverses=without_small_groups),
        ["quantize.limits", "quantize.rowlimits", "attention_kv.q8.edges"],
    ),
    "an infinite inverse is the largest number": (
        wrong(group_inverses=inverse_capped), ["quantize.64", "quantize.limits", "attention_kv.q8.edges"],
    ),
    "subnormal scales of weights flushed to zero": (
        wrong(matmul=flushing_product), ["matmul.subnormal", "matmul.subnormalrow"],
    ),
    "subnormal static scales are 0": (
        with_change("quantize_static", inverse=inverse_of_normal),
        ["quantize_static.tiny", "quantize_static.subnormal"],
    ),
    "rmsnorm: squares in fp32": (wrong(rmsnorm=squares_in_fp32), ["rmsnorm.limits"]),
    "accumulators are running sums in fp32": (
        with_change("matmul", sums=running_fp32), ["matmul.extreme.8192g8192", "matmul.beyond24bits"],
    ),
    **{f"silu is 0 below {least}": (silu_ends_at(least), ["swiglu.slope"]) for least in (-8, -16, -64, -80)},
}  # fmt: skip

PLACES = {
    "static scale of the place before": (
        wrong(scale_of_place=lambda scales, place: scales[max(place - 1, 0)][None]), ["model.static"],
    ),
    "router from the quantized input": (wrong(router_input=dequantized), ["model.moe"]),
    "one scale for all experts of a token": (wrong(hidden_codes=one_scale), ["model.moe"]),
}  # fmt: skip

KINDS = HALVES | CODES | TABLES | OPTIONS | POSITIONS | LIMITS | PLACES


@pytest.mark.parametrize("mistake", KINDS)
def test_these_vectors_show_a_mistake(mistake):
    change, cases = KINDS[mistake]
    assert named(change, cases) == cases


def test_the_page_names_these_vectors():
    assert unlisted(KINDS) == set()


def unlisted(kinds):
    """The cases of some mistakes that the page's list of kinds has not."""
    page = (ROOT / "docs" / "numerics.md").read_text(encoding="utf-8")
    _, _, table = page.partition("### Kinds of mistakes")
    listed = set(re.findall(r"`([\w.]+)`", table.partition("\nThose of the last row")[0]))
    # FORMAT.GROUP and the like stand for several cases, `.5x128` and others for those of each kind of attention.
    families, attention = (
        ("quantize.", "awq_matmul.", "gptq_expand.w", "matmul.extreme."),
        re.compile(r"attention(_int8|_kv)?\."),
    )
    endings = tuple(name for name in listed if name.startswith("."))
    missing = {case for _, cases in kinds.values() for case in cases} - listed
    kinds_of_attention = (case for case in missing if attention.match(case))
    missing -= {
        case for case in kinds_of_attention if case.removesuffix(".scores").removesuffix(".mix").endswith(endings)
    }
    return {case for case in missing if not case.startswith(families)}
