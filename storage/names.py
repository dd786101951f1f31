"""Names that come from strangers: client ids, topics and filters, up to 65,535 bytes of anything.

They are compared as bytes: case, normalisation and the last byte count. A key ends at 511 bytes,
so a longer name is cut and its hash takes the place of the rest; the full name stands in the row,
and is compared when it is found.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from storage.kv import ReadTxn

from storage.kv import U64, Space, get_u64

__all__ = [
    "KEPT_BYTES",
    "filter_hash",
    "is_shared",
    "key_of",
    "levels_match",
    "literal_prefix",
    "topic_id",
    "unshared",
]

KEPT_BYTES: Final = 400
"""Names up to this length are their own key. Longer ones keep this much, so that they sort and are
found by prefix nearly as whole names would be."""

_EMPTY: Final = b"\x00"
"""A key cannot be empty; no MQTT string holds a NUL [MQTT-1.5.4-2]."""


def key_of(name: bytes) -> bytes:
    """The key a name is stored under: 1..432 bytes, different for different names."""
    if len(name) > KEPT_BYTES:
        return name[:KEPT_BYTES] + blake2b(name, digest_size=32).digest()
    return name or _EMPTY


def filter_hash(topic_filter: bytes) -> bytes:
    """What a consumer's subscription is found by: 16 bytes, so that its row stays small."""
    return blake2b(topic_filter, digest_size=16).digest()


def topic_id(txn: ReadTxn, topic: bytes) -> int | None:
    """The number of a topic that the history knows, or None."""
    found = get_u64(txn, Space.TOPIC, key_of(topic))
    if found is not None and len(topic) > KEPT_BYTES:
        return found if txn.get(Space.TOPIC_NAME, U64.pack(found)) == topic else None
    return found


def is_shared(topic_filter: bytes) -> bool:
    """Whether a subscription makes its consumer a member of a group, which needs what matches."""
    return topic_filter.startswith(b"$share/")


def unshared(topic_filter: bytes) -> bytes:
    """The filter proper of a shared subscription, $share/group/filter."""
    if topic_filter.startswith(b"$share/"):
        return topic_filter.split(b"/", 2)[-1]
    return topic_filter


def literal_prefix(topic_filter: bytes) -> tuple[bytes, bool]:
    """What each matching topic begins with, and whether that is the whole of the filter.

    >>> literal_prefix(b"a/b/#")
    (b'a/b', False)
    >>> literal_prefix(b"a/+/c")
    (b'a/', False)
    """
    plain = unshared(topic_filter)
    for at, byte in enumerate(plain):
        if byte == 0x2B:  # +
            return plain[:at], False
        if byte == 0x23:  # # matches its parent too [MQTT-4.7.1-2]
            return plain[: max(at - 1, 0)], False
    return plain, True


def levels_match(topic_filter: bytes, topic: bytes) -> bool:
    """Whether a topic filter matches a topic [MQTT-4.7.1-1 to 4.7.2-1]."""
    wanted = unshared(topic_filter).split(b"/")
    levels = topic.split(b"/")
    if topic.startswith(b"$") and wanted[0] in (b"+", b"#"):
        return False
    for depth, level in enumerate(wanted):
        if level == b"#":
            return True
        if depth == len(levels) or (level not in (b"+", levels[depth])):
            return False
    return len(wanted) == len(levels)
