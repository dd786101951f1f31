"""The files of a data directory, for operations on it while no broker serves it.

A directory holds one database, ``history.mdb`` or ``history.sqlite``, and what its backend keeps
beside it: the sidecar (storage.identity), LMDB's ``-lock``, SQLite's ``-wal`` and ``-shm``, and
the ``lock`` of storage.lock. What an operation builds is called ``.incoming`` until it is whole.

Putting a database in place (``put_in_place``) is the last step of a restore, a migration and a
repair. At each step the directory holds a whole database, the old one or the new one; or one of
each kind, which no broker opens. So a crash never lets a broker start with an empty history.

    1. the old files get a second name in the directory that keeps them (hard links);
    2. the new file takes the place of an old one of its kind: one rename;
    3. the sidecar of the new one is written; a crash before that means a new generation;
    4. what is left of the old ones loses its name here.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from storage.durable import FILES
from storage.errors import StoreCorrupt, StoreTooNew, StoreUnavailable, StoreUnusable
from storage.identity import Sidecar, place_of, sync_directory
from storage.lock import DirectoryLock
from storage.meta import FORMAT, MetaDamaged, read_ends, read_format, read_identity
from storage.sealing import guarded, unlock

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from storage.keyring import Keyring
    from storage.kv import Database, ReadTxn
    from storage.meta import Ends, Identity

__all__ = [
    "COPY_BYTES",
    "INCOMING",
    "KINDS",
    "MANIFEST",
    "Kind",
    "Progress",
    "database_file",
    "identity_of",
    "kind_in",
    "locked",
    "must_not_be_a_backup",
    "open_database",
    "opened_with",
    "ours",
    "put_in_place",
    "remove_incoming",
    "sidecar_file",
    "silent",
    "sync_file",
    "the_kind_in",
]

Kind = Literal["lmdb", "sqlite"]

MANIFEST: Final = "manifest.json"
"""Tells what a backup is; see storage.backup."""

INCOMING: Final = ".incoming"
"""Ends the name of a database file that is being built."""

KINDS: Final[tuple[Kind, ...]] = ("lmdb", "sqlite")

COPY_BYTES: Final = 8 << 20
"""Copied in one transaction, or with one call: bounds what is in memory."""

Progress: TypeAlias = Callable[[str, int, int], None]
"""Is told how far an operation is: the step, and bytes, about, of how many."""

_BUSY_S: Final = 10.0


def silent(_what: str, _done: int, _total: int) -> None:
    """Progress that nobody is told."""


def database_file(directory: Path, kind: Kind) -> Path:
    """Where the database of a kind is."""
    return directory / FILES[kind]


def sidecar_file(directory: Path, kind: Kind) -> Path:
    """Where its sidecar is."""
    return directory / f"{FILES[kind]}.identity.json"


def kind_in(directory: Path) -> Kind | None:
    """The kind of the database in a directory, None = there is none.

    Raises StoreUnusable if there are two: a migration or a restore died in its last step.
    """
    found = [kind for kind in KINDS if database_file(directory, kind).exists()]
    if len(found) > 1:
        names = " and ".join(FILES[kind] for kind in found)
        raise StoreUnusable(
            str(directory),
            f"it holds {names}: an operation was interrupted in its last step. Both are whole;"
            " run it again, or move the one that you do not want away",
        )
    return found[0] if found else None


def the_kind_in(directory: Path) -> Kind:
    """The kind of the database in a directory. Raises StoreUnusable if there is none, or two."""
    kind = kind_in(directory)
    if kind is None:
        names = " nor ".join(FILES[kind] for kind in KINDS)
        raise StoreUnusable(str(directory), f"there is no database in it, neither {names}")
    return kind


def must_not_be_a_backup(directory: Path) -> None:
    """Raise StoreUnusable for a backup: once its file is changed it is one no longer."""
    if (directory / MANIFEST).exists():
        reason = "it is a backup, which has to stay as it is: restore it to another directory first"
        raise StoreUnusable(str(directory), reason)


def ours(directory: Path) -> list[Path]:
    """Every file of a database in a directory, but for those being built, and not the lock."""
    names = tuple(FILES.values())
    return sorted(
        path
        for path in directory.iterdir()
        if path.name.startswith(names) and INCOMING not in path.name and path.is_file()
    )


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Have a data directory to oneself. Raises StoreLocked, StoreUnavailable."""
    lock = DirectoryLock(directory)
    lock.acquire()
    try:
        yield
    finally:
        lock.release()


# -------------------------------------------------------------------------------- opening


def open_database(
    file: Path, kind: Kind, *, create: bool = False, is_whole: bool = True
) -> Database:
    """Open a database file in this thread, without the steps of an opening: nothing is counted,
    minted or detached.

    is_whole: False = also one that is damaged, as far as it can be opened at all.
    Raises StoreCorrupt, StoreUnavailable.
    """
    if not create and not file.exists():
        raise StoreCorrupt(str(file.parent), f"{file.name} is missing")
    if not create and file.stat().st_size == 0:
        raise StoreCorrupt(str(file.parent), f"{file.name} is empty")
    if kind == "lmdb":
        return _open_lmdb(file, create=create)
    return _open_sqlite(file, create=create, is_whole=is_whole)


def _open_lmdb(file: Path, *, create: bool) -> Database:
    import lmdb  # noqa: PLC0415 - a backend's package is not needed by the other one

    from storage.lmdb_store import _LmdbDatabase as LmdbDatabase  # noqa: PLC0415

    try:
        return LmdbDatabase(file, "fsync", None, create=create)
    except lmdb.NotFoundError as error:
        raise StoreCorrupt(str(file.parent), f"{file.name} is not one of ours") from error
    except (lmdb.CorruptedError, lmdb.InvalidError, lmdb.VersionMismatchError) as error:
        raise StoreCorrupt(str(file.parent), f"{file.name} cannot be used: {error}") from error
    except lmdb.Error as error:
        raise StoreUnavailable(f"{file}: {error}") from error


def _open_sqlite(file: Path, *, create: bool, is_whole: bool) -> Database:
    from storage.sqlite_store import _SqliteDatabase as SqliteDatabase  # noqa: PLC0415

    mode = "rwc" if create else "rw"
    try:
        connection = sqlite3.connect(
            f"{file.absolute().as_uri()}?mode={mode}",
            uri=True,
            timeout=_BUSY_S,
            isolation_level=None,
        )
    except sqlite3.Error as error:
        raise StoreUnavailable(f"{file}: {error}") from error
    database = SqliteDatabase(connection)
    try:
        database.prepare("fsync", create=create, writes=is_whole)
    except sqlite3.Error as error:
        connection.close()
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR):
            raise StoreCorrupt(str(file.parent), f"{file.name} cannot be used: {error}") from error
        raise StoreUnavailable(f"{file}: {error}") from error
    return database


def identity_of(database: Database, directory: Path) -> tuple[Identity, Ends]:
    """Identity and ends of a database. Raises StoreCorrupt, StoreTooNew."""

    def work(txn: ReadTxn) -> tuple[int, Identity, Ends]:
        return read_format(txn), read_identity(txn), read_ends(txn)

    try:
        number, identity, ends = database.read(work)
    except MetaDamaged as error:
        raise StoreCorrupt(str(directory), f"the database cannot be told: {error}") from error
    if number > FORMAT:
        raise StoreTooNew(str(directory), number, FORMAT)
    return identity, ends


def opened_with(
    keyring: Keyring | None, database: Database, identity: Identity, data: Path
) -> Database:
    """A database as it is read with keys; without keys, as it is on disk.

    Raises SealKeyMissing, SealKeyWrong, StoreCorrupt.
    """
    if keyring is None:
        return database
    try:
        seals = unlock(database, identity.db_id, keyring, path=str(data), is_readonly=True)
    except MetaDamaged as error:
        raise StoreCorrupt(str(data), f"the database cannot be told: {error}") from error
    return guarded(database, seals)


def sync_file(file: Path) -> None:
    """Have a file on disk. Raises OSError."""
    fd = os.open(file, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# -------------------------------------------------------------------------- putting in place


def remove_incoming(directory: Path) -> None:
    """Remove what an operation that died had built: it was never part of the store."""
    for path in directory.iterdir():
        if path.name.startswith(tuple(FILES.values())) and INCOMING in path.name:
            path.unlink()


def put_in_place(
    incoming: Path, kind: Kind, *, keep_in: Path | None, identity: Identity | None, head: int
) -> Path | None:
    """Make a database that is closed and whole the one of its directory, whose lock is held.

    keep_in: the directory that gets the files it replaces; None = none are there. Where the data
        directory is a file system of its own, a directory of that name inside it is used.
    identity: what the new sidecar says; None = leave none, so that opening mints a generation.
    Returns where the old files are. Raises OSError.
    """
    directory = incoming.parent
    old = ours(directory)
    _write_back(directory, old)
    old = [path for path in old if path.exists()]
    kept = _keep(old, keep_in) if old and keep_in is not None else None
    beside = ("-wal", "-shm", "-lock")
    for name in (FILES[kind], incoming.name):
        for suffix in beside:  # they belong to the old file, and must not meet the new one
            (directory / f"{name}{suffix}").unlink(missing_ok=True)
    sync_file(incoming)
    sync_directory(directory)
    incoming.replace(database_file(directory, kind))
    sync_directory(directory)
    if identity is not None:
        place = place_of(database_file(directory, kind))
        Sidecar.of(identity, head, place).write(sidecar_file(directory, kind))
    new = {database_file(directory, kind)}
    if identity is not None:
        new.add(sidecar_file(directory, kind))
    for path in old:
        if path not in new:
            path.unlink(missing_ok=True)
    sync_directory(directory)
    return kept


def _write_back(directory: Path, old: list[Path]) -> None:
    """Have the write-ahead log of an old SQLite database in its file, so that losing the name of
    one before the other takes nothing from it."""
    file = database_file(directory, "sqlite")
    if file not in old:
        return
    try:
        connection = sqlite3.connect(file, timeout=_BUSY_S)
        try:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        finally:
            connection.close()
    except sqlite3.Error:
        pass  # it is damaged: its files are kept as they are, which is all that can be done


def _keep(old: list[Path], keep_in: Path) -> Path:
    """Give files a second name in ``keep_in``."""
    if os.path.ismount(old[0].parent):
        keep_in = old[0].parent / keep_in.name
    keep_in.mkdir(mode=0o700)
    for path in old:
        kept = keep_in / path.name
        try:
            kept.hardlink_to(path)
        except OSError:  # a file system without hard links, or another one
            shutil.copy2(path, kept)
            sync_file(kept)
    sync_directory(keep_in)
    sync_directory(keep_in.parent)
    return keep_in
