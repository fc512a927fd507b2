"use strict";
// The page: turns on the screen, the message under way, memory and input.

const $ = id => document.getElementById(id);
let model = null;  // as /v1/models says
let chat = recalled();
let run = null;  // the answer under way; another one, or none, makes what still comes of it nobody's
let isChanged = false;

// A new element is read aloud even if its text is not new.
const say = text => $("said").replaceChildren(make("span", "", text));
const count = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;

// ── turns ──────────────────────────────────────────────────────────────────────────────────────

const talk = $("talk"), note = make("p", "note");
const isAtEnd = () => talk.scrollHeight - talk.scrollTop - talk.clientHeight < 40;
let follows = true;  // whether the end of the text was in sight when one last scrolled

function toEnd() {
  follows = true;
  talk.scrollTop = talk.scrollHeight;
}

function keepEnd() {
  if (follows) toEnd();
  $("newest").hidden = isAtEnd();
}

const views = new WeakMap();  // by turn

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
    const {turn} = this, since = performance.now(), isOpen = turn.state === "open";
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
    keepEnd();
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
  if (model) $("hint").textContent = model.chat ? `Chat with ${model.id}`
    : "This model has no template for chats: it continues what you write, each message by itself.";
  chat.turns.forEach((turn, i) => {
    const {whole} = viewOf(turn);
    whole.classList.toggle("past", i < chat.from);
    if (whole.parentNode !== talk) talk.append(whole);
  });
  const shown = new Set(chat.turns.map(turn => viewOf(turn).whole));
  for (const whole of talk.querySelectorAll("section")) if (!shown.has(whole)) whole.remove();
  note.remove();
  if (model && chat.from && chat.from < chat.turns.length) {
    const above = chat.from > 1 ? `${chat.from} turns above no longer fit and are` : "turn above no longer fits and is";
    note.textContent = `The context holds ${count(model.max_model_len, "token")}. The ${above} not sent.`;
    viewOf(chat.turns[chat.from]).whole.before(note);
  }
  keepEnd();
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
  const rate = tokens > 1 ? ` ${((tokens - 1) / (now - begun) * 1000).toFixed(0)} a second,` : "";
  const end = tokens === most ? "the most tokens" : "the end of the context";
  const cut = ended === "length" ? `, cut off at ${end}` : "";
  return `${count(tokens, "token")},${rate} the first after ${((begun || now) - since).toFixed(0)} ms${cut}`;
}

/** Get the answer to the last turn. */
async function start(turn) {
  if (run) return;
  const mine = run = new AbortController(), former = {...turn}, asking = chat;
  const view = viewOf(turn), since = performance.now();
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
    let begun = 0, ended = null, reasoned = false;
    for await (const piece of ask(model, $("key").value, asking, given, mine.signal)) {
      const choice = piece.choices?.[0], added = choice?.delta?.content ?? choice?.text ?? "";
      const reasons = Boolean(choice?.delta?.reasoning_content);
      reasoned ||= reasons;
      ended = choice?.finish_reason ?? ended;
      if (piece.usage) turn.figures = figuresOf(piece.usage, ended, begun, since, given.max_tokens);
      if (!added && !reasons) continue;
      if (!begun) {
        begun = performance.now();
        show();  // what is sent may begin elsewhere now
      }
      turn.answer += added;
      view.soon();
    }
    turn.state = "whole";
    if (!turn.answer) turn.reason = reasoned ? "The answer has only reasoning." : "The answer is empty.";
  } catch (error) {
    turn.state = mine.signal.aborted ? "stopped" : "failed";
    turn.reason = mine.signal.aborted ? "Stopped." : error.message;
    if (!turn.answer && former.answer) {
      for (const name of ["answer", "figures", "isPlain"]) turn[name] = former[name];
      view.begin();
    }
  }
  view.draw();
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
}

// ── memory ─────────────────────────────────────────────────────────────────────────────────────

function save() {
  isChanged = false;
  const kept = Object.fromEntries(SETTINGS.map(name => [name, $(name).value]));
  const isKept = keep({...chat, draft: $("text").value, settings: kept});
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

/** Show figures and settings on a narrow screen, where they cover the rest. */
function open(isOpen) {
  $("side").classList.toggle("open", isOpen);
  $("more").ariaExpanded = talk.inert = $("form").inert = isOpen;
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
matchMedia("(max-width: 48rem)").addEventListener("change", () => open(false));
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
talk.addEventListener("scroll", () => {
  follows = isAtEnd();
  $("newest").hidden = follows;
});
new ResizeObserver(keepEnd).observe(talk);
talk.addEventListener("click", event => {
  const from = event.target.closest("button.copy");
  if (!from) return;
  const block = from.closest(".code"), turn = chat.turns.find(one => viewOf(one).whole.contains(from));
  copy(block ? block.querySelector("code").textContent : turn.answer, from);
});

// ── the start ──────────────────────────────────────────────────────────────────────────────────

for (const name of SETTINGS) if (name in chat.settings) $(name).value = chat.settings[name];
$("key").value = recalledKey();
$("text").value = chat.draft;
show();
fit();
toEnd();
watch();
