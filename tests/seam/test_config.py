"""The options in YAML: every value that is refused, and what it is told."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import pytest
from amqtt.broker import Broker
from amqtt.errors import PluginError

from broker_ext import DurableSessionPlugin
from broker_ext.settings import Settings
from tests.seam.amqtt_broker import configuration, running

if TYPE_CHECKING:
    from pathlib import Path

Config = DurableSessionPlugin.Config

WORDS: dict[str, tuple[str, ...]] = {
    "store": ("lmdb", "sqlite"),
    "durability": ("fsync", "os"),
    "shared_order": ("free", "topic"),
    "on_generation_change": ("resume", "reset"),
    "on_history_pruned": ("reset", "skip"),
}
NUMBERS: dict[str, tuple[float, float | None]] = {
    "max_inflight": (1, 65_535),
    "max_packet_bytes": (1024, 268_435_455),
    "max_client_id_bytes": (23, 65_535),
    "max_qos": (0, 2),
    "receive_maximum": (1, 65_535),
    "topic_alias_maximum": (0, 65_535),
    "max_keep_alive": (0, 65_535),
    "max_queued_messages": (1, None),
    "max_queued_bytes": (1, None),
    "max_retained_messages": (0, None),
    "max_retained_bytes": (0, None),
    "commit_bytes_max": (65_536, None),
    "connect_timeout": (0.1, None),
    "takeover_timeout": (0.1, None),
    "max_connects_per_second": (0.1, None),
    "checkpoint_interval": (0.1, None),
    "retain_for": (0, None),
    "max_age": (1, None),
    "max_bytes": (0, None),
    "max_messages": (1, None),
    "max_delivery_attempts": (0, 255),
    "will_recovery_delay": (0, None),
    "map_bytes_max": (1 << 20, None),
    "keep_done": (0, None),
    "keep_dead": (0, None),
}
OTHERS = {
    "data",
    "history_filters",
    "publish_wills_after_crash",
    "queue_qos0",
    "response_information",
    "sinks",
    "wildcard_subscriptions",
    "subscription_identifiers",
    "filters",
    "seal_key",
    "seal_key_file",
    "seal_key_env",
    "seal_topics",
}
SECONDS = [name for name, (low, _) in NUMBERS.items() if isinstance(low, float)] + [
    "retain_for",
    "max_age",
    "will_recovery_delay",
    "keep_done",
    "keep_dead",
]


def refused(tmp_path: Path, **options: Any) -> BaseException:
    """Why amqtt makes no broker of it: what `amqtt -c` tells in one line, as a PluginError."""
    with pytest.raises(PluginError, match=r"^broker_ext\.DurableSessionPlugin: ") as raised:
        Broker(configuration(tmp_path, options=options))
    assert str(raised.value).endswith(f": {raised.value.__cause__}")
    return raised.value.__cause__ or raised.value


def test_every_option_is_here() -> None:
    assert WORDS.keys() | NUMBERS.keys() | OTHERS == {f.name for f in fields(Config)}


@pytest.mark.parametrize("name", WORDS)
async def test_a_word_that_is_none_of_those_is_refused(tmp_path: Path, name: str) -> None:
    error = refused(tmp_path, **{name: "hope"})
    assert str(error) == f"{name} is 'hope'; it must be one of {', '.join(WORDS[name])}"
    for word in WORDS[name]:
        made: Any = {name: word}
        Config(**made)


@pytest.mark.parametrize("name", NUMBERS)
async def test_a_number_out_of_range_is_refused(tmp_path: Path, name: str) -> None:
    low, high = NUMBERS[name]
    wanted = f"at least {low}" if high is None else f"{low} to {high}"
    bad = [low - 1] if high is None else [low - 1, high + 1]
    for value in bad:
        given = float(value) if name in SECONDS else value
        error = refused(tmp_path, **{name: given})
        assert str(error) == f"{name} is {given}; it must be {wanted}"
    kind: Any = float if name in SECONDS else int
    Config(**{name: kind(low)})
    if high is not None:
        Config(**{name: kind(high)})


@pytest.mark.parametrize("name", SECONDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
async def test_a_time_that_is_no_number_is_refused(tmp_path: Path, name: str, value: float) -> None:
    assert str(refused(tmp_path, **{name: value})).startswith(f"{name} is {value}; it must be ")


@pytest.mark.parametrize("name", NUMBERS)
async def test_yes_is_no_number(tmp_path: Path, name: str) -> None:
    assert str(refused(tmp_path, **{name: True})).startswith(f"{name} is True; it must be ")


@pytest.mark.parametrize("name", sorted({f.name for f in fields(Config)}))
async def test_a_wrong_type_is_refused(tmp_path: Path, name: str) -> None:
    wrong = {"a": "m4p"} if name != "history_filters" else 1
    error = str(refused(tmp_path, **{name: wrong}))
    assert name in error
    assert "m4p" not in error


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"max_inflight": "x"}, "max_inflight is 'x'; it must be a whole number"),
        ({"max_inflight": 3.5}, "max_inflight is 3.5; it must be a whole number"),
        ({"max_inflight": None}, "max_inflight is empty; it must be a whole number"),
        ({"retain_for": "5 s"}, "retain_for is '5 s'; it must be a number"),
        ({"seal_topics": "yes"}, "seal_topics is 'yes'; it must be true or false"),
        ({"data": 5}, "data is 5; it must be text: put it in quotes"),
        ({"store": "x" * 100}, "store is a long text; it must be one of lmdb, sqlite"),
        ({"store": "QUJD" * 10 + "QUI="}, "store is a long text; it must be one of lmdb, sqlite"),
        ({"history_filters": "a/#"}, "history_filters is 'a/#'; it must be a list of texts"),
        ({"filters": ["a"]}, "filters is a list; it must be a mapping"),
        ({"max-inflight": 1}, "there is no option 'max-inflight'; did you mean 'max_inflight'?"),
        ({"max_inflght": 1}, "there is no option 'max_inflght'; did you mean 'max_inflight'?"),
        ({"password": "pst"}, "there is no option 'password'; README has them all"),
    ],
)
async def test_what_is_wrong_is_told_in_words(
    tmp_path: Path, options: dict[str, Any], told: str
) -> None:
    assert str(refused(tmp_path, **options)) == told


async def test_options_that_are_no_mapping_are_refused(tmp_path: Path) -> None:
    config = configuration(tmp_path)
    config["plugins"]["broker_ext.DurableSessionPlugin"] = ["data"]
    with pytest.raises(PluginError, match="its options are a list, not a mapping"):
        Broker(config)


@pytest.mark.parametrize("name", SECONDS)
async def test_seconds_may_be_whole(tmp_path: Path, name: str) -> None:
    async with running(tmp_path, options={name: 2}):
        pass


async def test_the_data_directory_has_a_name(tmp_path: Path) -> None:
    error = refused(tmp_path, data="")
    assert str(error) == "data is empty; it must name a directory"


async def test_a_filter_that_is_none_is_refused(tmp_path: Path) -> None:
    error = refused(tmp_path, history_filters=["a/#", "a#"])
    assert str(error).startswith("history_filters has 'a#', which is no topic filter")


@pytest.mark.parametrize("name", ["max-inflight", "max_inflght", "lease"])
async def test_an_unknown_option_is_refused_by_name(tmp_path: Path, name: str) -> None:
    assert name in str(refused(tmp_path, **{name: 1}))


async def test_every_option_is_the_setting_of_its_name(tmp_path: Path) -> None:
    opens = {"data", "store", "durability", "map_bytes_max"}
    opens |= {name for name in OTHERS if name.startswith("seal_")}
    settings = {one.name.removesuffix("_s") for one in fields(Settings)}
    assert {f.name for f in fields(Config)} - opens == settings & {f.name for f in fields(Config)}
    given: dict[str, Any] = {name: max(low, 1) for name, (low, _) in NUMBERS.items()}
    given |= {name: words[-1] for name, words in WORDS.items()}
    given |= dict.fromkeys(("publish_wills_after_crash", "wildcard_subscriptions"), False)
    given |= {"history_filters": ["a"], "response_information": "r"}
    async with running(tmp_path, options=given) as instance:
        told = instance.hub.settings
        for name in given.keys() - opens - {"history_filters"}:
            assert getattr(told, name, getattr(told, f"{name}_s", None)) == given[name]
        assert told.history_filters == ("a",)


def test_every_option_is_documented() -> None:
    import ast  # noqa: PLC0415 - here only
    import inspect  # noqa: PLC0415
    import textwrap  # noqa: PLC0415

    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(Config))).body
    assert isinstance(tree, ast.ClassDef)
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign):
            assert isinstance(text, ast.Expr), ast.unparse(field)
