"""A process of its own that writes, for tests that let its disk fill up or kill it.

    writer.py KIND DIRECTORY kill      append for ever, tell each head that was committed
    writer.py KIND DIRECTORY full      append until the disk is full, then with room again
    writer.py KIND DIRECTORY prune     on a small disk: append until it is full, prune, append
    writer.py KIND DIRECTORY outbox    enqueue, claim and settle for ever, through the handles of
                                       roles, while it appends; tell what became of which message

What it prints is what it was told; whoever started it compares that with what is on the disk.
"""

from __future__ import annotations

import asyncio
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from storage import open_store
from storage.api import (
    Acquire,
    Acquired,
    Advance,
    Batch,
    Claim,
    Delivery,
    Entry,
    Prune,
    Pruned,
    Subscribe,
)
from storage.api import Subscription as Sub
from storage.clock import SystemClock
from storage.errors import StoreFull, StoreUnavailable
from storage.outbox import Failure
from storage.roles import Handles

if TYPE_CHECKING:
    from storage.api import Op, Outcome, Store

INCARNATION = b"I" * 16
PER_BATCH = 20


class Writer:
    """One consumer that follows the log: each batch appends, claims, and settles the last."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.head = 0
        self.claim = 0
        self.consumer = 0

    async def submit(self, batch: Batch) -> list[Outcome]:
        future: asyncio.Future[list[Outcome] | BaseException] = asyncio.Future()
        self.store.submit(batch, future.set_result)
        result = await future
        if isinstance(result, BaseException):
            raise result
        return result

    async def start(self) -> None:
        await self.store.open(now_ms=1)
        (acquired,) = await self.submit(Batch(ops=[Acquire(b"dev", INCARNATION, b"", 1)]))
        assert isinstance(acquired, Acquired)
        assert acquired.snapshot is not None
        self.consumer = acquired.snapshot.consumer.id
        subscribe = Subscribe(self.consumer, INCARNATION, (Sub(b"t/#", 1, 0),))
        await self.submit(Batch(ops=[subscribe]))

    async def step(self, payload_bytes: int = 100) -> None:
        """One batch; nothing of ours moves if it fails."""
        head = self.head + PER_BATCH
        entries = [
            Entry(
                offset, b"t/%d" % (offset % 7), offset.to_bytes(8, "big") * (payload_bytes // 8), 1
            )
            for offset in range(self.head + 1, head + 1)
        ]
        claim = Claim(
            self.claim + 1,
            tuple(Delivery(e.offset, n, 1) for n, e in enumerate(entries, 1)),
        )
        settled = [self.claim] if self.claim else []
        ops: list[Op] = [
            Advance(self.consumer, INCARNATION, cursor=head, claims=[claim], settled=settled)
        ]
        assert await self.submit(Batch(entries, ops, 1)) == [None]
        self.head, self.claim = head, claim.number


async def kill(writer: Writer) -> None:
    while True:
        await writer.step()
        print(writer.head, flush=True)  # noqa: T201 - it is what this process is for


async def full(writer: Writer) -> None:
    limit = 4 << 20
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    refused = 0
    while refused < 3:
        before = await writer.store.log()
        try:
            await writer.step(payload_bytes=8_000)
        except StoreUnavailable as error:
            refused += 1
            assert await writer.store.log() == before
            print(type(error).__name__, flush=True)  # noqa: T201
    assert (await writer.store.log()).head == writer.head
    (last,) = await writer.store.fetch([writer.head])
    assert last.payload.startswith(writer.head.to_bytes(8, "big"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    for _ in range(50):
        await writer.step(payload_bytes=8_000)
    print(writer.head, flush=True)  # noqa: T201
    wrong = await writer.store.check()
    assert wrong == [], wrong
    await writer.store.close()


async def prune(writer: Writer) -> None:
    for _ in range(2):
        try:
            while True:
                await writer.step(payload_bytes=8_000)
        except StoreFull:
            pass
        through = writer.head // 2
        outcome = Pruned(0, 0, 0, more=True)
        while outcome.more:
            (pruned,) = await writer.submit(Batch([], [Prune(through, 0, 16)], 1))
            assert isinstance(pruned, Pruned)
            outcome = pruned
        print(outcome.floor - through, flush=True)  # noqa: T201
        for _ in range(10):
            await writer.step(payload_bytes=8_000)
    print(writer.head, flush=True)  # noqa: T201
    await writer.store.close()


async def outbox(writer: Writer) -> None:
    handles = Handles(writer.store, SystemClock())

    async def produce() -> None:
        producer = handles.producer(b"hook")
        while True:
            enqueued = await producer.enqueue(Entry(0, b"t", b"x" * 100, 1))
            tell("enqueued", enqueued.id)

    async def work() -> None:
        worker = handles.worker(b"hook")
        while True:
            for message in (await worker.claim(limit=4)).messages:
                if message.id % 5:
                    assert await worker.done(message)
                    tell("done", message.id)
                else:
                    assert await worker.failed(message, Failure.REJECTED)
                    tell("dead", message.id)

    async def append() -> None:
        while True:
            await writer.step()

    await asyncio.gather(*(produce() for _ in range(3)), work(), work(), append())


def tell(what: str, number: int) -> None:
    print(what, number, flush=True)  # noqa: T201 - it is what this process is for


async def main() -> None:
    kind, directory, what = sys.argv[1:]
    assert kind in ("lmdb", "sqlite")
    writer = Writer(open_store(kind, Path(directory)))  # type: ignore[arg-type]
    await writer.start()
    await {"kill": kill, "full": full, "prune": prune, "outbox": outbox}[what](writer)


if __name__ == "__main__":
    asyncio.run(main())
