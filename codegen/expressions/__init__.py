# SPDX-License-Identifier: Apache-2.0
"""Expressions of specs: which keys a query sees, as one line of text.

`language` reads a line into a tree with types, and refuses what is not in the grammar; `values`
computes a tree over arrays of integers; `solve` turns a tree into bounds of ``kv``.
"""
