# SPDX-License-Identifier: Apache-2.0
"""Each rung above `compiled`: what ran in the emulator or on a GPU, and how it is judged."""
