"""What holds for all of pytest's tests, and the programs that they start."""

import os

# Matrices are small here: threads of OpenBLAS would wait for each other most of the time. Set before numpy is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
