"""The clock of the system: what a jump of the wall clock moves, and what it does not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from storage.clock import SystemClock


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0])
def test_a_jump_of_the_wall_clock_moves_what_is_told_and_no_deadline(
    monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    wall_s, mono_s = 1_700_000_000.0, 50.0
    time = SimpleNamespace(time=lambda: wall_s, monotonic=lambda: mono_s)
    monkeypatch.setattr("storage.clock.time", time)
    clock = SystemClock()
    assert clock.now_ms() == clock.wall_ms() == 1_700_000_000_000
    wall_s, mono_s = wall_s + 5 + jump_s, mono_s + 5
    assert clock.now_ms() == 1_700_000_005_000
    assert clock.wall_ms() == 1_700_000_005_000 + jump_s * 1000
    clock.not_before(1_800_000_000_000)
    mono_s += 1
    assert clock.now_ms() == 1_800_000_001_000
