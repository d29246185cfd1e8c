# SPDX-License-Identifier: Apache-2.0
"""A kernel's plan as pictures: memory maps, roles and barriers, loads of a cluster."""
