// Vercel's `ai` over chat, Responses and Messages: `node ai.mjs KIND`.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { Output, generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";
import { ABOUT, ASK, CUT, HELLO, LOOK, PLACE, SCHEMA, SEEN, THINK, document, model, report, url } from "./cells.mjs";

const kind = process.argv[2];
const options = { baseURL: `${url}/v1`, apiKey: "none" };
globalThis.AI_SDK_LOG_WARNINGS = false;
const named = (name) =>
  kind === "anthropic" ? createAnthropic(options)(name)
  : kind === "responses" ? createOpenAI(options).responses(name) : createOpenAI(options).chat(name);
const ask = (prompt, more = {}) =>
  generateText({ model: named(model), prompt, maxOutputTokens: 60, maxRetries: 0, ...more });
const tools = { look: tool({ description: ABOUT, inputSchema: jsonSchema(PLACE), execute: async () => SEEN }) };

await report({
  async answer() {
    const done = await ask(HELLO);
    return { text: done.text, input: done.usage.inputTokens };
  },
  async stream() {
    const pieces = [];
    const done = streamText({ model: named(model), prompt: HELLO, maxOutputTokens: 60, maxRetries: 0 });
    for await (const piece of done.textStream) pieces.push(piece);
    return { pieces: pieces.filter(Boolean) };
  },
  async tools() {
    const done = await ask(LOOK, { tools, stopWhen: stepCountIs(3) });
    const [call] = done.steps[0].toolCalls;
    return { call: [call.toolName, call.input], text: done.text };
  },
  async reasoning() {
    const done = await ask(THINK);
    return { reasoning: done.reasoningText ?? null, text: done.text };
  },
  async structured() {
    const done = await ask(ASK, { output: Output.object({ schema: jsonSchema(SCHEMA) }) });
    return { value: done.output };
  },
  async documents() {
    const marks = {
      anthropic: { anthropic: { cacheControl: { type: "ephemeral" } } },
      responses: { openai: { promptCacheBreakpoint: { mode: "explicit" } } },
      chat: { openai: { promptCacheBreakpoint: { mode: "explicit" } } },
    };
    const content = [{ type: "text", text: document, providerOptions: marks[kind] }, { type: "text", text: ASK }];
    const done = await ask(undefined, { messages: [{ role: "user", content }] });
    return { cached: done.usage.inputTokenDetails?.cacheReadTokens ?? done.usage.cachedInputTokens };
  },
  async cut() {
    const done = await ask(CUT, { tools });
    return { calls: done.toolCalls.length, reason: done.finishReason };
  },
  error: () => generateText({ model: named("nope"), prompt: HELLO, maxRetries: 0 }),
});
