import Anthropic from "@anthropic-ai/sdk";
import { ABOUT, ASK, CUT, HELLO, LOOK, PLACE, SCHEMA, SEEN, THINK, document, model, report, url, user } from "./cells.mjs";

const client = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const tools = [{ name: "look", description: ABOUT, input_schema: PLACE }];
const ask = (messages, more = {}) => client.messages.create({ model, messages, max_tokens: 60, ...more });
const text = (message) => message.content.filter((block) => block.type === "text").map((block) => block.text).join("");

await report({
  async answer() {
    const done = await ask(user(HELLO));
    return { text: text(done), input: done.usage.input_tokens + done.usage.cache_read_input_tokens };
  },
  async stream() {
    const pieces = [];
    const stream = client.messages.stream({ model, messages: user(HELLO), max_tokens: 60 });
    stream.on("text", (piece) => pieces.push(piece));
    await stream.finalMessage();
    return { pieces };
  },
  async tools() {
    const first = await ask(user(LOOK), { tools });
    const [use] = first.content.filter((block) => block.type === "tool_use");
    const result = [{ type: "tool_result", tool_use_id: use.id, content: SEEN }];
    const last = await ask([...user(LOOK), { role: "assistant", content: first.content }, ...user(result)], { tools });
    return { call: [use.name, use.input], text: text(last) };
  },
  async reasoning() {
    const done = await ask(user(THINK));
    return { reasoning: done.content[0].thinking, text: text(done) };
  },
  async structured() {
    const done = await ask(user(ASK), { output_config: { format: { type: "json_schema", schema: SCHEMA } } });
    return { value: JSON.parse(text(done)) };
  },
  async documents() {
    const marked = { type: "text", text: document, cache_control: { type: "ephemeral" } };
    return { cached: (await ask(user([marked, { type: "text", text: ASK }]))).usage.cache_read_input_tokens };
  },
  async cut() {
    const done = await ask(user(CUT), { tools });
    return { calls: done.content.filter((block) => block.type === "tool_use").length, reason: done.stop_reason };
  },
  error: () => ask(user(HELLO), { model: "nope" }),
});
