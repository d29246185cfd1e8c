# SPDX-License-Identifier: Apache-2.0
"""Preloaded by a worker: it has another version of the DSL."""

from fmha_gen.build import toolchain

toolchain.dsl_distributions = lambda: {toolchain.DSL: "4.8.0"}
