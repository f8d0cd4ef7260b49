"""Writes tests/hf/sampling.safetensors: next-token distributions by the logits processors of `transformers`.

    python -m tests.sampling_fixture write    make the file anew (needs torch and transformers)
    python -m tests.sampling_fixture check    compute the distributions again and compare with the stored ones

`transformers` chooses the processors and their order itself, as its generate() does. Each row is one draw:

    settings       (n, 5) F32       temperature (0: greedy), top_k, top_p, min_p, repetition_penalty
    seen           (n, n_seen) I32  prompt and output so far
    logits         (n, vocab) F32
    probabilities  (n, vocab) F32   of the next token; greedy: 1 for the one taken
"""

import sys
from pathlib import Path

from formats.interpreter import need

if __name__ == "__main__":
    need("numpy", "torch", "transformers")

import numpy as np
from safetensors.numpy import load_file, save_file

FILE = Path(__file__).resolve().parent / "hf" / "sampling.safetensors"
SETTINGS = [
    (0, 0, 1, 0, 1.3),
    (0, 0, 1, 0, 0.6),
    (0, 20, 0.9, 0.1, 1.05),
    (1, 0, 1, 0, 1.2),
    (1, 0, 1, 0.1, 1),
    (1, 0, 1, 1, 1),
    (0.7, 0, 1, 0.05, 1.1),
    (2, 0, 1, 0.4, 1),
    (1, 0, 0.8, 0.1, 1),
    (1, 0, 0.95, 0, 1.5),
    (0.6, 12, 1, 0.02, 1),
    (1.5, 20, 0.9, 0.08, 1.2),
    (0.9, 5, 0.7, 0.5, 0.8),
]
ROWS_EACH, VOCAB, N_SEEN = 3, 160, 30


def transformers_probabilities(settings: np.ndarray, seen: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """(n, vocab) fp32, as above."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCAB, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    )
    found = np.zeros_like(logits)
    for i, (temperature, top_k, top_p, min_p, penalty) in enumerate(settings.astype(float).round(6)):
        drawing = {"temperature": temperature, "top_k": int(top_k), "top_p": top_p, "min_p": min_p}
        config = GenerationConfig(
            do_sample=bool(temperature > 0), repetition_penalty=penalty, **(drawing if temperature > 0 else {})
        )
        processors = model._get_logits_processor(config, input_ids_seq_length=N_SEEN // 2)
        ids = torch.tensor(seen[i : i + 1].astype(np.int64))
        scores = processors(ids, torch.tensor(logits[i : i + 1]))[0]
        found[i] = scores.softmax(-1).numpy() if temperature > 0 else np.eye(VOCAB)[int(scores.argmax())]
    return found


def main() -> int:
    """Exit code 1 if the stored distributions are not those of `transformers`."""
    command = sys.argv[1] if len(sys.argv) == 2 else ""
    if command not in ("write", "check"):
        print(__doc__)
        return 2
    if command == "write":
        rng = np.random.default_rng(0)
        settings = np.repeat(np.array(SETTINGS, np.float32), ROWS_EACH, axis=0)
        logits = (3 * rng.standard_normal((len(settings), VOCAB))).astype(np.float32)
        # Half of what was seen is among the most probable tokens, so that the penalty decides.
        likely = np.argsort(-logits, axis=1)[:, : N_SEEN // 4]
        others = rng.integers(0, VOCAB, (len(settings), N_SEEN - 2 * likely.shape[1]))
        seen = rng.permuted(np.concatenate([likely, likely, others], axis=1), axis=1).astype(np.int32)
        probabilities = transformers_probabilities(settings, seen, logits)
        save_file({"settings": settings, "seen": seen, "logits": logits, "probabilities": probabilities}, FILE)
    stored = load_file(FILE)
    again = transformers_probabilities(stored["settings"], stored["seen"], stored["logits"])
    error = float(np.abs(again - stored["probabilities"]).max())
    print(f"{len(again)} rows, stored and computed differ by {error:.1e}")
    print("tokens left:", *(again > 0).sum(axis=1))
    return 0 if error <= 1e-6 else 1


if __name__ == "__main__":
    sys.exit(main())
