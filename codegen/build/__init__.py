# SPDX-License-Identifier: Apache-2.0
"""Kernels from specs: rendered, compiled, gated, written, with their lock and records."""
