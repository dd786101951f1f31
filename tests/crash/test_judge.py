"""The judge is judged: histories in which one thing is wrong, and each is counted once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.crash import facts
from tests.crash.facts import Message
from tests.crash.judge import PROMISES, judge, matches

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.crash.facts import Fact


class Story:
    """Writes a history: one publisher ``pub``, one subscriber ``sub``; everything goes well."""

    def __init__(self) -> None:
        self.history: list[Fact] = []
        self.link = 0
        self.links: dict[str, int] = {}
        self.numbers = 0
        self.tickets = 0
        self.now_ms = 0

    def note(self, fact: Fact) -> int:
        self.history.append(fact)
        return len(self.history)

    def connect(
        self,
        client: str,
        *,
        present: bool = True,
        clean: bool = False,
        answered: bool = True,
        expiry_s: int | None = None,
    ) -> None:
        self.link += 1
        if clean:
            expiry_s = 0
        self.note(facts.Connecting(client, self.link, clean, expiry_s))
        if answered:
            self.links[client] = self.link
            self.note(facts.Connected(client, self.link, clean, present, expiry_s))

    def subscribe(self, *filters: tuple[str, int], answered: bool = True) -> None:
        self.tickets += 1
        self.note(facts.Subscribing("sub", self.links["sub"], self.tickets, filters))
        if answered:
            self.note(facts.Subscribed("sub", self.tickets, tuple(qos for _, qos in filters)))

    def unsubscribe(self, *filters: str, answered: bool = True) -> None:
        self.tickets += 1
        self.note(facts.Unsubscribing("sub", self.links["sub"], self.tickets, filters))
        if answered:
            self.note(facts.Unsubscribed("sub", self.tickets))

    def message(self, topic: str = "t/1", qos: int = 1, **more: Any) -> Message:
        self.numbers += 1
        return Message("pub", self.numbers, topic, qos, **more)

    def send(self, message: Message, *, accepted: bool = True) -> None:
        link, number = self.links["pub"], message.number
        self.note(facts.Publishing("pub", link, message, number))
        if accepted:
            self.note(facts.Accepted("pub", link, message, number))

    def send_once(self, message: Message) -> None:
        """With QoS 0."""
        self.note(facts.Publishing("pub", self.links["pub"], message, 0))

    def complete(self, message: Message) -> None:
        self.note(facts.Released("pub", message, message.number))
        self.note(facts.Completed("pub", self.links["pub"], message, message.number))

    def arrive(
        self,
        message: Message,
        packet_id: int = 0,
        *,
        qos: int | None = None,
        dup: bool = False,
        retain: bool = False,
    ) -> None:
        qos = message.qos if qos is None else qos
        packet_id = packet_id or message.number
        self.note(
            facts.Delivered("sub", self.links["sub"], message.id, packet_id, qos, dup, retain)
        )

    def answer(self, message: Message, kind: str = "puback", packet_id: int = 0) -> None:
        link, packet_id = self.links["sub"], packet_id or message.number
        self.note(facts.Acknowledged("sub", link, packet_id, kind))

    def release(self, message: Message) -> None:
        self.note(facts.Releasing("sub", self.links["sub"], message.number))

    def deliver(self, message: Message) -> None:
        """Deliver and acknowledge."""
        self.arrive(message)
        if message.qos == 1:
            self.answer(message)
        else:
            self.answer(message, "pubrec")
            self.release(message)
            self.answer(message, "pubcomp")

    def settle(self) -> None:
        """Prove that everything acknowledged so far is settled."""
        asked = self.note(facts.Pinging("sub", self.links["sub"]))
        self.note(facts.Ponged("sub", self.links["sub"], asked))
        message = self.message("t/elsewhere")
        self.send(message)
        self.deliver(message)

    def die(self) -> None:
        self.note(facts.Died("random"))

    def wait(self, ms: int) -> None:
        self.now_ms += ms
        self.note(facts.Ticked(self.now_ms))

    def leave(self, expiry_s: int | None = None) -> None:
        self.note(facts.Left("sub", self.links["sub"], expiry_s))

    def be_brief(self) -> None:
        """``sub`` has a session that expires after two seconds, and leaves."""
        self.wait(1)
        self.connect("sub", expiry_s=2)
        self.leave()

    def begin(self) -> None:
        self.connect("pub", present=False)
        self.connect("sub", present=False)
        self.subscribe(("t/#", 2))

    def end(self) -> None:
        self.note(facts.Drained("sub"))


def counted(story: Story) -> dict[str, int]:
    return {name: count for name, count in judge(story.history).violations.items() if count}


# ------------------------------------------------------------------------------- what is legal


def test_a_history_in_which_all_goes_well_counts_nothing() -> None:
    story = Story()
    story.begin()
    for qos in (1, 2, 1, 2):
        message = story.message(qos=qos)
        story.send(message)
        story.deliver(message)
        if qos == 2:
            story.complete(message)
    story.settle()
    story.die()
    story.note(facts.Found((), ""))
    story.note(facts.Stored("sub", {"t/#": 2}, frozenset()))
    story.note(facts.Stored("pub", {}, frozenset()))
    story.connect("pub")
    story.connect("sub")
    story.end()
    verdict = judge(story.history)
    assert verdict.violations == dict.fromkeys(PROMISES, 0)
    assert verdict.counts["owed"] == 5
    assert verdict.counts["settled for certain"] == 2


def _not_accepted(story: Story) -> None:
    story.send(story.message(), accepted=False)


def _before_the_suback(story: Story) -> None:
    story.tickets += 1
    story.note(facts.Subscribing("sub", story.links["sub"], story.tickets, (("u/#", 1),)))
    story.send(story.message("u/1"))
    story.note(facts.Subscribed("sub", story.tickets, (1,)))


def _behind_an_unsubscribe(story: Story) -> None:
    story.send(story.message())
    story.unsubscribe("t/#", answered=False)


def _unsettled_and_redelivered(story: Story) -> None:
    message = story.message()
    story.send(message)
    story.deliver(message)
    story.die()
    story.connect("pub")
    story.connect("sub")
    story.arrive(message, dup=True)
    story.answer(message)


def _qos_0_once_or_never(story: Story) -> None:
    for _ in range(2):
        message = story.message(qos=0)
        story.send_once(message)
    story.arrive(message)
    story.die()
    story.connect("pub")
    story.connect("sub")


def _sent_twice_and_delivered_twice(story: Story) -> None:
    message = story.message()
    story.send(message, accepted=False)
    story.connect("pub")
    story.send(message)
    for packet_id in (1, 2):
        story.arrive(message, packet_id)
        story.answer(message, packet_id=packet_id)


def _sent_twice_and_delivered_twice_under_one_packet_id(story: Story) -> None:
    first, second = story.message(), story.message()
    story.send(first, accepted=False)
    story.connect("pub")
    story.send(first)
    story.send(second)
    story.deliver(first)
    story.arrive(second)
    story.settle()
    story.die()
    story.connect("sub")
    story.arrive(second, dup=True)
    story.arrive(first, dup=True)
    story.answer(second)
    story.answer(first)


def _pubrec_lost_and_publish_again(story: Story) -> None:
    message = story.message(qos=2)
    story.send(message)
    story.arrive(message)
    story.answer(message, "pubrec")
    story.die()
    story.connect("pub")
    story.connect("sub")
    story.arrive(message, dup=True)
    story.answer(message, "pubrec")
    story.release(message)
    story.answer(message, "pubcomp")
    story.die()
    story.connect("sub")
    story.release(message)
    story.answer(message, "pubcomp")


def _retained_qos_1_again_behind_qos_2(story: Story) -> None:
    first = story.message("t/kept", 1, retain=True)
    second = story.message("t/kept", 2, retain=True)
    story.send(first, accepted=False)
    story.send(second, accepted=False)
    story.connect("pub")
    story.send(first)
    story.send(second)
    for message in (first, second):
        story.deliver(message)
    story.note(facts.Retained("store", {"t/kept": first.id}))


def _subscribed_between_two_sendings(story: Story) -> None:
    first, second = story.message("u/1"), story.message("u/1")
    story.send(first, accepted=False)
    story.subscribe(("u/#", 1))
    story.send(second)
    story.deliver(second)
    story.connect("pub")
    story.send(first)
    story.deliver(first)


def _made_and_nothing_stored(story: Story) -> None:
    story.connect("other", present=False)
    story.die()
    story.connect("other", present=False)


def _a_clean_connect_without_an_answer(story: Story) -> None:
    story.send(story.message())
    story.connect("sub", clean=True, answered=False)
    story.die()
    story.note(facts.Stored("sub", None, frozenset()))
    story.connect("pub")
    story.connect("sub", present=False)
    story.subscribe(("t/#", 2))


def _expired(story: Story) -> None:
    story.send(story.message())
    story.be_brief()
    story.wait(2500)
    story.connect("sub", present=False)


def _about_to_expire(story: Story) -> None:
    story.be_brief()
    story.wait(1900)
    story.connect("sub", present=False)


def _not_noticed_yet(story: Story) -> None:
    story.be_brief()
    story.wait(2900)
    story.connect("sub")


def _not_noticed_before_the_broker_was_back(story: Story) -> None:
    story.be_brief()
    story.die()
    story.wait(10_000)
    story.connect("pub")
    story.wait(1000)
    story.connect("sub")


def _ended_by_its_disconnect(story: Story) -> None:
    story.be_brief()
    story.leave(expiry_s=0)
    story.connect("sub", present=False)


def _message_expired(story: Story) -> None:
    story.send(story.message(expiry_s=1))


def _under_way_when_it_expired(story: Story) -> None:
    message = story.message(expiry_s=1)
    story.send(message)
    story.die()
    story.wait(5000)
    story.connect("sub")
    story.arrive(message, dup=True)
    story.answer(message)


def _expired_when_it_was_to_be_sent(story: Story) -> None:
    first, second = story.message(expiry_s=1), story.message()
    story.send(first)
    story.send(second)
    story.wait(5000)
    story.arrive(second)
    story.die()
    story.connect("sub")
    story.arrive(first, dup=True)
    story.answer(first)
    story.arrive(second, dup=True)
    story.answer(second)


def _expired_when_it_was_to_be_sent_and_came_again_twice(story: Story) -> None:
    first, second = story.message(expiry_s=1), story.message()
    story.send(first)
    story.send(second)
    story.wait(5000)
    story.arrive(second)
    for _ in range(2):
        story.die()
        story.connect("sub")
        story.arrive(first, dup=True)
        story.arrive(second, dup=True)
    story.answer(first)
    story.answer(second)


def _first_copy_expired(story: Story) -> None:
    first, second = story.message(expiry_s=1), story.message()
    story.send(first, accepted=False)
    story.send(second)
    story.deliver(second)
    story.connect("pub")
    story.send(first)
    story.deliver(first)


def _retained_until_it_expired(story: Story) -> None:
    story.send(story.message("x", retain=True, expiry_s=1))
    story.wait(5000)
    story.note(facts.Retained("client", {}))


@pytest.mark.parametrize(
    "happens",
    [
        _expired,
        _about_to_expire,
        _not_noticed_yet,
        _not_noticed_before_the_broker_was_back,
        _ended_by_its_disconnect,
        _message_expired,
        _under_way_when_it_expired,
        _expired_when_it_was_to_be_sent,
        _expired_when_it_was_to_be_sent_and_came_again_twice,
        _first_copy_expired,
        _retained_until_it_expired,
        _not_accepted,
        _before_the_suback,
        _behind_an_unsubscribe,
        _unsettled_and_redelivered,
        _qos_0_once_or_never,
        _sent_twice_and_delivered_twice,
        _sent_twice_and_delivered_twice_under_one_packet_id,
        _pubrec_lost_and_publish_again,
        _retained_qos_1_again_behind_qos_2,
        _subscribed_between_two_sendings,
        _made_and_nothing_stored,
        _a_clean_connect_without_an_answer,
    ],
)
def test_what_mqtt_allows_is_not_counted(happens: Callable[[Story], None]) -> None:
    story = Story()
    story.begin()
    happens(story)
    story.end()
    assert counted(story) == {}


def _refused_subscribe(story: Story) -> None:
    """It is not in force, and nothing that matches is owed."""
    story.tickets += 1
    link = story.links["sub"]
    story.note(facts.Subscribing("sub", link, story.tickets, (("u/#", 1),)))
    story.note(facts.Subscribed("sub", story.tickets, (0x80,)))
    story.send(story.message("u/1"))
    stored = {"t/#": 2}
    story.note(facts.Stored("sub", stored, frozenset()))


def _refused_unsubscribe(story: Story) -> None:
    """It stays in force, and what matches is owed."""
    story.tickets += 1
    link = story.links["sub"]
    story.note(facts.Unsubscribing("sub", link, story.tickets, ("t/#",)))
    story.note(facts.Unsubscribed("sub", story.tickets, (0x80,)))
    message = story.message()
    story.send(message)
    story.deliver(message)
    story.note(facts.Stored("sub", {"t/#": 2}, frozenset()))


def _delivered_by_a_refused_subscribe(story: Story) -> None:
    story.tickets += 1
    link = story.links["sub"]
    story.note(facts.Subscribing("sub", link, story.tickets, (("u/#", 1),)))
    story.note(facts.Subscribed("sub", story.tickets, (0x80,)))
    message = story.message("u/1")
    story.send(message)
    story.deliver(message)


def _lost_by_a_refused_unsubscribe(story: Story) -> None:
    story.tickets += 1
    link = story.links["sub"]
    story.note(facts.Unsubscribing("sub", link, story.tickets, ("t/#",)))
    story.note(facts.Unsubscribed("sub", story.tickets, (0x80,)))
    story.send(story.message())


@pytest.mark.parametrize(
    ("promise", "happens"),
    [
        ("", _refused_subscribe),
        ("", _refused_unsubscribe),
        ("haunting", _delivered_by_a_refused_subscribe),
        ("lost", _lost_by_a_refused_unsubscribe),
    ],
)
def test_what_a_full_disk_refuses_changes_nothing(
    promise: str, happens: Callable[[Story], None]
) -> None:
    story = Story()
    story.begin()
    happens(story)
    story.end()
    violations = judge(story.history, may_refuse=True).violations
    assert {p: n for p, n in violations.items() if n} == ({promise: 1} if promise else {})


def test_an_acknowledgement_proves_no_commit_before_anybody_has_subscribed() -> None:
    story = Story()
    story.connect("pub", present=False)
    story.send(story.message())  # not stored: nobody wants it
    story.die()
    story.connect("pub", present=False)  # its session had nothing in it
    assert counted(story) == {}


# ---------------------------------------------------------------------------- what is not


def _lost(story: Story) -> None:
    story.send(story.message())


def _qos_2_in_two_deliveries(story: Story) -> None:
    message = story.message(qos=2)
    story.send(message)
    story.deliver(message)
    story.arrive(message, 99)
    story.answer(message, "pubrec", 99)
    story.note(facts.Releasing("sub", story.links["sub"], 99))
    story.answer(message, "pubcomp", 99)


def _publish_after_pubrel(story: Story) -> None:
    message = story.message(qos=2)
    story.send(message)
    story.arrive(message)
    story.answer(message, "pubrec")
    story.release(message)
    story.die()
    story.connect("sub")
    story.arrive(message, dup=True)
    story.release(message)
    story.answer(message, "pubcomp")


def _a_handshake_without_an_end(story: Story) -> None:
    message = story.message(qos=2)
    story.send(message)
    story.arrive(message)
    story.answer(message, "pubrec")


def _the_publishers_repetition_delivered(story: Story) -> None:
    message = story.message(qos=2)
    story.send(message, accepted=False)
    story.die()
    story.connect("pub")
    story.connect("sub")
    story.send(message)
    for packet_id in (1, 2):
        story.arrive(message, packet_id, qos=1)
        story.answer(message, packet_id=packet_id)


def _again_after_it_was_settled(story: Story) -> None:
    message = story.message()
    story.send(message)
    story.deliver(message)
    story.settle()
    story.die()
    story.connect("sub")
    story.arrive(message, dup=True)
    story.answer(message)


def _more_often_than_sent(story: Story) -> None:
    message = story.message()
    story.send(message)
    for packet_id in (1, 2):
        story.arrive(message, packet_id)
        story.answer(message, packet_id=packet_id)


def _out_of_order(story: Story) -> None:
    messages = [story.message(), story.message()]
    for message in messages:
        story.send(message)
    for message in reversed(messages):
        story.deliver(message)


def _wills_out_of_order(story: Story) -> None:
    """Two connections died with the broker."""
    wills = [Message("will-pub", link, "t/will/pub", 1) for link in (8, 9)]
    for message in wills:
        story.note(facts.Publishing("pub", message.number, message, 0))
        story.die()
        story.connect("pub")
        story.connect("sub")
    for message in reversed(wills):
        story.deliver(message)


def _out_of_order_though_it_was_sent_again(story: Story) -> None:
    first, second = story.message(), story.message()
    story.send(first, accepted=False)
    story.send(second)
    story.deliver(second)
    story.connect("pub")
    story.send(first)
    story.deliver(first)


def _new_before_unsettled(story: Story) -> None:
    first, second = story.message(), story.message()
    story.send(first)
    story.arrive(first)
    story.send(second)
    story.connect("sub")
    story.deliver(second)
    story.arrive(first, dup=True)
    story.answer(first)


def _again_without_dup(story: Story) -> None:
    message = story.message()
    story.send(message)
    story.arrive(message)
    story.connect("sub")
    story.deliver(message)


def _unsettled_in_another_order(story: Story) -> None:
    messages = [story.message(), story.message()]
    for message in messages:
        story.send(message)
        story.arrive(message)
    story.connect("sub")
    for message in reversed(messages):
        story.arrive(message, dup=True)
        story.answer(message)


def _packet_id_in_use(story: Story) -> None:
    messages = [story.message(), story.message()]
    for message in messages:
        story.send(message)
        story.arrive(message, 7)
    story.answer(messages[1], packet_id=7)


def _subscription_forgotten(story: Story) -> None:
    story.note(facts.Stored("sub", {}, frozenset()))


def _subscription_haunts(story: Story) -> None:
    story.unsubscribe("t/#")
    message = story.message()
    story.send(message)
    story.deliver(message)


def _subscription_still_stored(story: Story) -> None:
    story.unsubscribe("t/#")
    story.note(facts.Stored("sub", {"t/#": 2}, frozenset()))


def _session_not_present(story: Story) -> None:
    story.connect("sub", present=False)


def _session_out_of_nowhere(story: Story) -> None:
    story.connect("sub", present=False, clean=True)
    story.connect("sub", present=True)


def _record_gone(story: Story) -> None:
    story.note(facts.Stored("sub", None, frozenset()))


def _inbound_id_forgotten(story: Story) -> None:
    message = story.message("x", qos=2)
    story.send(message)
    story.note(facts.Stored("pub", {}, frozenset()))


def _inbound_id_kept(story: Story) -> None:
    message = story.message("x", qos=2)
    story.send(message)
    story.complete(message)
    story.note(facts.Stored("pub", {}, frozenset({message.number})))


def _retained_lost(story: Story) -> None:
    story.send(story.message("x", retain=True))
    story.note(facts.Retained("store", {}))


def _retained_from_before(story: Story) -> None:
    old = story.message("x", retain=True)
    story.send(old)
    story.send(story.message("x", retain=True))
    story.note(facts.Retained("client", {"x": old.id}))


def _cleared_but_retained(story: Story) -> None:
    old = story.message("x", retain=True)
    story.send(old)
    story.send(story.message("x", retain=True, empty=True))
    story.note(facts.Retained("client", {"x": old.id}))


def _qos_0_twice(story: Story) -> None:
    message = story.message(qos=0)
    story.send_once(message)
    story.arrive(message)
    story.die()
    story.connect("pub")
    story.connect("sub")
    story.arrive(message)


def _higher_qos_than_published(story: Story) -> None:
    message = story.message(qos=1)
    story.send(message)
    story.arrive(message, qos=2)
    story.answer(message, "pubrec")
    story.release(message)
    story.answer(message, "pubcomp")


def _old_connection_served(story: Story) -> None:
    old = story.links["sub"]
    story.connect("sub")
    message = story.message()
    story.send(message)
    story.deliver(message)
    story.note(facts.Delivered("sub", old, message.id, 9, 1, dup=False, retain=False))


def _gone_before_it_expired(story: Story) -> None:
    story.be_brief()
    story.wait(1000)
    story.connect("sub", present=False)


def _there_when_it_had_expired(story: Story) -> None:
    story.be_brief()
    story.wait(3100)
    story.connect("sub")


def _there_when_the_broker_was_back_for_long(story: Story) -> None:
    story.be_brief()
    story.die()
    story.connect("pub")
    story.wait(2100)
    story.connect("sub")


def _message_later_than_its_expiry(story: Story) -> None:
    message = story.message(expiry_s=1)
    story.send(message)
    story.wait(3000)
    story.deliver(message)


def _retained_after_its_expiry(story: Story) -> None:
    message = story.message("x", retain=True, expiry_s=1)
    story.send(message)
    story.wait(5000)
    story.note(facts.Retained("client", {"x": message.id}))


def _check_found_something(story: Story) -> None:
    story.note(facts.Found(("a row without its index",), ""))


def _generation_minted(story: Story) -> None:
    story.note(facts.Found((), "restored from a backup"))


def _broker_down(story: Story) -> None:
    story.note(facts.Failed("down", "no last start"))


@pytest.mark.parametrize(
    ("promise", "happens"),
    [
        ("lost", _lost),
        ("twice", _qos_2_in_two_deliveries),
        ("twice", _publish_after_pubrel),
        ("twice", _a_handshake_without_an_end),
        ("twice", _the_publishers_repetition_delivered),
        ("again", _again_after_it_was_settled),
        ("again", _more_often_than_sent),
        ("order", _out_of_order),
        ("order", _wills_out_of_order),
        ("order", _out_of_order_though_it_was_sent_again),
        ("redelivery", _new_before_unsettled),
        ("redelivery", _again_without_dup),
        ("redelivery", _unsettled_in_another_order),
        ("reused", _packet_id_in_use),
        ("forgotten", _subscription_forgotten),
        ("haunting", _subscription_haunts),
        ("haunting", _subscription_still_stored),
        ("session", _session_not_present),
        ("session", _session_out_of_nowhere),
        ("session", _record_gone),
        ("inbound", _inbound_id_forgotten),
        ("inbound", _inbound_id_kept),
        ("retained", _retained_lost),
        ("retained", _retained_from_before),
        ("retained", _cleared_but_retained),
        ("qos", _higher_qos_than_published),
        ("once", _qos_0_twice),
        ("owner", _old_connection_served),
        ("session", _gone_before_it_expired),
        ("expired", _there_when_it_had_expired),
        ("expired", _there_when_the_broker_was_back_for_long),
        ("expired", _message_later_than_its_expiry),
        ("retained", _retained_after_its_expiry),
        ("check", _check_found_something),
        ("check", _generation_minted),
        ("down", _broker_down),
    ],
)
def test_a_broken_promise_is_counted_once(promise: str, happens: Callable[[Story], None]) -> None:
    story = Story()
    story.begin()
    happens(story)
    story.end()
    assert counted(story) == {promise: 1}


@pytest.mark.parametrize(
    ("topic_filter", "topic", "expected"),
    [
        ("t/#", "t", True),
        ("t/#", "t/1/2", True),
        ("t/+", "t/1", True),
        ("t/+", "t/1/2", False),
        ("+/1", "u/1", True),
        ("t/1", "t/10", False),
        ("#", "u/kept/x/1", True),
    ],
)
def test_the_judge_matches_filters_by_itself(
    topic_filter: str, topic: str, *, expected: bool
) -> None:
    assert matches(topic_filter, topic) is expected


# ------------------------------------------------------------------------------- a group

CREW = "$share/crew/t/#"


class Crew(Story):
    """``one`` and ``two`` share a subscription; both speak of it by themselves."""

    def begin(self) -> None:
        self.connect("pub", present=False)
        for member in ("one", "two"):
            self.connect(member, present=False)
            self.tickets += 1
            link = self.links[member]
            self.note(facts.Subscribing(member, link, self.tickets, ((CREW, 2),)))
            self.note(facts.Subscribed(member, self.tickets, (2,)))

    def give(self, member: str, message: Message, packet_id: int = 1, *, dup: bool = False) -> None:
        link, qos = self.links[member], message.qos
        self.note(facts.Delivered(member, link, message.id, packet_id, qos, dup, retain=False))

    def finish(self, member: str, qos: int = 1, packet_id: int = 1) -> None:
        link = self.links[member]
        for kind in ("puback",) if qos == 1 else ("pubrec", "pubcomp"):
            if kind == "pubcomp":
                self.note(facts.Releasing(member, link, packet_id))
            self.note(facts.Acknowledged(member, link, packet_id, kind))

    def prove(self, member: str) -> None:
        asked = self.note(facts.Pinging(member, self.links[member]))
        self.note(facts.Ponged(member, self.links[member], asked))
        message = self.message("t/elsewhere")
        self.send(message)
        self.give(member, message, 90)
        self.finish(member, packet_id=90)


def _one_each(crew: Crew) -> None:
    for member, qos in (("one", 1), ("two", 2), ("one", 2)):
        message = crew.message(qos=qos)
        crew.send(message)
        crew.give(member, message)
        crew.finish(member, qos)


def _handed_on(crew: Crew) -> None:
    message = crew.message()
    crew.send(message)
    crew.give("one", message)
    crew.give("two", message)
    crew.finish("two")
    crew.connect("one")
    other = crew.message()
    crew.send(other)
    crew.give("one", other)
    crew.finish("one")


def _handed_on_and_back_under_the_same_packet_id(crew: Crew) -> None:
    message = crew.message()
    crew.send(message)
    crew.give("one", message)
    crew.connect("one")
    crew.give("two", message)
    crew.connect("two")
    crew.give("one", message)
    crew.finish("one")


def _handed_on_and_back_unsent(crew: Crew) -> None:
    message = crew.message()
    crew.send(message)
    crew.give("one", message)
    crew.note(facts.Left("one", crew.links["one"], None))
    crew.connect("two")  # it was for this one, who left before it was sent it
    crew.connect("one")
    crew.give("one", message)
    crew.finish("one")


def _handed_on_and_back_past_one_who_was_there_before(crew: Crew) -> None:
    crew.connect("one")
    message = crew.message()
    crew.send(message)
    crew.give("one", message)
    crew.note(facts.Left("one", crew.links["one"], None))
    crew.give("two", message)
    crew.note(facts.Left("two", crew.links["two"], None))
    crew.connect("one")
    crew.give("one", message)
    crew.finish("one")


def _waits_for_its_member(crew: Crew) -> None:
    message = crew.message(qos=2)
    crew.send(message)
    crew.give("one", message)
    crew.die()
    crew.connect("one")
    crew.give("one", message, dup=True)
    crew.finish("one", 2)


def _left_alone(crew: Crew) -> None:
    crew.send(crew.message())


def _never_finished(crew: Crew) -> None:
    message = crew.message()
    crew.send(message)
    crew.give("one", message)


def _qos_2_to_two_members(crew: Crew) -> None:
    message = crew.message(qos=2)
    crew.send(message)
    crew.give("one", message)
    crew.finish("one", 2)
    crew.give("two", message)
    crew.finish("two", 2)


def _again_in_the_group(crew: Crew) -> None:
    message = crew.message()
    crew.send(message)
    crew.give("one", message)
    crew.finish("one")
    crew.prove("one")
    crew.give("two", message)
    crew.finish("two")


def _read_by_who_has_left(crew: Crew) -> None:
    message = crew.message()
    crew.send(message)
    crew.note(facts.Left("two", crew.links["two"], None))  # it was sent, and handed on then
    crew.give("one", message)
    crew.finish("one")
    crew.prove("one")
    crew.give("two", message)


def _id_in_use_in_the_group(crew: Crew) -> None:
    first, second = crew.message(), crew.message()
    crew.send(first)
    crew.send(second)
    crew.give("one", first)
    crew.give("one", second)
    crew.finish("one")
    crew.give("two", first)
    crew.finish("two")


def _without_dup_in_the_group(crew: Crew) -> None:
    message = crew.message()
    crew.send(message)
    crew.note(facts.Left("two", crew.links["two"], None))
    crew.connect("one")
    crew.give("one", message)
    crew.connect("one")  # nobody else was there
    crew.give("one", message)
    crew.finish("one")


@pytest.mark.parametrize(
    ("promise", "happens"),
    [
        ("", _one_each),
        ("", _handed_on),
        ("", _handed_on_and_back_under_the_same_packet_id),
        ("", _handed_on_and_back_unsent),
        ("", _handed_on_and_back_past_one_who_was_there_before),
        ("", _waits_for_its_member),
        ("lost", _left_alone),
        ("", _read_by_who_has_left),
        ("lost", _never_finished),
        ("twice", _qos_2_to_two_members),
        ("again", _again_in_the_group),
        ("reused", _id_in_use_in_the_group),
        ("redelivery", _without_dup_in_the_group),
    ],
)
def test_a_group_is_judged_as_one(promise: str, happens: Callable[[Crew], None]) -> None:
    crew = Crew()
    crew.begin()
    happens(crew)
    for member in ("one", "two"):
        crew.note(facts.Drained(member))
    violations = judge(crew.history, shared=CREW).violations
    assert {p: n for p, n in violations.items() if n} == ({promise: 1} if promise else {})
