"""A Hugging Face model directory: config.json and the tensors, one at a time.

Reads `config.json`, and `model.safetensors` or the shards that `model.safetensors.index.json` names. Everything
the forward pass depends on comes from the file. What the forward pass does not implement is refused by name.

What only needs a `Config`, such as making a model file with random weights on a bare GPU machine, runs with numpy
alone: safetensors is imported where a checkpoint is opened.
"""

import json
from collections.abc import Container
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

with suppress(ImportError):
    import ml_dtypes  # noqa: F401  (teaches numpy the name "bfloat16")

ARCHITECTURES = ("llama", "qwen3")
LARGEST = float(np.finfo(np.float32).max)  # of the numbers that a model file has room for


class ModelError(ValueError):
    """The directory holds something that cannot be used; the text names the file, the field and the value."""


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's rescaling of the RoPE frequencies (`rope_scaling` of type `llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class Config:
    """The numbers of `config.json`, under the names that the programs use."""

    arch: str  # "llama" or "qwen3"
    dim: int
    hidden_dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    max_seq_len: int
    tied: bool  # the classifier is the embedding
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None

    @property
    def q_dim(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.n_kv_heads * self.head_dim


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ModelError if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path}: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def read_config(hf_dir: Path, quantized: bool = False) -> Config:
    """`config.json` of a Hugging Face directory. Raises ModelError for anything this project does not run.

    quantized: the caller has looked at `quantization_config` and can read such weights.
    """
    path = Path(hf_dir) / "config.json"
    raw = read_json(path)

    def refuse(field: str, value: object, why: str) -> None:
        raise ModelError(f"{path}: {field} is {json.dumps(value)}: {why}")

    def integer(field: str, default: int | None = None) -> int:
        value = raw.get(field)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"{path}: {field} is missing")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            refuse(field, value, "expected a positive whole number")
        return value

    def number(where: dict, field: str, default: float | None = None) -> float:
        value = where.get(field, default)
        if value is None:
            raise ModelError(f"{path}: {field} is missing")
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= LARGEST:
            refuse(field, value, "expected a positive number")
        return float(value)

    arch = raw.get("model_type")
    if arch not in ARCHITECTURES:
        refuse("model_type", arch, f"supported are {' and '.join(ARCHITECTURES)}")
    for field in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if raw.get(field):
            refuse(field, raw[field], "not supported")
    kinds = raw.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        shown = sorted(set(map(str, kinds))) if isinstance(kinds, list) else kinds
        refuse("layer_types", shown, "only full_attention is supported")
    if raw.get("hidden_act", "silu") != "silu":
        refuse("hidden_act", raw["hidden_act"], "only silu is supported")
    quantization = raw.get("quantization_config")
    if quantization is not None and not quantized:
        if not isinstance(quantization, dict):
            refuse("quantization_config", quantization, "expected an object")
        refuse("quantization_config.quant_method", quantization.get("quant_method"), "expected unquantized weights")

    # transformers 5 writes rope_theta and the scaling into one object, rope_parameters.
    for field in ("rope_scaling", "rope_parameters"):
        if not isinstance(raw.get(field) or {}, dict):
            refuse(field, raw[field], "expected an object")
    rope = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    scaling = None
    if kind == "llama3":
        scaling = RopeScaling(
            factor=number(rope, "factor"),
            low_freq_factor=number(rope, "low_freq_factor"),
            high_freq_factor=number(rope, "high_freq_factor"),
            original_max_position_embeddings=int(number(rope, "original_max_position_embeddings")),
        )
        if not scaling.high_freq_factor > scaling.low_freq_factor:
            refuse("rope_scaling.high_freq_factor", scaling.high_freq_factor, "must be above low_freq_factor")
    elif kind != "default":
        refuse("rope_scaling.rope_type", kind, "supported are default and llama3")
    if rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        refuse("partial_rotary_factor", rope.get("partial_rotary_factor"), "not supported")

    dim, n_heads = integer("hidden_size"), integer("num_attention_heads")
    head_dim = integer("head_dim", dim // n_heads if arch == "llama" else 128)
    config = Config(
        arch=arch,
        dim=dim,
        hidden_dim=integer("intermediate_size"),
        n_layers=integer("num_hidden_layers"),
        n_heads=n_heads,
        n_kv_heads=integer("num_key_value_heads", n_heads),
        head_dim=head_dim,
        vocab_size=integer("vocab_size"),
        max_seq_len=integer("max_position_embeddings"),
        tied=bool(raw.get("tie_word_embeddings", False)),
        norm_eps=number(raw, "rms_norm_eps", 1e-6),
        rope_theta=number(
            {"rope_theta": raw.get("rope_theta"), **rope} if "rope_theta" in rope else raw, "rope_theta", 10000.0
        ),
        rope_scaling=scaling,
    )
    if config.n_heads % config.n_kv_heads:
        refuse("num_key_value_heads", config.n_kv_heads, f"does not divide num_attention_heads {config.n_heads}")
    if config.head_dim % 2:
        refuse("head_dim", config.head_dim, "RoPE needs an even number")
    return config


def tensor_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Names and shapes of every tensor that a model of this config has, in Hugging Face's names."""
    c = config
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c.vocab_size, c.dim)}
    for i in range(c.n_layers):
        p = f"model.layers.{i}."
        shapes[p + "input_layernorm.weight"] = (c.dim,)
        shapes[p + "self_attn.q_proj.weight"] = (c.q_dim, c.dim)
        shapes[p + "self_attn.k_proj.weight"] = (c.kv_dim, c.dim)
        shapes[p + "self_attn.v_proj.weight"] = (c.kv_dim, c.dim)
        shapes[p + "self_attn.o_proj.weight"] = (c.dim, c.q_dim)
        if c.arch == "qwen3":
            shapes[p + "self_attn.q_norm.weight"] = (c.head_dim,)
            shapes[p + "self_attn.k_norm.weight"] = (c.head_dim,)
        shapes[p + "post_attention_layernorm.weight"] = (c.dim,)
        shapes[p + "mlp.gate_proj.weight"] = (c.hidden_dim, c.dim)
        shapes[p + "mlp.up_proj.weight"] = (c.hidden_dim, c.dim)
        shapes[p + "mlp.down_proj.weight"] = (c.dim, c.hidden_dim)
    shapes["model.norm.weight"] = (c.dim,)
    if not c.tied:
        shapes["lm_head.weight"] = (c.vocab_size, c.dim)
    return shapes


FLOATS = ("F32", "F16", "BF16")


def awq_tensor_shapes(config: Config, group_size: int) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """Names, shapes and types of every tensor of an AutoAWQ checkpoint: three in the place of a layer's matrix."""
    tensors: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {}
    for name, shape in tensor_shapes(config).items():
        if len(shape) == 2 and ".layers." in name:
            (n_out, n_in), stem = shape, name.removesuffix("weight")
            tensors[stem + "qweight"] = (n_in, n_out // 8), ("I32",)
            tensors[stem + "qzeros"] = (n_in // group_size, n_out // 8), ("I32",)
            tensors[stem + "scales"] = (n_in // group_size, n_out), ("F16",)
        else:
            tensors[name] = shape, FLOATS
    return tensors


def is_left_over(name: str, expected: Container[str]) -> bool:
    """Whether a tensor changes what a layer or the classifier computes, in a way that this project does not."""
    if name in expected or not name.startswith(("model.layers.", "lm_head.")):
        return False
    # old checkpoints store the frequencies of RoPE, some the classifier though it is the embedding
    return name != "lm_head.weight" and not name.endswith(".rotary_emb.inv_freq")


class Checkpoint:
    """The tensors of a Hugging Face directory, read from disk when asked for.

    Opening checks that every tensor is there with the right shape and type, and that layers and classifier have no
    others, such as biases; it reads none. awq_group_size: of an AutoAWQ checkpoint; None: weights are floating-point
    numbers.
    """

    def __init__(self, hf_dir: Path | str, awq_group_size: int | None = None):
        from safetensors import SafetensorError

        self.path = Path(hf_dir)
        self.config_path = self.path / "config.json"
        if not self.path.is_dir():
            raise ModelError(f"{self.path}: no such directory")
        self.config = read_config(self.path, quantized=awq_group_size is not None)
        self._file_of = self._locate()
        if awq_group_size is None:
            expected = {name: (shape, FLOATS) for name, shape in tensor_shapes(self.config).items()}
        else:
            expected = awq_tensor_shapes(self.config, awq_group_size)
        self._check_names(expected, awq_group_size is not None)
        for name, (shape, types) in expected.items():
            if name not in self._file_of:
                raise ModelError(f"{self.path}: tensor {name} is missing")
            file = self._file_of[name]
            with self._open(file) as f:
                try:
                    part = f.get_slice(name)
                except SafetensorError:
                    raise ModelError(f"{file}: tensor {name} is missing, though the index names it here") from None
                found, dtype = tuple(part.get_shape()), part.get_dtype()
            if found != shape:
                raise ModelError(f"{file}: tensor {name} has shape {found}, config.json implies {shape}")
            if dtype not in types:
                supported = " and ".join(", ".join(types).rsplit(", ", 1))
                raise ModelError(f"{file}: tensor {name} has type {dtype}, supported are {supported}")

    def _check_names(self, expected: Container[str], quantized: bool) -> None:
        """Refuses tensors that would be left out, quantized ones by what config.json says of them."""
        left_over = sorted(name for name in self._file_of if is_left_over(name, expected))
        if not left_over:
            return
        packed = next((name for name in left_over if name.endswith(".qweight")), None)
        if packed is not None and not quantized:
            raise ModelError(
                f"{self.path / 'config.json'}: quantization_config is missing, though there is a tensor {packed} "
                "(older versions of AutoAWQ wrote quant_config.json instead)"
            )
        raise ModelError(f"{self._file_of[left_over[0]]}: tensor {left_over[0]} is not supported")

    @staticmethod
    def _open(file: Path):  # noqa: ANN205  (safetensors does not name its type)
        from safetensors import SafetensorError, safe_open

        try:
            return safe_open(file, framework="numpy")
        except FileNotFoundError:
            raise ModelError(f"{file}: no such file") from None
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file}: {error}") from None

    def _locate(self) -> dict[str, Path]:
        """Which file holds each tensor."""
        index = self.path / "model.safetensors.index.json"
        if index.exists():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict):
                raise ModelError(f"{index}: weight_map is missing")
            for name, file in weight_map.items():
                if not isinstance(file, str):
                    raise ModelError(f"{index}: weight_map.{name} is {json.dumps(file)}, expected the name of a file")
            return {name: self.path / file for name, file in weight_map.items()}
        single = self.path / "model.safetensors"
        with self._open(single) as f:
            return dict.fromkeys(f.keys(), single)

    def stored(self, name: str) -> np.ndarray:
        """One tensor as it is, finite. The file is opened and closed, so that its pages do not stay resident."""
        file = self._file_of[name]
        with self._open(file) as f:
            value = f.get_tensor(name)
        if not np.isfinite(value).all():
            raise ModelError(f"{file}: tensor {name} has values that are not finite")
        return value

    def tensor(self, name: str) -> np.ndarray:
        """One tensor as fp32, finite."""
        return self.stored(name).astype(np.float32)
