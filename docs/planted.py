"""Writes the trace of a port of runq with a planted bug, for docs/numerics.md and docs/exercises.md.

    python -m docs.planted BUG OUT.safetensors

BUG is `example`, or 1 to 4 for the exercises. The model is models/tiny-llama in Q8, the tokens are those of its golden
trace. `golden diff` finds out what is wrong. (Whoever wants to do the exercise reads no further.)
"""

import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import numpy as np

from formats.checkpoint import Checkpoint
from golden import forward
from golden.q8 import Q8, Quantized, traced_matmul
from golden.trace import Recorder, read_trace, write_trace

ROOT = Path(__file__).resolve().parent.parent


def from_position_1(config: forward.Config, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """RoPE's table with positions counted from 1."""
    return forward_rope_table(config, positions + 1)


def heads_in_turn(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Dot products of query head h with key head h % G. q: (n, H, head_dim), k: (n, G, head_dim)."""
    return forward_attention_dots(q, np.tile(k, (1, q.shape[1] // k.shape[1], 1)))


def gated_the_other_way(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """SwiGLU with gate and up exchanged."""
    return forward_swiglu(up, gate)


def scales_of_the_next_group(self: Q8, x: Quantized, name: str, step: forward.Step) -> np.ndarray:
    """Products in which the weights of down_proj have the scales of the group behind theirs."""
    w = self.matrix(name)
    wrong = Quantized(w.codes, np.roll(w.scales, -1, axis=1)) if name.endswith("down_proj") else w
    return traced_matmul(x, wrong, name, step)


def up_proj_too_large(self: Q8, x: Quantized, name: str, step: forward.Step) -> np.ndarray:
    """Products, that of layer 1's up_proj a hundredth too large."""
    out = traced_matmul(x, self.matrix(name), name, step)
    return out * np.float32(1.01 if name == "layers.1.ffn.up_proj" else 1)


forward_rope_table, forward_swiglu, forward_attention_dots = forward.rope_table, forward.swiglu, forward.attention_dots
BUGS: dict[str, tuple[object, str, Callable]] = {
    "example": (Q8, "linear", up_proj_too_large),
    "1": (forward, "rope_table", from_position_1),
    "2": (forward, "attention_dots", heads_in_turn),
    "3": (forward, "swiglu", gated_the_other_way),
    "4": (Q8, "linear", scales_of_the_next_group),
}


def planted(bug: str) -> dict[str, np.ndarray]:
    """The trace of a port with one of BUGS: step names and values."""
    tokens = read_trace(ROOT / "golden" / "data" / "tiny-llama.q8.trace.safetensors")["tokens"]
    checkpoint, recorder = Checkpoint(ROOT / "models" / "tiny-llama"), Recorder()
    owner, name, wrong = BUGS[bug]
    with patch.object(owner, name, wrong):
        forward.forward(checkpoint.config, Q8(checkpoint), tokens, recorder)
    return {"tokens": tokens, **recorder.tensors}


def main() -> int:
    """Exit code 2 if the command line is wrong."""
    if len(sys.argv) != 3 or sys.argv[1] not in BUGS:
        print(f"usage: python -m docs.planted {'|'.join(BUGS)} OUT.safetensors", file=sys.stderr)
        return 2
    write_trace(Path(sys.argv[2]), planted(sys.argv[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
