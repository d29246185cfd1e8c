# SPDX-License-Identifier: Apache-2.0
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fmha_gen.build import render, tree
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
        "X = 1\n",  # no header any more
        "",
    ],
)
def test_edited_kernels_and_edited_orphans(tmp_path, text):
    write(tmp_path, {**OLD, "a.py": text, "gone.py": text})
    found = kinds(tmp_path)
    assert found["a.py"] == found["gone.py"] == "edited"


def test_a_file_that_was_never_a_kernel_is_foreign(tmp_path):
    write(tmp_path, {"a.py": "X = 1\n"})
    assert kinds(tmp_path, owned={})["a.py"] == "foreign"
    write(tmp_path, {"a.py": kernel(1).replace("X = 1", "X = 9")})
    assert kinds(tmp_path, owned={})["a.py"] == "edited"


def test_what_goes_has_no_diff(tmp_path):
    write(tmp_path, {**OLD, "records/a.json": "edited\n"})
    changes = {c.path: c for c in tree.compare(tmp_path, NEW, OWNED, ORPHANS)}
    assert changes["gone.py"].diff == changes["records/a.json"].diff == ""


def test_a_long_diff_is_cut_in_messages(tmp_path):
    write(tmp_path, {"a.txt": "x\n" * 100})
    (change,) = tree.compare(tmp_path, {"a.txt": "y\n" * 100}, {})
    lines = tree.shortened(change.diff).splitlines()
    assert len(lines) == tree.LONGEST_DIFF + 1
    assert lines[-1] == "... 163 more lines; --json has all"
    assert tree.shortened("-a\n+b\n") == "-a\n+b\n"


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
    for path in ("../x", "/x", "records/../../x", ""):
        with pytest.raises(ValueError, match="not below"):
            tree.read(tmp_path, path)
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


def check_whole(root: Path) -> None:
    """Every file is the old or the new one, and the lock is the new one only if all are."""
    found = {
        path: text
        for path, text in contents(root).items()
        if not path.startswith(".fmha-gen-")
    }
    assert found.keys() <= OLD.keys() | NEW.keys()
    for path, text in found.items():
        assert text in (OLD.get(path), NEW.get(path)), f"{path} is torn"
    assert found.keys() >= OLD.keys() & NEW.keys()
    if found["MANIFEST.lock"] == NEW["MANIFEST.lock"]:
        assert found == NEW


def die_at(last: int):
    left = iter(range(last, -1, -1))

    def step(_name: str) -> None:
        if next(left) == 0:
            raise Died

    return step


def test_dying_before_any_step_leaves_whole_files_that_the_next_finishes(
    tmp_path_factory,
):
    names = steps(tmp_path_factory)
    assert names == [
        "make private folder",
        *(f"write {path}" for path in sorted(NEW)),
        "make folders",
        *(f"replace {path}" for path in ("a.py", "b.py", "records/b.json")),
        *(f"delete {path}" for path in ORPHANS),
        "sync",
        "replace MANIFEST.lock",
        "end",
    ]
    outcomes = []
    for last, name in enumerate(names):
        root = tmp_path_factory.mktemp("tree")
        write(root, OLD)
        with pytest.raises(Died):
            update(root, die_at(last))
        check_whole(root)
        found = contents(root)
        assert not any(path.startswith(".fmha-gen-") for path in found)
        outcomes.append(found)
        assert "edited" not in kinds(root).values(), name
        update(root)
        assert contents(root) == NEW
    begun = names.index("replace a.py")
    assert outcomes[: begun + 1] == [OLD] * (begun + 1)
    assert [found == NEW for found in outcomes] == [False] * (len(names) - 1) + [True]


def test_dying_again_and_again_comes_to_the_same_end(tmp_path_factory):
    """Each run dies one step later than the last one did."""
    root = tmp_path_factory.mktemp("tree")
    write(root, OLD)
    for last in range(len(steps(tmp_path_factory))):
        try:
            update(root, die_at(last))
        except Died:
            check_whole(root)
        else:
            break
    assert contents(root) == NEW


def test_a_kernel_that_came_before_the_lock_may_be_wanted_otherwise(tmp_path):
    """The lock knows neither; what is there says itself that no hand was in it."""
    write(tmp_path, {"b.py": kernel(4)})
    assert kinds(tmp_path, {"b.py": kernel(5)}, {}, []) == {"b.py": "changed"}


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
        "write b.py",
        "make folders",
        "delete gone.py",
        "replace records/b.json",
        "replace MANIFEST.lock",
        "end",
    ]
    for name in chosen:
        root = tmp_path_factory.mktemp("killed")
        write(root, OLD)
        process, reached = child(root, names.index(name))
        assert reached == name
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        check_whole(root)
        (left,) = root.glob(".fmha-gen-*")
        with tree.exclusive(root):  # the lock died with its holder
            assert not left.exists()
        update(root)
        assert contents(root) == NEW


@pytest.mark.parametrize("threads", [0, 1])  # a progress bar has one of its own
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_waits_for_renames_that_have_begun(tmp_path_factory, number, threads):
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


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read anywhere")
def test_a_folder_that_may_not_be_searched_is_named(tmp_path):
    write(tmp_path, OLD)
    (tmp_path / "records").chmod(0)
    try:
        with pytest.raises(CheckFailed, match=r"b\.json: cannot be read: Permission"):
            kinds(tmp_path)
    finally:
        (tmp_path / "records").chmod(0o755)


def test_what_cannot_be_finished_can_be_later(tmp_path):
    write(tmp_path, {"a.py": OLD["a.py"]})

    def spoil(name: str) -> None:
        if name == "make folders":
            (tmp_path / "records").write_text("")

    with pytest.raises(EnvironmentProblem, match="cannot write there: File exists"):
        update(tmp_path, spoil)
    with pytest.raises(CheckFailed, match="records: not a folder"):
        update(tmp_path)
    (tmp_path / "records").unlink()
    update(tmp_path)
    assert contents(tmp_path) == NEW


def test_a_full_disk_leaves_the_old_files_and_nothing_else(tmp_path):
    """The system refuses longer files, which is how a full disk looks from here."""
    write(tmp_path, OLD)
    large = {**NEW, "records/b.json": "x" * 100_000}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with (
            tree.exclusive(tmp_path),
            pytest.raises(EnvironmentProblem, match="cannot write there: File too"),
        ):
            tree.apply(tmp_path, tree.compare(tmp_path, large, OWNED, ORPHANS))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert contents(tmp_path) == OLD
    assert not list(tmp_path.glob(".*"))


# --- what somebody else left in the folder


def test_only_our_own_leftovers_are_removed(tmp_path):
    outside = tmp_path / "outside"
    root = tmp_path / "root"
    write(outside, {"0": "mine\n"})
    write(root, {**OLD, ".fmha-gen-0123456789abcdef/0": "left\n"})
    write(root, {".fmha-gen-1123456789abcdef/1": "left\n"})
    write(root, {".fmha-gen-1123456789abcdef/mine": "mine\n"})
    write(root, {".fmha-gen-2123456789abcdef/3/mine": "mine\n"})
    write(root, {".fmha-gen-stage/0": "of an older version\n"})
    (root / ".fmha-gen-3123456789abcdef").symlink_to(outside)
    (root / ".fmha-gen-0123456789abcdef/1").symlink_to(outside / "0")
    update(root)
    assert contents(outside) == {"0": "mine\n"}
    assert contents(root) == {
        **NEW,
        ".fmha-gen-1123456789abcdef/mine": "mine\n",
        ".fmha-gen-2123456789abcdef/3/mine": "mine\n",
        ".fmha-gen-stage/0": "of an older version\n",
    }


@pytest.mark.parametrize(
    "path", ["a.py", "b.py", "gone.py", "records/b.json", "MANIFEST.lock"]
)
@pytest.mark.parametrize("to", ["file", "folder", "nothing"])
def test_a_link_in_a_file_s_place_is_refused_by_name(tmp_path, path, to):
    outside, root = tmp_path / "outside", tmp_path / "root"
    write(outside, {"file": NEW.get(path, OLD.get(path, ""))})
    (outside / "folder").mkdir()
    write(root, OLD)
    (root / path).unlink(missing_ok=True)
    (root / path).symlink_to(outside / to)
    before = contents(root)
    with pytest.raises(CheckFailed, match=f"{path}: a symbolic link"):
        update(root)
    assert contents(outside) == {"file": NEW.get(path, OLD.get(path, ""))}
    assert not (outside / "nothing").exists()
    assert contents(root) == before


def test_a_link_in_a_folder_s_place_is_refused_by_name(tmp_path):
    outside, root = tmp_path / "outside", tmp_path / "root"
    write(outside, {"a.json": "mine\n"})
    write(root, {path: text for path, text in OLD.items() if "/" not in path})
    (root / "records").symlink_to(outside)
    with pytest.raises(CheckFailed, match="records: a symbolic link"):
        update(root)
    with tree.exclusive(root), pytest.raises(CheckFailed, match="records: a symbolic"):
        tree.apply(root, [tree.Change("records/a.json", "orphaned", None, "")])
    assert contents(outside) == {"a.json": "mine\n"}
    assert (root / "a.py").read_text() == OLD["a.py"]


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.py")
    with pytest.raises(CheckFailed, match=r"a\.py: cannot be read: not a file"):
        kinds(tmp_path)


def test_the_folder_itself_may_be_a_link(tmp_path):
    """Whoever gives it means what it leads to."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    update(tmp_path / "link")
    assert contents(tmp_path / "real") == NEW


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
