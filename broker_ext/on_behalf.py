"""Subscriptions that a plugin makes for a client, connected or not.

For one who is not connected it is done in the line of its CONNECTs, as one that owns the record for
a moment and leaves it as it was, but for the subscription.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Final

from broker_ext.registry import GaveUpError
from broker_ext.session import REFUSED
from broker_ext.wire import valid_filter
from storage.api import (
    INCARNATION_BYTES,
    UNCLAIMED,
    Acquire,
    Acquired,
    Detach,
    Subscribe,
    Subscription,
)
from storage.errors import StoreError

if TYPE_CHECKING:
    from broker_ext.hub import Hub
    from broker_ext.session import Grant
    from broker_ext.settings import Settings
    from storage.api import Outcome

__all__ = ["STRING_BYTES_MAX", "could_subscribe", "subscribe"]

log = logging.getLogger("amqtt_durable.on_behalf")

STRING_BYTES_MAX: Final = 65_535
"""Of a string in a packet [MQTT-1.5.3]."""


def could_subscribe(settings: Settings, client_id: bytes, topic_filter: bytes, qos: int) -> bool:
    """Whether a client could have sent this SUBSCRIBE: what the decoder sees to otherwise."""
    return (
        0 < len(client_id) <= settings.max_client_id_bytes
        and len(topic_filter) <= STRING_BYTES_MAX
        and b"\0" not in client_id + topic_filter
        and valid_filter(topic_filter)
        and not topic_filter.startswith(b"$share/")
        and qos in (0, 1, 2)
    )


async def subscribe(hub: Hub, client_id: bytes, grant: Grant) -> int:
    """Subscribe a client: in its session if it is connected, else in its durable one, which is made
    if there is none and belongs to the user who connects first. Returns the SUBACK return code."""
    if client_id not in hub.registry.owners:
        try:
            async with hub.registry.turn(client_id):
                if client_id not in hub.registry.owners:
                    return await _subscribe_at_rest(hub, client_id, grant)
        except GaveUpError:
            return REFUSED
        if client_id not in hub.registry.owners:
            return REFUSED
    return (await hub.registry.owners[client_id].subscribe([grant]))[0]


async def _subscribe_at_rest(hub: Hub, client_id: bytes, grant: Grant) -> int:
    """In its turn: own the record for a moment, as a CONNECT would."""
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


def _detached(outcome: Outcome) -> None:
    if isinstance(outcome, BaseException):
        log.error("a subscription's session could not be let go: %s", outcome)
