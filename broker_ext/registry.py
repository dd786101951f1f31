"""Client id -> the session that owns it, and the line of CONNECTs (P7).

Rule 1. CONNECTs for one client id take turns in arrival order, after authentication and before
        anything is read or deleted.
Rule 2. A newer one takes over: the older session saves, is sealed and is closed; what it wrote is
        in the committer before the newer one's Acquire, and is applied before it.
Rule 3. From authentication to CONNACK takes takeover_timeout_s at most, whatever hangs. One that
        gave up keeps its place until its predecessor is done, so that nobody passes a session that
        is still loading.
Rule 4. One whose client left while it waited stops after each wait and takes nothing over; what it
        made already is undone.
Rule 5. A client id that connects in a tight loop waits for its allowance in its own line, so that
        it costs the others nothing (max_connects_per_second).
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

from broker_ext.durable import DurableSession
from broker_ext.reasons import NO_WORDS, Reason, Words
from broker_ext.resume import Finding, Verdict, is_blank, verdict
from broker_ext.session import End, Session, TransientSession
from broker_ext.wire.properties import MESSAGE_EXPIRY_S, WILL_DELAY_S
from storage.api import (
    INCARNATION_BYTES,
    RETAINED,
    UNCLAIMED,
    Acquire,
    Acquired,
    Detach,
    Entry,
    Will,
)
from storage.errors import NotOwner, StoreError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from broker_ext.connection import Connection
    from broker_ext.hub import Hub
    from broker_ext.wire import Connect, ConnectWill
    from storage.api import Outcome, Snapshot

__all__ = ["EXPIRED", "TAKEN_OVER", "Allowance", "GaveUpError", "Registry"]

log = logging.getLogger("amqtt_durable.registry")

TAKEN_OVER: Final = End("taken over", reason=Reason.TAKEN_OVER, blames=True)
EXPIRED: Final = Words(b"the session has expired")
GAVE_UP: Final = End("gave up", publish_will=False)
BURST_S: Final = 2.0
"""A client id may use the allowance of this many seconds at once."""
UNTOLD_MAX: Final = 10_000
"""Beyond that the oldest are forgotten: they are told once, by the next CONNACK alone."""


class _Begun(NamedTuple):
    """A session for a CONNECT. present: what CONNACK says of it, and in which words."""

    session: Session
    present: bool = False
    words: Words = NO_WORDS


class GaveUpError(Exception):
    """The predecessor in line took too long."""


class Allowance:
    """How often each client id may connect: ``per_s`` a second in the long run, and that of
    BURST_S at once. A token bucket kept as one number, the time at which it is full again (as the
    generic cell rate algorithm does); who has a full one is forgotten, so that memory holds those
    who connected in the last BURST_S seconds.
    """

    def __init__(self, per_s: float) -> None:
        self._each_s = 1 / per_s
        self._full_at: dict[bytes, float] = {}

    def __len__(self) -> int:
        return len(self._full_at)

    def take(self, client_id: bytes, now_s: float) -> float:
        """Count a CONNECT; returns the seconds it has to wait, 0 = none."""
        full_at = self._full_at
        while full_at:
            oldest = next(iter(full_at))
            if full_at[oldest] > now_s:
                break
            del full_at[oldest]
        mine = max(full_at.pop(client_id, now_s), now_s) + self._each_s
        full_at[client_id] = mine
        wait_s = mine - now_s - BURST_S
        return wait_s if wait_s > 1e-6 else 0.0  # less is what floats are off by


class Registry:
    """The owners of all client ids. One object for each broker."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.owners: dict[bytes, Session] = {}
        self.allowance = Allowance(hub.settings.max_connects_per_second)
        self.untold: dict[bytes, Words] = {}
        """Client ids whose session was deleted (410, expired), until they have surely been told;
        and in which words."""
        self._lines: dict[bytes, asyncio.Future[None]] = {}

    def must_tell(self, client_id: bytes, words: Words) -> None:
        """The session of a client was deleted without its asking. Session Present is 0 until its
        client sends something after a CONNACK: one that is lost on its way tells nobody."""
        self.untold.pop(client_id, None)
        self.untold[client_id] = words
        if len(self.untold) > UNTOLD_MAX:
            del self.untold[next(iter(self.untold))]

    # ------------------------------------------------------------------------ the line

    @asynccontextmanager
    async def turn(self, client_id: bytes) -> AsyncIterator[None]:
        """Wait for this client id's turn. Raises GaveUpError after takeover_timeout_s."""
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        before = self._lines.get(client_id)
        self._lines[client_id] = mine

        def done(_: object = None) -> None:
            if not mine.done():
                mine.set_result(None)
            if self._lines.get(client_id) is mine:
                del self._lines[client_id]

        if before is not None:
            finished: set[asyncio.Future[None]] = set()
            try:
                finished, _ = await asyncio.wait(
                    [before], timeout=self.hub.settings.takeover_timeout_s
                )
            finally:
                if finished:
                    pass
                elif self._lines.get(client_id) is mine:
                    self._lines[client_id] = before  # who comes next waits for whom we waited for
                else:
                    before.add_done_callback(done)
            if not finished:
                raise GaveUpError
        try:
            yield
        finally:
            done()

    # --------------------------------------------------------------------- the CONNECT

    async def connect(self, connection: Connection, packet: Connect) -> None:
        """Everything between a CONNECT and its CONNACK, and the start of the session."""
        hub = self.hub
        if not packet.client_id and (packet.clean_start or connection.five is not None):
            assigned = b"auto-" + os.urandom(12).hex().encode()  # [MQTT-3.1.3-6]
            packet = packet._replace(client_id=assigned)
        client_id = packet.client_id
        refusal = self._refusal(connection, packet)
        if refusal is not None:
            connection.refuse(refusal)
            return
        user = await connection.authenticate(packet)
        if isinstance(user, Reason):
            log.info("client %s is not authorized", connection.peername)
            connection.refuse(user)
            return
        too_late = asyncio.get_running_loop().call_later(
            hub.settings.takeover_timeout_s, self._too_late, connection, client_id
        )
        try:
            async with self.turn(client_id):
                if not _left(connection):
                    await self._allowed(client_id)
                if not _left(connection):
                    await self._take(connection, packet, user)
        except GaveUpError:
            self._too_late(connection, client_id)
        except StoreError as error:
            log.log(hub.committer.told_level, "CONNECT of %r: %s", client_id, error)
            if isinstance(error, NotOwner):
                connection.refuse(Reason.NOT_AUTHORIZED, b"the session belongs to another user")
            else:
                connection.refuse(Reason.UNAVAILABLE, b"the store does not answer")
        finally:
            too_late.cancel()

    def _refusal(self, connection: Connection, packet: Connect) -> Reason | None:
        """Why a CONNECT cannot be accepted, whoever it is from."""
        if not 0 < len(packet.client_id) <= self.hub.settings.max_client_id_bytes:
            return Reason.BAD_CLIENT_ID  # [MQTT-3.1.3-8]
        if self.hub.refusing:
            return Reason.UNAVAILABLE
        return connection.five.refuses(packet) if connection.five is not None else None

    def _too_late(self, connection: Connection, client_id: bytes) -> None:
        """The client is told; the CONNECT itself stops after what it is waiting for."""
        if not _left(connection):
            log.warning("CONNECT of %r gave up waiting", client_id)
            connection.refuse(Reason.BUSY, b"the session is not free in time")

    async def _allowed(self, client_id: bytes) -> None:
        """Wait for the allowance of a client id that connects too often (in turn)."""
        wait_s = self.allowance.take(client_id, self.hub.clock.monotonic())
        if wait_s:
            self.hub.figures.connects_delayed += 1
            await asyncio.sleep(wait_s)

    async def _take(self, connection: Connection, packet: Connect, user: bytes) -> None:
        """In turn: take over from the older owner, load or make the session, answer."""
        hub = self.hub
        client_id = packet.client_id
        older = self.owners.get(client_id)
        expiry_s = self._expiry_s(connection, clean_start=packet.clean_start)
        stored = None
        if packet.clean_start or expiry_s == 0:
            stored = await hub.store.snapshot(client_id)
        owner = stored.consumer.user if stored is not None else user
        if older is not None:
            owner = older.user
        if owner not in (user, UNCLAIMED):
            raise NotOwner(0)
        if _left(connection):
            return
        older = self.owners.get(client_id)  # it may have left meanwhile
        if older is not None:
            hub.figures.takeovers += 1
            older.peer.finish(TAKEN_OVER)
        incarnation = os.urandom(INCARNATION_BYTES)
        if packet.will is not None:
            hub.wills.store(_will(client_id, incarnation, user, packet.will))
        begun: _Begun | None = None
        try:
            if expiry_s == 0 and (packet.clean_start or stored is None):
                begun = await self._transient(
                    connection, packet, user, incarnation, stored=stored is not None
                )
            else:
                begun = await self._durable(
                    connection, packet, user, incarnation, expiry_s=expiry_s
                )
            await self._settle_wills(connection, packet, incarnation)
        except BaseException:
            hub.wills.abandon(incarnation)
            if begun is not None:
                self._undo(begun.session)
            raise
        if _left(connection):
            # nobody was told anything, so there is no will either [MQTT-3.1.2-8]
            hub.wills.abandon(incarnation)
            self._undo(begun.session)
            return
        begun.session.has_will = packet.will is not None
        self._accept(connection, packet, begun)

    async def _settle_wills(
        self, connection: Connection, packet: Connect, incarnation: bytes
    ) -> None:
        """Before the client is told: its will is stored, and what waited for its return is gone."""
        if packet.will is not None:
            await self.hub.wills.stored(incarnation)
        if not _left(connection):
            deleted = await self.hub.wills.returned(packet.client_id, clean=packet.clean_start)
            if _left(connection):
                self.hub.wills.went_again(deleted)

    def _expiry_s(self, connection: Connection, *, clean_start: bool) -> int | None:
        """How long the session is kept after its connection, None = for ever. Before MQTT 5 Clean
        Session says both: begin afresh, and keep nothing."""
        settings = self.hub.settings
        if connection.five is not None:
            return connection.five.terms.granted_expiry_s(settings)
        return 0 if clean_start else settings.session_expiry_interval_s

    def _accept(self, connection: Connection, packet: Connect, begun: _Begun) -> None:
        """The session begins, and its client is told."""
        hub = self.hub
        session = begun.session
        client_id = session.client_id
        if packet.clean_start:
            self.untold.pop(client_id, None)  # its client has asked for it
        self.owners[client_id] = session
        connection.session = session
        session.may_receive = connection.guard.may_receive
        hub.figures.connects += 1
        connection.accept(packet, session_present=begun.present, words=begun.words)
        connection.guard.connected(session)
        if isinstance(session, DurableSession):
            session.start()

    async def _transient(
        self,
        connection: Connection,
        packet: Connect,
        user: bytes,
        incarnation: bytes,
        *,
        stored: bool,
    ) -> _Begun:
        """A clean session: what is stored for the id is deleted first [MQTT-3.1.2-6]."""
        hub = self.hub
        if stored:
            outcome = await hub.committer.apply(
                Acquire(
                    packet.client_id,
                    incarnation,
                    user,
                    hub.clock.now_ms(),
                    clean=True,
                    create=False,
                )
            )
            self._uncount(outcome)
        session = TransientSession(
            hub,
            connection,
            client_id=packet.client_id,
            user=user,
            incarnation=incarnation,
            window=min(hub.settings.max_inflight, connection.receive_maximum),
        )
        return _Begun(session)

    async def _durable(
        self,
        connection: Connection,
        packet: Connect,
        user: bytes,
        incarnation: bytes,
        *,
        expiry_s: int | None,
    ) -> _Begun:
        """A session that survives: acquired, and checked before CONNACK."""
        outcome = await self._acquire(
            connection, packet, user, incarnation, clean=packet.clean_start, expiry_s=expiry_s
        )
        snapshot = outcome.snapshot
        assert snapshot is not None
        present = outcome.existed
        if outcome.dropped and not packet.clean_start:
            self.must_tell(packet.client_id, EXPIRED)
        finding = Finding(Verdict.RESUME)
        if present and not _left(connection):
            finding = verdict(
                snapshot,
                outcome.log,
                on_generation_change=self.hub.settings.on_generation_change,
                on_history_pruned=self.hub.settings.on_history_pruned,
            )
            try:
                if finding.verdict is Verdict.RESET:
                    snapshot = await self._reset(
                        connection, packet, user, incarnation, expiry_s=expiry_s
                    )
                    present = False
            except BaseException:
                self._detach(snapshot.consumer.id, incarnation)
                raise
        if finding.verdict is Verdict.RESET:
            self.hub.tell_reset(packet.client_id, finding)
        elif finding.verdict is Verdict.REBIND:
            self.hub.figures.rebound += 1
            log.warning("session %r: %s; it resumes unchecked", packet.client_id, finding.error)
        elif present:
            self.hub.figures.resumed += 1
        present = present and not is_blank(snapshot)
        session = DurableSession(
            self.hub,
            connection,
            snapshot,
            client_id=packet.client_id,
            user=user,
            incarnation=incarnation,
            window=min(self.hub.settings.max_inflight, connection.receive_maximum),
            unbound=finding.verdict is Verdict.REBIND,
            expiry_s=expiry_s,
        )
        session.fresh = not present
        words = NO_WORDS if packet.clean_start else self.untold.get(packet.client_id)
        return _Begun(session, present and words is None, words or NO_WORDS)

    def _detach(self, consumer_id: int, incarnation: bytes) -> None:
        """Leave a record that was acquired, as it is."""
        now_ms = self.hub.clock.now_ms()
        self.hub.committer.submit(Detach(consumer_id, incarnation, now_ms), _logged)

    async def _acquire(
        self,
        connection: Connection,
        packet: Connect,
        user: bytes,
        incarnation: bytes,
        *,
        clean: bool,
        expiry_s: int | None,
    ) -> Acquired:
        outcome = await self.hub.committer.apply(
            Acquire(
                packet.client_id,
                incarnation,
                user,
                self.hub.clock.now_ms(),
                clean=clean,
                expiry_s=expiry_s,
                version=connection.version,
            )
        )
        self._uncount(outcome)
        assert isinstance(outcome, Acquired)
        return outcome

    async def _reset(
        self,
        connection: Connection,
        packet: Connect,
        user: bytes,
        incarnation: bytes,
        *,
        expiry_s: int | None,
    ) -> Snapshot:
        """Delete the record and its deliveries, and begin afresh."""
        outcome = await self._acquire(
            connection, packet, user, incarnation, clean=True, expiry_s=expiry_s
        )
        assert outcome.snapshot is not None
        return outcome.snapshot

    def _uncount(self, outcome: Outcome) -> None:
        """A record was deleted: its durable filters are wanted by one consumer less."""
        if isinstance(outcome, Acquired):
            self.hub.shared.ended(outcome.dropped_id)
            for topic_filter in outcome.dropped:
                self.hub.router.count(topic_filter, -1)

    def _undo(self, session: Session) -> None:
        """A session that its client was never told of. A record that was there is left as it is;
        one that was made goes again, so that the next CONNECT is told that there was none."""
        if isinstance(session, DurableSession) and session.fresh:
            session.discard()
        else:
            session.end(GAVE_UP)

    # -------------------------------------------------------------------------- the end

    def leave(self, session: Session, end: End) -> None:
        """A connection ended: seal its session, and see to its will."""
        if session.sealed:
            return
        if self.owners.get(session.client_id) is session:
            del self.owners[session.client_id]
        if session.client_id in self.untold and session.peer.confirmed:
            del self.untold[session.client_id]
        if (
            isinstance(session, DurableSession)
            and session.fresh
            and session.client_id in self.untold
        ):
            session.discard()  # its client may never have heard that its session is gone
        elif isinstance(session, DurableSession) and session.expiry_s == 0:
            session.discard()  # it ends with its connection [MQTT5-3.1.2.11.2]
        else:
            session.end(end)
        if session.has_will:
            self.hub.wills.ended(session, end)

    def discard(self, session: DurableSession) -> None:
        """Seal a session and delete its record, if its incarnation still owns it."""
        if self.owners.get(session.client_id) is session:
            del self.owners[session.client_id]
        session.discard()


def _left(connection: Connection) -> bool:
    """Whether there is nobody any more who could be answered."""
    return connection.ended is not None or connection.closed


def _logged(outcome: Outcome) -> None:
    if isinstance(outcome, BaseException):
        log.warning("a record could not be left: %s", outcome)


def _will(client_id: bytes, incarnation: bytes, user: bytes, will: ConnectWill) -> Will:
    flags = RETAINED if will.retain else 0
    properties = will.properties
    if properties is None:
        return Will(
            client_id, incarnation, user, Entry(0, will.topic, will.payload, will.qos, flags)
        )
    lifetime_s: int | None = properties.get(MESSAGE_EXPIRY_S)
    message = Entry(
        0,
        will.topic,
        will.payload,
        will.qos,
        flags,
        expires_ms=0 if lifetime_s is None else max(lifetime_s * 1000, 1),
        properties=properties.forwarded(),
    )
    return Will(client_id, incarnation, user, message, properties.get(WILL_DELAY_S, 0))
