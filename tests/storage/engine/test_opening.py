"""What is found in the data directory: opened, created, or refused with a text that helps."""

from __future__ import annotations

import os
import sqlite3
from typing import TYPE_CHECKING

import lmdb
import pytest

from storage import open_store
from storage.errors import StoreCorrupt, StoreTooNew, StoreUnavailable, StoreUnusable
from storage.kv import FIRST_FORMAT_SPACES, Space
from storage.meta import _FORMAT, _FORMAT_KEY, FORMAT, _sealed, read_format
from storage.outbox import Enqueue
from tests.storage.harness import NOW_MS, message

if TYPE_CHECKING:
    from pathlib import Path

    from storage.kv import WriteTxn
    from tests.storage.engine.raw import Files


async def refused(files: Files) -> StoreCorrupt:
    """The refusal, after which nothing has changed."""
    before = files.file.read_bytes() if files.file.exists() else None
    with pytest.raises(StoreCorrupt) as error:
        await files.start().open(now_ms=NOW_MS)
    assert (files.file.read_bytes() if files.file.exists() else None) == before
    assert "nothing was changed" in str(error.value)
    assert str(files.directory) in str(error.value)
    return error.value


async def made(files: Files, entries: int = 3) -> None:
    db = files.database()
    await db.open()
    for _ in range(entries):
        await db.append(message(payload=bytes(10_000)))
    await db.acquire()
    await db.store.close()


@pytest.mark.parametrize("content", [b"", b"\n", b"not a database\n" * 1000, os.urandom(100_000)])
async def test_what_is_no_database_is_refused_and_left_alone(files: Files, content: bytes) -> None:
    files.directory.mkdir()
    files.file.write_bytes(content)
    await refused(files)


async def test_a_file_that_was_cut_short_is_refused(files: Files) -> None:
    await made(files, entries=300)
    with files.file.open("r+b") as file:
        file.truncate(files.file.stat().st_size // 3)
    await refused(files)


async def test_a_first_page_of_zeros_is_refused(files: Files) -> None:
    await made(files)
    with files.file.open("r+b") as file:
        file.write(bytes(16384))
    await refused(files)


async def test_a_database_of_somebody_else_is_refused(files: Files) -> None:
    files.directory.mkdir()
    if files.kind == "sqlite":
        with sqlite3.connect(files.file) as connection:
            connection.execute("CREATE TABLE history (x)")
        connection.close()
    else:
        with lmdb.open(str(files.file), subdir=False) as env, env.begin(write=True) as txn:
            txn.put(b"somebody", b"else")
    assert "not one of ours" in str(await refused(files))


@pytest.mark.parametrize("key", [b"format", b"identity", b"ends"])
async def test_a_damaged_row_about_the_database_itself_is_refused(files: Files, key: bytes) -> None:
    await made(files)
    files.flip(Space.META, key, 3)
    assert f"its {key.decode()} is damaged" in str(await refused(files))
    files.alter(lambda txn: txn.delete(Space.META, key))
    assert f"its {key.decode()} is missing" in str(await refused(files))


async def test_a_newer_format_is_refused_by_name(files: Files) -> None:
    await made(files)

    def work(txn: WriteTxn) -> None:
        txn.put(Space.META, _FORMAT_KEY, _sealed(_FORMAT.pack(FORMAT + 1)))

    files.alter(work)
    with pytest.raises(StoreTooNew, match=rf"format {FORMAT + 1}, this version .* knows {FORMAT}"):
        await files.start().open(now_ms=NOW_MS)


async def test_a_log_without_its_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "history.sqlite-wal").write_bytes(b"frames")
    with pytest.raises(StoreCorrupt, match="it is missing, but"):
        await open_store("sqlite", tmp_path).open(now_ms=NOW_MS)
    assert not (tmp_path / "history.sqlite").exists()


async def test_the_other_kind_of_store_is_not_passed_over(files: Files) -> None:
    await made(files)
    other = open_store("lmdb" if files.kind == "sqlite" else "sqlite", files.directory)
    with pytest.raises(StoreUnusable, match=f"holds a store of kind '{files.kind}'"):
        await other.open(now_ms=NOW_MS)


async def test_a_directory_that_cannot_be_made_is_unavailable(files: Files) -> None:
    files.directory.write_text("a file")
    with pytest.raises(StoreUnavailable):
        await files.start().open(now_ms=NOW_MS)


async def test_a_creation_that_was_cut_off_begins_again(files: Files) -> None:
    files.directory.mkdir()
    files.file.with_name(files.file.name + ".new").write_bytes(b"half of it")
    db = files.database()
    assert (await db.open()).minted == "created"
    await db.stop()


async def test_a_closed_store_refuses_and_can_be_opened_again(files: Files) -> None:
    db = files.database()
    await db.open()
    await db.store.close()
    await db.store.close()
    for call in (db.store.log(), db.store.check(), db.store.fetch([1]), db.append(message())):
        with pytest.raises(StoreUnavailable):
            await call
    await db.store.open(now_ms=NOW_MS)
    with pytest.raises(StoreUnusable):
        await db.store.open(now_ms=NOW_MS)
    await db.append(message())
    await db.stop()


async def test_a_database_of_the_first_format_gets_an_outbox(files: Files) -> None:
    db = files.database()
    await db.open()
    await db.append(message())
    await db.store.close()
    make_first_format(files)
    db = files.database()
    await db.open()
    assert len(await db.history()) == 1
    assert (await db.do(Enqueue(b"hook", message(), NOW_MS))).id == 1
    await db.stop()
    assert files.alter(read_format) == FORMAT


def make_first_format(files: Files) -> None:
    """Take away what later formats added."""

    def older(txn: WriteTxn) -> None:
        txn.put(Space.META, _FORMAT_KEY, _sealed(_FORMAT.pack(1)))

    files.alter(older)
    later = [space.name.lower() for space in Space if space >= FIRST_FORMAT_SPACES]
    assert later[0] == "outbox"
    if files.kind == "lmdb":
        with lmdb.open(str(files.file), subdir=False, max_dbs=64) as env:
            for name in later:
                db = env.open_db(name.encode(), create=False)
                with env.begin(write=True) as txn:
                    txn.drop(db)
        return
    connection = sqlite3.connect(files.file)
    for name in later:
        connection.execute(f"DROP TABLE {name}")
    connection.close()
