"""Our hand on one broker: in place of its connections, of what its contexts call and show."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from broker_ext.seam.contexts import Contexts
from broker_ext.seam.guard import permits_will
from broker_ext.seam.known import broker_of
from broker_ext.seam.listeners import Listeners
from broker_ext.seam.plugins import Plugins
from broker_ext.seam.shown import Shown
from broker_ext.seam.starting import (
    calm_collector,
    listen_widely,
    refuse_to_start,
    stop_on_signals,
    watch_listeners,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from amqtt.broker import BrokerContext

    from broker_ext.hub import Hub

__all__ = ["Seam"]


class Seam:
    """Of one broker. ``install`` in on_broker_pre_start, before the listeners bind; then
    ``watch_listeners``, or ``refuse_to_start``; ``listening`` in on_broker_post_start."""

    def __init__(self, context: BrokerContext) -> None:
        """Raises SeamError if this is not the amqtt we know."""
        self.broker: Any = broker_of(context)

    def install(self, hub: Hub) -> None:
        """Replace the broker's connection callbacks and what its contexts call. Raises
        SeamError."""
        plugins = Plugins(self.broker)
        hub.on_reset = plugins.tell_reset
        hub.router.guarded = plugins.filter_topics
        if plugins.filter_topics:
            hub.permits_will = partial(permits_will, plugins)
        shown = Shown(self.broker, plugins, hub.retained)
        Contexts(self.broker, hub, plugins, shown)
        Listeners(self.broker, hub, plugins, shown)

    def refuse_to_start(self, reason: BaseException) -> None:
        """Have ``Broker.start`` fail: the store cannot be used, so nothing may be served."""
        refuse_to_start(self.broker, reason)

    def watch_listeners(self, failed: Callable[[], Awaitable[None]]) -> None:
        """Have ``failed`` awaited if the listeners cannot be started, since amqtt tells nobody."""
        watch_listeners(self.broker, failed)

    def listening(self) -> None:
        """The listeners are bound."""
        listen_widely(self.broker)
        stop_on_signals(self.broker)
        calm_collector()
