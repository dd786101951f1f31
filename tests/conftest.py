"""What every test shares: the ``--long`` option, and no task left behind."""

from __future__ import annotations

import asyncio
import inspect
import signal
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


# a busy machine is no fault of what is tested
settings.register_profile(
    "project", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("project")


# a shell that runs the tests in the background has them ignore SIGINT, and with them each broker
# they start, which is then not stopped by it
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--long",
        action="store_true",
        help="give the random tests minutes instead of seconds",
    )


@pytest.fixture(scope="session")
def long(request: pytest.FixtureRequest) -> bool:
    """Whether the random tests may take minutes."""
    return bool(request.config.getoption("--long"))


@pytest.fixture(autouse=True)
def _tidy(request: pytest.FixtureRequest) -> None:
    """Watch the tasks of coroutine tests; others have no loop to look at."""
    if inspect.iscoroutinefunction(getattr(request, "function", None)):
        request.getfixturevalue("_no_task_left_behind")


@pytest.fixture
async def _no_task_left_behind(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """Fail a test that ends while a task it made is still pending."""
    before = asyncio.all_tasks()
    yield
    left = asyncio.all_tasks() - before - {asyncio.current_task()}
    if left:
        await asyncio.sleep(0)  # a task whose last await has just ended may finish
    names = sorted(task.get_name() for task in left if not task.done())
    assert not names, f"{request.node.name} left tasks pending: {names}"
