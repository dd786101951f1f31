"""What the two sides of an MQTT 5 connection tell each other in CONNECT and CONNACK.

MQTT 3.1.1 has nothing of it: its connections have the terms that a CONNECT without properties has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from broker_ext.wire import Properties
from broker_ext.wire.properties import (
    ASSIGNED_CLIENT_ID,
    PACKET_BYTES_MAX,
    QOS_MAX,
    RECEIVE_MAX,
    SESSION_EXPIRY_S,
    SHARED_AVAILABLE,
)

if TYPE_CHECKING:
    from broker_ext.settings import Settings
    from broker_ext.wire import Connect, PropertyValue

__all__ = ["FOR_EVER", "Terms", "told"]

FOR_EVER: Final = 0xFFFF_FFFF
"""Session Expiry Interval: the session does not expire."""
RECEIVE_MAX_DEFAULT: Final = 65_535


@dataclass(frozen=True, slots=True)
class Terms:
    """What a client asks for.

    receive_maximum: deliveries (QoS >= 1) under way to it. packet_bytes_max: 0 = no limit.
    expiry_s: Session Expiry Interval as asked for.
    """

    receive_maximum: int = RECEIVE_MAX_DEFAULT
    packet_bytes_max: int = 0
    expiry_s: int = 0

    @staticmethod
    def of(connect: Connect) -> Terms:
        """The terms of a CONNECT (checked by the decoder)."""
        if connect.properties is None:
            return Terms()
        get = connect.properties.get
        return Terms(
            receive_maximum=get(RECEIVE_MAX, RECEIVE_MAX_DEFAULT),
            packet_bytes_max=get(PACKET_BYTES_MAX, 0),
            expiry_s=get(SESSION_EXPIRY_S, 0),
        )

    def granted_expiry_s(self, settings: Settings) -> int | None:
        """How long the session is kept after its connection, None = for ever."""
        most = settings.session_expiry_interval_s
        if self.expiry_s == FOR_EVER:
            return most
        return self.expiry_s if most is None else min(self.expiry_s, most)


def told(settings: Settings, terms: Terms, *, assigned: bytes) -> Properties:
    """The properties of a CONNACK that accepts: what differs from what a client must assume.

    assigned: the client id we chose, b"" = its own.
    """
    pairs: list[tuple[int, PropertyValue]] = []
    granted = terms.granted_expiry_s(settings)
    if granted != (None if terms.expiry_s == FOR_EVER else terms.expiry_s):
        pairs.append((SESSION_EXPIRY_S, FOR_EVER if granted is None else granted))
    if settings.receive_maximum < RECEIVE_MAX_DEFAULT:
        pairs.append((RECEIVE_MAX, settings.receive_maximum))
    if settings.max_qos < 2:
        pairs.append((QOS_MAX, settings.max_qos))
    pairs.append((PACKET_BYTES_MAX, settings.max_packet_bytes))
    if assigned:
        pairs.append((ASSIGNED_CLIENT_ID, assigned))
    if not settings.shared_subscriptions:
        pairs.append((SHARED_AVAILABLE, 0))
    return Properties(tuple(pairs))
