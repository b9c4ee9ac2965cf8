// The npm package `ai`: tools, whole, streamed and in steps, and an object of a schema.
import assert from 'node:assert/strict';
import { generateText, Output, stepCountIs, streamText, tool } from 'ai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { z } from 'zod';

const [baseURL, name] = process.argv.slice(2);
const server = createOpenAICompatible({
  name: 'octavo',
  baseURL,
  apiKey: 'none',
  supportsStructuredOutputs: true,
});
const called = [];
const tools = {
  getWeather: tool({
    description: 'Return the weather of a city.',
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => {
      called.push(city);
      return `It is sunny in ${city}.`;
    },
  }),
};
const settings = { model: server(name), temperature: 0, maxOutputTokens: 100, maxRetries: 0 };

const whole = await generateText({
  ...settings,
  tools,
  toolChoice: 'required',
  prompt: 'What is the weather in Paris?',
});
assert.deepEqual(whole.toolCalls.map((call) => call.input), [{ city: 'Paris' }]);
assert.equal(whole.finishReason, 'tool-calls');

const stream = streamText({
  ...settings,
  tools,
  toolChoice: 'required',
  prompt: 'What is the weather in Rome?',
});
const kinds = new Set();
for await (const part of stream.fullStream) kinds.add(part.type);
assert.ok(kinds.has('tool-input-delta') && !kinds.has('error'), [...kinds]);
assert.deepEqual((await stream.toolCalls).map((call) => call.input), [{ city: 'Rome' }]);

const steps = await generateText({
  ...settings,
  tools,
  stopWhen: stepCountIs(2),
  prompt: 'What is the weather in Berlin?',
});
assert.deepEqual([steps.steps.length, called], [2, ['Paris', 'Rome', 'Berlin']]);

const schema = z.object({ name: z.string(), country: z.string() });
const city = await generateText({
  ...settings,
  output: Output.object({ schema }),
  prompt: 'Paris is the capital of France.',
});
assert.deepEqual(city.output, { name: 'Paris', country: 'France' });
