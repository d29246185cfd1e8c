# SPDX-License-Identifier: Apache-2.0
"""This machine: processes, files, cache, GPU, and where a command's tasks run."""
