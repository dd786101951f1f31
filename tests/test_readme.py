"""What README.md says of options, commands and configuration files is so."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from broker_ext import DurableSessionPlugin
from broker_ext.cli import app, outbox_app
from broker_ext.cli.serving import our_plugin, serving_config
from broker_ext.sinks.settings import BridgeSettings, TlsSettings, WebhookSettings

README = (Path(__file__).parent.parent / "README.md").read_text()
UNITS = {"MiB": 1 << 20, "s": 1, "days": 86_400}
NONE = ("none", "half of what the disk has free at start")


def section(head: str, end: str) -> str:
    return README.partition(f"\n{head}\n")[2].partition(f"\n{end}\n")[0]


def rows(text: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in text.splitlines()
        if line.startswith("|") and not line.startswith(("| option", "|---"))
    ]


def documented() -> dict[str, str]:
    """Option -> its default, as the tables have it."""
    found: dict[str, str] = {}
    for names, default, _ in rows(section("## Configuration", "### MQTT 5")):
        options = re.findall(r"`(\w+)`", names)
        defaults = re.split(r", (?!\d{3}\b)", default)
        found |= zip(
            options, defaults * len(options) if len(defaults) == 1 else defaults, strict=True
        )
    return found


def value(text: str) -> Any:
    text = text.strip("`")
    if text in NONE:
        return None
    number, _, unit = text.replace(",", "").partition(" ")
    if re.fullmatch(r"[\d.]+", number):
        return float(number) * UNITS[unit or "s"]
    return {"true": True, "false": False}.get(text, text)


def test_every_option_is_in_a_table_with_its_default() -> None:
    told = documented()
    fields = {one.name: one for one in dataclasses.fields(DurableSessionPlugin.Config)}
    del fields["seal_key"]  # it is there to be refused
    assert told.keys() == fields.keys()
    config = DurableSessionPlugin.Config()
    for name, text in told.items():
        assert (getattr(config, name) or None) == (value(text) or None), name


def test_every_option_of_a_sink_is_in_its_table() -> None:
    told = set(re.findall(r"`(\w+)`", section("### Webhooks and bridges", "### Sealed messages")))
    for kind in (WebhookSettings, BridgeSettings, TlsSettings):
        names = {one.name for one in dataclasses.fields(kind)} - {"name"}
        assert names <= told | {"type"}, names - told


@pytest.mark.parametrize(
    "text", re.findall(r"```yaml\n(.*?)```", README, re.DOTALL), ids=lambda text: text.split(":")[0]
)
def test_every_configuration_is_taken(text: str) -> None:
    loaded = yaml.safe_load(textwrap.dedent(text))
    if "plugins" not in loaded:
        loaded = {"plugins": loaded if "listeners" not in loaded else {}, **loaded}
        loaded = {key: loaded[key] for key in ("plugins", "listeners") if key in loaded}
    for listener in loaded.get("listeners", {}).values():
        listener["bind"] = listener["bind"].replace("0.0.0.0", "127.0.0.1")  # noqa: S104
    plugins = serving_config(loaded)["plugins"]
    DurableSessionPlugin.Config(**plugins[our_plugin(plugins)])


def test_every_command_is_there() -> None:
    top = {str(one.name or one.callback.__name__) for one in app.registered_commands}  # type: ignore[union-attr]
    below = {str(one.name) for one in outbox_app.registered_commands}
    told = set(re.findall(r"amqtt-durable ([a-z]+)", README)) - {"database"}
    assert told == top | {"outbox"}
    listed = re.findall(r"\| `amqtt-durable outbox ([^|]*)\|", README)
    assert set(re.findall(r"(?:^|`)([a-z][a-z-]{3,})", listed[0])) == below


@pytest.mark.parametrize("text", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_every_program_can_be_read(text: str) -> None:
    compile("async def example():\n" + textwrap.indent(text, "    "), "README.md", "exec")


def test_every_place_it_points_to_is_there() -> None:
    heads = re.findall(r"^#+ (.*)$", README, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in heads}
    for anchor in re.findall(r"\]\(#([^)]*)\)", README):
        assert anchor in anchors
    for file in re.findall(r"\]\(([\w/]+\.md)", README):
        assert (Path(__file__).parent.parent / file).exists()
