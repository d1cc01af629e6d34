"use strict";
// Types a prompt, shows the picture, and what the server says of how it came about. Several requests may be under way.

const $ = (id) => document.getElementById(id);
const STAGES = ["queue", "encode", "denoise", "decode"];
const NUMBERS = ["seed", "n", "num_inference_steps", "guidance_scale"];
const LOOK_MS = 3000, POLL_MS = 700, SMALL = 256;
let isVideo = false;

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function words(seconds) {
  if (seconds < 0.01) return `${(seconds * 1000).toFixed(1)} ms`;
  return seconds < 1 ? `${Math.round(seconds * 1000)} ms` : `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
}

async function ask(path, options = {}) {
  const headers = { ...(options.headers || {}) };
  const key = $("key").value;
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch {
    throw new Error("The server can't be reached.");
  }
  if (response.ok) return response;
  let message = `The server answered ${response.status}.`;
  try { message = (await response.json()).error.message; } catch { /* no JSON: the status must do */ }
  if (response.status === 401) $("more").open = true;
  throw new Error(message);
}

function post(path, body) {
  return ask(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
}

function fields() {
  const body = { prompt: $("prompt").value.trim() };
  for (const name of NUMBERS) {
    const text = $(name).value.trim();
    if (text) body[name] = Number(text);
    if (text && Number.isNaN(body[name])) throw new Error(`${name.replaceAll("_", " ")}: ${text} is no number.`);
  }
  for (const name of ["size", "negative_prompt"]) if ($(name).value.trim()) body[name] = $(name).value.trim();
  return body;
}

// One card per request: it waits, then shows pictures or an error.

function card(prompt) {
  const article = element("article");
  const told = element("p", "told", "waiting …");
  const pictures = element("div", "pictures");
  article.append(element("h2", "", prompt), told, pictures);
  $("results").prepend(article);
  const began = performance.now();
  const since = () => words((performance.now() - began) / 1000);
  let note = "waiting";
  const timer = setInterval(() => { told.textContent = `${note} … ${since()}`; }, 100);
  return {
    article, pictures,
    say(text) { note = text; },
    finish(text) { clearInterval(timer); told.textContent = text ?? since(); article.dataset.done = "yes"; },
    since,
  };
}

function showPicture(shown, source, prompt, about) {
  const image = element("img");
  image.alt = prompt;
  image.title = about;
  image.addEventListener("load", () => image.classList.toggle("small", image.naturalWidth < SMALL));
  image.src = source;
  shown.pictures.append(image);
}

// The timeline: the queue, then what each rank did, all on one scale.

function timeline(times) {
  const ends = times.ranks.flatMap((each) => each.spans.map((span) => span.end_s));
  const whole = Math.max(times.queue_s + Math.max(times.run_s, ...ends), 1e-9);
  const box = element("div", "timeline");
  const totals = { queue: times.queue_s };
  const lane = (name, bars) => {
    const row = element("div", "lane");
    for (const [stage, begin, end] of bars) {
      const bar = element("div", `bar ${stage}`);
      bar.style.left = `${100 * begin / whole}%`;
      bar.style.width = `${100 * Math.max(0, end - begin) / whole}%`;
      bar.title = `${stage}: ${words(end - begin)}`;
      row.append(bar);
    }
    box.append(element("span", "", name), row);
  };
  lane("queue", [["queue", 0, times.queue_s]]);
  for (const { rank, spans } of times.ranks) {
    lane(`rank ${rank}`, spans.map((s) => [s.stage, times.queue_s + s.begin_s, times.queue_s + s.end_s]));
    for (const s of spans) totals[s.stage] = Math.max(totals[s.stage] || 0, s.end_s - s.begin_s);
  }
  const legend = element("div", "legend");
  for (const stage of STAGES.filter((name) => name in totals)) {
    const entry = element("span");
    entry.append(element("i", stage), `${stage} ${words(totals[stage])}`);
    legend.append(entry);
  }
  box.append(legend);
  return box;
}

function planInWords(plan) {
  const details = element("details", "plan");
  const list = element("dl");
  for (const [name, text] of Object.entries(plan)) list.append(element("dt", "", name), element("dd", "", text));
  details.append(element("summary", "", "How it was spread over the ranks"), list);
  return details;
}

function explain(shown, about) {
  const { batch_size: size, replica, ranks } = about.timeline;
  const parts = [shown.since(), `seed ${about.seeds.join(", ")}`, `${ranks.length} rank${ranks.length === 1 ? "" : "s"}`];
  if (size > 1) parts.push(`in a batch of ${size}`);
  if (replica > 0) parts.push(`replica ${replica}`);
  const { different, from_cache: cached } = about.texts;
  if (cached) parts.push(`${cached} of ${different} text${different > 1 ? "s" : ""} from the cache`);
  shown.article.append(timeline(about.timeline), planInWords(about.plan));
  shown.finish(parts.join(" · "));
}

async function drawPicture(shown, body) {
  const answer = await (await post("/v1/images/generations", body)).json();
  answer.data.forEach((each, i) => {
    showPicture(shown, `data:image/png;base64,${each.b64_json}`, body.prompt, `seed ${answer.enfold.seeds[i]}`);
  });
  explain(shown, answer.enfold);
}

async function drawClip(shown, { n, ...body }) {
  let clip = await (await post("/v1/videos", body)).json();
  while (clip.status === "queued" || clip.status === "in_progress") {
    shown.say(clip.status === "queued" ? "waiting" : `drawing, ${clip.progress} %`);
    await new Promise((done) => setTimeout(done, POLL_MS));
    clip = await (await ask(`/v1/videos/${clip.id}`)).json();
  }
  if (clip.status !== "completed") throw new Error(clip.error ? clip.error.message : `The clip was ${clip.status}.`);
  const content = await (await ask(`/v1/videos/${clip.id}/content`)).blob();
  showPicture(shown, URL.createObjectURL(content), body.prompt, clip.size);
  explain(shown, clip.enfold);
}

async function submit(event) {
  event.preventDefault();
  let body;
  try {
    body = fields();
  } catch (error) {
    return notice(error.message);
  }
  if (!body.prompt) return notice("Say what shall be drawn.");
  notice("");
  const shown = card(body.prompt);
  try {
    await (isVideo ? drawClip : drawPicture)(shown, body);
  } catch (error) {
    shown.finish();
    shown.article.append(element("p", "error", error.message));
  }
}

function notice(text) {
  $("notice").textContent = text;
  $("notice").hidden = !text;
}

// What the server holds, and how it is.

async function look() {
  let state = null;
  try {
    state = await (await fetch("/health")).json();
  } catch { /* not there: said below */ }
  const ranks = state ? state.replicas.flatMap((replica) => replica.ranks) : [];
  const alive = ranks.filter((rank) => rank === "alive").length;
  const waiting = state && state.waiting ? `, ${state.waiting} waiting` : "";
  $("state").textContent = state ? `${state.status}${ranks.length ? `, ${alive} of ${ranks.length} ranks` : ""}${waiting}` : "gone";
  document.querySelector(".dot").className = `dot ${state && state.ready ? "ready" : state && state.status === "loading" ? "" : "bad"}`;
  if (state && !$("model").textContent) $("model").textContent = state.model;
  if (state && state.ready && !look.known) await describe().catch((error) => notice(error.message));
  setTimeout(look, LOOK_MS);
}

async function describe() {
  const { data: [model] } = await (await ask("/v1/models")).json();
  look.known = true;
  notice("");
  isVideo = Boolean(model.enfold.is_video);
  if (model.enfold.type === "encoder") {
    notice("This server holds a text encoder, which draws nothing. Use POST /v1/embeddings or POST /encode.");
    $("draw").disabled = true;
  }
  const { width, height, num_inference_steps: steps } = model.enfold.defaults || {};
  if (width && height) $("size").placeholder = `${width}x${height}`;
  if (steps) $("num_inference_steps").placeholder = steps;
}

$("ask").addEventListener("submit", submit);
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
});
look();
