"""Transports for what is not an asyncio socket: WebSockets, and connections that somebody else
accepted. They look like an asyncio transport to ``Connection`` and feed it what arrives.

Rule 1. What waits to be sent is bounded by the connection: beyond HIGH_BYTES it is congested.
Rule 2. What is read of a packet before the decoder has seen its length is bounded by READ_BYTES.
Rule 3. The other side may hang in any call; ``abort`` ends it, and its closing has LINGER_S.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Final

from websockets.exceptions import ConnectionClosed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from amqtt.adapters import ReaderAdapter, WriterAdapter
    from websockets.asyncio.server import ServerConnection

    from broker_ext.connection import Connection
    from broker_ext.guard import Transport

__all__ = ["external_transport", "websocket_transport"]

log = logging.getLogger("amqtt_durable.connection")

HIGH_BYTES: Final = 256 << 10
READ_BYTES: Final = 65_536
LINGER_S: Final = 5.0
"""How long the other side may take to close."""


class _QueuedTransport:
    """Writes are queued and sent by a task, since the other side's ``send`` must be awaited."""

    def __init__(
        self,
        send: Callable[[bytes], Awaitable[None]],
        close: Callable[[], Awaitable[None]],
        cut: Callable[[], None] | None = None,
    ) -> None:
        self._send = send
        self._close = close
        self._cut = cut
        self._sending: asyncio.Future[None] | None = None
        self._queue: list[bytes] = []
        self._queued_bytes = 0
        self._wake = asyncio.Event()
        self._closing = False
        self._aborted = False
        self.may_read = asyncio.Event()
        self.may_read.set()
        self.connection: Connection | None = None

    def write(self, data: bytes) -> None:
        if self._closing:
            return
        self._queue.append(data)
        self._queued_bytes += len(data)
        if self._queued_bytes > HIGH_BYTES and self.connection is not None:
            self.connection.pause_writing()
        self._wake.set()

    def can_write_eof(self) -> bool:
        return False

    def write_eof(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self._closing = True
        self._wake.set()

    def abort(self) -> None:
        self._closing = self._aborted = True
        self._wake.set()
        if self._cut is not None:
            self._cut()
        if self._sending is not None:
            self._sending.cancel()

    def pause_reading(self) -> None:
        self.may_read.clear()

    def resume_reading(self) -> None:
        self.may_read.set()

    def start(self) -> asyncio.Future[None]:
        """Begin to send. Returns the task."""
        self._sending = asyncio.ensure_future(self._work())
        return self._sending

    async def _work(self) -> None:
        """Send what is queued until closed, then close the other side."""
        try:
            while not self._aborted:
                if not self._queue:
                    if self._closing:
                        break
                    self._wake.clear()
                    await self._wake.wait()
                    continue
                data = b"".join(self._queue)
                self._queue.clear()
                await self._send(data)
                self._queued_bytes -= len(data)
                if (
                    self.connection is not None
                    and self.connection.congested
                    and self._queued_bytes <= HIGH_BYTES // 4
                ):
                    self.connection.resume_writing()
        except (ConnectionClosed, OSError):
            pass  # the reader meets the end too, and tells the connection
        finally:
            self.may_read.set()
            with contextlib.suppress(Exception):  # it is gone, whatever it says
                await asyncio.wait_for(self._close(), LINGER_S)


async def _serve(
    transport: _QueuedTransport,
    make: Callable[[Transport], Connection],
    read: Callable[[], Awaitable[bytes]],
) -> None:
    """Feed a connection until the other side ends."""
    connection = transport.connection = make(transport)
    writer = transport.start()
    reader = asyncio.ensure_future(_feed(transport, connection, read))
    try:
        await asyncio.wait([writer, reader], return_when=asyncio.FIRST_COMPLETED)
    finally:
        transport.close()
        connection.connection_lost(None)
        reader.cancel()
        await asyncio.wait([writer], timeout=LINGER_S)
        transport.abort()
        await asyncio.gather(writer, reader, return_exceptions=True)


async def _feed(
    transport: _QueuedTransport, connection: Connection, read: Callable[[], Awaitable[bytes]]
) -> None:
    with contextlib.suppress(ConnectionClosed, OSError, EOFError):
        while True:
            await transport.may_read.wait()
            data = await read()
            if not data:
                return
            connection.data_received(data)


async def websocket_transport(
    websocket: ServerConnection, make: Callable[[Transport], Connection]
) -> None:
    """Serve one WebSocket client. MQTT packets may be cut anywhere [MQTT-6.0.0-2]. amqtt has
    messages limited to 1 MiB, so that larger packets have to be cut."""

    async def read() -> bytes:
        while True:
            message = await websocket.recv()
            if isinstance(message, str):
                log.warning("a WebSocket client sent text; closing the connection")
                return b""  # [MQTT-6.0.0-1]
            if message:
                return message

    cut = websocket.transport.abort
    await _serve(_QueuedTransport(websocket.send, websocket.close, cut), make, read)


async def external_transport(
    reader: ReaderAdapter, writer: WriterAdapter, make: Callable[[Transport], Connection]
) -> None:
    """Serve a client that another server accepted. amqtt's readers return exactly what is asked
    for, so a packet is read by its parts."""

    async def send(data: bytes) -> None:
        writer.write(data)
        await writer.drain()

    left = 0  # bytes of the packet that are not asked for yet

    async def read() -> bytes:
        nonlocal left
        if left:
            part = await reader.read(min(left, READ_BYTES))
            left -= len(part)
            return bytes(part)
        head = bytearray(await reader.read(1))
        for shift in (0, 7, 14, 21) if head else ():
            byte = await reader.read(1)
            if not byte:
                return b""
            head += byte
            left |= (byte[0] & 0x7F) << shift
            if not byte[0] & 0x80:
                break
        else:
            left = 0  # five length bytes: the decoder says what is wrong
        return bytes(head)

    await _serve(_QueuedTransport(send, writer.close), make, read)
