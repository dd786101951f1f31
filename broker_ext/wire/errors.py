"""Errors of the codec.

WireError
|- MalformedPacket        what a peer sent is not MQTT; the decoder keeps it in `Decoder.error`
|  `- UnsupportedVersion  a CONNECT of a protocol level that this side does not speak
`- UnencodablePacket      a packet that no bytes can say (also a ValueError: it is the caller's bug)

Texts are our own words, and never contain what a peer sent.
Clause ids are those of MQTT 3.1.1; rules that only MQTT 5 has carry its ids, with "MQTT5-" in
front, because the two specifications number their rules apart. A rule that has no number of its
own carries MQTT-4.8.0-1 (a protocol violation closes the connection), or in MQTT 5 the section
that states it, as "MQTT5-2.2.2.2". Reason codes are in reasons.py; a client before MQTT 5 is
never told them: its connection closes.
"""

from typing import ClassVar

from broker_ext.wire.reasons import UNSUPPORTED_PROTOCOL_VERSION

__all__ = [
    "MalformedPacket",
    "UnencodablePacket",
    "UnsupportedVersion",
    "WireError",
]


class WireError(Exception):
    """Root of what the codec raises or reports. code: stable number in the style of HTTP."""

    code: ClassVar[int] = 500


class MalformedPacket(WireError):
    """A peer broke the protocol; the connection has to be closed.

    reason_code: what MQTT 5 would say in DISCONNECT or CONNACK, 0x80..0xFF.
    clause: the statement that was broken, as "MQTT-3.3.2-2".
    what: our words for it; holds no bytes of the packet.
    """

    code = 400

    def __init__(self, reason_code: int, clause: str, what: str) -> None:
        super().__init__(reason_code, clause, what)
        self.reason_code = reason_code
        self.clause = clause
        self.what = what

    def __str__(self) -> str:
        return f"{self.what} [{self.clause}] (0x{self.reason_code:02X})"


class UnsupportedVersion(MalformedPacket):
    """A CONNECT with a protocol level that is not accepted here; `level` is what it asked for.

    [MQTT-3.1.2-2]: the broker answers CONNACK 1 (MQTT 5: 0x84) before it closes.
    """

    code = 505

    def __init__(self, level: int) -> None:
        super().__init__(
            UNSUPPORTED_PROTOCOL_VERSION, "MQTT-3.1.2-2", f"protocol level {level} is not accepted"
        )
        self.level = level


class UnencodablePacket(WireError, ValueError):
    """A field is out of the range that the wire has room for. A bug of the caller."""

    code = 422

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what
