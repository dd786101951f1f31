"""What amqtt's plugin contexts show: sessions, their subscriptions, retained messages."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

from amqtt.broker import RetainedApplicationMessage
from amqtt.events import BrokerEvents

from broker_ext.on_behalf import STRING_BYTES_MAX
from broker_ext.seam.views import HandlerView, RetainedView, SessionView
from broker_ext.wire import MalformedPacket, check_topic

if TYPE_CHECKING:
    from amqtt.session import Session as AmqttSession

    from broker_ext.retained import RetainedStore
    from broker_ext.seam.plugins import Plugins
    from storage.api import Entry

__all__ = ["Shown", "check_name", "check_qos"]

AT_REST_SHOWN_MAX: Final = 100
"""Sessions at rest that ``context.sessions`` goes on showing, about 1 kB each; the stored ones are
not limited by it. amqtt shows all of them for ever, which costs memory for each."""


class Shown:
    """What one broker's contexts show. Implements ``retained.RetainedMirror``."""

    def __init__(self, broker: Any, plugins: Plugins, retained: RetainedStore) -> None:
        self._broker = broker
        self._plugins = plugins
        self._at_rest: OrderedDict[str, SessionView] = OrderedDict()
        self._retained = broker._retained_messages = _RetainedMessages(retained)
        retained.mirror = self
        broker.create_offline_session = self._create_offline_session
        broker._cleanup_session = self._cleanup_session

    # --------------------------------------------------------------------------- sessions

    def session_of(self, client_id: str) -> AmqttSession | None:
        """The session that is shown of a client."""
        view: AmqttSession | None
        view, _ = self._broker._sessions.get(client_id, (None, None))
        return view

    def show_session(
        self, view: SessionView, handler: HandlerView
    ) -> list[RetainedApplicationMessage]:
        """Show a connected client in ``context.sessions``. Returns what plugins had put into the
        queue of its session at rest (``retained_messages``, as amqtt's SessionDBPlugin does)."""
        client_id = str(view.client_id)
        queued: list[RetainedApplicationMessage] = []
        shown, _ = self._broker._sessions.get(client_id, (None, None))
        if shown is not None:
            self.hide_session(shown)
            queued = shown.take_queued()
        self._broker._sessions[client_id] = (view, handler)
        return queued

    def show_at_rest(self, view: SessionView, *, kept: bool) -> None:
        """Its client left: show it, as amqtt does, until amqtt's monitor takes it away; which it
        does within a second but for durable sessions of named users. kept: it may be one of those,
        which are shown until AT_REST_SHOWN_MAX others have come to rest after it."""
        client_id = str(view.client_id)
        shown = self._broker._sessions.get(client_id)
        if shown is not None:
            if shown[0] is not view:
                return  # taken over: the newer connection is shown
            self._broker._sessions[client_id] = (view, HandlerView(None))
        if not kept:
            return
        self._at_rest[client_id] = view
        self._at_rest.move_to_end(client_id)
        while len(self._at_rest) > AT_REST_SHOWN_MAX:
            _, oldest = self._at_rest.popitem(last=False)
            self.hide_session(oldest)

    def _create_offline_session(self, client_id: str) -> tuple[HandlerView, SessionView]:
        view = SessionView()
        view.client_id = client_id
        view.disconnect()
        self.show_at_rest(view, kept=True)
        return HandlerView(None), view

    async def _cleanup_session(self, client_id: str) -> None:
        """In place of amqtt's, which looks through all subscriptions for each session."""
        view, handler = self._broker._sessions.get(client_id, (None, None))
        if view is not None:
            await handler.stop()
            self.hide_session(view)

    def hide_session(self, view: SessionView) -> None:
        """Show a session no longer, nor its subscriptions."""
        client_id = str(view.client_id)
        if self._broker._sessions.get(client_id, (None,))[0] is view:
            del self._broker._sessions[client_id]
        if self._at_rest.get(client_id) is view:
            del self._at_rest[client_id]
        for topic_filter in list(view.shown):
            self.hide_subscription(topic_filter, view)

    # ---------------------------------------------------------------------- subscriptions

    def show_subscription(self, topic_filter: str, view: SessionView, qos: int) -> None:
        """Show a subscription in ``context.subscriptions``."""
        shown = self._broker._subscriptions.setdefault(topic_filter, [])
        if topic_filter in view.shown:
            shown[:] = [(s, qos if s is view else q) for s, q in shown]
        else:
            view.shown.add(topic_filter)
            shown.append((view, qos))

    def hide_subscription(self, topic_filter: str, view: SessionView) -> None:
        """Undo ``show_subscription``."""
        view.shown.discard(topic_filter)
        subscriptions = self._broker._subscriptions
        shown = subscriptions.get(topic_filter)
        if shown is None:
            return
        for i, (session, _) in enumerate(shown):
            if session is view:
                del shown[i]
                break
        if not shown:
            del subscriptions[topic_filter]

    # -------------------------------------------------------------------------- retained

    def retained_changed(self, message: Entry, *, loaded: bool) -> None:
        """Keep ``context.retained_messages`` true."""
        shown = RetainedView(message, self)
        if message.payload:
            self._retained.show(shown)
        else:
            self._retained.hide(shown.topic)
        if not loaded:
            self._plugins.fire(
                BrokerEvents.RETAINED_MESSAGE, client_id=None, retained_message=shown
            )


class _RetainedMessages(dict[str, RetainedApplicationMessage]):
    """``context.retained_messages``. What a plugin sets or deletes is retained or removed; that
    amqtt clears it when it stops is none of our business."""

    def __init__(self, retained: RetainedStore) -> None:
        super().__init__()
        self._retained = retained

    def __setitem__(self, topic: str, message: RetainedApplicationMessage) -> None:
        check_name(topic)
        check_qos(message.qos or 0)
        self._retained.keep(topic.encode(), bytes(message.data or b""), message.qos or 0)

    def __delitem__(self, topic: str) -> None:
        if topic not in self:
            raise KeyError(topic)
        self._retained.keep(topic.encode(), b"", 0)

    def show(self, message: RetainedApplicationMessage) -> None:
        super().__setitem__(message.topic, message)

    def hide(self, topic: str) -> None:
        super().pop(topic, None)


def check_name(topic: str) -> None:
    """Raise ValueError if a plugin names a topic that nothing can be published to."""
    try:
        check_topic(topic.encode())
    except MalformedPacket as error:
        raise ValueError(str(error)) from error
    if len(topic.encode()) > STRING_BYTES_MAX:  # it could not be stored, and all would wait for it
        raise ValueError("a topic name is longer than a string of MQTT")


def check_qos(qos: int) -> None:
    """Raise ValueError if it is none."""
    if qos not in (0, 1, 2):
        raise ValueError(f"QoS {qos!r} is none")
