// Tables of the breakdown: sorted, folded, and leading to an op in the timeline.

function sortable(table) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, place) => head.querySelector("button").addEventListener("click", () => {
    const now = head.getAttribute("aria-sort"), up = now === "descending" || (place === 0 && now === "none");
    heads.forEach((other) => other.setAttribute("aria-sort", "none"));
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    sortBy(table.tBodies[0], place, up ? 1 : -1);
  }));
}

/** By the number of a cell, or its text in the first column. What has no number comes last either way. */
function sortBy(body, place, sign) {
  const keyed = [...body.rows].map((row) => {
    const cell = row.cells[place];
    return [place === 0 ? cell.textContent : cell.dataset.v === undefined ? null : Number(cell.dataset.v), row];
  });
  keyed.sort(([a], [b]) => {
    if (a === null || b === null) return (a === null) - (b === null);
    return sign * (place === 0 ? a.localeCompare(b, "en", { numeric: true }) : a - b);
  });
  body.append(...keyed.map(([, row]) => row));
}

function breakdown(root, view) {
  const tabs = [...root.querySelectorAll(".tabs button")], parts = [...root.querySelectorAll(".tab")];
  const choose = (which) => {
    tabs.forEach((tab) => tab.setAttribute("aria-pressed", String(tab.dataset.tab === which)));
    parts.forEach((part) => { part.hidden = part.dataset.tab !== which; });
  };
  tabs.forEach((tab) => tab.addEventListener("click", () => choose(tab.dataset.tab)));
  choose(tabs[0].dataset.tab);
  root.querySelectorAll("table").forEach(sortable);
  root.querySelectorAll(".more").forEach((button) => button.addEventListener("click", () => {
    const short = button.parentElement.querySelector("table").classList.toggle("short");
    button.textContent = short ? `show all ${button.dataset.all}` : "show fewer";
  }));
  root.addEventListener("click", (event) => {
    const found = event.target.closest(".find");
    if (!found || !view) return;
    view.find(Number(found.dataset.place));
    view.root.scrollIntoView({ block: "nearest", behavior: "smooth" });
  });
}
