"""Retained messages [MQTT-3.3.1-5..12]: in memory for look-up, in the store for ever.

They are kept in memory because every new subscription looks through them; their number and size
are bounded by configuration, and a message beyond that is not retained (logged once, counted).
One whose time is over (Message Expiry) is given to nobody from then on, and is deleted, in memory
and in the store, within a second [MQTT5-3.3.2-5].
"""

from __future__ import annotations

import logging
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Final, Protocol

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
EXPIRE_MAX: Final = 1000
"""Messages deleted in one go because their time is over."""


class RetainedMirror(Protocol):
    """Somebody who shows the retained messages elsewhere (amqtt's ``retained_messages``)."""

    def retained_changed(self, message: Entry, *, loaded: bool) -> None:
        """A message was retained, or removed (empty payload). loaded: read from disk at start."""
        ...


class RetainedStore:
    """The retained message of each topic.

    messages_max, bytes_max: limits of what is kept (count; topic, payload and properties).
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
        self._deadlines: list[tuple[int, bytes]] = []  # a heap; some are of replaced messages
        self._full_logged = False

    async def load(self, store: Store) -> None:
        """Read what is stored, at start; what expired meanwhile goes."""
        after: bytes | None = None
        while page := await store.retained(after, PAGE):
            for message in page:
                if self._expired(message):
                    self._delete(message)
                    continue
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

    def has(self, topic_filter: bytes) -> bool:
        """Whether there is one that a new subscription would get."""
        return next(self.match(topic_filter), None) is not None

    def _walk(self, topic_filter: bytes, through: int) -> Iterator[Entry]:
        for topic in self._topics.match(topic_filter):
            message = self.get(topic)
            if message is not None and self._changed[topic] <= through:
                yield message

    def _expired(self, message: Entry) -> bool:
        return 0 < message.expires_ms <= self.committer.clock.now_ms()

    def expire(self) -> bool:
        """Delete what has expired, in memory and in the store (the hub's timer). Returns whether
        there may be more."""
        now_ms = self.committer.clock.now_ms()
        deadlines = self._deadlines
        for _ in range(EXPIRE_MAX):
            if not deadlines or deadlines[0][0] > now_ms:
                return False
            deadline_ms, topic = heappop(deadlines)
            message = self._topics.values.get(topic)
            if message is not None and message.expires_ms == deadline_ms:
                self._drop(topic, message)
                self._delete(message)
        return True

    def _delete(self, message: Entry) -> None:
        """An expired message is no more: take it out of the store, and tell who shows it."""
        self.figures.expired_messages += 1
        removed = Entry(0, message.topic, b"", 0)
        self.committer.submit(Retain(removed), _stored)
        if self.mirror is not None:
            self.mirror.retained_changed(removed, loaded=False)

    def _note_deadline(self, message: Entry) -> None:
        deadlines = self._deadlines
        heappush(deadlines, (message.expires_ms, message.topic))
        if len(deadlines) > 2 * len(self) + EXPIRE_MAX:  # most are of messages that were replaced
            values = self._topics.values
            deadlines[:] = [(m.expires_ms, m.topic) for m in values.values() if m.expires_ms]
            heapify(deadlines)

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
        elif not self._room(topic, payload, properties, old):
            self._refuse()
            return False
        message = Entry(0, topic, payload, qos, 0, origin, expires_ms, properties)
        if payload:
            self._set(message)
        self.committer.submit(Retain(message), _stored)
        if self.mirror is not None:
            self.mirror.retained_changed(message, loaded=False)
        return True

    def takes(self, topic: bytes, payload: bytes, properties: bytes = b"") -> bool:
        """Whether there is room for a message."""
        return not payload or self._room(topic, payload, properties, self._topics.values.get(topic))

    def _room(self, topic: bytes, payload: bytes, properties: bytes, old: Entry | None) -> bool:
        size = len(topic) + len(payload) + len(properties)
        freed = _bytes(old) if old is not None else 0
        if (old is not None or len(self) < self.messages_max) and (
            self.bytes + size - freed <= self.bytes_max
        ):
            self._full_logged = False
            return True
        return False

    def _refuse(self) -> None:
        self.figures.refused_retained += 1
        if not self._full_logged:
            self._full_logged = True
            log.warning(
                "retained messages are full (%d messages, %d bytes): new ones are delivered but "
                "not retained; raise max_retained_messages or max_retained_bytes",
                len(self),
                self.bytes,
            )

    def _set(self, message: Entry) -> None:
        old = self._topics.values.get(message.topic)
        if old is not None:
            self._drop(message.topic, old)
        self._topics.put(message.topic, message)
        self._changes += 1
        self._changed[message.topic] = self._changes
        self.bytes += _bytes(message)
        if message.expires_ms:
            self._note_deadline(message)

    def _drop(self, topic: bytes, old: Entry) -> None:
        self._topics.drop(topic)
        del self._changed[topic]
        self.bytes -= _bytes(old)


def _bytes(message: Entry) -> int:
    return len(message.topic) + len(message.payload) + len(message.properties)


def _stored(outcome: Outcome) -> None:
    if isinstance(outcome, BaseException):
        log.error("a retained message could not be stored: %s", outcome)
