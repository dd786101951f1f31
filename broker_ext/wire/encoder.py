"""Packets -> bytes, and the pieces of them that a broker sends by the hundred thousand.

`encode` takes any packet, for any version. What an older version has no room for (properties,
reasons of acknowledgements) is left out, as the specification wants it of a server that forwards
between versions. Numbers that do not fit raise UnencodablePacket; strings are not checked again.
"""

from collections.abc import Callable
from typing import Any, Final, TypeAlias

from broker_ext.wire import kinds
from broker_ext.wire.errors import UnencodablePacket
from broker_ext.wire.numbers import BYTE, PACKET_ID, binary, byte, packet_id, two, variable_length
from broker_ext.wire.packets import (
    Auth,
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
from broker_ext.wire.properties import Properties, encode_properties
from broker_ext.wire.reasons import valid_reason

__all__ = [
    "DISCONNECT",
    "PINGREQ",
    "PINGRESP",
    "PUBACK_HEAD",
    "PUBCOMP_HEAD",
    "PUBREC_HEAD",
    "PUBREL_HEAD",
    "UNSUBACK_HEAD",
    "connack",
    "encode",
    "publish_head",
]

PUBACK_HEAD: Final = b"\x40\x02"
PUBREC_HEAD: Final = b"\x50\x02"
PUBREL_HEAD: Final = b"\x62\x02"
PUBCOMP_HEAD: Final = b"\x70\x02"
UNSUBACK_HEAD: Final = b"\xb0\x02"
"""Before MQTT 5; the four others are short forms of it too: reason 0 and no properties."""

PINGREQ: Final = b"\xc0\x00"
PINGRESP: Final = b"\xd0\x00"
DISCONNECT: Final = b"\xe0\x00"

_NAMES: Final = {3: b"\x00\x06MQIsdp\x03", 4: b"\x00\x04MQTT\x04", 5: b"\x00\x04MQTT\x05"}

_Acknowledgement: TypeAlias = Puback | Pubrec | Pubrel | Pubcomp


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
        return BYTE[first_byte] + BYTE[length] + PACKET_ID[topic_bytes] + topic
    return BYTE[first_byte] + variable_length(length) + PACKET_ID[topic_bytes] + topic


def connack(session_present: bool, reason: int = 0, version: int = 4) -> bytes:
    """Return a CONNACK without properties."""
    return _connack(Connack(session_present, reason), version)


def encode(packet: Packet, version: int = 4) -> bytes:
    """Return the bytes of any packet. Raises UnencodablePacket.

    version: that of the connection; a CONNECT carries its own.
    """
    encoder = _ENCODERS.get(type(packet))
    if encoder is None or (version < 5 and encoder is _auth):
        raise UnencodablePacket(f"{type(packet).__name__} is no packet of version {version}")
    return encoder(packet, version)


def _whole(first: int, *fields: bytes) -> bytes:
    body = b"".join(fields)
    return BYTE[first] + variable_length(len(body)) + body


def _properties(properties: Properties | None, kind: int, version: int) -> bytes:
    return encode_properties(properties, kind) if version == 5 else b""


def _reason(kind: int, reason: int, version: int) -> bytes:
    if not valid_reason(kind, reason, version):
        raise UnencodablePacket(f"packet type {kind} has no reason code {reason}")
    return BYTE[reason]


def _connect(packet: Connect, _version: int) -> bytes:
    version = packet.version
    name = _NAMES.get(version)
    if name is None:
        raise UnencodablePacket(f"protocol level {version} is not known")
    flags = packet.clean_start << 1
    fields = [_properties(packet.properties, kinds.CONNECT, version), binary(packet.client_id)]
    will = packet.will
    if will is not None:
        flags |= _will_flags(will)
        properties = _properties(will.properties, kinds.WILL, version)
        fields += (properties, binary(will.topic), binary(will.payload))
    if packet.username is not None:
        flags |= 128
        fields.append(binary(packet.username))
    if packet.password is not None:
        if packet.username is None and version < 5:
            raise UnencodablePacket("a password without a user name")
        flags |= 64
        fields.append(binary(packet.password))
    return _whole(0x10, name, BYTE[flags], two(packet.keep_alive_s), *fields)


def _will_flags(will: ConnectWill) -> int:
    if will.qos not in (0, 1, 2):
        raise UnencodablePacket(f"the will has QoS {will.qos}")
    return 4 | will.qos << 3 | will.retain << 5


def _connack(packet: Connack, version: int) -> bytes:
    reason = _reason(kinds.CONNACK, packet.reason, version)
    properties = _properties(packet.properties, kinds.CONNACK, version)
    return _whole(0x20, BYTE[packet.session_present], reason, properties)


def _publish(packet: Publish, version: int) -> bytes:
    flags = packet.flags
    if not 0 <= flags <= 15 or flags & 6 == 6 or (flags & 8 and not flags & 6):
        raise UnencodablePacket(f"{flags} are no flags of a PUBLISH")
    middle = packet_id(packet.packet_id) if flags & 6 else b""
    middle += _properties(packet.properties, kinds.PUBLISH, version)
    payload = packet.payload
    return publish_head(0x30 | flags, packet.topic, len(middle) + len(payload)) + middle + payload


def _acknowledgement(first: int, kind: int) -> Callable[[_Acknowledgement, int], bytes]:
    """Return the encoder of one of the four acknowledgements, which are alike."""

    def encode_acknowledgement(packet: _Acknowledgement, version: int) -> bytes:
        rest = _reason_and_properties(packet, kind, version)
        return _whole(first, packet_id(packet.packet_id), rest)

    return encode_acknowledgement


def _reason_and_properties(packet: _Acknowledgement | Disconnect, kind: int, version: int) -> bytes:
    """Return the end of a packet, as short as MQTT 5 lets it be; nothing before MQTT 5."""
    if version < 5 or (not packet.reason and packet.properties is None):
        return b""
    reason = _reason(kind, packet.reason, version)
    if packet.properties is None:
        return reason
    return reason + encode_properties(packet.properties, kind)


def _subscribe(packet: Subscribe, version: int) -> bytes:
    if not packet.filters:
        raise UnencodablePacket("a SUBSCRIBE without a filter")
    head = packet_id(packet.packet_id) + _properties(packet.properties, kinds.SUBSCRIBE, version)
    return _whole(0x82, head, *(binary(name) + byte(options) for name, options in packet.filters))


def _suback(packet: Suback, version: int) -> bytes:
    head = packet_id(packet.packet_id) + _properties(packet.properties, kinds.SUBACK, version)
    reasons = packet.reasons
    if version < 5:
        reasons = bytes(min(reason, 0x80) for reason in reasons)  # the only failure there was
    return _whole(0x90, head, *(_reason(kinds.SUBACK, reason, version) for reason in reasons))


def _unsubscribe(packet: Unsubscribe, version: int) -> bytes:
    if not packet.filters:
        raise UnencodablePacket("an UNSUBSCRIBE without a filter")
    head = packet_id(packet.packet_id) + _properties(packet.properties, kinds.UNSUBSCRIBE, version)
    return _whole(0xA2, head, *map(binary, packet.filters))


def _unsuback(packet: Unsuback, version: int) -> bytes:
    head = packet_id(packet.packet_id)
    if version < 5:
        return _whole(0xB0, head)
    head += encode_properties(packet.properties, kinds.UNSUBACK)
    return _whole(0xB0, head, *(_reason(kinds.UNSUBACK, reason, 5) for reason in packet.reasons))


def _disconnect(packet: Disconnect, version: int) -> bytes:
    return _whole(0xE0, _reason_and_properties(packet, kinds.DISCONNECT, version))


def _auth(packet: Auth, version: int) -> bytes:
    if not packet.reason and packet.properties is None:
        return _whole(0xF0)
    reason = _reason(kinds.AUTH, packet.reason, version)
    return _whole(0xF0, reason, encode_properties(packet.properties, kinds.AUTH))


_ENCODERS: Final[dict[type, Callable[[Any, int], bytes]]] = {
    Connect: _connect,
    Connack: _connack,
    Publish: _publish,
    Puback: _acknowledgement(0x40, kinds.PUBACK),
    Pubrec: _acknowledgement(0x50, kinds.PUBREC),
    Pubrel: _acknowledgement(0x62, kinds.PUBREL),
    Pubcomp: _acknowledgement(0x70, kinds.PUBCOMP),
    Subscribe: _subscribe,
    Suback: _suback,
    Unsubscribe: _unsubscribe,
    Unsuback: _unsuback,
    Pingreq: lambda _packet, _version: PINGREQ,
    Pingresp: lambda _packet, _version: PINGRESP,
    Disconnect: _disconnect,
    Auth: _auth,
}
