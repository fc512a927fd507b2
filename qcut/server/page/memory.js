"use strict";
// The chat and its settings over a reload, in the browser's storage; the API key ends with its tab.

const KEPT = "qcut-chat", VERSION = 1;
const MOST_TURNS = 200, MOST_CHARACTERS = 500_000;
const SETTINGS = ["temperature", "top_p", "most", "system"];

/** What a turn is: a message, its answer so far, and how that ended. `state` is open, whole, stopped or failed. */
const turnOf = asked => ({asked, answer: "", state: "open", reason: "", figures: "", isPlain: false});

const words = value => typeof value === "string" ? value : "";

/** What was kept, or a new chat; what is not as it should be is left out, whatever wrote it.
 *
 * `from` is the first turn that is sent, `density` how many tokens a character has: a guess until the server counts.
 */
function recalled() {
  const chat = {turns: [], from: 0, density: 0.3, draft: "", settings: {}};
  let kept = null;
  try {
    kept = JSON.parse(localStorage.getItem(KEPT));
  } catch { /* no storage, or no JSON: a new chat */ }
  if (kept?.version !== VERSION) return chat;
  for (const name of SETTINGS) if (typeof kept.settings?.[name] === "string") chat.settings[name] = kept.settings[name];
  for (const found of Array.isArray(kept.turns) ? kept.turns.slice(-MOST_TURNS) : []) {
    if (typeof found?.asked !== "string" || !found.asked) continue;
    const turn = turnOf(found.asked);
    for (const name of ["answer", "reason", "figures"]) turn[name] = words(found[name]);
    turn.isPlain = found.isPlain === true;
    turn.state = ["whole", "stopped"].includes(found.state) ? found.state : "failed";
    if (turn.state === "failed") turn.reason ||= "The page was left before the answer was whole.";
    chat.turns.push(turn);
  }
  if (Number.isInteger(kept.from)) chat.from = Math.min(Math.max(0, kept.from), chat.turns.length);
  if (kept.density > 0 && kept.density < 10) chat.density = kept.density;
  chat.draft = words(kept.draft);
  return chat;
}

/** Keep the newest turns, as many as fit; false: the browser keeps nothing. */
function keep(chat) {
  let turns = chat.turns.slice(-MOST_TURNS), size = 0;
  const fits = turns.findLastIndex(turn => (size += turn.asked.length + turn.answer.length) > MOST_CHARACTERS);
  turns = turns.slice(fits + 1);
  for (;;) {
    const from = Math.max(0, chat.from - (chat.turns.length - turns.length));
    try {
      localStorage.setItem(KEPT, JSON.stringify({version: VERSION, ...chat, turns, from}));
      return true;
    } catch {
      if (!turns.length) return false;
      turns = turns.slice(Math.ceil(turns.length / 2));
    }
  }
}

/** Forget the chat, the settings and the key. */
function forget() {
  for (const storage of ["localStorage", "sessionStorage"]) {
    try { window[storage].removeItem(KEPT); } catch { /* no storage keeps nothing */ }
  }
}

function recalledKey() {
  try { return sessionStorage.getItem(KEPT) ?? ""; } catch { return ""; }
}

function keepKey(key) {
  try { sessionStorage.setItem(KEPT, key); } catch { /* the field has it until the page ends */ }
}
