"""Arbitrary packets, as Hypothesis makes them."""

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from broker_ext.wire import (
    PROPERTIES,
    Auth,
    Connack,
    Connect,
    ConnectWill,
    Disconnect,
    Packet,
    Pingreq,
    Pingresp,
    Properties,
    PropertyValue,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Suback,
    Subscribe,
    SubscribeFilter,
    Unsuback,
    Unsubscribe,
    valid_reason,
)
from broker_ext.wire.kinds import (
    AUTH,
    CONNACK,
    CONNECT,
    DISCONNECT,
    PUBACK,
    PUBCOMP,
    PUBLISH,
    PUBREC,
    PUBREL,
    SUBACK,
    SUBSCRIBE,
    UNSUBACK,
    UNSUBSCRIBE,
    WILL,
)
from broker_ext.wire.properties import (
    AUTHENTICATION_DATA,
    AUTHENTICATION_METHOD,
    BINARY,
    FLAG,
    FOUR,
    PAIR,
    RESPONSE_TOPIC,
    SUBSCRIPTION_ID,
    TEXT,
    TOPIC_ALIAS,
    TWO,
    VARIABLE,
    ValueType,
)

_characters = st.characters(codec="utf-8", exclude_characters="\0")
texts = st.text(_characters, max_size=20).map(str.encode)
filters = st.text(_characters, min_size=1, max_size=20).map(str.encode)
topics = (
    st.one_of(st.sampled_from(("a", "a/b")), st.text(_characters, min_size=1, max_size=40))
    .map(lambda text: text.replace("+", "-").replace("#", "-"))
    .map(str.encode)
)
payloads = st.one_of(st.binary(max_size=200), st.integers(0, 40_000).map(bytes))
packet_ids = st.integers(1, 65_535)
qos = st.integers(0, 2)

strings = st.text(_characters, max_size=10).map(str.encode)
_VALUES: dict[ValueType, st.SearchStrategy[Any]] = {
    FLAG: st.integers(0, 1),
    TWO: st.integers(1, 0xFFFF),
    FOUR: st.integers(1, 0xFFFF_FFFF),
    VARIABLE: st.integers(1, 268_435_455),
    BINARY: st.binary(max_size=10),
    TEXT: strings,
    PAIR: st.tuples(strings, strings),
}


@st.composite
def properties(draw: st.DrawFn, kind: int, *, server: bool = False) -> Properties | None:
    """Properties that a packet of this kind may carry, in any order."""
    allowed = [ident for ident, rule in PROPERTIES.items() if kind in rule.kinds]
    if kind == PUBLISH and not server:
        allowed.remove(SUBSCRIPTION_ID)
    pairs: list[tuple[int, PropertyValue]] = []
    for ident in draw(st.lists(st.sampled_from(allowed), max_size=6)):
        rule = PROPERTIES[ident]
        if ident in (found for found, _ in pairs) and kind not in rule.repeats:
            continue
        pairs.append((ident, draw(topics if ident == RESPONSE_TOPIC else _VALUES[rule.type])))
    idents = [ident for ident, _ in pairs]
    if AUTHENTICATION_DATA in idents and AUTHENTICATION_METHOD not in idents:
        pairs.append((AUTHENTICATION_METHOD, b"m"))
    return Properties(tuple(pairs)) if pairs else None


def reasons(kind: int, version: int) -> st.SearchStrategy[int]:
    return st.sampled_from([code for code in range(256) if valid_reason(kind, code, version)])


def maybe(kind: int, version: int, *, server: bool = False) -> st.SearchStrategy[Any]:
    return properties(kind, server=server) if version == 5 else st.none()


@st.composite
def connects(draw: st.DrawFn) -> Connect:
    version = draw(st.sampled_from((3, 4, 5)))
    username = draw(st.none() | texts)
    password = draw(st.none() | st.binary(max_size=20))
    will = ConnectWill(
        draw(topics),
        draw(st.binary(max_size=50)),
        draw(qos),
        draw(st.booleans()),
        draw(maybe(WILL, version)),
    )
    return Connect(
        version,
        draw(texts),
        draw(st.booleans()),
        draw(st.integers(0, 65_535)),
        username,
        None if username is None and version < 5 else password,
        draw(st.sampled_from((None, will))),
        draw(maybe(CONNECT, version)),
    )


@st.composite
def publishes(draw: st.DrawFn, version: int, *, server: bool = False) -> Publish:
    level = draw(qos)
    flags = level << 1 | draw(st.booleans()) | (draw(st.booleans()) << 3 if level else 0)
    packet_id = draw(packet_ids) if level else 0
    found = draw(maybe(PUBLISH, version, server=server))
    aliased = found is not None and found.get(TOPIC_ALIAS) is not None
    topic = draw(topics | st.just(b"")) if aliased else draw(topics)
    return Publish(flags, topic, packet_id, draw(payloads), found)


def _acknowledgement(
    version: int, kind: int, cls: Callable[[int, int, Properties | None], Packet]
) -> st.SearchStrategy[Packet]:
    said = reasons(kind, version) if version == 5 else st.just(0)
    return st.tuples(packet_ids, said, maybe(kind, version)).map(lambda drawn: cls(*drawn))


def _acknowledgements(version: int) -> list[st.SearchStrategy[Packet]]:
    return [
        _acknowledgement(version, PUBACK, Puback),
        _acknowledgement(version, PUBREC, Pubrec),
        _acknowledgement(version, PUBREL, Pubrel),
        _acknowledgement(version, PUBCOMP, Pubcomp),
    ]


def _endings(version: int) -> list[st.SearchStrategy[Packet]]:
    if version < 5:
        return []
    return [
        st.tuples(reasons(DISCONNECT, 5), properties(DISCONNECT)).map(lambda d: Disconnect(*d)),
        st.tuples(reasons(AUTH, 5), properties(AUTH)).map(lambda drawn: Auth(*drawn)),
    ]


def _options(version: int) -> st.SearchStrategy[int]:
    if version < 5:
        return qos
    return st.tuples(qos, st.integers(0, 3), st.integers(0, 2)).map(
        lambda drawn: drawn[0] | drawn[1] << 2 | drawn[2] << 4
    )


def from_clients(version: int) -> st.SearchStrategy[Packet]:
    """Packets that a server may receive after CONNECT."""
    subscribed = st.tuples(filters, _options(version)).map(lambda d: SubscribeFilter(*d))
    return st.one_of(
        publishes(version),
        *_acknowledgements(version),
        st.tuples(
            packet_ids, st.lists(subscribed, min_size=1, max_size=5), maybe(SUBSCRIBE, version)
        ).map(lambda drawn: Subscribe(drawn[0], tuple(drawn[1]), drawn[2])),
        st.tuples(
            packet_ids, st.lists(filters, min_size=1, max_size=5), maybe(UNSUBSCRIBE, version)
        ).map(lambda drawn: Unsubscribe(drawn[0], tuple(drawn[1]), drawn[2])),
        st.just(Pingreq()),
        st.just(Disconnect()),
        *_endings(version),
    )


def from_servers(version: int) -> st.SearchStrategy[Packet]:
    """Packets that a client may receive."""
    suback = st.lists(reasons(SUBACK, version), min_size=1, max_size=9).map(bytes)
    unsuback = st.just(b"")
    if version == 5:
        unsuback = st.lists(reasons(UNSUBACK, version), min_size=1, max_size=9).map(bytes)
    return st.one_of(
        publishes(version, server=True),
        *_acknowledgements(version),
        maybe(CONNACK, version).map(lambda found: Connack(True, 0, found)),
        st.tuples(st.just(False), reasons(CONNACK, version), maybe(CONNACK, version)).map(
            lambda drawn: Connack(*drawn)
        ),
        st.tuples(packet_ids, suback, maybe(SUBACK, version)).map(lambda drawn: Suback(*drawn)),
        st.tuples(packet_ids, unsuback, maybe(UNSUBACK, version)).map(lambda d: Unsuback(*d)),
        st.just(Pingresp()),
        *_endings(version),
    )
