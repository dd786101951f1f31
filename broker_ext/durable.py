"""The durable session: the connected half of a consumer in the store.

What it has not been offered yet is its ``backlog``. Everything it wants to store for one batch is
written by one ``Advance`` under its incarnation (P3).
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final

from broker_ext.backlog import Backlog
from broker_ext.options import PLAIN, WALKING, options_of
from broker_ext.outbound import PACKET_IDS, SETTLED, Collected, Flight, Outbound
from broker_ext.reasons import Reason
from broker_ext.replay import Replay, Wanted
from broker_ext.session import DISCONNECTED, NO_SUBSCRIPTION, REFUSED, End, Grant, Session
from broker_ext.wire import PACKET_ID, PUBREL_HEAD
from storage.api import (
    HELD,
    RECEIVED,
    RETAINED,
    Advance,
    Bind,
    Detach,
    Discard,
    Subscribe,
    Subscription,
    Unsubscribe,
)
from storage.errors import (
    ClaimNotHeld,
    EntryDamaged,
    EntryGone,
    Fenced,
    ResumeHistoryUnavailable,
    StoreError,
)
from storage.names import is_shared, levels_match
from storage.outbox import DeadLetter, Failure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from broker_ext.hub import Hub
    from broker_ext.options import Options
    from broker_ext.session import Peer
    from storage.api import Entry, Outcome, Snapshot

__all__ = ["DurableSession"]

log = logging.getLogger("amqtt_durable.session")

AHEAD_MIN: Final = 1024
"""Deliveries claimed ahead of the window: a drain then waits for a commit every few hundred."""
DEAD_BYTES_MAX: Final = 16 << 20
"""Payloads that one connection's dead letters keep: a client that takes small packets could
have all that it is sent written twice. Beyond it a dead letter only says that there was one."""
FETCH_MAX: Final = 128
"""Deliveries of earlier connections whose messages are read at a time."""

FENCED = End("fenced", publish_will=False, reason=Reason.TAKEN_OVER)
STORE = End("store unavailable", reason=Reason.UNSPECIFIED)
REFUSED_RESUME = End("resume refused")


class DurableSession(Session):
    """A session that survives. Made by the registry after Acquire; ``start`` begins delivery.

    fresh: its record was made by its own CONNECT.
    """

    durable: ClassVar[bool] = True
    keeps_qos0: ClassVar[bool] = True

    def __init__(
        self,
        hub: Hub,
        peer: Peer,
        snapshot: Snapshot,
        *,
        client_id: bytes,
        user: bytes,
        incarnation: bytes,
        window: int,
        unbound: bool = False,
        expiry_s: int | None = None,
    ) -> None:
        super().__init__(
            hub, peer, client_id=client_id, user=user, incarnation=incarnation, window=window
        )
        self.committer = hub.committer
        self.consumer_id = snapshot.consumer.id
        self.expiry_s = expiry_s
        self.out = Outbound(window, max(window, AHEAD_MIN))
        self.backlog = Backlog(self, snapshot, unbound=unbound)
        self._gaining: tuple[bytes, ...] = ()
        self.saved_cursor = snapshot.consumer.cursor
        self.inbound = set(snapshot.inbound)
        self._from: dict[bytes, int] = {}
        self._options: dict[bytes, tuple[int, int]] = {}  # byte and identifier, where not plain
        self._walking: set[bytes] = set()  # as stored: their retained messages are not all given
        self._changing = asyncio.Lock()
        self._counted = {s.filter for s in snapshot.subscriptions if s.qos}
        self.fresh = False
        self._unknown = snapshot.consumer.next_packet_id == 0
        self._joined = False
        self._checkpoint = False
        self._dead_bytes = 0
        self._unindexed = False
        self._received: list[int] = []
        self._released: list[int] = []
        self._fetching: asyncio.Task[None] | None = None
        for subscription in snapshot.subscriptions:
            self.subscriptions[subscription.filter] = subscription.qos
            self._from[subscription.filter] = subscription.from_offset
            self._note_options(subscription)
        self._due = self.out.restore(snapshot)
        self._attempts_max = hub.settings.max_delivery_attempts
        newest = hub.router.rules.newest
        self._looks = bool(self.bytes_max or self._attempts_max or newest)
        """At each delivery, before it is sent."""
        self._is_behind = False
        self._is_careful = self._attempts_max > 0 and self.out.has_suspects

    def _note_options(self, subscription: Subscription) -> None:
        name = subscription.filter
        options = subscription.options & ~WALKING
        if options or subscription.identifier:
            self._options[name] = options, subscription.identifier
        else:
            self._options.pop(name, None)
        if subscription.options & WALKING:
            self._walking.add(name)
        else:
            self._walking.discard(name)

    def introduce(self) -> None:
        """From now on a crash leaves a session that is told to be there (``resume.is_blank``)."""
        if self._unknown and not self.sealed:
            self._unknown = False
            self._checkpoint = True
            if not self._joined:
                self.join(lazy=True)

    def start(self) -> None:
        """Deliver: first what earlier connections left, in its order (P6), then the rest."""
        self.hub.shared.returned(self)
        for topic_filter, qos in self.subscriptions.items():
            options, identifier = self._options.get(topic_filter, (0, 0))
            self.hub.router.attach(self, topic_filter, qos, options, identifier)
        if self._due:
            self.peer.write(b"".join(PUBREL_HEAD + PACKET_ID[i] for i in self._due))
            self._due = []
        for topic_filter in self._walking:  # from the beginning: nobody knows which were given
            asked = options_of(*self._options.get(topic_filter, (0, 0)))
            self._begin_walk(topic_filter, self.subscriptions[topic_filter], asked)
        self.hub.figures.redelivered += len(self.out.ready)
        self.turn_over()
        self.backlog.pump()

    # ---------------------------------------------------------------- what is published

    def pass_on(self, entry: Entry, qos: int, options: Options = PLAIN) -> None:
        is_logged = entry.offset and entry.qos and not qos
        if is_logged and any(levels_match(name, entry.topic) for name in self._gaining):
            return  # the subscription that is being saved will have it from the history
        super().pass_on(entry, qos, options)

    def offer(self, entry: Entry, qos: int, options: Options = PLAIN) -> None:
        if not self.backlog.live:
            return
        if self.out.room and not self.hub.router.guarded:
            self.out.claim(entry, qos, options)
            if not self._joined:
                self.join(lazy=False)
        else:
            self.backlog.begin(entry)

    def _deliver_acknowledged(
        self, entry: Entry, qos: int, retain: bool, identifiers: bytes
    ) -> None:
        # a retained message for a new subscription, or one of amqtt's contexts: the copy that is
        # held is this session's own, so it has the identifier of its subscription
        flags = entry.flags | RETAINED if retain else entry.flags & ~RETAINED
        properties = identifiers + entry.properties
        self.out.hold(entry._replace(flags=flags, properties=properties), qos)
        self.join(lazy=False)

    def _walked(self) -> None:
        """Note in the store that retained messages were all given: in the commit that holds the
        last of them. A change of subscriptions that is being saved goes first; then they come
        again when the session is resumed before anything else is noted."""
        if self.sealed or self._changing.locked():
            return
        given = self._walking - {walk.filter for walk in self._walks}
        if not given:
            return
        self._walking -= given
        head = self.committer.last
        noted = tuple(
            Subscription(name, self.subscriptions[name], head, *self._options.get(name, (0, 0)))
            for name in given
        )
        self.committer.submit(Subscribe(self.consumer_id, self.incarnation, noted), self._written)

    def _room_for_retained(self) -> bool:
        return super()._room_for_retained() and self.out.room

    # ---------------------------------------------------------------------- saving

    def join(self, *, lazy: bool) -> None:
        """Have ``collect`` called when the open batch is closed."""
        if not self.sealed:
            self._joined = True
            self.committer.join(self, lazy=lazy)

    def collect(self) -> None:
        self._joined = False
        if not self.sealed:
            self._save()

    def _save(self) -> None:
        """Put everything that is not written yet into the open batch."""
        collected = self.out.collect()
        cursor = self.backlog.at
        received, self._received = self._received, []
        released, self._released = self._released, []
        checkpoint, self._checkpoint = self._checkpoint, False
        if not (collected or received or released or checkpoint):
            return
        self.committer.submit(
            Advance(
                self.consumer_id,
                self.incarnation,
                cursor=cursor,
                claims=collected.claims,
                settled=collected.settled,
                held=collected.held,
                unheld=collected.unheld,
                received=received,
                released=released,
                next_packet_id=None if self._unknown else self.out.next_packet_id,
                checkpoint=checkpoint,
                dead=collected.dead,
            ),
            partial(self._saved, collected),
        )
        self.saved_cursor = cursor
        self._unindexed = not checkpoint

    def _saved(self, collected: Collected, outcome: Outcome) -> None:
        if isinstance(outcome, BaseException):
            self._refused(outcome)
            return
        self.hub.figures.settled += len(collected.settled)
        if self.sealed:
            return
        if collected.released:
            self.out.committed(collected)
            self.peer.write(b"".join(PUBREL_HEAD + PACKET_ID[i] for i in collected.released))
        if collected.flights:
            self.out.ready.extend(collected.flights)
            self._send()
        self.backlog.pump_if_low()

    def _refused(self, outcome: BaseException) -> None:
        """A write changed nothing. Absorbed and logged, never tried again."""
        if isinstance(outcome, Fenced):
            self.hub.figures.fenced += 1
        elif isinstance(outcome, ClaimNotHeld):
            self.hub.figures.claims_not_held += 1
        if not self.sealed:
            log.warning("session %r: %s; closing the connection", self.client_id, outcome)
            self.peer.finish(FENCED)

    def checkpoint(self) -> None:
        """Bring the stored position, and retention with it, up to what was dispatched (the hub's
        timer). Also when the cursor stands still: what was settled since the last one is not needed
        any more, and pruning waits for the position of a session that went quiet."""
        if self.sealed:
            return
        if self._unindexed or self._joined or self.backlog.at != self.saved_cursor:
            self._checkpoint = True
            if not self._joined:
                self.join(lazy=True)

    def _remember(self, packet_id: int) -> bool:
        if packet_id in self._released:  # used again before its release was written
            self._released.remove(packet_id)
        self._received.append(packet_id)
        if not self._joined:
            self.join(lazy=False)
        self.committer.hurry()
        return True

    def _release(self, packet_id: int) -> bool:
        self._released.append(packet_id)
        if not self._joined:
            self.join(lazy=False)
        self.committer.hurry()
        return True

    # ---------------------------------------------------------------------- sending

    @property
    def places(self) -> int:
        # nor more than there are free packet ids: what is claimed ahead has some
        return min(self.out.window - self.out.sent, PACKET_IDS - len(self.out.flights))

    @property
    def waits(self) -> bool:
        return bool(self.out.ready)

    @property
    def awaits(self) -> bool:
        return self.out.awaits

    @property
    def sends_alone(self) -> bool:
        if not self._is_careful:
            return False
        flights = self.out.flights.values()
        left = [f for f in flights if f.dup and type(f) is Flight and not f.state & RECEIVED]
        self._is_careful = bool(left)
        return any(f.sent for f in left)

    def sends(self, flight: Flight) -> None:
        self.out.sends(flight)

    def lend(self, flight: Flight, packet_id: int = 0) -> bool:
        return self.out.lend(flight, packet_id)

    def take_place(self) -> None:
        self.out.sent += 1

    def give_back(self, packet_id: int, *, place: bool) -> None:
        self.out.give_back(packet_id, place=place)

    def puback(self, packet_id: int) -> None:
        if self.member is not None and self.member.puback(packet_id):
            return
        if self.out.puback(packet_id) and not self._joined:
            self.join(lazy=True)

    def pubrec(self, packet_id: int) -> None:
        if self.member is not None and self.member.pubrec(packet_id):
            return
        due = self.out.pubrec(packet_id)
        if due is None:
            self.peer.write(PUBREL_HEAD + PACKET_ID[packet_id])
        elif due:
            if not self._joined:
                self.join(lazy=True)
            self.committer.hurry_soon()

    def refused(self, packet_id: int) -> None:
        if self.member is not None and self.member.refused(packet_id):
            return
        if self.out.refused(packet_id) and not self._joined:
            self.join(lazy=True)

    def pubcomp(self, packet_id: int) -> None:
        if self.member is not None and self.member.pubcomp(packet_id):
            return
        if self.out.pubcomp(packet_id) and not self._joined:
            self.join(lazy=True)

    def turn_over(self) -> None:
        if self.sealed:
            return
        if self.out.ready:
            self._send()
        if self._walks:
            self._walk()
        self.backlog.pump_if_low()
        if self.member is not None:
            self.member.turn_over()

    def _send(self) -> None:
        out, peer = self.out, self.peer
        ready = out.ready
        publish = peer.publish
        window = out.window if self.member is None else self.member.own_window
        while ready and out.sent < window and not peer.congested:
            flight = ready[0]
            entry = flight.entry
            if entry is None:
                if out.next_ready() is not flight:
                    continue  # it was acknowledged meanwhile
                self._fetch()
                return
            options = flight.options
            if (entry.expires_ms or self._looks) and not self._may_send(flight, entry):
                continue
            if self._is_careful and self._must_wait(flight):
                return
            out.take()
            if options is PLAIN and not flight.state:  # most of them
                publish(entry, flight.qos, flight.packet_id, dup=flight.dup, retain=False)
            else:
                retain = entry.flags & RETAINED and (options.retain or flight.state & HELD)
                publish(
                    entry,
                    flight.qos,
                    flight.packet_id,
                    dup=flight.dup,
                    retain=bool(retain),
                    identifiers=options.identifiers,
                )
            flight.entry = None
            self.hub.figures.delivered += 1
        self._is_behind = bool(ready)

    def _may_send(self, flight: Flight, entry: Entry) -> bool:
        """Whether the next delivery is to be sent. If not, it is settled, and what its client
        cannot take is a dead letter.

        What may have been sent before is sent again even when its time is over: its delivery has
        begun, and is to be brought to its end [MQTT5-3.3.2-5, MQTT5-4.4.0-1].
        """
        failure = self._failure(flight, entry)
        if failure is None:
            if self._attempts_max:
                self.out.sends(flight)
            return True
        letter = None
        if failure:
            now_ms = self.hub.clock.now_ms()
            self._dead_bytes += len(entry.payload)
            erase = self._dead_bytes > DEAD_BYTES_MAX
            letter = DeadLetter(entry, failure, now_ms, flight.attempts, erase)
        self.out.drop_next(letter)
        if not self._joined:
            self.join(lazy=True)
        return False

    def _failure(self, flight: Flight, entry: Entry) -> Failure | None:
        """Why the next delivery is not to be sent: NONE = nobody misses it. None = it is."""
        if flight.dup:
            if 0 < self._attempts_max <= flight.attempts:
                self._give_up(flight)
                return Failure.UNDELIVERABLE
        elif entry.expires_ms and self.hub.is_over(entry):
            return Failure.NONE
        elif self._is_behind and not flight.state & HELD and self.hub.is_superseded(entry):
            return Failure.NONE  # it waited for the client; who keeps up gets every one
        if self.is_too_large(entry, flight.qos, flight.options.identifiers):
            return Failure.TOO_LARGE
        return None

    def _give_up(self, flight: Flight) -> None:
        self.hub.figures.undeliverable += 1
        log.warning(
            "session %r: its connection broke %d times while %s %d was under way: a dead letter",
            self.client_id,
            flight.attempts,
            "held message" if flight.state & HELD else "entry",
            flight.offset,
        )

    def _must_wait(self, flight: Flight) -> bool:
        """Whether the next delivery waits until nothing else is under way: of what was under way
        when the connection broke, one at a time, so that no other message takes the blame."""
        if flight.dup:
            return self.out.awaits
        self._is_careful = self.out.awaits and any(f.dup for f in self.out.flights.values())
        return self._is_careful

    def _fetch(self) -> None:
        if self._fetching is None:
            self._fetching = asyncio.ensure_future(self._fetch_left())
            self._fetching.add_done_callback(self.task_done)

    async def _fetch_left(self) -> None:
        """Read the messages of deliveries that an earlier connection left."""
        left: list[Flight] = []
        for flight in self.out.ready:
            if len(left) == FETCH_MAX or not flight.dup:
                break
            if flight.entry is None and not flight.state & (RECEIVED | SETTLED):
                left.append(flight)
        for flight in left:
            if flight.state & HELD:  # a held message is in the snapshot, or it is gone
                self._fetching = None
                self.lose(ResumeHistoryUnavailable(self.backlog.cursor, flight.offset))
                return
        try:
            entries = await self.hub.store.fetch([f.offset for f in left])
        except (EntryGone, EntryDamaged) as error:
            self._left_is_gone(left, error)
            return
        except StoreError as error:
            self.unavailable(error)
            return
        finally:
            self._fetching = None
        for flight, entry in zip(left, entries, strict=True):
            if not flight.state & (RECEIVED | SETTLED):
                flight.entry = entry
                flight.options = self.backlog.replay.options(entry)  # as the subscriptions are now
        if not self.sealed:
            self._send()

    def _left_is_gone(self, left: list[Flight], error: EntryGone | EntryDamaged) -> None:
        """A delivery that an earlier connection left has lost its message."""
        if self.sealed:
            return
        if self.hub.settings.on_history_pruned == "reset":
            topic = error.topic if isinstance(error, EntryDamaged) else b""
            self.lose(ResumeHistoryUnavailable(self.backlog.cursor, error.offset, topic))
            return
        for flight in left:
            if flight.offset == error.offset:
                self.out.drop(flight)
        self.hub.tell_gap(self.client_id, error.offset - 1, error.offset)
        self.join(lazy=True)
        self._send()

    # ------------------------------------------------------------------ for its backlog

    @property
    def catches_up(self) -> bool:
        return self.backlog.catches_up

    def replay(self) -> Replay:
        """A reader of its durable filters, as they are now."""
        plain = (0, 0)
        return Replay(
            self.hub.store,
            (
                Wanted(f, q, self._from.get(f, 0), *self._options.get(f, plain))
                for f, q in self.subscriptions.items()
                if not is_shared(f)
            ),
            skips=self.hub.settings.on_history_pruned == "skip",
            reader=self.client_id,
        )

    def bind(self) -> None:
        """Its position is of this generation now."""
        self.committer.submit(
            Bind(self.consumer_id, self.incarnation, self.saved_cursor), self._written
        )

    def task_done(self, task: asyncio.Task[None]) -> None:
        """Something of it that ran beside has ended."""
        if task.cancelled() or task.exception() is None:
            return
        # our own bug in one session: the client comes back and resumes from what was saved
        log.error("session %r failed", self.client_id, exc_info=task.exception())
        if not self.sealed:
            self.peer.finish(STORE)

    def unavailable(self, error: StoreError) -> None:
        """The store does not answer: close, so that the client comes back and resumes."""
        if not self.sealed:
            log.warning("session %r: cannot read (%s); closing", self.client_id, error)
            self.peer.finish(STORE)

    def lose(self, error: ResumeHistoryUnavailable) -> None:
        """What this session still has to get is gone: fence it, close, delete the record (410)."""
        if not self.sealed:
            self.hub.refuse_resume(self, error)

    # ------------------------------------------------------------------- subscriptions

    async def subscribe(self, grants: list[Grant]) -> list[int]:
        async with self._changing:
            return await self._subscribe(grants)

    async def _subscribe(self, grants: list[Grant]) -> list[int]:
        head = self.committer.last
        wanted: dict[bytes, Subscription] = {}
        for grant in grants:
            if grant.allowed:
                gives = grant.gives and grant.qos and self.hub.retained.has(grant.filter)
                options = grant.options | (WALKING if gives else 0)
                wanted[grant.filter] = Subscription(
                    grant.filter, grant.qos, head, options, grant.identifier
                )
        refused = [REFUSED if g.allowed else g.code for g in grants]
        if not wanted:
            return refused
        gained = [f for f, s in wanted.items() if s.qos and f not in self._counted]
        for topic_filter in gained:
            self._counted.add(topic_filter)
            self.hub.router.count(topic_filter, 1)  # from now on what matches is logged
        passes_over = bool(gained) and 0 in self.subscriptions.values()
        self.backlog.passes_over = passes_over
        self._gaining = tuple(gained) if passes_over else ()
        self.backlog.hold()
        try:
            if not await self._save_subscriptions(gained, tuple(wanted.values())):
                self._uncount(gained)
                return refused
            self._uncount([f for f, s in wanted.items() if not s.qos])
            self._granted_now(wanted)
            if passes_over:
                self.backlog.pass_over_qos0()
        finally:
            self.backlog.passes_over = False
            self._gaining = ()
            self.backlog.unhold()
        return [g.qos if g.allowed else g.code for g in grants]

    async def _save_subscriptions(
        self, gained: list[bytes], wanted: tuple[Subscription, ...]
    ) -> bool:
        """Whether they are stored."""
        try:
            await self.hub.shared.prepare(gained)
            if self.sealed:
                return False
            await self.committer.apply(Subscribe(self.consumer_id, self.incarnation, wanted))
        except StoreError as error:
            if isinstance(error, Fenced):
                self._refused(error)
            else:
                level = self.committer.told_level
                log.log(level, "session %r: SUBSCRIBE not saved: %s", self.client_id, error)
            return False
        return True

    def _granted_now(self, wanted: dict[bytes, Subscription]) -> None:
        for topic_filter, subscription in wanted.items():
            if not self.subscriptions.get(topic_filter):
                self._from[topic_filter] = subscription.from_offset
            self.subscriptions[topic_filter] = subscription.qos
            self._note_options(subscription)
            if not self.sealed:
                self.hub.router.attach(
                    self,
                    topic_filter,
                    subscription.qos,
                    subscription.options,
                    subscription.identifier,
                )

    def _uncount(self, filters: Sequence[bytes]) -> None:
        """The record does not have these filters any more (with QoS >= 1)."""
        for topic_filter in filters:
            if topic_filter in self._counted:
                self._counted.discard(topic_filter)
                self.hub.router.count(topic_filter, -1)

    async def unsubscribe(self, filters: list[bytes]) -> list[int]:
        async with self._changing:
            return await self._unsubscribe(filters)

    async def _unsubscribe(self, filters: list[bytes]) -> list[int]:
        if self.sealed:
            return [REFUSED] * len(filters)
        codes = [0 if f in self.subscriptions else NO_SUBSCRIPTION for f in filters]
        self.backlog.hold()
        try:
            await self.committer.apply(
                Unsubscribe(self.consumer_id, self.incarnation, tuple(filters))
            )
        except StoreError as error:
            if isinstance(error, Fenced):
                self._refused(error)
            else:
                level = self.committer.told_level
                log.log(level, "session %r: UNSUBSCRIBE not saved: %s", self.client_id, error)
            return [REFUSED] * len(filters)
        else:
            for topic_filter in filters:
                self.hub.router.detach(self, topic_filter)
                self._from.pop(topic_filter, None)
                self.subscriptions.pop(topic_filter, None)
                self._options.pop(topic_filter, None)
                self._walking.discard(topic_filter)
            self._end_walks(filters)
            self._uncount(filters)
        finally:
            self.backlog.unhold()
        return codes

    # ----------------------------------------------------------------------------- end

    def end(self, end: End) -> None:
        broke = self._attempts_max > 0 and end.blames
        first = self.out.first_awaited() if broke else None
        if type(first) is Flight:  # not one that is lent: that is its group's to blame
            self.out.blame(first)
        if self.member is not None:
            self.member.end(first, for_good=False, broke=broke)
        cursor = self.out.release_unsent()
        if cursor is not None:
            self.backlog.go_back(cursor)
        self._checkpoint |= self.backlog.at != self.saved_cursor
        if self.peer.confirmed or end is DISCONNECTED:
            self.introduce()
        self._save()
        super().end(end)
        self.committer.submit(
            Detach(
                self.consumer_id,
                self.incarnation,
                self.hub.clock.now_ms(),
                expiry_s=self.expiry_s,
                keep_expiry=False,
                qos0_after=self.backlog.qos0_through,
            ),
            self._written,
        )

    def discard(self) -> None:
        """Delete the record instead of saving it, if this incarnation still owns it."""
        self.expiry_s = 0
        super().end(REFUSED_RESUME)

        def done(outcome: Outcome) -> None:
            if isinstance(outcome, BaseException):
                self._refused(outcome)
                return
            self._uncount(list(self._counted))

        self.committer.submit(Discard(self.consumer_id, self.incarnation), done)

    def _written(self, outcome: Outcome) -> None:
        if isinstance(outcome, BaseException):
            self._refused(outcome)
