"""Sealing everything with the current key while the broker runs: ``rekey`` of the control socket.

The keys are read again from where the configuration has them, so a new first key in the file is
taken over without a restart; a variable of the environment stays what it was at the start. Steps go
through the writer's thread like commits (storage.rekey), and as much time as each took is left to
others. A broker that stops in the middle, in whatever way, goes on from there when it is asked
again.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from broker_ext.operations import RefusedError
from storage.errors import KeysUnusable, SealKeyMissing, SealKeyWrong, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from broker_ext.hub import Hub
    from broker_ext.operations import Operation
    from storage.clock import Clock
    from storage.durable import DurableStore
    from storage.keyring import Keyring

__all__ = ["REKEYING", "Progress", "Rekeying", "rekey", "rekey_progress"]

log = logging.getLogger("amqtt_durable.rekey")

RETRY_S: Final = 1.0
"""After a step that the disk did not take."""


@dataclass(slots=True)
class Progress:
    """looked_at, written, unreadable: rows. space, through: where it is. key_id: what everything is
    sealed with. key_ids: keys that are needed. state: idle, running, done or failed."""

    state: str = "idle"
    key_id: str = ""
    key_ids: tuple[str, ...] = ()
    space: str = ""
    through: float = 0.0
    looked_at: int = 0
    written: int = 0
    unreadable: int = 0


class Rekeying:
    """One broker's. keys: reads them."""

    def __init__(self, store: DurableStore, clock: Clock, keys: Callable[[], Keyring]) -> None:
        self.progress = Progress()
        self._store = store
        self._clock = clock
        self._keys = keys
        self._task: asyncio.Task[None] | None = None

    async def start(self, *, seal_topics: bool = False) -> None:
        """Begin, or go on; nothing if it is under way. Raises KeysUnusable, SealKeyMissing,
        SealKeyWrong, StoreUnavailable."""
        if self._task is not None and not self._task.done():
            return
        key_ids = await self._store.seal_with(self._keys(), seal_topics=seal_topics)
        self.progress = Progress("running", key_ids[0], tuple(key_ids))
        self._task = asyncio.ensure_future(self._run(self.progress))

    async def stop(self) -> None:
        """Leave it where it is. Before the store is closed; idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self, progress: Progress) -> None:
        log.info("sealing everything with key %r", progress.key_id)
        try:
            while progress.state == "running":
                await self._step(progress)
        except Exception:
            progress.state = "failed"
            log.exception("sealing everything anew failed; what is sealed stays so")
        else:
            log.info(
                "everything is sealed with key %r: %d rows were sealed anew, %d do not open",
                progress.key_id,
                progress.written,
                progress.unreadable,
            )

    async def _step(self, progress: Progress) -> None:
        begun_s = self._clock.monotonic()
        try:
            step = await self._store.reseal()
        except StoreUnavailable as error:
            log.warning("sealing everything anew waits for the store: %s", error)
            await asyncio.sleep(RETRY_S)
            return
        progress.looked_at += step.looked_at
        progress.written += step.written
        progress.unreadable += step.unreadable
        progress.space, progress.through = step.space, round(step.through, 3)
        progress.key_ids = step.key_ids
        if step.is_done:
            progress.state = "done"
            return
        await asyncio.sleep(self._clock.monotonic() - begun_s)


async def rekey(hub: Hub, *, seal_topics: bool = False) -> dict[str, Any]:
    """Read the keys again, and begin to seal everything with the first one. How far it is."""
    rekeying = _rekeying(hub)
    try:
        await rekeying.start(seal_topics=seal_topics)
    except (KeysUnusable, SealKeyMissing, SealKeyWrong) as error:
        # nothing of a key is in them, and who may ask may read the file
        raise RefusedError(409, str(error)) from None
    return asdict(rekeying.progress)


async def rekey_progress(hub: Hub) -> dict[str, Any]:
    """How far it is."""
    return asdict(_rekeying(hub).progress)


def _rekeying(hub: Hub) -> Rekeying:
    if hub.rekeying is None:
        raise RefusedError(
            409, "the broker has no keys: configure seal_key_file or seal_key_env, and restart it"
        )
    return hub.rekeying


REKEYING: Final[dict[str, Operation]] = {"rekey": rekey, "rekey_progress": rekey_progress}
