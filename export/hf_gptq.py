"""Quantized checkpoints of Hugging Face into a GPTQ file, code for code, and such a file into a GPTQ checkpoint.

A GPTQ checkpoint (`quant_method: gptq`; AutoGPTQ, GPTQModel) has for each matrix of a layer, with k codes in a word:

    qweight  int32 (n_in / k, n_out)       k neighbours along n_in, the first in the lowest bits
    qzeros   int32 (n_groups, n_out / k)   k neighbours along n_out; zero - 1 in `checkpoint_format: gptq` (the usual
                                           one), zero in gptq_v2
    scales   fp16 (n_groups, n_out)
    g_idx    int32 (n_in,)                 the group of each input: i // group_size, unless quantized with desc_act

With desc_act a group's inputs are scattered. Here they are gathered: codes go into the order of their groups, and the
file has that order, by which the program gathers activations. AutoAWQ's packing is golden/awq.py's.

A checkpoint of compressed-tensors in the format "pack-quantized" has for each of these matrices

    weight_packed      int32 (n_out, n_in / k)        k neighbours along n_in, the first lowest
    weight_zero_point  int32 (n_out / k, n_groups)    k neighbours along n_out; none if all are the middle code
    weight_scale       fp16, bf16 or fp32 (n_out, n_groups)
    weight_shape       int64 (2,)                     n_out and n_in

Here codes and zero points count from 0, in the package from the middle code. The bits are the same.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from export.gptq_layout import row_lengths
from export.hf_directory import Content, as_stored, part_name, read_source_config, write_directory
from formats.checkpoint import Checkpoint, ModelError
from formats.gptq import KINDS, ORDER_PLACES, ROW_UNIT, GptqLayout, MatrixFormat
from formats.moe import LADDER_KINDS, MoeLayout, expert_shapes, ladder_kind
from formats.packing import INT_QUANTIZED, Packing, pack_words
from formats.source import Source
from formats.tensors import Tensor, matrix_shapes, norm_shapes
from golden.channel_scaling import CONSUMERS, input_of
from golden.forward import F32, expert_steps, hf_name, in_halves, in_pairs, load_weight
from golden.gptq import F16, GPTQ, Matrix

BITS, GROUPS = (2, 4, 8), (32, 64, 128)  # of a GPTQ file


# ----------------------------------------------------------------------------
# In


def can_repack(checkpoint: Source) -> bool:
    """Whether a GPTQ file has room for the codes of all quantized matrices of a model, of which there are some."""
    forms = list(checkpoint.forms.values())
    return bool(forms) and all(
        isinstance(form, Packing) and form.method != INT_QUANTIZED and (not form.group_size or form.group_size >= 32)
        for form in forms
    )


def widest(forms: Iterable[Packing | None]) -> MatrixFormat:
    """The format of a file that has room for matrices of these forms; None: one that is not quantized, for int8.

    A code is the same in more bits, and a group's scale that of several smaller groups.
    """
    forms = list(forms)
    most = max((form.bits for form in forms if form), default=8)
    groups = {min(form.group_size, GROUPS[-1]) for form in forms if form} - {0}
    return MatrixFormat(8 if None in forms else next(bits for bits in BITS if bits >= most), min(groups, default=0))


class Repacker:
    """The matrices of a quantized checkpoint, as a GPTQ file has them, or a ladder of experts.

    has_order: groups are scattered over the inputs; a file with experts cannot have that.
    """

    def __init__(self, checkpoint: Checkpoint):
        self._checkpoint, self._config = checkpoint, checkpoint.config
        names = [step for step, _ in matrix_shapes(self._config) if step.startswith("layers.")]
        experts = [(name, expert) for name, (n, *_) in expert_shapes(self._config) for expert in range(n)]
        names += [step for name, expert in experts for step in expert_steps(name, expert)]
        self._forms = {step: checkpoint.forms.get(hf_name(self._config, step)) for step in names}
        group = max(form.group_size for form in self._forms.values() if form)
        for field, n in row_lengths(self._config).items():
            if n % ROW_UNIT or n % (group or n):
                raise ModelError(
                    f"{checkpoint.config_path}: {field} is {n}, expected a multiple of {max(ROW_UNIT, group)}"
                )
        of_kind: dict[str, list[Packing | None]] = {}
        for step, form in self._forms.items():
            of_kind.setdefault(self._kind(step), []).append(form)
        self._formats = {kind: widest(forms) for kind, forms in of_kind.items()}
        self.n_rounded = 0  # scales of the matrices so far that were not fp16 numbers
        self.orders: dict[str, np.ndarray] = {}  # by place, int32; empty if no place has one
        if self._config.moe is not None:
            self._formats.setdefault("ffn", self._formats["attn"])
            self.has_order = any(form and self._groups_of(step) is not None for step, form in self._forms.items())
            return
        layers = [f"layers.{i}." for i in range(self._config.n_layers)]
        found = {layer + place: self._order_of(layer, place) for layer in layers for place in ORDER_PLACES}
        self.has_order = any(order is not None for order in found.values())
        if self.has_order:
            for place, order in found.items():
                n = getattr(self._config, ORDER_PLACES[place.split(".", 2)[-1]])
                self.orders[place] = np.arange(n, dtype=np.int32) if order is None else order

    def _kind(self, step: str) -> str:
        """The kind of a matrix, of formats/gptq.py's or formats/moe.py's."""
        return step.rsplit(".", 1)[-1] if self._config.moe is None else ladder_kind(step)

    def layout(self, others: GptqLayout | MoeLayout) -> GptqLayout | MoeLayout:
        """The layout of the file. others: has the formats of embedding and classifier."""
        kinds = KINDS if isinstance(others, GptqLayout) else LADDER_KINDS
        formats = tuple(self._formats.get(kind, other) for kind, other in zip(kinds, others.formats, strict=True))
        if isinstance(others, GptqLayout):
            return GptqLayout(formats, self.has_order)
        return others._replace(formats=formats)

    def _refuse(self, name: str, part: str, what: str) -> ModelError:
        return ModelError(f"{self._checkpoint.path}: tensor {part_name(self._config, name, part)} {what}")

    def _groups_of(self, name: str) -> np.ndarray | None:
        """The group of each input of a quantized matrix; None where groups are neighbours."""
        form = self._forms[name]
        return self._checkpoint.from_parts(hf_name(self._config, name), lambda load, shape: form.groups(load, shape[1]))

    def _order_of(self, layer: str, place: str) -> np.ndarray | None:
        """In which order the inputs of a place are gathered, int32; None: as they are."""
        consumers = [name for name in CONSUMERS[place] if self._forms[layer + name] is not None]
        groups = {consumer: self._groups_of(layer + consumer) for consumer in consumers}
        if all(found is None for found in groups.values()):
            return None
        # Smaller groups lie within larger ones, or there is no order for both.
        first, *others = sorted(consumers, key=lambda name: self._forms[layer + name].group_size or 1 << 30)
        order = None if groups[first] is None else np.argsort(groups[first], kind="stable").astype(np.int32)
        for other in others:
            found = groups[other]
            if order is None or found is None or (np.diff(found[order]) < 0).any():
                raise self._refuse(layer + other, "g_idx", f"differs from that of {first}, which reads the same inputs")
        return order

    def _order(self, name: str) -> np.ndarray | None:
        return self.orders.get(input_of(name)) if self.orders else None

    def plain(self, name: str) -> np.ndarray | None:
        """The weights of a matrix that is not quantized, fp32, its columns gathered; None for others."""
        if self._forms.get(name) is not None:
            return None
        weight = load_weight(self._checkpoint, name, interleaved=True)
        order = self._order(name) if name in self._forms else None
        return weight if order is None else weight[:, order]

    def matrix(self, name: str) -> Matrix:
        """A quantized matrix of a layer, its columns gathered. Raises ModelError for what a GPTQ file cannot hold."""
        form, target = self._forms[name], self._formats[self._kind(name)]
        codes, zeros, scales = self._checkpoint.from_parts(hf_name(self._config, name), form.integers)
        of_zeros, of_scales = ("qzeros", "scales")
        if form.is_compressed_tensors:
            of_zeros, of_scales = ("weight_zero_point", "weight_scale")
        if form.bits < 8 and zeros.max() >= 1 << form.bits:
            raise self._refuse(name, of_zeros, f"has a zero point of {zeros.max()}, above the largest code")
        order = self._order(name)
        if order is not None:
            codes = codes[:, order]
        kind = F16 if target.group or target.bits < 8 else F32
        if kind == F16 and scales.dtype != F16:
            scales = self._in_half(name, of_scales, scales.astype(F32))
        codes, zeros, scales = (in_pairs(self._config, name, rows) for rows in (codes, zeros, scales))
        n_groups = codes.shape[1] // (target.group or codes.shape[1])
        zeros, scales = (np.repeat(values, n_groups // values.shape[1], axis=1) for values in (zeros, scales))
        scales = np.ascontiguousarray(scales, kind)
        if target.bits == 8:
            steps = codes.reshape(*zeros.shape, -1).astype(np.int16) - zeros[..., None]
            if steps.min() < -128 or steps.max() > 127:
                raise self._refuse(name, of_zeros, "puts codes beyond int8: not supported")
            return Matrix(target, steps.reshape(codes.shape).astype(np.int8), scales)
        return Matrix(target, np.ascontiguousarray(codes), scales, zeros.astype(np.uint8))

    def _in_half(self, name: str, part: str, scales: np.ndarray) -> np.ndarray:
        """Scales in fp16; below 2^-14, where fp16 is a grid of 2^-24, rounded and counted.

        Raises ModelError for others that are no fp16 numbers, which bf16 numbers up to 65504 are.
        """
        with np.errstate(over="ignore"):
            half = scales.astype(F16)
        inexact = half.astype(F32) != scales
        if (bad := inexact & (np.abs(scales) >= np.finfo(F16).smallest_normal)).any():
            raise self._refuse(name, part, f"has {scales[bad][0]:.9g}, which is no fp16 number: not supported")
        self.n_rounded += int(inexact.sum())
        return half


# ----------------------------------------------------------------------------
# Out


def check_expressible(layout: GptqLayout, repacked: bool = False) -> MatrixFormat:
    """The format that all matrices of the layers have. Raises ModelError if a GPTQ checkpoint cannot express it.

    repacked: scales are those of a checkpoint, hence fp16 numbers, also where the file has fp32.
    """
    formats = sorted(set(layout.formats[1:8]))
    if len(formats) > 1:
        two = f"{formats[0]}; {formats[1]}"
        raise ModelError(f"--hf-out: a GPTQ checkpoint has one format for all layers, here are {two}")
    (form,) = formats
    if form.two_level or form.int8_scales:
        raise ModelError(f"--hf-out: a GPTQ checkpoint cannot express {form}")
    if form.bits == 8 and not form.group and not repacked:
        raise ModelError("--hf-out: a GPTQ checkpoint has fp16 scales, 8 bits per row has fp32's: give --group")
    return form


def is_symmetric(model: GPTQ, form: MatrixFormat) -> bool:
    """Whether all zero points of the layers are the middle code, as they are of 8 bits."""
    names = (name for name, _ in matrix_shapes(model.config) if name.startswith("layers."))
    middle = 1 << (form.bits - 1)
    return form.bits == 8 or all((model.zeros(name) == middle).all() for name in names)


def write_gptq_checkpoint(source: Source, model_file: Path, hf_out: Path) -> bool:
    """Writes `hf_out`, which must not exist, from a model file and the directory or GGUF file that it was made from.

    Codes, zero points and scales are those of the file, embedding, norms and classifier the source's. Returns whether
    all zero points are the middle code.
    """
    model = GPTQ(model_file)
    form = check_expressible(model.layout, repacked=True)
    config, symmetric = read_source_config(source.path, model.config.tied), is_symmetric(model, form)
    config["quantization_config"] = {
        "bits": form.bits,
        "checkpoint_format": "gptq",
        "desc_act": model.layout.has_order,
        "group_size": form.group or -1,
        "lm_head": False,
        "quant_method": "gptq",
        "sym": symmetric,
    }
    write_directory(source.path, hf_out, config, contents(model, source, form))
    return symmetric


def contents(model: GPTQ, source: Source, form: MatrixFormat) -> Iterator[Content]:
    """Every tensor of the directory. A classifier that was the embedding is stored again where the file is not tied."""
    c = model.config
    words = lru_cache(maxsize=1)(partial(to_words, model))  # a matrix's tensors are asked for one after the other

    def load(name: str, part: str) -> np.ndarray:
        return words(name)[part]

    for name, _ in norm_shapes(c):
        yield as_stored(source, hf_name(c, name), hf_name(source.config, name))
    for name, (n_out, n_in) in matrix_shapes(c):
        if not name.startswith("layers."):
            yield as_stored(source, hf_name(c, name), hf_name(source.config, name))
            continue
        for part, shape, _, _ in Packing("gptq", form.bits, form.group).parts(n_out, n_in):
            if part != "bias":
                dtype = "<f2" if part == "scales" else "<i4"
                yield Tensor(part_name(c, name, part), dtype, shape), partial(load, name, part)


def to_words(model: GPTQ, name: str) -> dict[str, np.ndarray]:
    """The tensors of a matrix in a GPTQ checkpoint, by their parts' names."""
    m = model.stored(name)
    bits = m.form.bits
    codes, scales = m.codes, m.scales.astype(F16)
    if not np.array_equal(scales, m.scales):
        raise ModelError(f"--hf-out: {name} has scales that are no fp16 numbers")
    if bits == 8:
        zeros = np.full(scales.shape, 128, np.uint8)
        codes = (codes.astype(np.int16) + 128).astype(np.uint8)
    else:
        zeros = m.zeros
    if m.kept is not None:  # a weight that is not kept has the zero point's code
        codes = np.where(m.kept, codes, np.repeat(zeros, m.form.group, axis=1))
    if not zeros.all():
        raise ModelError(f"--hf-out: {name} has zero points of 0, which a GPTQ checkpoint cannot express")
    codes, scales, zeros = (in_halves(model.config, name, rows) for rows in (codes, scales, zeros))
    n_in = codes.shape[1]
    back = np.argsort(model.orders.get(input_of(name), np.arange(n_in)))
    return {
        "qweight": pack_words(codes[:, back].T, bits),
        "qzeros": np.ascontiguousarray(pack_words(zeros - np.uint8(1), bits).T),
        "scales": np.ascontiguousarray(scales.T),
        "g_idx": (back // (m.form.group or n_in)).astype(np.int32),
    }
