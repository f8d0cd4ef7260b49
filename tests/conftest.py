"""What holds for all of pytest's tests, and the programs that they start."""

import os

# Matrices are small here: threads of OpenBLAS would wait for each other most of the time. Set before numpy is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Threads of OpenMP that wait would keep the cores from other tests.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
