"""The record of a group in the store: it is there from the group's first durable member to its
last, and until what was sent is settled.

Everything of one batch is written by one ``Advance``. When a write changed nothing, what is in
memory is not what is stored, and the group is read again.
"""

from __future__ import annotations

import asyncio
import logging
import os
from functools import partial
from typing import TYPE_CHECKING, Final

from broker_ext.shared.backlog import QOS
from broker_ext.shared.rows import Rows
from broker_ext.topics import matches
from storage.api import (
    GROUP,
    Acquire,
    Acquired,
    Advance,
    Bind,
    Detach,
    Discard,
    Subscribe,
    Subscription,
    Unsubscribe,
)
from storage.errors import Fenced, StoreError
from storage.outbox import DeadLetter

if TYPE_CHECKING:
    from broker_ext.shared.group import Group
    from broker_ext.shared.rows import Collected
    from storage.api import Entry, Outcome, Snapshot
    from storage.outbox import Failure

__all__ = ["Record"]

log = logging.getLogger("amqtt_durable.shared")

ID_BYTES: Final = 16


class Record:
    """Of one group. durable: the group follows the history. consumer_id: 0 = there is no record.

    awaits_history: it is being made, and what is logged meanwhile will come from the history.
    """

    __slots__ = (
        "_checkpoint",
        "_group",
        "_joined",
        "_making",
        "_unindexed",
        "awaits_history",
        "client_id",
        "committer",
        "consumer_id",
        "durable",
        "incarnation",
        "rows",
        "saved_cursor",
    )

    def __init__(self, group: Group, incarnation: bytes) -> None:
        self._group = group
        self.committer = group.hub.committer
        self.client_id = GROUP
        self.incarnation = incarnation
        self.consumer_id = 0
        self.durable = False
        self.saved_cursor = 0
        self.rows = Rows()
        self.awaits_history = False
        self._joined = False
        self._checkpoint = False
        self._unindexed = False
        self._making: asyncio.Future[None] | None = None

    # ------------------------------------------------------------------ from first to last

    @property
    def is_being_made(self) -> bool:
        """A durable member is joining."""
        return self._making is not None

    async def make(self) -> None:
        """Follow the history from now on, if the group does not. Raises StoreError."""
        while self._making is not None:
            await asyncio.wait([self._making])
        if self.durable:
            return
        self._making = asyncio.get_running_loop().create_future()
        try:
            await self._make()
        finally:
            self._making.set_result(None)
            self._making = None
            if not self._group.wanted:
                self._group.forsaken()
            self.discard_if_settled()
            self._group.backlog.pump()

    async def _make(self) -> None:
        apply, group = self.committer.apply, self._group
        if not self.consumer_id:
            # random: a client id stands in the store in clear, topics may be sealed
            self.client_id = GROUP + os.urandom(ID_BYTES).hex().encode()
            acquired = await apply(
                Acquire(self.client_id, self.incarnation, GROUP, group.hub.clock.now_ms())
            )
            assert isinstance(acquired, Acquired)
            assert acquired.snapshot is not None
            self.own(acquired.snapshot)
        head = group.backlog.cursor = self.committer.last
        self.awaits_history = True
        group.hub.router.count(group.filter, 1)  # from now on what matches is logged
        try:
            follows = Subscription(group.filter, QOS, head)
            name = Subscription(group.name, 0, head)
            await apply(Subscribe(self.consumer_id, self.incarnation, (follows, name)))
        except StoreError:
            group.hub.router.count(group.filter, -1)
            self.awaits_history = False
            for entry in self.committer.since(head) or ():
                if entry.qos and matches(group.filter, entry.topic):
                    group.pass_on(entry, entry.qos)
            raise
        self.awaits_history = False
        self.follow(head)
        self.checkpoint_with(lazy=False)

    def own(self, snapshot: Snapshot) -> None:
        """It was acquired."""
        consumer = snapshot.consumer
        self.client_id = consumer.client_id
        self.consumer_id = consumer.id
        self.saved_cursor = self._group.backlog.cursor = consumer.cursor
        self.rows.begin_at(consumer.next_claim)

    def follow(self, from_offset: int) -> None:
        """The group is durable now."""
        group = self._group
        self._be_durable(durable=True)
        group.backlog.follow(from_offset)
        if group.members:
            group.hub.router.attach(group, group.filter, QOS)  # as a durable receiver now

    def _be_durable(self, *, durable: bool) -> None:
        if durable != self.durable:
            self.durable = durable
            self._group.hub.router.follow(self._group.filter, 1 if durable else -1)

    def give_up(self) -> None:
        """Nobody who could come back is a member any more."""
        if self.durable:
            self._be_durable(durable=False)
            self._group.hub.router.count(self._group.filter, -1)
            if self.rows.stored:
                self._submit(Unsubscribe(self.consumer_id, self.incarnation, (self._group.filter,)))
        self.discard_if_settled()

    def discard_if_settled(self) -> None:
        """Delete it, when nothing needs it any more."""
        is_over = not (self.durable or self.rows.stored or self._making)
        if self.consumer_id and is_over:
            if self.rows.has_letters:
                self._save()
            self._submit(Discard(self.consumer_id, self.incarnation))
            self.consumer_id = 0
            self.rows.forget()

    def abandon(self) -> None:
        """Another object goes on with it."""
        self._be_durable(durable=False)
        self.consumer_id = 0

    def leave(self) -> None:
        """The broker stops."""
        if self.consumer_id:
            self._checkpoint = True
            self._save()
            now_ms = self._group.hub.clock.now_ms()
            self._submit(Detach(self.consumer_id, self.incarnation, now_ms))
            self.consumer_id = 0  # nothing more is written

    def bind(self) -> None:
        """Everything behind the cursor was offered: it is of this generation."""
        self._submit(Bind(self.consumer_id, self.incarnation, self.saved_cursor))

    def _submit(self, op: Discard | Unsubscribe | Detach | Bind) -> None:
        def done(outcome: Outcome) -> None:
            if isinstance(outcome, BaseException):
                log.warning("group %r: %s", self._group.name, outcome)

        self.committer.submit(op, done)

    # ----------------------------------------------------------------------------- saving

    def join(self, *, lazy: bool) -> None:
        """Have ``collect`` called when the open batch is closed."""
        if not self.consumer_id:
            return
        if not self._joined or not lazy:
            self._joined = True
            self.committer.join(self, lazy=lazy)

    def collect(self) -> None:
        """Add what is to be written to the open batch (the committer asks)."""
        self._joined = False
        if self.consumer_id:
            self._save()

    def checkpoint_with(self, *, lazy: bool) -> None:
        """Have the position saved, too."""
        self._checkpoint = True
        self.join(lazy=lazy)

    def checkpoint(self) -> None:
        """Bring the stored position up to what was dispatched, if it is behind."""
        if self._group.backlog.at != self.saved_cursor or self._joined or self._unindexed:
            self.checkpoint_with(lazy=True)

    def bury(self, entry: Entry, failure: Failure, attempts: int) -> None:
        """A message is a dead letter; one from memory is only counted."""
        if entry.offset and self.consumer_id:
            now_ms = self._group.hub.clock.now_ms()
            self.rows.bury(DeadLetter(entry, failure, now_ms, attempts))
            self.join(lazy=True)

    def _save(self) -> None:
        collected = self.rows.collect()
        cursor = self._group.backlog.at
        checkpoint, self._checkpoint = self._checkpoint, False
        if collected.is_empty and not checkpoint:
            return
        self.committer.submit(
            Advance(
                self.consumer_id,
                self.incarnation,
                cursor=cursor if self.durable else None,
                claims=collected.claims,
                settled=collected.settled,
                checkpoint=checkpoint,
                dead=collected.letters,
            ),
            partial(self._saved, self.consumer_id, collected),
        )
        self.saved_cursor = cursor
        self._unindexed = not checkpoint

    def _saved(self, consumer_id: int, collected: Collected, outcome: Outcome) -> None:
        if isinstance(outcome, BaseException):
            self._refused(consumer_id, outcome)
        else:
            self._group.committed(collected)

    def _refused(self, consumer_id: int, outcome: BaseException) -> None:
        """A write changed nothing: what is in memory is not what is stored. Read it again."""
        group = self._group
        if isinstance(outcome, Fenced):
            group.hub.figures.fenced += 1
        log.error("group %r: %s; it is read again", group.name, outcome)
        if consumer_id == self.consumer_id and not group.hub.refusing:
            group.shared.reload(group)
