"""A subscription change while the session reads the history behind its cursor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.broker.mqtt import Broker


@pytest.mark.parametrize("change", ["subscribe", "unsubscribe"])
async def test_delivery_goes_on_when_a_change_was_saved_during_a_read(
    broker: Broker, change: str
) -> None:
    """The read is thrown away, since it asked with the old filters; another one has to follow."""
    await broker.sleeper(b"device", b"a")
    await broker.sleeper(b"other", b"b")
    sensor = await broker.connect()
    await sensor.deliver(b"b", b"not for the device")
    await broker.restart()
    gate = broker.store.hang_read()
    device = await broker.connect(b"device")
    await gate.reached.wait()
    if change == "subscribe":
        await device.subscribe(b"c")
    else:
        await device.unsubscribe(b"x")
    gate.release()
    sensor = await broker.connect()
    await sensor.deliver(b"a", b"for the device")
    # the device sends nothing meanwhile: a packet of its own would have woken the session
    assert await device.payloads(1) == [b"for the device"]
