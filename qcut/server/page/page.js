"use strict";
// The page: turns on the screen, the message under way, settings, and the server's figures.

const $ = id => document.getElementById(id);
let model = null;  // as /v1/models says
let chat = recalled();
let run = null;  // the answer under way; another one, or none, makes what still comes of it nobody's
let isChanged = false;

const say = text => { $("said").textContent = text; };
const count = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;

// ── turns ──────────────────────────────────────────────────────────────────────────────────────

const talk = $("talk"), note = make("p", "note");
const isAtEnd = () => talk.scrollHeight - talk.scrollTop - talk.clientHeight < 40;
const toEnd = () => { talk.scrollTop = talk.scrollHeight; };
const seen = () => { $("newest").hidden = isAtEnd(); };
const views = new WeakMap();

function button(name, label, act) {
  const made = make("button", name, label);
  made.type = "button";
  if (act) made.addEventListener("click", act);
  return made;
}

/** A turn on the screen. */
class View {
  constructor(turn) {
    this.turn = turn;
    this.asked = make("div", "user", turn.asked);
    this.answer = make("div", "assistant");
    this.reason = make("p", "error");
    this.figures = make("span", "figures");
    this.copy = button("copy", "Copy");
    const foot = make("div", "foot", this.copy, button("last", "Try again", () => { start(turn); rest(); }),
      button("last", "Edit", () => edit(turn)), this.figures);
    this.whole = make("section", "turn", this.asked, this.answer, this.reason, foot);
    for (const [part, label] of [[this.asked, "Message"], [this.answer, "Answer"]]) {
      part.dir = "auto";
      part.setAttribute("role", "group");
      part.setAttribute("aria-label", label);
    }
    this.begin();
  }

  /** Show the answer from its beginning. */
  begin() {
    this.cost = this.timer = 0;
    this.answer.replaceChildren();
    this.growing = new Growing(this.answer);
    this.draw();
  }

  /** Show what is there, and follow the end of the text if it is in sight. */
  draw() {
    clearTimeout(this.timer);
    const {turn} = this, follows = isAtEnd(), since = performance.now(), isOpen = turn.state === "open";
    this.whole.dataset.state = turn.state;
    this.answer.ariaBusy = isOpen;
    this.answer.classList.toggle("plain", turn.isPlain);
    if (turn.isPlain) this.answer.textContent = turn.answer;
    else this.growing.show(turn.answer);
    this.answer.hidden = !turn.answer && !isOpen;
    this.copy.hidden = !turn.answer;
    this.reason.textContent = turn.reason;
    this.reason.hidden = !turn.reason;
    this.figures.textContent = turn.figures;
    if (follows) toEnd();
    seen();
    this.cost = performance.now() - since;
    this.timer = 0;
  }

  /** Draw soon. A long answer takes longer to draw, and is drawn less often. */
  soon() {
    this.timer ||= setTimeout(() => this.draw(), Math.max(16, 4 * this.cost));
  }
}

function viewOf(turn) {
  if (!views.has(turn)) views.set(turn, new View(turn));
  return views.get(turn);
}

/** Show the chat: its turns, and where what is sent begins. */
function show() {
  document.body.classList.toggle("answering", run !== null);
  $("send").hidden = run !== null;
  $("stop").hidden = run === null;
  $("hint").hidden = chat.turns.length > 0;
  if (model) $("hint").textContent = model.chat ? `A chat with ${model.id}.`
    : "This model has no template for chats: it continues what you write, each message by itself.";
  chat.turns.forEach((turn, i) => {
    const {whole} = viewOf(turn);
    whole.classList.toggle("past", i < chat.from);
    if (whole.parentNode !== talk) talk.append(whole);
  });
  for (const whole of talk.querySelectorAll("section")) {
    if (!chat.turns.some(turn => viewOf(turn).whole === whole)) whole.remove();
  }
  note.remove();
  if (!model || !chat.from || chat.from >= chat.turns.length) return;
  note.textContent = `The context holds ${count(model.max_model_len, "token")}. ` +
    (chat.from === 1 ? "The turn above no longer fits and is not sent." : `The ${chat.from} turns above no longer fit and are not sent.`);
  viewOf(chat.turns[chat.from]).whole.before(note);
}

// ── the message under way ──────────────────────────────────────────────────────────────────────

/** What the fields say. An empty one is not set; one that holds no number is an error. */
function settings() {
  const found = {system: $("system").value.trim()};
  for (const [id, name] of [["temperature", "temperature"], ["top_p", "top_p"], ["most", "max_tokens"]]) {
    const field = $(id);
    if (field.validity.badInput) throw new Error(`${field.labels[0].textContent.trim()}: found what is no number.`);
    if (field.value !== "") found[name] = Number(field.value);
  }
  return found;
}

function figuresOf(usage, ended, begun, since, most) {
  const now = performance.now(), tokens = usage.completion_tokens;
  const rate = tokens > 1 ? (tokens - 1) / (now - begun) * 1000 : 0;
  const cut = ended === "length" ? `, cut off at ${tokens === most ? "the most tokens" : "the end of the context"}` : "";
  return `${count(tokens, "token")}, ${rate.toFixed(0)} a second, the first after ${((begun || now) - since).toFixed(0)} ms${cut}`;
}

/** Get the answer to the last turn. */
async function start(turn) {
  if (run) return;
  const mine = run = new AbortController(), before = {...turn}, view = viewOf(turn), of = chat;
  const since = performance.now();
  Object.assign(turn, turnOf(turn.asked));
  view.begin();
  show();
  toEnd();
  save();
  try {
    const given = settings();
    if (!model) await meet();
    mine.signal.throwIfAborted();
    turn.isPlain = !model.chat;
    let begun = 0, ended = null;
    for await (const piece of ask(model, $("key").value, of, given, mine.signal)) {
      const choice = piece.choices[0], added = choice?.delta?.content ?? choice?.text ?? "";
      ended = choice?.finish_reason ?? ended;
      if (piece.usage) turn.figures = figuresOf(piece.usage, ended, begun, since, given.max_tokens);
      if (!added) continue;
      if (!begun) show();
      begun ||= performance.now();
      turn.answer += added;
      view.soon();
    }
    turn.state = "whole";
    if (!turn.answer) turn.reason = "The answer is empty.";
  } catch (error) {
    turn.state = mine.signal.aborted ? "stopped" : "failed";
    turn.reason = mine.signal.aborted ? "Stopped." : error.message;
    if (!turn.answer) for (const name of ["answer", "figures", "isPlain"]) turn[name] = before[name];
  }
  view.begin();
  if (run !== mine) return;
  run = null;
  show();
  save();
  say(turn.reason || view.answer.textContent);
}

function stop() {
  run?.abort();
}

/** Take a chat's last message back for another wording. */
function edit(turn) {
  if (run) return;
  chat.turns.splice(chat.turns.indexOf(turn), 1);
  chat.from = Math.min(chat.from, Math.max(0, chat.turns.length - 1));
  $("text").value = [turn.asked, $("text").value].filter(Boolean).join("\n\n");
  show();
  fit();
  save();
  $("text").focus();
}

/** Begin anew; an answer under way ends, and what still comes of it belongs to the chat that is gone. */
function clear() {
  stop();
  run = null;
  chat = {...chat, turns: [], from: 0};
  show();
  seen();
}

// ── memory ─────────────────────────────────────────────────────────────────────────────────────

function save() {
  isChanged = false;
  const kept = Object.fromEntries(SETTINGS.map(name => [name, $(name).value]));
  const isKept = keep({turns: chat.turns, from: chat.from, draft: $("text").value, settings: kept});
  $("unkept").textContent = isKept ? "" : "This browser keeps nothing: the chat ends with this page.";
}

const changed = () => { isChanged = true; };
const leave = () => { if (isChanged || run) save(); };
document.addEventListener("visibilitychange", () => { if (document.hidden) leave(); });
addEventListener("pagehide", () => {
  leave();
  run = null;  // the browser ends its connection: that is no answer that broke off
});
addEventListener("pageshow", event => { if (event.persisted) location.reload(); });

// ── input ──────────────────────────────────────────────────────────────────────────────────────

/** Give the message's field as many lines as it has. */
function fit() {
  const field = $("text");
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight}px`;
}

/** Put the focus where one goes on: a screen's keyboard would cover the answer. */
function rest() {
  (matchMedia("(pointer: coarse)").matches ? talk : $("text")).focus({preventScroll: true});
}

function open(isOpen) {
  $("side").classList.toggle("open", isOpen);
  $("more").ariaExpanded = isOpen;
}

async function copy(text, from) {
  let isDone = false;
  try {
    await navigator.clipboard.writeText(text);
    isDone = true;
  } catch {  // an address without TLS has no clipboard
    const field = make("textarea", "unseen");
    field.value = text;
    document.body.append(field);
    field.select();
    isDone = document.execCommand("copy");
    field.remove();
    from.focus();
  }
  from.textContent = isDone ? "Copied" : "Not copied";
  say(from.textContent);
  setTimeout(() => { from.textContent = "Copy"; }, 1500);
}

$("form").addEventListener("submit", event => {
  event.preventDefault();
  const text = $("text").value.trim();
  if (!text || run) return;
  $("text").value = "";
  fit();
  const turn = turnOf(text);
  chat.turns.push(turn);
  start(turn);
  rest();
});
$("text").addEventListener("keydown", event => {
  if (event.isComposing || event.keyCode === 229) return;  // 229: Safari's end of a composition
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    $("form").requestSubmit();
  }
});
document.addEventListener("keydown", event => {
  if (event.key !== "Escape" || event.isComposing) return;
  if ($("side").classList.contains("open")) {
    open(false);
    $("more").focus();
  } else stop();
});
$("text").addEventListener("input", () => { changed(); fit(); });
$("settings").addEventListener("input", changed);
$("settings").addEventListener("submit", event => event.preventDefault());
$("stop").addEventListener("click", () => { stop(); rest(); });
$("clear").addEventListener("click", () => { clear(); save(); rest(); });
$("more").addEventListener("click", () => open(!$("side").classList.contains("open")));
$("newest").addEventListener("click", () => { toEnd(); rest(); });
$("forget").addEventListener("click", () => {
  clear();
  $("settings").reset();
  $("text").value = "";
  fit();
  forget();
  isChanged = false;
  model = null;
  say("Everything is forgotten.");
});
$("key").addEventListener("change", () => { keepKey($("key").value); model = null; wake(); });
talk.addEventListener("scroll", seen);
talk.addEventListener("click", event => {
  const from = event.target.closest("button.copy");
  if (!from) return;
  const block = from.closest(".code"), turn = chat.turns.find(one => viewOf(one).whole.contains(from));
  copy(block ? block.querySelector("code").textContent : turn.answer, from);
});

// ── the server ─────────────────────────────────────────────────────────────────────────────────

const LOOK_MS = 1000, SILENT_MS = 5000;
const rates = [];
let before = null, wake = () => {};
const bytes = value => value >= 2 ** 30 ? `${(value / 2 ** 30).toFixed(1)} GiB` : `${(value / 2 ** 20).toFixed(0)} MiB`;

/** Ask for the model. */
async function meet() {
  const answer = await call("v1/models", $("key").value, {signal: AbortSignal.timeout(SILENT_MS)});
  model = (await answer.json()).data[0];
  $("model").textContent = document.title = model.id;
  $("context").textContent = count(model.max_model_len, "token");
  $("system-label").hidden = !model.chat;
  show();
}

function tell(state, text) {
  document.body.dataset.server = state;
  if ($("state").textContent !== text) $("state").textContent = $("state").title = text;
}

async function look() {
  try {
    if (!model) await meet();
    const answer = await call("metrics", $("key").value, {signal: AbortSignal.timeout(SILENT_MS)});
    const found = {};
    for (const line of (await answer.text()).split("\n")) {
      const [name, value] = line.split(" ");
      if (name && !name.startsWith("#")) found[name] = Number(value);
    }
    const now = performance.now(), tokens = found.qcut_new_tokens_total;
    if (before && tokens >= before.tokens) {
      rates.push((tokens - before.tokens) / (now - before.now) * 1000);
      if (rates.length > 61) rates.shift();
      $("rate").textContent = rates.at(-1).toFixed(0);
      const most = Math.max(1, ...rates), first = 61 - rates.length;
      $("curve").setAttribute("points", rates.map((rate, i) => `${first + i},${(98 - 96 * rate / most).toFixed(1)}`).join(" "));
    }
    before = {now, tokens};
    $("running").textContent = `${found.qcut_sequences_running} of ${found.qcut_sequences_most}`;
    $("waiting").textContent = found.qcut_requests_waiting + found.qcut_prompts_reading;
    $("cache").textContent = bytes(found.qcut_cache_bytes);
    $("memory-kind").textContent = found.qcut_gpu_bytes ? "GPU memory" : "Memory";
    $("memory").textContent = bytes(found.qcut_gpu_bytes ?? found.process_resident_memory_bytes);
    tell("ready", "Ready");
  } catch (error) {
    const isSilent = error.isSilent || error.name === "TimeoutError" || error instanceof TypeError;
    if (isSilent) model = null;  // another one may answer next
    before = null;
    for (const id of ["rate", "running", "waiting", "cache", "memory"]) $(id).textContent = "–";
    tell(isSilent ? "silent" : "refusing", isSilent ? SILENT : error.message);
  }
}

async function watch() {
  for (;;) {
    if (!document.hidden) await look();
    await new Promise(resolve => {
      wake = resolve;
      setTimeout(resolve, LOOK_MS);
    });
  }
}

for (const name of SETTINGS) if (name in chat.settings) $(name).value = chat.settings[name];
$("key").value = recalledKey();
$("text").value = chat.draft;
show();
fit();
toEnd();
watch();
