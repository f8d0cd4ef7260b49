"""Gives a model the outlier channels of a large one, without changing what it computes.

    python -m models.outliers SRC_DIR OUT_DIR [--channels 4] [--factor-low 30] [--factor-high 100] [--seed 0]

In large language models a few channels of the activations are tens of times larger than the others, the same ones in
every layer (Dettmers et al. 2022, arXiv 2208.07339; Xiao et al. 2022, arXiv 2211.10438). A model as small as those
here has none, so that its activations are easy to quantize and say little about a scheme made for the hard ones. This
puts them in. In every layer, `channels` elements of both RMSNorms' weights are multiplied by whole factors between the
two limits, and the columns that read them (of q, k and v; of gate and up) divided by the same ones:

    W' = W / s,  x' = x * s,  W' x' = W x          s (dim,): 1 but for the outliers

The channels are the same in all layers; the factors are drawn log-uniformly for each norm. `--all-places` does the
same to what the other two matrices read: rows of v and the columns of o that see them (with grouped heads several for
a row), rows of up and columns of down. These channels are drawn anew in each layer.

Products of the stored bf16 weights and a whole factor are exact in fp32, and a quotient is off by at most 2^-24 of
itself; therefore OUT_DIR has fp32 weights. All of them are in memory at once. Files other than weights are copied.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from formats.checkpoint import Checkpoint, Config, ModelError, tensor_shapes
from formats.files import new_directory, read_json

WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pth", "*.gguf")


def factors(rng: np.random.Generator, n: int, channels: np.ndarray, low: int, high: int) -> np.ndarray:
    """(n,) fp32: at `channels` whole numbers from low to high, log-uniform, 1 elsewhere."""
    s = np.ones(n, np.float32)
    s[channels] = np.rint(np.exp(rng.uniform(np.log(low), np.log(high), len(channels))))
    return s


def add_outliers(
    weights: dict[str, np.ndarray], config: Config, channels: int, low: int, high: int, seed: int, all_places: bool
) -> None:
    """Rescales weights, by their Hugging Face names and in fp32, in place."""
    c, rng, other = config, np.random.default_rng(seed), np.random.default_rng([seed, 1])
    outliers = rng.choice(c.dim, channels, replace=False)

    def spread(producer: str, consumers: list[str], s: np.ndarray, s_in: np.ndarray) -> None:
        weights[producer + ".weight"] *= s if weights[producer + ".weight"].ndim == 1 else s[:, None]
        for name in consumers:
            weights[name + ".weight"] /= s_in

    for i in range(c.n_layers):
        layer = f"model.layers.{i}."
        s = factors(rng, c.dim, outliers, low, high)
        spread(layer + "input_layernorm", [layer + f"self_attn.{p}_proj" for p in "qkv"], s, s)
        s = factors(rng, c.dim, outliers, low, high)
        spread(layer + "post_attention_layernorm", [layer + f"mlp.{p}_proj" for p in ("gate", "up")], s, s)
        if all_places:
            s = factors(other, c.kv_dim, other.choice(c.kv_dim, channels, replace=False), low, high)
            heads = s.reshape(c.n_kv_heads, c.head_dim)  # query head h reads the values of h / (H / G)
            s_in = np.repeat(heads, c.n_heads // c.n_kv_heads, axis=0).reshape(-1)
            spread(layer + "self_attn.v_proj", [layer + "self_attn.o_proj"], s, s_in)
            s = factors(other, c.hidden_dim, other.choice(c.hidden_dim, channels, replace=False), low, high)
            spread(layer + "mlp.up_proj", [layer + "mlp.down_proj"], s, s)


def copy_with_outliers(
    source: Path,
    out: Path,
    channels: int = 4,
    low: int = 30,
    high: int = 100,
    seed: int = 0,
    all_places: bool = False,
) -> None:
    """Writes the directory `out`, which must not exist. Raises ModelError before anything is written."""
    checkpoint = Checkpoint(source)
    c = checkpoint.config
    most = min(c.dim, c.kv_dim, c.hidden_dim) if all_places else c.dim
    if not 1 <= channels <= most:
        raise ModelError(f"--channels is {channels}, expected 1 to {most}")
    if not 1 <= low <= high <= 65536:
        raise ModelError(f"--factor-low {low} and --factor-high {high}: expected 1 <= low <= high <= 65536")
    if seed < 0:
        raise ModelError(f"--seed is {seed}, expected 0 or more")
    if out.exists() or out.is_symlink():
        raise ModelError(f"{out}: exists already")
    config = read_json(source / "config.json")
    config["torch_dtype"] = "float32"
    if "dtype" in config:  # what newer versions of transformers call it
        config["dtype"] = "float32"

    weights = {name: checkpoint.tensor(name) for name in tensor_shapes(c)}
    add_outliers(weights, c, channels, low, high, seed, all_places)
    with new_directory(out) as temporary:
        for file in sorted(source.iterdir()):
            if file.is_file() and file.name != "config.json" and not any(file.match(p) for p in WEIGHTS):
                shutil.copyfile(file, temporary / file.name)
        (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(weights, temporary / "model.safetensors", metadata={"format": "pt"})
        (temporary / "model.safetensors").chmod((temporary / "config.json").stat().st_mode)  # both are made private
        temporary.chmod(source.stat().st_mode | 0o700)


def main() -> int:
    """Command line; see the module's docstring. Exit code 0, 1 for what cannot be done, 2 for a wrong command line."""
    parser = argparse.ArgumentParser(prog="python -m models.outliers", description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, metavar="SRC_DIR")
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    parser.add_argument("--channels", type=int, default=4, metavar="N", help="outliers in each place (%(default)s)")
    parser.add_argument("--factor-low", type=int, default=30, metavar="F", help="the least factor (%(default)s)")
    parser.add_argument("--factor-high", type=int, default=100, metavar="F", help="the greatest factor (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="(%(default)s)")
    parser.add_argument("--all-places", action="store_true", help="also in the inputs of o and down")
    a = parser.parse_args()
    try:
        copy_with_outliers(a.source, a.out, a.channels, a.factor_low, a.factor_high, a.seed, a.all_places)
    except (ModelError, OSError) as error:
        print(f"outliers: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
