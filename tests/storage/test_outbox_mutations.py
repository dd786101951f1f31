"""Each rule of the outbox is taken out once, and the test that DESIGN.md names for it fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.storage.outbox_mutations import MUTATIONS, Mutation, caught, outcome, row

DESIGN = Path(__file__).parents[2] / "DESIGN.md"


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: f"{m.rule}: {m.taken_out}")
def test_a_rule_that_is_taken_out_is_missed(
    mutation: Mutation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert outcome(mutation, caplog) == "", "the test fails in a build that is whole"
    caplog.clear()
    told = caught(mutation, monkeypatch, caplog)
    print(told)  # noqa: T201 - pytest -rP shows what it saw
    assert told, f"nobody noticed: {mutation.taken_out}"


def test_the_table_of_the_design_is_the_one_that_is_tried() -> None:
    design = DESIGN.read_text()
    missing = [row(mutation) for mutation in MUTATIONS if row(mutation) not in design]
    assert not missing, "write it with: python -m tests.storage.outbox_mutations"
