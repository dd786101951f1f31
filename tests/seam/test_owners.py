"""P14: a session belongs to the authenticated user that created it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.broker.mqtt import will
from tests.seam.amqtt_broker import ANONYMOUS, running

if TYPE_CHECKING:
    from pathlib import Path

NOT_AUTHORIZED = 5
ALICE: dict[str, Any] = {"user": b"alice", "password": b"alicealice"}
BOB: dict[str, Any] = {"user": b"bob", "password": b"bobbob"}


@pytest.fixture
def users(password_file: Path) -> dict[str, Any]:
    return {"amqtt.plugins.authentication.FileAuthPlugin": {"password_file": str(password_file)}}


@pytest.mark.parametrize("clean", [False, True])
async def test_another_user_gets_nothing_of_a_session_at_rest_and_changes_nothing(
    tmp_path: Path, users: dict[str, Any], clean: bool
) -> None:
    async with running(tmp_path, plugins=users) as broker:
        alice = await broker.subscriber(b"device", (b"a", 1), **ALICE)
        await alice.disconnect()
        await broker.left(b"device")
        await broker.context.broadcast_message("a", b"for alice")
        before = await broker.hub.store.snapshot(b"device")
        for _ in range(2):
            bob = await broker.dial()
            options = {"clean": clean, "will": will(b"a", b"of bob"), **BOB}
            answer = await bob.connect(b"device", **options)
            assert (answer.reason, answer.session_present) == (NOT_AUTHORIZED, False)
            await bob.closed()
        assert await broker.hub.store.snapshot(b"device") == before
        alice = await broker.connect(b"device", **ALICE)
        assert alice.connack.session_present
        assert await alice.payloads(1) == [b"for alice"]
        await alice.quiet()


@pytest.mark.parametrize("clean", [False, True])
@pytest.mark.parametrize("owner_clean", [False, True])
async def test_another_user_does_not_take_over_from_a_connected_owner(
    tmp_path: Path, users: dict[str, Any], owner_clean: bool, clean: bool
) -> None:
    async with running(tmp_path, plugins=users) as broker:
        alice = await broker.subscriber(b"device", (b"a", 1), clean=owner_clean, **ALICE)
        bob = await broker.dial()
        assert (await bob.connect(b"device", clean=clean, **BOB)).reason == NOT_AUTHORIZED
        await bob.closed()
        await broker.context.broadcast_message("a", b"for alice")
        assert await alice.payloads(1) == [b"for alice"]
        await alice.quiet()


async def test_the_owner_is_remembered_across_a_restart(
    tmp_path: Path, users: dict[str, Any]
) -> None:
    async with running(tmp_path, plugins=users) as broker:
        await broker.subscriber(b"device", (b"a", 1), **ALICE)
    async with running(tmp_path, plugins=users) as broker:
        bob = await broker.dial()
        assert (await bob.connect(b"device", **BOB)).reason == NOT_AUTHORIZED
        assert (await broker.connect(b"device", **ALICE)).connack.session_present


async def test_an_id_is_free_again_when_its_owner_ends_the_session(
    tmp_path: Path, users: dict[str, Any]
) -> None:
    async with running(tmp_path, plugins=users) as broker:
        alice = await broker.subscriber(b"device", (b"a", 1), **ALICE)
        await alice.disconnect()
        alice = await broker.connect(b"device", clean=True, **ALICE)
        await alice.disconnect()
        await broker.left(b"device")
        bob = await broker.connect(b"device", **BOB)
        assert not bob.connack.session_present


async def test_a_name_that_nobody_checked_owns_nothing(tmp_path: Path) -> None:
    """Where all are anonymous, a user name is not a credential, and none locks the others out."""
    async with running(tmp_path) as broker:
        first = await broker.connect(b"device", user=b"alice")
        await first.disconnect()
        assert (await broker.connect(b"device", user=b"bob")).connack.session_present
        assert (await broker.connect(b"device")).connack.session_present


async def test_a_name_that_was_checked_owns_though_anonymous_clients_are_welcome(
    tmp_path: Path, users: dict[str, Any]
) -> None:
    async with running(tmp_path, plugins={**ANONYMOUS, **users}) as broker:
        alice = await broker.connect(b"device", **ALICE)
        await alice.disconnect()
        for options in (BOB, {}):
            other = await broker.dial()
            assert (await other.connect(b"device", **options)).reason == NOT_AUTHORIZED
        assert (await broker.connect(b"device", **ALICE)).connack.session_present
        await broker.connect(b"anonymous")
