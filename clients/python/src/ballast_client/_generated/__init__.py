# SPDX-License-Identifier: Apache-2.0
"""Written by scripts/python-stubs."""
