// The chat page: streams answers, marks accepted draft tokens, races drafts against the plain model.
//
// A text is {text, marks}: marks[i] is true where code unit i came from an accepted draft token.

import { element, render } from "./markdown.js";

const byId = (id) => document.getElementById(id);
const [log, input, chart] = ["log", "text", "chart"].map(byId);
const settings = byId("settings");
const fields = settings.querySelector("form").elements;
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const SHOWN_STEPS = 120;
const LEARNING_PERIOD = 15_000; // milliseconds
const ENDINGS = { length: "cut at the length limit", stopped: "stopped by you" };

let turns = []; // of the conversation: {question, text, marks, about}
let unfinished = () => []; // the turn in the making
let running = null; // the AbortController of the answers in the making
let learns = false; // does the server train its head?

const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
const mode = () => document.querySelector("[name=mode]:checked").value;
const announce = (text) => { byId("said").textContent = text; };

// ---- Settings -------------------------------------------------------------------------------

// What the browser keeps for this page. Site data may be blocked, full or damaged: then nothing is
// kept, and the page works.
function recall(area) {
  try {
    return JSON.parse(window[area].getItem("draftheads")) ?? {};
  } catch {
    return {};
  }
}

function keep(area, value) {
  try {
    window[area].setItem("draftheads", JSON.stringify(value));
  } catch { // nothing is kept
  }
}

const saved = { ...recall("localStorage") };
for (const field of fields) {
  if (!(field.name in saved) || field.name === "key") continue;
  if (field.type === "checkbox") field.checked = saved[field.name];
  else field.value = saved[field.name];
}

function applySettings() {
  const values = {};
  for (const field of fields) {
    if (field.name) values[field.name] = field.type === "checkbox" ? field.checked : field.value;
  }
  delete values.key; // a secret, and an earlier version kept it
  keep("localStorage", values);
  document.documentElement.dataset.theme = values.theme;
  document.body.classList.toggle("tinted", values.tint);
}

function headers() {
  const key = fields.key.value.trim();
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

function options() {
  const chosen = {};
  for (const name of NUMBERS) {
    if (fields[name].value !== "") chosen[name] = Number(fields[name].value);
  }
  return chosen;
}

// ---- Requests -------------------------------------------------------------------------------

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function* events(response) {
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    rest += decoder.decode(value, { stream: !done });
    const lines = rest.split(/\r?\n/);
    rest = done ? "" : lines.pop();
    for (const line of lines) {
      if (line.startsWith("data:")) yield line.slice(5).trim();
    }
    if (done) return;
  }
}

async function* answer(conversation, more, signal) {
  const messages = [...conversation];
  const system = fields.system.value.trim();
  if (system) messages.unshift({ role: "system", content: system });
  const body = {
    messages,
    stream: true,
    stream_options: { include_usage: true, include_steps: true },
    reasoning_format: "none", // shown within the text
    ...options(),
    ...more,
  };
  const request = { method: "POST", headers: headers(), body: JSON.stringify(body), signal };
  const response = await fetch("v1/chat/completions", request);
  if (!response.ok) {
    const { error } = await response.json().catch(() => ({}));
    throw new Refused(response.status, error?.message ?? `The server answered ${response.status}.`);
  }
  for await (const data of events(response)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refused(0, chunk.error.message);
    yield chunk;
  }
  throw new Refused(0, "The answer was cut off.");
}

// ---- An answer in the making ----------------------------------------------------------------

class Answer {
  constructor(node, onChange) {
    this.node = node;
    this.onChange = onChange;
    this.text = "";
    this.marks = [];
    this.steps = [];
    this.usage = null;
    this.finish = null;
    this.blocks = []; // what is drawn
    this.drawing = 0; // the next animation frame, if one is asked for
  }

  async read(chunks) {
    for await (const chunk of chunks) {
      this.usage = chunk.usage ?? this.usage;
      const choice = chunk.choices?.[0];
      if (!choice) continue;
      const text = choice.delta?.content ?? "";
      // the server counts characters, a string here code units
      const characters = Array.from(text).slice(0, choice.step?.accepted_chars ?? 0);
      const drafted = characters.join("").length;
      for (let i = 0; i < text.length; i++) this.marks.push(i < drafted);
      this.text += text;
      this.finish = choice.finish_reason;
      if (choice.step) this.steps.push(choice.step);
      this.drawing ||= requestAnimationFrame(() => this.draw());
    }
  }

  draw() {
    cancelAnimationFrame(this.drawing);
    this.drawing = 0;
    if (!this.node.isConnected) return; // a new chat has begun
    following(() => {
      this.blocks = render(this.node, this.text, this.marks, this.blocks, withCopyButton);
      this.onChange(this);
    });
  }

  // Rates are of the steps after the prompt was read, in time of the engine.
  get decoding() { return this.steps.filter((step) => !step.prefill); }
  get tokens() { return sum(this.decoding, "tokens"); }
  get rate() { return this.tokens / (sum(this.decoding, "seconds") || Infinity); }
  get perStep() { return this.tokens / (this.decoding.length || Infinity); }
  get acceptance() { return sum(this.steps, "accepted") / (sum(this.steps, "tokens") || Infinity); }

  summary() {
    const parts = [];
    if (this.steps.length) parts.push(plural(sum(this.steps, "tokens"), "token"));
    if (this.rate) {
      parts.push(`${this.rate.toFixed(0)} tokens/s`, `${this.perStep.toFixed(2)} per step`);
      parts.push(`${(100 * this.acceptance).toFixed(0)} % from drafts`);
    }
    const cached = this.usage?.prompt_tokens_details?.cached_tokens;
    if (cached) parts.push(`${cached} of ${this.usage.prompt_tokens} prompt tokens reused`);
    if (this.finish in ENDINGS) parts.push(ENDINGS[this.finish]);
    return parts.join(" · ");
  }
}

const sum = (items, key) => items.reduce((total, item) => total + item[key], 0);

// ---- Controls of an answer ---------------------------------------------------------------------

function withCopyButton(node, code) {
  const copy = copyButton(() => code.textContent);
  copy.ariaLabel = "Copy code";
  node.append(copy);
  return node;
}

function copyButton(text) {
  const button = element("button", { type: "button", textContent: "Copy" });
  button.onclick = async () => {
    const isCopied = await navigator.clipboard?.writeText(text()).then(() => true, () => false);
    button.textContent = isCopied ? "Copied" : "Not allowed here";
    announce(button.textContent);
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  };
  return button;
}

// ---- The chart ------------------------------------------------------------------------------

function drawChart(answer) {
  if (!answer.decoding.length) return;
  byId("steps").hidden = false;
  const steps = answer.decoding.slice(-SHOWN_STEPS);
  const most = Math.max(4, ...steps.map((step) => step.tokens));
  const width = Math.max(steps.length, 40);
  const mean = answer.perStep.toFixed(2);
  chart.setAttribute("viewBox", `0 0 ${width} ${most}`);
  chart.setAttribute("aria-label", `Tokens of the last ${plural(steps.length, "step")}, ${mean} on average`);
  const bars = steps.flatMap((step, x) => {
    const own = step.tokens - step.accepted;
    return [bar("own", x, most - own, own), bar("drafted", x, most - step.tokens, step.accepted)];
  });
  chart.replaceChildren(...bars);
  byId("mean").textContent = mean;
}

function bar(kind, x, y, height) {
  const rect = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  const attributes = { class: kind, x: x + 0.1, y, width: 0.8, height };
  for (const [name, value] of Object.entries(attributes)) rect.setAttribute(name, value);
  return rect;
}

// ---- Learning -------------------------------------------------------------------------------

async function showLearning() {
  const response = await fetch("v1/learning", { headers: headers() }).catch(() => null);
  const points = response?.ok ? (await response.json()).data : [];
  byId("learning").hidden = !points.length;
  if (!points.length) return;
  const rates = points.map((point) => point.tokens_per_step);
  const [first, newest] = [rates[0], rates.at(-1)].map((rate) => rate.toFixed(2));
  const low = Math.min(...rates);
  const range = Math.max(...rates) - low || 1;
  const width = Math.max(rates.length - 1, 1);
  const line = rates.map((rate, x) => `${(100 * x) / width},${20 - (20 * (rate - low)) / range}`);
  const tokens = points.at(-1).tokens.toLocaleString("en");
  byId("learned").textContent = `τ ${first} → ${newest}, ${tokens} tokens`;
  byId("curve").setAttribute("aria-label", `Tokens per step, from ${first} to ${newest}`);
  byId("curve").firstElementChild.setAttribute("points", line.join(" "));
}

// ---- Conversation and race --------------------------------------------------------------------

function inWords(error, answer) {
  if (error instanceof SyntaxError) return "The server sent something that this page does not understand.";
  if (!(error instanceof TypeError)) return error.message;
  if (answer.steps.length) return "The connection was lost; the answer is cut off.";
  return "The server cannot be reached.";
}

// Only the newest question can be asked again: `run` removes these buttons.
function redoButton(label, again) {
  return element("button", { type: "button", className: "redo", textContent: label, onclick: again });
}

function showFault(parent, error, answer) {
  if (error.name === "AbortError") return announce("Stopped.");
  if (error.status === 401) {
    byId("key-wanted").hidden = false;
    settings.showModal();
    fields.key.focus();
  }
  const fault = inWords(error, answer);
  parent.append(element("p", { className: "fault" }, fault));
  announce(fault);
}

async function run(work) {
  running = new AbortController();
  for (const button of log.querySelectorAll(".redo")) button.remove();
  byId("welcome").hidden = true;
  busy(true);
  try {
    await work(running.signal);
  } finally {
    running = null;
    busy(false);
    const focused = document.activeElement;
    if (focused === document.body || focused.hidden) input.focus();
  }
}

function busy(is) {
  log.setAttribute("aria-busy", is);
  byId("stop").hidden = !is;
  byId("send").hidden = is;
  if (is) announce("Answering.");
}

function scrollToEnd() {
  log.parentElement.scrollTop = log.parentElement.scrollHeight;
}

function show(...nodes) {
  log.append(...nodes);
  scrollToEnd();
}

// Changes the page, and stays at its end unless the reader has scrolled up.
function following(change) {
  const { scrollHeight, scrollTop, clientHeight } = log.parentElement;
  const isAtEnd = scrollHeight - scrollTop - clientHeight < 80;
  change();
  if (isAtEnd) scrollToEnd();
}

// The nodes of a question and its answer.
function article(question) {
  const about = element("div", { className: "about" });
  const text = element("div", { className: "text" });
  const asked = element("div", { className: "asked", dir: "auto", textContent: question });
  const turn = element("article", { ariaLabel: "Answer" }, text, about);
  return { about, text, asked, turn };
}

async function chat(question) {
  const { about, text, asked, turn } = article(question);
  show(asked, turn);
  const newest = new Answer(text, (each) => {
    about.textContent = each.summary();
    drawChart(each);
  });
  const conversation = turns; // a new chat has another
  const place = conversation.length;
  const again = () => {
    asked.remove();
    turn.remove();
    conversation.length = place;
    chat(question);
  };
  const record = () => {
    const marks = newest.marks.map(Number).join("");
    return { question, text: newest.text, marks, about: newest.summary() };
  };
  unfinished = () => (conversation === turns && newest.text ? [record()] : []);
  await run(async (signal) => {
    let fault = null;
    try {
      await newest.read(answer(messages(conversation, question), {}, signal));
    } catch (error) {
      fault = error;
    }
    if (fault?.name === "AbortError") newest.finish = "stopped";
    unfinished = () => [];
    newest.draw();
    following(() => {
      about.textContent = newest.summary();
      if (newest.steps.length) {
        conversation.push(record());
        keepConversation();
        about.append(copyButton(() => newest.text), redoButton("Regenerate", again));
      }
      if (!fault) return announce(`Answered: ${newest.summary()}`);
      showFault(turn, fault, newest);
      if (!newest.steps.length || newest.finish !== "stopped") turn.append(redoButton("Try again", again));
    });
  });
}

function messages(conversation, question) {
  const before = conversation.flatMap((turn) => [
    { role: "user", content: turn.question },
    { role: "assistant", content: turn.text },
  ]);
  return [...before, { role: "user", content: question }];
}

// A reload, or the way back to this page, finds the conversation again, in this tab alone.
function keepConversation() {
  keep("sessionStorage", { turns: [...turns, ...unfinished()], typed: input.value });
}

function restoreConversation() {
  const stored = recall("sessionStorage");
  const isTurn = (turn) => ["question", "text", "marks", "about"].every((key) => typeof turn?.[key] === "string");
  turns = Array.isArray(stored.turns) ? stored.turns.filter(isTurn) : [];
  for (const [place, turn] of turns.entries()) {
    const nodes = article(turn.question);
    const marks = Array.from(turn.marks, (mark) => mark === "1");
    render(nodes.text, turn.text, marks, [], withCopyButton);
    nodes.about.append(turn.about, copyButton(() => turn.text));
    if (place === turns.length - 1) {
      const again = () => {
        nodes.asked.remove();
        nodes.turn.remove();
        turns.length = place;
        chat(turn.question);
      };
      nodes.about.append(redoButton("Regenerate", again));
    }
    show(nodes.asked, nodes.turn);
  }
  byId("welcome").hidden = turns.length > 0;
  input.value = typeof stored.typed === "string" ? stored.typed : "";
  grow();
}

async function race(question) {
  const lanes = ["Draft heads", "Plain model"].map((name) => {
    const rate = element("span", { className: "rate" });
    const bar = element("i");
    const text = element("div", { className: "text" });
    const head = element("h3", {}, name, rate);
    const track = element("div", { className: "bar" }, bar);
    const node = element("section", { className: "lane", ariaLabel: name }, head, track, text);
    const answer = new Answer(text, () => {
      rate.textContent = `${answer.rate.toFixed(0)} tokens/s`;
      const most = Math.max(...lanes.map((lane) => lane.answer.rate), 1);
      for (const lane of lanes) lane.bar.style.width = `${(100 * lane.answer.rate) / most}%`;
      if (answer === lanes[0].answer) drawChart(answer);
    });
    return { node, answer, bar };
  });
  const card = element("article", { className: "race", ariaLabel: "Race" }, ...lanes.map((lane) => lane.node));
  const asked = element("div", { className: "asked", dir: "auto", textContent: question });
  const again = () => {
    asked.remove();
    card.remove();
    race(question);
  };
  show(asked, card);
  await run(async (signal) => {
    const seed = Math.floor(Math.random() * 2 ** 31);
    const prompt = [{ role: "user", content: question }];
    const reads = lanes.map((lane, place) => {
      const more = { seed, ...options(), draft: place === 0 };
      return lane.answer.read(answer(prompt, more, signal));
    });
    const outcomes = await Promise.allSettled(reads);
    const fault = outcomes.find((outcome) => outcome.status === "rejected");
    for (const lane of lanes) {
      if (lane.answer.steps.length) lane.answer.draw();
    }
    following(() => endRace(card, ...lanes.map((lane) => lane.answer), fault?.reason, again));
  });
}

function endRace(card, drafts, plain, fault, again) {
  if (fault) {
    showFault(card, fault, drafts);
    return card.append(redoButton("Try again", again));
  }
  const isSame = drafts.text === plain.text;
  const texts = isSame ? "the same text" : "another text, as it was sampled or rounded otherwise";
  let times = "Too short to compare";
  let rest = `: an answer of one token has no speed; ${texts}`;
  if (drafts.rate && plain.rate) {
    times = `${(drafts.rate / plain.rate).toFixed(2)} times`;
    rest = ` as fast, ${texts}`;
  }
  card.append(element("p", { className: "verdict" }, element("b", { textContent: times }), rest));
  announce(times + rest);
}

// ---- Controls -------------------------------------------------------------------------------

function grow() {
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight + 2}px`;
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = input.value.trim();
  if (!question || running) return;
  input.value = "";
  grow();
  (mode() === "race" ? race : chat)(question);
});
input.addEventListener("input", grow);
input.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("ask").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !settings.open) running?.abort();
});
byId("stop").addEventListener("click", () => running?.abort());
byId("new").addEventListener("click", () => {
  running?.abort();
  turns = [];
  keepConversation();
  log.replaceChildren();
  byId("welcome").hidden = false;
  byId("steps").hidden = true;
  input.focus();
});
byId("open-settings").addEventListener("click", () => settings.showModal());
settings.addEventListener("close", () => {
  applySettings();
  byId("key-wanted").hidden = true;
  describe();
});
settings.addEventListener("input", applySettings);

async function describe() {
  const response = await fetch("v1/models", { headers: headers() }).catch(() => null);
  const model = response?.ok ? (await response.json()).data[0] : null;
  const facts = model ? [model.id, model.drafts] : [];
  byId("model").textContent = facts.filter(Boolean).join(", ");
  const hasDrafts = model?.drafts !== "";
  for (const node of document.querySelectorAll(".drafting")) node.hidden = !hasDrafts;
  byId("plain").hidden = hasDrafts;
  learns = Boolean(model?.learns);
  byId("learning").hidden = true;
  if (learns) await showLearning();
  if (!hasDrafts) document.querySelector("[name=mode][value=chat]").checked = true;
}

addEventListener("pagehide", keepConversation);
setInterval(() => learns && !document.hidden && showLearning(), LEARNING_PERIOD);
applySettings();
restoreConversation();
describe();
input.focus();
