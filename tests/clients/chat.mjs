// node chat.mjs BASE_URL: the official npm client against a running server; prints what came back as one line of JSON.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const request = { model: "minimax-m3", messages: [{ role: "user", content: "What is 23 + 45?" }], temperature: 0 };

const whole = (await client.chat.completions.create(request)).choices[0].message.content;
let streamed = "";
for await (const chunk of await client.chat.completions.create({ ...request, stream: true })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
}
const models = [];
for await (const model of client.models.list()) models.push(model.id);
let refused = 0;
try {
  await client.chat.completions.create({ ...request, model: "nobody" });
} catch (error) {
  refused = error.status;
}
console.log(JSON.stringify({ whole, streamed, models, refused }));
