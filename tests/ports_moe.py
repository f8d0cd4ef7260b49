"""A port of what mixtures of experts add, written from docs/moe.md alone, and ways to get it wrong.

As in tests/ports.py, each function takes a case's inputs and parameters by name; none imports anything of golden/.
"""

import math

import numpy as np

from tests.ports import exp, fma, gptq_expand, in_order, quantize, swiglu

F32, F64 = np.float32, np.float64
FORMATS = {"e4m3": (4, 3, 7, 448.0, 8), "e5m2": (5, 2, 15, 57344.0, 15)}  # exponent, mantissa, bias, largest, emax


# ---- MXFP8


def mx_number(code, element):
    """What one element means if every code is a number."""
    _, mantissa_bits, bias, _, _ = FORMATS[element]
    sign, exponent, mantissa = code >> 7, code >> mantissa_bits & (1 << 7 - mantissa_bits) - 1, code & (
        (1 << mantissa_bits) - 1
    )  # fmt: skip
    if exponent:
        value = math.ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits)
    else:
        value = math.ldexp(mantissa, 1 - bias - mantissa_bits)
    return -value if sign else value


def mx_value(code, element):
    """What one element means. E4M3: 0x7f is NaN. E5M2: 0x7c is infinity, and what is above it NaN."""
    magnitude, infinity = code & 0x7F, 0x7C if element == "e5m2" else 0x7F
    if magnitude < infinity:
        return mx_number(code, element)
    return math.copysign(math.inf, 128 - code - 0.5) if (element, magnitude) == ("e5m2", infinity) else math.nan


def mx_power(scale):
    """What a scale byte means."""
    return math.nan if scale == 255 else 2.0 ** (scale - 127)


def mx_values(codes, element):
    return {"values": np.array([mx_value(int(code), element) for code in codes], F32)}


def mx_scales(scales):
    return {"values": np.array([mx_power(int(scale)) for scale in scales], F32)}


def half_to_even(x):
    return round(x)


def mx_encode(value, element, rounded=half_to_even, subnormals=True):
    """The element nearest to a value, saturating."""
    _, mantissa_bits, bias, largest, _ = FORMATS[element]
    sign = 128 if math.copysign(1, value) < 0 else 0
    if math.isnan(value):
        return 127
    magnitude = min(abs(value), largest)
    if magnitude == 0:
        return sign
    exponent = max(math.frexp(magnitude)[1] - 1, 1 - bias)
    steps = rounded(math.ldexp(magnitude, mantissa_bits - exponent))  # 8 to 16, or less where it is subnormal
    if steps < 1 << mantissa_bits and not subnormals:
        return sign
    code = steps + (exponent + bias - 1 << mantissa_bits)
    return sign | min(code, 126 if element == "e4m3" else 123)


def floor_log2(amax):
    return math.frexp(amax)[1] - 1


def mx_quantize(x, element, block, log2=floor_log2, encode=mx_encode, nan_scale=255):
    rows, n = x.shape
    codes, scales = np.zeros((rows, n), np.uint8), np.zeros((rows, n // block), np.uint8)
    for row in range(rows):
        for b in range(n // block):
            values = [float(v) for v in x[row, b * block : (b + 1) * block]]
            amax = max(abs(v) for v in values)
            if any(math.isnan(v) for v in values):
                scales[row, b] = nan_scale
                zeros = [math.copysign(0, v) if not math.isnan(v) else v for v in values]
                codes[row, b * block : (b + 1) * block] = [encode(v, element) for v in zeros]
                continue
            exponent = -127 if amax == 0 else max((128 if math.isinf(amax) else log2(amax)) - FORMATS[element][4], -127)
            scales[row, b] = exponent + 127
            codes[row, b * block : (b + 1) * block] = [
                encode(v if math.isinf(v) else math.ldexp(v, -exponent), element) for v in values
            ]
    return {"codes": codes, "scales": scales}


def mx_dequantize(codes, scales, element, block, value=mx_value, power=None):
    values = np.array([value(code, element) for code in range(256)])
    powers = np.array([(power or mx_power)(scale) for scale in range(256)])
    return values[codes] * np.repeat(powers[scales], block, axis=-1)


# ---- the router


def best_first(row):
    """Indices by falling value, the lowest of equals first."""
    return sorted(range(len(row)), key=lambda i: (-row[i], i))


def route(logits, n_active, norm_topk_prob, order=best_first, by_probability=False, scores=None):
    experts, weights = np.zeros((len(logits), n_active), np.int32), np.zeros((len(logits), n_active), F32)
    for t, row in enumerate(logits):
        e = exp(row - row.max()).astype(F64)
        probs = (e / in_order(e)).astype(F32)
        experts[t] = order(probs if by_probability else row)[:n_active]
        chosen = (e if scores is None else scores(row, experts[t]))[experts[t]]
        total = in_order(chosen) if norm_topk_prob else in_order(e) if scores is None else 1
        weights[t] = chosen / total
    return {"experts": experts, "weights": weights}


def rising(experts):
    return np.argsort(experts, axis=-1)


def moe_combine(outputs, experts, weights, weight_of=lambda weight: weight, order=rising):
    """Each token's experts, in the order of their numbers, added one after the other."""
    out = np.zeros(outputs[:, 0].shape, F32)
    for chosen in order(experts).T:
        row = np.arange(len(out))
        out = fma(weight_of(weights[row, chosen])[:, None], outputs[row, chosen], out)
    return {"out": out}


# ---- the operator


def msd_split(codes):
    wide = codes.astype(int)
    return {"high": np.floor_divide(wide, 16).astype(np.int8), "low": (wide % 16 - 8).astype(np.int8)}


def ends_of(group_list, group_list_type):
    return np.cumsum(group_list) if group_list_type == "count" else group_list


def gate_first(product):
    half = product.shape[1] // 2
    return swiglu(gate=product[:, :half], up=product[:, half:])["out"]


def grouped(tensors, group_list_type, product_of, quantized, ends=ends_of, act=gate_first, touch_rest=False):
    """Every expert's rows; product_of(rows, expert) is fp32, quantized(values) codes and scales."""
    codes, scales = tensors["before.codes"].copy(), tensors["before.scales"].copy()
    n, start, products = tensors["weight.codes"].shape[1], 0, []
    for expert, end in enumerate(ends(tensors["group_list"], group_list_type)):
        if end > start:
            products.append(product_of(slice(start, end), expert))
            found = quantized(act(products[-1]))
            codes[start:end], scales[start:end] = found["codes"], found["scales"]
        start = max(start, end)
    if touch_rest:
        codes[start:], scales[start:] = 0, 0
    product = np.concatenate(products) if products else np.zeros((0, n), F32)
    outputs = {"out.codes": codes, "out.scales": scales}
    if np.isfinite(product).all():
        outputs |= {"product": product, "hidden": act(product)}
    return outputs


def directly(x, w):
    return x.astype(np.int64) @ w.T.astype(np.int64)


def by_row(values, rounded=quantize):
    return rounded(values, group_size=values.shape[1])


def grouped_a8w8(tensors, group_list_type, quantized=by_row, sums_of=directly, **change):
    x, scale = tensors["x.codes"], tensors["x.scales"]

    def product_of(rows, expert):
        sums = sums_of(x[rows], tensors["weight.codes"][expert])
        return fma(sums.astype(F32), scale[rows] * tensors["weight.scales"][expert], F32(0))

    return grouped(tensors, group_list_type, product_of, quantized, **change)


def in_64(size):
    """How many codes of a group of A8W4 are added up before their sum is scaled."""
    return size if size % 64 else 64


def by_split(x, w):
    """int8 times int4 as two products of int4 and int4: no operand leaves -8..7."""
    parts = msd_split(x)
    high, low = (parts[name].astype(np.int64) @ w.T for name in ("high", "low"))
    return 16 * high + low + 8 * w.sum(axis=1)


def grouped_a8w4(tensors, group_list_type, sums_of=by_split, quantized=by_row, part_of=in_64, **change):
    x, w, scales = tensors["x.codes"], tensors["weight.codes"].astype(np.int64), tensors["weight.scales"]
    n_groups, all_sums = scales.shape[2], []
    size = x.shape[1] // n_groups
    part = part_of(size)

    def product_of(rows, expert):
        parts = [slice(at, at + part) for at in range(0, x.shape[1], part)]
        sums = np.stack([sums_of(x[rows, at], w[expert][:, at]) for at in parts], axis=-1).astype(np.int32)
        all_sums.append(sums)
        out = np.zeros(sums.shape[:2], F32)
        for i, at in enumerate(parts):
            out = fma(sums[..., i].astype(F32), scales[expert][:, at.start // size] * tensors["x.scales"][rows], out)
        return out

    outputs = grouped(tensors, group_list_type, product_of, quantized, **change)
    group_sums = w.reshape(*scales.shape, size).sum(axis=-1)
    assist = (8 * group_sums * scales).sum(axis=-1).astype(F32)
    return outputs | {"sums": np.concatenate(all_sums), "assist": assist}


def grouped_mxfp8(tensors, group_list_type, element, block, quantized=mx_quantize, x_has=None, w_has=None, **change):
    """x_has, w_has: other meanings of elements and scales, of mx_dequantize."""
    x = mx_dequantize(tensors["x.codes"], tensors["x.scales"], element, block, **(x_has or {}))
    w = mx_dequantize(tensors["weight.codes"], tensors["weight.scales"], element, block, **(w_has or {}))

    def product_of(rows, expert):
        out = np.zeros((rows.stop - rows.start, w.shape[1]), F32)
        for at in range(0, x.shape[1], block):
            terms = x[rows, None, at : at + block] * w[expert][None, :, at : at + block]
            out = out + in_order(np.moveaxis(terms, -1, 0)).astype(F32)
        return out

    def codes_and_scales(values):
        return quantized(values, element, block)

    with np.errstate(invalid="ignore", over="ignore"):
        return grouped(tensors, group_list_type, product_of, codes_and_scales, **change)


def part_of_expert(values, expert, part):
    return values[expert]


def ladder_experts(tensors, group_list_type, bits, group, sparse, two_level, int8_scales, group_size,
                   of_expert=part_of_expert, quantized=quantize, **change):  # fmt: skip
    """Experts stored as GPTQ files store matrices; of_expert(values, expert, part) is what one of them has."""
    stored = {name[7:]: values for name, values in tensors.items() if name.startswith("weight.")}
    x, scales, all_sums = tensors["x.codes"].astype(np.int64), tensors["x.scales"], []

    def product_of(rows, expert):
        parts = {part: of_expert(values, expert, part) for part, values in stored.items()}
        w = gptq_expand(**parts, bits=bits, group=group, sparse=sparse, two_level=two_level, int8_scales=int8_scales,
                        group_size=group_size)  # fmt: skip
        codes = w["w.codes"].astype(np.int64)
        spans = [slice(at, at + group_size) for at in range(0, x.shape[1], group_size)]
        all_sums.append(np.stack([x[rows, span] @ codes[:, span].T for span in spans], axis=-1).astype(np.int32))
        out = np.zeros(all_sums[-1].shape[:2], F32)
        for g in range(len(spans)):
            out = fma(all_sums[-1][..., g].astype(F32), w["w.scales"][:, g] * scales[rows, g, None], out)
        return out

    def by_group(values):
        return quantized(values, group_size=group_size)

    outputs = grouped(tensors, group_list_type, product_of, by_group, **change)
    return outputs | {"sums": np.concatenate(all_sums)}


# ---- GPTQ of an expert, in the two-level form


def expert_hessian(x, mean_square):
    n = x.shape[1]
    return x.T.astype(F64) @ x + n / 2 * mean_square * np.eye(n)


def nearest_code(w, scale, zero):
    """Of codes that stand for (5 code - zero) scale; 0 where the scale is."""
    return np.clip(np.rint((w / np.where(scale > 0, scale, np.inf) + zero) / 5), 0, 3)


def best_pair(w, importance, row_scale):
    """The codes of scale and zero point with which a group w is rounded best."""

    def cost(pair):
        scale = row_scale * pair[0]
        return importance @ ((5 * nearest_code(w, scale, pair[1]) - pair[1]) * scale - w) ** 2

    return min(((s, z) for s in range(16) for z in range(16)), key=cost)


def gptq_expert(weight, x, mean_square, group, hessian=expert_hessian, pair_of=best_pair):
    h = hessian(x, mean_square)
    size, n = np.diag(h), len(h)
    groups = sorted(range(n // group), key=lambda g: -size[g * group : (g + 1) * group].sum())
    order = [k for g in groups for k in sorted(range(g * group, (g + 1) * group), key=lambda k: -size[k])]
    damped = h + 0.05 * size.mean() * np.eye(n)
    u = np.linalg.cholesky(np.linalg.inv(damped[np.ix_(order, order)])).T
    parts = weight.reshape(len(weight), -1, group)
    widest = (np.maximum(parts.max(axis=2), 0) - np.minimum(parts.min(axis=2), 0)).max(axis=1)
    rows = widest / F32(5 * 3 * 15)
    w, codes, pairs = weight[:, order].astype(F64), np.empty(weight.shape), np.empty((len(weight), n // group, 2))
    for i, k in enumerate(order):
        g, behind = k // group, slice(i, i + group)
        if i % group == 0:
            pairs[:, g] = [pair_of(w[r, behind], 1 / np.diag(u)[behind] ** 2, rows[r]) for r in range(len(w))]
        scale, zero = rows * pairs[:, g, 0], pairs[:, g, 1]
        codes[:, k] = nearest_code(w[:, i], scale, zero)
        w[:, i:] -= (w[:, i] - (5 * codes[:, k] - zero) * scale)[:, None] / u[i, i] * u[i, i:]
    s, z = (pairs[..., i].astype(np.uint8) for i in range(2))
    return {"codes": codes.astype(np.uint8), "scale_codes": s, "zero_codes": z, "row_scales": rows}
