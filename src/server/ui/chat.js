// The chat page: messages here, answers streamed from /v1/chat/completions.
const $ = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
let messages = [];        // {role, content}, as the API takes them
let running = null;       // the AbortController of the answer that is being made

function request_body() {
  const body = { model: $("model").value, messages: [], stream: true, stream_options: { include_usage: true } };
  if ($("system").value.trim()) body.messages.push({ role: "system", content: $("system").value });
  body.messages.push(...messages);
  for (const name of NUMBERS) if ($(name).value !== "") body[name] = Number($(name).value);
  return body;
}

// Calls each(data) for every event of the stream; resolves at its end.
async function read_events(response, each) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ")) each(line.slice(6).trimEnd());
  }
}

function at_bottom() { const m = $("messages"); return m.scrollHeight - m.scrollTop - m.clientHeight < 40; }
function to_bottom() { $("messages").scrollTop = $("messages").scrollHeight; }

function add_user(text) {
  $("messages").append(make("div", { class: "message user" }, text));
  to_bottom();
}

function copy_button(text) {
  const b = make("button", { type: "button" }, say("Copy"));
  b.addEventListener("click", async () => {
    try { await navigator.clipboard.writeText(text()); b.textContent = say("Copied"); } catch { /* the browser says no */ }
  });
  return b;
}

function add_answer() {
  const thought = make("span"), thinking = make("details", { hidden: "" }, make("summary", {}, say("Thinking")), thought);
  const body = make("div", { class: "body" }), note = make("div", { class: "note" });
  const all = make("div", { class: "message assistant" }, thinking, body, note);
  $("messages").append(all);
  let drawn = 0, text = "", waiting = false;
  const draw = () => {
    const follow = at_bottom();
    render_markdown(body, text);
    drawn = performance.now();
    waiting = false;
    if (follow) to_bottom();
  };
  return {
    all, note,
    add(piece) {
      text += piece;
      // Drawing is repeated for the whole text: not for every token of a fast model.
      if (performance.now() - drawn > 80) draw();
      else if (!waiting) { waiting = true; setTimeout(() => waiting && draw(), 80); }
    },
    think(piece) { thinking.hidden = false; thought.textContent += piece; },
    text: () => text,
    finish(words) {
      draw();
      for (const pre of body.querySelectorAll("pre")) pre.append(copy_button(() => pre.querySelector("code").textContent));
      note.append(copy_button(() => text), again_button(), words.filter(Boolean).join(" · "));
    },
  };
}

function again_button() {
  const b = make("button", { type: "button" }, say("Again"));
  b.addEventListener("click", () => {
    // Only the last answer can be made anew: what follows an older one was said in reply to it.
    if (running || messages.at(-1)?.role !== "assistant" || b.closest(".message") !== $("messages").lastElementChild) return;
    messages.pop();
    $("messages").lastElementChild.remove();
    answer();
  });
  return b;
}

function show_error(text) {
  $("messages").append(make("div", { class: "message error", role: "alert" }, text));
  to_bottom();
}

async function error_of(response) {
  const text = await response.text();
  try { return JSON.parse(text).error.message; } catch { return `${response.status} ${text.slice(0, 300)}`; }
}

function busy(yes) {
  $("send").hidden = yes;
  $("stop").hidden = !yes;
}

async function answer() {
  running = new AbortController();
  const conversation = messages;   // "New chat" begins another one
  busy(true);
  const shown = add_answer(), began = performance.now();
  let first = 0, usage = null, finish = null, failure = null, ended = false;
  try {
    const response = await fetch(at("/v1/chat/completions"), {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(request_body()), signal: running.signal });
    if (!response.ok) throw new Error(await error_of(response));
    await read_events(response, (data) => {
      if (data === "[DONE]") { ended = true; return; }
      const j = JSON.parse(data);
      if (j.error) { failure = j.error.message; return; }
      if (j.usage) usage = j.usage;
      const choice = j.choices?.[0];
      if (!choice) return;
      if (choice.finish_reason) finish = choice.finish_reason;
      const { content, reasoning_content } = choice.delta ?? {};
      if ((content || reasoning_content) && !first) first = performance.now();
      if (reasoning_content) shown.think(reasoning_content);
      if (content) shown.add(content);
    });
    if (!ended && !failure) failure = say("The answer broke off");
  } catch (e) {
    if (e.name === "AbortError") finish = "stopped";
    else failure = e instanceof TypeError ? say("The server cannot be reached") : e.message;
  }
  const seconds = (performance.now() - first) / 1000, n = usage?.completion_tokens;
  shown.finish([
    n && `${n} ${say("tokens")}`,
    n > 1 && first && seconds > 0 && `${((n - 1) / seconds).toFixed(1)} tok/s`,
    first && `${Math.round(first - began)} ms ${say("to the first token")}`,
    finish === "stopped" && say("stopped"), finish === "length" && say("cut off at the limit"),
  ]);
  if (shown.text() || !failure) conversation.push({ role: "assistant", content: shown.text() });
  else shown.all.remove();
  if (failure && conversation === messages) show_error(failure);
  running = null;
  busy(false);
  $("question").focus();
}

function send() {
  const text = $("question").value.trim();
  if (!text || running) return;
  $("question").value = "";
  grow();
  // A question without an answer (the server said no) is asked together with the next one.
  messages.push({ role: "user", content: text });
  add_user(text);
  answer();
}

function grow() {
  const q = $("question");
  q.rows = Math.min(12, q.value.split("\n").length);
}

async function load_models() {
  try {
    const response = await fetch(at("/v1/models"));
    if (!response.ok) throw new Error(await error_of(response));
    for (const m of (await response.json()).data) $("model").append(make("option", { value: m.id }, m.id));
  } catch (e) {
    show_error(e instanceof TypeError ? say("The server cannot be reached") : e.message);
  }
}

document.querySelector("form.ask").addEventListener("submit", (e) => { e.preventDefault(); send(); });
$("question").addEventListener("keydown", (e) => {
  if (e.key === "Enter" && !e.shiftKey && !e.isComposing) { e.preventDefault(); send(); }
});
$("question").addEventListener("input", grow);
$("stop").addEventListener("click", () => running?.abort());
$("fresh").addEventListener("click", () => {
  running?.abort();
  messages = [];
  $("messages").replaceChildren();
  $("question").focus();
});
$("show-settings").addEventListener("click", () => {
  $("settings").hidden = !$("settings").hidden;
  $("show-settings").setAttribute("aria-expanded", String(!$("settings").hidden));
});
for (const name of [...NUMBERS, "system"]) {
  $(name).value = remembered(name) ?? "";
  $(name).addEventListener("change", () => remember(name, $(name).value));
}
load_models();
