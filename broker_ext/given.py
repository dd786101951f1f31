"""What somebody wrote into YAML, compared with the dataclass that it is for: every refusal names
the option, what was written and what it must be.

Rule 1. What is inside of a list or a mapping is not repeated, nor what looks like a key, nor the
        value of an option that is not known: it may be a secret (P13).
Rule 2. Every refusal is a ValueError.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

from storage.keyring import looks_like_a_key

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["check_names", "check_number", "check_types", "shown"]

SHOWN_MAX: Final = 60
"""Longest text that is repeated."""
NAMED_MAX: Final = 16
"""Names that are all told to somebody whose name is not like any of them."""

_KINDS: Final[dict[str, tuple[type | tuple[type, ...], type | tuple[type, ...], str]]] = {
    "str": (str, object, "text"),
    "int": (int, object, "a whole number"),
    "float": ((int, float), object, "a number"),
    "bool": (bool, object, "true or false"),
    "list[str]": (list, str, "a list of texts"),
    "tuple[str, ...]": (tuple, str, "a list of texts"),
    "tuple[float, ...]": (tuple, (int, float), "a list of numbers"),
    "dict[str, Any]": (dict, object, "a mapping"),
    "Mapping[str, str]": (dict, str, "a mapping of texts"),
    "Literal['json', 'raw']": (str, object, "json or raw"),
    "Start": ((str, int), object, "head, earliest or an offset"),
    "Any": (object, object, "anything"),
}
"""Annotation of an option -> what YAML makes of it, what is inside of that, and its name."""


def shown(value: object) -> str:
    """A value as a refusal may repeat it."""
    if value is None:
        return "empty"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    text = repr(value)
    return "a long text" if len(text) > SHOWN_MAX or looks_like_a_key(text.strip("'")) else text


def check_names(names: Iterable[object], known: Iterable[str], whose: str = "") -> None:
    """Raise ValueError for a name that is not known; it says which one was meant."""
    allowed = list(known)
    for name in names:
        if name in allowed:
            continue
        text = str(name)[:SHOWN_MAX]
        close = difflib.get_close_matches(text.replace("-", "_").lower(), allowed, 1)
        meant = f"did you mean {close[0]!r}?" if close else "README has them all"
        if not close and len(allowed) <= NAMED_MAX:
            meant = f"there are {', '.join(allowed)}"
        msg = f"{f'{whose} has' if whose else 'there is'} no option {text!r}; {meant}"
        raise ValueError(msg)


def check_types(kind: type, given: Mapping[str, Any]) -> None:
    """Raise ValueError for an option of the dataclass ``kind`` whose value is of another type."""
    annotations = {one.name: str(one.type).replace('"', "'") for one in fields(kind)}
    for name, value in given.items():
        annotation, _, optional = annotations[name].partition(" | ")
        if optional and value is None:
            continue
        outer, inner, words = _KINDS[annotation]
        if _is(value, outer) and all(_is(item, inner) for item in _items(value)):
            continue
        inside = _is(value, outer) * " with something else in it"
        hint = ""
        if words == "text" and isinstance(value, int | float):
            hint = ": put it in quotes"
        elif inside and words.endswith("texts"):
            hint = ": put numbers and true, false in quotes"
        msg = f"{name} is {shown(value)}{inside}; it must be {words}{hint}"
        raise ValueError(msg)


def check_number(name: str, value: float | None, low: float, high: float | None) -> None:
    """Raise ValueError unless it is a number from low to high; None is one that was left out."""
    if value is None:
        return
    if not math.isfinite(value) or value < low or (high is not None and value > high):
        wanted = f"at least {low}" if high is None else f"{low} to {high}"
        msg = f"{name} is {value}; it must be {wanted}"
        raise ValueError(msg)


def _is(value: object, kind: type | tuple[type, ...]) -> bool:
    """As isinstance; but YAML's `yes`, which Python takes for 1, is no number."""
    return isinstance(value, kind) and (
        not isinstance(value, bool) or kind is bool or kind is object
    )


def _items(value: object) -> list[object]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    return list(value) if isinstance(value, list | tuple) else []
