"""Every row of the tables, whole, in pieces, cut short, and with something behind it."""

import pytest

from broker_ext.wire import VERSIONS_ALL, Decoder, MalformedPacket, Packet, encode
from tests.wire.cases import CASES, LENIENT, MALFORMED, Case, Malformed

each_case = pytest.mark.parametrize("case", CASES + LENIENT, ids=lambda case: case.name)
each_malformed = pytest.mark.parametrize("row", MALFORMED, ids=lambda row: row.name)


def decoder(row: Case | Malformed) -> Decoder:
    return Decoder(server=row.server, version=row.version, versions=VERSIONS_ALL)


def same(found: list[Packet], expected: list[Packet]) -> bool:
    """Equal as tuples is not enough: all acknowledgements of one id are."""
    return found == expected and [type(p) for p in found] == [type(p) for p in expected]


def trailer(row: Case | Malformed) -> tuple[bytes, Packet]:
    after = next(case for case in CASES if case.raw == (b"\xc0\x00" if row.server else b"\xd0\x00"))
    return after.raw, after.packet


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_packet_is_encoded_as_its_bytes(case: Case) -> None:
    assert encode(case.packet, case.version or 4) == case.raw


@each_case
def test_bytes_are_decoded_whole(case: Case) -> None:
    reader = decoder(case)
    assert same(reader.feed(case.raw), [case.packet])
    assert reader.error is None
    assert reader.pending_bytes == 0


@each_case
def test_bytes_are_decoded_one_by_one(case: Case) -> None:
    reader = decoder(case)
    found = [packet for byte in case.raw for packet in reader.feed(bytes((byte,)))]
    assert same(found, [case.packet])
    assert reader.error is None
    assert reader.pending_bytes == 0


@each_case
def test_every_prefix_is_held_back_until_the_rest_comes(case: Case) -> None:
    step = max(1, len(case.raw) // 500)
    for cut in range(0, len(case.raw), step):
        reader = decoder(case)
        assert reader.feed(case.raw[:cut]) == []
        assert reader.error is None
        assert reader.pending_bytes == cut
        assert same(reader.feed(case.raw[cut:]), [case.packet])


@each_case
def test_the_next_packet_is_not_touched(case: Case) -> None:
    raw, after = trailer(case)
    reader = decoder(case)
    assert same(reader.feed(case.raw + raw + raw[:1]), [case.packet, after])
    assert reader.pending_bytes == 1


@each_malformed
def test_a_broken_rule_is_named(row: Malformed) -> None:
    reader = decoder(row)
    reader.feed(row.raw)
    assert isinstance(reader.error, MalformedPacket)
    assert (reader.error.clause, reader.error.reason_code) == (row.clause, row.reason_code)


@each_malformed
def test_a_broken_rule_is_named_byte_by_byte(row: Malformed) -> None:
    reader = decoder(row)
    for byte in row.raw:
        reader.feed(bytes((byte,)))
    assert reader.error is not None
    assert (reader.error.clause, reader.error.reason_code) == (row.clause, row.reason_code)


@each_malformed
def test_what_came_before_a_malformed_packet_is_good_and_nothing_after_it(row: Malformed) -> None:
    raw, good = trailer(row)
    reader = decoder(row)
    if row.version:
        assert same(reader.feed(raw + row.raw + raw), [good])
    else:
        reader.feed(row.raw + raw)
    assert reader.error is not None
    assert reader.feed(raw) == []
    assert reader.pending_bytes == 0
