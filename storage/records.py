"""What is stored for one consumer, as bytes. All numbers are big-endian.

    CONSUMER      +0  u8 version = 2, u8 MQTT level, u16 next_packet_id,
                  +4  16s incarnation, 16s generation, u64 cursor, next_claim, next_held,
                      expiry_s, detached_ms, created_ms, indexed, needed_from, durable,
                      qos0_after (not in version 1), u16 user_bytes, user, client id, u32 crc
    CLAIM         u8 version = 1, or 2 and u64 member; deliveries of 13 bytes (u64 offset, u16
                  packet id, u8 qos, u8 state, u8 attempts), u32 crc
    SUBSCRIPTION  u8 version = 1, u8 qos, u8 options, u32 identifier, u64 from_offset, filter,
                  u32 crc
    WILL          u8 version = 3, u32 delay_s, u64 due_ms, u64 number, u16 client_bytes,
                  u16 user_bytes, client id, user, message (storage.blocks), u32 crc;
                  version 2 has no number, version 1 no due_ms either

Each crc is a CRC-32 of what stands before it, begun with its key's numbers. A cursor or a packet
id that changed by itself would lose messages without a word; so a record that fails its crc is
refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from struct import Struct
from struct import error as StructError  # noqa: N812 - it is a class
from typing import TYPE_CHECKING, Final
from zlib import crc32

from storage.api import CLAIM_DELIVERIES_MAX, HELD, Claim, Consumer, Delivery, Subscription, Will
from storage.blocks import Damage, decode_message, encode_message
from storage.errors import RecordDamaged

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "NONE",
    "Record",
    "decode_claim",
    "decode_subscription",
    "decode_will",
    "encode_claim",
    "encode_subscription",
    "encode_will",
    "lowest_unsettled",
]

NONE: Final = 0xFFFF_FFFF_FFFF_FFFF
"""Stands for None in a u64."""

_VERSION: Final = 1
_OF_MEMBER: Final = 2
_WILL_VERSION: Final = 3
_CONSUMER_VERSION: Final = 2
_MASK: Final = 0xFFFFFFFF
_CRC: Final = Struct(">I")
_CONSUMER_1: Final = Struct(">BBH16s16sQQQQQQQQQH")
_CONSUMER: Final = Struct(">BBH16s16sQQQQQQQQQQH")
_DELIVERY: Final = Struct(">QHBBB")
_MEMBER: Final = Struct(">BQ")
_SUBSCRIPTION: Final = Struct(">BBBIQ")
_WILL_1: Final = Struct(">BIHH")
_WILL_2: Final = Struct(">BIQHH")
_WILL: Final = Struct(">BIQQHH")


def _sealed(packed: bytes, begun: int) -> bytes:
    return packed + _CRC.pack(crc32(packed, begun & _MASK))


def _opened(
    raw: bytes, begun: int, consumer_id: int, versions: tuple[int, ...] = (_VERSION,)
) -> bytes:
    """What a crc stands behind. Raises RecordDamaged."""
    packed = raw[:-4]
    if not packed or packed[0] not in versions or _sealed(packed, begun) != raw:
        raise RecordDamaged(consumer_id)
    return packed


@dataclass(slots=True)
class Record:
    """A consumer as the writer works on it; ``consumer`` is how the outside sees it.

    indexed: its row in Space.POSITION, NONE = it has none.
    needed_from: lowest from_offset of its durable subscriptions, or lower. durable: how many these
        are.
    """

    id: int
    client_id: bytes
    user: bytes
    incarnation: bytes
    generation: bytes
    cursor: int
    next_claim: int = 1
    next_held: int = 1
    next_packet_id: int = 1
    expiry_s: int = NONE
    detached_ms: int = 0
    created_ms: int = 0
    version: int = 4
    indexed: int = NONE
    needed_from: int = 0
    durable: int = 0
    qos0_after: int = 0

    @property
    def consumer(self) -> Consumer:
        """As an immutable value."""
        return Consumer(
            id=self.id,
            client_id=self.client_id,
            user=self.user,
            incarnation=self.incarnation,
            generation=self.generation.hex(),
            cursor=self.cursor,
            next_claim=self.next_claim,
            next_held=self.next_held,
            next_packet_id=self.next_packet_id,
            expiry_s=None if self.expiry_s == NONE else self.expiry_s,
            detached_ms=self.detached_ms,
            created_ms=self.created_ms,
            version=self.version,
            qos0_after=self.qos0_after,
        )

    @property
    def deadline_ms(self) -> int | None:
        """When it expires; None = not while it is attached, or never."""
        if self.detached_ms == 0 or self.expiry_s == NONE:
            return None
        return self.detached_ms + self.expiry_s * 1000

    def pack(self) -> bytes:
        """As stored."""
        packed = _CONSUMER.pack(
            _CONSUMER_VERSION,
            self.version,
            self.next_packet_id,
            self.incarnation,
            self.generation,
            self.cursor,
            self.next_claim,
            self.next_held,
            self.expiry_s,
            self.detached_ms,
            self.created_ms,
            self.indexed,
            self.needed_from,
            self.durable,
            self.qos0_after,
            len(self.user),
        )
        return _sealed(packed + self.user + self.client_id, self.id)

    @classmethod
    def unpack(cls, consumer_id: int, raw: bytes) -> Record:
        """Raises RecordDamaged."""
        packed = _opened(raw, consumer_id, consumer_id, (_VERSION, _CONSUMER_VERSION))
        layout = _CONSUMER_1 if packed[0] == _VERSION else _CONSUMER
        (
            _,
            version,
            next_packet_id,
            incarnation,
            generation,
            cursor,
            next_claim,
            next_held,
            expiry_s,
            detached_ms,
            created_ms,
            indexed,
            needed_from,
            durable,
            *later,
            user_bytes,
        ) = layout.unpack_from(packed)
        split = layout.size + user_bytes
        return cls(
            consumer_id,
            packed[split:],
            packed[layout.size : split],
            incarnation,
            generation,
            cursor,
            next_claim,
            next_held,
            next_packet_id,
            expiry_s,
            detached_ms,
            created_ms,
            version,
            indexed,
            needed_from,
            durable,
            *later,
        )


@lru_cache(maxsize=CLAIM_DELIVERIES_MAX)
def _claim(count: int) -> Struct:
    return Struct(">B" + "QHBBB" * count)


def encode_claim(consumer_id: int, claim: Claim) -> bytes:
    """One row, however many deliveries; a claim above CLAIM_DELIVERIES_MAX is a caller's bug."""
    deliveries = claim.deliveries
    assert len(deliveries) <= CLAIM_DELIVERIES_MAX, "a claim is too large"
    packed = _claim(len(deliveries)).pack(_VERSION, *chain.from_iterable(deliveries))
    if claim.member:
        packed = _MEMBER.pack(_OF_MEMBER, claim.member) + packed[1:]
    return _sealed(packed, consumer_id ^ claim.number)


def decode_claim(consumer_id: int, number: int, raw: bytes) -> Claim:
    """Raises RecordDamaged."""
    packed = _opened(raw, consumer_id ^ number, consumer_id, (_VERSION, _OF_MEMBER))
    member, at = 0, 1
    if packed[0] == _OF_MEMBER:
        _, member = _MEMBER.unpack_from(packed)
        at = _MEMBER.size
    return Claim(number, tuple(map(Delivery._make, _DELIVERY.iter_unpack(packed[at:]))), member)


def lowest_unsettled(claims: Iterable[Claim]) -> int:
    """Lowest offset of the deliveries from the history, NONE = there are none."""
    return min(
        (
            delivery.offset
            for claim in claims
            for delivery in claim.deliveries
            if not delivery.state & HELD
        ),
        default=NONE,
    )


def encode_subscription(consumer_id: int, sub: Subscription) -> bytes:
    """As stored."""
    packed = _SUBSCRIPTION.pack(_VERSION, sub.qos, sub.options, sub.identifier, sub.from_offset)
    return _sealed(packed + sub.filter, consumer_id)


def decode_subscription(consumer_id: int, raw: bytes) -> Subscription:
    """Raises RecordDamaged."""
    packed = _opened(raw, consumer_id, consumer_id)
    _, qos, options, identifier, from_offset = _SUBSCRIPTION.unpack_from(packed)
    return Subscription(packed[_SUBSCRIPTION.size :], qos, from_offset, options, identifier)


def encode_will(will: Will) -> bytes:
    """As stored; the incarnation is its key."""
    sizes = len(will.client_id), len(will.user)
    packed = _WILL.pack(_WILL_VERSION, will.delay_s, will.due_ms, will.number, *sizes)
    body = packed + will.client_id + will.user + encode_message(will.message)
    return _sealed(body, crc32(will.incarnation))


def decode_will(incarnation: bytes, raw: bytes) -> Will:
    """Raises RecordDamaged."""
    packed = _opened(raw, crc32(incarnation), 0, (_VERSION, 2, _WILL_VERSION))
    due_ms = number = 0
    try:
        if packed[0] == 1:
            layout = _WILL_1
            _, delay_s, client_bytes, user_bytes = layout.unpack_from(packed)
        elif packed[0] == 2:
            layout = _WILL_2
            _, delay_s, due_ms, client_bytes, user_bytes = layout.unpack_from(packed)
        else:
            layout = _WILL
            _, delay_s, due_ms, number, client_bytes, user_bytes = layout.unpack_from(packed)
        user_at = layout.size + client_bytes
        message_at = user_at + user_bytes
        message = decode_message(packed[message_at:])
    except (Damage, StructError):
        raise RecordDamaged(0) from None
    client_id, user = packed[layout.size : user_at], packed[user_at:message_at]
    return Will(client_id, incarnation, user, message, delay_s, due_ms, number)
