"""Fixtures of the control socket's tests."""

from __future__ import annotations

from tests.broker.conftest import broker

__all__ = ["broker"]
