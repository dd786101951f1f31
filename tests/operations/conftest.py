"""A database with something of everything, and its files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.operations.stores import Files
from tests.storage.harness import scratch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from storage.files import Kind


@pytest.fixture(params=["lmdb", "sqlite"])
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


@pytest.fixture
def files(kind: Kind) -> Iterator[Files]:
    """A scratch directory for one kind of store."""
    with scratch() as path:
        yield Files(path, kind)
