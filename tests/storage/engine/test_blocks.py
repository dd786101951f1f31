"""Blocks: what is written is read, and a flipped bit is told and takes no neighbour with it."""

from __future__ import annotations

from contextlib import suppress

import pytest

from storage.api import BLOCK_BYTES_MAX, BLOCK_ENTRIES_MAX, RETAINED, Entry
from storage.blocks import Block, Damage, decode_message, encode_block, encode_message

ENTRIES = [
    Entry(1001, b"a/b", b"one", 1, 0, b"publisher"),
    Entry(1002, b"a/b", b"", 2, RETAINED, b""),
    Entry(1003, b"publisher", b"\xff\x00" * 20, 1, 0, b"publisher"),
    Entry(1004, b"c", b"x" * 300, 1, RETAINED, b"other", 1 << 40, b"\x01\x02"),
    Entry(1005, b"c", b"y", 0, 0, b"other", 0, b"\x26" * 70_000),
    Entry(1006, b"\xf0\x9f\x8c\x8a" * 10_000, b"z", 2, 0, b"", 7),
]
FIRST = ENTRIES[0].offset
RAW = encode_block(ENTRIES, 0, 1_700_000_000_000).raw
SMALL = encode_block(ENTRIES[:4], 0, 1_700_000_000_000).raw


def read(raw: bytes, first: int = FIRST) -> list[Entry | None]:
    """Each entry, None = damaged. Raises Damage when nothing can be told."""
    block = Block(first, raw)
    found: list[Entry | None] = []
    for position in range(block.count):
        try:
            found.append(block.entry(position))
        except Damage:
            found.append(None)
    return found


def test_a_block_gives_back_what_was_put_in() -> None:
    block = Block(FIRST, RAW)
    assert read(RAW) == ENTRIES
    assert (block.first, block.last, block.stored_ms) == (1001, 1006, 1_700_000_000_000)
    assert block.topics() == {entry.topic for entry in ENTRIES}
    assert block.last_of_topics(1004) == {b"a/b": 1002, b"publisher": 1003, b"c": 1004}


def test_a_block_ends_at_its_limits_and_has_one_entry_at_least() -> None:
    many = [Entry(n, b"t", b"p", 1) for n in range(1, BLOCK_ENTRIES_MAX + 2)]
    assert encode_block(many, 0, 0).taken == BLOCK_ENTRIES_MAX
    assert encode_block(many, BLOCK_ENTRIES_MAX, 0).taken == 1
    half = bytes(BLOCK_BYTES_MAX // 2)
    large = [Entry(n, b"t", half, 1) for n in range(1, 4)]
    assert encode_block(large, 0, 0).taken == 2
    huge = [Entry(1, b"t", bytes(BLOCK_BYTES_MAX + 1), 1), Entry(2, b"t", b"", 1)]
    assert encode_block(huge, 0, 0).taken == 1


def test_the_topics_of_a_block_are_those_of_its_entries_without_origins() -> None:
    assert set(encode_block(ENTRIES[:2], 0, 0).topics) == {b"a/b"}
    assert set(encode_block(ENTRIES, 0, 0).topics) == {entry.topic for entry in ENTRIES}


@pytest.mark.parametrize("bit", range(8))
def test_every_flipped_bit_is_told_and_undamaged_entries_survive(bit: int) -> None:
    bodies_at = len(SMALL) - Block(FIRST, SMALL).body_bytes
    table_at = bodies_at - 4 * 13
    for at in range(len(SMALL)):
        spoiled = bytearray(SMALL)
        spoiled[at] ^= 1 << bit
        try:
            found = read(bytes(spoiled))
        except Damage:
            assert at < table_at, f"byte {at} took the whole block with it"
            continue
        wrong = [n for n, entry in enumerate(found) if entry != ENTRIES[n]]
        assert all(found[n] is None for n in wrong), f"byte {at} was taken for true"
        if at >= table_at:
            assert len(wrong) == 1, f"byte {at} damaged {len(wrong)} entries"
        else:  # table_crc itself
            assert wrong == []
            assert not Block(FIRST, bytes(spoiled)).is_sound


def test_a_flipped_row_is_told_before_its_entry_is_asked_for() -> None:
    bodies_at = len(SMALL) - Block(FIRST, SMALL).body_bytes
    for at in range(bodies_at - 4 * 13, bodies_at):
        spoiled = bytearray(SMALL)
        spoiled[at] ^= 0x10
        assert not Block(FIRST, bytes(spoiled)).is_sound


@pytest.mark.parametrize("length", [*range(0, len(SMALL), 7), len(SMALL) - 1])
def test_a_block_that_was_cut_gives_no_wrong_entry(length: int) -> None:
    try:
        found = read(SMALL[:length])
    except Damage:
        return
    assert found != ENTRIES[:4]
    assert all(entry in (None, ENTRIES[n]) for n, entry in enumerate(found))


@pytest.mark.parametrize("first", [0, 1, FIRST - 1, FIRST + 1, FIRST + (1 << 31)])
def test_a_block_that_was_moved_to_another_offset_is_damaged(first: int) -> None:
    with pytest.raises(Damage):
        read(SMALL, first)


def test_bodies_that_changed_places_are_damaged() -> None:
    twins = [Entry(1, b"t", b"aaaa", 1), Entry(2, b"t", b"bbbb", 1), Entry(3, b"t", b"aaaa", 1)]
    raw = encode_block(twins, 0, 0).raw
    assert read(raw[:-12] + b"bbbb" + b"aaaa" + raw[-4:], 1) == [None, None, twins[2]]


def test_a_message_by_itself_comes_back_and_tells_damage() -> None:
    for entry in ENTRIES:
        assert decode_message(encode_message(entry)) == entry._replace(offset=0)
    raw = encode_message(ENTRIES[0])
    for at in range(len(raw)):
        spoiled = bytearray(raw)
        spoiled[at] ^= 0x20
        with suppress(Damage):
            assert decode_message(bytes(spoiled)) == ENTRIES[0]._replace(offset=0)
