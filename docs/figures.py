"""Draws the figures of the documentation as SVG: python docs/figures.py [FOLDER]

Each figure has a background of its own, so that it reads the same on a light page and on a dark one.

smoothing.svg shows measured data. They are measured each time it is drawn, which takes a second or two: tiny-llama gets
outliers (models/outliers.py) and reads models/calibration.txt, as `export w8a8` would have it (golden/smooth.py).
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent

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
    s.text(844, 122, "one layer, 16 times over", 13, QUIET, "end")
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


def channel_maxima(layer: int, alpha: float) -> dict[str, Sequence[float]]:
    """attn.norm's channels in a layer of tiny-llama with outliers: max|x| and max|w|, before and after smoothing."""
    sys.path.insert(0, str(HERE.parent))
    import numpy as np

    from golden.checkpoint import Checkpoint
    from golden.smooth import CONSUMERS, calibration_samples, factors, observe
    from models.outliers import copy_with_outliers

    models = HERE.parent / "models"
    text = (models / "calibration.txt").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        hf_dir = Path(folder) / "model"
        copy_with_outliers(models / "tiny-llama", hf_dir)
        checkpoint = Checkpoint(hf_dir)
        samples = calibration_samples(hf_dir, checkpoint.config, text, n_samples=16, seq_len=256)
        for i, (weights, seen) in enumerate(observe(checkpoint, samples)):
            if i == layer:
                x = seen[f"layers.{i}.attn.norm"].largest
                names = [f"layers.{i}.{consumer}" for consumer in CONSUMERS["attn.norm"]]
                w = np.max([np.abs(weights.vector(name)).max(axis=0) for name in names], axis=0)
                s = factors(x, w, alpha)
                return {"x": x, "w": w, "x / s": x / s, "w * s": w * s}
    raise ValueError(f"there is no layer {layer}")


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
        "the activations four channels reach 109 to 154 and all others less than 3; the same four columns of the "
        "weights are far smaller than the others. After smoothing with alpha 0.5, all channels have maxima of the same "
        "order, and those of activations and weights are equal.",
    )
    colour = {True: FILL["int8"][1], False: FILL["fp32"][1]}
    for x, outlier, name in ((560, True, "outlier channels"), (720, False, "the others")):
        s.parts.append(f'<rect x="{x}" y="18" width="14" height="14" rx="2" fill="{colour[outlier]}"/>')
        s.text(x + 20, 30, name, 13, INK, "start")
    s.text(40, 31, "Inputs of q, k and v in layer 0: 128 channels", 15, INK, "start", bold=True)

    width, height = 384, 150  # of a chart: three to a channel
    charts = [
        (58, 84, "x", "activations, max|x| of each channel", 160, 40),
        (486, 84, "x / s", "x / s", 1.5, 0.5),
        (58, 316, "w", "weights, max|w| of each column", 0.8, 0.2),
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
        largest, middle = max(values), median(values)
        note = f"largest {largest:.3g}, median {middle:.3g}"
        if key.startswith("x"):
            note += f"; the median has code {round(127 * middle / largest)} of 127"
        s.text(left, bottom + 22, note, 12, QUIET, "start")
    s.text(58, 516, "The axes differ. What counts is how unequal the bars of a chart are.", 13, INK, "start")
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
        "there are 64 accumulators, each scaled and added in fp32. Q8 with groups of 64 does the same 32 times.",
    )
    columns = [
        ("W8A8, static", "", "2048 MACs", "int32, 26 bits", "multiply once", 1),
        ("W8A8, a row", "max of 2048", "2048 MACs", "int32, 26 bits", "multiply twice", 1),
        ("Q8, groups of 64", "max of 64", "64 MACs", "int32, 21 bits", "multiply twice, add", 32),
        ("W8A8, blocks of 32", "max of 32", "32 MACs", "int32, 20 bits", "multiply twice, add", 64),
    ]
    for i, (name, largest, macs, bits, scaling, count) in enumerate(columns):
        left, centre = 30 + 210 * i, 120 + 210 * i
        s.text(centre, 38, name, 15, INK, bold=True)
        s.text(centre, 66, "x, fp32", 13, QUIET)
        if largest:
            s.arrow((centre, 74), (centre, 94))
            s.box(left, 96, 180, 44, "fp32", largest, "all of them, before a code")
            s.arrow((centre, 140), (centre, 160))
        else:
            s.arrow((centre, 74), (centre, 160))
        s.box(left, 162, 180, 44, "quantize", "multiply, round", "each value")
        s.arrow((centre, 206), (centre, 226))
        s.box(left, 228, 180, 54, "int8", macs, bits)
        s.arrow((centre, 282), (centre, 302))
        s.box(left, 304, 180, 44, "fp32", scaling, "at the foot of a column")
        if count > 1:  # back to the array for the next group
            s.arrow((left + 180, 326), (left + 192, 326), (left + 192, 255), (left + 182, 255), dashed=True)
        s.arrow((centre, 348), (centre, 372))
        s.text(centre, 390, "output, fp32", 13, QUIET)
        s.text(centre, 420, f"{count} scaling{'s' * (count > 1)} for 2048 MACs", 13, INK)
    s.text(440, 442, "One output whose row is 2048 long. MAC: a multiply-and-add of two int8 codes.", 12, QUIET)
    return s.done()


FIGURES = {
    "data-flow.svg": data_flow,
    "int8-product.svg": int8_product,
    "smoothing.svg": smoothing,
    "scaling-units.svg": scaling_units,
}


def main() -> None:
    """Writes every figure into the folder named on the command line, or else beside this file."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    for name, draw in FIGURES.items():
        (folder / name).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
