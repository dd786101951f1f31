"""A deliberately broken build is caught each time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exploration.mutations import MUTATIONS, TABLE, Mutation, caught, row


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_a_fence_that_is_taken_out_is_missed(
    mutation: Mutation, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    promise, _ = caught(mutation, monkeypatch, seed)
    assert promise, f"nobody noticed: {mutation.name}"


def test_the_table_lists_them_all() -> None:
    table = TABLE.read_text()
    missing = [m.name for m in MUTATIONS if row(m) not in table]
    assert not missing, "write it with: python -m tests.exploration.mutations"


def test_design_has_the_same_table() -> None:
    assert TABLE.read_text() in (Path(__file__).parents[2] / "DESIGN.md").read_text()
