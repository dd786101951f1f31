"""The lane of a connection: packets that have to ask somebody, and those behind them, in order.

A SUBSCRIBE that is saved, a topic plugin, a plugin that listens to packets: while one of them is
waited for, what comes behind it queues here, and one coroutine works it off. A connection that
needs none of this has none (``broker_ext.connection``, rule 1).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, Final

from broker_ext.reasons import Reason
from broker_ext.session import End
from broker_ext.subscribing import subscribe, unsubscribe
from broker_ext.wire import Disconnect, Publish, Subscribe, Unsubscribe

if TYPE_CHECKING:
    from broker_ext.connection import Connection
    from broker_ext.session import Session
    from broker_ext.wire import Packet

__all__ = ["Lane"]

log = logging.getLogger("amqtt_durable.connection")

BYTES_MAX: Final = 256 << 10
"""Packets that wait behind a slow one; then the socket is not read."""
PACKET_BYTES: Final = 64
"""What one costs but for its payload."""
FAILED: Final = End("connection lost", reason=Reason.UNSPECIFIED, blames=True)


class Lane:
    """Of one connection, which it does not hold on to: they would be a ring."""

    __slots__ = ("_bytes", "_packets", "_task")

    def __init__(self) -> None:
        self._packets: deque[Packet] = deque()
        self._bytes = 0  # of what came since it was empty
        self._task: asyncio.Task[None] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether something is waited for: what comes now has to queue."""
        return self._task is not None or bool(self._packets)

    @property
    def is_full(self) -> bool:
        """Whether no more is to be read."""
        return self._bytes > BYTES_MAX

    def add(self, packet: Packet) -> None:
        """Put a packet at the end; ``start`` follows."""
        self._packets.append(packet)
        self._bytes += PACKET_BYTES
        if type(packet) is Publish:
            self._bytes += len(packet.payload)

    def start(self, connection: Connection) -> None:
        """Work off what is in it, if nobody does."""
        if self._packets and self._task is None:
            self._task = asyncio.ensure_future(self._work(connection))

    def clear(self) -> None:
        """Handle no more."""
        self._packets.clear()

    async def _work(self, connection: Connection) -> None:
        """One packet after the other."""
        try:
            while self._packets and connection.ended is None:
                await _handle(connection, self._packets.popleft())
        except Exception:
            log.exception("client %r: a packet could not be handled", connection.peername)
            connection.finish(FAILED)
        finally:
            self._task = None
            self._bytes = 0
            connection.resume_when_room()
        if connection.ended is None:
            connection.caught_up()


async def _handle(connection: Connection, packet: Packet) -> None:
    session = connection.session
    assert session is not None
    if type(packet) is Publish and connection.five is not None:
        checked = connection.checked(packet)
        if checked is None:
            return
        packet = checked
    connection.guard.packet_received(packet)
    match packet:
        case Publish():
            await _publish(connection, session, packet)
        case Subscribe():
            await subscribe(connection, session, packet)
        case Unsubscribe():
            await unsubscribe(connection, session, packet)
        case Disconnect():
            connection.disconnect(session, packet)
        case _:
            connection.answer(session, packet)


async def _publish(connection: Connection, session: Session, packet: Publish) -> None:
    guard = connection.guard
    guard.message_received(packet, permitted=None)
    if packet.topic[:1] != b"$":
        if not await guard.may_publish(packet.topic):
            guard.message_received(packet, permitted=False)
            connection.acknowledge_refused(session, packet, Reason.NOT_AUTHORIZED)
            return
        if connection.ended is not None or session.sealed:
            return
        guard.message_received(packet, permitted=True)
    committer = connection.hub.committer
    before = committer.waiting_bytes
    connection.received(session, packet)
    if committer.waiting_bytes > before and committer.pressure():
        connection.pause_for_room()
