# SPDX-License-Identifier: Apache-2.0
"""Executes PTX on a model of its functions and synchronisation: no GPU, no timing.

Knows nothing of specs or templates: PTX text, a launch and buffers in, results and findings out.
"""
