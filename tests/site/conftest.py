# SPDX-License-Identifier: Apache-2.0
"""The site of all shipped kernels, made once."""

from __future__ import annotations

from pathlib import Path

import pytest
import support
from fmha_gen.show.website import command as website


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the whole site."""
    folder = tmp_path_factory.mktemp("site")
    website.write([support.SPECS], support.GENERATED, folder)
    return folder
