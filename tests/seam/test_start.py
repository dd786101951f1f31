"""Start and stop: in this process, and as ``python -m amqtt.scripts.broker_script``."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from amqtt.broker import Broker
from amqtt.errors import BrokerError

from broker_ext.wire import Puback
from storage import open_store
from tests.broker.mqtt import Client
from tests.seam.amqtt_broker import Running, configuration, running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

START_S = 60
STORES = ["sqlite", "lmdb"]


async def spoil(data: Path, store: str) -> None:
    """Make a database, and write garbage over it."""
    made = open_store(store, data)  # type: ignore[arg-type]
    await made.open(now_ms=1)
    await made.close()
    file = data / {"sqlite": "history.sqlite", "lmdb": "history.mdb"}[store]
    size = file.stat().st_size
    file.write_bytes(b"no database " * (size // 12 + 1))


# -------------------------------------------------------------------------- in this process


@pytest.mark.parametrize("store", STORES)
async def test_a_store_that_is_held_keeps_the_broker_from_starting(
    tmp_path: Path, store: str
) -> None:
    options = {"store": store}
    async with running(tmp_path, options=options) as holder:
        second = Broker(configuration(tmp_path, options=options))
        with pytest.raises(BrokerError, match=rf"(?i){os.getpid()}"):
            await second.start()
        assert not second._servers
        assert second.transitions.state == "not_started"
        await (await holder.connect(b"device")).quiet()
    async with running(tmp_path, options=options):
        pass


@pytest.mark.parametrize("store", STORES)
async def test_a_store_that_is_garbage_keeps_the_broker_from_starting(
    tmp_path: Path, store: str
) -> None:
    await spoil(tmp_path, store)
    broker = Broker(configuration(tmp_path, options={"store": store}))
    with pytest.raises(BrokerError, match=str(tmp_path)):
        await broker.start()
    assert not broker._servers


async def test_a_directory_that_cannot_be_made_keeps_the_broker_from_starting(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").touch()
    broker = Broker(configuration(tmp_path / "file" / "data"))
    with pytest.raises(BrokerError, match="file"):
        await broker.start()


async def test_listeners_that_cannot_bind_let_go_of_the_store(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(tmp_path / "other") as other:
        taken = {"default": {"type": "tcp", "bind": f"127.0.0.1:{other.port()}"}}
        broker = Broker(configuration(tmp_path / "data", listeners=taken))
        with pytest.raises(BrokerError, match="address already in use"):
            await broker.start()
    assert "the broker does not start" in caplog.text
    async with running(tmp_path / "data"):
        pass


async def test_one_broker_object_starts_again_after_it_stopped(tmp_path: Path) -> None:
    broker = Broker(configuration(tmp_path))
    for number in range(3):
        await broker.start()
        instance = Running(broker)
        client = await instance.connect(b"device")
        assert client.connack.session_present == (number > 0)
        if number:
            assert await client.payloads(1) == [b"%d" % (number - 1)]
        else:
            await client.subscribe((b"a", 1))
        await client.disconnect()
        await instance.left(b"device")
        await instance.context.broadcast_message("a", b"%d" % number)
        await instance.context.retain_message("r", b"%d" % number)
        assert instance.context.retained_messages["r"].data == b"%d" % number
        await broker.shutdown()
        assert instance.plugin.hub is None
        assert not broker._sessions


async def test_a_stop_ends_connections_and_publishes_no_will(tmp_path: Path) -> None:
    from tests.broker.mqtt import will  # noqa: PLC0415 - here only

    async with running(tmp_path) as broker:
        watcher = await broker.subscriber(b"watcher", (b"w", 1))
        await watcher.disconnect()
        client = await broker.connect(b"device", will=will(b"w"))
        clients, broker.clients = broker.clients, []
    await client.closed()
    for each in clients:
        await each.close()
    options = {"will_recovery_delay": 0}
    async with running(tmp_path, options=options) as broker:  # as after a crash
        watcher = await broker.connect(b"watcher")
        assert await watcher.payloads(1) == [b"gone"]


# ---------------------------------------------------------------------------- as a script


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Script:
    """A process of amqtt's script."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.process = process
        self.port = port

    async def ended(self) -> tuple[int | None, str]:
        """Exit code and what it wrote."""
        _, err = await asyncio.wait_for(self.process.communicate(), START_S)
        return self.process.returncode, err.decode()

    async def connect(self, client_id: bytes, **options: Any) -> Client:
        async with asyncio.timeout(START_S):
            while True:
                try:
                    reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                except ConnectionRefusedError:
                    await asyncio.sleep(0.05)
                else:
                    break
        nobody: Any = type("Nobody", (), {"guards": {}})()
        client = Client(nobody, reader, writer)
        client.connack = await client.connect(client_id, **options)
        return client


@asynccontextmanager
async def script(folder: Path, **changes: Any) -> AsyncIterator[Script]:
    port = free_port()
    listeners = {"default": {"type": "tcp", "bind": f"127.0.0.1:{port}"}}
    given = configuration(folder / "data", **{"listeners": listeners, **changes})
    del given["plugins"]["tests.seam.amqtt_broker.Recorder"]
    file = folder / "broker.yaml"
    file.write_text(yaml.safe_dump(given))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "amqtt.scripts.broker_script", "-c", str(file)),
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield Script(process, port)
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("store", STORES)
async def test_a_signal_stops_the_script_with_everything_stored(
    tmp_path: Path, store: str, number: signal.Signals
) -> None:
    options = {"store": store}
    async with script(tmp_path, options=options) as broker:
        sleeper = await broker.connect(b"sleeper")
        await sleeper.subscribe((b"a", 1))
        await sleeper.disconnect()
        publisher = await broker.connect(b"publisher", clean=True)
        for i in range(100):
            publisher.publish(b"a", b"%d" % i)
        await publisher.flushed()
        await publisher.next(Puback)
        broker.process.send_signal(number)
        code, log = await broker.ended()
        assert code == 0, log
        assert "Traceback" not in log
        acknowledged = 1
        while (packet := await rest(publisher)) is not None:
            acknowledged += isinstance(packet, Puback)
        await publisher.close()
    async with running(tmp_path / "data", options=options) as again:
        sleeper = await again.connect(b"sleeper")
        assert sleeper.connack.session_present
        got = await sleeper.payloads(acknowledged)
        assert got == [b"%d" % i for i in range(acknowledged)]


async def rest(client: Client) -> Any:
    """The next packet of a connection that the broker has closed, None at its end."""
    try:
        return await client.any()
    except (AssertionError, ConnectionError):
        return None


@pytest.mark.parametrize("store", STORES)
async def test_a_script_whose_store_is_held_says_so_and_ends(tmp_path: Path, store: str) -> None:
    options = {"store": store}
    async with (
        running(tmp_path / "data", options=options),
        script(tmp_path, options=options) as second,
    ):
        code, log = await second.ended()
    assert code == 1
    line = next(line for line in log.splitlines() if "does not start" in line)
    assert str(os.getpid()) in line
    assert "Traceback" not in log


async def test_a_script_whose_store_is_garbage_says_so_and_ends(tmp_path: Path) -> None:
    await spoil(tmp_path / "data", "sqlite")
    async with script(tmp_path) as broker:
        code, log = await broker.ended()
    assert code == 1
    line = next(line for line in log.splitlines() if "does not start" in line)
    assert "history.sqlite" in line
    assert "Traceback" not in log


async def test_a_script_whose_port_is_taken_says_so_and_ends(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        bind = f"127.0.0.1:{taken.getsockname()[1]}"
        async with script(tmp_path, listeners={"default": {"type": "tcp", "bind": bind}}) as broker:
            code, log = await broker.ended()
    assert code == 1
    assert any("does not start" in line and "in use" in line for line in log.splitlines())
    assert "Traceback" not in log


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"store": "mysql"}, "store is 'mysql'; it must be one of lmdb, sqlite"),
        ({"retain_for": "1 d"}, "retain_for is '1 d'; it must be a number"),
        ({"stroe": "lmdb"}, "there is no option 'stroe'; did you mean 'store'?"),
    ],
)
async def test_a_script_with_a_bad_option_says_so_and_ends(
    tmp_path: Path, options: dict[str, Any], told: str
) -> None:
    async with script(tmp_path, options=options) as broker:
        code, log = await broker.ended()
    assert code == 1
    assert f"broker_ext.DurableSessionPlugin: {told}" in log
    assert "Traceback" not in log


async def test_signals_of_another_program_are_left_alone(tmp_path: Path) -> None:
    logging.getLogger().debug("only `amqtt -c` is ours to stop")
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    async with running(tmp_path):
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


async def test_the_collector_of_another_program_is_left_alone(tmp_path: Path) -> None:
    before = gc.get_threshold(), gc.get_freeze_count()
    async with running(tmp_path):
        assert (gc.get_threshold(), gc.get_freeze_count()) == before


async def test_the_collector_of_a_broker_process_still_finds_rings() -> None:
    code = """
import gc, weakref
from broker_ext.collector import calm

class Ring: pass

calm()
ring = Ring(); ring.itself = ring; gone = weakref.ref(ring); del ring
kept = [[] for _ in range(gc.get_threshold()[0] + 1)]
assert gone() is None and gc.get_freeze_count() > 1000
"""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code), env=dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    )
    assert await asyncio.wait_for(process.wait(), START_S) == 0


ENDS = """
import asyncio, sys
from amqtt.broker import Broker
from tests.seam.amqtt_broker import configuration

async def main():
    await Broker(configuration(sys.argv[1], options={"store": sys.argv[2]})).start()
    print("started", flush=True)
    raise SystemExit(7)

asyncio.run(main())
"""


@pytest.mark.parametrize("store", STORES)
async def test_a_program_that_ends_without_a_shutdown_ends(tmp_path: Path, store: str) -> None:
    """As amqtt's own samples do at Ctrl-C; nothing of ours may keep the process."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", ENDS, str(tmp_path), store),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)),
    )
    try:
        out, _ = await asyncio.wait_for(process.communicate(), START_S)
    finally:
        if process.returncode is None:
            process.kill()
    assert out == b"started\n"
    assert process.returncode == 7
    async with running(tmp_path, options={"store": store}):
        pass
