"""Who of a group gets the next message: whoever has most room in its window, in turn among equals;
or, where topics stay with a member (``shared_order: topic``), the one that has unsettled messages
of the topic, as long as it has room.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from broker_ext.session import publish_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from broker_ext.options import Options
    from broker_ext.shared.handed import Handed
    from broker_ext.shared.member import Member
    from storage.api import Entry

__all__ = ["Holder", "Joined", "Turns"]

LOOK_MAX: Final = 16
"""Members that are looked at for one message, in turn; more only if none of these has room."""


class Joined(NamedTuple):
    """What a member asked for."""

    qos: int
    options: Options


class Holder:
    """The member that a topic stays with."""

    __slots__ = ("member", "topic", "unsettled")

    def __init__(self, topic: bytes, member: Member) -> None:
        self.topic = topic
        self.member = member
        self.unsettled = 0


class Turns:
    """The connected members of one group, and whose turn it is. by_topic: topics stay."""

    __slots__ = ("_by_topic", "_line", "members", "topics")

    def __init__(self, *, by_topic: bool) -> None:
        self.members: dict[Member, Joined] = {}
        self.topics: dict[bytes, Holder] = {}
        self._line: list[Member] = []
        self._by_topic = by_topic

    def come(self, member: Member, joined: Joined) -> None:
        """A member is connected, and the next one; or asks for something else than before."""
        if member not in self.members:
            self._line.insert(0, member)
        self.members[member] = joined

    def go(self, member: Member) -> bool:
        """A member is gone. False: it was none."""
        if self.members.pop(member, None) is None:
            return False
        self._line.remove(member)
        return True

    @property
    def has_room(self) -> bool:
        """Whether anybody may take a message now."""
        return any(
            member.places > 0 or (joined.qos == 0 and member.is_open)
            for member, joined in self.members.items()
        )

    def choose(self, entry: Entry, refused: Sequence[Member] = ()) -> tuple[Member | None, bool]:
        """Who gets a message, of those who are not ``refused``. None: no one has room now; and
        whether anybody could take it at all."""
        best: Member | None = None
        most = 0
        fits = not self._line
        if self._by_topic:
            holder = self.topics.get(entry.topic)
            if holder is not None and holder.member in self.members:
                member = holder.member
                if member not in refused and self.places(member, entry) > 0:
                    return member, True
        zero: Member | None = None
        for looked, member in enumerate(self._line):
            if looked >= LOOK_MAX and best is not None:
                break
            if member in refused:
                continue
            places = self.places(member, entry)
            if places < 0:
                continue
            fits = True
            if min(entry.qos, self.members[member].qos) == 0:
                if places and best is None and zero is None:
                    zero = member  # it has no window to compare: its turn decides
            elif places > most:
                best, most = member, places
        return zero or best, fits

    def places(self, member: Member, entry: Entry) -> int:
        """Free places for a message; -1 = the client takes no packet that large."""
        joined = self.members[member]
        qos = min(entry.qos, joined.qos)
        bytes_max = member.session.bytes_max
        if bytes_max and publish_bytes(entry, qos, joined.options.identifiers) > bytes_max:
            return -1
        if not qos:
            return int(member.is_open)
        return max(member.places, 0)  # one that came back may have more than its window

    def had(self, member: Member) -> None:
        """It had its turn."""
        if self._line[-1] is not member:
            self._line.remove(member)
            self._line.append(member)

    def hold(self, flight: Handed, member: Member, topic: bytes) -> None:
        """From now on the topic stays with the member of this delivery, where topics do."""
        if not self._by_topic:
            return
        holder = self.topics.get(topic)
        if holder is None or holder.member is not member:
            holder = self.topics[topic] = Holder(topic, member)
        holder.unsettled += 1
        flight.holder = holder

    def let_go(self, flight: Handed) -> None:
        """A topic stays with a member for as long as that has unsettled messages of it."""
        holder, flight.holder = flight.holder, None
        if holder is not None:
            holder.unsettled -= 1
            if not holder.unsettled and self.topics.get(holder.topic) is holder:
                del self.topics[holder.topic]
