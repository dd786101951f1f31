"""Looking into a data directory that no broker serves: check, figures, repair.

A repair builds the sound database beside the damaged one (storage.repair), checks it, and only
then puts it in place; the damaged files are kept in a directory of their own, with
``repair.json``, which lists what was left out and who is reset.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Final

from storage.api import GROUP
from storage.blocks import Block, Damage
from storage.check import check
from storage.durable import FILES
from storage.errors import RecordDamaged, StoreCorrupt, StoreError, StoreTooNew, StoreUnusable
from storage.files import (
    INCOMING,
    database_file,
    locked,
    must_not_be_a_backup,
    open_database,
    opened_with,
    ours,
    put_in_place,
    remove_incoming,
    sidecar_file,
    the_kind_in,
)
from storage.identity import Sidecar, changed, place_of
from storage.kv import Space
from storage.meta import FORMAT, MetaDamaged, read_ends, read_format, read_identity
from storage.outbox.reading import backlog
from storage.records import Record, decode_claim
from storage.repair import Repaired, rebuild
from storage.retention import low_water
from storage.sealing import (
    SEALED_NAMES,
    SEALED_ROWS,
    guarded,
    is_sealed,
    key_ids,
    put_seal_rows,
    seal_rows,
    unlock,
)

if TYPE_CHECKING:
    from pathlib import Path

    from storage.files import Kind
    from storage.keyring import Keyring
    from storage.kv import Database, ReadTxn
    from storage.sealing import Seals

__all__ = ["Figures", "Inspection", "figures", "inspect", "repair"]

REPORT: Final = "repair.json"


@dataclass(slots=True)
class Figures:
    """What there is. Bytes are those of keys and values; file_bytes, those on disk.

    floor: nothing at or below it is promised. needed_from: lowest position that a session needs.
    oldest_ms: when the oldest entry was stored, 0 = there is none. filters: distinct durable ones.
    """

    db_id: str = ""
    generation: str = ""
    boot: int = 0
    head: int = 0
    floor: int = 0
    coarse: int = 0
    needed_from: int = 0
    entries: int = 0
    blocks: int = 0
    history_bytes: int = 0
    oldest_ms: int = 0
    topics: int = 0
    marks: int = 0
    sessions: int = 0
    groups: int = 0
    sessions_attached: int = 0
    sessions_expiring: int = 0
    subscriptions: int = 0
    filters: int = 0
    deliveries: int = 0
    held: int = 0
    inbound: int = 0
    retained: int = 0
    retained_bytes: int = 0
    wills: int = 0
    outbox_messages: int = 0
    outbox_waiting: int = 0
    outbox_claimed: int = 0
    outbox_dead: int = 0
    outbox_bytes: int = 0
    audit: int = 0
    file_bytes: int = 0


def figures(txn: ReadTxn) -> Figures:
    """Count everything, by walking it. Rows that are damaged are counted as rows. Raises
    MetaDamaged."""
    identity, ends = read_identity(txn), read_ends(txn)
    found = Figures(identity.db_id, identity.generation, identity.boot, ends.head, ends.floor)
    found.coarse = ends.coarse
    found.needed_from = low_water(txn, ends)
    for key, raw in txn.scan(Space.HISTORY):
        found.blocks += 1
        found.history_bytes += len(key) + len(raw)
        try:
            block = Block(int.from_bytes(key, "big"), raw)
        except Damage:
            continue
        found.entries += min(block.count, max(0, block.last - ends.floor))
        found.oldest_ms = found.oldest_ms or block.stored_ms
    for key, raw in txn.scan(Space.RETAINED):
        found.retained += 1
        found.retained_bytes += len(key) + len(raw)
    for key, raw in txn.scan(Space.CLAIM):
        number, claim = (int.from_bytes(part, "big") for part in (key[:8], key[8:]))
        try:
            found.deliveries += len(decode_claim(number, claim, raw).deliveries)
        except RecordDamaged:
            continue
    for packed_id, raw in txn.scan(Space.CONSUMER):
        found.sessions += 1
        try:
            record = Record.unpack(int.from_bytes(packed_id, "big"), raw)
        except RecordDamaged:
            continue
        if record.client_id.startswith(GROUP):
            found.sessions -= 1
            found.groups += 1
            continue
        found.sessions_attached += record.detached_ms == 0
        found.sessions_expiring += record.deadline_ms is not None
    found.topics = _count(txn, Space.TOPIC_NAME)
    found.marks = _count(txn, Space.MARK)
    found.subscriptions = _count(txn, Space.SUBSCRIPTION)
    found.filters = _count(txn, Space.FILTER)
    found.held = _count(txn, Space.HELD)
    found.inbound = _count(txn, Space.INBOUND)
    found.wills = _count(txn, Space.WILL)
    found.audit = _count(txn, Space.AUDIT)
    _count_outbox(txn, found)
    return found


def _count_outbox(txn: ReadTxn, found: Figures) -> None:
    for space in (Space.OUTBOX, Space.OUTBOX_BODY):
        found.outbox_bytes += sum(len(key) + len(raw) for key, raw in txn.scan(space))
    found.outbox_messages = _count(txn, Space.OUTBOX)
    for queue in backlog(txn):
        found.outbox_waiting += queue.waiting
        found.outbox_claimed += queue.claimed
        found.outbox_dead += queue.dead


def _count(txn: ReadTxn, space: Space) -> int:
    return sum(1 for _ in txn.scan(space))


@dataclass(slots=True)
class Inspection:
    """What was found. violations: a sentence each. figures: None = they cannot be told.

    mints: why the next opening will mint a generation, "" = it will not.
    is_readable: False = the file cannot be opened, or not read to its end.
    key_ids: of the keys it is sealed with. unseen: sealed rows that were not looked into, because
        their keys were not given.
    """

    path: str
    kind: str
    violations: list[str] = field(default_factory=list)
    figures: Figures | None = None
    mints: str = ""
    is_readable: bool = True
    key_ids: list[str] = field(default_factory=list)
    unseen: int = 0


def inspect(data: Path, keyring: Keyring | None = None) -> Inspection:
    """Walk every invariant. Changes nothing.

    keyring: of a sealed database; without it, what is in sealed rows is not looked at.
    Raises StoreLocked when a broker has it, StoreUnusable when nothing is there, StoreTooNew,
    SealKeyMissing, SealKeyWrong.
    """
    kind = the_kind_in(data)
    with locked(data):
        return _inspect(data, kind, keyring)


def _inspect(data: Path, kind: Kind, keyring: Keyring | None) -> Inspection:
    file = database_file(data, kind)
    found = Inspection(str(data), kind)
    try:
        database = open_database(file, kind)
    except StoreCorrupt as error:
        found.violations.append(error.reason)
        found.is_readable = False
        return found
    try:
        with suppress(Exception):  # a damaged file raises what it likes; the walk tells
            found.key_ids = database.read(key_ids)
        _walk(_seen(database, data, keyring), data, found)
        found.mints = _mints(database, data, kind)
    finally:
        database.close()
    return found


def _seen(database: Database, data: Path, keyring: Keyring | None) -> Database:
    """The database as it is read with the keys. Raises SealKeyMissing, SealKeyWrong."""
    if keyring is None:
        return database
    try:
        identity = database.read(read_identity)
    except (MetaDamaged, StoreError):
        return database  # it cannot be told what was sealed; a violation says so
    return opened_with(keyring, database, identity, data)


def _walk(database: Database, data: Path, found: Inspection) -> None:
    try:
        number = database.read(read_format)
    except (MetaDamaged, StoreError) as error:
        found.violations.append(f"the format cannot be told: {error}")
    else:
        if number > FORMAT:
            raise StoreTooNew(str(data), number, FORMAT)
    try:
        found.violations += database.read(check)
    except Exception as error:  # noqa: BLE001 - a damaged file raises what it likes
        found.violations.append(f"{FILES[_literal(found.kind)]} cannot be read to its end: {error}")
        found.is_readable = False
        return
    try:
        found.figures = database.read(figures)
        if found.key_ids:
            found.unseen = database.read(_unseen)
        found.figures.file_bytes = database_file(data, _literal(found.kind)).stat().st_size
    except MetaDamaged:
        found.figures = None  # a violation says so already


def _unseen(txn: ReadTxn) -> int:
    spaces = SEALED_ROWS | SEALED_NAMES
    return sum(is_sealed(raw) for space in spaces for _, raw in txn.scan(space))


def _literal(kind: str) -> Kind:
    return "lmdb" if kind == "lmdb" else "sqlite"


def _sidecar(data: Path, kind: Kind) -> tuple[Sidecar | None, str]:
    """The sidecar, and what is wrong with it."""
    try:
        return Sidecar.read(sidecar_file(data, kind)), ""
    except (ValueError, OSError):
        return None, "sidecar damaged"


def _mints(database: Database, data: Path, kind: Kind) -> str:
    """Why the next opening mints a generation, as storage.identity decides it."""
    sidecar, damaged = _sidecar(data, kind)
    if damaged:
        return damaged
    try:
        identity, ends = database.read(lambda txn: (read_identity(txn), read_ends(txn)))
    except (MetaDamaged, StoreError):
        return "its identity cannot be told"
    return changed(identity, ends.head, sidecar, place_of(database_file(data, kind)))


# --------------------------------------------------------------------------------- repair


def repair(
    data: Path, *, keep_in: Path, keyring: Keyring | None = None
) -> tuple[Inspection, Repaired | None, Path | None]:
    """Check, and repair what is found; see storage.repair for what becomes of it.

    What was found, what was done (None = it was sound) and where the damaged files are. The
    generation stays where identity and ends are sound, so that who lost something is told 410.
    Raises as ``inspect``, and StoreCorrupt if it cannot be made sound; then nothing was changed.
    """
    kind = the_kind_in(data)
    data = data.resolve()
    with locked(data):
        found = _inspect(data, kind, keyring)
        if not found.violations:
            return found, None, None
        must_not_be_a_backup(data)
        if found.key_ids and keyring is None:
            reason = (
                "it is sealed: a repair needs its keys, to tell what is damaged from what is not"
            )
            raise StoreUnusable(str(data), reason)
        remove_incoming(data)
        try:
            done, kept = _repair(data, kind, found, keep_in, keyring)
        finally:
            remove_incoming(data)
        return found, done, kept


def _repair(
    data: Path, kind: Kind, found: Inspection, keep_in: Path, keyring: Keyring | None
) -> tuple[Repaired, Path | None]:
    file = database_file(data, kind)
    sidecar, _ = _sidecar(data, kind)
    incoming = data / f"{FILES[kind]}{INCOMING}"
    try:
        source: Database | None = open_database(file, kind, is_whole=False)
    except StoreCorrupt:
        source = None
    try:
        target = open_database(incoming, kind, create=True)
        try:
            done, left = _rebuilt(source, target, sidecar, data, keyring)
        finally:
            target.close()
    finally:
        if source is not None:
            source.close()
    if left:
        reason = f"it could not be made sound ({left[0]}); nothing was changed, restore a backup"
        raise StoreCorrupt(str(data), reason)
    keeps = None if found.mints and not done.minted else done.identity
    old = ours(data)
    kept = put_in_place(incoming, kind, keep_in=keep_in, identity=keeps, head=done.head)
    if keeps is None:  # what minted before mints still
        sidecar_file(data, kind).unlink(missing_ok=True)
    if kept is not None and old:
        _write_report(kept / REPORT, found, done)
    return done, kept


def _rebuilt(
    source: Database | None,
    target: Database,
    sidecar: Sidecar | None,
    data: Path,
    keyring: Keyring | None,
) -> tuple[Repaired, list[str]]:
    """Rebuild, through the seals of a sealed database; what was done, and what is wrong still."""
    if source is not None and keyring is not None:
        seals = _seals(source, sidecar, data, keyring)
        if seals is not None:
            rows = source.read(seal_rows)
            target.write(lambda txn: put_seal_rows(txn, rows))
            source, target = guarded(source, seals), guarded(target, seals)
    return rebuild(source, target, sidecar), target.read(check)


def _seals(source: Database, sidecar: Sidecar | None, data: Path, keyring: Keyring) -> Seals | None:
    """Raises StoreCorrupt, SealKeyMissing, SealKeyWrong."""
    try:
        db_id = source.read(read_identity).db_id
    except MetaDamaged:
        if sidecar is None:
            reason = "neither its identity nor its sidecar can be read: its rows cannot be opened"
            raise StoreCorrupt(str(data), reason) from None
        db_id = sidecar.db_id
    try:
        return unlock(source, db_id, keyring, path=str(data), is_readonly=True)
    except MetaDamaged as error:
        raise StoreCorrupt(str(data), f"{error}: restore a backup") from error


def _write_report(path: Path, found: Inspection, done: Repaired) -> None:
    fields = asdict(done)
    fields["resets"] = [
        {
            "client_id": reset.client_id.decode("utf-8", "backslashreplace"),
            "reason": reset.reason,
            "is_removed": reset.is_removed,
        }
        for reset in done.resets
    ]
    with path.open("w", encoding="utf-8") as file:
        json.dump({"violations": found.violations, **fields}, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
