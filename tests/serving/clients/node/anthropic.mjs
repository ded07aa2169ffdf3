// The Anthropic package runs a tool until it has an answer: node anthropic.mjs URL MODEL
// What it prints: the answers, whole and streamed, and what the tool was called with.

import Anthropic from "@anthropic-ai/sdk";
import { betaTool } from "@anthropic-ai/sdk/helpers/beta/json-schema";

const [baseURL, model] = process.argv.slice(2);
const called = [];
const weather = betaTool({
  name: "get_weather",
  description: "The weather of a city.",
  inputSchema: {
    type: "object",
    properties: { city: { type: "string" }, days: { type: "integer" } },
    required: ["city", "days"],
    additionalProperties: false,
  },
  run: ({ city, days }) => {
    called.push([city, days]);
    return "sunshine";
  },
});
const client = new Anthropic({ baseURL, apiKey: "none", maxRetries: 0 });
const options = {
  model,
  max_tokens: 500,
  system: "Be short.",
  tools: [weather],
  messages: [{ role: "user", content: "Rome?" }],
};
const whole = await client.beta.messages.toolRunner(options).runUntilDone();
let last;
for await (const stream of client.beta.messages.toolRunner({ ...options, stream: true })) {
  last = await stream.finalMessage();
}
console.log(JSON.stringify([[whole, last].map((each) => each.content.at(-1).text), called]));
