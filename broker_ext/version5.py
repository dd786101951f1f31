"""What MQTT 5 adds to a connection, in one place; ``Connection`` does what both versions do.

Pure: packets and bytes, no socket, no clock. An MQTT 3.1.1 connection has none of it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from broker_ext.aliases import Aliases, AliasesIn
from broker_ext.limits import InFlight
from broker_ext.reasons import NO_WORDS, Reason, Words
from broker_ext.terms import Terms, refuses_will, told, valid_payload
from broker_ext.wire import (
    Connack,
    MalformedPacket,
    Properties,
    encode,
    properties_field,
)
from broker_ext.wire.properties import (
    MESSAGE_EXPIRY_S,
    REASON_STRING,
    SERVER_REFERENCE,
    SESSION_EXPIRY_S,
    TOPIC_ALIAS,
    USER_PROPERTY,
)

if TYPE_CHECKING:
    from broker_ext.authentication import Authentication
    from broker_ext.settings import Settings
    from broker_ext.wire import Connect, Disconnect, Packet, PropertyValue, Publish
    from storage.api import Entry

__all__ = ["Version5", "with_words"]

OVERHEAD_BYTES: Final = 20
"""What a PUBLISH is longer than topic, properties and payload, with an alias: 17 at most."""
_EXPIRY: Final = bytes((MESSAGE_EXPIRY_S,))
_NOTHING: Final = b"\0"
_DISCONNECTS: Final = frozenset(
    {0, 4, 0x80, 0x81, 0x82, 0x83, 0x90, 0x93, 0x94, 0x95, 0x96, 0x97, 0x98, 0x99}
)
"""Reason codes of a client's DISCONNECT (table 3-10)."""


class Version5:
    """The MQTT 5 half of one connection, from its CONNECT on."""

    __slots__ = (
        "_aliases",
        "_aliases_in",
        "_assigns",
        "authentication",
        "in_flight",
        "settings",
        "terms",
    )

    def __init__(
        self,
        connect: Connect,
        settings: Settings,
        authentication: Authentication,
    ) -> None:
        self.settings = settings
        self._assigns = not connect.client_id
        self.terms = Terms.of(connect)
        self.in_flight = InFlight(settings.receive_maximum)
        self.authentication = authentication
        self._aliases_in = AliasesIn(settings.topic_alias_maximum)
        self._aliases = Aliases(self.terms.aliases_max) if self.terms.aliases_max else None

    def refuses(self, connect: Connect) -> Reason | None:
        """Why a CONNECT cannot be accepted, whoever it is from; None if it can."""
        if connect.will is not None:
            reason = refuses_will(connect.will, self.settings)
            if reason is not None:
                return reason
        return None if self.can_accept(connect) else Reason.PACKET_TOO_LARGE

    def can_accept(self, connect: Connect) -> bool:
        """Whether its client takes a packet large enough to be told what it must know."""
        return self.encode(self.connack(connect)) is not None

    # ------------------------------------------------------------------ what is received

    def received(self, packet: Publish) -> Publish:
        """A PUBLISH with its topic, and within what CONNACK said. Raises MalformedPacket."""
        flags, topic, _, payload, properties = packet
        settings = self.settings
        if properties is not None:
            alias = properties.get(TOPIC_ALIAS)
            if alias is not None:
                packet = packet._replace(topic=self._aliases_in.topic(alias, topic))
            if not flags & 6 and not valid_payload(properties, payload):
                what = "a QoS 0 payload is not UTF-8, as it says"
                raise MalformedPacket(Reason.PAYLOAD_FORMAT, "MQTT5-3.3.2.3.2", what)
        if flags & 6:
            if flags >> 1 & 3 > settings.max_qos:
                what = "a QoS above the maximum"
                raise MalformedPacket(Reason.QOS_UNSUPPORTED, "MQTT5-3.2.2-11", what)
            self.count(packet)
        if flags & 1 and not settings.retain_available:
            what = "a retained message, and retain is not available"
            raise MalformedPacket(Reason.RETAIN_UNSUPPORTED, "MQTT5-3.2.2-14", what)
        return packet

    def count(self, packet: Publish) -> None:
        """A PUBLISH came; to count it again counts nothing. Raises MalformedPacket if there are
        more under way than our Receive Maximum."""
        if packet.packet_id and not self.in_flight.begin(packet.packet_id):
            what = "more messages under way than the receive maximum"
            raise MalformedPacket(Reason.RECEIVE_MAXIMUM, "MQTT5-3.3.4-9", what)

    # ---------------------------------------------------------------------- what is sent

    def encode(self, packet: Packet) -> bytes | None:
        """The bytes of any packet but PUBLISH, as its client may be sent it.

        Without Reason String and User Properties where the client asked for no problem information
        [MQTT5-3.1.2-29], or where the packet would be larger than it takes. None: it is larger even
        so, and must not be sent [MQTT5-3.1.2-24].
        """
        most = self.terms.packet_bytes_max
        left_out: tuple[int, ...] = () if self.terms.problems else (USER_PROPERTY, REASON_STRING)
        data = encode(_without(packet, left_out), 5)
        if not most or len(data) <= most:
            return data
        for left_out in ((USER_PROPERTY,), (USER_PROPERTY, REASON_STRING)):
            data = encode(_without(packet, left_out), 5)
            if len(data) <= most:
                return data
        return None

    def connack(
        self,
        connect: Connect,
        session_present: bool = False,
        words: Words = NO_WORDS,
    ) -> Connack:
        """CONNACK of a connection that is accepted. connect: with its client id as it is now."""
        pairs = told(self.settings, self.terms, connect, assigned=self._assigns).pairs
        if self.authentication.told is not None:
            pairs = (*pairs, *self.authentication.told.pairs)
        return Connack(session_present, Reason.SUCCESS, with_words(words, pairs))

    def leave(self, packet: Disconnect) -> None:
        """A client's DISCONNECT may change its Session Expiry Interval. Raises MalformedPacket."""
        get = packet.properties.get if packet.properties is not None else dict[int, int]().get
        if packet.reason not in _DISCONNECTS or get(SERVER_REFERENCE) is not None:
            what = "a client said what only a server says"
            raise MalformedPacket(Reason.PROTOCOL_ERROR, "MQTT5-3.14.2-1", what)
        expiry_s = get(SESSION_EXPIRY_S)
        if expiry_s is None:
            return
        if expiry_s and not self.terms.expiry_s:
            what = "a session that ends with its connection is to be kept"
            raise MalformedPacket(Reason.PROTOCOL_ERROR, "MQTT5-3.14.2.2.2", what)
        self.terms = replace(self.terms, expiry_s=expiry_s)

    def head_and_properties(
        self, entry: Entry, identifiers: bytes, now_ms: int
    ) -> tuple[bytes, bytes]:
        """The topic of a PUBLISH and its properties with their length."""
        topic = entry.topic
        properties = identifiers + entry.properties
        if entry.expires_ms:  # what is left of it [MQTT5-3.3.2-6]
            left_s = max((entry.expires_ms - now_ms + 999) // 1000, 0)
            properties = _EXPIRY + left_s.to_bytes(4, "big") + properties
        if self._aliases is not None and not self._is_near_limit(entry, properties):
            topic, alias = self._aliases.shorten(topic)
            properties = alias + properties
        return topic, properties_field(properties) if properties else _NOTHING

    def _is_near_limit(self, entry: Entry, properties: bytes) -> bool:
        """Whether a new alias could make a packet larger than its client takes."""
        most = self.terms.packet_bytes_max
        if not most:
            return False
        return len(entry.topic) + len(properties) + len(entry.payload) + OVERHEAD_BYTES > most


def with_words(
    words: Words, pairs: tuple[tuple[int, PropertyValue], ...] = ()
) -> Properties | None:
    """Properties with a Reason String and User Properties behind them; None if there are none."""
    if words.text:
        pairs = (*pairs, (REASON_STRING, words.text))
    pairs = (*pairs, *((USER_PROPERTY, pair) for pair in words.pairs))
    return Properties(pairs) if pairs else None


def _without(packet: Packet, left_out: tuple[int, ...]) -> Packet:
    properties: Properties | None = getattr(packet, "properties", None)
    if not left_out or properties is None:
        return packet
    kept = tuple(pair for pair in properties.pairs if pair[0] not in left_out)
    return packet._replace(properties=Properties(kept) if kept else None)  # type: ignore[call-arg]
