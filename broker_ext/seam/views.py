"""amqtt's objects, for its plugins to look at: the truth is in ours."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from amqtt.broker import RetainedApplicationMessage
from amqtt.session import Session as AmqttSession

from broker_ext.reasons import Reason
from broker_ext.session import End

if TYPE_CHECKING:
    from collections.abc import Callable

    from broker_ext.connection import Connection
    from broker_ext.seam.shown import Shown
    from broker_ext.session import Session
    from storage.api import Entry

__all__ = ["HandlerView", "RetainedView", "SessionView"]


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
    """An amqtt Session.

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

    def connect(self) -> None:
        """Its client is connected."""
        self.transitions.connect()
        self._on_enter_connected()

    def disconnect(self) -> None:
        """Its client is not connected any more."""
        self.transitions.disconnect()
        self._on_enter_disconnected()

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


class HandlerView:
    """Stands in for amqtt's protocol handler: others may only stop it."""

    def __init__(self, connection: Connection | None) -> None:
        self._connection = connection

    async def stop(self) -> None:
        """Close the connection, if there is one."""
        if self._connection is not None:
            self._connection.finish(End("stopped by amqtt", reason=Reason.ADMINISTRATIVE))

    async def handle_connection_closed(self) -> None:
        """The same."""
        await self.stop()


class RetainedView(RetainedApplicationMessage):
    """A retained message. It keeps its publisher's name, not the session: there may be one
    publisher for each."""

    __slots__ = ("_origin", "_shown")

    def __init__(self, message: Entry, shown: Shown) -> None:
        super().__init__(None, message.topic.decode(), message.payload, message.qos)
        self._origin = message.origin
        self._shown = shown

    @property
    def source_session(self) -> AmqttSession | None:
        """The session of its publisher; of one that is shown no longer, only the client id."""
        if not self._origin:
            return None
        client_id = self._origin.decode()
        shown = self._shown.session_of(client_id)
        if shown is not None:
            return shown
        view = SessionView()
        view.client_id = client_id
        return view

    @source_session.setter
    def source_session(self, session: AmqttSession | None) -> None:
        """Amqtt's constructor sets it."""
