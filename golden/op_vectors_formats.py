"""Golden vectors of every format that GPTQ files and ladders have (formats/gptq.py): those without a case elsewhere,
dense and of experts, and a file whose matrices have tables of their own.
"""

from functools import partial

import numpy as np

from formats.checkpoint import Config
from formats.gptq import FORMATS, KINDS, GptqLayout, MatrixFormat, gptq_tensors, pack_layout
from formats.model_file import Generation, header
from formats.schemes import GPTQ_FILE
from formats.tensors import HEADER_SIZE, matrix_shapes, weights_end, with_offsets
from golden.forward import F32
from golden.gptq import GPTQ, pack_matrix
from golden.op_cases import EXACT, OpVectors
from golden.op_vectors_gptq import EXPANDED, INT8_SCALES, add_expand, random_matrix
from golden.op_vectors_kinds import logits_of
from golden.op_vectors_moe import LADDER, add_ladder_case, until_clear, with_usual_scales

COLUMNS = {MatrixFormat(2, 32): 8320}  # 260 groups; three rows of 384 of other formats


def add_formats(vectors: OpVectors, rng: np.random.Generator) -> None:
    """All of them."""
    for form in sorted(FORMATS - {form for form, *_ in (*EXPANDED, *INT8_SCALES)}):
        add_expand(vectors, rng, form, 1 if form in COLUMNS else 3, COLUMNS.get(form, 384))
    add_expand(vectors, rng, MatrixFormat(2), 3, 192)  # whose rows are more than a group of 64
    add_expand(vectors, rng, MatrixFormat(2, 64, two_level=True), 260, 64)  # many rows
    for form in sorted(FORMATS - {form for form, _ in LADDER}):  # two experts, a token each
        n = 64 if form.group == 32 else 128
        until_clear(partial(add_ladder_case, vectors, rng, form, columns(form), n, np.array([1, 2], np.int32)))
    add_file(vectors, rng)


def columns(form: MatrixFormat) -> int:
    """Of experts: as few as tell a format from others of as many bits, 64 where they would be large."""
    if form.bits > 4 or form.has_table or form.sparse:
        return max(form.group, 128 if form.bits < 5 else 64)
    return {0: 192, 32: 128, 64: 128, 128: 256}[form.group]


# The kinds of a file in the order of KINDS, all that have a table or int8 scales.
FILE = (
    MatrixFormat(6, 64, int8_scales=True), MatrixFormat(4, 64, int8_scales=True), MatrixFormat(5, 64, int8_scales=True),
    MatrixFormat(6, 32, int8_scales=True), MatrixFormat(4, 32, int8_scales=True), MatrixFormat(5, 32, int8_scales=True),
    MatrixFormat(4, 128, int8_scales=True), MatrixFormat(2, 64, two_level=True), MatrixFormat(5, 64, int8_scales=True),
)  # fmt: skip


def add_file(vectors: OpVectors, rng: np.random.Generator) -> None:
    """A GPTQ file as `model.tied` is a Q8 file: a table for each matrix, activations gathered."""
    config = Config(
        arch="llama", dim=64, hidden_dim=128, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, vocab_size=40,
        max_seq_len=64, tied=False, norm_eps=1e-5, rope_theta=10000.0, rope_scaling=None,
    )  # fmt: skip
    layout = GptqLayout(FILE, has_order=True)
    assert len(FILE) == len(KINDS)
    values = {}
    for name, (n_out, n_in) in matrix_shapes(config):
        m = with_usual_scales(random_matrix(rng, layout.of(name), n_out, n_in), rng)
        values |= {f"{name}.{part}": value for part, value in pack_matrix(m).items()}
    tensors = list(gptq_tensors(config, layout))
    data = bytearray(weights_end(tensors, GPTQ_FILE.alignment))
    for tensor in with_offsets(tensors, alignment=GPTQ_FILE.alignment):
        value = values.get(tensor.name)
        if tensor.name.endswith(".order"):
            value = rng.permutation(tensor.shape[0])
        elif value is None:  # of a norm
            value = 1 + rng.standard_normal(tensor.shape) / 10
        data[tensor.offset : tensor.end] = np.ascontiguousarray(value, tensor.dtype).tobytes()
    own = pack_layout(layout)
    data[:HEADER_SIZE] = header(config, Generation(), GPTQ_FILE, layout.activation_group, len(data), b"", own=own)
    tokens = rng.integers(0, config.vocab_size, 6).astype(np.int32)
    logits = logits_of(bytes(data), GPTQ, tokens)
    assert F32(0.1) < logits.std() < F32(100)
    inputs = {"file": np.frombuffer(bytes(data), np.uint8), "tokens": tokens}
    vectors.add("model.gptq", "model", inputs, {"logits": (logits, EXACT)})
