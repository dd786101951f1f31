"""`sessions`, `groups`, `figures` and `kick`: what a running broker has, for people and scripts."""

from __future__ import annotations

import hashlib
import json
import time
from typing import TYPE_CHECKING, Any

import typer

from broker_ext.cli.calling import call

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

__all__ = ["figures", "groups", "kick", "masked", "readable", "rows", "sessions"]

COLUMNS = ("client id", "user", "kind", "connected", "lag", "since")
GROUP_COLUMNS = ("group", "kind", "connected", "stored", "lag", "waiting", "under way")


def masked(name: str) -> str:
    """A name that can be told from others, and not read: two characters, and four hex digits of
    its SHA-256. A short one shows less."""
    if not name:
        return ""
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:4]
    return f"{name[: min(2, len(name) // 3)]}***{digest}"


def sessions(data: Path, *, is_unmasked: bool, as_json: bool, limit: int) -> None:
    """List up to ``limit`` sessions."""
    found, more = _pages(data, "sessions", limit)
    if not is_unmasked:
        for row in found:
            row["client_id"], row["user"] = masked(row["client_id"]), masked(row["user"])
    if as_json:
        typer.echo(json.dumps({"sessions": found, "more": more}, indent=1))
        return
    rows(COLUMNS, [_columns(row) for row in found])
    if more:
        typer.echo(f"and more; `--limit` is {limit}")


def groups(data: Path, *, as_json: bool, limit: int) -> None:
    """List up to ``limit`` groups of shared subscriptions."""
    found, more = _pages(data, "groups", limit)
    if as_json:
        typer.echo(json.dumps({"groups": found, "more": more}, indent=1))
        return
    rows(GROUP_COLUMNS, [_group_columns(row) for row in found])
    if more:
        typer.echo(f"and more; `--limit` is {limit}")


def _group_columns(row: dict[str, Any]) -> tuple[str, ...]:
    names = ("members", "durable_members", "lag", "waiting", "under_way")
    kind = "durable" if row["durable"] else "transient"
    return (readable(row["name"]), kind, *(str(row[name]) for name in names))


def _pages(data: Path, kind: str, limit: int) -> tuple[list[dict[str, Any]], bool]:
    found: list[dict[str, Any]] = []
    after = ""
    while True:
        page = call(data, kind, after=after, limit=min(limit - len(found), 1000))
        found += page[kind]
        after = page["next"]
        if not after or len(found) >= limit:
            return found, bool(after)


def _columns(row: dict[str, Any]) -> tuple[str, ...]:
    since_ms = row.get("detached_ms") or row.get("created_ms") or 0
    return (
        readable(row["client_id"]),
        readable(row["user"]),
        row["kind"],
        "yes" if row["connected"] else "no",
        str(row.get("lag", "-")),
        time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(since_ms / 1000)) if since_ms else "-",
    )


def figures(data: Path, *, as_json: bool) -> None:
    """Everything that is counted, and how things are: a name and a value in each line."""
    found = call(data, "figures")
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    for name, value in _flat(found):
        typer.echo(f"{readable(name):<34} {readable(str(value))}".rstrip())


def _flat(found: dict[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in found.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{within}{name}.")
        else:
            yield within + name, value


def kick(data: Path, client_id: str) -> bool:
    """Close the connection of a client; whether it was connected."""
    kicked: bool = call(data, "kick", client_id=client_id)["kicked"]
    typer.echo("disconnected" if kicked else "it is not connected")
    return kicked


def readable(text: str) -> str:
    """Text as a terminal can take it."""
    return text if text.isprintable() else repr(text)


def rows(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Print columns, each as wide as its widest entry."""
    widths = [max(map(len, column)) for column in zip(heads, *lines, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded: Iterator[str] = (c.ljust(w) for c, w in zip(cells, widths, strict=True))
        return "  ".join(padded).rstrip()

    for cells in (heads, *lines):
        typer.echo(line(cells))
