"""`filters` and `max_delivery_attempts` in the configuration of a real broker."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING

import pytest

from broker_ext.cli.calling import call
from broker_ext.wire import Connack, Connect, Decoder, Publish, encode
from tests.cli.processes import Serving, run, serving
from tests.operations.devices import device, publish

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path


def broker(tmp_path: Path, store: str, options: str) -> AbstractContextManager[Serving]:
    config = tmp_path / "broker.yaml"
    config.write_text(f"plugins:\n  broker_ext.DurableSessionPlugin:\n{options}")
    data = ("--data", str(tmp_path / "data"), "--store", store, "--durability", "os")
    return serving("--config", str(config), "--bind", "127.0.0.1:0", *data)


FILTERS = """\
    filters:
      dash/#: {keep: latest}
      brief/+: {expire_after: 0.001}
"""


@pytest.mark.parametrize("store", ["lmdb", "sqlite"])
def test_a_dashboard_that_was_away_gets_last_values_over_a_kill(tmp_path: Path, store: str) -> None:
    with broker(tmp_path, store, FILTERS) as process:
        with device(process, "dashboard") as client:
            client.subscribe("dash/#")
            client.subscribe("log")
            client.subscribe("brief/+")
        publish(process, "dash/a", *[b"a%d" % n for n in range(300)])
        publish(process, "log", b"1", b"2")
        publish(process, "brief/x", b"too late")
        publish(process, "dash/b", *[b"b%d" % n for n in range(300)])
        process.signal(signal.SIGKILL)
    with broker(tmp_path, store, FILTERS) as process:
        with device(process, "dashboard") as client:
            assert client.session_present
            assert client.payloads(4) == [b"a299", b"1", b"2", b"b299"]
            assert client.is_quiet()
        counts = call(tmp_path / "data", "figures")["counts"]
        assert (counts["superseded"], counts["expired_messages"]) == (598, 1)


@pytest.mark.parametrize("store", ["lmdb", "sqlite"])
def test_a_message_that_kills_its_device_is_a_dead_letter(tmp_path: Path, store: str) -> None:
    with broker(tmp_path, store, "    max_delivery_attempts: 2\n") as process:
        with device(process, "device") as client:
            client.subscribe("t")
        publish(process, "t", b"poison", b"good")
        for _ in range(2):
            assert first_payload(process) == b"poison"
        with device(process, "device") as client:
            assert client.payloads(1) == [b"good"]
            assert client.is_quiet()
        data = ("--data", str(tmp_path / "data"))
        ended = run("outbox", "dead-letters", "--json", *data)
        assert ended.code == 0, ended.err
        assert "UNDELIVERABLE" in ended.out.upper()
        assert "poison" not in ended.out
        assert json.loads(ended.out)


def first_payload(process: Serving) -> bytes:
    """Connect as the device, and fail at the first message."""
    decoder = Decoder(server=False)
    with process.connect() as client:
        client.sendall(encode(Connect(4, b"device", False)))
        while True:
            for packet in decoder.feed(client.recv(65_536)):
                if isinstance(packet, Publish):
                    return packet.payload
                assert isinstance(packet, Connack)
