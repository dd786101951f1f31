"""Strings, topic names and topic filters: what may be one, and one object for each topic name."""

from typing import Final

from broker_ext.wire.errors import MalformedPacket
from broker_ext.wire.reasons import MALFORMED, TOPIC_NAME_INVALID

__all__ = [
    "NAMES_BYTES_MAX",
    "NAMES_MAX",
    "TopicNames",
    "check_text",
    "check_topic",
    "valid_filter",
]

NAMES_MAX: Final = 65_536
"""Topic names kept; enough for a fleet with one topic per device, small enough to rebuild."""

NAMES_BYTES_MAX: Final = 8 * 1024 * 1024
"""Bytes of topic names kept: one name may be 65,535 bytes, so a count alone bounds nothing."""


def check_text(text: bytes) -> None:
    """Raise MalformedPacket if `text` is no MQTT string: UTF-8 without surrogates and NUL."""
    try:
        text.decode()
    except UnicodeDecodeError:
        # [MQTT-1.5.3-1]; from None: the cause carries the bytes that a log must not show
        raise MalformedPacket(MALFORMED, "MQTT-1.5.3-1", "a string is not UTF-8") from None
    if b"\0" in text:
        raise MalformedPacket(MALFORMED, "MQTT-1.5.3-2", "a string contains U+0000")


def check_topic(topic: bytes) -> None:
    """Raise MalformedPacket if `topic` is no topic name that can be published to."""
    check_text(topic)
    if not topic:
        raise MalformedPacket(TOPIC_NAME_INVALID, "MQTT-4.7.3-1", "a topic name is empty")
    if b"+" in topic or b"#" in topic:
        what = "a topic name contains a wildcard"
        raise MalformedPacket(TOPIC_NAME_INVALID, "MQTT-3.3.2-2", what)


def valid_filter(filter: bytes) -> bool:  # noqa: A002 - the specification's noun
    """Whether the wildcards of a topic filter stand where they may; the decoder checked the rest.

    Source: [MQTT-4.7.1-2], [MQTT-4.7.1-3], [MQTT-4.7.3-1].
    """
    if not filter:
        return False
    *parents, last = filter.split(b"/")
    if any(b"#" in level or (b"+" in level and level != b"+") for level in parents):
        return False
    return last in (b"#", b"+") or not (b"#" in last or b"+" in last)


class TopicNames:
    """Topic names that were found valid, one bytes object for each: one cache for each broker.

    Equal topics come back as the same object, whose hash is already computed, so every look-up
    by topic behind the codec is cheaper; and a known topic is not checked again.
    It holds at most NAMES_MAX names and NAMES_BYTES_MAX bytes, then starts anew (P12): forgetting
    everything needs no bookkeeping for each message, and costs one check for each topic in use.
    """

    __slots__ = ("_bytes", "_bytes_max", "_names_max", "known")

    def __init__(self, *, names_max: int = NAMES_MAX, bytes_max: int = NAMES_BYTES_MAX) -> None:
        self.known: dict[bytes, bytes] = {}  # never replaced: decoders hold on to it
        self._bytes = 0
        self._names_max = names_max
        self._bytes_max = bytes_max

    def admit(self, topic: bytes) -> bytes:
        """Return the one object that stands for `topic`. Raises MalformedPacket."""
        found = self.known.get(topic)
        if found is not None:
            return found
        check_topic(topic)
        self._bytes += len(topic)
        if len(self.known) >= self._names_max or self._bytes > self._bytes_max:
            self.known.clear()
            self._bytes = len(topic)
        self.known[topic] = topic
        return topic
