"""A position of the client's own: SUBSCRIBE with User Properties reads the history (our extension
to MQTT 5, for clients that keep no session).

    resume-generation, resume-position   go on after this position
    previous-count                       begin with the last N messages that the history still has

Each delivery from the history carries the User Properties ``position`` and ``generation``, before
those of its publisher: what the client keeps where it keeps its results, to go on from. The check
is that of ``history.subscribe`` (``broker_ext.history``), made before SUBACK: a position that
cannot be continued is refused with 0x83 and the verdict in the Reason String.

Rule 1. Messages of QoS >= 1 come from the history, in its order, as the client takes them: what
        waits is a position, not a queue. Those of QoS 0 are not in it: they come live, without a
        position, as for any subscription.
Rule 2. The client's place is its own: nothing of it is stored here, and what it has not
        acknowledged when it leaves comes again from the position it goes on from.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, NamedTuple

from broker_ext.options import NO_LOCAL, joined, options_of
from broker_ext.reasons import NO_WORDS, Reason, Words
from broker_ext.resume import Finding, Verdict, words_of
from broker_ext.topics import MATCHER_CACHE_MAX, matches
from broker_ext.wire import Properties
from broker_ext.wire.properties import USER_PROPERTY
from storage.api import Position
from storage.errors import DatabaseGenerationChanged, ResumeRefused, StoreError

if TYPE_CHECKING:
    from broker_ext.history import HistorySubscription
    from broker_ext.options import Options
    from broker_ext.session import Grant, TransientSession
    from storage.api import Entry

__all__ = [
    "FEEDS_MAX",
    "PREVIOUS_MAX",
    "STORED_SESSION",
    "Ask",
    "BadAskError",
    "Feed",
    "ask_of",
    "words_for",
]

log = logging.getLogger("amqtt_durable.feed")

FEEDS_MAX: Final = 16
"""Of one client: each keeps a chunk of the history in memory (P12)."""
PREVIOUS_MAX: Final = 100_000
"""Messages that are looked for backwards."""
_DIGITS_MAX: Final = 19

GENERATION: Final = b"resume-generation"
POSITION: Final = b"resume-position"
PREVIOUS: Final = b"previous-count"
_NAMES: Final = frozenset({GENERATION, POSITION, PREVIOUS})

STORED_SESSION: Final = Words(b"resume: 400 stored-session", ((b"resume", b"400 stored-session"),))
"""A session that is kept has a position of its own."""


class BadAskError(Exception):
    """What a SUBSCRIBE asks for cannot be understood. words: for the client."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        told = f"400 {what}".encode()
        self.words = Words(b"resume: " + told, ((b"resume", told),))


class Ask(NamedTuple):
    """Where to begin: after a position, or with the last so many messages."""

    resume: Position | None = None
    previous: int | None = None


def ask_of(properties: Properties | None) -> Ask | None:
    """What a SUBSCRIBE asks for; None = an ordinary subscription. Raises BadAskError."""
    if properties is None:
        return None
    pairs = [pair for pair in properties.all(USER_PROPERTY) if pair[0] in _NAMES]
    if not pairs:
        return None
    asked = dict(pairs)
    if len(asked) < len(pairs):
        raise BadAskError("asked-twice")
    if asked.keys() == {PREVIOUS}:
        previous = _number(asked[PREVIOUS])
        if previous > PREVIOUS_MAX:
            raise BadAskError("previous-count-too-large")
        return Ask(previous=previous)
    if asked.keys() != {GENERATION, POSITION}:
        raise BadAskError("incomplete")
    return Ask(Position(asked[GENERATION].decode(), _number(asked[POSITION])))


def _number(digits: bytes) -> int:
    if not digits.isdigit() or len(digits) > _DIGITS_MAX:
        raise BadAskError("not-a-number")
    return int(digits)


def words_for(error: ResumeRefused) -> Words:
    """The verdict on a position, as for sessions (``resume: 410 history-pruned``)."""
    reason = "history-pruned"
    if isinstance(error, DatabaseGenerationChanged):
        reason = "generation-changed" if error.held != error.current else "position-ahead"
    return words_of(Finding(Verdict.RESET, reason, error))


class Feed:
    """The filters of one such SUBSCRIBE, while they are subscribed.

    For the router it is a subscriber of its own, which takes what is not in the history.
    """

    durable: Final = False
    keeps_qos0: Final = False
    catches_up: Final = False

    def __init__(
        self, session: TransientSession, messages: HistorySubscription, grants: list[Grant]
    ) -> None:
        self.session = session
        self.client_id = session.client_id
        self._messages = messages
        self._grants = {grant.filter: grant for grant in grants}
        self._begun = False
        self._found: dict[tuple[bytes, bool], tuple[int, Options] | None] = {}
        self._generation = _user_property(b"generation", messages.generation.encode())
        self._task: asyncio.Task[None] | None = None
        self._room: asyncio.Future[None] | None = None
        for grant in grants:
            session.hub.router.attach(
                self, grant.filter, grant.qos, grant.options, grant.identifier
            )

    def __repr__(self) -> str:
        return f"<feed of {self.client_id!r}>"

    def start(self) -> None:
        """SUBACK was written: begin."""
        if self._task is None:
            self._task = asyncio.ensure_future(self._run())
            self._task.add_done_callback(self._done)

    @property
    def is_open(self) -> bool:
        """Whether it still reads."""
        return bool(self._grants)

    def drop(self, topic_filter: bytes) -> bool:
        """Read this filter no more, if it is one of ours. Returns whether any is left."""
        if self._grants.pop(topic_filter, None) is not None:
            self.session.hub.router.detach(self, topic_filter)
            self._found.clear()
        if not self._grants:
            self.close()
        return bool(self._grants)

    def close(self) -> None:
        """The session ended, or no filter is left."""
        for topic_filter in self._grants:
            self.session.hub.router.detach(self, topic_filter)
        self._grants = {}
        self._messages.close()
        self.turn_over()
        if self._task is not None:
            self._task.cancel()

    def turn_over(self) -> None:
        """There may be room again."""
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    # ------------------------------------------------------------------- as the router's

    def offer(self, entry: Entry, qos: int, options: Options) -> None:
        """Only durable sessions are asked."""
        raise NotImplementedError

    def pass_on(self, entry: Entry, qos: int, options: Options) -> None:
        """A message that was published: one that has an offset is read from the history."""
        if not entry.offset:
            self.session.pass_on(entry, qos, options)

    # ------------------------------------------------------------------------- reading

    async def _run(self) -> None:
        session = self.session
        try:
            while (entry := await self._messages.next_entry()) is not None:
                found = self._look(entry)
                if found is None or not await self._may_receive(entry):
                    continue
                while not session.has_room and self._grants:
                    self._room = asyncio.get_running_loop().create_future()
                    await self._room
                if not self._grants:
                    return
                qos, options = found
                position = _user_property(b"position", str(entry.offset).encode())
                session.hand_out(
                    entry,
                    min(qos, entry.qos),
                    options._replace(identifiers=options.identifiers + position + self._generation),
                )
        except ResumeRefused as error:
            log.warning("%r cannot go on: %s", self, error)
            session.stop_reading(Reason.IMPLEMENTATION, words_for(error))
        except StoreError as error:
            log.warning("%r: cannot read (%s); closing", self, error)
            session.stop_reading(Reason.UNSPECIFIED, Words(b"the store does not answer"))

    async def _may_receive(self, entry: Entry) -> bool:
        session = self.session
        if not session.hub.router.guarded or session.may_receive is None:
            return True
        return await session.may_receive(entry.topic)

    def _look(self, entry: Entry) -> tuple[int, Options] | None:
        """Of our filters that match: the highest QoS, and what they ask for; None if none do."""
        key = (entry.topic, entry.origin == self.client_id)
        if key not in self._found:
            if len(self._found) >= MATCHER_CACHE_MAX:
                self._found.clear()
            grants = [
                grant
                for grant in self._grants.values()
                if matches(grant.filter, entry.topic) and not (key[1] and grant.options & NO_LOCAL)
            ]
            self._found[key] = None
            if grants:
                options = joined(options_of(g.options, g.identifier) for g in grants)
                self._found[key] = max(g.qos for g in grants), options
        return self._found[key]

    def _done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            # our own bug in one client's feed: it comes back and goes on from its position
            log.error("%r failed", self, exc_info=error)
            self.session.stop_reading(Reason.UNSPECIFIED, NO_WORDS)


def _user_property(name: bytes, value: bytes) -> bytes:
    return Properties(((USER_PROPERTY, (name, value)),)).forwarded()
