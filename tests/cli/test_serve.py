"""`serve` as a real process: what it says, how it stops, and how it refuses."""

from __future__ import annotations

import os
import signal
import socket
from typing import TYPE_CHECKING

import pytest

from tests.cli.processes import run, serving

if TYPE_CHECKING:
    from pathlib import Path

CONNECT = b"\x10\x0d\x00\x04MQTT\x04\x02\x00\x3c\x00\x01a"
CONNACK = b"\x20\x02\x00\x00"
IPV6 = socket.has_ipv6


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["--store", "mysql"], id="store"),
        pytest.param(["--durability", "hope"], id="durability"),
        pytest.param(["--log-level", "loud"], id="level"),
        pytest.param(["--no-such-option"], id="option"),
        pytest.param(["surplus"], id="argument"),
    ],
)
def test_wrong_arguments_are_exit_code_2(arguments: list[str]) -> None:
    assert run("serve", *arguments).code == 2


def test_without_a_command_there_is_help() -> None:
    ended = run()
    assert "serve" in ended.out + ended.err
    assert "demo" in ended.out + ended.err


@pytest.mark.parametrize("bind", [":1883", "0.0.0.0:1883", "[::]:1883", "192.0.2.1"])
def test_any_user_from_anywhere_is_refused_in_one_line(tmp_path: Path, bind: str) -> None:
    ended = run("serve", "--bind", bind, "--data", str(tmp_path / "data"))
    assert ended.code == 1
    assert ended.err.startswith("amqtt-durable: refusing to listen on ")
    assert ended.err.count("\n") == 1
    assert not (tmp_path / "data").exists()


def test_it_says_where_it_listens_and_what_it_keeps_where(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with serving(
        *("--data", str(data), "--bind", "127.0.0.1:0"),
        *("--store", "sqlite", "--durability", "os"),
    ) as broker:
        assert broker.line.startswith("listening on 127.0.0.1:")
        assert broker.line.endswith(f" (tcp); data {data}; store sqlite; durability os")
        with broker.connect() as client:
            client.sendall(CONNECT)
            assert client.recv(4) == CONNACK


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_with_code_0_also_when_a_client_is_connected(
    tmp_path: Path, number: int
) -> None:
    with serving("--data", str(tmp_path / "data"), "--bind", "127.0.0.1:0") as broker:
        with broker.connect() as client:
            client.sendall(CONNECT)
            assert client.recv(4) == CONNACK
            assert broker.signal(number) == 0
            assert client.recv(1) == b""
        assert broker.process.stderr is not None
        assert "Traceback" not in broker.process.stderr.read()


@pytest.mark.parametrize("store", ["lmdb", "sqlite"])
def test_a_data_directory_that_is_served_is_refused_and_serves_on(
    tmp_path: Path, store: str
) -> None:
    arguments = ("--data", str(tmp_path / "data"), "--bind", "127.0.0.1:0", "--store", store)
    with serving(*arguments) as broker:
        ended = run("serve", *arguments)
        assert ended.code == 1
        assert ended.err.startswith("amqtt-durable: the broker cannot start: ")
        assert str(broker.process.pid) in ended.err
        assert ended.err.count("\n") == 1
        assert broker.signal(signal.SIGTERM) == 0
    with serving(*arguments):
        pass  # and it is free again


def test_a_port_in_use_is_told_in_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        bind = f"127.0.0.1:{taken.getsockname()[1]}"
        ended = run("serve", "--bind", bind, "--data", str(tmp_path / "data"))
    assert ended.code == 1
    assert "Traceback" not in ended.err
    line = ended.err.splitlines()[-1]
    assert line.startswith("amqtt-durable: the broker cannot start: ")
    assert line.endswith("address already in use")


def test_a_setting_that_does_not_exist_is_told_in_one_line(tmp_path: Path) -> None:
    config = tmp_path / "broker.yaml"
    config.write_text("plugins: {broker_ext.DurableSessionPlugin: {no_such_setting: 1}}")
    ended = run("serve", "--bind", "127.0.0.1:0", "--config", str(config), "--data", str(tmp_path))
    assert ended.code == 1
    assert "no_such_setting" in ended.err
    assert ended.err.count("\n") == 1


def test_a_file_and_options_together(tmp_path: Path) -> None:
    config = tmp_path / "broker.yaml"
    config.write_text(
        "listeners:\n"
        "  default: {type: tcp, bind: '0.0.0.0:1883'}\n"
        "  web: {type: ws, bind: '127.0.0.1:0'}\n"
        "plugins:\n"
        "  - amqtt.plugins.authentication.AnonymousAuthPlugin: {allow_anonymous: false}\n"
        "  - broker_ext.DurableSessionPlugin: {store: sqlite}\n"
    )
    data = tmp_path / "data"
    with serving("--config", str(config), "--bind", "127.0.0.1:0", "--data", str(data)) as broker:
        assert "(tcp), 127.0.0.1:" in broker.line
        assert f"(ws); data {data}; store sqlite; " in broker.line
        with broker.connect() as client:
            client.sendall(CONNECT)
            assert client.recv(4) == b"\x20\x02\x00\x05"  # the file wants a user name


@pytest.mark.skipif(not IPV6, reason="no IPv6 here")
def test_ipv6_loopback(tmp_path: Path) -> None:
    with serving("--data", str(tmp_path / "data"), "--bind", "[::1]:0") as broker:
        assert broker.line.startswith("listening on [::1]:")
        broker.connect().close()


def test_a_second_signal_ends_a_shutdown_that_hangs_with_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hanging.py").write_text(
        "import asyncio\n"
        "from amqtt.plugins.base import BasePlugin\n"
        "class Hanging(BasePlugin):\n"
        "    async def on_broker_pre_shutdown(self):\n"
        "        print('hangs', flush=True)\n"
        "        await asyncio.Event().wait()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    config = tmp_path / "broker.yaml"
    config.write_text("plugins: {hanging.Hanging: {}}")
    arguments = ("--config", str(config), "--bind", "127.0.0.1:0", "--data", str(tmp_path / "d"))
    with serving(*arguments) as broker:
        broker.process.send_signal(signal.SIGTERM)
        assert broker.process.stdout is not None
        assert broker.process.stdout.readline() == "hangs\n"
        assert broker.signal(signal.SIGTERM) == 1


@pytest.mark.parametrize(("store", "file"), [("sqlite", "history.sqlite"), ("lmdb", "history.mdb")])
def test_a_database_that_is_none_is_told_with_what_to_do(
    tmp_path: Path, store: str, file: str
) -> None:
    (tmp_path / file).write_bytes(b"garbage " * 4096)
    at = ("--data", str(tmp_path), "--bind", "127.0.0.1:0")
    ended = run("serve", *at, "--store", store)
    assert ended.code == 1
    told = f"amqtt-durable: the broker cannot start: {tmp_path}: {file} cannot be used: "
    assert ended.err.startswith(told)
    assert "Restore it from a backup, or move the directory away" in ended.err
    other = "lmdb" if store == "sqlite" else "sqlite"
    ended = run("serve", *at, "--store", other)
    assert ended.code == 1
    assert f"`amqtt-durable migrate --from {store} --to {other}`" in ended.err


def test_what_is_stored_is_for_nobody_else(tmp_path: Path) -> None:
    with serving("--data", str(tmp_path / "a" / "data"), "--bind", "127.0.0.1:0"):
        assert (tmp_path / "a" / "data").stat().st_mode & 0o777 == 0o700
    (tmp_path / "open").mkdir(mode=0o755)
    with serving("--data", str(tmp_path / "open"), "--bind", "127.0.0.1:0"):
        assert (tmp_path / "open").stat().st_mode & 0o777 == 0o755
