"""The broker of the campaign: one real process after the other on one data directory."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    import random
    from multiprocessing.context import ForkServerProcess

__all__ = ["HOST", "Broker", "Fate", "free_port"]

HOST: Final = "127.0.0.1"
UP_S: Final = 30.0
PORTS: Final = range(20_000, 32_000)
"""Below the ports that systems give to outgoing connections: one of those, dialled while nobody
listens, can connect to itself and keep the broker out."""


class Fate(NamedTuple):
    """How a process is to live and die.

    point: see ``points``, "" = it does not die by itself. nth: at which time it dies there.
    window: deliveries to one client that are not acknowledged. is_short: its disk is full now and
    then.
    """

    point: str = ""
    nth: int = 0
    window: int = 100
    is_short: bool = False


def _serve(data: str, port: int, store: str, fate: Fate, log: str, keys: str) -> None:
    """Be the broker. In a process of its own."""
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    from broker_ext.cli import app  # noqa: PLC0415 - in the broker's process only
    from tests.crash import points  # noqa: PLC0415

    points.make_small(fate.window)
    points.arm(fate.point, fate.nth)
    if fate.is_short:
        points.fill_the_disk_now_and_then(Path(data), port)
    sealed = ["--key-file", keys, "--seal-topics"] if keys else []
    app(["serve", "--data", data, "--bind", f"{HOST}:{port}", "--store", store, *sealed])


def free_port(rng: random.Random) -> int:
    """Give a port that nobody listens on."""
    while True:
        port = rng.choice(PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port


class Broker:
    """As many processes as it takes, one at a time. Processes are forked from one that has imported
    everything, so that a start takes as long as the product's own part of it.

    keys: what the data is sealed with, None = it is not.
    """

    def __init__(self, folder: Path, store: str, port: int, keys: Path | None = None) -> None:
        self.keys = keys
        self.data = folder / "data"
        self.log = folder / "broker.log"
        self.store = store
        self.port = port
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(
            ["broker_ext.cli.running", "broker_ext.plugin", "amqtt.broker", "tests.crash.points"]
        )
        self._process: ForkServerProcess | None = None

    def start(self, fate: Fate) -> None:
        """Start a process; it may be dead before it listens."""
        self._process = self._context.Process(
            target=_serve,
            args=(
                str(self.data),
                self.port,
                self.store,
                fate,
                str(self.log),
                str(self.keys or ""),
            ),
            daemon=True,
        )
        self._process.start()

    @property
    def is_alive(self) -> bool:
        """Whether the process is there."""
        return self._process is not None and self._process.is_alive()

    @property
    def exit_code(self) -> int | None:
        """Of the last process; -9 when it was killed."""
        return self._process.exitcode if self._process is not None else None

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        if self._process is not None and self._process.pid is not None and self.is_alive:
            os.kill(self._process.pid, number)

    async def died(self, within_s: float) -> bool:
        """Wait for the end of the process."""
        end = asyncio.get_running_loop().time() + within_s
        while self.is_alive:
            if asyncio.get_running_loop().time() >= end:
                return False
            await asyncio.sleep(0.005)
        return True

    async def kill(self) -> None:
        """SIGKILL, and wait until the process is gone."""
        self.send(signal.SIGKILL)
        await self.died(UP_S)
        if self._process is not None:
            self._process.join()

    async def listens(self) -> bool:
        """Wait until somebody can connect. False: the process ended before."""
        end = asyncio.get_running_loop().time() + UP_S
        while self.is_alive and asyncio.get_running_loop().time() < end:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection(HOST, self.port)
                writer.close()
                return True
            await asyncio.sleep(0.01)
        return False
