# SPDX-License-Identifier: Apache-2.0
"""The micro-kernels are imported from the folder of the hardware tests."""

import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)
