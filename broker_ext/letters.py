"""Dead letters of sessions and groups that an operator had reissued, on their way back.

They wait in the queue ``$sessions`` of the outbox. When the client is connected, its session holds
a copy of the message like one that is retained (a delivery of its own, durable until it is
settled), and the letter is done with when that is committed. So it comes at least once: twice, if
the broker dies between the two. While the client is away the letter waits; when its session is
gone, or is no longer subscribed to the topic, it is a dead letter again. One of a group is held by
the session of a durable member that has room.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from storage.api import GROUP
from storage.names import levels_match
from storage.outbox import SESSIONS, Failure, Schedule

if TYPE_CHECKING:
    from broker_ext.hub import Hub
    from broker_ext.session import Session
    from storage.outbox import Message
    from storage.roles import Worker

__all__ = ["Letters"]

AGAIN: Final = Schedule((5_000, 15_000, 60_000))
"""How often it is looked whether a client is there: soon, then once a minute."""
LOOK_MAX: Final = 64
"""Letters handed on at a time."""


class Letters:
    """Hands reissued letters to sessions. ``look`` is called by the clock of the hub."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._worker: Worker | None = None

    async def look(self) -> None:
        """Hand on what is due."""
        hub = self._hub
        if hub.committer.failing_since is not None:
            return
        now_ms = hub.clock.now_ms()
        due = (b.oldest_due_ms for b in await hub.store.outbox.backlog() if b.queue == SESSIONS)
        if not 0 < next(due, 0) <= now_ms:
            return
        if self._worker is None:
            self._worker = hub.handles.worker(SESSIONS, schedule=AGAIN)
        claimed = await self._worker.claim(limit=LOOK_MAX)
        for message in claimed.messages:
            failure = await self._hand_on(message)
            if failure is None:
                await self._worker.done(message)
            else:
                await self._worker.failed(message, failure)

    async def _hand_on(self, message: Message) -> Failure | None:
        """Why it could not be, None = its session has it."""
        hub, body = self._hub, message.message
        assert body is not None, "a live message has its body"
        if message.destination.startswith(GROUP):
            session, granted = hub.shared.taker(message.destination, body)
        else:
            session = hub.registry.owners.get(message.destination)
            granted = _granted(session, body.topic) if session is not None else 0
        if session is None or not session.durable:
            is_known = await hub.store.snapshot(message.destination) is not None
            return Failure.UNAVAILABLE if is_known else Failure.REJECTED
        if not min(body.qos, granted):
            return Failure.REJECTED
        session.pass_on(body, min(body.qos, granted))
        await session.asked()
        committed = asyncio.Event()
        hub.committer.after(committed.set)
        await committed.wait()
        return Failure.UNAVAILABLE if session.sealed else None


def _granted(session: Session, topic: bytes) -> int:
    """The highest QoS of the subscriptions that match."""
    subscriptions = session.subscriptions.items()
    return max((qos for name, qos in subscriptions if levels_match(name, topic)), default=0)
