"""What amqtt's plugin contexts call: publish, retain and subscribe, as durable as a client does."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from amqtt.contexts import Action

from broker_ext.on_behalf import could_subscribe, subscribe
from broker_ext.seam.shown import check_name, check_qos
from broker_ext.seam.views import SessionView
from broker_ext.session import REFUSED, Grant

if TYPE_CHECKING:
    from amqtt.session import Session as AmqttSession

    from broker_ext.hub import Hub
    from broker_ext.seam.plugins import Plugins
    from broker_ext.seam.shown import Shown

__all__ = ["Contexts"]


class Contexts:
    """In place of the broker's own methods."""

    def __init__(self, broker: Any, hub: Hub, plugins: Plugins, shown: Shown) -> None:
        self._hub = hub
        self._plugins = plugins
        self._shown = shown
        broker.internal_message_broadcast = self._broadcast
        broker.retain_message = self._retain
        broker.add_subscription = self._add_subscription

    async def _broadcast(self, topic: str, data: bytes, qos: int | None = None) -> None:
        """``context.broadcast_message``. qos None: as each subscriber was granted; $SYS: QoS 0."""
        check_name(topic)
        if self._hub.refusing:
            return
        if qos is None:
            qos = 0 if topic.startswith("$SYS/") else 2
        check_qos(qos)
        if self._hub.router.publish(topic.encode(), bytes(data), qos):
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
        if topic_name is None or self._hub.refusing:
            return
        check_name(topic_name)
        check_qos(qos or 0)
        if self._hub.retained.keep(topic_name.encode(), bytes(data or b""), qos or 0):
            await self._committed()

    async def _committed(self) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._hub.committer.after(partial(_set, done))
        await done

    async def _add_subscription(self, subscription: tuple[str, int], session: AmqttSession) -> int:
        """``context.add_subscription``: for a connected client in its session; for any other one
        in a durable session, which is made if there is none and belongs to the user who connects
        first. Returns the SUBACK return code."""
        topic_filter, qos = subscription[0].encode(), subscription[1]
        client_id = str(session.client_id).encode()
        settings = self._hub.settings
        if (
            self._hub.refusing
            or not could_subscribe(settings, client_id, topic_filter, qos)
            or not await self._plugins.permits(session, topic_filter, Action.SUBSCRIBE)
        ):
            return REFUSED
        code = await subscribe(
            self._hub, client_id, Grant(topic_filter, min(qos, settings.max_qos))
        )
        if code < REFUSED:
            shown = self._shown.session_of(str(session.client_id))
            if isinstance(shown, SessionView):
                self._shown.show_subscription(subscription[0], shown, code)
        return code


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
