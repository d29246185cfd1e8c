# SPDX-License-Identifier: Apache-2.0
"""Preloaded by a worker: it has another version of the DSL."""

from fmha_gen.host import tools

tools.dsl_distributions = lambda: {tools.DSL: "4.8.0"}
