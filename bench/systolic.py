"""Cycles of a matrix product on an array of R x C cells: a formula, and the array itself, cell by cell.

    python -m bench.systolic MODEL [--rows R] [--cols C] [--bytes-per-cycle B]

The array is weight-stationary with double buffering. Cell (r, c) holds the weight of input r and output c in one
register, and in a second one that of the tile that comes next. In every cycle it adds weight * activation to the sum
that comes from above, hands the sum down and the activation to the right. Token t's value r enters row r at cycle
start + t + r, and its sum leaves column c R - 1 + c cycles later: the wave runs diagonally (fill and drain). A row of
a tile is loaded in `row_cycles` cycles, with the same skew, into the second registers; a cell takes its new weight
over when the next tile's first token comes by.

`cycles` is the formula, `simulate` runs the registers and gives the sums as well: tests/test_systolic.py holds them
equal.
"""

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from formats.checkpoint import Config, read_config
from formats.tensors import matrix_shapes


@dataclass(frozen=True)
class Array:
    """rows: inputs, at least 2; cols: outputs; row_cycles: between the rows of a tile as they come from memory."""

    rows: int
    cols: int
    row_cycles: int = 1


def row_cycles(cols: int, bytes_per_weight: float, bytes_per_cycle: float) -> int:
    """Cycles in which memory delivers the weights of a row of cells."""
    return max(1, int(np.ceil(cols * bytes_per_weight / bytes_per_cycle)))


def cycles(array: Array, n_tokens: int, n_inputs: int, n_outputs: int) -> int:
    """Cycles of a product (n_tokens, n_inputs) x (n_inputs, n_outputs), from the first weight to the last sum.

    load of the first tile + a period for each further tile + the last tile's tokens + fill and drain. The period is
    what takes longer: the tokens of a tile, or the weights of the next one.
    """
    tiles = -(-n_inputs // array.rows) * -(-n_outputs // array.cols)
    load = (array.rows - 1) * (array.row_cycles - 1) + 1  # until the wave of tokens can follow the wave of weights
    period = max(n_tokens, array.rows * array.row_cycles)
    return load + (tiles - 1) * period + n_tokens + array.rows + array.cols - 2


def simulate(array: Array, x: np.ndarray, w: np.ndarray, hurry: int = 0) -> tuple[np.ndarray, int]:
    """The sums of each pass, and the cycles. x: (n, K), w: (K, M) integers, in whole tiles; sums: (tiles, n, C).

    The control starts a tile as soon as every cell will have its weight in time, and loads the next one as soon as no
    cell's second register is still in use. With `hurry` it starts tiles that many cycles too early. Raises RuntimeError
    if a cell then finds a weight of another tile, or one is overwritten before its use.
    """
    n, rows, cols, every = len(x), array.rows, array.cols, array.row_cycles
    w_tiles = (
        w.reshape(w.shape[0] // rows, rows, w.shape[1] // cols, cols).transpose(2, 0, 1, 3).reshape(-1, rows, cols)
    )
    x_tiles = [x[:, k : k + rows] for _ in range(0, w.shape[1], cols) for k in range(0, w.shape[0], rows)]
    r, c = np.indices((rows, cols))
    none = -1
    held, waiting = np.full((rows, cols), none), np.full((rows, cols), none)  # the tile of each cell's two weights
    weight, next_weight = np.zeros((rows, cols), np.int64), np.zeros((rows, cols), np.int64)
    passing, going_down = np.zeros((rows, cols), np.int64), np.zeros((rows, cols), np.int64)
    starts, loads, sums = [], [0], np.zeros((len(w_tiles), n, cols), np.int64)
    now, remaining = 0, sums.size
    while remaining:
        # Control: the tile whose load began last is started, and the load of the one behind it begins.
        if len(starts) < len(loads) and (not starts or now >= starts[-1] + n):
            last_row = loads[-1] + (rows - 1) * every  # its weight is in cell (r, 0) at the end of this cycle
            if now >= last_row - (rows - 1) + 1 - hurry:
                starts.append(now)
        loader_is_free = now >= loads[-1] + rows * every
        if len(loads) < len(w_tiles) and len(starts) == len(loads) and loader_is_free and now > starts[-1]:
            loads.append(now)
        # Cells that take over their next weight.
        for i, start in enumerate(starts):
            switch = start + r + c == now
            if (waiting[switch] != i).any():
                raise RuntimeError(f"cycle {now}: a cell has no weight of tile {i}")
            held[switch], weight[switch], waiting[switch] = i, next_weight[switch], none
        # A multiplication and an addition in each cell.
        entering = np.zeros(rows, np.int64)
        for i, start in enumerate(starts):
            t = now - start - np.arange(rows)
            valid = (t >= 0) & (t < n)
            entering[valid] = x_tiles[i][t[valid], np.arange(rows)[valid]]
        passing = np.column_stack([entering, passing[:, :-1]])
        going_down = np.vstack([np.zeros(cols, np.int64), going_down[:-1]]) + weight * passing
        for i, start in enumerate(starts):
            t = now - start - (rows - 1) - np.arange(cols)
            valid = (t >= 0) & (t < n)
            sums[i, t[valid], np.arange(cols)[valid]] = going_down[-1, valid]
            remaining -= int(valid.sum())
        # Weights that arrive.
        for i, load in enumerate(loads):
            arrive = load + r * every + c == now
            if (waiting[arrive] != none).any():
                raise RuntimeError(f"cycle {now}: a weight of tile {waiting[arrive].max()} is overwritten")
            waiting[arrive], next_weight[arrive] = i, w_tiles[i][arrive]
        now += 1
    return sums, now


def default_scalers(array: Array) -> int:
    """SCALERS of hw/rtl/matmul_axi.sv where nobody says another number: enough for groups of 64.

    As many columns share one as the largest power of two that divides the columns and the passes of such a group.
    array.rows: a power of two, 64 at most.
    """
    return array.cols // math.gcd(array.cols, 64 // array.rows)


@dataclass(frozen=True)
class Stream:
    """How weights come to hw/rtl's core. scale_beats: before the codes of a group; beat_cycles: between beats."""

    scale_beats: int = 4
    rows_per_beat: int = 1  # rows of cells: 2 with codes of 4 bits, 4 with those of 2
    beat_cycles: int = 1


def core_cycles(
    array: Array, n_tokens: int, n_inputs: int, n_outputs: int, group_size: int, stream: Stream, scalers: int = 0
) -> int:
    """Cycles of a product on hw/rtl/matmul_core.sv, from the first beat of weights to the last sum.

    scalers: SCALERS of the core, a divisor of array.cols; 0: `default_scalers`.

    What it does beyond `cycles`: scales come in the same stream (stream.scale_beats); a tile is loaded, a row a cycle,
    when all of it is in a buffer of two tiles, two cycles after its last row came; codes are read in two cycles, and a
    sum leaves through a register; scales of four groups, sums of two, and results of two rows of tiles are kept; as
    many columns share a scaler as groups of 64 have passes, and it takes a cycle for each token of each, from 8 cycles
    behind its begin with the group before on; results go out four beats for each token. (array.row_cycles does not
    matter here.)
    """
    n, rows, cols = n_tokens, array.rows, array.cols
    share = cols // (scalers or default_scalers(array))
    n_groups, n_passes, n_tiles = n_inputs // group_size, group_size // rows, -(-n_outputs // cols)
    offered, taken = 0, -1  # the beat of weights that is on the stream: since when, and when the one before was taken
    loads, starts, sent = [], [], []  # of tiles; of rows of tiles: the last result is out
    scaled = []  # of groups: when the last sum is on its way through the scaler
    for row_of_tiles in range(n_tiles):
        for group in range(n_groups):
            free = scaled[-4] + 1 if len(scaled) >= 4 else 0
            for _ in range(stream.scale_beats):
                offered = max(taken + 1, offered + stream.beat_cycles) if taken >= 0 else 0
                taken = max(offered, free)
            slot = taken  # of the last row that was taken
            for last_pass in [False] * (n_passes - 1) + [True]:
                for row in range(rows):
                    if row % stream.rows_per_beat == 0:
                        offered = max(taken + 1, offered + stream.beat_cycles) if taken >= 0 else 0
                    has_room = loads[-2] + row + 1 if len(loads) >= 2 else 0
                    slot = max(slot + 1, offered, has_room)
                    if (row + 1) % stream.rows_per_beat == 0:
                        taken = slot
                after = (loads[-1] + rows, starts[-1] + 1) if loads else ()
                loads.append(max(slot + 2, 0, *after))
                begin = max(loads[-1] + 1, starts[-1] + n if starts else 0)
                if last_pass and len(scaled) >= 2:
                    begin = max(begin, scaled[-2] + 1)
                if last_pass and group == n_groups - 1 and row_of_tiles >= 2:
                    begin = max(begin, sent[-2] + 1)
                starts.append(begin)
            done = starts[-1] + n + rows + cols + 1  # a cycle behind the last sum
            turn = max(done + 1, scaled[-1] + max(1, 8 - n * share) if scaled else 0)
            scaled.append(turn + n * share)
        sent.append(max(scaled[-1] + 12, sent[-1] if sent else 0) + 4 * n)
    return done


def decode_beats(array: Array, n_inputs: int, n_outputs: int, group_size: int, stream: Stream) -> int:
    """Beats of weights and scales of a matrix on hw/rtl's core."""
    n_tiles = -(-n_outputs // array.cols)
    return n_tiles * (n_inputs // stream.rows_per_beat + n_inputs // group_size * stream.scale_beats)


def decode_cycles(array: Array, n_inputs: int, n_outputs: int, group_size: int, stream: Stream) -> int:
    """`core_cycles` of one token: no cycle is lost but at the end.

    Every beat takes as many cycles as its rows, or beat_cycles if these are more; behind the last one come the cycles
    of the last tile's load, the token's way through the array, and the registers on it.
    """
    per_rows = max(stream.rows_per_beat, stream.beat_cycles)
    n_tiles = -(-n_outputs // array.cols)
    codes = n_tiles * n_inputs // stream.rows_per_beat * per_rows
    scales = n_tiles * n_inputs // group_size * stream.scale_beats * stream.beat_cycles
    wait = per_rows - stream.rows_per_beat  # the last beat's rows are taken at once
    return codes + scales - wait + array.rows + array.cols + 4


@dataclass(frozen=True)
class Traffic:
    """Bytes that one matrix moves, and what it computes, for a number of tokens."""

    weights: int  # codes and scales, read once
    activations: int  # codes and scales in, fp32 out
    macs: int


def traffic(n_tokens: int, n_outputs: int, n_inputs: int, group_size: int) -> Traffic:
    """The traffic of a product in Q8. group_size 0: one scale per row and per token, as in W8A8."""
    groups = n_inputs // (group_size or n_inputs)
    weights = n_outputs * (n_inputs + 4 * groups)
    activations = n_tokens * (n_inputs + 4 * groups + 4 * n_outputs)
    return Traffic(weights, activations, n_tokens * n_outputs * n_inputs)


def layer_shapes(config: Config) -> dict[str, tuple[int, int]]:
    """(n_outputs, n_inputs) of the matrices of a layer, by the last part of their names, and of the classifier."""
    shapes = {name.split(".")[-1]: shape for name, shape in matrix_shapes(config) if name.startswith("layers.0.")}
    return shapes | {"classifier": (config.vocab_size, config.dim)}


def kv_bytes(config: Config, n_positions: int, value_bytes: int = 4) -> int:
    """Bytes of keys and values that attention of one token reads in a layer."""
    return 2 * n_positions * config.n_kv_heads * config.head_dim * value_bytes


@dataclass(frozen=True)
class Work:
    """Operations per token that are no multiply-and-add: scalar counts."""

    divisions: int
    roots: int
    exponentials: int


def other_work(config: Config, n_positions: int, group_size: int) -> Work:
    """The other work of a token that attends to n_positions, in Q8 (group_size 0: dynamic W8A8).

    A norm has a root and a division; softmax an exponential a position and, per head, a division; SwiGLU an
    exponential and a division a channel; quantizing two divisions per scale.
    """
    c = config
    q_dim = c.n_heads * c.head_dim
    places = (c.dim, q_dim, c.dim, c.hidden_dim)
    scales = sum(n // (group_size or n) for n in places)
    norms = 2 + (c.n_heads + c.n_kv_heads if c.arch == "qwen3" else 0)
    exponentials = c.n_heads * n_positions + c.hidden_dim
    divisions = norms + c.n_heads + c.hidden_dim + 2 * scales
    last = c.dim // (group_size or c.dim)
    return Work(c.n_layers * divisions + 1 + 2 * last, c.n_layers * norms + 1, c.n_layers * exponentials)


def main() -> int:
    """Prints a table of a model's matrices on an array."""
    parser = argparse.ArgumentParser(prog="python -m bench.systolic", description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="a Hugging Face directory; only its config.json is read")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--cols", type=int, default=64)
    parser.add_argument("--bytes-per-cycle", type=float, default=64.0, help="from memory (64: 64 GB/s at 1 GHz)")
    parser.add_argument("--group-size", type=int, default=64)
    args = parser.parse_args()
    if args.rows < 2 or args.cols < 1 or args.bytes_per_cycle <= 0 or args.group_size < 0:
        parser.error(
            "expected --rows of 2 and up, --cols of 1 and up, --bytes-per-cycle above 0, --group-size 0 and up"
        )
    config = read_config(args.model)
    per_weight = 1 + (4 / args.group_size if args.group_size else 0)
    array = Array(args.rows, args.cols, row_cycles(args.cols, per_weight, args.bytes_per_cycle))
    print(f"{args.rows} x {args.cols} cells, {args.bytes_per_cycle:g} bytes per cycle: a row in {array.row_cycles}")
    print(
        f"{'matrix':<11} {'outputs':>7} {'inputs':>6} | tokens {'weights':>12} {'activations':>12} {'cycles':>12} busy"
    )
    for name, (n_outputs, n_inputs) in layer_shapes(config).items():
        for n_tokens in (1, 128):
            moved = traffic(n_tokens, n_outputs, n_inputs, args.group_size)
            took = cycles(array, n_tokens, n_inputs, n_outputs)
            busy = moved.macs / took / args.rows / args.cols
            print(
                f"{name:<11} {n_outputs:7} {n_inputs:6} | {n_tokens:6} {moved.weights:12,} {moved.activations:12,} "
                f"{took:12,} {busy:4.0%}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
