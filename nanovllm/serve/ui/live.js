// The live state beside the chat, from /metrics once a second while it is shown.
const live = $("live"), PERIOD = 1000, KEPT = 60;
const shown = {}, rates = [];
const REFUSED = { 401: "an API key is needed: see Settings", 503: "loading" };
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
  const all = [...counts].map(([le, count]) => { const own = count - last; last = count; return { le, count: own }; });
  while (all.length && !all.at(-1).count) all.pop();
  while (all.length && !all[0].count) all.shift();
  return all;
}

// A card with a heading; the span is for what stands at its right.
function card(title) {
  const made = element("section"), heading = element("h2", "", title), right = element("span");
  heading.append(right);
  made.append(heading);
  live.append(made);
  return { made, right };
}

function figures(parent, ...names) {
  const list = element("dl");
  parent.append(list);
  return names.map((name) => {
    const one = element("div"), value = element("dd", "", "–");
    one.append(element("dt", "", name), value);
    list.append(one);
    return value;
  });
}

function build() {
  const requests = card("REQUESTS"), memory = card("KV CACHE"), rate = card("TOKENS PER SECOND"), first = card("FIRST TOKEN");
  [shown.running, shown.waiting, shown.finished] = figures(requests.made, "running", "waiting", "finished");
  [shown.kv, shown.hits] = figures(memory.made, "in use", "prompts cached");
  memory.made.append(shown.used = element("progress"));
  [shown.output, shown.prompt] = figures(rate.made, "generated", "prompts");
  shown.peak = rate.right;
  shown.graph = svg("svg");
  shown.graph.setAttribute("viewBox", `0 0 ${KEPT - 1} 1`);
  shown.graph.setAttribute("preserveAspectRatio", "none");
  shown.graph.append(shown.area = svg("path", "area"), shown.path = svg("path", "line"));
  rate.made.append(shown.graph);
  shown.median = first.right;
  first.made.append(shown.first = element("div"));
  live.append(shown.note = element("p", "error"));
  live.append(element("p", "", "From /metrics, every second. The graph shows the last minute, the histogram everything since the start."));
}

function svg(tag, className) {
  const made = document.createElementNS("http:" + "//www.w3.org/2000/svg", tag);
  if (className) made.setAttribute("class", className);
  return made;
}

// The bar that holds the middle one of all counts.
function median(histogram) {
  const half = histogram.reduce((sum, bar) => sum + bar.count, 0) / 2;
  let seen = 0;
  return histogram.find((bar) => (seen += bar.count) >= half).le;
}

// "0.06" -> "≤ 60 ms"
function bound(le) {
  const seconds = Number(le);
  return le === "+Inf" ? "more" : seconds < 1 ? `≤ ${Number((seconds * 1000).toPrecision(4))} ms` : `≤ ${seconds} s`;
}

const number = (value) => value >= 10 ? Math.round(value).toLocaleString("en") : value.toFixed(1);

function show(found, at) {
  const output = total(found, "generation_tokens_total"), prompt = total(found, "prompt_tokens_total");
  const queries = total(found, "prefix_cache_queries_total"), hits = total(found, "prefix_cache_hits_total");
  const engines = Math.max(1, (found.kv_cache_usage_perc ?? []).length);
  shown.running.textContent = total(found, "num_requests_running");
  shown.waiting.textContent = total(found, "num_requests_waiting");
  shown.finished.textContent = total(found, "request_success_total").toLocaleString("en");
  const used = total(found, "kv_cache_usage_perc") / engines;
  shown.kv.textContent = `${(100 * used).toFixed(1)} %`;
  shown.used.value = used;
  shown.hits.textContent = queries ? `${(100 * hits / queries).toFixed(0)} %` : "–";
  if (before) {
    const seconds = (at - before.at) / 1000;
    rates.push(Math.max(0, (output - before.output) / seconds));
    rates.splice(0, rates.length - KEPT);
    shown.output.textContent = number(rates.at(-1));
    shown.prompt.textContent = number(Math.max(0, (prompt - before.prompt) / seconds));
    const most = Math.max(1, ...rates);
    const begin = KEPT - rates.length; // the newest is at the right
    const line = rates.map((rate, n) => `${n ? "L" : "M"}${begin + n} ${1 - 0.95 * rate / most}`).join(" ");
    shown.path.setAttribute("d", line);
    shown.area.setAttribute("d", `${line} V1 H${begin} Z`);
    shown.peak.textContent = `peak ${number(Math.max(...rates))}`;
  }
  before = { at, output, prompt };
  const histogram = bars(found, "time_to_first_token_seconds"), most = Math.max(1, ...histogram.map((bar) => bar.count));
  shown.median.textContent = histogram.length ? `median ${bound(median(histogram))}` : "none yet";
  shown.first.replaceChildren(...histogram.map(({ le, count }) => {
    const bar = element("div", "bar"), width = element("progress");
    width.max = most;
    width.value = count;
    bar.append(element("span", "", bound(le)), width, element("span", "", String(count)));
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
