"""The judge: a model of what a durable broker may do, run over a history. Pure.

It is careful to the broker's advantage wherever MQTT leaves a choice, so that what it counts is a
broken promise and not a matter of taste:

* a message counts as accepted when PUBACK or PUBREC arrived; one that was sent and not accepted
  may be delivered or not;
* it is owed to a session when a SUBACK with QoS >= 1 for a matching filter arrived before it was
  first sent, and nothing that may end that subscription was sent later;
* a delivery may come again, with DUP and its packet id, until it is *settled*: its PUBACK was sent,
  a PINGRESP to a later PINGREQ arrived, and then something that was asked for after that was
  answered out of a commit. Commits are first in, first out, so the settlement was in it;
* QoS 2 is stricter: once PUBREL arrived, its PUBLISH must never come again, settled or not;
* a QoS 1 message that its publisher sent k times may be delivered k times, two of them under one
  packet id, if the first of these is settled, and one that is sent
  again behind a retained QoS 2 message of its topic may take that one's place: the broker knows
  the QoS 2 message again, but not the QoS 1 message;
* so a session that subscribed between the two sendings of a QoS 1 message sees only the second,
  which comes after messages with higher numbers that were sent in between; the same when the first
  one expired before it could be delivered;
* a new session for which nothing was answered out of a commit yet may be told to be absent once
  more: the broker cannot know that its client was told, and nothing of it is lost;
* a session that expires certainly is there until its expiry has passed since it last heard of the
  broker, and certainly is not when its expiry has passed since the broker must have known that its
  client had gone: a while after that, or, when the broker died meanwhile, as soon as it is back;
* wills of one client come in the order of its connections, however many died with a broker;
* a message that was published with QoS 0 comes to each session at most once, or not at all;
* what is shared is owed to the group as a whole, once a member's SUBACK arrived: somebody has to
  finish it. At QoS 1 it may come to a second member, or again, until it is settled (a member that
  has left may read later what was sent to it before); at QoS 2 it belongs to the first, for ever;
* a message that expires is owed to nobody, and comes to nobody for the first time a while after
  its expiry. One that comes with DUP was on its way before, for all that a broker can know which
  died meanwhile: it may have found it to have expired before it was sent, and others went first.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tests.crash import facts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tests.crash.facts import Fact, Message

__all__ = ["PROMISES", "Verdict", "judge", "matches"]

PROMISES: Final = {
    "lost": "P1 acknowledged to the publisher, owed to a session, never delivered",
    "twice": "P5 QoS 2 delivered twice, or its handshake broken",
    "again": "P4 delivered again after its acknowledgement was settled, or more often than sent",
    "once": "P18 published with QoS 0, delivered twice",
    "order": "P6 first deliveries of a topic out of order",
    "redelivery": "P6 what was unsettled did not come first, in order, with DUP and its packet id",
    "reused": "P6 a packet id was given to another message while it was in use",
    "forgotten": "P8 a SUBACKed subscription is gone",
    "haunting": "P8 an UNSUBACKed subscription delivers new messages, or is still stored",
    "session": "session present is wrong, or a session is gone",
    "inbound": "P5 an inbound QoS 2 id is not stored after PUBREC, or still is after PUBCOMP",
    "retained": "a retained message is lost, or another one is there",
    "qos": "P10 delivered with a QoS that was not granted or not published",
    "owner": "P7 a connection lives on after another took its client id",
    "check": "the store's own check found something, or its identity changed",
    "down": "the broker does not come back, or does not answer",
    "expired": "a message was delivered after its expiry, or a session outlived its own",
    "properties": "what MQTT 5 adds to a message did not come with it",
    "window": "more deliveries under way than the client said it takes",
}
EXAMPLES_MAX: Final = 20
EARLY_MS: Final = 500
"""What was heard of the broker may have been under way for so long."""
NOTICED_MS: Final = 1000
"""A broker that lives knows after so long that a client has gone."""
REFUSED: Final = 0x80
"""SUBACK, UNSUBACK: the change is not in force."""
LATE_MS: Final = 800
"""What was delivered in time may arrive so late: a client stalls for 200 ms."""


@dataclass(slots=True)
class Verdict:
    """What was counted. violations: promise -> how many. examples: some of them, in words."""

    violations: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PROMISES, 0))
    examples: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, promise: str, what: str) -> None:
        """Count one."""
        self.violations[promise] += 1
        if self.violations[promise] <= EXAMPLES_MAX:
            self.examples.append(f"{promise}: {what}")

    @property
    def total(self) -> int:
        """All violations."""
        return sum(self.violations.values())


class _Change(NamedTuple):
    """One SUBSCRIBE or UNSUBSCRIBE of one filter. qos: -1 = unsubscribe."""

    sent: int
    qos: int


@dataclass(slots=True)
class _Filter:
    """What a session asked for one filter, in order. acked: index in changes -> when answered.
    void: those that were refused; what was before them stays in force."""

    changes: list[_Change] = field(default_factory=list)
    acked: dict[int, int] = field(default_factory=dict)
    void: set[int] = field(default_factory=set)

    def sure_since(self, doubt: int) -> int | None:
        """Since when it is certainly in force with QoS >= 1, without a break, up to now.

        doubt: what was asked before it may be gone.
        """
        since: int | None = None
        for i, change in enumerate(self.changes):
            if i in self.void:
                continue
            if change.qos < 1:
                since = None
            elif since is None and change.sent > doubt:
                since = self.acked.get(i)
        return since

    def possible(self, begin: int, end: int) -> int:
        """The highest QoS it may have had at some time between two, -1 = none."""
        best = -1
        for i, change in enumerate(self.changes):
            if change.qos < 0 or change.sent > end or i in self.void:
                continue
            until = self._over(i)
            if until is None or until >= begin:
                best = max(best, change.qos)
        return best

    def _over(self, i: int) -> int | None:
        """When a subscription had certainly been replaced or removed; None = never."""
        later = set(range(i + 1, len(self.changes))) & self.acked.keys() - self.void
        return min((self.acked[j] for j in later), default=None)

    def known(self, doubt: int) -> int | None:
        """The QoS that is certainly stored, -1 = certainly nothing, None = cannot be told."""
        last = max(set(range(len(self.changes))) - self.void, default=None)
        if last is not None and last in self.acked and self.changes[last].sent > doubt:
            return self.changes[last].qos
        return None


@dataclass(slots=True)
class _Delivery:
    """One delivery as the subscribing application counts it.

    turn: its place in the order of first arrivals, 0 = it may have had another one before that.
    link: where it arrived last.
    step: "arrived", "acked" (PUBACK), "received" (PUBREC), "released" (PUBREL), "done" (PUBCOMP).
    """

    message_id: str
    packet_id: int
    qos: int
    turn: int
    link: int
    retained: bool
    step: str = "arrived"
    acked_at: int = 0
    settled: bool = False


@dataclass(slots=True)
class _Session:
    """One client id. exists: True, False, or None = it cannot be told.

    unanswered: CONNECTs since it did not exist that had no answer; one may have made it.
    doubt: when a clean CONNECT was sent that had no answer; it may have deleted what was there.
    kept: something of it was certainly stored after its first CONNACK.
    expiry_s: how long it is kept, None = for ever; expiry_min_s: or for so long, if a DISCONNECT
    that said so was read. heard_ms: when its client last heard of the broker. gone_ms: when the
    last of its connections ended, None = it has one. noticed_ms: when the broker certainly knew.
    died: the broker died after gone_ms.
    """

    exists: bool | None = False
    expiry_s: int | None = None
    expiry_min_s: int | None = None
    heard_ms: int = 0
    gone_ms: int | None = None
    noticed_ms: int | None = None
    died: bool = False
    unanswered: int = 0
    doubt: int = 0
    kept: bool = False
    link: int = 0
    filters: dict[str, _Filter] = field(default_factory=dict)
    tickets: dict[int, list[tuple[_Filter, int]]] = field(default_factory=dict)
    open: dict[int, _Delivery] = field(default_factory=dict)
    closed: dict[tuple[str, int], _Delivery] = field(default_factory=dict)
    times: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    live: set[str] = field(default_factory=set)
    newest: dict[tuple[str, str], int] = field(default_factory=dict)
    turns: int = 0
    due: dict[int, _Delivery] = field(default_factory=dict)
    due_told: bool = False
    last_turn: int = -1
    inbound: dict[int, str] = field(default_factory=dict)
    is_drained: bool = False

    def renew(self) -> None:
        """Begin a fresh session under this client id."""
        link = self.link
        self.__init__()  # type: ignore[misc]
        self.link = link


@dataclass(slots=True)
class _Sent:
    """One message. first, last: when it was sent. times: how often. accepted: when, 0 = not.
    last_ms: the broker certainly had it by then, if it ever had."""

    message: Message
    first: int
    last: int = 0
    last_ms: int = 0
    times: int = 0
    accepted: int = 0


def matches(topic_filter: str, topic: str) -> bool:
    """Whether a topic matches; the judge's own, for topics without a leading $."""
    wanted, levels = topic_filter.split("/"), topic.split("/")
    for i, level in enumerate(wanted):
        if level == "#":
            return True
        if i >= len(levels) or level not in ("+", levels[i]):
            return False
    return len(wanted) == len(levels)


@dataclass(slots=True)
class _Group:
    """Those who share a subscription. filter: what they share. since: of a first SUBACK, 0 = none.

    open: (client, packet id) -> a delivery that its member has not finished. had: message id -> its
    deliveries, finished or not. live: what came with QoS 0.
    """

    name: str
    filter: str
    asked: int = 0
    since: int = 0
    open: dict[tuple[str, int], _Delivery] = field(default_factory=dict)
    had: dict[str, list[_Delivery]] = field(default_factory=lambda: defaultdict(list))
    live: set[str] = field(default_factory=set)


HEARD: Final = (facts.Connected, facts.Delivered, facts.Accepted, facts.Completed, facts.Ponged)


class _Judge:
    def __init__(self, anchor: str, shared: str, *, may_refuse: bool) -> None:
        self.may_refuse = may_refuse
        self.group = _Group(shared, shared.split("/", 2)[2] if shared else "")
        self.verdict = Verdict()
        self.now = 0
        self.now_ms = 0
        self.asked_ms: dict[int, int] = {}
        self.sessions: dict[str, _Session] = defaultdict(_Session)
        self.sent: dict[str, _Sent] = {}
        self.retained: dict[str, list[_Sent]] = defaultdict(list)
        self.connecting: dict[int, int] = {}
        self.acked: dict[int, list[_Delivery]] = defaultdict(list)
        self.processed: deque[tuple[int, _Delivery]] = deque()
        self.anchor = anchor
        self.anchored = 0  # when somebody first was subscribed to all of it
        self.rules: dict[type, Callable[[Any], None]] = {
            facts.Connecting: self._connecting,
            facts.Connected: self._connected,
            facts.Left: self._left,
            facts.Publishing: self._publishing,
            facts.Accepted: self._accepted,
            facts.Released: self._released,
            facts.Completed: self._completed,
            facts.Subscribing: self._subscribing,
            facts.Subscribed: self._subscribed,
            facts.Unsubscribing: self._unsubscribing,
            facts.Unsubscribed: self._unsubscribed,
            facts.Delivered: self._delivered,
            facts.Acknowledged: self._acknowledged,
            facts.Releasing: self._releasing,
            facts.Pinging: lambda _: None,
            facts.Ponged: self._ponged,
            facts.Ticked: self._ticked,
            facts.Died: self._died,
            facts.Stored: self._stored,
            facts.Retained: self._retained,
            facts.Found: self._found,
            facts.Drained: self._drained,
            facts.Failed: self._failed,
        }

    def feed(self, index: int, fact: Fact) -> None:
        self.now = index
        self.rules[type(fact)](fact)
        if isinstance(fact, HEARD):
            session = self.sessions[fact.client]
            if fact.link == session.link:
                session.heard_ms = self.now_ms

    def _ticked(self, fact: facts.Ticked) -> None:
        self.now_ms = fact.now_ms

    # -------------------------------------------------------------------------- sessions

    def _connecting(self, fact: facts.Connecting) -> None:
        session = self.sessions[fact.client]
        self.connecting[fact.link] = self.now
        self.asked_ms[fact.link] = self.now_ms
        if fact.clean:
            session.exists = None if session.exists is not False else False
            session.doubt = self.now  # nothing is owed any more, whether it arrives or not
        session.unanswered += 1

    def _connected(self, fact: facts.Connected) -> None:
        session = self.sessions[fact.client]
        expired = self._expired(session, fact.link)
        if fact.clean and fact.present:
            self.verdict.add("session", f"{fact.client}: present after a clean CONNECT")
        elif fact.present and expired:
            self.verdict.add("expired", f"{fact.client}: present at {self.now}, but it expired")
        elif session.exists is True and session.kept and not (fact.clean or fact.present):
            if expired is False:
                self.verdict.add("session", f"{fact.client}: not present at {self.now}, but it was")
        elif session.exists is False and fact.present and session.unanswered == 1:
            self.verdict.add("session", f"{fact.client}: present at {self.now}, but never was")
        if session.expiry_s is not None and not fact.clean:
            self.verdict.counts["resumed in time" if fact.present else "expired"] += 1
        self._noticed()
        if fact.clean or not fact.present:
            session.renew()
        session.unanswered = 0
        session.exists = fact.expiry_s != 0
        session.expiry_s = session.expiry_min_s = fact.expiry_s
        session.gone_ms = session.noticed_ms = None
        session.died = False
        session.kept = session.kept or fact.present
        session.link = fact.link
        session.due = {
            d.packet_id: d for d in session.open.values() if d.step == "arrived" and not d.retained
        }
        session.due_told = False
        session.last_turn = -1
        if session.exists:
            self._committed(self.connecting[fact.link])

    def _left(self, fact: facts.Left) -> None:
        session = self.sessions[fact.client]
        if fact.link < session.link:
            return  # it was taken over from
        session.gone_ms = self.now_ms
        session.noticed_ms = None
        session.died = False
        if fact.expiry_s is not None and session.expiry_min_s is not None:
            session.expiry_min_s = min(session.expiry_min_s, fact.expiry_s)

    def _expired(self, session: _Session, link: int) -> bool | None:
        """Whether it certainly has, or certainly has not, when a CONNECT was answered."""
        if session.expiry_s is None or session.expiry_min_s is None:
            return False
        if self.now_ms < session.heard_ms + session.expiry_min_s * 1000 - EARLY_MS:
            return False
        noticed_ms = session.noticed_ms
        if noticed_ms is None:
            if session.died or session.gone_ms is None:
                return None
            noticed_ms = session.gone_ms + NOTICED_MS
        return True if self.asked_ms[link] > noticed_ms + session.expiry_s * 1000 else None

    def _noticed(self) -> None:
        """The broker has answered a CONNECT: what it died with is known to it."""
        for session in self.sessions.values():
            if session.died and session.noticed_ms is None:
                session.noticed_ms = self.now_ms

    # ------------------------------------------------------------------------ publishers

    def _publishing(self, fact: facts.Publishing) -> None:
        message = fact.message
        sent = self.sent.get(message.id)
        if sent is None:
            sent = self.sent[message.id] = _Sent(message, self.now)
            self.verdict.counts["published"] += 1
            if message.retain and message.qos:
                self.retained[message.topic].append(sent)
        sent.times += 1
        sent.last = self.now
        sent.last_ms = self.now_ms
        if message.qos == 2:
            self.sessions[fact.client].inbound[fact.packet_id] = "unknown"

    def _accepted(self, fact: facts.Accepted) -> None:
        sent = self.sent[fact.message.id]
        sent.accepted = sent.accepted or self.now
        sent.last_ms = self.now_ms
        self.verdict.counts["accepted"] += 1
        session = self.sessions[fact.client]
        if fact.message.topic.startswith(self.anchor) and 0 < self.anchored < sent.last:
            self._committed(sent.first)
            session.kept = True
        if fact.message.qos == 2:
            session.inbound[fact.packet_id] = "stored"
            session.kept = True

    def _released(self, fact: facts.Released) -> None:
        self.sessions[fact.client].inbound[fact.packet_id] = "unknown"

    def _completed(self, fact: facts.Completed) -> None:
        self.sessions[fact.client].inbound[fact.packet_id] = "gone"

    # --------------------------------------------------------------------- subscriptions

    def _subscribing(self, fact: facts.Subscribing) -> None:
        self._change(fact.client, fact.ticket, fact.filters)

    def _unsubscribing(self, fact: facts.Unsubscribing) -> None:
        self._change(fact.client, fact.ticket, [(name, -1) for name in fact.filters])

    def _change(self, client: str, ticket: int, filters: Iterable[tuple[str, int]]) -> None:
        session = self.sessions[client]
        if any(name == self.group.name for name, _ in filters):
            self.group.asked = self.group.asked or self.now
        places = session.tickets[ticket] = []
        for name, qos in filters:
            place = session.filters.setdefault(name, _Filter())
            places.append((place, len(place.changes)))
            place.changes.append(_Change(self.now, qos))

    def _subscribed(self, fact: facts.Subscribed) -> None:
        session = self.sessions[fact.client]
        session.kept = session.kept or any(code != REFUSED for code in fact.codes)
        places = session.tickets.pop(fact.ticket, [])
        for (place, i), code in zip(places, fact.codes, strict=True):
            if code == REFUSED and self.may_refuse:
                place.void.add(i)
                self.verdict.counts["refused"] += 1
                continue
            if code != place.changes[i].qos:
                self.verdict.add("qos", f"{fact.client}: SUBACK {code} at {self.now}")
            place.acked[i] = self.now
            self._committed(place.changes[i].sent)
            if place is session.filters.get(self.group.name):
                self.group.since = self.group.since or self.now
            if place in map(session.filters.get, ("#", f"{self.anchor}#", self.group.name)):
                self.anchored = self.anchored or self.now

    def _unsubscribed(self, fact: facts.Unsubscribed) -> None:
        for n, (place, i) in enumerate(self.sessions[fact.client].tickets.pop(fact.ticket, [])):
            if REFUSED in fact.codes[n : n + 1] and self.may_refuse:
                place.void.add(i)
                self.verdict.counts["refused"] += 1
                continue
            place.acked[i] = self.now
            self._committed(place.changes[i].sent)

    # ------------------------------------------------------------------------ deliveries

    def _delivered(self, fact: facts.Delivered) -> None:
        session = self.sessions[fact.client]
        if fact.link != session.link:
            self.verdict.add("owner", f"{fact.client}: a delivery on the old connection")
            return
        self.verdict.counts["delivered"] += 1
        if not fact.dup:
            self._check_expired(fact)
        is_shared = self._is_shared(session, fact)
        if fact.qos == 0:
            self._once(self.group.live if is_shared else session.live, fact)
            if not (fact.retain or is_shared):
                self._check_subscribed(session, fact)
            return
        if is_shared:
            self._shared(fact)
            return
        before = session.open.get(fact.packet_id)
        if before is not None and before.message_id == fact.message_id:
            self._redelivered(session, before, fact)
            return
        if before is not None:
            self.verdict.add(
                "reused",
                f"{fact.client}: id {fact.packet_id} of {before.message_id} ({before.step})"
                f" for {fact.message_id} at {self.now}",
            )
        closed = session.closed.get((fact.message_id, fact.packet_id))
        if fact.dup and closed is not None:
            may_be_another = self._has_another(session, fact.message_id)
            if not (closed.settled and may_be_another):
                if may_be_another:
                    closed.turn = 0
                self._came_again(session, closed, fact)
                return
        self._new(session, fact)

    def _has_another(self, session: _Session, message_id: str) -> bool:
        """Whether a message was sent more often than it came: another copy of it may have the
        packet id of one that is finished."""
        sent = self.sent.get(message_id)
        return sent is not None and sent.message.qos == 1 and session.times[message_id] < sent.times

    def _is_shared(self, session: _Session, fact: facts.Delivered) -> bool:
        """Members have nothing but the marker of their own."""
        if self.group.name not in session.filters:
            return False
        sent = self.sent.get(fact.message_id)
        return sent is None or sent.message.topic.startswith(self.anchor)

    def _shared(self, fact: facts.Delivered) -> None:
        """A delivery to a member of the group. is_back: it may have been with another member since
        (who need not have been sent it); it is a first delivery again, and may have the packet id
        that it had."""
        group, key = self.group, (fact.client, fact.packet_id)
        what = f"{fact.client}: {fact.message_id} id {fact.packet_id} at {self.now}, shared"
        before = group.open.get(key)
        if before is not None and before.link == fact.link:
            promise = "redelivery" if before.message_id == fact.message_id else "reused"
            self.verdict.add(promise, f"{what}: {before.message_id} ({before.step})")
        is_back = before is not None and not fact.dup and self._was_handed_on(fact.client, before)
        if before is not None and before.message_id == fact.message_id != "" and not is_back:
            self.verdict.counts["redelivered"] += 1
            if not fact.dup:
                self.verdict.add("redelivery", f"{what}: without DUP")
            if before.step == "released":
                self.verdict.add("twice", f"{what}: PUBLISH after PUBREL")
            before.link = fact.link
            return
        delivery = group.open[key] = _Delivery(
            fact.message_id, fact.packet_id, fact.qos, self.now, fact.link, fact.retain
        )
        if not fact.message_id:
            return
        sent = self.sent.get(fact.message_id)
        if sent is None or not matches(group.filter, sent.message.topic):
            self.verdict.add("haunting", what)
            return
        had = group.had[fact.message_id]
        has_left = self.sessions[fact.client].gone_ms is not None  # it reads what came before that
        had.append(delivery)
        if 0 < sent.accepted < group.asked:
            self.verdict.add("haunting", f"{what}: it was sent before")
        if fact.qos != sent.message.qos:
            self.verdict.add("qos", f"{what}: QoS {fact.qos}")
        if len(had) > 1 and fact.qos == 2:
            self.verdict.add("twice", f"{what}: it had been delivered")
        elif sent.times == 1 and any(earlier.settled for earlier in had) and not has_left:
            self.verdict.add("again", f"{what}: it was settled")
        self.verdict.counts["shared"] += 1
        self.verdict.counts["shared again"] += len(had) > 1

    def _was_handed_on(self, client: str, before: _Delivery) -> bool:
        """Whether what a member had not finished when its connection ended may have been with
        another one: it is QoS 1, and another one has had it since, or was there."""
        if before.qos != 1:
            return False
        if any(later.turn > before.turn for later in self.group.had[before.message_id]):
            return True
        others = (
            s for c, s in self.sessions.items() if c != client and self.group.name in s.filters
        )
        return any(s.gone_ms is None or s.link > before.link for s in others)

    def _once(self, had: set[str], fact: facts.Delivered) -> None:
        sent = self.sent.get(fact.message_id)
        if sent is not None and not (sent.message.qos or fact.retain):
            self.verdict.counts["published with QoS 0, delivered"] += 1
            if fact.message_id in had:
                self.verdict.add("once", f"{fact.client}: {fact.message_id} at {self.now}")
        had.add(fact.message_id)

    def _check_expired(self, fact: facts.Delivered) -> None:
        sent = self.sent.get(fact.message_id)
        if sent is None or not sent.message.expiry_s:
            return
        self.verdict.counts["delivered before their expiry"] += 1
        if self._is_over(sent):
            self.verdict.add("expired", f"{fact.client}: {fact.message_id} at {self.now}")

    def _is_over(self, sent: _Sent) -> bool:
        expiry_s = sent.message.expiry_s
        return expiry_s > 0 and self.now_ms > sent.last_ms + expiry_s * 1000 + LATE_MS

    def _redelivered(self, session: _Session, before: _Delivery, fact: facts.Delivered) -> None:
        what = f"{fact.client}: {fact.message_id} id {fact.packet_id} at {self.now}"
        self.verdict.counts["redelivered"] += 1
        if before.link == fact.link:
            self.verdict.add("redelivery", f"{what}: sent twice on one connection")
        elif not fact.dup:
            self.verdict.add("redelivery", f"{what}: without DUP")
        if before.step == "released":
            self.verdict.add("twice", f"{what}: PUBLISH after PUBREL")
        before.link = fact.link
        self._in_turn(session, before, what)

    def _came_again(self, session: _Session, closed: _Delivery, fact: facts.Delivered) -> None:
        """A delivery that the client had acknowledged."""
        what = f"{fact.client}: {fact.message_id} id {fact.packet_id} at {self.now}"
        if closed.qos == 2:
            self.verdict.add("twice", f"{what}: after PUBCOMP")
        elif closed.settled:
            self.verdict.add("again", f"{what}: acknowledged at {closed.acked_at} and settled")
        self.verdict.counts["redelivered"] += 1
        closed.step, closed.link = "arrived", fact.link
        session.open[fact.packet_id] = closed
        self._in_turn(session, closed, what)

    def _in_turn(self, session: _Session, delivery: _Delivery, what: str) -> None:
        session.due.pop(delivery.packet_id, None)
        if delivery.retained or not delivery.message_id or not delivery.turn:
            return  # who has no identity cannot be told from the next one with its packet id
        if delivery.turn < session.last_turn:
            self.verdict.add("redelivery", f"{what}: not in its first order")
        session.last_turn = max(session.last_turn, delivery.turn)

    def _new(self, session: _Session, fact: facts.Delivered) -> None:
        what = f"{fact.client}: {fact.message_id} id {fact.packet_id} at {self.now}"
        session.turns += 1
        sent = self.sent.get(fact.message_id)
        is_late = fact.dup and sent is not None and sent.message.expiry_s > 0
        turn = 0 if is_late else session.turns
        session.open[fact.packet_id] = _Delivery(
            fact.message_id, fact.packet_id, fact.qos, turn, fact.link, fact.retain
        )
        if fact.retain or not fact.message_id:
            return
        if session.due and not fact.dup and not session.due_told:
            session.due_told = True
            ids = [d.message_id for d in session.due.values()]
            self.verdict.add("redelivery", f"{what}: new before {ids[:3]} ({len(ids)}) came again")
        if sent is None:
            self.verdict.add("again", f"{what}: nobody sent it")
            return
        self._check_subscribed(session, fact)
        times = session.times[fact.message_id] = session.times[fact.message_id] + 1
        message = sent.message
        if times > (1 if message.qos == 2 else sent.times):
            promise = "twice" if message.qos == 2 else "again"
            self.verdict.add(promise, f"{what}: {times} times, sent {sent.times} times")
        if times == 1 and not is_late:
            key = (message.publisher, message.topic)
            if session.newest.get(key, -1) < message.number:
                session.newest[key] = message.number
            elif sent.times == 1 or message.qos == 2 or _is_owed(session, sent):
                self.verdict.add("order", f"{what}: after number {session.newest[key]}")

    def _check_subscribed(self, session: _Session, fact: facts.Delivered) -> None:
        sent = self.sent.get(fact.message_id)
        if sent is None:
            return
        best = max(
            (
                place.possible(sent.first, self.now)
                for name, place in session.filters.items()
                if matches(name, sent.message.topic)
            ),
            default=-1,
        )
        what = f"{fact.client}: {fact.message_id} at {self.now}"
        if best < 0:
            self.verdict.add("haunting", f"{what}: delivered without a subscription")
        elif fact.qos > min(best, sent.message.qos):
            self.verdict.add("qos", f"{what}: QoS {fact.qos}, granted {best}")

    def _acknowledged(self, fact: facts.Acknowledged) -> None:
        session, key = self.sessions[fact.client], (fact.client, fact.packet_id)
        delivery = self.group.open.get(key) or session.open.get(fact.packet_id)
        if delivery is None:
            return  # a handshake that an earlier connection had finished
        if fact.kind == "pubrec":
            if delivery.step == "arrived":
                delivery.step = "received"
            return
        delivery.step = "acked" if fact.kind == "puback" else "done"
        delivery.acked_at = self.now
        if self.group.open.pop(key, None) is None:
            del session.open[fact.packet_id]
            session.due.pop(fact.packet_id, None)
            if delivery.message_id:
                session.closed[delivery.message_id, fact.packet_id] = delivery
        if delivery.message_id:
            self.acked[fact.link].append(delivery)

    def _releasing(self, fact: facts.Releasing) -> None:
        delivery = self.group.open.get((fact.client, fact.packet_id))
        if delivery is None:
            delivery = self.sessions[fact.client].open.get(fact.packet_id)
        if delivery is None:
            return
        if delivery.step == "arrived" or delivery.qos != 2:
            self.verdict.add(
                "twice", f"{fact.client}: PUBREL for {delivery.message_id} before its PUBREC"
            )
        delivery.step = "released"

    # ------------------------------------------------------------------------ settlement

    def _ponged(self, fact: facts.Ponged) -> None:
        """What was acknowledged before the PINGREQ has been read by the broker."""
        kept: list[_Delivery] = []
        for delivery in self.acked[fact.link]:
            if delivery.acked_at < fact.asked:
                self.processed.append((self.now, delivery))
            else:
                kept.append(delivery)
        self.acked[fact.link] = kept

    def _committed(self, asked: int) -> None:
        """A commit answered what was asked at ``asked``: what was read before is in it."""
        processed = self.processed
        while processed and processed[0][0] < asked:
            delivery = processed.popleft()[1]
            if delivery.step == "acked":
                delivery.settled = True
                self.verdict.counts["settled for certain"] += 1

    # ------------------------------------------------------------- the broker and its store

    def _died(self, fact: facts.Died) -> None:
        self.verdict.counts["deaths"] += 1
        self.verdict.counts[f"died at {fact.how}"] += 1
        self.acked.clear()
        self.processed.clear()
        for session in self.sessions.values():
            if session.gone_ms is None:
                session.gone_ms = self.now_ms
            elif not session.died and self.now_ms >= session.gone_ms + NOTICED_MS:
                session.noticed_ms = session.gone_ms + NOTICED_MS
            session.died = True

    def _found(self, fact: facts.Found) -> None:
        for problem in fact.problems:
            self.verdict.add("check", f"at {self.now}: {problem}")
        if fact.minted:
            self.verdict.add("check", f"at {self.now}: generation minted: {fact.minted}")

    def _stored(self, fact: facts.Stored) -> None:
        session = self.sessions[fact.client]
        if fact.subscriptions is None:
            if session.exists is True and session.expiry_s is None:
                self.verdict.add("session", f"{fact.client}: no record at {self.now}")
            return
        if session.exists is not True or session.expiry_s is not None:
            return
        for name, place in session.filters.items():
            known = place.known(session.doubt)
            stored = fact.subscriptions.get(name, -1)
            if known is None or known == stored:
                continue
            what = f"{fact.client}: {name} has QoS {stored} in the store, should be {known}"
            self.verdict.add("haunting" if known < 0 else "forgotten", f"{what} at {self.now}")
        for packet_id, state in session.inbound.items():
            if state == ("stored" if packet_id not in fact.inbound else "gone"):
                self.verdict.add("inbound", f"{fact.client}: id {packet_id} is to be {state}")

    def _retained(self, fact: facts.Retained) -> None:
        for topic, history in self.retained.items():
            last = max((i for i, s in enumerate(history) if s.accepted), default=None)
            late = [s for s in history[last or 0 :] if fact.by == "client" and self._is_over(s)]
            allowed = {_shown(s.message) for s in history[last or 0 :] if s not in late}
            if last is None or any(s.message.expiry_s for s in history[last:]):
                allowed.add("")
            if last is not None and history[last].message.qos == 2:
                allowed |= {
                    _shown(s.message)
                    for s in history[:last]
                    if s.message.qos == 1 and s.last > history[last].first
                }
            there = fact.messages.get(topic, "")
            if there not in allowed:
                self.verdict.add(
                    "retained",
                    f"{topic}: {there or 'nothing'} in the {fact.by} at {self.now}, "
                    f"allowed {sorted(allowed)[:4]}",
                )

    # --------------------------------------------------------------------------- the end

    def _drained(self, fact: facts.Drained) -> None:
        self.sessions[fact.client].is_drained = True

    def _failed(self, fact: facts.Failed) -> None:
        self.verdict.add(fact.promise, f"at {self.now}: {fact.what}")

    def finish(self) -> Verdict:
        accepted = [s for s in self.sent.values() if s.accepted and s.message.qos]
        for client, session in self.sessions.items():
            if not session.is_drained:
                continue
            for delivery in session.open.values():
                if delivery.qos == 2:
                    what = f"{client}: {delivery.message_id} ends {delivery.step}"
                    self.verdict.add("twice", what)
            sure = {
                name: since
                for name, place in session.filters.items()
                if (since := place.sure_since(session.doubt)) is not None
            }
            self._count_lost(client, session, sure, accepted)
        if self.group.since:
            self._count_lost_in_group(accepted)
        return self.verdict

    def _count_lost_in_group(self, accepted: list[_Sent]) -> None:
        group = self.group
        members = [c for c, session in self.sessions.items() if group.name in session.filters]
        if not all(self.sessions[client].is_drained for client in members):
            return
        for (client, packet_id), delivery in group.open.items():
            if delivery.qos == 2:
                what = f"{client}: {delivery.message_id} id {packet_id}, shared"
                self.verdict.add("twice", f"{what}, ends {delivery.step}")
        for sent in accepted:
            message = sent.message
            if message.expiry_s or message.empty or not matches(group.filter, message.topic):
                continue
            if sent.first > group.since:
                self.verdict.counts["owed to the group"] += 1
                if not any(d.step in ("acked", "done") for d in group.had[message.id]):
                    self.verdict.add("lost", f"{group.name}: {message.id}, sent at {sent.first}")

    def _count_lost(
        self, client: str, session: _Session, sure: dict[str, int], accepted: list[_Sent]
    ) -> None:
        wanted: dict[str, int | None] = {}
        for sent in accepted:
            message = sent.message
            if message.expiry_s or (message.empty and message.retain):
                continue  # a clear has no identity
            if message.topic not in wanted:
                wanted[message.topic] = min(
                    (since for name, since in sure.items() if matches(name, message.topic)),
                    default=None,
                )
            since = wanted[message.topic]
            if since is None or since > sent.first:
                continue
            self.verdict.counts["owed"] += 1
            if message.id not in session.times:
                self.verdict.add(
                    "lost",
                    f"{client}: {message.id} on {message.topic}, sent at {sent.first}, "
                    f"accepted at {sent.accepted}",
                )


def _is_owed(session: _Session, sent: _Sent) -> bool:
    """Whether a session must get the first copy of a message: a subscription was certainly in force
    when it was sent, and it does not expire."""
    return not sent.message.expiry_s and any(
        since < sent.first
        for name, place in session.filters.items()
        if matches(name, sent.message.topic)
        and (since := place.sure_since(session.doubt)) is not None
    )


def _shown(message: Message) -> str:
    return "" if message.empty else message.id


def judge(
    history: Iterable[Fact], *, anchor: str = "t/", shared: str = "", may_refuse: bool = False
) -> Verdict:
    """Judge a history.

    may_refuse: the disk was full now and then, and a change of subscriptions may be refused.
    shared: the subscription that a group shares, "" = there is none.
    anchor: topics that begin with it are always matched by some durable session, once one has
    subscribed to all of them; from then on an acknowledgement of a message there proves a commit.
    """
    judge_ = _Judge(anchor, shared, may_refuse=may_refuse)
    for index, fact in enumerate(history):
        judge_.feed(index + 1, fact)
    return judge_.finish()
