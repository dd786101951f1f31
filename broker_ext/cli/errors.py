"""Errors of the command line.

CannotServe     the broker cannot be started as asked
CannotOperate   an operation cannot be carried out
+-- NoBroker    no broker is running on the data directory
+-- NoAnswer    one is running, and does not answer
+-- Refused     it answered no
"""

from __future__ import annotations

from storage.errors import StoreError

__all__ = ["CannotOperate", "CannotServe", "NoAnswer", "NoBroker", "Refused", "root_cause"]


class CannotServe(Exception):
    """The broker cannot be started as asked; the text is one line for a person."""


class CannotOperate(Exception):
    """An operation cannot be carried out; the text is one line for a person: what, what to do."""


class NoBroker(CannotOperate):
    """No broker is running on the data directory."""


class NoAnswer(CannotOperate):
    """A broker is running, and does not answer."""


class Refused(CannotOperate):
    """The broker answered no. code: in the style of HTTP."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def root_cause(exc: BaseException) -> str:
    """Say in one line what `exc` began with: amqtt wraps what went wrong once or twice. What the
    store says is for people; what it began with is not."""
    while exc.__cause__ is not None and not isinstance(exc, StoreError):
        exc = exc.__cause__
    if isinstance(exc, OSError) and exc.strerror:
        text = exc.strerror if exc.filename is None else f"{exc.filename}: {exc.strerror}"
    else:
        text = str(exc)
    text = " ".join(text.split())
    if not text or isinstance(exc, (KeyError, TypeError)):  # "'default'" says too little
        return f"{type(exc).__name__} {text}".strip()
    return text
