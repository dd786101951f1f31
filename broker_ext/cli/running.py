"""Running the broker of `serve` in this process: one line when it listens, one when it cannot."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from typing import TYPE_CHECKING, Any

import typer

from broker_ext.cli.errors import CannotServe, root_cause
from broker_ext.cli.serving import bound, our_plugin, plugin_defaults
from broker_ext.collector import calm

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from amqtt.broker import Broker

__all__ = ["run", "set_up_logging"]

OPEN_FILES_MAX = 1 << 20  # some systems have a hard limit of 2**63 and tables sized by the soft one

logger = logging.getLogger("amqtt_durable")


def set_up_logging(level: str | None) -> None:
    """Log to stderr: warnings of everybody and our own news, or all at the level asked for."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if level is None:
        logging.getLogger().setLevel(logging.WARNING)
        logger.setLevel(logging.INFO)
    else:
        logging.getLogger().setLevel(level.upper())
    logging.getLogger("transitions").setLevel(logging.WARNING)  # as amqtt's own script does


def run(config: dict[str, Any]) -> None:
    """Run a broker with this serving_config until a signal. Raises CannotServe."""
    _raise_open_files_limit()
    asyncio.run(_serve(config))


def _raise_open_files_limit() -> None:
    """Take as many open files as we may: each client is one, and 1,024 is a common soft limit."""
    import resource  # noqa: PLC0415 - POSIX only, as is `serve`; the rest imports anywhere

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as exc:
            logger.info("open files stay limited to %s: %s", soft, exc)


async def _serve(config: dict[str, Any]) -> None:
    """Run until the first signal, then shut down; a second signal ends the process at once."""
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(1)  # as safe as a crash, and that is safe (P1)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    broker = await _start(config)
    calm()
    typer.echo(_summary(config))
    await stop.wait()
    await broker.shutdown()


async def _start(config: dict[str, Any]) -> Broker:
    """Start amqtt's broker, or raise CannotServe with the root cause after undoing what began."""
    from amqtt.broker import Broker  # noqa: PLC0415 - a tenth of a second

    with _told_here():
        try:
            broker = Broker(config)
        except Exception as exc:
            # plugins and the reading of settings raise what they like; there is no broker
            raise CannotServe(f"the broker cannot start: {root_cause(exc)}") from exc
        try:
            await broker.start()
        except Exception as exc:
            with contextlib.suppress(Exception):  # the reason not to start is the one to tell
                await broker.plugins_manager.close()
            raise CannotServe(f"the broker cannot start: {root_cause(exc)}") from exc
    return broker


@contextlib.contextmanager
def _told_here() -> Iterator[None]:
    """Keep a failed start out of the log, amqtt's traceback too: CannotServe tells it in a line.

    Under `amqtt -c` these records are all there is, therefore whoever logs them must.
    """
    messages = {"Broker startup failed", "the broker does not start: %s"}

    def is_told_here(record: logging.LogRecord) -> bool:
        return record.msg not in messages

    handlers = logging.getLogger().handlers
    for handler in handlers:
        handler.addFilter(is_told_here)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(is_told_here)


def _summary(config: Mapping[str, Any]) -> str:
    """Say in one line where it listens, where the data is, which store and what a commit means."""
    plugins = config["plugins"]
    ours = plugin_defaults() | plugins[our_plugin(plugins)]
    where = ", ".join(f"{bind} ({kind})" for kind, bind in bound(config["listeners"]))
    return (
        f"listening on {where or 'no socket'}; data {ours['data']}; store {ours.get('store')}; "
        f"durability {ours.get('durability')}"
    )
