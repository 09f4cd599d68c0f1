"use strict";
// Texts come from users: they are put in as text, never as HTML.
(() => {
  // Narrow, their rows are laid out as cards and would be no table to hear.
  const ROLES = { table: "table", thead: "rowgroup", tbody: "rowgroup",
    tr: "row", td: "cell", "thead th": "columnheader",
    "tbody th": "rowheader" };
  for (const table of document.querySelectorAll(".cards")) {
    table.setAttribute("role", ROLES.table);
    for (const [name, role] of Object.entries(ROLES).slice(1)) {
      for (const part of table.querySelectorAll(name)) {
        part.setAttribute("role", role);
      }
    }
  }

  const source = document.getElementById("data");
  const data = JSON.parse(source.textContent);
  const form = document.querySelector(".filters");
  if (!form) return;
  const PAGE = 50;
  const WAIT_MS = 120; // while one types
  const body = document.querySelector(".utterances tbody");
  const clean = (text) => text.normalize("NFC").toLowerCase();
  const rate = (errors, n) => (n ? (100 * errors) / n : errors ? 100 : 0);

  const rows = data.rows.map((row, order) => {
    const [clip, model, errors, n, hypothesis, flags, edits] = row;
    const [set, id, reference, seconds, category, speaker, audio, reason] =
      data.clips[clip];
    const names = { model: data.models[model], set: data.sets[set],
      category: data.categories[category],
      flags: flags.map((flag) => data.flags[flag]) };
    return { ...names, order, clip, errors, n, hypothesis, edits, id,
      reference, seconds, speaker, audio, reason, cer: rate(errors, n),
      text: clean([id, reference, hypothesis, speaker, names.category]
        .join("\n")) };
  });
  const byClip = new Map();
  for (const row of rows) {
    if (!byClip.has(row.clip)) byClip.set(row.clip, []);
    byClip.get(row.clip).push(row);
  }

  const COLUMNS = [
    { key: "errors", name: "Errors", number: true,
      show: (row) => `${row.errors} / ${row.n}` },
    { key: "cer", name: "CER", number: true, show: (row) => row.cer.toFixed(1) },
    { key: "reference", name: "Text" },
    { key: "model", name: "Model", few: data.models },
    { key: "set", name: "Test set", few: data.sets },
    { key: "category", name: "Category", few: data.categories },
    { key: "speaker", name: "Speaker" },
    { key: "seconds", name: "Seconds", number: true,
      show: (row) => (row.seconds === null ? "–" : row.seconds.toFixed(1)) },
  ].filter((column) => !column.few || column.few.length > 1)
    .filter((column) => column.key !== "speaker" ||
      rows.some((row) => row.speaker));
  let found = [];
  let page = 0;
  let sort = { key: "errors", down: true };

  function make(tag, name, ...parts) {
    const element = document.createElement(tag);
    if (name) element.className = name;
    element.append(...parts);
    return element;
  }

  // The reference, or the hypothesis, with what the other has not.
  function line(edits, side) {
    const span = make("span");
    span.lang = "ko";
    for (const edit of edits) {
      if (typeof edit === "string") {
        span.append(edit);
      } else if (edit[side]) {
        const kind = edit[1 - side] ? "sub" : side ? "ins" : "del";
        const text = edit[side].replaceAll(" ", "␣\u200b"); // breaks
        const mark = make(side ? "u" : "s", kind, text);
        mark.title = { sub: "substituted", ins: "inserted",
          del: "deleted" }[kind];
        span.append(mark);
      }
    }
    if (!span.textContent) {
      span.className = "soft";
      span.lang = "en";
      span.append("empty");
    }
    return span;
  }

  function pair(row) {
    const letter = (text, name) => {
      const element = make("b", "", text);
      element.title = name;
      return element;
    };
    return make("div", "pair", letter("R", "Reference"), line(row.edits, 0),
      letter("H", "Hypothesis"), line(row.edits, 1));
  }

  function player(row) {
    if (!row.audio) return make("p", "note", row.reason);
    const audio = make("audio");
    audio.controls = true;
    audio.preload = "metadata";
    audio.src = row.audio;
    audio.setAttribute("aria-label", `Clip ${row.id}`);
    const note = make("p", "note");
    audio.addEventListener("error", () => {
      note.textContent = "The browser cannot play it.";
    });
    return make("div", "", audio, note);
  }

  // Below a row: the clip, the texts as they were written, other models.
  function more(row) {
    const inner = make("div", "inner");
    if (row.audio || row.reason) inner.append(player(row));
    for (const one of byClip.get(row.clip)) {
      const head = make("h4", "", one.model, make("span", "soft",
        ` ${one.errors} errors in ${one.n} characters, CER ${one.cer.toFixed(1)} %`));
      const raw = make("p", "", make("span", "soft", "As written: "));
      const text = make("span", "", one.hypothesis || "nothing");
      text.lang = "ko";
      raw.append(text);
      inner.append(make("div", "", head, pair(one), raw));
    }
    const raw = make("p", "", make("span", "soft", "Reference as written: "));
    const text = make("span", "", row.reference || "nothing");
    text.lang = "ko";
    raw.append(text);
    inner.append(raw);
    const cell = make("td", "", inner);
    cell.colSpan = COLUMNS.length + 1;
    cell.setAttribute("role", "cell");
    const element = make("tr", "more", cell);
    element.setAttribute("role", "row");
    return element;
  }

  function cellOf(column, row) {
    if (column.key === "reference") {
      const tags = row.flags.map((flag) => make("span", "tag", flag));
      return make("td", "wide", pair(row), make("span", "id", row.id), ...tags);
    }
    const text = column.show ? column.show(row) : String(row[column.key]);
    const cell = make("td", column.number ? "n" : column.key, text);
    if (column.number) cell.dataset.name = column.name;
    return cell;
  }

  function rowOf(row) {
    const button = make("button", "toggle", row.audio ? "▶ Open" : "Open");
    button.type = "button";
    button.setAttribute("aria-expanded", "false");
    button.setAttribute("aria-label", `Details of ${row.id}, ${row.model}`);
    const cells = COLUMNS.map((column) => cellOf(column, row));
    const element = make("tr", "", ...cells, make("td", "", button));
    element.setAttribute("role", "row");
    for (const cell of element.cells) cell.setAttribute("role", "cell");
    let below = null;
    button.addEventListener("click", () => {
      if (below) below.remove();
      below = below ? null : more(row);
      if (below) element.after(below);
      button.setAttribute("aria-expanded", String(Boolean(below)));
      button.lastChild.data = below ? "Close" : row.audio ? "▶ Open" : "Open";
    });
    return element;
  }

  function head() {
    const element = make("tr");
    element.setAttribute("role", "row");
    for (const column of COLUMNS) {
      const button = make("button", "", column.name);
      button.type = "button";
      const cell = make("th", column.number ? "n" : "", button);
      cell.scope = "col";
      cell.setAttribute("role", "columnheader");
      cell.dataset.key = column.key;
      button.addEventListener("click", () => {
        const down = sort.key === column.key ? !sort.down : column.number;
        order(column.key, Boolean(down));
      });
      element.append(cell);
    }
    const last = make("th", "", make("span", "hidden", "Details"));
    last.setAttribute("role", "columnheader");
    element.append(last);
    document.querySelector(".utterances thead").append(element);
  }

  function order(key, down) {
    sort = { key, down };
    form.elements.sort.value = `${key} ${down ? "down" : "up"}`;
    select();
  }

  function compare(a, b) {
    const [x, y] = [a[sort.key], b[sort.key]];
    const way = sort.down ? -1 : 1;
    if (x === y) return b.cer - a.cer || a.order - b.order;
    if (x === null || y === null) return x === null ? 1 : -1;
    return x < y ? -way : way;
  }

  function select() {
    const { q, set, model, category, flag } = form.elements;
    const words = clean(q.value).split(/\s+/).filter(Boolean);
    const only = (field, value) => !field.value || field.value === value;
    found = rows.filter((row) => only(set, row.set) &&
      only(model, row.model) && only(category, row.category) &&
      (!flag.value || row.flags.includes(flag.value)) &&
      words.every((word) => row.text.includes(word))).sort(compare);
    page = 0;
    draw();
  }

  function draw() {
    const last = Math.max(0, Math.ceil(found.length / PAGE) - 1);
    const first = page * PAGE;
    const shown = found.slice(first, first + PAGE);
    body.replaceChildren(...shown.map(rowOf));
    if (shown.length === 1) body.querySelector(".toggle").click();
    const number = (n) => n.toLocaleString("en");
    document.getElementById("count").textContent =
      `${number(found.length)} of ${number(rows.length)} hypotheses` +
      (found.length ? "" : ": no utterance fits; change the search");
    document.getElementById("place").textContent = found.length
      ? `${number(first + 1)} – ${number(first + shown.length)} of ` +
        number(found.length) : "";
    document.getElementById("previous").disabled = page === 0;
    document.getElementById("next").disabled = page >= last;
    for (const cell of document.querySelectorAll(".utterances th[data-key]")) {
      if (cell.dataset.key !== sort.key) cell.removeAttribute("aria-sort");
      else cell.setAttribute("aria-sort",
        sort.down ? "descending" : "ascending");
    }
  }

  function turn(by) {
    page += by;
    draw();
    document.getElementById("list").scrollIntoView();
  }

  // The address says what is shown, so that it can be sent: #q=학교&model=base
  // Without an address the last model's rows are shown.
  const PLAIN = { model: data.preset, sort: "errors down" };
  const FIELDS = ["q", "set", "model", "category", "flag", "sort"];

  function remember() {
    const values = FIELDS.map((name) => [name, form.elements[name].value]);
    const isPlain = values.every(([name, value]) =>
      value === (PLAIN[name] || ""));
    const pairs = values.filter(([name, value]) => !isPlain &&
      (name === "model" || (value && value !== PLAIN[name])))
      .map(([name, value]) => `${name}=${encodeURIComponent(value)}`);
    try {
      history.replaceState(null, "", pairs.length ? `#${pairs.join("&")}` : "#");
    } catch { /* Some viewers forbid it; the table works without. */ }
  }

  function recall() {
    const asked = new URLSearchParams(location.hash.slice(1));
    if (!FIELDS.some((name) => asked.has(name))) return false;
    for (const name of FIELDS) form.elements[name].value = asked.get(name) || "";
    const [key, way] = (asked.get("sort") || "errors down").split(" ");
    const known = COLUMNS.some((column) => column.key === key);
    order(known ? key : "errors", !known || way !== "up");
    document.getElementById("utterances").scrollIntoView();
    return true;
  }

  function fill(name, values) {
    const field = form.elements[name];
    for (const value of values.filter(Boolean)) {
      field.append(new Option(value, value));
    }
    if (field.options.length < 2 || values.length < (name === "flag" ? 1 : 2)) {
      field.parentElement.hidden = true;
      field.parentElement.style.display = "none";
    }
  }

  head();
  fill("set", data.sets);
  fill("model", data.models);
  fill("category", [...data.categories].sort());
  fill("flag", data.flags);
  for (const { key, name, number } of COLUMNS) {
    const ways = number ? ["down", "up"] : ["up", "down"];
    for (const way of ways) {
      const told = { down: number ? "highest first" : "Z to A",
        up: number ? "lowest first" : "A to Z" }[way];
      form.elements.sort.append(new Option(`${name}, ${told}`, `${key} ${way}`));
    }
  }
  let waiting = 0;
  form.addEventListener("input", (event) => {
    clearTimeout(waiting);
    waiting = setTimeout(() => {
      const [key, way] = form.elements.sort.value.split(" ");
      order(key, way === "down");
      remember();
    }, event.target.name === "q" ? WAIT_MS : 0);
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  document.getElementById("previous").addEventListener("click", () => turn(-1));
  document.getElementById("next").addEventListener("click", () => turn(1));
  window.addEventListener("hashchange", recall);
  window.addEventListener("beforeprint", () => {
    for (const part of document.querySelectorAll("details")) part.open = true;
  });
  if (!recall()) {
    form.elements.model.value = PLAIN.model;
    order("errors", true);
  }
})();
