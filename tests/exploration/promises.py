"""What must hold, looked at from outside the broker: at each operation of the store, at each packet
that is written, after each step, and when everything has come to rest.

It knows three things: what is stored (the memory store, watched operation by operation), what was
written to each socket, and what each client was told. It is independent of the code it judges: it
never asks a session or the registry for a verdict, only which session owns which connection.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from broker_ext.durable import DurableSession
from broker_ext.shared import Group, filter_of
from broker_ext.topics import matches
from broker_ext.wire import (
    Connack,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Suback,
    Subscribe,
    Unsuback,
)
from broker_ext.wire.properties import MESSAGE_EXPIRY_S
from storage.api import (
    GROUP,
    HELD,
    RECEIVED,
    UNRECORDED,
    Acquire,
    Acquired,
    Advance,
    Detach,
    Discard,
    DropWill,
    Expire,
    StoreWill,
    Subscription,
)
from storage.names import is_shared
from tests.exploration.store import OwnerOp

if TYPE_CHECKING:
    from broker_ext.hub import Hub
    from broker_ext.session import Session
    from broker_ext.wire import Packet, Unsubscribe
    from storage.api import Entry, Op, Outcome, Snapshot
    from tests.exploration.clients import Link, Outgoing
    from tests.exploration.world import World

__all__ = ["Ledger"]


@dataclass(slots=True)
class _Request:
    """A SUBSCRIBE or UNSUBSCRIBE that waits for its answer. wants: filter -> QoS, None = gone."""

    packet_id: int
    wants: dict[bytes, int | None]


@dataclass(slots=True)
class _Belief:
    """What a client may believe of its session.

    base: filters that it was told. pending: by connection, what it has asked for since.
    exists: it has a session that survives.
    must_hear: its session was deleted, and it was not told yet. plugins: what others asked for it.
    """

    base: dict[bytes, int] = field(default_factory=dict)
    pending: dict[Link, list[_Request]] = field(default_factory=dict)
    exists: bool = False
    must_hear: bool = False
    plugins: dict[bytes, set[int]] = field(default_factory=dict)

    def possible(self, topic_filter: bytes) -> set[int | None]:
        """The QoS values that the filter may stand at now; None = not there."""
        out: set[int | None] = {self.base.get(topic_filter)}
        out |= self.plugins.get(topic_filter, set())
        for link, requests in self.pending.items():
            if link.accepted:
                out |= {r.wants[topic_filter] for r in requests if topic_filter in r.wants}
        return out

    def certain(self, topic_filter: bytes) -> bool:
        """Whether it stands with QoS >= 1, and nobody has asked for anything else."""
        wants = [r.wants.get(topic_filter, 1) for rs in self.pending.values() for r in rs]
        return bool(self.base.get(topic_filter)) and all(wants)

    @property
    def stands(self) -> bool:
        """Whether there is a filter that nobody has asked to remove since."""
        return any(None not in self.possible(topic_filter) for topic_filter in self.base)

    def others_ended(self) -> None:
        """A newer connection was accepted: what older ones asked for was done, or never is."""
        for link in [link for link in self.pending if link.accepted]:
            del self.pending[link]

    def filters(self) -> set[bytes]:
        asked = {f for rs in self.pending.values() for r in rs for f in r.wants}
        return asked | set(self.base)


@dataclass(slots=True)
class _Record:
    """What was seen of one consumer. claimed: offsets that were claimed and not given back."""

    claimed: set[int] = field(default_factory=set)
    left: set[bytes] = field(default_factory=set)


class Ledger:
    """All that was seen of a run. violations: the promises that were broken, in words."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.violations: list[str] = []
        self.stored: dict[bytes, int] = {}
        """Payload -> how often it was appended."""
        self._appended: dict[bytes, int] = {}
        self._offsets: dict[int, bytes] = {}
        self._published: dict[bytes, int] = {}
        self._records: dict[int, _Record] = {}
        self._beliefs: dict[bytes, _Belief] = {}
        self._arrivals = 0
        self._accepted: dict[bytes, int] = {}
        self._topics: dict[bytes, tuple[bytes, int]] = {}
        self._acknowledged: set[bytes] = set()
        self._sent_once: set[tuple[bytes, bytes]] = set()
        self._owed: dict[tuple[bytes, bytes], None] = {}
        self._first: dict[tuple[bytes, int], int] = {}
        self._delivered: dict[tuple[bytes, bytes], int] = {}
        self._order: dict[tuple[bytes, bytes, int], int] = {}
        self._wills: set[bytes] = set()
        self._deadlines: dict[bytes, int] = {}
        self.sessions: list[Session] = []
        self._owed_to_groups: dict[tuple[bytes, bytes], None] = {}
        self._given: dict[bytes, list[tuple[Link, int]]] = {}
        """Payload -> links that a group gave it to, in their order, with the QoS."""
        self._begun: dict[bytes, set[Link]] = {}
        """The same, and those whose socket was closed before it was written."""
        self._from_memory: set[bytes] = set()
        self._over: set[bytes] = set()
        """Clients that a session of has ended."""
        self.orphans: dict[bytes, set[int]] = {}
        """Wills of connections that died with the broker -> how often they may be published."""

    def broken(self, what: str) -> None:
        self.violations.append(what)

    def belief(self, client_id: bytes) -> _Belief:
        return self._beliefs.setdefault(client_id, _Belief())

    def watch(self, hub: Hub) -> None:
        """Learn which messages are routed, and which get an offset, before they are stored."""
        append = hub.committer.append

        def watched(topic: bytes, payload: bytes, *rest: object) -> Entry:
            entry = append(topic, payload, *rest)  # type: ignore[arg-type]
            self._appended[payload] = entry.offset
            self._offsets[entry.offset] = payload
            return entry

        publish = hub.router.publish

        def published(topic: bytes, payload: bytes, *rest: object, **more: object) -> bool:
            self._published[payload] = self._published.get(payload, 0) + 1
            self._delayed_will(payload)
            if expires_ms := more.get("expires_ms"):
                assert isinstance(expires_ms, int)
                self._deadlines[payload] = expires_ms
            return publish(topic, payload, *rest, **more)  # type: ignore[arg-type]

        setattr(hub.committer, "append", watched)  # noqa: B010 - a method is not assigned to
        setattr(hub.router, "publish", published)  # noqa: B010

    # --------------------------------------------------------------- what clients have done

    def arrival(self) -> int:
        """A CONNECT was authenticated: its number."""
        self._arrivals += 1
        return self._arrivals

    def dialled(self, link: Link) -> None:
        if link.clean:
            self._forgive(link.identity.client_id, None)

    def asked(self, link: Link, packet: Subscribe | Unsubscribe) -> None:
        client_id = link.identity.client_id
        wants: dict[bytes, int | None] = {}
        if isinstance(packet, Subscribe):
            wants.update((f.filter, f.qos) for f in packet.filters)
        else:
            wants.update(dict.fromkeys(packet.filters))
        for topic_filter, qos in wants.items():
            if not qos:
                self._forgive(client_id, topic_filter)
        request = _Request(packet.packet_id, wants)
        self.belief(client_id).pending.setdefault(link, []).append(request)

    def subscribed_for(self, client_id: bytes, topic_filter: bytes, qos: int) -> None:
        """A plugin subscribes a client, who is not told."""
        self.belief(client_id).plugins.setdefault(topic_filter, set()).add(qos)

    def sent(self, link: Link, message: Outgoing, *, retain: bool) -> None:
        """A PUBLISH is on its way: who is owed it, if it is acknowledged."""
        del link, retain
        self._topics[message.payload] = (message.topic, message.qos)
        if not message.qos or message.expires_s:
            return
        for client_id, belief in self._beliefs.items():
            for topic_filter in belief.base:
                if (
                    belief.exists
                    and belief.certain(topic_filter)
                    and matches(topic_filter, message.topic)
                ):
                    self._owed[client_id, message.payload] = None
                plain = filter_of(topic_filter) if is_shared(topic_filter) else None
                if (
                    plain is not None
                    and belief.exists
                    and belief.certain(topic_filter)
                    and matches(plain, message.topic)
                    and not self._starts_clean(client_id)
                ):
                    self._owed_to_groups[topic_filter, message.payload] = None

    def _starts_clean(self, client_id: bytes) -> bool:
        """Whether its session may end at any moment."""
        return any(
            link.clean and link.connection is not None
            for link in self.world.links
            if link.identity.client_id == client_id
        )

    def _forgive(self, client_id: bytes, topic_filter: bytes | None) -> None:
        """A subscription may end: what is owed to it need not come any more."""
        for owed in list(self._owed):
            topic = self._topics[owed[1]][0]
            if owed[0] == client_id and (topic_filter is None or matches(topic_filter, topic)):
                del self._owed[owed]
        for name, payload in list(self._owed_to_groups):
            if topic_filter in {None, name} and not any(
                belief.exists and belief.certain(name)
                for other, belief in self._beliefs.items()
                if other != client_id
            ):
                del self._owed_to_groups[name, payload]

    # ----------------------------------------------------------------------- what is stored

    def appended(self, entry: Entry) -> None:
        self.stored[entry.payload] = self.stored.get(entry.payload, 0) + 1
        if self.stored[entry.payload] > 1 and entry.qos == 2:
            self.broken(f"P5: {entry.payload!r} (QoS 2) is in the history twice")

    def applied(
        self, op: Op, before: Snapshot | None, after: Snapshot | None, outcome: Outcome
    ) -> None:
        if isinstance(op, OwnerOp):
            self._owner_wrote(op, before, after, outcome)
        elif isinstance(op, Acquire):
            if isinstance(outcome, Acquired) and not outcome.existed:
                self._forgotten(op.client_id, asked_for=not op.create)
        elif isinstance(op, Expire):
            assert isinstance(outcome, tuple)
            for expired in outcome:
                self._forgotten(expired.client_id, asked_for=False)
        elif isinstance(op, StoreWill):
            self._wills.add(op.will.incarnation)
        elif isinstance(op, DropWill):
            self._wills.discard(op.incarnation)
            if self.world.store.memory.wills != self._wills:
                self.broken("P9: the will of one incarnation was deleted by another")

    def _forgotten(self, client_id: bytes, *, asked_for: bool) -> None:
        """A session was deleted: its client must be told, with Session Present = 0."""
        if client_id.startswith(GROUP):
            return
        belief = self.belief(client_id)
        # one with nothing in it may go: whether its client is told makes no difference to it
        had_something = belief.exists and belief.stands and not asked_for
        if had_something and not self.world.forgets:
            self.broken(f"P7: the session of {client_id!r} was deleted")
        self._over.add(client_id)
        belief.base.clear()
        belief.others_ended()
        belief.must_hear = belief.must_hear or had_something
        belief.exists = False
        self._forgive(client_id, None)

    def _owner_wrote(
        self, op: OwnerOp, before: Snapshot | None, after: Snapshot | None, outcome: Outcome
    ) -> None:
        kind = type(op).__name__
        record = self._records.setdefault(op.consumer_id, _Record())
        if op.incarnation in record.left:
            self.broken(f"P7: {kind} under an incarnation that had left")
        if isinstance(op, (Detach, Discard)):
            record.left.add(op.incarnation)
        if isinstance(op, Discard) and before is not None and after is None:
            self._forgotten(before.consumer.client_id, asked_for=False)
        if isinstance(outcome, BaseException) and not self.world.outsiders:
            self.broken(f"P3: {kind} was refused in a healthy build: {outcome!r}")
        if before is None or before == after:
            return
        if before.consumer.incarnation != op.incarnation:
            self.broken(f"P3: {kind} changed a record under an old incarnation")
        if after is not None and after.consumer.incarnation != before.consumer.incarnation:
            self.broken(f"P3: {kind} changed the incarnation")
        if isinstance(op, Advance) and after is not None:
            self._advanced(record, op, before, after)

    def _advanced(self, record: _Record, op: Advance, before: Snapshot, after: Snapshot) -> None:
        """P3, P4: a claim that is gone stays gone, and the cursor passes nothing unclaimed."""
        memory = self.world.store.memory
        had = {claim.number for claim in before.claims}
        for number in (*(claim.number for claim in op.claims), *op.settled):
            if number < before.consumer.next_claim and number not in had:
                self.broken(f"P4: claim {number} was written when it was no longer held")
        cursor = after.consumer.cursor
        if cursor > memory.head:
            self.broken(f"P3: cursor {cursor} is ahead of the head {memory.head}")
        record.claimed = {o for o in record.claimed if o <= cursor}
        record.claimed |= {
            d.offset for c in after.claims for d in c.deliveries if not d.state & HELD
        }
        for entry in memory.entries:
            if (
                entry.qos
                and entry.offset <= cursor
                and entry.offset not in record.claimed
                and not self._has_expired(entry.payload)
                and not self._is_superseded(entry.payload)
                and any(_wants(sub, entry) for sub in after.subscriptions)
            ):
                if entry.offset <= before.consumer.cursor:
                    continue  # it was passed under other subscriptions, and judged then
                self.broken(f"P3: the cursor passed {entry.offset}, which was never claimed")

    # ---------------------------------------------------------------------- what is written

    def written(self, link: Link, packet: Packet) -> None:
        """Each answer is written only after the commit that holds what it says."""
        match packet:
            case Connack():
                self._write_connack(link, packet)
            case Suback():
                self._write_suback(link, packet)
            case Unsuback():
                self._write_unsuback(link, packet)
            case Publish():
                self._write_publish(link, packet)
            case Puback(packet_id) | Pubrec(packet_id) | Pubcomp(packet_id):
                self._write_acknowledgement(link, packet, packet_id)
            case Pubrel(packet_id):
                self._write_pubrel(link, packet_id)

    def _record(self, link: Link) -> Snapshot | None:
        return self.world.store.memory.record_of(link.identity.client_id)

    def _write_connack(self, link: Link, packet: Connack) -> None:
        if packet.reason:
            return
        client_id = link.identity.client_id
        if link.arrived < self._accepted.get(client_id, 0):
            self.broken(f"P7: {link} was accepted after one that arrived later")
        self._accepted[client_id] = link.arrived
        assert link.connection is not None
        session = link.connection.session
        assert session is not None
        self.sessions.append(session)
        belief = self.belief(client_id)
        record = self._record(link)
        if link.will is not None and session.incarnation not in self.world.store.memory.wills:
            self.broken(f"P9: {link} was accepted before its will was stored")
        if link.clean and not self.world.guarded:
            self._look_at_wills_before(link)
        if not isinstance(session, DurableSession):
            if record is not None:
                self.broken(f"P7: {link} started clean before the old record was deleted")
            self._forgotten(client_id, asked_for=True)
            belief.must_hear = False
            return
        self._resumed(link, packet, session, record)

    def _resumed(
        self, link: Link, packet: Connack, session: DurableSession, record: Snapshot | None
    ) -> None:
        """A durable session was accepted: what it was told is what is stored."""
        client_id = link.identity.client_id
        belief = self.belief(client_id)
        if record is None or record.consumer.incarnation != session.incarnation:
            if not self.world.outsiders:
                self.broken(f"P7: {link} was accepted without its incarnation on the record")
            return
        stored = {s.filter: s.qos for s in record.subscriptions}
        if not belief.exists:
            belief.base.clear()  # of a clean session
        if packet.session_present:
            self._compare(link, belief, stored)
            if belief.must_hear:
                self.broken(f"P7: {link} was never told that its session was deleted")
        else:
            if stored:
                self.broken(f"P7: {link} was told of no session, and there is one")
            if belief.exists and belief.stands and not self.world.forgets:
                self.broken(f"P7: {link} lost its session")
            self._forgive(client_id, None)
            belief.must_hear = False
        belief.base = stored
        belief.others_ended()
        belief.exists = True

    def _compare(self, link: Link | None, belief: _Belief, stored: dict[bytes, int]) -> None:
        for topic_filter in belief.filters() | set(stored):
            at = stored.get(topic_filter)
            possible = belief.possible(topic_filter)
            if at not in possible:
                self.broken(
                    f"P8: {link}: {topic_filter!r} is stored with QoS {at}, "
                    f"but its client was told {possible}"
                )

    def _write_suback(self, link: Link, packet: Suback) -> None:
        belief = self.belief(link.identity.client_id)
        requests = belief.pending.get(link)
        if not requests:
            self.broken(f"P8: {link} was answered after another connection was accepted")
            return
        request = requests.pop(0)
        if request.packet_id != packet.packet_id:
            self.broken(f"P8: {link}: SUBACK out of order")
        record = self._record(link)
        stored = {} if record is None else {s.filter: s.qos for s in record.subscriptions}
        for (topic_filter, _), code in zip(request.wants.items(), packet.reasons, strict=True):
            if code >= 0x80:
                continue
            belief.base[topic_filter] = code
            # or what the client has asked for since, which may be stored by now
            saved = {code, *(r.wants[topic_filter] for r in requests if topic_filter in r.wants)}
            if not link.clean and stored.get(topic_filter) not in saved:
                self.broken(f"P8: {link}: SUBACK for {topic_filter!r} before it was saved")

    def _write_unsuback(self, link: Link, packet: Unsuback) -> None:
        belief = self.belief(link.identity.client_id)
        requests = belief.pending.get(link)
        if not requests:
            self.broken(f"P8: {link} was answered after another connection was accepted")
            return
        request = requests.pop(0)
        if request.packet_id != packet.packet_id:
            self.broken(f"P8: {link}: UNSUBACK out of order")
        record = self._record(link)
        stored = {} if record is None else {s.filter: s.qos for s in record.subscriptions}
        for topic_filter in request.wants:
            belief.base.pop(topic_filter, None)
            saved = {None, *(r.wants[topic_filter] for r in requests if topic_filter in r.wants)}
            if stored.get(topic_filter) not in saved:
                self.broken(f"P8: {link}: UNSUBACK for {topic_filter!r} before it was saved")

    def _write_acknowledgement(self, link: Link, packet: Packet, packet_id: int) -> None:
        record = None if link.clean else self._record(link)
        inbound = record.inbound if record is not None else frozenset()
        if isinstance(packet, Pubcomp):
            if packet_id in inbound:
                self.broken(f"P5: {link}: PUBCOMP {packet_id} before its id was released")
            return
        message = link.identity.outgoing.get(packet_id)
        if message is None:
            return
        if self._appended.get(message.payload, 0) > self.world.store.memory.head:
            self.broken(f"P1: {link}: {message.payload!r} was acknowledged before its commit")
        if isinstance(packet, Pubrec) and not link.clean and packet_id not in inbound:
            self.broken(f"P5: {link}: PUBREC {packet_id} before its id was saved")
        self._acknowledged.add(message.payload)

    def _write_publish(self, link: Link, packet: Publish) -> None:
        client_id, payload = link.identity.client_id, packet.payload
        self._delivered.setdefault((client_id, payload), 0)
        left_s = packet.properties.get(MESSAGE_EXPIRY_S) if packet.properties else None
        if left_s == 0 and not packet.dup:  # as it was when it was handed to the connection
            self.broken(f"{link}: {payload!r} was sent when its time was over")
        record = self._record(link)
        if packet.qos and self._is_shared(link, packet, record):
            self._write_shared(link, packet)
            self._count(link, packet)
            return
        if not packet.qos or link.clean:
            self._count(link, packet)
            self._at_most_once(link, packet)
            return
        claims = () if record is None else record.claims
        found = [d for c in claims for d in c.deliveries if d.packet_id == packet.packet_id]
        if record is None or not found:
            self.broken(f"P2: {link}: {payload!r} was sent before its claim was saved")
            return
        delivery = found[0]
        if delivery.state & HELD:
            stored = record.held.get(delivery.offset)
            right = stored is not None and stored.payload == payload
        else:  # by what it was appended as: it may have been pruned since
            right = self._offsets.get(delivery.offset) == payload
        if not right:
            self.broken(f"P2: {link}: {payload!r} was sent under the claim of another message")
        if delivery.state & RECEIVED:
            self.broken(f"P5: {link}: {payload!r} was sent again after its PUBREC was saved")
        if not packet.retain:
            self._first_or_again(link, packet, delivery.offset)
        self._count(link, packet)

    def _at_most_once(self, link: Link, packet: Publish) -> None:
        """P18: with QoS 0, whatever it was published with."""
        key = link.identity.client_id, packet.payload
        if packet.qos or packet.retain:
            return
        if key in self._sent_once:
            self.broken(f"P18: {link}: {packet.payload!r} was sent twice with QoS 0")
        self._sent_once.add(key)

    def _is_shared(self, link: Link, packet: Publish, record: Snapshot | None) -> bool:
        """Whether a group gave it to this client. One that is also owed it, as a subscriber of its
        own, is in no scenario."""
        offset = self._appended.get(packet.payload, 0)
        groups = [s for s in self.world.store.memory.records if _is_group(s)]
        for claim in (claim for group in groups for claim in group.claims):
            for delivery in claim.deliveries:
                if delivery.offset == offset and (
                    (link.clean and claim.member == UNRECORDED)
                    or (
                        record is not None
                        and claim.member == record.consumer.id
                        and delivery.packet_id == packet.packet_id
                    )
                ):
                    if delivery.state & RECEIVED:
                        self.broken(f"P5: {link}: {packet.payload!r} was sent after its PUBREC")
                    return True
        if link.clean and self._serves_in_memory(packet):
            self._from_memory.add(packet.payload)
            return True
        if packet.payload in self._given:
            if packet.payload not in self._from_memory:
                self.broken(f"P2: {link}: {packet.payload!r} was sent before its claim was saved")
            return True
        return False

    def _serves_in_memory(self, packet: Publish) -> bool:
        return any(
            matches(group.filter, packet.topic) and not group.durable
            for group in self.world.hub.shared.groups.values()
        )

    def begins(self, link: Link, payload: bytes) -> None:
        """A message is handed to a connection: its client may have it from now on."""
        self._begun.setdefault(payload, set()).add(link)

    def _write_shared(self, link: Link, packet: Publish) -> None:
        """P15: it is with one member at a time, and with QoS 2 with one for good."""
        payload = packet.payload
        given = self._given.setdefault(payload, [])
        for other, qos in given:
            assert other.connection is not None
            if other is link:
                self.broken(f"P15: {link}: {payload!r} was sent twice on one connection")
            elif other.connection.ended is None:
                self.broken(f"P15: {payload!r} went to {link}, and {other} has it")
            elif other.identity is not link.identity and qos == 2:
                self.broken(f"P15: {payload!r} (QoS 2) went to {other}, then to {link}")
            elif qos == 2 and not packet.dup:
                self.broken(f"P15: {link}: {payload!r} came again without DUP")
        given.append((link, packet.qos))

    def _has_expired(self, payload: bytes) -> bool:
        return self._deadlines.get(payload, 1 << 62) <= self.world.clock.now_ms()

    def _is_superseded(self, payload: bytes) -> bool:
        """Whether only the newest message of its topic is wanted, and a newer one is stored."""
        topic, _ = self._topics.get(payload, (b"", 0))
        rules = self.world.hub.settings.filters
        if not any(rule.keep_latest and matches(rule.filter, topic) for rule in rules):
            return False
        offset = self._appended.get(payload, 0)
        newer = (
            (other, self._appended.get(other, 0))
            for other, (other_topic, _) in self._topics.items()
            if other_topic == topic
        )
        memory = self.world.store.memory  # what is in the batch of the cursor counts, too
        return any(
            at > offset and (self.stored.get(other) or memory.entry(at)) for other, at in newer
        )

    def _first_or_again(self, link: Link, packet: Publish, offset: int) -> None:
        client_id, payload = link.identity.client_id, packet.payload
        first = self._first.get((client_id, offset))
        if packet.dup:
            if first is not None and first != packet.packet_id:
                self.broken(f"P6: {link}: {payload!r} came again with another packet id")
            return
        if first is not None:
            self.broken(f"P4: {link}: {payload!r} was sent twice as if for the first time")
        self._first[client_id, offset] = packet.packet_id
        key = client_id, packet.topic, packet.qos
        if self._order.get(key, 0) > offset:
            self.broken(f"P6: {link}: {payload!r} came out of order")
        self._order[key] = offset

    def _count(self, link: Link, packet: Publish) -> None:
        identity = link.identity
        key = identity.client_id, packet.payload
        if packet.qos == 2 and identity.incoming.get(packet.packet_id) == packet.payload:
            return
        if link.up:
            self._delivered[key] += 1
        if self._delivered[key] > 1 and packet.qos == 2 and not packet.retain and not link.clean:
            self.broken(f"P5: {link}: {packet.payload!r} (QoS 2) was delivered twice")

    def _write_pubrel(self, link: Link, packet_id: int) -> None:
        record = None if link.clean else self._record(link)
        if record is None:
            return
        groups = (s for s in self.world.store.memory.records if _is_group(s))
        shared = (c for s in groups for c in s.claims if c.member == record.consumer.id)
        for claim in (*record.claims, *shared):
            for delivery in claim.deliveries:
                if delivery.packet_id == packet_id and not delivery.state & RECEIVED:
                    self.broken(f"P5: {link}: PUBREL {packet_id} before 'received' was saved")

    # ---------------------------------------------------------------------- after each step

    def look(self) -> None:
        """One owner for each client id, and it is the one whose connection stands."""
        owners = self.world.hub.registry.owners
        for session in self.sessions:
            if not session.sealed and owners.get(session.client_id) is not session:
                self.broken(f"P7: {session!r} is not sealed and not the owner")
        for session in owners.values():
            if session.sealed:
                self.broken(f"P7: {session!r} is sealed and still the owner")
        for link in self.world.links:
            if link.connection is not None and link.connection.ended and not link.ended_ms:
                link.ended_ms = self.world.clock.now_ms()
        if self.world.loop.errors:
            self.violations += [f"loop: {error}" for error in self.world.loop.errors]

    def look_at_rest(self) -> None:
        """Nothing can happen any more: what is stored, what is told and what is counted agree."""
        world, hub = self.world, self.world.hub
        memory = world.store.memory
        self._look_for_leftovers()
        for session in {id(s): s for s in self.sessions}.values():
            if not session.sealed and isinstance(session, DurableSession):
                record = memory.record(session.consumer_id)
                fenced = record is None or record.consumer.incarnation != session.incarnation
                if fenced and not world.outsiders:
                    self.broken(f"P7: {session!r} does not own its record")
        for client_id, belief in self._beliefs.items():
            record = memory.record_of(client_id)
            told = any(link.session for link in world.links if link.identity.client_id == client_id)
            if record is not None and not (told or belief.plugins or world.outsiders):
                self.broken(f"P7: {client_id!r} has a session that it was never told of")
            stored = {} if record is None else {s.filter: s.qos for s in record.subscriptions}
            if belief.exists:
                self._compare(None, belief, stored)
            if (
                record is not None
                and not record.consumer.detached_ms
                and client_id not in hub.registry.owners
                and not world.outsiders
            ):
                self.broken(f"P7: the record of {client_id!r} is attached to nobody")
        self._look_at_filters()
        self._look_at_wills()

    def _look_for_leftovers(self) -> None:
        world, hub = self.world, self.world.hub
        if pending := world.loop.pending_tasks():
            self.broken(f"P7: tasks are left behind: {pending}")
        if hub.registry._lines:
            self.broken("P7: somebody is still in line")
        if hub.committer._flying is not None or hub.committer._open.ops:
            self.broken("P7: something is still to be written")
        for link in world.links:
            if link.up and not (link.accepted and not link.asked):
                self.broken(f"P7: {link} was never answered")
            if link.decoder.error is not None:
                self.broken(f"{link} was sent what is no packet")
        self.violations += [f"store: {wrong}" for wrong in memory_check(world)]

    def _look_at_filters(self) -> None:
        hub = self.world.hub
        counts = self.world.store.memory.counts()
        names = set(counts) | {f for b in self._beliefs.values() for f in b.filters()}
        names |= {f for s in self.sessions for f in s.subscriptions}
        self._look_at_groups({name for name in names if is_shared(name)}, counts)
        for name in sorted(name for name in names if not is_shared(name)):
            place = hub.router._places.find(name)
            counted = 0 if place is None else place.durable
            stored = counts.get(name, 0)
            if counted != stored:
                self.broken(f"P8: {name!r} is counted {counted} times and stored {stored} times")
            receivers = () if place is None else place.subscribers or ()
            attached = {r for r in receivers if not isinstance(r, Group)}
            wanted = {s for s in self.sessions if not s.sealed and name in s.subscriptions}
            if attached != wanted:
                self.broken(f"P8: {name!r} is delivered to {attached}, not to {wanted}")

    def _look_at_groups(self, names: set[bytes], counts: dict[bytes, int]) -> None:
        """P15: each group has the members it should have, and a record as long as it is needed."""
        shared = self.world.hub.shared
        records = {
            sub.filter: record
            for record in self.world.store.memory.records
            if _is_group(record)
            for sub in record.subscriptions
            if is_shared(sub.filter)
        }
        for name in sorted(names | set(shared.groups)):
            stored, counted = counts.get(name, 0), shared.counts.get(name, 0)
            if counted != stored:
                self.broken(f"P15: {name!r} is counted {counted} times and stored {stored} times")
            group = shared.groups.get(name)
            here = set() if group is None else {member.session for member in group.members}
            wanted = {s for s in self.sessions if not s.sealed and name in s.subscriptions}
            if here != wanted:
                self.broken(f"P15: {name!r} has the members {here}, not {wanted}")
            record = records.get(name)
            if stored and not (record and any(s.qos for s in record.subscriptions)):
                self.broken(f"P15: {name!r} has durable members and follows nothing")
            if record is not None and not (stored or here or record.claims):
                self.broken(f"P15: the record of {name!r} is left behind")
            if record is not None and group is not None:
                self._look_at_claims(record)
            if (group is None) != (record is None and not here):
                self.broken(f"P15: {name!r} is {group}, and its record {record}")

    def _look_at_claims(self, record: Snapshot) -> None:
        """What is stored as with somebody is with them, or waits for them."""
        here = {s.consumer_id: s for s in self.sessions if not s.sealed and s.durable}
        known = {s.consumer.id for s in self.world.store.memory.records} | {0}
        for claim in record.claims:
            session = here.get(claim.member)
            held = session.member.flights if session is not None and session.member else {}
            for delivery in claim.deliveries:
                if delivery.qos == 2 and claim.member not in known:
                    self.broken(f"P15: {delivery} is with a member that is gone")
                if session is not None and delivery.packet_id not in held:
                    self.broken(f"P15: {delivery} is stored as with {session!r}, who does not know")

    def _look_at_wills(self) -> None:
        stored = self.world.store.memory.wills
        for link in self.world.links:
            if link.will is None or link.connection is None:
                continue
            if link.will_delay_s:
                self._look_at_delayed_will(link)
                continue
            ended = link.connection.ended
            due = link.session is not None and ended is not None and ended.publish_will
            times = self._published.get(link.will.payload, 0)
            if times != due:
                self.broken(f"P9: the will of {link} was published {times} times")
            if link.session is not None and (link.session.incarnation in stored) != (ended is None):
                self.broken(f"P9: the will of {link} is stored although it ended, or is not")
        for payload, allowed in self.orphans.items():
            if self._published.get(payload, 0) not in allowed:
                self.broken("P9: the will of a connection that died with the broker")
        connected = {link.session.incarnation for link in self.world.links if link.session}
        if stored - connected:
            self.broken("P9: a will is stored that belongs to nobody")

    def _look_at_delayed_will(self, link: Link) -> None:
        """It is waiting, or was published, or its client came back or said goodbye."""
        ended = link.connection.ended if link.connection is not None else None
        assert link.will is not None
        times = self._published.get(link.will.payload, 0)
        waits = link.session is not None and (
            link.session.incarnation in self.world.store.memory.wills
        )
        if times + waits > 1:
            self.broken(f"P9: the will of {link} was published {times} times, and waits: {waits}")
        if link.session is None or ended is None or not ended.publish_will:
            if times or waits != (link.session is not None and ended is None):
                self.broken(f"P9: the will of {link} was published, or is stored")
        elif not (times or waits or self._came_back(link)):
            self.broken(f"P9: the will of {link} is lost")

    def _came_back(self, link: Link, before: int = 1 << 62) -> bool:
        """Whether its client was accepted after it, in the same session."""
        return any(
            other.identity is link.identity
            and link.arrived < other.arrived < before
            and other.session is not None
            and not other.clean
            for other in self.world.links
        )

    def _look_at_wills_before(self, link: Link) -> None:
        """A clean start was accepted: the session has ended, so no will of it waits."""
        for other in self.world.links:
            ended = other.connection.ended if other.connection is not None else None
            if (
                other.identity is link.identity
                and 0 < other.arrived < link.arrived
                and other.will is not None
                and other.will_delay_s
                and other.session is not None
                and ended is not None
                and ended.publish_will
                and not self._published.get(other.will.payload)
                and not self._came_back(other, link.arrived)
            ):
                self.broken(f"P9: the will of {other} was lost by a clean start")

    def _delayed_will(self, payload: bytes) -> None:
        """A message is published: if it is a will that waits, its time must have come."""
        for link in self.world.links:
            if link.will is None or link.will.payload != payload or not link.will_delay_s:
                continue
            due_ms = link.ended_ms + link.will_delay_s * 1000
            is_over = link.ended_ms and due_ms <= self.world.clock.now_ms()
            if not (is_over or link.clean or self._starts_clean_after(link)):
                self.broken(f"P9: the will of {link} was published before its delay was over")

    def _starts_clean_after(self, link: Link) -> bool:
        return any(
            other.clean and other.identity is link.identity and other.arrived > link.arrived
            for other in self.world.links
        )

    # --------------------------------------------------------------------------- at the end

    def look_at_deliveries(self) -> None:
        """Everybody has come back: nobody misses what was acknowledged to its publisher."""
        for client_id, payload in self._owed:
            if (
                payload in self._acknowledged
                and not self._delivered.get((client_id, payload))
                and not self._is_superseded(payload)
            ):
                self.broken(f"P6: {payload!r} never came to {client_id!r}")
        for name, payload in self._owed_to_groups:
            came = any(count for (_, what), count in self._delivered.items() if what == payload)
            ended = any(  # or would have ended, and does not come back
                link.identity.client_id in self._over or self._starts_clean(link.identity.client_id)
                for link in self._begun.get(payload, ())
            )
            may_be_lost = self._topics[payload][1] == 2 and (ended or self._waits(payload))
            if payload in self._acknowledged and not (came or may_be_lost):
                self.broken(f"P15: {payload!r} never came to {name!r}")

    def _waits(self, payload: bytes) -> bool:
        """Whether a message is with a member that may come back for it."""
        records = [s for s in self.world.store.memory.records if _is_group(s)]
        return any(
            delivery.offset == self._appended.get(payload) and delivery.qos == 2 and claim.member
            for claim in (claim for record in records for claim in record.claims)
            for delivery in claim.deliveries
        )

    def look_at_stop(self) -> None:
        """The broker has stopped: the wills of those who were connected stay, as after a crash."""
        world = self.world
        if pending := world.loop.pending_tasks():
            self.broken(f"P7: tasks are left behind: {pending}")
        for session in self.sessions:
            if not session.sealed:
                self.broken(f"P7: {session!r} is not sealed")
        world.do(world.store.open(now_ms=world.clock.now_ms()))
        self.violations += [f"store: {wrong}" for wrong in memory_check(world)]

    def look_at_end(self) -> None:
        """Everybody has left."""
        if self.world.hub.registry.owners:
            self.broken("P7: an owner is left")
        if self.world.hub.connections:
            self.broken("P7: a connection is left")


def memory_check(world: World) -> list[str]:
    """The store's own walk over its invariants."""
    from tests.exploration.loop import result_of  # noqa: PLC0415 - only here

    found: list[str] = result_of(world.store.check())
    return found


def _is_group(snapshot: Snapshot) -> bool:
    return snapshot.consumer.client_id.startswith(GROUP)


def _wants(subscription: Subscription, entry: Entry) -> bool:
    return (
        subscription.qos > 0
        and subscription.from_offset < entry.offset
        and matches(subscription.filter, entry.topic)
    )
