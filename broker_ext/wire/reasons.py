"""Reason codes of MQTT 5 (section 2.4): their names and the packets that may carry them.

From 0x80 on they say that something failed. MQTT 3.1.1 has only the codes of CONNACK_CODES, and
0x80 in SUBACK.
"""

from typing import Final, NamedTuple

from broker_ext.wire.kinds import (
    AUTH,
    CONNACK,
    DISCONNECT,
    PUBACK,
    PUBCOMP,
    PUBREC,
    PUBREL,
    SUBACK,
    UNSUBACK,
)

__all__ = [
    "CONNACK_CODES",
    "MALFORMED",
    "PACKET_TOO_LARGE",
    "PROTOCOL_ERROR",
    "QOS_NOT_SUPPORTED",
    "REASONS",
    "TOPIC_ALIAS_INVALID",
    "TOPIC_FILTER_INVALID",
    "TOPIC_NAME_INVALID",
    "UNSUPPORTED_PROTOCOL_VERSION",
    "Reason",
    "valid_reason",
]

MALFORMED: Final = 0x81
PROTOCOL_ERROR: Final = 0x82
UNSUPPORTED_PROTOCOL_VERSION: Final = 0x84
TOPIC_FILTER_INVALID: Final = 0x8F
TOPIC_NAME_INVALID: Final = 0x90
TOPIC_ALIAS_INVALID: Final = 0x94
PACKET_TOO_LARGE: Final = 0x95
QOS_NOT_SUPPORTED: Final = 0x9B


class Reason(NamedTuple):
    """name: as the specification writes it. kinds: packet types that may carry the code."""

    name: str
    kinds: frozenset[int]


def _reason(name: str, *kinds: int) -> Reason:
    return Reason(name, frozenset(kinds))


REASONS: Final[dict[int, Reason]] = {
    # 0x00 is "Normal disconnection" in DISCONNECT and "Granted QoS 0" in SUBACK
    0x00: _reason(
        "Success",
        CONNACK,
        PUBACK,
        PUBREC,
        PUBREL,
        PUBCOMP,
        SUBACK,
        UNSUBACK,
        DISCONNECT,
        AUTH,
    ),
    0x01: _reason("Granted QoS 1", SUBACK),
    0x02: _reason("Granted QoS 2", SUBACK),
    0x04: _reason("Disconnect with Will Message", DISCONNECT),
    0x10: _reason("No matching subscribers", PUBACK, PUBREC),
    0x11: _reason("No subscription existed", UNSUBACK),
    0x18: _reason("Continue authentication", AUTH),
    0x19: _reason("Re-authenticate", AUTH),
    0x80: _reason("Unspecified error", CONNACK, PUBACK, PUBREC, SUBACK, UNSUBACK, DISCONNECT),
    0x81: _reason("Malformed Packet", CONNACK, DISCONNECT),
    0x82: _reason("Protocol Error", CONNACK, DISCONNECT),
    0x83: _reason(
        "Implementation specific error", CONNACK, PUBACK, PUBREC, SUBACK, UNSUBACK, DISCONNECT
    ),
    0x84: _reason("Unsupported Protocol Version", CONNACK),
    0x85: _reason("Client Identifier not valid", CONNACK),
    0x86: _reason("Bad User Name or Password", CONNACK),
    0x87: _reason("Not authorized", CONNACK, PUBACK, PUBREC, SUBACK, UNSUBACK, DISCONNECT),
    0x88: _reason("Server unavailable", CONNACK),
    0x89: _reason("Server busy", CONNACK, DISCONNECT),
    0x8A: _reason("Banned", CONNACK),
    0x8B: _reason("Server shutting down", DISCONNECT),
    0x8C: _reason("Bad authentication method", CONNACK, DISCONNECT),
    0x8D: _reason("Keep Alive timeout", DISCONNECT),
    0x8E: _reason("Session taken over", DISCONNECT),
    0x8F: _reason("Topic Filter invalid", SUBACK, UNSUBACK, DISCONNECT),
    0x90: _reason("Topic Name invalid", CONNACK, PUBACK, PUBREC, DISCONNECT),
    0x91: _reason("Packet Identifier in use", PUBACK, PUBREC, SUBACK, UNSUBACK),
    0x92: _reason("Packet Identifier not found", PUBREL, PUBCOMP),
    0x93: _reason("Receive Maximum exceeded", DISCONNECT),
    0x94: _reason("Topic Alias invalid", DISCONNECT),
    0x95: _reason("Packet too large", CONNACK, DISCONNECT),
    0x96: _reason("Message rate too high", DISCONNECT),
    0x97: _reason("Quota exceeded", CONNACK, PUBACK, PUBREC, SUBACK, DISCONNECT),
    0x98: _reason("Administrative action", DISCONNECT),
    0x99: _reason("Payload format invalid", CONNACK, PUBACK, PUBREC, DISCONNECT),
    0x9A: _reason("Retain not supported", CONNACK, DISCONNECT),
    0x9B: _reason("QoS not supported", CONNACK, DISCONNECT),
    0x9C: _reason("Use another server", CONNACK, DISCONNECT),
    0x9D: _reason("Server moved", CONNACK, DISCONNECT),
    0x9E: _reason("Shared Subscriptions not supported", SUBACK, DISCONNECT),
    0x9F: _reason("Connection rate exceeded", CONNACK, DISCONNECT),
    0xA0: _reason("Maximum connect time", DISCONNECT),
    0xA1: _reason("Subscription Identifiers not supported", SUBACK, DISCONNECT),
    0xA2: _reason("Wildcard Subscriptions not supported", SUBACK, DISCONNECT),
}

CONNACK_CODES: Final[dict[int, str]] = {
    0: "Connection Accepted",
    1: "unacceptable protocol version",
    2: "identifier rejected",
    3: "Server unavailable",
    4: "bad user name or password",
    5: "not authorized",
}
"""Return codes of CONNACK before MQTT 5."""


def valid_reason(kind: int, reason: int, version: int = 5) -> bool:
    """Whether a packet type may carry a reason code in this version."""
    if version < 5:
        return reason in (CONNACK_CODES if kind == CONNACK else (0, 1, 2, 0x80))
    found = REASONS.get(reason)
    return found is not None and kind in found.kinds
