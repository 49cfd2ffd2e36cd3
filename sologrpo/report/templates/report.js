"use strict";
// Adds read-outs to the charts and filters to the lists. Without it everything is on the page too.
// Text enters the page as textContent only.

function element(tag, className, text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

// --- charts: values under the pointer, or step by step with the arrow keys

function addReadout(figure) {
  const { box, span, lines } = JSON.parse(figure.dataset.chart);
  const [left, top, width, height] = box;
  const values = lines.map((line) => new Map(line.points));
  const steps = [...new Set(lines.flatMap((line) => line.points.map(([step]) => step)))];
  steps.sort((a, b) => a - b);
  const plot = figure.querySelector(".plot");
  const cursor = element("i", "cursor");
  const readout = element("div", "readout");
  readout.setAttribute("role", "status");
  plot.append(cursor, readout);
  let at = steps.length;

  function show(index) {
    at = Math.max(0, Math.min(steps.length - 1, index));
    const share = (steps[at] - span[0]) / (span[1] - span[0]);
    const x = left + share * width;
    cursor.style.cssText = `left:${100 * x}%;top:${100 * top}%;height:${100 * height}%`;
    readout.replaceChildren(element("b", "", `step ${steps[at]}`));
    lines.forEach((line, i) => {
      if (!values[i].has(steps[at])) return;
      const value = values[i].get(steps[at]);
      const swatch = element("i", "");
      swatch.style.color = line.colour;
      const row = element("span", "", line.label);
      row.prepend(swatch);
      row.append(element("b", "", line.percent ? `${+(100 * value).toFixed(2)} %` : `${value}`));
      readout.append(row);
    });
    readout.classList.toggle("on-left", share > 0.5);
    figure.classList.add("reading");
  }

  function follow(event) {
    const frame = plot.getBoundingClientRect();
    const share = ((event.clientX - frame.left) / frame.width - left) / width;
    const wanted = span[0] + share * (span[1] - span[0]);
    const far = steps.map((step) => Math.abs(step - wanted));
    show(far.indexOf(Math.min(...far)));
  }

  function hide() {
    figure.classList.remove("reading");
  }

  plot.addEventListener("pointermove", follow);
  plot.addEventListener("pointerdown", follow);
  plot.addEventListener("pointerleave", hide);
  figure.addEventListener("blur", hide);
  figure.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    show(at + move);
  });
}

// --- lists: filters, search, and a page at a time

function addFilters(form) {
  const list = document.getElementById(form.dataset.list);
  const blocks = [...list.children].map((block) => ({
    block,
    // A block is an entry itself, or a group of entries under one question.
    entries: block.dataset.verdict ? [block] : [...block.querySelectorAll("[data-verdict]")],
    question: block.querySelector(".ask")?.textContent ?? "",
  }));
  const texts = new Map();
  const page = Number(list.dataset.page);
  const more = element("button", "more");
  more.type = "button";
  list.after(more);
  let room = page;

  function matches(entry, question) {
    for (const select of form.querySelectorAll("select")) {
      const found = (entry.dataset[select.name] ?? "").split("|");
      if (select.value && !found.includes(select.value)) return false;
    }
    const reward = parseFloat(entry.dataset.reward);
    const [least, most] = [parseFloat(form.least?.value), parseFloat(form.most?.value)];
    // Comparisons with NaN, of an empty box or an unjudged completion, are false.
    if ((least === least && !(reward >= least)) || (most === most && !(reward <= most))) return false;
    const wanted = form.search.value.trim().toLowerCase();
    if (!wanted) return true;
    if (!texts.has(entry)) texts.set(entry, `${question}\n${entry.textContent}`.toLowerCase());
    return texts.get(entry).includes(wanted);
  }

  function apply() {
    let found = 0, total = 0, shownBlocks = 0, foundBlocks = 0;
    for (const { block, entries, question } of blocks) {
      const kept = entries.filter((entry) => matches(entry, question));
      for (const entry of entries) entry.hidden = !kept.includes(entry);
      total += entries.length;
      found += kept.length;
      foundBlocks += kept.length > 0;
      const shown = kept.length > 0 && shownBlocks < room;
      block.hidden = !shown;
      shownBlocks += shown;
      if (form.open.checked && shown) kept.forEach((entry) => (entry.open = true));
    }
    form.querySelector("output").textContent =
      found === total ? `${total} in all` : `${found} of ${total} match`;
    more.hidden = foundBlocks <= shownBlocks;
    more.textContent = `show ${Math.min(page, foundBlocks - shownBlocks)} more`;
  }

  function restart() {
    room = page;
    apply();
  }

  form.addEventListener("input", restart);
  form.open.addEventListener("change", () => {
    if (!form.open.checked) list.querySelectorAll("[data-verdict]").forEach((e) => (e.open = false));
  });
  form.querySelector("[type=reset]").addEventListener("click", (event) => {
    event.preventDefault(); // the controls are to be clear before the list is made again
    form.reset();
    restart();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  more.addEventListener("click", () => {
    room += page;
    apply();
  });
  form.hidden = false;
  apply();
}

document.querySelectorAll("figure[data-chart]").forEach(addReadout);
document.querySelectorAll("form[data-list]").forEach(addFilters);
