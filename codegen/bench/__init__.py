# SPDX-License-Identifier: Apache-2.0
"""Rung 5: kernels timed beside their peers, one process, one GPU, everyone in turn.

`timing` defines the figures; `problems` and `grid` say what is computed, `lengths` how long packed
sequences are and `layouts` where their rows are, `contenders` who computes it; `results` holds what
was measured, `overhead` fits it, `tables` and `plot` show it; `command` is `fmha-gen bench`. Only
`contenders`, `layouts` and `cuda` need PyTorch.
"""
