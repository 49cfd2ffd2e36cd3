"use strict";
// Draws the charts with Plotly, and filters the lists. Text enters the page as textContent only.

// --- charts

async function loadPlotly() {
  // The content policy allows the unpacked library by its hash.
  const packed = atob(document.getElementById("plotly").textContent);
  const bytes = Uint8Array.from(packed, (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);
}

// The colours of the page, which follow the reader's light or dark scheme.
function theme() {
  const style = getComputedStyle(document.body);
  const [ink, soft, line, card] = ["--ink", "--soft", "--line", "--card"].map((name) =>
    style.getPropertyValue(name));
  const axis = { gridcolor: line, tickfont: { color: soft } };
  return { layout: {
    paper_bgcolor: "transparent", plot_bgcolor: "transparent",
    font: { color: soft, family: style.fontFamily, size: 12 },
    hoverlabel: { bgcolor: card, bordercolor: line, font: { color: ink } },
    xaxis: axis, yaxis: axis,
  } };
}

// Half the pixels between two steps: a line without a value at a step is not read from the next.
function hoverDistance(steps, width) {
  const gaps = steps.slice(1).map((step, i) => step - steps[i]);
  const distance = (Math.min(...gaps) / (steps.at(-1) - steps[0])) * (width / 2);
  return gaps.length ? Math.max(1, Math.floor(distance)) : 20;
}

function stepsOf(data) {
  return [...new Set(data.flatMap((trace) => trace.x))].sort((a, b) => a - b);
}

async function addChart(figure) {
  const { data, layout } = JSON.parse(figure.dataset.figure);
  const plot = figure.querySelector(".plot");
  if (layout.hovermode === "x unified") {
    layout.hoverdistance = hoverDistance(stepsOf(data), plot.clientWidth);
  }
  const options = { responsive: true, displayModeBar: false };
  await Plotly.newPlot(plot, data, { ...layout, template: theme() }, options);
  let at = Infinity;
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
    Plotly.relayout(plot, { template: theme() }));
  figure.addEventListener("blur", () => Plotly.Fx.unhover(plot));
  figure.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    const steps = stepsOf(plot.data);
    at = Math.max(0, Math.min(steps.length - 1, Math.min(steps.length, at) + move));
    Plotly.Fx.hover(plot, { xval: steps[at] });
  });
}

// --- lists: filters, search, and a page at a time

function matches(entry, question, form) {
  for (const select of form.querySelectorAll("select")) {
    const found = (entry.dataset[select.name] ?? "").split("|");
    if (select.value && !found.includes(select.value)) return false;
  }
  // An unjudged completion has no reward: it fits no limit.
  if (form.least?.value && !(entry.dataset.reward >= Number(form.least.value))) return false;
  if (form.most?.value && !(entry.dataset.reward <= Number(form.most.value))) return false;
  const wanted = form.search.value.trim().toLowerCase();
  return !wanted || `${question}\n${entry.textContent}`.toLowerCase().includes(wanted);
}

function addFilters(form) {
  const list = document.getElementById(form.dataset.list);
  const page = Number(list.dataset.page);
  const more = document.createElement("button");
  more.className = "more";
  more.type = "button";
  list.after(more);
  let room = page;

  function apply() {
    let found = 0, total = 0, left = 0, shown = 0;
    // A block is an entry itself, or a group of entries under one question.
    for (const block of list.children) {
      const entries = block.dataset.verdict ? [block] : [...block.querySelectorAll("[data-verdict]")];
      const question = block.querySelector(".ask")?.textContent ?? "";
      const kept = entries.filter((entry) => matches(entry, question, form));
      for (const entry of entries) entry.hidden = !kept.includes(entry);
      total += entries.length;
      found += kept.length;
      block.hidden = !kept.length || shown === room;
      if (!block.hidden) shown += 1;
      else if (kept.length) left += 1;
      if (form.open.checked && !block.hidden) kept.forEach((entry) => (entry.open = true));
    }
    form.querySelector("output").textContent =
      found === total ? `${total} in total` : `${found} of ${total} match`;
    more.hidden = !left;
    more.textContent = `show ${Math.min(page, left)} more`;
  }

  function restart() {
    room = page;
    apply();
  }

  form.addEventListener("input", () => {
    form.dataset.used = "";
    restart();
  });
  form.querySelector("[type=reset]").addEventListener("click", (event) => {
    event.preventDefault(); // clear the controls first, then list the entries again
    form.reset();
    delete form.dataset.used;
    restart();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  form.open.addEventListener("change", () => {
    if (!form.open.checked) list.querySelectorAll("[data-verdict]").forEach((e) => (e.open = false));
  });
  more.addEventListener("click", () => {
    form.dataset.used = "";
    room += page;
    apply();
  });
  form.hidden = false;
  apply();
}

// --- the page of a run that is followed: it loads again what the run has logged

const POLL = 5000; // milliseconds

async function follow({ dataset }) {
  if (!document.hidden) {
    try {
      const answer = await fetch("/", { method: "HEAD", cache: "no-store" });
      delete dataset.lost;
      if (answer.headers.get("ETag") !== `"${dataset.version}"`) dataset.stale = "";
    } catch {
      dataset.lost = "";
    }
    // What somebody reads stays as it is.
    const isRead = document.querySelector("details[open], form[data-used]");
    if ("stale" in dataset && !("lost" in dataset) && !isRead) location.reload();
  }
  setTimeout(follow, POLL, document.body);
}

document.querySelectorAll("form[data-list]").forEach(addFilters);
loadPlotly().then(() => document.querySelectorAll("figure").forEach(addChart));
if (document.body.dataset.version) follow(document.body);
