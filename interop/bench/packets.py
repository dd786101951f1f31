"""PUBLISH packets of one topic, all of the same length, so that a chunk of them is read at once.

The payload begins with a sequence number and the publisher's time in microseconds.
"""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple

from broker_ext.wire import PACKET_ID, publish_head

__all__ = ["PACKET_IDS", "PAYLOAD_BYTES_MIN", "TWO", "BadStream", "Got", "Shape", "acks_of"]

PACKET_IDS: Final = 65_535
PAYLOAD_BYTES_MIN: Final = 16
TWO: Final = Struct(">BBH")
"""An acknowledgement: first byte, length 2, packet id."""

_STAMP: Final = Struct(">QQ")


class BadStream(Exception):
    """The broker sent something that is not expected here."""


class Got(NamedTuple):
    """A PUBLISH. first: its first byte. stamp_us: the publisher's monotonic clock."""

    first: int
    packet_id: int
    sequence: int
    stamp_us: int


class Shape:
    """What the packets of one topic look like.

    qos: 1 or 2. payload_bytes: with sequence number and time, from PAYLOAD_BYTES_MIN; the length
    of the packet has to fit one byte.
    """

    def __init__(self, topic: bytes, qos: int, payload_bytes: int) -> None:
        self.topic = topic
        self.qos = qos
        self._head = publish_head(0x30 | qos << 1, topic, 2 + payload_bytes)
        self._pad = b"x" * (payload_bytes - PAYLOAD_BYTES_MIN)
        self.packet_bytes = len(self._head) + 2 + payload_bytes
        self._record = Struct(f">B{len(self._head) - 1}xHQQ{len(self._pad)}x")
        self._length = self._head[1]
        assert self._length < 128, "the length takes one byte"

    def packet(self, sequence: int, stamp_us: int = 0) -> bytes:
        """Write a PUBLISH; its packet id follows from its sequence number."""
        packet_id = PACKET_ID[sequence % PACKET_IDS + 1]
        return b"".join((self._head, packet_id, self.payload(sequence, stamp_us)))

    def payload(self, sequence: int, stamp_us: int = 0) -> bytes:
        """What a PUBLISH carries."""
        return _STAMP.pack(sequence, stamp_us) + self._pad

    def read(self, data: bytes) -> tuple[list[Got], bytes]:
        """Read whole packets of this shape; what is left over is the beginning of the next."""
        size = self.packet_bytes
        count = len(data) // size
        whole = data[: count * size]
        got = list(map(Got._make, self._record.iter_unpack(whole)))
        lengths = whole[1::size]
        if lengths != bytes((self._length,)) * count or any(g.first >> 4 != 3 for g in got):
            raise BadStream("something else than the expected PUBLISH packets")
        return got, data[count * size :]


def acks_of(data: bytes) -> tuple[list[tuple[int, int, int]], bytes]:
    """Read acknowledgements: (first byte, 2, packet id); and what is left over."""
    whole = len(data) & ~3
    acks = list(TWO.iter_unpack(data[:whole]))
    if any(length != 2 for _, length, _ in acks):
        raise BadStream("something else than acknowledgements")
    return acks, data[whole:]
