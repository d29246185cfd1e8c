# SPDX-License-Identifier: Apache-2.0
"""What people look at: the plan of a kernel, pictures, the schema, the site."""
