"""What the two sides of an MQTT 5 connection tell each other in CONNECT and CONNACK.

MQTT 3.1.1 has nothing of it: its connections have the terms that a CONNECT without properties has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from broker_ext.reasons import Reason
from broker_ext.shared import filter_of
from broker_ext.wire import Properties, valid_filter
from broker_ext.wire.properties import (
    ASSIGNED_CLIENT_ID,
    PACKET_BYTES_MAX,
    PAYLOAD_FORMAT,
    QOS_MAX,
    RECEIVE_MAX,
    REQUEST_PROBLEM_INFORMATION,
    REQUEST_RESPONSE_INFORMATION,
    RESPONSE_INFORMATION,
    RETAIN_AVAILABLE,
    SERVER_KEEP_ALIVE_S,
    SESSION_EXPIRY_S,
    SHARED_AVAILABLE,
    SUBSCRIPTION_IDS_AVAILABLE,
    TOPIC_ALIAS_MAX,
    WILDCARDS_AVAILABLE,
)
from storage.names import is_shared

if TYPE_CHECKING:
    from broker_ext.settings import Settings
    from broker_ext.wire import Connect, ConnectWill, PropertyValue

__all__ = [
    "ANY",
    "FOR_EVER",
    "Terms",
    "keep_alive_s",
    "not_available",
    "refuses_will",
    "told",
    "valid_payload",
]

FOR_EVER: Final = 0xFFFF_FFFF
"""Session Expiry Interval: the session does not expire."""
RECEIVE_MAX_DEFAULT: Final = 65_535


@dataclass(frozen=True, slots=True)
class Terms:
    """What a client asks for.

    receive_maximum: deliveries (QoS >= 1) under way to it. packet_bytes_max: 0 = no limit.
    expiry_s: Session Expiry Interval as asked for. aliases_max: Topic Alias Maximum.
    problems: it wants Reason Strings and User Properties with what goes wrong. responses: it wants
    Response Information.
    """

    receive_maximum: int = RECEIVE_MAX_DEFAULT
    packet_bytes_max: int = 0
    expiry_s: int = 0
    aliases_max: int = 0
    problems: bool = True
    responses: bool = False

    @staticmethod
    def of(connect: Connect) -> Terms:
        """The terms of a CONNECT (checked by the decoder)."""
        if connect.properties is None:
            return ANY
        get = connect.properties.get
        return Terms(
            receive_maximum=get(RECEIVE_MAX, RECEIVE_MAX_DEFAULT),
            packet_bytes_max=get(PACKET_BYTES_MAX, 0),
            expiry_s=get(SESSION_EXPIRY_S, 0),
            aliases_max=get(TOPIC_ALIAS_MAX, 0),
            problems=bool(get(REQUEST_PROBLEM_INFORMATION, 1)),
            responses=bool(get(REQUEST_RESPONSE_INFORMATION, 0)),
        )

    def granted_expiry_s(self, settings: Settings) -> int | None:
        """How long the session is kept after its connection, None = for ever."""
        most = settings.session_expiry_interval_s
        if self.expiry_s == FOR_EVER:
            return most
        return self.expiry_s if most is None else min(self.expiry_s, most)


ANY: Final = Terms()
"""Those of a client that says nothing."""


def keep_alive_s(settings: Settings, asked_s: int) -> int:
    """The keep alive of an MQTT 5 connection [MQTT5-3.1.2-21], 0 = none."""
    most = settings.max_keep_alive_s
    return most if most and not 0 < asked_s <= most else asked_s


def told(settings: Settings, terms: Terms, connect: Connect, *, assigned: bool) -> Properties:
    """The properties of a CONNACK that accepts: what differs from what a client would assume.

    connect: with the client id as it is now; assigned: we chose it.
    """
    pairs: list[tuple[int, PropertyValue]] = []
    granted = terms.granted_expiry_s(settings)
    if granted != (None if terms.expiry_s == FOR_EVER else terms.expiry_s):
        pairs.append((SESSION_EXPIRY_S, FOR_EVER if granted is None else granted))
    if settings.receive_maximum < RECEIVE_MAX_DEFAULT:
        pairs.append((RECEIVE_MAX, settings.receive_maximum))
    if settings.max_qos < 2:
        pairs.append((QOS_MAX, settings.max_qos))
    if not settings.retain_available:
        pairs.append((RETAIN_AVAILABLE, 0))
    pairs.append((PACKET_BYTES_MAX, settings.max_packet_bytes))
    if assigned:
        pairs.append((ASSIGNED_CLIENT_ID, connect.client_id))
    if settings.topic_alias_maximum:
        pairs.append((TOPIC_ALIAS_MAX, settings.topic_alias_maximum))
    if not settings.wildcard_subscriptions:
        pairs.append((WILDCARDS_AVAILABLE, 0))
    if not settings.subscription_identifiers:
        pairs.append((SUBSCRIPTION_IDS_AVAILABLE, 0))
    if not settings.shared_subscriptions:
        pairs.append((SHARED_AVAILABLE, 0))
    seconds = keep_alive_s(settings, connect.keep_alive_s)
    if seconds != connect.keep_alive_s:
        pairs.append((SERVER_KEEP_ALIVE_S, seconds))
    if terms.responses and settings.response_information:
        words = settings.response_information.encode()
        pairs.append((RESPONSE_INFORMATION, words.replace(b"{client_id}", connect.client_id)))
    return Properties(tuple(pairs))


def refuses_will(will: ConnectWill, settings: Settings) -> Reason | None:
    """Why a CONNECT is refused for its will: what CONNACK would have told its client."""
    if will.qos > settings.max_qos:
        return Reason.QOS_UNSUPPORTED  # [MQTT5-3.2.2-12]
    if will.retain and not settings.retain_available:
        return Reason.RETAIN_UNSUPPORTED  # [MQTT5-3.2.2-13]
    if will.topic.startswith(b"$"):
        return Reason.TOPIC_INVALID
    if not valid_payload(will.properties, will.payload):
        return Reason.PAYLOAD_FORMAT
    return None


def valid_payload(properties: Properties | None, payload: bytes) -> bool:
    """Whether a payload is UTF-8 if its Payload Format Indicator says so (section 3.3.2.3.2)."""
    if properties is None or not properties.get(PAYLOAD_FORMAT):
        return True
    try:
        payload.decode()
    except UnicodeDecodeError:
        return False
    return True


def not_available(topic_filter: bytes, identifier: int, settings: Settings) -> int:
    """The SUBACK code of a filter that is refused whoever asks for it, 0 = it is not."""
    if not valid_filter(topic_filter):
        return Reason.FILTER_INVALID
    if is_shared(topic_filter):
        if not settings.shared_subscriptions:
            return Reason.SHARED_UNSUPPORTED
        if filter_of(topic_filter) is None:
            return Reason.FILTER_INVALID
    if identifier and not settings.subscription_identifiers:
        return Reason.IDENTIFIERS_UNSUPPORTED
    if not settings.wildcard_subscriptions and (b"+" in topic_filter or b"#" in topic_filter):
        return Reason.WILDCARDS_UNSUPPORTED
    return 0
