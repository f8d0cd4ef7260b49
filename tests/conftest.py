"""What holds for all of pytest's tests, and the programs that they start."""

import os
import re

import pytest

# Matrices are small here: threads of OpenBLAS would wait for each other most of the time. Set before numpy is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Threads of OpenMP that wait would keep the cores from other tests.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Modules whose tests start no program and read no source but Python's, golden data and models.
PYTHON_ALONE = re.compile(
    r"test_(autoawq|awq_(export|goldens|search)|dither|export|foreign|gguf_out|gptq(_checkpoints|_refine)?|moe(_ladder)?"
    r"|op_vectors|padded|vector_kinds|w8a8)\.py"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks them: .ci/run leaves them out if none of these files has changed."""
    from tests.helpers import needs_change  # imports numpy, which the above goes before

    for item in items:
        if PYTHON_ALONE.fullmatch(item.path.name):
            item.add_marker(needs_change("python"))
