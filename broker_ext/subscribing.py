"""SUBSCRIBE and UNSUBSCRIBE of one client: what is asked for, who has to be asked, the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from broker_ext.feed import BadAskError, ask_of
from broker_ext.options import NO_LOCAL, gives_retained
from broker_ext.reasons import NO_WORDS, Reason, Words
from broker_ext.session import End, Grant
from broker_ext.shared import filter_of
from broker_ext.terms import not_available
from broker_ext.version5 import with_words
from broker_ext.wire import Suback, Unsuback
from broker_ext.wire.properties import SUBSCRIPTION_ID, USER_PROPERTY
from storage.names import is_shared

if TYPE_CHECKING:
    from broker_ext.connection import Connection
    from broker_ext.session import Session
    from broker_ext.settings import Settings
    from broker_ext.wire import Subscribe, Unsubscribe

__all__ = ["subscribe", "subscribe_now", "unsubscribe"]

NO_LOCAL_SHARED: Final = End("no local on a shared subscription", reason=Reason.PROTOCOL_ERROR)
NOT_SAVED: Final = End("unsubscribe not saved")


def subscribe_now(connection: Connection, session: Session, packet: Subscribe) -> bool:
    """Have subscriptions that nobody must be asked for in force as soon as they are read: so a
    message that another client sends after them is delivered. False: they have to wait."""
    if session.durable or (packet.properties and packet.properties.get(USER_PROPERTY)):
        return False
    if any(is_shared(wanted.filter) for wanted in packet.filters):
        return False
    grants = _grants(connection.hub.settings, session, packet)
    codes = session.subscribe_now(grants)
    _subscribed(connection, session, packet, grants, codes, NO_WORDS)
    return True


async def subscribe(connection: Connection, session: Session, packet: Subscribe) -> None:
    """Ask the topic plugins, have it saved, answer; or end the connection."""
    if any(options & NO_LOCAL and is_shared(name) for name, options in packet.filters):
        connection.finish(NO_LOCAL_SHARED)  # [MQTT5-3.8.3-4]
        return
    grants = _grants(connection.hub.settings, session, packet)
    for i, grant in enumerate(grants):
        # of a group the topic plugins are asked for what it shares
        plain = filter_of(grant.filter) if is_shared(grant.filter) else grant.filter
        if grant.allowed and not (plain and await connection.guard.may_subscribe(plain)):
            grants[i] = grant._replace(allowed=False, code=Reason.NOT_AUTHORIZED)
    words = NO_WORDS
    try:
        ask = ask_of(packet.properties)
    except BadAskError as error:
        codes = [Reason.IMPLEMENTATION if g.allowed else g.code for g in grants]
        words = error.words
    else:
        if ask is None:
            codes = await session.subscribe(grants)
        else:
            grants = [_without_position(grant) for grant in grants]
            codes, words = await session.read_history(grants, ask)
    _subscribed(connection, session, packet, grants, codes, words)


def _grants(settings: Settings, session: Session, packet: Subscribe) -> list[Grant]:
    identifier = packet.properties.get(SUBSCRIPTION_ID, 0) if packet.properties else 0
    grants: list[Grant] = []
    for topic_filter, options in packet.filters:
        code = not_available(topic_filter, identifier, settings)
        qos = min(options & 3, settings.max_qos)
        gives = not is_shared(topic_filter) and gives_retained(  # MQTT 5, 3.8.4
            options, existed=topic_filter in session.subscriptions
        )
        grants.append(Grant(topic_filter, qos, not code, options & ~3, identifier, code, gives))
    return grants


def _without_position(grant: Grant) -> Grant:
    """A group has its own position: a client cannot bring one to a shared subscription."""
    if grant.allowed and is_shared(grant.filter):
        return grant._replace(allowed=False, code=Reason.IMPLEMENTATION)
    return grant


def _subscribed(
    connection: Connection,
    session: Session,
    packet: Subscribe,
    grants: list[Grant],
    codes: list[int],
    words: Words,
) -> None:
    if session.sealed or connection.closed:
        return
    connection.send(Suback(packet.packet_id, bytes(codes), with_words(words)))
    granted = [g for g, code in zip(grants, codes, strict=True) if code < Reason.UNSPECIFIED]
    for grant in granted:
        connection.guard.subscribed(grant.filter, grant.qos)
    session.give_retained(granted)
    session.start_reading()


async def unsubscribe(connection: Connection, session: Session, packet: Unsubscribe) -> None:
    """Have it saved, and answer."""
    codes = await session.unsubscribe(list(packet.filters))
    if connection.version < 5 and max(codes) >= Reason.UNSPECIFIED:
        # 3.1.1 has no "failed" in UNSUBACK: close, so that the client tries again
        connection.finish(NOT_SAVED)
        return
    if session.sealed or connection.closed:
        return
    for topic_filter, code in zip(packet.filters, codes, strict=True):
        if code < Reason.UNSPECIFIED:
            connection.guard.unsubscribed(topic_filter)
    connection.send(Unsuback(packet.packet_id, bytes(codes)))
