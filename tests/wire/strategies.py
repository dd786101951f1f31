"""Arbitrary packets, as Hypothesis makes them."""

from hypothesis import strategies as st

from broker_ext.wire import (
    Connack,
    Connect,
    ConnectWill,
    Disconnect,
    Packet,
    Pingreq,
    Pingresp,
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

wills = st.tuples(topics, st.binary(max_size=50), qos, st.booleans()).map(
    lambda drawn: ConnectWill(*drawn)
)


@st.composite
def connects(draw: st.DrawFn, versions: tuple[int, ...] = (3, 4)) -> Connect:
    username = draw(st.none() | texts)
    password = None if username is None else draw(st.none() | st.binary(max_size=20))
    return Connect(
        draw(st.sampled_from(versions)),
        draw(texts),
        draw(st.booleans()),
        draw(st.integers(0, 65_535)),
        username,
        password,
        draw(st.none() | wills),
    )


@st.composite
def publishes(draw: st.DrawFn) -> Publish:
    level = draw(qos)
    flags = level << 1 | draw(st.booleans()) | (draw(st.booleans()) << 3 if level else 0)
    packet_id = draw(packet_ids) if level else 0
    return Publish(flags, draw(topics), packet_id, draw(payloads))


_acknowledgements: list[st.SearchStrategy[Packet]] = [
    packet_ids.map(kind) for kind in (Puback, Pubrec, Pubrel, Pubcomp)
]

subscribes = st.tuples(
    packet_ids, st.lists(st.builds(SubscribeFilter, filters, qos), min_size=1, max_size=5)
).map(lambda drawn: Subscribe(drawn[0], tuple(drawn[1])))
unsubscribes = st.tuples(packet_ids, st.lists(filters, min_size=1, max_size=5)).map(
    lambda drawn: Unsubscribe(drawn[0], tuple(drawn[1]))
)

from_clients: st.SearchStrategy[Packet] = st.one_of(
    publishes(),
    *_acknowledgements,
    subscribes,
    unsubscribes,
    st.just(Pingreq()),
    st.just(Disconnect()),
)

from_servers: st.SearchStrategy[Packet] = st.one_of(
    publishes(),
    *_acknowledgements,
    st.just(Connack(True)),
    st.integers(0, 5).map(lambda reason: Connack(False, reason)),
    st.tuples(
        packet_ids, st.lists(st.sampled_from((0, 1, 2, 128)), min_size=1, max_size=9).map(bytes)
    ).map(lambda drawn: Suback(*drawn)),
    packet_ids.map(Unsuback),
    st.just(Pingresp()),
)
