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

// Draws the figure, or changes it to new data.
async function drawChart(figure) {
  const { data, layout } = JSON.parse(figure.dataset.figure);
  const plot = figure.querySelector(".plot");
  if (layout.hovermode === "x unified") {
    layout.hoverdistance = hoverDistance(stepsOf(data), plot.clientWidth);
  }
  const options = { responsive: true, displayModeBar: false };
  await Plotly.react(plot, data, { ...layout, template: theme() }, options);
}

async function addChart(figure) {
  await drawChart(figure);
  const plot = figure.querySelector(".plot");
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

  form.addEventListener("input", restart);
  form.addEventListener("grown", (event) => {
    room += event.detail; // blocks above those that are read
    apply();
  });
  form.querySelector("[type=reset]").addEventListener("click", (event) => {
    event.preventDefault(); // clear the controls first, then list the entries again
    form.reset();
    restart();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  form.open.addEventListener("change", () => {
    if (!form.open.checked) list.querySelectorAll("[data-verdict]").forEach((e) => (e.open = false));
  });
  more.addEventListener("click", () => {
    room += page;
    apply();
  });
  form.hidden = false;
  apply();
}

document.querySelectorAll("form[data-list]").forEach(addFilters);
const plotly = loadPlotly();
plotly.then(() => document.querySelectorAll("figure").forEach(addChart));
