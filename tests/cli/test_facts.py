"""The judge of the demo is given wrong streams and must see what is wrong with them."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import pytest

from broker_ext.demo.facts import Arrival, Connection, Facts, Published, judge
from broker_ext.demo.readings import Reading, payload, read, topic
from broker_ext.demo.script import Outcome, Schedule
from broker_ext.demo.show import as_json, facts_table

if TYPE_CHECKING:
    from collections.abc import Sequence

CUT_MS = 5_000
BACK_MS = 9_000
CONNECTIONS = [Connection(0, False, CUT_MS), Connection(BACK_MS, True, None)]


def published(*readings: Reading, at_ms: int = 100, sends: int = 1) -> list[Published]:
    return [Published(reading, at_ms, at_ms + 10, sends) for reading in readings]


def arrival(
    reading: Reading | None,
    at_ms: int = 200,
    *,
    connection: int = 0,
    dup: bool = False,
    qos: int | None = None,
) -> Arrival:
    at_qos = qos if qos is not None else reading.qos if reading else 0
    return Arrival(reading, at_ms, connection, at_qos, dup)


def facts(
    books: Sequence[Published],
    arrivals: Sequence[Arrival],
    connections: Sequence[Connection] = CONNECTIONS,
    returns: Sequence[bool] = (True,),
) -> Facts:
    return judge(books, arrivals, connections, returns)


def series(count: int, qos: int, sensor: int = 1) -> list[Reading]:
    return [Reading(sensor, qos, seq) for seq in range(1, count + 1)]


@pytest.mark.parametrize("qos", [1, 2])
def test_a_whole_stream_breaks_nothing(qos: int) -> None:
    readings = series(5, qos)
    found = facts(published(*readings), [arrival(one) for one in readings])
    assert found.reasons() == []
    tally = found.by_qos[qos]
    assert (tally.published, tally.acknowledged, tally.delivered) == (5, 5, 5)
    assert found.total == tally


@pytest.mark.parametrize("qos", [1, 2])
def test_an_acknowledged_reading_that_never_came_is_lost(qos: int) -> None:
    readings = series(5, qos)
    found = facts(published(*readings), [arrival(one) for one in readings if one.seq != 3])
    assert found.by_qos[qos].lost == 1
    assert found.by_qos[qos].out_of_order == 0
    assert found.reasons() == ["1 acknowledged and lost"]


def test_an_unacknowledged_reading_is_not_lost_but_the_run_is_no_proof() -> None:
    one = Published(Reading(1, 1, 1), 100, None, 1)
    found = facts([one], [])
    assert found.total.lost == 0
    assert found.reasons() == ["1 never acknowledged"]


def test_qos_2_delivered_twice_is_duplicated_whatever_broke_in_between() -> None:
    one = Reading(1, 2, 1)
    twice = [arrival(one, CUT_MS - 1), arrival(one, BACK_MS + 1, connection=1, dup=True)]
    found = facts(published(one, sends=2), twice)
    assert found.total.duplicated == 1
    assert found.total.delivered == 1
    assert found.reasons() == ["1 duplicated after acknowledgement"]


def test_qos_1_delivered_twice_on_one_connection_is_duplicated() -> None:
    one = Reading(1, 1, 1)
    found = facts(published(one), [arrival(one, 200), arrival(one, CUT_MS - 1, dup=True)])
    assert found.total.duplicated == 1


@pytest.mark.parametrize(
    ("before_ms", "dup", "redelivered"),
    [
        pytest.param(CUT_MS - 1000, True, 1, id="PUBACK cut off"),
        pytest.param(CUT_MS - 1001, True, 0, id="PUBACK had time"),
        pytest.param(CUT_MS - 1, False, 0, id="not marked DUP"),
    ],
)
def test_qos_1_again_on_the_next_connection_is_allowed_only_when_the_puback_had_no_time(
    before_ms: int, *, dup: bool, redelivered: int
) -> None:
    one = Reading(1, 1, 1)
    copies = [arrival(one, before_ms), arrival(one, BACK_MS, connection=1, dup=dup)]
    total = facts(published(one), copies).total
    assert (total.redelivered, total.duplicated) == (redelivered, 1 - redelivered)


def test_qos_1_that_the_sensor_sent_again_may_come_once_more_but_not_twice() -> None:
    one = Reading(1, 1, 1)
    total = facts(published(one, sends=2), [arrival(one, 200 + n) for n in range(3)]).total
    assert (total.sent_again, total.duplicated, total.redelivered) == (1, 1, 0)


def test_findings_tell_the_story_of_what_was_lost_or_duplicated() -> None:
    lost, twice, good = series(3, 2)
    copies = [arrival(twice, 300), arrival(good, 310), arrival(twice, BACK_MS, connection=1)]
    twice_told = "at 300 ms on connection 0, DUP 0; at 9000 ms on connection 1, DUP 0"
    sent = "published at 100 ms, acknowledged 110 ms, sent up to 1 times"
    assert facts(published(lost, twice, good), copies).findings == [
        f"lost: sensor 1, QoS 2, seq 1: {sent}; delivered never",
        f"duplicated: sensor 1, QoS 2, seq 2: {sent}; delivered {twice_told}",
    ]


def test_a_reading_sent_again_and_redelivered_needs_both_reasons() -> None:
    one = Reading(1, 1, 1)
    copies = [
        arrival(one, CUT_MS - 10),
        arrival(one, BACK_MS, connection=1, dup=True),
        arrival(one, BACK_MS + 1, connection=1),
    ]
    total = facts(published(one, sends=2), copies).total
    assert (total.redelivered, total.sent_again, total.duplicated) == (1, 1, 0)


@pytest.mark.parametrize("qos", [1, 2])
def test_each_reading_behind_a_later_one_is_out_of_order(qos: int) -> None:
    readings = series(5, qos)
    order = [readings[n] for n in (0, 3, 1, 2, 4)]
    found = facts(published(*readings), [arrival(one) for one in order])
    assert found.by_qos[qos].out_of_order == 2
    assert found.by_qos[qos].lost == 0
    assert found.reasons() == ["2 out of order"]


def test_sensors_and_qos_have_orders_of_their_own() -> None:
    readings = [Reading(1, 1, 2), Reading(2, 1, 1), Reading(1, 2, 1)]
    assert facts(published(*readings), [arrival(one) for one in readings]).reasons() == []


def test_a_copy_is_not_out_of_order() -> None:
    first, second = series(2, 1)
    copies = [arrival(first), arrival(second), arrival(first), arrival(second)]
    assert facts(published(first, second, sends=2), copies).total.out_of_order == 0


def test_what_was_not_published_is_altered() -> None:
    one = Reading(1, 1, 1)
    found = facts(published(one), [arrival(one), arrival(None), arrival(Reading(1, 1, 2))])
    assert found.altered == 2
    assert found.reasons() == ["2 altered"]


def test_another_qos_is_not_a_loss_but_is_told() -> None:
    one = Reading(1, 1, 1)
    found = facts(published(one), [arrival(one, qos=2)])
    assert (found.wrong_qos, found.total.lost) == (1, 0)
    assert found.reasons() == ["1 delivered at another QoS"]


def test_session_present_is_that_of_every_return() -> None:
    one = Reading(1, 1, 1)
    for connections, present in (
        (CONNECTIONS, True),
        (CONNECTIONS[:1], False),
        ([CONNECTIONS[0], Connection(BACK_MS, False, None)], False),
        ([CONNECTIONS[0], Connection(CUT_MS + 1, False, CUT_MS + 2), CONNECTIONS[1]], False),
    ):
        found = facts(published(one), [arrival(one)], connections)
        assert found.session_present is present
        assert found.reasons() == ([] if present else ["session present was 0"])


def test_a_sensor_whose_session_was_gone_is_told() -> None:
    one = Reading(1, 1, 1)
    found = facts(published(one), [arrival(one)], returns=(True, False, True))
    assert found.sensor_returns == 3
    assert found.reasons() == ["session present was 0 for 1 sensors"]


def test_a_run_that_published_nothing_proves_nothing() -> None:
    assert facts([], []).reasons() == ["nothing was published"]


def test_drain_is_timed_from_the_return_to_the_last_reading_acknowledged_before_it() -> None:
    early, late, live = Reading(1, 1, 1), Reading(1, 1, 2), Reading(1, 1, 3)
    books = [*published(early), *published(late, at_ms=6_000), *published(live, at_ms=9_500)]
    arrivals = [
        arrival(early),
        arrival(late, BACK_MS + 400, connection=1),
        arrival(live, BACK_MS + 900, connection=1),
    ]
    drain = facts(books, arrivals).drain
    assert (drain.backlog, drain.duration_ms, drain.per_second) == (1, 400, 2)


def test_a_backlog_that_never_came_was_not_drained() -> None:
    drain = facts(published(Reading(1, 1, 1)), []).drain
    assert (drain.backlog, drain.duration_ms, drain.per_second) == (1, None, None)


def test_no_backlog_is_drained_at_once() -> None:
    one = Reading(1, 1, 1)
    drain = facts(published(one), [arrival(one)]).drain
    assert (drain.backlog, drain.duration_ms, drain.per_second) == (0, 0, None)


@pytest.mark.parametrize("reading", [Reading(1, 1, 1), Reading(200, 2, 10**6)])
def test_a_reading_is_read_back(reading: Reading) -> None:
    assert read(7, topic(reading), payload(7, reading)) == reading


@pytest.mark.parametrize(
    ("of_topic", "body"),
    [
        pytest.param("fleet/sensor-002/qos1", payload(7, Reading(1, 1, 1)), id="another topic"),
        pytest.param("fleet/sensor-001/qos1", payload(8, Reading(1, 1, 1)), id="another seed"),
        pytest.param("fleet/sensor-001/qos1", payload(7, Reading(1, 1, 1))[:-1], id="cut short"),
        pytest.param("fleet/sensor-001/qos1", payload(7, Reading(1, 1, 1)) + b" ", id="longer"),
        pytest.param("fleet/sensor-001/qos1", b"\xff\x00", id="not text"),
        pytest.param("fleet/sensor-001/qos1", b"[]", id="not a mapping"),
        pytest.param("fleet/sensor-001/qos1", b'{"sensor": 1}', id="too little"),
        pytest.param(
            "fleet/sensor-001/qos1", b'{"sensor": true, "qos": 1, "seq": 1}', id="not a number"
        ),
    ],
)
def test_what_no_sensor_says_is_not_a_reading(of_topic: str, body: bytes) -> None:
    assert read(7, of_topic, body) is None


@pytest.mark.parametrize("seed", range(20))
def test_the_schedule_keeps_its_order_and_its_seed(seed: int) -> None:
    def moments() -> Schedule:
        return Schedule.of(1000, random.Random(seed))  # noqa: S311 - no secret

    one = moments()
    assert 0 < one.cut_ms < one.kill_ms < one.return_ms < one.end_ms == 1000
    assert moments() == one


def test_json_and_table_say_what_was_counted() -> None:
    readings = series(3, 2)
    found = facts(published(*readings), [arrival(one) for one in readings[:2]])
    outcome = Outcome(found, restart_ms=300, duration_ms=12_000)
    told = json.loads(as_json(outcome, {"seed": 1}))
    assert told["ok"] is False
    assert told["reasons"] == ["1 acknowledged and lost"]
    assert told["qos2"]["lost"] == told["total"]["lost"] == 1
    assert told["qos1"]["published"] == 0
    assert facts_table(outcome, "title").renderables
