"""DESIGN.md names tests for every promise; here it is checked that they exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROW = re.compile(r"^\| (P\d+) \|(.*)\|(.*)\|(.*)\|$", re.MULTILINE)
NAMED = re.compile(r"`((?:tests|interop)/[\w/]+\.py)(?:::(\w+))?`")


def rows() -> list[tuple[str, str]]:
    """(promise, the cell with its tests)."""
    return [(m[1], m[4]) for m in ROW.finditer((ROOT / "DESIGN.md").read_text())]


def test_every_promise_has_a_row() -> None:
    assert [name for name, _ in rows()] == [f"P{i}" for i in range(1, len(rows()) + 1)]
    assert len(rows()) >= 14


@pytest.mark.parametrize(("promise", "cell"), rows())
def test_a_promise_names_tests_that_exist(promise: str, cell: str) -> None:
    named = NAMED.findall(cell)
    assert named, f"{promise} names no test"
    for path, name in named:
        source = ROOT / path
        assert source.exists(), f"{promise}: {path} does not exist"
        if name:
            assert re.search(rf"def {name}\b", source.read_text()), f"{promise}: {path}::{name}"


@pytest.mark.parametrize(
    ("path", "name"),
    sorted(set(NAMED.findall((ROOT / "DESIGN.md").read_text()))),
)
def test_everything_design_names_exists(path: str, name: str) -> None:
    assert (ROOT / path).exists()
    if name:
        assert re.search(rf"def {name}\b", (ROOT / path).read_text())
