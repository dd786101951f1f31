"""Who gets a message, and whether it must be stored.

A message is logged when it has QoS >= 1 and matches the filter of at least one durable consumer,
connected or not; one with QoS 0 when such a session is away (``queue_qos0``). To know that takes
the set of distinct durable filters with reference counts, not the sessions: a session at rest costs
no memory here, and no work per message.

The answer for a topic (a ``Route``) is remembered until any subscription changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol, cast

from broker_ext.options import joined, options_of
from broker_ext.topics import FilterTree
from storage.api import RETAINED, Entry
from storage.names import is_shared

if TYPE_CHECKING:
    from collections.abc import Iterable

    from broker_ext.figures import Figures
    from broker_ext.options import Options
    from broker_ext.retained import RetainedStore
    from broker_ext.rules import Rules
    from broker_ext.session import Session
    from broker_ext.shared import Shared
    from storage.api import FilterCount
    from storage.committer import Committer

__all__ = ["Receiver", "Route", "Router"]

ROUTES_MAX: Final = 65_536
"""Topics whose receivers are remembered; a client can invent a topic per message (P12)."""


class Receiver(Protocol):
    """Somebody who is delivered to: a session, or what stands for one."""

    @property
    def durable(self) -> bool:
        """Whether it is offered what is logged."""
        ...

    @property
    def keeps_qos0(self) -> bool:
        """Whether what is published with QoS 0 is kept for it while it is away."""
        ...

    @property
    def client_id(self) -> bytes:
        """Whom No Local is about."""
        ...

    def offer(self, entry: Entry, qos: int, options: Options, /) -> None:
        """A logged entry, as it is appended, for one who is durable and has QoS >= 1."""
        ...

    def pass_on(self, entry: Entry, qos: int, options: Options, /) -> None:
        """A message to deliver from memory."""
        ...

    @property
    def catches_up(self) -> bool:
        """Whether it reads from the history what was published with QoS 0, until it has all that
        it missed."""
        ...


class _Place:
    """What stands at one topic filter. durable: how many consumers. followers: how many of them are
    no sessions; they take nothing with QoS 0 from the history."""

    __slots__ = ("durable", "followers", "subscribers")

    def __init__(self) -> None:
        self.durable = 0
        self.followers = 0
        self.subscribers: dict[Receiver, tuple[int, Options]] | None = None


class Route:
    """The receivers of one topic: session, QoS that it was granted, and what else it asked for,
    of all its filters that match.

    log: a durable consumer wants it. away: so does a session that is not connected. durable:
    connected durable sessions (QoS >= 1). direct: connected sessions that are served from memory:
    transient ones, and durable ones that only have QoS 0 here. local: client ids of those who do
    not want everything that they publish themselves (No Local); what these publish has a route of
    its own. expire_after_ms, keeps_latest: of the topic (broker_ext.rules).
    """

    __slots__ = ("away", "direct", "durable", "expire_after_ms", "keeps_latest", "local", "log")

    def __init__(self) -> None:
        self.log = False
        self.away = False
        self.expire_after_ms = 0
        self.keeps_latest = False
        self.durable: list[tuple[Receiver, int, Options]] = []
        self.direct: list[tuple[Receiver, int, Options]] = []
        self.local: set[bytes] = set()

    @property
    def is_empty(self) -> bool:
        """Nobody is there to receive it, now or later."""
        return not (self.log or self.durable or self.direct)


class Router:
    """Routes every message of the broker. One object for each broker."""

    def __init__(
        self,
        committer: Committer,
        retained: RetainedStore,
        figures: Figures,
        shared: Shared,
        rules: Rules,
        *,
        queues_qos0: bool = True,
    ) -> None:
        self.committer = committer
        self.shared = shared
        self.retained = retained
        self.figures = figures
        self.rules = rules
        self.queues_qos0 = queues_qos0
        self.guarded = False
        """A topic plugin must be asked for each delivery (the seam sets it)."""
        self._places: FilterTree[_Place] = FilterTree(_Place)
        self._routes: dict[bytes, Route] = {}
        self._own_routes: dict[tuple[bytes, bytes], Route] = {}

    # -------------------------------------------------------------------- subscriptions

    def load(self, filters: Iterable[FilterCount]) -> None:
        """Take over the distinct durable filters of the store at start."""
        at = self._places.at
        for topic_filter, count in filters:
            if is_shared(topic_filter):
                self.shared.counts[topic_filter] = count
            else:
                at(topic_filter).durable = count
        self._changed()

    def count(self, topic_filter: bytes, change: int) -> None:
        """A durable consumer got (+1) or lost (-1) this filter with QoS >= 1."""
        if is_shared(topic_filter):
            self.shared.count(topic_filter, change)
            return
        place = self._places.at(topic_filter)
        place.durable += change
        assert place.durable >= 0, "a durable filter was released more often than taken"
        self._forget(topic_filter, place)

    def follow(self, topic_filter: bytes, change: int) -> None:
        """One (+1) of the durable consumers that are counted here is no session, or (-1) not any
        more: a sink, a group, a reader of the history. What has QoS 0 is not logged for it."""
        place = self._places.at(topic_filter)
        place.followers += change
        assert place.followers >= 0, "a follower was released more often than taken"
        self._forget(topic_filter, place)

    def attach(
        self,
        session: Receiver,
        topic_filter: bytes,
        qos: int,
        options: int = 0,
        identifier: int = 0,
    ) -> None:
        """Deliver what matches to a connected session. options, identifier: of a Subscription."""
        if is_shared(topic_filter):
            self.shared.attach(cast("Session", session), topic_filter, qos, options, identifier)
            return
        place = self._places.at(topic_filter)
        if place.subscribers is None:
            place.subscribers = {}
        place.subscribers[session] = (qos, options_of(options, identifier))
        self._changed()

    def detach(self, session: Receiver, topic_filter: bytes) -> None:
        """Undo ``attach``; harmless if it was not done."""
        if is_shared(topic_filter):
            self.shared.detach(cast("Session", session), topic_filter)
            return
        place = self._places.find(topic_filter)
        if place is not None and place.subscribers is not None:
            place.subscribers.pop(session, None)
            self._forget(topic_filter, place)

    def _forget(self, topic_filter: bytes, place: _Place) -> None:
        if not (place.durable or place.followers or place.subscribers):
            self._places.remove(topic_filter)
        self._changed()

    def _changed(self) -> None:
        self._routes.clear()
        self._own_routes.clear()

    # --------------------------------------------------------------------------- routing

    def route(self, topic: bytes) -> Route:
        """The receivers of a topic name."""
        route = self._routes.get(topic)
        if route is None:
            route = self._find(topic)
            if len(self._routes) >= ROUTES_MAX:
                self._routes.clear()
            self._routes[topic] = route
        return route

    def route_of(self, topic: bytes, origin: bytes) -> Route:
        """The receivers of what this client publishes."""
        route = self.route(topic)
        if origin not in route.local:
            return route
        own = self._own_routes.get((topic, origin))
        if own is None:
            own = self._find(topic, origin)
            if len(self._own_routes) >= ROUTES_MAX:
                self._own_routes.clear()
            self._own_routes[topic, origin] = own
        return own

    def _find(self, topic: bytes, origin: bytes | None = None) -> Route:
        route = Route()
        local: set[bytes] = set()
        receivers: dict[Receiver, tuple[int, Options]] = {}
        for place in self._places.match(topic):
            if place.durable:
                route.log = True
                route.away |= place.durable > place.followers + _sessions_at(place)
            for session, (qos, options) in (place.subscribers or {}).items():
                if options.no_local:
                    local.add(session.client_id)
                    if session.client_id == origin:
                        continue  # [MQTT5-3.8.3-3]
                before = receivers.get(session)
                if before is not None:  # overlapping filters: once, at the highest QoS
                    qos = max(qos, before[0])  # noqa: PLW2901 - of both
                    options = joined((before[1], options))  # noqa: PLW2901
                receivers[session] = (qos, options)
        route.away &= topic[:1] != b"$"  # statistics of a broker are of the moment
        route.expire_after_ms = self.rules.expire_after_ms(topic)
        route.keeps_latest = self.rules.keeps_latest(topic)
        route.local = local
        for session, (qos, options) in receivers.items():
            receiving = route.durable if qos and session.durable else route.direct
            receiving.append((session, qos, options))
        return route

    def publish(
        self,
        topic: bytes,
        payload: bytes,
        qos: int,
        *,
        retain: bool = False,
        origin: bytes = b"",
        expires_ms: int = 0,
        properties: bytes = b"",
    ) -> bool:
        """Hand one message to everybody who is to have it.

        Returns whether it is stored: then it may be acknowledged when the committer's open batch
        is committed, and not before (P1).
        """
        route = self._routes.get(topic) or self.route(topic)
        if route.local:
            route = self.route_of(topic, origin)
        stored = False
        if retain:
            stored = self.retained.keep(topic, payload, qos, origin, expires_ms, properties)
        flags = RETAINED if retain else 0
        if qos and route.log:
            if route.expire_after_ms:
                expires_ms = self._deadline(route, expires_ms)
            entry = self.committer.append(
                topic, payload, qos, flags, origin, expires_ms, properties
            )
            stored = True
            if route.keeps_latest and self.rules.newest is not None:
                self.rules.newest.note(topic, entry.offset)
            for session, granted, options in route.durable:
                session.offer(entry, min(qos, granted), options)
            if not route.direct:
                return True
        elif route.is_empty:
            return stored
        else:
            entry = Entry(0, topic, payload, qos, flags, origin, expires_ms, properties)
            if route.log:
                self._publish_qos0(route, entry)
        for session, granted, options in route.direct:
            session.pass_on(entry, min(qos, granted), options)
        return stored

    def _deadline(self, route: Route, expires_ms: int) -> int:
        """Of a message that is logged, where there is ``expire_after``."""
        over_ms = self.committer.clock.now_ms() + route.expire_after_ms
        return min(expires_ms or over_ms, over_ms)

    def _publish_qos0(self, route: Route, message: Entry) -> None:
        """Hand a message with QoS 0 to durable sessions: live, without a position; through the
        history to those who are away, and to those who are not through with what they missed.

        It is not logged while the store has enough to do with what was promised (P11)."""
        logged = (
            self.queues_qos0
            and (route.away or any(session.catches_up for session, _, _ in route.durable))
            and self.committer.is_at_ease
        )
        if logged:
            kept = message
            if route.expire_after_ms:
                kept = kept._replace(expires_ms=self._deadline(route, kept.expires_ms))
            self.committer.append(*kept[1:])
        for session, _, options in route.durable:
            if not (logged and session.catches_up):
                session.pass_on(message, 0, options)


def _sessions_at(place: _Place) -> int:
    """Connected sessions that something would be kept for."""
    subscribers = place.subscribers or {}
    return sum(qos > 0 and session.keeps_qos0 for session, (qos, _) in subscribers.items())
