# SPDX-License-Identifier: Apache-2.0
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fmha_gen import render, tree
from fmha_gen.errors import CheckFailed, EnvironmentProblem


def kernel(value: int) -> str:
    return render.finish(
        f'"""A kernel.\n\n{render.DIGEST_PLACEHOLDER}\n"""\n\nX = {value}\n', "a" * 64
    )


OLD = {
    "a.py": kernel(1),
    "gone.py": kernel(2),
    "records/a.json": "old\n",
    "MANIFEST.lock": "1\n",
}
NEW = {
    "a.py": kernel(3),
    "b.py": kernel(4),
    "records/b.json": "new\n",
    "MANIFEST.lock": "2\n",
}
ORPHANS = ["gone.py", "records/a.json"]
OWNED = {
    path: render.body_digest(text) for path, text in OLD.items() if path.endswith(".py")
}


def write(root: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


def contents(root: Path) -> dict[str, str]:
    return {
        path.relative_to(root).as_posix(): path.read_text()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def update(root: Path, step=None) -> None:
    with tree.exclusive(root):
        tree.recover(root)
        tree.apply(root, tree.compare(root, NEW, OWNED, ORPHANS), step=step)


def kinds(root: Path, desired=NEW, owned=OWNED, orphans=ORPHANS) -> dict[str, str]:
    return {
        change.path: change.kind
        for change in tree.compare(root, desired, owned, orphans)
    }


def test_compare_names_every_kind(tmp_path):
    write(tmp_path, OLD)
    assert kinds(tmp_path) == {
        "MANIFEST.lock": "changed",
        "a.py": "changed",
        "b.py": "missing",
        "gone.py": "orphaned",
        "records/a.json": "orphaned",
        "records/b.json": "missing",
    }


def test_nothing_to_do_is_no_change(tmp_path):
    write(tmp_path, NEW)
    assert kinds(tmp_path, orphans=[]) == {}


@pytest.mark.parametrize(
    "text",
    [
        kernel(1).replace("X = 1", "X = 9"),  # body is not what its header states
        kernel(9),  # restamped: not what the lock has
        "X = 1\n",  # no header at all
        "",
    ],
)
def test_edited_kernels_and_edited_orphans(tmp_path, text):
    write(tmp_path, {**OLD, "a.py": text, "gone.py": text})
    found = kinds(tmp_path)
    assert found["a.py"] == found["gone.py"] == "edited"


def test_an_edit_that_says_what_is_wanted_is_no_edit(tmp_path):
    write(tmp_path, {**OLD, "a.py": NEW["a.py"]})
    assert "a.py" not in kinds(tmp_path)


def test_without_a_lock_the_header_decides(tmp_path):
    write(tmp_path, OLD)
    assert kinds(tmp_path, owned={})["a.py"] == "changed"


def test_the_diff_is_what_the_build_would_do(tmp_path):
    write(tmp_path, {"a.py": kernel(1)})
    (change,) = tree.compare(tmp_path, {"a.py": kernel(3)}, {})
    assert "-X = 1\n+X = 3\n" in change.diff


def test_apply_leaves_the_new_tree_and_nothing_else(tmp_path):
    write(tmp_path, OLD)
    update(tmp_path)
    assert contents(tmp_path) == NEW


def test_paths_stay_below_the_root(tmp_path):
    with pytest.raises(ValueError, match="not below"):
        tree.apply(tmp_path, [tree.Change("../x", "missing", "", "")])
    assert not (tmp_path.parent / "x").exists()


def test_two_builds_at_once_are_refused(tmp_path):
    with (
        tree.exclusive(tmp_path),
        pytest.raises(CheckFailed, match="another command"),
        tree.exclusive(tmp_path),
    ):
        pass
    with tree.exclusive(tmp_path):
        pass


def test_who_waits_has_the_folder_next(tmp_path):
    order = []

    def second():
        with tree.exclusive(tmp_path, wait=True):
            order.append("second")

    waiting = threading.Thread(target=second)
    with tree.exclusive(tmp_path):
        waiting.start()
        waiting.join(0.2)
        order.append("first")
    waiting.join()
    assert order == ["first", "second"]


def test_a_process_that_was_started_meanwhile_does_not_keep_the_lock(tmp_path):
    """Until its exec, a child that another thread starts has a copy of every open file."""
    with tree.exclusive(tmp_path):
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
    try:
        with tree.exclusive(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


class Died(BaseException):
    pass


def steps(tmp_path_factory) -> list[str]:
    root = tmp_path_factory.mktemp("steps")
    write(root, OLD)
    names: list[str] = []
    update(root, names.append)
    return names


def test_dying_before_any_step_leaves_the_old_or_the_new_tree(tmp_path_factory):
    names = steps(tmp_path_factory)
    assert {"make stage", "write journal", "commit", "sync", "end journal"} <= set(
        names
    )
    outcomes = []
    for last in range(len(names)):
        root = tmp_path_factory.mktemp("tree")
        write(root, OLD)
        left = iter(range(last, -1, -1))

        def die(_name: str, left=left) -> None:
            if next(left) == 0:
                raise Died

        with pytest.raises(Died):
            update(root, die)
        assert tree.interrupted(root) == (
            names.index("commit") < last <= names.index("end journal")
        )
        with tree.exclusive(root):
            tree.recover(root)
        found = contents(root)
        assert found in (OLD, NEW), f"torn at {names[last]}"
        outcomes.append(found == NEW)
        update(root)
        assert contents(root) == NEW
    commit = names.index("commit")
    assert outcomes == [False] * (commit + 1) + [True] * (len(names) - commit - 1)


def test_dying_while_recovering_is_recovered_as_well(tmp_path, monkeypatch):
    write(tmp_path, OLD)

    def die_at(wanted: str):
        def step(name: str) -> None:
            if name == wanted:
                raise Died

        return step

    with pytest.raises(Died):
        update(tmp_path, die_at("replace a.py"))
    monkeypatch.setattr(tree, "_no_step", die_at("delete gone.py"))
    with pytest.raises(Died):
        tree.recover(tmp_path)
    monkeypatch.undo()
    tree.recover(tmp_path)
    assert contents(tmp_path) == NEW


CHILD = """
import signal, sys, threading, time
from pathlib import Path
# Who starts the tests in the background leaves ^C ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path[:0] = {path!r}
import test_tree
root, last, threads = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
for _ in range(threads):
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
count = 0
def step(name):
    global count
    if count == last:
        print(name, flush=True)
        sys.stdin.readline()
    count += 1
test_tree.update(root, step)
print("done", flush=True)
time.sleep(60)
"""


def child(
    root: Path, last: int, threads: int = 0
) -> tuple["subprocess.Popen[str]", str]:
    code = CHILD.format(path=[str(Path(__file__).parent), *sys.path])
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(root), str(last), str(threads)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_sigkill(tmp_path_factory):
    names = steps(tmp_path_factory)
    chosen = [
        "stage b.py",
        "commit",
        "delete gone.py",
        "replace records/b.json",
        "discard stage",
    ]
    for name in chosen:
        root = tmp_path_factory.mktemp("killed")
        write(root, OLD)
        process, reached = child(root, names.index(name))
        assert reached == name
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        with tree.exclusive(root):  # the lock died with its holder
            tree.recover(root)
        committed = names.index(name) > names.index("commit")
        assert contents(root) == (NEW if committed else OLD)


@pytest.mark.parametrize("threads", [0, 1])  # a progress bar has one of its own
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_after_the_commit_waits_for_the_renames(
    tmp_path_factory, number, threads
):
    names = steps(tmp_path_factory)
    root = tmp_path_factory.mktemp("interrupted")
    write(root, OLD)
    process, reached = child(root, names.index("delete gone.py"), threads)
    assert reached == "delete gone.py"
    process.send_signal(number)
    time.sleep(0.3)
    assert process.poll() is None, "the signal was not held back"
    out, _ = process.communicate("go on\n", timeout=60)
    assert (process.returncode, out) == (-number, "")
    assert contents(root) == NEW


def test_signals_are_held_back_only_where_python_lets_us(tmp_path):
    write(tmp_path, OLD)
    before = signal.getsignal(signal.SIGINT)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(update, tmp_path).result()
    assert contents(tmp_path) == NEW
    assert signal.getsignal(signal.SIGINT) is before


def test_a_file_where_a_folder_belongs_is_refused_before_anything_is_written(tmp_path):
    write(tmp_path, {"a.py": OLD["a.py"], "records": "mine\n"})
    before = contents(tmp_path)
    with pytest.raises(CheckFailed, match="records: not a folder"):
        update(tmp_path)
    assert contents(tmp_path) == before


def test_what_cannot_be_staged_is_a_problem_of_the_machine(tmp_path):
    write(tmp_path, {**OLD, tree.STAGE: "no folder\n"})
    with pytest.raises(EnvironmentProblem, match="cannot write there: File exists"):
        update(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
@pytest.mark.parametrize("folder", [".", "records"])
def test_a_folder_that_is_not_writable(tmp_path, folder):
    write(tmp_path, OLD)
    (tmp_path / folder).chmod(0o555)
    try:
        with pytest.raises(EnvironmentProblem, match="cannot write there: Permission"):
            update(tmp_path)
    finally:
        (tmp_path / folder).chmod(0o755)
    assert contents(tmp_path) == OLD


def test_what_cannot_be_finished_can_be_later(tmp_path):
    write(tmp_path, {"a.py": OLD["a.py"]})

    def spoil(name: str) -> None:
        if name == "replace records/b.json":
            (tmp_path / "records").write_text("")

    for step in (spoil, None):
        with pytest.raises(EnvironmentProblem, match="cannot write there: File exists"):
            update(tmp_path, step)
    assert tree.interrupted(tmp_path)
    (tmp_path / "records").unlink()
    update(tmp_path)
    assert contents(tmp_path) == NEW


def test_two_that_replace_one_file_do_not_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.o"
    rename = Path.replace

    def late(self: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "replace", rename)
        tree.replace(path, b"another")
        assert path.read_bytes() == b"another"
        return rename(self, target)

    monkeypatch.setattr(Path, "replace", late)
    tree.replace(path, b"one")
    assert path.read_bytes() == b"one"
    assert list(tmp_path.iterdir()) == [path]


def test_a_replaced_file_keeps_its_mode_and_its_links(tmp_path: Path) -> None:
    path, link = tmp_path / "a.yaml", tmp_path / "link.yaml"
    path.write_bytes(b"old")
    path.chmod(0o640)
    link.symlink_to(path)
    tree.replace(link, b"new")
    assert link.is_symlink() and path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_file_that_cannot_be_replaced_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.o").mkdir()
    with pytest.raises(IsADirectoryError):
        tree.replace(tmp_path / "a.o", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["a.o"]
