"""What the tests of sealing share: a scratch data directory of each kind, and keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from storage.files import KINDS
from storage.keyring import Key, Keyring
from tests.operations.stores import Files
from tests.storage.harness import scratch

if TYPE_CHECKING:
    from collections.abc import Iterator

OLD: Final = Key("2025", bytes(range(32)))
NEW: Final = Key("2026", bytes(range(32, 64)))
OTHER: Final = Key("2025", bytes(range(64, 96)))
"""Another key under the id of the old one."""

BOTH: Final = Keyring([NEW, OLD])


@pytest.fixture(params=KINDS)
def files(request: pytest.FixtureRequest) -> Iterator[Files]:
    """A data directory that is sealed with the old key."""
    with scratch() as path:
        yield Files(path, request.param, Keyring([OLD]))


@pytest.fixture(params=[False, True], ids=["rows", "topics"])
def topics(request: pytest.FixtureRequest) -> bool:
    """Whether topics are sealed, too."""
    return bool(request.param)
