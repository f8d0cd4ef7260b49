"""Mistakes that show only at the sizes of real models, and in one format of GPTQ files alone, with the op vectors that
show each.
"""

import math
from functools import partial
from itertools import permutations

import numpy as np
import pytest

from formats.gptq import FORMATS, MatrixFormat, matrix_tensors
from formats.moe import GROUPS
from golden.op_check import judge_ops
from tests import ports, ports_moe
from tests.helpers import F16, F32, F64
from tests.test_op_vectors import CASES, PORT, TENSORS
from tests.test_vector_kinds import mix_in_bits, named, unlisted, with_change, wrong

ATTENTIONS = ("attention", "attention_half", "attention_kv.f16", "attention_kv.q8")
INT8 = ("attention_int8.{}.scores", "attention_int8.{}.mix")


def attention_cases(name, *others):
    """A case's name among all kinds of attention in fp32, with others."""
    return [case for case in (f"{op}.{name}" for op in ATTENTIONS) if case in CASES] + list(others)


# ---- heads and positions


def up_to(n, x, axis=-1):
    """x, whose values from n on are 0."""
    x = x.copy()
    np.moveaxis(x, axis, 0)[n:] = 0
    return x


ATTENTION, SCORES, MIX = ports.attention, ports.attention_int8_scores, ports.attention_int8_mix
ROPE, SWIGLU, ROTATE = ports.rope, ports.swiglu, ports.rotate


def numbers_of_a_head(n):
    """Scores of a head's first n numbers alone."""
    return wrong(
        attention=lambda q, *rest, **named: ATTENTION(up_to(n, q), *rest, **named),
        attention_int8_scores=lambda q_codes, *rest, **named: SCORES(up_to(n, q_codes), *rest, **named),
    )


def results_of_a_head(n):
    """Only the first n numbers of a head are mixed."""

    def of(op):
        return lambda *rest, **named: (out := op(*rest, **named)) | {"out": up_to(n, out["out"])}

    return wrong(attention=of(ATTENTION), attention_int8_mix=of(MIX))


def of_heads(n):
    """Heads from n on are not computed."""

    def of(op):
        return lambda *rest, **named: (out := op(*rest, **named)) | {"out": up_to(n, out["out"], axis=1)}

    def scores(*rest, **named):
        out = SCORES(*rest, **named)
        return out | {"scores": up_to(n, out["scores"], axis=1)}

    return wrong(attention=of(ATTENTION), attention_int8_mix=of(MIX), attention_int8_scores=scores)


def kv_heads(kv_head):
    """Which key/value head a query head has."""
    changed = {name: partial(getattr(ports, name), kv_head=kv_head)
               for name in ("attention", "attention_int8_scores", "attention_int8_mix")}  # fmt: skip
    return wrong(**changed)


def fewer_to_a_head(most, head, n_heads, n_kv_heads):
    """Never more query heads to a key/value head; the last has all that are left."""
    return min(head // min(n_heads // n_kv_heads, most), n_kv_heads - 1)


def of_the_last_positions(n):
    """A token sees the last n positions alone."""

    def last(k):
        k = k.copy()
        k[: max(len(k) - n, 0)] = 0
        return k

    def mix(probs, v_codes, *rest, **named):
        return MIX(probs, last(v_codes), *rest, **named)

    return wrong(attention=partial(ATTENTION, cached=lambda k, v, _: (k, last(v))), attention_int8_mix=mix)


def not_turned(where):
    """RoPE leaves these positions as they are."""

    def rope(positions, x, *rest, **named):
        out = ROPE(positions, x, *rest, **named)
        return out | {"out": np.where(where(positions)[:, None, None], x, out["out"])}

    return wrong(rope=rope)


def softmax_of_the_first(n):
    """A row's sum is that of its first n values."""

    def softmax(x):
        e = ports.exp(x - x.max(axis=-1, keepdims=True))
        sums = [ports.in_order(np.moveaxis(e[..., lane:n:16], -1, 0)) for lane in range(min(16, e.shape[-1]))]
        return {"out": e * (F32(1) / ports.in_order(sums))[..., None]}

    return wrong(softmax=softmax)


def running_mix(probs, v_codes, *rest, **named):
    """Sums over positions are fp32 numbers, of one product after the other."""
    out, heads = MIX(probs, v_codes, *rest, **named), probs.shape[1] // v_codes.shape[1]
    products = out["weight_codes"][..., None].astype(F32) * np.repeat(v_codes, heads, axis=1).swapaxes(0, 1)
    sums = np.cumsum(products, axis=2, dtype=F32)[:, :, -1]
    return out | {"sums": sums.astype(np.int32), "out": sums * out["weight_scales"][..., None]}


HEADS = {
    **{
        f"{what} beyond {n} of a head": (
            mistake(n),
            [case for name in ("5x128", "1x256") if int(name[2:]) > n
             for case in attention_cases(name, f"attention_int8.{name}.{part}")]
            + ["attention_half.8x96"] * (n < 96),
        )
        for what, mistake, part in (
            ("no elements", numbers_of_a_head, "scores"), ("no results", results_of_a_head, "mix"),
        )
        for n in (64, 100, 128, 200)
    },
    **{
        f"key/value heads of four queries where there are {n} and more": (
            kv_heads(partial(fewer_to_a_head, n - 1)),
            [case for name in names for case in attention_cases(name, *(x.format(name) for x in INT8))],
        )
        for n, names in ((5, ("5x128", "8x8")), (8, ("8x8",)))
    },
    **{
        f"no heads beyond {n}": (of_heads(n), attention_cases("8x8", *(x.format("8x8") for x in INT8)))
        for n in (32, 64, 128)
    },
    "values of the last 1024 positions": (
        of_the_last_positions(1024), [*attention_cases("long"), "attention_int8.long.mix"],
    ),
    "softmax: sum of the first 1024": (softmax_of_the_first(1024), ["softmax.wide", *attention_cases("long")]),
    **{
        f"int8 attention: sums over positions of {bits} bits": (mix_in_bits(bits), ["attention_int8.long.mix"])
        for bits in (23, 24, 25)
    },
    "int8 attention: sums over positions in fp32": (wrong(attention_int8_mix=running_mix), ["attention_int8.long.mix"]),
    "no rotation at position 384": (not_turned(lambda p: p == 384), ["rope.every", "rope.late"]),
    "no rotation at position 777": (not_turned(lambda p: p == 777), ["rope.every"]),
    **{
        f"no rotation from {start} on": (not_turned(lambda p, start=start: p >= start), ["rope.late"])
        for start in (384, 1024, 4096, 8192, 16384, 32768, 40000)
    },
    "positions of 15 bits": (
        wrong(rope=lambda positions, *rest, **named: ROPE(positions & 0x7FFF, *rest, **named)), ["rope.late"],
    ),
}  # fmt: skip


# ---- rows

MATMUL, CLASSIFIER, MODEL, EXPAND = ports.matmul, ports.classifier, ports.model, ports.gptq_expand
COMBINE, RISING = ports_moe.moe_combine, ports_moe.rising


def last_logit(function):
    """The logit of the last token of the vocabulary is 0.3 % off."""

    def call(*arguments, **named):
        out = function(*arguments, **named)
        logits = out["logits"].copy()
        logits[:, -1] *= F32(1.003)
        return out | {"logits": logits}

    return call


def cut_product(n, axis):
    """Tokens or outputs from n on are not computed."""

    def matmul(*arguments, **named):
        out = MATMUL(*arguments, **named)
        return out | {"out": up_to(n, out["out"], axis)}

    return wrong(matmul=matmul)


def cut_groups(n):
    """Groups from n on count nothing."""
    return with_change("matmul", sums=lambda *arguments: up_to(n, ports.group_sums(*arguments)))


def cut_combine(n):
    """Channels from n on are 0."""
    return [(ports_moe, "moe_combine", lambda **named: {"out": up_to(n, COMBINE(**named)["out"])})]


def of_rows(n, part, axis):
    """A matrix of which rows, or a row's groups, from n on are 0."""
    return wrong(gptq_expand=lambda **named: (w := EXPAND(**named)) | {part: up_to(n, w[part], axis)})


def in_fp16(scales):
    """The table's scales in fp16."""
    return lambda *arguments: scales(*arguments).astype(F16).astype(F32)


class TableOfTheMatrixBefore:
    """Every matrix has the table of the one before that had as many codes, the first its own."""

    def __init__(self):
        self.tables = {}

    def __call__(self, table=None, **named):
        if table is not None:
            before = self.tables.get(len(table), table)
            self.tables[len(table)], table = table, before
        return EXPAND(table=table, **named)


TABLES = [case for case in CASES if case.startswith(("gptq_expand.w4i", "gptq_expand.w5i"))]

ROWS = {
    "the last logit is 0.3 % off": (
        wrong(classifier=last_logit(CLASSIFIER), model=last_logit(MODEL)),
        ["classifier", *(case for case, about in CASES.items() if about["op"] == "model")],
    ),
    **{
        f"no {what} beyond {n}": (change, [case])
        for n in (64, 128, 256)
        for what, change, case in (
            ("tokens", cut_product(n, 0), "matmul.260x1x64g64"), ("outputs", cut_product(n, 1), "matmul.1x260x64g64"),
            ("groups", cut_groups(n), "matmul.1x1x8320g32"),
            ("expanded rows", of_rows(n, "w.codes", 0), "gptq_expand.w2xg64.64"),
            ("expanded groups", of_rows(n, "w.scales", 1), "gptq_expand.w2g32.8320"),
            ("gates", wrong(swiglu=lambda gate, up, n=n: {"out": up_to(n, SWIGLU(gate, up)["out"])}), "swiglu.wide"),
            ("channels of a sum of experts", cut_combine(n), "moe_combine.8of128"),
        )
    },
    "an order of channels in 8 bits": (
        with_change("gptq_gather", gathered=lambda x, order: x[:, order & 0xFF]), ["gptq_gather.320"],
    ),
    **{
        f"rotation in blocks of up to {block}": (
            wrong(rotate=lambda x, s, block, most=block: ROTATE(x, s, min(block, most))), ["rotate.1024"],
        )
        for block in (64, 128, 256, 512)
    },
    "scales of the embedding in fp16": (
        wrong(table_scales=in_fp16(ports.table_scales)), ["embedding.32", "embedding.64", "classifier"],
    ),
    "the table of the matrix before": (wrong(gptq_expand=TableOfTheMatrixBefore()), ["model.gptq"]),
    "one table for all": (
        wrong(gptq_expand=lambda table=None, **named:
              EXPAND(table=table if table is None else np.linspace(-128, 127, len(table)).astype(np.int8), **named)),
        [*TABLES, "model.gptq"],
    ),
}  # fmt: skip


# ---- experts

GROUPED, ROUTE = ports_moe.grouped, ports_moe.route


def ids_of_bits(bits):
    """Expert ids are kept in so many bits."""
    low = (1 << bits) - 1

    def route(*arguments, **named):
        out = ROUTE(*arguments, **named)
        return out | {"experts": out["experts"] & low}

    def grouped(tensors, group_list_type, product_of, *rest, **named):
        return GROUPED(tensors, group_list_type, lambda rows, e: product_of(rows, e & low), *rest, **named)

    combine = partial(COMBINE, order=lambda experts: RISING(experts & low))
    return [(ports_moe, "route", route), (ports_moe, "grouped", grouped), (ports_moe, "moe_combine", combine)]


def running_sums(x, w):
    """One product after the other in fp32."""
    return np.cumsum(x.astype(F32)[:, None] * w.astype(F32)[None], axis=-1, dtype=F32)[..., -1]


def sums_of(bits):
    return lambda x, w: (ports_moe.directly(x, w) + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)


def mean_hessian(x, mean_square):
    """H as the mean over an expert's tokens, times their number."""
    n = x.shape[1]
    return x.T.astype(F64) @ x / len(x) * len(x) + n / 2 * mean_square * np.eye(n)


def by_the_mean(**named):
    with np.errstate(invalid="ignore"):
        return GPTQ_EXPERT(hessian=mean_hessian, **named)


GPTQ_EXPERT = ports_moe.gptq_expert


def wrong_scales(change):
    """A8W4 whose weights have other scales."""
    right = ports_moe.grouped_a8w4

    def grouped_a8w4(tensors, **named):
        return right(tensors | {"weight.scales": change(tensors["weight.scales"])}, **named)

    return [(ports_moe, "grouped_a8w4", grouped_a8w4)]


def blocks_of(n):
    """Only the first n elements of each block count."""

    def dequantize(codes, scales, element, block, **named):
        values = MX_DEQUANTIZE(codes, scales, element, block, **named)
        return up_to(n, values.reshape(*values.shape[:-1], -1, block), axis=-1).reshape(values.shape)

    return [(ports_moe, "mx_dequantize", dequantize)]


MX_DEQUANTIZE = ports_moe.mx_dequantize

OF_128 = ["route.8of128", "route.8of128n", "grouped_a8w8.130experts", "moe_combine.8of128"]
EXPERTS = {
    **{
        f"expert ids of {bits} bits": (ids_of_bits(bits), cases)
        for bits, cases in {
            4: [*OF_128, "grouped_a8w4.18experts"],
            6: OF_128,
            7: ["route.9of300", "route.9of300n", "grouped_a8w8.130experts"],
            8: ["route.9of300", "route.9of300n"],
        }.items()
    },
    "A8W8 adds up in fp32": (with_change("grouped_a8w8", ports_moe, sums_of=running_sums), ["grouped_a8w8.long"]),
    **{
        f"A8W8 adds up in {bits} bits": (
            with_change("grouped_a8w8", ports_moe, sums_of=sums_of(bits)), ["grouped_a8w8.long"],
        )
        for bits in (24, 25)
    },
    "A8W4 scales the sum of a whole group": (
        with_change("grouped_a8w4", ports_moe, part_of=lambda size: size), ["grouped_a8w4.g128"],
    ),
    "A8W4: scales of the group before": (
        wrong_scales(lambda scales: np.roll(scales, 1, axis=-1)), ["grouped_a8w4.g64", "grouped_a8w4.g128"],
    ),
    "MXFP8: no more than 64 elements of a block": (blocks_of(64), ["grouped_mxfp8.b96"]),
    "MXFP8: no more than 8 blocks of a row": (
        [(ports_moe, "mx_dequantize", lambda *arguments, **named: up_to(256, MX_DEQUANTIZE(*arguments, **named)))],
        ["grouped_mxfp8.wide"],
    ),
    "an expert without a token divides 0 by 0": ([(ports_moe, "gptq_expert", by_the_mean)], ["gptq_expert.0"]),
}  # fmt: skip

SIZES = HEADS | ROWS | EXPERTS


@pytest.mark.parametrize("mistake", SIZES)
def test_these_vectors_show_a_mistake(mistake):
    change, cases = SIZES[mistake]
    assert cases
    assert named(change, cases) == cases


def test_the_page_names_these_vectors():
    assert unlisted(SIZES) == set()


# ---- formats


def format_of(about):
    return MatrixFormat(*(about[field] for field in MatrixFormat._fields))


def cases_of(op):
    """The cases of each format."""
    found = {}
    for case, about in CASES.items():
        if about["op"] == op:
            found.setdefault(format_of(about), []).append(case)
    return found


DENSE, OF_EXPERTS = cases_of("gptq_expand"), cases_of("ladder_experts")


def is_seen(case, form, change=lambda _part, values: values):
    """Whether a port is wrong, or ends, that takes a case's weights for those of another format.

    It reads the bytes that the file has. change: of a part, before that.
    """
    about = CASES[case]
    prefix = "weight." if about["op"] == "ladder_experts" else ""
    parts = [name for name in about["inputs"] if not prefix or name.startswith(prefix)]
    file = b"".join(change(name, TENSORS[f"{case}.{name}"]).tobytes() for name in parts).ljust(1 << 20, b"\0")
    own = {name: TENSORS[f"{case}.{name}"] for name in about["inputs"] if name not in parts}
    rows = TENSORS[f"{case}.{prefix}codes"].shape[:-1]
    n_in = TENSORS[f"{case}.x.codes" if prefix else f"{case}.w.codes"].shape[-1]
    if n_in % (form.group or n_in):
        return True
    at = 0
    for tensor in matrix_tensors("", (*rows, n_in), form):
        size = math.prod(tensor.shape)
        own[prefix + tensor.name[1:]] = np.frombuffer(file, tensor.dtype, size, at).reshape(tensor.shape)
        at += size * np.dtype(tensor.dtype).itemsize
    rest = {name: about[name] for name in ("group_list_type", "group_size") if name in about}
    try:
        with np.errstate(all="ignore"):
            found = PORT[about["op"]](**own, **rest, **form._asdict())
    except (ValueError, IndexError):
        return True
    found = {f"{case}.{name}": value for name, value in found.items()}
    return any(not report.ok for report in judge_ops({case: about}, TENSORS, found))


def test_every_format_has_vectors():
    assert DENSE.keys() == OF_EXPERTS.keys() == FORMATS
    groups = set()
    for case in (case for case in CASES if case.startswith("grouped_a8w4.")):
        n, n_groups = (TENSORS[f"{case}.weight.{part}"].shape[-1] for part in ("codes", "scales"))
        groups.add(n // n_groups if n_groups > 1 else 0)
    assert groups == set(GROUPS["a8w4"])


@pytest.mark.parametrize("cases", [DENSE, OF_EXPERTS], ids=["dense", "experts"])
def test_no_format_passes_for_another(cases):
    pairs = permutations(sorted(FORMATS), 2)
    assert [pair for pair in pairs if not any(is_seen(case, pair[1]) for case in cases[pair[0]])] == []


@pytest.mark.parametrize("cases", [DENSE, OF_EXPERTS], ids=["dense", "experts"])
def test_scales_exchanged_show_in_each_format(cases):
    """Each scale, zero point, factor of a row and value of a table is the one before it."""
    for form in sorted(FORMATS):
        assert not any(is_seen(case, form) for case in cases[form]), str(form)
        for part in ("scales", "groups", "zeros", "row_scales", "table"):
            has = [case for case in cases[form] if {part, f"weight.{part}"} & set(CASES[case]["inputs"])]
            seen = [is_seen(case, form, partial(one_on, part)) for case in has]
            assert any(seen) == bool(has), f"{form}: {part}"


def one_on(part, name, values):
    """Values of this part, each that of the place before."""
    return np.roll(values, 1) if name.removeprefix("weight.") == part else values
