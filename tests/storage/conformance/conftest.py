"""Every test of the suite runs on every backend, and every store is checked when it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.storage.harness import BACKENDS, SEALED, Database, scratch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


EVERY_BACKEND = BACKENDS | SEALED


@pytest.fixture(params=EVERY_BACKEND)
async def db(request: pytest.FixtureRequest) -> AsyncIterator[Database]:
    """A new, open database of each backend."""
    with scratch() as path:
        database = Database(EVERY_BACKEND[request.param](path))
        await database.open()
        yield database
        await database.stop()
