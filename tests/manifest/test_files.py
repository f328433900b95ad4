"""A file of ours is complete or absent, and no file is ever overwritten."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pagedctl.errors import ConfigError
from pagedctl.manifest import files

WRITE_NEW = "from pagedctl.manifest.files import write_new"
# The control: how a file is usually written. Every harness below must catch it.
WRITE_NAIVELY = """
import os
def write_new(path, data):
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    for start in range(0, len(data), 1 << 20):
        os.write(descriptor, data[start:start + (1 << 20)])
    os.close(descriptor)
"""

# Kills itself just before the k-th call that touches the file system.
KILLED_AT_CALL = """
import os, signal, sys
from pathlib import Path
{definition}
kill_at, path, no_links = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "no-links"
calls = 0
def counted(name, call):
    def run(*arguments, **keywords):
        global calls
        calls += 1
        if calls == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if name == "link" and no_links:
            raise PermissionError(1, "no hard links here")
        return call(*arguments, **keywords)
    return run
for name in ("open", "write", "fsync", "close", "link", "replace", "unlink"):
    setattr(os, name, counted(name, getattr(os, name)))
write_new(path, bytes(range(256)) * 4096 * 3)
print(calls)
"""
EXPECTED = bytes(range(256)) * 4096 * 3


def run_killed(definition: str, kill_at: int, path: Path, links: str) -> int | None:
    """Run until the kill; the number of calls if it came to the end, else None."""
    script = KILLED_AT_CALL.format(definition=definition)
    completed = subprocess.run(
        [sys.executable, "-c", script, str(kill_at), str(path), links],
        capture_output=True,
        text=True,
        check=False,
    )
    if completed.returncode == -signal.SIGKILL:
        return None
    assert completed.returncode == 0, completed.stderr
    return int(completed.stdout)


def states_after_kills(definition: str, folder: Path, links: str) -> list[str]:
    """The final file's state after a kill before each call in turn, until none is left."""
    states: list[str] = []
    for kill_at in range(1, 60):
        path = folder / f"{kill_at}.json"
        ended = run_killed(definition, kill_at, path, links)
        if not path.exists():
            states.append("absent")
        else:
            content = path.read_bytes()
            whole = content == EXPECTED
            states.append("complete" if whole else "half" if content else "empty")
        if ended is not None:
            return states
    raise AssertionError("the writer never came to its end")


def test_a_kill_before_any_system_call_leaves_the_file_absent_or_complete(tmp_path: Path) -> None:
    states = states_after_kills(WRITE_NEW, tmp_path, "links")
    assert len(states) >= 8, "too few kill points were reached"
    assert set(states) == {"absent", "complete"}
    assert states == sorted(states), "once published, the file stays"


def test_without_hard_links_a_kill_never_leaves_half_a_file(tmp_path: Path) -> None:
    """The reservation of the name may stay behind, empty; a reader refuses an empty file."""
    states = states_after_kills(WRITE_NEW, tmp_path, "no-links")
    assert len(states) >= 8
    assert "half" not in states
    assert states[-1] == "complete"
    assert "empty" in states, "the fallback was not reached"


def test_the_kill_harness_catches_a_naive_writer(tmp_path: Path) -> None:
    assert "half" in states_after_kills(WRITE_NAIVELY, tmp_path, "links")


KILLED_AT_RANDOM = """
import hashlib, sys
from pathlib import Path
{definition}
folder = Path(sys.argv[1])
body = bytes(range(256)) * 4096 * 16
data = body + hashlib.sha256(body).digest()
write_new(folder / "first.bin", data)
print("ready", flush=True)
for index in range(100_000):
    write_new(folder / f"{{index}}.bin", data)
"""


def broken_after_random_kills(definition: str, folder: Path, rounds: int) -> tuple[int, int]:
    """(broken, complete) final files after kill -9 at random moments."""
    rng = random.Random(0)
    broken = complete = 0
    for number in range(rounds):
        target = folder / str(number)
        target.mkdir()
        script = KILLED_AT_RANDOM.format(definition=definition)
        with subprocess.Popen(
            [sys.executable, "-c", script, str(target)], stdout=subprocess.PIPE
        ) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
            time.sleep(rng.uniform(0.01, 0.15))
            child.kill()
        for path in target.glob("*.bin"):
            data = path.read_bytes()
            whole = hashlib.sha256(data[:-32]).digest() == data[-32:]
            complete, broken = complete + whole, broken + (not whole)
        for path in target.iterdir():
            path.unlink()
    return broken, complete


def test_kill_9_at_random_moments_leaves_no_half_file(tmp_path: Path) -> None:
    broken, complete = broken_after_random_kills(WRITE_NEW, tmp_path, rounds=8)
    assert broken == 0
    assert complete >= 8


def test_the_random_kills_catch_a_naive_writer(tmp_path: Path) -> None:
    broken, _ = broken_after_random_kills(WRITE_NAIVELY, tmp_path, rounds=6)
    assert broken > 0


RACER = """
import json, sys, time
from pathlib import Path
from pagedctl.errors import ConfigError
from pagedctl.manifest.files import write_new
name = sys.argv[1]
print("ready", flush=True)
for line in sys.stdin:
    path, at = json.loads(line)
    while time.monotonic() < at:
        pass
    try:
        write_new(Path(path), name.encode() * 2000)
        print(json.dumps(None), flush=True)
    except ConfigError as error:
        print(json.dumps([error.what, error.remedy]), flush=True)
"""


def test_two_writers_of_one_path_one_wins_and_nothing_is_lost(tmp_path: Path) -> None:
    racers = {
        name: subprocess.Popen(
            [sys.executable, "-c", RACER, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("first", "other")
    }
    rng = random.Random(0)
    try:
        for racer in racers.values():
            assert racer.stdout is not None
            racer.stdout.readline()
        for number in range(60):
            path = tmp_path / f"{number}.json"
            start_s = time.monotonic() + 0.003
            for racer in racers.values():
                assert racer.stdin is not None
                order = [str(path), start_s + rng.uniform(0, 1e-4)]
                racer.stdin.write(json.dumps(order) + "\n")
                racer.stdin.flush()
            answers = {
                name: json.loads(racer.stdout.readline())  # type: ignore[union-attr]
                for name, racer in racers.items()
            }
            winners = [name for name, answer in answers.items() if answer is None]
            assert len(winners) == 1
            assert path.read_bytes() == winners[0].encode() * 2000
            (loser,) = set(racers) - set(winners)
            what, remedy = answers[loser]
            assert str(path) in what
            kept = next(Path(word.strip(";,")) for word in remedy.split() if ".tmp" in word)
            assert kept.read_bytes() == loser.encode() * 2000
    finally:
        for racer in racers.values():
            racer.communicate()


def test_an_existing_path_is_named_and_left_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(ConfigError) as caught:
        files.write_new(path, b"new")
    assert str(path) in caught.value.what
    assert path.read_text() == "old"
    (kept,) = tmp_path.glob("*.tmp")
    assert str(kept) in caught.value.remedy
    assert kept.read_bytes() == b"new"


@pytest.mark.parametrize("kind", ["file", "folder", "dangling link", "link to a file"])
def test_whatever_stands_at_a_path_is_refused_before_work_and_after(
    tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "a.json"
    if kind == "file":
        path.touch()
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "b.json")
        if kind == "link to a file":
            (tmp_path / "b.json").write_text("old")
    with pytest.raises(ConfigError) as caught:
        files.refuse_existing(path, "--json")
    assert caught.value.where == "--json"
    assert str(path) in caught.value.what
    with pytest.raises(ConfigError):
        files.write_new(path, b"new")
    assert not (tmp_path / "b.json").exists() or (tmp_path / "b.json").read_text() == "old"


def test_a_new_file_has_its_bytes_the_usual_mode_and_no_companion(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 240 + ".json")
    data = os.urandom(3 * files.CHUNK_BYTES + 17)
    files.refuse_existing(path, "--json")
    files.write_new(path, data)
    plain = tmp_path / "plain"
    plain.touch()
    assert path.read_bytes() == data
    assert path.stat().st_mode == plain.stat().st_mode
    assert path.stat().st_nlink == 1
    assert sorted(tmp_path.iterdir()) == sorted([path, plain])


def test_an_empty_file_can_be_written(tmp_path: Path) -> None:
    files.write_new(tmp_path / "empty", b"")
    assert (tmp_path / "empty").read_bytes() == b""


def test_a_missing_folder_is_refused_unless_it_is_ours_to_make(tmp_path: Path) -> None:
    path = tmp_path / "no" / "such" / "a.json"
    with pytest.raises(ConfigError) as early:
        files.refuse_existing(path, "-o")
    with pytest.raises(ConfigError) as late:
        files.write_new(path, b"x")
    for error in (early.value, late.value):
        assert str(path.parent) in error.what
        assert "mkdir -p" in error.remedy
    files.write_new(path, b"x", create_parents=True)
    assert path.read_bytes() == b"x"


def test_a_full_disk_leaves_nothing_and_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(ConfigError, match="No space left"):
        files.write_new(tmp_path / "a.json", b"x")
    assert list(tmp_path.iterdir()) == []


def test_data_is_on_the_disk_before_its_name_and_the_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut must not leave the final name without its bytes."""
    events: list[str] = []
    fsync, link = os.fsync, os.link

    def synced(descriptor: int) -> None:
        events.append("folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "data")
        fsync(descriptor)

    def linked(source: Path, target: Path) -> None:
        events.append("link")
        link(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "link", linked)
    files.write_new(tmp_path / "a", b"x")
    assert events == ["data", "link", "folder"]


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:3]))
    files.write_new(tmp_path / "a", b"0123456789")
    assert (tmp_path / "a").read_bytes() == b"0123456789"


def test_a_file_system_without_hard_links_refuses_an_existing_path_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    path = tmp_path / "a.json"
    files.write_new(path, b"one")
    with pytest.raises(ConfigError, match="exists"):
        files.write_new(path, b"two")
    assert path.read_bytes() == b"one"
    assert [kept.read_bytes() for kept in tmp_path.glob("*.tmp")] == [b"two"]


def test_a_lost_answer_to_our_own_link_is_not_taken_for_a_rival(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS repeats a link request whose answer was lost, and then finds the name taken."""
    link = os.link

    def answer_lost(source: Path, target: Path) -> None:
        link(source, target)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(os, "link", answer_lost)
    files.write_new(tmp_path / "a.json", b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_another_failure_to_publish_keeps_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(source: Path, target: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "link", broken)
    with pytest.raises(ConfigError, match="Input/output error") as caught:
        files.write_new(tmp_path / "a.json", b"x")
    (kept,) = tmp_path.iterdir()
    assert str(kept) in caught.value.remedy
    assert kept.read_bytes() == b"x"


def test_one_of_many_claims_wins_and_the_others_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "out"
    first = files.claim(path, "--output")
    os.write(first.descriptor, b"mine")
    assert (first.created, first.locked) == (True, True)
    with pytest.raises(ConfigError, match="out exists"):
        files.claim(path, "--output")
    with pytest.raises(ConfigError, match="another run is writing"):
        files.claim(path, "--output", existing=True)
    os.close(first.descriptor)
    with pytest.raises(ConfigError, match="out exists"):
        files.claim(path, "--output")
    assert path.read_bytes() == b"mine"
    with pytest.raises(ConfigError, match="cannot write"):
        files.claim(tmp_path / "no" / "out", "--output")


def test_a_file_that_is_there_is_taken_up_and_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "out"
    for text, created in ((b"one", True), (b"two", False)):
        claim = files.claim(path, "--output", existing=True)
        assert (claim.created, claim.locked) == (created, True)
        os.write(claim.descriptor, text)
        os.close(claim.descriptor)
    assert path.read_bytes() == b"onetwo"
    (tmp_path / "link").symlink_to(path)
    os.close(files.claim(tmp_path / "link", "--output", existing=True).descriptor)
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    os.mkfifo(tmp_path / "pipe")
    for name, problem in (
        ("dangling", "cannot write"),
        ("pipe", "is not a file of lines"),
        ("", "cannot write"),
    ):
        with pytest.raises(ConfigError, match=problem):
            files.claim(tmp_path / name, "--output", existing=True)


def test_a_claim_of_a_file_that_its_owner_takes_away_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the opening and the lock, the run that made the file failed and removed it."""
    path = tmp_path / "out"
    path.write_bytes(b"old")
    lock, locked = fcntl.flock, []

    def late(descriptor: int, operation: int) -> None:
        if not locked:
            path.unlink()
        locked.append(descriptor)
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    claim = files.claim(path, "--output", existing=True)
    assert len(locked) == 2
    assert claim.created
    assert os.path.samestat(os.fstat(claim.descriptor), path.stat())
    os.close(claim.descriptor)


def test_a_claim_without_locks_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    claim = files.claim(tmp_path / "out", "--output")
    assert not claim.locked
    os.close(claim.descriptor)


@pytest.mark.parametrize("links", ["links", "no-links"])
def test_a_file_moved_aside_gets_a_free_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: str
) -> None:
    if links == "no-links":

        def refused(source: Path, target: Path) -> None:
            raise PermissionError(errno.EPERM, "no hard links here")

        monkeypatch.setattr(os, "link", refused)
    path = tmp_path / "out.manifest.json"
    (tmp_path / "out.manifest.2.json").write_bytes(b"precious")
    found = []
    for text in (b"first", b"second"):
        path.write_bytes(text)
        found.append(files.move_aside(path).name)
    assert found == ["out.manifest.1.json", "out.manifest.3.json"]
    texts = {one.name: one.read_bytes() for one in tmp_path.iterdir()}
    assert texts == {
        "out.manifest.1.json": b"first",
        "out.manifest.2.json": b"precious",
        "out.manifest.3.json": b"second",
    }


def test_two_spellings_of_one_path_clash(tmp_path: Path) -> None:
    (tmp_path / "here").symlink_to(tmp_path)
    files.refuse_clashes({"--output": tmp_path / "a", "--json": tmp_path / "b"})
    with pytest.raises(ConfigError) as caught:
        files.refuse_clashes({"--output": tmp_path / "a", "--json": tmp_path / "here" / "a"})
    assert caught.value.where == "--output and --json"


def test_a_folder_that_takes_no_files_is_refused_before_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def read_only(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, "Read-only file system")
        return opened(path, flags, mode)

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(ConfigError, match="Read-only file system"):
        files.refuse_existing(tmp_path / "a.json", "--json")
    with pytest.raises(ConfigError, match="Read-only file system"):
        files.make_writable_folder(tmp_path / "runs", "PAGEDCTL_RUNS_DIR")
