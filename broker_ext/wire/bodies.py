"""Packet bodies, read field by field. Pure: bytes in, one packet out, or MalformedPacket.

The decoder's hot loop handles the common PUBLISH and acknowledgements itself and hands everything
else to `read_packet`, also what it finds odd: then this file says precisely what is wrong.

Rule 1. The fixed header is checked before the body, so that a bad one need not be buffered.
Rule 2. A body has exactly its fields: one that is cut short or goes on is malformed.
"""

from collections.abc import Callable
from typing import Final

from broker_ext.wire.errors import (
    CLIENT_ID_NOT_VALID,
    MALFORMED,
    PROTOCOL_ERROR,
    TOPIC_FILTER_INVALID,
    UNSUPPORTED_PROTOCOL_VERSION,
    MalformedPacket,
    UnsupportedVersion,
)
from broker_ext.wire.fields import Fields
from broker_ext.wire.names import TopicNames, check_text, check_topic
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
    SubscribeFilter,
    Unsuback,
    Unsubscribe,
)

CONNECT: Final = 1
PUBLISH: Final = 3

FROM_CLIENT: Final = frozenset({1, 3, 4, 5, 6, 7, 8, 10, 12, 14})
"""Packet types that a server may receive."""

FROM_SERVER: Final = frozenset({2, 3, 4, 5, 6, 7, 9, 11, 13})
"""Packet types that a client may receive."""

# Fixed header flags other than 0, and the statement that says so [MQTT-2.2.2-2].
_FLAGS: Final = {
    6: (2, "MQTT-3.6.1-1"),
    8: (2, "MQTT-3.8.1-1"),
    10: (2, "MQTT-3.10.1-1"),
}
# MQTT 3.1 let these three be repeated with DUP = 1.
_FLAGS_REPEATED: Final = 2 | 8


def check_header(first: int, version: int, *, server: bool) -> None:
    """Refuse a first byte that no packet for this side starts with. version: 3, 4 or 5."""
    kind = first >> 4
    flags = first & 15
    if kind in (0, 15):
        what = f"packet type {kind} is reserved"
        raise MalformedPacket(MALFORMED, "MQTT-4.8.0-1", what)
    if kind not in (FROM_CLIENT if server else FROM_SERVER):
        what = f"packet type {kind} does not travel in this direction"
        raise MalformedPacket(PROTOCOL_ERROR, "MQTT-4.8.0-1", what)
    if kind == PUBLISH:
        if flags & 6 == 6:
            raise MalformedPacket(MALFORMED, "MQTT-3.3.1-4", "a PUBLISH has QoS 3")
        if flags & 8 and not flags & 6:
            raise MalformedPacket(MALFORMED, "MQTT-3.3.1-2", "a QoS 0 PUBLISH has DUP = 1")
        return
    expected, clause = _FLAGS.get(kind, (0, "MQTT-2.2.2-2"))
    if flags == expected or (version == 3 and expected and flags == _FLAGS_REPEATED):
        return
    what = f"reserved flags of packet type {kind} are {flags}, not {expected}"
    raise MalformedPacket(MALFORMED, clause, what)


def read_packet(first: int, body: bytes, version: int, names: TopicNames) -> Packet:
    """Return the packet whose first byte (checked) and body these are. Raises MalformedPacket."""
    fields = Fields(body)
    kind = first >> 4
    if kind == PUBLISH:
        return _publish(first & 15, fields, names)
    packet = _READERS[kind](fields, version)
    fields.end()
    return packet


def read_connect(body: bytes, versions: frozenset[int]) -> Connect:
    """Return a CONNECT. Raises MalformedPacket, and UnsupportedVersion for other versions."""
    fields = Fields(body)
    name = fields.binary()
    if name not in (b"MQTT", b"MQIsdp"):
        # [MQTT-3.1.2-1]
        what = "the protocol name is not MQTT"
        raise MalformedPacket(UNSUPPORTED_PROTOCOL_VERSION, "MQTT-3.1.2-1", what)
    version = fields.byte()
    # [MQTT-3.1.2-2]: what follows an unknown level may have any shape, so look no further
    if version not in versions or (version == 3) != (name == b"MQIsdp"):
        raise UnsupportedVersion(version)
    connect = _connect(fields, version)
    fields.end()
    return connect


def _connect(fields: Fields, version: int) -> Connect:
    flags = fields.byte()
    _check_connect_flags(flags, version)
    keep_alive_s = fields.two()
    client_id = fields.binary()
    try:
        check_text(client_id)  # [MQTT-3.1.3-4]
    except MalformedPacket as error:
        raise MalformedPacket(CLIENT_ID_NOT_VALID, error.clause, error.what) from None
    will = None
    if flags & 4:
        topic = fields.binary()
        check_topic(topic)  # [MQTT-3.1.3-10]; it will be the topic of a PUBLISH
        payload = fields.binary()
        will = ConnectWill(topic, payload, flags >> 3 & 3, flags & 32 == 32)
    username = fields.text() if flags & 128 else None  # [MQTT-3.1.3-11]
    password = fields.binary() if flags & 64 else None
    return Connect(version, client_id, flags & 2 == 2, keep_alive_s, username, password, will, None)


def _check_connect_flags(flags: int, version: int) -> None:
    if flags & 1:
        raise MalformedPacket(MALFORMED, "MQTT-3.1.2-3", "the reserved CONNECT flag is 1")
    if flags & 4:
        if flags & 24 == 24:
            raise MalformedPacket(MALFORMED, "MQTT-3.1.2-14", "the will has QoS 3")
    elif flags & 24:
        raise MalformedPacket(MALFORMED, "MQTT-3.1.2-13", "there is a will QoS but no will")
    elif flags & 32:
        raise MalformedPacket(MALFORMED, "MQTT-3.1.2-15", "there is a will retain but no will")
    if flags & 64 and not flags & 128 and version < 5:
        raise MalformedPacket(MALFORMED, "MQTT-3.1.2-22", "a password without a user name")


def _connack(fields: Fields, _version: int) -> Connack:
    flags = fields.byte()
    reason = fields.byte()
    if flags & 254:
        raise MalformedPacket(MALFORMED, "MQTT-4.8.0-1", "reserved CONNACK flags are set")
    if reason > 5:
        what = f"CONNACK return code {reason} is reserved"
        raise MalformedPacket(MALFORMED, "MQTT-4.8.0-1", what)
    if flags and reason:
        what = "a session is present in a refused connection"
        raise MalformedPacket(PROTOCOL_ERROR, "MQTT-3.2.2-4", what)
    return Connack(flags == 1, reason, None)


def _publish(flags: int, fields: Fields, names: TopicNames) -> Publish:
    topic = names.admit(fields.binary())
    packet_id = fields.packet_id() if flags & 6 else 0
    return Publish(flags, topic, packet_id, fields.rest(), None)


def _puback(fields: Fields, _version: int) -> Puback:
    return Puback(fields.packet_id())


def _pubrec(fields: Fields, _version: int) -> Pubrec:
    return Pubrec(fields.packet_id())


def _pubrel(fields: Fields, _version: int) -> Pubrel:
    return Pubrel(fields.packet_id())


def _pubcomp(fields: Fields, _version: int) -> Pubcomp:
    return Pubcomp(fields.packet_id())


def _filter(fields: Fields) -> bytes:
    text = fields.text()  # [MQTT-3.8.3-1], [MQTT-3.10.3-1]
    if not text:
        raise MalformedPacket(TOPIC_FILTER_INVALID, "MQTT-4.7.3-1", "a topic filter is empty")
    return text


def _subscribe(fields: Fields, _version: int) -> Subscribe:
    packet_id = fields.packet_id()
    filters = []
    while fields:
        topic_filter = _filter(fields)
        options = fields.byte()
        if options > 2:
            what = "reserved bits of a requested QoS are set"
            raise MalformedPacket(MALFORMED, "MQTT-3.8.3-4", what)
        filters.append(SubscribeFilter(topic_filter, options))
    if not filters:
        what = "a SUBSCRIBE without a filter"
        raise MalformedPacket(PROTOCOL_ERROR, "MQTT-3.8.3-3", what)
    return Subscribe(packet_id, tuple(filters), None)


def _suback(fields: Fields, _version: int) -> Suback:
    packet_id = fields.packet_id()
    reasons = fields.rest()
    if not reasons:
        what = "a SUBACK without a return code"
        raise MalformedPacket(PROTOCOL_ERROR, "MQTT-3.8.4-5", what)
    if any(reason not in (0, 1, 2, 128) for reason in reasons):
        what = "a SUBACK return code is reserved"
        raise MalformedPacket(MALFORMED, "MQTT-3.9.3-2", what)
    return Suback(packet_id, reasons, None)


def _unsubscribe(fields: Fields, _version: int) -> Unsubscribe:
    packet_id = fields.packet_id()
    filters = []
    while fields:
        filters.append(_filter(fields))
    if not filters:
        what = "an UNSUBSCRIBE without a filter"
        raise MalformedPacket(PROTOCOL_ERROR, "MQTT-3.10.3-2", what)
    return Unsubscribe(packet_id, tuple(filters), None)


def _unsuback(fields: Fields, _version: int) -> Unsuback:
    return Unsuback(fields.packet_id(), b"", None)


def _pingreq(_fields: Fields, _version: int) -> Pingreq:
    return Pingreq()


def _pingresp(_fields: Fields, _version: int) -> Pingresp:
    return Pingresp()


def _disconnect(_fields: Fields, _version: int) -> Disconnect:
    return Disconnect(0, None)


_READERS: Final[dict[int, Callable[[Fields, int], Packet]]] = {
    2: _connack,
    4: _puback,
    5: _pubrec,
    6: _pubrel,
    7: _pubcomp,
    8: _subscribe,
    9: _suback,
    10: _unsubscribe,
    11: _unsuback,
    12: _pingreq,
    13: _pingresp,
    14: _disconnect,
}
