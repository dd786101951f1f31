"""Reads the fields of one packet body from left to right, refusing what is cut short."""

from broker_ext.wire.errors import MalformedPacket
from broker_ext.wire.names import check_text
from broker_ext.wire.reasons import MALFORMED, PROTOCOL_ERROR

__all__ = [
    "Fields",
]


class Fields:
    """One packet body and how far it was read. Every method raises MalformedPacket."""

    __slots__ = ("_at", "_body")

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._at = 0

    def __bool__(self) -> bool:
        """Whether something is left."""
        return self._at < len(self._body)

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes."""
        at = self._at
        stop = at + count
        if stop > len(self._body):
            raise MalformedPacket(MALFORMED, "MQTT-4.8.0-1", "a packet ends within a field")
        self._at = stop
        return self._body[at:stop]

    def byte(self) -> int:
        """Return one byte as a number."""
        return self.take(1)[0]

    def two(self) -> int:
        """Return a Two Byte Integer."""
        return int.from_bytes(self.take(2), "big")

    def four(self) -> int:
        """Return a Four Byte Integer."""
        return int.from_bytes(self.take(4), "big")

    def variable(self) -> int:
        """Return a Variable Byte Integer, which MQTT 5 has outside the fixed header too."""
        number = 0
        for shift in (0, 7, 14, 21):
            byte = self.byte()
            number |= (byte & 127) << shift
            if byte < 128:
                if not byte and shift:
                    # [MQTT5-1.5.5-1]
                    what = "a Variable Byte Integer is longer than it has to be"
                    raise MalformedPacket(MALFORMED, "MQTT5-1.5.5-1", what)
                return number
        what = "a Variable Byte Integer is longer than four bytes"
        raise MalformedPacket(MALFORMED, "MQTT5-1.5.5-1", what)

    def packet_id(self) -> int:
        """Return a packet identifier, 1..65535."""
        packet_id = self.two()
        if not packet_id:
            what = "a packet identifier is 0"
            raise MalformedPacket(PROTOCOL_ERROR, "MQTT-2.3.1-1", what)
        return packet_id

    def binary(self) -> bytes:
        """Return binary data with a two byte length before it."""
        return self.take(self.two())

    def text(self) -> bytes:
        """Return a UTF-8 string, still encoded."""
        text = self.binary()
        check_text(text)
        return text

    def rest(self) -> bytes:
        """Return all that is left."""
        return self.take(len(self._body) - self._at)

    def end(self) -> None:
        """Refuse what stands behind the last field of a packet."""
        if self:
            what = "a packet is longer than its fields"
            raise MalformedPacket(MALFORMED, "MQTT-4.8.0-1", what)
