"""The store on SQLite, through aiosqlite.

aiosqlite gives each connection a thread and runs one call at a time in it. A batch is many
statements, and a hop for each would cost more than the statements; so the connection is one of
ours whose ``commit`` serves a queue of batches (storage.worker) until it is closed: one call of
aiosqlite, one hop for each batch. One connection writes, another reads, both in WAL mode.

A commit with ``synchronous=FULL`` syncs the write-ahead log. Another process that holds the write
lock (a backup, a console) makes commits wait, up to BUSY_MS, and nothing else: the transaction
takes its lock at the start, so nothing of it was done yet.

Checkpoints. The write-ahead log is copied into the database by a third connection that waits for
nobody, while commits go on; what was committed meanwhile is little, and the writer copies it
between two commits, so that the log can start anew. Commits write over what is in it: when it is
opened, a transaction that is given up makes it as long as it will be.

A full disk. To delete, SQLite needs room: in the log, and for what of the log has no place in the
database yet. So when less than MARGIN_BYTES are free the store is full for all but batches that
only make room; and when there is little more, the writer copies the log after every LOW_LOG_BYTES,
so that no more than that ever needs a place. What becomes free goes back to the disk.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
from functools import partial
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, Final, TypeVar

import aiosqlite

from storage.durable import DurableStore
from storage.errors import RoleRefused, StoreFull, StoreUnavailable
from storage.kv import FIRST_FORMAT_SPACES, Space
from storage.outbox.rights import Role
from storage.sqlite_roles import RoleWorker, authorizer
from storage.worker import Jobs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from storage.api import Outcome
    from storage.durable import Durability
    from storage.keyring import Keyring
    from storage.kv import Database, ReadTxn, WriteTxn

__all__ = ["SqliteStore"]

T = TypeVar("T")

BUSY_MS: Final = 60_000
"""How long a commit waits for the write lock. A backup that holds it for ten seconds is usual."""

CHECKPOINT_BYTES: Final = 4 << 20
"""The write-ahead log since the last checkpoint, about, before there is another one. It is made as
long when it is opened: where a commit writes over what is there, its sync has no new length of the
file to put into the file system's journal, and takes half the time; nor does it wait for others who
write to that journal."""
PAGE_BYTES: Final = 4096
"""What a row costs in the log besides its value, whatever its size: commits write whole pages."""

MARGIN_BYTES: Final = 8 << 20
"""Kept free on the disk for batches that make room, or a quarter of a disk that is small: a Prune
of 16 blocks of 256 KiB that are overwritten, and LOW_LOG_BYTES to be copied."""
LOG_BYTES_MAX: Final = 64 << 20
"""What the log may come to in a burst, about, while it is copied (pragma_journal_limit)."""
LOW_DISK_BYTES: Final = 2 * LOG_BYTES_MAX + MARGIN_BYTES
LOW_LOG_BYTES: Final = 1 << 20

log = logging.getLogger("amqtt_durable.store")

VACUUM_PAGES: Final = 512
"""Given back at a time, 2 MiB: twice what a Prune of 64 blocks of small entries frees."""
LOW_VACUUM_PAGES: Final = 64
"""The same between two checkpoints, when the disk has little room."""

_MAGIC: Final = b"SQLite format 3\x00"
"""How each file of SQLite begins."""

_LARGE: Final = (Space.HELD, Space.RETAINED, Space.WILL, Space.OUTBOX_BODY)
_OFFSET_MAX: Final = (1 << 63) - 1


def _load_statements() -> dict[str, str]:
    """Name -> statement, from sqlite.sql."""
    text = Path(__file__).with_name("sqlite.sql").read_text(encoding="utf-8")
    found: dict[str, str] = {}
    for part in text.split("-- name: ")[1:]:
        name, _, rest = part.partition("\n")
        lines = [line for line in rest.splitlines() if not line.startswith("--")]
        found[name.strip()] = "\n".join(lines).strip()
    return found


_SQL: Final = _load_statements()


def _for_spaces(name: str) -> list[str]:
    return [_SQL[name].format(space=space.name.lower()) for space in Space]


_GET: Final = _for_spaces("get")
_PUT: Final = _for_spaces("put")
_DELETE: Final = _for_spaces("delete")
_SCAN: Final = {
    (False, False): _for_spaces("scan_up"),
    (False, True): _for_spaces("scan_down"),
    (True, False): _for_spaces("scan_up_all"),
    (True, True): _for_spaces("scan_down_all"),
}
"""(without a stop, reverse) -> statements."""
_BEGIN_WRITE: Final = _SQL["begin_write"]
_BEGIN_READ: Final = _SQL["begin_read"]
_COMMIT: Final = _SQL["commit"]
_ROLLBACK: Final = _SQL["rollback"]


def _number(key: bytes) -> int:
    """An offset as a key of the history."""
    return min(int.from_bytes(key, "big"), _OFFSET_MAX)


class _Txn:
    """storage.kv.WriteTxn over a connection with an open transaction."""

    __slots__ = ("_execute", "written_bytes")
    hides_names = False

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._execute = connection.execute
        self.written_bytes = 0

    def place(self, _: Space, key: bytes) -> bytes:
        return key

    def get(self, space: Space, key: bytes) -> bytes | None:
        at = key if space is not Space.HISTORY else _number(key)
        row = self._execute(_GET[space], (at,)).fetchone()
        return None if row is None else row[0]

    def put(self, space: Space, key: bytes, value: bytes) -> None:
        at = key if space is not Space.HISTORY else _number(key)
        self._execute(_PUT[space], (at, value))
        self.written_bytes += len(value) + PAGE_BYTES

    def delete(self, space: Space, key: bytes) -> bool:
        at = key if space is not Space.HISTORY else _number(key)
        return self._execute(_DELETE[space], (at,)).rowcount > 0

    def scan(
        self,
        space: Space,
        start: bytes = b"",
        stop: bytes | None = None,
        *,
        reverse: bool = False,
    ) -> Iterator[tuple[bytes, bytes]]:
        bounds: tuple[Any, ...] = (start,) if stop is None else (start, stop)
        if space is Space.HISTORY:
            bounds = tuple(map(_number, bounds))
        rows = self._execute(_SCAN[stop is None, reverse][space], bounds)
        if space is Space.HISTORY:
            return ((number.to_bytes(8, "big"), value) for number, value in rows)
        return rows


class _SqliteDatabase:
    """storage.kv.Database over a connection, in the connection's thread."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        turn: RLock | None = None,
        directory: Path | None = None,
    ) -> None:
        """directory: on a disk that may fill up; None = nobody looks."""
        self._connection = connection
        self._turn = turn or RLock()
        self._directory = directory
        self.unchecked_bytes = 0

    def prepare(
        self, durability: Durability, *, create: bool, writes: bool, erases: bool = False
    ) -> None:
        """Set the connection up; make the tables, or see that they are there. erases: what is
        deleted is overwritten."""
        execute = self._connection.execute
        synchronous = "FULL" if durability == "fsync" else "NORMAL"
        if writes and not create:
            for sql in _GET[:FIRST_FORMAT_SPACES]:  # before anything would change another's file
                execute(sql, (b"",)).close()
        if create:
            execute(_SQL["pragma_page"])
            execute(_SQL["pragma_vacuum"])
        execute(_SQL["pragma_journal"])
        execute(_SQL["pragma_synchronous"].format(synchronous=synchronous))
        execute(_SQL["pragma_checkpoint"])
        execute(_SQL["pragma_journal_limit"])
        execute(_SQL["pragma_cache"])
        if erases:
            execute(_SQL["pragma_erase"])
        if create or writes:
            execute(_BEGIN_WRITE)
            for space in Space:
                if create or space >= FIRST_FORMAT_SPACES:
                    execute(_SQL[_create(space)].format(space=space.name.lower()))
            execute(_COMMIT)
        if writes and not create:
            self._lengthen_log()

    def _lengthen_log(self) -> None:
        """Make the write-ahead log as long as it will be. Nothing depends on it."""
        is_low, _ = self._room()
        if is_low:
            return
        execute = self._connection.execute
        try:
            execute(_BEGIN_WRITE)
            try:
                execute(_SQL["spill"].format(bytes=CHECKPOINT_BYTES))
            finally:
                if self._connection.in_transaction:
                    execute(_ROLLBACK)
        except sqlite3.Error as error:
            # as on a full disk: it grows with each commit, if it can
            log.warning("the write-ahead log could not be made longer: %s", error)

    def restrict(self, role: Role, durability: Durability, *, erases: bool) -> None:
        """Set the connection up for a role: from here on it can touch what is the role's."""
        self.prepare(durability, create=False, writes=False, erases=erases)
        if role is Role.READER:
            self._connection.execute(_SQL["pragma_query_only"])
        self._connection.set_authorizer(authorizer(role))

    def write(self, work: Callable[[WriteTxn], T], *, frees: bool = False) -> T:
        """See storage.kv.Database. In the thread of the writer, or of a role.

        They take turns here: SQLite's own waiting is a sleep of up to 100 ms at a time.
        """
        with self._turn:
            return self._write(work, frees=frees)

    def _write(self, work: Callable[[WriteTxn], T], *, frees: bool) -> T:
        connection = self._connection
        is_low, is_full = self._room()
        if is_full and not frees:
            raise StoreFull("the disk has only the room left that deleting needs")
        try:
            if connection.in_transaction:  # a ROLLBACK that failed with the disk
                connection.execute(_ROLLBACK)
            connection.execute(_BEGIN_WRITE)
            try:
                txn = _Txn(connection)
                result = work(txn)
                connection.execute(_COMMIT)
            except BaseException:
                if connection.in_transaction:
                    connection.execute(_ROLLBACK)
                raise
        except sqlite3.Error as error:
            raise _mapped(error) from error
        self.unchecked_bytes += txn.written_bytes
        if is_low and (frees or self.unchecked_bytes > LOW_LOG_BYTES):
            self.checkpoint()
        if frees:
            self._give_back(is_low=is_low, is_full=is_full)
        return result

    def _room(self) -> tuple[bool, bool]:
        """Whether the disk has little room, and whether none is left but what is kept back."""
        if self._directory is None:
            return False, False
        try:
            disk = os.statvfs(self._directory)
        except OSError:
            return False, False  # whoever writes finds out
        free = disk.f_frsize * disk.f_bavail
        margin = min(MARGIN_BYTES, disk.f_frsize * disk.f_blocks // 4)
        return free < LOW_DISK_BYTES, free < margin

    def checkpoint(self) -> None:
        """Copy what can be copied from the write-ahead log. Nothing depends on it."""
        self.unchecked_bytes = 0
        try:
            self._connection.execute(_SQL["checkpoint"]).fetchall()
        except sqlite3.Error as error:
            # everything stays readable from the log, and the next checkpoint tries again
            log.warning("no checkpoint: %s", error)

    def _give_back(self, *, is_low: bool, is_full: bool) -> None:
        """Give free pages back to the disk, unless they are few and it has room: those are soon
        used again. They are copied to the log first; if the disk is low, a few at a time."""
        execute = self._connection.execute
        step = LOW_VACUUM_PAGES if is_low else VACUUM_PAGES
        try:
            (free,) = execute(_SQL["free_pages"]).fetchone()
            (pages,) = execute(_SQL["pages"]).fetchone()
            if free <= max(VACUUM_PAGES, pages // 4) and not is_full:
                return
            for _ in range(0, min(free, VACUUM_PAGES), step):
                self._run_to_its_end(_SQL["vacuum"].format(pages=step))
                if is_low:
                    self.checkpoint()
        except sqlite3.Error as error:
            # the batch is committed, whatever happens here; the next one tries again
            log.warning("no vacuum: %s", error)

    def _run_to_its_end(self, sql: str) -> None:
        """A vacuum gives a row without columns after each page, and ``execute`` with ``fetchall``
        stops at the first one."""
        self._connection.executescript(sql)

    def read(self, work: Callable[[ReadTxn], T]) -> T:
        """See storage.kv.Database. In the reader's thread, or the writer's before there is one."""
        connection = self._connection
        try:
            connection.execute(_BEGIN_READ)
            try:
                return work(_Txn(connection))
            finally:
                if connection.in_transaction:
                    connection.execute(_ROLLBACK)
        except sqlite3.Error as error:
            raise _mapped(error) from error

    def scrub(self) -> None:
        """See storage.kv.Database: give back all free pages, and empty the write-ahead log."""
        execute = self._connection.execute
        try:
            self._run_to_its_end(_SQL["vacuum_all"])
            execute(_SQL["checkpoint_all"]).fetchall()
        except sqlite3.Error as error:
            # what is left is written over sooner or later
            log.warning("free pages and write-ahead log were not emptied: %s", error)

    def close(self) -> None:
        """See storage.kv.Database."""
        self._connection.close()


def _create(space: Space) -> str:
    if space is Space.HISTORY:
        return "create_numbered"
    return "create_large" if space in _LARGE else "create"


def _mapped(error: sqlite3.Error) -> Exception:
    """What an error of SQLite means; one that only a bug of ours can cause stays what it is."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    text = f"sqlite: {error}"
    if code == sqlite3.SQLITE_AUTH:
        return RoleRefused("role of the outbox", str(error))
    if code == sqlite3.SQLITE_FULL:
        return StoreFull(text)
    if code in _UNAVAILABLE:
        return StoreUnavailable(text)
    return error


_UNAVAILABLE: Final = (
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PROTOCOL,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_PERM,
)


class _Connection(sqlite3.Connection):
    """A connection whose ``commit`` serves a queue; aiosqlite calls it in its thread."""

    jobs: Jobs
    database: _SqliteDatabase

    def commit(self) -> None:
        """Do jobs until there is an end."""
        self.jobs.serve()


class _Worker:
    """A connection, its thread, and the jobs on their way to it."""

    def __init__(self, file: Path, turn: RLock, *, create: bool) -> None:
        self._jobs = Jobs()
        self._turn = turn
        self._directory = file.parent
        self._serving: asyncio.Task[None] | None = None
        self.database: _SqliteDatabase
        self._aio = aiosqlite.connect(
            f"{file.absolute().as_uri()}?mode={'rwc' if create else 'rw'}",
            uri=True,
            timeout=BUSY_MS / 1000,
            isolation_level=None,
            cached_statements=256,
            factory=self._made,
        )
        # a program that ends without close() ends, as in a crash, instead of waiting for this
        # thread for ever (until aiosqlite 0.22 the connection was the thread)
        thread: Any = getattr(self._aio, "_thread", self._aio)
        thread.daemon = True

    def _made(self, *args: Any, **kwargs: Any) -> sqlite3.Connection:
        connection = _Connection(*args, **kwargs)
        connection.jobs = self._jobs
        self.database = _SqliteDatabase(connection, self._turn, self._directory)
        connection.database = self.database
        return connection

    async def start(self) -> None:
        """Start the thread and open the file."""
        await self._aio
        self._serving = asyncio.ensure_future(self._aio.commit())

    def post(self, work: Callable[[Any], T], done: Callable[[Any], None]) -> None:
        """Do a job after those before it; ``done`` gets its result or its exception."""
        self._jobs.post(partial(work, self.database), done)

    async def run(self, work: Callable[[Any], T]) -> T:
        """Do a job after those before it, and wait for it."""
        return await self._jobs.run(partial(work, self.database))

    async def stop(self) -> None:
        """Finish what was posted, close the file, end the thread."""
        self._jobs.end()
        if self._serving is not None:
            await asyncio.wait([self._serving])
        await self._aio.close()


class SqliteStore(DurableStore):
    """See storage.durable.DurableStore. Each role of the outbox has a connection of its own, with
    an authorizer."""

    name = "sqlite"

    def __init__(
        self,
        directory: Path,
        *,
        durability: Durability = "fsync",
        keyring: Keyring | None = None,
        seal_topics: bool = False,
    ) -> None:
        super().__init__(directory, durability=durability, keyring=keyring, seal_topics=seal_topics)
        self._writer: _Worker | None = None
        self._reader: _Worker | None = None
        self._keeper: _Worker | None = None
        self._checkpointing: asyncio.Task[None] | None = None
        self._roles: dict[Role, RoleWorker] = {}

    def _remains(self) -> tuple[str, ...]:
        return (f"{self._file.name}-wal",)

    async def _connect(self, file: Path, *, create: bool) -> None:
        if not create:
            self._must_be_sqlite(file)
        try:
            self._writer = await self._connected(file, create=create, writes=True)
            self._reader = await self._connected(file, create=False, writes=False)
            self._keeper = await self._connected(file, create=False, writes=False)
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                raise self._corrupt(str(error)) from error
            if code == sqlite3.SQLITE_ERROR:
                raise self._corrupt(f"it is not one of ours ({error})") from error
            raise _mapped(error) from error

    def _must_be_sqlite(self, file: Path) -> None:
        """SQLite takes a file of less than a page for an empty database, and begins to write."""
        with file.open("rb") as opened:
            if opened.read(len(_MAGIC)) != _MAGIC:
                raise self._corrupt("file is not a database")

    async def _connected(self, file: Path, *, create: bool, writes: bool) -> _Worker:
        worker = _Worker(file, self._turn, create=create)
        await worker.start()
        prepare = partial(
            _SqliteDatabase.prepare,
            durability=self.durability,
            create=create,
            writes=writes,
            erases=self._keyring is not None,
        )
        try:
            await worker.run(prepare)
        except BaseException:
            await worker.stop()
            raise
        return worker

    async def _as_role(self, role: Role) -> _Worker:
        worker = _Worker(self._file, self._turn, create=False)
        restrict = partial(
            _SqliteDatabase.restrict,
            role=role,
            durability=self.durability,
            erases=self._keyring is not None,
        )
        try:
            await worker.start()
            await worker.run(restrict)
        except sqlite3.Error as error:
            await worker.stop()
            raise _mapped(error) from error
        return worker

    def _role(self, role: Role) -> RoleWorker:
        if role not in self._roles:
            self._roles[role] = RoleWorker(partial(self._as_role, role))
        return self._roles[role]

    async def _disconnect(self) -> None:
        roles, self._roles = self._roles, {}
        for role in roles.values():
            await role.stop()
        if self._checkpointing is not None:
            await asyncio.wait([self._checkpointing])
        writer, self._writer = self._writer, None
        reader, self._reader = self._reader, None
        keeper, self._keeper = self._keeper, None
        for worker in (reader, keeper, writer):
            if worker is not None:
                await worker.stop()

    async def _in_writer(self, job: Callable[[Database], T]) -> T:
        assert self._writer is not None, "connected"
        return await self._writer.run(job)

    async def _in_reader(self, job: Callable[[Database], T]) -> T:
        if self._reader is None:
            raise StoreUnavailable("the store is not open")
        return await self._reader.run(job)

    def _post(
        self,
        job: Callable[[Database], list[Outcome] | BaseException],
        done: Callable[[list[Outcome] | BaseException], None],
    ) -> None:
        assert self._writer is not None, "connected"
        self._writer.post(job, done)
        self._checkpoint_if_due()

    def _post_as(
        self,
        role: Role,
        job: Callable[[Database], list[Outcome] | BaseException],
        done: Callable[[list[Outcome] | BaseException], None],
    ) -> None:
        self._role(role).post(job, done)
        self._checkpoint_if_due()

    async def _in_outbox_reader(self, job: Callable[[Database], T]) -> T:
        return await self._role(Role.READER).run(job)

    def _checkpoint_if_due(self) -> None:
        assert self._writer is not None, "connected"
        open_ones = [role.worker for role in self._roles.values()]
        databases = [one.database for one in (self._writer, *open_ones) if one is not None]
        if self._checkpointing:
            return
        if sum(database.unchecked_bytes for database in databases) > CHECKPOINT_BYTES:
            for database in databases:
                database.unchecked_bytes = 0
            self._checkpointing = asyncio.get_running_loop().create_task(self._checkpoint())

    async def _checkpoint(self) -> None:
        """In the keeper while commits go on, then the little that is left between two of them."""
        try:
            for worker in (self._keeper, self._writer):
                if worker is not None:
                    await worker.run(_SqliteDatabase.checkpoint)
        finally:
            self._checkpointing = None
