# SPDX-License-Identifier: Apache-2.0
"""Hardware facts, one module per architecture."""
