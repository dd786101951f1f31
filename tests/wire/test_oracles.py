"""Other people's codecs: what amqtt and paho write, we read, and the other way round."""

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from amqtt.adapters import BufferReader
from amqtt.mqtt.connack import ConnackPacket
from amqtt.mqtt.connect import ConnectPacket, ConnectPayload, ConnectVariableHeader
from amqtt.mqtt.puback import PubackPacket
from amqtt.mqtt.publish import PublishPacket
from amqtt.mqtt.pubrel import PubrelPacket
from amqtt.mqtt.suback import SubackPacket
from amqtt.mqtt.subscribe import SubscribePacket
from amqtt.mqtt.unsuback import UnsubackPacket
from amqtt.mqtt.unsubscribe import UnsubscribePacket
from hypothesis import given
from hypothesis import strategies as st
from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties as PahoProperties
from paho.mqtt.reasoncodes import ReasonCode

from broker_ext.wire import (
    PROPERTIES,
    Connack,
    Connect,
    ConnectWill,
    Decoder,
    Disconnect,
    Packet,
    Properties,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Suback,
    Subscribe,
    SubscribeFilter,
    Unsuback,
    Unsubscribe,
    encode,
    encode_properties,
    valid_reason,
)
from broker_ext.wire.fields import Fields
from broker_ext.wire.kinds import PUBLISH, WILL
from broker_ext.wire.properties import read_properties
from tests.wire import strategies

paho_properties: Any = PahoProperties  # untyped, and its attributes are made as they are set

topics = strategies.topics.map(bytes.decode)
filters = strategies.filters.map(bytes.decode)


def read(raw: bytes, *, version: int = 4, server: bool = True) -> Packet:
    reader = Decoder(version=version, server=server)
    (packet,) = reader.feed(raw)
    assert reader.error is None
    return packet


# amqtt -> ours


@given(topics, st.binary(max_size=300), st.integers(0, 2), st.booleans(), st.booleans())
def test_a_publish_that_amqtt_wrote(
    topic: str, payload: bytes, qos: int, retain: bool, again: bool
) -> None:
    dup = again and qos > 0
    packet_id = 77 if qos else 0
    theirs = PublishPacket.build(topic, payload, packet_id or None, dup, qos, retain)
    flags = dup << 3 | qos << 1 | retain
    assert read(theirs.to_bytes()) == Publish(flags, topic.encode(), packet_id, payload)


@given(st.lists(st.tuples(filters, st.integers(0, 2)), min_size=1, max_size=4))
def test_a_subscribe_that_amqtt_wrote(wanted: list[tuple[str, int]]) -> None:
    theirs = SubscribePacket.build(wanted, 9)
    ours = Subscribe(9, tuple(SubscribeFilter(name.encode(), qos) for name, qos in wanted))
    assert read(theirs.to_bytes()) == ours


@given(st.lists(filters, min_size=1, max_size=4))
def test_an_unsubscribe_that_amqtt_wrote(wanted: list[str]) -> None:
    theirs = UnsubscribePacket.build(wanted, 9)
    assert read(theirs.to_bytes()) == Unsubscribe(9, tuple(map(str.encode, wanted)))


def test_a_connect_that_amqtt_wrote() -> None:
    head = ConnectVariableHeader(0, 30)
    head.clean_session_flag = True
    head.will_flag = head.will_retain_flag = True
    head.will_qos = 1
    head.username_flag = head.password_flag = True
    theirs = ConnectPacket(None, head, ConnectPayload("id", "will", b"\xff\x00", "user", "pass"))
    reader = Decoder()
    will = ConnectWill(b"will", b"\xff\x00", 1, True)
    assert reader.feed(theirs.to_bytes()) == [Connect(4, b"id", True, 30, b"user", b"pass", will)]


def test_answers_that_amqtt_wrote() -> None:
    assert read(ConnackPacket.build(1, 0).to_bytes(), server=False) == Connack(True, 0)
    assert read(SubackPacket.build(9, [0, 1, 128]).to_bytes(), server=False) == Suback(
        9, b"\0\1\x80"
    )
    assert read(UnsubackPacket.build(9).to_bytes(), server=False) == Unsuback(9)
    assert read(PubackPacket.build(9).to_bytes()) == Puback(9)
    assert read(PubrelPacket.build(9).to_bytes()) == Pubrel(9)


# ours -> amqtt


@pytest.mark.parametrize("payload", [b"", b"\xff\x00", bytes(300), bytes(20_000)])
@pytest.mark.parametrize("flags", [0, 1, 2, 11, 4, 13])
async def test_amqtt_reads_our_publish(payload: bytes, flags: int) -> None:
    packet_id = 513 if flags & 6 else 0
    raw = encode(Publish(flags, "a/\u20ac".encode(), packet_id, payload))
    theirs = await PublishPacket.from_stream(BufferReader(raw))
    assert theirs.topic_name == "a/\u20ac"
    assert theirs.data == payload
    assert (theirs.qos, theirs.retain_flag, theirs.dup_flag) == (
        flags >> 1 & 3,
        bool(flags & 1),
        bool(flags & 8),
    )
    assert (theirs.packet_id or 0) == packet_id


async def test_amqtt_reads_our_connect() -> None:
    will = ConnectWill(b"will", b"\xff\x00", 2, True)
    raw = encode(Connect(4, b"id", False, 30, b"user", b"pass", will))
    theirs = await ConnectPacket.from_stream(BufferReader(raw))
    assert (theirs.proto_name, theirs.proto_level) == ("MQTT", 4)
    assert (theirs.client_id, theirs.clean_session_flag, theirs.keep_alive) == ("id", False, 30)
    assert (theirs.username, theirs.password) == ("user", "pass")
    assert (theirs.will_topic, theirs.will_message) == ("will", b"\xff\x00")
    assert (theirs.will_qos, theirs.will_retain_flag) == (2, True)


async def test_amqtt_reads_our_subscriptions_and_answers() -> None:
    raw = encode(Subscribe(9, (SubscribeFilter(b"a/#", 1), SubscribeFilter(b"+", 2))))
    subscribe = await SubscribePacket.from_stream(BufferReader(raw))
    assert subscribe.payload is not None
    assert subscribe.payload.topics == [("a/#", 1), ("+", 2)]
    raw = encode(Unsubscribe(9, (b"a/#", b"+")))
    unsubscribe = await UnsubscribePacket.from_stream(BufferReader(raw))
    assert unsubscribe.payload is not None
    assert unsubscribe.payload.topics == ["a/#", "+"]
    suback = await SubackPacket.from_stream(BufferReader(encode(Suback(9, b"\1\x80"))))
    assert suback.payload is not None
    assert suback.payload.return_codes == [1, 128]
    connack = await ConnackPacket.from_stream(BufferReader(encode(Connack(False, 5))))
    assert (connack.session_parent, connack.return_code) == (0, 5)
    puback = await PubackPacket.from_stream(BufferReader(encode(Puback(515))))
    assert puback.packet_id == 515


# paho <-> ours


class Listener:
    """A server for one connection: keeps what it reads, and answers as a broker would."""

    def __init__(self, versions: frozenset[int]) -> None:
        self.packets: list[Packet] = []
        self.error: Exception | None = None
        self._decoder = Decoder(versions=versions)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.settimeout(10)
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        connection, _ = self._socket.accept()
        connection.settimeout(10)
        with connection:
            while data := connection.recv(7):  # little at a time: packets come in pieces
                for packet in self._decoder.feed(data):
                    self.packets.append(packet)
                    for answer in self._answers(packet):
                        connection.sendall(encode(answer, self._decoder.version))
                if self._decoder.error is not None:
                    return

    def _answers(self, packet: Packet) -> Iterator[Packet]:
        match packet:
            case Connect():
                yield Connack(False)
            case Subscribe():
                yield Suback(packet.packet_id, bytes(one.qos for one in packet.filters))
                yield Publish(0, b"back", 0, b"\xff\x00")
            case Unsubscribe():
                reasons = bytes(len(packet.filters)) if self._decoder.version == 5 else b""
                yield Unsuback(packet.packet_id, reasons)
            case Publish(flags, _, packet_id) if flags & 6:
                yield Puback(packet_id) if packet.qos == 1 else Pubrec(packet_id)
            case Pubrel():
                yield Pubcomp(packet.packet_id)

    def close(self) -> None:
        self._thread.join(10)
        self._socket.close()
        assert not self._thread.is_alive()
        assert self._decoder.error is None, self._decoder.error


def converse(
    version: int, prepare: Callable[[paho.Client], None]
) -> tuple[list[Packet], list[paho.MQTTMessage]]:
    """Let paho say everything it can say; return what we read and what it received."""
    listener = Listener(frozenset({version}))
    messages: list[paho.MQTTMessage] = []
    steps = {name: threading.Event() for name in ("connect", "subscribe", "message", "unsubscribe")}
    client = paho.Client(CallbackAPIVersion.VERSION2, "id", protocol=MQTTProtocolVersion(version))
    prepare(client)
    client.on_connect = lambda *_: steps["connect"].set()
    client.on_subscribe = lambda *_: steps["subscribe"].set()
    client.on_unsubscribe = lambda *_: steps["unsubscribe"].set()

    def on_message(_client: paho.Client, _data: object, message: paho.MQTTMessage) -> None:
        messages.append(message)
        steps["message"].set()

    client.on_message = on_message
    client.connect("127.0.0.1", listener.port, 60)
    client.loop_start()
    assert steps["connect"].wait(10)
    client.subscribe([("a/#", 1), ("b", 2)])
    assert steps["subscribe"].wait(10)
    assert steps["message"].wait(10)
    for qos in (0, 1, 2):
        client.publish("a/\u20ac", b"\xff\x00", qos, retain=qos == 1).wait_for_publish(10)
    client.unsubscribe(["a/#", "b"])
    assert steps["unsubscribe"].wait(10)
    client.disconnect()
    client.loop_stop()
    listener.close()
    return listener.packets, messages


@pytest.mark.parametrize("version", [3, 4])
def test_paho_and_we_understand_each_other(version: int) -> None:
    def prepare(client: paho.Client) -> None:
        client.username_pw_set("user", "pass")
        client.will_set("will", b"\xff\x00", 1, retain=True)

    packets, messages = converse(version, prepare)
    will = ConnectWill(b"will", b"\xff\x00", 1, True)
    topic = "a/\u20ac".encode()
    assert packets == [
        Connect(version, b"id", True, 60, b"user", b"pass", will),
        Subscribe(1, (SubscribeFilter(b"a/#", 1), SubscribeFilter(b"b", 2))),
        Publish(0, topic, 0, b"\xff\x00"),
        Publish(3, topic, 3, b"\xff\x00"),
        Publish(4, topic, 4, b"\xff\x00"),
        Pubrel(4),
        Unsubscribe(5, (b"a/#", b"b")),
        Disconnect(),
    ]
    assert [(message.topic, message.payload) for message in messages] == [("back", b"\xff\x00")]


def test_paho_and_we_understand_each_other_in_mqtt_5() -> None:
    def prepare(client: paho.Client) -> None:
        will = paho_properties(PacketTypes.WILLMESSAGE)
        will.WillDelayInterval = 5
        client.username_pw_set("user", "pass")
        client.will_set("will", b"\xff\x00", 1, retain=True, properties=will)

    packets, messages = converse(5, prepare)
    will = ConnectWill(b"will", b"\xff\x00", 1, True, Properties(((24, 5),)))
    topic = "a/\u20ac".encode()
    assert packets == [
        Connect(5, b"id", True, 60, b"user", b"pass", will),
        Subscribe(1, (SubscribeFilter(b"a/#", 1), SubscribeFilter(b"b", 2))),
        Publish(0, topic, 0, b"\xff\x00"),
        Publish(3, topic, 3, b"\xff\x00"),
        Publish(4, topic, 4, b"\xff\x00"),
        Pubrel(4),
        Unsubscribe(5, (b"a/#", b"b")),
        Disconnect(),
    ]
    assert [(message.topic, message.payload) for message in messages] == [("back", b"\xff\x00")]


def test_properties_that_paho_wrote() -> None:
    theirs = paho_properties(PacketTypes.PUBLISH)
    theirs.PayloadFormatIndicator = 1
    theirs.MessageExpiryInterval = 60
    theirs.ContentType = "text/plain"
    theirs.ResponseTopic = "r"
    theirs.CorrelationData = b"\xff\x00"
    theirs.UserProperty = [("k", "v"), ("k", "w")]
    ours = read_properties(Fields(theirs.pack()), PUBLISH)
    assert ours is not None
    assert ours.get(1) == 1
    assert ours.get(2) == 60
    assert (ours.get(3), ours.get(8), ours.get(9)) == (b"text/plain", b"r", b"\xff\x00")
    assert ours.all(38) == ((b"k", b"v"), (b"k", b"w"))


def test_paho_reads_our_properties() -> None:
    ours = Properties(((2, 60), (38, (b"k", b"v")), (9, b"\xff\x00"), (35, 9), (38, (b"k", b"w"))))
    theirs = paho_properties(PacketTypes.PUBLISH)
    theirs.unpack(encode_properties(ours, PUBLISH))
    assert (theirs.MessageExpiryInterval, theirs.TopicAlias) == (60, 9)
    assert theirs.CorrelationData == b"\xff\x00"
    assert theirs.UserProperty == [("k", "v"), ("k", "w")]


def test_the_table_of_properties_is_that_of_paho() -> None:
    theirs = paho_properties(PacketTypes.PUBLISH)
    kinds = {
        ident: {WILL if kind == PacketTypes.WILLMESSAGE else kind for kind in found}
        for ident, (_, found) in theirs.properties.items()
    }
    assert {ident: set(rule.kinds) for ident, rule in PROPERTIES.items()} == kinds
    names = {ident: name for name, ident in theirs.names.items()}
    assert {ident: rule.name for ident, rule in PROPERTIES.items()} == names


def test_the_table_of_reasons_is_that_of_paho_but_for_one_it_lacks() -> None:
    theirs = ReasonCode(PacketTypes.CONNACK).names
    kinds = {
        code: {kind for found in names.values() for kind in found} for code, names in theirs.items()
    }
    kinds[0x99].add(PacketTypes.CONNACK)  # section 3.2.2.2: of the will's payload
    for code in range(256):
        for kind in range(1, 16):
            assert valid_reason(kind, code) == (kind in kinds.get(code, ())), (code, kind)
