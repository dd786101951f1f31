"""What MQTT 5 has that the tables of packets do not show."""

import pytest
from hypothesis import given

from broker_ext.wire import (
    CONNACK_CODES,
    PROPERTIES,
    VERSIONS_ALL,
    Auth,
    Connack,
    Connect,
    ConnectWill,
    Decoder,
    Disconnect,
    Packet,
    Properties,
    Puback,
    Publish,
    Pubrec,
    Suback,
    Subscribe,
    SubscribeFilter,
    UnencodablePacket,
    Unsuback,
    UnsupportedVersion,
    encode,
    properties_field,
    read_forwarded,
    valid_reason,
)
from broker_ext.wire.errors import MalformedPacket
from broker_ext.wire.fields import Fields
from broker_ext.wire.kinds import CONNACK, PUBLISH, SUBACK, WILL
from broker_ext.wire.properties import (
    BINARY,
    FLAG,
    FORWARDED,
    FOUR,
    PAIR,
    TEXT,
    TWO,
    VARIABLE,
    read_properties,
)
from tests.wire import strategies

_RAW = {
    FLAG: b"\x01",
    TWO: b"\x00\x01",
    FOUR: b"\x00\x00\x00\x01",
    VARIABLE: b"\x01",
    BINARY: b"\x00\x01d",
    TEXT: b"\x00\x01t",
    PAIR: b"\x00\x01k\x00\x01v",
}

SOME = Properties(((31, b"no"),))


def test_mqtt_5_is_refused_unless_it_was_asked_for() -> None:
    reader = Decoder()
    reader.feed(encode(Connect(5, b"a")))
    assert isinstance(reader.error, UnsupportedVersion)
    assert reader.error.level == 5
    reader = Decoder(versions=VERSIONS_ALL)
    assert reader.feed(encode(Connect(5, b"a"))) == [Connect(5, b"a")]
    assert reader.version == 5


def test_versions_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="versions"):
        Decoder(versions=frozenset({4, 6}))
    with pytest.raises(ValueError, match="versions"):
        Decoder(version=6)


@pytest.mark.parametrize("ident", PROPERTIES)
@pytest.mark.parametrize("kind", range(1, WILL + 1))
def test_a_property_is_read_in_the_packets_that_may_carry_it_and_only_there(
    ident: int, kind: int
) -> None:
    rule = PROPERTIES[ident]
    alone = bytes((ident,)) + _RAW[rule.type]
    method = b"\x15\x00\x01m" if ident == 22 else b""  # data needs a method beside it
    if kind not in rule.kinds:
        with pytest.raises(MalformedPacket) as caught:
            read_properties(Fields(properties_field(alone)), kind)
        assert caught.value.reason_code == 0x81
        return
    found = read_properties(Fields(properties_field(alone + method)), kind)
    assert found is not None
    assert found.pairs[0][0] == ident
    if kind in rule.repeats:
        assert read_properties(Fields(properties_field(alone * 2)), kind) is not None
        return
    with pytest.raises(MalformedPacket) as caught:
        read_properties(Fields(properties_field(alone * 2 + method)), kind)
    assert caught.value.reason_code == 0x82


def test_what_goes_on_with_a_message_keeps_its_order_and_its_bytes() -> None:
    pairs = (
        (38, (b"b", b"1")),
        (2, 60),
        (9, b"\xff\x00"),
        (35, 3),
        (38, (b"a", b"2")),
        (8, b"r"),
        (11, 4),
        (1, 1),
        (38, (b"b", b"1")),
        (3, b"c"),
    )
    raw = Properties(pairs).forwarded()
    kept = read_forwarded(raw)
    assert kept == Properties(tuple(pair for pair in pairs if pair[0] not in (2, 35, 11)))
    body = b"\x00\x01t" + properties_field(raw) + b"x"
    (publish,) = Decoder(version=5).feed(bytes((0x30, len(body))) + body)
    assert publish == Publish(0, b"t", 0, b"x", kept)


def test_a_message_with_nothing_that_goes_on_has_no_bytes_for_it() -> None:
    assert Properties(((35, 3),)).forwarded() == b""
    assert read_forwarded(b"") is None


@given(strategies.properties(PUBLISH))
def test_what_goes_on_comes_back(found: Properties | None) -> None:
    if found is not None:
        kept = tuple(pair for pair in found.pairs if pair[0] in FORWARDED)
        assert read_forwarded(found.forwarded()) == (Properties(kept) if kept else None)


def test_properties_answer_by_id() -> None:
    found = Properties(((11, 5), (38, (b"k", b"v")), (11, 6)))
    assert found.get(11) == 5
    assert found.all(11) == (5, 6)
    assert found.get(35) is None
    assert found.get(33, 65_535) == 65_535
    assert found.all(35) == ()


@pytest.mark.parametrize(
    ("packet", "older"),
    [
        (Publish(2, b"t", 1, b"x", Properties(((3, b"c"),))), Publish(2, b"t", 1, b"x")),
        (Puback(1, 0x10, SOME), Puback(1)),
        (Pubrec(1, 0x87), Pubrec(1)),
        (Connack(True, 0, SOME), Connack(True)),
        (Suback(1, b"\x01\x87", SOME), Suback(1, b"\x01\x80")),
        (Unsuback(1, b"\x00\x11", SOME), Unsuback(1)),
        (Disconnect(0x8E, SOME), Disconnect()),
    ],
    ids=lambda packet: type(packet).__name__,
)
def test_what_an_older_version_cannot_say_is_left_out(packet: Packet, older: Packet) -> None:
    assert encode(packet, 4) == encode(older, 4)


@pytest.mark.parametrize(
    "packet",
    [
        Publish(0, b"t", 0, b"", Properties(((33, 1),))),
        Publish(0, b"t", 0, b"", Properties(((35, 0),))),
        Publish(0, b"t", 0, b"", Properties(((35, 65_536),))),
        Publish(0, b"t", 0, b"", Properties(((3, b"c"), (3, b"c")))),
        Publish(0, b"t", 0, b"", Properties(((99, b"c"),))),
        Publish(0, b"t", 0, b"", Properties(((1, 2),))),
        Publish(0, b"t", 0, b"", Properties(((2, -1),))),
        Puback(1, 0x92),
        Connack(False, 5),
        Suback(1, b"\x11"),
        Unsuback(1, b"\x01"),
        Disconnect(1),
        Auth(1),
        Connect(5, b"a", will=ConnectWill(b"w", b"", 0, False, Properties(((35, 1),)))),
    ],
    ids=repr,
)
def test_what_mqtt_5_cannot_say_is_refused(packet: Packet) -> None:
    with pytest.raises(UnencodablePacket):
        encode(packet, 5)


def test_what_only_mqtt_5_says_is_refused_before_it() -> None:
    with pytest.raises(UnencodablePacket):
        encode(Auth(), 4)
    with pytest.raises(UnencodablePacket):
        encode(Connack(False, 0x87), 4)
    with pytest.raises(UnencodablePacket):
        encode(Suback(1, b"\x03"), 4)


def test_reasons_depend_on_the_version() -> None:
    assert all(valid_reason(CONNACK, code, 4) for code in CONNACK_CODES)
    assert not valid_reason(CONNACK, 1, 5)
    assert valid_reason(CONNACK, 0x84, 5)
    assert valid_reason(SUBACK, 0x80, 4)
    assert not valid_reason(SUBACK, 0x87, 4)


def test_subscription_options_are_kept_whole() -> None:
    packet = Subscribe(1, (SubscribeFilter(b"a", 0x2D),))
    (found,) = Decoder(version=5).feed(encode(packet, 5))
    assert found == packet
    assert packet.filters[0].qos == 1


def test_a_topic_of_an_alias_is_not_remembered() -> None:
    reader = Decoder(version=5)
    packet = Publish(0, b"", 0, b"x", Properties(((35, 1),)))
    assert reader.feed(encode(packet, 5)) == [packet]
    assert b"" not in reader._names.known
