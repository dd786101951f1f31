"""The one room that touches amqtt's insides.

``known`` lists every attribute of amqtt that is used here and is not documented for plugins, as
read in amqtt 0.12.1. They are compared with the installed amqtt before anything is replaced, so
that an upgrade fails by name before it fails a device; ``tests/seam/test_check.py`` pins each.

How it works: in ``on_broker_pre_start``, before the listeners bind, the connection callbacks of the
broker object (``stream_connected``, ``ws_connected``, ``external_connected``) are replaced by ours,
and so are the calls behind its plugin contexts. amqtt stays the broker: listeners, TLS, YAML,
authentication and topic plugins, events, ``$SYS``.

    seam       our hand on one broker: puts the others together
    known      the amqtt that we know
    starting   a start that fails fails, a listening broker and its process
    listeners  in place of its connection callbacks
    guard      its plugins, for one connection: asked and told
    plugins    its plugins: what is asked, and what is told
    contexts   in place of what plugin contexts call
    shown      what plugin contexts show
    views      amqtt's objects, for its plugins to look at

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
                            session is in the history, once for all, and a plugin that keeps what
                            the event has (SessionDBPlugin) would have it delivered once more

amqtt knows MQTT 3.1.1. Of an MQTT 5 client its plugins see what that version can say: packets
without properties (``broker_ext.older``), messages as ever, ``session.clean_session`` for "its
session ends with its connection", whatever Clean Start was. Its authentication plugins are asked as
for any other client, but for one that names an Authentication Method
(``broker_ext.authentication``).

Mind: amqtt schedules ``on_*`` events without waiting and drops what they raise; so nothing here
that a promise hangs on is an event.
"""

from __future__ import annotations

from broker_ext.seam.known import SeamError, broker_of
from broker_ext.seam.seam import Seam
from broker_ext.seam.starting import read_by

__all__ = ["Seam", "SeamError", "broker_of", "read_by"]
