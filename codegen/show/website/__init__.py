# SPDX-License-Identifier: Apache-2.0
"""A static site about kernels: their pictures, plans, sources, evidence and speed, and why."""
