"""Bytes of one connection -> packets. No socket, no clock, no await.

Rule 1. A packet comes out once it is whole, in order, and never before it was checked.
Rule 2. What a refused packet carried is never read as further packets: an error is the end.
Rule 3. A packet that will be refused for its fixed header is refused before it is buffered.
Rule 4. Buffering costs time and memory linear in what was received, however it was cut.
"""

from typing import TYPE_CHECKING, Final

from broker_ext.wire.bodies import check_header, read_connect, read_packet
from broker_ext.wire.errors import MalformedPacket
from broker_ext.wire.kinds import CONNECT
from broker_ext.wire.names import TopicNames
from broker_ext.wire.numbers import REMAINING_BYTES_MAX
from broker_ext.wire.packets import Packet, Puback, Pubcomp, Publish, Pubrec, Pubrel
from broker_ext.wire.reasons import MALFORMED, PACKET_TOO_LARGE, PROTOCOL_ERROR

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "PACKET_BYTES_MAX",
    "PACKET_BYTES_MIN",
    "VERSIONS",
    "VERSIONS_ALL",
    "Decoder",
]

PACKET_BYTES_MAX: Final = REMAINING_BYTES_MAX + 5
"""A whole packet with the largest Remaining Length and its fixed header."""

PACKET_BYTES_MIN: Final = 2 + 127
"""No limit can be lower: the length of such a packet takes one byte, and is not compared."""

VERSIONS: Final = frozenset({3, 4})
"""Protocol levels that a CONNECT may ask for unless said otherwise: MQTT 3.1 and 3.1.1."""

VERSIONS_ALL: Final = frozenset({3, 4, 5})
"""Protocol levels that the codec can speak."""

# Acknowledgements of one packet identifier, by first byte.
_ACKS: Final[dict[int, type[Puback | Pubrec | Pubrel | Pubcomp]]] = {
    0x40: Puback,
    0x50: Pubrec,
    0x62: Pubrel,
    0x70: Pubcomp,
}


class Decoder:
    """Decodes what one peer sends. Call `feed` with what arrived, then look at `error`.

    packet_bytes_max: largest packet accepted, fixed header included; from PACKET_BYTES_MIN.
    server: True reads what clients send, False what servers send (in any order).
    version: 0 = wait for CONNECT and learn it there (a client's decoder then takes 4);
        otherwise the connection is taken as established with this version.
    versions: protocol levels that a CONNECT may ask for.
    names: the topic names shared by all decoders of one broker.

    level: of the CONNECT, also of one that is refused; 0 = not known.
    """

    __slots__ = (
        "_bytes_max",
        "_names",
        "_need",
        "_pending",
        "_server",
        "_versions",
        "error",
        "level",
        "version",
    )

    def __init__(
        self,
        *,
        packet_bytes_max: int = PACKET_BYTES_MAX,
        server: bool = True,
        version: int = 0,
        versions: frozenset[int] = VERSIONS,
        names: TopicNames | None = None,
    ) -> None:
        if packet_bytes_max < PACKET_BYTES_MIN:
            raise ValueError(f"packet_bytes_max is below {PACKET_BYTES_MIN}")
        if not versions <= VERSIONS_ALL or version not in (0, *VERSIONS_ALL):
            raise ValueError(f"versions are {sorted(VERSIONS_ALL)}")
        self.error: MalformedPacket | None = None
        self.level = version
        self.version = version if version or server else 4
        self._bytes_max = packet_bytes_max
        self._server = server
        self._versions = versions
        self._names = TopicNames() if names is None else names
        self._pending = bytearray()
        self._need = 0  # bytes from the start of _pending that are worth another look

    @property
    def pending_bytes(self) -> int:
        """Bytes held back because their packet is not whole yet."""
        return len(self._pending)

    def feed(self, data: bytes) -> list[Packet]:
        """Return the packets that `data` completes, in order.

        After a malformed packet `error` says why, and every later call returns []: the packets
        returned with it came before it and are good.
        """
        packets: list[Packet] = []
        if self.error is not None:
            return packets
        pending = self._pending
        if pending:
            pending += data
            if len(pending) < self._need:
                return packets
            data = bytes(pending)
            pending.clear()
        try:
            done = 0 if self.version else self._read_connect(data, packets)
            if self.version:
                done = self._read(data, done, packets)
        except MalformedPacket as error:
            # without its traceback, which would keep the whole chunk alive
            self.error = error.with_traceback(None)
            return packets
        if done < len(data):
            pending += data[done:] if done else data
        return packets

    def _read(  # noqa: C901, PLR0912, PLR0915 - a call for each packet would double its cost
        self, data: bytes, pos: int, packets: list[Packet]
    ) -> int:
        """Read all whole packets from `pos` on; return where the first one that is not begins.

        The common PUBLISH and acknowledgement are read here. Whatever is odd goes to `_read_one`,
        which reads anything or says what is wrong, so this loop only has to notice.
        """
        append = packets.append
        new = tuple.__new__  # a named tuple's own __new__ is a Python function
        known = self._names.known.get
        acks = _ACKS.get
        bytes_max = self._bytes_max
        properties = self.version == 5  # then their length follows, and is 0 on this path
        # a new topic; in MQTT 5 it may be empty, which is for the careful reader to judge
        admit: Callable[[bytes], bytes | None] = known if properties else self._names.admit
        end = len(data)
        while True:
            body = pos + 2
            if body > end:
                self._need = 2
                return pos
            first = data[pos]
            length = data[pos + 1]
            if length > 127:
                if body < end and 0 < data[body] < 128:  # two bytes, as most packets above 127
                    length += (data[body] << 7) - 128
                    body += 1
                else:
                    self._check_first(first)
                    length, body = self._read_length(data, pos)
                    if not body:
                        return pos
                if body - pos + length > bytes_max:
                    self._check_first(first)
                    raise _too_large(bytes_max)
            stop = body + length
            if stop > end:
                self._check_first(first)
                self._need = stop - pos
                return pos
            kind = first & 0xF6  # PUBLISH with its QoS, whatever DUP and RETAIN are
            if kind == 0x32 or kind == 0x34:  # noqa: PLR1714 - a set would be hashed into
                if length > 4:
                    topic_at = body + 2
                    at = topic_at + (data[body] << 8 | data[body + 1])
                    payload_at = at + 2
                    if payload_at <= stop:
                        topic = known(data[topic_at:at]) or admit(data[topic_at:at])
                        packet_id = data[at] << 8 | data[at + 1]
                        if properties:
                            if payload_at < stop and not data[payload_at]:
                                payload_at += 1
                            else:
                                topic = None
                        if topic is not None and packet_id:
                            append(
                                new(
                                    Publish,
                                    (first & 15, topic, packet_id, data[payload_at:stop], None),
                                )
                            )
                            pos = stop
                            continue
            elif length == 2:
                ack = acks(first)
                if ack is not None:
                    packet_id = data[body] << 8 | data[body + 1]
                    if packet_id:
                        append(new(ack, (packet_id, 0, None)))
                        pos = stop
                        continue
            elif kind == 0x30 and first < 0x38 and length > 2:
                topic_at = body + 2
                at = topic_at + (data[body] << 8 | data[body + 1])
                if at <= stop:
                    topic = known(data[topic_at:at]) or admit(data[topic_at:at])
                    if properties:
                        if at < stop and not data[at]:
                            at += 1
                        else:
                            topic = None
                    if topic is not None:
                        append(new(Publish, (first & 15, topic, 0, data[at:stop], None)))
                        pos = stop
                        continue
            append(self._read_one(first, data[body:stop]))
            pos = stop

    def _read_length(self, data: bytes, pos: int) -> tuple[int, int]:
        """Return the Remaining Length of the packet at `pos` and where its body begins.

        (0, 0) while the length is not whole.
        """
        length = 0
        for index, byte in enumerate(data[pos + 1 : pos + 5]):
            length |= (byte & 127) << 7 * index
            if byte < 128:
                if not byte and index and self.version == 5:
                    # [MQTT5-1.5.5-1]; 3.1.1 does not ask for the shortest form
                    what = "the Remaining Length is longer than it has to be"
                    raise MalformedPacket(MALFORMED, "MQTT5-1.5.5-1", what)
                return length, pos + 2 + index
            if index == 3:
                what = "the Remaining Length is longer than four bytes"
                raise MalformedPacket(MALFORMED, "MQTT-4.8.0-1", what)
        self._need = len(data) - pos + 1
        return 0, 0

    def _check_first(self, first: int) -> None:
        """Refuse a packet for its first byte. Rule 3: this must not wait for the rest of it."""
        if self._server and first >> 4 == CONNECT:
            raise MalformedPacket(PROTOCOL_ERROR, "MQTT-3.1.0-2", "a second CONNECT")
        check_header(first, self.version, server=self._server)

    def _read_one(self, first: int, body: bytes) -> Packet:
        """Read any packet of an established connection."""
        self._check_first(first)
        return read_packet(first, body, self.version, self._names, server=self._server)

    def _read_connect(self, data: bytes, packets: list[Packet]) -> int:
        """Read the packet that a client has to begin with; return how far `data` was read."""
        if not data:
            return 0
        if data[0] != CONNECT << 4:
            # [MQTT-3.1.0-1]; flags of CONNECT are reserved [MQTT-2.2.2-2]
            raise MalformedPacket(PROTOCOL_ERROR, "MQTT-3.1.0-1", "the first packet is no CONNECT")
        length, body = self._read_length(data, 0)
        if not body:
            return 0
        if data[body : body + 6] == b"\x00\x04MQTT" and len(data) > body + 6:
            self.level = data[body + 6]
        if body + length > self._bytes_max:
            raise _too_large(self._bytes_max)
        stop = body + length
        if stop > len(data):
            self._need = stop
            return 0
        connect = read_connect(data[body:stop], self._versions)
        self.version = connect.version
        packets.append(connect)
        return stop


def _too_large(bytes_max: int) -> MalformedPacket:
    what = f"a packet is larger than {bytes_max} bytes"
    return MalformedPacket(PACKET_TOO_LARGE, "MQTT-4.8.0-1", what)
