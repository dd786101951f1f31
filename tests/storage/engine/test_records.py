"""Rows that an older version of this program has written."""

from __future__ import annotations

from dataclasses import replace
from struct import Struct
from zlib import crc32

import pytest

from storage.api import RETAINED, Entry, Will
from storage.blocks import encode_message
from storage.errors import RecordDamaged
from storage.records import NONE, Record, decode_will, encode_will

INCARNATION = b"i" * 16
MESSAGE = Entry(0, b"w", b"gone", 1, RETAINED)


def will_of_version_1(*, damaged: bool = False) -> bytes:
    packed = Struct(">BIHH").pack(1, 30, 3, 4) + b"devuser" + encode_message(MESSAGE)
    crc = crc32(packed, crc32(INCARNATION)) ^ damaged
    return packed + Struct(">I").pack(crc)


def will_of_version_2() -> bytes:
    packed = Struct(">BIQHH").pack(2, 30, 5, 3, 4) + b"devuser" + encode_message(MESSAGE)
    return packed + Struct(">I").pack(crc32(packed, crc32(INCARNATION)))


def test_a_will_that_knows_no_number_is_read() -> None:
    will = decode_will(INCARNATION, will_of_version_2())
    assert will == Will(b"dev", INCARNATION, b"user", MESSAGE, 30, 5)


def test_a_will_that_knows_no_deadline_is_read() -> None:
    will = decode_will(INCARNATION, will_of_version_1())
    assert will == Will(b"dev", INCARNATION, b"user", MESSAGE, 30)
    numbered = replace(will, due_ms=5, number=7)
    assert decode_will(INCARNATION, encode_will(numbered)) == numbered
    with pytest.raises(RecordDamaged):
        decode_will(INCARNATION, will_of_version_1(damaged=True))


def test_a_session_that_knows_nothing_of_qos_0_is_read() -> None:
    numbers = 7, 2, 3, NONE, 5, 6, NONE, 8, 1
    packed = Struct(">BBH16s16sQQQQQQQQQH").pack(1, 4, 9, INCARNATION, b"g" * 16, *numbers, 4)
    packed += b"userdev"
    raw = packed + Struct(">I").pack(crc32(packed, 33))
    record = Record.unpack(33, raw)
    assert (record.client_id, record.user, record.cursor) == (b"dev", b"user", 7)
    assert (record.durable, record.qos0_after) == (1, 0)
    record.qos0_after = 12
    assert Record.unpack(33, record.pack()) == record
    with pytest.raises(RecordDamaged):
        Record.unpack(34, raw)
