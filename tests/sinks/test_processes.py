"""Sinks of real broker processes that are killed, and of brokers that are killed behind them."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Any

import paho.mqtt.client as mqtt
import pytest
import yaml
from paho.mqtt.enums import CallbackAPIVersion

from broker_ext.cli.calling import call
from tests.cli.processes import serving
from tests.cli.test_outbox import publish, receiving, until

if TYPE_CHECKING:
    from pathlib import Path

STORES = pytest.mark.parametrize("store", ["lmdb", "sqlite"])


def configured(folder: Path, name: str, sinks: dict[str, Any], store: str) -> tuple[str, ...]:
    """Arguments of `serve` for a broker with these sinks."""
    config = folder / f"{name}.yaml"
    config.write_text(
        yaml.safe_dump({"plugins": {"broker_ext.DurableSessionPlugin": {"sinks": sinks}}})
    )
    return (
        *("--config", str(config), "--data", str(folder / name), "--store", store),
        *("--bind", "127.0.0.1:0"),
    )


def done(folder: Path, name: str = "data") -> int:
    (queue,) = call(folder / name, "outbox_backlog") or [{"done": 0}]
    number: int = queue["done"]
    return number


@STORES
def test_a_broker_that_is_killed_delivers_everything_acknowledged(
    tmp_path: Path, store: str
) -> None:
    with receiving() as server:
        url = f"http://127.0.0.1:{server.server_address[1]}/"
        sink = {"type": "webhook", "filters": ["alerts/#"], "url": url, "body": "raw"}
        arguments = configured(tmp_path, "data", {"alerts": sink}, store)
        sent: set[bytes] = set()
        for life in range(3):
            with serving(*arguments) as broker:
                payloads = [b"%d-%d" % (life, n) for n in range(100)]
                publish(broker, *payloads)
                sent |= set(payloads)
                broker.signal(signal.SIGKILL)
        with serving(*arguments):
            until(lambda: sent <= set(server.bodies))
            until(lambda: done(tmp_path) == 300)
        assert set(server.bodies) == sent
        # at most what was claimed at each death comes again: 4 workers and as many that wait
        assert len(server.bodies) <= 300 + 3 * 8


@STORES
def test_a_bridge_outlives_the_broker_behind_it_and_its_own(tmp_path: Path, store: str) -> None:
    got: list[bytes] = []
    subscribed = threading.Event()
    upstream_arguments = configured(tmp_path, "upstream", {}, store)
    with serving(*upstream_arguments) as upstream:
        host, port = upstream.address
        reader = mqtt.Client(CallbackAPIVersion.VERSION2, client_id="reader", clean_session=False)
        reader.on_message = lambda _, __, message: got.append(message.payload)
        reader.on_subscribe = lambda *_: subscribed.set()
        reader.connect(host, port)
        reader.loop_start()
        reader.subscribe("site/#", qos=2)
        assert subscribed.wait(20)
        sink = {
            "type": "bridge",
            "filters": ["alerts/#"],
            "host": host,
            "port": port,
            "qos": 2,
            "topic_prefix": "site/",
        }
        arguments = configured(tmp_path, "data", {"up": sink}, store)
        with serving(*arguments) as broker:
            publish(broker, *(b"%d" % n for n in range(50)))
            until(lambda: len(got) == 50)
            upstream.signal(signal.SIGKILL)
            publish(broker, *(b"%d" % n for n in range(50, 100)))
            broker.signal(signal.SIGKILL)
    with serving(*upstream_arguments[:-1], f"{host}:{port}"), serving(*arguments) as broker:
        until(lambda: done(tmp_path) == 100)
        publish(broker, *(b"%d" % n for n in range(100, 120)))
        until(lambda: len(set(got)) == 120)
    reader.disconnect()
    reader.loop_stop()
    assert list(dict.fromkeys(got)) == [b"%d" % n for n in range(120)], "in order, nothing missing"
