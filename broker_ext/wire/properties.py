"""Properties of MQTT 5 packets (section 2.2.2): one table, and the code that follows it.

Rule 1. A property that its packet may not carry, or that is not known, makes the packet malformed.
Rule 2. A property comes once, unless the table says that it repeats.
Rule 3. The order of properties is kept: user properties have one [MQTT5-3.3.2-18].
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

from broker_ext.wire.errors import MalformedPacket, UnencodablePacket
from broker_ext.wire.fields import Fields
from broker_ext.wire.kinds import (
    AUTH,
    CONNACK,
    CONNECT,
    DISCONNECT,
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
from broker_ext.wire.names import check_topic
from broker_ext.wire.numbers import binary, four, two, variable_length
from broker_ext.wire.reasons import MALFORMED, PROTOCOL_ERROR, TOPIC_ALIAS_INVALID

__all__ = [
    "ASSIGNED_CLIENT_ID",
    "AUTHENTICATION_DATA",
    "AUTHENTICATION_METHOD",
    "BINARY",
    "CONTENT_TYPE",
    "CORRELATION_DATA",
    "FLAG",
    "FORWARDED",
    "FOUR",
    "MESSAGE_EXPIRY_S",
    "PACKET_BYTES_MAX",
    "PAIR",
    "PAYLOAD_FORMAT",
    "PROPERTIES",
    "QOS_MAX",
    "REASON_STRING",
    "RECEIVE_MAX",
    "REQUEST_PROBLEM_INFORMATION",
    "REQUEST_RESPONSE_INFORMATION",
    "RESPONSE_INFORMATION",
    "RESPONSE_TOPIC",
    "RETAIN_AVAILABLE",
    "SERVER_KEEP_ALIVE_S",
    "SERVER_REFERENCE",
    "SESSION_EXPIRY_S",
    "SHARED_AVAILABLE",
    "SUBSCRIPTION_ID",
    "SUBSCRIPTION_IDS_AVAILABLE",
    "TEXT",
    "TOPIC_ALIAS",
    "TOPIC_ALIAS_MAX",
    "TWO",
    "USER_PROPERTY",
    "VARIABLE",
    "WILDCARDS_AVAILABLE",
    "WILL_DELAY_S",
    "Properties",
    "PropertyRule",
    "PropertyValue",
    "ValueType",
    "encode_properties",
    "properties_field",
    "read_forwarded",
    "read_properties",
]

PropertyValue: TypeAlias = int | bytes | tuple[bytes, bytes]

PAYLOAD_FORMAT: Final = 1
MESSAGE_EXPIRY_S: Final = 2
CONTENT_TYPE: Final = 3
RESPONSE_TOPIC: Final = 8
CORRELATION_DATA: Final = 9
SUBSCRIPTION_ID: Final = 11
SESSION_EXPIRY_S: Final = 17
ASSIGNED_CLIENT_ID: Final = 18
SERVER_KEEP_ALIVE_S: Final = 19
AUTHENTICATION_METHOD: Final = 21
AUTHENTICATION_DATA: Final = 22
REQUEST_PROBLEM_INFORMATION: Final = 23
WILL_DELAY_S: Final = 24
REQUEST_RESPONSE_INFORMATION: Final = 25
RESPONSE_INFORMATION: Final = 26
SERVER_REFERENCE: Final = 28
REASON_STRING: Final = 31
RECEIVE_MAX: Final = 33
TOPIC_ALIAS_MAX: Final = 34
TOPIC_ALIAS: Final = 35
QOS_MAX: Final = 36
RETAIN_AVAILABLE: Final = 37
USER_PROPERTY: Final = 38
PACKET_BYTES_MAX: Final = 39
WILDCARDS_AVAILABLE: Final = 40
SUBSCRIPTION_IDS_AVAILABLE: Final = 41
SHARED_AVAILABLE: Final = 42


class ValueType(NamedTuple):
    """How values of one type are read from a packet and written into one."""

    read: Callable[[Fields], PropertyValue]
    write: Callable[[Any], bytes]


def _read_flag(fields: Fields) -> int:
    flag = fields.byte()
    if flag > 1:
        what = "a property that is 0 or 1 has another value"
        raise MalformedPacket(PROTOCOL_ERROR, "MQTT5-2.2.2.2", what)
    return flag


def _write_flag(flag: int) -> bytes:
    if flag not in (0, 1):
        raise UnencodablePacket("a property that is 0 or 1 has another value")
    return b"\1" if flag else b"\0"


def _write_pair(pair: tuple[bytes, bytes]) -> bytes:
    name, value = pair
    return binary(name) + binary(value)


FLAG: Final = ValueType(_read_flag, _write_flag)
TWO: Final = ValueType(Fields.two, two)
FOUR: Final = ValueType(Fields.four, four)
VARIABLE: Final = ValueType(Fields.variable, variable_length)
BINARY: Final = ValueType(Fields.binary, binary)
TEXT: Final = ValueType(Fields.text, binary)
PAIR: Final = ValueType(lambda fields: (fields.text(), fields.text()), _write_pair)


class PropertyRule(NamedTuple):
    """One property. kinds: what may carry it. repeats: in which of these it may come again.

    zero: reason code if the value is 0, where 0 is no value.
    """

    name: str
    type: ValueType
    kinds: frozenset[int]
    repeats: frozenset[int] = frozenset()
    zero: int | None = None


_MESSAGE: Final = frozenset({PUBLISH, WILL})
_OPENING: Final = frozenset({CONNECT, CONNACK})
_CONNACK: Final = frozenset({CONNACK})
_ANSWERS: Final = frozenset(
    {CONNACK, PUBACK, PUBREC, PUBREL, PUBCOMP, SUBACK, UNSUBACK, DISCONNECT, AUTH}
)
_ALL: Final = _ANSWERS | {CONNECT, PUBLISH, WILL, SUBSCRIBE, UNSUBSCRIBE}

PROPERTIES: Final[dict[int, PropertyRule]] = {
    PAYLOAD_FORMAT: PropertyRule("Payload Format Indicator", FLAG, _MESSAGE),
    MESSAGE_EXPIRY_S: PropertyRule("Message Expiry Interval", FOUR, _MESSAGE),
    CONTENT_TYPE: PropertyRule("Content Type", TEXT, _MESSAGE),
    RESPONSE_TOPIC: PropertyRule("Response Topic", TEXT, _MESSAGE),
    CORRELATION_DATA: PropertyRule("Correlation Data", BINARY, _MESSAGE),
    SUBSCRIPTION_ID: PropertyRule(
        "Subscription Identifier",
        VARIABLE,
        frozenset({PUBLISH, SUBSCRIBE}),
        repeats=frozenset({PUBLISH}),  # one for each subscription that matched
        zero=PROTOCOL_ERROR,
    ),
    SESSION_EXPIRY_S: PropertyRule("Session Expiry Interval", FOUR, _OPENING | {DISCONNECT}),
    ASSIGNED_CLIENT_ID: PropertyRule("Assigned Client Identifier", TEXT, _CONNACK),
    SERVER_KEEP_ALIVE_S: PropertyRule("Server Keep Alive", TWO, _CONNACK),
    AUTHENTICATION_METHOD: PropertyRule("Authentication Method", TEXT, _OPENING | {AUTH}),
    AUTHENTICATION_DATA: PropertyRule("Authentication Data", BINARY, _OPENING | {AUTH}),
    REQUEST_PROBLEM_INFORMATION: PropertyRule(
        "Request Problem Information", FLAG, frozenset({CONNECT})
    ),
    WILL_DELAY_S: PropertyRule("Will Delay Interval", FOUR, frozenset({WILL})),
    REQUEST_RESPONSE_INFORMATION: PropertyRule(
        "Request Response Information", FLAG, frozenset({CONNECT})
    ),
    RESPONSE_INFORMATION: PropertyRule("Response Information", TEXT, _CONNACK),
    SERVER_REFERENCE: PropertyRule("Server Reference", TEXT, _CONNACK | {DISCONNECT}),
    REASON_STRING: PropertyRule("Reason String", TEXT, _ANSWERS),
    RECEIVE_MAX: PropertyRule("Receive Maximum", TWO, _OPENING, zero=PROTOCOL_ERROR),
    TOPIC_ALIAS_MAX: PropertyRule("Topic Alias Maximum", TWO, _OPENING),
    TOPIC_ALIAS: PropertyRule("Topic Alias", TWO, frozenset({PUBLISH}), zero=TOPIC_ALIAS_INVALID),
    QOS_MAX: PropertyRule("Maximum QoS", FLAG, _CONNACK),
    RETAIN_AVAILABLE: PropertyRule("Retain Available", FLAG, _CONNACK),
    USER_PROPERTY: PropertyRule("User Property", PAIR, _ALL, repeats=_ALL),
    PACKET_BYTES_MAX: PropertyRule("Maximum Packet Size", FOUR, _OPENING, zero=PROTOCOL_ERROR),
    WILDCARDS_AVAILABLE: PropertyRule("Wildcard Subscription Available", FLAG, _CONNACK),
    SUBSCRIPTION_IDS_AVAILABLE: PropertyRule("Subscription Identifier Available", FLAG, _CONNACK),
    SHARED_AVAILABLE: PropertyRule("Shared Subscription Available", FLAG, _CONNACK),
}

FORWARDED: Final = frozenset(
    {PAYLOAD_FORMAT, CONTENT_TYPE, RESPONSE_TOPIC, CORRELATION_DATA, USER_PROPERTY}
)
"""What a server sends on unaltered with a message: [MQTT5-3.3.2-4], -15, -16, -17, -20.

Message Expiry is sent on too, less the time that the message waited, so it is not among these.
"""


@dataclass(frozen=True, slots=True, repr=False)
class Properties:
    """The properties of one packet, in the order they were sent. None stands for "none at all".

    pairs: (property id, value). A value is an int, bytes, or for a user property (name, value).
    """

    pairs: tuple[tuple[int, PropertyValue], ...]

    def get(self, ident: int, default: Any = None) -> Any:
        """Return the (first) value of a property: int, bytes or a pair, as the table says."""
        for found, value in self.pairs:
            if found == ident:
                return value
        return default

    def all(self, ident: int) -> tuple[Any, ...]:
        """Return all values of a property that repeats, in order."""
        return tuple(value for found, value in self.pairs if found == ident)

    def forwarded(self) -> bytes:
        """Return the encoded properties that go on with a message, without a length before them.

        `read_forwarded` is its inverse, and `properties_field` puts the length before them.
        """
        return _encode_pairs(pair for pair in self.pairs if pair[0] in FORWARDED)

    def __repr__(self) -> str:
        # P13: correlation data, authentication data and user properties may hold secrets
        names = ", ".join(
            PROPERTIES[ident].name if ident in PROPERTIES else f"0x{ident:02X}"
            for ident, _ in self.pairs
        )
        return f"Properties({names})"


def read_properties(fields: Fields, kind: int) -> Properties | None:
    """Read the property length and the properties of a packet (or will) of this kind.

    Raises MalformedPacket.
    """
    length = fields.variable()
    return _read_pairs(Fields(fields.take(length)), kind) if length else None


def read_forwarded(raw: bytes) -> Properties | None:
    """Return what `Properties.forwarded` encoded. Raises MalformedPacket."""
    return _read_pairs(Fields(raw), PUBLISH) if raw else None


def encode_properties(properties: Properties | None, kind: int) -> bytes:
    """Return the property length and the properties. Raises UnencodablePacket."""
    if properties is None:
        return b"\0"
    seen: set[int] = set()
    for ident, value in properties.pairs:
        rule = PROPERTIES.get(ident)
        if rule is None or kind not in rule.kinds:
            raise UnencodablePacket(f"packet type {kind} has no property 0x{ident:02X}")
        if ident in seen and kind not in rule.repeats:
            raise UnencodablePacket(f"{rule.name} comes twice")
        if rule.zero is not None and value == 0:
            raise UnencodablePacket(f"{rule.name} is 0")
        seen.add(ident)
    return properties_field(_encode_pairs(properties.pairs))


def properties_field(raw: bytes) -> bytes:
    """Put the property length before encoded properties."""
    return variable_length(len(raw)) + raw


def _encode_pairs(pairs: Iterable[tuple[int, PropertyValue]]) -> bytes:
    # all 27 ids are below 128, so the Variable Byte Integer of an id is one byte
    return b"".join(bytes((ident,)) + PROPERTIES[ident].type.write(value) for ident, value in pairs)


def _read_pairs(fields: Fields, kind: int) -> Properties:
    pairs: list[tuple[int, PropertyValue]] = []
    seen: set[int] = set()
    while fields:
        ident = fields.variable()
        rule = PROPERTIES.get(ident)
        if rule is None or kind not in rule.kinds:
            what = f"packet type {kind} has no property {ident}"
            raise MalformedPacket(MALFORMED, "MQTT5-2.2.2.2", what)
        value = rule.type.read(fields)
        if ident in seen and kind not in rule.repeats:
            raise MalformedPacket(PROTOCOL_ERROR, "MQTT5-2.2.2.2", f"{rule.name} comes twice")
        if rule.zero is not None and value == 0:
            raise MalformedPacket(rule.zero, "MQTT5-2.2.2.2", f"{rule.name} is 0")
        if ident == RESPONSE_TOPIC and isinstance(value, bytes):
            check_topic(value)  # [MQTT5-3.3.2-14]
        seen.add(ident)
        pairs.append((ident, value))
    if AUTHENTICATION_DATA in seen and AUTHENTICATION_METHOD not in seen:
        what = "Authentication Data without an Authentication Method"
        raise MalformedPacket(PROTOCOL_ERROR, "MQTT5-3.1.2.11.10", what)
    return Properties(tuple(pairs))
