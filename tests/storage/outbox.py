"""What the tests of the outbox use: short calls, and every stored byte of it."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any, Final

from storage.api import Advance
from storage.durable import DurableStore
from storage.kv import Space
from storage.memory import MemoryStore
from storage.outbox import (
    Backlog,
    Claimed,
    ClaimNext,
    DeadLetter,
    Enqueue,
    Enqueued,
    Extend,
    Failure,
    Message,
    Reissue,
    Release,
    Settle,
    State,
    Verdict,
)
from tests.storage.harness import NOW_MS, A, Database, message

if TYPE_CHECKING:
    from storage.api import Entry
    from storage.kv import ReadTxn

HOOK: Final = b"hook"
ONE: Final = b"1" * 16
TWO: Final = b"2" * 16
"""Workers."""
LEASE_MS: Final = 60_000

SPACES: Final = [space for space in Space if space.name.startswith("OUTBOX")] + [Space.AUDIT]


class Outbox:
    """The outbox of a database, at a time that tests move."""

    def __init__(self, db: Database) -> None:
        self.db = db
        self.now_ms = NOW_MS

    async def enqueue(self, body: Entry | None = None, **rest: Any) -> Enqueued:
        fields = {"queue": HOOK, "now_ms": self.now_ms, **rest}
        outcome = await self.db.do(Enqueue(message=body or message(), **fields))
        assert isinstance(outcome, Enqueued)
        return outcome

    async def some(self, count: int, **rest: Any) -> list[int]:
        """Ids of new messages."""
        return [(await self.enqueue(**rest)).id for _ in range(count)]

    async def claim(self, worker: bytes = ONE, **rest: Any) -> Claimed:
        fields = {"queue": HOOK, "until_ms": self.now_ms + LEASE_MS, **rest}
        outcome = await self.db.do(ClaimNext(worker=worker, now_ms=self.now_ms, **fields))
        assert isinstance(outcome, Claimed)
        return outcome

    async def claim_one(self, worker: bytes = ONE, **rest: Any) -> Message:
        (found,) = (await self.claim(worker, **rest)).messages
        return found

    async def dead(self, **rest: Any) -> Message:
        """A dead letter."""
        await self.enqueue(**rest)
        one = await self.claim_one(queue=rest.get("queue", HOOK))
        assert await self.settle(one, Verdict.DEAD, Failure.REJECTED) is State.DEAD
        return await self.show(one.id)

    async def settle(
        self,
        one: Message,
        verdict: Verdict = Verdict.DONE,
        failure: Failure | None = None,
        **rest: Any,
    ) -> Any:
        if failure is None:
            failure = Failure.NONE if verdict is Verdict.DONE else Failure.UNAVAILABLE
        return await self.db.do(Settle(one.credential, self.now_ms, verdict, failure, **rest))

    async def show(self, message_id: int) -> Message:
        found = await self.db.store.outbox.show(message_id)
        assert found is not None
        return found

    async def figures(self, queue: bytes = HOOK) -> Backlog:
        found = {one.queue: one for one in await self.db.store.outbox.backlog()}
        return found.get(queue, Backlog(queue))

    async def stored(self) -> Any:
        """Everything that is stored for the outbox, to the byte."""
        store = self.db.store
        if isinstance(store, MemoryStore):
            return deepcopy(store._tables.outbox)
        assert isinstance(store, DurableStore)

        def rows(txn: ReadTxn) -> Any:
            return {space: list(txn.scan(space)) for space in SPACES}

        return await store._in_reader(lambda database: database.read(rows))


ACTS: Final[dict[str, Any]] = {
    "done": lambda held, now_ms: Settle(held, now_ms, Verdict.DONE),
    "retry": lambda held, now_ms: Settle(
        held, now_ms, Verdict.RETRY, Failure.UNAVAILABLE, now_ms + 1
    ),
    "dead": lambda held, now_ms: Settle(held, now_ms, Verdict.DEAD, Failure.REJECTED),
    "dead, erased": lambda held, now_ms: Settle(
        held, now_ms, Verdict.DEAD, Failure.REJECTED, erase=True
    ),
    "expired": lambda held, now_ms: Settle(held, now_ms, Verdict.EXPIRED, Failure.EXPIRED),
    "release": Release,
    "extend": lambda held, now_ms: Extend(held, now_ms, now_ms + 10 * LEASE_MS),
}
"""Everything that states a credential."""


async def fill_outbox(store: Database, client_id: bytes) -> None:
    """Messages by id: 1 done, 2 claimed, 3 reissued as 5, 4 waiting, 6 a dead letter of a session
    that A owns."""
    for key in (b"", b"k", b"", b"room"):
        await store.do(Enqueue(HOOK, message(b"b", b"to send"), NOW_MS, key=key, supersede_key=key))
    claim = ClaimNext(HOOK, ONE, NOW_MS, NOW_MS + 60_000, limit=3)
    done, _, dead = (await store.do(claim)).messages
    await store.do(Settle(done.credential, NOW_MS, Verdict.DONE))
    await store.do(Settle(dead.credential, NOW_MS, Verdict.DEAD, Failure.REJECTED))
    await store.do(Reissue(dead.id, NOW_MS, b"ann"))
    session = (await store.snapshot(client_id)).consumer
    letter = DeadLetter(message(b"b", b"too large"), Failure.TOO_LARGE, NOW_MS)
    await store.do(Advance(session.id, A, dead=[letter]))
