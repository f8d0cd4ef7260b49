"""Writes the trace of a port of runq with a planted bug, for the exercises of docs/README.md.

    python -m docs.planted NUMBER OUT.safetensors

NUMBER is 1 to 4. The model is models/tiny-llama in Q8, the tokens are those of its golden trace. `golden diff` finds
out what is wrong. (Whoever wants to do the exercise reads no further.)
"""

import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import numpy as np

from formats.checkpoint import Checkpoint
from golden import forward
from golden.q8 import Q8, Quantized, matmul
from golden.trace import Recorder, read_trace, write_trace

ROOT = Path(__file__).resolve().parent.parent


def from_position_1(config: forward.Config, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """RoPE's table with positions counted from 1."""
    return forward_rope_table(config, positions + 1)


def heads_in_turn(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Scores with query head h reading key head h % G. q: (n, H, head_dim), k: (n, G, head_dim)."""
    dots = np.einsum("qhd,khd->qhk", q.astype(np.float64), np.tile(k, (1, q.shape[1] // k.shape[1], 1)))
    return (dots / np.sqrt(q.shape[-1])).astype(np.float32)


def gated_the_other_way(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """SwiGLU with gate and up exchanged."""
    return forward_swiglu(up, gate)


def scales_of_the_next_group(self: Q8, x: Quantized, name: str) -> np.ndarray:
    """Products in which the weights of down_proj have the scales of the group behind theirs."""
    w = self.matrix(name)
    return matmul(x, Quantized(w.codes, np.roll(w.scales, -1, axis=1)) if name.endswith("down_proj") else w)


forward_rope_table, forward_swiglu = forward.rope_table, forward.swiglu
BUGS: list[tuple[object, str, Callable]] = [
    (forward, "rope_table", from_position_1),
    (forward, "attention_scores", heads_in_turn),
    (forward, "swiglu", gated_the_other_way),
    (Q8, "linear", scales_of_the_next_group),
]


def planted(number: int) -> dict[str, np.ndarray]:
    """The trace of a port with bug `number`, 1 to 4: step names and values."""
    tokens = read_trace(ROOT / "golden" / "data" / "tiny-llama.q8.trace.safetensors")["tokens"]
    checkpoint, recorder = Checkpoint(ROOT / "models" / "tiny-llama"), Recorder()
    owner, name, bug = BUGS[number - 1]
    with patch.object(owner, name, bug):
        forward.forward(checkpoint.config, Q8(checkpoint), tokens, recorder)
    return {"tokens": tokens, **recorder.tensors}


def main() -> int:
    """Exit code 2 if the command line is wrong."""
    numbers = [str(i + 1) for i in range(len(BUGS))]
    if len(sys.argv) != 3 or sys.argv[1] not in numbers:
        print(f"usage: python -m docs.planted {'|'.join(numbers)} OUT.safetensors", file=sys.stderr)
        return 2
    write_trace(Path(sys.argv[2]), planted(int(sys.argv[1])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
