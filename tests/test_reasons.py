"""DESIGN.md's table of reason codes against the code: each that can be sent, and a test of it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from broker_ext.reasons import Reason, return_code
from broker_ext.wire import REASONS, valid_reason
from broker_ext.wire import kinds as packet_kinds
from broker_ext.wire import reasons as wire_reasons

ROOT = Path(__file__).parent.parent
ROW = re.compile(r"^\| (0x[0-9A-F]{2}) \| ([^|]*) \|(?:[^|]*\|){2} ([^|]*) \|$", re.MULTILINE)
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def rows() -> list[tuple[int, str, str]]:
    """(code, packets, the cell with its tests)."""
    text = (ROOT / "DESIGN.md").read_text()
    return [(int(m[1], 16), m[2], m[3]) for m in ROW.finditer(text)]


def test_the_table_has_every_code_that_can_be_sent_and_no_other() -> None:
    assert {code for code, _, _ in rows()} == set(Reason)


def test_what_the_codec_finds_wrong_is_among_them() -> None:
    """``MalformedPacket.reason_code`` goes into CONNACK or DISCONNECT."""
    names = [name for name in wire_reasons.__all__ if name.isupper()]
    codes = [getattr(wire_reasons, name) for name in names]
    assert {code for code in codes if isinstance(code, int)} <= set(Reason)


def test_every_name_is_used() -> None:
    """A code that nothing sends would be a promise of the table that nobody keeps."""
    used = {
        node.attr
        for source in (ROOT / "broker_ext").rglob("*.py")
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "Reason"
    }
    by_codec = {
        value
        for name, value in vars(wire_reasons).items()
        if name.isupper() and isinstance(value, int)
    }
    assert {r.name for r in Reason} - used <= {r.name for r in Reason if r in by_codec}


@pytest.mark.parametrize(("code", "packets", "cell"), rows())
def test_a_packet_of_the_table_may_carry_the_code(code: int, packets: str, cell: str) -> None:
    del cell
    if packets == "all":
        return
    for name in packets.split(", "):
        assert valid_reason(getattr(packet_kinds, name), code), (name, REASONS[code])


@pytest.mark.parametrize(("code", "packets", "cell"), rows())
def test_a_test_of_the_table_names_its_code(code: int, packets: str, cell: str) -> None:
    del packets
    named = NAMED.findall(cell)
    assert named, f"0x{code:02X} has no test"
    for path, name in named:
        text = (ROOT / path).read_text()
        assert f"def {name}(" in text, f"{path}::{name}"
        assert not code or f"0x{code:02X}" in text, f"{path} does not name 0x{code:02X}"


def test_3_1_1_has_a_return_code_for_each() -> None:
    codes = {return_code(reason) for reason in Reason if reason >= Reason.UNSPECIFIED}
    assert codes == {1, 2, 3, 5}
