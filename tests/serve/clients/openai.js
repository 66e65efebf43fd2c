// OpenAI's package for Node against a server; prints what it got as one line of JSON. Usage: node openai.js URL
const OpenAI = require("openai");
const messages = [{ role: "user", content: "What is the capital of Italy?" }];
const greedy = { model: "demo", messages, temperature: 0 };

async function main() {
  const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "none", maxRetries: 0 });
  const found = {};
  const answer = await client.chat.completions.create(greedy);
  found.chat = answer.choices[0].message.content;

  const pieces = [];
  const options = { stream: true, stream_options: { include_usage: true } };
  for await (const chunk of await client.chat.completions.create({ ...greedy, ...options })) {
    if (chunk.choices.length) pieces.push(chunk.choices[0].delta.content ?? "");
    if (chunk.usage) found.streamed_tokens = chunk.usage.completion_tokens;
  }
  found.streamed = pieces.join("");

  const endless = { ...greedy, stream: true, ignore_eos: true, temperature: 1 };
  const stream = await client.chat.completions.create(endless);
  for await (const _ of stream) break; // leaves: the connection is closed
  found.aborted = stream.controller.signal.aborted;

  const schema = { type: "object", properties: { sure: { type: "boolean" } }, required: ["sure"], additionalProperties: false };
  const tools = [{ type: "function", function: { name: "answer", strict: true, parameters: schema } }];
  const called = await client.chat.completions.create({ ...greedy, tools, tool_choice: "required" });
  const call = called.choices[0].message.tool_calls[0].function;
  found.call = [call.name, typeof JSON.parse(call.arguments).sure];

  const response = await client.responses.create({ model: "demo", input: messages[0].content, temperature: 0 });
  found.response = response.output_text;
  try {
    await client.chat.completions.create({ ...greedy, model: "other" });
  } catch (error) {
    found.missing = [error instanceof OpenAI.NotFoundError, error.status, error.code];
  }
  console.log(JSON.stringify(found));
}

main();
