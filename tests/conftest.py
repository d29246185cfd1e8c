# SPDX-License-Identifier: Apache-2.0
"""Settings of every test process."""

import os

# The emulator multiplies small matrices. From 128 x 128 x 32 on OpenBLAS spreads them over
# threads, which takes 20 times as long when another test process has the other core. Read when
# numpy is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
