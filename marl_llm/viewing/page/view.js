"use strict";
// Every text comes from models, tools and tasks: it enters the page as text nodes only, never as HTML.
(() => {
  const PAGE_ROWS = 200;
  const COLORS = ["none", "advantage", "log-prob", "entropy"];
  const embedded = document.getElementById("data") ? JSON.parse(document.getElementById("data").textContent) : null;
  const state = {
    runs: [], run: 0, view: "plays", rows: [], shown: PAGE_ROWS, found: null, text: "", filter: {}, sort: { key: null, down: false },
    play: null, call: null, color: "none", versions: [], compare: { first: 0, second: 1, seats: "after", task: null }, opened: new Set(),
  };
  let drawn = 0; // a drawing that was overtaken stops

  // ---------------------------------------------------------------------------------------------------------------- elements
  const visible = (text) => String(text).replace(/[\u0000-\u0008\u000b-\u001f]/g, (c) => String.fromCharCode(0x2400 + c.charCodeAt(0)))
    .replace(/[\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]/gu, "\ufffd");
  const add = (node, children) => {
    for (const child of children.flat(Infinity)) {
      if (child !== null && child !== undefined && child !== false) node.append(child instanceof Node ? child : visible(child));
    }
    return node;
  };
  const set = (node, attributes) => {
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (name === "role_color") node.style.setProperty("--role", value);
      else if (name === "background") node.style.backgroundColor = value;
      else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, visible(value));
    }
    return node;
  };
  const el = (tag, attributes, ...children) => add(set(document.createElement(tag), attributes), children);
  const svg = (tag, attributes, ...children) => add(set(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes), children);
  const chip = (text, tone) => el("span", { class: "chip " + (tone || "") }, text);
  const number = (x, digits = 2) => (x === null || x === undefined ? "" : Number(x).toFixed(digits));
  const tone = (row) => (row.status === "success" ? "good" : ["failed", "horizon", "aborted"].includes(row.status) ? "bad" : "");
  const colorOf = (roles, role) => `var(--s${Math.max(0, [...roles].sort().indexOf(role)) % 8})`;
  const readable = (value) => (typeof value === "string" ? value : JSON.stringify(value, null, 1));

  // ---------------------------------------------------------------------------------------------------------------- data
  async function api(path, params = {}) {
    if (embedded) return local(path, params);
    const query = new URLSearchParams(params).toString();
    const reply = await fetch(`api/${path}?${query}`);
    const value = await reply.json();
    if (!reply.ok) throw new Error(value.error);
    return value;
  }
  function local(path, params) {
    const of = embedded.of[params.run || 0];
    if (path === "runs") return embedded.runs;
    if (path === "versions") return embedded.runs.map(() => 0);
    if (path === "plays") return of.plays;
    if (path === "play") return of.play[params.id];
    if (path === "call") return of.call[params.id][params.call];
    if (path === "summary") return of.summary;
    if (path === "search") {
      const needle = folded(params.text);
      const has = (id) => textsOf(of.play[id], of.call[id]).some((text) => folded(text).includes(needle));
      return of.plays.map((row) => row.id).filter(has);
    }
    if (path === "group") return groupOf(of, params.id, Number(params.call));
    if (path === "compare") {
      const found = embedded.compare[`${params.first} ${params.second}`];
      if (found.error) throw new Error(found.error);
      return found;
    }
    throw new Error(path);
  }
  // As marl_llm/viewing/runs.py searches: NFKC and case folded (upper case first, for ß), texts without the names of fields.
  const folded = (text) => text.normalize("NFKC").toUpperCase().toLowerCase().replaceAll("ς", "σ").normalize("NFKC");
  const within = (value) => (typeof value === "string" ? [value] : value && typeof value === "object" ? Object.values(value).flatMap(within) : []);
  function textsOf(play, calls) {
    const tools = (play.tools || []).map((use) => [use.reads, use.writes, use.refused]);
    return within([calls.map((call) => [call.prompt, call.texts]), tools, play.task, play.hidden, play.failures]);
  }
  function groupOf(of, id, call) {
    const mine = of.plays.find((row) => row.id === id), step = of.play[id].steps[call];
    const same = (row) => row.when === mine.when && row.step === mine.step && row.key === mine.key;
    const calls = of.plays.filter(same).flatMap((row) => of.play[row.id].steps.map((one) => [row.id, one]));
    return calls.filter(([other, one]) => one.role === step.role && one.turn === step.turn && (other !== id || one.number === call))
      .flatMap(([other, one]) => one.responses.map((r) => ({ play: other, call: one.number, same: other === id, ...r })));
  }

  // ---------------------------------------------------------------------------------------------------------------- the address
  function readAddress() {
    const given = new URLSearchParams(location.hash.slice(1));
    state.run = Math.min(Number(given.get("run") || 0), Math.max(state.runs.length - 1, 0));
    state.view = given.get("view") || (embedded && embedded.view) || "plays";
    if (given.has("play") && !given.has("view")) state.view = "plays";
    state.play = given.get("play");
    state.call = given.has("call") ? Number(given.get("call")) : null;
    state.filter = Object.fromEntries(["when", "status", "step"].filter((k) => given.get(k)).map((k) => [k, given.get(k)]));
  }
  function go(change) {
    const next = { run: state.run, view: state.view, play: state.play, call: state.call, ...state.filter, ...change };
    if (change.play) next.view = "plays";
    const given = new URLSearchParams();
    for (const [key, value] of Object.entries(next)) if (value !== null && value !== undefined && value !== "") given.set(key, value);
    if (location.hash.slice(1) === given.toString()) draw();
    else location.hash = given.toString();
  }

  // ---------------------------------------------------------------------------------------------------------------- the list
  const KEYS = {
    play: (row) => row.id, when: (row) => row.when, step: (row) => row.step ?? -1, task: (row) => row.task, status: (row) => row.status,
    score: (row) => row.score ?? -1, turns: (row) => row.turns, paid: (row) => Object.values(row.paid).reduce((a, b) => a + b, 0),
  };
  function listed() {
    const { filter, found, sort } = state;
    const keep = (row) => (!filter.when || row.when === filter.when) && (!filter.status || row.status === filter.status)
      && (!filter.step || String(row.step) === filter.step) && (!found || found.has(row.id));
    const rows = state.rows.filter(keep);
    const roleKey = sort.key && sort.key.startsWith("role:") ? sort.key.slice(5) : null;
    const key = roleKey ? (row) => row.paid[roleKey] ?? -Infinity : KEYS[sort.key];
    if (key) rows.sort((a, b) => { const x = key(a), y = key(b); return (x < y ? -1 : x > y ? 1 : 0) * (sort.down ? -1 : 1); });
    return rows;
  }
  function list() {
    const values = (name) => [...new Set(state.rows.map((row) => row[name]).filter((x) => x !== null && x !== undefined))];
    const choice = (name, label) => {
      const options = [["", label], ...values(name).sort((a, b) => (a < b ? -1 : 1)).map((x) => [String(x), `${name} ${x}`])];
      const node = el("select", { "aria-label": label, onchange: (e) => go({ [name]: e.target.value || null, play: null, call: null }) },
        options.map(([value, text]) => el("option", { value }, text)));
      node.value = state.filter[name] || "";
      return node;
    };
    const search = el("input", { type: "search", id: "search", placeholder: "search in texts", "aria-label": "search in texts", value: state.text });
    search.addEventListener("keydown", (e) => { if (e.key === "Enter") find(search.value); });
    search.addEventListener("search", () => find(search.value));
    const roles = [...new Set(state.rows.flatMap((row) => Object.keys(row.paid)))];
    const head = (key, text, kind) => el("th", { class: kind, "aria-sort": state.sort.key === key ? (state.sort.down ? "descending" : "ascending") : null },
      el("button", { onclick: () => { state.sort = { key, down: state.sort.key === key && !state.sort.down }; refreshList(); } },
        text + (state.sort.key === key ? (state.sort.down ? " ▾" : " ▴") : "")));
    const rows = listed();
    const line = (row) => el("tr", { "data-play": row.id, tabindex: 0, "aria-selected": row.id === state.play ? "true" : null,
      onclick: () => go({ play: row.id, call: null }), onkeydown: (e) => { if (e.key === "Enter") go({ play: row.id, call: null }); } },
      el("td", {}, row.id), el("td", { class: "num" }, row.step ?? ""), el("td", { class: "task wide", title: row.task }, row.task),
      el("td", {}, chip(row.status, tone(row)), row.malformed ? chip(`${row.malformed} malformed`, "bad") : null),
      el("td", { class: "num" }, number(row.score)), el("td", { class: "num wide" }, row.turns),
      roles.map((role) => el("td", { class: "num wide" }, number(row.paid[role]))));
    const more = rows.length > state.shown
      ? el("button", { onclick: () => { state.shown += PAGE_ROWS; refreshList(); } }, `${rows.length - state.shown} more`) : null;
    return el("div", {},
      el("div", { class: "filters" }, search, choice("when", "any time"), choice("status", "any status"), choice("step", "any step")),
      el("p", { class: "muted", id: "count" }, `${rows.length} of ${state.rows.length} plays`),
      state.runs[state.run].faults.map((fault) => el("p", { class: "error" }, `left out: ${fault}`)),
      el("div", { class: "scroll" }, el("table", { id: "list" },
        el("thead", {}, el("tr", {}, head("play", "play"), head("step", "step", "num"), head("task", "task", "wide"), head("status", "status"),
          head("score", state.runs[state.run].headline, "num"), head("turns", "turns", "num wide"),
          roles.map((role) => head("role:" + role, role, "num wide")))),
        el("tbody", {}, rows.slice(0, state.shown).map(line)))), more);
  }
  async function find(text) {
    state.text = text;
    state.found = text ? new Set(await api("search", { run: state.run, text })) : null;
    state.shown = PAGE_ROWS;
    refreshList();
    document.getElementById("search").focus();
  }
  function refreshList() {
    const side = document.getElementById("side");
    if (side) side.replaceChildren(list());
  }

  // ---------------------------------------------------------------------------------------------------------------- a play
  async function playCard(run, id, here) {
    const play = await api("play", { run, id });
    const roles = Object.keys(play.roles), tools = new Map(), { map, ...task } = play.task;
    for (const use of play.tools || []) tools.set(use.after, [...(tools.get(use.after) || []), toolCard(use)]);
    const head = el("div", { class: "card" }, el("h2", {}, `${state.runs[run].name} · ${id}`),
      chip(play.status, tone(play)), " ", play.score === undefined ? null : chip(`${play.headline} ${number(play.score)}`), " ",
      chip(`${play.turns} turns`), " ", play.step === null ? null : chip(`step ${play.step}`), " ",
      roles.map((role) => [el("span", { class: "chip", role_color: colorOf(roles, role) }, el("span", { class: "who" }, role), ` → ${play.roles[role]}`), " "]),
      (play.failures || []).map((text) => el("p", { class: "error" }, text)),
      map ? picture(map) : null,
      Object.keys(task).length ? el("details", { open: "" }, el("summary", {}, "task"), el("pre", {}, readable(task))) : null,
      play.hidden ? el("details", {}, el("summary", {}, "hidden from the roles"), el("pre", {}, readable(play.hidden))) : null);
    const calls = play.steps.map((step) => [callCard(run, id, step, roles, play, here), tools.get(step.number + 1) || []]);
    return el("div", {}, head, tools.get(0) || [], calls);
  }
  function toolCard(use) {
    const lines = (fields) => Object.entries(fields || {}).map(([name, value]) => el("pre", {}, `${name}: ${readable(value)}`));
    return el("article", { class: "card tool" }, el("header", {}, el("span", { class: "who" }, use.node), " ", chip("tool"), " ",
      chip(`turn ${use.turn}`), " ", chip(`${number(use.seconds, 3)} s`), use.refused ? chip(`refused: ${use.refused}`, "bad") : null),
      use.reads ? el("details", {}, el("summary", {}, "input"), lines(use.reads)) : null, lines(use.writes));
  }
  function callCard(run, id, step, roles, play, here) {
    const chosen = step.responses.find((one) => one.chosen), own = chosen || step.responses[0];
    const text = el("div", { class: "said" });
    const card = el("article", { class: "card call" + (here === step.number ? " here" : ""), id: `call-${step.number}`, tabindex: -1,
      "data-call": step.number, role_color: colorOf(roles, step.role) },
      el("header", {}, el("span", { class: "who" }, step.role), chip(`turn ${step.turn}`), chip(`call ${step.number}`),
        chip(`team ${number(own.team)}`), chip(`local ${number(own.local)}`), own.advantage === undefined ? null : chip(`advantage ${number(own.advantage, 3)}`), own.without === undefined ? null : chip(`team without it ${number(own.without, 3)}`),
        own.well_formed ? null : chip("malformed", "bad"), own.truncated ? chip("truncated", "bad") : null,
        chosen ? null : chip("nothing chosen", "bad"), step.tokens ? chip(`${step.tokens} tokens`) : null,
        el("button", { class: "link", title: "link to this call", onclick: () => go({ play: id, call: step.number }) }, "#")),
      text,
      step.state_after ? picture(step.state_after) : null,
      rewardParts(own),
      lazily("what " + step.role + " read", `${step.prompt_characters} characters` + (step.prompt_tokens ? `, ${step.prompt_tokens} tokens` : ""), "read",
        async () => promptOf(await api("call", { run, id, call: step.number }))),
      lazily("its group", step.responses.length > 1 ? `${step.responses.length} candidates` : "", "group",
        async () => candidates(await api("group", { run, id, call: step.number }))));
    saidOf(text, run, id, step, step.responses.indexOf(own));
    return card;
  }
  async function saidOf(place, run, id, step, which) {
    const own = step.responses[which];
    if (state.color === "none") {
      const cut = own.characters ? el("button", { onclick: async () => {
        place.replaceChildren(el("pre", {}, (await api("call", { run, id, call: step.number })).texts[which]));
      } }, `all ${own.characters} characters`) : null;
      place.replaceChildren(own.text ? el("pre", {}, own.text) : el("p", { class: "muted" }, "(empty)"), cut || "");
      return;
    }
    const call = await api("call", { run, id, call: step.number });
    if (!call.responses) { place.replaceChildren(el("pre", {}, own.text), el("p", { class: "muted" }, "no tokens were stored")); return; }
    place.replaceChildren(tokens(call.responses[which], call.specials));
  }
  const COLUMN = { "log-prob": "log_probs", entropy: "entropy", advantage: "advantage" };
  function tokens(response, specials) {
    const values = response[COLUMN[state.color]];
    if (values === undefined) return el("div", {}, el("pre", {}, response.pieces.join(" ")), el("p", { class: "muted" }, `this run stored no ${state.color}`));
    const of = (i) => (Array.isArray(values) ? values[i] : values);
    const most = Math.max(1e-9, ...response.pieces.map((_, i) => Math.abs(of(i))));
    const paint = (x) => (state.color === "advantage" ? `rgba(var(--${x < 0 ? "down" : "up"}),${0.08 + 0.5 * Math.min(1, Math.abs(x) / Math.max(most, 1))})`
      : `rgba(var(--level),${0.05 + 0.55 * Math.abs(x) / most})`);
    return el("pre", {}, response.pieces.map((piece, i) => [el("span", { class: "token" + (specials.includes(piece) ? " special" : ""),
      title: `${state.color} ${number(of(i), 4)}`, background: paint(of(i)) }, piece || "∅"), " "]));
  }
  function promptOf(call) {
    if (!call.prompt_pieces) return el("pre", {}, call.prompt);
    const pieces = call.prompt_pieces.map((piece) => [el("span", { class: "token" + (call.specials.includes(piece) ? " special" : "") }, piece || "∅"), " "]);
    return el("div", {}, el("pre", {}, call.prompt), el("details", {}, el("summary", {}, `its ${call.prompt_pieces.length} tokens, special ones marked`), el("pre", {}, pieces)));
  }
  function rewardParts(response) {
    const parts = Object.entries(response.components);
    if (!parts.length) return null;
    return el("details", {}, el("summary", {}, "reward parts"), el("table", { class: "parts" }, el("tbody", {},
      parts.map(([name, value]) => el("tr", {}, el("td", {}, name), el("td", { class: "num" }, number(value, 3)))),
      el("tr", { class: "sum" }, el("td", {}, "team + local"), el("td", { class: "num" }, number(response.team + response.local, 3))))));
  }
  function candidates(group) {
    return el("div", { class: "columns" }, group.map((one) => el("div", { class: "candidate" + (one.same && one.chosen ? " same" : "") },
      el("p", {}, one.chosen ? chip("went on", "good") : null, " ", chip(`team ${number(one.team)}`), " ", chip(`local ${number(one.local)}`), " ",
        one.advantage === undefined ? null : chip(`advantage ${number(one.advantage, 3)}`, one.advantage < 0 ? "bad" : "good"), " ",
        one.well_formed ? null : chip("malformed", "bad")),
      el("pre", {}, one.text), one.same ? null : el("button", { onclick: () => go({ play: one.play, call: one.call }) }, one.play))));
  }
  function lazily(title, hint, kind, make) {
    const body = el("div", {}, el("p", { class: "muted" }, "…"));
    const node = el("details", { "data-kind": kind }, el("summary", {}, title, hint ? ` (${hint})` : ""), body);
    node.addEventListener("toggle", async () => {
      if (!node.open || node.dataset.filled) return;
      node.dataset.filled = "1";
      try { body.replaceChildren(await make()); } catch (error) { body.replaceChildren(el("p", { class: "error" }, error.message)); }
    });
    return node;
  }
  function picture(rows) {
    if (!rows.length || rows.length * rows[0].length > 10000) return el("pre", {}, rows.join("\n"));
    const size = 10, width = Math.max(...rows.map((row) => row.length)) * size, height = rows.length * size;
    const cells = rows.flatMap((row, y) => [...row].map((c, x) => [x * size, y * size, c]));
    const shape = ([x, y, c]) => {
      if (c === "#") return svg("rect", { x, y, width: size, height: size, fill: "var(--wall)" });
      const marks = [];
      if ("G*".includes(c)) marks.push(svg("rect", { x: x + 1.5, y: y + 1.5, width: 7, height: 7, fill: "none", stroke: "var(--s2)", "stroke-width": 1.8 }));
      if ("A*".includes(c)) marks.push(svg("circle", { cx: x + 5, cy: y + 5, r: 2.9, fill: "var(--s0)" }));
      if (!"#. G*A".includes(c)) marks.push(svg("text", { x: x + 5, y: y + 7.6, "font-size": 7.5, "text-anchor": "middle", fill: "var(--ink)" }, c));
      return marks;
    };
    return svg("svg", { class: "map", viewBox: `-0.5 -0.5 ${width + 1} ${height + 1}`, role: "img", "aria-label": rows.join(" / ") },
      svg("rect", { width, height, fill: "var(--soft)", stroke: "var(--wall)" }), cells.map(shape));
  }

  // ---------------------------------------------------------------------------------------------------------------- charts
  function curve(chart, steps) {
    const head = [el("h3", {}, chart.title), el("p", { class: "muted" }, chart.caption)];
    const F = chart.log ? Math.log10 : (y) => y, top = chart.whole ? 1 : chart.top, fits = ([, ...ys]) => !chart.log || ys.every((y) => y > 0);
    const lines = chart.lines.map((line) => ({ ...line, points: line.points.filter(fits), band: (line.band || []).filter(fits) })).filter((line) => line.points.length);
    const points = lines.flatMap((line) => [...line.points, ...line.band.flatMap(([x, low, high]) => [[x, low], [x, high]])]);
    if (!points.length) return el("p", { class: "muted" }, el("b", {}, `${chart.title}: `), chart.absent);
    const W = 560, H = 220, L = 52, B = 26, xs = points.map((p) => p[0]), ys = [...points.map((p) => p[1]), ...chart.levels.map((level) => level[0])];
    const least = (values, start) => values.reduce((a, b) => Math.min(a, b), start), most = (values, start) => values.reduce((a, b) => Math.max(a, b), start);
    const [x0, x1] = [least(xs, Infinity), most(xs, -Infinity)], y0 = F(chart.log ? least(ys.filter((y) => y > 0), Infinity) : least(ys, 0)), y1 = F(top || most(ys, 1e-9));
    const X = (x) => L + ((W - L - 10) * (x - x0)) / Math.max(x1 - x0, 1), Y = (y) => H - B - ((H - B - 10) * (Math.min(F(y), y1) - y0)) / (y1 - y0 || 1);
    const path = (some) => some.map(([x, y]) => `${X(x)},${Y(y)}`).join(" "), label = (y) => (chart.share ? `${number(100 * y, chart.whole ? 0 : 1)} %` : Number(y.toPrecision(3)));
    const drawnLine = (line) => { const color = `var(--s${line.color})`; return [
      line.band.length ? svg("polygon", { fill: color, opacity: 0.18, points: path([...line.band.map(([x, low]) => [x, low]), ...line.band.map(([x, , high]) => [x, high]).reverse()]) }) : null,
      svg("polyline", { fill: "none", stroke: color, opacity: line.faint ? 0.3 : 1, "stroke-width": line.faint ? 1 : 2, "stroke-dasharray": line.dashed ? "5 3" : null, points: path(line.points) }),
      line.marks || line.points.length === 1 ? line.points.map(([x, y]) => svg("circle", { cx: X(x), cy: Y(y), r: 3, fill: color })) : null]; };
    const nearest = (x) => lines[0].points.reduce((a, b) => (Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a));
    const links = [...steps].filter((x) => x !== null && x >= x0 && x <= x1).map((x) => svg("circle", { class: "point", cx: X(x), cy: Y(nearest(x)[1]), r: 5, fill: `var(--s${lines[0].color})`,
      tabindex: 0, role: "link", "aria-label": `plays of step ${x}`, onclick: () => go({ view: "plays", step: x, play: null, call: null }),
      onkeydown: (e) => { if (e.key === "Enter") go({ view: "plays", step: x, play: null, call: null }); } }, svg("title", {}, `step ${x}: ${label(nearest(x)[1])}; plays`)));
    return el("figure", { class: "card" }, head, svg("svg", { class: "curve", viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": chart.title },
      [y0, (y0 + y1) / 2, y1].map((f) => { const y = chart.log ? 10 ** f : f; return [svg("line", { x1: L, x2: W - 10, y1: Y(y), y2: Y(y), stroke: "var(--grid)" }), svg("text", { x: L - 6, y: Y(y) + 4, "text-anchor": "end" }, label(y))]; }),
      (x0 === x1 ? [x0] : [x0, x1]).map((x, i) => svg("text", { x: X(x), y: H - 8, "text-anchor": i ? "end" : "start" }, `step ${x}`)),
      chart.levels.map(([y, name]) => [svg("line", { x1: L, x2: W - 10, y1: Y(y), y2: Y(y), stroke: "var(--bad)", "stroke-dasharray": "2 3" }), svg("text", { x: W - 12, y: Y(y) - 4, "text-anchor": "end" }, name)]),
      lines.map(drawnLine), links), el("p", {}, chart.unit ? el("span", { class: "muted" }, chart.unit, "  ") : null,
      lines.filter((line) => line.name).map((line) => [el("span", { class: "who", role_color: `var(--s${line.color})` }, line.name), "  "])));
  }

  // ---------------------------------------------------------------------------------------------------------------- the summary
  function cell(value) {
    if (typeof value !== "object") return el("td", {}, value);
    const at = (share) => 100 * Math.min(Math.max(share, 0), 1), [low, high] = value.ends.map(at);
    return el("td", {}, svg("svg", { class: "bar", viewBox: "0 0 100 10", preserveAspectRatio: "none" }, svg("rect", { width: 100, height: 10, fill: "var(--soft)" }),
      svg("rect", { x: low, width: Math.max(high - low, 0), height: 10, fill: "var(--s0)", opacity: 0.35 }), svg("rect", { x: at(value.share) - 1, width: 2, height: 10, fill: "var(--s0)" })));
  }
  async function summary() {
    const run = state.run, found = await api("summary", { run }), steps = new Set(state.rows.map((row) => row.step));
    const part = (title, ...body) => el("section", {}, el("h2", {}, title), body), note = (text) => (text ? el("p", { class: "muted" }, text) : null);
    const table = ({ title, intro, head, rows }) => part(title, note(intro), el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, head.map((x) => el("th", {}, x)))),
      el("tbody", {}, rows.map((row) => el("tr", {}, row.map(cell)))))));
    const plays = found.pairs.map(async (pair, i) => el("div", {}, el("h3", {}, `Instance ${i + 1}`), el("div", { class: "columns" },
      await Promise.all(Object.entries(pair).map(async ([when, id]) => el("div", {}, el("p", { class: "muted" }, when === "train" ? "while training" : `${when} training`), await playCard(run, id, null)))))));
    return el("div", { id: "summary" }, el("h2", {}, found.name), el("p", {}, found.lead),
      found.alarms.length ? el("div", { class: "card alarms" }, el("b", {}, "Look at this first"), el("ul", {}, found.alarms.map((text) => el("li", {}, text)))) : null,
      el("div", { class: "columns" }, found.tiles.map(([label, value, text]) => el("div", { class: "card" }, el("p", { class: "muted" }, label), el("p", { class: "value" }, value), note(text)))),
      note(found.pay), found.absent.length ? note(`Not there: ${found.absent.join(", ")}. The final evaluation writes evaluation.json.`) : null,
      el("dl", {}, found.facts.map(([label, text]) => [el("dt", {}, label), el("dd", {}, text)])),
      found.graph ? part("Who speaks when", note("The workflow's graph; behind each role, its model."), el("img", { alt: "graph of the workflow", src: found.graph })) : null,
      found.charts.map(([title, charts]) => part(title, el("div", { class: "columns" }, charts.map((chart) => curve(chart, steps))))),
      found.tables.map(table),
      part("How the team plays", note("The first instances at hand, not picked for their outcome. The view of plays has all."), await Promise.all(plays)),
      part("Configuration", el("details", {}, el("summary", {}, "the whole config.json"), el("pre", {}, found.config))));
  }

  // ---------------------------------------------------------------------------------------------------------------- compare
  async function compare() {
    const { compare: chosen } = state;
    chosen.second = Math.min(chosen.second, state.runs.length - 1);
    const pick = (which) => {
      const node = el("select", { "aria-label": `${which} run`, onchange: (e) => { chosen[which] = Number(e.target.value); draw(); } },
        state.runs.map((run, i) => el("option", { value: i }, run.name)));
      node.value = chosen[which];
      return node;
    };
    const head = el("div", { class: "filters" }, pick("first"), pick("second"));
    const found = await api("compare", { first: chosen.first, second: chosen.second, seats: chosen.seats });
    const names = [state.runs[chosen.first].name, state.runs[chosen.second].name];
    const line = (row) => el("tr", { "data-play": row.task, tabindex: 0, "aria-selected": chosen.task === row.task ? "true" : null,
      onclick: () => { chosen.task = row.task; draw(); }, onkeydown: (e) => { if (e.key === "Enter") { chosen.task = row.task; draw(); } } },
      el("td", {}, `task ${row.task}`), el("td", { class: "num" }, number(row.first)), el("td", { class: "num" }, number(row.second)),
      el("td", { class: "num" }, (row.difference > 0 ? "+" : "") + number(row.difference)));
    const table = el("table", { id: "compared" }, el("thead", {}, el("tr", {}, ["task", ...names, "difference"].map((x, i) => el("th", { class: i ? "num" : "" }, x)))),
      el("tbody", {}, found.rows.slice(0, 500).map(line)));
    const sides = chosen.task === null ? el("p", { class: "muted" }, "Choose a task to see both plays, where they were kept.")
      : el("div", { class: "columns" }, await Promise.all([chosen.first, chosen.second].map((run) => playOfTask(run, chosen.task))));
    return el("div", {}, head, el("p", {}, `${names[0]} is better on ${found.first} tasks, ${names[1]} on ${found.second}; ${found.ties} are equal.`),
      el("div", { class: "two" }, el("div", { class: "side scroll" }, table), sides));
  }
  async function playOfTask(run, task) {
    const rows = await api("plays", { run });
    const row = rows.find((one) => one.when === "after" && (one.id === `after-${task}` || one.id.startsWith(`after-${task}/`)));
    return row ? playCard(run, row.id, null) : el("p", { class: "muted" }, `${state.runs[run].name} kept no play of task ${task}`);
  }

  // ---------------------------------------------------------------------------------------------------------------- the page
  function frame() {
    const run = document.getElementById("run");
    run.replaceChildren(...state.runs.map((one, i) => el("option", { value: i, title: one.path }, one.name)));
    run.value = state.run;
    const views = ["summary", "plays", ...(state.runs.length > 1 ? ["compare"] : [])];
    document.getElementById("views").replaceChildren(...views.map((name) => el("button", { "aria-current": state.view === name ? "page" : null, onclick: () => go({ view: name }) }, name)));
    document.title = state.play ? `${state.play} · marl_llm` : "marl_llm: plays";
  }
  let drawing = Promise.resolve();
  async function draw() {
    const turn = ++drawn, main = document.getElementById("main");
    frame();
    try {
      let content;
      if (state.view === "summary") content = await summary();
      else if (state.view === "compare") content = await compare();
      else {
        const color = el("select", { "aria-label": "colour of tokens", id: "color", onchange: (e) => { state.color = e.target.value; draw(); } },
          COLORS.map((name) => el("option", { value: name }, name === "none" ? "tokens: plain" : `tokens: ${name}`)));
        color.value = state.color;
        const right = state.play ? el("div", {}, el("div", { class: "filters" }, el("button", { onclick: () => go({ play: null, call: null }) }, "list"), color),
          await playCard(state.run, state.play, state.call)) : el("p", { class: "muted" }, "Choose a play.");
        const before = document.getElementById("side"), scrolled = before ? before.scrollTop : 0;
        content = el("div", { class: "two" + (state.play ? " opened" : "") }, el("div", { class: "side", id: "side" }, list()), el("div", { id: "play" }, right));
        if (turn === drawn) { main.replaceChildren(content); document.getElementById("side").scrollTop = scrolled; }
        const here = state.call === null ? null : document.getElementById(`call-${state.call}`);
        if (here) { here.scrollIntoView({ block: "center" }); here.focus({ preventScroll: true }); }
        return;
      }
      if (turn === drawn) main.replaceChildren(content);
    } catch (error) {
      if (turn === drawn) main.replaceChildren(el("p", { class: "error" }, error.message));
    }
  }
  async function follow() {
    try {
      const versions = await api("versions");
      if (state.versions.length && versions.join() !== state.versions.join()) {
        const before = state.rows.length;
        state.rows = await api("plays", { run: state.run });
        if (state.rows.length !== before) document.getElementById("live").textContent = `${state.rows.length - before} new plays`;
        if (state.view === "plays") refreshList();
        else draw();
      }
      state.versions = versions;
    } catch (error) {
      document.getElementById("live").textContent = "the server has ended";
      return;
    }
    setTimeout(follow, 2000);
  }
  function keys(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (["INPUT", "SELECT"].includes(event.target.tagName)) { if (event.key === "Escape") event.target.blur(); return; }
    const ids = listed().map((row) => row.id), at = ids.indexOf(state.play), calls = document.querySelectorAll("#play .call");
    const toggle = async (kind) => {
      await drawing;  // a key that comes before the page is drawn opens what it will show
      const node = document.querySelector(`#call-${state.call ?? 0} details[data-kind=${kind}]`);
      if (node) node.open = !node.open;
    };
    const move = (by) => { if (ids.length) go({ play: ids[Math.min(ids.length - 1, Math.max(0, at + by))], call: null }); };
    const step = (by) => { if (calls.length) go({ call: Math.min(calls.length - 1, Math.max(0, (state.call ?? -1) + by)) }); };
    const action = { j: () => move(1), k: () => move(-1), n: () => step(1), p: () => step(-1), r: () => toggle("read"), g: () => toggle("group"),
      "/": () => document.getElementById("search")?.focus(), Escape: () => go({ play: null, call: null }) }[event.key];
    if (action) { event.preventDefault(); action(); }
  }
  async function choose(run) {
    state.run = run;
    state.rows = await api("plays", { run });
    state.found = null; state.text = ""; state.shown = PAGE_ROWS;
  }
  async function moved() {
    const run = state.run;
    readAddress();
    if (state.run !== run) await choose(state.run);
    await draw();
  }
  async function start() {
    state.runs = await api("runs");
    readAddress();
    await choose(state.run);
    document.getElementById("run").addEventListener("change", (e) => go({ run: e.target.value, play: null, call: null, when: null, status: null, step: null }));
    window.addEventListener("hashchange", () => { drawing = moved(); });
    document.addEventListener("keydown", keys);
    await draw();
    if (!embedded) follow();
  }
  start().catch((error) => document.getElementById("main").replaceChildren(el("p", { class: "error" }, error.message)));
})();
