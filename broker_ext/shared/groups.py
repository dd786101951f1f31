"""All shared subscriptions of a broker: which groups there are, and who is a member of them.

A member's subscription is stored with its session, under the whole filter ``$share/GROUP/filter``,
and counted by the store; a group that is durable has a record of its own. At start all these
records are acquired in one commit.

Rule 1. A group has its record before its first durable member has its SUBACK (``prepare``).
Rule 2. A record whose last member is gone goes too; what a crash leaves is found at start.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING, Final

from broker_ext.options import options_of
from broker_ext.resume import Verdict, verdict
from broker_ext.shared.group import Group
from broker_ext.shared.member import Member
from broker_ext.wire import valid_filter
from storage.api import GROUP, INCARNATION_BYTES, Acquire, Acquired, Discard
from storage.errors import RecordDamaged, StoreError
from storage.names import is_shared

if TYPE_CHECKING:
    from collections.abc import Iterable

    from broker_ext.hub import Hub
    from broker_ext.session import Session
    from broker_ext.shared.handed import Handed
    from storage.api import Entry, LogState, Snapshot

__all__ = ["Shared", "filter_of"]

log = logging.getLogger("amqtt_durable.shared")

PAGE: Final = 1000


def filter_of(name: bytes) -> bytes | None:
    """The topic filter behind ``$share/GROUP/filter``, None if that is malformed: GROUP has a
    character, and neither '+' nor '#' [MQTT-4.8.2-1, MQTT-4.8.2-2].

    >>> filter_of(b"$share/workers/jobs/#")
    b'jobs/#'
    """
    _, group, *rest = name.split(b"/", 2)
    if not group or b"+" in group or b"#" in group or not rest or not valid_filter(rest[0]):
        return None
    return rest[0]


class Shared:
    """One object for each broker."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.incarnation = os.urandom(INCARNATION_BYTES)
        """Of all groups' records: their owner is this run of the broker."""
        self.groups: dict[bytes, Group] = {}
        self.counts: dict[bytes, int] = {}
        """name -> durable sessions that are members with QoS >= 1."""
        self._left: dict[int, dict[Handed, None]] = {}
        self._reloading: set[asyncio.Task[None]] = set()

    # ---------------------------------------------------------------------------- at start

    async def load(self) -> None:
        """Acquire the records of all groups, and take over what the last run left. Raises
        StoreError."""
        records = await self._records()
        for outcome in await asyncio.gather(*map(self._acquire_if_sound, records)):
            if outcome is not None:
                assert outcome.snapshot is not None
                await self._take_over(outcome.snapshot, outcome.log)
        for name in self.counts.keys() - self.groups.keys():
            # damaged, or a repair left it out: what it had not had is not known any more
            self._tell_reset(name, "record-missing", None)
            await self._group(name).record.make()

    async def _records(self) -> list[bytes]:
        found: list[bytes] = []
        after = GROUP[:-1]
        while True:
            page = await self.hub.store.consumers(after, PAGE)
            records = [c.client_id for c in page if c.client_id.startswith(GROUP)]
            found += records
            if len(records) < PAGE:
                return found
            after = records[-1]

    async def _acquire(self, client_id: bytes) -> Acquired:
        outcome = await self.hub.committer.apply(
            Acquire(client_id, self.incarnation, GROUP, self.hub.clock.now_ms())
        )
        assert isinstance(outcome, Acquired)
        return outcome

    async def _acquire_if_sound(self, client_id: bytes) -> Acquired | None:
        try:
            return await self._acquire(client_id)
        except RecordDamaged as error:
            # no traceback: it says nothing about the disk; the others go on
            log.error("a group cannot be read: %s; see amqtt-durable check", error)  # noqa: TRY400
            return None

    async def _take_over(self, snapshot: Snapshot, state: LogState) -> None:
        """Check a group's position as that of a session, and go on."""
        name = next((s.filter for s in snapshot.subscriptions if is_shared(s.filter)), b"")
        if not name or name in self.groups:  # a crash left it, half made
            await self._discard(snapshot)
            return
        group = self._group(name)
        finding = verdict(
            snapshot,
            state,
            on_generation_change=self.hub.settings.on_generation_change,
            on_history_pruned="skip",  # nobody could be told; what is left is better than nothing
        )
        if finding.verdict is Verdict.RESET:
            self._tell_reset(name, finding.reason, finding.error)
            await self._discard(snapshot)
            if self.counts.get(name):
                await group.record.make()
            else:
                self.forget(group)
            return
        if finding.verdict is Verdict.REBIND:
            self.hub.figures.rebound += 1
            log.warning("group %r: %s; it goes on unchecked", name, finding.error)
        group.backlog.unbound = finding.verdict is Verdict.REBIND
        group.restore(snapshot)
        if snapshot.loss is not None:
            group.backlog.skip(snapshot.loss.pruned_through)

    async def _discard(self, snapshot: Snapshot) -> None:
        for subscription in snapshot.subscriptions:
            if subscription.qos:
                self.hub.router.count(subscription.filter, -1)
        await self.hub.committer.apply(Discard(snapshot.consumer.id, self.incarnation))

    def _tell_reset(self, name: bytes, reason: str, error: object) -> None:
        resets = self.hub.figures.resets
        resets[reason] = resets.get(reason, 0) + 1
        log.warning("group %r begins again at the end of the history: %s", name, error or reason)

    def reload(self, group: Group) -> None:
        """What is in memory is not what is stored: read it again."""
        task = asyncio.ensure_future(self._reload(group))
        self._reloading.add(task)
        task.add_done_callback(self._reloading.discard)

    async def _reload(self, group: Group) -> None:
        name, client_id = group.name, group.record.client_id
        was_durable, joined = group.durable, dict(group.members)
        sessions = self.hub.registry.owners.values()
        members = [session.member for session in sessions if session.member is not None]
        group.abandon(members)
        self.forget(group)
        try:
            outcome = await self._acquire(client_id)
            assert outcome.snapshot is not None
            follows = any(s.filter == group.filter for s in outcome.snapshot.subscriptions)
            self.hub.router.count(group.filter, follows - was_durable)
            await self._take_over(outcome.snapshot, outcome.log)
            if self.counts.get(name):
                await self._group(name).record.make()
        except StoreError as error:
            # no traceback: the store has said why, and its members' next SUBSCRIBE tries again
            log.error("group %r cannot be read: %s", name, error)  # noqa: TRY400
            return
        for member in members:
            if not member.ended:
                self._give_back(member)
        for member, (qos, options) in joined.items():
            if not member.ended:
                self._group(name).join(member, qos, options)

    # ---------------------------------------------------------------------------- groups

    def _group(self, name: bytes) -> Group:
        group = self.groups.get(name)
        if group is None:
            topic_filter = filter_of(name)
            assert topic_filter is not None, "a malformed filter was granted"
            group = self.groups[name] = Group(self, self.hub, name, topic_filter)
        return group

    def forget(self, group: Group) -> None:
        """Nobody is a member any more."""
        if self.groups.get(group.name) is group:
            del self.groups[group.name]

    def count(self, name: bytes, change: int) -> None:
        """A durable session got (+1) or lost (-1) this subscription with QoS >= 1."""
        count = self.counts.get(name, 0) + change
        assert count >= 0, "a shared filter was released more often than taken"
        if count:
            self.counts[name] = count
            return
        self.counts.pop(name, None)
        group = self.groups.get(name)
        if group is not None:
            group.forsaken()

    async def prepare(self, filters: Iterable[bytes]) -> None:
        """Make the groups of a durable session's new subscriptions durable. Raises StoreError."""
        for name in filters:
            if is_shared(name):
                await self._group(name).record.make()

    def taker(self, client_id: bytes, message: Entry) -> tuple[Session | None, int]:
        """Who of the group with this record may hold a message that was a dead letter, and the QoS
        it was granted; None = nobody now."""
        for group in self.groups.values():
            if group.record.client_id == client_id:
                passing = [
                    m for m, (qos, _) in group.members.items() if not (qos and m.consumer_id)
                ]
                member, _ = group.turns.choose(message, passing)
                if member is not None:
                    return member.session, group.members[member].qos
        return None, 0

    # --------------------------------------------------------------------------- members

    def attach(
        self, session: Session, name: bytes, qos: int, options: int, identifier: int
    ) -> None:
        """A connected session is a member."""
        if session.member is None:
            session.member = Member(session)
        self._group(name).join(session.member, qos, options_of(options, identifier))

    def detach(self, session: Session, name: bytes) -> None:
        """It is no longer; harmless if it was not."""
        group = self.groups.get(name)
        if group is not None and session.member is not None:
            group.leave(session.member)

    def left(self, consumer_id: int, flight: Handed) -> None:
        """A delivery was with a durable session that is not connected."""
        flight.left_by = consumer_id
        self._left.setdefault(consumer_id, {})[flight] = None

    def handed_on(self, flight: Handed) -> None:
        """It is with somebody else, or over."""
        of_member = self._left.get(flight.left_by)
        if of_member is not None:
            of_member.pop(flight, None)
            if not of_member:
                del self._left[flight.left_by]
        flight.left_by = 0

    def returned(self, session: Session) -> None:
        """A durable session is connected: what was with it goes on, in its order."""
        if session.consumer_id in self._left:
            if session.member is None:
                session.member = Member(session)
            self._give_back(session.member)

    def _give_back(self, member: Member) -> None:
        for flight in self._left.pop(member.consumer_id, {}):
            flight.left_by = 0
            flight.group.take_back(flight, member)
        member.turn_over()

    def ended(self, consumer_id: int) -> None:
        """A session is over: what it may have had with QoS 2 is for nobody else [MQTT-4.8.2-5]."""
        for flight in self._left.pop(consumer_id, {}):
            flight.left_by = 0
            if not flight.is_loose:
                flight.group.settle(flight)

    # --------------------------------------------------------------------------- the hub

    def checkpoint(self) -> None:
        """Bring stored positions up to date (the hub's timer)."""
        for group in list(self.groups.values()):
            group.checkpoint()

    def stop(self) -> None:
        """Save the positions, at the end of the broker."""
        for group in list(self.groups.values()):
            group.stop()
