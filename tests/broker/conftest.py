"""Fixtures of the broker's tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.broker.mqtt import running
from tests.storage.harness import OnDisk, scratch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tests.broker.mqtt import Broker
    from tests.storage.harness import Backend


@pytest.fixture
async def broker() -> AsyncIterator[Broker]:
    """A broker over the store in memory."""
    async with running() as broker:
        yield broker


@pytest.fixture(params=["lmdb", "sqlite"])
def disk(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """A database on disk."""
    with scratch() as path:
        yield OnDisk(request.param, path)


@pytest.fixture
async def durable_broker(disk: Backend) -> AsyncIterator[Broker]:
    """A broker over a database on disk."""
    async with running(disk) as broker:
        yield broker
