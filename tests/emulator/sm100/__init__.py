# SPDX-License-Identifier: Apache-2.0
"""Kernels for sm_100a, written by hand in the DSL, and what the emulator makes of them."""
