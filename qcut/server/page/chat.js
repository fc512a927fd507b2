"use strict";
// What is asked of the server, and what comes of it.

const SILENT = "The server does not answer.";

/** A call to this server. */
async function call(path, key, options = {}) {
  const headers = {...options.headers};
  // A header takes bytes, a character each.
  if (key) headers.Authorization = `Bearer ${String.fromCharCode(...new TextEncoder().encode(key))}`;
  let answer;
  try {
    answer = await fetch(path, {...options, headers});
  } catch (error) {
    throw error.name === "AbortError" ? error : Object.assign(new Error(SILENT), {isSilent: true});
  }
  if (answer.ok) return answer;
  let found = null;
  try { found = (await answer.json()).error; } catch { /* the status says it */ }
  const message = found?.message || `The server answers with status ${answer.status}.`;
  const isBeyond = found?.code === "context_length_exceeded" || /maximum context length/i.test(message);
  throw Object.assign(new Error(message), {isTooLong: isBeyond || answer.status === 413});
}

/** Lines of a stream. */
async function* lines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const {done, value} = await reader.read();
      if (done) return;
      const all = (rest + value).split("\n");
      rest = all.pop();
      yield* all;
    }
  } finally {
    reader.cancel().catch(() => {});  // who stops reading lets the connection go
  }
}

/** The pieces of an answer, as they come. */
async function* pieces(answer) {
  try {
    for await (const line of lines(answer.body)) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const piece = JSON.parse(data);
      if (piece.error) throw Object.assign(new Error(piece.error.message), {isSaid: true});
      yield piece;
    }
  } catch (error) {
    if (error.name === "AbortError" || error.isSaid) throw error;
  }
  throw new Error("The answer broke off: the connection has ended.");
}

/** Characters of what is sent, with some for the template. */
const size = (system, turns) =>
  turns.reduce((sum, turn) => sum + turn.asked.length + turn.answer.length + 32, system.length + 32);

/** The turns that are sent from an index on: those with an answer, and the last one. */
const sent = (turns, from) => turns.filter((turn, i) => i === turns.length - 1 || (i >= from && turn.answer));

/** Drop a chat's oldest turns where those that are sent have more tokens than there is room for. */
function drop(chat, system, room) {
  const isTooLong = most => chat.density * size(system, sent(chat.turns, chat.from)) > most;
  if (!isTooLong(room)) return;
  // More than has to go goes at once: the beginning stays the same for a while, and the server has read it already.
  while (chat.from < chat.turns.length - 1 && isTooLong(room * 3 / 4)) chat.from++;
}

/** The pieces of an answer to a chat's last turn; moves the chat's beginning on where the whole has no room. */
async function* ask(model, key, chat, settings, signal) {
  const {system, ...sampling} = settings, {from} = chat, turn = chat.turns.at(-1);
  const room = model.max_model_len - Math.min(sampling.max_tokens ?? Infinity, model.max_model_len / 4);
  const shared = {model: model.id, ...sampling, stream: true, stream_options: {include_usage: true}};
  const ahead = system ? [{role: "system", content: system}] : [];
  let path = "v1/completions", body = {...shared, prompt: turn.asked}, turns = [turn], answer;
  if (model.chat) drop(chat, system, room);
  while (!answer) {
    if (model.chat) {
      turns = sent(chat.turns, chat.from);
      const messages = turns.flatMap(({asked, answer}) => [
        {role: "user", content: asked}, ...(answer ? [{role: "assistant", content: answer}] : []),
      ]);
      [path, body] = ["v1/chat/completions", {...shared, messages: [...ahead, ...messages]}];
    }
    try {
      const headers = {"Content-Type": "application/json"};
      answer = await call(path, key, {method: "POST", headers, body: JSON.stringify(body), signal});
    } catch (error) {
      if (error.isTooLong && turns.length === 1) chat.from = from;  // a shorter message may have room beside the others
      if (!error.isTooLong || turns.length === 1) throw error;
      chat.density *= 1.25;
      chat.from = chat.turns.indexOf(turns[1]);
      drop(chat, system, room);
    }
  }
  const characters = size(system, turns);
  for await (const piece of pieces(answer)) {
    if (piece.usage) chat.density = piece.usage.prompt_tokens / characters;
    yield piece;
  }
}
