"""Topic aliases (section 3.3.2.3.4): a number that stands for a topic name on one connection.

They are never stored: a message has its topic everywhere else. Each direction has its own numbers.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from broker_ext.reasons import Reason
from broker_ext.wire import PACKET_ID, MalformedPacket
from broker_ext.wire.properties import TOPIC_ALIAS

__all__ = ["ALIASES_MAX", "Aliases", "AliasesIn"]

ALIASES_MAX: Final = 64
"""Aliases that we use towards one client, however many it permits: what we keep for it (P12)."""
TOPIC_BYTES_MIN: Final = 4
"""A shorter topic is shorter than its alias."""

_ALIAS: Final = bytes((TOPIC_ALIAS,))


class AliasesIn:
    """What a client's aliases stand for. most: the Topic Alias Maximum that we told it."""

    __slots__ = ("_most", "_topics")

    def __init__(self, most: int) -> None:
        self._most = most
        self._topics: dict[int, bytes] = {}

    def topic(self, alias: int, topic: bytes) -> bytes:
        """The topic of a PUBLISH with an alias. topic: as it was sent, empty = as before.

        Raises MalformedPacket.
        """
        if not 0 < alias <= self._most:
            what = "a topic alias is above the maximum"
            raise MalformedPacket(Reason.ALIAS_INVALID, "MQTT5-3.3.2-9", what)
        if topic:
            self._topics[alias] = topic
            return topic
        known = self._topics.get(alias)
        if known is None:
            what = "a topic alias stands for nothing yet"
            raise MalformedPacket(Reason.PROTOCOL_ERROR, "MQTT5-3.3.2.3.4", what)
        return known


class Aliases:
    """The aliases that we use towards a client.

    While some are free each new topic gets one. Then a new topic takes that of the topic that was
    not sent for longest, if that is at least twice as many messages ago as there are aliases: who
    cycles through more topics than that has the use of most of them, instead of none.
    """

    __slots__ = ("_most", "_sent", "_topics")

    def __init__(self, most: int) -> None:
        self._most = min(most, ALIASES_MAX)
        self._topics: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        self._sent = 0

    def shorten(self, topic: bytes) -> tuple[bytes, bytes]:
        """The topic to write, and the encoded alias property (b"" = none)."""
        self._sent += 1
        topics = self._topics
        found = topics.get(topic)
        if found is not None:
            alias = found[0]
            topics[topic] = (alias, self._sent)
            topics.move_to_end(topic)
            return b"", _ALIAS + PACKET_ID[alias]
        if len(topic) < TOPIC_BYTES_MIN or not self._most:
            return topic, b""
        if len(topics) < self._most:
            alias = len(topics) + 1
        else:
            oldest = next(iter(topics))
            alias, sent = topics[oldest]
            if self._sent - sent < 2 * self._most:
                return topic, b""
            del topics[oldest]
        topics[topic] = (alias, self._sent)
        return topic, _ALIAS + PACKET_ID[alias]
