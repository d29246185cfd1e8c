# SPDX-License-Identifier: Apache-2.0
"""A spec: its text with places, its names, and the model that it is checked against."""
