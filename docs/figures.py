"""Draws the figures of the documentation as SVG: python docs/figures.py [FOLDER [FIGURE ...]]

Each figure has a background of its own, so that it reads the same on a light page and on a dark one.

smoothing.svg and awq-search.svg show measured data. They are measured each time they are drawn, which takes a second or
two: tiny-llama gets outliers (models/outliers.py) and reads models/calibration.txt, as the exporter would have it
(golden/smooth.py, golden/awq_search.py). moe-routing.svg is what the reference traces of tiny-qwen3-moe, unquantized.
awq-fragments.svg, awq-pairs.svg and ldmatrix.svg show what docs/fragments.cu says, which is compiled with $CXX (g++)
and run in the emulator. quality.svg shows docs/quality.json, which `make quality` measures, quality-weights.svg
docs/quality-weights.json (docs/quality.md has the command), rtl-wave.svg docs/rtl-wave.json, which `make rtl-wave`
simulates, rtl-chip.svg docs/rtl-chip.json, which `make rtl-chip` measures; chip-layer.svg docs/chip.json, which
docs/chip.md has the command for; gpu-ladder.svg docs/gpu-results.json, memory-limit.svg a table of docs/moe.md.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

INK, QUIET, LINE, PAPER = "#1f2328", "#57606a", "#6e7781", "#fbfbfa"
FILL = {  # name: (fill, border)
    "int8": ("#ffd8a8", "#d9730d"),
    "fp32": ("#d3e5fb", "#3b78c4"),
    "quantize": ("#fff3bf", "#b08800"),
    "memory": ("#e6e8eb", "#6e7781"),
    "id": ("#ffffff", "#6e7781"),
}
FONT = "font-family=\"Helvetica, Arial, 'DejaVu Sans', sans-serif\""


class Svg:
    """A drawing, grown shape by shape."""

    def __init__(self, width: int, height: int, title: str, text: str):
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img" {FONT}>',
            f"<title>{title}</title>",
            f"<desc>{text}</desc>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{LINE}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" rx="10" fill="{PAPER}" stroke="#d0d7de"/>',
        ]

    def text(
        self,
        x: float,
        y: float,
        words: str,
        size: int = 14,
        colour: str = INK,
        anchor: str = "middle",
        bold: bool = False,
        mono: bool = False,
    ) -> None:
        extra = ' font-weight="bold"' if bold else ""
        extra += " font-family=\"Menlo, Consolas, 'DejaVu Sans Mono', monospace\"" if mono else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}" text-anchor="{anchor}"{extra}>{words}</text>'
        )

    def box(self, x: float, y: float, w: float, h: float, kind: str, name: str, note: str = "") -> None:
        """A box with its top left corner at (x, y): a name, and a smaller line under it."""
        fill, border = FILL[kind]
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="5" fill="{fill}" stroke="{border}" '
            'stroke-width="1.5"/>'
        )
        middle = y + h / 2
        if note:
            self.text(x + w / 2, middle - 2, name, 14, bold=True)
            self.text(x + w / 2, middle + 14, note, 12, QUIET)
        else:
            self.text(x + w / 2, middle + 5, name, 14, bold=True)

    def arrow(self, *points: tuple[float, float], tip: bool = True, dashed: bool = False) -> None:
        """A line through the points, with an arrowhead at the last."""
        path = "M" + " L".join(f"{x:g} {y:g}" for x, y in points)
        end = ' marker-end="url(#tip)"' if tip else ""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(f'<path d="{path}" fill="none" stroke="{LINE}" stroke-width="1.6"{end}{dash}/>')

    def plus(self, x: float, y: float) -> None:
        """The sum of two arrows."""
        fill, border = FILL["fp32"]
        self.parts.append(
            f'<circle cx="{x:g}" cy="{y:g}" r="14" fill="{fill}" stroke="{border}" stroke-width="1.5"/>'
            f'<path d="M{x - 7:g} {y:g} H{x + 7:g} M{x:g} {y - 7:g} V{y + 7:g}" stroke="{INK}" stroke-width="2"/>'
        )

    def done(self) -> str:
        return "\n".join([*self.parts, "</svg>"]) + "\n"


def data_flow() -> str:
    """One token's way through the model; shapes are those of Llama 3.2 1B."""
    s = Svg(
        880,
        872,
        "Data flow of one token through runq",
        "A token id picks a row of the embedding. Each layer normalizes, quantizes to int8, multiplies by q, k and v, "
        "rotates q and k, attends over the KV cache, quantizes, multiplies by o and adds the result to the residual "
        "stream; then normalizes, quantizes, multiplies by gate and up, applies SwiGLU, quantizes, multiplies by down "
        "and adds. After the last layer it normalizes, quantizes and multiplies by the classifier; the sampler picks "
        "the next token id from the logits. Matrices are int8, everything else is fp32.",
    )
    # The way in.
    s.box(30, 22, 118, 44, "id", "token id")
    s.box(190, 22, 190, 44, "int8", "embedding", "one row, int8 to fp32")
    s.arrow((148, 44), (188, 44))
    s.arrow((285, 66), (285, 128))
    s.text(293, 86, "x: 2048 values, the residual stream", 12, QUIET, "start")

    # Legend.
    for i, (kind, name) in enumerate(
        [("int8", "int8"), ("quantize", "fp32 to int8"), ("fp32", "fp32"), ("memory", "memory")]
    ):
        x = 494 + (0, 70, 186, 258)[i]
        fill, border = FILL[kind]
        s.parts.append(f'<rect x="{x}" y="36" width="16" height="16" rx="3" fill="{fill}" stroke="{border}"/>')
        s.text(x + 22, 49, name, 13, INK, "start")

    # The frame of a layer.
    s.parts.append(
        f'<rect x="20" y="100" width="840" height="620" rx="10" fill="none" stroke="{LINE}" stroke-dasharray="6 4"/>'
    )
    s.text(844, 122, "one of 16 layers", 13, QUIET, "end")
    s.text(70, 150, "Attention", 15, INK, "start", bold=True)
    s.text(500, 150, "Feed-forward", 15, INK, "start", bold=True)

    # Attention, from x = 40 to 420; its centre line at 285 is that of the second of three boxes.
    centre = 285
    s.box(190, 130, 190, 40, "fp32", "RMSNorm", "attn.norm")
    s.arrow((centre, 170), (centre, 186))
    s.box(190, 188, 190, 40, "quantize", "quantize", "32 groups of 64")
    s.arrow((centre, 228), (centre, 240), tip=False)
    for x in (145, 285, 395):
        s.arrow((centre, 240), (x, 240), (x, 256))
    s.box(80, 258, 130, 46, "int8", "q_proj", "2048 to 2048")
    s.box(232, 258, 106, 46, "int8", "k_proj", "2048 to 512")
    s.box(346, 258, 98, 46, "int8", "v_proj", "2048 to 512")
    s.arrow((145, 304), (145, 322))
    s.arrow((285, 304), (285, 322))
    s.box(80, 324, 130, 46, "fp32", "RoPE", "(Qwen3: norm first)")
    s.box(232, 324, 106, 46, "fp32", "RoPE", "(norm first)")
    s.arrow((285, 370), (285, 390))
    s.arrow((395, 304), (395, 390))
    s.box(232, 392, 212, 46, "memory", "KV cache", "k, v of every position, fp32")
    s.arrow((145, 370), (145, 474))
    s.arrow((338, 438), (338, 456), (285, 456), (285, 474))
    s.box(80, 476, 364, 50, "fp32", "scores, softmax, mix", "32 heads of 64; 4 query heads share a key/value head")
    s.arrow((centre, 526), (centre, 544))
    s.box(190, 546, 190, 40, "quantize", "quantize", "32 groups of 64")
    s.arrow((centre, 586), (centre, 602))
    s.box(190, 604, 190, 46, "int8", "o_proj", "2048 to 2048")
    s.arrow((centre, 650), (centre, 668))
    s.plus(centre, 684)
    s.arrow((centre, 112), (50, 112), (50, 684), (269, 684))  # residual
    s.parts.append(f'<circle cx="{centre}" cy="112" r="3" fill="{LINE}"/>')

    # From attention to the feed-forward block, up through the gutter.
    s.arrow((301, 684), (470, 684), (470, 166), (650, 166), (650, 194))

    right = 650
    s.parts.append(f'<circle cx="{right}" cy="166" r="3" fill="{LINE}"/>')
    s.box(555, 196, 190, 40, "fp32", "RMSNorm", "ffn.norm")
    s.arrow((right, 236), (right, 256))
    s.box(555, 258, 190, 40, "quantize", "quantize", "32 groups of 64")
    s.arrow((right, 298), (right, 312), tip=False)
    for x in (577, 723):
        s.arrow((right, 312), (x, 312), (x, 330))
    s.box(510, 332, 134, 46, "int8", "gate_proj", "2048 to 8192")
    s.box(656, 332, 134, 46, "int8", "up_proj", "2048 to 8192")
    s.arrow((577, 378), (577, 408))
    s.arrow((723, 378), (723, 408))
    s.box(510, 410, 280, 46, "fp32", "SwiGLU", "silu(gate) * up, 8192 values")
    s.arrow((right, 456), (right, 482))
    s.box(555, 484, 190, 40, "quantize", "quantize", "128 groups of 64")
    s.arrow((right, 524), (right, 550))
    s.box(555, 552, 190, 46, "int8", "down_proj", "8192 to 2048")
    s.arrow((right, 598), (right, 668))
    s.plus(right, 684)
    s.arrow((right, 166), (830, 166), (830, 684), (666, 684))  # residual

    # The way out.
    s.arrow((right, 698), (right, 744))
    s.text(right + 8, 737, "after the last layer", 12, QUIET, "start")
    s.box(560, 746, 180, 40, "fp32", "RMSNorm", "norm")
    s.arrow((560, 766), (522, 766))
    s.box(380, 746, 140, 40, "quantize", "quantize", "32 groups of 64")
    s.arrow((380, 766), (342, 766))
    s.box(190, 746, 150, 40, "int8", "classifier", "2048 to 128256")
    s.arrow((265, 786), (265, 812))
    s.box(190, 814, 150, 40, "fp32", "sampler", "128256 logits")
    s.arrow((190, 834), (150, 834))
    s.box(30, 814, 118, 40, "id", "next token id")
    s.text(360, 838, "The next id goes in at the top; its keys and values join the cache.", 13, QUIET, "start")
    return s.done()


def int8_product() -> str:
    """One output of a quantized matrix product: codes, accumulators, scales."""
    s = Svg(
        880,
        330,
        "One output of an int8 matrix product",
        "A row of int8 weights and the int8 activations are cut into groups of 64. Each pair of groups gives one exact "
        "int32 accumulator, which is multiplied by the two fp32 scales of the group; the products are added in fp32.",
    )
    s.text(40, 36, "One output = one row of W times x, 2048 long: 32 groups of 64", 15, INK, "start", bold=True)
    columns = [(150, "group 0"), (340, "group 1"), (640, "group 31")]
    s.text(40, 94, "row of W", 13, INK, "start")
    s.text(40, 148, "x", 13, INK, "start")
    s.text(40, 204, "int32, exact", 13, INK, "start")
    s.text(40, 258, "fp32", 13, INK, "start")
    for x, name in columns:
        g = name.rsplit(" ", maxsplit=1)[-1]
        s.text(x + 90, 62, name, 12, QUIET)
        s.box(x, 70, 112, 38, "int8", "64 codes")
        s.box(x + 116, 70, 54, 38, "fp32", f"s{g}")
        s.box(x, 124, 112, 38, "int8", "64 codes")
        s.box(x + 116, 124, 54, 38, "fp32", f"t{g}")
        s.arrow((x + 56, 162), (x + 56, 178))
        s.box(x, 180, 112, 38, "int8", f"acc{g}")
        s.arrow((x + 56, 218), (x + 56, 234))
        s.arrow((x + 143, 162), (x + 143, 234))
        s.box(x, 236, 170, 38, "fp32", f"acc{g} * s{g} * t{g}")
        s.arrow((x + 85, 274), (x + 85, 302), tip=False)
    for y in (94, 148, 204, 260):
        s.text(575, y, ". . .", 16, QUIET)
    s.arrow((235, 302), (790, 302))
    s.text(798, 307, "sum, fp32", 13, INK, "start")
    return s.done()


@cache
def calibrated_layer(layer: int) -> tuple:
    """Config, weights (golden.forward.Fp32) and inputs by place of a layer of tiny-llama with outliers."""
    from formats.checkpoint import Checkpoint
    from golden.calibration import calibration_samples, observe
    from models.outliers import copy_with_outliers

    models = HERE.parent / "models"
    text = (models / "calibration.txt").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        hf_dir = Path(folder) / "model"
        copy_with_outliers(models / "tiny-llama", hf_dir)
        checkpoint = Checkpoint(hf_dir)
        samples = calibration_samples(hf_dir, checkpoint.config, text, n_samples=16, seq_len=256)
        for i, (weights, seen) in enumerate(observe(checkpoint, samples, n_rows=256)):
            if i == layer:
                for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                    weights.vector(f"layers.{i}.attn.{name}")
                for name in ("gate_proj", "up_proj", "down_proj"):
                    weights.vector(f"layers.{i}.ffn.{name}")
                return checkpoint.config, weights, seen
    raise ValueError(f"there is no layer {layer}")


def channel_maxima(layer: int, alpha: float) -> dict[str, Sequence[float]]:
    """attn.norm's channels in a layer of tiny-llama with outliers: max|x| and max|w|, before and after smoothing."""
    import numpy as np

    from golden.channel_scaling import CONSUMERS
    from golden.smooth import factors

    _, weights, seen = calibrated_layer(layer)
    x = seen[f"layers.{layer}.attn.norm"].largest
    names = [f"layers.{layer}.{consumer}" for consumer in CONSUMERS["attn.norm"]]
    w = np.max([np.abs(weights.vector(name)).max(axis=0) for name in names], axis=0)
    s = factors(x, w, alpha)
    return {"x": x, "w": w, "x / s": x / s, "w * s": w * s}


def median(values: Sequence[float]) -> float:
    """The middle one; of an even number, the mean of the middle two."""
    v = sorted(values)
    return (v[(len(v) - 1) // 2] + v[len(v) // 2]) / 2


def smoothing() -> str:
    """Maxima of activations and weights, channel by channel, before and after smoothing."""
    maxima = channel_maxima(layer=0, alpha=0.5)
    outliers = {i for i, x in enumerate(maxima["x"]) if x > 10 * median(maxima["x"])}
    s = Svg(
        880,
        530,
        "What smoothing does to the channels of attn.norm",
        "Four bar charts over the 128 input channels of q, k and v in layer 0 of tiny-llama with outliers. Before: in "
        "the activations four channels reach 104 to 163 and all others less than 3; the weights of the same four "
        "input channels are far smaller than the others. After smoothing with alpha 0.5, all channels have maxima of "
        "the same order, and those of activations and weights are equal.",
    )
    colour = {True: FILL["int8"][1], False: FILL["fp32"][1]}
    for x, outlier, name in ((560, True, "outlier channels"), (720, False, "the others")):
        s.parts.append(f'<rect x="{x}" y="18" width="14" height="14" rx="2" fill="{colour[outlier]}"/>')
        s.text(x + 20, 30, name, 13, INK, "start")
    s.text(40, 31, "q, k and v in layer 0: 128 input channels", 15, INK, "start", bold=True)

    width, height = 384, 150  # of a chart: three to a channel
    charts = [
        (58, 84, "x", "activations, max|x| per input channel", 200, 50),
        (486, 84, "x / s", "x / s", 1.5, 0.5),
        (58, 316, "w", "weights, max|w| per input channel", 0.8, 0.2),
        (486, 316, "w * s", "w * s", 1.5, 0.5),
    ]
    for left, top, key, name, limit, tick in charts:
        values = maxima[key]
        assert max(values) <= limit, f"{key}: {max(values)} is above the chart"
        bottom = top + height
        s.text(left, top - 14, name, 14, INK, "start")
        for i in range(round(limit / tick) + 1):
            y = bottom - height * i * tick / limit
            s.parts.append(f'<path d="M{left} {y:g} H{left + width}" stroke="{FILL["memory"][0]}"/>')
            s.text(left - 8, y + 4, f"{i * tick:g}", 12, QUIET, "end")
        for is_outlier in (False, True):
            bars = "".join(
                f"M{left + 3 * i + 1.5:g} {bottom} V{bottom - height * v / limit:.1f}"
                for i, v in enumerate(values)
                if (i in outliers) == is_outlier
            )
            s.parts.append(f'<path d="{bars}" stroke="{colour[is_outlier]}" stroke-width="2.4"/>')
        s.parts.append(f'<path d="M{left} {bottom} H{left + width}" stroke="{LINE}"/>')
        if key == "w":  # bars of less than a point's height: pointed at, or they look forgotten
            for i in outliers:
                x = left + 3 * i + 1.5
                s.parts.append(f'<path d="M{x - 3:g} {bottom - 12} h6 l-3 8 z" fill="{colour[True]}"/>')
        largest, middle = max(values), median(values)
        note = f"largest {largest:.3g}, median {middle:.3g}"
        if key == "w":
            note += f"; outlier channels at most {max(values[i] for i in outliers):.1g}"
        if key.startswith("x"):
            note += f"; the median has code {round(127 * middle / largest)} of 127"
        s.text(left, bottom + 22, note, 12, QUIET, "start")
    s.text(58, 516, "The axes differ. What matters is how unequal the bars of one chart are.", 13, INK, "start")
    s.text(870, 516, "Left: before. Right: after, alpha 0.5.", 13, INK, "end")
    return s.done()


def scaling_units() -> str:
    """Where a systolic array has its scaling units under four schemes."""
    s = Svg(
        880,
        452,
        "Where the scaling units sit",
        "Four columns of boxes, from the fp32 activations to one fp32 output of a row 2048 long. W8A8 with static "
        "scales multiplies and rounds each value as it comes, sums the whole row in int32 and scales once. W8A8 with "
        "dynamic scales first needs the maximum of the row. With blocks of 32 the maximum is that of a block, and "
        "there are 64 accumulators, each scaled and added to the sum so far: a dashed arrow leads it back. Q8 with "
        "groups of 64 does the same 32 times.",
    )
    columns = [
        ("W8A8, static", "", "2048 MACs", "int32, 26 bits", "multiply once", 1),
        ("W8A8, whole rows", "max of 2048", "2048 MACs", "int32, 26 bits", "multiply twice", 1),
        ("Q8, groups of 64", "max of 64", "64 MACs", "int32, 21 bits", "multiply twice, add", 32),
        ("W8A8, blocks of 32", "max of 32", "32 MACs", "int32, 20 bits", "multiply twice, add", 64),
    ]
    for i, (name, largest, macs, bits, scaling, count) in enumerate(columns):
        left, centre = 30 + 210 * i, 120 + 210 * i
        s.text(centre, 38, name, 15, INK, bold=True)
        s.text(centre, 66, "x, fp32", 13, QUIET)
        if largest:
            s.arrow((centre, 74), (centre, 94))
            s.box(left, 96, 180, 44, "fp32", largest, "before the first code")
            s.arrow((centre, 140), (centre, 160))
        else:
            s.arrow((centre, 74), (centre, 160))
        s.box(left, 162, 180, 44, "quantize", "multiply, round", "per value")
        s.arrow((centre, 206), (centre, 226))
        s.box(left, 228, 180, 54, "int8", macs, bits)
        s.arrow((centre, 282), (centre, 302))
        s.box(left, 304, 180, 44, "fp32", scaling, "below each output channel")
        if count > 1:  # the sum so far comes back to the addition
            s.arrow((left + 150, 348), (left + 150, 362), (left + 192, 362), (left + 192, 326), (left + 182, 326),
                    dashed=True)  # fmt: skip
        s.arrow((centre, 348), (centre, 372))
        s.text(centre, 390, "output, fp32", 13, QUIET)
        s.text(centre, 420, f"{count} scaling{'s' * (count > 1)} per 2048 MACs", 13, INK)
    s.text(440, 442, "For one output, a row of 2048 weights. MAC: one multiply-add of two int8 codes.", 12, QUIET)
    return s.done()


def awq_search() -> str:
    """The error of each place's outputs at each of the ratios that AWQ tries."""
    import numpy as np

    from golden.awq_search import RATIOS, factors, rounded
    from golden.channel_scaling import CONSUMERS, share, spread

    config, weights, seen = calibrated_layer(0)
    s = Svg(
        880,
        400,
        "The error of a layer's outputs by AWQ's ratio",
        "Four curves over the ratios 0, 0.05, ... 0.95 for the four inputs of matrices in layer 0 of tiny-llama with "
        "outliers. Those of attn.norm and ffn.norm, which have outliers, fall to half. The others are flat and rise "
        "towards the end.",
    )
    left, top, width, height, limit = 60, 64, 620, 276, 25
    s.text(24, 31, "Error of the outputs of layer 0, plain rounding after scaling, %", 15, INK, "start", bold=True)
    for i in range(6):
        y = top + height - height * 5 * i / limit
        s.parts.append(f'<path d="M{left} {y:g} H{left + width}" stroke="{FILL["memory"][0]}"/>')
        s.text(left - 8, y + 4, f"{5 * i}", 12, QUIET, "end")
    for i in range(0, 20, 2):
        s.text(left + width * i / 19, top + height + 20, f"{RATIOS[i]:g}", 12, QUIET)
    s.text(left + width / 2, top + height + 44, "ratio; 0 is no scaling", 13)
    colours = (FILL["fp32"][1], FILL["int8"][1], INK, FILL["quantize"][1])
    ends = []  # of the curves: height, label, colour
    for colour, (place, consumers) in zip(colours, CONSUMERS.items(), strict=True):
        inputs = seen[f"layers.0.{place}"]
        w = np.concatenate([weights.vector(f"layers.0.{consumer}") for consumer in consumers])
        x = inputs.rows.astype(float)
        exact = x @ w.T
        mean = share(config, place, inputs.mean)
        errors = []
        for ratio in RATIOS:
            scale = spread(config, place, factors(mean, ratio))
            errors.append(100 * np.linalg.norm(x / scale @ rounded(w * scale, 128).T - exact) / np.linalg.norm(exact))
        points = [(left + width * i / 19, top + height - height * e / limit) for i, e in enumerate(errors)]
        path = "M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        s.parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        best = int(np.argmin(errors))
        s.parts.append(f'<circle cx="{points[best][0]:.1f}" cy="{points[best][1]:.1f}" r="5" fill="{colour}"/>')
        ends.append((points[-1][1], f"{place}, best {RATIOS[best]:g}", colour))
    # Beside the end of each curve, but far enough apart to read; a thin line leads to the curve.
    label = -math.inf
    for y, words, colour in sorted(ends):
        label = max(y, label + 20)
        s.parts.append(f'<path d="M{left + width + 6} {y:.1f} L{left + width + 28} {label:.1f}" stroke="{colour}"/>')
        s.text(left + width + 34, label + 4, words, 13, colour, "start")
    return s.done()


PAIR = ("fp32", "int8", "quantize", "memory")  # colours of the pairs 0 to 3, and of registers


def cell(
    s: Svg, x: float, y: float, w: float, h: float, kind: str, words: str, size: int = 13, mono: bool = False
) -> None:
    """A small box with one line in it."""
    fill, border = FILL[kind]
    s.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" fill="{fill}" stroke="{border}"/>')
    s.text(x + w / 2, y + h / 2 + 0.36 * size, words, size, mono=mono)


def awq_nibbles() -> str:
    """Eight int4 in a word, and what lop3 takes out of it."""
    from golden.awq import NIBBLE

    s = Svg(
        880,
        440,
        "Eight int4 codes in a 32-bit word",
        "From bit 31 to bit 0 the nibbles hold the output channels 7, 5, 3, 1, 6, 4, 2, 0. The mask 000f000f takes "
        "channels 1 and 0, which become the fp16 numbers 1024 + q; the mask 00f000f0 takes channels 3 and 2, 16 times "
        "as large. Shifted right by 8, the same masks take channels 5 and 4, and 7 and 6.",
    )
    left, width, height = 152, 86, 34
    channel = {nibble: i for i, nibble in enumerate(NIBBLE)}

    def row(y: float, labels: Sequence[str], shown: Callable[[int], tuple[str, str]]) -> None:
        for i, label in enumerate(labels):
            s.text(24, y + 22 + 18 * (i - (len(labels) - 1) / 2), label, 13, INK, "start", mono=True)
        for place in range(8):
            words, kind = shown(7 - place)
            cell(s, left + width * place, y, width, height, kind, words, 14, mono=True)
        s.parts.append(f'<path d="M{left + 4 * width} {y - 4} v{height + 8}" stroke="{INK}" stroke-width="2.5"/>')

    s.text(left + 2 * width, 32, "high half: odd output channels", 14, INK, bold=True)
    s.text(left + 6 * width, 32, "low half: even output channels", 14, INK, bold=True)
    for place in range(8):
        bit = 28 - 4 * place
        s.text(left + width * (place + 0.5), 54, f"bits {bit + 3}..{bit}", 12, QUIET)
    row(62, ["word"], lambda n: (f"output {channel[n]}", PAIR[channel[n] // 2]))

    def taken(pair: int) -> Callable[[int], tuple[str, str]]:
        at = pair % 2  # its nibble in either half, after the shift

        def shown(n: int) -> tuple[str, str]:
            if n % 4 == at:
                return f"q{2 * pair + n // 4}", PAIR[pair]
            return ("0", "id") if n % 4 < 2 else ("64"[3 - n % 4], "id")

        return shown

    for pair in range(4):
        y = 130 + 76 * pair
        mask = "0x000f000f" if pair % 2 == 0 else "0x00f000f0"
        row(y, ["&gt;&gt; 8"] * (pair >= 2) + [f"&amp; {mask}", "| 0x64006400"], taken(pair))
        factor = "16 * " if pair % 2 else ""
        for half in (1, 0):
            x = left + width * (2 if half else 6)
            s.text(x, y + height + 19, f"fp16: 1024 + {factor}q{2 * pair + half}", 13, QUIET)
    return s.done()


@cache
def fragments() -> tuple[tuple[str, int, int, int, int, int], ...]:
    """What docs/fragments.cu prints: what, lane, register, half, row, column."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "fragments"
        flags = ["-std=c++20", "-pthread", "-fno-strict-aliasing", "-Wno-unknown-pragmas", "-DNO_TOKENIZER"]
        source = ["-DENGINE", "-I.", "-x", "c++", "docs/fragments.cu"]
        command = [*os.environ.get("CXX", "g++").split(), *flags, *source, "-o", program]
        subprocess.run(command, cwd=HERE.parent, check=True)
        printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    return tuple((line.split()[0], *map(int, line.split()[1:])) for line in printed.splitlines())


def held(what: str) -> Iterator[tuple[int, int, int, int, int]]:
    """Lane, register, half, row and column of each element of one kind."""
    return (found[1:] for found in fragments() if found[0] == what)


SHOWN_LANE = 9


def fragment(s: Svg, what: str, x: float, y: float, by_columns: bool = False) -> None:
    """A matrix whose elements bear their lane, in the colour of the register; two in a register are one box."""
    w, h = 22, 20
    boxes: dict[tuple, list[tuple[int, int]]] = {}
    for lane, register, _half, row, column in held(what):
        if what == "c":
            register = register // 2 * 2
        boxes.setdefault((lane, register), []).append((row, column))
    marked = []
    for (lane, register), places in boxes.items():
        (row, column), (last_row, last_column) = min(places), max(places)
        assert (last_row - row, last_column - column) == ((1, 0) if by_columns else (0, 1)), what
        at = x + w * column, y + h * row, w * (last_column - column + 1), h * (last_row - row + 1)
        cell(s, *at, PAIR[register // (2 if what == "c" else 1)], str(lane), 11)
        if lane == SHOWN_LANE:
            marked.append(at)
    for left, top, width, height in marked:
        s.parts.append(
            f'<rect x="{left:g}" y="{top:g}" width="{width:g}" height="{height:g}" fill="none" stroke="{INK}" '
            'stroke-width="2.5"/>'
        )
    rows, columns = (1 + max(e[i] for e in held(what)) for i in (3, 4))
    for i in range(rows):
        s.text(x - 6, y + h * i + 14, str(i), 11, QUIET, "end")
    for i in range(columns):
        s.text(x + w * (i + 0.5), y - 6, str(i), 11, QUIET)


def registers(s: Svg, x: float, y: float, names: Sequence[str]) -> None:
    """What the colours stand for."""
    for i, name in enumerate(names):
        fill, border = FILL[PAIR[i]]
        s.parts.append(
            f'<rect x="{x:g}" y="{y - 11:g}" width="14" height="14" rx="2" fill="{fill}" stroke="{border}"/>'
        )
        s.text(x + 20, y, name, 12, INK, "start")
        x += 34 + 7 * len(name)


def awq_fragments() -> str:
    """Which lane holds which element in mma.m16n8k16, as the emulator has it."""
    s = Svg(
        880,
        476,
        "Which lane holds which element",
        "Three grids with a lane's number in each element: operand A of mma.m16n8k16, 16 by 16; operand B, 16 by 8; "
        "the result C, 16 by 8. Colours tell the registers of a lane.",
    )
    top = 106
    for what, x, shape, sides, names in (
        ("a", 40, "A: 16 by 16", "output channels by input channels", ("a[0]", "a[1]", "a[2]", "a[3]")),
        ("b", 450, "B: 16 by 8", "input channels by tokens", ("b[0]", "b[1]")),
        ("c", 676, "C: 16 by 8", "output channels by tokens", ("c[0], c[1]", "c[2], c[3]")),
    ):
        s.text(x, 30, shape, 14, INK, "start", bold=True)
        s.text(x, 50, sides, 13, INK, "start")
        registers(s, x, 74, names)
        fragment(s, what, x, top, by_columns=what == "b")
    s.text(416, top + 165, "*", 20)
    s.text(642, top + 165, "=", 20)
    s.text(40, 456, "A number is the lane that holds the element. A box is a register in A and B, two in C.", 13,
           QUIET, "start")  # fmt: skip
    s.text(852, 456, f"Outlined: lane {SHOWN_LANE}, g = {SHOWN_LANE // 4}, t = {SHOWN_LANE % 4}.", 13, QUIET, "end")
    return s.done()


def awq_pairs() -> str:
    """How four words become operand A in one lane."""
    weights = [
        {(r, h): (row, col) for lane, r, h, row, col in held(f"pair{p}") if lane == SHOWN_LANE} for p in range(4)
    ]
    inputs = [weights[0][0, 0][0], weights[0][0, 1][0], weights[0][2, 0][0], weights[0][2, 1][0]]
    first = weights[0][0, 0][1] // 8 * 8
    s = Svg(
        880,
        462,
        "From four words to operand A",
        f"Lane {SHOWN_LANE} holds four words, of the input channels {inputs}. prmt puts the low halves of two words "
        "together, and the high halves. lop3 takes a pair of nibbles out of each of the four results; subtraction "
        "and multiplication make them weights, a register of operand A each.",
    )
    s.text(24, 32, f"Lane {SHOWN_LANE}: g = {SHOWN_LANE // 4}, t = {SHOWN_LANE % 4}; word {SHOWN_LANE // 4}, "
           f"output channels {first} to {first + 7}", 15, INK, "start", bold=True)  # fmt: skip
    lefts, half = (24, 238, 452, 666), 95
    evens = " ".join(str(c) for c in range(first + 6, first - 1, -2))
    odds = " ".join(str(c) for c in range(first + 7, first, -2))
    for x, k in zip(lefts, inputs, strict=True):
        s.text(x + half, 66, f"word of input channel {k}", 13, QUIET)
        cell(s, x, 76, half, 34, "int8", odds, 12)
        cell(s, x + half, 76, half, 34, "fp32", evens, 12)
    names = ("even[0]", "odd[0]", "even[1]", "odd[1]")
    for i, (x, name) in enumerate(zip(lefts, names, strict=True)):
        odd, pair = i % 2, i // 2 * 2
        for j in (1, 0):  # the high half first: from the later input
            at = x if j else x + half
            cell(s, at, 190, half, 34, "int8" if odd else "fp32", f"of input {inputs[pair + j]}", 12)
            source = lefts[pair + j] + (half / 2 if odd else half * 1.5)
            s.arrow((source, 110), (at + half / 2, 188))
        s.text(x + half, 242, name, 13, INK, mono=True)
        s.arrow((x + half, 250), (x + half, 300))
    s.text(440, 148, "prmt", 14, INK, bold=True)
    s.text(440, 272, "lop3 with the", 13, INK, bold=True)
    s.text(440, 290, "mask of pair 0", 13, INK, bold=True)
    s.text(226, 272, "- zero", 13, INK)
    s.text(226, 290, "* scale", 13, INK)
    s.text(654, 272, "- zero", 13, INK)
    s.text(654, 290, "* scale", 13, INK)
    for i, x in enumerate(lefts):
        for h in (1, 0):
            k, channel = weights[0][i, h]
            at = x if h else x + half
            cell(s, at, 302, half, 46, "quantize", "", 12)
            s.text(at + half / 2, 321, f"output {channel}", 12)
            s.text(at + half / 2, 339, f"input {k}", 12)
        row = SHOWN_LANE // 4 + i % 2 * 8
        s.text(x + half, 368, f"a[{i}]", 13, INK, mono=True)
        s.text(x + half, 386, f"row {row} of A", 12, QUIET)
    others = [sorted({channel for _, channel in w.values()}) for w in weights[1:]]
    s.text(24, 420, "The other masks and the shift make three more A operands: output channels "
           + ", ".join(f"{a} and {b}" for a, b in others) + ".", 13, INK, "start")  # fmt: skip
    s.text(24, 442, f"All are in rows {SHOWN_LANE // 4} and {SHOWN_LANE // 4 + 8} of A, so the four results of a lane "
           "are the eight output channels of its word.", 13, INK, "start")  # fmt: skip
    return s.done()


def outline(s: Svg, x: float, y: float, w: float, h: float) -> None:
    """A heavy frame around what a figure follows."""
    s.parts.append(
        f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" fill="none" stroke="{INK}" stroke-width="2.5"/>'
    )


def ldmatrix() -> str:
    """What the lanes of a warp pass to ldmatrix and what they get, as the emulator has it."""
    s = Svg(
        880,
        420,
        "ldmatrix: addresses in, fragments out",
        "Four matrices of 8 rows, each row eight fp16 numbers in shared memory. Beside each row is the lane that "
        "passes its address: lanes 0 to 7 for matrix 0, 8 to 15 for matrix 1, and so on. In each pair of neighbouring "
        f"elements is the lane that gets it: lane 4g + t gets pair t of row g, from every matrix. Lane {SHOWN_LANE} "
        "gets the outlined pairs, matrix m in its register m.",
    )
    s.text(24, 32, "One ldmatrix.x4: a warp loads four matrices of 8 by 8 fp16 from shared memory", 15, INK, "start",
           bold=True)  # fmt: skip
    w, h, top = 34, 24, 96
    receiver = {(register, row, column): lane for lane, register, _half, row, column in held("ldmatrix")}
    for m in range(4):
        left = 62 + 208 * m
        s.text(left + 2 * w, 62, f"matrix {m}", 14, INK, bold=True)
        for t in range(4):
            s.text(left + w * (t + 0.5), 86, f"{2 * t}, {2 * t + 1}", 11, QUIET)
        for row in range(8):
            s.text(left - 8, top + h * row + 16, str(8 * m + row), 12, INK, "end", bold=True)
            for t in range(4):
                lane = receiver[m, row, 2 * t]
                assert lane == receiver[m, row, 2 * t + 1]
                cell(s, left + w * t, top + h * row, w, h, PAIR[m], str(lane), 12)
        for t in range(4):
            for row in range(8):
                if receiver[m, row, 2 * t] == SHOWN_LANE:
                    outline(s, left + w * t, top + h * row, w, h)
        s.arrow((left + 2 * w, top + 8 * h + 4), (left + 2 * w, top + 8 * h + 28))
        cell(s, left, top + 8 * h + 30, 4 * w, 30, PAIR[m], f"r[{m}] of every lane", 13)
    y = top + 8 * h + 86
    s.text(24, y, "Bold, beside a row: the lane that passes its address, 8m + r.", 13, INK, "start")
    s.text(856, y, f"Outlined: what lane {SHOWN_LANE} gets, row {SHOWN_LANE // 4}, pair {SHOWN_LANE % 4}.", 13, INK,
           "end")  # fmt: skip
    s.text(24, y + 22, "In a pair of elements: the lane that gets it, two fp16 in a register of 32 bits. "
           "Lane 4g + t gets pair t of row g.", 13, INK, "start")  # fmt: skip
    return s.done()


def prefill_decode() -> str:
    """A prompt of 300 tokens and three new ones: passes over the weights, and what limits each."""
    s = Svg(
        880,
        372,
        "Prefill and decode",
        "A prompt of 300 tokens goes through the layers in three passes, of 128, 128 and 44 tokens; each new token is "
        "a pass of its own. Every pass reads all weights of the layers once. In a pass of 128 tokens each byte of "
        "weights is used for 120 multiplications, and multipliers set the speed; in decode for 0.94, and memory does.",
    )
    s.text(24, 32, "A prompt of 300 tokens, then new ones", 15, INK, "start", bold=True)
    passes = [(40, 180, "128 tokens", "int8"), (228, 180, "128 tokens", "int8"), (416, 104, "44 tokens", "int8"),
              (570, 40, "1", "quantize"), (644, 40, "1", "quantize"), (718, 40, "1", "quantize")]  # fmt: skip
    s.text(40, 66, "tokens of a pass", 12, QUIET, "start")
    for x, w, words, kind in passes:
        cell(s, x, 76, w, 34, kind, words, 13)
        s.arrow((x + w / 2, 112), (x + w / 2, 134))
        cell(s, x + w / 2 - 33, 136, 66, 44, "memory", "", 12)
        s.text(x + w / 2, 154, "all" if words == "128 tokens" else "layers,", 12)
        s.text(x + w / 2, 170, "layers" if words == "128 tokens" else "classifier", 12)
    s.text(790, 98, ". . .", 16, QUIET)
    s.text(790, 162, ". . .", 16, QUIET)
    for x in (468, 590, 664):  # the logits of the last token choose the next token
        s.arrow((x, 182), (x, 206), (x + (61 if x == 468 else 37), 206), tip=False)
        to = {468: 590, 590: 664, 664: 738}[x]
        middle = x + (61 if x == 468 else 37)
        s.arrow((middle, 206), (middle, 93), (to - 22, 93))
    s.text(548, 226, "the logits of the last token choose the next one", 12, QUIET)
    for x, w, name, lines, kind in (
        (40, 400, "prefill", ("a weight is read once for 128 tokens:", "128 / 1.0625 = 120 MACs per byte",
                              "limit: how fast the machine multiplies"), "int8"),
        (460, 380, "decode", ("a weight is read for one token:", "1 / 1.0625 = 0.94 MACs per byte",
                              "limit: how fast memory delivers the weights"), "quantize"),
    ):  # fmt: skip
        fill, border = FILL[kind]
        s.parts.append(f'<rect x="{x}" y="248" width="{w}" height="104" rx="5" fill="{fill}" stroke="{border}"/>')
        s.text(x + w / 2, 272, name, 14, INK, bold=True)
        for i, line in enumerate(lines):
            s.text(x + w / 2, 296 + 20 * i, line, 13, INK)
    return s.done()


def kv_cache() -> str:
    """Where keys and values lie: KV pages, layers, heads; keys side by side, values one by one."""
    s = Svg(
        880,
        540,
        "The layout of the KV cache",
        "A KV page of 256 positions holds all layers, and each layer all key/value heads. For one head, keys lie in "
        "key blocks of 32 positions: first the first element of all 32, then the second. Values lie position by "
        "position.",
    )
    s.text(24, 32, "Keys, and likewise values, in memory: from left to right (Llama 3.2 1B)", 15, INK, "start",
           bold=True)  # fmt: skip

    def bar(y: float, left: float, width: float, names: Sequence[str], note: str, kinds: Sequence[str]) -> None:
        s.text(24, y + 21, note, 13, INK, "start")
        w = width / len(names)
        for i, (name, kind) in enumerate(zip(names, kinds, strict=True)):
            cell(s, left + w * i, y, w, 32, kind, name, 13)

    def zoom(x0: float, x1: float, y: float, to0: float, to1: float, to_y: float) -> None:
        for x, to in ((x0, to0), (x1, to1)):
            s.parts.append(f'<path d="M{x:g} {y:g} L{to:g} {to_y:g}" stroke="{LINE}" stroke-dasharray="4 3"/>')

    left, width = 130, 726
    bar(52, left, width, ("positions 0 .. 255", "256 .. 511", "512 .. 767: not used yet"), "KV pages",
        ("fp32", "fp32", "id"))  # fmt: skip
    zoom(left, left + width / 3, 84, left, left + width, 106)
    bar(106, left, width, ("layer 0", "layer 1", "layer 2", ". . .", "layer 15"), "layers", ("fp32",) * 5)
    zoom(left, left + width / 5, 138, left, left + width, 160)
    bar(160, left, width, ("head 0", "head 1", "head 2", ". . .", "head 7"), "kv heads", ("fp32",) * 5)

    def grid(x: float, title: str, rows: Sequence[str], columns: Sequence[str], use: Sequence[str]) -> None:
        w, h, top = 58, 26, 296
        s.text(x, 244, title, 14, INK, "start", bold=True)
        for j, name in enumerate(columns):
            s.text(x + 74 + w * (j + 0.5), top - 8, name, 12, QUIET)
        for i, name in enumerate(rows):
            s.text(x + 66, top + h * i + 18, name, 12, QUIET, "end")
            for j in range(len(columns)):
                dots = columns[j] == ". . ." or rows[i] == ". . ."
                cell(s, x + 74 + w * j, top + h * i, w, h, "fp32" if i != 1 else "int8", ". . ." if dots else "", 12)
        outline(s, x + 74, top + h, w * len(columns), h)
        for i, line in enumerate(use):
            s.text(x, top + h * len(rows) + 30 + 20 * i, line, 13, INK, "start")

    zoom(left, left + width / 5, 192, 24, 856, 222)
    grid(24, "keys of a head: 8 key blocks like this", ("d = 0", "d = 1", "d = 2", ". . .", "d = 63"),
         ("pos 0", "pos 1", "pos 2", ". . .", "pos 31"),
         ("Outlined: 32 consecutive numbers, two vectors.", "score[pos] += q[d] * keys[d][pos]:",
          "a lane adds up the score of its position."))  # fmt: skip
    grid(464, "values of a head: 256 positions", ("pos 0", "pos 1", "pos 2", ". . .", "pos 255"),
         ("d = 0", "d = 1", "d = 2", ". . .", "d = 63"),
         ("Outlined: 64 consecutive numbers, four vectors.", "out[d] += prob[pos] * values[pos][d]:",
          "a lane adds up its element of the output."))  # fmt: skip
    s.text(24, 524, "Grids are in memory row by row. No sum goes across the lanes of a vector. Vectors of 16 fp32 "
           "(AVX-512).", 12, QUIET, "start")  # fmt: skip
    return s.done()


def words() -> str:
    """Which columns of a row a packed word of 8, 4 and 2 bits has, and where the words of a block's rows lie."""
    s = Svg(
        880,
        494,
        "Words of 8, 4 and 2 bits",
        "Three words of four bytes. With 8 bits a byte is a column. With 4 bits the low halves of the four bytes are "
        "columns 0 to 3, the high halves columns 4 to 7. With 2 bits each byte has four parts: the lowest are columns "
        "0 to 3, the next 4 to 7, then 8 to 11, and the highest 12 to 15. Below, a block: a line for each word, with a "
        "box for each row.",
    )
    w, h, top = 58, 30, 92
    for x, bits in ((60, 8), (340, 4), (620, 2)):
        parts = 8 // bits
        s.text(x, 34, f"{bits} bits: {4 * parts} columns", 15, INK, "start", bold=True)
        for byte in range(4):
            s.text(x + w * (byte + 0.5), top - 12, f"byte {byte}", 12, QUIET)
            for part in range(parts):
                y = top + h * (parts - 1 - part)
                kind = ("int8", "quantize", "fp32", "memory")[part]
                cell(s, x + w * byte, y, w, h, kind, f"k + {4 * part + byte}", 12)
        for part in range(parts if parts > 1 else 0):
            y = top + h * (parts - 1 - part) + 20
            s.text(x - 8, y, f"{bits * part}..{bits * part + bits - 1}", 11, QUIET, "end")
    note = "Boxes of one colour are four neighbouring columns: a shift and a mask take them out of the word."
    s.text(60, top + h * 4 + 34, note, 13, INK, "start")
    y, box = 324, 46
    s.text(24, y - 30, "A block of 16 rows: one word of each, then the next word of each", 15, INK, "start", bold=True)
    for line in range(3):
        s.text(118, y + (h + 6) * line + 20, f"word {line}", 12, QUIET, "end")
        for i in range(16):
            cell(s, 130 + box * i, y + (h + 6) * line, box - 2, h, "int8" if line == 0 else "memory", f"row {i}", 11)
    s.text(130 + box * 8, y + (h + 6) * 3 + 14, ". . .", 14, QUIET)
    note = "A line is 64 bytes: one AVX-512 register, two of AVX2, four of NEON. With AVX-512 a block has 32 rows."
    s.text(24, y + (h + 6) * 3 + 44, note, 12, QUIET, "start")
    return s.done()


def blocks() -> str:
    """From rows of weights to a block, and a block times eight tokens: a tile."""
    s = Svg(
        880,
        630,
        "A block and a tile",
        "Eight rows of weights, cut into words of four codes. Packed, the first words of all rows form the first "
        "vector of the block, the second words the second vector. Below the block, a grid of accumulators: a row per "
        "token, a lane per row of weights. The word of a token, broadcast to all lanes, times the vector of the block "
        "is added to the token's row.",
    )
    w, h, kinds = 47, 24, ("int8", "quantize", "fp32", "memory")
    left, right, top = 74, 466, 90
    s.text(24, 34, "8 rows of weights, as in the file", 15, INK, "start", bold=True)
    s.text(right, 34, "packed: a block, one vector per line", 15, INK, "start", bold=True)
    for k, name in enumerate(("0..3", "4..7", "8..11", "12..15")):
        s.text(left + w * (k + 0.5), top - 10, name, 12, QUIET)
        s.text(right - 10, top + (h + 6) * k + 17, name, 12, QUIET, "end")
        for i in range(8):
            cell(s, left + w * k, top + h * i, w, h, kinds[k], "", 12)
            cell(s, right + w * i, top + (h + 6) * k, w, h, kinds[k], f"row {i}", 12)
    for i in range(8):
        s.text(left - 8, top + h * i + 17, f"row {i}", 12, QUIET, "end")
        s.text(left + w * 4 + 20, top + h * i + 17, ". . .", 13, QUIET)
    s.text(left + w * 2, top - 30, "columns; a box is a word: four codes", 12, QUIET)
    s.text(right + w * 4, top - 14, "lanes", 12, QUIET)
    s.text(right + w * 4, top + (h + 6) * 4 + 14, ". . .", 14, QUIET)
    s.arrow((left + w * 4 + 44, top + 50), (right - 52, top + 50))
    s.text((left + w * 4 + right) / 2 - 4, top + 40, "transpose", 12, QUIET)

    y = 330
    s.text(24, y - 14, "8 tokens, packed column by column", 15, INK, "start", bold=True)
    s.text(right, y - 14, "tile: accumulators, in registers", 15, INK, "start", bold=True)
    for j in range(8):
        s.text(left - 8, y + h * j + 17, f"token {j}" if j else "token 0", 12, QUIET, "end")
        for k in range(4):
            cell(s, left + w * k, y + h * j, w, h, kinds[k], "", 12)
        for i in range(8):
            cell(s, right + w * i, y + h * j, w, h, "id", "int32", 11)
    for k, name in enumerate(("0..3", "4..7", "8..11", "12..15")):
        s.text(left + w * (k + 0.5), y + h * 8 + 16, name, 12, QUIET)
    outline(s, left, y + h * 2, w, h)
    outline(s, right, top, w * 8, h)
    outline(s, right, y + h * 2, w * 8, h)
    s.arrow((left + w * 4 + 10, y + h * 2.5), (right - 4, y + h * 2.5))
    s.text((left + w * 4 + right) / 2 + 4, y + h * 2.5 - 8, "to every lane", 12, QUIET)
    for i, line in enumerate((
        "Outlined, one dot4: the word of token 2, in every lane, times the first vector of the block, lane by lane,",
        "added to the accumulators of token 2. The vector of the block is loaded once for all 8 tokens.",
    )):  # fmt: skip
        s.text(24, y + h * 8 + 46 + 20 * i, line, 13, INK, "start")
    s.text(24, y + h * 8 + 88, "These vectors have 8 lanes. With AVX-512 there are 16, and a block is two vectors.",
           12, QUIET, "start")  # fmt: skip
    return s.done()


# NVIDIA H200 (SXM) datasheet: HBM3e at 4.8 TB/s; fp16 tensor cores 1979 TFLOP/s with sparsity, half of it without.
H200_BYTES, H200_FLOPS = 4.8e12, 1979e12 / 2


def awq_roofline() -> str:
    """Tokens per second of Qwen3-8B by the number of tokens of a pass."""
    layer_weights = 36 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288)
    classifier = 151936 * 4096
    s = Svg(
        880,
        500,
        "Roofline of Qwen3-8B on an H200",
        "Tokens per second at most, over the number of tokens per pass, both axes logarithmic. With int4 weights the "
        "line begins at 989 tokens per second and reaches the limit of the tensor cores at 72 tokens; with fp16 "
        "weights it begins at 317 and reaches it at 225.",
    )
    left, top, width, height = 92, 64, 640, 356
    low, high, most = 100.0, 200000.0, 2048
    s.text(24, 31, "Qwen3-8B: what an H200 allows, from its datasheet", 15, INK, "start", bold=True)

    def at(tokens: float, rate: float) -> tuple[float, float]:
        return (
            left + width * math.log(tokens) / math.log(most),
            top + height * (1 - math.log(rate / low) / math.log(high / low)),
        )

    for rate in (100, 1000, 10000, 100000):
        y = at(1, rate)[1]
        s.parts.append(f'<path d="M{left} {y:g} H{left + width}" stroke="{FILL["memory"][0]}"/>')
        s.text(left - 8, y + 4, f"{rate:,}", 12, QUIET, "end")
    for tokens in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048):
        x = at(tokens, low)[0]
        s.parts.append(f'<path d="M{x:.1f} {top} V{top + height}" stroke="{FILL["memory"][0]}"/>')
        s.text(x, top + height + 20, str(tokens), 12, QUIET)
    s.text(left + width / 2, top + height + 46, "tokens per pass: one in decode, many in a prompt", 13)
    s.parts.append(
        f'<text x="26" y="{top + height / 2:g}" font-size="13" fill="{INK}" text-anchor="middle" '
        f'transform="rotate(-90 26 {top + height / 2:g})">tokens per second, at most</text>'
    )

    def seconds(tokens: float, bits: float) -> tuple[float, float]:
        """Of reading all weights once, and of multiplying. The classifier is fp16 and for one token only."""
        reading = (layer_weights * bits / 8 + 2 * classifier) / H200_BYTES
        return reading, 2 * (layer_weights * tokens + classifier) / H200_FLOPS

    for bits, colour, name in (
        (4 + 4 / 128 + 16 / 128, FILL["int8"][1], "int4"),
        (16, FILL["fp32"][1], "fp16"),
    ):
        reading, _ = seconds(1, bits)
        crossing = (reading * H200_FLOPS / 2 - classifier) / layer_weights
        points = [at(1, 1 / reading), at(crossing, crossing / reading)]
        path = "M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        s.parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        x, y = points[0]
        s.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}"/>')
        x, y = (points[0][0] + points[1][0]) / 2, (points[0][1] + points[1][1]) / 2
        angle = math.degrees(math.atan2(points[1][1] - points[0][1], points[1][0] - points[0][0]))
        s.parts.append(f'<g transform="rotate({angle:.1f} {x:.1f} {y:.1f})">')
        s.text(x, y - 9, f"{name} weights: {1 / reading:.0f} tokens/s for one token", 13, colour)
        s.parts.append("</g>")
        x, y = points[1]
        s.parts.append(f'<path d="M{x:.1f} {y:.1f} V{top + height}" stroke="{colour}" stroke-dasharray="4 4"/>')
        s.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}"/>')
        s.text(x + 8, top + height - 12, f"{crossing:.0f} tokens", 13, colour, "start")
    steps = [2 ** (i / 8) for i in range(8 * 11 + 1)]
    roof = [at(m, m / seconds(m, 16)[1]) for m in steps if m >= 72]
    path = "M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in roof)
    s.parts.append(f'<path d="{path}" fill="none" stroke="{INK}" stroke-width="2.5"/>')
    s.text(at(most, 1)[0], roof[-1][1] - 26, f"tensor cores, {H200_FLOPS / 1e12:.0f} TFLOP/s: "
           f"{most / seconds(most, 16)[1]:,.0f} tokens/s for {most}", 13, INK, "end")  # fmt: skip
    s.text(left + width + 12, at(1, 30000)[1], "not counted:", 12, QUIET, "start")
    for i, line in enumerate(("attention,", "KV cache, and", "all that is not", "a matrix")):
        s.text(left + width + 12, at(1, 30000)[1] + 17 * (i + 1), line, 12, QUIET, "start")
    return s.done()


def gpu_ladder() -> str:
    """Microseconds of gate_proj and up_proj in one launch by the number of tokens, of docs/gpu-results.json."""
    found = json.loads((HERE / "gpu-results.json").read_text(encoding="utf-8"))
    rows = [r for r in found["measured"] if r["matrices"] == "gate, up in one launch"]
    tokens = sorted({r["tokens"] for r in rows})
    kernels = {
        "plain": ("#8250df", "plain"), "shared_gemm<64>": (QUIET, "weights through shared memory"),
        "runq_awq": (FILL["int8"][1], "runq_awq"), "dequantize + cuBLAS": ("#2f855a", "expanded, then cuBLAS"),
        "fp16 cuBLAS": (FILL["fp32"][1], "fp16 weights, cuBLAS"),
    }  # fmt: skip
    title = f"Qwen3-8B, gate and up in one launch, on an {found['device'].split(',')[0]}"
    s = Svg(880, 480, "Microseconds by tokens, on a GPU", title + ": microseconds over tokens, both axes logarithmic.")
    left, top, width, height, low, high = 84, 56, 560, 350, 10.0, 30000.0

    def at(n: float, us: float) -> tuple[float, float]:
        down = math.log(high / us) / math.log(high / low)
        return left + width * math.log(n) / math.log(tokens[-1]), top + height * down

    s.text(24, 31, title, 15, INK, "start", bold=True)
    for tick in (10, 100, 1000, 10000):
        y = at(1, tick)[1]
        s.parts.append(f'<path d="M{left} {y:.1f} H{left + width}" stroke="{FILL["memory"][0]}"/>')
        s.text(left - 8, y + 4, f"{tick:,} us", 12, QUIET, "end")
    for n in tokens:
        s.text(at(n, low)[0], top + height + 20, f"{n:,}", 12, QUIET)
    s.text(left + width / 2, top + height + 46, "tokens", 13)
    ends: list[float] = []
    for kernel, (colour, name) in kernels.items():
        points = [at(r["tokens"], r["us"]) for r in rows if r["kernel"] == kernel]
        path = "M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        s.parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2.2"/>')
        ends.append(max([points[-1][1], *(y + 17 for y in ends if abs(y - points[-1][1]) < 17)]))
        s.text(points[-1][0] + 10, ends[-1] + 4, name, 13, colour, "start")
    floor = at(1, 1e-3 * rows[0]["n_in"] * rows[0]["n_out"] * (4 + 4 / 128 + 16 / 128) / 8 / found["copy_gb_per_s"])[1]
    s.arrow((left, floor), (left + width, floor), tip=False, dashed=True)
    s.text(left + width - 4, floor - 6, "reading int4 weights at the speed of a copy", 12, QUIET, "end")
    return s.done()


def gptq_ladder() -> str:
    """Bits per weight over numbers of weights, of Llama 3.2 1B: areas are bytes."""
    from bench.random_checkpoint import config_of
    from export.gptq_layout import choose_layout, component_sizes

    config = config_of("llama-3.2-1b")
    sizes = component_sizes(config, choose_layout(config, {}, None, sparse=False))
    s = Svg(
        880,
        380,
        "The ladder of Llama 3.2 1B",
        "Three blocks side by side, as wide as they have weights and as high as they have bits per weight. The "
        "embedding, which is the classifier, has 263 million at 8.0 bits: 263 MB. Attention has 168 million at 4.2 "
        "bits: 87 MB. The feed-forward matrices have 805 million at 2.1 bits: 215 MB. A dashed line at 8.5 bits is Q8.",
    )
    left, bottom, per_million, per_bit = 80, 320, 760 / 1240, 30
    for bits in (0, 2, 4, 6, 8):
        y = bottom - per_bit * bits
        s.parts.append(f'<path d="M{left - 5} {y} H{left + 760}" stroke="#d0d7de"/>')
        s.text(left - 12, y + 5, str(bits), 13, QUIET, "end")
    s.text(24, 34, "bits per weight, scales and zero points included", 13, QUIET, "start")
    x = float(left)
    for name, label, kind in (
        ("embedding", "embedding, classifier", "int8"),
        ("attention", "attention", "quantize"),
        ("feed-forward", "feed-forward", "fp32"),
    ):
        n_weights, n_bytes = sizes[name]
        bits = 8 * n_bytes / n_weights
        width, height = n_weights / 1e6 * per_million, bits * per_bit
        fill, border = FILL[kind]
        s.parts.append(
            f'<rect x="{x:.1f}" y="{bottom - height:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}" '
            f'stroke="{border}" stroke-width="1.5"/>'
        )
        middle = round(x + width / 2, 1)
        s.text(middle, bottom - height / 2 - 4, f"{n_bytes / 1e6:.0f} MB", 15, bold=True)
        s.text(middle, bottom - height / 2 + 15, f"{bits:.2f} bits", 13, QUIET)
        s.text(middle, bottom + 22, label, 13, INK)
        s.text(middle, bottom + 40, f"{n_weights / 1e6:.0f} M", 12, QUIET)
        x += width
    y = bottom - 8.5 * per_bit
    s.arrow((left, y), (left + 760, y), tip=False, dashed=True)
    s.text(left + 760, y - 8, "Q8: 8.5 bits, 1,313 MB", 13, QUIET, "end")
    return s.done()


def moe_routing() -> str:
    """Which experts take which tokens of a held-out story, and with what weights."""
    import numpy as np
    from tokenizers import Tokenizer

    from formats.checkpoint import SPARSE, Checkpoint
    from golden.forward import Fp32, forward
    from golden.trace import Recorder

    model, n_tokens, size = HERE.parent / "models" / "tiny-qwen3-moe", 30, 18
    tokenizer, recorder = Tokenizer.from_file(str(model / "tokenizer.json")), Recorder()
    story = (HERE.parent / "models" / "held_out.txt").read_text(encoding="utf-8").split("\n\n")[0]
    ids = tokenizer.encode(story).ids[:n_tokens]
    checkpoint = Checkpoint(model, archs=SPARSE)
    config = checkpoint.config
    forward(config, Fp32(checkpoint), np.array(ids), recorder)
    layers = [i for i in range(config.n_layers) if config.has_experts(i)]
    n_experts = config.moe.n_experts if config.moe else 0

    left, top, block = 150, 96, size * n_experts + 36
    height = top + n_tokens * size + 64
    s = Svg(left + len(layers) * block + 4, height, "Which experts take which word",
            "Tokens of a story are rows, the experts of each layer columns; each token has two filled cells in each "
            "layer, the darker the larger the expert's weight.")  # fmt: skip
    s.text(20, 34, "Which expert takes which word", 17, anchor="start", bold=True)
    for row, token in enumerate(ids):
        word = tokenizer.decode([token]).strip() or "\u21b5"
        word = word.replace("&", "&amp;").replace("<", "&lt;")
        s.text(left - 14, top + row * size + 13, word, 13, anchor="end")
    for column, layer in enumerate(layers):
        x = left + column * block
        s.text(x + size * n_experts / 2, top - 26, f"layer {layer}", 13, bold=True)
        chosen, weights = (recorder.tensors[f"layers.{layer}.moe.{part}"] for part in ("experts", "weights"))
        for expert in range(n_experts):
            s.text(x + (expert + 0.5) * size, top - 8, str(expert), 11, QUIET)
            taken = int((chosen == expert).sum())
            s.text(x + (expert + 0.5) * size, top + n_tokens * size + 16, str(taken), 11, QUIET)
        for row in range(n_tokens):
            of_token = dict(zip(chosen[row].tolist(), weights[row].tolist(), strict=True))
            for expert in range(n_experts):
                weight = of_token.get(expert, 0.0)
                fill = f'fill="{FILL["int8"][1]}" fill-opacity="{weight:.2f}"' if weight else 'fill="none"'
                s.parts.append(
                    f'<rect x="{x + expert * size}" y="{top + row * size}" width="{size}" height="{size}" {fill} '
                    f'stroke="#d0d7de"/>'
                )
    s.text(left - 14, top - 8, "expert", 11, QUIET, anchor="end")
    s.text(left - 14, top + n_tokens * size + 16, "tokens taken", 11, QUIET, anchor="end")
    s.text(
        20, height - 18, "Layers that are not here are dense. Full colour is a weight of 1.", 12, QUIET, anchor="start"
    )
    return s.done()


def memory_limit() -> str:
    """Decode of a mixture by how much of its file memory may hold: the table of docs/moe.md."""
    lines = (HERE / "moe.md").read_text(encoding="utf-8").split("### More experts than memory")[1].splitlines()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    shares = [int(cell.removesuffix("%")) for cell in table[0][1:]]
    rows = {row[0]: [float(cell) for cell in row[1:]] for row in table[2:]}
    said = "; ".join(f"{name}: {', '.join(map(str, speeds))}" for name, speeds in rows.items())
    s = Svg(640, 320, "More experts than memory", f"Tokens/s at {', '.join(map(str, shares))} % of the file: {said}.")
    left, top, width, height = 60, 56, 440, 206
    high = 2 * math.ceil(max(map(max, rows.values())) / 2)

    def at(share: float, speed: float) -> tuple[float, float]:
        return left + width * share / 100, top + height * (1 - speed / high)

    s.text(24, 31, "Tokens/s by how much of the file memory may hold", 15, INK, "start", bold=True)
    for tick in range(0, high + 1, 2):
        y = at(0, tick)[1]
        s.parts.append(f'<path d="M{left} {y:.1f} H{left + width}" stroke="{FILL["memory"][0]}"/>')
        s.text(left - 8, y + 4, str(tick), 12, QUIET, "end")
    for share in shares:
        s.text(at(share, 0)[0], top + height + 20, f"{share} %", 12, QUIET)
    s.text(left + width / 2, top + height + 44, "of the 8.8 GB of Qwen3-30B-A3B by the ladder", 13)
    for (name, speeds), colour in zip(rows.items(), (FILL["fp32"][1], FILL["int8"][1]), strict=True):
        points = [at(share, speed) for share, speed in zip(shares, speeds, strict=True)]
        path = "M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        s.parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        s.parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in points]
        s.text(points[0][0] + 10, points[0][1] + 4, f"{name} routing", 13, colour, "start")
    return s.done()


def quality_weights() -> str:
    """Size and divergence of formats of weights alone, of this project's and of GGUF files."""
    return quality(
        "quality-weights.json", "SmolLM2, dithered: what a format of weights loses, and its bytes", "weights, MB"
    )


def quality(
    source: str = "quality.json",
    title: str = "SmolLM2-135M-Instruct: what is lost, and the size of the file",
    axis: str = "model file, MB",
) -> str:
    """Size and divergence of every row of a comparison but the unquantized model's."""
    found = json.loads((HERE / source).read_text(encoding="utf-8"))
    rows = found["rows"][1:]  # the first is the unquantized model
    s = Svg(
        920,
        max(500, 92 + 17 * len(rows)),
        "Quality against size",
        f"Mean KL divergence from fp32 on a logarithmic axis over {axis}: "
        + "; ".join(f"{r['name']} {r['megabytes']:.0f} MB, {r['kl_divergence']:.4f}" for r in rows)
        + ".",
    )
    left, top, width, height = 84, 66, 436, 364
    sizes, losses = ([r[key] for r in rows] for key in ("megabytes", "kl_divergence"))
    first, last = 20 * math.floor(min(sizes) / 20), 20 * math.ceil(max(sizes) / 20)
    low, high = math.log10(min(losses) / 1.3), math.log10(max(losses) * 1.3)

    def at(megabytes: float, loss: float) -> tuple[float, float]:
        return (
            left + width * (megabytes - first) / (last - first),
            top + height * (high - math.log10(loss)) / (high - low),
        )

    s.text(24, 31, title, 15, INK, "start", bold=True)
    for tick in (digit * 10.0**power for power in range(-5, 2) for digit in (1, 2, 5)):
        if low <= math.log10(tick) <= high:
            y = at(first, tick)[1]
            s.parts.append(f'<path d="M{left} {y:.1f} H{left + width}" stroke="{FILL["memory"][0]}"/>')
            s.text(left - 8, y + 4, f"{tick:g}", 12, QUIET, "end")
    for size in range(first, last + 1, 20):
        x = at(size, 1)[0]
        s.parts.append(f'<path d="M{x:.1f} {top} V{top + height}" stroke="{FILL["memory"][0]}"/>')
        s.text(x, top + height + 20, str(size), 12, QUIET)
    s.text(left + width / 2, top + height + 46, axis, 13)
    s.text(24, 52, "mean KL divergence from fp32, nats per token; lower is better", 12, QUIET, "start")
    for peers in (False, True) if source == "quality-weights.json" else ():
        front, least = [], math.inf  # of one side: what no smaller row equals
        for row in sorted(rows, key=lambda r: (round(r["megabytes"], 1), r["kl_divergence"])):
            if row["name"].startswith("GGUF") == peers and row["kl_divergence"] < least:
                least = row["kl_divergence"]
                front.append("{:.1f} {:.1f}".format(*at(row["megabytes"], least)))
        dashes = ' stroke-dasharray="3 4"' if peers else ""
        s.parts.append(f'<path d="M{" L".join(front)}" fill="none" stroke="{QUIET}"{dashes}/>')

    families = list(dict.fromkeys(row["name"].split(",")[0].split()[0] for row in rows))
    colours = dict(zip(families, (FILL["fp32"][1], FILL["int8"][1], INK, "#2f855a", "#8250df"), strict=False))
    columns: dict[tuple[bool, int], float] = {}  # how far down numbers reach, by side and about one size
    for number, row in enumerate(sorted(rows, key=lambda r: -r["kl_divergence"]), 1):
        x, y = at(row["megabytes"], row["kl_divergence"])
        colour = colours[row["name"].split(",")[0].split()[0]]
        others = (at(r["megabytes"], r["kl_divergence"]) for r in rows if r is not row)
        to_left = any(0 < to - x < 32 and abs(down - y) < 12 for to, down in others)
        end, away, anchor = (x - 11, -5, "end") if to_left else (x + 11, 5, "start")
        column = round(x / 20)
        near = [columns[to_left, c] for c in (column - 1, column, column + 1) if (to_left, c) in columns]
        label = columns[to_left, column] = max([y, *(reach + 13 for reach in near)])
        s.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{colour}"/>')
        s.parts.append(f'<path d="M{x + away:.1f} {y:.1f} L{end:.1f} {label:.1f}" stroke="{colour}"/>')
        s.text(end + away / 2.5, label + 4, str(number), 11, colour, anchor, bold=True)
        line = top + 4 + 17 * (number - 1)
        s.text(left + width + 54, line + 4, str(number), 12, colour, "end", bold=True)
        s.text(left + width + 62, line + 4, row["name"], 12, colour, "start")
    return s.done()


def rtl_blocks() -> str:
    """What is in hw/rtl/matmul_axi.sv, and how data goes through it."""
    s = Svg(
        920,
        622,
        "The core",
        "Weights come in from above, or weight_fetcher reads them, activations from the left. weight_loader takes "
        "scales out of the stream of weights and keeps two tiles of codes. quantizer makes codes of fp32, "
        "activation_store keeps them. Both feed "
        "an array of cells, of which four by four are drawn. Below the columns are column_edges: a sum for each "
        "column, and one scaler that these columns share. Below it is result_store, from which results go out. "
        "tile_sequencer starts loads and passes; axil_registers has sizes, commands and counters.",
    )
    s.text(24, 31, "matmul_axi: a product, from streams to a stream", 15, INK, "start", bold=True)
    cells, pitch, left, top = 4, 62, 452, 172
    edge = left + cells * pitch
    s.text(left + 118, 66, "s_axis_w: weights and scales, COLS bytes a beat", 13, QUIET)
    s.arrow((left + 118, 74), (left + 118, 92))
    s.box(left - 6, 94, 248, 44, "memory", "weight_loader", "two tiles; scales of four groups")
    s.text(left + 360, 66, "m_axi: memory", 13, QUIET)
    s.arrow((left + 360, 74), (left + 360, 92))
    s.box(left + 286, 94, 150, 44, "memory", "weight_fetcher", "bursts, queue")
    s.arrow((left + 286, 116), (left + 244, 116))
    for c in range(cells):
        x = left + c * pitch + 25
        s.arrow((x, 138), (x, top - 4))
        for r in range(cells):
            y = top + r * pitch
            s.box(x - 25, y, 50, 50, "int8", "MAC")
            if r + 1 < cells:
                s.arrow((x, y + 50), (x, y + pitch - 2))
            if c + 1 < cells:
                s.arrow((x + 25, y + 25), (x + pitch - 27, y + 25))
        s.arrow((x, top + cells * pitch - 12), (x, top + cells * pitch + 12))
        s.box(x - 25, top + cells * pitch + 14, 50, 34, "int8", "sums")
        s.arrow((x, top + cells * pitch + 48), (x, top + cells * pitch + 66))
    s.text(edge + 8, top + 20, "systolic_array", 13, INK, "start", bold=True)
    s.text(edge + 8, top + 38, "ROWS x COLS cells;", 12, QUIET, "start")
    s.text(edge + 8, top + 54, "codes go right,", 12, QUIET, "start")
    s.text(edge + 8, top + 70, "sums down", 12, QUIET, "start")
    below = top + cells * pitch
    s.text(edge + 8, below + 26, "column_edges", 13, INK, "start", bold=True)
    s.text(edge + 8, below + 43, "adds up the passes of", 12, QUIET, "start")
    s.text(edge + 8, below + 58, "a group; one scaler", 12, QUIET, "start")
    s.text(edge + 8, below + 73, "takes all columns in turn", 12, QUIET, "start")
    s.box(left - 6, below + 68, 248, 44, "fp32", "group_scaler", "times both scales, plus the sum so far")
    s.arrow((left + 118, below + 112), (left + 118, below + 132))
    s.box(left - 6, below + 134, 248, 44, "memory", "result_store", "two rows of tiles, fp32")
    s.arrow((left + 242, below + 156), (left + 284, below + 156))
    s.text(left + 292, below + 160, "m_axis: results", 13, QUIET, "start")

    s.text(24, 226, "s_axis_x: fp32, or codes", 13, QUIET, "start")
    s.arrow((96, 234), (96, 250))
    s.box(24, 252, 150, 56, "quantize", "quantizer", "amax, scale, codes")
    s.arrow((174, 280), (206, 280))
    s.box(208, 252, 176, 56, "memory", "activation_store", "codes, a scale a group")
    for r in range(cells):
        y = top + r * pitch + 25
        s.arrow((384, 280), (410, 280), (410, y), (left - 2, y))
    s.arrow((296, 308), (296, below + 90), (left - 8, below + 90))
    s.text(304, below + 82, "scales of x", 12, QUIET, "start")

    s.text(24, 66, "AXI4-Lite", 13, QUIET, "start")
    s.arrow((96, 74), (96, 92))
    s.box(24, 94, 150, 44, "id", "axil_registers", "sizes, start, counters")
    s.arrow((174, 116), (206, 116))
    s.box(208, 94, 176, 44, "id", "tile_sequencer", "loads, passes, tokens")
    s.arrow((384, 116), (left - 8, 116), dashed=True)
    s.arrow((296, 138), (296, 250), dashed=True)
    return s.done()


def rtl_wave() -> str:
    """One tile on an array of 4 x 4 cells, clock by clock, as docs/rtl-wave.json has it from the simulation."""
    lanes = json.loads((HERE / "rtl-wave.json").read_text(encoding="utf-8"))
    n_clocks = 1 + max(int(clock) for lane in lanes for clock in lane["at"])
    left, top, step, height = 158, 66, 20, 25
    s = Svg(
        left + n_clocks * step + 24,
        top + height * len(lanes) + 20,
        "One tile, clock by clock",
        "Signals of the core during a product of two tokens with a tile of 4 outputs by 4 inputs: "
        + "; ".join(f"{lane['name']} in clocks {', '.join(lane['at'])}" for lane in lanes)
        + ".",
    )
    s.text(24, 31, "Two tokens through one tile of 4 x 4", 15, INK, "start", bold=True)
    s.text(left - 10, 54, "clock", 12, QUIET, "end")
    for clock in range(n_clocks):
        x = left + clock * step
        if clock % 5 == 0:
            s.text(x + step / 2, 54, str(clock), 11, QUIET)
        s.parts.append(f'<path d="M{x} {top - 4} V{top + height * len(lanes)}" stroke="{FILL["memory"][0]}"/>')
    kinds = {"s_axis_w": "memory", "array: x_i": "int8", "array: w_row_i": "int8", "m_axis": "memory"}
    for i, lane in enumerate(lanes):
        y, name = top + i * height, lane["name"]
        s.text(left - 10, y + 16, name, 12, INK, "end")
        kind = "int8" if name.startswith("sum") else "fp32" if name.startswith("scaler") else kinds.get(name, "id")
        fill, border = FILL[kind]
        clocks = sorted(map(int, lane["at"]))
        while clocks:
            # Clocks with the same text that follow each other are one box, as of the scales.
            text, n = lane["at"][str(clocks[0])], 1
            while n < len(clocks) and clocks[n] == clocks[0] + n and lane["at"][str(clocks[n])] == text:
                n += 1
            x = left + clocks[0] * step
            s.parts.append(
                f'<rect x="{x + 0.5}" y="{y + 2}" width="{n * step - 1}" height="{height - 6}" rx="3" fill="{fill}" '
                f'stroke="{border}"/>'
            )
            words = text.removeprefix("row ") if n == 1 else text
            s.text(x + n * step / 2, y + 15, words, min(11, int(n * step / (0.62 * len(words)))))
            clocks = clocks[n:]
    return s.done()


def rtl_chip() -> str:
    """What docs/rtl-chip.json has of arrays that were placed and routed: shares of the chip's resources."""
    found = json.loads((HERE / "rtl-chip.json").read_text(encoding="utf-8"))["ecp5"]
    kinds = {"luts": "LUTs", "ffs": "registers", "dsps": "DSPs, 18 x 18", "brams": "block RAMs"}
    row, left, width, top = 30, 190, 520, 84
    height = top + len(kinds) * (row * len(found) + 16) + 34
    s = Svg(
        900,
        height,
        "Arrays on an ECP5",
        "; ".join(
            f"{size}: "
            + ", ".join(f"{c[k]} of {c['available'][k]} {name}" for k, name in kinds.items())
            + f", {c['fmax_mhz']} MHz"
            for size, c in found.items()
        )
        + ".",
    )
    s.text(24, 31, "Placed and routed: shares of an ECP5 LFE5U-85F", 15, INK, "start", bold=True)
    s.text(24, 54, "; ".join(f"{size}: {c['fmax_mhz']} MHz" for size, c in found.items()), 13, QUIET, "start")
    colours = (FILL["int8"], FILL["fp32"])
    y = top
    for kind, name in kinds.items():
        s.text(left - 74, y + row * len(found) / 2 + 4, name, 13, INK, "end")
        for (size, c), (fill, border) in zip(found.items(), colours, strict=False):
            share = c[kind] / c["available"][kind]
            s.text(left - 10, y + 19, size, 12, QUIET, "end")
            s.parts.append(
                f'<rect x="{left}" y="{y + 4}" width="{width * share:.1f}" height="{row - 8}" rx="3" fill="{fill}" '
                f'stroke="{border}"/>'
            )
            s.text(
                left + width * share + 8,
                y + 19,
                f"{c[kind]:,} of {c['available'][kind]:,}, {share:.0%}",
                12,
                INK,
                "start",
            )
            y += row
        y += 16
    for share in range(0, 101, 25):
        x = left + width * share / 100
        s.parts.append(f'<path d="M{x:g} {top} V{y - 12}" stroke="{LINE}" stroke-width="0.6" stroke-dasharray="3 4"/>')
        s.text(x, y + 6, f"{share} %", 11, QUIET)
    return s.done()


def chip_layer() -> str:
    """The steps of a layer on the chip with 16 x 16 cells, as docs/chip.json has them from the simulation."""
    run = json.loads((HERE / "chip.json").read_text(encoding="utf-8"))["q8, 16x16"]
    steps = run["layer"]
    rows = {
        "multiply": ("array", "int8"),
        "quantize": ("quantizer", "quantize"),
        "attend": ("attention", "fp32"),
        "gate": ("SwiGLU", "fp32"),
        "norm": ("RMSNorm", "fp32"),
        "rotate": ("RoPE", "fp32"),
        "add": ("residual sum", "fp32"),
        "store": ("KV cache", "memory"),
    }
    first, last = steps[0]["begin"], steps[-1]["end"]
    left, top, width, height = 120, 62, 760, 30
    scale = width / (last - first)
    totals = {kind: sum(s["end"] - s["begin"] for s in steps if s["kind"] == kind) for kind in rows}
    s = Svg(
        left + width + 110,
        top + height * len(rows) + 44,
        "A layer on the chip",
        f"Clocks of the units in a layer of {last - first:,} clocks: "
        + ", ".join(f"{name} {totals[kind]:,}" for kind, (name, _) in rows.items())
        + ".",
    )
    title = f"A layer of tiny-llama at position {run['position']}, 16 x 16 cells: {last - first:,} clocks"
    s.text(24, 31, title, 15, INK, "start", bold=True)
    bottom = top + height * len(rows)
    for clock in range(0, last - first, 5000):
        x = left + clock * scale
        s.parts.append(f'<path d="M{x:.1f} {top - 6} V{bottom}" stroke="{FILL["memory"][0]}"/>')
        s.text(x, bottom + 20, f"{clock:,}", 11, QUIET)
    for i, (kind, (name, colour)) in enumerate(rows.items()):
        y = top + i * height
        fill, border = FILL[colour]
        s.text(left - 10, y + 19, name, 13, INK, "end")
        s.text(left + width + 10, y + 19, f"{totals[kind]:,}", 12, QUIET, "start")
        for step in steps:
            if step["kind"] == kind:
                x, w = left + (step["begin"] - first) * scale, (step["end"] - step["begin"]) * scale
                s.parts.append(
                    f'<rect x="{x:.1f}" y="{y + 4}" width="{max(w, 1):.1f}" height="{height - 8}" fill="{fill}" '
                    f'stroke="{border}"/>'
                )
                words = step["name"].split(".")[-1].removesuffix("_proj")
                if w > 8 * len(words):
                    s.text(x + w / 2, y + 19, words, 11)
    return s.done()


FIGURES = {
    "data-flow.svg": data_flow,
    "int8-product.svg": int8_product,
    "smoothing.svg": smoothing,
    "scaling-units.svg": scaling_units,
    "awq-search.svg": awq_search,
    "awq-nibbles.svg": awq_nibbles,
    "awq-fragments.svg": awq_fragments,
    "awq-pairs.svg": awq_pairs,
    "awq-roofline.svg": awq_roofline,
    "ldmatrix.svg": ldmatrix,
    "prefill-decode.svg": prefill_decode,
    "kv-cache.svg": kv_cache,
    "blocks.svg": blocks,
    "words.svg": words,
    "gpu-ladder.svg": gpu_ladder,
    "gptq-ladder.svg": gptq_ladder,
    "moe-routing.svg": moe_routing,
    "memory-limit.svg": memory_limit,
    "quality.svg": quality,
    "quality-weights.svg": quality_weights,
    "rtl-blocks.svg": rtl_blocks,
    "rtl-wave.svg": rtl_wave,
    "rtl-chip.svg": rtl_chip,
    "chip-layer.svg": chip_layer,
}


def main() -> None:
    """Writes every figure, or those named, into the folder named on the command line, or else beside this file."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    for name in sys.argv[2:] or FIGURES:
        (folder / name).write_text(FIGURES[name](), encoding="utf-8")


if __name__ == "__main__":
    main()
