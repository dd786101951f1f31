"""Every reason code that this broker sends (MQTT 5, section 2.4), and the words that go with them.

DESIGN.md has a table of them: when each is sent, by which clause, and the test that sees it on the
wire. MQTT 3.1.1 is told the return codes of CONNACK and 0x80 in SUBACK; for everything else its
connection is closed.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final, NamedTuple

__all__ = ["NO_WORDS", "Reason", "Words", "return_code"]


class Reason(IntEnum):
    """A reason code, by what it says."""

    SUCCESS = 0x00
    NO_MATCHING = 0x10
    NO_SUBSCRIPTION = 0x11
    CONTINUE = 0x18
    UNSPECIFIED = 0x80
    MALFORMED = 0x81
    PROTOCOL_ERROR = 0x82
    IMPLEMENTATION = 0x83
    UNSUPPORTED_VERSION = 0x84
    BAD_CLIENT_ID = 0x85
    BAD_CREDENTIALS = 0x86
    NOT_AUTHORIZED = 0x87
    UNAVAILABLE = 0x88
    BUSY = 0x89
    SHUTTING_DOWN = 0x8B
    BAD_METHOD = 0x8C
    KEEP_ALIVE = 0x8D
    TAKEN_OVER = 0x8E
    FILTER_INVALID = 0x8F
    TOPIC_INVALID = 0x90
    RECEIVE_MAXIMUM = 0x93
    ALIAS_INVALID = 0x94
    PACKET_TOO_LARGE = 0x95
    QUOTA_EXCEEDED = 0x97
    ADMINISTRATIVE = 0x98
    PAYLOAD_FORMAT = 0x99
    RETAIN_UNSUPPORTED = 0x9A
    QOS_UNSUPPORTED = 0x9B
    SHARED_UNSUPPORTED = 0x9E
    IDENTIFIERS_UNSUPPORTED = 0xA1
    WILDCARDS_UNSUPPORTED = 0xA2


class Words(NamedTuple):
    """What a client is told beside a reason code: our own words, never those of an exception or of
    a packet. text: the Reason String. pairs: User Properties."""

    text: bytes = b""
    pairs: tuple[tuple[bytes, bytes], ...] = ()


NO_WORDS: Final = Words()

_RETURN_CODES: Final = {
    Reason.UNSUPPORTED_VERSION: 1,
    Reason.BAD_CLIENT_ID: 2,
    Reason.BAD_CREDENTIALS: 5,
    Reason.NOT_AUTHORIZED: 5,
}
_UNAVAILABLE: Final = 3


def return_code(reason: int) -> int:
    """What MQTT 3.1.1 says in CONNACK (table 3.1) in place of a reason code from 0x80 on."""
    return _RETURN_CODES.get(Reason(reason), _UNAVAILABLE)
