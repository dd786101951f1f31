"""Processes that are killed, and disks that are full or held by somebody else."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from types import SimpleNamespace
from typing import TYPE_CHECKING
from unittest.mock import Mock

import lmdb
import pytest

from storage.api import Batch, Prune
from storage.errors import StoreFull, StoreUnavailable
from storage.lmdb_store import LENGTHEN_BYTES, MAP_BYTES, _LmdbDatabase
from storage.outbox import State
from storage.sqlite_store import _SqliteDatabase
from tests.storage.engine.raw import Files
from tests.storage.engine.writer import PER_BATCH
from tests.storage.harness import message

if TYPE_CHECKING:
    from pathlib import Path

ALONE = ["unshare", "--mount", "--user", "--map-root-user", "--", "sh", "-c"]
"""Run something that may mount what nobody else sees."""


def writer(files: Files, what: str) -> subprocess.Popen[bytes]:
    arguments = ["-m", "tests.storage.engine.writer", files.kind, str(files.directory), what]
    return subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE)


@pytest.mark.parametrize("batches", [1, 5, 60])
async def test_what_was_reported_is_there_after_a_kill(files: Files, batches: int) -> None:
    with writer(files, "kill") as process:
        assert process.stdout is not None
        reported = [int(process.stdout.readline()) for _ in range(batches)]
        process.kill()
        reported += [int(line) for line in process.stdout.read().split(b"\n")[:-1]]
    db = files.database()
    opened = await db.open()
    assert opened.minted == ""
    assert opened.log.head >= reported[-1]
    assert opened.log.head % PER_BATCH == 0, "a batch is there whole or not at all"
    history = await db.read_all(0, lambda _: 1)
    assert [entry.offset for entry in history] == list(range(1, opened.log.head + 1))
    assert all(entry.payload[:8] == entry.offset.to_bytes(8, "big") for entry in history)
    snapshot = await db.snapshot()
    assert snapshot.consumer.cursor == opened.log.head
    assert [d.offset for claim in snapshot.claims for d in claim.deliveries] == list(
        range(opened.log.head - PER_BATCH + 1, opened.log.head + 1)
    )
    await db.stop()


@pytest.mark.parametrize("lines", [1, 30, 300])
async def test_what_was_reported_of_the_outbox_is_there_after_a_kill(
    files: Files, lines: int
) -> None:
    """Each role on a connection of its own, beside the writer of the history."""
    with writer(files, "outbox") as process:
        assert process.stdout is not None
        reported = [process.stdout.readline() for _ in range(lines)]
        process.kill()
        reported += process.stdout.read().split(b"\n")[:-1]
    db = files.database()
    opened = await db.open()
    assert opened.log.head % PER_BATCH == 0, "a batch is there whole or not at all"
    states = {one.id: one.state for one in await db.messages()}
    told: dict[bytes, set[int]] = {b"enqueued": set(), b"done": set(), b"dead": set()}
    for line in reported:
        what, number = line.split()
        told[what].add(int(number))
    assert told[b"enqueued"] <= set(states)
    assert all(states[number] is State.DONE for number in told[b"done"])
    assert all(states[number] is State.DEAD for number in told[b"dead"])
    await db.stop()


@pytest.mark.case("HK-19")
async def test_a_full_disk_refuses_batches_whole_and_goes_on_when_there_is_room(
    files: Files,
) -> None:
    with writer(files, "full") as process:
        out, _ = process.communicate(timeout=60)
    *refusals, head = out.split()
    assert process.returncode == 0
    assert len(refusals) == 3
    assert set(refusals) <= {b"StoreFull", b"StoreUnavailable"}
    db = files.database()
    assert (await db.open()).log.head == int(head)
    assert len(await db.read_all(0, lambda _: 1)) == int(head)
    await db.stop()


@pytest.mark.case("HK-19")
def test_a_disk_that_is_full_has_room_again_when_history_is_pruned(files: Files) -> None:
    """On a file system of its own, 48 MiB, where this process may make one."""
    files.directory.mkdir()
    what = f"mount -t tmpfs -o size=48m tmpfs {files.directory} && exec "
    if subprocess.call([*ALONE, f"{what} true"], stderr=subprocess.DEVNULL):
        pytest.skip("no file system can be mounted here")
    arguments = f"-m tests.storage.engine.writer {files.kind} {files.directory} prune"
    command = [*ALONE, f"{what} {sys.executable} {arguments}"]
    out = subprocess.check_output(command, timeout=60)
    *floors, head = map(int, out.split())
    assert floors == [0, 0]
    assert head > 40 << 20 >> 13


async def test_what_is_pruned_is_given_back_to_the_disk(tmp_path: Path) -> None:
    files = Files("sqlite", tmp_path)
    db = files.database()
    await db.open()
    for _ in range(16):
        await db.append(message(payload=bytes(1 << 20)))
    await db.reopen()
    assert files.file.stat().st_size > 16 << 20
    for _ in range(10):
        await db.write(Prune(15, 0, 1000))
    await db.stop()
    assert files.file.stat().st_size < 6 << 20, "all but a quarter"
    with closing(sqlite3.connect(files.file, isolation_level=None)) as connection:
        assert connection.execute("PRAGMA freelist_count").fetchone() > (0,)
        _SqliteDatabase(connection).scrub()
        assert connection.execute("PRAGMA freelist_count").fetchone() == (0,)


async def test_commits_write_over_what_is_in_the_file_already(files: Files) -> None:
    """A sync then has no new length of the file to write down."""
    db = files.database()
    await db.open()
    await db.append(message())
    log = files.file.with_name(f"{files.file.name}-wal")
    grows = log if files.kind == "sqlite" else files.file
    at_first = grows.stat().st_size
    assert at_first > LENGTHEN_BYTES * 0.9
    for _ in range(8):
        await db.append(message(payload=bytes(16 << 10)))
    assert grows.stat().st_size == at_first
    await db.stop()


async def test_a_map_that_was_opened_on_a_full_disk_grows_when_that_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 0
    monkeypatch.setattr("storage.lmdb_store.MAP_BYTES", 1 << 20)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free))
    db = Files("lmdb", tmp_path).database()
    await db.open()
    with pytest.raises(StoreFull, match="maximum"):
        await db.append(message(payload=bytes(4 << 20)))
    free = 1 << 30
    await db.append(message(payload=bytes(4 << 20)))
    await db.stop()


async def test_a_map_that_could_not_be_opened_again_is_opened_by_a_later_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A meta page could not be written, and the disk fails on."""
    db = Files("lmdb", tmp_path).database()
    await db.open()
    await db.append(message(payload=b"before"))
    panic, disk = lmdb.PanicError("mdb_txn_commit"), lmdb.DiskError("mdb_env_open")
    panic.code, disk.code = -30795, 5  # as LMDB gives them
    with monkeypatch.context() as failing:
        for name, error in (("_write_once", panic), ("_open", disk)):
            failing.setattr(_LmdbDatabase, name, Mock(side_effect=error))
        for _ in range(3):
            with pytest.raises(StoreUnavailable):
                await db.commit(Batch([message()._replace(offset=2)]))
            with pytest.raises(StoreUnavailable):
                await db.store.fetch([1])
    await db.commit(Batch([message(payload=b"behind")._replace(offset=2)]))
    assert [e.payload for e in await db.store.fetch([1, 2])] == [b"before", b"behind"]
    await db.stop()


async def test_a_backup_that_was_killed_does_not_keep_the_file_growing(tmp_path: Path) -> None:
    """Who reads an LMDB file keeps the pages of that moment from being used again."""
    files = Files("lmdb", tmp_path)
    db = files.database()
    await db.open()
    await db.append(message())
    code = (
        "import lmdb, os, signal, sys\n"
        "env = lmdb.open(sys.argv[1], subdir=False, readonly=True)\n"
        "with env.begin():\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(files.file)], check=False)  # noqa: ASYNC221
    for head in range(1, 40):
        await db.append(message(payload=bytes(1 << 20)))
        await db.write(Prune(head, 0, 1000))
    await db.stop()
    assert files.file.stat().st_size < 10 << 20


async def test_the_map_grows_under_a_batch_that_does_not_fit(tmp_path: Path) -> None:
    db = Files("lmdb", tmp_path).database()
    await db.open()
    reading = asyncio.create_task(db.store.check())
    large = bytes(MAP_BYTES * 3 // 2)
    await db.append(message(b"a"), message(b"b", large), message(b"c"))
    assert await reading == []
    assert [len(e.payload) for e in await db.store.fetch([1, 2, 3])] == [1, len(large), 1]
    await db.reopen()
    assert len(await db.history()) == 3
    await db.stop()


@pytest.mark.case("HK-19")
async def test_at_the_maximum_of_the_map_the_store_is_full_until_history_is_pruned(
    tmp_path: Path,
) -> None:
    db = Files("lmdb", tmp_path, map_bytes_max=MAP_BYTES).database()
    await db.open()
    payload = bytes(1 << 20)
    appended = 0
    with pytest.raises(StoreFull, match="maximum"):  # noqa: PT012 - some append will be too many
        while True:
            await db.append(message(payload=payload))
            appended += 1
    before = await db.store.log()
    assert before.head == appended > 40
    with pytest.raises(StoreFull):
        await db.append(message(payload=payload))
    assert await db.store.log() == before
    await db.write(Prune(appended // 2, 0, 1000))
    for _ in range(10):
        await db.append(message(payload=payload))
    assert (await db.store.log()).head == appended + 10
    await db.stop()


@pytest.mark.case("HK-24")
async def test_a_write_lock_held_by_somebody_else_makes_commits_late_and_nothing_else(
    files: Files,
) -> None:
    db = files.database()
    await db.open()
    await db.append(message(payload=b"before"))
    held, release = threading.Event(), threading.Event()

    def hold_sqlite() -> None:
        connection = sqlite3.connect(files.file, isolation_level=None)
        connection.execute("BEGIN IMMEDIATE")
        held.set()
        release.wait(10)
        connection.execute("ROLLBACK")
        connection.close()

    hold_lmdb = (
        "import lmdb, sys\n"
        "with lmdb.open(sys.argv[1], subdir=False, create=False) as env:\n"
        "    with env.begin(write=True) as txn:\n"
        "        print(flush=True)\n"
        "        sys.stdin.readline()\n"
    )
    process = None
    if files.kind == "sqlite":
        thread = threading.Thread(target=hold_sqlite)
        thread.start()
        held.wait(10)
    else:
        process = subprocess.Popen(  # noqa: ASYNC220 - it answers at once
            [sys.executable, "-c", hold_lmdb, str(files.file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        process.stdout.readline()
    done: asyncio.Future[object] = asyncio.Future()
    db.store.submit(Batch([message(payload=b"late")._replace(offset=2)]), done.set_result)
    begun = time.monotonic()
    for _ in range(10):
        await asyncio.sleep(0.02)
        assert [e.payload for e in await db.store.fetch([1])] == [b"before"]
    assert time.monotonic() - begun < 5
    assert not done.done()
    assert (await db.store.log()).head == 1
    if process is not None:
        process.communicate(b"\n")
    else:
        release.set()
        thread.join()
    assert await done == []
    assert [e.payload for e in await db.store.fetch([1, 2])] == [b"before", b"late"]
    await db.stop()
