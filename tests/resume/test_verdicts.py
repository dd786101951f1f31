"""Every verdict on a stored session, as a paho client sees it (VERDICTS.md is the table)."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Literal

import pytest

from storage.kv import U64, Space
from storage.meta import read_ends
from tests.resume.site import until

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from storage.kv import WriteTxn
    from tests.resume.site import Site
    from tests.storage.engine.raw import Files

    Sites = Callable[..., AbstractContextManager[Site]]


def numbered(first: int, last: int) -> list[str]:
    return [f"m{n}" for n in range(first, last + 1)]


# ------------------------------------------------------------------------------------- ok


def test_a_session_resumes_where_it_was(site: Sites) -> None:
    with site() as s:
        device = s.sleeper("dev", "a/+")
        s.publish("a/1", *numbered(1, 20))
        s.kill().start()
        assert device.up().present is True
        assert device.payloads(20) == numbered(1, 20)
        s.counted(resumed=1, verified=1, resets={}, rebound=0, gaps=0)
        device.down()
        assert device.up().present is True
        assert device.payloads(0) == []
        assert s.resets() == []


# --------------------------------------------------------------------------- 410, pruned


@pytest.mark.case("HK-17")
def test_a_session_that_lost_history_is_told(site: Sites) -> None:
    with site(max_messages=10) as s:
        device = s.sleeper("dev", "a")
        s.publish("a", *numbered(1, 50))
        s.counted(head=50, floor=40)
        assert device.up().present is False
        s.counted(resets={"history-pruned": 1}, resumed=0)
        assert s.logged("'dev'", "is reset", "history after 0", "lost through 40") == 1
        told = {"client_id": "dev", "reason": "history-pruned", "position": 0, "floor": 40}
        until(lambda: s.resets() == [told], "the plugin is not told")
        # a fresh session: no subscriptions, nothing of the ten that are left
        s.publish("a", "m51")
        assert device.payloads(0) == []
        device.subscribe("a")
        s.publish("a", "m52")
        assert device.payloads(1) == ["m52"]
        device.down()
        assert device.up().present is True


def test_a_delivery_under_way_that_was_pruned_resets(site: Sites) -> None:
    """It was sent and never acknowledged: the broker cannot send it again."""
    with site(max_messages=10) as s:
        device = s.device("dev")
        device.paho.manual_ack_set(on=True)
        device.up().subscribe("a")
        s.publish("a", "m1")
        until(lambda: device.got, "not delivered")
        device.down()
        s.sleeper("other", "b")
        s.publish("b", *numbered(1, 50))
        s.counted(floor=41)
        assert device.up().present is False
        s.counted(resets={"history-pruned": 1})


# ------------------------------------------------------------------------------- precise


@pytest.mark.case("HK-17")
def test_only_who_would_have_received_what_was_pruned_is_refused(site: Sites) -> None:
    with site(max_messages=10) as s:
        resumed = {
            "exact": s.sleeper("exact", "quiet/1"),
            "wild": s.sleeper("wild", "quiet/+", "elsewhere/#"),
            "qos0": s.sleeper("qos0", "busy/#", qos=0),
            "grown": s.sleeper("grown", "quiet/#"),
        }
        refused = {
            "busy": s.sleeper("busy", "busy/1"),
            "plus": s.sleeper("plus", "+/1"),
            "hash": s.sleeper("hash", "#"),
            "both": s.sleeper("both", "quiet/1", "busy/+"),
        }
        reader = s.device("reader").up().subscribe("busy/2")
        s.publish("busy/2", "read")  # it has this one before it is pruned
        assert reader.payloads(1) == ["read"]
        resumed["reader"] = reader.down()
        s.publish("busy/1", *numbered(1, 49))
        s.counted(head=50, floor=40)
        resumed["late"] = s.sleeper("late", "busy/#", "+/1")
        resumed["grown"].up().subscribe("busy/#", "+/1").down()
        s.publish("quiet/1", "after")
        s.counted(floor=41)
        s.restart()
        expected = {"exact": ["after"], "wild": ["after"], "late": ["after"], "grown": ["after"]}
        for name, device in resumed.items():
            assert device.up().present is True, name
            assert device.payloads(len(expected.get(name, []))) == expected.get(name, []), name
        assert s.figures["resets"] == {}
        for name, device in refused.items():
            assert device.up().present is False, name
        s.counted(resets={"history-pruned": len(refused)})
        until(lambda: {r["client_id"] for r in s.resets()} == set(refused), "not told of each")


# ----------------------------------------------------------------------- 409, generation


def replace_generation(files: Files) -> None:
    """As if a sibling had been put there: the sidecar is of another generation."""
    sidecar = json.loads(files.sidecar.read_text())
    sidecar["generation"] = "f" * 32
    files.sidecar.write_text(json.dumps(sidecar))


def lose_sidecar(files: Files) -> None:
    files.sidecar.unlink()


@pytest.mark.case("HK-16")
@pytest.mark.parametrize("change", [replace_generation, lose_sidecar])
def test_another_generation_is_resumed_unchecked_and_bound(
    site: Sites, change: Callable[[Files], None]
) -> None:
    with site() as s:
        device = s.sleeper("dev", "a")
        s.publish("a", *numbered(1, 20))
        s.stop()
        change(s.files)
        s.start()
        assert s.logged("database generation", "minted") == 2
        assert device.up().present is True
        s.counted(rebound=1, resumed=0)
        assert s.logged("'dev'", "is of generation", "resumes unchecked") == 1
        assert device.payloads(20) == numbered(1, 20)
        s.counted(verified=1)
        device.down()
        s.restart(on_generation_change="reset")  # it is bound: nothing is left to be refused
        assert device.up().present is True
        assert device.payloads(0) == []
        s.counted(rebound=0, resumed=1, resets={})
        assert s.resets() == []


@pytest.mark.case("HK-16")
@pytest.mark.parametrize("change", [replace_generation, lose_sidecar])
def test_another_generation_is_reset_where_so_configured(
    site: Sites, change: Callable[[Files], None]
) -> None:
    with site(on_generation_change="reset") as s:
        device = s.sleeper("dev", "a")
        s.publish("a", *numbered(1, 20))
        s.stop()
        change(s.files)
        s.start()
        assert device.up().present is False
        s.counted(rebound=0, resumed=0, resets={"generation-changed": 1})
        assert s.logged("'dev'", "is reset", "is of generation") == 1
        told = {"client_id": "dev", "reason": "generation-changed", "position": 0, "floor": 0}
        until(lambda: s.resets() == [told], "the plugin is not told")
        assert device.payloads(0) == []


@pytest.mark.case("HK-16")
@pytest.mark.parametrize("choice", ["resume", "reset"])
def test_an_older_copy_of_the_data_is_another_generation(
    site: Sites, choice: Literal["resume", "reset"]
) -> None:
    with site(on_generation_change=choice) as s:
        device = s.sleeper("dev", "a")
        s.publish("a", *numbered(1, 5))
        copy = s.stop().back_up()
        s.start()
        newcomer = s.sleeper("new", "a")
        s.publish("a", *numbered(6, 10))
        s.stop().restore(copy)
        s.start()
        assert s.logged("minted", "restored from a backup") == 1
        assert newcomer.up().present is False  # the copy does not know it
        assert device.up().present is (choice == "resume")
        assert device.payloads(5 if choice == "resume" else 0) == (
            numbered(1, 5) if choice == "resume" else []
        )
        s.counted(rebound=int(choice == "resume"))


# ---------------------------------------------------------------------- 409, ahead of head


def lose_tail(files: Files, head: int) -> None:
    """Have the log end at ``head``, with the records of consumers as they are."""

    def work(txn: WriteTxn) -> None:
        ends = read_ends(txn)
        for key, raw in list(txn.scan(Space.HISTORY, U64.pack(head + 1))):
            txn.delete(Space.HISTORY, key)
            ends.blocks -= 1
            ends.bytes -= len(raw)
        ends.head = head
        ends.indexed = min(ends.indexed, head)
        ends.write(txn)

    files.alter(work)


@pytest.mark.case("HK-16")
@pytest.mark.parametrize("choice", ["resume", "reset"])
def test_a_position_ahead_of_the_log_is_never_trusted(
    site: Sites, choice: Literal["resume", "reset"]
) -> None:
    with site(on_generation_change=choice) as s:
        ahead = s.device("ahead").up().subscribe("a")
        behind = s.sleeper("behind", "a")
        s.publish("a", *numbered(1, 20))
        assert ahead.payloads(20) == numbered(1, 20)
        ahead.down()
        s.stop()
        lose_tail(s.files, 10)
        s.start()
        assert ahead.up().present is False
        s.counted(resets={"position-ahead": 1})
        assert s.logged("'ahead'", "is reset") == 1
        told = {"client_id": "ahead", "reason": "position-ahead", "position": 20, "floor": 0}
        until(lambda: told in s.resets(), "the plugin is not told")
        assert behind.up().present is (choice == "resume")  # of the old generation, not ahead
        # its offsets are used again, and it hears of each from now on
        ahead.subscribe("a")
        s.publish("a", *numbered(11, 15))
        assert ahead.payloads(5) == numbered(11, 15)
        if choice == "resume":
            assert behind.payloads(15) == numbered(1, 15)


# -------------------------------------------------------------------------- 410, damaged


def test_a_damaged_entry_resets_those_who_should_have_it(site: Sites) -> None:
    with site() as s:
        hit = [s.sleeper("hit", "a"), s.sleeper("wild", "#")]
        spared = s.sleeper("spared", "b/+")
        s.publish("a", "m1", "m2", "m3")
        s.publish("b/1", *numbered(1, 5))
        s.stop()
        s.files.flip_block(2, -1)  # the last byte of a block is the last of its last payload
        s.start()
        for device in hit:
            assert device.up().present is True  # it shows when the entry is read
            device.cut_off()
            assert "m2" not in [got.payload for got in device.got]
            assert device.up().present is False
            assert device.payloads(0) == []
        s.counted(resets={"history-unavailable": 2})
        assert s.logged("is reset", "history after", "lost through 2") == 2
        until(lambda: {r["client_id"] for r in s.resets()} == {"hit", "wild"}, "not told")
        assert spared.up().present is True
        assert spared.payloads(5) == numbered(1, 5)
        # the topic goes on
        hit[0].subscribe("a")
        s.publish("a", "m4")
        assert hit[0].payloads(1) == ["m4"]


def test_a_damaged_delivery_under_way_resets(site: Sites) -> None:
    with site() as s:
        device = s.device("dev")
        device.paho.manual_ack_set(on=True)
        device.up().subscribe("a")
        s.publish("a", "m1")
        until(lambda: device.got, "not delivered")
        device.down()
        s.stop()
        s.files.flip_block(1, -1)
        s.start()
        device.up().cut_off()
        assert device.got == []
        assert device.up().present is False
        s.counted(resets={"history-unavailable": 1})


def test_a_damaged_record_is_neither_resumed_nor_replaced(site: Sites) -> None:
    """Whose session it was cannot be told, so nobody gets it (P14)."""
    with site() as s:
        device = s.sleeper("dev", "a")
        other = s.sleeper("other", "a")
        s.publish("a", *numbered(1, 3))
        s.stop()
        s.files.flip(Space.CONSUMER, U64.pack(1), -1)
        s.start()
        assert device.up().reason != 0
        device.cut_off()
        assert other.up().present is True
        assert other.payloads(3) == numbered(1, 3)


# ------------------------------------------------------------------------------------ skip


@pytest.mark.case("HK-17")
def test_skip_delivers_what_is_left_and_says_what_is_not(site: Sites) -> None:
    with site(max_messages=10, on_history_pruned="skip") as s:
        device = s.sleeper("dev", "a")
        s.publish("a", *numbered(1, 50))
        s.counted(head=50, floor=40)
        s.restart()  # what is in memory would be delivered, too
        assert device.up().present is True
        assert device.payloads(10) == numbered(41, 50)
        s.counted(gaps=1, resets={}, resumed=1)
        assert s.logged("'dev'", "skips a gap", "lost through 40") == 1
        device.down()
        assert device.up().present is True
        assert device.payloads(0) == []
        s.counted(gaps=1)


def test_skip_drops_a_delivery_under_way_that_is_gone(site: Sites) -> None:
    with site(max_messages=10, on_history_pruned="skip") as s:
        device = s.device("dev")
        device.paho.manual_ack_set(on=True)
        device.up().subscribe("a")
        s.publish("a", "m1")
        until(lambda: device.got, "not delivered")
        device.down()
        device.paho.manual_ack_set(on=False)
        s.publish("a", *numbered(2, 50))
        s.counted(floor=40)
        s.restart()
        assert device.up().present is True
        assert device.payloads(10) == numbered(41, 50)
        until(lambda: s.figures["gaps"] >= 1, "the gap is not counted")
        assert s.logged("'dev'", "skips a gap") >= 1


# ---------------------------------------------------------------------------------- expiry


def test_a_session_that_expired_is_gone(site: Sites) -> None:
    with site(session_expiry_interval=1) as s:
        device = s.sleeper("dev", "a")
        s.publish("a", *numbered(1, 5))
        device.up()
        assert device.present is True
        device.down()
        s.counted(expired=1)
        assert device.up().present is False
        assert device.payloads(0) == []
        time.sleep(2.1)  # connected, it does not expire
        device.down()
        assert device.up().present is True
