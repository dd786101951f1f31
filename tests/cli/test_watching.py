"""`sessions` and `kick` against a real broker process."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING

import pytest

from broker_ext.cli.calling import call
from broker_ext.cli.errors import NoAnswer
from broker_ext.cli.watching import masked
from tests.cli.processes import run, serving

if TYPE_CHECKING:
    import socket
    from pathlib import Path

CONNECT = b"\x10\x19\x00\x04MQTT\x04\x00\x00\x3c\x00\x0dthermometer-1"
CONNACK = b"\x20\x02\x00\x00"


def connected(client: socket.socket) -> None:
    client.sendall(CONNECT)
    assert client.recv(4) == CONNACK


@pytest.mark.parametrize("store", ["lmdb", "sqlite"])
def test_sessions_are_listed_masked_and_kicked(tmp_path: Path, store: str) -> None:
    data = ("--data", str(tmp_path / "data"))
    with serving(*data, "--bind", "127.0.0.1:0", "--store", store) as broker:
        heads = " ".join(run("sessions", *data).out.split())
        assert heads == "client id user kind connected lag since"
        with broker.connect() as client:
            connected(client)
            ended = run("sessions", *data)
            assert ended.code == 0
            assert "thermometer" not in ended.out
            assert masked("thermometer-1") in ended.out
            told = json.loads(run("sessions", *data, "--unmask", "--json").out)
            assert told["more"] is False
            assert [row["client_id"] for row in told["sessions"]] == ["thermometer-1"]
            assert told["sessions"][0]["connected"] is True
            ended = run("kick", "thermometer-1", *data)
            assert (ended.code, ended.out) == (0, "disconnected\n")
            assert client.recv(1) == b""
        ended = run("kick", "thermometer-1", *data)
        assert (ended.code, ended.out) == (1, "it is not connected\n")


def test_figures_are_told(tmp_path: Path) -> None:
    data = ("--data", str(tmp_path / "data"))
    with serving(*data, "--bind", "127.0.0.1:0") as broker, broker.connect() as client:
        connected(client)
        lines = dict(line.split(maxsplit=1) for line in run("figures", *data).out.splitlines())
        assert (lines["counts.connects"], lines["sessions_connected.durable"]) == ("1", "1")
        assert lines["writing"] == "True"
        assert json.loads(run("figures", *data, "--json").out)["connections"] == 1


def test_groups_are_listed(tmp_path: Path) -> None:
    data = ("--data", str(tmp_path / "data"))
    with serving(*data, "--bind", "127.0.0.1:0") as broker, broker.connect() as client:
        connected(client)
        client.sendall(b"\x82\x0f\x00\x01\x00\x0a$share/g/t\x01")
        assert client.recv(5) == b"\x90\x03\x00\x01\x01"
        heads, row = run("groups", *data).out.splitlines()
        assert " ".join(heads.split()) == "group kind connected stored lag waiting under way"
        assert row.split() == ["$share/g/t", "durable", "1", "1", "0", "0", "0"]
        told = json.loads(run("groups", *data, "--json").out)
        assert ([g["name"] for g in told["groups"]], told["more"]) == (["$share/g/t"], False)


def test_no_broker_a_dead_one_and_one_that_hangs_are_told_apart(tmp_path: Path) -> None:
    data = ("--data", str(tmp_path / "data"))
    ended = run("sessions", *data)
    assert ended.code == 1
    assert ended.err == f"amqtt-durable: no broker is running on {tmp_path / 'data'}\n"
    with serving(*data, "--bind", "127.0.0.1:0") as broker:
        broker.process.send_signal(signal.SIGSTOP)
        with pytest.raises(NoAnswer):
            call(tmp_path / "data", "figures", timeout_s=0.5)
        broker.process.send_signal(signal.SIGCONT)
        assert call(tmp_path / "data", "figures")["connections"] == 0
        broker.signal(signal.SIGKILL)
        assert (tmp_path / "data" / "control.sock").exists()
        ended = run("kick", "nobody", *data)
        assert ended.code == 1
        assert "no broker is running on" in ended.err
    with serving(*data, "--bind", "127.0.0.1:0") as broker:
        assert call(tmp_path / "data", "figures")["connections"] == 0
        assert broker.signal(signal.SIGTERM) == 0
    assert not (tmp_path / "data" / "control.sock").exists()


def test_masked_names_differ_and_do_not_tell() -> None:
    assert masked("") == ""
    assert masked("a") != masked("b")
    assert not masked("ab").startswith("a")
    assert masked("sensor-17").startswith("se***")
