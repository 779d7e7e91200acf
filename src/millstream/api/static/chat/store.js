// Conversations, kept in this browser (IndexedDB) and nowhere else.
//
// A conversation: {id, title, created, updated, model, suggested (to sample it with), settings:
// {system, temperature, …}, turns}.
// A turn of the user: {role: "user", content}. One of the assistant: {role: "assistant", content,
// state: "sending" | "running" | "completed" | "cancelled" | "failed", key and body (what was sent,
// so that it can be sent again), task, usage, finish, seconds, rejoined, attempts, error}.

import { createStore, del, entries, get, set } from "../vendor/idb-keyval/index.js";

const database = createStore("millstream", "conversations");

/** All conversations, the last changed first. */
export async function all() {
  const rows = (await entries(database)).map(([, value]) => value);
  return rows.sort((a, b) => b.updated - a.updated);
}

/** A conversation as any tab last kept it. */
export const load = (id) => get(id, database);

export function create(model, settings = {}) {
  const now = Date.now();
  return { id: randomId(), title: "", created: now, updated: now, model,
    settings, turns: [] };
}

/** 128 random bits; `crypto.randomUUID` is there on https and localhost only. */
export function randomId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) =>
    byte.toString(16).padStart(2, "0")).join("");
}

const saving = new Map();

/** Keep a conversation as it is; calls in quick succession become one. */
export function save(conversation) {
  const { id } = conversation;
  if (!saving.has(id)) {
    saving.set(id, Promise.resolve().then(async () => {
      saving.delete(id);
      await set(id, conversation, database);
    }));
  }
  return saving.get(id);
}

export const remove = (conversation) => del(conversation.id, database);

export function toMarkdown(conversation) {
  const parts = [`# ${conversation.title || "Conversation"}`];
  if (conversation.settings.system) parts.push(`**System**\n\n${conversation.settings.system}`);
  for (const turn of conversation.turns) {
    parts.push(`**${turn.role === "user" ? "You" : conversation.model || "Answer"}**\n\n${turn.content}`);
  }
  return parts.join("\n\n") + "\n";
}
