# SPDX-License-Identifier: Apache-2.0
"""What a change of a spec, a template or a compiler does to kernels: `fmha-gen diff`.

Arrows run one way: `command -> sides -> {git, measure} -> kernels`, then `compare -> report`.
"""
