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
Rule 7. A message whose lease lapsed is suspect: it may be what killed the process. It is sent while
        nothing else is claimed, so that it takes no others with it to the dead letters.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import traceback
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from broker_ext.figures import SinkFigures
from broker_ext.sinks.pace import Pace
from broker_ext.sinks.sender import Outgoing, Sent
from storage.errors import StoreError
from storage.outbox import CLAIM_MESSAGES_MAX, ENDED, Failure, State

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from broker_ext.sinks.sender import Sender
    from storage.clock import Clock
    from storage.outbox import Message, OutboxReads
    from storage.roles import Worker

__all__ = ["Dispatcher"]

log = logging.getLogger("amqtt_durable.sinks")

LOOK_S: Final = 5.0
"""How often an idle dispatcher looks by itself: for what was reissued, or reaped."""
STORE_S: Final = 1.0
"""Pause after the store could not be written."""
SETTLED_S: Final = 1.0
"""How long a stop waits for the last settlements; what the committer has is written in any case."""


@dataclass(slots=True, eq=False)
class _Held:
    """A message that we have claimed."""

    message: Message
    until_ms: int
    lost: bool = False
    extending: bool = False
    round: int = 0
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def is_suspect(self) -> bool:
        """Its last worker went away with it."""
        return self.message.failure is Failure.LAPSED


class Dispatcher:
    """One worker of one queue, with up to ``sender.window`` sends under way.

    event_id: makes what a receiver finds repetitions by. on_ended: called for each message that
    will not be sent again, with its payload's size.
    """

    def __init__(
        self,
        name: str,
        sender: Sender,
        worker: Worker,
        outbox: OutboxReads,
        clock: Clock,
        *,
        event_id: Callable[[Message], str],
        figures: SinkFigures | None = None,
        on_ended: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.name = name
        self.figures = figures or SinkFigures()
        self.pace = Pace()
        self._sender = sender
        self._worker = worker
        self._outbox = outbox
        self._clock = clock
        self._event_id = event_id
        self._on_ended = on_ended
        self._held: dict[_Held, None] = {}
        self._waiting: deque[_Held] = deque()
        self._running = 0
        self._wake = asyncio.Event()
        self._stopping = asyncio.Event()
        self._loops: list[asyncio.Task[None]] = []
        self._sends: set[asyncio.Task[None]] = set()
        self._writes: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------------------ life cycle

    def start(self) -> None:
        """Begin to claim."""
        self._loops = [
            asyncio.ensure_future(self._run()),
            asyncio.ensure_future(self._keep_leases()),
        ]

    def wake(self) -> None:
        """Something was enqueued, or the clock went on."""
        self._wake.set()

    async def stop(self, grace_s: float) -> None:
        """Claim no more, give back what was not begun, let what is under way end for ``grace_s``.
        What has not ended then is cancelled, and left to its lease."""
        self._stopping.set()
        claiming = self._loops[:1]
        for task in claiming:
            task.cancel()  # what is claimed for it now is released by the worker
        await asyncio.gather(*claiming, return_exceptions=True)
        self._give_back()
        if self._sends:
            await asyncio.wait(self._sends, timeout=grace_s)
        if self._writes:
            await asyncio.wait(self._writes, timeout=SETTLED_S)
        await self.abandon()

    async def abandon(self) -> None:
        """Stop at once: whatever is held is left to its lease."""
        self._stopping.set()
        tasks = [*self._loops, *self._sends, *self._writes]
        self._loops = []
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
                # `wait_for` may swallow a cancellation
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._wake.wait()

    async def _turn(self) -> float | None:
        """Claim once. Returns how long to wait for a wake-up, None = not at all."""
        await self._sender.ready()
        now_ms = self._clock.now_ms()
        if not self.pace.room(self._sender.window, now_ms):
            self._give_back()  # a claim may come back when the pause has begun
        self._begin()
        room = self._room(now_ms)
        if room <= 0:
            pause_ms = self.pace.until_ms - now_ms
            return pause_ms / 1000 if pause_ms > 0 else LOOK_S
        until_ms = now_ms + self._worker.lease_ms
        claimed = await self._worker.claim(limit=min(room, CLAIM_MESSAGES_MAX))
        for message in claimed.messages:
            held = _Held(message, until_ms)
            self._held[held] = None
            self._waiting.append(held)
        for _ in claimed.expired + claimed.unreadable:
            self._on_ended(0)
        self.figures.expired += len(claimed.expired)
        self._tell_unreadable(claimed.unreadable)
        self._begin()
        if claimed.messages or claimed.more:
            return None
        return await self._due_in_s()

    def _room(self, now_ms: int) -> int:
        """How many messages to claim: to send, and for a transport without order as many again, so
        that a send that ends is followed by the next one without waiting for a commit."""
        window = self.pace.room(self._sender.window, now_ms)
        if not (self._sender.ordered or self.pace.is_failing):
            window *= 2
        if any(held.is_suspect for held in self._held):
            return 0
        room = window - len(self._held)
        return room if room >= max(window // 4, 1) else 0

    async def _due_in_s(self) -> float:
        for backlog in await self._outbox.backlog():
            if backlog.queue == self._worker.queue and backlog.oldest_due_ms:
                due_ms = backlog.oldest_due_ms - self._clock.now_ms()
                return min(max(due_ms / 1000, 0.0), LOOK_S)
        return LOOK_S

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
        if self._stopping.is_set():
            return
        allowed = self.pace.room(self._sender.window, self._clock.now_ms())
        while self._waiting and self._running < allowed:
            if self._must_wait(self._waiting[0]):
                return
            held = self._waiting.popleft()
            if held.lost:
                del self._held[held]
                continue
            self._running += 1
            held.round = self.pace.round
            held.task = _kept(self._sends, self._deliver(held))

    def _must_wait(self, held: _Held) -> bool:
        """A suspect goes alone; a send of its own that was too slow is no other one."""
        mine = held.message.id
        return held.is_suspect and any(
            other.task is not None and other.message.id != mine for other in self._held
        )

    async def _deliver(self, held: _Held) -> None:
        try:
            sent = await self._send(held.message)
        finally:
            self._running -= 1
        self._keep_pace(held, sent)
        self._held.pop(held, None)  # before the wake-up, so that there is room
        _kept(self._writes, self._settle(held, sent))
        self._begin()
        self._wake.set()

    async def _send(self, message: Message) -> Sent:
        body = message.message
        assert body is not None, "a live message has a body"
        if body.expires_ms and body.expires_ms <= self._clock.now_ms():
            return Sent(Failure.EXPIRED, "its deadline is over")
        out = Outgoing(
            message.id, self._event_id(message), message.attempts + 1, message.created_ms, body
        )
        try:
            return await self._sender.send(out)
        except Exception as error:  # noqa: BLE001 - rule 5
            log.error("sink %r: message %d: %s", self.name, message.id, _where(error))  # noqa: TRY400
            return Sent(Failure.UNEXPECTED, type(error).__name__)

    async def _settle(self, held: _Held, sent: Sent) -> None:
        """Say what became of it."""
        worker, message, failure = self._worker, held.message, sent.failure
        if held.lost:
            return
        if failure is Failure.UNAVAILABLE:
            await self._release(held)
            return
        state: State | None = State.DONE
        if failure is Failure.NONE:
            if not await worker.done(message):
                state = None
        else:
            state = await worker.failed(message, failure, retry_at_ms=sent.retry_at_ms)
        if state is None:
            self.figures.lost += 1
        else:
            self._settled(message, sent, state)

    def _keep_pace(self, held: _Held, sent: Sent) -> None:
        now_ms = self._clock.now_ms()
        failure = sent.failure
        if failure:
            self.figures.last_failure = f"{failure.name.lower()}: {sent.detail}"
        if not self.pace.told(failure, held.round, now_ms, sent.retry_at_ms):
            return
        self._give_back()
        log.warning(
            "sink %r: %s (%s); the next attempt is in %.0f s",
            self.name,
            failure.name.lower(),
            sent.detail,
            (self.pace.until_ms - now_ms) / 1000,
        )

    def _settled(self, message: Message, sent: Sent, state: State) -> None:
        figures, body = self.figures, message.message
        assert body is not None, "a live message has a body"
        if state is State.DONE:
            figures.done += 1
            figures.bytes += len(body.payload)
            figures.last_done_ms = self._clock.now_ms()
        elif state is State.DEAD:
            figures.dead += 1
            log.warning(
                "sink %r: message %d is a dead letter after attempt %d: %s (%s)",
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
            _kept(self._writes, self._release(self._waiting.popleft()))

    async def _release(self, held: _Held) -> None:
        self._held.pop(held, None)
        if held.lost:
            return
        if await self._worker.release(held.message):
            self.figures.released += 1
            self._wake.set()
        else:
            self.figures.lost += 1

    # ---------------------------------------------------------------------------- leases

    async def _keep_leases(self) -> None:
        while True:
            await asyncio.sleep(self._worker.lease_ms / 3000)
            self.extend()

    def extend(self) -> None:
        """Extend the lease of everything that is held and has less than two thirds of it left."""
        soon_ms = self._clock.now_ms() + self._worker.lease_ms * 2 // 3
        for held in list(self._held):
            if not (held.lost or held.extending) and held.until_ms <= soon_ms:
                held.extending = True
                _kept(self._writes, self._extend(held))

    async def _extend(self, held: _Held) -> None:
        until_ms = self._clock.now_ms() + self._worker.lease_ms
        try:
            if await self._worker.extend(held.message):
                held.until_ms = until_ms
                return
        finally:
            held.extending = False
        held.lost = True
        self.figures.lost += 1
        if held.task is None:
            self._held.pop(held, None)


def _kept(tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """A task that is held on to until it is done."""
    task = asyncio.ensure_future(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


def _where(error: BaseException) -> str:
    """An exception as class and place: its text may have a payload in it (P13)."""
    frames = traceback.extract_tb(error.__traceback__)
    last = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"unexpected {type(error).__name__}{last}"
