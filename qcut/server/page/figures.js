"use strict";
// The model that the server has, and the server's figures, once a second.

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
    const now = performance.now(), tokens = found.qcut_new_tokens_total, accepted = found.qcut_accepted_tokens_total;
    if (before && tokens >= before.tokens) {
      rates.push((tokens - before.tokens) / (now - before.now) * 1000);
      if (rates.length > 61) rates.shift();
      $("rate").textContent = rates.at(-1).toFixed(0);
      const more = tokens - before.tokens, steps = more - (accepted - before.accepted);  // of each sequence
      if (steps > 0) $("width").textContent = (more / steps).toFixed(1);
      const most = Math.max(1, ...rates), first = 61 - rates.length;
      const points = rates.map((rate, i) => `${first + i},${(98 - 96 * rate / most).toFixed(1)}`);
      $("curve").setAttribute("points", points.join(" "));
    }
    before = {now, tokens, accepted};
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
    for (const id of ["rate", "width", "running", "waiting", "cache", "memory"]) $(id).textContent = "–";
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
