"""One process at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from storage.errors import StoreLocked
from storage.lock import DirectoryLock
from tests.storage.harness import NOW_MS

if TYPE_CHECKING:
    from pathlib import Path

    from tests.storage.engine.raw import Files

HOLD = """
import asyncio, sys
from pathlib import Path
from storage import open_store

async def main():
    store = open_store(sys.argv[1], Path(sys.argv[2]))
    await store.open(now_ms=1)
    print("open", flush=True)
    sys.stdin.readline()

asyncio.run(main())
"""


async def test_another_process_gets_the_pid_of_the_one_that_has_it(files: Files) -> None:
    with subprocess.Popen(  # noqa: ASYNC220 - nothing else runs in this loop
        [sys.executable, "-c", HOLD, files.kind, str(files.directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"open\n"
        db = files.database()
        with pytest.raises(StoreLocked) as refused:
            await db.open()
        assert refused.value.pid == holder.pid
        assert str(holder.pid) in str(refused.value)
        holder.kill()
    opened = await db.open()
    assert (opened.minted, opened.log.boot) == ("", 2)
    await db.stop()


async def test_a_second_store_in_this_process_is_refused_and_the_first_goes_on(
    files: Files,
) -> None:
    db = files.database()
    await db.open()
    with pytest.raises(StoreLocked) as refused:
        await files.start().open(now_ms=NOW_MS)
    assert refused.value.pid == os.getpid()
    await db.acquire()
    await db.stop()


async def test_a_store_that_could_not_be_opened_leaves_no_lock(files: Files) -> None:
    files.directory.mkdir()
    files.file.write_bytes(b"")
    for _ in range(2):
        with pytest.raises(Exception, match="empty"):
            await files.start().open(now_ms=NOW_MS)
    DirectoryLock(files.directory).acquire()


def test_a_lock_file_without_a_pid_is_told_as_nobody(tmp_path: Path) -> None:
    first = DirectoryLock(tmp_path)
    first.acquire()
    (tmp_path / "lock").write_text("")
    with pytest.raises(StoreLocked) as refused:
        DirectoryLock(tmp_path).acquire()
    assert refused.value.pid == 0
    first.release()
    first.release()
    DirectoryLock(tmp_path).acquire()
