"""Wills: stored under the incarnation of their connection, and published or deleted by it alone
(P9).

A will is stored before CONNACK. When the connection ends without DISCONNECT it is published
through the ordinary path, and deleted in the same commit. Wills that are found at start are those
of connections that died with the broker: they are published after ``will_recovery_delay_s``,
unless their client has come back by then.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from storage.api import RETAINED, DropWill, StoreWill

if TYPE_CHECKING:
    from broker_ext.hub import Hub
    from broker_ext.session import End, Session
    from storage.api import Outcome, Will

__all__ = ["Wills"]

log = logging.getLogger("amqtt_durable.wills")


class Wills:
    """All wills of a broker."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self._wills: dict[bytes, Will] = {}
        self._saving: dict[bytes, asyncio.Future[Outcome]] = {}
        self._orphans: dict[bytes, list[Will]] = {}
        self._publishing: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------------- with a CONNECT

    def store(self, will: Will) -> None:
        """Put a will into the open batch; ``stored`` waits for it."""
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

        def done(outcome: Outcome) -> None:
            if future.done():
                return
            if isinstance(outcome, BaseException):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

        self._wills[will.incarnation] = will
        self._saving[will.incarnation] = future
        self.hub.committer.submit(StoreWill(will), done, retry=False)

    async def stored(self, incarnation: bytes) -> None:
        """Wait until a will is on disk. Raises StoreError; then there is none."""
        try:
            await self._saving.pop(incarnation)
        except BaseException:
            self._wills.pop(incarnation, None)
            raise

    def abandon(self, incarnation: bytes) -> None:
        """The CONNECT failed: there is no will."""
        saving = self._saving.pop(incarnation, None)
        if saving is not None and not saving.cancel():
            saving.exception()  # looked at, so that asyncio does not complain that nobody did
        will = self._wills.pop(incarnation, None)
        if will is not None:
            self._delete(will)

    # ------------------------------------------------------------------ with the session

    def ended(self, session: Session, end: End) -> None:
        """A session ended: publish its will, or delete it."""
        will = self._wills.pop(session.incarnation, None)
        if will is None:
            return
        if end.publish_will:
            self._publish_if_permitted(will, session)
        elif end.name != "shutdown":  # those stay, as after a crash
            self._delete(will)

    def _delete(self, will: Will) -> None:
        self.hub.committer.submit(DropWill(will.incarnation), _logged)

    def _publish_if_permitted(self, will: Will, session: Session | None) -> None:
        permits = self.hub.permits_will
        if permits is None:
            self._publish(will)
            return
        task = asyncio.ensure_future(self._ask(will, session))
        self._publishing.add(task)
        task.add_done_callback(self._publishing.discard)

    async def _ask(self, will: Will, session: Session | None) -> None:
        assert self.hub.permits_will is not None
        try:
            permitted = await self.hub.permits_will(will, session)
        except Exception:
            # a topic plugin's bug: who cannot say yes has not said it
            log.exception("a topic plugin failed on the will of %r", will.client_id)
            permitted = False
        if permitted:
            self._publish(will)
        else:
            log.info("the will of %r is not permitted", will.client_id)
            self._delete(will)

    def _publish(self, will: Will) -> None:
        message = will.message
        self.hub.figures.wills += 1
        self.hub.router.publish(
            message.topic,
            message.payload,
            message.qos,
            retain=bool(message.flags & RETAINED),
            origin=will.client_id,
            properties=message.properties,
        )
        self._delete(will)

    # -------------------------------------------------------------------- after a crash

    def load(self, wills: tuple[Will, ...]) -> None:
        """Wills of connections that died with the broker."""
        for will in wills:
            self._orphans.setdefault(will.client_id, []).append(will)

    def cancel_orphans(self, client_id: bytes) -> None:
        """The client has come back before its old will was published."""
        for will in self._orphans.pop(client_id, ()):
            self._delete(will)

    def publish_orphans(self) -> None:
        """The time is up: publish what is left (or delete it, where so configured)."""
        orphans, self._orphans = self._orphans, {}
        for wills in orphans.values():
            for will in wills:
                if self.hub.settings.publish_wills_after_crash:
                    self._publish_if_permitted(will, None)
                else:
                    self._delete(will)

    async def settle(self) -> None:
        """Wait for the topic plugins that are being asked."""
        if self._publishing:
            await asyncio.gather(*self._publishing, return_exceptions=True)


def _logged(outcome: Outcome) -> None:
    if isinstance(outcome, BaseException):
        log.error("a will could not be deleted: %s", outcome)
