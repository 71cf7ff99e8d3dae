// Plots of /metrics, read every second. Counters become rates, histograms the quantiles of the last few seconds.
const KEEP = 180;          // points that a plot shows
const EVERY = 1000;        // milliseconds
const WINDOW = 10;         // points that a rate or quantile looks back over

// Prometheus' text form: {name: [{labels, value}]}.
function parse_metrics(text) {
  const out = {};
  for (const line of text.split("\n")) {
    const m = /^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\s+(\S+)/.exec(line);
    if (!m) continue;
    const labels = {};
    for (const l of (m[2] ?? "").matchAll(/([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"/g)) labels[l[1]] = l[2];
    (out[m[1]] ??= []).push({ labels, value: m[3] === "+Inf" ? Infinity : Number(m[3]) });
  }
  return out;
}

const history = [];        // {time, metrics}
const total = (p, name) => (p?.metrics[name] ?? []).reduce((s, x) => s + x.value, 0);
const has = (name) => history.at(-1)?.metrics[name] !== undefined;
const before = () => history[Math.max(0, history.length - 1 - WINDOW)];

const gauge = (name, factor = 1) => () => has(name) ? total(history.at(-1), name) * factor : null;
const rate = (name) => () => {
  const a = before(), b = history.at(-1);
  return a === b || !has(name) ? null : Math.max(0, (total(b, name) - total(a, name)) / (b.time - a.time));
};
const share = (part, whole) => () => {
  const a = before(), b = history.at(-1), n = total(b, whole) - total(a, whole);
  return has(whole) && n > 0 ? 100 * (total(b, part) - total(a, part)) / n : null;
};
// The value below which `q` of what the window saw lies, interpolated within its bucket, in milliseconds.
const quantile = (name, q) => () => {
  const a = before(), b = history.at(-1), buckets = b?.metrics[name + "_bucket"];
  if (!buckets || a === b) return null;
  const old = new Map((a.metrics[name + "_bucket"] ?? []).map((x) => [x.labels.le, x.value]));
  const rows = buckets.map((x) => [x.labels.le === "+Inf" ? Infinity : Number(x.labels.le), x.value - (old.get(x.labels.le) ?? 0)])
    .sort((x, y) => x[0] - y[0]);
  const want = q * rows.at(-1)[1];
  if (!(want > 0)) return null;
  let low = 0, below = 0;
  for (const [bound, count] of rows) {
    if (count >= want) return 1000 * (bound === Infinity ? low : low + (bound - low) * (want - below) / (count - below));
    low = bound;
    below = count;
  }
  return null;
};

const PLOTS = [
  { title: "Speed", unit: "tok/s", series: [["answers", rate("vllm:generation_tokens_total")], ["prompts", rate("vllm:prompt_tokens_total")]] },
  { title: "Time to the first token", unit: "ms", series: [["half", quantile("vllm:time_to_first_token_seconds", .5)], ["1 in 20 above", quantile("vllm:time_to_first_token_seconds", .95)]] },
  { title: "Between tokens", unit: "ms", series: [["half", quantile("vllm:time_per_output_token_seconds", .5)], ["1 in 20 above", quantile("vllm:time_per_output_token_seconds", .95)]] },
  { title: "Requests", unit: "", series: [["running", gauge("vllm:num_requests_running")], ["waiting", gauge("vllm:num_requests_waiting")]] },
  { title: "Keys and values in use", unit: "%", top: 100, series: [["used", gauge("vllm:kv_cache_usage_perc", 100)]] },
  { title: "Prefix cache", unit: "%", top: 100, needs: "vllm:prefix_cache_queries_total", series: [["hits", share("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")]] },
  { title: "Memory", unit: "MB", series: [["used", gauge("process_resident_memory_bytes", 1e-6)]] },
];
const EXPERTS = "metainfer:expert_tokens_total";   // labels layer and expert

const SVG = "http://www.w3.org/2000/svg";
function svg(tag, attributes, text) {
  const e = document.createElementNS(SVG, tag);
  for (const [k, v] of Object.entries(attributes)) e.setAttribute(k, v);
  if (text !== undefined) e.textContent = text;
  return e;
}

const short = (v) => v === null ? "–" : v >= 100 ? Math.round(v).toLocaleString("en") : String(Math.round(v * 10) / 10);

// The next 1, 2 or 5 times a power of ten.
function round_up(v) {
  if (!(v > 0)) return 1;
  const p = 10 ** Math.floor(Math.log10(v));
  return [1, 2, 5, 10].map((f) => f * p).find((x) => x >= v * 0.999999);
}

function draw(plot) {
  const W = plot.svg.clientWidth || 600, H = plot.svg.clientHeight || 150;
  plot.svg.setAttribute("viewBox", `0 0 ${W} ${H}`);
  const top = plot.top ?? round_up(Math.max(...plot.points.flat().map((v) => v ?? 0)));
  const x = (i) => W - (plot.points[0].length - 1 - i) * W / (KEEP - 1), y = (v) => H - 6 - (H - 18) * Math.min(v, top) / top;
  const parts = [0, .5, 1].flatMap((f) => [
    svg("line", { class: "grid", x1: 0, x2: W, y1: y(f * top), y2: y(f * top) }),
    ...(f ? [svg("text", { x: 2, y: y(f * top) - 2 }, short(f * top) + " " + plot.unit)] : [])]);
  plot.points.forEach((values, s) => {
    let d = "", pen = false;
    values.forEach((v, i) => {
      if (v === null) { pen = false; return; }
      d += `${pen ? "L" : "M"}${x(i).toFixed(1)} ${y(v).toFixed(1)}`;
      pen = true;
    });
    parts.push(svg("path", { class: "line s" + s, d }));
  });
  plot.svg.replaceChildren(...parts);
  plot.now.replaceChildren(...plot.series.map(([name], s) => make("span", { class: "k" + s }, say(name) + " ",
    make("b", {}, `${short(plot.points[s].at(-1))} ${plot.unit}`))));
}

function draw_experts() {
  const rows = history.at(-1).metrics[EXPERTS];
  heat.box.hidden = !rows;
  if (!rows) return;
  const old = new Map((before().metrics[EXPERTS] ?? []).map((x) => [x.labels.layer + "/" + x.labels.expert, x.value]));
  const layers = [...new Set(rows.map((x) => Number(x.labels.layer)))].sort((a, b) => a - b);
  const experts = 1 + Math.max(...rows.map((x) => Number(x.labels.expert)));
  const change = rows.map((x) => x.value - (old.get(x.labels.layer + "/" + x.labels.expert) ?? 0));
  const use = change.some((v) => v > 0) ? change : rows.map((x) => x.value);   // idle: since the start
  const most = new Map();
  rows.forEach((x, i) => most.set(x.labels.layer, Math.max(most.get(x.labels.layer) ?? 0, use[i])));
  heat.svg.setAttribute("viewBox", `0 0 ${experts} ${layers.length}`);
  heat.svg.replaceChildren(...rows.map((x, i) => {
    const cell = svg("rect", { x: x.labels.expert, y: layers.indexOf(Number(x.labels.layer)), width: 1, height: 1, class: "s0",
                               "fill-opacity": (use[i] / (most.get(x.labels.layer) || 1)).toFixed(3), fill: "currentColor", "stroke-width": 0 });
    cell.append(svg("title", {}, `${say("layer")} ${x.labels.layer}, ${say("expert")} ${x.labels.expert}: ${use[i]}`));
    return cell;
  }));
}

function add_plot(title, wide) {
  const heading = make("h2", { "data-say": title }), now = make("div", { class: "now" });
  const picture = svg("svg", { viewBox: "0 0 600 150", preserveAspectRatio: "none", role: "img" });
  const box = make("section", { class: wide ? "plot wide k0" : "plot" }, heading, now, picture);
  document.getElementById("plots").append(box);
  return { box, now, svg: picture };
}

for (const p of PLOTS) Object.assign(p, add_plot(p.title, false), { points: p.series.map(() => []) });
const heat = add_plot("Expert load", true);
heat.now.append(make("span", { "data-say": "each row a layer, each column an expert; darker is more" }));
heat.box.hidden = true;

async function look() {
  const state = document.getElementById("state");
  try {
    const response = await fetch(at("/metrics"), { cache: "no-store" });
    if (!response.ok) throw new Error(String(response.status));
    const metrics = parse_metrics(await response.text()), time = performance.now() / 1000;
    const started = (p) => total(p, "process_start_time_seconds");
    // A new server counts from zero.
    if (history.length && started(history.at(-1)) !== started({ metrics })) history.length = 0;
    history.push({ time, metrics });
    if (history.length > KEEP) history.shift();
    for (const p of PLOTS) {
      p.box.hidden = p.needs !== undefined && !has(p.needs);
      p.series.forEach(([, value], s) => {
        p.points[s].push(value());
        if (p.points[s].length > KEEP) p.points[s].shift();
      });
      draw(p);
    }
    draw_experts();
    const model = metrics["vllm:num_requests_running"]?.[0].labels.model_name ?? "";
    const up = Date.now() / 1000 - started(history.at(-1));
    state.className = "note";
    state.textContent = `${model} · ${say("up")} ${up < 5400 ? Math.round(up / 60) + " min" : Math.round(up / 3600) + " h"}`;
  } catch {
    state.className = "note error";
    state.textContent = say("The server cannot be reached");
  }
  setTimeout(look, EVERY);
}
document.addEventListener("language", () => { if (history.length) PLOTS.forEach(draw); });
look();
