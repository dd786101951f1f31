"""The one file that touches amqtt's insides.

``RELIES_ON`` and its companions list every attribute of amqtt that is used here and is not
documented for plugins, as read in amqtt 0.12.1. They are compared with the installed amqtt before
anything is replaced, so that an upgrade fails by name before it fails a device;
``tests/seam/test_check.py`` pins each.

How it works: in ``on_broker_pre_start``, before the listeners bind, the connection callbacks of the
broker object (``stream_connected``, ``ws_connected``, ``external_connected``) are replaced by ours,
and so are the calls behind its plugin contexts. amqtt stays the broker: listeners, TLS, YAML,
authentication and topic plugins, events, ``$SYS``.

What other plugins see (``BrokerContext``):

    sessions, get_session   clients that are connected, and durable sessions that came to rest since
                            the start: those that amqtt would show too, AT_REST_SHOWN_MAX at most
    subscriptions           theirs
    retained_messages       all; what is set or deleted in it is retained or removed
    broadcast_message       is durable like a client's PUBLISH before it returns
    retain_message          is durable before it returns
    add_subscription        is saved before it returns; for a client that is not connected, in a
                            durable session that belongs to the first user who connects with its id
    session.retained_messages   what a plugin queues for a session at rest is delivered, once its
                            client connects; we never queue there, and so never fire
                            ``on_broker_retained_message`` with a client id: what waits for a
                            session is in the history, once for all

amqtt knows MQTT 3.1.1. Of an MQTT 5 client its plugins see what that version can say: packets
without properties (``older.py``), messages as ever, ``session.clean_session`` for "its session ends
with its connection", whatever Clean Start was. Its authentication plugins are asked as for any
other client, but for one that names an Authentication Method (``authentication.py``).

Mind: amqtt schedules ``on_*`` events without waiting and drops what they raise; so nothing here
that a promise hangs on is an event.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import amqtt
from amqtt.adapters import BufferReader
from amqtt.broker import Broker, RetainedApplicationMessage, Server
from amqtt.contexts import Action
from amqtt.errors import AMQTTError, BrokerError
from amqtt.events import BrokerEvents, MQTTEvents
from amqtt.mqtt import packet_class
from amqtt.mqtt.packet import MQTTFixedHeader
from amqtt.plugins.manager import PluginManager
from amqtt.session import IncomingApplicationMessage
from amqtt.session import Session as AmqttSession

from broker_ext.collector import calm
from broker_ext.connection import WRITE_HIGH_BYTES, Connection
from broker_ext.hub import REFUSED_RESUME
from broker_ext.older import as_older, sent_as_older
from broker_ext.reasons import Reason
from broker_ext.registry import GaveUpError
from broker_ext.session import REFUSED, End, Grant
from broker_ext.terms import Terms
from broker_ext.transports import external_transport, websocket_transport
from broker_ext.wire import Connect, MalformedPacket, Publish, check_topic, encode, valid_filter
from storage.api import (
    INCARNATION_BYTES,
    UNCLAIMED,
    Acquire,
    Acquired,
    Detach,
    Entry,
    Subscribe,
    Subscription,
)
from storage.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from amqtt.adapters import ReaderAdapter, WriterAdapter
    from amqtt.broker import BrokerContext
    from websockets.asyncio.server import ServerConnection

    from broker_ext.authentication import Exchange
    from broker_ext.guard import Transport
    from broker_ext.hub import Hub
    from broker_ext.retained import RetainedStore
    from broker_ext.session import Session
    from broker_ext.wire import Packet
    from storage.api import Outcome, Will

__all__ = ["RELIES_ON", "Seam", "SeamError", "SessionView", "check"]

log = logging.getLogger("amqtt_durable.seam")

RELIES_ON: Final[tuple[tuple[object, str], ...]] = (
    (Broker, "stream_connected"),
    (Broker, "ws_connected"),
    (Broker, "external_connected"),
    (Broker, "internal_message_broadcast"),
    (Broker, "retain_message"),
    (Broker, "add_subscription"),
    (Broker, "create_offline_session"),
    (Broker, "_cleanup_session"),
    (Broker, "_start_listeners"),
    (Broker, "_authenticate"),
    (Broker, "_topic_filtering"),
    (Broker, "sessions"),
    (Broker, "subscriptions"),
    (Broker, "retained_messages"),
    (Server, "acquire_connection"),
    (Server, "release_connection"),
    (PluginManager, "fire_event"),
    (AmqttSession, "_init_states"),
    (AmqttSession, "_on_enter_connected"),
    (AmqttSession, "_on_enter_disconnected"),
)
"""What must exist on amqtt's classes (read in 0.12.1)."""

RELIES_ON_INSTANCE: Final = (
    "_servers",
    "_sessions",
    "_subscriptions",
    "_retained_messages",
    "_loop",
    "config",
    "listeners_config",
)
"""What must exist on a broker object when it makes its plugins (read in 0.12.1)."""

RELIES_ON_SERVER: Final = ("instance", "semaphore", "listener_name")
"""What must exist on a listener's Server object (read in 0.12.1)."""

RELIES_ON_MANAGER: Final = (
    "_auth_plugins",
    "_topic_plugins",
    "_event_plugin_callbacks",
    "plugins",
)
"""What must exist on its plugin manager, once there is one (read in 0.12.1)."""

LISTEN_BACKLOG: Final = 4096
"""amqtt listens with asyncio's backlog of 100; 500 clients that dial at once would meet SYN
retransmits of a second each."""


STRING_BYTES_MAX: Final = 65_535
"""Of a string in a packet [MQTT-1.5.3]."""
REFUSED_LOGGED_MAX: Final = 10
"""Topics that a connection may not publish to and that are logged, once each, in amqtt's words."""
AT_REST_SHOWN_MAX: Final = 100
"""Sessions at rest that ``context.sessions`` goes on showing, about 1 kB each; the stored ones are
not limited by it. amqtt shows all of them for ever, which costs memory for each."""


class SeamError(RuntimeError):
    """The installed amqtt lacks something this plugin relies on."""


def check(broker: Any) -> None:
    """Compare what we rely on with the installed amqtt. Raises SeamError, naming what it lacks."""
    missing = [
        f"{getattr(o, '__name__', o)}.{name}" for o, name in RELIES_ON if not hasattr(o, name)
    ]
    missing += [f"Broker().{name}" for name in RELIES_ON_INSTANCE if not hasattr(broker, name)]
    server = Server("", None)  # type: ignore[arg-type]
    missing += [f"Server().{name}" for name in RELIES_ON_SERVER if not hasattr(server, name)]
    _complain(missing)


def _check_manager(manager: object) -> None:
    _complain(
        [f"PluginManager().{name}" for name in RELIES_ON_MANAGER if not hasattr(manager, name)]
    )


def _complain(missing: list[str]) -> None:
    if missing:
        msg = (
            f"amqtt {amqtt.__version__} is not the amqtt this version of amqtt-durable knows "
            f"(>=0.12,<0.13): it lacks {', '.join(missing)}. Install a matching pair."
        )
        raise SeamError(msg)


# ------------------------------------------------------------------------- amqtt's objects


class _States:
    """Stands in for the state machine of amqtt's Session, which costs 0.5 ms to build."""

    __slots__ = ("state",)

    def __init__(self) -> None:
        self.state = "new"

    def connect(self) -> None:
        self.state = "connected"

    def disconnect(self) -> None:
        self.state = "disconnected"

    def is_connected(self) -> bool:
        return self.state == "connected"

    def is_disconnected(self) -> bool:
        return self.state == "disconnected"

    def is_new(self) -> bool:
        return self.state == "new"


class _Lazy:
    """An attribute that is made when somebody asks for it."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, view: SessionView, owner: type | None = None) -> Any:
        held = vars(view)
        if self._name not in held:
            held[self._name] = self._make()
        return held[self._name]

    def __set__(self, view: SessionView, value: Any) -> None:
        if view.made:  # what amqtt's constructor sets is empty
            vars(view)[self._name] = value


class SessionView(AmqttSession):
    """An amqtt Session for amqtt's plugins to look at; the truth is in ours.

    amqtt gives each session queues and maps of 7 kB, which it uses and we do not.
    """

    made = False
    inflight_in: Any = _Lazy(OrderedDict)
    inflight_out: Any = _Lazy(OrderedDict)
    retained_messages: Any = _Lazy(asyncio.Queue)
    delivered_message_queue: Any = _Lazy(asyncio.Queue)

    def __init__(self) -> None:
        super().__init__()
        self.made = True
        self.ours: Session | None = None
        self.shown: set[str] = set()
        """Filters under which it stands in ``context.subscriptions``."""

    def _init_states(self) -> None:
        self.transitions: Any = _States()

    def take_queued(self) -> list[RetainedApplicationMessage]:
        """What plugins put into ``retained_messages``, which is empty then."""
        queue = vars(self).pop("retained_messages", None)
        return [] if queue is None else [queue.get_nowait() for _ in range(queue.qsize())]

    @property
    def retained_messages_count(self) -> int:
        """Messages that plugins queued for a session at rest."""
        queue = vars(self).get("retained_messages")
        return queue.qsize() if queue is not None else 0

    @property
    def inflight_out_count(self) -> int:
        """Deliveries under way."""
        out = getattr(self.ours, "out", None)
        return len(out.flights) if out is not None else 0

    @property
    def inflight_in_count(self) -> int:
        """QoS 2 messages received and not released."""
        return len(self.ours.inbound) if self.ours is not None else 0


class _HandlerView:
    """Stands in for amqtt's protocol handler: others may only stop it."""

    def __init__(self, connection: Connection | None) -> None:
        self._connection = connection

    async def stop(self) -> None:
        if self._connection is not None:
            self._connection.finish(End("stopped by amqtt", reason=Reason.ADMINISTRATIVE))

    async def handle_connection_closed(self) -> None:
        await self.stop()


# -------------------------------------------------------------------------------- the guard


class _PluginGuard:
    """amqtt's plugins, for one connection. See ``guard.Guard``."""

    def __init__(self, seam: Seam, turn: _Turn, peer: tuple[str, int], ssl_object: Any) -> None:
        self.seam = seam
        self.view = SessionView()
        self.view.remote_address, self.view.remote_port = peer
        self.view.ssl_object = ssl_object
        self.slow = seam.slow
        self._turn = turn
        self._refused: set[bytes] = set()
        self._aliases: dict[int, bytes] = {}
        self._connection: Connection | None = None

    def attach(self, connection: Connection) -> None:
        self._connection = connection

    async def authenticate(self, connect: Connect) -> bytes | None:
        view = self.view
        view.client_id = connect.client_id.decode()
        view.clean_session = connect.clean_start
        if connect.version == 5:  # of its two meanings amqtt asks for this one
            view.clean_session = Terms.of(connect).expiry_s == 0
        view.keep_alive = connect.keep_alive_s
        view.username = connect.username.decode() if connect.username is not None else None
        view.password = (
            connect.password.decode(errors="replace") if connect.password is not None else None
        )
        if connect.will is not None:
            view.will_flag = True
            view.will_topic = connect.will.topic.decode()
            view.will_message = connect.will.payload
            view.will_qos = connect.will.qos
            view.will_retain = connect.will.retain
        broker = self.seam.broker
        listener = broker.listeners_config.get(self._turn.server.listener_name)
        if not await broker._authenticate(view, listener):
            return None
        if not view.username:
            return b""
        if view.is_anonymous and len(broker.plugins_manager._auth_plugins) < 2:
            return b""  # nobody but AnonymousAuthPlugin looked at it: the name means nothing
        return view.username.encode()

    def exchange(self, method: bytes, client_id: bytes) -> Exchange | None:
        for plugin in self.seam.broker.plugins_manager.plugins:
            if getattr(plugin, "authentication_method", None) == method.decode():
                made: Exchange = plugin.authentication_exchange(client_id=client_id.decode())
                return made
        return None

    async def may_publish(self, topic: bytes) -> bool:
        if await self.seam.permits(self.view, topic, Action.PUBLISH):
            return True
        if topic not in self._refused and len(self._refused) < REFUSED_LOGGED_MAX:
            self._refused.add(topic)
            log.info("%s not allowed to publish to TOPIC %s.", self.view.client_id, topic.decode())
        return False

    async def may_subscribe(self, topic_filter: bytes) -> bool:
        return await self.seam.permits(self.view, topic_filter, Action.SUBSCRIBE)

    async def may_receive(self, topic: bytes) -> bool:
        return await self.seam.permits(self.view, topic, Action.RECEIVE)

    def packet_received(self, packet: Packet) -> None:
        if self.seam.listens(MQTTEvents.PACKET_RECEIVED):
            version = self._connection.version if self._connection is not None else 4
            view = None if isinstance(packet, Connect) else self.view
            data = as_older(packet) if version == 5 else encode(packet, version)
            self.seam.spawn(self._fire_packets(MQTTEvents.PACKET_RECEIVED, data, view))

    def packet_sent(self, data: bytes) -> None:
        if self.seam.listens(MQTTEvents.PACKET_SENT):
            if self._connection is not None and self._connection.version == 5:
                data = sent_as_older(data, self._aliases)
            self.seam.spawn(self._fire_packets(MQTTEvents.PACKET_SENT, data, self.view))

    async def _fire_packets(self, event: MQTTEvents, data: bytes, view: SessionView | None) -> None:
        """Build amqtt's packet objects, now that somebody wants them."""
        reader = BufferReader(data)
        with contextlib.suppress(AMQTTError, UnicodeError, ValueError):
            while (header := await MQTTFixedHeader.from_stream(reader)) is not None:
                packet = await packet_class(header).from_stream(reader, fixed_header=header)
                arguments: dict[str, Any] = {"packet": packet}
                if view is not None:
                    arguments["session"] = view
                await self.seam.fire_event(event, **arguments)

    def message_received(self, packet: Publish, *, permitted: bool | None) -> None:
        event = BrokerEvents.MESSAGE_BROADCAST if permitted else BrokerEvents.MESSAGE_RECEIVED
        if permitted is False or not self.seam.listens(event):
            return
        message = IncomingApplicationMessage(
            packet.packet_id or None,
            packet.topic.decode(),
            packet.qos,
            packet.payload,
            packet.retain,
        )
        message.publish_packet = message.build_publish_packet(dup=packet.dup)
        self.seam.fire(event, client_id=self.view.client_id, message=message)

    def subscribed(self, topic_filter: bytes, qos: int) -> None:
        name = topic_filter.decode()
        self.seam.show_subscription(name, self.view, qos)
        self.seam.fire(
            BrokerEvents.CLIENT_SUBSCRIBED, client_id=self.view.client_id, topic=name, qos=qos
        )

    def unsubscribed(self, topic_filter: bytes) -> None:
        name = topic_filter.decode()
        self.seam.hide_subscription(name, self.view)
        self.seam.fire(BrokerEvents.CLIENT_UNSUBSCRIBED, client_id=self.view.client_id, topic=name)

    def connected(self, session: Session) -> None:
        view = self.view
        view.ours = session
        view.client_id = session.client_id.decode()
        view.transitions.connect()
        view._on_enter_connected()
        queued = self.seam.show_session(view, _HandlerView(self._connection))
        for message in queued:
            qos = message.qos or 0
            session.pass_on(Entry(0, message.topic.encode(), bytes(message.data), qos), qos)
        for topic_filter, qos in session.subscriptions.items():
            self.seam.show_subscription(topic_filter.decode(), view, qos)
        self.seam.fire(BrokerEvents.CLIENT_CONNECTED, client_id=view.client_id, client_session=view)

    def disconnected(self, session: Session, end: End) -> None:
        view = self.view
        view.transitions.disconnect()
        view._on_enter_disconnected()
        view.ours = view.password = view.ssl_object = None
        kept = session.expiry_s != 0 and end.name != REFUSED_RESUME.name
        self.seam.show_at_rest(view, kept=kept)
        self.seam.fire(
            BrokerEvents.CLIENT_DISCONNECTED, client_id=view.client_id, client_session=view
        )

    def closed(self) -> None:
        self._turn.over()
        self._connection = None


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


# --------------------------------------------------------------------------------- the seam


class Seam:
    """Our hand on one broker. ``install`` in on_broker_pre_start, before the listeners bind."""

    def __init__(self, context: BrokerContext) -> None:
        """Raises SeamError if this is not the amqtt we know."""
        if not hasattr(context, "_broker_instance"):
            _complain(["BrokerContext()._broker_instance"])
        self.broker: Any = context._broker_instance
        check(self.broker)
        self.hub: Hub | None = None
        self.slow = False
        self._tasks: set[asyncio.Future[Any]] = set()
        self._at_rest: OrderedDict[str, SessionView] = OrderedDict()
        self._retained: _RetainedView

    def install(self, hub: Hub) -> None:
        """Replace the broker's connection callbacks and what its contexts call."""
        self.hub = hub
        broker = self.broker
        manager = broker.plugins_manager
        _check_manager(manager)
        self.slow = bool(manager._topic_plugins) or any(
            self.listens(event)
            for event in (
                MQTTEvents.PACKET_RECEIVED,
                MQTTEvents.PACKET_SENT,
                BrokerEvents.MESSAGE_RECEIVED,
                BrokerEvents.MESSAGE_BROADCAST,
            )
        )
        hub.router.guarded = bool(manager._topic_plugins)
        if hub.router.guarded:
            hub.permits_will = self._permits_will
        self._retained = broker._retained_messages = _RetainedView(hub.retained)
        hub.retained.mirror = self
        broker.stream_connected = self._stream_connected
        broker.ws_connected = self._ws_connected
        broker.external_connected = self._external_connected
        broker.internal_message_broadcast = self._broadcast
        broker.retain_message = self._retain
        broker.add_subscription = self._add_subscription
        broker.create_offline_session = self._create_offline_session
        broker._cleanup_session = self._cleanup_session

    def refuse_to_start(self, reason: BaseException) -> None:
        """Have ``Broker.start`` fail: the store cannot be used, so nothing may be served."""

        async def refuse() -> None:
            log.critical("the broker does not start: %s", reason)
            self._leave_script()
            raise BrokerError(str(reason)) from reason

        self.broker._start_listeners = refuse

    def watch_listeners(self, failed: Callable[[], Awaitable[None]]) -> None:
        """Have ``failed`` awaited if the listeners cannot be started, since amqtt tells nobody."""
        start = self.broker._start_listeners

        async def start_or_tell() -> None:
            self.broker._start_listeners = start
            try:
                await start()
            except Exception as error:
                log.critical("the broker does not start: %s", error)
                await failed()
                self._leave_script()
                raise

        self.broker._start_listeners = start_or_tell

    def _leave_script(self) -> None:
        """`amqtt -c` never looks at what ``start`` raised, and would idle for ever."""
        if _run_by_script():
            self.broker._loop.call_soon(partial(sys.exit, 1))

    def listen_widely(self) -> None:
        """Raise the backlog of the listening sockets (on_broker_post_start)."""
        for server in self.broker._servers.values():
            for shared in getattr(server.instance, "sockets", None) or ():
                with socket.socket(fileno=os.dup(shared.fileno())) as listening:
                    listening.listen(LISTEN_BACKLOG)

    def calm_collector(self) -> None:
        """Have the garbage collector look less often, where the process is the broker's alone."""
        if _run_by_script():
            calm()

    def stop_on_signals(self) -> None:
        """`amqtt -c` knows SIGINT only, and has it raised between any two instructions. There, and
        nowhere else, both signals stop the loop between two callbacks."""
        if not _run_by_script():
            return

        def interrupt() -> None:
            raise KeyboardInterrupt

        for number, usual in (
            (signal.SIGTERM, signal.SIG_DFL),
            (signal.SIGINT, signal.default_int_handler),
        ):
            if signal.getsignal(number) is usual:
                with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
                    self.broker._loop.add_signal_handler(number, interrupt)

    # --------------------------------------------------------------------- connections

    def _server(self, listener_name: str) -> Server:
        server: Server | None = self.broker._servers.get(listener_name)
        if server is None:
            msg = f"Invalid listener name '{listener_name}'"
            raise BrokerError(msg)
        return server

    def _admit(
        self, turn: _Turn, transport: Transport, peer: tuple[str, int], ssl_object: Any
    ) -> Connection:
        assert self.hub is not None
        guard = _PluginGuard(self, turn, peer, ssl_object)
        connection = Connection(self.hub, transport, guard, peername=f"{peer[0]}:{peer[1]}")
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
        transport.set_protocol(connection)
        if server.semaphore is None:
            self.spawn(turn.come())
        else:
            connection.pause()  # as amqtt does: nothing is read before its turn
            self.spawn(self._wait_for_turn(turn, connection))

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

    # ------------------------------------------------------------------- what contexts call

    async def _broadcast(self, topic: str, data: bytes, qos: int | None = None) -> None:
        """``context.broadcast_message``. qos None: as each subscriber was granted; $SYS: QoS 0."""
        assert self.hub is not None
        _check_name(topic)
        if self.hub.refusing:
            return
        if qos is None:
            qos = 0 if topic.startswith("$SYS/") else 2
        if self.hub.router.publish(topic.encode(), bytes(data), qos):
            await self._committed()

    async def _retain(
        self,
        source_session: AmqttSession | None,
        topic_name: str | None,
        data: bytes | bytearray | None,
        qos: int | None = None,
    ) -> None:
        """``context.retain_message``."""
        del source_session
        assert self.hub is not None
        if topic_name is None or self.hub.refusing:
            return
        _check_name(topic_name)
        if self.hub.retained.keep(topic_name.encode(), bytes(data or b""), qos or 0):
            await self._committed()

    async def _committed(self) -> None:
        assert self.hub is not None
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.hub.committer.after(partial(_set, done))
        await done

    def _create_offline_session(self, client_id: str) -> tuple[_HandlerView, SessionView]:
        view = SessionView()
        view.client_id = client_id
        view.transitions.disconnect()
        view._on_enter_disconnected()
        self.show_at_rest(view, kept=True)
        return _HandlerView(None), view

    async def _add_subscription(self, subscription: tuple[str, int], session: AmqttSession) -> int:
        """``context.add_subscription``: for a connected client in its session; for any other one
        in a durable session, which is made if there is none and belongs to the user who connects
        first. Returns the SUBACK return code."""
        assert self.hub is not None
        topic_filter, qos = subscription[0].encode(), subscription[1]
        client_id = str(session.client_id).encode()
        if (
            self.hub.refusing
            or not self._could_be_sent(client_id, topic_filter, qos)
            or not await self.permits(session, topic_filter, Action.SUBSCRIBE)
        ):
            return REFUSED
        grant = Grant(topic_filter, min(qos, self.hub.settings.max_qos))
        code = await self._subscribe_for(client_id, grant)
        if code < REFUSED:
            shown, _ = self.broker._sessions.get(session.client_id, (None, None))
            if isinstance(shown, SessionView):
                self.show_subscription(subscription[0], shown, code)
        return code

    def _could_be_sent(self, client_id: bytes, topic_filter: bytes, qos: int) -> bool:
        """Whether a client could have sent this SUBSCRIBE: what the decoder sees to otherwise."""
        assert self.hub is not None
        return (
            0 < len(client_id) <= self.hub.settings.max_client_id_bytes
            and len(topic_filter) <= STRING_BYTES_MAX
            and b"\0" not in client_id + topic_filter
            and valid_filter(topic_filter)
            and not topic_filter.startswith(b"$share/")
            and qos in (0, 1, 2)
        )

    async def _subscribe_for(self, client_id: bytes, grant: Grant) -> int:
        hub = self.hub
        assert hub is not None
        if client_id not in hub.registry.owners:
            try:
                async with hub.registry.turn(client_id):
                    if client_id not in hub.registry.owners:
                        return await self._subscribe_at_rest(client_id, grant)
            except GaveUpError:
                return REFUSED
            if client_id not in hub.registry.owners:
                return REFUSED
        return (await hub.registry.owners[client_id].subscribe([grant]))[0]

    async def _subscribe_at_rest(self, client_id: bytes, grant: Grant) -> int:
        """In its turn: own the record for a moment, as a CONNECT would."""
        hub = self.hub
        assert hub is not None
        stored = await hub.store.snapshot(client_id)
        user = stored.consumer.user if stored is not None else UNCLAIMED
        incarnation = os.urandom(INCARNATION_BYTES)
        now_ms = hub.clock.now_ms()
        left_ms, expiry_s, version = now_ms, hub.settings.session_expiry_interval_s, 4
        if stored is not None:  # it goes on expiring from when its client left, as that asked for
            consumer = stored.consumer
            left_ms, expiry_s, version = consumer.detached_ms, consumer.expiry_s, consumer.version
        acquired = await hub.committer.apply(
            Acquire(client_id, incarnation, user, now_ms, expiry_s=expiry_s, version=version)
        )
        assert isinstance(acquired, Acquired)
        assert acquired.snapshot is not None
        if not acquired.existed:
            left_ms, expiry_s = now_ms, hub.settings.session_expiry_interval_s
        hub.shared.ended(acquired.dropped_id)
        for topic_filter in acquired.dropped:
            hub.router.count(topic_filter, -1)
        consumer_id = acquired.snapshot.consumer.id
        had = any(s.qos for s in acquired.snapshot.subscriptions if s.filter == grant.filter)
        # counted before it is saved, as a session does: what is published meanwhile is logged
        hub.router.count(grant.filter, 1)
        try:
            wanted = Subscription(grant.filter, grant.qos, hub.committer.last)
            await hub.committer.apply(Subscribe(consumer_id, incarnation, (wanted,)))
        except StoreError as error:
            log.warning("client %r: a subscription was not saved: %s", client_id, error)
            hub.router.count(grant.filter, -1)
            return REFUSED
        else:
            if had or not grant.qos:
                hub.router.count(grant.filter, -1)
            if had and not grant.qos:
                hub.router.count(grant.filter, -1)
            return grant.qos
        finally:
            left = Detach(
                consumer_id, incarnation, left_ms or now_ms, expiry_s=expiry_s, keep_expiry=False
            )
            hub.committer.submit(left, _detached)

    # -------------------------------------------------------------------------- plugins

    async def permits(self, view: AmqttSession, topic: bytes, action: Action) -> bool:
        """Ask the topic plugins."""
        return bool(await self.broker._topic_filtering(view, topic.decode(), action))

    async def _permits_will(self, will: Will, session: Session | None) -> bool:
        guard = getattr(session.peer, "guard", None) if session is not None else None
        if isinstance(guard, _PluginGuard):
            view = guard.view
        else:  # its connection died with the broker
            view = SessionView()
            view.client_id = will.client_id.decode()
            view.username = will.user.decode() or None
            view.is_anonymous = not will.user
        return await self.permits(view, will.message.topic, Action.PUBLISH)

    def listens(self, event: BrokerEvents | MQTTEvents) -> bool:
        """Whether some plugin has a handler for an event."""
        callbacks = self.broker.plugins_manager._event_plugin_callbacks
        return bool(callbacks.get(event))

    def fire(self, event: BrokerEvents, **arguments: Any) -> None:
        """Fire an event, if some plugin listens."""
        if self.listens(event):
            self.spawn(self.fire_event(event, **arguments))

    async def fire_event(self, event: BrokerEvents | MQTTEvents, **arguments: Any) -> None:
        """Fire an event; amqtt does not wait for it."""
        await self.broker.plugins_manager.fire_event(event, **arguments)

    def tell_reset(self, client_id: bytes, reason: str, position: int, floor: int) -> None:
        """Call ``on_durable_session_reset`` of every plugin that has it."""
        for plugin in self.broker.plugins_manager.plugins:
            handler: Callable[..., Awaitable[None]] | None = getattr(
                type(plugin), "on_durable_session_reset", None
            )
            if handler is not None:
                call = partial(
                    handler,
                    plugin,
                    client_id=client_id.decode(),
                    reason=reason,
                    position=position,
                    floor=floor,
                )
                self.spawn(_ignoring_errors(call))

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run something that nobody waits for."""
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ------------------------------------------------------------------ what contexts show

    def show_session(
        self, view: SessionView, handler: _HandlerView
    ) -> list[RetainedApplicationMessage]:
        """Show a connected client in ``context.sessions``. Returns what plugins had put into the
        queue of its session at rest (``retained_messages``, as amqtt's SessionDBPlugin does)."""
        client_id = str(view.client_id)
        queued: list[RetainedApplicationMessage] = []
        shown, _ = self.broker._sessions.get(client_id, (None, None))
        if shown is not None:
            self.hide_session(shown)
            queued = shown.take_queued()
        self.broker._sessions[client_id] = (view, handler)
        return queued

    def show_at_rest(self, view: SessionView, *, kept: bool) -> None:
        """Its client left: show it, as amqtt does, until amqtt's monitor takes it away; which it
        does within a second but for durable sessions of named users. kept: it may be one of those,
        which are shown until AT_REST_SHOWN_MAX others have come to rest after it."""
        client_id = str(view.client_id)
        shown = self.broker._sessions.get(client_id)
        if shown is not None:
            if shown[0] is not view:
                return  # taken over: the newer connection is shown
            self.broker._sessions[client_id] = (view, _HandlerView(None))
        if not kept:
            return
        self._at_rest[client_id] = view
        self._at_rest.move_to_end(client_id)
        while len(self._at_rest) > AT_REST_SHOWN_MAX:
            _, oldest = self._at_rest.popitem(last=False)
            self.hide_session(oldest)

    async def _cleanup_session(self, client_id: str) -> None:
        """In place of amqtt's, which looks through all subscriptions for each session."""
        view, handler = self.broker._sessions.get(client_id, (None, None))
        if view is not None:
            await handler.stop()
            self.hide_session(view)

    def hide_session(self, view: SessionView) -> None:
        """Show a session no longer, nor its subscriptions."""
        client_id = str(view.client_id)
        if self.broker._sessions.get(client_id, (None,))[0] is view:
            del self.broker._sessions[client_id]
        if self._at_rest.get(client_id) is view:
            del self._at_rest[client_id]
        for topic_filter in list(view.shown):
            self.hide_subscription(topic_filter, view)

    def show_subscription(self, topic_filter: str, view: SessionView, qos: int) -> None:
        """Show a subscription in ``context.subscriptions``."""
        shown = self.broker._subscriptions.setdefault(topic_filter, [])
        if topic_filter in view.shown:
            shown[:] = [(s, qos if s is view else q) for s, q in shown]
        else:
            view.shown.add(topic_filter)
            shown.append((view, qos))

    def hide_subscription(self, topic_filter: str, view: SessionView) -> None:
        """Undo ``show_subscription``."""
        view.shown.discard(topic_filter)
        subscriptions = self.broker._subscriptions
        shown = subscriptions.get(topic_filter)
        if shown is None:
            return
        for i, (session, _) in enumerate(shown):
            if session is view:
                del shown[i]
                break
        if not shown:
            del subscriptions[topic_filter]

    def retained_changed(self, message: Entry, *, loaded: bool) -> None:
        """Keep ``context.retained_messages`` true (retained.RetainedMirror)."""
        topic = message.topic.decode()
        shown = _Retained(None, topic, message.payload, message.qos)
        shown.seam, shown.origin = self, message.origin
        if message.payload:
            self._retained.show(topic, shown)
        else:
            self._retained.hide(topic)
        if not loaded:
            self.fire(BrokerEvents.RETAINED_MESSAGE, client_id=None, retained_message=shown)


class _Retained(RetainedApplicationMessage):
    """A retained message as amqtt's plugins see it. It keeps its publisher's name, not the session:
    there may be one publisher for each."""

    __slots__ = ("origin", "seam")

    seam: Seam
    origin: bytes

    @property
    def source_session(self) -> AmqttSession | None:
        """The session of its publisher; of one that is shown no longer, only the client id."""
        if not self.origin:
            return None
        client_id = self.origin.decode()
        view, _ = self.seam.broker._sessions.get(client_id, (None, None))
        if view is None:
            view = SessionView()
            view.client_id = client_id
        return view  # type: ignore[no-any-return]

    @source_session.setter
    def source_session(self, session: AmqttSession | None) -> None:
        """Amqtt's constructor sets it."""


class _RetainedView(dict[str, RetainedApplicationMessage]):
    """``context.retained_messages``. What a plugin sets or deletes is retained or removed; that
    amqtt clears it when it stops is none of our business."""

    def __init__(self, retained: RetainedStore) -> None:
        super().__init__()
        self._retained = retained

    def __setitem__(self, topic: str, message: RetainedApplicationMessage) -> None:
        _check_name(topic)
        self._retained.keep(topic.encode(), bytes(message.data or b""), message.qos or 0)

    def __delitem__(self, topic: str) -> None:
        if topic not in self:
            raise KeyError(topic)
        self._retained.keep(topic.encode(), b"", 0)

    def show(self, topic: str, message: RetainedApplicationMessage) -> None:
        super().__setitem__(topic, message)

    def hide(self, topic: str) -> None:
        super().pop(topic, None)


def _check_name(topic: str) -> None:
    """Raise ValueError if a plugin names a topic that nothing can be published to."""
    try:
        check_topic(topic.encode())
    except MalformedPacket as error:
        raise ValueError(str(error)) from error


def _detached(outcome: Outcome) -> None:
    if isinstance(outcome, BaseException):
        log.error("a subscription's session could not be let go: %s", outcome)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def _ignoring_errors(call: Callable[[], Awaitable[None]]) -> None:
    try:
        await call()
    except Exception:
        # somebody else's plugin: it must not be able to stop ours
        log.exception("on_durable_session_reset failed")


def _run_by_script() -> bool:
    """Whether this process is ``amqtt -c ...`` and nobody else's program."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name == "amqtt.scripts.broker_script":
        return True
    return Path(getattr(main, "__file__", None) or "").name == "amqtt"
