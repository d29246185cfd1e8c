# SPDX-License-Identifier: Apache-2.0
"""fmha-gen: YAML specs in, standalone CuTe DSL attention kernels and their evidence out."""
