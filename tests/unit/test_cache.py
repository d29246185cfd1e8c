# SPDX-License-Identifier: Apache-2.0
import errno
import os
import stat
from pathlib import Path

import pytest
from fmha_gen.compat import environments
from fmha_gen.errors import EnvironmentProblem
from fmha_gen.host import cache, doctor, files


@pytest.fixture(autouse=True)
def nothing_said_yet():
    cache._say_once.cache_clear()


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


def test_a_folder_that_cannot_be_written_costs_nothing_and_is_told_once(
    tmp_path, capsys
):
    blocked = tmp_path / "file"
    blocked.write_text("")
    for number in range(3):
        cache.put(f"k-{number}", 1, root=blocked)
        assert cache.get(f"k-{number}", root=blocked) is None
    assert capsys.readouterr().err == (
        f"the cache is not used: {blocked}: not a folder\n"
    )


def test_a_full_disk_is_told_once(tmp_path, monkeypatch, capsys):
    def full(*_arguments, **_options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "replace", full)
    for number in range(3):
        cache.put(f"k-{number}", 1, root=tmp_path)
    assert capsys.readouterr().err == (
        f"the cache is not used: {tmp_path}: cannot be written:"
        " No space left on device\n"
    )


def test_only_we_may_look_into_it(tmp_path):
    before = os.umask(0o002)
    try:
        root = tmp_path / "new" / "cache"
        cache.put("k-1", 1, root=root)
    finally:
        os.umask(before)
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert stat.S_IMODE((root / "k-1.json").stat().st_mode) == 0o600
    assert cache.get("k-1", root=root) == 1


@pytest.mark.parametrize("mode", [0o770, 0o777, 0o1777, 0o702])
def test_a_folder_that_others_may_write_is_not_used_and_told_once(
    tmp_path, mode, capsys
):
    cache.put("k-1", 1, root=tmp_path)
    tmp_path.chmod(mode)
    for _ in range(2):
        assert cache.get("k-1", root=tmp_path) is None
        cache.put("k-2", 1, root=tmp_path)
    assert capsys.readouterr().err == (
        f"the cache is not used: {tmp_path}: others may write there;"
        f" run: chmod go-w {tmp_path}\n"
    )
    tmp_path.chmod(0o755)  # who else reads it does not matter
    assert cache.get("k-1", root=tmp_path) == 1
    assert cache.get("k-2", root=tmp_path) is None


@pytest.mark.parametrize("mode", [0o620, 0o606])
def test_an_entry_that_others_may_write_is_a_miss_and_is_written_anew(tmp_path, mode):
    cache.put("k-1", 1, root=tmp_path)
    (tmp_path / "k-1.json").chmod(mode)
    assert cache.get("k-1", root=tmp_path) is None
    cache.put("k-1", 2, root=tmp_path)
    assert cache.get("k-1", root=tmp_path) == 2


def test_an_entry_that_is_a_link_is_a_miss_and_is_replaced(tmp_path):
    elsewhere, root = tmp_path / "elsewhere", tmp_path / "cache"
    cache.put("k-1", 1, root=elsewhere)
    cache.make(root)
    (root / "k-1.json").symlink_to(elsewhere / "k-1.json")
    os.mkfifo(root / "k-2.json")
    assert cache.get("k-1", root=root) is None
    assert cache.get("k-2", root=root) is None
    cache.put("k-1", 2, root=root)
    assert cache.get("k-1", root=root) == 2
    assert cache.get("k-1", root=elsewhere) == 1


@pytest.mark.parametrize("what", ["folder", "entry", "link"])
def test_what_another_user_made_is_not_used(tmp_path, monkeypatch, what):
    root, name = tmp_path / "cache", "k-1"
    cache.put(name, 1, root=root)
    link = tmp_path / "link"
    link.symlink_to(root)
    assert cache.get(name, root=link) == 1
    changed = {"folder": root, "entry": root / "k-1.json", "link": link}[what]
    if os.geteuid() == 0:
        os.chown(changed, 12345, -1, follow_symlinks=False)
    else:  # nobody but root can give a file away: we are somebody else instead
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert cache.get(name, root=link) is None
    why = cache.refusal(link)
    assert (why is None) == (what == "entry" and os.geteuid() == 0)


def test_doctor_and_matrix_say_why(tmp_path, monkeypatch):
    monkeypatch.setenv(cache.ENVIRONMENT, str(tmp_path))
    assert doctor._cache().ok
    for folder in (tmp_path / environments.FOLDER, tmp_path):
        folder.mkdir(exist_ok=True)
        folder.chmod(0o777)
        with pytest.raises(EnvironmentProblem, match="others may write there"):
            environments._root()
    found = doctor._cache()
    assert not found.ok and not found.needed
    assert found.detail.startswith(f"not used: {tmp_path}: others may write there")


def test_a_deep_entry_is_a_miss(tmp_path):
    (tmp_path / "k-1.json").write_text("[" * 100_000)
    assert cache.get("k-1", root=tmp_path) is None


def test_which_folder(monkeypatch, tmp_path):
    monkeypatch.delenv(cache.ENVIRONMENT, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.folder() == tmp_path / ".cache/fmha-gen"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache.folder() == Path("/xdg/fmha-gen")
    monkeypatch.setenv(cache.ENVIRONMENT, "/own")
    assert cache.folder() == Path("/own")


def test_what_killed_writers_left_is_removed_by_the_next(tmp_path):
    root = tmp_path / "cache"
    cache.make(root)
    left = root / f".{cache.key('kind', ['a'])}.json.0123456789abcdef"
    left.write_text("half")
    mine = root / ".keep"
    mine.write_text("mine")
    cache.put(cache.key("kind", ["b"]), 1, root=root)
    assert not left.exists()
    assert mine.exists()
