// The `ai` package calls a tool, whole and streamed: node tools.mjs URL MODEL [CHOICE_AS_JSON...]

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, streamText, tool } from "ai";

const [url, name, ...choices] = process.argv.slice(2);
const model = createOpenAICompatible({ name: "shiftjax", baseURL: url })(name);
const schema = {
  type: "object",
  properties: { city: { type: "string" }, days: { type: "integer" } },
  required: ["city", "days"],
  additionalProperties: false,
};
const tools = {
  get_weather: tool({ description: "The weather of a city", inputSchema: jsonSchema(schema) }),
};
const found = [];
for (const toolChoice of choices.length ? choices.map(JSON.parse) : ["auto", "required"]) {
  const options = { model, tools, toolChoice, prompt: "Rome?", seed: 1, maxRetries: 0 };
  const whole = await generateText(options);
  found.push([whole.toolCalls, whole.finishReason]);
  const stream = streamText(options);
  found.push([await stream.toolCalls, await stream.finishReason]);
}
const calls = ([calls, reason]) => [calls.map((call) => [call.toolName, call.input]), reason];
console.log(JSON.stringify(found.map(calls)));
