"""MQTT 5 packets as MQTT 3.1.1 can say them: what amqtt's plugins are shown, who know no other.

Properties go, of Subscription Options the QoS stays, of a refusal in CONNACK the return code; an
AUTH packet has nothing like it. What is sent under a topic alias has its topic again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from broker_ext.reasons import Reason, return_code
from broker_ext.wire import (
    Auth,
    Connack,
    Connect,
    Decoder,
    Publish,
    Subscribe,
    SubscribeFilter,
    encode,
)
from broker_ext.wire.properties import TOPIC_ALIAS

if TYPE_CHECKING:
    from broker_ext.wire import Packet

__all__ = ["as_older", "sent_as_older"]


def as_older(packet: Packet) -> bytes:
    """The bytes of the packet in MQTT 3.1.1; none if it has no such packet."""
    match packet:
        case Auth():
            return b""
        case Connect():
            username = packet.username
            if packet.password is not None and username is None:
                username = b""  # a password alone is new in MQTT 5
            packet = packet._replace(version=4, username=username)
        case Connack() if packet.reason >= Reason.UNSPECIFIED:
            packet = packet._replace(reason=return_code(packet.reason))
        case Subscribe():
            filters = tuple(SubscribeFilter(name, options & 3) for name, options in packet.filters)
            packet = packet._replace(filters=filters)
    return encode(packet, 4)


def sent_as_older(data: bytes, aliases: dict[int, bytes]) -> bytes:
    """The same for whole packets that were sent to an MQTT 5 client. aliases: what the aliases of
    its connection stand for; kept by the caller, filled here."""
    shown = bytearray()
    for packet in Decoder(server=False, version=5).feed(data):
        if type(packet) is Publish and packet.properties is not None:
            alias = packet.properties.get(TOPIC_ALIAS)
            if alias is not None and packet.topic:
                aliases[alias] = packet.topic
            elif alias is not None:
                packet = packet._replace(topic=aliases[alias])  # noqa: PLW2901 - the same, in full
        shown += as_older(packet)
    return bytes(shown)
