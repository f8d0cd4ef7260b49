"""A Hugging Face model directory: config.json and the tensors, one at a time.

Reads `config.json`, and `model.safetensors` or else the shards that `model.safetensors.index.json` names. Everything
the forward pass depends on comes from the file. What the forward pass does not implement is refused by name.

What only needs a `Config`, such as making a model file with random weights on a bare GPU machine, runs with numpy
alone: safetensors is imported where a checkpoint is opened.
"""

import json
import math
import re
import warnings
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path, PurePath
from typing import Any, TypeVar

import numpy as np

from formats.errors import ModelError, shown
from formats.fields import Fields, is_number, is_whole
from formats.files import check_file, read_json
from formats.gguf_file import parts_of
from formats.limits import LIMITS, Range
from formats.packing import FLOATS, Form, Load, Loose, PartError, unpack_words

with suppress(ImportError):
    import ml_dtypes  # noqa: F401  (teaches numpy the name "bfloat16")

DENSE = ("llama", "qwen3")
SPARSE = ("qwen3_moe",)  # some layers are mixtures of experts

# What a directory's files are called that an export reads, or copies.
INPUTS = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")


@dataclass(frozen=True)
class RopeScaling:
    """A rescaling of the RoPE frequencies (`rope_scaling`): (1 - s) / factor + s is what each is multiplied by.

    s is (x - low_freq_factor) / (high_freq_factor - low_freq_factor), clipped to 0..1. In llama3 x is how often a pair
    turns within the original context, in linear and yarn head_dim - i for pair i.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int
    kind: str = "llama3"  # or "linear", "yarn"
    attention_factor: float = 1.0  # what cos and sin are multiplied by; 1 in llama3 and linear


@dataclass(frozen=True)
class Moe:
    """The mixtures of experts of a `qwen3_moe` model: how many experts a layer has, and what each of them is."""

    n_experts: int
    n_active: int  # experts that a token goes to
    hidden_dim: int  # length inside an expert
    norm_topk_prob: bool  # weights of the active experts are divided by their sum
    dense_layers: tuple[int, ...] = ()  # in rising order: layers without experts, with a feed-forward block as in qwen3


@dataclass(frozen=True)
class Config:
    """The numbers of `config.json`, under the names that the programs use."""

    arch: str  # "llama", "qwen3" or "qwen3_moe"
    dim: int
    hidden_dim: int  # of the feed-forward block; in qwen3_moe of dense layers only
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
    moe: Moe | None = None  # of qwen3_moe
    rotation_block: int = 0  # a program rotates rows of the embedding, in blocks of so many (golden/rotation.py)

    @property
    def has_head_norms(self) -> bool:
        """Whether queries and keys are normalized, each head on its own."""
        return self.arch in ("qwen3", "qwen3_moe")

    def has_experts(self, layer: int) -> bool:
        """Whether a layer's feed-forward block is a mixture of experts."""
        return self.moe is not None and layer not in self.moe.dense_layers

    @property
    def q_dim(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.n_kv_heads * self.head_dim


ROPE_KINDS = ("llama3", "linear", "yarn")  # rescalings, by their numbers in a header, from 1 on


def linear(factor: float, context: int, head_dim: int) -> RopeScaling:
    """All frequencies are divided by factor. context: for the header alone."""
    return RopeScaling(factor, head_dim, head_dim + 1, context, "linear")


def yarn(
    factor: float,
    context: int,
    head_dim: int,
    theta: float,
    turns: tuple[float, float] = (32.0, 1.0),
    attention_factor: float | None = None,
    truncate: bool = True,
) -> RopeScaling:
    """YaRN (Peng et al. 2023, arXiv 2309.00071), as in transformers 5.24: `_compute_yarn_parameters`.

    Pairs that turn turns[0] times or more within the original context stay, those that turn turns[1] times or less are
    divided by factor; in between it goes linearly over the pairs. truncate: the ends are whole pairs.
    """
    first, last = (head_dim * math.log(context / (n * 2 * math.pi)) / (2 * math.log(theta)) for n in turns)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001
    if attention_factor is None:
        attention_factor = yarn_attention(factor)
    return RopeScaling(factor, head_dim - last, head_dim - first, context, "yarn", attention_factor)


def yarn_attention(factor: float, scale: float = 1.0) -> float:
    """What YaRN multiplies cos and sin by (the same, equation 22)."""
    return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0


def _read_yarn(rope: Fields, fields: Fields, head_dim: int, theta: float) -> RopeScaling:
    """YaRN's fields. What is missing, null or 0 is the default of transformers."""

    def number(name: str, limits: str, default: float) -> float:
        return rope.number(name, LIMITS[limits]) if rope.values.get(name) else default

    factor, given = rope.number("factor", LIMITS["rope_scaling factor"]), rope.values.get("attention_factor")
    scales = [number(name, "attention_factor", 0.0) for name in ("mscale", "mscale_all_dim")]
    attention = yarn_attention(factor)
    if given is not None:
        attention = rope.number("attention_factor", LIMITS["attention_factor"])
    elif all(scales):
        attention = yarn_attention(factor, scales[0]) / yarn_attention(factor, scales[1])
    name = "original_max_position_embeddings"
    outer = fields if fields.values.get(name) is not None else rope
    context = outer.whole(name, LIMITS[name], fields.values.get("max_position_embeddings"))
    turns = tuple(number(name, "high_freq_factor", default) for name, default in (("beta_fast", 32), ("beta_slow", 1)))
    if theta <= 1:
        raise ModelError(f"{fields.path}: rope_theta is {theta:g}, YaRN needs more than 1")
    found = yarn(factor, context, head_dim, theta, turns, attention, rope.flag("truncate", True))
    if not np.float32(found.high_freq_factor) > np.float32(found.low_freq_factor):
        pairs = f"{head_dim - found.high_freq_factor:g} and {head_dim - found.low_freq_factor:g}"
        rope.refuse("rope_type", f"beta_fast and beta_slow give the pairs {pairs}, expected a first and a later one")
    return found


def _read_rope(fields: Fields, head_dim: int) -> tuple[float, RopeScaling | None]:
    """(rope_theta, its rescaling), from the fields of config.json.

    transformers 4 writes rope_theta and rope_scaling, transformers 5 both into one object, rope_parameters. Where a
    config has both objects, rope_scaling replaces the other, unless it is empty; what is then missing comes from the
    fields outside (transformers 5.23, convert_rope_params_to_dict of modeling_rope_utils.py).
    """
    scaling, parameters = fields.object("rope_scaling"), fields.object("rope_parameters")
    rope = scaling if scaling.values else parameters

    for field, value in rope.values.items():
        if isinstance(value, dict):  # one object for each type of layer
            rope.refuse(field, "not supported")
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    theta = (rope if "rope_theta" in rope.values else fields).number("rope_theta", LIMITS["rope_theta"], 10000.0)
    found = None
    name = "original_max_position_embeddings"
    outer = fields if fields.values.get(name) is not None else rope  # the one outside goes before the one inside
    if kind == "linear":
        context = fields.whole("max_position_embeddings", LIMITS["max_seq_len"])
        found = linear(rope.number("factor", LIMITS["rope_scaling factor"]), context, head_dim)
    elif kind == "yarn":
        found = _read_yarn(rope, fields, head_dim, theta)
    elif kind == "llama3":
        found = RopeScaling(
            factor=rope.number("factor", LIMITS["rope_scaling factor"]),
            low_freq_factor=rope.number("low_freq_factor", LIMITS["low_freq_factor"]),
            high_freq_factor=rope.number("high_freq_factor", LIMITS["high_freq_factor"]),
            original_max_position_embeddings=outer.whole(name, LIMITS[name]),
        )
        if not np.float32(found.high_freq_factor) > np.float32(found.low_freq_factor):
            rope.refuse("high_freq_factor", "must be above low_freq_factor")
    elif kind != "default":
        supported = f"supported are default, {', '.join(ROPE_KINDS[:-1])} and {ROPE_KINDS[-1]}"
        if kind == "dynamic":
            supported += " (dynamic's frequencies depend on how a prompt was split)"
        raise ModelError(f"{fields.path}: {rope.inside}rope_type is {shown(kind)}: {supported}")
    place = rope if "partial_rotary_factor" in rope.values else fields
    part = place.values.get("partial_rotary_factor")
    if part is not None and (not is_number(part) or part != 1):
        place.refuse("partial_rotary_factor", "not supported")
    return theta, found


def _read_moe(fields: Fields, n_layers: int) -> Moe:
    """The fields of qwen3_moe. A layer i is dense if mlp_only_layers has it, or i + 1 is no multiple of the step."""
    name = "num_experts"
    if name not in fields.values and "num_local_experts" in fields.values:  # transformers 5 knows both
        name = "num_local_experts"
    n_experts = fields.whole(name, LIMITS["n_experts"])
    n_active = fields.whole("num_experts_per_tok", LIMITS["n_active"])
    if n_active > n_experts:
        fields.refuse("num_experts_per_tok", f"there are {n_experts} experts")
    step = fields.whole("decoder_sparse_step", LIMITS["n_layers"], 1)
    listed = fields.values.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(is_whole(i) and 0 <= i < n_layers for i in listed):
        fields.refuse("mlp_only_layers", f"expected a list of layers, 0 to {n_layers - 1}")
    return Moe(
        n_experts=n_experts,
        n_active=n_active,
        hidden_dim=fields.whole("moe_intermediate_size", LIMITS["moe_hidden_dim"]),
        norm_topk_prob=fields.flag("norm_topk_prob"),
        dense_layers=tuple(i for i in range(n_layers) if i in listed or (i + 1) % step),
    )


def read_config(hf_dir: Path, quantized: bool = False, archs: tuple[str, ...] = DENSE) -> Config:
    """`config.json` of a Hugging Face directory. Raises ModelError for anything this project does not run.

    quantized: the caller has looked at `quantization_config` and can read such weights. archs: those the caller runs.
    """
    path = Path(hf_dir) / "config.json"
    raw = Fields(path, read_json(path))
    arch = raw.values.get("model_type")
    if arch not in archs:
        of_moe = "; python -m export moe takes it" if arch in SPARSE else ""
        raw.refuse("model_type", f"supported {'is' if len(archs) == 1 else 'are'} {' and '.join(archs)}{of_moe}")
    n_layers = raw.whole("num_hidden_layers", LIMITS["n_layers"])
    kinds = raw.values.get("layer_types")
    slides = raw.flag("use_sliding_window") and kinds is None and raw.values.get("sliding_window", 4096) is not None
    if slides and raw.whole("max_window_layers", Range(0, 2**31 - 1), 28) < n_layers:  # those behind slide
        raw.refuse("use_sliding_window", "not supported")
    for field in ("attention_bias", "mlp_bias"):
        if raw.flag(field):
            raw.refuse(field, "not supported")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        different = sorted({k if isinstance(k, str) else shown(k) for k in kinds}) if isinstance(kinds, list) else kinds
        raw.refuse("layer_types", "only full_attention is supported", different)
    if raw.values.get("hidden_act", "silu") != "silu":
        raw.refuse("hidden_act", "only silu is supported")
    if raw.values.get("quantization_config") is not None and not quantized:
        raw.object("quantization_config").refuse("quant_method", "expected unquantized weights")

    dim, n_heads = raw.whole("hidden_size", LIMITS["dim"]), raw.whole("num_attention_heads", LIMITS["n_heads"])
    head_dim = raw.whole("head_dim", LIMITS["head_dim"], 128 if arch == "qwen3" else dim // n_heads)
    rope_theta, rope_scaling = _read_rope(raw, head_dim)
    config = Config(
        arch=arch,
        dim=dim,
        hidden_dim=raw.whole("intermediate_size", LIMITS["hidden_dim"]),
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=raw.whole("num_key_value_heads", LIMITS["n_kv_heads"], n_heads),
        head_dim=head_dim,
        vocab_size=raw.whole("vocab_size", LIMITS["vocab_size"]),
        max_seq_len=raw.whole("max_position_embeddings", LIMITS["max_seq_len"]),
        tied=raw.flag("tie_word_embeddings"),
        norm_eps=raw.number("rms_norm_eps", LIMITS["norm_eps"], 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        moe=_read_moe(raw, n_layers) if arch in SPARSE else None,
    )
    if config.n_heads % config.n_kv_heads:
        raw.refuse("num_key_value_heads", f"does not divide num_attention_heads {config.n_heads}")
    if config.head_dim % 2:
        raw.refuse("head_dim", "RoPE needs an even number", config.head_dim)
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
        if c.has_head_norms:
            shapes[p + "self_attn.q_norm.weight"] = (c.head_dim,)
            shapes[p + "self_attn.k_norm.weight"] = (c.head_dim,)
        shapes[p + "post_attention_layernorm.weight"] = (c.dim,)
        width, blocks = c.hidden_dim, ["mlp."]
        if c.moe is not None and c.has_experts(i):
            shapes[p + "mlp.gate.weight"] = (c.moe.n_experts, c.dim)  # the router
            width, blocks = c.moe.hidden_dim, [f"mlp.experts.{e}." for e in range(c.moe.n_experts)]
        for block in blocks:
            shapes[p + block + "gate_proj.weight"] = (width, c.dim)
            shapes[p + block + "up_proj.weight"] = (width, c.dim)
            shapes[p + block + "down_proj.weight"] = (c.dim, width)
    shapes["model.norm.weight"] = (c.dim,)
    if not c.tied:
        shapes["lm_head.weight"] = (c.vocab_size, c.dim)
    return shapes


Made = TypeVar("Made")
ONE_BYTE = {"F8_E4M3": "float8_e4m3fn", "F8_E8M0": "u1"}  # numpy's, of safetensors' types
EMBEDDING, CLASSIFIER = "model.embed_tokens.weight", "lm_head.weight"
COMPARED_VALUES = 1 << 24  # of two matrices at a time


# Names of tensors -> shape, None: any, and types that are read, none: all.
Expected = dict[str, tuple[tuple[int, ...] | None, tuple[str, ...]]]


def is_left_over(name: str, expected: Container[str]) -> bool:
    """Whether a tensor changes what a layer or the classifier computes, in a way that this project does not."""
    if name in expected or not name.startswith(("model.layers.", "lm_head.")):
        return False
    # old checkpoints store the frequencies of RoPE, some the classifier though it is the embedding, some the scales of
    # a quantized cache of keys and values, which is not the file's business here
    return name != "lm_head.weight" and not name.endswith((".rotary_emb.inv_freq", "attn.k_scale", "attn.v_scale"))


def input_files(source: Path, text: Path | None = None) -> list[Path]:
    """The files that an export of a directory (or of a GGUF file) reads or copies; text: it is calibrated on that.

    Raises ModelError if parts of a split GGUF file are missing.
    """
    source = Path(source)
    files = [file for pattern in INPUTS for file in source.glob(pattern)] if source.is_dir() else parts_of(source)
    return files if text is None else [*files, Path(text)]


# The name of a model on Hugging Face, or the address of its page.
_HUGGING_FACE = re.compile(r"(?:https?:/+huggingface\.co/)?(([A-Za-z\d][\w.-]*)/([A-Za-z\d][\w.-]*))", re.ASCII)


# What there is where a model in Hugging Face's format is not, and what to do.
_INSTEAD = {
    "adapter_config.json": "a LoRA adapter, which is merged into its base model first (merge_and_unload of peft)",
    "*.pth": "Meta's own format: take the Hugging Face directory of the same model",
    "pytorch_model*.bin": "PyTorch's format: load it with transformers, and save it with save_pretrained",
    "model-*-of-*.safetensors": "shards: model.safetensors.index.json belongs beside them",
}


def no_such_file(path: Path) -> ModelError:
    """The error for a file that is missing in a model's directory, by what else lies there."""
    if path.with_name("model.safetensors.index.json").exists():
        return ModelError(f"{path}: no such file, though the index names it: the download is not complete")
    for pattern, what in _INSTEAD.items():
        if found := sorted(path.parent.glob(pattern)):
            return ModelError(f"{path}: no such file; there is {found[0].name}, {what}")
    return ModelError(f"{path}: no such file")


def check_directory(path: Path) -> None:
    """Raises ModelError if a model's directory is not there, which says how to download one by its name.

    Also if it has no config.json.
    """
    if path.is_dir():
        if not (path / "config.json").exists():
            raise no_such_file(path / "config.json")
        return
    name, hint = _HUGGING_FACE.fullmatch(str(path)), ""
    if name and not path.exists() and not Path(name[2]).exists():
        command = f".venv/bin/hf download {name[1]} --local-dir {name[3].lower()}"
        hint = f"; a model of Hugging Face has to be downloaded first: {command}"
    raise ModelError(f"{path}: no such directory{hint}")


def is_inside(file: str) -> bool:
    """Whether a name of an index stays in its directory; links that lie there may lead anywhere."""
    path = PurePath(file)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in file


@lru_cache(maxsize=2)
def _places(file: Path, _mtime_ns: int) -> tuple[int, dict[str, Any]]:
    """Where a safetensors file's tensors begin, and its header, which whoever opened the file has checked."""
    with file.open("rb") as f:
        size = int.from_bytes(f.read(8), "little")
        return 8 + size, json.loads(f.read(size))


def read_bytes(file: Path, name: str) -> np.ndarray:
    """A tensor of numbers of one byte, FP8 or exponents, of which the package has no array for numpy."""
    start, header = _places(file, file.stat().st_mtime_ns)
    place = header[name]
    begin, end = place["data_offsets"]
    return np.fromfile(file, ONE_BYTE[place["dtype"]], end - begin, offset=start + begin).reshape(place["shape"])


class Checkpoint:
    """The tensors of a Hugging Face directory, read from disk when asked for.

    Opening checks that every tensor is there with the right shape and type, and that layers and classifier have no
    others, such as biases. It reads none, unless there is a classifier beside `tie_word_embeddings: true`: if the two
    matrices differ in any bit, the model is not tied, as in transformers 5.23 (tie_weights of modeling_utils.py); or
    unless there are GPTQ's zero points.
    storage: of a quantized checkpoint, by module; a form stands for all. None: weights are floating-point numbers, as
    those of other directories are whose tensors say so. archs: architectures that the caller runs; others are refused.
    """

    def __init__(
        self,
        hf_dir: Path | str,
        storage: Callable[[str], Form] | Form | None = None,
        archs: tuple[str, ...] = DENSE,
    ):
        self.path = Path(hf_dir)
        self.config_path = self.path / "config.json"
        check_directory(self.path)
        self.config = read_config(self.path, quantized=storage is not None, archs=archs)
        self._file_of = self._locate()
        self._part_of = dict(self._find_fused())  # of tensors that are there as parts of others: which, and where in it
        if self.config.tied and EMBEDDING not in self._file_of and CLASSIFIER in self._file_of:  # as in transformers
            self._part_of[EMBEDDING] = CLASSIFIER, ()
        elif self.config.tied and CLASSIFIER in self._file_of:
            self._check_tensors({EMBEDDING: ((self.config.vocab_size, self.config.dim), FLOATS)})
            if self._differ(EMBEDDING, CLASSIFIER):
                self.config = replace(self.config, tied=False)
        form_of = storage if storage is None or callable(storage) else lambda _module: storage
        self._shape_of = tensor_shapes(self.config)
        self.forms = {} if form_of is None else dict(self._find_forms(form_of))  # of quantized matrices, by name
        expected: Expected = {}
        for name, shape in self._shape_of.items():
            if name in self._part_of:
                whole, index = self._part_of[name]
                expected[whole] = self._fused_shape(whole) if index else shape, FLOATS
                continue
            if name not in self.forms:
                expected[name] = shape, FLOATS
                continue
            stem = name.removesuffix("weight")
            for part, part_shape, types, needed in self.forms[name].parts(*shape):
                if needed or stem + part in self._file_of:
                    expected[stem + part] = part_shape, types
        self._check_names(expected, storage is not None)
        self._check_tensors(expected)
        self._settle_zero_points()

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        return name in self._file_of or name in self._part_of

    def _find_fused(self) -> Iterator[tuple[str, tuple[str, tuple[int | slice, ...]]]]:
        """Matrices of experts that are in one tensor for a layer, as transformers 5 has them in memory.

        gate_up_proj (n_experts, 2 * moe.hidden_dim, dim), gate's rows first; down_proj (n_experts, dim, hidden_dim).
        """
        moe = self.config.moe
        for i in range(self.config.n_layers if moe else 0):
            layer = f"model.layers.{i}.mlp.experts."
            rows = {"gate": slice(moe.hidden_dim), "up": slice(moe.hidden_dim, None), "down": slice(None)}
            for part, index in rows.items():
                whole = f"{layer}{'down' if part == 'down' else 'gate_up'}_proj"
                if whole in self._file_of:
                    for expert in range(moe.n_experts):
                        yield f"{layer}{expert}.{part}_proj.weight", (whole, (expert, index))

    def _fused_shape(self, whole: str) -> tuple[int, ...]:
        c, moe = self.config, self.config.moe
        return (moe.n_experts, *((c.dim, moe.hidden_dim) if "down" in whole else (2 * moe.hidden_dim, c.dim)))

    def _find_forms(self, form_of: Callable[[str], Form]) -> Iterator[tuple[str, Form]]:
        """Name and form of each matrix that is quantized.

        Those of layers are, unless they are there as they were; those outside layers, and routers, where all parts are.
        """
        for name, shape in self._shape_of.items():
            if len(shape) != 2:
                continue
            module = name.removesuffix(".weight")
            form = form_of(module)
            needed = [f"{module}.{part}" for part, _, _, needed in form.parts(*shape) if needed]
            if ".layers." not in name or name.endswith("mlp.gate.weight"):
                is_quantized = all(map(self.has, needed))
            else:
                is_quantized = not self.has(name) or any(self.has(part) for part in needed if part != name)
            if is_quantized:
                yield name, form

    def _settle_zero_points(self) -> None:
        """Symmetric zero points, all the middle code, tell how GPTQ's are stored, whatever config.json says.

        Raises ModelError for `sym: true` with others.
        """
        gptq = {name: form for name, form in self.forms.items() if getattr(form, "method", "") == "gptq"}
        found: set[int] = set()  # what the middle code has above what is stored
        stored = {f"{name.removesuffix('weight')}qzeros": form for name, form in gptq.items()}
        for file in {self._file_of[name] for name in stored}:
            with self._open(file) as f:  # once, as an index of many experts takes its time
                for name, form in stored.items():
                    if self._file_of[name] != file:
                        continue
                    zeros = np.unique(unpack_words(f.get_tensor(name).T, form.bits)).tolist()
                    values = {(1 << (form.bits - 1)) - zero for zero in zeros}
                    if form.symmetric and values not in ({0}, {1}):
                        why = "has zero points beside the middle code, though config.json says sym: true"
                        raise ModelError(f"{file}: tensor {name} {why}")
                    found |= values
        said = {form.added for form in gptq.values()}
        if found in ({0}, {1}) and found != said:
            (added,) = found
            self.forms |= {name: form._replace(added=added) for name, form in gptq.items()}
            warnings.warn(
                f"{self.path}: its zero points are those of gptq{'' if added else '_v2'}, config.json says otherwise: "
                "read as they are",
                stacklevel=2,
            )

    def _check_tensors(self, expected: Expected) -> None:
        """Refuses tensors that are missing or have another shape or type. Each file is opened once."""
        names_of: dict[Path, list[str]] = {}
        for name in expected:
            if name not in self._file_of:
                raise ModelError(f"{self.path}: tensor {name} is missing")
            names_of.setdefault(self._file_of[name], []).append(name)
        for file, names in names_of.items():
            with self._open(file) as f:
                for name in names:
                    self._check_tensor(file, name, self._part(f, file, name), *expected[name])

    @staticmethod
    def _check_tensor(file: Path, name: str, part: Any, shape: tuple[int, ...] | None, types: tuple[str, ...]) -> None:
        found, dtype = tuple(part.get_shape()), part.get_dtype()
        loose = isinstance(shape, Loose) and [n for n in found if n != 1] == [n for n in shape if n != 1]
        if shape is not None and found != shape and not loose:
            raise ModelError(f"{file}: tensor {name} has shape {found}, config.json implies {tuple(shape)}")
        if types and dtype not in types:
            supported = " and ".join(", ".join(types).rsplit(", ", 1))
            raise ModelError(f"{file}: tensor {name} has type {dtype}, supported are {supported}")

    @staticmethod
    def _part(f: Any, file: Path, name: str) -> Any:
        """A tensor of an open file, not read."""
        from safetensors import SafetensorError

        try:
            return f.get_slice(name)
        except SafetensorError:
            raise ModelError(f"{file}: tensor {name} is missing, though the index names it here") from None

    def _differ(self, a: str, b: str) -> bool:
        """Whether two matrices differ in shape, type or any bit. A block of rows of each is in memory at a time."""
        with self._open(self._file_of[a]) as f, self._open(self._file_of[b]) as g:
            parts = self._part(f, self._file_of[a], a), self._part(g, self._file_of[b], b)
            shape, other = (tuple(part.get_shape()) for part in parts)
            if shape != other or parts[0].get_dtype() != parts[1].get_dtype():
                return True
            rows = max(1, COMPARED_VALUES // shape[1])
            blocks = [slice(i, min(i + rows, shape[0])) for i in range(0, shape[0], rows)]
            return any(parts[0][block].tobytes() != parts[1][block].tobytes() for block in blocks)

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
    def _open(file: Path) -> Any:
        """An open safetensors file; its type has no name there."""
        from safetensors import SafetensorError, safe_open

        if not file.exists():
            raise no_such_file(file)
        check_file(file)
        try:
            return safe_open(file, framework="numpy")
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file}: {error}") from None

    def _locate(self) -> dict[str, Path]:
        """Which file holds each tensor. A single file goes before an index, as in transformers: the index is stale."""
        single, index = self.path / "model.safetensors", self.path / "model.safetensors.index.json"
        if single.exists() or not index.exists():
            with self._open(single) as f:
                found = dict.fromkeys(f.keys(), single)
            if index.exists():
                warnings.warn(f"{index}: not followed, as there is a {single.name}", stacklevel=2)
            return found
        fields = Fields(index, read_json(index))
        if fields.values.get("weight_map") is None:
            raise ModelError(f"{index}: weight_map is missing")
        weight_map = fields.object("weight_map").values
        for name, file in weight_map.items():
            if not isinstance(file, str):
                raise ModelError(f"{index}: weight_map.{name} is {shown(file)}, expected the name of a file")
            if not is_inside(file):
                raise ModelError(f"{index}: weight_map.{name} is {shown(file)}, expected a file of this directory")
        return {name: self.path / file for name, file in weight_map.items()}

    def stored(self, name: str) -> np.ndarray:
        """One tensor as it is, finite. The file is opened and closed, so that its pages do not stay resident."""
        whole, index = self._part_of.get(name, (name, ()))
        file = self._file_of[whole]
        with self._open(file) as f:
            part = self._part(f, file, whole)
            one_byte = part.get_dtype() in ONE_BYTE
            value = None if one_byte else part[index] if index else f.get_tensor(whole)
        value = read_bytes(file, name) if one_byte else value
        if not np.isfinite(value).all():
            raise ModelError(f"{file}: tensor {name} has values that are not finite")
        return value

    def from_parts(self, name: str, make: Callable[[Load, tuple[int, ...]], Made]) -> Made:
        """What make(load, shape) makes of the parts of a quantized matrix. Raises ModelError for a PartError."""
        stem = name.removesuffix("weight")

        def load(part: str) -> np.ndarray | None:
            return self.stored(stem + part) if self.has(stem + part) else None

        try:
            return make(load, self._shape_of[name])
        except PartError as error:
            part, what = error.args
            raise ModelError(f"{self.path}: tensor {stem}{part} {what}") from None

    def tensor(self, name: str) -> np.ndarray:
        """One tensor as fp32, finite; of a quantized matrix the weights that it stands for."""
        if name not in self.forms:
            return self.stored(name).astype(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            value = self.from_parts(name, self.forms[name].weights)
        if not np.isfinite(value).all():
            raise ModelError(f"{self.path}: {name} has values that are not finite")
        return value.astype(np.float32, copy=False)
