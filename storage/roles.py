"""Handles of the outbox by role: each can do what its methods say, and nothing else.

    Producer   enqueue
    Worker     claim, extend, settle, release: what it acquired itself
    Operator   figures, dead letters, one message, the audit; reissue
    Janitor    reap, expire, purge

A handle submits its batches in the name of its role; the store refuses whatever is not the role's,
on every backend, and SQLite asks an authorizer besides (storage.outbox.rights). Plugins and sinks
get a handle, never the store, the committer or ``Handles``.

Each role has a committer of its own, so the handles of a role share commits with each other. Who
wants an enqueue in the transaction of something else says so in the operation that it belongs to
(storage.api.Advance).
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from typing import TYPE_CHECKING, Final, cast

from storage.committer import Committer
from storage.errors import ClaimNotHeld
from storage.outbox import (
    ATTEMPTS_MAX,
    CLAIM_BYTES_MAX,
    CLAIM_MESSAGES_MAX,
    RETRY_DELAYS_MS,
    WORKER_BYTES,
    Claimed,
    ClaimNext,
    Enqueue,
    Enqueued,
    ExpireMessages,
    Extend,
    Failure,
    Purge,
    Purged,
    Reap,
    Reaped,
    Reissue,
    Reissued,
    Release,
    Schedule,
    Settle,
    State,
    Verdict,
)
from storage.outbox.rights import Role

if TYPE_CHECKING:
    from collections.abc import Callable

    from storage.api import Entry, Op, Outcome, Store
    from storage.clock import Clock
    from storage.outbox import AuditRecord, Backlog, Credential, Message, OutboxReads

__all__ = [
    "AUDIT_KEPT_MS",
    "DEAD_KEPT_MS",
    "DONE_KEPT_MS",
    "LEASE_MS",
    "Handles",
    "Janitor",
    "Operator",
    "Producer",
    "Worker",
]

_DAY_MS: Final = 24 * 3600 * 1000
DONE_KEPT_MS: Final = 30 * _DAY_MS
DEAD_KEPT_MS: Final = 90 * _DAY_MS
AUDIT_KEPT_MS: Final = 365 * _DAY_MS
"""How long a janitor keeps what has ended."""

LEASE_MS: Final = 60_000
"""Default lease: twice as long as a request to a webhook may take."""

LOST_MAX: Final = 1024
"""Credentials that a worker remembers as lost, so that each is logged once."""

SWEEP_MAX: Final = 500
"""Messages moved or deleted in one commit of a janitor."""

log = logging.getLogger("amqtt_durable.outbox")


class Producer:
    """Enqueue to one queue, and nothing else."""

    def __init__(self, committer: Committer, queue: bytes) -> None:
        self._committer = committer
        self.queue = queue

    async def enqueue(
        self,
        message: Entry,
        *,
        not_before_ms: int = 0,
        key: bytes = b"",
        supersede_key: bytes = b"",
        destination: bytes = b"",
        attempts_max: int = ATTEMPTS_MAX,
    ) -> Enqueued:
        """Add a message; it is stored when this returns. See storage.outbox.Enqueue. Raises
        StoreUnavailable; then it is not."""
        op = Enqueue(
            self.queue,
            message,
            self._committer.clock.now_ms(),
            not_before_ms,
            key,
            supersede_key,
            destination,
            attempts_max,
        )
        return cast("Enqueued", await self._committer.apply(op))


class Worker:
    """Claim from one queue and record what became of it, and nothing else.

    id: minted here; a worker that starts again is another one.
    refused: how often something was recorded for a claim that was no longer held. Each is logged
        once and is no error of the caller's, who goes on with its batch.
    schedule, chance: when a failed message is tried again; chance draws 0..1.
    """

    def __init__(
        self,
        committer: Committer,
        queue: bytes,
        *,
        lease_ms: int = LEASE_MS,
        schedule: Schedule | None = None,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._committer = committer
        self._chance = chance
        self._lost: dict[Credential, None] = {}
        self.queue = queue
        self.lease_ms = lease_ms
        self.schedule = schedule or Schedule()
        self.id = os.urandom(WORKER_BYTES)
        self.refused = 0

    async def claim(
        self, *, limit: int = CLAIM_MESSAGES_MAX, bytes_max: int = CLAIM_BYTES_MAX
    ) -> Claimed:
        """Acquire what is due. Raises StoreUnavailable; then nothing was acquired.

        Who is cancelled while it waits has begun nothing: what was acquired for it is released.
        """
        now_ms = self._committer.clock.now_ms()
        op = ClaimNext(self.queue, self.id, now_ms, now_ms + self.lease_ms, limit, bytes_max)
        future: asyncio.Future[Claimed] = asyncio.get_running_loop().create_future()

        def done(outcome: Outcome) -> None:
            if future.cancelled():
                self._give_back(outcome)
            elif isinstance(outcome, BaseException):
                future.set_exception(outcome)
            else:
                future.set_result(cast("Claimed", outcome))

        self._committer.submit(op, done, retry=False)
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._give_back(future.result())
            raise

    def _give_back(self, outcome: Outcome) -> None:
        """Nobody waits any more: what cannot be released lapses."""
        if isinstance(outcome, Claimed):
            now_ms = self._committer.clock.now_ms()
            for message in outcome.messages:
                self._committer.submit(Release(message.credential, now_ms), lambda _: None)

    async def extend(self, message: Message) -> bool:
        """Have the lease run from now; False = the message is no longer ours."""
        now_ms = self._committer.clock.now_ms()
        op = Extend(message.credential, now_ms, now_ms + self.lease_ms)
        return await self._record(op, message.credential) is not _REFUSED

    async def done(self, message: Message) -> bool:
        """It was taken; False = the message is no longer ours."""
        op = Settle(message.credential, self._committer.clock.now_ms(), Verdict.DONE)
        return await self._record(op, message.credential) is not _REFUSED

    async def failed(
        self,
        message: Message,
        failure: Failure,
        *,
        retry_at_ms: int | None = None,
        erase: bool = False,
    ) -> State | None:
        """It was not taken; see storage.outbox.schedule for what becomes of it: its state now.
        None = the message is no longer ours. retry_at_ms: the receiver's own wish, as a time."""
        op = self.schedule.settlement(
            message,
            failure,
            self._committer.clock.now_ms(),
            chance=self._chance(),
            retry_at_ms=retry_at_ms,
            erase=erase,
        )
        outcome = await self._record(op, message.credential)
        return None if outcome is _REFUSED else cast("State", outcome)

    async def release(self, message: Message) -> bool:
        """Give it back unsent (shutdown); False = the message is no longer ours."""
        op = Release(message.credential, self._committer.clock.now_ms())
        return await self._record(op, message.credential) is not _REFUSED

    async def _record(self, op: Op, credential: Credential) -> Outcome:
        """Write until the store takes it: a settlement that is given up is a message sent twice."""
        try:
            return await self._committer.apply(op, retry=True)
        except ClaimNotHeld as error:
            self.refused += 1
            if credential not in self._lost:
                self._lost[credential] = None
                if len(self._lost) > LOST_MAX:
                    del self._lost[next(iter(self._lost))]
                log.warning(
                    "ack refused, claim no longer held: message %d of %r (%s)",
                    credential.message_id,
                    self.queue,
                    error.found,
                )
            return _REFUSED


_REFUSED: Final = object()


class Operator:
    """Look at the outbox, and have dead letters reissued."""

    def __init__(self, committer: Committer, reads: OutboxReads) -> None:
        self._committer = committer
        self._reads = reads

    async def backlog(self) -> list[Backlog]:
        """Figures of every queue."""
        return await self._reads.backlog()

    async def dead_letters(
        self, queue: bytes, after: tuple[int, int] = (0, 0), limit: int = 100
    ) -> list[Message]:
        """A page; see storage.outbox.OutboxReads."""
        return await self._reads.dead_letters(queue, after, limit)

    async def show(self, message_id: int) -> Message | None:
        """One message, None = there is none."""
        return await self._reads.show(message_id)

    async def audit(self, after: int = 0, limit: int = 100) -> list[AuditRecord]:
        """Who had what reissued."""
        return await self._reads.audit(after, limit)

    async def reissue(
        self, message_id: int, actor: bytes, *, attempts_max: int | None = None
    ) -> Reissued:
        """A fresh message in the place of a dead letter. Raises ReissueRefused."""
        now_ms = self._committer.clock.now_ms()
        op = Reissue(message_id, now_ms, actor, attempts_max)
        return cast("Reissued", await self._committer.apply(op))


class Janitor:
    """Reap, expire and purge, in bounded steps."""

    def __init__(self, committer: Committer) -> None:
        self._committer = committer

    async def reap(
        self, *, limit: int = SWEEP_MAX, delays_ms: tuple[int, ...] = RETRY_DELAYS_MS
    ) -> Reaped:
        """End leases that lapsed."""
        op = Reap(self._committer.clock.now_ms(), limit, delays_ms)
        return cast("Reaped", await self._committer.apply(op))

    async def reap_all(self, *, limit: int = SWEEP_MAX) -> Reaped:
        """End every lease, before any worker of this process has one: the directory's lock says
        that whoever had one is gone. What is ended keeps its place in line."""
        op = Reap(self._committer.clock.now_ms(), limit, delays_ms=(), all_leases=True)
        return cast("Reaped", await self._committer.apply(op))

    async def expire(self, *, limit: int = SWEEP_MAX) -> tuple[int, ...]:
        """End waiting messages whose deadline is over."""
        op = ExpireMessages(self._committer.clock.now_ms(), limit)
        return cast("tuple[int, ...]", await self._committer.apply(op))

    async def purge(
        self,
        *,
        done_kept_ms: int = DONE_KEPT_MS,
        dead_kept_ms: int = DEAD_KEPT_MS,
        audit_kept_ms: int = AUDIT_KEPT_MS,
        queue: bytes = b"",
        limit: int = SWEEP_MAX,
    ) -> Purged:
        """Delete what ended longer ago than it is kept."""
        now_ms = self._committer.clock.now_ms()
        op = Purge(
            done_before_ms=max(0, now_ms - done_kept_ms),
            dead_before_ms=max(0, now_ms - dead_kept_ms),
            limit=limit,
            queue=queue,
            audit_before_ms=max(0, now_ms - audit_kept_ms),
        )
        return cast("Purged", await self._committer.apply(op))

    async def sweep(self) -> bool:
        """One step of each; whether another one would find more."""
        reaped = await self.reap()
        expired = await self.expire()
        purged = await self.purge()
        return reaped.more or len(expired) == SWEEP_MAX or purged.more


class Handles:
    """Makes handles over a store that is open. For the broker, which gives them away one by one."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._committers: dict[Role, Committer] = {}

    def _committer(self, role: Role) -> Committer:
        found = self._committers.get(role)
        if found is None:
            found = self._committers[role] = Committer(self._store, self._clock, head=0, role=role)
        return found

    def producer(self, queue: bytes) -> Producer:
        """For who enqueues to ``queue``."""
        return Producer(self._committer(Role.PRODUCER), queue)

    def worker(
        self,
        queue: bytes,
        *,
        lease_ms: int = LEASE_MS,
        schedule: Schedule | None = None,
        chance: Callable[[], float] = random.random,
    ) -> Worker:
        """For one worker of ``queue``."""
        committer = self._committer(Role.WORKER)
        return Worker(committer, queue, lease_ms=lease_ms, schedule=schedule, chance=chance)

    def operator(self) -> Operator:
        """For a console or a command line."""
        return Operator(self._committer(Role.OPERATOR), self._store.outbox)

    def janitor(self) -> Janitor:
        """For a timer."""
        return Janitor(self._committer(Role.JANITOR))

    async def drain(self) -> None:
        """Wait until everything that handles submitted is committed."""
        for committer in self._committers.values():
            await committer.drain()

    def close(self) -> None:
        """Take no more."""
        for committer in self._committers.values():
            committer.close()
