# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest
from fmha_gen import cache


def test_put_then_get(tmp_path):
    name = cache.key("kind", ["a", "b"])
    assert cache.get(name, root=tmp_path) is None
    cache.put(name, {"x": [1]}, root=tmp_path)
    assert cache.get(name, root=tmp_path) == {"x": [1]}
    assert [p.name for p in tmp_path.iterdir()] == [f"{name}.json"]


def test_parts_do_not_run_together():
    assert cache.key("k", ["ab", "c"]) != cache.key("k", ["a", "bc"])
    assert cache.key("k", ["a"]) != cache.key("j", ["a"])


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"[]", b"{}", b"\xff", b'{"key": "j", "value": 1}']
)
def test_damage_is_a_miss(tmp_path, damage):
    name = cache.key("k", ["a"])
    cache.put(name, 1, root=tmp_path)
    (tmp_path / f"{name}.json").write_bytes(damage)
    assert cache.get(name, root=tmp_path) is None


def test_a_folder_that_cannot_be_written_costs_nothing(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    cache.put("k-1", 1, root=blocked)
    assert cache.get("k-1", root=blocked) is None


def test_which_folder(monkeypatch, tmp_path):
    monkeypatch.delenv(cache.ENVIRONMENT, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.folder() == tmp_path / ".cache/fmha-gen"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache.folder() == Path("/xdg/fmha-gen")
    monkeypatch.setenv(cache.ENVIRONMENT, "/own")
    assert cache.folder() == Path("/own")
