"""Q8 files for runq: every matrix as int8 codes with one fp32 scale for each group along a row.

The order is that of llama2.c's version 2: fp32 norms, then the embedding, then each projection over all layers,
then the classifier if it has its own weights. Rows of q and k (and Qwen3's head norms) go from Hugging Face's order
of halves to adjacent pairs, the order in which runq rotates.
"""

from pathlib import Path

from tqdm import tqdm

from export.model_file import (
    HEADER_SIZE,
    MAGIC_Q8,
    VERSION_Q8,
    check_group_size,
    header,
    matrix_names,
    norm_names,
    read_generation,
    replacing,
    write_array,
    write_matrix,
)
from export.tokenizer import tokenizer_section
from golden.checkpoint import Checkpoint
from golden.forward import load_weight


def export_q8(
    hf_dir: Path, out: Path, group_size: int = 64, with_tokenizer: bool = True, progress: bool = True
) -> None:
    """Writes `out`. Raises ModelError, before anything is written, for what cannot be exported.

    A file without a tokenizer runs on token ids alone.
    """
    checkpoint = Checkpoint(hf_dir)
    config = checkpoint.config
    check_group_size(checkpoint, group_size)
    generation = read_generation(checkpoint.path, config.vocab_size)
    tokenizer = tokenizer_section(checkpoint.path, config.vocab_size) if with_tokenizer else b""
    norms, matrices = list(norm_names(config)), list(matrix_names(config))

    with replacing(out) as f, tqdm(total=len(norms) + len(matrices), unit="tensor", disable=not progress) as bar:
        f.write(bytes(HEADER_SIZE))
        for name in norms:
            write_array(f, load_weight(checkpoint, name, interleaved=True), "f4")
            bar.update()
        for name in matrices:
            bar.set_postfix_str(name)
            write_matrix(f, load_weight(checkpoint, name, interleaved=True), group_size)
            bar.update()
        tokenizer_offset = f.tell()
        f.write(tokenizer)
        f.seek(0)
        f.write(header(config, generation, MAGIC_Q8, VERSION_Q8, group_size, tokenizer_offset, tokenizer))
