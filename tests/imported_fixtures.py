"""Small models as llmcompressor quantizes them, and what transformers computes of them: tests/hf/imported/.

    python -m tests.imported_fixtures write    make them anew (needs torch, transformers and llmcompressor)

Each is a directory as llmcompressor 0.14.0.1 wrote it, without its recipe. In expected.safetensors beside it are token
ids and the fp32 logits that transformers 5.17 with compressed-tensors 0.19 makes of them.
"""

import shutil
import sys
import tempfile
from pathlib import Path

from formats.interpreter import need

if __name__ == "__main__":
    need("numpy", "safetensors", "torch", "transformers", "compressed_tensors", "llmcompressor")

import numpy as np
from safetensors.numpy import save_file

from tests.hf_fixtures import FOLDER, SMALL

IMPORTED = FOLDER / "imported"
# A directory's name, the model of tests/hf that it is made of, and its kind in tests/hf_in_check.py.
MADE = {
    "qwen3-w8a8": ("qwen3-gqa-untied", "w8a8"),
    "llama-w8a8-static": ("llama-scaled-rope", "w8a8-static"),
    "qwen3-w4a16-g32": ("qwen3-gqa-untied", "w4a16-g32"),
    "llama-w4a16-asym": ("llama-scaled-rope", "w4a16-asym"),
    "llama-w8a16": ("llama-gqa-tied", "w8a16"),
}
N_TOKENS = 24


def main() -> int:
    """See the module's docstring."""
    from tests.hf_in_check import loaded, logits_of, quantize

    if sys.argv[1:] != ["write"]:
        sys.exit("python -m tests.imported_fixtures write")
    rng = np.random.default_rng(0)
    for name, (source, kind) in MADE.items():
        out = IMPORTED / name
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        with tempfile.TemporaryDirectory() as folder:
            hf_dir = Path(folder) / "hf"
            quantize(FOLDER / source, kind, hf_dir, rng.integers(0, SMALL["vocab_size"], (4, 64)))
            for file in ("config.json", "model.safetensors"):
                shutil.copy(hf_dir / file, out / file)
        tokens = rng.integers(0, SMALL["vocab_size"], N_TOKENS).astype(np.int32)
        (logits,) = logits_of(loaded(out), [tokens])
        save_file({"tokens": tokens, "logits": np.ascontiguousarray(logits)}, out / "expected.safetensors")
    return 0


if __name__ == "__main__":
    sys.exit(main())
