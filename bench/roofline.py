"""Draws the roofline of a benchmark as SVG: achieved multiply-adds a second against the machine's two limits.

    python -m bench.roofline RESULTS.json OUT.svg     from what `python -m bench.run --json` wrote

Across: multiply-adds per byte read, of weights and in decode of the KV cache. Up: how many were done a second. A
program can be no higher than bandwidth x intensity, on the left, and the peak of the multiplying instructions, on the
right. The drawing has a background of its own, so that it reads the same on a light page and on a dark one.
"""

import json
import math
import sys
from pathlib import Path

WIDTH, HEIGHT = 1060, 560
LEFT, RIGHT, TOP, BOTTOM = 76, 250, 64, 64
INK, QUIET, GRID, PAPER, LIMIT = "#1f2328", "#57606a", "#e3e6ea", "#fbfbfa", "#8a5a00"
COLOURS = ("#2563b0", "#c2410c", "#15803d", "#9333a8", "#b91c5c")
FONT = "font-family=\"Helvetica, Arial, 'DejaVu Sans', sans-serif\""
LABEL_HEIGHT, LABEL_WIDTH = 15, 95


def ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times the powers of ten within the range."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [m * 10.0**p for p in powers for m in (1, 2, 5) if low <= m * 10.0**p <= high]


def spread_out(heights: list[float], gap: float) -> list[float]:
    """Ascending heights, in their order, moved as little as it takes to be `gap` apart."""
    groups: list[tuple[float, int]] = []  # (sum of where each label wishes the group's first to be, labels)
    for y in heights:
        total, n = y, 1
        while groups and groups[-1][0] / groups[-1][1] + groups[-1][1] * gap > total / n:
            above, n_above = groups.pop()
            total, n = above + total - n * n_above * gap, n_above + n
        groups.append((total, n))
    return [total / n + k * gap for total, n in groups for k in range(n)]


def roofline(results: dict) -> str:
    """The whole drawing. `results` is what bench.run writes as JSON."""
    machine, rows = results["machine"], results["rows"]
    bandwidth, peak = machine["read_gb_per_s"]["median"], machine["peak_gmac_per_s"]["median"]
    ridge = peak / bandwidth
    intensities = [row["macs_per_byte"] for row in rows]
    achieved = [row["gmac_per_s"]["median"] for row in rows]
    x_low, x_high = min([*intensities, 1]) / 1.6, max([*intensities, 2 * ridge]) * 1.6
    y_low, y_high = min([*achieved, bandwidth * x_low]) / 2.2, peak * 1.7

    def x_of(v: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log(v / x_low) / math.log(x_high / x_low)

    def value_at(x: float) -> float:
        return x_low * (x_high / x_low) ** ((x - LEFT) / (WIDTH - LEFT - RIGHT))

    def y_of(v: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * math.log(v / y_low) / math.log(y_high / y_low)

    def text(
        x: float, y: float, words: str, size: int = 12, colour: str = INK, anchor: str = "start", **more: str
    ) -> str:
        extra = "".join(f' {k.replace("_", "-")}="{v}"' for k, v in more.items())
        words = words.replace("&", "&amp;").replace("<", "&lt;")
        return (
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}" text-anchor="{anchor}"{extra}>'
            f"{words}</text>"
        )

    title = "Roofline: multiply-adds achieved, and what the machine allows"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" {FONT}>',
        f"<title>{title}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="{PAPER}" stroke="#d0d7de"/>',
        text(LEFT, 28, title, 16, font_weight="bold"),
        text(LEFT, 47, f"{machine['cpu']}, {machine['threads']} threads, {machine['kernel']}", 12, QUIET),
    ]

    # Axes
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    for v in ticks(x_low, x_high):
        parts.append(f'<path d="M{x_of(v):.1f} {TOP} V{bottom}" stroke="{GRID}"/>')
        parts.append(text(x_of(v), bottom + 18, f"{v:g}", 12, QUIET, "middle"))
    for v in ticks(y_low, y_high):
        parts.append(f'<path d="M{LEFT} {y_of(v):.1f} H{right}" stroke="{GRID}"/>')
        parts.append(text(LEFT - 8, y_of(v) + 4, f"{v:g}", 12, QUIET, "end"))
    parts.append(
        text(
            (LEFT + right) / 2,
            HEIGHT - 18,
            "int8 multiply-adds per byte read: weights, and in decode the KV cache",
            13,
            INK,
            "middle",
        )
    )
    middle = (TOP + bottom) / 2
    parts.append(text(22, middle, "GMAC/s", 13, INK, "middle", transform=f"rotate(-90 22 {middle:.0f})"))

    # The roof
    x0, y0, x1, y1 = x_of(x_low), y_of(bandwidth * x_low), x_of(ridge), y_of(peak)
    parts.append(
        f'<path d="M{x0:.1f} {y0:.1f} L{x1:.1f} {y1:.1f} H{right}" fill="none" stroke="{LIMIT}" stroke-width="2.5"/>'
    )
    angle, xm = math.degrees(math.atan2(y1 - y0, x1 - x0)), x0 + 0.62 * (x1 - x0)
    ym = y0 + 0.62 * (y1 - y0) - 8
    turn = f"rotate({angle:.1f} {xm:.1f} {ym:.1f})"
    parts.append(text(xm, ym, f"reads {bandwidth:.1f} GB/s", 13, LIMIT, "middle", transform=turn))
    parts.append(text(right, y1 - 8, f"multiplies {peak:.0f} GMAC/s", 13, LIMIT, "end"))

    # Points; labels beside them. Points so close that a label would reach the next have theirs in one column.
    models = list(dict.fromkeys(row["model"] for row in rows))
    points = [(x_of(row["macs_per_byte"]), y_of(row["gmac_per_s"]["median"]), row) for row in rows]
    points.sort(key=lambda p: p[0])
    columns: list[list[tuple[float, float, dict]]] = []
    for point in points:
        if columns and point[0] - columns[-1][-1][0] < LABEL_WIDTH:
            columns[-1].append(point)
        else:
            columns.append([point])
    for column in columns:
        column.sort(key=lambda p: p[1])
        beside = max(x for x, _, _ in column) + 16
        under_roof = y_of(min(peak, bandwidth * value_at(beside))) + LABEL_HEIGHT
        labels = spread_out([y for _, y, _ in column], LABEL_HEIGHT)
        labels = [max(y, under_roof + k * LABEL_HEIGHT) for k, y in enumerate(labels)]
        for (x, y, row), label in zip(column, labels, strict=True):
            colour = COLOURS[models.index(row["model"]) % len(COLOURS)]
            parts.append(
                f'<path d="M{x:.1f} {y:.1f} L{beside - 3:.1f} {label:.1f}" stroke="{colour}" stroke-width="0.8"/>'
            )
            if row["phase"] == "decode":
                parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}" stroke="{PAPER}"/>')
            else:
                parts.append(
                    f'<rect x="{x - 4.5:.1f}" y="{y - 4.5:.1f}" width="9" height="9" fill="{colour}" stroke="{PAPER}"/>'
                )
            words = f"{row['phase']} {row['tokens']}"
            parts.append(
                text(beside, label + 4, words, 12, colour, paint_order="stroke", stroke=PAPER, stroke_width="3")
            )

    # Which colour and shape is what, to the right of the outermost labels
    key = right + 116
    for i, model in enumerate(models):
        y = TOP + 14 + 20 * i
        parts.append(f'<rect x="{key}" y="{y - 9}" width="10" height="10" fill="{COLOURS[i % len(COLOURS)]}"/>')
        parts.append(text(key + 16, y, model, 13))
    y = TOP + 14 + 20 * len(models) + 8
    parts.append(f'<circle cx="{key + 5}" cy="{y - 4}" r="5" fill="{QUIET}"/>')
    parts.append(text(key + 16, y, "decode", 13, QUIET))
    parts.append(f'<rect x="{key + 0.5}" y="{y + 11.5}" width="9" height="9" fill="{QUIET}"/>')
    parts.append(text(key + 16, y + 20, "prefill", 13, QUIET))
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> int:
    """Command line; see the module's docstring."""
    if len(sys.argv) != 3:
        print("usage: python -m bench.roofline RESULTS.json OUT.svg", file=sys.stderr)
        return 2
    results = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(sys.argv[2]).write_text(roofline(results), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
