"use strict";
// Follows the run: fetches the page again, and changes only the parts that differ. What is open,
// chosen, typed or scrolled to stays as it is. Nothing that is fetched runs: it is parsed without
// scripts, and the content policy allows none. Runs before report.js, which changes the page.

const POLL = 2000; // milliseconds
// Parts that stay in place while their children change.
const FRAMES = "main, section, .charts, #problem-list, #completion-list";
// Of each part as the server sent it: scripts change it afterwards.
const sources = new WeakMap();

function remember(part) {
  sources.set(part, part.outerHTML);
  if (part.matches(FRAMES)) [...part.children].forEach(remember);
}

// What a part is called among its siblings, whatever it says now.
function nameOf(part) {
  const { key, list } = part.dataset;
  const name = part.id || key || list || part.getAttribute("aria-label") ||
    (part.querySelector("summary")?.textContent ?? part.className);
  return `${part.tagName} ${name}`;
}

// Makes the children of a frame those of another, and keeps those that are the same.
function update(frame, fresh) {
  if (sources.get(frame) === fresh.outerHTML) return;
  sources.set(frame, fresh.outerHTML);
  const old = [...frame.children].filter((part) => sources.has(part));
  const same = new Map(old.map((part) => [sources.get(part), part]));
  const named = new Map(old.map((part) => [nameOf(part), part]));
  const kept = new Set();
  const take = (part) => (part && !kept.has(part) ? part : undefined);
  const form = frame.id ? document.querySelector(`form[data-list="${frame.id}"]`) : null;
  let last = null, added = 0;
  for (const part of [...fresh.children]) {
    let here = take(same.get(part.outerHTML));
    const twin = here ?? take(named.get(nameOf(part)));
    if (!here && twin) here = replace(twin, part);
    if (!here) {
      here = part;
      added += 1;
      remember(part);
    }
    const isThere = here.parentElement === frame &&
      !(last && last.compareDocumentPosition(here) & Node.DOCUMENT_POSITION_PRECEDING);
    if (!isThere) {
      if (last) last.after(here);
      else frame.prepend(here);
    }
    if (here === part && !twin) start(part);
    kept.add(twin ?? here).add(here);
    last = here;
  }
  for (const part of old) {
    // What somebody reads stays, though the page has room for other steps only.
    const isRead = form && !form.open.checked && part.querySelector("[open]");
    if (!kept.has(part) && !isRead) part.remove();
  }
  if (form) {
    const isReading = frame.querySelector("[open]") || frame.getBoundingClientRect().top < 0;
    form.dispatchEvent(new CustomEvent("grown", { detail: isReading ? added : 0 }));
  }
}

// Puts a part in the place of an older one, or changes that one; returns which of them it is.
function replace(old, part) {
  if (old.matches(FRAMES)) {
    update(old, part);
    return old;
  }
  if (old.tagName === "FIGURE" || old.tagName === "FORM") {
    sources.set(old, part.outerHTML);
    if (old.tagName === "FORM") updateChoices(old, part);
    else {
      old.dataset.figure = part.dataset.figure;
      plotly.then(() => drawChart(old));
    }
    return old;
  }
  const open = [...old.querySelectorAll("details[open] > summary")].map((s) => s.textContent);
  if (old.open) part.open = true;
  remember(part);
  for (const summary of part.querySelectorAll("details > summary")) {
    if (open.includes(summary.textContent)) summary.parentElement.open = true;
  }
  old.replaceWith(part);
  return part;
}

function updateChoices(form, fresh) {
  for (const select of fresh.querySelectorAll("select")) {
    const chosen = form.elements[select.name];
    if (!chosen) {
      form.prepend(select.parentElement);
      continue;
    }
    const { value } = chosen;
    chosen.replaceChildren(...select.children);
    if (![...chosen.options].some((option) => option.value === value)) {
      chosen.append(new Option(value));
    }
    chosen.value = value;
  }
}

// Makes a new part work.
function start(part) {
  const found = (selector) =>
    [...(part.matches(selector) ? [part] : []), ...part.querySelectorAll(selector)];
  found("figure").forEach((figure) => plotly.then(() => addChart(figure)));
  // The list of a new form is put in after it.
  found("form[data-list]").forEach((form) => queueMicrotask(() => addFilters(form)));
}

// Changes the page, and scrolls so that what is read does not move, where browsers do not do it.
function inPlace(change) {
  if (CSS.supports("overflow-anchor", "auto")) return change();
  const read = [];
  let part = document.elementFromPoint(innerWidth / 2, innerHeight / 3);
  for (; part && part !== document.body; part = part.parentElement) {
    read.push([part, part.getBoundingClientRect().top]);
  }
  change();
  const [anchor, top] = read.find(([part]) => part.isConnected) ?? [];
  if (anchor && scrollY > 0) scrollBy(0, anchor.getBoundingClientRect().top - top);
}

let tag = null;

// Returns the page if it has changed; null if it has not, or the server cannot be reached.
async function fetchPage() {
  try {
    const headers = tag ? { "If-None-Match": tag } : {};
    const answer = await fetch("/parts", { headers, cache: "no-store" });
    if (!answer.ok && answer.status !== 304) throw new Error(answer.statusText);
    const text = answer.ok ? await answer.text() : null;
    delete document.body.dataset.lost;
    tag = answer.headers.get("ETag");
    return text;
  } catch {
    document.body.dataset.lost = "";
    return null;
  }
}

async function poll() {
  const text = await fetchPage();
  if (text === null) return;
  const fresh = new DOMParser().parseFromString(text, "text/html");
  inPlace(() => {
    document.title = fresh.title;
    for (const name of ["header", "main"]) {
      const old = document.querySelector(name), part = fresh.querySelector(name);
      if (sources.get(old) !== part.outerHTML) replace(old, part);
    }
  });
}

async function keepPolling() {
  if (!document.hidden) await poll();
  setTimeout(keepPolling, POLL);
}

["header", "main"].forEach((name) => remember(document.querySelector(name)));
addEventListener("DOMContentLoaded", keepPolling); // once report.js has run
