"""The packets of MQTT as values: what the decoder returns and the encoder takes.

They are named tuples because the decoder makes hundreds of thousands a second, and a tuple is
the cheapest object that has fields. Two things follow from it:
- look at `type(packet)`, never at truth or equality alone: `Pingreq()` is empty, hence false,
  and `Puback(7) == Pubrec(7)`;
- no constructor checks anything: the decoder has checked, and the encoder will.

All strings are bytes, as they were on the wire (checked to be UTF-8). `properties` is None where
there are none, which is always so before MQTT 5; `reason` is 0 there, but in CONNACK.
No repr shows a payload or a password (P13).
"""

from typing import NamedTuple, TypeAlias

from broker_ext.wire.properties import Properties

__all__ = [
    "Auth",
    "Connack",
    "Connect",
    "ConnectWill",
    "Disconnect",
    "Packet",
    "Pingreq",
    "Pingresp",
    "Puback",
    "Pubcomp",
    "Publish",
    "Pubrec",
    "Pubrel",
    "Suback",
    "Subscribe",
    "SubscribeFilter",
    "Unsuback",
    "Unsubscribe",
]


def _hidden(value: bytes) -> str:
    return f"<{len(value)} bytes>"


class ConnectWill(NamedTuple):
    """The will inside a CONNECT."""

    topic: bytes
    payload: bytes
    qos: int
    retain: bool
    properties: Properties | None = None

    def __repr__(self) -> str:
        return (
            f"ConnectWill(topic={self.topic!r}, payload={_hidden(self.payload)}, qos={self.qos}, "
            f"retain={self.retain}, properties={self.properties!r})"
        )


class Connect(NamedTuple):
    """version: 3 (MQTT 3.1), 4 (3.1.1) or 5. keep_alive_s: 0 = none. client_id may be empty."""

    version: int
    client_id: bytes
    clean_start: bool = True
    keep_alive_s: int = 0
    username: bytes | None = None
    password: bytes | None = None
    will: ConnectWill | None = None
    properties: Properties | None = None

    def __repr__(self) -> str:
        # not even the length of the password
        password = None if self.password is None else "<hidden>"
        return (
            f"Connect(version={self.version}, client_id={self.client_id!r}, "
            f"clean_start={self.clean_start}, keep_alive_s={self.keep_alive_s}, "
            f"username={self.username!r}, password={password}, will={self.will!r}, "
            f"properties={self.properties!r})"
        )


class Connack(NamedTuple):
    """reason: a return code 0..5 before MQTT 5, a reason code in it."""

    session_present: bool
    reason: int = 0
    properties: Properties | None = None


class Publish(NamedTuple):
    """flags: low nibble of the first byte (DUP 8, QoS 6, RETAIN 1). packet_id: 0 for QoS 0."""

    flags: int
    topic: bytes
    packet_id: int
    payload: bytes
    properties: Properties | None = None

    @property
    def qos(self) -> int:
        """0, 1 or 2."""
        return self.flags >> 1 & 3

    @property
    def retain(self) -> bool:
        """The RETAIN flag."""
        return self.flags & 1 == 1

    @property
    def dup(self) -> bool:
        """The DUP flag: says that it was sent before, not that it was received before."""
        return self.flags & 8 == 8

    def __repr__(self) -> str:
        return (
            f"Publish(flags={self.flags}, topic={self.topic!r}, packet_id={self.packet_id}, "
            f"payload={_hidden(self.payload)}, properties={self.properties!r})"
        )


class Puback(NamedTuple):
    """Acknowledges a QoS 1 PUBLISH."""

    packet_id: int
    reason: int = 0
    properties: Properties | None = None


class Pubrec(NamedTuple):
    """Received a QoS 2 PUBLISH."""

    packet_id: int
    reason: int = 0
    properties: Properties | None = None


class Pubrel(NamedTuple):
    """Releases a QoS 2 packet id."""

    packet_id: int
    reason: int = 0
    properties: Properties | None = None


class Pubcomp(NamedTuple):
    """Ends a QoS 2 exchange."""

    packet_id: int
    reason: int = 0
    properties: Properties | None = None


class SubscribeFilter(NamedTuple):
    """options: the whole byte; QoS is `options & 3`, and MQTT 5 uses bits 2..5 beside it."""

    filter: bytes
    options: int

    @property
    def qos(self) -> int:
        """Maximum QoS asked for."""
        return self.options & 3


class Subscribe(NamedTuple):
    """At least one filter. Wildcard syntax is not checked: SUBACK answers filter by filter."""

    packet_id: int
    filters: tuple[SubscribeFilter, ...]
    properties: Properties | None = None


class Suback(NamedTuple):
    """reasons: one byte for each filter, in order."""

    packet_id: int
    reasons: bytes
    properties: Properties | None = None


class Unsubscribe(NamedTuple):
    """At least one filter."""

    packet_id: int
    filters: tuple[bytes, ...]
    properties: Properties | None = None


class Unsuback(NamedTuple):
    """reasons: one byte for each filter in MQTT 5, empty before."""

    packet_id: int
    reasons: bytes = b""
    properties: Properties | None = None


class Pingreq(NamedTuple):
    """Asks for a PINGRESP."""


class Pingresp(NamedTuple):
    """Answers a PINGREQ."""


class Disconnect(NamedTuple):
    """Nothing may follow it: drop what the same chunk holds after it [MQTT-3.14.4-2]."""

    reason: int = 0
    properties: Properties | None = None


class Auth(NamedTuple):
    """MQTT 5 only."""

    reason: int = 0
    properties: Properties | None = None


Packet: TypeAlias = (
    Connect
    | Connack
    | Publish
    | Puback
    | Pubrec
    | Pubrel
    | Pubcomp
    | Subscribe
    | Suback
    | Unsubscribe
    | Unsuback
    | Pingreq
    | Pingresp
    | Disconnect
    | Auth
)
