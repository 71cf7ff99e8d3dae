// node chat.mjs BASE_URL: the official npm client against a running server; prints what came back as one line of JSON.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const model = "minimax-m3";
const messages = [{ role: "user", content: "What is 23 + 45?" }];
const request = { model, messages, temperature: 0 };
const out = {};

out.whole = (await client.chat.completions.create(request)).choices[0].message.content;

out.streamed = "";
const stream = await client.chat.completions.create({ ...request, stream: true, stream_options: { include_usage: true } });
for await (const chunk of stream) {
  out.streamed += chunk.choices[0]?.delta?.content ?? "";
  if (chunk.usage) out.tokens = chunk.usage.completion_tokens;
}

// The client's own reader of streams puts the pieces together.
const runner = client.chat.completions.stream(request);
let deltas = "";
runner.on("content", (piece) => { deltas += piece; });
out.runner = [await runner.finalContent(), deltas, (await runner.finalChatCompletion()).choices[0].finish_reason];

const tool = { type: "function", function: { name: "add", parameters: {
  type: "object", properties: { a: { type: "integer" }, b: { type: "integer" } }, required: ["a", "b"], additionalProperties: false } } };
const call = (await client.chat.completions.create({ ...request, max_tokens: 60, tools: [tool], tool_choice: { type: "function", function: { name: "add" } } }))
  .choices[0].message.tool_calls[0];
out.call = [call.type, call.function.name, Object.keys(JSON.parse(call.function.arguments)).sort()];
const streamed_call = await client.chat.completions.stream({ ...request, max_tokens: 60, tools: [tool], tool_choice: "required" }).finalMessage();
out.streamed_call = streamed_call.tool_calls.map((c) => [c.function.name, typeof JSON.parse(c.function.arguments)]);

const schema = { type: "object", properties: { n: { type: "integer", minimum: 1, maximum: 9 } }, required: ["n"], additionalProperties: false };
const shaped = await client.chat.completions.create({ ...request, response_format: { type: "json_schema", json_schema: { name: "n", schema } } });
out.shaped = Object.keys(JSON.parse(shaped.choices[0].message.content));

const completion = await client.completions.create({ model, prompt: "There was a tired frog", max_tokens: 5, temperature: 0, logprobs: 1 });
out.completion = [completion.usage.completion_tokens, completion.choices[0].logprobs.tokens.length];

out.response = (await client.responses.create({ model, input: messages[0].content, temperature: 0 })).output_text;
out.response_events = "";
for await (const event of await client.responses.create({ model, input: messages[0].content, temperature: 0, stream: true })) {
  if (event.type === "response.output_text.delta") out.response_events += event.delta;
}

// The client asks for base64 by itself and decodes it.
const [plain, decoded] = await Promise.all([client.embeddings.create({ model, input: "one", encoding_format: "float" }), client.embeddings.create({ model, input: "one" })]);
out.embedding = plain.data[0].embedding.length > 0 && plain.data[0].embedding.every((v, i) => Math.fround(v) === decoded.data[0].embedding[i]);

out.models = [];
for await (const m of client.models.list()) out.models.push(m.id);
out.retrieved = (await client.models.retrieve(model)).id;

const error_of = async (promise) => { try { await promise; return null; } catch (e) { return [e.constructor.name, e.status, e.param]; } };
out.unknown_model = await error_of(client.chat.completions.create({ ...request, model: "nobody" }));
out.bad_field = await error_of(client.chat.completions.create({ ...request, temperature: -1 }));

// Leaving a stream cancels it, and the next request is served.
const left = await client.completions.create({ model, prompt: "x", max_tokens: 1500, logit_bias: { 300: 100 }, stream: true });
for await (const _ of left) break;
out.after_leaving = (await client.chat.completions.create(request)).choices[0].message.content;

const many = await Promise.all(Array.from({ length: 16 }, () => client.chat.completions.create(request)));
out.at_once = [...new Set(many.map((m) => m.choices[0].message.content))];

console.log(JSON.stringify(out));
