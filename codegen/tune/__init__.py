# SPDX-License-Identifier: Apache-2.0
"""`fmha-gen tune`: searches the numbers that the plan leaves free, on this machine's GPU.

Arrows one way: command -> {board, gpu} -> halving -> journal, and command -> candidates ->
{space, edit}. Only `worker`, which runs in processes of its own, imports torch.
"""
