# SPDX-License-Identifier: Apache-2.0
import pytest


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def own_cache(cache_folder, monkeypatch):
    """Made-up compiles stay out of the cache of whoever runs the tests."""
    monkeypatch.setenv("FMHA_GEN_CACHE", str(cache_folder))
