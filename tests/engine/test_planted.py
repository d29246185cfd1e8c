# SPDX-License-Identifier: Apache-2.0
"""What somebody left in a folder that a command writes to: it changes nothing anywhere else.

Every command of test_kill.py that writes files is run among journals of older versions, which named
paths to write and to delete, and where its own files and folders are links to elsewhere.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from fmha_gen import verify

from .test_kill import COMMANDS, Command, contents, models

__all__ = ["models"]  # a fixture

STAGE = ".fmha-gen-stage"
WRITTEN = ("generated", "copies", "objects", "pages", "cache", ".")
JOURNALS = {
    "valid": None,
    "not JSON": "{",
    "not a list": "{}",
    "no names": "[1]",
    "no stage": '[{"path": "a.py", "new": "7"}]',
    "deep": "[" * 100_000,
    "binary": "\0\udcff",
}


def journal(outside: Path, root: Path) -> str:
    """Actions of a journal that would overwrite, delete and fetch files outside of a folder."""
    up = os.path.relpath(outside, root)
    return json.dumps(
        [
            {"path": f"{up}/victim", "new": "0"},
            {"path": f"{outside}/victim", "new": "0"},
            {"path": f"{up}/goes", "new": None},
            {"path": f"{outside}/goes", "new": None},
            {"path": "fetched.py", "new": f"{up}/../secret"},
            {"path": "fetched.py", "new": f"../{up}/secret"},
            {"path": "fetched.py", "new": f"{outside}/secret"},
            {"path": "records/goes.json", "new": None},
            {"path": "link/victim", "new": "0"},
            {"path": "link/goes", "new": None},
        ]
    )


def plant(root: Path, outside: Path, text: str | None) -> None:
    stage = root / STAGE
    stage.mkdir(parents=True)
    (stage / "0").write_text("planted\n")
    data = journal(outside, root) if text is None else text
    (stage / "journal.json").write_bytes(data.encode(errors="surrogateescape"))
    (stage / "1").symlink_to(outside / "secret")
    (root / "link").symlink_to(outside)
    # What a command that was killed leaves has a name as well.
    (root / ".fmha-gen-0123456789abcdef").symlink_to(outside)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    folder.mkdir()
    for name in ("victim", "goes", "secret", "0", "1"):
        (folder / name).write_text(f"{name}\n")
    return folder


@pytest.fixture
def folder(
    command: Command, models: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Where the command runs, with what it finds there."""
    found = tmp_path / "folder"
    found.mkdir()
    monkeypatch.chdir(found)
    command.before()
    return found


def plain(found: dict[str, bytes]) -> dict[str, bytes]:
    """Without what was planted."""
    return {
        name: data
        for name, data in found.items()
        if not {STAGE, "link", ".fmha-gen-0123456789abcdef"} & {*Path(name).parts}
    }


@pytest.mark.parametrize(
    ("command", "journal_is"),
    [
        (command, name)
        for command in COMMANDS
        for name in (JOURNALS if command.name in ("build", "emulate") else ("valid",))
    ],
    ids=lambda given: getattr(given, "name", given),
)
def test_a_journal_is_no_order(
    command: Command,
    journal_is: str,
    folder: Path,
    outside: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(folder, elsewhere)
    monkeypatch.chdir(elsewhere)
    command.run()
    wanted = contents(elsewhere)
    monkeypatch.chdir(folder)

    before = contents(outside)
    for name in WRITTEN:
        plant(folder / name, outside, JOURNALS[journal_is])
    if command.name == "site":  # a folder with files of others
        with pytest.raises(AssertionError):
            command.run()
    else:
        command.run()
        assert plain(contents(folder)).keys() == wanted.keys()
    assert contents(outside) == before
    for name in WRITTEN:
        assert (folder / name / STAGE / "0").read_text() == "planted\n"


OWN = ("generated", "copies", "objects", "pages", "cache", "table.json")


@pytest.mark.parametrize("kind", ["files", "folders"])
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_no_link_is_written_through(
    command: Command,
    kind: str,
    folder: Path,
    outside: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whatever was there lies elsewhere now, with a link in its place."""
    if command.name in ("tune", "vendor"):
        (folder / "generated/records").mkdir(parents=True, exist_ok=True)
        (folder / "copies/records").mkdir(parents=True, exist_ok=True)
    if command.name == "tune":
        (folder / "generated/records/k.tune.jsonl").touch()
    (folder / "table.json").write_text("{}\n")
    roots = [folder / name for name in OWN if (folder / name).exists()]
    below = [path for root in roots for path in (root, *sorted(root.rglob("*")))]
    for path in below:
        # The folder that was named to the command may be a link.
        wanted = path.is_file() if kind == "files" else path.is_dir()
        if wanted and path not in roots[:-1]:
            place = outside / path.relative_to(folder)
            place.parent.mkdir(parents=True, exist_ok=True)
            path.rename(place)
            path.symlink_to(place)
    before = contents(outside)
    try:
        command.run()
    except AssertionError:
        assert "a symbolic link" in capsys.readouterr().err
    assert contents(outside) == before


@pytest.mark.parametrize("entry", ["../victim", "/victim", "a/../../victim", "a//b"])
@pytest.mark.parametrize(
    ("command", "lock"),
    [(one, "pages/SITE.lock") for one in COMMANDS if one.name == "site"]
    + [(one, "copies/VENDOR.lock") for one in COMMANDS if one.name == "vendor --update"]
    + [(one, "generated/MANIFEST.lock") for one in COMMANDS if one.name == "build"],
    ids=lambda given: getattr(given, "name", given),
)
def test_a_lock_names_nothing_outside(
    command: Command,
    lock: str,
    entry: str,
    folder: Path,
    outside: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = folder / lock
    (path.parent / "victim").write_text("mine\n")
    (folder / "victim").write_text("mine\n")
    text = path.read_text()
    digest = verify.sha256("mine\n")
    planted = {
        "SITE.lock": f"{digest}  {entry}\n",
        "VENDOR.lock": f"{entry} {digest} (text):{digest[:8]}\n",
        "MANIFEST.lock": f"{entry} {digest} {digest} {digest}\n",
    }
    path.write_text(text + planted[path.name])
    before = contents(folder)
    with pytest.raises(AssertionError):
        command.run()
    assert (
        f"{lock}:{len(text.splitlines()) + 1}: not an entry" in capsys.readouterr().err
    )
    assert contents(folder) == before


def test_a_lock_of_copies_is_not_followed_through_links(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it names is read only where it really lies in the folder."""
    secret = tmp_path / "secret.py"
    secret.write_text("SECRET = 1\n")
    copies = tmp_path / "copies"
    (copies / "sub").mkdir(parents=True)
    (copies / "k.py").symlink_to(secret)
    (copies / "up").symlink_to(tmp_path)
    names = ("k.py", "up/secret.py")
    entries = {name: verify.entry_of(name, "X = 1\n") for name in names}
    lock = verify.Lock("fmha-gen==1", entries)
    (copies / verify.LOCK).write_text(verify.dump(lock))
    found = {str(f.path.relative_to(copies)): f for f in verify.verify([copies])}
    assert found.keys() == set(names)
    for finding in found.values():
        assert finding.state == "edited"
        assert [str(edit) for edit in finding.edits] == [
            " (a symbolic link) unreadable"
        ]
    assert "SECRET" not in verify.to_text(list(found.values()))
