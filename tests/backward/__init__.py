# SPDX-License-Identifier: Apache-2.0
"""`fmha_bwd` through everything but a GPU, by a kernel that is slow and easy to read."""
