"""What the durable stores share: opening, identity, and every read and write as one transaction.

A backend says how a piece of work gets to the thread of its writer or of its reader, and what a
transaction is (storage.kv); everything that is promised is here and in the engine.

Rule 1. A database file appears whole: it is built under another name and renamed.
Rule 2. A file that is there is opened or refused, never replaced.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from functools import partial
from threading import RLock
from typing import TYPE_CHECKING, Literal, TypeVar

from storage import consumers, engine, history
from storage.check import check
from storage.errors import (
    StoreCorrupt,
    StoreTooNew,
    StoreUnavailable,
    StoreUnusable,
)
from storage.identity import (
    WITNESS_MS,
    Place,
    Sidecar,
    changed,
    mint,
    new_identity,
    place_of,
    sync_directory,
)
from storage.lock import DirectoryLock
from storage.meta import FORMAT, Ends, Identity, MetaDamaged, read_ends, read_format, read_identity
from storage.outbox.reading import Reads
from storage.outbox.rights import Role, refusal
from storage.rekey import Resealing, reseal
from storage.sealing import guarded, unlock
from storage.topics import Matches

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from storage.api import (
        Accept,
        Batch,
        Chunk,
        Consumer,
        Entry,
        LogState,
        Loss,
        Missed,
        Opened,
        Outcome,
        Snapshot,
    )
    from storage.engine import Engine
    from storage.keyring import Keyring
    from storage.kv import Database, ReadTxn, WriteTxn
    from storage.outbox import OutboxReads
    from storage.sealing import Seals

__all__ = ["Durability", "DurableStore"]

T = TypeVar("T")
Durability = Literal["fsync", "os"]

FILES = {"lmdb": "history.mdb", "sqlite": "history.sqlite"}
"""Kind of store -> its file in the data directory."""

log = logging.getLogger("amqtt_durable.store")


class DurableStore(ABC):
    """A Store on disk; see storage.api.Store for what it guarantees.

    directory: holds the database, its sidecar and the lock; made if it is missing.
    durability: "fsync" = a batch is on disk when it is reported; "os" = the operating system has
        it, so that it survives a crash of the process but perhaps not of the machine.
    keyring: what is written is sealed with its current key (storage.sealing), with the names of
        topics if ``seal_topics``; None = nothing is sealed, and a sealed database is refused.
    """

    name: str

    def __init__(
        self,
        directory: Path,
        *,
        durability: Durability = "fsync",
        keyring: Keyring | None = None,
        seal_topics: bool = False,
    ) -> None:
        self.directory = directory
        self.durability = durability
        self._keyring = keyring
        self._seal_topics = seal_topics
        self._seals: Seals | None = None
        self._file = directory / FILES[self.name]
        self._sidecar = directory / f"{FILES[self.name]}.identity.json"
        self._lock = DirectoryLock(directory)
        self._turn = RLock()  # of whoever writes, where a backend has more than one writer
        self._engine: Engine | None = None
        self._place: Place | None = None
        self._matches = Matches()
        self._witness_ms = 0
        self._is_open = False
        self.outbox: OutboxReads = Reads(partial(self._read, is_of_outbox=True))

    # ------------------------------------------------------------------- what a backend provides

    @abstractmethod
    async def _connect(self, file: Path, *, create: bool) -> None:
        """Start the threads and open the file. Raises StoreCorrupt, StoreUnavailable."""

    @abstractmethod
    async def _disconnect(self) -> None:
        """Finish what was given to the threads, close the file, end the threads. Idempotent."""

    @abstractmethod
    async def _in_writer(self, job: Callable[[Database], T]) -> T:
        """Run a job in the writer's thread, after what was submitted before."""

    @abstractmethod
    async def _in_reader(self, job: Callable[[Database], T]) -> T:
        """Run a job in the reader's thread."""

    @abstractmethod
    def _post(
        self,
        job: Callable[[Database], list[Outcome] | BaseException],
        done: Callable[[list[Outcome] | BaseException], None],
    ) -> None:
        """Run a job in the writer's thread, then ``done`` in the event loop. FIFO."""

    def _post_as(
        self,
        role: Role,  # noqa: ARG002 - a backend may have a connection for it
        job: Callable[[Database], list[Outcome] | BaseException],
        done: Callable[[list[Outcome] | BaseException], None],
    ) -> None:
        """The same for a batch of a role, which needs no engine."""
        self._post(job, done)

    async def _in_outbox_reader(self, job: Callable[[Database], T]) -> T:
        """Run a job that reads the outbox and nothing else."""
        return await self._in_reader(job)

    # ----------------------------------------------------------------------------- life cycle

    async def open(self, *, now_ms: int) -> Opened:
        """Open or create. Raises StoreLocked, StoreTooNew, StoreCorrupt, StoreUnavailable,
        SealKeyMissing, SealKeyWrong."""
        if self._is_open:
            raise StoreUnusable(str(self.directory), "it is open already")
        try:
            # what is in it is for nobody else, unless somebody says so by making it himself
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StoreUnavailable(f"{self.directory}: {error.strerror}") from error
        self._lock.acquire()
        try:
            is_new = self._must_be_created()
            if is_new:
                await self._create()
            await self._connect(self._file, create=False)
            opened = await self._in_writer(partial(self._boot, is_new, now_ms))
        except BaseException as error:
            await self._disconnect()
            self._lock.release()
            if isinstance(error, MetaDamaged):
                raise self._corrupt(str(error)) from error
            if isinstance(error, OSError):
                raise StoreUnavailable.of(error) from error
            raise
        self._matches = Matches()  # of this database; another one may have had the directory
        self._is_open = True
        return opened

    def _must_be_created(self) -> bool:
        """Whether there is nothing yet. Raises StoreUnusable, StoreCorrupt."""
        for kind, name in FILES.items():
            if kind != self.name and (self.directory / name).exists():
                reason = (
                    f"it holds a store of kind {kind!r}, and {self.name!r} is configured: configure"
                    f" {kind!r}, or `amqtt-durable migrate --from {kind} --to {self.name}`"
                )
                raise StoreUnusable(str(self.directory), reason)
        if self._file.exists():
            if self._file.stat().st_size == 0:
                raise self._corrupt("it is empty")
            return False
        for name in self._remains():
            if (self.directory / name).exists():
                raise self._corrupt(f"it is missing, but {name} is there")
        return True

    def _remains(self) -> tuple[str, ...]:
        """Files that only a database leaves behind which was not closed."""
        return ()

    def _corrupt(self, reason: str) -> StoreCorrupt:
        return StoreCorrupt(
            str(self.directory),
            f"{self._file.name} cannot be used: {reason}. Restore it from a backup, or move the"
            " directory away to start anew; nothing was changed",
        )

    async def _create(self) -> None:
        """Build a new database beside its place, and put it there whole."""
        building = self._file.with_name(self._file.name + ".new")
        for leftover in self.directory.glob(building.name + "*"):
            leftover.unlink()
        await self._connect(building, create=True)
        identity = new_identity()

        def first(txn: WriteTxn) -> None:
            identity.write(txn)
            Ends().write(txn)

        await self._in_writer(lambda database: database.write(first))
        await self._disconnect()
        building.replace(self._file)
        for leftover in self.directory.glob(building.name + "*"):
            leftover.unlink()
        sync_directory(self.directory)

    def _boot(self, is_new: bool, now_ms: int, database: Database) -> Opened:
        """The steps of an opening; see storage.identity. In the writer's thread."""
        number = database.read(read_format)
        if number > FORMAT:
            raise StoreTooNew(str(self.directory), number, FORMAT)
        identity, ends = database.read(lambda txn: (read_identity(txn), read_ends(txn)))
        self._seals = self._unlocked(database, identity, is_new=is_new)
        database = guarded(database, self._seals)
        place = self._place = place_of(self._file)
        minted = "created" if is_new else self._changed(identity, ends, place)
        if minted:
            identity = mint(identity)
        else:
            Sidecar.of(identity, ends.head, place).write(self._sidecar)
            identity = Identity(identity.db_id, identity.generation, identity.boot + 1)

        def boot(txn: WriteTxn) -> tuple[Opened, Engine]:
            identity.write(txn)
            return engine.opened(txn, identity, minted, now_ms)

        # nothing can be deleted before it is open, so a full disk must not stop it
        opened, self._engine = database.write(boot, frees=True)
        Sidecar.of(identity, ends.head, place).write(self._sidecar)
        self._witness_ms = now_ms
        return opened

    def _unlocked(
        self, database: Database, identity: Identity, *, is_new: bool = False
    ) -> Seals | None:
        return unlock(
            database,
            identity.db_id,
            self._keyring,
            path=str(self.directory),
            seal_topics=self._seal_topics,
            is_new=is_new,
        )

    def _changed(self, identity: Identity, ends: Ends, place: Place) -> str:
        try:
            sidecar = Sidecar.read(self._sidecar)
        except ValueError:
            return "sidecar damaged"
        return changed(identity, ends.head, sidecar, place)

    async def close(self) -> None:
        """Finish what was submitted, then close. Idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        try:
            await self._in_writer(lambda _: self._write_sidecar())
        finally:
            await self._disconnect()
            self._lock.release()

    def _write_sidecar(self) -> None:
        """Let the sidecar's head follow."""
        engine_, place = self._engine, self._place
        if engine_ is None or place is None:
            return
        try:
            Sidecar.of(engine_.identity, engine_.ends.head, place).write(self._sidecar)
        except OSError as error:
            # it is a witness only: an older head is true as well, and the next one comes
            log.warning("the sidecar could not be written: %s", error.strerror)

    # -------------------------------------------------------------------------------- writes

    def submit(self, batch: Batch, done: Callable[[list[Outcome] | BaseException], None]) -> None:
        """Apply a batch in the writer; ``done`` runs in the event loop."""
        if not self._is_open:
            error = StoreUnavailable("the store is not open")
            asyncio.get_running_loop().call_soon(done, error)
            return
        if batch.role is Role.BROKER:
            self._post(partial(self._commit, batch), done)
        elif (refused := refusal(batch)) is not None:
            asyncio.get_running_loop().call_soon(done, refused)
        else:
            self._post_as(batch.role, partial(self._commit_as_role, batch), done)

    def _commit(self, batch: Batch, database: Database) -> list[Outcome] | BaseException:
        """Apply and commit a batch, or nothing of it. In the writer's thread."""
        writer = self._engine
        assert writer is not None, "an open store has an engine"
        database = guarded(database, self._seals)
        try:
            outcomes = database.write(partial(writer.apply, batch), frees=engine.frees(batch))
        except Exception as error:  # noqa: BLE001 - whatever it is, the submitter is told
            writer.aborted()
            return error
        writer.committed()
        if batch.stored_ms - self._witness_ms >= WITNESS_MS:
            self._witness_ms = batch.stored_ms
            self._write_sidecar()
        return outcomes

    def _commit_as_role(self, batch: Batch, database: Database) -> list[Outcome] | BaseException:
        """Apply and commit a batch of a role, or nothing of it."""
        try:
            with self._turn:  # keys do not change from here to the commit
                work = partial(engine.apply_as_role, batch)
                return guarded(database, self._seals).write(work, frees=engine.frees(batch))
        except Exception as error:  # noqa: BLE001 - whatever it is, the submitter is told
            return error

    # ------------------------------------------------------------------------------- sealing

    async def seal_with(self, keyring: Keyring, *, seal_topics: bool = False) -> list[str]:
        """Seal what is written from now on with the current key of another ring, which must have
        all keys that something is sealed with. The ids of those keys, the current one first.

        Raises SealKeyMissing, SealKeyWrong, StoreUnavailable; then nothing changed.
        """

        def job(database: Database) -> list[str]:
            before = self._keyring, self._seal_topics
            self._keyring, self._seal_topics = keyring, self._seal_topics or seal_topics
            try:
                identity = database.read(read_identity)
                self._seals = seals = self._unlocked(database, identity)
            except BaseException:
                self._keyring, self._seal_topics = before
                raise
            assert seals is not None, "there are keys"
            return seals.key_ids

        return await self._sealing(job)

    async def reseal(self) -> Resealing:
        """One step of sealing everything with the current key, in one transaction; see
        storage.rekey. When it has come to the end, no other key is needed any more.

        Raises StoreFull, StoreUnavailable; the step can be tried again.
        """

        def job(database: Database) -> Resealing:
            assert self._seals is not None, "it is sealed"
            found, self._seals = reseal(database, self._seals)
            return found

        done = await self._sealing(job)
        if done.is_done:
            await self._in_writer(lambda database: database.scrub())
        return done

    async def _sealing(self, job: Callable[[Database], T]) -> T:
        if not self._is_open:
            raise StoreUnavailable("the store is not open")

        def in_turn(database: Database) -> T:
            with self._turn:  # a role's connection seals with the keys that are set here
                return job(database)

        try:
            return await self._in_writer(in_turn)
        except MetaDamaged as error:
            raise StoreUnavailable(f"{self._file.name}: {error}") from error

    # --------------------------------------------------------------------------------- reads

    async def _read(self, work: Callable[[ReadTxn], T], *, is_of_outbox: bool = False) -> T:
        if not self._is_open:
            raise StoreUnavailable("the store is not open")
        reader = self._in_outbox_reader if is_of_outbox else self._in_reader
        try:
            return await reader(partial(self._read_sealed, work))
        except MetaDamaged as error:
            raise StoreUnavailable(f"{self._file.name}: {error}") from error

    def _read_sealed(self, work: Callable[[ReadTxn], T], database: Database) -> T:
        """Read with the keys of now. What was sealed with a key that came between their look-up and
        the begin of the transaction would be taken for damage, so then it is read again."""
        while True:
            seals = self._seals
            try:
                result = guarded(database, seals).read(work)
            except Exception:
                if seals is self._seals:
                    raise
            else:
                if seals is self._seals:
                    return result

    async def read(
        self,
        after: int,
        accept: Accept,
        *,
        filters: Sequence[bytes] = (),
        entries_max: int,
        bytes_max: int,
        missed: Missed | None = None,
    ) -> Chunk:
        """Read entries with offset > after that ``accept`` takes; see storage.api.Store.

        Goes on in a new transaction when a slice found nothing: what one of them checked holds
        for what it read, so the chunk is as if it were read in one.
        """
        bounds = {
            "filters": filters,
            "entries_max": entries_max,
            "bytes_max": bytes_max,
            "missed": missed,
            "matches": self._matches,
        }
        lost: list[Loss] = []
        while True:
            work = partial(history.read, after=after, accept=accept, **bounds)  # type: ignore[arg-type]
            chunk = await self._read(work)
            if chunk.loss is not None:
                lost.append(chunk.loss)
            if chunk.entries or chunk.through >= chunk.head:
                loss = max(lost, key=lambda loss: loss.pruned_through, default=None)
                return chunk._replace(loss=loss)
            after = chunk.through

    async def fetch(self, offsets: Sequence[int]) -> list[Entry]:
        """The entries at these offsets. Raises EntryGone or EntryDamaged."""
        return await self._read(partial(history.fetch, offsets=offsets))

    async def newest(self, topics: Sequence[bytes]) -> list[int]:
        """The offset of the newest entry of each topic, 0 = none, or it cannot be told."""
        return await self._read(partial(history.newest, topics=topics))

    async def snapshot(self, client_id: bytes) -> Snapshot | None:
        """Read a consumer without owning it. None if there is none."""
        return await self._read(partial(consumers.snapshot, client_id=client_id))

    async def consumers(self, after: bytes | None = None, limit: int = 1000) -> list[Consumer]:
        """Records in the order of their client ids, a page at a time."""
        records = await self._read(partial(consumers.page, after=after, limit=limit))
        return [record.consumer for record in records]

    async def retained(self, after: bytes | None = None, limit: int = 1000) -> list[Entry]:
        """Retained messages in the order of their keys, a page at a time."""
        return await self._read(partial(engine.retained_page, after=after, limit=limit))

    async def log(self) -> LogState:
        """Identity and ends of the history, as committed."""
        return await self._read(lambda txn: read_ends(txn).log(read_identity(txn)))

    async def check(self) -> list[str]:
        """Walk every stored invariant; one sentence for each violation, empty = sound."""
        return await self._read(check)
