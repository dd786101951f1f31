"""Fixtures of the sinks' tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.storage.harness import BACKENDS, scratch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.storage.harness import Backend


@pytest.fixture(params=sorted(BACKENDS))
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """A database of each kind."""
    with scratch() as path:
        yield BACKENDS[request.param](path)
