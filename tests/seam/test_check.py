"""The seam's list of what it relies on, against the installed amqtt and against a changed one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from amqtt.broker import Broker, Server
from amqtt.errors import BrokerError, PluginInitError

from broker_ext.seam import Seam, known
from broker_ext.seam.known import (
    RELIES_ON,
    RELIES_ON_INSTANCE,
    RELIES_ON_MANAGER,
    RELIES_ON_SERVER,
    SeamError,
    check,
)
from tests.seam.amqtt_broker import configuration, running

if TYPE_CHECKING:
    from pathlib import Path


def name_of(owner: Any) -> str:
    return str(owner.__name__)


@pytest.mark.parametrize(
    ("owner", "name"), RELIES_ON, ids=[f"{name_of(o)}.{n}" for o, n in RELIES_ON]
)
async def test_an_amqtt_that_lacks_a_name_makes_no_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    monkeypatch.delattr(owner, name)
    data = tmp_path / "data"
    with pytest.raises(PluginInitError) as raised:
        Broker(configuration(data))
    assert isinstance(raised.value.__cause__, SeamError)
    assert f"{owner.__name__}.{name}" in str(raised.value.__cause__)
    assert not data.exists()


@pytest.mark.parametrize("name", RELIES_ON_INSTANCE)
def test_a_broker_that_lacks_a_name_is_refused_by_name(name: str) -> None:
    check(SimpleNamespace(**dict.fromkeys(RELIES_ON_INSTANCE)))
    lacking = SimpleNamespace(**dict.fromkeys(n for n in RELIES_ON_INSTANCE if n != name))
    with pytest.raises(SeamError, match=rf"Broker\(\)\.{name}\b.*matching pair"):
        check(lacking)


@pytest.mark.parametrize("name", RELIES_ON_SERVER)
def test_a_listener_that_lacks_a_name_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    broker = SimpleNamespace(**dict.fromkeys(RELIES_ON_INSTANCE))

    class Lacking(Server):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            delattr(self, name)

    monkeypatch.setattr(known, "Server", Lacking)
    with pytest.raises(SeamError, match=rf"Server\(\)\.{name}\b"):
        check(broker)


@pytest.mark.parametrize("name", [n for n in RELIES_ON_MANAGER if n != "plugins"])
async def test_a_plugin_manager_that_lacks_a_name_lets_nothing_start(
    tmp_path: Path, name: str
) -> None:
    broker = Broker(configuration(tmp_path))
    there = getattr(broker.plugins_manager, name)
    if name == "_event_plugin_callbacks":
        start = there["broker_pre_start"]
        delattr(broker.plugins_manager, name)
        with pytest.raises(AttributeError, match=name):  # amqtt fails before we are asked
            await broker.start()
        plugin: Any = start[-1].__self__
        await plugin.on_broker_pre_start()
        with pytest.raises(BrokerError, match=name):
            await broker._start_listeners()
        return
    delattr(broker.plugins_manager, name)
    with pytest.raises(BrokerError, match=rf"PluginManager\(\)\.{name}\b"):
        await broker.start()
    setattr(broker.plugins_manager, name, there)
    async with running(tmp_path):  # and the store is not held
        pass


def test_a_context_without_its_broker_is_refused_by_name() -> None:
    context: Any = SimpleNamespace()
    with pytest.raises(SeamError, match=r"BrokerContext\(\)\._broker_instance"):
        Seam(context)
