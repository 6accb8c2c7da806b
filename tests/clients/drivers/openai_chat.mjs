import OpenAI from "openai";
import { ABOUT, ASK, CUT, HELLO, LOOK, PLACE, SCHEMA, SEEN, THINK, cache, model, report, url, user } from "./cells.mjs";

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const tools = [{ type: "function", function: { name: "look", description: ABOUT, parameters: PLACE } }];
const ask = (messages, more = {}) => client.chat.completions.create({ model, messages, max_tokens: 60, ...more });

await report({
  async answer() {
    const done = await ask(user(HELLO));
    return { text: done.choices[0].message.content, input: done.usage.prompt_tokens };
  },
  async stream() {
    const pieces = [];
    for await (const chunk of await ask(user(HELLO), { stream: true })) pieces.push(chunk.choices[0]?.delta.content);
    return { pieces: pieces.filter(Boolean) };
  },
  async tools() {
    const { message } = (await ask(user(LOOK), { tools })).choices[0];
    const [call] = message.tool_calls;
    const last = await ask([...user(LOOK), message, { role: "tool", tool_call_id: call.id, content: SEEN }], { tools });
    return { call: [call.function.name, JSON.parse(call.function.arguments)], text: last.choices[0].message.content };
  },
  async reasoning() {
    const { message } = (await ask(user(THINK))).choices[0];
    return { reasoning: message.reasoning_content, text: message.content };
  },
  async structured() {
    const json_schema = { name: "kind", schema: SCHEMA, strict: true };
    const done = await ask(user(ASK), { response_format: { type: "json_schema", json_schema } });
    return { value: JSON.parse(done.choices[0].message.content) };
  },
  async documents() {
    return { cached: (await ask(user(ASK), { cache_ids: [cache] })).usage.prompt_tokens_details.cached_tokens };
  },
  async cut() {
    const choice = (await ask(user(CUT), { tools })).choices[0];
    return { calls: (choice.message.tool_calls ?? []).length, reason: choice.finish_reason };
  },
  error: () => ask(user(HELLO), { model: "nope" }),
});
