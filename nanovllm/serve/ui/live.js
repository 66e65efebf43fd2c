// The live state beside the chat, from /metrics once a second while it is shown.
const live = $("live"), PERIOD = 1000, KEPT = 60;
const shown = {}, rates = [];
const REFUSED = { 401: "an API key is needed: Settings", 503: "loading" };
let before = null, timer = null;

// Prometheus' text -> {name: [{labels, value}]}.
function parseMetrics(text) {
  const found = {};
  for (const line of text.split("\n")) {
    const hit = line.match(/^vllm:(\w+)(?:\{(.*)\})? (\S+)$/);
    if (!hit) continue;
    const labels = Object.fromEntries([...(hit[2] ?? "").matchAll(/(\w+)="([^"]*)"/g)].map((each) => [each[1], each[2]]));
    (found[hit[1]] ??= []).push({ labels, value: Number(hit[3]) });
  }
  return found;
}

const total = (found, name) => (found[name] ?? []).reduce((sum, each) => sum + each.value, 0);

// Bars of a histogram: counts between its bounds, summed over engines, the empty ends left out.
function bars(found, name) {
  const counts = new Map();
  for (const { labels, value } of found[name + "_bucket"] ?? []) {
    counts.set(labels.le, (counts.get(labels.le) ?? 0) + value);
  }
  let last = 0;
  const all = [...counts].map(([bound, count]) => { const own = count - last; last = count; return { bound, count: own }; });
  while (all.length && !all.at(-1).count) all.pop();
  while (all.length && !all[0].count) all.shift();
  return all;
}

function line(parent, name) {
  const value = element("dd", "", "–");
  parent.append(element("dt", "", name), value);
  return value;
}

function build() {
  const now = element("dl"), rate = element("dl");
  live.append(element("h2", "", "Requests"), now, element("h2", "", "Tokens a second, last minute"));
  shown.running = line(now, "running");
  shown.waiting = line(now, "waiting");
  shown.finished = line(now, "finished");
  shown.kv = line(now, "KV cache in use");
  shown.hits = line(now, "prompt tokens cached");
  shown.graph = document.createElementNS("http:" + "//www.w3.org/2000/svg", "svg");
  shown.path = document.createElementNS(shown.graph.namespaceURI, "path");
  shown.graph.setAttribute("viewBox", `0 0 ${KEPT - 1} 1`);
  shown.graph.setAttribute("preserveAspectRatio", "none");
  shown.graph.append(shown.path);
  shown.output = line(rate, "generated");
  shown.prompt = line(rate, "prompts");
  live.append(shown.graph, rate, element("h2", "", "First token, since the start"), shown.first = element("div"));
  live.append(shown.note = element("p", "note"));
}

const number = (value) => value >= 10 ? Math.round(value).toLocaleString("en") : value.toFixed(1);

function show(found, at) {
  const output = total(found, "generation_tokens_total"), prompt = total(found, "prompt_tokens_total");
  const queries = total(found, "prefix_cache_queries_total"), hits = total(found, "prefix_cache_hits_total");
  const engines = Math.max(1, (found.kv_cache_usage_perc ?? []).length);
  shown.running.textContent = total(found, "num_requests_running");
  shown.waiting.textContent = total(found, "num_requests_waiting");
  shown.finished.textContent = total(found, "request_success_total").toLocaleString("en");
  shown.kv.textContent = `${(100 * total(found, "kv_cache_usage_perc") / engines).toFixed(1)} %`;
  shown.hits.textContent = queries ? `${(100 * hits / queries).toFixed(0)} %` : "–";
  if (before) {
    const seconds = (at - before.at) / 1000;
    rates.push(Math.max(0, (output - before.output) / seconds));
    rates.splice(0, rates.length - KEPT);
    shown.output.textContent = number(rates.at(-1));
    shown.prompt.textContent = number(Math.max(0, (prompt - before.prompt) / seconds));
    const most = Math.max(1, ...rates);
    shown.path.setAttribute("d", rates.map((rate, n) => `${n ? "L" : "M"}${n} ${1 - rate / most}`).join(" "));
  }
  before = { at, output, prompt };
  const histogram = bars(found, "time_to_first_token_seconds"), most = Math.max(1, ...histogram.map((bar) => bar.count));
  shown.first.replaceChildren(...histogram.map(({ bound, count }) => {
    const bar = element("div", "bar"), width = element("progress");
    width.max = most;
    width.value = count;
    const seconds = Number(bound);
    bar.append(element("span", "", bound === "+Inf" ? "more" : seconds < 1 ? `≤ ${seconds * 1000} ms` : `≤ ${seconds} s`));
    bar.append(width, element("span", "", String(count)));
    return bar;
  }));
}

async function poll() {
  clearTimeout(timer);
  if (live.hidden) return;
  if (!document.hidden) {
    try {
      const response = await fetch("metrics", { headers: headers() });
      if (!response.ok) throw new Error(REFUSED[response.status] ?? `HTTP ${response.status}`);
      show(parseMetrics(await response.text()), performance.now());
      shown.note.textContent = "";
    } catch (error) {
      shown.note.textContent = error.message;
    }
  }
  timer = setTimeout(poll, PERIOD);
}

function toggle() {
  live.hidden = !live.hidden;
  $("state").setAttribute("aria-expanded", String(!live.hidden));
  before = null;
  poll();
}

build();
$("state").addEventListener("click", toggle);
addEventListener("keydown", (event) => { if (event.altKey && event.code === "KeyL") { event.preventDefault(); toggle(); } });
if (matchMedia("(min-width: 60rem)").matches) toggle();
