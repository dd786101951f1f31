"""A data directory of each durable kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.storage.engine.raw import KINDS, Files

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(params=KINDS)
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Files:
    return Files(request.param, tmp_path / "data")
