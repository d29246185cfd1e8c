# SPDX-License-Identifier: Apache-2.0
"""`fmha-gen vendor`: kernels for other repositories, with licence, evidence and a lock.

Arrows one way: command -> {contents -> source, merge}. What was copied is judged by `verify`.
"""
