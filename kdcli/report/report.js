"use strict";

const UNITS = { k: 1e3, M: 1e6, G: 1e9 };
// A number at the beginning of a cell, perhaps with a unit, as in "+0.50", "≤ 1.2 MB" or "33.8 k".
const NUMBER = /^[≤≥<]?\s*([+\-−]?[\d,]*\.?\d+(?:e[+\-]?\d+)?)x?(?![\w\-])\s*([kMG]?)/;
const FEW_ROWS = 8; // Fewer rows are read faster than filtered.

function value(row, column) {
  const text = row.cells[column]?.textContent.trim() ?? "";
  const parts = NUMBER.exec(text);
  if (!parts) return text;
  return parseFloat(parts[1].replaceAll(",", "").replace("−", "-")) * (UNITS[parts[2]] ?? 1);
}

// Numbers come before words, and empty cells are last in both directions.
function compare(one, other, sign) {
  if (one === "" || other === "") return (one === "") - (other === "");
  if (typeof one === typeof other) {
    return sign * (typeof one === "number" ? one - other : one.localeCompare(other));
  }
  return typeof one === "number" ? -1 : 1;
}

function sortable(table) {
  const heads = [...table.tHead.rows[0].cells];
  const body = table.tBodies[0];
  heads.forEach((head, column) => {
    if (!head.textContent.trim()) return;
    const button = document.createElement("button");
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const sign = head.getAttribute("aria-sort") === "descending" ? 1 : -1;
      heads.forEach((each) => each.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", sign < 0 ? "descending" : "ascending");
      const rows = [...body.rows];
      rows.sort((a, b) => compare(value(a, column), value(b, column), sign));
      body.append(...rows);
    });
  });
}

function filterable(rows, place) {
  const field = document.createElement("input");
  const count = document.createElement("output");
  field.type = "search";
  field.placeholder = field.ariaLabel = `Filter ${rows.length} rows`;
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/);
    const hidden = rows.filter((row) => {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      return row.hidden;
    });
    count.value = hidden.length ? `${rows.length - hidden.length} of ${rows.length} rows` : "";
  });
  const line = document.createElement("p");
  line.className = "filter";
  line.append(field, count);
  place.before(line);
}

for (const table of document.querySelectorAll("table:not(.models, .confusion)")) {
  const rows = [...table.tBodies[0].rows];
  if (rows.length > 1) sortable(table);
  if (rows.length >= FEW_ROWS) filterable(rows, table.closest(".scroll"));
}
for (const list of document.querySelectorAll("ul.worst")) {
  const rows = [...list.children];
  if (rows.length >= FEW_ROWS) filterable(rows, list);
}
