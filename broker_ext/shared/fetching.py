"""Messages of deliveries that an earlier connection left, read again before they are sent, or are
dead letters.

What is gone or damaged is told and given up: a group has no client whose session could be reset.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from broker_ext.outbound import SETTLED
from storage.api import RECEIVED
from storage.errors import EntryDamaged, EntryGone, StoreError

if TYPE_CHECKING:
    from broker_ext.shared.group import Group
    from broker_ext.shared.handed import Handed
    from broker_ext.shared.member import Member

__all__ = ["Fetching"]

log = logging.getLogger("amqtt_durable.shared")

FETCH_MAX: Final = 128


class Fetching:
    """What one group has to read again."""

    __slots__ = ("_group", "_task", "_wanted")

    def __init__(self, group: Group) -> None:
        self._group = group
        self._wanted: dict[Handed, None] = {}
        self._task: asyncio.Task[None] | None = None

    def ask(self, *flights: Handed) -> None:
        """Read their messages; who has them, or the backlog, is told when they are there."""
        self._wanted |= dict.fromkeys(flights)
        if self._task is None:
            self._task = asyncio.ensure_future(self._fetch())
            self._task.add_done_callback(self._group.task_done)

    def stop(self) -> None:
        """The broker stops."""
        if self._task is not None:
            self._task.cancel()

    async def _fetch(self) -> None:
        waiting: dict[Member, None] = {}
        try:
            while self._wanted:
                waiting |= dict.fromkeys(await self._fetch_some())
        except StoreError as error:
            log.warning("group %r: cannot read (%s); later", self._group.name, error)
            self._wanted.clear()
            return
        finally:
            self._task = None
        for member in waiting:
            member.turn_over()
        self._group.backlog.pump()

    async def _fetch_some(self) -> list[Member]:
        """Returns whose deliveries were read, or are lost."""
        group = self._group
        left = [*self._wanted, *group.backlog.loose[:FETCH_MAX]]
        wanted = [
            flight
            for flight in dict.fromkeys(left)
            if flight.entry is None and not flight.state & (RECEIVED | SETTLED)
        ][:FETCH_MAX]
        if not wanted:
            self._wanted.clear()
            return []
        try:
            entries = await group.hub.store.fetch([flight.offset for flight in wanted])
        except (EntryGone, EntryDamaged) as error:
            group.hub.tell_gap(group.name, error.offset - 1, error.offset)
            waiting = [f.member for f in wanted if f.member is not None]
            for flight in wanted:
                if flight.offset == error.offset:
                    self._wanted.pop(flight, None)
                    self._lose(flight)
            return waiting
        for flight, entry in zip(wanted, entries, strict=True):
            self._wanted.pop(flight, None)
            if not flight.state & (RECEIVED | SETTLED):
                flight.entry = entry
                if flight in group.undeliverable:
                    group.give_up(flight, entry)
        return [f.member for f in wanted if f.member is not None]  # it may have come back meanwhile

    def _lose(self, flight: Handed) -> None:
        """The message of a delivery is gone."""
        if flight.member is not None:
            flight.member.release(flight)
        self._group.settle(flight)
