"""Named steps at which a broker process kills itself, put into the product from outside.

A point is armed in the broker's own process before it starts; the product has no switch for it.
The fault model is SIGKILL: what was written to the operating system stays, everything else is gone.
"""

from __future__ import annotations

import functools
import os
import random
import resource
import signal
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from broker_ext import durable, outbound
from broker_ext.connection import Connection
from broker_ext.hub import Hub
from broker_ext.registry import Registry
from broker_ext.wills import Wills
from storage import committer, engine, lmdb_store, sqlite_store
from storage.committer import Committer
from storage.durable import DurableStore
from storage.history import History
from storage.lmdb_store import _LmdbDatabase
from storage.sqlite_store import _SqliteDatabase

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["POINTS", "arm", "fill_the_disk_now_and_then", "make_small", "points_of"]

SIDECARS: Final = (".identity.json.new",)
DATABASES: Final = (".mdb.new", ".sqlite.new")


class _Fuse:
    """Kills the process when it is asked for the nth time."""

    def __init__(self, count: int) -> None:
        self._left = count

    def __call__(self) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def soon(self) -> None:
        """Kill within two milliseconds: while what comes next is under way."""
        self._left -= 1
        if self._left == 0:
            delay_s = random.random() * 0.002  # noqa: S311 - no secret
            threading.Thread(target=self._after, args=[delay_s], daemon=True).start()

    @staticmethod
    def _after(delay_s: float) -> None:
        time.sleep(delay_s)
        os.kill(os.getpid(), signal.SIGKILL)


def _wrap(
    owner: Any,
    name: str,
    *,
    before: Callable[[], None] | None = None,
    after: Callable[[], None] | None = None,
) -> None:
    """Have ``before`` and ``after`` called around a method."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before()
        result = original(*args, **kwargs)
        if after is not None:
            after()
        return result

    setattr(owner, name, wrapped)


def _wrap_work(end: Callable[[], None]) -> None:
    """Have ``end`` called at the end of each write transaction, before its commit."""
    for database in (_LmdbDatabase, _SqliteDatabase):
        original = database.write

        def write(
            self: Any, work: Callable[[Any], Any], _original: Any = original, **kwargs: Any
        ) -> Any:
            def and_then(txn: Any) -> Any:
                result = work(txn)
                end()
                return result

            return _original(self, and_then, **kwargs)

        database.write = write  # type: ignore[method-assign]


def _wrap_async(owner: Any, name: str, after: Callable[[], None]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    async def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = await original(*args, **kwargs)
        after()
        return result

    setattr(owner, name, wrapped)


def _wrap_replace(
    ends: tuple[str, ...],
    *,
    before: Callable[[], None] | None = None,
    after: Callable[[], None] | None = None,
) -> None:
    """Have something called around the renaming of a file with one of these ends."""
    original = Path.replace

    def replace(self: Path, target: str | Path) -> Path:
        ours = self.name.endswith(ends)
        if ours and before is not None:
            before()
        result = original(self, target)
        if ours and after is not None:
            after()
        return result

    Path.replace = replace  # type: ignore[method-assign, assignment]


def _arm_sidecar(fuse: _Fuse, *, before: bool) -> None:
    """An opening writes the sidecar, commits the boot, and writes the sidecar again."""
    committed = [False]

    def commit() -> None:
        committed[0] = True

    def when_committed() -> None:
        if committed[0]:
            fuse()

    for database in (_LmdbDatabase, _SqliteDatabase):
        _wrap(database, "write", after=commit)
    if before:
        _wrap_replace(SIDECARS, before=when_committed)
    else:
        _wrap_replace(SIDECARS, after=when_committed)


def _arm_operation(fuse: _Fuse, name: str) -> None:
    """In the middle of a batch: an operation was applied, nothing is committed."""
    for kind, apply in list(engine._OPERATIONS.items()):
        if kind.__name__ == name:

            def applied(*args: Any, _apply: Any = apply) -> Any:
                result = _apply(*args)
                fuse()
                return result

            engine._OPERATIONS[kind] = applied
            return
    raise KeyError(name)


def make_small(window: int) -> None:
    """Have what seldom happens happen often, within the second that a process may live.

    Maps grow, logs are checkpointed, history is pruned, packet ids are used again, sessions lag
    behind what the committer remembers. window: deliveries to one client, as ``max_inflight``.
    """
    lmdb_store.MAP_BYTES = 1 << 20  # type: ignore[misc]
    sqlite_store.CHECKPOINT_BYTES = 256 << 10  # type: ignore[misc]
    committer.TAIL_BYTES_MAX = 64 << 10  # type: ignore[misc]
    outbound.PACKET_IDS = 500  # type: ignore[misc]
    outbound.ROW_FLIGHTS_MAX = 16  # type: ignore[misc]
    durable.AHEAD_MIN = 2 * window  # type: ignore[misc]
    original = Hub.__init__

    def init(self: Hub, store: Any, settings: Any, clock: Any) -> None:
        for name, value in (
            ("prune_interval_s", 0.1),
            ("checkpoint_interval_s", 0.1),
            ("will_recovery_delay_s", 0.2),
            ("max_inflight", window),
        ):
            object.__setattr__(settings, name, value)
        original(self, store, settings, clock)

    Hub.__init__ = init  # type: ignore[method-assign]


class Point(NamedTuple):
    """A named step. most: it kills when the step is taken for the nth time, n = 1..most."""

    most: int
    arm: Callable[[_Fuse], None]


def _before(owner: Any, name: str) -> Callable[[_Fuse], None]:
    return lambda fuse: _wrap(owner, name, before=fuse)


def _after(owner: Any, name: str) -> Callable[[_Fuse], None]:
    return lambda fuse: _wrap(owner, name, after=fuse)


def _operation(name: str, most: int) -> tuple[str, Point]:
    return f"op.{name}", Point(most, lambda fuse: _arm_operation(fuse, name))


POINTS: Final[dict[str, Point]] = {
    "append.after": Point(40, _after(History, "append")),
    "commit.before": Point(60, _wrap_work),
    "commit.during": Point(60, lambda fuse: _wrap_work(fuse.soon)),
    "commit.after": Point(60, _after(DurableStore, "_commit")),
    "completion.before": Point(60, _before(Committer, "_done")),
    "completion.after": Point(60, _after(Committer, "_done")),
    "flush.before": Point(120, _before(Connection, "flush")),
    "flush.after": Point(120, _after(Connection, "flush")),
    "takeover.after": Point(2, _after(Registry, "leave")),
    "will.after": Point(2, _after(Wills, "_publish")),
    "create.before": Point(1, lambda fuse: _wrap_replace(DATABASES, before=fuse)),
    "create.after": Point(1, lambda fuse: _wrap_replace(DATABASES, after=fuse)),
    "boot.before-first-sidecar": Point(1, lambda fuse: _wrap_replace(SIDECARS, before=fuse)),
    "boot.before-sidecar": Point(1, lambda fuse: _arm_sidecar(fuse, before=True)),
    "boot.after-sidecar": Point(1, lambda fuse: _arm_sidecar(fuse, before=False)),
    "grow.before": Point(2, _before(_LmdbDatabase, "_set_map_bytes")),
    "grow.after": Point(2, _after(_LmdbDatabase, "_set_map_bytes")),
    "checkpoint.before": Point(3, _before(_SqliteDatabase, "checkpoint")),
    "checkpoint.during": Point(
        3, lambda fuse: _wrap(_SqliteDatabase, "checkpoint", before=fuse.soon)
    ),
    "checkpoint.after": Point(3, _after(_SqliteDatabase, "checkpoint")),
    "stop.drained": Point(1, lambda fuse: _wrap_async(Hub, "_drain", fuse)),
    **dict(
        _operation(name, most)
        for name, most in {
            "Acquire": 6,
            "Advance": 60,
            "Subscribe": 4,
            "Unsubscribe": 2,
            "Detach": 5,
            "Retain": 8,
            "Prune": 3,
            "StoreWill": 3,
            "DropWill": 2,
            "Expire": 3,
        }.items()
    ),
}


def points_of(store: str, *, is_new: bool) -> list[str]:
    """Give the points that can be reached. is_new: the database is not there yet."""
    if is_new:
        return ["create.before", "create.after", "boot.before-sidecar", "boot.after-sidecar"]
    not_here = ("create.", {"lmdb": "checkpoint.", "sqlite": "grow."}[store])
    return [point for point in POINTS if not point.startswith(not_here)]


def arm(point: str, nth: int) -> None:
    """Have this process killed when it takes the step for the nth time. "" = never."""
    if point:
        POINTS[point].arm(_Fuse(nth))


def fill_the_disk_now_and_then(data: Path, port: int) -> None:
    """For some time no file gets longer than the longest one is, or not much longer: what the
    operating system answers then is what a full disk is to a store. From when the broker listens,
    since it does not start on a full disk."""
    threading.Thread(target=_fill, args=[data, port], daemon=True).start()


def _fill(data: Path, port: int) -> None:
    rng = random.Random()  # noqa: S311 - no secret
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.01)
    while True:
        sizes = [path.stat().st_size for path in data.glob("*") if path.is_file()]
        room = rng.choice((0, 1, 5_000, 100_000))
        resource.setrlimit(resource.RLIMIT_FSIZE, (max(sizes, default=0) + room, hard))
        time.sleep(rng.uniform(0.02, 0.3))
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        time.sleep(rng.uniform(0.02, 0.3))
