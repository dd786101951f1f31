// Clients of MQTT.js, told what to do by lines of JSON on stdin; what they see goes to stdout.

const mqtt = require("mqtt");
const lines = require("readline").createInterface({ input: process.stdin });

const clients = new Map();
const say = (what) => process.stdout.write(JSON.stringify(what) + "\n");
const pairs = (user) =>
  Object.entries(user ?? {}).flatMap(([k, v]) => [v].flat().map((one) => [k, one]));

const commands = {
  connect({ id, port, clientId, clean, expiry, window, will }) {
    const properties = { sessionExpiryInterval: expiry };
    if (window) properties.receiveMaximum = window;
    const client = mqtt.connect({
      host: "127.0.0.1", port, clientId, clean, properties,
      protocolVersion: 5, reconnectPeriod: 0, keepalive: 30,
      will: will && {
        topic: will.topic, payload: Buffer.from(will.payload, "base64"), qos: 1,
        properties: { willDelayInterval: will.delay },
      },
    });
    client.setMaxListeners(0);
    clients.set(id, client);
    client.on("connect", (packet) => say({
      id, is: "connack", present: packet.sessionPresent, reason: packet.reasonCode,
      text: packet.properties?.reasonString ?? "", user: pairs(packet.properties?.userProperties),
    }));
    client.on("disconnect", (packet) => say({ id, is: "end", reason: packet.reasonCode }));
    client.on("close", () => say({ id, is: "closed" }));
    client.on("error", (error) => say({ id, is: "error", text: String(error), code: error.code }));
    client.on("message", (topic, payload, packet) => say({
      id, is: "message", topic, payload: payload.toString("base64"), qos: packet.qos,
      retain: packet.retain, user: pairs(packet.properties?.userProperties),
      expiry: packet.properties?.messageExpiryInterval ?? null,
    }));
  },
  subscribe({ id, filter, qos }) {
    clients.get(id).subscribe(filter, { qos }, (error, _granted, packet) =>
      say({ id, is: "suback", reason: packet?.granted?.[0] ?? error?.code ?? 0x80 }));
  },
  publish({ id, topic, payloads, qos, expiry, user }) {
    const properties = {};
    if (expiry !== null) properties.messageExpiryInterval = expiry;
    if (user.length) properties.userProperties = Object.fromEntries(user);
    const sent = payloads.map((payload) => clients.get(id).publishAsync(
      topic, Buffer.from(payload, "base64"), { qos, properties }));
    Promise.all(sent).then(() => say({ id, is: "published" }));
  },
  down({ id }) {
    clients.get(id).end(false, {}, () => say({ id, is: "down" }));
  },
  cut({ id }) {
    clients.get(id).stream.destroy();
  },
};

lines.on("line", (line) => {
  const what = JSON.parse(line);
  commands[what.do](what);
});
lines.on("close", () => process.exit(0));
say({ is: "ready" });
