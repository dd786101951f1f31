"""The hub: what all connections of one broker share, and what is done by the clock."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from broker_ext.figures import Figures
from broker_ext.history import History
from broker_ext.letters import Letters
from broker_ext.reasons import Reason
from broker_ext.registry import EXPIRED, Registry
from broker_ext.resume import Finding, Verdict, words_of
from broker_ext.retained import RetainedStore
from broker_ext.router import Router
from broker_ext.rules import Rules
from broker_ext.session import End
from broker_ext.shared import Shared
from broker_ext.sinks.sink import Sinks
from broker_ext.wills import Wills
from broker_ext.wire import TopicNames
from storage.api import Expire, Prune, Pruned
from storage.committer import LAZY_MS, Committer
from storage.errors import StoreError
from storage.roles import Handles

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from broker_ext.connection import Connection
    from broker_ext.durable import DurableSession
    from broker_ext.rekeying import Rekeying
    from broker_ext.session import Session
    from broker_ext.settings import Settings
    from storage.api import Entry, Opened, Outcome, Store, Will
    from storage.clock import Clock
    from storage.errors import ResumeHistoryUnavailable

__all__ = ["Hub"]

log = logging.getLogger("amqtt_durable")

TICK_S: Final = 0.5
"""How often silent clients are looked for: a keep alive is exceeded by at most this."""
PRUNE_BLOCKS_MAX: Final = 16
PRUNE_TOPICS_MAX: Final = 500
"""Blocks deleted in one commit, and topics of which something goes (those of one block at least): a
commit beside pruning waits for at most this much, some 20 ms. When a lot is to go, as much time as
the last one took is left to others before the next one."""
CHECKPOINT_SESSIONS_MAX: Final = 64
"""Sessions whose position the timer has saved in one commit, which then takes some 3 ms."""
EXPIRE_MAX: Final = 100
PURGE_S: Final = 600.0
"""How often the outbox is looked through for what ended weeks ago."""
DRAIN_S: Final = 3.0
"""How long a stop waits for the store, twice."""

SHUTDOWN: Final = End("shutdown", publish_will=False, reason=Reason.SHUTTING_DOWN)
REFUSED_RESUME: Final = End("resume refused", reason=Reason.IMPLEMENTATION)


class Hub:
    """One broker's durable half. ``start`` before the listeners, ``stop`` after they closed."""

    def __init__(self, store: Store, settings: Settings, clock: Clock) -> None:
        self.store = store
        self.settings = settings
        self.clock = clock
        self.handles = Handles(store, clock)
        """Of the outbox; the hub gives them away by role."""
        self.figures = Figures()
        self.names = TopicNames()
        self.connections: set[Connection] = set()
        self.refusing = False
        self.permits_will: Callable[[Will, Session | None], Awaitable[bool]] | None = None
        self.on_reset: Callable[[bytes, str, int, int], None] | None = None
        self.opened: Opened
        self.committer: Committer
        self.router: Router
        self.retained: RetainedStore
        self.wills = Wills(self)
        self.registry = Registry(self)
        self.history = History(self)
        self.shared = Shared(self)
        self.sinks = Sinks(self)
        self.letters = Letters(self)
        self.rekeying: Rekeying | None = None
        """Where the store is sealed."""
        self._timers: list[asyncio.Task[None]] = []
        self._pruned_through = -1

    async def start(self) -> None:
        """Open the store and everything that hangs on it. Raises StoreUnusable."""
        self.opened = await self.store.open(now_ms=self.clock.now_ms())
        self.clock.not_before(self.opened.seen_ms)
        minted = self.opened.minted
        if minted:
            level = logging.INFO if minted == "created" else logging.WARNING
            generation = self.opened.log.generation
            log.log(level, "database generation %s minted: %s", generation, minted)
        settings = self.settings
        self.committer = Committer(
            self.store, self.clock, head=self.opened.log.head, bytes_max=settings.commit_bytes_max
        )
        self.retained = RetainedStore(
            self.committer,
            self.figures,
            messages_max=settings.max_retained_messages,
            bytes_max=settings.max_retained_bytes,
        )
        self.router = Router(
            self.committer,
            self.retained,
            self.figures,
            self.shared,
            Rules(settings.filters),
            queues_qos0=settings.queue_qos0,
        )
        self.router.load(self.opened.filters)
        self.opened = replace(self.opened, filters=())  # they may be as many as the sessions
        self.wills.load(self.opened.wills)

    async def load(self) -> None:
        """Read what is needed in memory (retained messages), and begin what the clock drives."""
        await self.retained.load(self.store)
        await self.history.load()
        await self.shared.load()
        await self.sinks.start()
        settings = self.settings
        self._every(TICK_S, self._look_for_silence)
        self._every(settings.checkpoint_interval_s, self._checkpoint_in_turns)
        self._every(settings.prune_interval_s, self._prune)
        self._every(1.0, self._expire)
        self._every(settings.checkpoint_interval_s, self.sinks.checkpoint)
        self._every(1.0, self.sinks.sweep)
        self._every(PURGE_S, self.sinks.purge)
        self._every(1.0, self.letters.look)
        self._timers.append(asyncio.ensure_future(self._recover_wills()))

    async def stop(self) -> None:
        """End every session in good order, write everything, close the store."""
        self.refusing = True
        for task in self._timers:
            task.cancel()
        await asyncio.gather(*self._timers, return_exceptions=True)
        self._timers.clear()
        if self.rekeying is not None:
            await self.rekeying.stop()
        # first what clients have sent is stored and acknowledged; what they send now is not read,
        # so it is still theirs to send again
        for connection in list(self.connections):
            connection.stop_reading()
        await self._drain()
        await self.sinks.stop()
        for connection in list(self.connections):
            connection.finish(SHUTDOWN)
        await self.history.close()
        self.shared.stop()
        await self.wills.settle()
        await self._drain()
        self.committer.close()
        self.handles.close()
        await self.store.close()

    async def _drain(self) -> None:
        try:
            await asyncio.wait_for(self.committer.drain(), DRAIN_S)
            await asyncio.wait_for(self.handles.drain(), DRAIN_S)
        except TimeoutError:
            # no traceback: it says nothing about the disk
            log.error(  # noqa: TRY400
                "the store does not take the last writes; they were never acknowledged"
            )

    # --------------------------------------------------------------------- by the clock

    def _every(self, seconds: float, call: Callable[[], Awaitable[None] | None]) -> None:
        async def run() -> None:
            while True:
                await asyncio.sleep(seconds)
                try:
                    result = call()
                    if result is not None:
                        await result
                except StoreError as error:
                    # the committer says it once; here it is only put off until next time
                    log.debug("%s is put off: %s", call.__name__, error)
                except Exception:
                    log.exception("%s failed", call.__name__)

        self._timers.append(asyncio.ensure_future(run()))

    def _look_for_silence(self) -> None:
        now = self.clock.monotonic()
        for connection in list(self.connections):
            connection.overdue(now)
        self.wills.publish_due()

    async def _checkpoint_in_turns(self) -> None:
        """Have the sessions save their positions, some at a time, in half of the interval."""
        due = [session for session in self.registry.owners.values() if session.durable]
        turns = range(0, len(due), CHECKPOINT_SESSIONS_MAX)
        pause_s = self.settings.checkpoint_interval_s / 2 / max(len(turns), 1)
        pause_s = max(pause_s, 2 * LAZY_MS / 1000)  # so that no two turns share a commit
        for begin in turns:
            if begin:
                await asyncio.sleep(pause_s)
            self._checkpoint(due[begin : begin + CHECKPOINT_SESSIONS_MAX])

    def _checkpoint(self, sessions: Iterable[Session] | None = None) -> None:
        for session in list(self.registry.owners.values()) if sessions is None else sessions:
            if session.durable:
                session.checkpoint()  # type: ignore[attr-defined]
        self.shared.checkpoint()

    async def _prune(self) -> None:
        """Delete what nobody needs, and what is beyond the hard caps whoever needs it."""
        if not self.committer.can_delete or self.committer.head == self._pruned_through:
            return  # it cannot, or there is no history
        if not self.committer.full:
            await self.history.checkpoint()
        settings = self.settings
        now_ms = self.clock.now_ms()
        before_ms = now_ms - int(settings.retain_for_s * 1000)
        older_than_ms = 0
        if settings.max_age_s is not None:
            older_than_ms = max(now_ms - int(settings.max_age_s * 1000), 0)
        through = 0
        if settings.max_messages is not None:
            through = max(self.committer.head - settings.max_messages, 0)
        prune = Prune(
            through,
            before_ms,
            PRUNE_BLOCKS_MAX,
            older_than_ms=older_than_ms,
            bytes_max=settings.max_bytes or 0,
            topics_max=PRUNE_TOPICS_MAX,
            now_ms=now_ms,
        )
        while True:
            begun_s = self.clock.monotonic()
            outcome = await self._delete(prune)
            took_s = self.clock.monotonic() - begun_s
            assert isinstance(outcome, Pruned)
            self.figures.pruned_blocks += outcome.blocks
            self._pruned_through = outcome.floor
            if not outcome.more:
                return
            await asyncio.sleep(took_s)

    async def _delete(self, op: Prune | Expire) -> Outcome:
        committer = self.committer
        return await (committer.make_room(op) if committer.full else committer.apply(op))

    async def _expire(self) -> None:
        if not self.committer.can_delete:
            return
        while not self.committer.full and self.retained.expire():
            await self.committer.drain()
        while True:
            gone = await self._delete(Expire(self.clock.now_ms(), EXPIRE_MAX))
            assert isinstance(gone, tuple)
            for expired in gone:
                self.figures.expired += 1
                self.registry.must_tell(expired.client_id, EXPIRED)
                self.wills.session_ended(expired.client_id)
                self.shared.ended(expired.consumer_id)
                for topic_filter in expired.filters:
                    self.router.count(topic_filter, -1)
            if len(gone) < EXPIRE_MAX:
                return

    async def _recover_wills(self) -> None:
        await asyncio.sleep(self.settings.will_recovery_delay_s)
        self.wills.publish_orphans()

    # ------------------------------------------------------------- what is not delivered

    def is_over(self, message: Entry) -> bool:
        """Whether its Message Expiry Interval has passed [MQTT5-3.3.2-5]; counted then."""
        if 0 < message.expires_ms <= self.clock.now_ms():
            self.figures.expired_messages += 1
            return True
        return False

    def is_superseded(self, entry: Entry) -> bool:
        """Whether a newer message of its topic will come, and is all that is wanted
        (``broker_ext.rules``); counted then."""
        newest = self.router.rules.newest
        if newest is not None and newest.supersedes(entry):
            self.figures.superseded += 1
            return True
        return False

    # ------------------------------------------------------------------- for an operator

    def outbox_changed(self) -> None:
        """Something in the outbox is due that was not before."""
        self.sinks.wake()

    def destinations(self) -> dict[str, str]:
        """Sink -> scheme and host of where it sends."""
        return {one.name: one.destination for one in self.settings.sinks}

    # ---------------------------------------------------------------------------- resets

    def tell_reset(self, client_id: bytes, finding: Finding) -> None:
        """A session is deleted because it cannot be resumed: log, count, tell the plugins, and its
        client by the next CONNACK that surely arrives."""
        self.registry.must_tell(client_id, words_of(finding))
        resets = self.figures.resets
        resets[finding.reason] = resets.get(finding.reason, 0) + 1
        log.warning("session %r is reset: %s", client_id, finding.error)
        if self.on_reset is not None:
            error = finding.error
            position = getattr(error, "position", 0)
            self.on_reset(client_id, finding.reason, position, getattr(error, "floor", 0))

    def tell_gap(self, client_id: bytes, position: int, lost_through: int) -> None:
        """A session goes on although history is missing, because it is configured so."""
        self.figures.gaps += 1
        log.warning(
            "session %r skips a gap: history after %d is lost through %d",
            client_id,
            position,
            lost_through,
        )

    def refuse_resume(self, session: DurableSession, error: ResumeHistoryUnavailable) -> None:
        """After CONNACK it turned out that history is missing: fence, close, delete (410)."""
        finding = Finding(Verdict.RESET, "history-unavailable", error)
        self.registry.discard(session)
        end = REFUSED_RESUME._replace(words=words_of(finding))
        session.peer.finish(end)
        if session.has_will:
            self.wills.ended(session, end)
        self.tell_reset(session.client_id, finding)
