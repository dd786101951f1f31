"""Online backup, and restore.

A backup is a directory with the database file and ``manifest.json``, which tells what it is and
holds the file's SHA-256. The directory appears under its name when all of it is on disk. It has no
sidecar: what is served from it as it is, is told apart by that alone.

Generations. ``restore`` mints the new generation itself, in the file that is put in place, and does
not leave it to the next opening to find that something changed: a backup that was taken in this
boot, with a sidecar that was copied along, looks like the database it came from. So after it no
position that was given before is of the current generation, whatever becomes of the sidecar
(storage.identity); sessions are told 409. It is the same with a migration (storage.rewriting).

Who may write meanwhile. A backup holds no lock: the broker goes on. Restore holds the lock of the
data directory from before the first look to after the last step.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sqlite3
from dataclasses import asdict, dataclass
from threading import Thread
from typing import TYPE_CHECKING, Any, Final

from storage.check import check
from storage.durable import FILES
from storage.errors import (
    NO_SPACE,
    StoreCorrupt,
    StoreFull,
    StoreTooNew,
    StoreUnavailable,
    StoreUnusable,
)
from storage.files import (
    COPY_BYTES,
    INCOMING,
    MANIFEST,
    database_file,
    identity_of,
    locked,
    open_database,
    opened_with,
    ours,
    put_in_place,
    remove_incoming,
    silent,
    sync_file,
    the_kind_in,
)
from storage.identity import mint, sync_directory
from storage.meta import FORMAT

if TYPE_CHECKING:
    from pathlib import Path

    from storage.files import Kind, Progress
    from storage.keyring import Keyring
    from storage.meta import Identity

__all__ = ["MANIFEST", "Manifest", "Restored", "back_up", "restore"]

_PAGES: Final = 2048
"""Pages of SQLite (8 KiB) copied with one call."""


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
    progress: Progress = silent,
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
        building.mkdir(mode=0o700)
        try:
            found = _build(data, kind, building, now_ms, progress, keyring, is_checked=is_checked)
            building.rename(target)
        except BaseException:
            shutil.rmtree(building, ignore_errors=True)
            raise
        sync_directory(target.parent)
    except OSError as error:
        raise StoreUnavailable.of(error) from error
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
        identity, ends = identity_of(database, data)
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
            if failed[0].code in NO_SPACE:
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
    progress: Progress = silent,
) -> Restored:
    """Put a backup in place, in a new generation (see above).

    keep_in: where a database that is there is kept; None = refuse if there is one.
    Raises StoreLocked when a broker has ``data``, StoreUnusable, StoreCorrupt, StoreUnavailable.
    Whatever is raised, what was there before is there still.
    """
    manifest = Manifest.read(backup)
    kind: Kind = "lmdb" if manifest.kind == "lmdb" else "sqlite"
    try:
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
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
        raise StoreUnavailable.of(error) from error


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
        identity, ends = identity_of(database, backup)
        minted = mint(identity)
        database.write(minted.write)
    finally:
        database.close()
    kept = put_in_place(incoming, kind, keep_in=keep_in, identity=minted, head=ends.head)
    return Restored(manifest, minted, kept)
