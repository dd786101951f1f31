"""Wills: stored under the incarnation of their connection, and published or deleted by it alone
(P9).

A will is stored before CONNACK. When the connection ends without DISCONNECT it is published
through the ordinary path, and deleted in the same commit. One with a Will Delay Interval waits for
it, with its deadline in the store: it is published when the delay is over or when its session ends,
whichever is first, and deleted if its client comes back to the session before [MQTT5-3.1.3-9].

Wills that are found at start without a deadline are those of connections that died with the
broker. All that are found are published after ``will_recovery_delay_s`` at the earliest, unless
their client has come back by then: it could not while the broker was away.

Wills of one client are published in the order of its connections. There are several only where a
topic plugin has not answered yet, or where the broker died during a CONNECT: its will is stored,
and the one before it not deleted or published yet. Then the earlier one waits no longer than the
later one, whatever its delay: the connection that it waited for was there.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from functools import partial
from heapq import heapify, heappop, heappush
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from storage.api import RETAINED, DropWill, StoreWill

if TYPE_CHECKING:
    from broker_ext.hub import Hub
    from broker_ext.session import End, Session
    from storage.api import Outcome, Will

__all__ = ["Waiting", "Wills"]

log = logging.getLogger("amqtt_durable.wills")

DUE_MAX: Final = 1000
"""Deadlines of wills that are gone may lie about; beyond this and twice as many as there are wills
they are cleared away."""


_NUMBER: Final = attrgetter("number")


class Waiting(NamedTuple):
    """A will whose connection has ended. orphan: it died with the broker."""

    will: Will
    due_ms: int
    orphan: bool = False


class Wills:
    """All wills of a broker."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self._wills: dict[bytes, Will] = {}
        self._saving: dict[bytes, asyncio.Future[Outcome]] = {}
        self._waiting: dict[bytes, dict[bytes, Waiting]] = {}  # client id, incarnation
        self._due: list[tuple[int, int, bytes, bytes]] = []  # a heap; some of wills that are gone
        self._due_max = DUE_MAX
        self._last = 0
        self._recovered_ms = 0
        self._through_ms = 0
        self._asking: dict[bytes, asyncio.Task[None]] = {}  # client id -> of its last will

    # ------------------------------------------------------------------- with a CONNECT

    def store(self, will: Will) -> None:
        """Put a will into the open batch; ``stored`` waits for it. It is the latest one."""
        self._last += 1
        will = replace(will, number=self._last)
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

        def done(outcome: Outcome) -> None:
            if future.done():
                return
            if isinstance(outcome, BaseException):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

        self._wills[will.incarnation] = will
        self._saving[will.incarnation] = future
        self.hub.committer.submit(StoreWill(will), done, retry=False)

    async def stored(self, incarnation: bytes) -> None:
        """Wait until a will is on disk. Raises StoreError; then there is none."""
        try:
            await self._saving.pop(incarnation)
        except BaseException:
            self._wills.pop(incarnation, None)
            raise

    def abandon(self, incarnation: bytes) -> None:
        """The CONNECT failed: there is no will."""
        saving = self._saving.pop(incarnation, None)
        if saving is not None and not saving.cancel():
            saving.exception()  # looked at, so that asyncio does not complain that nobody did
        will = self._wills.pop(incarnation, None)
        if will is not None:
            self._delete(will)

    # ------------------------------------------------------------------ with the session

    def ended(self, session: Session, end: End) -> None:
        """The connection of a session ended: publish its will, now or later, or delete it."""
        will = self._wills.pop(session.incarnation, None)
        if will is None:
            return
        delay_s = will.delay_s
        if session.expiry_s is not None:
            delay_s = min(delay_s, session.expiry_s)  # the session ends then
        if end.publish_will and delay_s:
            self._delay(will, self.hub.clock.now_ms() + delay_s * 1000)
        elif end.publish_will:
            self._publish_if_permitted(will, session)
        elif end.name != "shutdown":  # those stay, as after a crash
            self._delete(will)

    def _delete(self, will: Will) -> None:
        self.hub.committer.submit(DropWill(will.incarnation), _logged)

    def _publish_if_permitted(self, will: Will, session: Session | None) -> None:
        permits = self.hub.permits_will
        if permits is None:
            self._publish(will)
            return
        before = self._asking.get(will.client_id)
        task = asyncio.ensure_future(self._ask(will, session, before))
        self._asking[will.client_id] = task
        task.add_done_callback(partial(self._asked, will.client_id))

    def _asked(self, client_id: bytes, task: asyncio.Task[None]) -> None:
        if self._asking.get(client_id) is task:
            del self._asking[client_id]

    async def _ask(
        self, will: Will, session: Session | None, before: asyncio.Task[None] | None
    ) -> None:
        assert self.hub.permits_will is not None
        try:
            permitted = await self.hub.permits_will(will, session)
        except Exception:
            # a topic plugin's bug: who cannot say yes has not said it
            log.exception("a topic plugin failed on the will of %r", will.client_id)
            permitted = False
        if before is not None:
            await asyncio.wait([before])
        if permitted:
            self._publish(will)
        else:
            log.info("the will of %r is not permitted", will.client_id)
            self._delete(will)

    def _publish(self, will: Will) -> None:
        message = will.message
        lifetime_ms = message.expires_ms
        self.hub.figures.wills += 1
        self.hub.router.publish(
            message.topic,
            message.payload,
            message.qos,
            retain=bool(message.flags & RETAINED),
            origin=will.client_id,
            expires_ms=self.hub.clock.now_ms() + lifetime_ms if lifetime_ms else 0,
            properties=message.properties,
        )
        self._delete(will)

    # ------------------------------------------------------------------- those that wait

    def load(self, wills: tuple[Will, ...]) -> None:
        """Wills that the last run left: of connections that died with it, and those that waited."""
        settings = self.hub.settings
        now_ms = self.hub.clock.now_ms()
        self._recovered_ms = now_ms + int(settings.will_recovery_delay_s * 1000)
        found: list[Waiting] = []
        latest_ms: dict[bytes, int] = {}  # for a client's earlier ones
        for will in sorted(wills, key=_NUMBER, reverse=True):
            due_ms = max(will.due_ms, self._recovered_ms)
            is_delayed = not will.due_ms and will.delay_s and settings.publish_wills_after_crash
            if is_delayed:
                due_ms = max(due_ms, now_ms + will.delay_s * 1000)
            due_ms = latest_ms[will.client_id] = min(due_ms, latest_ms.get(will.client_id, due_ms))
            found.append(Waiting(will, due_ms, orphan=not will.due_ms))
            if is_delayed:
                found[-1] = found[-1]._replace(will=self._remember(will, due_ms))
        for waiting in reversed(found):
            self._wait(waiting)
        self._last = max((will.number for will in wills), default=0)

    def _delay(self, will: Will, due_ms: int) -> None:
        """Let a will wait, and remember in the store until when."""
        self._wait(Waiting(self._remember(will, due_ms), due_ms))

    def _remember(self, will: Will, due_ms: int) -> Will:
        will = replace(will, due_ms=due_ms)
        self.hub.committer.submit(StoreWill(will), _logged)
        return will

    def _wait(self, waiting: Waiting) -> None:
        will = waiting.will
        self._waiting.setdefault(will.client_id, {})[will.incarnation] = waiting
        if len(self._due) >= self._due_max:  # most are of wills that are gone
            self._due = [
                (w.due_ms, w.will.number, client_id, incarnation)
                for client_id, of_client in self._waiting.items()
                for incarnation, w in of_client.items()
                if w is not waiting
            ]
            heapify(self._due)
            self._due_max = 2 * len(self._due) + DUE_MAX
        heappush(self._due, (waiting.due_ms, will.number, will.client_id, will.incarnation))

    async def returned(self, client_id: bytes, *, clean: bool) -> list[Waiting]:
        """A client has come back: what waited for it is deleted, before it is told, so that a crash
        does not bring it back; but if it starts clean, the session that the will belongs to has
        ended, and the will is published (section 3.1.4 of MQTT 5). A broker that died is no reason:
        those wills are deleted. Returns what was deleted, for ``went_again``."""
        now_ms = self.hub.clock.now_ms()
        deleted: list[Waiting] = []
        for waiting in self._waiting.pop(client_id, {}).values():
            if waiting.orphan or not (clean or waiting.due_ms <= now_ms):
                deleted.append(waiting)
            else:
                self._publish_if_permitted(waiting.will, None)
        apply = self.hub.committer.apply
        if deleted:
            ops = [DropWill(waiting.will.incarnation) for waiting in deleted]
            await asyncio.gather(*(apply(op, retry=True) for op in ops))
        return deleted

    def went_again(self, deleted: list[Waiting]) -> None:
        """The client left before it was told that it is back: its wills wait as before."""
        for waiting in deleted:
            self._wait(waiting)
            self.hub.committer.submit(StoreWill(waiting.will), _logged)
        self.publish_due(self._through_ms)  # their time may have come meanwhile

    def session_ended(self, client_id: bytes) -> None:
        """A session at rest expired."""
        for waiting in self._waiting.pop(client_id, {}).values():
            self._finish(waiting)

    def publish_due(self, now_ms: int | None = None) -> None:
        """Publish what has waited long enough (the hub's timer)."""
        if now_ms is None:
            now_ms = self.hub.clock.now_ms()
        self._through_ms = max(self._through_ms, now_ms)
        due = self._due
        while due and due[0][0] <= now_ms:
            _, _, client_id, incarnation = heappop(due)
            of_client = self._waiting.get(client_id)
            if of_client is None:
                continue
            waiting = of_client.pop(incarnation, None)
            if not of_client:
                del self._waiting[client_id]
            if waiting is not None:
                self._finish(waiting)

    def _finish(self, waiting: Waiting) -> None:
        if waiting.orphan and not self.hub.settings.publish_wills_after_crash:
            self._delete(waiting.will)
        else:
            self._publish_if_permitted(waiting.will, None)

    def publish_orphans(self) -> None:
        """Who died with the broker has had time to come back: publish what was only waiting for
        that (or delete it, where so configured)."""
        self.publish_due(self._recovered_ms)

    async def settle(self) -> None:
        """Wait for the topic plugins that are being asked."""
        while self._asking:
            await asyncio.wait(self._asking.values())


def _logged(outcome: Outcome) -> None:
    if isinstance(outcome, BaseException):
        log.error("a will could not be written: %s", outcome)
