"""amqtt's plugins, for one connection: they are asked and told in its name."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any, Final

from amqtt.adapters import BufferReader
from amqtt.contexts import Action
from amqtt.errors import AMQTTError
from amqtt.events import BrokerEvents, MQTTEvents
from amqtt.mqtt import packet_class
from amqtt.mqtt.packet import MQTTFixedHeader
from amqtt.session import IncomingApplicationMessage

from broker_ext.hub import REFUSED_RESUME
from broker_ext.older import as_older, sent_as_older
from broker_ext.seam.views import HandlerView, SessionView
from broker_ext.terms import Terms
from broker_ext.wire import Connect, encode
from storage.api import Entry

if TYPE_CHECKING:
    from collections.abc import Callable

    from broker_ext.authentication import Exchange
    from broker_ext.connection import Connection
    from broker_ext.seam.plugins import Plugins
    from broker_ext.seam.shown import Shown
    from broker_ext.session import End, Session
    from broker_ext.wire import Packet, Publish
    from storage.api import Will

__all__ = ["PluginGuard", "permits_will"]

log = logging.getLogger("amqtt_durable.seam")

REFUSED_LOGGED_MAX: Final = 10
"""Topics that a connection may not publish to and that are logged, once each, in amqtt's words."""


class PluginGuard:
    """Implements ``broker_ext.guard.Guard``.

    view: the client, as plugins see it. left: called when its connection is gone.
    """

    def __init__(
        self,
        plugins: Plugins,
        shown: Shown,
        view: SessionView,
        listener_name: str,
        left: Callable[[], None],
    ) -> None:
        self.view = view
        self.slow = plugins.are_slow
        self._plugins = plugins
        self._shown = shown
        self._listener_name = listener_name
        self._left = left
        self._refused: set[bytes] = set()
        self._aliases: dict[int, bytes] = {}
        self._connection: Connection | None = None

    def attach(self, connection: Connection) -> None:
        """The connection whose guard it is."""
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
        return await self._plugins.authenticate(view, self._listener_name)

    def exchange(self, method: bytes, client_id: bytes) -> Exchange | None:
        return self._plugins.exchange(method, client_id)

    async def may_publish(self, topic: bytes) -> bool:
        if await self._plugins.permits(self.view, topic, Action.PUBLISH):
            return True
        if topic not in self._refused and len(self._refused) < REFUSED_LOGGED_MAX:
            self._refused.add(topic)
            log.info("%s not allowed to publish to TOPIC %s.", self.view.client_id, topic.decode())
        return False

    async def may_subscribe(self, topic_filter: bytes) -> bool:
        return await self._plugins.permits(self.view, topic_filter, Action.SUBSCRIBE)

    async def may_receive(self, topic: bytes) -> bool:
        return await self._plugins.permits(self.view, topic, Action.RECEIVE)

    def packet_received(self, packet: Packet) -> None:
        if self._plugins.listens(MQTTEvents.PACKET_RECEIVED):
            version = self._connection.version if self._connection is not None else 4
            view = None if isinstance(packet, Connect) else self.view
            data = as_older(packet) if version == 5 else encode(packet, version)
            self._plugins.spawn(self._fire_packets(MQTTEvents.PACKET_RECEIVED, data, view))

    def packet_sent(self, data: bytes) -> None:
        if self._plugins.listens(MQTTEvents.PACKET_SENT):
            if self._connection is not None and self._connection.version == 5:
                data = sent_as_older(data, self._aliases)
            self._plugins.spawn(self._fire_packets(MQTTEvents.PACKET_SENT, data, self.view))

    async def _fire_packets(self, event: MQTTEvents, data: bytes, view: SessionView | None) -> None:
        """Build amqtt's packet objects, now that somebody wants them."""
        reader = BufferReader(data)
        with contextlib.suppress(AMQTTError, UnicodeError, ValueError):
            while (header := await MQTTFixedHeader.from_stream(reader)) is not None:
                packet = await packet_class(header).from_stream(reader, fixed_header=header)
                arguments: dict[str, Any] = {"packet": packet}
                if view is not None:
                    arguments["session"] = view
                await self._plugins.fire_event(event, **arguments)

    def message_received(self, packet: Publish, *, permitted: bool | None) -> None:
        event = BrokerEvents.MESSAGE_BROADCAST if permitted else BrokerEvents.MESSAGE_RECEIVED
        if permitted is False or not self._plugins.listens(event):
            return
        message = IncomingApplicationMessage(
            packet.packet_id or None,
            packet.topic.decode(),
            packet.qos,
            packet.payload,
            packet.retain,
        )
        message.publish_packet = message.build_publish_packet(dup=packet.dup)
        self._plugins.fire(event, client_id=self.view.client_id, message=message)

    def subscribed(self, topic_filter: bytes, qos: int) -> None:
        name = topic_filter.decode()
        self._shown.show_subscription(name, self.view, qos)
        self._plugins.fire(
            BrokerEvents.CLIENT_SUBSCRIBED, client_id=self.view.client_id, topic=name, qos=qos
        )

    def unsubscribed(self, topic_filter: bytes) -> None:
        name = topic_filter.decode()
        self._shown.hide_subscription(name, self.view)
        self._plugins.fire(
            BrokerEvents.CLIENT_UNSUBSCRIBED, client_id=self.view.client_id, topic=name
        )

    def connected(self, session: Session) -> None:
        view = self.view
        view.ours = session
        view.client_id = session.client_id.decode()
        view.connect()
        queued = self._shown.show_session(view, HandlerView(self._connection))
        for message in queued:
            qos = message.qos or 0
            session.pass_on(Entry(0, message.topic.encode(), bytes(message.data), qos), qos)
        for topic_filter, qos in session.subscriptions.items():
            self._shown.show_subscription(topic_filter.decode(), view, qos)
        self._plugins.fire(
            BrokerEvents.CLIENT_CONNECTED, client_id=view.client_id, client_session=view
        )

    def disconnected(self, session: Session, end: End) -> None:
        view = self.view
        view.disconnect()
        view.ours = view.password = view.ssl_object = None
        kept = session.expiry_s != 0 and end.name != REFUSED_RESUME.name
        self._shown.show_at_rest(view, kept=kept)
        self._plugins.fire(
            BrokerEvents.CLIENT_DISCONNECTED, client_id=view.client_id, client_session=view
        )

    def closed(self) -> None:
        self._left()
        self._connection = None


async def permits_will(plugins: Plugins, will: Will, session: Session | None) -> bool:
    """Whether a will may be published by its client, whose connection is over."""
    guard = getattr(session.peer, "guard", None) if session is not None else None
    if isinstance(guard, PluginGuard):
        view = guard.view
    else:  # its connection died with the broker
        view = SessionView()
        view.client_id = will.client_id.decode()
        view.username = will.user.decode() or None
        view.is_anonymous = not will.user
    return await plugins.permits(view, will.message.topic, Action.PUBLISH)
