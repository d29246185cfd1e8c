# SPDX-License-Identifier: Apache-2.0
"""Plans: what all architectures share, and for each its numbers, template values and words."""
