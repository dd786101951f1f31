"""Every test of the suite runs on every backend, and every store is checked when it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.storage.harness import BACKENDS, Database

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest.fixture(params=BACKENDS)
async def db(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Database]:
    """A new, open database of each backend."""
    database = Database(BACKENDS[request.param](tmp_path))
    await database.open()
    yield database
    await database.stop()
