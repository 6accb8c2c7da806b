import OpenAI from "openai";
import { ABOUT, ASK, CUT, HELLO, LOOK, PLACE, SCHEMA, SEEN, THINK, document, model, report, url, user } from "./cells.mjs";

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const tools = [{ type: "function", name: "look", description: ABOUT, parameters: PLACE, strict: true }];
const ask = (input, more = {}) => client.responses.create({ model, input, max_output_tokens: 60, ...more });

await report({
  async answer() {
    const done = await ask(HELLO);
    return { text: done.output_text, input: done.usage.input_tokens };
  },
  async stream() {
    const pieces = [];
    for await (const event of await ask(HELLO, { stream: true })) {
      if (event.type === "response.output_text.delta") pieces.push(event.delta);
    }
    return { pieces };
  },
  async tools() {
    const first = await ask(LOOK, { tools });
    const call = first.output.at(-1);
    const result = { type: "function_call_output", call_id: call.call_id, output: SEEN };
    const last = await ask([result], { tools, previous_response_id: first.id });
    return { call: [call.name, JSON.parse(call.arguments)], text: last.output_text };
  },
  async reasoning() {
    const done = await ask(THINK);
    return { reasoning: done.output[0].content[0].text, text: done.output_text };
  },
  async structured() {
    const format = { type: "json_schema", name: "kind", schema: SCHEMA, strict: true };
    return { value: JSON.parse((await ask(ASK, { text: { format } })).output_text) };
  },
  async documents() {
    const marked = { type: "input_text", text: document, prompt_cache_breakpoint: { mode: "explicit" } };
    const done = await ask(user([marked, { type: "input_text", text: ASK }]));
    return { cached: done.usage.input_tokens_details.cached_tokens };
  },
  async cut() {
    const done = await ask(CUT, { tools });
    return { calls: done.output.filter((item) => item.type === "function_call").length, reason: done.status };
  },
  error: () => ask(HELLO, { model: "nope" }),
});
