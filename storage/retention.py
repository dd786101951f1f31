"""Retention: deleting history from the old end, and knowing afterwards what was lost.

Whole blocks are deleted; the floor may lie inside one, and what is at or below it is gone all the
same. For each topic that lost something its last deleted offset is kept, its *mark*; what had
expired by then was lost to nobody, and leaves none. A topic per message can be invented, so marks
are bounded: above ``marks_max`` the lowest fold into the *coarse* floor, and topics that have
nothing else left are forgotten. The lowest go first whether
their topic has entries left or not: a mark at or below the coarse floor says nothing more.

Rule 1. Marks, the coarse floor and the floor only rise, in the transaction that deletes. What is
        pruned is at or below the floor; a mark or a coarse floor above it tells of what was
        damaged and is gone (storage.repair).
Rule 2. A consumer above all three lost nothing, and is asked no more.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from storage.api import Loss, Prune, Pruned
from storage.blocks import Block, Damage
from storage.kv import U64, ReadTxn, Space, WriteTxn, get_u64
from storage.names import key_of, literal_prefix, topic_id
from storage.topics import UNKNOWN, forget, is_in

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from storage.history import History
    from storage.meta import Ends

__all__ = ["Marks", "low_water", "prune"]


def low_water(txn: ReadTxn, ends: Ends) -> int:
    """No consumer needs what is at or below this offset."""
    for key, _ in txn.scan(Space.POSITION):
        return min(int.from_bytes(key[:8], "big"), ends.head)
    return ends.head


class Marks:
    """What was lost, as one transaction sees it."""

    def __init__(self, txn: ReadTxn, ends: Ends) -> None:
        self._txn = txn
        self._ends = ends

    def loss(
        self,
        after: int,
        filters: Sequence[bytes],
        is_missed: Callable[[bytes, int], bool],
    ) -> Loss | None:
        """The highest pruned entry above ``after`` that would have been received.

        is_missed: (topic, pruned offset) -> whether it would. Topic b"" = one that was forgotten.
        filters: behind ``is_missed``, so that exact ones are looked up; empty = not known.
        """
        if after >= self._ends.floor and not self._is_below_damage(after):
            return None
        found = None
        if self._ends.coarse > after and is_missed(b"", self._ends.coarse):
            found = Loss(b"", self._ends.coarse)
            after = self._ends.coarse
        return self._highest(after, filters, is_missed) or found

    def _highest(
        self, after: int, filters: Sequence[bytes], is_missed: Callable[[bytes, int], bool]
    ) -> Loss | None:
        literals = [literal_prefix(topic_filter) for topic_filter in filters]
        if literals and all(is_exact for _, is_exact in literals):
            lost = [self._mark(topic) for topic, _ in literals]
            missed = [loss for loss in lost if loss.pruned_through > after and is_missed(*loss)]
            return max(missed, key=lambda loss: loss.pruned_through, default=None)
        start = U64.pack(after + 1)
        for key, _ in self._txn.scan(Space.MARK_ORDER, start, reverse=True):
            topic = self._txn.get(Space.TOPIC_NAME, key[8:]) or b""
            loss = Loss(topic, int.from_bytes(key[:8], "big"))
            if is_missed(*loss):
                return loss
        return None

    def _is_below_damage(self, after: int) -> bool:
        """Whether something above ``after`` is gone though it is above the floor."""
        if after < self._ends.coarse:
            return True
        for key, _ in self._txn.scan(Space.MARK_ORDER, reverse=True):
            return after < int.from_bytes(key[:8], "big")
        return False

    def _mark(self, topic: bytes) -> Loss:
        number = topic_id(self._txn, topic)
        mark = None if number is None else get_u64(self._txn, Space.MARK, U64.pack(number))
        return Loss(topic, mark or 0)


# ------------------------------------------------------------------------------------ pruning


def prune(txn: WriteTxn, history: History, op: Prune) -> Pruned:
    """See storage.api.Prune."""
    pruning = _Pruning(txn, history, op)
    more = pruning.run()
    pruning.mark_topics()
    _fold(txn, history, op.marks_max)
    return Pruned(history.ends.floor, pruning.blocks, pruning.payload_bytes, more)


class _Pruning:
    """One Prune. lost: topic id -> its last offset that goes, but for those that had expired (0 =
    all had). last_first: of the last block."""

    def __init__(self, txn: WriteTxn, history: History, op: Prune) -> None:
        self._txn = txn
        self._history = history
        self._ends = history.ends
        self._op = op
        self._lost: dict[int, int] = {}
        self._last_first = 0
        self._touched = 0
        self.blocks = 0
        self.payload_bytes = 0

    def run(self) -> bool:
        """Delete blocks; whether more could be deleted."""
        ends = self._ends
        through = min(self._op.through, ends.head)
        unneeded = low_water(self._txn, ends)
        if max(through, unneeded) > ends.indexed or self._op.older_than_ms or self._is_too_large():
            self._history.tail.index(self._txn, ends)
        while (row := next(self._txn.scan(Space.HISTORY), None)) is not None:
            key, raw = row
            block = _Old(self._txn, self._history, key, raw, self._op.now_ms)
            is_old = block.stored_ms < self._op.before_ms
            is_too_old = block.stored_ms < self._op.older_than_ms
            is_forced = block.last <= through or is_too_old or self._is_too_large()
            if not is_forced and not (block.last <= unneeded and is_old):
                if through > ends.floor:
                    self._note(block.last_of_topics(through))
                    ends.floor = through
                return False
            if self.blocks == self._op.blocks_max or self._touched > self._op.topics_max:
                return True
            lost = block.last_of_topics(block.last)
            self._note(lost)
            self._touched += len(lost)
            if not lost:  # nobody can tell whose entries these were
                ends.coarse = max(ends.coarse, block.last)
            self._last_first = block.first
            self._txn.delete(Space.HISTORY, key)
            self.blocks += 1
            self.payload_bytes += block.body_bytes
            ends.blocks -= 1
            ends.bytes -= len(raw)
            ends.floor = max(ends.floor, block.last)
        return False

    def _note(self, lost: dict[int, int]) -> None:
        for number, offset in lost.items():
            self._lost[number] = max(self._lost.get(number, 0), offset)

    def _is_too_large(self) -> bool:
        return 0 < self._op.bytes_max < self._ends.bytes

    def mark_topics(self) -> None:
        """Raise the marks of the topics that lost something, and shorten their index, once each."""
        forget(self._txn, (UNKNOWN, *self._lost), self._last_first)
        for number, offset in self._lost.items():
            packed_id = U64.pack(number)
            if not offset:
                _forget_if_empty(self._txn, self._history, packed_id)
                continue
            before = self._txn.get(Space.MARK, packed_id)
            if before is None:
                self._ends.marks += 1
            elif int.from_bytes(before, "big") >= offset:
                continue  # it tells of damage above
            else:
                self._txn.delete(Space.MARK_ORDER, before + packed_id)
            self._txn.put(Space.MARK, packed_id, U64.pack(offset))
            self._txn.put(Space.MARK_ORDER, U64.pack(offset) + packed_id, b"")


class _Old:
    """A block at the old end, damaged or not."""

    def __init__(self, txn: ReadTxn, history: History, key: bytes, raw: bytes, now_ms: int) -> None:
        self._txn = txn
        self._tail = history.tail
        self._now_ms = now_ms
        self.first = int.from_bytes(key, "big")
        self._block: Block | None = None
        try:
            self._block = block = Block(self.first, raw)
        except Damage:
            following = next(txn.scan(Space.HISTORY, U64.pack(self.first + 1)), None)
            self.last = int.from_bytes(following[0], "big") - 1 if following else history.ends.head
            self.stored_ms = 0
            self.body_bytes = len(raw)
        else:
            self.last = block.last
            self.stored_ms = block.stored_ms
            self.body_bytes = block.body_bytes

    def last_of_topics(self, through: int) -> dict[int, int]:
        """Topic id -> its last offset at or below ``through`` that had not expired, 0 = none.

        Of a block that tells nothing the index knows the topics (slow), and each is taken to have
        lost its last entry.
        """
        if self._block is None:
            ids = [int.from_bytes(key, "big") for key, _ in self._txn.scan(Space.TOPIC_NAME)]
            last = min(through, self.last)
            return {number: last for number in ids if is_in(self._txn, number, self.first)}
        found: dict[int, int] = {}
        for topic, offset in self._block.last_of_topics(through, self._now_ms).items():
            number = self._tail.id_of(self._txn, topic)
            if number is not None:  # a name that is only an origin, in a damaged table
                found[number] = offset
        return found


def _fold(txn: WriteTxn, history: History, marks_max: int) -> None:
    """Fold the lowest marks into the coarse floor, and forget topics that have nothing left."""
    ends = history.ends
    excess = max(0, ends.marks - marks_max)
    for key, _ in list(islice(txn.scan(Space.MARK_ORDER), excess)):
        packed_id = key[8:]
        txn.delete(Space.MARK_ORDER, key)
        txn.delete(Space.MARK, packed_id)
        ends.marks -= 1
        ends.coarse = max(ends.coarse, int.from_bytes(key[:8], "big"))
        _forget_if_empty(txn, history, packed_id)


def _forget_if_empty(txn: WriteTxn, history: History, packed_id: bytes) -> None:
    """Forget a topic that has neither entries nor a mark."""
    following = U64.pack(int.from_bytes(packed_id, "big") + 1)
    if txn.get(Space.MARK, packed_id) is None and (
        next(txn.scan(Space.TOPIC_INDEX, packed_id, following), None) is None
    ):
        name = txn.get(Space.TOPIC_NAME, packed_id)
        assert name is not None, "a topic has a name"
        txn.delete(Space.TOPIC, key_of(name))
        txn.delete(Space.TOPIC_NAME, packed_id)
        history.tail.forget(name)
