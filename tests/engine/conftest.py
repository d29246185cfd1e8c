# SPDX-License-Identifier: Apache-2.0
import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Each test has an empty cache of its own."""
    monkeypatch.setenv("FMHA_GEN_CACHE", str(tmp_path_factory.mktemp("cache")))
