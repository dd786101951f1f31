"""Moving a whole database: online backup, restore, migration to the other backend.

A backup is a directory with the database file and ``manifest.json``, which tells what it is and
holds the file's SHA-256. The directory appears under its name when all of it is on disk. It has no
sidecar: what is served from it as it is, is told apart by that alone.

Generations. ``restore`` and ``migrate`` mint the new generation themselves, in the file that is
put in place, and do not leave it to the next opening to find that something changed: a backup that
was taken in this boot, with a sidecar that was copied along, looks like the database it came from.
So after them no position that was given before is of the current generation, whatever becomes of
the sidecar (storage.identity); sessions are told 409.

Who may write meanwhile. A backup holds no lock: the broker goes on. Restore and migration hold the
lock of the data directory from before the first look to after the last step.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import starmap
from threading import Thread
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from storage.check import check
from storage.durable import FILES
from storage.errors import (
    StoreCorrupt,
    StoreFull,
    StoreTooNew,
    StoreUnavailable,
    StoreUnusable,
)
from storage.files import (
    INCOMING,
    database_file,
    locked,
    open_database,
    ours,
    put_in_place,
    remove_incoming,
    sidecar_file,
    sync_file,
    the_kind_in,
)
from storage.identity import Sidecar, changed, mint, place_of, sync_directory
from storage.kv import U64, Space
from storage.meta import FORMAT, MetaDamaged, read_ends, read_format, read_identity
from storage.rekey import Resealed, finish
from storage.sealing import guarded, unlock

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from storage.files import Kind
    from storage.keyring import Keyring
    from storage.kv import Database, ReadTxn, WriteTxn
    from storage.meta import Ends, Identity
    from storage.sealing import Seals

__all__ = [
    "MANIFEST",
    "Manifest",
    "Migrated",
    "Progress",
    "Rekeyed",
    "Restored",
    "back_up",
    "migrate",
    "opened_with",
    "rekey",
    "restore",
]

MANIFEST: Final = "manifest.json"

COPY_BYTES: Final = 8 << 20
"""Copied in one transaction, or with one call: bounds what is in memory."""

COPY_ROWS: Final = 20_000

_PAGES: Final = 2048
"""Pages of SQLite (8 KiB) copied with one call."""


Change: TypeAlias = Callable[[Space, bytes, bytes], tuple[bytes, bytes]]
"""(space, key, value) -> what is written for that row."""

Progress: TypeAlias = Callable[[str, int, int], None]
"""Is told how far an operation is: the step, and bytes, about, of how many."""


def _silent(_what: str, _done: int, _total: int) -> None:
    pass


# -------------------------------------------------------------------------------- backup


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a backup is. made_ms: when it was complete. violations: of the copy, found by check;
    -1 = not checked. sha256: of the file."""

    kind: str
    file: str
    format: int
    db_id: str
    generation: str
    boot: int
    head: int
    floor: int
    made_ms: int
    bytes: int
    sha256: str
    violations: int

    def write(self, path: Path) -> None:
        """Raises OSError."""
        with path.open("w", encoding="utf-8") as file:
            json.dump(asdict(self), file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Raises StoreUnusable when the directory is not a complete backup."""
        try:
            fields = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
            found = cls(**fields)
        except FileNotFoundError as error:
            reason = f"it is not a backup: it has no {MANIFEST}"
            raise StoreUnusable(str(directory), reason) from error
        except (ValueError, TypeError) as error:
            reason = f"its {MANIFEST} is not one: the backup is damaged"
            raise StoreUnusable(str(directory), reason) from error
        if FILES.get(found.kind) != found.file:
            reason = f"its {MANIFEST} names no database: the backup is damaged"
            raise StoreUnusable(str(directory), reason)
        if found.format > FORMAT:
            raise StoreTooNew(str(directory), found.format, FORMAT)
        return found


def back_up(
    data: Path,
    target: Path,
    *,
    now_ms: int,
    is_checked: bool = True,
    keyring: Keyring | None = None,
    progress: Progress = _silent,
) -> tuple[Manifest, list[str]]:
    """Copy the database in ``data``, also while a broker serves it: one state of it, as committed.

    keyring: of a sealed database, so that check sees what is in it; copied is what is on disk.

    The broker is another process (LMDB opens a file once in each), and goes on; only what it frees
    meanwhile is not used again until the copy is done, so its files grow by what it writes in that
    time. Gives the manifest, and what check found in the copy.
    Raises StoreUnusable (nothing there, or something at the target), StoreUnavailable, StoreFull.
    """
    kind = the_kind_in(data)
    target = target.absolute()
    _must_be_free(target)
    building = target.with_name(f".{target.name}{INCOMING}-{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        building.mkdir(mode=0o750)
        try:
            found = _build(data, kind, building, now_ms, progress, keyring, is_checked=is_checked)
            building.rename(target)
        except BaseException:
            shutil.rmtree(building, ignore_errors=True)
            raise
        sync_directory(target.parent)
    except OSError as error:
        raise _of_the_system(error) from error
    return found


def _must_be_free(target: Path) -> None:
    """Raises StoreUnusable."""
    if target.is_dir():
        if os.path.ismount(target):
            reason = "it is a file system of its own: name a directory in it"
            raise StoreUnusable(str(target), reason)
        if any(target.iterdir()):
            raise StoreUnusable(str(target), "it is not empty: name a new directory")
    elif target.exists():
        raise StoreUnusable(str(target), "it is not a directory: name a new one")


def _build(
    data: Path,
    kind: Kind,
    building: Path,
    now_ms: int,
    progress: Progress,
    keyring: Keyring | None,
    *,
    is_checked: bool,
) -> tuple[Manifest, list[str]]:
    source, copy = database_file(data, kind), database_file(building, kind)
    (_copy_lmdb if kind == "lmdb" else _copy_sqlite)(source, copy, progress)
    violations: list[str] = []
    database = open_database(copy, kind)
    try:
        identity, ends = _told(database, data)
        if is_checked:
            progress("check", 0, 1)
            violations = opened_with(keyring, database, identity, data).read(check)
            progress("check", 1, 1)
    finally:
        database.close()
    for path in building.iterdir():
        if path != copy:
            path.unlink()  # what the backend left beside it
    sync_file(copy)
    manifest = Manifest(
        kind,
        copy.name,
        FORMAT,
        identity.db_id,
        identity.generation,
        identity.boot,
        ends.head,
        ends.floor,
        now_ms,
        copy.stat().st_size,
        _copied(copy, None, "checksum", progress),
        len(violations) if is_checked else -1,
    )
    manifest.write(building / MANIFEST)
    sync_directory(building)
    return manifest, violations


def _copy_lmdb(source: Path, copy: Path, progress: Progress) -> None:
    """LMDB copies what a read transaction sees; free pages are left out."""
    import lmdb  # noqa: PLC0415 - a backend's package is not needed by the other one

    size = source.stat().st_size
    failed: list[BaseException] = []

    def work() -> None:
        try:
            env = lmdb.open(
                str(source),
                map_size=size * 2 + (1 << 30),
                subdir=False,
                readonly=True,
                create=False,
                max_readers=16,
            )
            try:
                env.copy(str(copy), compact=True)
            finally:
                env.close()
        except BaseException as error:  # noqa: BLE001 - it is raised below
            failed.append(error)

    thread = Thread(target=work, name="backup", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.2)
        progress("copy", min(size, copy.stat().st_size if copy.exists() else 0), size)
    if failed:
        if isinstance(failed[0], lmdb.Error):
            if failed[0].code in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
                raise StoreFull(f"{copy}: no space") from failed[0]
            raise StoreUnavailable(f"{source}: {failed[0]}") from failed[0]
        raise failed[0]
    progress("copy", size, size)


def _copy_sqlite(source: Path, copy: Path, progress: Progress) -> None:
    """SQLite copies page by page; the read transaction around it keeps it from beginning again
    with every commit of the broker."""
    page = 8192

    def tell(_: int, left: int, total: int) -> None:
        progress("copy", (total - left) * page, total * page)

    try:
        reader = sqlite3.connect(
            f"{source.absolute().as_uri()}?mode=rw", uri=True, timeout=60, isolation_level=None
        )
        writer = sqlite3.connect(copy)
        try:
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM sqlite_schema").fetchone()
            reader.backup(writer, pages=_PAGES, progress=tell, sleep=0)
            reader.execute("ROLLBACK")
        finally:
            writer.close()
            reader.close()
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL:
            raise StoreFull(f"{copy}: no space") from error
        raise StoreUnavailable(f"{source}: {error}") from error


def _told(database: Database, directory: Path) -> tuple[Identity, Ends]:
    """Identity and ends. Raises StoreCorrupt, StoreTooNew."""

    def work(txn: ReadTxn) -> tuple[int, Identity, Ends]:
        return read_format(txn), read_identity(txn), read_ends(txn)

    try:
        number, identity, ends = database.read(work)
    except MetaDamaged as error:
        raise StoreCorrupt(str(directory), f"the database cannot be told: {error}") from error
    if number > FORMAT:
        raise StoreTooNew(str(directory), number, FORMAT)
    return identity, ends


def _copied(source: Path, copy: Path | None, step: str, progress: Progress) -> str:
    """Read a file, copy it if a name for that is given, and give its SHA-256."""
    digest = hashlib.sha256()
    total = source.stat().st_size
    done = 0
    with source.open("rb") as reading:
        writing: Any = copy.open("wb") if copy is not None else None
        try:
            while piece := reading.read(COPY_BYTES):
                digest.update(piece)
                if writing is not None:
                    writing.write(piece)
                done += len(piece)
                progress(step, done, total)
            if writing is not None:
                writing.flush()
                os.fsync(writing.fileno())
        finally:
            if writing is not None:
                writing.close()
    return digest.hexdigest()


def _of_the_system(error: OSError) -> StoreUnavailable:
    text = f"{error.filename or 'the disk'}: {error.strerror or error}"
    if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
        return StoreFull(text)
    return StoreUnavailable(text)


# -------------------------------------------------------------------------------- restore


@dataclass(frozen=True, slots=True)
class Restored:
    """What restore did. identity: of what is in place. kept_in: what was there before, or None."""

    manifest: Manifest
    identity: Identity
    kept_in: Path | None


def restore(
    backup: Path,
    data: Path,
    *,
    keep_in: Path | None,
    progress: Progress = _silent,
) -> Restored:
    """Put a backup in place, in a new generation (see above).

    keep_in: where a database that is there is kept; None = refuse if there is one.
    Raises StoreLocked when a broker has ``data``, StoreUnusable, StoreCorrupt, StoreUnavailable.
    Whatever is raised, what was there before is there still.
    """
    manifest = Manifest.read(backup)
    kind: Kind = "lmdb" if manifest.kind == "lmdb" else "sqlite"
    try:
        data.mkdir(parents=True, exist_ok=True)
        data = data.resolve()
        with locked(data):
            if ours(data) and keep_in is None:
                reason = "it holds a database already; --force sets it aside and goes on"
                raise StoreUnusable(str(data), reason)
            remove_incoming(data)
            incoming = data / f"{FILES[kind]}{INCOMING}"
            try:
                return _restore(backup, manifest, kind, incoming, keep_in, progress)
            finally:
                remove_incoming(data)
    except OSError as error:
        raise _of_the_system(error) from error


def _restore(
    backup: Path,
    manifest: Manifest,
    kind: Kind,
    incoming: Path,
    keep_in: Path | None,
    progress: Progress,
) -> Restored:
    if _copied(backup / manifest.file, incoming, "copy", progress) != manifest.sha256:
        reason = f"{manifest.file} is not what was backed up (its SHA-256 differs): nothing changed"
        raise StoreCorrupt(str(backup), reason)
    database = open_database(incoming, kind)
    try:
        identity, ends = _told(database, backup)
        minted = mint(identity)
        database.write(minted.write)
    finally:
        database.close()
    kept = put_in_place(incoming, kind, keep_in=keep_in, identity=minted, head=ends.head)
    return Restored(manifest, minted, kept)


# ------------------------------------------------------------------------------- migration


@dataclass(frozen=True, slots=True)
class Migrated:
    """What migrate did. rows, bytes: copied. kept_in: where the old files are, None = untouched in
    their own directory."""

    identity: Identity
    head: int
    rows: int
    bytes: int
    kept_in: Path | None


def migrate(
    data: Path,
    *,
    source: Kind,
    target: Kind,
    to_data: Path | None = None,
    keep_in: Path,
    keyring: Keyring | None = None,
    progress: Progress = _silent,
) -> Migrated:
    """Move everything to the other backend: every row of every space, byte by byte.

    keyring: as for ``back_up``.

    The new database is built under another name, compared with the old one row by row and checked,
    then put in place in a new generation; the old one is kept in ``keep_in``, or where it is when
    the new one goes to another directory. A crash leaves the old one untouched.
    Raises StoreLocked when a broker has one of them, StoreUnusable, StoreCorrupt, StoreUnavailable.
    """
    try:
        data = data.resolve()
        if not database_file(data, source).exists():
            found = the_kind_in(data)
            raise StoreUnusable(str(data), f"the database in it is of kind {found}, not {source}")
        goal = data if to_data is None else to_data
        goal.mkdir(parents=True, exist_ok=True)
        goal = goal.resolve()
        with locked(data):
            if goal == data:
                return _migrate(data, source, goal, target, keep_in, keyring, progress)
            with locked(goal):
                if ours(goal):
                    raise StoreUnusable(str(goal), "it holds a database: name another directory")
                return _migrate(data, source, goal, target, None, keyring, progress)
    except OSError as error:
        raise _of_the_system(error) from error


def _migrate(
    data: Path,
    source: Kind,
    goal: Path,
    target: Kind,
    keep_in: Path | None,
    keyring: Keyring | None,
    progress: Progress,
) -> Migrated:
    remove_incoming(goal)
    incoming = goal / f"{FILES[target]}{INCOMING}"
    old = open_database(database_file(data, source), source)
    try:
        identity, ends = _told(old, data)
        total = database_file(data, source).stat().st_size
        new = open_database(incoming, target, create=True)
        try:
            copied = _Copied(total, progress)
            rows = old.read(lambda txn: copied.all(txn, new))
            progress("copy", total, total)
            _must_be_the_same(old, new, copied.bytes, data, progress)
            progress("check", 0, 1)
            if violations := opened_with(keyring, new, identity, data).read(check):
                reason = (
                    f"it is damaged ({len(violations)} findings, the first: {violations[0]});"
                    " run `amqtt-durable check --repair` first. Nothing was changed"
                )
                raise StoreCorrupt(str(data), reason)
            progress("check", 1, 1)
            minted = mint(identity)
            new.write(minted.write)
        finally:
            new.close()
    except BaseException:
        remove_incoming(goal)
        raise
    finally:
        old.close()
    kept = put_in_place(incoming, target, keep_in=keep_in, identity=minted, head=ends.head)
    remove_incoming(goal)
    return Migrated(minted, ends.head, rows, copied.bytes, kept)


class _Copied:
    """Copies all spaces in bounded transactions. bytes: of keys and values, so far.

    change: what becomes of a row on its way.
    """

    def __init__(self, total: int, progress: Progress, change: Change | None = None) -> None:
        self._total = total
        self._progress = progress
        self._change = change
        self.bytes = 0

    def all(self, old: ReadTxn, new: Database) -> int:
        """Every row of every space; how many."""
        count = 0
        for space in Space:
            rows = old.scan(space)
            if self._change is not None:
                rows = starmap(partial(self._change, space), rows)
            while piece := self._piece(rows):
                new.write(lambda txn, space=space, piece=piece: _put(txn, space, piece))  # type: ignore[misc]
                count += len(piece)
                self._progress("copy", min(self.bytes, self._total), self._total)
        return count

    def _piece(self, rows: Iterator[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        piece: list[tuple[bytes, bytes]] = []
        size = 0
        for row in rows:
            piece.append(row)
            size += len(row[0]) + len(row[1])
            if size > COPY_BYTES or len(piece) == COPY_ROWS:
                break
        self.bytes += size
        return piece


# ---------------------------------------------------------------------------------- sealing


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


@dataclass(frozen=True, slots=True)
class Rekeyed:
    """What rekey did. rows: in the new file. unreadable: of those, damaged, as they were before.
    key_id: the one that is needed now."""

    kind: str
    rows: int
    written: int
    unreadable: int
    key_id: str


def rekey(
    data: Path, keyring: Keyring, *, seal_topics: bool = False, progress: Progress = _silent
) -> Rekeyed:
    """Seal everything in a database that nobody serves with the current key, in a new file.

    The new file takes the place of the old one, which is deleted: nothing of what was there in
    clear, or sealed otherwise, is in free space of the new one. The generation stays. A crash
    leaves the old one, or the new one, whole.
    Raises SealKeyMissing, SealKeyWrong, StoreLocked, StoreUnusable, StoreCorrupt, StoreUnavailable.
    """
    kind = the_kind_in(data)
    try:
        data = data.resolve()
        with locked(data):
            remove_incoming(data)
            try:
                return _rekey(data, kind, keyring, progress, seal_topics=seal_topics)
            finally:
                remove_incoming(data)
    except OSError as error:
        raise _of_the_system(error) from error


def _rekey(
    data: Path, kind: Kind, keyring: Keyring, progress: Progress, *, seal_topics: bool
) -> Rekeyed:
    incoming = data / f"{FILES[kind]}{INCOMING}"
    old = open_database(database_file(data, kind), kind)
    try:
        identity, ends = _told(old, data)
        is_other = _mints(data, kind, identity, ends)
        seals = _unlocked(old, identity, keyring, data, seal_topics=seal_topics)
        change = Resealed(seals)
        total = database_file(data, kind).stat().st_size
        new = open_database(incoming, kind, create=True)
        try:
            copied = _Copied(total, progress, change)
            rows = old.read(lambda txn: copied.all(txn, new))
            done = new.write(lambda txn: finish(txn, seals))
            progress("copy", total, total)
            left = len(guarded(new, done).read(check)) - len(guarded(old, seals).read(check))
        finally:
            new.close()
    finally:
        old.close()
    if left > 0:
        raise StoreCorrupt(str(data), f"the copy has {left} violations more: nothing was changed")
    keeps = None if is_other else identity  # what mints a generation mints it still
    put_in_place(incoming, kind, keep_in=None, identity=keeps, head=ends.head)
    if is_other:
        sidecar_file(data, kind).unlink(missing_ok=True)
    return Rekeyed(kind, rows, change.written, change.unreadable, done.current.id)


def _unlocked(
    database: Database, identity: Identity, keyring: Keyring, data: Path, *, seal_topics: bool
) -> Seals:
    try:
        seals = unlock(database, identity.db_id, keyring, path=str(data), seal_topics=seal_topics)
    except MetaDamaged as error:
        raise StoreCorrupt(str(data), f"the database cannot be told: {error}") from error
    assert seals is not None, "there are keys"
    return seals


def _mints(data: Path, kind: Kind, identity: Identity, ends: Ends) -> bool:
    """Whether the next opening would mint a generation."""
    try:
        sidecar = Sidecar.read(sidecar_file(data, kind))
    except (ValueError, OSError):
        return True
    return changed(identity, ends.head, sidecar, place_of(database_file(data, kind))) != ""


def _put(txn: WriteTxn, space: Space, rows: list[tuple[bytes, bytes]]) -> None:
    for key, value in rows:
        txn.put(space, key, value)


def _must_be_the_same(
    old: Database,
    new: Database,
    total: int,
    data: Path,
    progress: Progress,
) -> None:
    """Compare two databases row by row. Raises StoreCorrupt."""

    def work(txn: ReadTxn) -> bytes:
        digest = hashlib.sha256()
        done = told = 0
        for space in Space:
            for key, value in txn.scan(space):
                digest.update(b"".join((bytes((space,)), U64.pack(len(key)), key, value)))
                done += len(key) + len(value)
                if done - told > COPY_BYTES:
                    told = done
                    progress("compare", done, 2 * total)
        return digest.digest()

    first, second = old.read(work), new.read(work)
    progress("compare", 2 * total, 2 * total)
    if first != second:
        raise StoreCorrupt(str(data), "the copy differs from what was read: nothing was changed")
