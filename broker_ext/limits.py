"""Receive Maximum as we ask for it: how many messages a client may have under way to us.

Source: [MQTT5-3.3.4-7], [MQTT5-3.3.4-9]. A QoS 1 message counts until its PUBACK is written, a QoS
2 message until its PUBCOMP is, or a PUBREC that refuses it. What an earlier connection left does
not count: the quota belongs to one connection (section 4.9).
"""

from __future__ import annotations

from typing import Final

__all__ = ["InFlight"]

_PUBACK: Final = 0x40
_PUBREC: Final = 0x50
_PUBCOMP: Final = 0x70


class InFlight:
    """The packet ids of messages that a client sent and that are not finished."""

    __slots__ = ("_ids", "_most")

    def __init__(self, most: int) -> None:
        self._ids: set[int] = set()
        self._most = most

    def __len__(self) -> int:
        return len(self._ids)

    def begin(self, packet_id: int) -> bool:
        """A PUBLISH came. False: it is one more than may be under way."""
        ids = self._ids
        ids.add(packet_id)
        return len(ids) <= self._most

    def written(self, acknowledgements: bytes) -> None:
        """These PUBACK, PUBREC and PUBCOMP packets go out, each of less than 128 bytes."""
        ids = self._ids
        at = 0
        while at < len(acknowledgements):
            kind = acknowledgements[at]
            length = acknowledgements[at + 1]
            refuses = length > 2 and acknowledgements[at + 4] >= 0x80
            if kind in (_PUBACK, _PUBCOMP) or (kind == _PUBREC and refuses):
                ids.discard(acknowledgements[at + 2] << 8 | acknowledgements[at + 3])
            at += 2 + length
