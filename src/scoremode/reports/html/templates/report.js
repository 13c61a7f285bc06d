"use strict";
// Shows the scored text. Data is decoded when it is first needed, and only one page of tokens is in the document.
// All words come from untrusted files: they are written with textContent, never as markup.
(() => {
  const PAGE = 1200; // tokens per page: quick to draw on a phone, long enough to read
  const MAP_BARS = 150;
  const WORST_SHOWN = 8;
  const MEASURES = {
    delta: { name: "Δ logprob", steps: [0.1, 0.3, 1, 3], scaled: true },
    kl: { name: "KL", steps: [0.1, 0.3, 1, 3], scaled: true },
    surprise: { name: "Surprise", steps: [1, 3, 6, 10], scaled: false },
  };
  const ARRAYS = { f4: Float32Array, u1: Uint8Array, u2: Uint16Array, u4: Uint32Array };

  const byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId("scoremode-data").textContent);
  const state = { view: data.first || 0, measure: "delta", scales: { ...data.sensitivity, surprise: 1 }, page: 0, selected: -1, place: -1 };

  // ── data ──────────────────────────────────────────────────────────────────────────────────────────────────────────

  /** A column as a typed array, decoded once. */
  function numbers(column) {
    if (!column.array) {
      const text = atob(column.data);
      const bytes = new Uint8Array(text.length);
      for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
      column.array = new ARRAYS[column.type](bytes.buffer);
      column.data = ""; // lets the browser free the text
    }
    return column.array;
  }

  const view = () => data.views[state.view];
  const text = () => data.texts[view().text];
  const baseline = () => data.scores[view().baseline];
  const candidate = () => (view().candidate === null ? null : data.scores[view().candidate]);
  const word = (i) => data.words[numbers(text().word)[i]];
  const topWord = (scores, i) => data.words[numbers(scores.topWord)[i]];

  /** A column that the engine did not measure is null. */
  const measured = (column, write) => (column === null ? make("span", "error", "not measured") : write());

  /** How bad each token is by a measure: positive is worse. */
  function badness(v, measure) {
    v.badness = v.badness || {};
    if (!v.badness[measure]) v.badness[measure] = computeBadness(v, measure);
    return v.badness[measure];
  }

  function computeBadness(v, measure) {
    if (measure === "kl") return numbers(v.kl);
    const before = numbers(data.scores[v.baseline].logprob);
    if (measure === "surprise") return before.map((value) => -value);
    const after = numbers(data.scores[v.candidate].logprob);
    return before.map((value, i) => (value === after[i] ? 0 : value - after[i]));
  }

  /** Tokens from the worst to the best. */
  function worstFirst(v, measure) {
    v.order = v.order || {};
    if (!v.order[measure]) {
      const bad = badness(v, measure);
      const key = bad.map((value) => (Number.isNaN(value) ? -Infinity : value));
      const order = new Uint32Array(bad.length).map((_, i) => i);
      v.order[measure] = order.sort((a, b) => (key[b] === key[a] ? a - b : key[b] > key[a] ? 1 : -1));
    }
    return v.order[measure];
  }

  /** The last index whose value is at most the wanted one: the stretch that contains it. */
  function stretchOf(begins, wanted) {
    let low = 0;
    let high = begins.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (begins[middle] <= wanted) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  function placeOf(i) {
    const t = text();
    const stretch = stretchOf(numbers(t.begin), i);
    return {
      position: numbers(t.beginToken)[stretch] + i - numbers(t.begin)[stretch],
      document: numbers(t.beginDocument)[stretch],
      window: numbers(t.enterWindow)[stretchOf(numbers(t.enter), i)],
    };
  }

  /** The token at a position of the text, or the next token that was scored. */
  function tokenAt(position) {
    const t = text();
    const tokens = numbers(t.beginToken);
    const begin = numbers(t.begin);
    if (position < tokens[0]) return 0;
    const stretch = stretchOf(tokens, position);
    const end = stretch + 1 < begin.length ? begin[stretch + 1] : t.count;
    return Math.min(begin[stretch] + position - tokens[stretch], stretch + 1 < begin.length ? end : t.count - 1);
  }

  // ── colours ───────────────────────────────────────────────────────────────────────────────────────────────────────

  function steps() {
    const measure = MEASURES[state.measure];
    return measure.steps.map((step) => step / (measure.scaled ? state.scales[state.measure] : 1));
  }

  function colour(value, thresholds) {
    const size = Math.abs(value);
    let level = 0;
    while (level < thresholds.length && size >= thresholds[level]) level++;
    if (!level) return "";
    if (state.measure !== "delta") return value > 0 ? "v" + level : "";
    return (value > 0 ? "w" : "b") + level;
  }

  // ── drawing ───────────────────────────────────────────────────────────────────────────────────────────────────────

  function make(tag, className, content) {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (content !== undefined) element.textContent = content;
    return element;
  }

  /** A token's text. A line end gets a visible sign: without one it would show no colour. */
  function drawToken(className, token) {
    const lines = (token === "" ? "∅" : token).split("\n");
    const span = make("span", className, lines[0]);
    for (const line of lines.slice(1)) span.append(make("span", "end", "↵"), "\n" + line);
    return span;
  }

  const quoted = (token) => "“" + token.replace(/\n/g, "↵").replace(/\t/g, "⇥") + "”";

  function drawPage() {
    const t = text();
    const from = state.page * PAGE;
    const to = Math.min(from + PAGE, t.count);
    const bad = badness(view(), state.measure);
    const begin = numbers(t.begin);
    const thresholds = steps();
    const page = document.createDocumentFragment();
    let stretch = t.count ? stretchOf(begin, from) : 0;
    for (let i = from; i < to; i++) {
      if (stretch + 1 < begin.length && begin[stretch + 1] === i) stretch++;
      if (begin[stretch] === i) page.append(drawBreak(stretch));
      const level = colour(bad[i], thresholds);
      const token = drawToken(level ? "t " + level : "t", word(i));
      token.id = "t" + i;
      token.setAttribute("role", "option");
      token.setAttribute("aria-selected", String(i === state.selected));
      page.append(token);
    }
    byId("tokens").replaceChildren(page);
    const pages = pageCount();
    byId("page").max = String(pages);
    byId("page").value = String(state.page + 1);
    byId("page-number").textContent = `page ${(state.page + 1).toLocaleString("en")} of ${pages.toLocaleString("en")}`;
    byId("previous-page").disabled = state.page === 0;
    byId("next-page").disabled = state.page + 1 >= pages;
    drawHere();
  }

  /** A gap in the text: a new document starts, or tokens in between were not scored. */
  function drawBreak(stretch) {
    const t = text();
    const documents = numbers(t.beginDocument);
    const changed = stretch === 0 || documents[stretch] !== documents[stretch - 1];
    const position = numbers(t.beginToken)[stretch].toLocaleString("en");
    const name = changed && t.documents > 1 ? `document ${documents[stretch] + 1}, ` : stretch ? "… " : "";
    const mark = make("span", "break", `${name}from position ${position}`);
    mark.setAttribute("role", "presentation");
    return mark;
  }

  const pageCount = () => Math.max(1, Math.ceil(text().count / PAGE));

  const SVG = "http://www.w3.org/2000/svg";

  function svg(tag, attributes) {
    const element = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
    return element;
  }

  /** An overview of the whole text: the mean of each stretch; up is worse. */
  function drawMap() {
    const means = stretchMeans(badness(view(), state.measure));
    const top = Math.max(...means.map(Math.abs), 1e-12);
    const signed = state.measure === "delta";
    const zero = signed && means.some((mean) => mean < 0) ? 30 : 42;
    const bars = means.map((mean, i) => {
      const height = Math.min(zero - 2, (Math.abs(mean) / top) * (zero - 2));
      const down = Math.min(42 - zero, height);
      return svg("rect", {
        class: !signed ? "bar-size" : mean > 0 ? "bar-worse" : "bar-better",
        x: ((i * 600) / means.length).toFixed(2),
        width: Math.max(0.5, 600 / means.length - 0.6).toFixed(2),
        y: (mean > 0 ? zero - height : zero).toFixed(2),
        height: (mean > 0 ? height : down).toFixed(2),
      });
    });
    byId("map").replaceChildren(...bars, svg("rect", { id: "here", class: "here", y: 0, height: 44 }));
    drawHere();
  }

  function stretchMeans(bad) {
    const count = Math.max(1, Math.min(MAP_BARS, bad.length));
    const means = [];
    for (let b = 0; b < count; b++) {
      const from = Math.floor((b * bad.length) / count);
      const to = Math.floor(((b + 1) * bad.length) / count);
      let sum = 0;
      for (let i = from; i < to; i++) if (Number.isFinite(bad[i])) sum += bad[i];
      means.push(to > from ? sum / (to - from) : 0);
    }
    return means;
  }

  function drawHere() {
    const here = byId("here");
    if (!here) return;
    const count = Math.max(1, text().count);
    here.setAttribute("x", String((state.page * PAGE * 600) / count));
    here.setAttribute("width", String(Math.max(3, (Math.min(PAGE, count - state.page * PAGE) * 600) / count)));
  }

  function drawLegend() {
    const thresholds = steps();
    const shown = thresholds.map((step) => String(Number(step.toPrecision(3))));
    const line = make("span", "steps");
    const step = (name, content) => line.append(make("span", name, content));
    let before = "surprise (−logprob of the baseline), nats";
    let after = "";
    if (state.measure === "delta") {
      for (let i = shown.length - 1; i >= 0; i--) step("b" + (i + 1), "+" + shown[i]);
      step("plain", "±" + shown[0]);
      shown.forEach((value, i) => step("w" + (i + 1), "−" + value));
      before = "Δ logprob, nats: likelier";
      after = "less likely than in the baseline";
    } else {
      step("plain", "<" + shown[0]);
      shown.forEach((value, i) => step("v" + (i + 1), "≥" + value));
      if (state.measure === "kl") before = "KL from the baseline, nats";
      else if (!candidate()) before = "surprise (−logprob), nats";
    }
    byId("legend").replaceChildren(make("span", "", before), line, make("span", "", after));
  }

  // ── the selected token ─────────────────────────────────────────────────────────────────────────────────────────────

  function probability(logprob) {
    const p = Math.exp(logprob);
    if (p === 0) return Number.isFinite(logprob) ? "<1e−37" : "0";
    if (p >= 0.001) return (100 * p).toFixed(p >= 0.1 ? 1 : 2) + "%";
    return p.toExponential(1).replace("-", "−");
  }

  const fixed = (value, digits = 3) =>
    Number.isNaN(value) ? "–" : Number.isFinite(value) ? value.toFixed(digits).replace("-", "−") : value > 0 ? "∞" : "−∞";
  const small = (value) => (value !== 0 && Math.abs(value) < 0.001 ? value.toExponential(2).replace("-", "−") : fixed(value, 4));

  function row(cells, tag = "td") {
    const line = document.createElement("tr");
    cells.forEach((content, i) => {
      const cell = make(i ? tag : "th", "", typeof content === "string" ? content : undefined);
      if (typeof content !== "string") cell.append(content);
      cell.scope = i ? (tag === "th" ? "col" : "") : tag === "th" ? "col" : "row";
      line.append(cell);
    });
    return line;
  }

  function drawDetails(i) {
    const details = byId("details");
    if (i < 0) {
      details.classList.remove("open");
      details.replaceChildren(make("p", "", "Point at a token, or press n to jump to the worst one."));
      return;
    }
    const sides = candidate() ? [baseline(), candidate()] : [baseline()];
    const each = (write) => sides.map((scores) => write(scores));
    const place = placeOf(i);
    const table = document.createElement("table");
    const head = document.createElement("thead");
    head.append(row(candidate() ? ["", "baseline", "candidate"] : ["", "model"], "th"));
    const body = document.createElement("tbody");
    body.append(
      row(["probability", ...each((s) => probability(numbers(s.logprob)[i]))]),
      row(["logprob", ...each((s) => fixed(numbers(s.logprob)[i]))]),
      row(["rank", ...each((s) => measured(s.rank, () => numbers(s.rank)[i].toLocaleString("en")))]),
      row(["first choice", ...each((s) => measured(s.topWord, () => make("span", "quote", quoted(topWord(s, i)))))]),
      row(["its probability", ...each((s) => measured(s.topLogprob, () => probability(numbers(s.topLogprob)[i])))]),
    );
    if (candidate()) {
      const last = (name, value) => body.append(row([name, "", value]));
      last("Δ logprob", small(-badness(view(), "delta")[i]));
      if (view().kl) last("KL", small(numbers(view().kl)[i]));
    }
    table.append(head, body);
    const documentNumber = text().documents > 1 ? `document ${(place.document + 1).toLocaleString("en")} · ` : "";
    const where = `position ${place.position.toLocaleString("en")} · ${documentNumber}window ${(place.window + 1).toLocaleString("en")}`;
    const close = make("button", "close", "×");
    close.type = "button";
    close.setAttribute("aria-label", "Close");
    details.replaceChildren(close, make("p", "word", quoted(word(i))), make("p", "", where), table);
    details.classList.add("open");
  }

  function mark(i) {
    const before = byId("t" + state.selected);
    if (before) before.setAttribute("aria-selected", "false");
    state.selected = i;
    const token = byId("t" + i);
    if (token) token.setAttribute("aria-selected", "true");
    if (i >= 0) byId("tokens").setAttribute("aria-activedescendant", "t" + i);
    else byId("tokens").removeAttribute("aria-activedescendant");
    drawDetails(i);
  }

  /** Open the token's page, select the token and scroll to it. */
  function show(i, { focus = true } = {}) {
    const page = Math.floor(i / PAGE);
    if (page !== state.page) {
      state.page = page;
      drawPage();
    }
    mark(i);
    if (focus) byId("tokens").focus({ preventScroll: true });
    byId("t" + i).scrollIntoView({ block: "center" });
  }

  function say(message) {
    byId("said").textContent = message;
  }

  function jump(place) {
    const order = worstFirst(view(), state.measure);
    if (!order.length) return;
    state.place = Math.max(0, Math.min(order.length - 1, place));
    show(order[state.place]);
    const bad = badness(view(), state.measure)[order[state.place]];
    const value = state.measure === "delta" ? small(-bad) : small(bad);
    const total = order.length.toLocaleString("en");
    say(`worst ${(state.place + 1).toLocaleString("en")} of ${total} by ${MEASURES[state.measure].name}: ${value} nats`);
  }

  // ── the list of the worst ─────────────────────────────────────────────────────────────────────────────────────────

  function drawWorst() {
    const order = worstFirst(view(), state.measure);
    const items = Array.from(order.subarray(0, WORST_SHOWN), (i, place) => {
      const item = document.createElement("li");
      const button = make("button", "");
      button.type = "button";
      button.dataset.place = String(place);
      button.append(drawContext(i), make("span", "amount", amount(i)), make("span", "instead", instead(i)));
      item.append(button);
      return item;
    });
    const by = MEASURES[state.measure].name;
    byId("worst-title").textContent = candidate() ? `Worst tokens of ${view().name} by ${by}` : "Most surprising tokens";
    byId("worst-tokens").replaceChildren(...items);
  }

  function amount(i) {
    const bad = badness(view(), state.measure)[i];
    return fixed(state.measure === "delta" ? -bad : bad, 2);
  }

  function instead(i) {
    const before = baseline();
    const after = candidate();
    const p = (scores) => probability(numbers(scores.logprob)[i]);
    const first = (scores, verb) => (scores.topWord === null ? "" : `, ${verb} ${quoted(topWord(scores, i))}`);
    if (!after) return p(before) + first(before, "expected");
    return `${p(before)} → ${p(after)}${first(after, "expects")}`;
  }

  function drawContext(i) {
    const line = make("span", "context");
    const begin = numbers(text().begin);
    const stretch = stretchOf(begin, i);
    const end = stretch + 1 < begin.length ? begin[stretch + 1] : text().count;
    const words = (from, to) => {
      let joined = "";
      for (let k = from; k < to; k++) joined += word(k);
      return joined.replace(/\s+/g, " ");
    };
    const before = words(Math.max(begin[stretch], i - 14), i);
    const token = make("b", state.measure === "delta" ? "" : "size", word(i).replace(/\n/g, "↵") || "∅");
    line.append(make("span", "before", before.slice(-60)), token, make("span", "after", words(i + 1, Math.min(end, i + 14)).slice(0, 60)));
    return line;
  }

  // ── finding ───────────────────────────────────────────────────────────────────────────────────────────────────────

  /** The whole text as one string, with the offset of each token in it. */
  function joined(t) {
    if (!t.joined) {
      const starts = new Uint32Array(t.count);
      const parts = [];
      let at = 0;
      for (let i = 0; i < t.count; i++) {
        starts[i] = at;
        parts.push(word(i));
        at += parts[i].length;
      }
      t.joined = { text: parts.join("").toLowerCase(), starts };
      if (t.joined.text.length !== at) t.joined.text = parts.join(""); // lower case changes the length of some letters
    }
    return t.joined;
  }

  function find(needle) {
    const all = joined(text());
    const wanted = needle.toLowerCase();
    if (!wanted) return;
    const from = state.selected >= 0 ? all.starts[state.selected] + 1 : all.starts[state.page * PAGE] || 0;
    let at = all.text.indexOf(wanted, from);
    const again = at < 0;
    if (again) at = all.text.indexOf(wanted);
    if (at < 0) {
      say("not in the scored text");
      return;
    }
    show(stretchOf(all.starts, at), { focus: false });
    say(again ? "found after continuing from the beginning" : "found");
  }

  // ── user actions ─────────────────────────────────────────────────────────────────────────────────────────────────

  function available(measure) {
    if (measure === "delta") return view().candidate !== null;
    return measure === "surprise" || view().kl !== null;
  }

  /** Draw everything that depends on the candidate and the measure. */
  function draw() {
    if (!available(state.measure)) state.measure = available("delta") ? "delta" : "surprise";
    for (const button of document.querySelectorAll("[data-measure]")) {
      button.setAttribute("aria-pressed", String(button.dataset.measure === state.measure));
      button.disabled = !available(button.dataset.measure);
    }
    byId("scale").value = String(state.scales[state.measure]);
    byId("scale-label").hidden = !MEASURES[state.measure].scaled;
    state.page = Math.min(state.page, pageCount() - 1);
    state.place = -1;
    drawLegend();
    drawMap();
    drawPage();
    drawWorst();
    mark(state.selected < text().count ? state.selected : -1);
    say("");
  }

  /** Shows the page of the worst token, and leaves the window where it is. */
  function openOnWorst() {
    const [token] = worstFirst(view(), state.measure);
    if (token === undefined) return;
    state.page = Math.floor(token / PAGE);
    drawPage();
    // on a narrow screen the details of a selected token lie over the page, which nobody asked for yet
    if (getComputedStyle(byId("details")).position !== "fixed") mark(token);
  }

  function turn(page) {
    state.page = Math.max(0, Math.min(pageCount() - 1, page));
    mark(-1);
    drawPage();
  }

  const tokenOf = (event) => {
    const token = event.target.closest && event.target.closest(".t");
    return token ? Number(token.id.slice(1)) : -1;
  };

  function listenToTokens() {
    const tokens = byId("tokens");
    tokens.addEventListener("click", (event) => {
      const i = tokenOf(event);
      if (i >= 0) mark(i);
    });
    // hovering shows details; a touch screen has no hover
    tokens.addEventListener("pointerover", (event) => {
      const i = tokenOf(event);
      if (i >= 0 && event.pointerType === "mouse") drawDetails(i);
    });
    tokens.addEventListener("pointerleave", () => drawDetails(state.selected));
    tokens.addEventListener("keydown", (event) => {
      const first = state.page * PAGE;
      const here = state.selected < 0 ? first - (event.key === "ArrowRight" ? 1 : 0) : state.selected;
      const last = text().count - 1;
      const wanted = { ArrowRight: here + 1, ArrowLeft: here - 1, Home: first, End: Math.min(first + PAGE - 1, last) }[event.key];
      if (wanted === undefined || wanted < 0 || wanted > last || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      show(wanted);
    });
  }

  function listenToKeys() {
    document.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) return;
      if (event.key === "n") jump(state.place + 1);
      else if (event.key === "p") jump(state.place - 1);
      else if (event.key === "Escape") mark(-1);
    });
  }

  function listenToTools() {
    byId("view").addEventListener("change", (event) => {
      const before = view().text;
      state.view = Number(event.target.value);
      if (view().text !== before) Object.assign(state, { page: 0, selected: -1 });
      draw();
    });
    document.querySelector(".tools").addEventListener("click", (event) => {
      const button = event.target.closest("[data-measure]");
      if (!button) return;
      state.measure = button.dataset.measure;
      draw();
    });
    byId("scale").addEventListener("change", (event) => {
      state.scales[state.measure] = Number(event.target.value);
      drawLegend();
      drawPage();
    });
    byId("worst").addEventListener("click", () => jump(0));
    byId("next-worst").addEventListener("click", () => jump(state.place + 1));
    byId("previous-worst").addEventListener("click", () => jump(state.place - 1));
    byId("go").addEventListener("submit", (event) => {
      event.preventDefault();
      const position = Number(byId("position").value);
      if (byId("position").value === "" || !text().count) return;
      const i = tokenAt(position);
      show(i);
      const found = placeOf(i).position;
      say(found === position ? "" : `position ${position} was not scored; showing position ${found}`);
    });
    byId("search").addEventListener("submit", (event) => {
      event.preventDefault();
      find(byId("needle").value);
    });
    byId("worst-tokens").addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (button) jump(Number(button.dataset.place));
    });
    byId("details").addEventListener("click", (event) => {
      if (event.target.closest(".close")) mark(-1);
    });
  }

  function listenToPages() {
    byId("previous-page").addEventListener("click", () => turn(state.page - 1));
    byId("next-page").addEventListener("click", () => {
      turn(state.page + 1);
      byId("tokens").scrollIntoView({ block: "start" });
    });
    byId("page").addEventListener("input", (event) => turn(Number(event.target.value) - 1));
    byId("map").addEventListener("click", (event) => {
      const box = byId("map").getBoundingClientRect();
      turn(Math.floor((((event.clientX - box.left) / box.width) * text().count) / PAGE));
    });
  }

  function startThemes() {
    const buttons = document.querySelectorAll("[data-theme-choice]");
    for (const button of buttons) {
      button.addEventListener("click", () => {
        const choice = button.dataset.themeChoice;
        if (choice === "auto") delete document.documentElement.dataset.theme;
        else document.documentElement.dataset.theme = choice;
        for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
      });
    }
  }

  function startCopying() {
    for (const button of document.querySelectorAll("[data-copies]")) {
      button.hidden = false;
      button.addEventListener("click", () => copyText(button, byId(button.dataset.copies)));
    }
  }

  async function copyText(button, source) {
    try {
      await navigator.clipboard.writeText(source.textContent);
      button.textContent = "Copied";
    } catch (refused) {
      // no clipboard access (an old browser, an embedded page): at least select the text
      getSelection().selectAllChildren(source);
      button.textContent = "Selected";
    }
    setTimeout(() => (button.textContent = "Copy"), 1500);
  }

  /** The figures of a mark, below its chart: a finger cannot point without pressing. */
  function startSizeChart() {
    const said = byId("size-said");
    if (!said) return;
    said.hidden = false;
    for (const point of document.querySelectorAll(".large-chart .point")) {
      const say = () => (said.textContent = point.getAttribute("aria-label"));
      for (const event of ["pointerenter", "focus", "click"]) point.addEventListener(event, say);
    }
  }

  function startPrinting() {
    addEventListener("beforeprint", () => {
      for (const details of document.querySelectorAll("details")) details.open = true;
    });
  }

  startThemes();
  startCopying();
  startSizeChart();
  startPrinting();
  if (data.views.length) {
    for (const part of document.querySelectorAll("#text [hidden]:not(#scale-label)")) part.hidden = false;
    listenToTokens();
    listenToKeys();
    listenToTools();
    listenToPages();
    byId("view").value = String(state.view);
    draw();
    openOnWorst();
  }
})();
