const log = $("log"), ask = $("ask"), send = $("send"), empty = $("empty");
const kept = ["system", "temperature", "max_tokens", "key"];
let messages = [], running = null;

// The chat outlives a reload of this tab.
const remember = () => sessionStorage.setItem("messages", JSON.stringify(messages));

function addTurn(role) {
  empty.remove();
  const turn = element("div", "turn " + role), text = element("div", "text");
  turn.append(text);
  log.append(turn);
  return { turn, text };
}

// The line below an answer: a note, and what can be done with the answer. Returns the note.
function addFoot({ turn, text }, said, content) {
  const foot = element("div", "foot"), note = element("span", "note", said), retry = element("button", "retry", "Try again");
  retry.type = "button";
  retry.addEventListener("click", () => { if (!running) tryAgain(turn); });
  foot.append(note, copyButton(content, text), retry);
  turn.append(foot);
  return note;
}

class Answer {
  constructor() {
    Object.assign(this, addTurn("assistant"));
    this.note = addFoot(this, "…", () => this.content);
    this.content = this.reasoning = "";
    this.tokens = 0;
    this.asked = performance.now();
    this.first = this.last = null;
    this.drawing = false;
  }
  take(event) {
    if (event.usage) this.tokens = event.usage.completion_tokens;
    for (const choice of event.choices ?? []) {
      const delta = choice.delta ?? {};
      const thought = delta.reasoning_content ?? delta.reasoning ?? "";
      let text = delta.content ?? "";
      for (const call of delta.tool_calls ?? []) text += (call.function?.name ?? "") + (call.function?.arguments ?? "");
      this.reasoning += thought;
      this.content += text;
      if (thought || text) {
        this.tokens += 1;
        this.last = performance.now();
        this.first ??= this.last;
      }
    }
    if (!this.drawing) {
      this.drawing = true;
      requestAnimationFrame(() => { this.drawing = false; if (!this.hasEnded) this.draw(); });
    }
  }
  draw() {
    const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
    if (this.reasoning && !this.details) {
      this.details = element("details");
      this.thoughts = element("div", "text");
      this.details.append(element("summary", "", "Reasoning"), this.thoughts);
      this.turn.prepend(this.details);
    }
    if (this.details) this.thoughts.textContent = this.reasoning.trim();
    this.text.replaceChildren(...markdown(this.content.trimStart()));
    this.note.textContent = this.rate();
    if (atEnd) log.scrollTop = log.scrollHeight;
  }
  rate() {
    const seconds = (this.last - this.first) / 1000;
    const rate = seconds > 0 ? ` · ${((this.tokens - 1) / seconds).toFixed(1)} tokens/s` : "";
    const wait = this.first === null ? "" : ` · first token after ${Math.round(this.first - this.asked)} ms`;
    return `${this.tokens} tokens${rate}${wait}`;
  }
  end(said, isError) {
    this.draw();
    this.hasEnded = true; // a frame that was asked for before would draw over what is said here
    this.note.textContent = [this.tokens ? this.rate() : "", said].filter(Boolean).join(" · ");
    if (isError) this.note.classList.add("error");
  }
}

function headers() {
  const key = $("key").value.trim();
  return key ? { "content-type": "application/json", authorization: "Bearer " + key } : { "content-type": "application/json" };
}

function body() {
  const system = $("system").value.trim();
  const made = {
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    stream: true, stream_options: { include_usage: true },
  };
  for (const name of ["temperature", "max_tokens"]) if ($(name).value !== "") made[name] = Number($(name).value);
  if (!$("thinking").checked) made.chat_template_kwargs = { enable_thinking: false };
  return JSON.stringify(made);
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("the connection was lost");
    const whole = (rest + value).split("\n\n");
    rest = whole.pop();
    for (const event of whole) {
      if (!event.startsWith("data: ")) continue;
      const data = event.slice(6);
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

async function chat() {
  const answer = new Answer(), chat = messages;
  log.scrollTop = log.scrollHeight;
  const stop = running = new AbortController();
  send.firstElementChild.textContent = "Stop";
  log.setAttribute("aria-busy", "true"); // a screen reader waits for the whole answer
  let said = "", isError = false;
  try {
    const response = await fetch("v1/chat/completions", { method: "POST", headers: headers(), body: body(), signal: stop.signal });
    if (!response.ok) throw await failure(response);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      if (event.choices?.[0]?.finish_reason === "length") said = "cut off at the maximum number of tokens";
      answer.take(event);
    }
  } catch (error) {
    said = stop.signal.aborted ? "stopped" : error.message;
    isError = !stop.signal.aborted;
  }
  answer.end(said, isError);
  if (answer.content || !isError) chat.push({ role: "assistant", content: answer.content });
  else putBack(chat.pop(), answer);
  if (chat === messages) remember();
  running = null;
  send.firstElementChild.textContent = "Send";
  log.setAttribute("aria-busy", "false");
}

// Drops the last answer and asks for another one.
function tryAgain(turn) {
  while (messages.at(-1)?.role === "assistant") messages.pop();
  if (!messages.length) return;
  turn.remove();
  remember();
  chat();
}

// A question that failed goes back into the field; the error stays in the log.
function putBack(question, answer) {
  answer.turn.previousElementSibling?.remove();
  for (const button of answer.turn.querySelectorAll(".foot button")) button.remove();
  ask.value ||= question.content;
  ask.focus();
}

async function failure(response) {
  if (response.status === 401) $("settings").showModal();
  try { return new Error((await response.json()).error.message); } catch { return new Error("HTTP " + response.status); }
}

function submit(text) {
  ask.value = "";
  messages.push({ role: "user", content: text });
  remember();
  addTurn("user").text.textContent = text;
  chat();
}
$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) return running.abort();
  const text = ask.value.trim();
  if (text) submit(text);
});
for (const example of empty.querySelectorAll("button")) {
  example.addEventListener("click", () => { if (!running) submit(example.textContent); });
}
ask.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing && matchMedia("(pointer: fine)").matches) {
    event.preventDefault();
    if (!running) $("form").requestSubmit();
  }
});
function newChat() {
  running?.abort();
  messages = [];
  remember();
  log.replaceChildren(empty);
  ask.focus();
}
$("new").addEventListener("click", newChat);
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !$("settings").open) running?.abort();
  if (event.altKey && event.code === "KeyN") { event.preventDefault(); newChat(); }
});
$("open").addEventListener("click", () => $("settings").showModal());
$("settings").addEventListener("close", () => { for (const id of kept) sessionStorage.setItem(id, $(id).value); find(); });
for (const id of kept) $(id).value = sessionStorage.getItem(id) ?? "";

function restore() {
  try { messages = JSON.parse(sessionStorage.getItem("messages") ?? "[]"); } catch { messages = []; }
  for (const { role, content } of messages) {
    const made = addTurn(role);
    if (role === "user") made.text.textContent = content;
    else {
      made.text.replaceChildren(...markdown(content.trimStart()));
      addFoot(made, "", () => content);
    }
  }
  if (messages.at(-1)?.role === "user") { // its answer was cut by the reload
    ask.value = messages.pop().content;
    log.lastElementChild.remove();
    if (!messages.length) log.append(empty);
  }
  log.scrollTop = log.scrollHeight;
}
restore();

function setStatus(name) {
  $("status").className = name;
  $("status").ariaLabel = name;
}

// The model's name, and how far it is with loading.
async function find() {
  try {
    const health = await (await fetch("health")).json();
    if (health.status === "loading") {
      setStatus("loading");
      $("model").textContent = `loading: ${health.stage} (${health.percent} %)`;
      return setTimeout(find, 500);
    }
    const response = await fetch("v1/models", { headers: headers() });
    if (response.status === 401) return $("model").textContent = "an API key is needed: see Settings";
    $("model").textContent = document.title = (await response.json()).data[0].id;
    setStatus("ready");
  } catch {
    setStatus("lost");
    $("model").textContent = "the server cannot be reached";
    setTimeout(find, 2000);
  }
}
find();
