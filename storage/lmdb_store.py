"""The store on LMDB: a memory-mapped B-tree, copy on write, one writer, readers never wait.

One thread writes and one reads. A commit writes the changed pages, syncs, and then writes the
meta page that points to them, so a crash at any step leaves the last commit or the one before.
Durability "os" leaves out the sync of the meta page only (``metasync=False``): the last commits
may be lost with the machine, but the file stays sound. ``sync=False`` would not keep that.

The map. LMDB maps the file at a size that is given, and refuses to grow beyond it. We start small
(the file is a little longer than what is in it, whatever the map), and when it is full the batch is
given up, the map doubled, and the batch applied again. A map cannot be moved under an open read
transaction, so the reader holds a lock while it has one. At the maximum the store is full:
StoreFull. Deleting needs free pages too, so RESERVE_BYTES are kept back for batches that only
make room.
"""

from __future__ import annotations

import errno
import logging
import shutil
from contextlib import suppress
from functools import partial
from os import SEEK_END
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, Final, TypeVar

import lmdb

from storage.durable import DurableStore
from storage.errors import NO_SPACE, StoreFull, StoreUnavailable
from storage.kv import FIRST_FORMAT_SPACES, Space
from storage.worker import Jobs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from storage.api import Outcome
    from storage.durable import Durability
    from storage.keyring import Keyring
    from storage.kv import Database, ReadTxn, WriteTxn

__all__ = ["LmdbStore"]

T = TypeVar("T")

MAP_BYTES: Final = 64 << 20
"""The first map: address space, not disk; small enough that growing is tried by every broker that
stores more than a little."""
MAP_BYTES_MAX: Final = 64 << 30
"""The largest map unless one is configured, if the disk has that much."""
RESERVE_BYTES: Final = 4 << 20
"""Kept back for batches that make room: copies of the pages that a Prune of 64 blocks touches."""

PAGE_BYTES: Final = 4096

LENGTHEN_BYTES: Final = 4 << 20
LENGTHEN_COMMITS: Final = 16
"""Every so many commits the file is made longer by so much, if need be: see _lengthen."""
LOW_DISK_BYTES: Final = 64 << 20
"""Not when less than this is free."""
_ZEROS: Final = bytes(64 << 10)

UNWRITTEN_BYTES_MAX: Final = 1 << 20
"""Pages at the end of a file that may be missing without harm; see _must_be_whole."""

log = logging.getLogger("amqtt_durable.store")

_DAMAGE: Final = (
    lmdb.CorruptedError,
    lmdb.InvalidError,
    lmdb.PageNotFoundError,
    lmdb.VersionMismatchError,
)


class _Txn:
    """storage.kv.WriteTxn over a transaction of LMDB."""

    __slots__ = ("_dbs", "_txn")
    hides_names = False

    def __init__(self, txn: lmdb.Transaction[bytes], dbs: list[Any]) -> None:
        self._txn = txn
        self._dbs = dbs

    def place(self, _: Space, key: bytes) -> bytes:
        return key

    def get(self, space: Space, key: bytes) -> bytes | None:
        return self._txn.get(key, None, self._dbs[space])

    def put(self, space: Space, key: bytes, value: bytes) -> None:
        self._txn.put(key, value, True, True, False, self._dbs[space])

    def delete(self, space: Space, key: bytes) -> bool:
        return self._txn.delete(key, b"", self._dbs[space])

    def scan(
        self,
        space: Space,
        start: bytes = b"",
        stop: bytes | None = None,
        *,
        reverse: bool = False,
    ) -> Iterator[tuple[bytes, bytes]]:
        with self._txn.cursor(self._dbs[space]) as cursor:
            if reverse:
                at = cursor.set_range(stop) if stop is not None else False
                if not (cursor.prev() if at else cursor.last()):
                    return
                for row in cursor.iterprev(True, True):
                    if row[0] < start:
                        return
                    yield row
            else:
                if not (cursor.set_range(start) if start else cursor.first()):
                    return
                for row in cursor.iternext(True, True):
                    if stop is not None and row[0] >= stop:
                        return
                    yield row


class _LmdbDatabase:
    """storage.kv.Database over an environment of LMDB."""

    def __init__(
        self, file: Path, durability: Durability, map_bytes_max: int | None, *, create: bool
    ) -> None:
        self._file = file
        self._durability = durability
        self._map_lock = Lock()
        self._commits = 0
        self._length = 0
        """Of the file, when it was made longer the last time."""
        self._lost_map_bytes = 0
        """The size of the map, while the environment is closed and could not be opened again."""
        self._max = map_bytes_max or self._bytes_that_fit()
        self._is_max_given = map_bytes_max is not None
        self._env, self._dbs = self._open(create=create)
        self._env.reader_check()

    def _open(self, *, create: bool) -> tuple[lmdb.Environment, list[Any]]:
        env = lmdb.open(
            str(self._file),
            map_size=min(MAP_BYTES, self._max),
            subdir=False,
            metasync=self._durability == "fsync",
            mode=0o640,
            max_dbs=len(Space),
            max_readers=16,
            max_spare_txns=2,
        )
        try:
            self._must_be_whole(env)
            with env.begin(write=True) as txn:  # handles last only if it is committed
                names = [space.name.lower().encode() for space in Space]
                return env, [
                    env.open_db(name, txn, create=create or number >= FIRST_FORMAT_SPACES)
                    for number, name in enumerate(names)
                ]
        except BaseException:
            env.close()
            raise

    def _bytes_that_fit(self) -> int:
        """How long the file may get on the disk as it is now."""
        used = self._file.stat().st_size if self._file.exists() else 0
        free = shutil.disk_usage(self._file.parent).free
        return max(MAP_BYTES, min(MAP_BYTES_MAX, used + free - RESERVE_BYTES))

    def _must_be_whole(self, env: lmdb.Environment) -> None:
        """A page behind the end of the file would kill the process (SIGBUS) when it is read.

        The last few pages may never have been written, if they were free again in the transaction
        that made them; so a file that ends a little early is made as long as it says it is.
        """
        wanted = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
        size = self._file.stat().st_size
        if size < wanted - UNWRITTEN_BYTES_MAX:
            raise lmdb.CorruptedError(f"it ends after {size} bytes of {wanted}")
        if size < wanted:
            with self._file.open("r+b") as file:
                file.truncate(wanted)

    def write(self, work: Callable[[WriteTxn], T], *, frees: bool = False) -> T:
        """See storage.kv.Database. In the writer's thread."""
        is_turned = False
        while True:
            try:
                if self._lost_map_bytes:
                    self._reopen()
                result = self._write_once(work)
            except lmdb.MapFullError:
                if self._grow(frees=frees):
                    continue
                if is_turned:
                    given = ", map_bytes_max" if self._is_max_given else ", which the disk has"
                    reason = f"its map is at its maximum, {self._max} bytes{given}"
                    raise StoreFull(f"{self._file.name}: {reason}") from None
                self._turn_over()
                is_turned = True
            except lmdb.PanicError:
                self._lose()
                with suppress(lmdb.Error, OSError):  # then the next write tries
                    self._reopen()
                raise StoreUnavailable(f"{self._file.name}: a write failed midway") from None
            except OSError as error:
                raise StoreUnavailable(f"{self._file.name}: {error.strerror}") from error
            except lmdb.Error as error:
                if error.code == errno.EIO and self._is_disk_full():
                    raise StoreFull(f"lmdb: {error}") from error
                raise _mapped(error) from error
            else:
                if frees:
                    self._keep_reserve()
                    self._forget_the_dead()
                self._lengthen()
                return result

    def _lengthen(self) -> None:
        """Have zeros behind the last page, for the next commits to write over. Where a file grows
        with each commit, each sync puts its new length into the file system's journal: half as
        much time again, and more where others write to that journal. Nothing depends on it."""
        self._commits += 1
        if self._commits % LENGTHEN_COMMITS != 1:
            return
        info = self._env.info()
        end = (info["last_pgno"] + 1) * self._env.stat()["psize"]
        if end + LENGTHEN_BYTES // 2 <= self._length:
            return
        with suppress(OSError), self._file.open("r+b", buffering=0) as file:
            self._length = file.seek(0, SEEK_END)
            more = min(end + LENGTHEN_BYTES, info["map_size"]) - self._length
            if more > 0 and shutil.disk_usage(self._file.parent).free > LOW_DISK_BYTES:
                file.writelines([_ZEROS] * (more // len(_ZEROS)))
                self._length = file.tell()

    def _forget_the_dead(self) -> None:
        """A process that died while it read the file (a backup) keeps all pages that were in use
        then from being used again, until somebody looks whether it is there."""
        with suppress(lmdb.Error):  # the batch is committed, and the next one looks again
            self._env.reader_check()

    def _is_disk_full(self) -> bool:
        """LMDB says "I/O error" of a write that was cut short because the disk was full."""
        return shutil.disk_usage(self._file.parent).free < PAGE_BYTES

    def _write_once(self, work: Callable[[WriteTxn], T]) -> T:
        txn = self._env.begin(write=True)
        try:
            result = work(_Txn(txn, self._dbs))
        except BaseException:
            txn.abort()
            raise
        txn.commit()
        return result

    def read(self, work: Callable[[ReadTxn], T]) -> T:
        """See storage.kv.Database. In the reader's thread, or the writer's before there is one."""
        with self._map_lock:
            if self._lost_map_bytes:
                raise StoreUnavailable(f"{self._file.name}: it is not open")
            try:
                txn = self._env.begin()
                try:
                    return work(_Txn(txn, self._dbs))
                finally:
                    txn.abort()
            except lmdb.Error as error:
                raise _mapped(error) from error

    def _grow(self, *, frees: bool) -> bool:
        """Double the map; False at the maximum."""
        size = self._env.info()["map_size"]
        if size >= self._max and not self._is_max_given:  # the disk may have room again
            self._max = max(self._max, self._bytes_that_fit())
        most = self._max + (RESERVE_BYTES if frees else 0)
        if size >= most:
            return False
        self._set_map_bytes(min(size * 2, most))
        return True

    def _turn_over(self) -> None:
        """Pages that a transaction freed are used again by the second one after it: be the first.

        Without this a store that was full, and whose history was pruned, would stay full.
        """
        if self._grow(frees=True):
            with suppress(lmdb.Error):  # then it is full indeed, and the caller finds out
                self._write_once(lambda txn: txn.put(Space.META, b"turnover", b""))
            self._keep_reserve()

    def _keep_reserve(self) -> None:
        """Go back to the maximum, if the reserve was used."""
        if self._env.info()["map_size"] > self._max:
            try:
                self._set_map_bytes(self._max)
            except lmdb.Error as error:
                # the batch is committed, whatever happens here; the next one tries again
                log.warning("the map keeps its reserve: %s", error)

    def _set_map_bytes(self, size: int) -> None:
        with self._map_lock:
            self._env.set_mapsize(size)

    def _lose(self) -> None:
        """LMDB refuses everything after it could not write its meta page, until it is reopened."""
        with self._map_lock:
            self._lost_map_bytes = self._env.info()["map_size"]
            self._env.close()

    def _reopen(self) -> None:
        with self._map_lock:
            env, dbs = self._open(create=False)
            try:
                env.set_mapsize(self._lost_map_bytes)
            except BaseException:
                env.close()
                raise
            self._env, self._dbs = env, dbs
            self._lost_map_bytes = 0

    def scrub(self) -> None:
        """See storage.kv.Database. Free pages keep what was in them until they are used again."""

    def close(self) -> None:
        """See storage.kv.Database."""
        self._env.close()


def _mapped(error: lmdb.Error) -> Exception:
    """What an error of LMDB means; one that only a bug of ours can cause stays what it is."""
    text = f"lmdb: {error}"
    if error.code in NO_SPACE or isinstance(error, (lmdb.DiskError, lmdb.MapFullError)):
        return StoreFull(text)
    if error.code > 0 or isinstance(error, (*_DAMAGE, lmdb.PanicError, lmdb.ReadersFullError)):
        return StoreUnavailable(text)
    return error


class _Worker(Jobs):
    """A thread with a queue."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._thread = Thread(target=self.serve, name=name, daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """Finish what was posted, and end."""
        await self.run(lambda: None)
        self.end()
        self._thread.join()


class LmdbStore(DurableStore):
    """See storage.durable.DurableStore.

    map_bytes_max: the file never gets longer than this (and RESERVE_BYTES); None = the smaller of
        64 GiB and what the disk has free.
    """

    name = "lmdb"

    def __init__(
        self,
        directory: Path,
        *,
        durability: Durability = "fsync",
        map_bytes_max: int | None = None,
        keyring: Keyring | None = None,
        seal_topics: bool = False,
    ) -> None:
        super().__init__(directory, durability=durability, keyring=keyring, seal_topics=seal_topics)
        self._map_bytes_max = map_bytes_max
        self._database: _LmdbDatabase | None = None
        self._writer: _Worker | None = None
        self._reader: _Worker | None = None

    async def _connect(self, file: Path, *, create: bool) -> None:
        self._writer = _Worker("store-writer")
        self._reader = _Worker("store-reader")
        connect = partial(_LmdbDatabase, file, self.durability, self._map_bytes_max, create=create)
        try:
            self._database = await self._writer.run(connect)
        except lmdb.NotFoundError as error:
            raise self._corrupt("it is not one of ours") from error
        except _DAMAGE as error:
            raise self._corrupt(str(error)) from error
        except lmdb.Error as error:
            raise _mapped(error) from error

    async def _disconnect(self) -> None:
        writer, self._writer = self._writer, None
        reader, self._reader = self._reader, None
        database, self._database = self._database, None
        if writer is not None:
            await writer.stop()
        if reader is not None:
            await reader.stop()
        if database is not None:
            database.close()

    async def _in_writer(self, job: Callable[[Database], T]) -> T:
        assert self._writer is not None, "connected"
        return await self._writer.run(partial(self._run, job))

    async def _in_reader(self, job: Callable[[Database], T]) -> T:
        if self._reader is None:
            raise StoreUnavailable("the store is not open")
        return await self._reader.run(partial(self._run, job))

    def _run(self, job: Callable[[Database], T]) -> T:
        assert self._database is not None, "connected"
        return job(self._database)

    def _post(
        self,
        job: Callable[[Database], list[Outcome] | BaseException],
        done: Callable[[list[Outcome] | BaseException], None],
    ) -> None:
        assert self._writer is not None, "connected"
        self._writer.post(partial(self._run, job), done)
