"""Rows that an older version of this program has written."""

from __future__ import annotations

from dataclasses import replace
from struct import Struct
from zlib import crc32

import pytest

from storage.api import RETAINED, Entry, Will
from storage.blocks import encode_message
from storage.errors import RecordDamaged
from storage.records import decode_will, encode_will

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
