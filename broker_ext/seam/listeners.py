"""In place of the broker's connection callbacks: what its listeners accept becomes ours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from amqtt.errors import BrokerError

from broker_ext.connection import WRITE_HIGH_BYTES, Connection
from broker_ext.seam.guard import PluginGuard
from broker_ext.seam.views import SessionView
from broker_ext.transports import external_transport, websocket_transport

if TYPE_CHECKING:
    import asyncio

    from amqtt.adapters import ReaderAdapter, WriterAdapter
    from amqtt.broker import Server
    from websockets.asyncio.server import ServerConnection

    from broker_ext.guard import Transport
    from broker_ext.hub import Hub
    from broker_ext.seam.plugins import Plugins
    from broker_ext.seam.shown import Shown

__all__ = ["Listeners"]


class _Turn:
    """One of the ``max_connections`` places of a listener: taken once, given back once."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._taken = self._over = False

    async def come(self) -> None:
        """Wait for a place. One whose client left meanwhile gives it back at once."""
        await self.server.acquire_connection()
        self._taken = True
        if self._over:
            self.server.release_connection()

    def over(self) -> None:
        """The client is gone."""
        if self._taken and not self._over:
            self.server.release_connection()
        self._over = True


def _open_ring(transport: Any) -> None:
    """A transport of asyncio keeps a bound method of its own. Only the collector would find them
    and their sockets, 1.5 kB of each client that has come and gone."""
    if hasattr(transport, "_read_ready_cb"):
        transport._read_ready_cb = None


class Listeners:
    """What the listeners of one broker accept."""

    def __init__(self, broker: Any, hub: Hub, plugins: Plugins, shown: Shown) -> None:
        self._broker = broker
        self._hub = hub
        self._plugins = plugins
        self._shown = shown
        broker.stream_connected = self._stream_connected
        broker.ws_connected = self._ws_connected
        broker.external_connected = self._external_connected

    def _server(self, listener_name: str) -> Server:
        server: Server | None = self._broker._servers.get(listener_name)
        if server is None:
            msg = f"Invalid listener name '{listener_name}'"
            raise BrokerError(msg)
        return server

    def _admit(
        self, turn: _Turn, transport: Transport, peer: tuple[str, int], ssl_object: Any
    ) -> Connection:
        view = SessionView()
        view.remote_address, view.remote_port = peer
        view.ssl_object = ssl_object
        name = turn.server.listener_name

        def left() -> None:
            turn.over()
            _open_ring(transport)

        guard = PluginGuard(self._plugins, self._shown, view, name, left)
        connection = Connection(self._hub, transport, guard, peername=f"{peer[0]}:{peer[1]}")
        guard.attach(connection)
        return connection

    def _stream_connected(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, listener_name: str
    ) -> None:
        """A TCP or TLS client. Called by asyncio inside connection_made, before any byte is read:
        from here on the transport talks to our protocol."""
        del reader
        transport: Any = writer.transport
        peername = writer.get_extra_info("peername")
        try:
            server = self._server(listener_name)
        except BrokerError:
            # amqtt fills its table after the listener is bound; the client may try again
            transport.abort()
            return
        if not peername:
            transport.abort()
            return
        turn = _Turn(server)
        connection = self._admit(
            turn,
            transport,
            (str(peername[0]), int(peername[1]) if len(peername) > 1 else 0),
            transport.get_extra_info("ssl_object"),
        )
        connection.keeps = writer  # collected, it would close the transport
        transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)
        streams = transport.get_protocol()
        transport.set_protocol(connection)
        streams.connection_lost(None)  # they let go of each other: no ring
        if server.semaphore is None:
            self._plugins.spawn(turn.come())
        else:
            connection.pause()  # as amqtt does: nothing is read before its turn
            self._plugins.spawn(self._wait_for_turn(turn, connection))

    async def _wait_for_turn(self, turn: _Turn, connection: Connection) -> None:
        await turn.come()
        connection.resume()

    async def _ws_connected(self, websocket: ServerConnection, listener_name: str) -> None:
        turn = _Turn(self._server(listener_name))
        await turn.come()
        address = websocket.remote_address or ("", 0)
        ssl_object = websocket.transport.get_extra_info("ssl_object")
        await websocket_transport(
            websocket,
            lambda t: self._admit(turn, t, (str(address[0]), int(address[1])), ssl_object),
        )

    async def _external_connected(
        self, reader: ReaderAdapter, writer: WriterAdapter, listener_name: str
    ) -> None:
        turn = _Turn(self._server(listener_name))
        await turn.come()
        peer = writer.get_peer_info() or ("", 0)
        await external_transport(
            reader, writer, lambda t: self._admit(turn, t, peer, writer.get_ssl_info())
        )
