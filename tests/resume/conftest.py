"""A site for each store."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.resume.site import Site
from tests.storage.engine.raw import KINDS
from tests.storage.harness import scratch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from typing import Any

    from tests.storage.engine.raw import Kind


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    chosen: Kind = request.param
    return chosen


@pytest.fixture
def site(kind: Kind) -> Callable[..., AbstractContextManager[Site]]:
    """What starts a broker process, with the plugin options it is given."""

    @contextmanager
    def started(**options: Any) -> Iterator[Site]:
        with scratch() as folder, Site(folder, kind, durability="os", **options) as running:
            yield running

    return started
