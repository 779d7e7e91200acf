// The Vercel AI SDK, as its documentation uses it: by OpenAI's provider, which speaks Responses or
// chats, and by the one for OpenAI-compatible servers.
import { readFileSync } from "node:fs";
import { setTimeout as pause } from "node:timers/promises";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";

const plan = JSON.parse(readFileSync(0, "utf8"));
const PROVIDERS = {
  responses: (options, model) => createOpenAI(options)(model),
  chat: (options, model) => createOpenAI(options).chat(model),
  compatible: (options, model) =>
    createOpenAICompatible({ name: "millstream", includeUsage: true, ...options })(model),
};

const open = { baseURL: `${plan.open_url}/v1`, apiKey: "none" };
const keyed = { baseURL: `${plan.keyed_url}/v1`, apiKey: plan.key };

async function conversation(model) {
  const messages = [{ role: "user", content: plan.first }];
  const first = await generateText({ model, messages });
  messages.push(...first.response.messages, { role: "user", content: plan.second });
  const second = await generateText({ model, messages });
  return {
    texts: [first.text, second.text],
    prompt_tokens: [first.usage.inputTokens, second.usage.inputTokens],
  };
}

async function stream(model) {
  const answer = streamText({ model, prompt: plan.streamed });
  const pieces = [];
  for await (const piece of answer.textStream) pieces.push(piece);
  const usage = await answer.usage;
  return {
    pieces,
    finish_reason: await answer.finishReason,
    usage: [usage.inputTokens, usage.outputTokens],
  };
}

/** Abort after three pieces; how the task then stands, while this program goes on. */
async function cancel(model) {
  const controller = new AbortController();
  let task, pieces = 0;
  const answer = streamText({
    model,
    prompt: plan.endless,
    abortSignal: controller.signal,
    include: { rawChunks: true },
    includeRawChunks: true,
  });
  for await (const part of answer.fullStream) {
    if (part.type === "raw") {
      task ??= (part.rawValue.id ?? part.rawValue.response?.id)?.replace(/^(chatcmpl-|resp_)/, "");
    }
    if (part.type === "text-delta" && ++pieces === 3) controller.abort();
  }
  let state;
  for (let look = 0; look < 400; look++) {
    state = (await (await fetch(`${plan.open_url}/tasks/${task}`)).json()).status;
    if (state !== "running") break;
    await pause(50);
  }
  return { task_id: task, state };
}

async function fault(model, options = {}) {
  try {
    await generateText({ model, prompt: "x", maxRetries: 0, ...options });
  } catch (error) {
    return {
      name: error.name,
      status: error.statusCode,
      message: error.message,
      param: error.data?.error?.param,
      retryable: error.isRetryable,
    };
  }
  return {};
}

/** A second stream is refused while the first is open; the client comes back when told to. */
async function limited(provider) {
  const refusals = [];
  const controller = new AbortController();
  const first = streamText({
    model: provider(keyed, plan.model),
    prompt: plan.endless,
    abortSignal: controller.signal,
  });
  const pieces = first.textStream[Symbol.asyncIterator]();
  await pieces.next();
  const watched = async (...request) => {
    const answer = await fetch(...request);
    if (answer.status === 429) {
      refusals.push(answer.headers.get("retry-after"));
      controller.abort();
    }
    return answer;
  };
  const second = streamText({
    model: provider({ ...keyed, fetch: watched }, plan.model),
    prompt: plan.streamed,
    maxRetries: 5,
  });
  return { refusals, text: await second.text };
}

const report = {};
for (const [name, provider] of Object.entries(PROVIDERS)) {
  const model = provider(open, plan.model);
  report[name] = {
    conversation: await conversation(model),
    stream: await stream(model),
    cancel: await cancel(model),
    no_model: await fault(provider(open, "gpt-9")),
    too_hot: await fault(model, { temperature: 7 }),
    wrong_key: await fault(provider({ ...keyed, apiKey: "none" }, plan.model)),
    limited: await limited(provider),
  };
}
console.log(JSON.stringify(report));
