"""Whatever arrives, however it is cut: Hypothesis looks for what the tables forgot."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from broker_ext.wire import VERSIONS_ALL, Connect, Decoder, Packet, TopicNames, encode
from broker_ext.wire.bodies import check_header, read_packet
from broker_ext.wire.errors import MalformedPacket
from tests.wire import strategies
from tests.wire.cases import CASES, MALFORMED

streams = strategies.connects().flatmap(
    lambda connect: st.lists(strategies.from_clients(connect.version), max_size=8).map(
        lambda packets: [connect, *packets]
    )
)
answers = st.sampled_from((3, 4, 5)).flatmap(
    lambda version: st.tuples(
        st.just(version), st.lists(strategies.from_servers(version), min_size=1, max_size=8)
    )
)


def same(found: list[Packet], expected: list[Packet]) -> bool:
    return found == expected and [type(p) for p in found] == [type(p) for p in expected]


def encoded(packets: list[Packet]) -> bytes:
    connect = packets[0]
    assert isinstance(connect, Connect)
    return b"".join(encode(packet, connect.version) for packet in packets)


def feed_in_pieces(reader: Decoder, raw: bytes, cuts: list[int]) -> list[Packet]:
    edges = [0, *sorted(cut % (len(raw) + 1) for cut in cuts), len(raw)]
    pieces = [raw[start:stop] for start, stop in pairwise(edges)]
    return [packet for piece in pieces for packet in reader.feed(piece)]


def outcome(reader: Decoder) -> tuple[int, str] | None:
    return None if reader.error is None else (reader.error.reason_code, reader.error.clause)


@given(streams)
def test_what_a_client_says_comes_back(packets: list[Packet]) -> None:
    reader = Decoder(versions=VERSIONS_ALL)
    assert same(reader.feed(encoded(packets)), packets)
    assert reader.error is None
    assert reader.pending_bytes == 0


@given(answers)
def test_what_a_server_says_comes_back(said: tuple[int, list[Packet]]) -> None:
    version, packets = said
    reader = Decoder(server=False, version=version)
    raw = b"".join(encode(packet, version) for packet in packets)
    assert same(reader.feed(raw), packets)
    assert reader.error is None


@given(streams, st.lists(st.integers(0, 100_000), max_size=12))
def test_packets_do_not_depend_on_where_the_stream_is_cut(
    packets: list[Packet], cuts: list[int]
) -> None:
    reader = Decoder(versions=VERSIONS_ALL)
    assert same(feed_in_pieces(reader, encoded(packets), cuts), packets)


# Bytes that look like MQTT get further than bytes that are drawn one by one.
_rows = [row.raw for row in CASES if len(row.raw) < 200] + [row.raw for row in MALFORMED]
_noise = st.one_of(
    st.binary(max_size=60),
    st.lists(st.one_of(st.sampled_from(_rows), st.binary(max_size=4)), max_size=6).map(b"".join),
)
_sides = st.sampled_from(((True, 0), (True, 3), (True, 4), (True, 5), (False, 4), (False, 5)))


@given(_noise, _sides, st.lists(st.integers(0, 200), max_size=8))
def test_arbitrary_bytes_never_raise_and_end_the_same_however_they_are_cut(
    raw: bytes, side: tuple[bool, int], cuts: list[int]
) -> None:
    server, version = side
    whole = Decoder(server=server, version=version, versions=VERSIONS_ALL, packet_bytes_max=200)
    pieces = Decoder(server=server, version=version, versions=VERSIONS_ALL, packet_bytes_max=200)
    assert same(feed_in_pieces(pieces, raw, cuts), whole.feed(raw))
    assert outcome(pieces) == outcome(whole)
    assert pieces.pending_bytes == whole.pending_bytes


@given(_noise, _noise, _sides)
def test_after_an_error_there_is_nothing_more(
    raw: bytes, more: bytes, side: tuple[bool, int]
) -> None:
    server, version = side
    reader = Decoder(server=server, version=version, versions=VERSIONS_ALL)
    reader.feed(raw + b"\xf0\x00")
    error = reader.error
    if error is not None:
        assert reader.feed(more) == []
        assert reader.error is error
        assert reader.pending_bytes == 0


@given(
    st.sampled_from((*range(0x30, 0x40), 0x40, 0x50, 0x62, 0x70)),
    st.one_of(
        st.binary(max_size=12),
        st.builds(
            lambda size, rest: bytes((0, size)) + rest,
            st.integers(0, 4),
            st.lists(st.sampled_from(b"\0\1\2\x23ab+\xff"), max_size=9).map(bytes),
        ),
    ),
    st.sampled_from((3, 4, 5)),
)
def test_the_hot_loop_reads_what_the_careful_reader_reads(
    first: int, body: bytes, version: int
) -> None:
    reader = Decoder(version=version)
    raw = bytes((first, len(body))) + body
    found = reader.feed(raw)
    again = Decoder(version=version, names=reader._names).feed(raw)  # the topic is known by now
    assert same(found, again)
    expected: list[Packet] = []
    broken = None
    try:
        check_header(first, version, server=True)
        expected.append(read_packet(first, body, version, TopicNames()))
    except MalformedPacket as error:
        broken = (error.reason_code, error.clause)
    assert same(found, expected)
    assert outcome(reader) == broken
