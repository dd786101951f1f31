"""Writing a database anew, row by row, into a file that takes the place of the old one: migration
to the other backend, and sealing everything with another key while nobody serves it.

Both hold the lock of the data directory from before the first look to after the last step, and a
crash leaves the old file or the new one. A migration mints a new generation, as ``storage.backup``
says of a restore.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import starmap
from typing import TYPE_CHECKING, Final, TypeAlias

from storage.check import check
from storage.durable import FILES
from storage.errors import StoreCorrupt, StoreUnavailable, StoreUnusable
from storage.files import (
    COPY_BYTES,
    INCOMING,
    database_file,
    identity_of,
    locked,
    must_not_be_a_backup,
    open_database,
    opened_with,
    ours,
    put_in_place,
    remove_incoming,
    sidecar_file,
    silent,
    the_kind_in,
)
from storage.identity import Sidecar, changed, mint, place_of
from storage.kv import U64, Space
from storage.meta import MetaDamaged
from storage.rekey import Resealed, finish
from storage.sealing import guarded, unlock

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from storage.files import Kind, Progress
    from storage.keyring import Keyring
    from storage.kv import Database, ReadTxn, WriteTxn
    from storage.meta import Ends, Identity
    from storage.sealing import Seals

__all__ = ["Migrated", "Rekeyed", "migrate", "rekey"]

COPY_ROWS: Final = 20_000
"""Copied in one transaction, at most COPY_BYTES of them."""

Change: TypeAlias = Callable[[Space, bytes, bytes], tuple[bytes, bytes]]
"""(space, key, value) -> what is written for that row."""


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
    progress: Progress = silent,
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
        if to_data is None:
            must_not_be_a_backup(data)
        goal = data if to_data is None else to_data
        goal.mkdir(mode=0o700, parents=True, exist_ok=True)
        goal = goal.resolve()
        with locked(data):
            if goal == data:
                return _migrate(data, source, goal, target, keep_in, keyring, progress)
            with locked(goal):
                if ours(goal):
                    raise StoreUnusable(str(goal), "it holds a database: name another directory")
                return _migrate(data, source, goal, target, None, keyring, progress)
    except OSError as error:
        raise StoreUnavailable.of(error) from error


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
        identity, ends = identity_of(old, data)
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
    data: Path, keyring: Keyring, *, seal_topics: bool = False, progress: Progress = silent
) -> Rekeyed:
    """Seal everything in a database that nobody serves with the current key, in a new file.

    The new file takes the place of the old one, which is deleted: nothing of what was there in
    clear, or sealed otherwise, is in free space of the new one. The generation stays. A crash
    leaves the old one, or the new one, whole.
    Raises SealKeyMissing, SealKeyWrong, StoreLocked, StoreUnusable, StoreCorrupt, StoreUnavailable.
    """
    kind = the_kind_in(data)
    must_not_be_a_backup(data)
    try:
        data = data.resolve()
        with locked(data):
            remove_incoming(data)
            try:
                return _rekey(data, kind, keyring, progress, seal_topics=seal_topics)
            finally:
                remove_incoming(data)
    except OSError as error:
        raise StoreUnavailable.of(error) from error


def _rekey(
    data: Path, kind: Kind, keyring: Keyring, progress: Progress, *, seal_topics: bool
) -> Rekeyed:
    incoming = data / f"{FILES[kind]}{INCOMING}"
    old = open_database(database_file(data, kind), kind)
    try:
        identity, ends = identity_of(old, data)
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
