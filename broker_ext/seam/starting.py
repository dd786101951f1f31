"""A broker's start and its process: what amqtt leaves undone there.

amqtt drops what plugins raise while it starts, and what dacite says of their options; its own
script never looks at what ``start`` raised; it listens with a short backlog, and knows SIGINT only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from amqtt.errors import BrokerError, PluginError
from amqtt.plugins import manager

from broker_ext.collector import calm

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = [
    "calm_collector",
    "listen_widely",
    "read_by",
    "refuse_to_start",
    "stop_on_signals",
    "watch_listeners",
]

log = logging.getLogger("amqtt_durable.seam")

LISTEN_BACKLOG: Final = 4096
"""amqtt listens with asyncio's backlog of 100; 500 clients that dial at once would meet SYN
retransmits of a second each."""


def read_by(plugin: str, config: type, read: Callable[[object], object]) -> None:
    """Have amqtt read the options of a plugin, which are a ``config``, by ``read``. A ValueError
    becomes a PluginError, the text of which amqtt's script tells in a line.

    amqtt reads them with dacite, and raises PluginLoadError without a word for an option that is
    not known or of another type. Where it no longer does, nothing is changed.
    """
    theirs = getattr(manager, "from_dict", None)

    def from_dict(data_class: type, data: object, *rest: Any, **named: Any) -> object:
        assert theirs is not None
        if data_class is not config:
            return theirs(data_class, data, *rest, **named)
        try:
            return read(data)
        except ValueError as error:
            msg = f"{plugin}: {error}"
            raise PluginError(msg) from error

    if theirs is not None:
        setattr(manager, "from_dict", from_dict)  # noqa: B010 - it does not export it


def refuse_to_start(broker: Any, reason: BaseException) -> None:
    """Have ``Broker.start`` fail: the store cannot be used, so nothing may be served."""

    async def refuse() -> None:
        log.critical("the broker does not start: %s", reason)
        _leave_script(broker)
        raise BrokerError(str(reason)) from reason

    broker._start_listeners = refuse


def watch_listeners(broker: Any, failed: Callable[[], Awaitable[None]]) -> None:
    """Have ``failed`` awaited if the listeners cannot be started, since amqtt tells nobody."""
    start = broker._start_listeners

    async def start_or_tell() -> None:
        broker._start_listeners = start
        try:
            await start()
        except Exception as error:
            log.critical("the broker does not start: %s", error)
            await failed()
            _leave_script(broker)
            raise

    broker._start_listeners = start_or_tell


def listen_widely(broker: Any) -> None:
    """Raise the backlog of the listening sockets (on_broker_post_start)."""
    for server in broker._servers.values():
        for shared in getattr(server.instance, "sockets", None) or ():
            with socket.socket(fileno=os.dup(shared.fileno())) as listening:
                listening.listen(LISTEN_BACKLOG)


def calm_collector() -> None:
    """Have the garbage collector look less often, where the process is the broker's alone."""
    if _run_by_script():
        calm()


def stop_on_signals(broker: Any) -> None:
    """`amqtt -c` knows SIGINT only, and has it raised between any two instructions. There, and
    nowhere else, both signals stop the loop between two callbacks."""
    if not _run_by_script():
        return

    def interrupt() -> None:
        raise KeyboardInterrupt

    for number, usual in (
        (signal.SIGTERM, signal.SIG_DFL),
        (signal.SIGINT, signal.default_int_handler),
    ):
        if signal.getsignal(number) is usual:
            with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
                broker._loop.add_signal_handler(number, interrupt)


def _leave_script(broker: Any) -> None:
    """`amqtt -c` never looks at what ``start`` raised, and would idle for ever. It leaves without
    tracebacks: what there is to say was said. Raises CancelledError there, of the task of ``start``
    that nobody awaits."""
    if _run_by_script():
        broker._loop.call_soon(partial(sys.exit, 1))
        raise asyncio.CancelledError


def _run_by_script() -> bool:
    """Whether this process is ``amqtt -c ...`` and nobody else's program."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name == "amqtt.scripts.broker_script":
        return True
    return Path(getattr(main, "__file__", None) or "").name == "amqtt"
