"""The outbox of one sink, worked off: claim, send, settle.

Rule 1. What is claimed is sent under a lease that is extended while it is held, acquisition by
        acquisition; a settlement states the acquisition.
Rule 2. A refusal (``ClaimNotHeld``) is logged once with the id and absorbed; the rest goes on.
Rule 3. What certainly was not sent is released, and costs no attempt: what waits when a pause or
        the stop begins, and a message whose destination could not be reached.
Rule 4. What may have been sent is never released. When it is cancelled it is left to its lease.
Rule 5. Whatever a transport raises is our bug, and a failure like others (UNEXPECTED): counted, so
        that it ends, and logged without the text of the exception.
Rule 6. The deadline of a message is looked at right before each send.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import traceback
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from broker_ext.figures import SinkFigures
from broker_ext.sinks.pace import Pace
from broker_ext.sinks.sender import Outgoing, Sent
from storage.errors import ClaimNotHeld, StoreError
from storage.outbox import (
    CLAIM_MESSAGES_MAX,
    ENDED,
    WORKER_BYTES,
    Claimed,
    ClaimNext,
    Extend,
    Failure,
    Release,
    Schedule,
    Settle,
    State,
    Verdict,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from broker_ext.sinks.sender import Sender
    from storage.committer import Committer
    from storage.outbox import Message

__all__ = ["LEASE_MS", "Dispatcher"]

log = logging.getLogger("amqtt_durable.sinks")

LEASE_MS: Final = 30_000
"""How long a message of a worker that vanished waits. It is extended every third of it."""
LOOK_S: Final = 5.0
"""How often an idle dispatcher looks by itself: for what was reissued, or reaped."""
STORE_S: Final = 1.0
"""Pause after the store could not be written."""


@dataclass(slots=True, eq=False)
class _Held:
    """A message that we have claimed."""

    message: Message
    until_ms: int
    lost: bool = False
    extending: bool = False
    round: int = 0
    task: asyncio.Task[None] | None = field(default=None, repr=False)


class Dispatcher:
    """One worker of one queue, with up to ``sender.window`` sends under way.

    event_id: makes what a receiver finds repetitions by. on_ended: called for each message that
    will not be sent again, with its payload's size.
    """

    def __init__(
        self,
        name: str,
        sender: Sender,
        committer: Committer,
        *,
        schedule: Schedule,
        event_id: Callable[[Message], str],
        figures: SinkFigures | None = None,
        on_ended: Callable[[int], None] = lambda _: None,
        lease_ms: int = LEASE_MS,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.name = name
        self.queue = name.encode()
        self.worker = os.urandom(WORKER_BYTES)
        self.figures = figures or SinkFigures()
        self.pace = Pace()
        self._sender = sender
        self._committer = committer
        self._outbox = committer.store.outbox
        self._clock = committer.clock
        self._schedule = schedule
        self._event_id = event_id
        self._on_ended = on_ended
        self._lease_ms = lease_ms
        self._chance = chance
        self._held: dict[_Held, None] = {}
        self._waiting: deque[_Held] = deque()
        self._running = 0
        self._settling = 0
        self._wake = asyncio.Event()
        self._stopping = asyncio.Event()
        self._idle = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    # ------------------------------------------------------------------------ life cycle

    def start(self) -> None:
        """Begin to claim."""
        self._tasks = [
            asyncio.ensure_future(self._run()),  # the first: it is waited for at the stop
            asyncio.ensure_future(self._keep_leases()),
        ]

    def wake(self) -> None:
        """Something was enqueued, or the clock went on."""
        self._wake.set()

    async def stop(self, grace_s: float) -> None:
        """Claim no more, give back what was not begun, let what is under way end for ``grace_s``.
        What has not ended then is cancelled, and left to its lease."""
        self._stopping.set()
        self._wake.set()
        if not self._tasks:
            return
        await asyncio.wait(self._tasks[:1], timeout=grace_s)
        self._give_back()
        sends = [held.task for held in self._held if held.task is not None]
        if sends:
            await asyncio.wait(sends, timeout=grace_s)
        await self.abandon()

    async def abandon(self) -> None:
        """Stop at once: whatever is held is left to its lease."""
        self._stopping.set()
        sends = [held.task for held in self._held if held.task is not None]
        tasks = [*self._tasks, *sends]
        self._tasks = []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -------------------------------------------------------------------------- claiming

    async def _run(self) -> None:
        while not self._stopping.is_set():
            self._wake.clear()
            try:
                wait_s = await self._turn()
            except StoreError as error:
                # the committer says it once; what is not claimed is still there
                log.debug("sink %r: no claim: %s", self.name, error)
                wait_s = STORE_S
            except Exception as error:  # noqa: BLE001 - our bug; a sink that stands still is worse
                log.error("sink %r: %s", self.name, _where(error))  # noqa: TRY400 - P13
                wait_s = STORE_S
            if wait_s is not None:
                await self._first(self._wake.wait(), wait_s)

    async def _turn(self) -> float | None:
        """Claim once. Returns how long to wait for a wake-up, None = not at all."""
        await self._first(self._sender.ready())
        if self._stopping.is_set():
            return None
        now_ms = self._clock.now_ms()
        room = self._room(now_ms)
        if room <= 0:
            pause_ms = self.pace.until_ms - now_ms
            return pause_ms / 1000 if pause_ms > 0 else LOOK_S
        until_ms = now_ms + self._lease_ms
        outcome = await self._committer.apply(
            ClaimNext(
                self.queue, self.worker, now_ms, until_ms, limit=min(room, CLAIM_MESSAGES_MAX)
            )
        )
        assert isinstance(outcome, Claimed)
        for message in outcome.messages:
            held = _Held(message, until_ms)
            self._held[held] = None
            self._waiting.append(held)
        for ended in (outcome.expired, outcome.unreadable):
            for _ in ended:
                self._on_ended(0)
        self.figures.expired += len(outcome.expired)
        self._tell_unreadable(outcome.unreadable)
        if self._stopping.is_set():
            return None
        self._begin()
        if outcome.messages or outcome.more:
            return None
        return await self._due_in_s()

    def _room(self, now_ms: int) -> int:
        """How many messages to claim: to send, and for a transport without order as many again, so
        that a send that ends is followed by the next one without waiting for a commit."""
        window = self.pace.room(self._sender.window, now_ms)
        if not (self._sender.ordered or self.pace.is_failing):
            window *= 2
        room = window - len(self._held)
        return room if room >= max(window // 4, 1) else 0

    async def _due_in_s(self) -> float:
        for backlog in await self._outbox.backlog():
            if backlog.queue == self.queue and backlog.oldest_due_ms:
                due_ms = backlog.oldest_due_ms - self._clock.now_ms()
                return min(max(due_ms / 1000, 0.0), LOOK_S)
        return LOOK_S

    async def _first(self, what: Coroutine[Any, Any, Any], timeout_s: float | None = None) -> None:
        """Wait for something, for the stop, or for a time."""
        waits = [asyncio.ensure_future(what), asyncio.ensure_future(self._stopping.wait())]
        try:
            await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    def _tell_unreadable(self, ids: tuple[int, ...]) -> None:
        for number in ids:
            self.figures.dead += 1
            log.error(
                "security: sink %r: message %d cannot be read (damaged, or sealed with another "
                "key); it is a dead letter",
                self.name,
                number,
            )

    # --------------------------------------------------------------------------- sending

    def _begin(self) -> None:
        """Begin what there is room for."""
        allowed = self.pace.room(self._sender.window, self._clock.now_ms())
        while self._waiting and self._running < allowed:
            held = self._waiting.popleft()
            if held not in self._held:
                continue
            self._running += 1
            held.round = self.pace.round
            held.task = asyncio.ensure_future(self._send(held))

    async def _send(self, held: _Held) -> None:
        message = held.message
        body = message.message
        assert body is not None, "a live message has a body"
        try:
            if body.expires_ms and body.expires_ms <= self._clock.now_ms():
                sent = Sent(Failure.EXPIRED, "its deadline is over")
            else:
                out = Outgoing(
                    message.id,
                    self._event_id(message),
                    message.attempts + 1,
                    message.created_ms,
                    body,
                )
                sent = await self._sender.send(out)
        except Exception as error:  # noqa: BLE001 - rule 5
            log.error("sink %r: message %d: %s", self.name, message.id, _where(error))  # noqa: TRY400
            sent = Sent(Failure.UNEXPECTED, type(error).__name__)
        finally:
            self._running -= 1
        self._settle(held, sent)
        if self._stopping.is_set():
            return
        self._begin()
        self._wake.set()

    def _settle(self, held: _Held, sent: Sent) -> None:
        """Say what became of it."""
        now_ms = self._clock.now_ms()
        message, failure = held.message, sent.failure
        if failure:
            self.figures.last_failure = f"{failure.name.lower()}: {sent.detail}"
        if self.pace.told(failure, held.round, now_ms, sent.retry_at_ms):
            self._give_back()
            log.warning(
                "sink %r: %s (%s); the next attempt is in %.0f s",
                self.name,
                failure.name.lower(),
                sent.detail,
                (self.pace.until_ms - now_ms) / 1000,
            )
        if failure is Failure.UNAVAILABLE:
            self._release(held)
            return
        del self._held[held]
        if held.lost:
            return
        if failure is Failure.NONE:
            op = Settle(message.credential, now_ms, Verdict.DONE)
        else:
            op = self._schedule.settlement(
                message, failure, now_ms, chance=self._chance(), retry_at_ms=sent.retry_at_ms
            )
        self._submit(op, held, sent)

    def _submit(self, op: Settle | Release, held: _Held, sent: Sent) -> None:
        self._settling += 1

        def done(outcome: object) -> None:
            self._settling -= 1
            if isinstance(outcome, ClaimNotHeld):
                self._tell_lost(held)
            elif isinstance(outcome, BaseException):
                log.error("sink %r: message %d: %s", self.name, held.message.id, outcome)
            elif isinstance(outcome, State):
                self._settled(held, sent, outcome)

        self._committer.submit(op, done)

    def _settled(self, held: _Held, sent: Sent, state: State) -> None:
        figures, message = self.figures, held.message
        body = message.message
        assert body is not None, "a live message has a body"
        if state is State.DONE:
            figures.done += 1
            figures.bytes += len(body.payload)
            figures.last_done_ms = self._clock.now_ms()
        elif state is State.DEAD:
            figures.dead += 1
            log.warning(
                "sink %r: message %d is a dead letter after %d attempts: %s (%s)",
                self.name,
                message.id,
                message.attempts + 1,
                sent.failure.name.lower(),
                sent.detail,
            )
        elif state is State.EXPIRED:
            figures.expired += 1
        else:
            figures.retried += 1
            self._wake.set()  # it is due some time
        if state in ENDED:
            self._on_ended(len(body.payload))

    def _give_back(self) -> None:
        """Release what was claimed and not begun."""
        while self._waiting:
            self._release(self._waiting.popleft())

    def _release(self, held: _Held) -> None:
        self._held.pop(held, None)
        if held.lost:
            return
        self.figures.released += 1
        op = Release(held.message.credential, self._clock.now_ms())
        self._submit(op, held, Sent())

    def _tell_lost(self, held: _Held) -> None:
        if not held.lost:
            held.lost = True
            self.figures.lost += 1
            log.warning(
                "sink %r: message %d: ack refused, claim no longer held",
                self.name,
                held.message.id,
            )

    # ---------------------------------------------------------------------------- leases

    async def _keep_leases(self) -> None:
        while True:
            await asyncio.sleep(self._lease_ms / 3000)
            self.extend()

    def extend(self) -> None:
        """Extend the lease of everything that is held and has less than two thirds of it left."""
        now_ms = self._clock.now_ms()
        until_ms = now_ms + self._lease_ms
        for held in list(self._held):
            if held.lost or held.extending or held.until_ms - now_ms > self._lease_ms * 2 // 3:
                continue
            held.extending = True
            op = Extend(held.message.credential, now_ms, until_ms)
            self._committer.submit(op, self._extended(held, until_ms), retry=False)

    def _extended(self, held: _Held, until_ms: int) -> Callable[[object], None]:
        def done(outcome: object) -> None:
            held.extending = False
            if isinstance(outcome, ClaimNotHeld):
                self._tell_lost(held)
                if held.task is None:
                    self._held.pop(held, None)
            elif not isinstance(outcome, BaseException):
                held.until_ms = max(held.until_ms, until_ms)
            # else: the store does not answer; the next round tries again

        return done


def _where(error: BaseException) -> str:
    """An exception as class and place: its text may have a payload in it (P13)."""
    frames = traceback.extract_tb(error.__traceback__)
    last = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"unexpected {type(error).__name__}{last}"
