"""Retained messages [MQTT-3.3.1-5..12]: in memory for look-up, in the store for ever.

They are kept in memory because every new subscription looks through them; their number and size
are bounded by configuration, and a message beyond that is not retained (logged once, counted).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from broker_ext.topics import TopicTree
from storage.api import Entry, Retain

if TYPE_CHECKING:
    from collections.abc import Iterator

    from broker_ext.figures import Figures
    from storage.api import Outcome, Store
    from storage.committer import Committer

__all__ = ["RetainedMirror", "RetainedStore"]

log = logging.getLogger("amqtt_durable.retained")
PAGE = 1000


class RetainedMirror(Protocol):
    """Somebody who shows the retained messages elsewhere (amqtt's ``retained_messages``)."""

    def retained_changed(self, message: Entry, *, loaded: bool) -> None:
        """A message was retained, or removed (empty payload). loaded: read from disk at start."""
        ...


class RetainedStore:
    """The retained message of each topic.

    messages_max, bytes_max: limits of what is kept (count; payload + topic bytes).
    """

    def __init__(
        self, committer: Committer, figures: Figures, *, messages_max: int, bytes_max: int
    ) -> None:
        self.committer = committer
        self.figures = figures
        self.messages_max = messages_max
        self.bytes_max = bytes_max
        self.bytes = 0
        self.mirror: RetainedMirror | None = None
        self._topics: TopicTree[Entry] = TopicTree()
        self._changes = 0
        self._changed: dict[bytes, int] = {}  # topic -> number of the change that set it
        self._full_logged = False

    async def load(self, store: Store) -> None:
        """Read what is stored, at start."""
        after: bytes | None = None
        while page := await store.retained(after, PAGE):
            for message in page:
                self._set(message)
                if self.mirror is not None:
                    self.mirror.retained_changed(message, loaded=True)
            after = page[-1].topic

    def __len__(self) -> int:
        return len(self._topics.values)

    def get(self, topic: bytes) -> Entry | None:
        """The retained message of a topic, None if there is none or it has expired."""
        message = self._topics.values.get(topic)
        if message is None or self._expired(message):
            return None
        return message

    def match(self, topic_filter: bytes) -> Iterator[Entry]:
        """The retained messages that a new subscription gets: those there are now. One that is
        replaced before its turn comes is passed over: what replaced it was delivered as it was
        published."""
        return self._walk(topic_filter, self._changes)

    def _walk(self, topic_filter: bytes, through: int) -> Iterator[Entry]:
        for topic in self._topics.match(topic_filter):
            message = self.get(topic)
            if message is not None and self._changed[topic] <= through:
                yield message

    def _expired(self, message: Entry) -> bool:
        return 0 < message.expires_ms <= self.committer.clock.now_ms()

    def keep(
        self,
        topic: bytes,
        payload: bytes,
        qos: int,
        origin: bytes = b"",
        expires_ms: int = 0,
        properties: bytes = b"",
    ) -> bool:
        """Retain a message, or remove the one of its topic (empty payload).

        Returns whether something is written: it is durable with the committer's open batch.
        """
        old = self._topics.values.get(topic)
        if not payload:
            if old is None:
                return False
            self._drop(topic, old)
        elif not self._room(topic, payload, old):
            return False
        message = Entry(0, topic, payload, qos, 0, origin, expires_ms, properties)
        if payload:
            self._set(message)
        self.committer.submit(Retain(message), _stored)
        if self.mirror is not None:
            self.mirror.retained_changed(message, loaded=False)
        return True

    def _room(self, topic: bytes, payload: bytes, old: Entry | None) -> bool:
        size = len(topic) + len(payload)
        freed = len(topic) + len(old.payload) if old is not None else 0
        if (old is not None or len(self) < self.messages_max) and (
            self.bytes + size - freed <= self.bytes_max
        ):
            self._full_logged = False
            return True
        self.figures.refused_retained += 1
        if not self._full_logged:
            self._full_logged = True
            log.warning(
                "retained messages are full (%d messages, %d bytes): new ones are delivered but "
                "not retained; raise max_retained_messages or max_retained_bytes",
                len(self),
                self.bytes,
            )
        return False

    def _set(self, message: Entry) -> None:
        old = self._topics.values.get(message.topic)
        if old is not None:
            self._drop(message.topic, old)
        self._topics.put(message.topic, message)
        self._changes += 1
        self._changed[message.topic] = self._changes
        self.bytes += len(message.topic) + len(message.payload)

    def _drop(self, topic: bytes, old: Entry) -> None:
        self._topics.drop(topic)
        del self._changed[topic]
        self.bytes -= len(topic) + len(old.payload)


def _stored(outcome: Outcome) -> None:
    if isinstance(outcome, BaseException):
        log.error("a retained message could not be stored: %s", outcome)
