"""Topic names and filters [MQTT-4.7]: one table, and the trees beside a naive model."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from broker_ext.topics import MATCHER_CACHE_MAX, FilterTree, TopicTree, matcher, matches

MATCHES: list[tuple[bytes, bytes, bool]] = [
    # exact, and bytes are compared as bytes [MQTT-4.7.3-4]
    (b"a", b"a", True),
    (b"a/b", b"a/b", True),
    (b"a", b"A", False),
    (b"a", b"a/b", False),
    (b"a/b", b"a", False),
    (b"\xc3\xa9", b"e\xcc\x81", False),  # the same letter, composed and not
    (b"a b/c", b"a b/c", True),
    # empty levels are levels
    (b"/", b"/", True),
    (b"a/", b"a", False),
    (b"a", b"a/", False),
    (b"/a", b"a", False),
    (b"a//b", b"a//b", True),
    (b"a//b", b"a/b", False),
    # '+' is exactly one level, an empty one too
    (b"+", b"a", True),
    (b"+", b"/a", False),
    (b"+/+", b"/a", True),
    (b"/+", b"/a", True),
    (b"/+", b"/", True),
    (b"+/+", b"/", True),
    (b"+", b"a/b", False),
    (b"a/+", b"a/b", True),
    (b"a/+", b"a/", True),
    (b"a/+", b"a", False),
    (b"a/+/c", b"a/b/c", True),
    (b"a/+/c", b"a//c", True),
    (b"a/+/c", b"a/b/c/d", False),
    (b"+/b", b"a/b", True),
    # '#' is any number of levels, none too
    (b"#", b"a", True),
    (b"#", b"/", True),
    (b"#", b"a/b/c", True),
    (b"a/#", b"a", True),
    (b"a/#", b"a/", True),
    (b"a/#", b"a/b/c", True),
    (b"a/#", b"ab", False),
    (b"a/#", b"b/a", False),
    (b"/#", b"/a", True),
    (b"/#", b"a", False),
    (b"+/#", b"a", True),
    (b"+/#", b"a/b/c", True),
    (b"a/+/#", b"a/b", True),
    (b"a/+/#", b"a", False),
    # no filter that begins with a wildcard matches a topic that begins with '$' [MQTT-4.7.2-1]
    (b"#", b"$SYS/uptime", False),
    (b"+/uptime", b"$SYS/uptime", False),
    (b"+", b"$SYS", False),
    (b"+/#", b"$SYS", False),
    (b"$SYS/#", b"$SYS/uptime", True),
    (b"$SYS/#", b"$SYS", True),
    (b"$SYS/+", b"$SYS/uptime", True),
    (b"$SYS/uptime", b"$SYS/uptime", True),
    (b"a/+", b"a/$b", True),
    (b"a/#", b"a/$b", True),
    (b"#", b"a/$SYS", True),
]


@pytest.mark.parametrize(("topic_filter", "topic", "expected"), MATCHES)
def test_a_filter_matches_what_the_specification_says(
    topic_filter: bytes, topic: bytes, expected: bool
) -> None:
    assert matches(topic_filter, topic) is expected
    tree: FilterTree[list[bytes]] = FilterTree(list)
    tree.at(topic_filter)
    assert (len(tree.match(topic)) == 1) is expected
    topics: TopicTree[int] = TopicTree()
    topics.put(topic, 1)
    assert (list(topics.match(topic_filter)) == [topic]) is expected
    assert matcher([(topic_filter, 2)])(topic) == (2 if expected else 0)


LEVEL = st.sampled_from([b"", b"a", b"b", b"$a", b"ab"])
TOPIC = st.lists(LEVEL, min_size=1, max_size=4).map(b"/".join)
FILTER = st.builds(
    lambda levels, more: b"/".join([*levels, *more]) or b"+",
    st.lists(st.one_of(LEVEL, st.just(b"+")), max_size=3),
    st.sampled_from([[], [b"#"], [b"a"]]),
)


def naive(topic_filter: bytes, topic: bytes) -> bool:
    """The rules of [MQTT-4.7], written the other way round."""
    if topic.startswith(b"$") and topic_filter[:1] in (b"+", b"#"):
        return False

    def same(wanted: list[bytes], levels: list[bytes]) -> bool:
        if wanted == [b"#"]:
            return True
        if not wanted or not levels:
            return not wanted and not levels
        return wanted[0] in (b"+", levels[0]) and same(wanted[1:], levels[1:])

    return same(topic_filter.split(b"/"), topic.split(b"/"))


@given(FILTER, TOPIC)
def test_matches_agrees_with_a_naive_model(topic_filter: bytes, topic: bytes) -> None:
    assert matches(topic_filter, topic) is naive(topic_filter, topic)


@given(st.lists(st.tuples(st.booleans(), FILTER), max_size=30), st.lists(TOPIC, max_size=5))
def test_a_filter_tree_finds_what_a_naive_model_finds(
    changes: list[tuple[bool, bytes]], topics: list[bytes]
) -> None:
    tree: FilterTree[list[bytes]] = FilterTree(list)
    model: set[bytes] = set()
    for put, topic_filter in changes:
        if put:
            place = tree.at(topic_filter)
            assert tree.at(topic_filter) is place
            assert tree.find(topic_filter) is place
            place[:] = [topic_filter]
            model.add(topic_filter)
        else:
            tree.remove(topic_filter)
            model.discard(topic_filter)
            assert tree.find(topic_filter) is None
        assert tree.size == len(model)
    for topic in topics:
        found = sorted(place[0] for place in tree.match(topic))
        assert found == sorted(f for f in model if naive(f, topic))


@given(st.sets(FILTER, max_size=20))
def test_a_filter_tree_keeps_nothing_of_what_was_removed(filters: set[bytes]) -> None:
    tree: FilterTree[list[bytes]] = FilterTree(list)
    for topic_filter in filters:
        tree.at(topic_filter)
    for topic_filter in filters:
        tree.remove(topic_filter)
    assert tree.size == 0
    assert not tree._exact
    assert tree._root.children is None
    assert tree._root.hash is None


@given(st.lists(st.tuples(st.booleans(), TOPIC), max_size=30), st.lists(FILTER, max_size=5))
def test_a_topic_tree_finds_what_a_naive_model_finds(
    changes: list[tuple[bool, bytes]], filters: list[bytes]
) -> None:
    tree: TopicTree[int] = TopicTree()
    model: dict[bytes, int] = {}
    for number, (put, topic) in enumerate(changes):
        if put:
            tree.put(topic, number)
            model[topic] = number
        else:
            tree.drop(topic)
            model.pop(topic, None)
    assert tree.values == model
    for topic_filter in filters:
        assert sorted(tree.match(topic_filter)) == sorted(
            topic for topic in model if naive(topic_filter, topic)
        )


def test_a_topic_tree_may_change_while_it_is_walked() -> None:
    tree: TopicTree[int] = TopicTree()
    for number in range(10):
        tree.put(b"a/%d" % number, number)
    walked: list[bytes] = []
    for topic in tree.match(b"a/+"):
        walked.append(topic)
        tree.drop(topic)
        tree.put(b"a/x" + topic, 0)
    assert len(walked) == 10


@given(st.lists(st.tuples(FILTER, st.sampled_from([1, 2])), max_size=10), st.lists(TOPIC))
def test_a_matcher_returns_the_highest_qos_of_overlapping_filters(
    grants: list[tuple[bytes, int]], topics: list[bytes]
) -> None:
    grants = list(dict(grants).items())  # a session has each filter once
    accept = matcher(grants)
    for topic in (*topics, *topics):
        assert accept(topic) == max((q for f, q in grants if naive(f, topic)), default=0)


def test_a_matcher_remembers_a_bounded_number_of_topics() -> None:
    accept = matcher([(b"+", 1), (b"a/b", 2)])
    for number in range(MATCHER_CACHE_MAX * 2 + 10):
        assert accept(b"%d" % number) == 1
    cache = accept.__closure__
    assert cache is not None
    sizes = [len(cell.cell_contents) for cell in cache if isinstance(cell.cell_contents, dict)]
    assert max(sizes) <= MATCHER_CACHE_MAX
