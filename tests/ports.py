"""A port of every operation, written from docs/numerics.md and docs/model-files.md alone, and ways to get it wrong.

Each function takes a case's inputs and parameters by name and returns its outputs; none imports anything of golden/.
"""

import numpy as np

F16, F32, F64 = np.float16, np.float32, np.float64


# ---- arithmetic


def fma(a, b, c):
    """a * b + c rounded once: in fp64 the last bit is odd if anything was lost (Boldo and Melquiond 2008)."""
    p, c = np.multiply(a, b, dtype=F64), np.asarray(c, F64)
    with np.errstate(invalid="ignore", over="ignore"):
        s = np.asarray(p + c)
        back = s - p
        lost = (p - (s - back)) + (c - back)
        even = (lost != 0) & (s.view(np.int64) & 1 == 0)
        return np.where(even, np.nextafter(s, np.where(lost > 0, np.inf, -np.inf)), s).astype(F32)


def exp(x):
    x = np.clip(x, F32(-87), F32(88))
    n = fma(x, F32(1.44269504), F32(12582912)) - F32(12582912)
    r = fma(n, F32(2.12194440e-4), fma(-n, F32(0.693359375), x))
    p = F32(1) / F32(5040)
    for divisor in (720, 120, 24, 6, 2, 1, 1):
        p = fma(p, r, F32(1) / F32(divisor))
    return np.ldexp(p, n.astype(np.int32))


def in_order(parts):
    """The sum of parts along the first axis, one after the other, in their type."""
    total = np.zeros_like(parts[0])
    for part in parts:
        total = total + part
    return total


# ---- quantizing


def round_codes(x):
    """Halves to even, within -127..127."""
    return np.clip(np.rint(x), -127, 127).astype(np.int8)


def group_inverses(x, group_size):
    """Groups of x, their largest magnitudes and the inverses of their scales; 0 where 127 / amax is not finite."""
    groups = x.reshape(len(x), -1, group_size)
    amax = np.abs(groups).max(axis=-1)
    with np.errstate(divide="ignore", over="ignore"):
        inv = F32(127) / amax
    return groups, amax, np.where(np.isfinite(inv), inv, F32(0))


def quantize(x, group_size, codes_of=lambda groups, inv, _scales: round_codes(groups * inv), scale_of=None):
    groups, amax, inv = group_inverses(x, group_size)
    scales = np.where(inv > 0, amax / F32(127), F32(0)).astype(F32)
    if scale_of is not None:
        scales = scale_of(scales)
    codes = codes_of(groups, inv[..., None], scales[..., None]).astype(np.int8)
    dequantized = (codes * scales[..., None]).astype(F32).reshape(x.shape)
    return {"codes": codes.reshape(x.shape), "scales": scales, "dequantized": dequantized}


def static_inverse(scale):
    with np.errstate(divide="ignore", over="ignore"):
        inv = F32(1) / scale[0]
    return inv if np.isfinite(inv) else F32(0)


def quantize_static(x, scale, inverse=static_inverse, product=lambda x, inv: x * inv, rounded=round_codes):
    with np.errstate(over="ignore"):
        return {"codes": rounded(product(x, inverse(scale)))}


# ---- products


def group_sums(x, w, group_size):
    """The int32 sums of each group, (n, m, groups): exact in fp64, which is faster here than int64."""
    xg, wg = (t.reshape(len(t), -1, group_size).astype(F64) for t in (x, w))
    return np.stack([xg[:, g] @ wg[:, g].T for g in range(xg.shape[1])], axis=-1).astype(np.int64)


def matmul(inputs, group_size, sums=group_sums, to_float=lambda acc: acc.astype(F32)):
    acc = sums(inputs["x.codes"], inputs["w.codes"], group_size).astype(np.int32)
    xs, ws = inputs["x.scales"], inputs["w.scales"]
    out = np.zeros(acc.shape[:2], F32)
    for g in range(acc.shape[2]):
        out = fma(to_float(acc[..., g]), xs[:, None, g] * ws[None, :, g], out)
    return {"accumulators": acc, "out": out}


# ---- between products


def rmsnorm(x, weight, eps, precision=F64, sum_precision=F64):
    eps = precision(F32(eps)) if precision is F64 else F32(eps)
    with np.errstate(over="ignore"):  # in fp32
        squares = (x.astype(sum_precision) ** 2).sum(axis=-1, keepdims=True, dtype=sum_precision)
        mean = (squares / sum_precision(x.shape[-1])).astype(precision)
    inv = precision(1) / np.sqrt(mean + eps)
    return {"out": (weight.astype(precision) * (x.astype(precision) * inv)).astype(F32)}


def rmsnorm_with_wide_eps(x, weight, eps):
    x64 = x.astype(F64)
    return {"out": (weight * (x64 / np.sqrt((x64**2).mean(axis=-1, keepdims=True) + eps))).astype(F32)}


def rope_frequencies(head_dim, theta, scaling):
    freq = F64(theta) ** (-np.arange(0, head_dim, 2) / head_dim)
    if scaling:
        low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
        turns = scaling["original_max_position_embeddings"] * freq / (2 * np.pi)
        if "kind" in scaling:
            turns = head_dim - np.arange(head_dim // 2)
        part = np.clip((turns - low) / (high - low), 0, 1)
        freq = (1 - part) * freq / factor + part * freq
    return freq.astype(F32)


def wide_angles(positions, freq):
    return positions[:, None].astype(F64) * freq.astype(F64)


def rope(positions, x, head_dim, theta, scaling, pairs, frequencies=rope_frequencies, angles=wide_angles):
    freq = frequencies(head_dim, theta, scaling)
    angle = angles(positions, freq)
    scale = F32((scaling or {}).get("attention_factor", 1))
    cos, sin = (scale * np.cos(angle)).astype(F32), (scale * np.sin(angle)).astype(F32)
    half = head_dim // 2
    first, second = (
        (np.arange(0, head_dim, 2), np.arange(1, head_dim, 2))
        if pairs == "(2i, 2i + 1)"
        else (np.arange(half), np.arange(half, head_dim))
    )
    a, b, out = x[..., first], x[..., second], np.empty_like(x)
    out[..., first] = fma(a, cos[:, None], -(b * sin[:, None]))
    out[..., second] = fma(a, sin[:, None], b * cos[:, None])
    return {"frequencies": freq, "cos": cos, "sin": sin, "out": out}


def softmax(x, subtract_largest=True, lanes=16):
    e = exp(x - x.max(axis=-1, keepdims=True) if subtract_largest else x)
    with np.errstate(over="ignore"):  # of what is not subtracted
        sums = [in_order(np.moveaxis(e[..., lane::lanes], -1, 0)) for lane in range(min(lanes, e.shape[-1]))]
        return {"out": e * (F32(1) / in_order(sums))[..., None]}


def by_division(head, n_heads, n_kv_heads):
    return head // (n_heads // n_kv_heads)


def up_to_its_own(position):
    """How many keys and values a token at a position sees."""
    return position + 1


def as_they_came(k, v, _first_position):
    """The keys and values of all positions; those from first_position on are new."""
    return k, v


def attention(
    q, k, v, first_position, kv_head=by_division, seen_at=up_to_its_own, cached=as_they_came, scales=(None, None)
):
    """scales: of the codes k and v, (positions, kv heads)."""
    n, n_heads, head_dim = q.shape
    k_scales, v_scales = (np.ones(k.shape[:2], F32) if s is None else s for s in scales)
    k, v = cached(k, v, first_position)
    scores = np.zeros((n, n_heads, len(k)), F32)
    probs, out = np.zeros_like(scores), np.zeros(q.shape, F32)
    for t in range(n):
        seen = seen_at(first_position + t)
        for h in range(n_heads):
            g = kv_head(h, n_heads, k.shape[1])
            for i in range(head_dim):
                scores[t, h, :seen] = fma(q[t, h, i], k[:seen, g, i], scores[t, h, :seen])
            scores[t, h, :seen] *= F32(1) / np.sqrt(F32(head_dim)) * k_scales[:seen, g]
            probs[t, h, :seen] = softmax(scores[t, h, :seen])["out"]
            weights = probs[t, h, :seen] * v_scales[:seen, g]
            for position in range(seen):
                out[t, h] = fma(weights[position], v[position, g], out[t, h])
    return {"scores": scores, "probs": probs, "out": out}


def attention_int8_scores(
    q_codes, q_scales, k_codes, k_scales, first_position, kv_head=by_division, seen_at=up_to_its_own
):
    n, n_heads, head_dim = q_codes.shape
    sums = np.zeros((n, n_heads, len(k_codes)), np.int32)
    scores = np.zeros(sums.shape, F32)
    for t in range(n):
        seen = seen_at(first_position + t)
        for h in range(n_heads):
            g = kv_head(h, n_heads, k_codes.shape[1])
            sums[t, h, :seen] = k_codes[:seen, g].astype(np.int32) @ q_codes[t, h].astype(np.int32)
            factor = q_scales[t, h] * (F32(1) / np.sqrt(F32(head_dim)))
            scores[t, h, :seen] = sums[t, h, :seen].astype(F32) * (factor * k_scales[:seen, g])
    return {"sums": sums, "scores": scores}


def weight_by_scale(probs, scales):
    return probs * scales


def attention_int8_mix(
    probs, v_codes, v_scales, first_position, weight=weight_by_scale, rounded=round_codes, seen_at=up_to_its_own,
    kv_head=by_division,
):  # fmt: skip
    n, n_heads, _ = probs.shape
    sums = np.zeros((n, n_heads, v_codes.shape[2]), np.int32)
    codes, scales, out = np.zeros(probs.shape, np.int8), np.zeros((n, n_heads), F32), np.zeros(sums.shape, F32)
    for t in range(n):
        seen = seen_at(first_position + t)
        for h in range(n_heads):
            g = kv_head(h, n_heads, v_codes.shape[1])
            weights = weight(probs[t, h, :seen], v_scales[:seen, g])
            amax = weights.max()
            codes[t, h, :seen], scales[t, h] = rounded(weights * (F32(127) / amax)), amax / F32(127)
            sums[t, h] = codes[t, h, :seen].astype(np.int32) @ v_codes[:seen, g].astype(np.int32)
            out[t, h] = sums[t, h].astype(F32) * scales[t, h]
    return {"weight_codes": codes, "weight_scales": scales, "sums": sums, "out": out}


def attention_half(q, k, v, first_position, rounded="qkv", **change):
    """Queries, keys and values are rounded to fp16 on their way, and the output."""
    q, k, v = (
        t.astype(F16).astype(F32) if name in rounded else t.astype(F32)
        for name, t in zip("qkv", (q, k, v), strict=True)
    )
    out = attention(q, k, v, first_position, **change)["out"]
    with np.errstate(over="ignore"):
        return {"out": out.astype(F16)}


def kept_half(x):
    with np.errstate(over="ignore"):
        return x.astype(F16)


def kept_q8(x):
    """Codes and scales, the numbers of a position and head under one."""
    q = quantize(x.reshape(len(x), -1), x.shape[-1])
    return q["codes"].reshape(x.shape), q["scales"]


def attention_kv(q, k, v, kv, first_position):
    """Attention over what a cache keeps in fp16, or in int8."""
    outputs, kept, scales = {}, [], []
    for name, x in (("k", k), ("v", v)):
        if kv == "f16":
            outputs[f"{name}_kept"] = kept_half(x)
            kept.append(outputs[f"{name}_kept"].astype(F32))
            scales.append(None)
        else:
            codes, scale = outputs[f"{name}_codes"], outputs[f"{name}_scales"] = kept_q8(x)
            kept.append(codes.astype(F32))
            scales.append(scale)
    return outputs | {"out": attention(q, *kept, first_position, scales=scales)["out"]}


def walsh_hadamard(x):
    """Of a vector of 2^k values, in fp32: of its halves, then their sum and their difference."""
    if len(x) == 1:
        return x
    out = np.empty_like(x)
    half = len(x) // 2
    first, second = walsh_hadamard(x[:half]), walsh_hadamard(x[half:])
    out[:half], out[half:] = first + second, first - second
    return out


def rotate(x, s, block):
    blocks = [slice(i, i + block) for i in range(0, len(s), block)]
    return {
        "rotated": np.stack([np.concatenate([walsh_hadamard((row * s)[at]) for at in blocks]) for row in x]),
        "back": np.stack([np.concatenate([walsh_hadamard(row[at]) for at in blocks]) * s for row in x]),
    }


def swiglu(gate, up):
    return {"out": gate / (1 + exp(-gate)) * up}


def argmax(logits, last=False):
    n = logits.shape[-1]
    ids = n - 1 - logits[:, ::-1].argmax(axis=-1) if last else logits.argmax(axis=-1)
    return {"ids": ids.astype(np.int32)}


# ---- tables


def table_codes(rows, dim):
    return ((7919 * rows.astype(np.int64)[:, None] + 104729 * np.arange(dim)) % 255 - 127).astype(np.int8)


def table_scales(rows, n_groups):
    return ((1 + (31 * rows.astype(np.int64)[:, None] + 17 * np.arange(n_groups)) % 10007) / 2**20).astype(F32)


def embedding(tokens, vocab_size, dim, group_size, table):
    """Rows of a table that has a rule in place of bytes."""
    assert tokens.max() < vocab_size
    assert (table["codes"], table["scales"]) == (
        "(7919 * row + 104729 * column) % 255 - 127", "(1 + (31 * row + 17 * group) % 10007) / 2**20",
    )  # fmt: skip
    return {"out": table_codes(tokens, dim) * np.repeat(table_scales(tokens, dim // group_size), group_size, axis=1)}


def classifier(inputs, vocab_size, dim, group_size, table):
    """Logits of every row of the same table: those that are asked for, and the tokens chosen."""
    assert table["codes"].startswith("(7919")
    every = np.arange(vocab_size)
    w = {"w.codes": table_codes(every, dim), "w.scales": table_scales(every, dim // group_size)}
    product, rows = matmul(inputs | w, group_size), inputs["rows"]
    return {
        "accumulators": np.ascontiguousarray(product["accumulators"][:, rows]),
        "logits": np.ascontiguousarray(product["out"][:, rows]),
        "ids": argmax(product["out"])["ids"],
    }


# ---- AWQ

NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)  # the place of code i of eight, in fours of bits from the lowest


def awq_pack(codes, nibbles=NIBBLES):
    words = sum(codes[:, i::8].astype(np.uint32) << np.uint32(4 * place) for i, place in enumerate(nibbles))
    return {"packed": words.astype(np.uint32).view(np.int32)}


def awq_unpack(words, nibbles=NIBBLES):
    parts = [words.view(np.uint32) >> np.uint32(4 * place) & 15 for place in nibbles]
    return np.stack(parts, axis=-1).reshape(len(words), -1).astype(np.int64)


def awq_dequantize(qweight, qzeros, scales, group_size, nibbles=NIBBLES, offset=0, scale_of=lambda s: s):
    codes, zeros = awq_unpack(qweight, nibbles), awq_unpack(qzeros, nibbles) + offset
    repeat = np.arange(len(codes)) // group_size
    with np.errstate(over="ignore"):
        return {"w16": ((codes - zeros[repeat]) * scale_of(scales.astype(F32))[repeat]).astype(F16)}


def awq_matmul(x, qweight, qzeros, scales, group_size):
    w16 = awq_dequantize(qweight, qzeros, scales, group_size)["w16"]
    return {"w16": w16, "out": x.astype(F32) @ w16.astype(F32)}


def half(x):
    with np.errstate(over="ignore"):
        return {"out": x.astype(F16)}


# ---- GPTQ


def gptq_unpack(packed, bits):
    """Codes of a row: blocks of 64 bytes, then one of 32, 16 and 8; byte j has codes j, j + B, ... of its block."""
    codes, at = [], 0
    while at < packed.shape[1]:
        size = next(size for size in (64, 32, 16, 8) if packed.shape[1] - at >= size)
        block = packed[:, at : at + size]
        codes += [block >> shift & 2**bits - 1 for shift in range(0, 8, bits)]
        at += size
    return np.concatenate(codes, axis=1).astype(np.int64)


def low_half_first(packed, n):
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)[:, :n].astype(np.int64)


def lowest_bit_first(mask):
    return np.stack([mask >> i & 1 for i in range(8)], axis=-1).reshape(len(mask), -1).astype(bool)


def scale_of_each_group(scale, times, bits):
    """Scales of a row, each as many times as its group has groups of activations."""
    return np.repeat(scale, times, axis=1)


def low_plane_first(codes, n_low):
    """Rows of 5 or 6 bits: the bytes of the low 4 bits, and those of the upper ones."""
    return codes[:, :n_low], codes[:, n_low:]


def by_table(codes, table):
    return table[codes].astype(np.int64)


def gptq_expand(codes, bits, group, sparse, two_level, int8_scales, group_size, scales=None, zeros=None, groups=None,
                row_scales=None, mask=None, table=None, planes=low_plane_first, looked_up=by_table,
                unpacked=gptq_unpack, halves=low_half_first, bit_order=lowest_bit_first, steps=5,
                scale_of=lambda s, row: s.astype(F32) * row, spread=scale_of_each_group):  # fmt: skip
    if bits in (5, 6):
        first, second = planes(codes, codes.shape[1] * 4 // bits)
        w = unpacked(first, 4) + 16 * unpacked(second, bits - 4)
    else:
        w = codes.astype(np.int64) if bits == 8 else unpacked(codes, bits)
    if sparse:
        kept = bit_order(mask)
        stored, w = w, np.zeros(kept.shape, np.int64)
        w[kept] = stored.ravel()
    size = group or w.shape[1]
    if two_level:
        s, z = groups & 15, (groups >> 4).astype(np.int64)
        w, scale = steps * w - np.repeat(z, size, axis=1), scale_of(s, row_scales[:, None])
    elif int8_scales:
        w, scale = looked_up(w, table) if bits < 6 else w - 32, scale_of(groups, row_scales[:, None])
    else:
        scale = scales.astype(F32).reshape(len(w), -1)
        if bits < 8:
            w = w - np.repeat(halves(zeros, scale.shape[1]), size, axis=1)
    if sparse:
        w[~kept] = 0
    return {"w.codes": w.astype(np.int8), "w.scales": spread(scale, size // group_size, bits).astype(F32)}


def gptq_gather(x, order, group_size, gathered=lambda x, order: np.ascontiguousarray(x[:, order])):
    out = gathered(x, order)
    q = quantize(out, group_size)
    return {"gathered": out, "codes": q["codes"], "scales": q["scales"]}


# ---- a whole file

Q8, W8A8, MOE, GPTQ = 0x616B3432, 0x616B3838, 0x616B6D65, 0x616B6770  # how files of the schemes begin


def read_header(file):
    """The fields of a header that a forward pass needs."""

    def number(offset, dtype="<i4"):
        return file[offset : offset + np.dtype(dtype).itemsize].view(dtype)[0]

    names = ("dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size")
    header = {name: int(number(8 + 4 * i)) for i, name in enumerate(names)}
    header |= {"tied": bool(number(0x24, "u1")), "group_size": int(number(0x25)), "head_norms": number(0x44) >= 2}
    header |= {"head_dim": int(number(0x48)), "eps": number(0x50, "<f4"), "theta": number(0x54, "<f4")}
    header |= {"magic": int(number(0, "<u4")), "static": bool(number(0xB4))}
    own = ("format", "n_experts", "n_active", "moe_hidden_dim", "norm_topk_prob")
    return header | {name: int(number(0xC0 + 4 * i)) for i, name in enumerate(own)}


class Tensors:
    """Takes one tensor after the other from a file's bytes."""

    def __init__(self, file, group_size, alignment=1):
        self.file, self.at, self.group_size, self.alignment = file, 256, group_size, alignment

    def next(self, dtype, *shape):
        self.at += -self.at % self.alignment
        end = self.at + int(np.prod(shape)) * np.dtype(dtype).itemsize
        value = self.file[self.at : end].copy().view(dtype).reshape(shape)
        self.at = end
        return value

    def matrix(self, *shape):
        """Codes and scales of a matrix, or of those of all experts."""
        return self.next("i1", *shape), self.next("<f4", *shape[:-1], shape[-1] // (self.group_size or shape[-1]))


def gptq_matrix(tensors, entry, n_out, n_in):
    """What a matrix of a GPTQ file expands to. entry: its four bytes in the header, bits, flags and group."""
    bits, flags, group = int(entry[0]), entry[1], int(entry[2:].view("<u2")[0])
    sparse, two_level, int8_scales = (bool(flags & flag) for flag in (1, 2, 4))
    n_groups, parts = n_in // (group or n_in), {}
    if sparse:
        parts["mask"] = tensors.next("u1", n_out, n_in // 8)
    if int8_scales and bits < 6:
        parts["table"] = tensors.next("i1", 2**bits)
    parts["codes"] = tensors.next("i1" if bits == 8 else "u1", n_out, n_in * bits // 8 // (1 + sparse))
    if two_level or int8_scales:
        parts["groups"] = tensors.next("u1" if two_level else "i1", n_out, n_groups)
        parts["row_scales"] = tensors.next("<f4", n_out)
    else:
        parts["scales"] = tensors.next("<f2", n_out, n_groups) if bits < 8 or group else tensors.next("<f4", n_out)
        if bits < 8:
            parts["zeros"] = tensors.next("u1", n_out, (n_groups + 1) // 2)
    w = gptq_expand(**parts, bits=bits, group=group, sparse=sparse, two_level=two_level, int8_scales=int8_scales,
                    group_size=tensors.group_size)  # fmt: skip
    return w["w.codes"], w["w.scales"]


def tied_classifier(_tensors, embedding):
    return embedding


def scale_of_place(scales, place):
    """The static scale of a place: four of each layer, then that of the classifier's input."""
    return scales[place : place + 1]


def router_input(normed):
    """The router takes what the norm gives, in fp32."""
    return normed


def hidden_codes(hidden):
    """Codes and scales of experts' hidden values, (n, k, hidden_dim): each expert of each token has its own scale."""
    q = quantize(hidden.reshape(-1, hidden.shape[-1]), hidden.shape[-1])
    return q["codes"].reshape(hidden.shape), q["scales"].reshape(*hidden.shape[:-1], 1)


def router_logits(normed, weight):
    return (normed.astype(F64) @ weight.T.astype(F64)).astype(F32)


def model(file, tokens, classifier=tied_classifier):
    h = read_header(file)
    alignment = 64 if h["magic"] in (MOE, GPTQ) else 1
    t, n_layers, dim, is_gptq = Tensors(file, h["group_size"], alignment), h["n_layers"], h["dim"], h["magic"] == GPTQ
    entries = dict(
        zip(("embed", "q", "k", "v", "o", "gate", "down", "up", "last"), file[0xC0:].reshape(-1, 4), strict=False)
    )

    def matrix(kind, *shape):
        return gptq_matrix(t, entries[kind], *shape) if is_gptq else t.matrix(*shape)

    dense = t.next("u1", n_layers) if h["magic"] == MOE else np.ones(n_layers)
    q_dim, kv_dim = h["n_heads"] * h["head_dim"], h["n_kv_heads"] * h["head_dim"]
    norms = {part: [t.next("<f4", dim) for _ in range(n_layers)] for part in ("attn", "ffn")}
    norms["last"] = t.next("<f4", dim)
    if h["head_norms"]:
        norms |= {part: [t.next("<f4", h["head_dim"]) for _ in range(n_layers)] for part in "qk"}
    static = t.next("<f4", 4 * n_layers + 1) if h["magic"] == W8A8 and h["static"] else None
    widths = (dim, q_dim, dim, h["hidden_dim"]) if is_gptq and file[0xE4] else ()
    orders = [[t.next("<i4", width) for _ in range(n_layers)] for width in widths]
    routers = [None if dense[i] else t.next("<f4", h["n_experts"], dim) for i in range(n_layers)]
    embedding = matrix("embed", h["vocab_size"], dim)
    shapes = {"q": (q_dim, dim), "k": (kv_dim, dim), "v": (kv_dim, dim), "o": (dim, q_dim)}
    w = {name: [matrix(name, *shape) for _ in range(n_layers)] for name, shape in shapes.items()}
    shapes = {"gate": (h["hidden_dim"], dim), "down": (dim, h["hidden_dim"]), "up": (h["hidden_dim"], dim)}
    w |= {name: [matrix(name, *shape) if dense[i] else None for i in range(n_layers)] for name, shape in shapes.items()}
    last = classifier(t, embedding) if h["tied"] else matrix("last", h["vocab_size"], dim)
    experts, hidden_dim = [None] * n_layers, h["moe_hidden_dim"]
    for i in np.flatnonzero(dense == 0):
        of_all = ((h["n_experts"], 2 * hidden_dim, dim), (h["n_experts"], dim, hidden_dim))
        experts[i] = [t.matrix(*shape) for shape in of_all]

    def product(codes, scales, matrix):
        group = codes.shape[-1] // scales.shape[-1]
        inputs = {"x.codes": codes, "x.scales": scales, "w.codes": matrix[0], "w.scales": matrix[1]}
        return matmul(inputs, group)["out"]

    def linear(x, matrix, place):
        if static is not None:
            scale = scale_of_place(static, place)
            return product(quantize_static(x, scale)["codes"], np.full((len(x), 1), scale[0], F32), matrix)
        if orders and place < 4 * n_layers:
            x = np.ascontiguousarray(x[:, orders[place % 4][place // 4]])
        q = quantize(x, h["group_size"] or x.shape[-1])
        return product(q["codes"], q["scales"], matrix)

    def heads(x, norm, layer):
        x = x.reshape(len(x), -1, h["head_dim"])
        if h["head_norms"] and norm:
            x = rmsnorm(x, norms[norm][layer], h["eps"])["out"]
        return rope(positions, x, h["head_dim"], h["theta"], None, "(2i, 2i + 1)")["out"] if norm else x

    def moe(normed, router, gate_up, down):
        logits = router_logits(router_input(normed), router)
        chosen = np.argsort(-logits, axis=-1, kind="stable")[:, : h["n_active"]]
        weights = np.take_along_axis(softmax(logits)["out"], chosen, axis=-1)
        if h["norm_topk_prob"]:
            weights /= weights.sum(axis=-1, keepdims=True)
        q, out = quantize(normed, dim), np.zeros_like(normed)
        hidden = np.zeros((*chosen.shape, hidden_dim), F32)
        for row, r in np.ndindex(chosen.shape):
            e = chosen[row, r]
            both = product(q["codes"][[row]], q["scales"][[row]], [part[e] for part in gate_up])[0]
            hidden[row, r] = swiglu(both[:hidden_dim], both[hidden_dim:])["out"]
        codes, scales = hidden_codes(hidden)
        for row, r in np.ndindex(chosen.shape):
            matrix = [part[chosen[row, r]] for part in down]
            out[row] += weights[row, r] * product(codes[[row], r], scales[[row], r], matrix)[0]
        return out

    positions = np.arange(len(tokens))
    x = embedding[0][tokens] * np.repeat(embedding[1][tokens], dim // embedding[1].shape[-1], axis=1)
    for i in range(n_layers):
        normed = rmsnorm(x, norms["attn"][i], h["eps"])["out"]
        q, k, v = (
            heads(linear(normed, w[name][i], 4 * i), norm, i) for name, norm in (("q", "q"), ("k", "k"), ("v", None))
        )
        x = x + linear(attention(q, k, v, 0)["out"].reshape(len(x), -1), w["o"][i], 4 * i + 1)
        normed = rmsnorm(x, norms["ffn"][i], h["eps"])["out"]
        if not dense[i]:
            x = x + moe(normed, routers[i], *experts[i])
            continue
        hidden = swiglu(*(linear(normed, w[name][i], 4 * i + 2) for name in ("gate", "up")))["out"]
        x = x + linear(hidden, w["down"][i], 4 * i + 3)
    return {"logits": linear(rmsnorm(x, norms["last"], h["eps"])["out"], last, 4 * n_layers)}
