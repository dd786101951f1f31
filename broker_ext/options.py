"""What a subscriber asks for beyond a topic filter and its QoS (MQTT 5, section 3.8.3.1). Pure.

A 3.1.1 subscription asks for nothing of it: then everything here is ``PLAIN``, one object, which
the hot path tells by identity.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Final, NamedTuple

from broker_ext.wire import variable_length

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["NO_LOCAL", "PLAIN", "WALKING", "Options", "gives_retained", "joined", "options_of"]

NO_LOCAL: Final = 0x04
RETAIN_AS_PUBLISHED: Final = 0x08
RETAIN_HANDLING: Final = 0x30
WALKING: Final = 0x40
"""In the byte that is stored, and never on the wire (bits 6 and 7 are reserved there): the
retained messages of this subscription have not all been given."""
_IDENTIFIER: Final = b"\x0b"


class Options(NamedTuple):
    """How what matches is delivered.

    retain: RETAIN stays as published. identifiers: encoded Subscription Identifiers, each with its
    property id, as they stand in a PUBLISH. no_local: not what the subscriber itself published.
    """

    retain: bool = False
    identifiers: bytes = b""
    no_local: bool = False


PLAIN: Final = Options()


def options_of(options: int, identifier: int) -> Options:
    """Of a subscription's options byte (its QoS does not matter) and identifier (0 = none)."""
    if not options & (NO_LOCAL | RETAIN_AS_PUBLISHED) and not identifier:
        return PLAIN
    return Options(
        bool(options & RETAIN_AS_PUBLISHED),
        _IDENTIFIER + variable_length(identifier) if identifier else b"",
        bool(options & NO_LOCAL),
    )


def joined(all_options: Iterable[Options]) -> Options:
    """Of overlapping subscriptions, for the one delivery that they come to: all their identifiers
    [MQTT5-3.3.4-4], and RETAIN as published if one of them asks for that."""
    return reduce(_join, all_options, PLAIN)


def _join(one: Options, other: Options) -> Options:
    if other is PLAIN:
        return one
    if one is PLAIN:
        return other
    return Options(
        one.retain or other.retain,
        one.identifiers + other.identifiers,
        one.no_local and other.no_local,
    )


def gives_retained(options: int, *, existed: bool) -> bool:
    """Whether SUBSCRIBE brings the retained messages (Retain Handling) [MQTT5-3.3.1-9..11]."""
    handling = (options & RETAIN_HANDLING) >> 4
    return handling == 0 or (handling == 1 and not existed)
