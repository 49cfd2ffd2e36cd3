// Filters are shown only where scripts run; without them all entries stay visible.
for (const select of document.querySelectorAll("select[data-filter]")) {
  const entries = document.querySelectorAll(`#${select.dataset.filter} > [data-verdict]`);
  select.parentElement.hidden = false;
  select.addEventListener("change", () => {
    for (const entry of entries) {
      entry.hidden = select.value !== "" && entry.dataset.verdict !== select.value;
    }
  });
}
