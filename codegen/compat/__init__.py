# SPDX-License-Identifier: Apache-2.0
"""Kernels under several versions of the CuTe DSL, each in an environment of its own."""
