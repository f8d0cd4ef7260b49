"""What an exporter made, as a GGUF file for llama.cpp, ik_llama.cpp and ollama: `--gguf-out FILE`.

The tensors are those of the model file, so codes are not rounded again. A block of Q8_0, Q4_0 and Q4_1 has 32 codes and
an fp16 scale, Q4_1's a minimum as well (ggml-common.h of llama.cpp), so a group becomes several blocks of one scale:

    8 bits                            Q8_0    code * scale; scales that are fp32 in the model file are rounded to fp16
    4 bits, all zero points 8         Q4_0    (code - 8) * scale; scales as above
    4 bits, other zero points         Q4_1    code * scale + minimum, where -zero * scale is rounded to fp16
    all else                          F16     the weights that the matrix stands for, rounded to fp16
    norms, routers                    F32     as they are

"All else" is what has no such blocks: 2 bits, 2:4 sparse, MXFP8, embeddings in fp16, groups that are no multiple of 32,
and matrices whose inputs are gathered (desc_act). Rows of q and k are as llama.cpp rotates them, in adjacent pairs for
`llama`, in halves for `qwen3` and `qwen3moe`. Metadata are those that formats/gguf_model.py and
formats/gguf_tokenizer.py read. How activations are rounded is not kept: llama.cpp does it in its own way.
"""

import math
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import (
    GGML_QUANT_SIZES,
    GGML_QUANT_VERSION,
    GGMLQuantizationType,
    GGUFType,
    GGUFWriter,
    LlamaFileType,
    RopeScalingType,
)
from gguf.gguf_writer import WriterState

from export.chat_template import find_source
from export.tokenizer import DIGITS_PATTERN, GPT2_PATTERN, Refusal, pcre2_pattern, read_bos, read_files, read_steps
from formats.checkpoint import (
    DENSE,
    SPARSE,
    Config,
    ModelError,
    RopeScaling,
    input_files,
    read_config,
    yarn,
    yarn_attention,
)
from formats.files import check_output, replacing
from formats.gguf_model import ROPE_FREQS, gguf_name, rope_divisors
from formats.gguf_tokenizer import CONTROL, END_TOKENS, NORMAL, PRE_TOKENIZERS, SPECIAL_TOKENS, UNUSED, USER_DEFINED
from formats.model_file import Generation, read_generation
from formats.moe import expert_shapes, router_shapes
from formats.source import is_gguf, open_gguf
from formats.tensors import matrix_shapes, norm_shapes
from golden.awq import AWQ, unpack
from golden.channel_scaling import input_of
from golden.forward import F32, F64, hf_name, in_halves, in_pairs
from golden.gptq import F16, GPTQ
from golden.moe import MoE
from golden.mx import MX, dequantize_mx
from golden.schemes import FileScheme, read_file

Kind = GGMLQuantizationType
BLOCK = 32  # codes
MIDDLE = 8  # the zero point of Q4_0
ARCHITECTURES = {"llama": "llama", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}
FILE_TYPES = {Kind.Q8_0: LlamaFileType.MOSTLY_Q8_0, Kind.Q4_0: LlamaFileType.MOSTLY_Q4_0,
              Kind.Q4_1: LlamaFileType.MOSTLY_Q4_1, Kind.F16: LlamaFileType.MOSTLY_F16}  # fmt: skip
EXPERTS = {"gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"), "down_proj": ("ffn_down_exps",)}


# ----------------------------------------------------------------------------
# Matrices


class Codes(NamedTuple):
    """A matrix (n_out, n_in) on a grid: (code - zero) * scale."""

    bits: int  # 8: int8 codes, no zero points; 4: uint8 codes
    group: int  # weights along a row that share a scale
    zeros: np.ndarray | int  # (n_out, n_groups), or one for all
    load: Callable[[], tuple[np.ndarray, np.ndarray]]  # codes (n_out, n_in) and scales (n_out, n_groups)


class Stored(NamedTuple):
    """A tensor of the GGUF file. values: bytes (..., n_bytes) of blocks, otherwise numbers of the kind."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    values: Callable[[], np.ndarray]


def is_gathered(scheme: GPTQ, name: str) -> bool:
    """Whether the inputs of a matrix are in another order than the model's."""
    order = scheme.orders.get(input_of(name)) if name.startswith("layers.") else None
    return order is not None and not np.array_equal(order, np.arange(len(order)))


def codes_of(scheme: FileScheme, name: str, n_in: int) -> Codes | None:
    """The codes of a matrix that is no expert's; None where it has none, or none that GGUF has blocks for."""
    if isinstance(scheme, AWQ):
        if not name.startswith("layers."):
            return None
        m = scheme.matrix(name)
        return Codes(4, scheme.group_size, unpack(m.qzeros).T, lambda: (unpack(m.qweight).T, m.scales.T))
    if isinstance(scheme, GPTQ):
        form = scheme.layout.of(name)
        if form.bits == 2 or form.sparse or form.int8_scales or is_gathered(scheme, name):
            return None
        zeros = 0 if form.bits == 8 else scheme.zeros(name)
        return Codes(form.bits, form.group or n_in, zeros, lambda: scheme.stored(name)[1:3])
    if isinstance(scheme, MoE) and scheme.layout.is_uniform:
        return expert_codes(scheme, name, n_in)
    if not hasattr(scheme, "matrix"):  # weights are stored as they are
        return None
    m = scheme.matrix(name)
    return Codes(8, n_in // m.scales.shape[1], 0, lambda: (m.codes, m.scales))


def expert_codes(scheme: MoE, name: str, n_in: int) -> Codes | None:
    """The same of the matrices of a step's experts, their rows one behind the other, (E * n_out, n_in)."""
    if scheme.layout.format == "mxfp8":
        return None
    bits = 4 if scheme.layout.format == "a8w4" else 8  # a ladder's codes are expanded

    def load() -> tuple[np.ndarray, np.ndarray]:
        found = scheme.experts(name)
        codes = found.codes if bits == 8 else (found.codes + np.int8(MIDDLE)).astype(np.uint8)
        return codes.reshape(-1, n_in), found.scales.reshape(codes.shape[0] * codes.shape[1], -1)

    return Codes(bits, scheme.layout.group or scheme.group_size or n_in, MIDDLE, load)


def kind_of(codes: Codes | None) -> Kind:
    """How GGUF stores a matrix."""
    if codes is None or codes.group % BLOCK:
        return Kind.F16
    if codes.bits == 8:
        return Kind.Q8_0
    return Kind.Q4_0 if np.all(codes.zeros == MIDDLE) else Kind.Q4_1


def in_half(name: str, values: np.ndarray) -> np.ndarray:
    """Rounded to fp16. Raises ModelError for values that it does not hold."""
    half = values.astype(F16)
    if not np.isfinite(half).all():
        raise ModelError(f"--gguf-out: {name} has {np.abs(values).max():.6g}, fp16 ends at 65504")
    return half


def blocks(name: str, codes: Codes, kind: Kind) -> np.ndarray:
    """The bytes of a matrix, (n_out, n_in / 32 * bytes of a block) uint8."""
    values, scales = codes.load()
    times = codes.group // BLOCK
    heads = [np.repeat(in_half(name, scales), times, axis=1)]
    if kind == Kind.Q4_1:
        heads.append(np.repeat(in_half(name, -codes.zeros.astype(F32) * scales.astype(F32)), times, axis=1))
    cells = np.ascontiguousarray(values).view(np.uint8).reshape(-1, BLOCK)
    if kind != Kind.Q8_0:
        cells = cells[:, : BLOCK // 2] | cells[:, BLOCK // 2 :] << np.uint8(4)
    parts = [np.ascontiguousarray(head).reshape(-1, 1).view(np.uint8) for head in heads]
    return np.concatenate([*parts, cells], axis=1).reshape(len(values), -1)


def dense(scheme: FileScheme, name: str) -> np.ndarray:
    """What a matrix stands for, (n_out, n_in) fp32; experts', and any of a pure file, one behind the other."""
    if isinstance(scheme, MoE) and (scheme.layout.is_uniform or ".moe." in name):
        found = scheme.experts(name)
        if isinstance(found, MX):
            values = dequantize_mx(found).astype(F32)
        else:
            scales = found.scales.reshape(*found.codes.shape[:2], -1, 1)
            values = (found.codes.reshape(*scales.shape[:3], -1) * scales).reshape(found.codes.shape)
        return values.reshape(-1, values.shape[-1])
    if not hasattr(scheme, "dense") or (isinstance(scheme, AWQ) and not name.startswith("layers.")):
        return scheme.vector(name)
    weight = scheme.dense(name)
    if isinstance(scheme, GPTQ) and is_gathered(scheme, name):
        gathered, weight = weight, np.empty_like(weight)
        weight[:, scheme.orders[input_of(name)]] = gathered
    return weight


def rotated(scheme: FileScheme, name: str, rows: np.ndarray) -> np.ndarray:
    """A step's rows in the order in which llama.cpp rotates them, if it does."""
    in_pairs_there = scheme.config.arch == "llama"
    if in_pairs_there == scheme.interleaved:
        return rows
    return (in_pairs if in_pairs_there else in_halves)(scheme.config, name, rows)


def matrix_values(scheme: FileScheme, name: str, codes: Codes | None, kind: Kind) -> np.ndarray:
    """A matrix as the file has it: bytes of blocks, or fp16."""
    values = in_half(name, dense(scheme, name)) if kind == Kind.F16 else blocks(name, codes, kind)
    return rotated(scheme, name, values)


def expert_values(
    scheme: FileScheme, name: str, codes: Codes | None, kind: Kind, n_experts: int, n_parts: int, i: int
) -> np.ndarray:
    """Part i of n of every expert's matrix, (n_experts, n_out / n_parts, ..)."""
    values = matrix_values(scheme, name, codes, kind)
    return np.split(values.reshape(n_experts, -1, values.shape[-1]), n_parts, axis=1)[i]


def stored_tensors(scheme: FileScheme) -> Iterator[Stored]:
    """Every tensor of the file."""
    c = scheme.config
    if c.rope_scaling is not None and c.rope_scaling.kind == "llama3":
        freq = F64(F32(c.rope_theta)) ** (-np.arange(0, c.head_dim, 2) / c.head_dim)
        yield Stored(ROPE_FREQS, freq.shape, Kind.F32, lambda: rope_divisors(c.rope_scaling, freq))
    for name, shape in norm_shapes(c):
        yield Stored(gguf_name(hf_name(c, name)), shape, Kind.F32, lambda n=name: rotated(scheme, n, scheme.vector(n)))
    for name, shape in matrix_shapes(c):
        codes = codes_of(scheme, name, shape[1])
        kind = kind_of(codes)
        yield Stored(gguf_name(hf_name(c, name)), shape, kind, partial(matrix_values, scheme, name, codes, kind))
    if c.moe is None:
        return
    for name, shape in router_shapes(c):
        yield Stored(f"blk.{name.split('.')[1]}.ffn_gate_inp.weight", shape, Kind.F32, partial(scheme.vector, name))
    for name, (e, n_out, n_in) in expert_shapes(c):
        codes = expert_codes(scheme, name, n_in)
        kind, (_, layer, _, part) = kind_of(codes), name.split(".")
        n = len(EXPERTS[part])  # gate and up of an expert are one matrix here

        for i, stored in enumerate(EXPERTS[part]):
            values = partial(expert_values, scheme, name, codes, kind, e, n, i)
            yield Stored(f"blk.{layer}.{stored}.weight", (e, n_out // n, n_in), kind, values)


# ----------------------------------------------------------------------------
# Metadata


def pre_tokenizer(files: Any, refuse: Refusal) -> str:
    """llama.cpp's name of a pre-tokenizer. Raises ValueError if it has none that is known here."""
    found = [pattern for pattern, _ in read_steps(files.tokenizer, refuse)]
    merges = bool(files.tokenizer["model"].get("ignore_merges"))
    known = {name: [pre.pattern] for name, pre in PRE_TOKENIZERS.items()}
    for name, steps in [*known.items(), ("smollm", [DIGITS_PATTERN[True], GPT2_PATTERN])]:
        if [pcre2_pattern(step) for step in steps] == found and PRE_TOKENIZERS[name].ignore_merges == merges:
            return name
    raise refuse("pre_tokenizer", files.tokenizer["pre_tokenizer"], "has no name in llama.cpp that is known here")


def add_tokenizer(writer: GGUFWriter, source: Path, vocab_size: int, generation: Generation) -> None:
    """The keys tokenizer.*. Raises ValueError for a tokenizer that they cannot express."""
    files = read_files(source)
    refuse, model = Refusal(files.path), files.tokenizer["model"]
    added = {token["content"]: token for token in files.tokenizer.get("added_tokens") or []}
    ids = model["vocab"] | {name: token["id"] for name, token in added.items()}
    names, types = [f"[PAD{i}]" for i in range(vocab_size)], [UNUSED] * vocab_size
    for name, i in ids.items():
        special = added[name]["special"] if name in added else None
        names[i], types[i] = name, NORMAL if special is None else CONTROL if special else USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer(files, refuse))
    writer.add_token_list(names)
    writer.add_token_types(types)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in model["merges"]])
    bos_id, add_bos = read_bos(files.tokenizer, files.config, ids, refuse)
    writer.add_add_bos_token(add_bos)
    others = {"bos_token": bos_id if bos_id >= 0 else generation.bos_id}
    for field, key in SPECIAL_TOKENS.items():
        token = files.config.get(field)
        token_id = others.get(field, ids.get(token["content"] if isinstance(token, dict) else token, -1))
        if token_id >= 0 and field != "eos_token":
            writer.add_uint32(f"tokenizer.ggml.{key}", token_id)
    # llama.cpp ends at one id that the file calls eos, one eot and one eom, and at control tokens by their names.
    first, *more = generation.eos_ids or [None]
    unnamed = [i for i in more if types[i] != CONTROL or names[i] not in END_TOKENS]
    for key, i in zip(("eos", "eot", "eom"), [first, *unnamed], strict=False):
        if i is not None:
            writer.add_uint32(f"tokenizer.ggml.{key}_token_id", i)
    if len(unnamed) > 2:
        listed = ", ".join(map(str, unnamed[2:]))
        warnings.warn(f"--gguf-out: a text also ends at the ids {listed}, which a GGUF file cannot say", stacklevel=2)
    if template := find_source(source, files.config):
        writer.add_chat_template(template)


def add_parameters(writer: GGUFWriter, config: Config, generation: Generation) -> None:
    """Dimensions, RoPE and how the model likes to be sampled."""
    c, g = config, generation
    writer.add_vocab_size(c.vocab_size)
    writer.add_context_length(c.max_seq_len)
    writer.add_embedding_length(c.dim)
    writer.add_block_count(c.n_layers)
    writer.add_feed_forward_length(c.hidden_dim)
    writer.add_head_count(c.n_heads)
    writer.add_head_count_kv(c.n_kv_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_rope_dimension_count(c.head_dim)
    writer.add_rope_freq_base(c.rope_theta)
    if (s := c.rope_scaling) is not None and s.kind != "llama3":  # that is a tensor
        writer.add_rope_scaling_type(RopeScalingType(s.kind))
        writer.add_rope_scaling_factor(s.factor)
        writer.add_rope_scaling_orig_ctx_len(s.original_max_position_embeddings)
        if s.kind == "yarn":
            writer.add_rope_scaling_attn_factors(s.attention_factor / yarn_attention(s.factor))
    else:
        writer.add_rope_scaling_type(RopeScalingType.NONE)
    writer.add_layer_norm_rms_eps(c.norm_eps)
    if c.moe is not None:
        writer.add_expert_count(c.moe.n_experts)
        writer.add_expert_used_count(c.moe.n_active)
        writer.add_expert_feed_forward_length(c.moe.hidden_dim)
    if g.temperature > 0:
        writer.add_sampling_temp(g.temperature)
        writer.add_sampling_top_p(g.top_p)
        writer.add_sampling_top_k(g.top_k)
        writer.add_sampling_min_p(g.min_p)
    if g.repetition_penalty != 1:
        writer.add_sampling_penalty_repeat(g.repetition_penalty)


def default_yarn(config: Config) -> RopeScaling:
    """The YaRN of a model without fields of its own but the attention factor."""
    c, s = config, config.rope_scaling
    return yarn(
        s.factor, s.original_max_position_embeddings, c.head_dim, c.rope_theta, attention_factor=s.attention_factor
    )


def check_config(path: Path, config: Config) -> None:
    """Raises ModelError for a model that llama.cpp would run as another one."""
    why, s = None, config.rope_scaling
    if s is not None and s.kind == "llama3" and config.arch != "llama":
        why = f"rope_scaling llama3, which llama.cpp has for llama alone, not for {config.arch}"
    elif s is not None and s.kind == "yarn" and s != default_yarn(config):
        why = "rope_scaling yarn with beta_fast, beta_slow or truncate other than 32, 1 and true, which llama.cpp takes"
    elif config.moe is not None and config.moe.dense_layers:
        why = f"layer {config.moe.dense_layers[0]} without experts, llama.cpp's qwen3moe has them in every layer"
    elif config.moe is not None and not config.moe.norm_topk_prob:
        why = "norm_topk_prob false, llama.cpp's qwen3moe always normalizes"
    if why:
        raise ModelError(f"{path}: --gguf-out cannot express {why}")


# ----------------------------------------------------------------------------
# The file


def prepare(source: Path, out: Path, gguf_out: Path, with_tokenizer: bool) -> GGUFWriter:
    """The file's metadata, made before anything is exported. Raises ValueError for what a GGUF file cannot express."""
    if gguf_out.resolve() == out.resolve():
        raise ModelError(f"{gguf_out}: is the model file, --gguf-out needs another place")
    check_output(gguf_out, input_files(source))
    if not gguf_out.parent.is_dir():
        raise ModelError(f"{gguf_out}: cannot write: {gguf_out.parent} is no directory")
    if is_gguf(source):
        config, generation = open_gguf(source).config, open_gguf(source).generation
    else:
        config = read_config(source, quantized=True, archs=(*DENSE, *SPARSE))
        with warnings.catch_warnings(action="ignore"):  # the exporter gives them
            generation = read_generation(source, config.vocab_size)
    check_config(source, config)
    writer = GGUFWriter(None, ARCHITECTURES[config.arch])
    writer.add_type(GGUFType.MODEL)
    writer.add_string("general.name", source.resolve().stem if source.is_file() else source.resolve().name)
    writer.add_quantization_version(GGML_QUANT_VERSION)
    add_parameters(writer, config, generation)
    if with_tokenizer:
        add_tokenizer(writer, source, config.vocab_size, generation)
    else:
        writer.add_tokenizer_model("none")
    return writer


def write_gguf(writer: GGUFWriter, source: Path, model_file: Path, gguf_out: Path) -> None:
    """Writes `gguf_out` from a model file. writer: from `prepare`. Raises ModelError, and writes nothing, if not."""
    tensors = list(stored_tensors(read_file(model_file)))
    sizes = dict.fromkeys(FILE_TYPES, 0)
    for tensor in tensors:
        block, n_bytes = GGML_QUANT_SIZES[tensor.kind]
        size = math.prod(tensor.shape) // block * n_bytes
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(F32), size, raw_dtype=tensor.kind)
        if tensor.kind in sizes:
            sizes[tensor.kind] += size
    writer.add_file_type(FILE_TYPES[max(sizes, key=sizes.__getitem__)])
    with replacing(gguf_out, [*input_files(source), model_file]) as f:
        writer.fout, writer.state = [f], WriterState.EMPTY
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tensors:
            values = tensor.values()
            writer.write_tensor_data(np.ascontiguousarray(values, F32 if tensor.kind == Kind.F32 else None))
