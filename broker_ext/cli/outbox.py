"""`outbox ...`: the outbox, told to an operator by the broker that runs, or by the store itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pwd
import time
from typing import TYPE_CHECKING, Any, Final, Self

import typer

from broker_ext.cli.calling import call
from broker_ext.cli.errors import CannotOperate, NoBroker, Refused
from broker_ext.cli.operations import as_one_line
from broker_ext.cli.watching import masked, readable, rows
from broker_ext.operating import OPERATING
from broker_ext.operations import RefusedError
from storage import open_store
from storage.clock import SystemClock
from storage.errors import StoreUnusable
from storage.files import must_not_be_a_backup, the_kind_in
from storage.roles import Handles

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from broker_ext.cli.store import Store
    from storage import api

__all__ = ["Desk", "audit", "backlog", "dead_letters", "purge", "reissue", "show"]

DAY_MS: Final = 86_400_000
PAGE: Final = 500
LETTERS: Final = ("id", "queue", "failure", "attempts", "died", "topic", "bytes", "destination")
QUEUES: Final = (
    "queue",
    "waiting",
    "claimed",
    "dead",
    "done",
    "expired",
    "oldest due",
    "destination",
)


class _Offline:
    """A store that no broker serves, opened by us (see ``broker_ext.operating.Place``)."""

    def __init__(self, store: api.Store, clock: SystemClock) -> None:
        self._store = store
        self.handles = Handles(store, clock)
        self.clock = clock

    def outbox_changed(self) -> None:
        """The next start finds it."""

    def destinations(self) -> dict[str, str]:
        """They are in the broker's configuration."""
        return {}

    async def close(self) -> None:
        """Write everything, and let go of the directory."""
        await self.handles.drain()
        self.handles.close()
        await self._store.close()


class Desk:
    """Where to ask: the broker that serves the store or, where none does, the store itself, which
    is opened once and closed at the end (``with``)."""

    def __init__(self, store: Store) -> None:
        self._data, self._keys = store
        self._runner = asyncio.Runner()
        self._offline: _Offline | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._runner, as_one_line():
            if self._offline is not None:
                self._runner.run(self._offline.close())

    def ask(self, name: str, **arguments: Any) -> Any:
        """Carry out one operation. Raises CannotOperate."""
        if self._offline is None:
            try:
                return call(self._data, name, **arguments)
            except NoBroker:
                with as_one_line("it does not answer on its control socket; see its log"):
                    self._offline = self._runner.run(self._open())
        with as_one_line():
            try:
                return self._runner.run(_operate(self._offline, name, arguments))
            except RefusedError as error:
                raise Refused(error.code, error.message) from error

    def queues(self, only: str | None) -> list[str]:
        """The names of all queues, or the one that is asked for. Raises CannotOperate for one that
        there is not: a name that was mistyped is no queue with nothing in it."""
        known = [one["queue"] for one in self.ask("outbox_backlog")]
        if only is None:
            return known
        if only not in known:
            there = f"there are {', '.join(map(readable, known))}" if known else "there is none"
            raise CannotOperate(f"there is no queue {only!r}; {there}")
        return [only]

    async def _open(self) -> _Offline:
        try:
            kind = the_kind_in(self._data)
            must_not_be_a_backup(self._data)
        except StoreUnusable as error:
            reason = f"no broker is running on {self._data}, and {error.reason}"
            raise CannotOperate(reason) from error
        clock = SystemClock()
        store = open_store(kind, self._data, keyring=self._keys.read())
        opened = await store.open(now_ms=clock.now_ms())
        clock.not_before(opened.seen_ms)
        return _Offline(store, clock)


async def _operate(place: _Offline, name: str, arguments: dict[str, Any]) -> Any:
    return await OPERATING[name](place, **arguments)


def backlog(desk: Desk, *, is_unmasked: bool, as_json: bool) -> None:
    """Figures of each queue."""
    found = desk.ask("outbox_backlog")
    for one in found:
        one["destination"] = _destination(one["destination"], is_unmasked=is_unmasked)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    rows(
        QUEUES,
        [
            (
                readable(one["queue"]),
                *(str(one[state]) for state in ("waiting", "claimed", "dead", "done", "expired")),
                f"{one['oldest_ms'] / 1000:.0f} s ago" if one["oldest_ms"] else "-",
                readable(one["destination"]),
            )
            for one in found
        ],
    )


def dead_letters(
    desk: Desk, queue: str | None, *, limit: int, is_unmasked: bool, as_json: bool
) -> None:
    """List up to ``limit`` dead letters, of one queue or of all."""
    found: list[dict[str, Any]] = []
    for one in _letters(desk, queue):
        if len(found) == limit:
            break
        found.append(_masked(one, is_unmasked=is_unmasked))
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    rows(LETTERS, [_letter(one) for one in found])


def _letters(desk: Desk, queue: str | None) -> Iterator[dict[str, Any]]:
    for name in desk.queues(queue):
        after = ""
        while True:
            page = desk.ask("outbox_dead_letters", queue=name, after=after, limit=PAGE)
            yield from page["dead_letters"]
            after = page["next"]
            if not after:
                break


def _letter(one: dict[str, Any]) -> tuple[str, ...]:
    return (
        str(one["id"]),
        readable(one["queue"]),
        one["failure"],
        str(one["attempts"]),
        _date(one["ended_ms"]),
        readable(one.get("topic", "-")),
        str(one.get("payload_bytes", "-")),
        readable(one["destination"]),
    )


def show(
    desk: Desk, message_id: int, *, has_payload: bool, is_unmasked: bool, as_json: bool
) -> None:
    """Everything about one message."""
    found = desk.ask("outbox_show", message_id=message_id, payload=has_payload)
    found = _masked(found, is_unmasked=is_unmasked)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    for name, value in found.items():
        told = str(value)
        if name.endswith("_ms"):
            told = _date(value) if value else "-"
        typer.echo(f"{name.removesuffix('_ms'):<14} {readable(told)}".rstrip())


def reissue(desk: Desk, ids: list[int], queue: str | None, *, as_json: bool) -> bool:
    """Have dead letters sent again, as fresh messages; whether all of them were."""
    actor = _actor()
    if queue is not None:
        ids = [one["id"] for one in _letters(desk, queue)]  # before the first dies again
    done: list[dict[str, Any]] = []
    refused: list[dict[str, Any]] = []
    for message_id in ids:
        try:
            done.append(desk.ask("outbox_reissue", message_id=message_id, actor=actor))
        except Refused as error:
            refused.append({"message_id": message_id, "code": error.code, "error": str(error)})
    if as_json:
        typer.echo(json.dumps({"reissued": done, "refused": refused}, indent=1))
        return not refused
    for one in done:
        typer.echo(f"message {one['message_id']} is reissued as {one['new_id']}")
    for one in refused:
        typer.echo(f"amqtt-durable: {one['error']}", err=True)
    if not ids:
        typer.echo("there is nothing to reissue")
    return not refused


def purge(
    desk: Desk, queue: str | None, *, done_days: float, dead_days: float, as_json: bool
) -> None:
    """Delete what ended longer ago."""
    if queue is not None:
        desk.queues(queue)
    messages = 0
    more = True
    while more:
        purged = desk.ask(
            "outbox_purge",
            queue=queue or "",
            done_kept_ms=int(done_days * DAY_MS),
            dead_kept_ms=int(dead_days * DAY_MS),
        )
        messages += purged["messages"]
        more = purged["more"]
    if as_json:
        typer.echo(json.dumps({"messages": messages}))
    else:
        typer.echo(f"{messages} messages are deleted")


def audit(desk: Desk, *, as_json: bool) -> None:
    """Who had what reissued."""
    found: list[dict[str, Any]] = []
    after = 0
    while True:
        page = desk.ask("outbox_audit", after=after, limit=PAGE)
        found += page["records"]
        after = page["next"]
        if not after:
            break
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    rows(
        ("number", "when", "who", "queue", "dead letter", "reissued as"),
        [
            (
                str(one["number"]),
                _date(one["at_ms"]),
                readable(one["actor"]),
                readable(one["queue"]),
                str(one["message_id"]),
                str(one["new_id"]),
            )
            for one in found
        ],
    )


def _masked(found: dict[str, Any], *, is_unmasked: bool) -> dict[str, Any]:
    """The destination of a message is a client id."""
    if not is_unmasked:
        found["destination"] = masked(found["destination"])
    return found


def _destination(destination: str, *, is_unmasked: bool) -> str:
    scheme, separator, host = destination.partition("://")
    return destination if is_unmasked or not separator else f"{scheme}://{masked(host)}"


def _actor() -> str:
    """Who asks: the user of this process."""
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(os.getuid()).pw_name
    return f"uid {os.getuid()}"


def _date(ms: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(ms / 1000))
