"""Packet bodies, read field by field. Pure: bytes in, one packet out, or MalformedPacket.

The decoder's hot loop handles the common PUBLISH and acknowledgements itself and hands everything
else to `read_packet`, also what it finds odd: then this file says precisely what is wrong.

Rule 1. The fixed header is checked before the body, so that a bad one need not be buffered.
Rule 2. A body has exactly its fields: one that is cut short or goes on is malformed.
"""

from collections.abc import Callable
from typing import Final, TypeVar

from broker_ext.wire.errors import MalformedPacket, UnsupportedVersion
from broker_ext.wire.fields import Fields
from broker_ext.wire.kinds import (
    AUTH,
    CONNACK,
    CONNECT,
    DISCONNECT,
    PINGREQ,
    PINGRESP,
    PUBACK,
    PUBCOMP,
    PUBLISH,
    PUBREC,
    PUBREL,
    SUBACK,
    SUBSCRIBE,
    UNSUBACK,
    UNSUBSCRIBE,
    WILL,
)
from broker_ext.wire.names import TopicNames, check_text, check_topic
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
    SubscribeFilter,
    Unsuback,
    Unsubscribe,
)
from broker_ext.wire.properties import SUBSCRIPTION_ID, TOPIC_ALIAS, Properties, read_properties
from broker_ext.wire.reasons import (
    MALFORMED,
    PROTOCOL_ERROR,
    TOPIC_FILTER_INVALID,
    UNSUPPORTED_PROTOCOL_VERSION,
    valid_reason,
)

__all__ = [
    "check_header",
    "read_connect",
    "read_packet",
]

_BOTH_WAYS: Final = frozenset({PUBLISH, PUBACK, PUBREC, PUBREL, PUBCOMP})
_FROM_CLIENT: Final = _BOTH_WAYS | {CONNECT, SUBSCRIBE, UNSUBSCRIBE, PINGREQ, DISCONNECT}
_FROM_SERVER: Final = _BOTH_WAYS | {CONNACK, SUBACK, UNSUBACK, PINGRESP}

# Packet types that one side may receive, by (server, MQTT 5).
_RECEIVED: Final[dict[tuple[bool, bool], frozenset[int]]] = {
    (True, False): _FROM_CLIENT,
    (True, True): _FROM_CLIENT | {AUTH},
    (False, False): _FROM_SERVER,
    (False, True): _FROM_SERVER | {AUTH, DISCONNECT},
}

# Fixed header flags other than 0, and the statement that says so [MQTT-2.2.2-2].
_FLAGS: Final = {
    PUBREL: (2, "MQTT-3.6.1-1"),
    SUBSCRIBE: (2, "MQTT-3.8.1-1"),
    UNSUBSCRIBE: (2, "MQTT-3.10.1-1"),
}
# MQTT 3.1 let these three be sent again with DUP = 1.
_FLAGS_REPEATED: Final = 2 | 8


def check_header(first: int, version: int, *, server: bool) -> None:
    """Refuse a first byte that no packet for this side starts with. version: 3, 4 or 5."""
    kind = first >> 4
    flags = first & 15
    if not kind or (kind == AUTH and version < 5):
        what = f"packet type {kind} is reserved"
        raise MalformedPacket(MALFORMED, "MQTT-4.8.0-1", what)
    if kind not in _RECEIVED[server, version == 5]:
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


def read_packet(
    first: int, body: bytes, version: int, names: TopicNames, *, server: bool = True
) -> Packet:
    """Return the packet whose first byte (checked) and body these are. Raises MalformedPacket."""
    fields = Fields(body)
    kind = first >> 4
    if kind == PUBLISH:
        publish = _publish(first & 15, fields, version, names)
        if publish.properties is not None and server:
            _check_from_client(publish.properties)
        return publish
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
    properties = read_properties(fields, CONNECT) if version == 5 else None
    client_id = fields.binary()
    check_text(client_id)  # [MQTT-3.1.3-4]
    will = None
    if flags & 4:
        will_properties = read_properties(fields, WILL) if version == 5 else None
        topic = fields.binary()
        check_topic(topic)  # [MQTT-3.1.3-10]; it will be the topic of a PUBLISH
        payload = fields.binary()
        will = ConnectWill(topic, payload, flags >> 3 & 3, flags & 32 == 32, will_properties)
    username = fields.text() if flags & 128 else None  # [MQTT-3.1.3-11]
    password = fields.binary() if flags & 64 else None
    return Connect(
        version, client_id, flags & 2 == 2, keep_alive_s, username, password, will, properties
    )


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


def _check_reason(kind: int, reason: int, version: int, clause: str) -> None:
    if not valid_reason(kind, reason, version):
        what = f"packet type {kind} has no reason code 0x{reason:02X}"
        raise MalformedPacket(PROTOCOL_ERROR if version == 5 else MALFORMED, clause, what)


def _connack(fields: Fields, version: int) -> Connack:
    flags = fields.byte()
    reason = fields.byte()
    if flags & 254:
        raise MalformedPacket(MALFORMED, "MQTT-4.8.0-1", "reserved CONNACK flags are set")
    _check_reason(CONNACK, reason, version, "MQTT5-3.2.2-8" if version == 5 else "MQTT-4.8.0-1")
    if flags and reason:
        what = "a session is present in a refused connection"
        raise MalformedPacket(PROTOCOL_ERROR, "MQTT-3.2.2-4", what)
    properties = read_properties(fields, CONNACK) if version == 5 else None
    return Connack(flags == 1, reason, properties)


def _publish(flags: int, fields: Fields, version: int, names: TopicNames) -> Publish:
    topic = fields.binary()
    if topic or version < 5:
        topic = names.admit(topic)
    packet_id = fields.packet_id() if flags & 6 else 0
    properties = read_properties(fields, PUBLISH) if version == 5 else None
    if not topic and (properties is None or properties.get(TOPIC_ALIAS) is None):
        what = "neither a topic name nor a topic alias"
        raise MalformedPacket(PROTOCOL_ERROR, "MQTT5-3.3.2.1", what)
    return Publish(flags, topic, packet_id, fields.rest(), properties)


def _check_from_client(properties: Properties) -> None:
    if properties.get(SUBSCRIPTION_ID) is not None:
        what = "a client sent a Subscription Identifier with a message"
        raise MalformedPacket(PROTOCOL_ERROR, "MQTT5-3.3.4-6", what)


_Acknowledgement = TypeVar("_Acknowledgement", Puback, Pubrec, Pubrel, Pubcomp)


def _acknowledgement(
    cls: type[_Acknowledgement], kind: int, clause: str
) -> Callable[[Fields, int], _Acknowledgement]:
    """Return the reader of one of the four acknowledgements, which are alike."""

    def read(fields: Fields, version: int) -> _Acknowledgement:
        packet_id = fields.packet_id()
        if version < 5 or not fields:
            return cls(packet_id, 0, None)
        reason = fields.byte()
        _check_reason(kind, reason, version, clause)
        properties = read_properties(fields, kind) if fields else None
        return cls(packet_id, reason, properties)

    return read


def _filter(fields: Fields) -> bytes:
    text = fields.text()  # [MQTT-3.8.3-1], [MQTT-3.10.3-1]
    if not text:
        raise MalformedPacket(TOPIC_FILTER_INVALID, "MQTT-4.7.3-1", "a topic filter is empty")
    return text


def _subscribe(fields: Fields, version: int) -> Subscribe:
    packet_id = fields.packet_id()
    properties = read_properties(fields, SUBSCRIBE) if version == 5 else None
    filters = []
    while fields:
        topic_filter = _filter(fields)
        options = fields.byte()
        if version == 5:
            _check_options(topic_filter, options)
        elif options > 2:
            what = "reserved bits of a requested QoS are set"
            raise MalformedPacket(MALFORMED, "MQTT-3.8.3-4", what)
        filters.append(SubscribeFilter(topic_filter, options))
    if not filters:
        what = "a SUBSCRIBE without a filter"
        raise MalformedPacket(PROTOCOL_ERROR, "MQTT-3.8.3-3", what)
    return Subscribe(packet_id, tuple(filters), properties)


def _check_options(topic_filter: bytes, options: int) -> None:
    """Check the Subscription Options of MQTT 5: QoS 0..1, No Local 2, RAP 3, retain 4..5."""
    if options & 0xC0:
        what = "reserved Subscription Options are set"
        raise MalformedPacket(MALFORMED, "MQTT5-3.8.3-5", what)
    if options & 3 == 3:
        what = "a requested QoS is 3"
        raise MalformedPacket(PROTOCOL_ERROR, "MQTT5-3.8.3.1", what)
    if options & 0x30 == 0x30:
        what = "Retain Handling is 3"
        raise MalformedPacket(PROTOCOL_ERROR, "MQTT5-3.8.3.1", what)
    if options & 4 and topic_filter.startswith(b"$share/"):
        what = "No Local on a shared subscription"
        raise MalformedPacket(PROTOCOL_ERROR, "MQTT5-3.8.3-4", what)


def _suback(fields: Fields, version: int) -> Suback:
    packet_id = fields.packet_id()
    properties = read_properties(fields, SUBACK) if version == 5 else None
    reasons = fields.rest()
    if not reasons:
        what = "a SUBACK without a reason code"
        raise MalformedPacket(PROTOCOL_ERROR, "MQTT-3.8.4-5", what)
    for reason in reasons:
        _check_reason(SUBACK, reason, version, "MQTT-3.9.3-2")
    return Suback(packet_id, reasons, properties)


def _unsubscribe(fields: Fields, version: int) -> Unsubscribe:
    packet_id = fields.packet_id()
    properties = read_properties(fields, UNSUBSCRIBE) if version == 5 else None
    filters = []
    while fields:
        filters.append(_filter(fields))
    if not filters:
        what = "an UNSUBSCRIBE without a filter"
        raise MalformedPacket(PROTOCOL_ERROR, "MQTT-3.10.3-2", what)
    return Unsubscribe(packet_id, tuple(filters), properties)


def _unsuback(fields: Fields, version: int) -> Unsuback:
    packet_id = fields.packet_id()
    if version < 5:
        return Unsuback(packet_id, b"", None)
    properties = read_properties(fields, UNSUBACK)
    reasons = fields.rest()
    if not reasons:
        what = "an UNSUBACK without a reason code"
        raise MalformedPacket(PROTOCOL_ERROR, "MQTT5-3.11.3-1", what)
    for reason in reasons:
        _check_reason(UNSUBACK, reason, version, "MQTT5-3.11.3-2")
    return Unsuback(packet_id, reasons, properties)


def _pingreq(_fields: Fields, _version: int) -> Pingreq:
    return Pingreq()


def _pingresp(_fields: Fields, _version: int) -> Pingresp:
    return Pingresp()


def _disconnect(fields: Fields, version: int) -> Disconnect:
    if version < 5 or not fields:
        return Disconnect(0, None)
    reason = fields.byte()
    _check_reason(DISCONNECT, reason, version, "MQTT5-3.14.2-1")
    properties = read_properties(fields, DISCONNECT) if fields else None
    return Disconnect(reason, properties)


def _auth(fields: Fields, version: int) -> Auth:
    if not fields:
        return Auth(0, None)
    reason = fields.byte()
    _check_reason(AUTH, reason, version, "MQTT5-3.15.2-1")
    # only both together may be left out, unlike in DISCONNECT
    return Auth(reason, read_properties(fields, AUTH))


_READERS: Final[dict[int, Callable[[Fields, int], Packet]]] = {
    CONNACK: _connack,
    PUBACK: _acknowledgement(Puback, PUBACK, "MQTT5-3.4.2-1"),
    PUBREC: _acknowledgement(Pubrec, PUBREC, "MQTT5-3.5.2-1"),
    PUBREL: _acknowledgement(Pubrel, PUBREL, "MQTT5-3.6.2-1"),
    PUBCOMP: _acknowledgement(Pubcomp, PUBCOMP, "MQTT5-3.7.2-1"),
    SUBSCRIBE: _subscribe,
    SUBACK: _suback,
    UNSUBSCRIBE: _unsubscribe,
    UNSUBACK: _unsuback,
    PINGREQ: _pingreq,
    PINGRESP: _pingresp,
    DISCONNECT: _disconnect,
    AUTH: _auth,
}
