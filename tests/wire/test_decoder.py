"""State, limits and memory of the decoder; names; what a repr shows."""

import pytest

from broker_ext.wire import (
    PACKET_ID,
    PUBACK_HEAD,
    Connect,
    ConnectWill,
    Decoder,
    Packet,
    Pingreq,
    Properties,
    Publish,
    TopicNames,
    UnencodablePacket,
    UnsupportedVersion,
    connack,
    encode,
    publish_head,
    valid_filter,
    variable_length,
)

CONNECT = encode(Connect(4, b"a"))


def test_the_version_is_learnt_from_connect_in_the_chunk_that_holds_it() -> None:
    reader = Decoder()
    packets = reader.feed(CONNECT + encode(Publish(2, b"t", 1, b"x")))
    assert [type(packet) for packet in packets] == [Connect, Publish]
    assert reader.version == 4


def test_an_unknown_level_is_told_with_its_number() -> None:
    reader = Decoder()
    assert reader.feed(b"\x10\x08\x00\x04MQTT\x09\x02") == []
    assert isinstance(reader.error, UnsupportedVersion)
    assert reader.error.level == 9


def test_a_level_that_this_broker_does_not_accept_is_unsupported() -> None:
    reader = Decoder(versions=frozenset({3}))
    reader.feed(CONNECT)
    assert isinstance(reader.error, UnsupportedVersion)
    assert reader.error.level == 4


def test_a_packet_too_large_is_refused_at_its_fixed_header() -> None:
    reader = Decoder(version=4, packet_bytes_max=1_000)
    fits = encode(Publish(0, b"t", 0, bytes(994)))
    assert len(fits) == 1_000
    assert len(reader.feed(fits)) == 1
    assert reader.feed(b"\x30\xe6\x07") == []
    assert reader.error is not None
    assert reader.error.reason_code == 0x95
    assert reader.pending_bytes == 0


def test_a_connect_too_large_is_refused_at_its_fixed_header() -> None:
    reader = Decoder(packet_bytes_max=1_000)
    reader.feed(b"\x10\xff\xff\xff\x7f")
    assert reader.error is not None
    assert reader.error.reason_code == 0x95


def test_a_limit_below_what_one_length_byte_says_is_refused() -> None:
    with pytest.raises(ValueError, match="packet_bytes_max"):
        Decoder(packet_bytes_max=128)


@pytest.mark.parametrize("head", [b"\x20\x7f", b"\x36\x7f", b"\x38\xff\xff", b"\xf0\xff"])
def test_a_packet_refused_for_its_first_byte_is_not_buffered(head: bytes) -> None:
    reader = Decoder(version=4)
    reader.feed(head)
    assert reader.error is not None
    assert reader.pending_bytes == 0


def test_before_connect_nothing_else_is_buffered() -> None:
    reader = Decoder()
    reader.feed(b"\x30")
    assert reader.error is not None


class CountingBuffer(bytearray):
    """Counts the bytes that are copied out of a decoder's buffer."""

    copied = 0

    def __bytes__(self) -> bytes:
        CountingBuffer.copied += len(self)
        return bytes(memoryview(self))


def test_a_large_packet_in_small_pieces_is_copied_a_constant_number_of_times() -> None:
    raw = encode(Publish(2, b"t", 1, bytes(8_000_000)))
    reader = Decoder(version=4)
    reader._pending = CountingBuffer()
    CountingBuffer.copied = 0
    found = []
    for at in range(0, len(raw), 1_000):
        found += reader.feed(raw[at : at + 1_000])
    assert len(found) == 1
    assert len(raw) <= CountingBuffer.copied < 2 * len(raw)


def test_an_error_does_not_keep_the_chunk_alive() -> None:
    reader = Decoder(version=4)
    reader.feed(b"\xf0\x00" + bytes(1_000))
    assert reader.error is not None
    assert reader.error.__traceback__ is None
    assert reader.error.__cause__ is None


def test_an_error_shows_nothing_of_the_packet() -> None:
    reader = Decoder(version=4)
    reader.feed(b"\x30\x0b\x00\x09secret\xff\x00x")
    assert reader.error is not None
    assert "secret" not in f"{reader.error} {reader.error!r}"
    assert reader.error.__context__ is None or reader.error.__suppress_context__


def test_equal_topics_are_one_object_across_connections() -> None:
    names = TopicNames()
    raw = encode(Publish(2, b"a/b", 1, b"x")) + encode(Publish(0, b"a/b", 0, b"x"))
    found = Decoder(version=4, names=names).feed(raw) + Decoder(version=4, names=names).feed(raw)
    topics = [packet.topic for packet in found if isinstance(packet, Publish)]
    assert len(topics) == 4
    assert all(topic is topics[0] for topic in topics)


def test_names_are_bounded_by_count() -> None:
    names = TopicNames(names_max=10)
    for number in range(100):
        names.admit(b"t/%d" % number)
        assert len(names.known) <= 10


def test_names_are_bounded_by_bytes() -> None:
    names = TopicNames(bytes_max=1_000)
    for number in range(100):
        names.admit(b"%0300d" % number)
        assert sum(map(len, names.known)) <= 1_000


def test_a_decoder_goes_on_when_the_names_are_forgotten() -> None:
    reader = Decoder(version=4, names=TopicNames(names_max=2))
    raws = [encode(Publish(2, b"t%d" % (number % 5), 1, b"x")) for number in range(50)]
    assert len(reader.feed(b"".join(raws))) == 50


@pytest.mark.parametrize(
    "good", ["#", "+", "/", "a", "a/#", "a/+/b", "+/+/#", "/#", "a//b", "$SYS/#", "\u20ac/+"]
)
def test_a_filter_with_wildcards_in_their_places_is_valid(good: str) -> None:
    assert valid_filter(good.encode())


@pytest.mark.parametrize("bad", ["", "a#", "a/#/b", "#/a", "a+", "+a/b", "a/b+/c", "##", "a/b#"])
def test_a_filter_with_misplaced_wildcards_is_not_valid(bad: str) -> None:
    assert not valid_filter(bad.encode())


def test_no_repr_shows_a_payload_or_a_password() -> None:
    will = ConnectWill(b"will", b"secret", 1, False, Properties(((0x16, b"secret"),)))
    connect = Connect(5, b"id", True, 0, b"user", b"secret", will, Properties(((9, b"secret"),)))
    publish = Publish(2, b"t", 1, b"secret", Properties(((38, (b"secret", b"secret")),)))
    for packet in (connect, will, publish, [connect], (publish,)):
        assert "secret" not in f"{packet} {packet!r}"
    assert "b'user'" in repr(connect)
    assert "b't'" in repr(publish)


def test_flags_of_a_publish_have_names() -> None:
    publish = Publish(0b1101, b"t", 1, b"")
    assert (publish.qos, publish.retain, publish.dup) == (2, True, True)
    publish = Publish(0b0010, b"t", 1, b"")
    assert (publish.qos, publish.retain, publish.dup) == (1, False, False)


@pytest.mark.parametrize("payload_bytes", [0, 100, 120, 121, 200, 16_379, 70_000, 2_097_150])
def test_the_head_of_a_publish_and_its_rest_are_what_encode_makes(payload_bytes: int) -> None:
    payload = bytes(payload_bytes)
    raw = publish_head(0x32, b"a/b", 2 + payload_bytes) + PACKET_ID[7] + payload
    assert raw == encode(Publish(2, b"a/b", 7, payload))


def test_the_pieces_for_answers_are_what_encode_makes() -> None:
    assert PUBACK_HEAD + PACKET_ID[515] == b"\x40\x02\x02\x03"
    assert connack(True) == b"\x20\x02\x01\x00"
    assert connack(False, 5) == b"\x20\x02\x00\x05"


@pytest.mark.parametrize(
    ("number", "raw"),
    [
        (0, b"\x00"),
        (127, b"\x7f"),
        (128, b"\x80\x01"),
        (16_383, b"\xff\x7f"),
        (16_384, b"\x80\x80\x01"),
        (2_097_151, b"\xff\xff\x7f"),
        (2_097_152, b"\x80\x80\x80\x01"),
        (268_435_455, b"\xff\xff\xff\x7f"),
    ],
)
def test_a_length_takes_as_few_bytes_as_can_be(number: int, raw: bytes) -> None:
    assert variable_length(number) == raw


def test_what_cannot_be_said_is_refused() -> None:
    long = bytes(65_536)
    impossible: list[Packet] = [
        Publish(0, long, 0, b""),
        Publish(6, b"t", 1, b""),
        Publish(8, b"t", 0, b""),
        Publish(2, b"t", 0, b""),
        Publish(2, b"t", 65_536, b""),
        Connect(4, long),
        Connect(6, b"a"),
        Connect(4, b"a", password=b"p"),
        Connect(4, b"a", keep_alive_s=65_536),
        Connect(4, b"a", will=ConnectWill(b"w", b"", 3, False)),
    ]
    for packet in impossible:
        with pytest.raises(UnencodablePacket):
            encode(packet)
    with pytest.raises(UnencodablePacket):
        publish_head(0x30, b"t", 268_435_455)
    with pytest.raises(ValueError, match="length"):
        variable_length(268_435_456)


def test_a_client_decoder_reads_any_order() -> None:
    assert Decoder(server=False).feed(b"\x30\x03\x00\x01a\x20\x02\x00\x00") == [
        Publish(0, b"a", 0, b""),
        (False, 0, None),
    ]


def test_packets_behind_an_empty_chunk_are_read() -> None:
    reader = Decoder()
    assert reader.feed(b"") == []
    assert len(reader.feed(CONNECT)) == 1
    assert reader.feed(b"") == []
    assert [type(packet) for packet in reader.feed(b"\xc0\x00")] == [Pingreq]
