"""An amqtt plugin for the broker under test: it tells what the durable half counts and resets.

It is copied beside the broker's configuration and named there as ``witness.Witness``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from amqtt.broker import BrokerContext
from amqtt.plugins.base import BasePlugin

FIGURES = Path("figures.json")
RESETS = Path("resets.jsonl")
EVERY_S = 0.02


class Witness(BasePlugin[BrokerContext]):
    """Writes ``figures.json`` while the broker runs, and a line in ``resets.jsonl`` per reset."""

    @dataclass
    class Config:
        """prune_often: beside the timer, every time it looks."""

        prune_often: bool = False

    def __init__(self, context: BrokerContext) -> None:
        super().__init__(context)
        self._task: asyncio.Task[None] | None = None

    async def on_broker_post_start(self) -> None:
        self._task = asyncio.ensure_future(self._watch())

    async def on_broker_pre_shutdown(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def on_durable_session_reset(
        self, *, client_id: str, reason: str, position: int, floor: int
    ) -> None:
        line = json.dumps(
            {"client_id": client_id, "reason": reason, "position": position, "floor": floor}
        )
        with RESETS.open("a") as file:  # noqa: ASYNC230 - a few bytes, in a test
            file.write(line + "\n")

    async def _watch(self) -> None:
        broker: Any = self.context._broker_instance
        told = ""
        while True:
            plugin: Any = broker.plugins_manager.get_plugin("DurableSessionPlugin")
            with contextlib.suppress(Exception):  # it may be closing
                if self.config.prune_often:
                    await plugin.hub._prune()
                log = await plugin.hub.store.log()
                figures = asdict(plugin.hub.figures) | {"head": log.head, "floor": log.floor}
                if (now := json.dumps(figures)) != told:
                    new = FIGURES.with_suffix(".new")
                    new.write_text(now)
                    new.replace(FIGURES)
                    told = now
            await asyncio.sleep(EVERY_S)
