"""One delivery of a group, on its way between members."""

from __future__ import annotations

from typing import TYPE_CHECKING

from broker_ext.outbound import Flight
from storage.api import SENT

if TYPE_CHECKING:
    from broker_ext.shared.group import Group
    from broker_ext.shared.member import Member
    from broker_ext.shared.rows import Row
    from broker_ext.shared.turns import Holder
    from storage.api import Entry

__all__ = ["Handed"]


class Handed(Flight):
    """A delivery of a group. offset: below 0 for a message that is not in the history.

    member: whom it is with, None = nobody who is connected. turn: how often it was handed to
    somebody; a commit that belongs to an earlier turn says nothing any more.
    stored: the row that it is in, None = in none (yet). counted: it has a place in the window.
    holder: counts it, where topics stay with a member.
    is_loose: it waits for somebody. left_by: number of the consumer that may come back for it.
    is_suspect: it was under way when a connection broke, so it is sent alone
    (``max_delivery_attempts``).
    undurable: "received" is not committed: no PUBREL yet (P5).
    """

    __slots__ = (
        "counted",
        "group",
        "holder",
        "is_loose",
        "is_suspect",
        "left_by",
        "member",
        "stored",
        "turn",
        "undurable",
    )

    def __init__(self, group: Group, offset: int, entry: Entry | None, qos: int = 0) -> None:
        super().__init__(offset, 0, qos, SENT, entry)
        self.group = group
        self.member: Member | None = None
        self.stored: Row | None = None
        self.holder: Holder | None = None
        self.turn = 0
        self.is_loose = False
        self.is_suspect = False
        self.left_by = 0
        self.counted = False
        self.undurable = False

    @property
    def begun(self) -> bool:
        """Whether its client may have had it."""
        return self.sent or self.dup
