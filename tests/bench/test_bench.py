"""The benchmark works: each of its commands, in its tiniest setting, fills every row."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def bench(tmp_path: Path, *arguments: str) -> tuple[str, dict[str, list[dict[str, float]]]]:
    """The tables, and the figures by name, of all brokers."""
    written = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, "-m", "interop.bench", *arguments, "--tiny", "--json", str(written)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert not done.returncode, done.stderr
    assert "failed" not in done.stderr
    figures: Any = json.loads(written.read_text())["figures"]
    return done.stdout, figures


def total(figures: list[dict[str, float]], name: str) -> float:
    return sum(f[name] for f in figures if name in f)


def test_brokers(tmp_path: Path) -> None:
    text, figures = bench(tmp_path, "brokers", "--only", "durable", "--stores", "sqlite")
    scenarios = figures["durable sqlite"]
    assert list(scenarios) == [
        *("ingest 0", "ingest 1", "ingest 5"),
        *("live 1", "live 2", "latency", "drain", "storm", "memory", "start"),
    ]
    for name, (found,) in scenarios.items():
        assert found.get("lost", 0) == found.get("again", 0) == 0, name
        wanted = {"latency": "latency p99", "memory": "session bytes"}.get(name, name)
        assert found[wanted] > 0 or name == "memory", name
    for row in (
        *("ingest QoS 1, 0 sleeping", "ingest QoS 1, 1 sleeping", "live QoS 1", "live QoS 2"),
        *("latency p50", "latency p99", "drain of", "storm,", "memory of a sleeping session"),
        *("memory of a message", "start, nothing stored", "start, 200 sessions, 2,000 messages"),
        *("goals, of this run", "≤ 0.30"),
    ):
        assert row in text


def test_resume(tmp_path: Path) -> None:
    text, figures = bench(tmp_path, "resume", "--stores", "lmdb")
    assert list(figures) == [
        *(f"lmdb {size} {who}" for size in (100, 1000) for who in ("one", "front", "all")),
        *("lmdb kept", "lmdb followed", "lmdb held", "lmdb released"),
    ]
    for name, found in figures.items():
        assert total(found, "per_s") > 0, name
        assert total(found, "lost") == total(found, "again") == 0, name
    assert total(figures["lmdb kept"], "pruned") == total(figures["lmdb held"], "pruned") == 0
    assert total(figures["lmdb released"], "pruned") > 0
    assert text.count("missed everything") == 2
    assert "needed no more" in text


def test_store(tmp_path: Path) -> None:
    text, figures = bench(tmp_path, "store")
    assert len(figures) == 2 * 2 * 2 * 4
    for name, found in figures.items():
        assert found[0]["commits_per_s"] > 0, name
    assert text.count("append + Advance, fsync") == 4


def test_outbox(tmp_path: Path) -> None:
    text, figures = bench(tmp_path, "outbox")
    assert list(figures) == ["lmdb 1", "sqlite 1", "lmdb 4", "sqlite 4"]
    for name, (found,) in figures.items():
        assert min(found.values()) > 0, name
    assert "claimed and settled/s" in text


def test_webhook(tmp_path: Path) -> None:
    text, figures = bench(tmp_path, "webhook", "--stores", "lmdb")
    assert list(figures) == [f"lmdb, {workers} workers" for workers in (1, 4, 16)]
    assert all(rate > 0 for (rate,) in figures.values())
    assert "webhook deliveries/s" in text
