"""amqtt's other plugins: what we ask them, and what we tell them."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from amqtt.events import BrokerEvents, MQTTEvents

from broker_ext.seam.known import check_manager

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from amqtt.contexts import Action
    from amqtt.session import Session as AmqttSession

    from broker_ext.authentication import Exchange

__all__ = ["Plugins"]

log = logging.getLogger("amqtt_durable.seam")


class Plugins:
    """All plugins of one broker but ours. Made when the broker has made them all.

    filter_topics: some of them filter topics. are_slow: a packet has to wait for them: they filter
    topics, or listen to packets.
    """

    def __init__(self, broker: Any) -> None:
        """Raises SeamError if this is not the amqtt we know."""
        self._broker = broker
        self._manager = broker.plugins_manager
        self._tasks: set[asyncio.Future[Any]] = set()
        check_manager(self._manager)
        self.filter_topics = bool(self._manager._topic_plugins)
        self.are_slow = self.filter_topics or any(
            self.listens(event)
            for event in (
                MQTTEvents.PACKET_RECEIVED,
                MQTTEvents.PACKET_SENT,
                BrokerEvents.MESSAGE_RECEIVED,
                BrokerEvents.MESSAGE_BROADCAST,
            )
        )

    # ------------------------------------------------------------------------------ asked

    async def authenticate(self, view: AmqttSession, listener_name: str) -> bytes | None:
        """The user name of an accepted client (b"" = anonymous), None if it is refused."""
        listener = self._broker.listeners_config.get(listener_name)
        if not await self._broker._authenticate(view, listener):
            return None
        if not view.username:
            return b""
        if view.is_anonymous and len(self._manager._auth_plugins) < 2:
            return b""  # nobody but AnonymousAuthPlugin looked at it: the name means nothing
        return view.username.encode()

    def exchange(self, method: bytes, client_id: bytes) -> Exchange | None:
        """An exchange of enhanced authentication, None if nobody provides the method."""
        for plugin in self._manager.plugins:
            if getattr(plugin, "authentication_method", None) == method.decode():
                made: Exchange = plugin.authentication_exchange(client_id=client_id.decode())
                return made
        return None

    async def permits(self, view: AmqttSession, topic: bytes, action: Action) -> bool:
        """Whether the topic plugins permit it."""
        return bool(await self._broker._topic_filtering(view, topic.decode(), action))

    # ------------------------------------------------------------------------------- told

    def listens(self, event: BrokerEvents | MQTTEvents) -> bool:
        """Whether some plugin has a handler for an event."""
        return bool(self._manager._event_plugin_callbacks.get(event))

    def fire(self, event: BrokerEvents, **arguments: Any) -> None:
        """Fire an event, if some plugin listens."""
        if self.listens(event):
            self.spawn(self.fire_event(event, **arguments))

    async def fire_event(self, event: BrokerEvents | MQTTEvents, **arguments: Any) -> None:
        """Fire an event; amqtt does not wait for it."""
        await self._manager.fire_event(event, **arguments)

    def tell_reset(self, client_id: bytes, reason: str, position: int, floor: int) -> None:
        """Call ``on_durable_session_reset`` of every plugin that has it."""
        for plugin in self._manager.plugins:
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


async def _ignoring_errors(call: Callable[[], Awaitable[None]]) -> None:
    try:
        await call()
    except Exception:
        # somebody else's plugin: it must not be able to stop ours
        log.exception("on_durable_session_reset failed")
