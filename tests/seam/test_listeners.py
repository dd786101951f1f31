"""Every kind of listener that amqtt has, and what it counts and times."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import websockets
from amqtt.adapters import (
    ReaderAdapter,
    StreamReaderAdapter,
    StreamWriterAdapter,
    WriterAdapter,
)
from amqtt.client import MQTTClient

from broker_ext import transports
from broker_ext.transports import READ_BYTES
from broker_ext.wire import (
    Connack,
    Connect,
    Decoder,
    Pingreq,
    Pingresp,
    Puback,
    Publish,
    Suback,
    Subscribe,
    SubscribeFilter,
    encode,
)
from storage.clock import ManualClock
from tests.broker.mqtt import Client
from tests.seam.amqtt_broker import running

if TYPE_CHECKING:
    import ssl
    from pathlib import Path

    from broker_ext.wire import Packet
    from tests.seam.conftest import Certificate

TCP = {"type": "tcp", "bind": "127.0.0.1:0"}


async def there_and_back(client: Client) -> None:
    """A durable session over one connection: subscribe, publish, deliver."""
    assert (await client.connect(b"device")).reason == 0
    assert await client.subscribe((b"a/#", 1)) == b"\x01"
    number = client.publish(b"a/b", b"x")
    answers = [await client.any(), await client.any()]
    assert Puback(number) in answers
    delivered = next(p for p in answers if isinstance(p, Publish))
    assert delivered.payload == b"x"
    client.send(Puback(delivered.packet_id))
    await client.quiet()


async def test_tcp(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        await there_and_back(await broker.dial())


async def test_a_connection_that_is_over_leaves_nothing_for_the_collector(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        gc.disable()
        try:
            client = await broker.dial()
            await there_and_back(client)
            (connection,) = broker.hub.connections
            kept: Any = connection.keeps
            left = [weakref.ref(connection.transport), weakref.ref(kept)]
            del connection, kept
            await client.disconnect()
            await broker.left(b"device")
            async with asyncio.timeout(5):
                while any(ref() for ref in left):  # noqa: ASYNC110 - no event for it
                    await asyncio.sleep(0.001)
        finally:
            gc.enable()


async def test_tls(tmp_path: Path, certificate: Certificate) -> None:
    files = {"certfile": certificate.certfile, "keyfile": certificate.keyfile}
    async with running(tmp_path, listeners={"default": {**TCP, "ssl": True, **files}}) as broker:
        await there_and_back(await broker.dial(tls=certificate.client))
        view = broker.context.get_session("device")
        assert view is not None
        assert view.ssl_object is not None


async def test_amqtts_own_client(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        client = MQTTClient(client_id="own", config={"auto_reconnect": False})
        await client.connect(f"mqtt://127.0.0.1:{broker.port()}/", cleansession=False)
        assert await client.subscribe([("a/#", 2)]) == [2]
        await client.publish("a/b", b"x", 2)
        message = await client.deliver_message(timeout_duration=10)
        assert message is not None
        assert message.data == b"x"
        await client.disconnect()


class WebSocketClient:
    """MQTT over WebSocket messages that are cut where a test wants it."""

    def __init__(self, websocket: Any) -> None:
        self._websocket = websocket
        self._decoder = Decoder(server=False)
        self._packets: list[Packet] = []

    async def send(self, data: bytes, *, cut: int) -> None:
        for start in range(0, len(data), cut):
            await self._websocket.send(data[start : start + cut])

    async def next(self) -> Any:
        while not self._packets:
            self._packets += self._decoder.feed(await self._websocket.recv())
        return self._packets.pop(0)


async def test_websocket_messages_may_cut_packets_anywhere(tmp_path: Path) -> None:
    listeners = {"default": TCP, "web": {"type": "ws", "bind": "127.0.0.1:0"}}
    sent = b"".join(
        (
            encode(Connect(4, b"device", clean_start=False)),
            encode(Subscribe(1, (SubscribeFilter(b"a/#", 1),))),
            encode(Publish(0x2, b"a/b", 2, b"x" * 300)),
        )
    )
    async with running(tmp_path, listeners=listeners) as broker:
        for cut in (1, 7, len(sent)):
            url = f"ws://127.0.0.1:{broker.port('web')}/mqtt"
            async with websockets.connect(url, subprotocols=[websockets.Subprotocol("mqtt")]) as ws:
                client = WebSocketClient(ws)
                await client.send(sent, cut=cut)
                assert await client.next() == Connack(cut > 1)
                assert await client.next() == Suback(1, b"\x01")
                answers = [await client.next(), await client.next()]
                delivered = next(p for p in answers if isinstance(p, Publish))
                assert Puback(2) in answers
                assert delivered.payload == b"x" * 300
                await client.send(encode(Puback(delivered.packet_id)), cut=1)


async def test_a_websocket_client_that_vanishes_leaves_its_session(tmp_path: Path) -> None:
    listeners = {"default": TCP, "web": {"type": "ws", "bind": "127.0.0.1:0"}}
    async with running(tmp_path, listeners=listeners) as broker:
        websocket = await websockets.connect(
            f"ws://127.0.0.1:{broker.port('web')}", subprotocols=[websockets.Subprotocol("mqtt")]
        )
        client = WebSocketClient(websocket)
        await client.send(encode(Connect(4, b"device", clean_start=False)), cut=100)
        assert await client.next() == Connack(False)
        await client.send(encode(Pingreq(), 4), cut=100)
        assert await client.next() == Pingresp()
        websocket.transport.abort()
        await broker.left(b"device")
        again = await broker.connect(b"device")
        assert again.connack.session_present
        await websocket.close()


async def test_external_listener(tmp_path: Path) -> None:
    """Connections that somebody else accepts: here a Unix socket."""
    listeners = {"default": TCP, "unix": {"type": "external", "bind": "unix"}}
    async with running(tmp_path / "data", listeners=listeners) as broker:
        serving: list[asyncio.Task[None]] = []

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connected = partial(broker.broker.external_connected, listener_name="unix")
            writer_adapter = _UnixWriter(writer)
            serving.append(
                asyncio.ensure_future(connected(StreamReaderAdapter(reader), writer_adapter))
            )
            await serving[-1]

        path = str(tmp_path / "socket")
        server = await asyncio.start_unix_server(accept, path)
        reader, writer = await asyncio.open_unix_connection(path)
        client = _UnixClient(broker, reader, writer)
        await there_and_back(client)
        writer.close()
        await asyncio.wait_for(asyncio.gather(*serving), 10)
        assert b"device" not in broker.hub.registry.owners
        server.close()


class Scripted(ReaderAdapter, WriterAdapter):
    """The other side of an external listener: it says what it is told to, and may hang."""

    def __init__(self, *says: bytes, hangs: bool = False) -> None:
        self._says = bytearray(b"".join(says))
        self._hangs = hangs
        self.asked_max = 0
        self.written = bytearray()
        self.closed = asyncio.Event()

    async def read(self, n: int = -1) -> bytes:
        self.asked_max = max(self.asked_max, n)
        if not self._says:
            await self.closed.wait()
            raise BrokenPipeError
        said = self._says[:n]
        del self._says[:n]
        return said  # type: ignore[return-value] # a bytearray, as amqtt's own sample gives

    def feed_eof(self) -> None:
        pass

    def write(self, data: bytes) -> None:
        self.written += data

    async def drain(self) -> None:
        if self._hangs:
            await asyncio.Event().wait()

    def get_peer_info(self) -> tuple[str, int] | None:
        return "somewhere", 0

    def get_ssl_info(self) -> ssl.SSLObject | None:
        return None

    async def close(self) -> None:
        if self._hangs:
            await asyncio.Event().wait()
        self.closed.set()


EXTERNAL = {"default": TCP, "other": {"type": "external", "bind": "other"}}


async def test_an_external_client_is_not_asked_for_more_than_it_may_send(tmp_path: Path) -> None:
    async with running(tmp_path, listeners=EXTERNAL) as broker:
        connect = encode(Connect(4, b"device"))
        large = Scripted(connect, encode(Publish(0, b"a", 0, b"x" * 300_000)), b"\xe0\x00")
        await broker.broker.external_connected(large, large, "other")
        assert large.asked_max == READ_BYTES
        assert broker.hub.figures.published == 1
        huge = Scripted(connect, b"\x30\xff\xff\xff\x7f", b"x" * 1000)
        await broker.broker.external_connected(huge, huge, "other")
        assert huge.closed.is_set()
        endless = Scripted(b"\x10\xff\xff\xff\xff\xff")
        await broker.broker.external_connected(endless, endless, "other")
        assert endless.closed.is_set()


async def test_an_external_client_that_hangs_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transports, "LINGER_S", 0.01)
    async with running(tmp_path, listeners=EXTERNAL) as broker:
        clock = broker.hub.clock = ManualClock()
        hanging = Scripted(encode(Connect(4, b"device", keep_alive_s=10)), hangs=True)
        serving = asyncio.ensure_future(broker.broker.external_connected(hanging, hanging, "other"))
        await broker.recorder.wait_for("broker_client_connected")
        broker.hub._look_for_silence()
        clock.advance(ms=20_000)
        broker.hub._look_for_silence()
        await asyncio.wait_for(serving, 10)
        assert not broker.hub.connections


async def test_a_websocket_that_does_not_read_is_cut(tmp_path: Path) -> None:
    listeners = {"default": TCP, "web": {"type": "ws", "bind": "127.0.0.1:0", "max_connections": 1}}
    async with running(tmp_path, listeners=listeners) as broker:
        clock = broker.hub.clock = ManualClock()
        url = f"ws://127.0.0.1:{broker.port('web')}"
        subprotocols = [websockets.Subprotocol("mqtt")]
        websocket = await websockets.connect(url, subprotocols=subprotocols, compression=None)
        client = WebSocketClient(websocket)
        await client.send(encode(Connect(4, b"device", keep_alive_s=10)), cut=100)
        assert await client.next() == Connack(False)
        await client.send(encode(Subscribe(1, (SubscribeFilter(b"a", 0),))), cut=100)
        assert await client.next() == Suback(1, b"\x00")
        websocket.transport.pause_reading()
        (connection,) = broker.hub.connections
        while not connection.congested:
            await broker.context.broadcast_message("a", b"x" * 500_000, 0)
            await asyncio.sleep(0)
        broker.hub._look_for_silence()
        clock.advance(ms=20_000)
        broker.hub._look_for_silence()
        async with asyncio.timeout(10):
            while broker.broker._servers["web"].conn_count:  # noqa: ASYNC110 - no event for it
                await asyncio.sleep(0.01)
        websocket.transport.abort()
        await websocket.wait_closed()


async def test_a_websocket_that_sends_text_is_closed(tmp_path: Path) -> None:
    """[MQTT-6.0.0-1]; amqtt takes it."""
    listeners = {"default": TCP, "web": {"type": "ws", "bind": "127.0.0.1:0"}}
    async with running(tmp_path, listeners=listeners) as broker:
        url = f"ws://127.0.0.1:{broker.port('web')}"
        websocket = await websockets.connect(url, subprotocols=[websockets.Subprotocol("mqtt")])
        await websocket.send(encode(Connect(4, b"device")).decode())
        await asyncio.wait_for(websocket.wait_closed(), 10)
        assert not broker.hub.registry.owners


class _UnixWriter(StreamWriterAdapter):
    def get_peer_info(self) -> tuple[str, int] | None:
        return "unix", 0


class _UnixClient(Client):
    def __init__(
        self, broker: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.get_extra_info = lambda *_: ("unix", 0)  # type: ignore[method-assign]
        super().__init__(broker, reader, writer)


async def test_a_connection_beyond_max_connections_waits_for_its_turn(tmp_path: Path) -> None:
    listeners = {"default": {**TCP, "max_connections": 2}}
    async with running(tmp_path, listeners=listeners) as broker:
        clock = broker.hub.clock = ManualClock()
        first = await broker.connect(b"one")
        second = await broker.connect(b"two")
        third, fourth = await broker.dial(), await broker.dial()
        answers = [asyncio.ensure_future(c.connect(i)) for c, i in ((third, b"3"), (fourth, b"4"))]
        await second.quiet()
        clock.advance(ms=3_600_000)  # far beyond connect_timeout: it was not heard, nor listened to
        broker.hub._look_for_silence()
        await second.quiet()
        assert not any(a.done() for a in answers)
        await first.disconnect()
        assert (await asyncio.wait_for(answers[0], 10)).reason == 0
        await second.quiet()
        assert not answers[1].done()
        third._writer.transport.abort()
        assert (await asyncio.wait_for(answers[1], 10)).reason == 0
        assert broker.broker._servers["default"].conn_count == 2


async def test_one_that_waits_and_leaves_takes_no_place(tmp_path: Path) -> None:
    listeners = {"default": {**TCP, "max_connections": 1}}
    async with running(tmp_path, listeners=listeners) as broker:
        first = await broker.connect(b"one")
        waiting = await broker.dial()
        await waiting.close()
        last = await broker.dial()
        answer = asyncio.ensure_future(last.connect(b"two"))
        await first.quiet()
        assert not answer.done()
        await first.disconnect()
        assert (await asyncio.wait_for(answer, 10)).reason == 0
        await last.disconnect()
        await broker.connect(b"three")
        assert broker.broker._servers["default"].conn_count == 1


async def test_websockets_wait_for_their_turn_too(tmp_path: Path) -> None:
    listeners = {"default": TCP, "web": {"type": "ws", "bind": "127.0.0.1:0", "max_connections": 1}}
    async with running(tmp_path, listeners=listeners) as broker:
        url = f"ws://127.0.0.1:{broker.port('web')}"
        subprotocols = [websockets.Subprotocol("mqtt")]
        first = await websockets.connect(url, subprotocols=subprotocols)
        client = WebSocketClient(first)
        await client.send(encode(Connect(4, b"one")), cut=100)
        assert await client.next() == Connack(False)
        second = await websockets.connect(url, subprotocols=subprotocols)
        waiting = WebSocketClient(second)
        await waiting.send(encode(Connect(4, b"two")), cut=100)
        answer = asyncio.ensure_future(waiting.next())
        await (await broker.connect(b"other")).quiet()
        assert not answer.done()
        await first.close()
        assert await asyncio.wait_for(answer, 10) == Connack(False)
        await second.close()


async def test_a_stop_does_not_wait_for_those_that_wait(tmp_path: Path) -> None:
    listeners = {
        "default": {**TCP, "max_connections": 1},
        "web": {"type": "ws", "bind": "127.0.0.1:0", "max_connections": 1},
    }
    subprotocols = [websockets.Subprotocol("mqtt")]
    async with asyncio.timeout(20):
        async with running(tmp_path, listeners=listeners) as broker:
            await broker.connect(b"one")
            for _ in range(2):
                waiting = await broker.dial()
                waiting.send(waiting.connect_packet(b"two"))
            url = f"ws://127.0.0.1:{broker.port('web')}"
            sockets = [await websockets.connect(url, subprotocols=subprotocols) for _ in range(3)]
            clients, broker.clients = broker.clients, []
        for client in clients:
            await client.closed()
            await client.close()
        for websocket in sockets:
            await websocket.wait_closed()


async def test_a_burst_of_connections_does_not_pass_the_limit(tmp_path: Path) -> None:
    listeners = {"default": {**TCP, "max_connections": 3}}
    async with running(tmp_path, listeners=listeners) as broker:
        clients = await asyncio.gather(*(broker.dial() for _ in range(10)))
        for number, client in enumerate(clients):
            client.send(client.connect_packet(b"%d" % number))
        served = 0
        for client in clients:
            answer = await asyncio.wait_for(client.next(Connack), 10)
            assert answer.reason == 0
            assert len(broker.hub.registry.owners) <= 3
            await client.disconnect()
            served += 1
        assert served == 10


async def test_keep_alive_is_one_and_a_half_times_what_the_client_said(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        clock = broker.hub.clock = ManualClock()
        talker = await broker.connect(b"talker", keep_alive=10)
        mute = await broker.connect(b"mute", keep_alive=10)
        patient = await broker.connect(b"patient", keep_alive=0)
        broker.hub._look_for_silence()
        for _ in range(2):
            clock.advance(ms=7_400)
            await talker.quiet()
            broker.hub._look_for_silence()
        assert {b"talker", b"mute", b"patient"} == set(broker.hub.registry.owners)
        clock.advance(ms=300)
        broker.hub._look_for_silence()
        await mute.closed()
        await talker.quiet()
        await patient.quiet()
        assert {b"talker", b"patient"} == set(broker.hub.registry.owners)


async def test_timeout_disconnect_delay_is_added_to_the_keep_alive(tmp_path: Path) -> None:
    async with running(tmp_path, timeout_disconnect_delay=10) as broker:
        clock = broker.hub.clock = ManualClock()
        mute = await broker.connect(b"mute", keep_alive=10)
        broker.hub._look_for_silence()
        clock.advance(ms=29_900)
        broker.hub._look_for_silence()
        await mute.quiet()
        broker.hub._look_for_silence()
        clock.advance(ms=30_000)
        broker.hub._look_for_silence()
        await mute.closed()


@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_what_is_published_to_a_dollar_topic_is_answered_and_dropped(
    tmp_path: Path, qos: int
) -> None:
    async with running(tmp_path) as broker:
        client = await broker.subscriber(b"device", (b"$mine", 1), (b"#", 1))
        await client.deliver(b"$mine", b"x", qos=qos)
        await client.quiet()


async def test_a_client_without_a_listener_is_turned_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As long as amqtt has not noted its listener; then it is served."""
    async with running(tmp_path) as broker:
        port = broker.port()
        server = broker.broker._servers.pop("default")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(ConnectionError):  # reset: turned away too
            assert await reader.read() == b""
        writer.close()
        broker.broker._servers["default"] = server
        await broker.connect(b"device")
    assert "Traceback" not in caplog.text
