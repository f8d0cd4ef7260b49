"""Which engines load what --hf-out writes, in a line for whoever exports.

Of vLLM 0.32: on a CPU by running it (`make serve-check`), on a GPU by its sources; docs/serving.md has the table. What
vLLM refuses is a warning, which comes before the work where it is known then.
"""

import sys
import warnings
from pathlib import Path

from formats.gptq import MatrixFormat

GPU_AND_CPU = "vLLM takes it on a GPU and on a CPU"
INT8_EXPERTS = "experts in int8: vLLM takes them on a GPU; on a CPU it has no such kernel and refuses them"
GPTQMODEL = "transformers with gptqmodel takes it"


def gptq_refused(form: MatrixFormat, symmetric: bool, has_order: bool) -> str | None:
    """What vLLM refuses of a GPTQ directory, and who takes it; None if vLLM takes it on a GPU and on a CPU.

    form: of the layers. symmetric: all zero points are the middle code. has_order: groups are scattered (desc_act).
    """
    if form.bits not in (4, 8):
        return f"{form}: vLLM refuses it, it takes 4 and 8; {GPTQMODEL}"
    if has_order and form.group:
        return f"{form}, scattered groups (desc_act): vLLM refuses it; {GPTQMODEL}"
    if not symmetric:
        return f"{form}, zero points of their own: vLLM refuses it, it takes what --sym writes; {GPTQMODEL}"
    if form.bits == 8:
        return f"{form}: vLLM takes it on a GPU; on a CPU it takes 4 bits alone and refuses it"
    return None


def warn_refused(refused: str | None) -> None:
    """Says what is refused, if anything is, as a warning of the command line."""
    if refused is not None:
        warnings.warn(f"--hf-out: {refused}", stacklevel=2)


def announce(hf_out: Path, takes: str) -> None:
    """Says of a directory that was written who takes it."""
    print(f"{hf_out}: {takes}", file=sys.stderr)
