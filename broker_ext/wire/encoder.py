"""Packets -> bytes, and the pieces of them that a broker sends by the hundred thousand.

`encode` takes any packet, for any version. What an older version has no room for (properties,
reasons of acknowledgements) is left out, as the specification wants it of a server that forwards
between versions. Numbers that do not fit raise UnencodablePacket; strings are not checked again.
"""

from collections.abc import Callable
from typing import Any, Final

from broker_ext.wire.errors import UnencodablePacket
from broker_ext.wire.packets import (
    Connack,
    Connect,
    ConnectWill,
    Disconnect,
    Packet,
    Pingreq,
    Pingresp,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Suback,
    Subscribe,
    Unsuback,
    Unsubscribe,
)

PACKET_ID: Final[tuple[bytes, ...]] = tuple(number.to_bytes(2, "big") for number in range(65_536))
"""Every two byte number, big-endian: an acknowledgement is `PUBACK_HEAD + PACKET_ID[id]`."""

PUBACK_HEAD: Final = b"\x40\x02"
PUBREC_HEAD: Final = b"\x50\x02"
PUBREL_HEAD: Final = b"\x62\x02"
PUBCOMP_HEAD: Final = b"\x70\x02"
UNSUBACK_HEAD: Final = b"\xb0\x02"
PINGREQ: Final = b"\xc0\x00"
PINGRESP: Final = b"\xd0\x00"
DISCONNECT: Final = b"\xe0\x00"

_REMAINING_BYTES_MAX: Final = 268_435_455
_SHORT: Final[tuple[bytes, ...]] = tuple(bytes((length,)) for length in range(128))
_BYTE: Final[tuple[bytes, ...]] = tuple(bytes((number,)) for number in range(256))


def variable_length(number: int) -> bytes:
    """Return a Variable Byte Integer, 0..268435455, as short as can be [MQTT5-1.5.5-1]."""
    if not 0 <= number <= _REMAINING_BYTES_MAX:
        raise UnencodablePacket(f"length {number} is out of range")
    if number < 128:
        return _SHORT[number]
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def publish_head(first_byte: int, topic: bytes, body_bytes: int) -> bytes:
    """Return the fixed header and the topic field of a PUBLISH.

    first_byte: 0x30 | flags. body_bytes: what will follow: packet id, properties and payload.
    Raises UnencodablePacket if the topic or the packet is too long.
    """
    topic_bytes = len(topic)
    length = 2 + topic_bytes + body_bytes
    if topic_bytes > 65_535:
        raise UnencodablePacket("a topic is longer than 65535 bytes")
    if length < 128:
        return _BYTE[first_byte] + _SHORT[length] + PACKET_ID[topic_bytes] + topic
    return _BYTE[first_byte] + variable_length(length) + PACKET_ID[topic_bytes] + topic


def connack(session_present: bool, reason: int = 0, version: int = 4) -> bytes:
    """Return a CONNACK without properties."""
    return _connack(Connack(session_present, reason), version)


def encode(packet: Packet, version: int = 4) -> bytes:
    """Return the bytes of any packet. Raises UnencodablePacket.

    version: that of the connection; a CONNECT carries its own.
    """
    encoder = _ENCODERS.get(type(packet))
    if encoder is None:
        raise UnencodablePacket(f"{type(packet).__name__} is no packet of version {version}")
    return encoder(packet, version)


def _whole(first: int, *fields: bytes) -> bytes:
    body = b"".join(fields)
    return _BYTE[first] + variable_length(len(body)) + body


def _two(number: int) -> bytes:
    if not 0 <= number <= 65_535:
        raise UnencodablePacket(f"{number} does not fit into two bytes")
    return PACKET_ID[number]


def _byte(number: int) -> bytes:
    if not 0 <= number <= 255:
        raise UnencodablePacket(f"{number} does not fit into one byte")
    return _BYTE[number]


def _packet_id(packet_id: int) -> bytes:
    if not 1 <= packet_id <= 65_535:
        raise UnencodablePacket(f"{packet_id} is no packet identifier")
    return PACKET_ID[packet_id]


def _binary(data: bytes) -> bytes:
    if len(data) > 65_535:
        raise UnencodablePacket("a field is longer than 65535 bytes")
    return PACKET_ID[len(data)] + data


def _connect(packet: Connect, _version: int) -> bytes:
    version = packet.version
    name = {3: b"MQIsdp", 4: b"MQTT"}.get(version)
    if name is None:
        raise UnencodablePacket(f"protocol level {version} is not known")
    flags = packet.clean_start << 1
    fields = [_binary(packet.client_id)]
    if packet.will is not None:
        flags |= _will_flags(packet.will)
        fields += (_binary(packet.will.topic), _binary(packet.will.payload))
    if packet.username is not None:
        flags |= 128
        fields.append(_binary(packet.username))
    if packet.password is not None:
        if packet.username is None:
            raise UnencodablePacket("a password without a user name")
        flags |= 64
        fields.append(_binary(packet.password))
    head = _binary(name) + _byte(version) + _byte(flags) + _two(packet.keep_alive_s)
    return _whole(0x10, head, *fields)


def _will_flags(will: ConnectWill) -> int:
    if will.qos not in (0, 1, 2):
        raise UnencodablePacket(f"the will has QoS {will.qos}")
    return 4 | will.qos << 3 | will.retain << 5


def _connack(packet: Connack, _version: int) -> bytes:
    if not 0 <= packet.reason <= 5:
        raise UnencodablePacket(f"{packet.reason} is no return code of CONNACK")
    return _whole(0x20, _BYTE[packet.session_present], _byte(packet.reason))


def _publish(packet: Publish, _version: int) -> bytes:
    flags = packet.flags
    if not 0 <= flags <= 15 or flags & 6 == 6 or (flags & 8 and not flags & 6):
        raise UnencodablePacket(f"{flags} are no flags of a PUBLISH")
    packet_id = _packet_id(packet.packet_id) if flags & 6 else b""
    payload = packet.payload
    head = publish_head(0x30 | flags, packet.topic, len(packet_id) + len(payload))
    return head + packet_id + payload


def _acknowledgement(first: int) -> Callable[[Puback | Pubrec | Pubrel | Pubcomp, int], bytes]:
    def encode_acknowledgement(packet: Puback | Pubrec | Pubrel | Pubcomp, _version: int) -> bytes:
        return _whole(first, _packet_id(packet.packet_id))

    return encode_acknowledgement


def _subscribe(packet: Subscribe, _version: int) -> bytes:
    if not packet.filters:
        raise UnencodablePacket("a SUBSCRIBE without a filter")
    filters = (_binary(name) + _byte(options) for name, options in packet.filters)
    return _whole(0x82, _packet_id(packet.packet_id), *filters)


def _suback(packet: Suback, _version: int) -> bytes:
    return _whole(0x90, _packet_id(packet.packet_id), packet.reasons)


def _unsubscribe(packet: Unsubscribe, _version: int) -> bytes:
    if not packet.filters:
        raise UnencodablePacket("an UNSUBSCRIBE without a filter")
    return _whole(0xA2, _packet_id(packet.packet_id), *map(_binary, packet.filters))


def _unsuback(packet: Unsuback, _version: int) -> bytes:
    return _whole(0xB0, _packet_id(packet.packet_id))


def _disconnect(_packet: Disconnect, _version: int) -> bytes:
    return DISCONNECT


_ENCODERS: Final[dict[type, Callable[[Any, int], bytes]]] = {
    Connect: _connect,
    Connack: _connack,
    Publish: _publish,
    Puback: _acknowledgement(0x40),
    Pubrec: _acknowledgement(0x50),
    Pubrel: _acknowledgement(0x62),
    Pubcomp: _acknowledgement(0x70),
    Subscribe: _subscribe,
    Suback: _suback,
    Unsubscribe: _unsubscribe,
    Unsuback: _unsuback,
    Pingreq: lambda _packet, _version: PINGREQ,
    Pingresp: lambda _packet, _version: PINGRESP,
    Disconnect: _disconnect,
}
