const log = $("log"), ask = $("ask"), send = $("send");
const kept = ["system", "temperature", "max_tokens", "key"];
let messages = [], running = null;

// The chat outlives a reload of this tab.
const remember = () => sessionStorage.setItem("messages", JSON.stringify(messages));

function addTurn(role) {
  $("empty")?.remove();
  const turn = element("div", "turn " + role), text = element("div", "text");
  turn.append(text);
  log.append(turn);
  return { turn, text };
}

class Answer {
  constructor() {
    Object.assign(this, addTurn("assistant"));
    this.note = element("div", "note", "…");
    this.turn.append(this.note);
    this.content = this.reasoning = "";
    this.tokens = 0;
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
    const rate = seconds > 0 ? `, ${((this.tokens - 1) / seconds).toFixed(1)} tokens/s` : "";
    return `${this.tokens} tokens${rate}`;
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
  send.textContent = "Stop";
  log.setAttribute("aria-busy", "true"); // a screen reader waits for the whole answer
  let said = "", isError = false;
  try {
    const response = await fetch("v1/chat/completions", { method: "POST", headers: headers(), body: body(), signal: stop.signal });
    if (!response.ok) throw await failure(response);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      if (event.choices?.[0]?.finish_reason === "length") said = "cut: most tokens reached";
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
  send.textContent = "Send";
  log.setAttribute("aria-busy", "false");
}

// A question that failed goes back into the field; the error stays in the log.
function putBack(question, answer) {
  answer.turn.previousElementSibling?.remove();
  ask.value ||= question.content;
  ask.focus();
}

async function failure(response) {
  if (response.status === 401) $("settings").showModal();
  try { return new Error((await response.json()).error.message); } catch { return new Error("HTTP " + response.status); }
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) return running.abort();
  const text = ask.value.trim();
  if (!text) return;
  ask.value = "";
  messages.push({ role: "user", content: text });
  remember();
  addTurn("user").text.textContent = text;
  chat();
});
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
  log.replaceChildren();
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
    const { text } = addTurn(role);
    if (role === "user") text.textContent = content;
    else text.replaceChildren(...markdown(content.trimStart()));
  }
  if (messages.at(-1)?.role === "user") { // its answer was cut by the reload
    ask.value = messages.pop().content;
    log.lastElementChild.remove();
  }
  log.scrollTop = log.scrollHeight;
}
restore();

// The model's name, and how far it is with loading.
async function find() {
  try {
    const health = await (await fetch("health")).json();
    if (health.status === "loading") {
      $("model").textContent = `loading: ${health.stage} (${health.percent} %)`;
      return setTimeout(find, 500);
    }
    const response = await fetch("v1/models", { headers: headers() });
    if (response.status === 401) return $("model").textContent = "an API key is needed: Settings";
    $("model").textContent = document.title = (await response.json()).data[0].id;
  } catch {
    $("model").textContent = "no server";
    setTimeout(find, 2000);
  }
}
find();
