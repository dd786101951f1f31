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

from broker_ext.feed import FEEDS_MAX, STORED_SESSION, Ask, Feed, words_for
from broker_ext.options import PLAIN, options_of
from broker_ext.reasons import NO_WORDS, Reason, Words
from broker_ext.wire import (
    PACKET_ID,
    PUBACK_HEAD,
    PUBCOMP_HEAD,
    PUBREC_HEAD,
    PUBREL_HEAD,
    Puback,
    Pubrec,
    encode,
    variable_length,
)
from storage.api import RECEIVED, RETAINED
from storage.errors import ResumeRefused, StoreError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from broker_ext.hub import Hub
    from broker_ext.options import Options
    from broker_ext.outbound import Flight
    from broker_ext.shared.member import Member
    from storage.api import Entry

__all__ = ["End", "Grant", "Peer", "Session", "TransientSession", "Walk", "publish_bytes"]

log = logging.getLogger("amqtt_durable.session")

REFUSED: Final = 0x80
"""SUBACK return code: failure; UNSUBACK has it too in MQTT 5."""
NO_SUBSCRIPTION: Final = Reason.NO_SUBSCRIPTION
"""UNSUBACK reason code: there was no such subscription."""
PACKET_IDS: Final = 65_535
LENT: Final = 0
"""In the place of the QoS of what is under way: a delivery of a group."""


class End(NamedTuple):
    """Why a session's connection ends.

    name: one word for logs. publish_will: the will is published [MQTT-3.1.2-8]. reason: what an
    MQTT 5 client is told in DISCONNECT, 0 = nothing; and in which words. blames: what was being
    delivered may be why (``max_delivery_attempts``).
    """

    name: str
    publish_will: bool = True
    reason: int = 0
    words: Words = NO_WORDS
    blames: bool = False


DISCONNECTED: Final = End("disconnect", publish_will=False)
"""The client sent DISCONNECT."""


class Grant(NamedTuple):
    """A subscription as it is asked for.

    allowed: False = it is already decided that SUBACK says ``code``. options: the Subscription
    Options of MQTT 5 without the QoS (No Local 0x04, Retain As Published 0x08, Retain Handling
    0x30). identifier: the Subscription Identifier, 0 = none. gives: it brings retained messages,
    with ``give_retained`` after its SUBACK.
    """

    filter: bytes
    qos: int
    allowed: bool = True
    options: int = 0
    identifier: int = 0
    code: int = 0x80
    gives: bool = False


class Walk(NamedTuple):
    """The retained messages of a subscription that have not been given yet."""

    filter: bytes
    messages: Iterator[Entry]
    qos: int
    options: Options


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

    @property
    def awaiting(self) -> bool:
        """An acknowledgement to the client waits for a commit."""
        ...

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


def _answer(qos: int, packet_id: int, reason: int) -> bytes:
    """PUBACK or PUBREC of MQTT 5 with a reason code."""
    return encode(Puback(packet_id, reason) if qos == 1 else Pubrec(packet_id, reason), 5)


def publish_bytes(entry: Entry, qos: int, identifiers: bytes) -> int:
    """Size of the MQTT 5 PUBLISH packet of a delivery, with no topic alias."""
    properties = len(identifiers) + len(entry.properties) + (5 if entry.expires_ms else 0)
    rest = 2 + len(entry.topic) + (2 if qos else 0) + properties + len(entry.payload)
    rest += len(variable_length(properties))
    return 1 + len(variable_length(rest)) + rest


class Session:
    """One client's session on one connection.

    client_id, user: UTF-8; user b"" = anonymous. window: deliveries under way at most.
    expiry_s: how long it is kept when its client is gone, None = for ever, 0 = not at all.
    sealed: it ended; nothing is delivered to it and nothing is saved for it any more.
    member: its part in shared subscriptions, None = it never had one.
    """

    durable: ClassVar[bool] = False
    keeps_qos0: ClassVar[bool] = False
    consumer_id = 0

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
        self.bytes_max = peer.packet_bytes_max
        self.subscriptions: dict[bytes, int] = {}
        self.inbound: set[int] = set()
        self.sealed = False
        self.expiry_s: int | None = 0
        self.has_will = False
        self.member: Member | None = None
        self.may_receive: Callable[[bytes], Awaitable[bool]] | None = None
        self._walks: deque[Walk] = deque()
        self._guarded: deque[tuple[Entry, int, bool, bytes]] = deque()
        self._guard_task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        kind = "durable" if self.durable else "transient"
        return f"<{kind} session {self.client_id!r}>"

    @property
    def catches_up(self) -> bool:
        """Whether it reads from the history what was published with QoS 0."""
        return False

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
        reason = 0
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
            if self.peer.version == 5:
                reason = self._reason(topic, payload, qos, properties, retain=retain)
                if reason == Reason.QUOTA_EXCEEDED:
                    self.peer.acknowledge(_answer(qos, packet_id, reason), stored=False)
                    return
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
            data = _answer(1, packet_id, reason) if reason else PUBACK_HEAD + PACKET_ID[packet_id]
            self.peer.acknowledge(data, stored=stored)
            return
        if packet_id not in self.inbound:
            self.inbound.add(packet_id)
            stored |= self._remember(packet_id)
        # else: a repetition [MQTT-4.3.3-2]; its PUBREC queues behind the first one's commit
        data = _answer(2, packet_id, reason) if reason else PUBREC_HEAD + PACKET_ID[packet_id]
        self.peer.acknowledge(data, stored=stored)

    def _reason(
        self, topic: bytes, payload: bytes, qos: int, properties: bytes, *, retain: bool
    ) -> int:
        """What an MQTT 5 publisher is told of a message (QoS >= 1).

        No matching subscribers: nobody will receive it, though it may be retained. Quota exceeded:
        it is refused, and nobody receives it: it cannot be retained; or the disk is full. The
        latter is said only where it can be said at once: behind an acknowledgement that waits for
        the disk it would be told when it is no longer so, so there the message waits too (P11).
        """
        hub = self.hub
        route = hub.router.route_of(topic, self.client_id)
        is_written = route.log or retain or (qos == 2 and self.durable)
        if (retain and not hub.retained.takes(topic, payload, properties)) or (
            is_written and hub.committer.full and not self.peer.awaiting
        ):
            hub.figures.refused_quota += 1
            return Reason.QUOTA_EXCEEDED
        return Reason.NO_MATCHING if route.is_empty else 0

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

    def offer(self, entry: Entry, qos: int, options: Options = PLAIN) -> None:
        """A logged entry, as it is appended. Only durable sessions are asked."""
        raise NotImplementedError

    def pass_on(self, entry: Entry, qos: int, options: Options = PLAIN) -> None:
        """A message to deliver from memory."""
        if self.sealed:
            return
        if not self.hub.router.guarded or self.may_receive is None:
            self.deliver(entry, qos, options)
        elif len(self._guarded) >= self.hub.settings.max_queued_messages:
            self.hub.figures.dropped_queue += 1
        else:
            retain = options.retain and entry.flags & RETAINED != 0
            self._ask(entry, qos, retain, options.identifiers)

    def deliver(self, entry: Entry, qos: int, options: Options) -> None:
        """The same, where topic plugins were asked already, or need not be."""
        retain = options.retain and entry.flags & RETAINED != 0
        self._deliver(entry, qos, retain, options.identifiers)

    async def asked(self) -> None:
        """Wait until topic plugins were asked about everything that was passed on."""
        while self._guard_task is not None:
            await asyncio.wait([self._guard_task])

    def _ask(self, entry: Entry, qos: int, retain: bool, identifiers: bytes) -> None:
        self._guarded.append((entry, qos, retain, identifiers))
        if self._guard_task is None:
            self._guard_task = asyncio.ensure_future(self._guard())

    async def _guard(self) -> None:
        """Ask the topic plugins for each delivery, in order."""
        try:
            while self._guarded and not self.sealed:
                entry, qos, retain, identifiers = self._guarded.popleft()
                assert self.may_receive is not None
                if await self.may_receive(entry.topic) and not self.sealed:
                    self._deliver(entry, qos, retain, identifiers)
                self._walk()  # retained messages are asked for one by one
        finally:
            self._guard_task = None

    def _deliver(self, entry: Entry, qos: int, retain: bool, identifiers: bytes) -> None:
        if qos:
            self._deliver_acknowledged(entry, qos, retain, identifiers)
        elif self.peer.congested:
            self.hub.figures.dropped_qos0 += 1
        elif not (
            (entry.expires_ms or self.peer.packet_bytes_max)  # no call for most
            and self.is_undeliverable(entry, 0, identifiers)
        ):
            self.hub.figures.delivered += 1
            self.peer.publish(entry, 0, 0, dup=False, retain=retain, identifiers=identifiers)

    def _deliver_acknowledged(
        self, entry: Entry, qos: int, retain: bool, identifiers: bytes
    ) -> None:
        raise NotImplementedError

    def is_undeliverable(self, entry: Entry, qos: int, identifiers: bytes) -> bool:
        """Whether a message is not to be sent; it is counted then."""
        if entry.expires_ms and self.hub.is_over(entry):
            return True
        return self.is_too_large(entry, qos, identifiers)

    def is_too_large(self, entry: Entry, qos: int, identifiers: bytes) -> bool:
        """Whether the client takes no packet that large [MQTT5-3.1.2-24]; counted then."""
        if self.bytes_max and publish_bytes(entry, qos, identifiers) > self.bytes_max:
            self.hub.figures.too_large += 1
            return True
        return False

    # ------------------------------------------------------------- what groups hand to it

    @property
    def places(self) -> int:
        """How many more deliveries may be under way."""
        raise NotImplementedError

    @property
    def waits(self) -> bool:
        """Whether something of its own is to be sent."""
        raise NotImplementedError

    @property
    def awaits(self) -> bool:
        """Whether something was sent, its own or a group's, that the client has not said to
        have."""
        raise NotImplementedError

    @property
    def sends_alone(self) -> bool:
        """Whether something of its own is under way that may have broken an earlier connection:
        nothing is sent beside it."""
        return False

    def lend(self, flight: Flight, packet_id: int = 0) -> bool:
        """Give a delivery of a group a packet id: this one, or one that is free (0). False: this
        one is in use."""
        raise NotImplementedError

    def take_place(self) -> None:
        """A delivery of a group is under way."""
        raise NotImplementedError

    def sends(self, flight: Flight) -> None:
        """A delivery of a group is sent now, after everything that was sent before. Where the
        attempts are limited."""
        raise NotImplementedError

    def give_back(self, packet_id: int, *, place: bool) -> None:
        """A packet id that was lent is free again, and its place, if it took one."""
        raise NotImplementedError

    # ------------------------------------------------------------------- acknowledgements

    def puback(self, packet_id: int) -> None:
        """PUBACK from the subscriber."""
        raise NotImplementedError

    def pubrec(self, packet_id: int) -> None:
        """PUBREC from the subscriber."""
        raise NotImplementedError

    def refused(self, packet_id: int) -> None:
        """PUBREC with a reason why not: the delivery is over, without PUBREL (MQTT 5, 4.3.3)."""
        raise NotImplementedError

    def pubcomp(self, packet_id: int) -> None:
        """PUBCOMP from the subscriber."""
        raise NotImplementedError

    def turn_over(self) -> None:
        """All packets of a chunk were handled, or there is room to write again: go on sending."""

    # ---------------------------------------------------------------------- subscriptions

    def subscribe_now(self, grants: list[Grant]) -> list[int]:
        """The same as ``subscribe``, for a session that has nothing to save."""
        raise NotImplementedError

    async def subscribe(self, grants: list[Grant]) -> list[int]:
        """Make subscriptions. Returns the SUBACK return codes; those granted are in force and, for
        a durable session, saved (P8)."""
        raise NotImplementedError

    async def unsubscribe(self, filters: list[bytes]) -> list[int]:
        """Remove subscriptions. Returns the UNSUBACK reason codes: 0x11 where there was none, 0x80
        everywhere if it could not be saved and nothing changed."""
        raise NotImplementedError

    async def read_history(self, grants: list[Grant], ask: Ask) -> tuple[list[int], Words]:
        """Make subscriptions that read the history from the client's own position. Returns the
        SUBACK reason codes, and the words that go with them. ``start_reading`` follows the SUBACK.
        """
        del ask
        return _refused(grants, Reason.IMPLEMENTATION), STORED_SESSION

    def start_reading(self) -> None:
        """SUBACK was written: what ``read_history`` has made begins."""

    def give_retained(self, grants: list[Grant]) -> None:
        """Send the retained messages of subscriptions that were granted [MQTT-3.3.1-6], after
        their SUBACK, where they bring any."""
        for grant in grants:
            if grant.gives:
                options = options_of(grant.options, grant.identifier)
                self._begin_walk(grant.filter, grant.qos, options)
        self._walk()

    def _begin_walk(self, topic_filter: bytes, qos: int, options: Options) -> None:
        self._end_walks([topic_filter])
        messages = self.hub.retained.match(topic_filter)
        self._walks.append(Walk(topic_filter, messages, qos, options))

    def _end_walks(self, filters: Sequence[bytes]) -> None:
        """What has not been given yet is not given any more [MQTT-3.10.4-2]."""
        if self._walks:
            self._walks = deque(walk for walk in self._walks if walk.filter not in filters)

    def _walked(self) -> None:
        """All retained messages of a subscription were given."""

    def _walk(self) -> None:
        while self._walks and self._room_for_retained():
            _, messages, granted, options = self._walks[0]
            message = next(messages, None)
            if message is None:
                self._walks.popleft()
                self._walked()
                continue
            if options.no_local and message.origin == self.client_id:
                continue
            qos = min(granted, message.qos)
            if self.hub.router.guarded and self.may_receive is not None:
                self._ask(message, qos, True, options.identifiers)
            else:
                self._deliver(message, qos, True, options.identifiers)

    def _room_for_retained(self) -> bool:
        return not (self.sealed or self.peer.congested or self._guarded)

    # ------------------------------------------------------------------------------- end

    def end(self, end: End) -> None:
        """Seal the session and save what there is to save. Called once, by the registry."""
        self.sealed = True
        if self.member is not None:
            broke = self.hub.settings.max_delivery_attempts > 0 and end.blames
            self.member.end(self._first_lent() if broke else None, for_good=True, broke=broke)
        for topic_filter in self.subscriptions:
            self.hub.router.detach(self, topic_filter)
        if self._guard_task is not None:
            self._guard_task.cancel()

    def _first_lent(self) -> Flight | None:
        """The first delivery that was sent and is not acknowledged, if it is one of a group."""
        return None


def _refused(grants: list[Grant], code: int) -> list[int]:
    return [code if grant.allowed else grant.code for grant in grants]


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
        self._queue: deque[tuple[Entry, int, bool, bytes]] = deque()
        self._queued_bytes = 0
        self._next_packet_id = 1
        self._feeds: list[Feed] = []

    def _deliver_acknowledged(
        self, entry: Entry, qos: int, retain: bool, identifiers: bytes
    ) -> None:
        if not self._queue and len(self._under_way) < self._window and not self.peer.congested:
            self._send(entry, qos, retain, identifiers)
            return
        settings = self.hub.settings
        if (
            len(self._queue) >= settings.max_queued_messages
            or self._queued_bytes >= settings.max_queued_bytes
        ):
            self.hub.figures.dropped_queue += 1
            return
        self._queue.append((entry, qos, retain, identifiers))
        self._queued_bytes += len(entry.payload) + len(entry.properties)

    @property
    def _window(self) -> int:
        """For what need not queue."""
        return 0 if self.member is not None and self.member.goes_alone else self.window

    def _send(self, entry: Entry, qos: int, retain: bool, identifiers: bytes) -> None:
        peer = self.peer
        if (entry.expires_ms or peer.packet_bytes_max) and self.is_undeliverable(
            entry, qos, identifiers
        ):
            return
        packet_id = self._next_packet_id
        if packet_id in self._under_way:
            packet_id = self._free_id()
        else:
            self._next_packet_id = packet_id % PACKET_IDS + 1
        self._under_way[packet_id] = qos
        self.hub.figures.delivered += 1
        peer.publish(entry, qos, packet_id, dup=False, retain=retain, identifiers=identifiers)

    @property
    def places(self) -> int:
        return self.window - len(self._under_way)

    @property
    def waits(self) -> bool:
        return bool(self._queue)

    def lend(self, flight: Flight, packet_id: int = 0) -> bool:
        assert not packet_id, "a transient session has no earlier connection"
        flight.packet_id = self._free_id()
        self._under_way[flight.packet_id] = LENT
        return True

    def take_place(self) -> None:
        pass  # what is under way has one

    @property
    def awaits(self) -> bool:
        return self._first_awaited() is not None

    def _first_awaited(self) -> int | None:
        """The packet id of what was sent first and is not acknowledged."""
        lent = self.member.flights if self.member is not None else {}
        for packet_id, state in self._under_way.items():
            if state == LENT:
                flight = lent[packet_id]
                if flight.sent and not flight.state & RECEIVED:
                    return packet_id
            elif state < 3:
                return packet_id
        return None

    def _first_lent(self) -> Flight | None:
        first = self._first_awaited()
        lent = self.member.flights if self.member is not None else {}
        return None if first is None else lent.get(first)

    def sends(self, flight: Flight) -> None:
        # to the end: what is its own is entered as it is sent
        self._under_way[flight.packet_id] = self._under_way.pop(flight.packet_id)

    def give_back(self, packet_id: int, *, place: bool) -> None:
        del place
        del self._under_way[packet_id]

    def _free_id(self) -> int:
        packet_id = self._next_packet_id
        while packet_id in self._under_way:
            packet_id = packet_id % PACKET_IDS + 1
        self._next_packet_id = packet_id % PACKET_IDS + 1
        return packet_id

    def puback(self, packet_id: int) -> None:
        if self.member is not None and self.member.puback(packet_id):
            return
        if self._under_way.get(packet_id) == 1:
            del self._under_way[packet_id]

    def pubrec(self, packet_id: int) -> None:
        if self.member is not None and self.member.pubrec(packet_id):
            return
        # 3 = QoS 2, received; an unknown id is answered so that the client can finish
        if self._under_way.get(packet_id) == 2:
            self._under_way[packet_id] = 3
        self.peer.write(PUBREL_HEAD + PACKET_ID[packet_id])

    def refused(self, packet_id: int) -> None:
        if self.member is not None and self.member.refused(packet_id):
            return
        if self._under_way.get(packet_id) == 2:
            del self._under_way[packet_id]

    def pubcomp(self, packet_id: int) -> None:
        if self.member is not None and self.member.pubcomp(packet_id):
            return
        if self._under_way.get(packet_id) == 3:
            del self._under_way[packet_id]

    def turn_over(self) -> None:
        queue = self._queue
        window = self.window if self.member is None else self.member.own_window
        while queue and len(self._under_way) < window and not self.peer.congested:
            entry, qos, retain, identifiers = queue.popleft()
            self._queued_bytes -= len(entry.payload) + len(entry.properties)
            self._send(entry, qos, retain, identifiers)
        if self._walks and not self.sealed:
            self._walk()
        for feed in self._feeds:
            feed.turn_over()
        if self.member is not None:
            self.member.turn_over()

    def _room_for_retained(self) -> bool:
        return (
            super()._room_for_retained() and not self._queue and len(self._under_way) < self.window
        )

    # -------------------------------------------------- what reads the history for the client

    async def read_history(self, grants: list[Grant], ask: Ask) -> tuple[list[int], Words]:
        hub = self.hub
        wanted = [grant for grant in grants if grant.allowed]
        self._feeds = [feed for feed in self._feeds if feed.is_open]
        if len(self._feeds) >= FEEDS_MAX:
            return _refused(grants, Reason.QUOTA_EXCEEDED), NO_WORDS
        if not wanted:
            return _refused(grants, REFUSED), NO_WORDS
        names = [grant.filter.decode() for grant in wanted]
        try:
            messages = hub.history.subscribe(names, resume=ask.resume, previous=ask.previous)
            await messages.begin()
        except ResumeRefused as error:
            hub.figures.feeds_refused += 1
            log.info("%r may not read on from its position: %s", self, error)
            return _refused(grants, Reason.IMPLEMENTATION), words_for(error)
        except StoreError as error:
            log.warning("%r: the history cannot be read: %s", self, error)
            return _refused(grants, REFUSED), NO_WORDS
        if self.sealed:
            messages.close()
            return _refused(grants, REFUSED), NO_WORDS
        for grant in wanted:
            self._forget(grant.filter)
            self.subscriptions[grant.filter] = grant.qos
        self._feeds.append(Feed(self, messages, wanted))
        hub.figures.feeds += 1
        return [grant.qos if grant.allowed else grant.code for grant in grants], NO_WORDS

    def start_reading(self) -> None:
        for feed in self._feeds:
            feed.start()

    @property
    def has_room(self) -> bool:
        """Whether what is handed out is sent at once."""
        return self._room_for_retained()

    def hand_out(self, entry: Entry, qos: int, options: Options) -> None:
        """Deliver a message that was read from the history."""
        retain = options.retain and entry.flags & RETAINED != 0
        self._deliver(entry, qos, retain, options.identifiers)

    def stop_reading(self, reason: Reason, words: Words) -> None:
        """The history cannot be read on: the client comes back, with its position."""
        if not self.sealed:
            self.peer.finish(End("resume refused", reason=reason, words=words))

    def _forget(self, topic_filter: bytes) -> bool:
        """End a subscription, whatever serves it. Returns whether it was there."""
        self._end_walks([topic_filter])
        if self.subscriptions.pop(topic_filter, None) is None:
            return False
        self.hub.router.detach(self, topic_filter)
        self._feeds = [feed for feed in self._feeds if feed.drop(topic_filter)]
        return True

    def end(self, end: End) -> None:
        super().end(end)
        for feed in self._feeds:
            feed.close()
        self._feeds = []

    # ---------------------------------------------------------------------- subscriptions

    async def subscribe(self, grants: list[Grant]) -> list[int]:
        return self.subscribe_now(grants)

    def subscribe_now(self, grants: list[Grant]) -> list[int]:
        codes: list[int] = []
        for grant in grants:
            if not grant.allowed or self.sealed:
                codes.append(REFUSED if grant.allowed else grant.code)
                continue
            if self._feeds:
                self._forget(grant.filter)
            self.subscriptions[grant.filter] = grant.qos
            self.hub.router.attach(self, grant.filter, grant.qos, grant.options, grant.identifier)
            codes.append(grant.qos)
        return codes

    async def unsubscribe(self, filters: list[bytes]) -> list[int]:
        return [0 if self._forget(f) else NO_SUBSCRIPTION for f in filters]
