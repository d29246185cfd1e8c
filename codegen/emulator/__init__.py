# SPDX-License-Identifier: Apache-2.0
"""Executes PTX on a CPU: function and synchronisation on a model of PTX, no timing, no silicon."""
