# SPDX-License-Identifier: Apache-2.0
"""An operation of two kernels with a workspace between them, through everything but a GPU."""
