"""The MQTT session of a connected client: what both kinds have in common, and the transient kind.

A session object exists while its client is connected. A *transient* session (clean session) lives
in memory and ends with its connection [MQTT-3.1.2-6]; a *durable* one (``broker_ext.durable``) is
the in-memory half of a consumer in the store.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple, Protocol

from broker_ext.wire import PACKET_ID, PUBACK_HEAD, PUBCOMP_HEAD, PUBREC_HEAD, PUBREL_HEAD

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from broker_ext.hub import Hub
    from storage.api import Entry

__all__ = ["End", "Grant", "Peer", "Session", "TransientSession"]

log = logging.getLogger("amqtt_durable.session")

REFUSED: Final = 0x80
"""SUBACK return code: failure; UNSUBACK has it too in MQTT 5."""
NO_SUBSCRIPTION: Final = 0x11
"""UNSUBACK reason code: there was no such subscription."""
PACKET_IDS: Final = 65_535


class End(NamedTuple):
    """Why a session's connection ends.

    name: one word for logs. publish_will: the will is published [MQTT-3.1.2-8]. reason: what an
    MQTT 5 client is told in DISCONNECT, 0 = nothing.
    """

    name: str
    publish_will: bool = True
    reason: int = 0


DISCONNECTED: Final = End("disconnect", publish_will=False)
"""The client sent DISCONNECT."""


class Grant(NamedTuple):
    """A subscription as it is asked for.

    allowed: False = it is already decided that SUBACK says ``code``. options: the Subscription
    Options of MQTT 5 without the QoS (No Local 0x04, Retain As Published 0x08, Retain Handling
    0x30). identifier: the Subscription Identifier, 0 = none.
    """

    filter: bytes
    qos: int
    allowed: bool = True
    options: int = 0
    identifier: int = 0
    code: int = 0x80


class Peer(Protocol):
    """The connection, as a session sees it."""

    congested: bool
    closed: bool
    confirmed: bool
    """The client has sent something since its CONNECT was answered."""
    version: int
    """Protocol level: 3, 4 or 5."""
    receive_maximum: int
    """How many deliveries (QoS >= 1) the client takes at a time."""
    packet_bytes_max: int
    """The largest packet that the client takes, 0 = any."""

    def write(self, data: bytes) -> None:
        """Send bytes, together with what else this turn of the loop brings."""
        ...

    def publish(
        self,
        entry: Entry,
        qos: int,
        packet_id: int,
        *,
        dup: bool,
        retain: bool,
        identifiers: bytes = b"",
    ) -> None:
        """Send a PUBLISH. identifiers: encoded Subscription Identifiers, for MQTT 5."""
        ...

    def acknowledge(self, data: bytes, *, stored: bool) -> None:
        """Send an acknowledgement after everything acknowledged before; if ``stored``, after the
        commit of the open batch (P1)."""
        ...

    def finish(self, end: End) -> None:
        """Close the connection; its session is ended with this reason."""
        ...


class Session:
    """One client's session on one connection.

    client_id, user: UTF-8; user b"" = anonymous. window: deliveries under way at most.
    expiry_s: how long it is kept when its client is gone, None = for ever, 0 = not at all.
    sealed: it ended; nothing is delivered to it and nothing is saved for it any more.
    """

    durable: ClassVar[bool] = False

    def __init__(
        self,
        hub: Hub,
        peer: Peer,
        *,
        client_id: bytes,
        user: bytes,
        incarnation: bytes,
        window: int,
    ) -> None:
        self.hub = hub
        self.peer = peer
        self.client_id = client_id
        self.user = user
        self.incarnation = incarnation
        self.window = window
        self.subscriptions: dict[bytes, int] = {}
        self.inbound: set[int] = set()
        self.sealed = False
        self.expiry_s: int | None = 0
        self.has_will = False
        self.may_receive: Callable[[bytes], Awaitable[bool]] | None = None
        self._walks: deque[tuple[Iterator[Entry], int]] = deque()
        self._guarded: deque[tuple[Entry, int, bool]] = deque()
        self._guard_task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        kind = "durable" if self.durable else "transient"
        return f"<{kind} session {self.client_id!r}>"

    def introduce(self) -> None:
        """The client has sent something: it had its CONNACK, and knows this session."""

    # --------------------------------------------------------------- from the publisher

    def receive(
        self,
        topic: bytes,
        payload: bytes,
        qos: int,
        packet_id: int,
        *,
        retain: bool,
        expires_ms: int = 0,
        properties: bytes = b"",
    ) -> None:
        """A PUBLISH from this client: route it, and acknowledge it when it is safe to (P1, P5)."""
        publish = self.hub.router.publish
        if qos == 0:
            publish(
                topic,
                payload,
                0,
                retain=retain,
                origin=self.client_id,
                expires_ms=expires_ms,
                properties=properties,
            )
            return
        stored = False
        if qos == 1 or packet_id not in self.inbound:
            stored = publish(
                topic,
                payload,
                qos,
                retain=retain,
                origin=self.client_id,
                expires_ms=expires_ms,
                properties=properties,
            )
        if qos == 1:
            self.peer.acknowledge(PUBACK_HEAD + PACKET_ID[packet_id], stored=stored)
            return
        if packet_id not in self.inbound:
            self.inbound.add(packet_id)
            stored |= self._remember(packet_id)
        # else: a repetition [MQTT-4.3.3-2]; its PUBREC queues behind the first one's commit
        self.peer.acknowledge(PUBREC_HEAD + PACKET_ID[packet_id], stored=stored)

    def pubrel(self, packet_id: int) -> None:
        """PUBREL: the id is free again; an unknown one is answered too [MQTT-4.3.3-2]."""
        stored = False
        if packet_id in self.inbound:
            self.inbound.discard(packet_id)
            stored = self._release(packet_id)
        self.peer.acknowledge(PUBCOMP_HEAD + PACKET_ID[packet_id], stored=stored)

    def _remember(self, packet_id: int) -> bool:
        """Make an inbound QoS 2 id survive; returns whether that takes a commit."""
        del packet_id
        return False

    def _release(self, packet_id: int) -> bool:
        del packet_id
        return False

    # --------------------------------------------------------------- to the subscriber

    def offer(self, entry: Entry, qos: int) -> None:
        """A logged entry, as it is appended. Only durable sessions are asked."""
        raise NotImplementedError

    def pass_on(self, entry: Entry, qos: int) -> None:
        """A message to deliver from memory."""
        if self.sealed:
            return
        if self.hub.router.guarded and self.may_receive is not None:
            if len(self._guarded) >= self.hub.settings.max_queued_messages:
                self.hub.figures.dropped_queue += 1
                return
            self._ask(entry, qos, retain=False)
            return
        self._deliver(entry, qos)

    def _ask(self, entry: Entry, qos: int, *, retain: bool) -> None:
        self._guarded.append((entry, qos, retain))
        if self._guard_task is None:
            self._guard_task = asyncio.ensure_future(self._guard())

    async def _guard(self) -> None:
        """Ask the topic plugins for each delivery, in order."""
        try:
            while self._guarded and not self.sealed:
                entry, qos, retain = self._guarded.popleft()
                assert self.may_receive is not None
                if await self.may_receive(entry.topic) and not self.sealed:
                    self._deliver(entry, qos, retain=retain)
                self._walk()  # retained messages are asked for one by one
        finally:
            self._guard_task = None

    def _deliver(self, entry: Entry, qos: int, *, retain: bool = False) -> None:
        if qos == 0:
            if self.peer.congested:
                self.hub.figures.dropped_qos0 += 1
            else:
                self.hub.figures.delivered += 1
                self.peer.publish(entry, 0, 0, dup=False, retain=retain)
        else:
            self._deliver_acknowledged(entry, qos, retain=retain)

    def _deliver_acknowledged(self, entry: Entry, qos: int, *, retain: bool) -> None:
        raise NotImplementedError

    # ------------------------------------------------------------------- acknowledgements

    def puback(self, packet_id: int) -> None:
        """PUBACK from the subscriber."""
        raise NotImplementedError

    def pubrec(self, packet_id: int) -> None:
        """PUBREC from the subscriber."""
        raise NotImplementedError

    def pubcomp(self, packet_id: int) -> None:
        """PUBCOMP from the subscriber."""
        raise NotImplementedError

    def turn_over(self) -> None:
        """All packets of a chunk were handled, or there is room to write again: go on sending."""

    # ---------------------------------------------------------------------- subscriptions

    async def subscribe(self, grants: list[Grant]) -> list[int]:
        """Make subscriptions. Returns the SUBACK return codes; those granted are in force and, for
        a durable session, saved (P8)."""
        raise NotImplementedError

    async def unsubscribe(self, filters: list[bytes]) -> list[int]:
        """Remove subscriptions. Returns the UNSUBACK reason codes: 0x11 where there was none, 0x80
        everywhere if it could not be saved and nothing changed."""
        raise NotImplementedError

    def give_retained(self, topic_filter: bytes, qos: int) -> None:
        """Send the retained messages of a new subscription [MQTT-3.3.1-6], after its SUBACK."""
        self._walks.append((self.hub.retained.match(topic_filter), qos))
        self._walk()

    def _walk(self) -> None:
        while self._walks and self._room_for_retained():
            walk, granted = self._walks[0]
            message = next(walk, None)
            if message is None:
                self._walks.popleft()
                continue
            qos = min(granted, message.qos)
            if self.hub.router.guarded and self.may_receive is not None:
                self._ask(message, qos, retain=True)
            else:
                self._deliver(message, qos, retain=True)

    def _room_for_retained(self) -> bool:
        return not (self.sealed or self.peer.congested or self._guarded)

    # ------------------------------------------------------------------------------- end

    def end(self, end: End) -> None:
        """Seal the session and save what there is to save. Called once, by the registry."""
        del end
        self.sealed = True
        for topic_filter in self.subscriptions:
            self.hub.router.detach(self, topic_filter)
        if self._guard_task is not None:
            self._guard_task.cancel()


class TransientSession(Session):
    """A session that ends with its connection. Its queue is bounded: beyond
    ``max_queued_messages`` a new message is dropped and counted."""

    def __init__(
        self,
        hub: Hub,
        peer: Peer,
        *,
        client_id: bytes,
        user: bytes,
        incarnation: bytes,
        window: int,
    ) -> None:
        super().__init__(
            hub, peer, client_id=client_id, user=user, incarnation=incarnation, window=window
        )
        self._under_way: dict[int, int] = {}
        self._queue: deque[tuple[Entry, int, bool]] = deque()
        self._queued_bytes = 0
        self._next_packet_id = 1

    def _deliver_acknowledged(self, entry: Entry, qos: int, *, retain: bool) -> None:
        if not self._queue and len(self._under_way) < self.window and not self.peer.congested:
            self._send(entry, qos, retain=retain)
            return
        settings = self.hub.settings
        if (
            len(self._queue) >= settings.max_queued_messages
            or self._queued_bytes >= settings.max_queued_bytes
        ):
            self.hub.figures.dropped_queue += 1
            return
        self._queue.append((entry, qos, retain))
        self._queued_bytes += len(entry.payload)

    def _send(self, entry: Entry, qos: int, *, retain: bool) -> None:
        packet_id = self._next_packet_id
        while packet_id in self._under_way:
            packet_id = packet_id % PACKET_IDS + 1
        self._next_packet_id = packet_id % PACKET_IDS + 1
        self._under_way[packet_id] = qos
        self.hub.figures.delivered += 1
        self.peer.publish(entry, qos, packet_id, dup=False, retain=retain)

    def puback(self, packet_id: int) -> None:
        if self._under_way.get(packet_id) == 1:
            del self._under_way[packet_id]

    def pubrec(self, packet_id: int) -> None:
        # 3 = QoS 2, received; an unknown id is answered so that the client can finish
        if self._under_way.get(packet_id) == 2:
            self._under_way[packet_id] = 3
        self.peer.write(PUBREL_HEAD + PACKET_ID[packet_id])

    def pubcomp(self, packet_id: int) -> None:
        if self._under_way.get(packet_id) == 3:
            del self._under_way[packet_id]

    def turn_over(self) -> None:
        queue = self._queue
        while queue and len(self._under_way) < self.window and not self.peer.congested:
            entry, qos, retain = queue.popleft()
            self._queued_bytes -= len(entry.payload)
            self._send(entry, qos, retain=retain)
        if self._walks and not self.sealed:
            self._walk()

    def _room_for_retained(self) -> bool:
        return (
            super()._room_for_retained() and not self._queue and len(self._under_way) < self.window
        )

    async def subscribe(self, grants: list[Grant]) -> list[int]:
        codes: list[int] = []
        for grant in grants:
            if not grant.allowed or self.sealed:
                codes.append(REFUSED if grant.allowed else grant.code)
                continue
            self.subscriptions[grant.filter] = grant.qos
            self.hub.router.attach(self, grant.filter, grant.qos)
            codes.append(grant.qos)
        return codes

    async def unsubscribe(self, filters: list[bytes]) -> list[int]:
        codes: list[int] = []
        for topic_filter in filters:
            if self.subscriptions.pop(topic_filter, None) is None:
                codes.append(NO_SUBSCRIPTION)
            else:
                self.hub.router.detach(self, topic_filter)
                codes.append(0)
        return codes
