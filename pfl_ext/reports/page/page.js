"use strict";
// Charts, the table of clients, the theme, and the updates of a live page. Text from files is only ever set as text.
(() => {
  const byId = (id) => document.getElementById(id);
  let data = JSON.parse(byId("numbers").textContent);
  const live = data.live;

  // ---- elements -----------------------------------------------------------------------------------------------------

  function element(name, attributes = {}, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
      if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
      else if (key === "text") made.textContent = value;
      else if (value === true) made.setAttribute(key, "");
      else if (value !== false && value != null) made.setAttribute(key, value);
    }
    made.append(...children.filter((child) => child != null));
    return made;
  }

  function drawing(name, attributes, ...children) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  let serial = 0;

  // A labelled <select>. Its choices may change later; what was chosen stays chosen where it can.
  function chooser(label, change) {
    const select = element("select", { id: `choice-${++serial}`, onchange: () => change(select.value) });
    const whole = element("label", { for: select.id }, label, select);
    return {
      whole,
      select,
      fill(choices, wanted) {
        const before = select.value;
        const options = choices.map(([value, text]) => element("option", { value, text }));
        const same = select.options.length === options.length
          && options.every((o, k) => o.value === select.options[k].value && o.text === select.options[k].text);
        if (!same) select.replaceChildren(...options);
        const values = choices.map(([value]) => String(value));
        for (const value of [before, String(wanted), values[0]]) {
          if (values.includes(value)) { select.value = value; break; }
        }
        whole.hidden = choices.length < 2;
        return select.value;
      },
    };
  }

  // ---- numbers ------------------------------------------------------------------------------------------------------

  const known = (value) => typeof value === "number" && Number.isFinite(value);
  const about = (metric) => data.metrics[metric] || { scale: 1, digits: 4, word: metric.replaceAll("_", " "), lower: false };
  const unitOf = (metric) => (about(metric).scale === 100 ? " (%)" : "");
  const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

  function shown(value, digits) {
    if (!known(value)) return "–";
    const fixed = value.toFixed(digits);
    const text = value && Number(fixed) === 0 ? value.toPrecision(2) : fixed;
    const [whole, rest] = text.split(".");
    const grouped = whole.length > 4 && !text.includes("e") ? whole.replace(/\B(?=(\d{3})+$)/g, "\u202f") : whole;
    return (rest === undefined ? grouped : `${grouped}.${rest}`).replace("-", "−");
  }

  // As many digits as tell one tick, or one of several sizes, from the next.
  function plain(value) {
    if (!known(value)) return "–";
    if (Number.isInteger(value)) return shown(value, 0);
    const size = Math.abs(value);
    return shown(value, size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 4);
  }

  const titles = {
    mean: "mean over clients", weighted_mean: "mean weighted by samples", lowest5: "lowest 5 % of the clients",
    top5: "top 5 % of the clients", std: "std over clients",
  };
  const partTitles = { test: "clients’ test data", validation: "clients’ validation data", train: "clients’ training data", global_test: "global test data" };

  // ---- colours ------------------------------------------------------------------------------------------------------

  const dashes = [[], [9, 4], [2, 3], [12, 3, 2, 3], [18, 5], [6, 2, 2, 2, 2, 2], [3, 7]];
  let colours = {};

  function readColours() {
    const style = getComputedStyle(document.documentElement);
    const of = (name) => style.getPropertyValue(name).trim();
    colours = { ink: of("--ink"), soft: of("--soft"), line: of("--line"), shade: of("--shade"), heat: of("--heat"), paper: of("--paper"), list: [] };
    for (let k = 0; k < 10; k++) colours.list.push(of(`--c${k}`));
  }

  const colourOf = (k) => colours.list[k % 10];
  const dashOf = (k) => dashes[Math.floor(k / 10) % dashes.length];

  function key(k) {
    const line = drawing("line", { x1: 1, y1: 6, x2: 29, y2: 6, stroke: `var(--c${k % 10})`, "stroke-width": 3, "stroke-dasharray": dashOf(k).join(" ") });
    return drawing("svg", { width: 30, height: 12, viewBox: "0 0 30 12", "aria-hidden": "true" }, line);
  }

  // ---- a chart ------------------------------------------------------------------------------------------------------
  // `describe()` says what to draw: {title, note, x: {title, show, ticks}, show, series, shade, paint, tip, table, labels}.
  // A series is {name, group, x, y, low, high, step, fill}. Zoom, hidden lines and the open table outlive every change.

  const charts = [];

  function makeChart(place, describe, controls) {
    const root = document.querySelector(`[data-chart="${place}"]`);
    const title = element("h3", { id: `${place}-name` });
    const note = element("p", { class: "hint", id: `${place}-note` });
    const plot = element("div", { class: "plot", tabindex: "0", role: "application", "aria-roledescription": "chart", "aria-labelledby": title.id, "aria-describedby": `${note.id} ${place}-keys` });
    const keys = element("p", { class: "for-readers", id: `${place}-keys`, text: "Left and right arrows read the values, plus and minus zoom, shift with arrows moves, 0 shows everything. The same numbers are in the table below." });
    const tip = element("div", { class: "tip", hidden: true, "aria-hidden": "true" });
    const spoken = element("div", { class: "for-readers", "aria-live": "polite" });
    const tool = (text, label, act) => element("button", { type: "button", "aria-label": label, title: label, text, onclick: act });
    const everything = tool("⤢", "Show everything", () => setZoom(null));
    const tools = element("div", { class: "tools", role: "group", "aria-label": "Zoom" },
      tool("◀", "Move left", () => pan(-1)), tool("▶", "Move right", () => pan(1)),
      tool("+", "Zoom in", () => scale(0.5)), tool("−", "Zoom out", () => scale(2)), everything);
    const legend = element("ul", { class: "legend", "aria-label": "Lines; press to hide or show" });
    const numbers = element("div");
    const details = element("details", { ontoggle: () => { if (details.open) fillTable(); } }, element("summary", { text: "These numbers as a table" }), numbers);
    const empty = element("p", { class: "empty", hidden: true });
    root.replaceChildren(
      ...(controls ? [element("div", { class: "controls" }, ...controls)] : []),
      element("div", { class: "chart-head" }, element("div", {}, title, note), tools), keys, plot, empty, spoken, legend, details);
    plot.append(tip);

    let u = null, what = null, zoom = null, cursor = null, width = 0, legendState = "";
    const off = new Set();

    function setZoom(next) { zoom = next; draw(); }

    function scale(by) {
      if (!u) return;
      const change = (name, middle) => {
        const { min, max } = u.scales[name];
        const at = middle == null || middle < min || middle > max ? (min + max) / 2 : middle;
        return [at - (at - min) * by, at + (max - at) * by];
      };
      const next = { x: change("x", cursor), y: zoom && zoom.y ? zoom.y : null };
      const all = what.range;
      if (next.x[0] <= all[0] && next.x[1] >= all[1]) setZoom(null);
      else setZoom({ x: [Math.max(next.x[0], all[0]), Math.min(next.x[1], all[1])], y: next.y });
    }

    function pan(by) {
      if (!u || !zoom) return;
      const { min, max } = u.scales.x, all = what.range, size = max - min;
      const from = Math.min(Math.max(min + by * size / 4, all[0]), all[1] - size);
      setZoom({ ...zoom, x: [from, from + size] });
    }

    function shownSeries() { return what.series.filter((one) => !off.has(one.name)); }

    function draw() {
      const state = what = describe();
      if (u) { u.destroy(); u = null; }
      tip.hidden = true;
      root.hidden = !state;
      if (!state) return;
      if (title.textContent !== state.title) title.textContent = state.title;
      note.textContent = state.note || "";
      const any = state.paint || state.series.some((one) => one.y.some(known));
      plot.hidden = tools.hidden = details.hidden = !any;
      empty.hidden = any;
      if (!any) { empty.textContent = state.none || "There is nothing to draw yet: no round was evaluated."; legend.replaceChildren(); legendState = ""; return; }
      details.hidden = state.table === null;
      everything.disabled = !zoom;
      tools.firstChild.disabled = tools.children[1].disabled = !zoom;
      drawLegend(state);
      const visible = shownSeries();
      const xs = [...new Set(visible.flatMap((one) => one.x))].sort((a, b) => a - b);
      const where = new Map(xs.map((x, k) => [x, k]));
      const spread = (one, values) => {
        const full = new Array(xs.length);
        one.x.forEach((x, k) => { full[where.get(x)] = known(values[k]) ? values[k] : null; });
        return full;
      };
      const columns = [xs], series = [{}], bands = [];
      // A line that lies under others is drawn wider and paler, so that it shows on both sides of them.
      const tops = visible.flatMap((one) => one.y.filter(known)), hair = tops.length ? (tops.reduce((a, b) => Math.max(a, b)) - tops.reduce((a, b) => Math.min(a, b))) / 500 : 0;
      const covers = (upper, lower) => {
        const at = new Map(upper.x.map((x, k) => [x, upper.y[k]]));
        const both = lower.x.filter((x, k) => known(lower.y[k]) && known(at.get(x)));
        return both.length > 1 && lower.x.filter((x, k) => known(lower.y[k]) && known(at.get(x)) && Math.abs(lower.y[k] - at.get(x)) <= hair).length >= 0.8 * both.length;
      };
      visible.forEach((one, k) => { one.under = visible.length > 60 ? 0 : Math.min(3, visible.slice(k + 1).filter((other) => covers(other, one)).length); });
      for (const one of visible) {
        one.at = columns.length;
        const colour = colourOf(one.group);
        const few = one.x.length < 26;
        columns.push(spread(one, one.y));
        series.push({
          stroke: one.unseen ? "transparent" : colour, width: one.unseen ? 0 : 2 + 3 * one.under, alpha: one.under ? 0.5 : 1, dash: one.under ? [] : dashOf(one.group), spanGaps: false,
          fill: one.fill ? `${colour}40` : undefined, fillTo: one.fill ? 0 : undefined,
          paths: one.step ? uPlot.paths.stepped({ align: 1 }) : undefined,
          points: { show: one.points === false ? false : few, size: 6, fill: colour, stroke: colour },
        });
        if (one.high && one.high.some(known)) {
          for (const edge of [one.high, one.low]) {
            columns.push(spread(one, edge));
            series.push({ stroke: "transparent", width: 0, points: { show: false } });
          }
          bands.push({ series: [columns.length - 2, columns.length - 1], fill: `${colour}2b` });
        }
      }
      const ends = xs.length ? [xs[0], xs[xs.length - 1]] : [0, 1];
      const room = (ends[1] - ends[0]) * 0.015 || 1; // for the marks of the first and the last point
      state.range = state.x.range || [ends[0] - room, ends[1] + room];
      const heights = () => {
        if (zoom && zoom.y) return zoom.y;
        if (state.y && state.y.range) return state.y.range;
        const [from, to] = zoom ? zoom.x : state.range;
        let low = Infinity, high = -Infinity;
        for (const one of visible) {
          for (const values of [one.y, one.low, one.high]) {
            if (!values) continue;
            values.forEach((value, k) => {
              if (!known(value) || one.x[k] < from || one.x[k] > to) return;
              low = Math.min(low, value); high = Math.max(high, value);
            });
          }
          if (one.fill) { low = Math.min(low, 0); high = Math.max(high, 0); }
        }
        if (!(low <= high)) return [0, 1];
        const above = (high - low) * 0.06 || Math.abs(high) * 0.05 || 1;
        return [low >= 0 && low < above ? 0 : low - above, state.y && high <= state.y.top ? Math.min(high + above, state.y.top) : high + above];
      };
      width = Math.floor(root.clientWidth);
      const small = width < 520;
      const font = "12px system-ui, -apple-system, sans-serif";
      const axis = { stroke: colours.soft, font, ticks: { stroke: colours.line, size: 5 }, grid: { stroke: colours.line, width: 1 } };
      u = new uPlot({
        width, height: state.height || (small ? 260 : 360), legend: { show: false }, padding: [12, small ? 10 : 18, 0, 0],
        scales: { x: { time: false, range: () => (zoom ? zoom.x : state.range) }, y: { range: heights, dir: state.paint ? -1 : 1 } },
        axes: [
          { ...axis, label: state.x.title, labelFont: font, labelSize: 22, size: 30, space: small ? 48 : 60, grid: state.paint ? { show: false } : axis.grid, incrs: state.x.whole ? [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000] : undefined, values: (_, splits) => splits.map((value) => (state.x.tick || plain)(value)) },
          { ...axis, size: (_, values) => 14 + 7 * Math.max(2, ...(values || []).map((value) => value.length)), grid: state.paint ? { show: false } : axis.grid, splits: state.y && state.y.splits, values: (_, splits) => { const step = splits.length > 1 ? Math.abs(splits[1] - splits[0]) : 1; const digits = Math.max(0, Math.min(6, -Math.floor(Math.log10(step) + 1e-9))); return splits.map((value) => (state.y && state.y.tick ? state.y.tick(value) : shown(value, digits))); } },
        ],
        series, bands,
        cursor: {
          drag: { x: true, y: !state.paint, uni: 24, setScale: false },
          points: state.paint ? { show: false } : { size: 7 },
          y: Boolean(state.paint),
          bind: { dblclick: () => () => { setZoom(null); return null; } },
          dataIdx: (self, k, near) => nearest(self.data[k], near, self.data[0]),
        },
        hooks: {
          drawClear: [(self) => { if (state.shade) state.shade(self); }],
          draw: state.paint ? [(self) => state.paint(self)] : [],
          setCursor: [(self) => follow(self)],
          setSelect: [(self) => {
            const box = self.select;
            if (box.width < 6 && box.height < 6) return;
            const x = box.width < 6 ? null : [self.posToVal(box.left, "x"), self.posToVal(box.left + box.width, "x")];
            const tall = box.height >= 6 && box.height < self.over.clientHeight - 1;
            const y = tall ? [self.posToVal(box.top + box.height, "y"), self.posToVal(box.top, "y")] : null;
            const before = zoom ? zoom.x : state.range;
            setTimeout(() => setZoom({ x: x || before, y: state.paint ? null : y }));
          }],
        },
      }, columns, plot);
      plot.append(tip);
      if (details.open) fillTable();
    }

    // The cursor's place may have a value of another line only: the nearest that this line has.
    function nearest(values, near, xs) {
      if (values[near] != null) return near;
      let left = near, right = near;
      while (left >= 0 && values[left] == null) left--;
      while (right < values.length && values[right] == null) right++;
      if (left < 0 && right >= values.length) return near;
      if (left < 0) return right;
      if (right >= values.length) return left;
      return xs[near] - xs[left] <= xs[right] - xs[near] ? left : right;
    }

    function follow(self) {
      const { left, top, idx } = self.cursor;
      if (left == null || left < 0 || (!what.paint && idx == null)) { tip.hidden = true; return; }
      cursor = self.posToVal(left, "x");
      const lines = what.tip ? what.tip(self, cursor, self.posToVal(top, "y")) : values(self, idx, top);
      if (!lines) { tip.hidden = true; return; }
      tip.replaceChildren(element("b", { text: lines.head }), ...lines.rows.map((row) => element("div", { class: row.near ? "near" : null },
        row.group == null ? null : colourKey(row.group), element("span", { class: "name", text: row.name }), element("span", { text: row.value }))));
      tip.hidden = false;
      const space = plot.clientWidth, at = self.over.offsetLeft + left;
      tip.style.left = `${at + tip.offsetWidth + 18 > space ? Math.max(0, at - tip.offsetWidth - 14) : at + 14}px`;
      tip.style.top = `${Math.max(0, Math.min(self.over.offsetTop + Math.max(top, 0) - 20, plot.clientHeight - tip.offsetHeight))}px`;
      return lines;
    }

    function colourKey(group) {
      const made = element("span", { class: "key" });
      made.style.background = colourOf(group);
      return made;
    }

    function values(self, idx, top) {
      const found = [];
      for (const one of shownSeries()) {
        const at = nearest(self.data[one.at], idx, self.data[0]), value = self.data[one.at][at];
        if (!known(value)) continue;
        const place = one.x.indexOf(self.data[0][at]);
        const std = one.std && known(one.std[place]) ? ` ± ${what.show(one.std[place])}` : "";
        const far = at !== idx ? ` at ${(what.x.show || plain)(self.data[0][at])}` : "";
        found.push({ name: one.name, group: one.group, value: what.show(value) + std + far, size: value, apart: Math.abs(self.valToPos(value, "y") - top) });
      }
      if (!found.length) return null;
      const closest = Math.min(...found.map((one) => one.apart));
      found.forEach((one) => { one.near = found.length > 1 && one.apart === closest; });
      found.sort((a, b) => b.size - a.size);
      const most = 14, near = found.findIndex((one) => one.near);
      const from = Math.max(0, Math.min(near - most / 2, found.length - most));
      return { head: `${what.x.title}: ${(what.x.show || plain)(self.data[0][idx])}`, rows: found.slice(from, from + most) };
    }

    function drawLegend(state) {
      const names = state.paint || state.series.length < 2 ? [] : state.series;
      const wanted = JSON.stringify(names.map((one) => [one.name, one.group]));
      legend.hidden = !names.length;
      if (wanted === legendState) {
        [...legend.querySelectorAll("button")].forEach((button, k) => button.setAttribute("aria-pressed", String(!off.has(names[k].name))));
        return;
      }
      legendState = wanted;
      legend.replaceChildren(...names.map((one) => {
        const raise = (high) => {
          if (!u || !one.at || off.has(one.name)) return;
          u.series.forEach((series, k) => { if (k) if (series.plain === undefined) series.plain = [series.alpha, series.width]; series.alpha = !high ? series.plain[0] : k === one.at ? 1 : 0.15; });
          u.series[one.at].width = u.series[one.at].plain[1] + (high ? 2 : 0);
          u.redraw(false);
        };
        const find = () => shownSeries().find((other) => other.name === one.name);
        const on = () => { one = find() || one; raise(true); }, out = () => { one = find() || one; raise(false); };
        return element("li", {}, element("button", {
          type: "button", "aria-pressed": String(!off.has(one.name)),
          onclick: (event) => {
            if (event.altKey || event.shiftKey) { const alone = state.series.every((other) => other.name === one.name || off.has(other.name)); off.clear(); if (!alone) what.series.forEach((other) => { if (other.name !== one.name) off.add(other.name); }); }
            else if (!off.delete(one.name)) off.add(one.name);
            draw();
          },
          onmouseenter: on, onmouseleave: out, onfocus: on, onblur: out,
        }, key(one.group), one.name));
      }));
    }

    function fillTable() {
      if (!what) return;
      const xs = [...new Set(what.series.flatMap((one) => one.x))].sort((a, b) => a - b);
      const step = Math.max(1, Math.ceil(xs.length / 200));
      const rows = xs.filter((_, k) => k % step === 0 || k === xs.length - 1);
      const places = what.series.map((one) => new Map(one.x.map((x, k) => [x, k])));
      const head = element("tr", {}, element("th", { scope: "col", class: "n", text: what.x.title }), ...what.series.map((one) => element("th", { scope: "col", class: "n", text: one.name })));
      const body = rows.map((x) => element("tr", {}, element("th", { scope: "row", class: "n", text: (what.x.show || plain)(x) }), ...what.series.map((one, k) => {
        const at = places[k].get(x), value = at === undefined ? null : one.y[at];
        const std = one.std && known(one.std[at]) ? ` ± ${what.show(one.std[at])}` : "";
        return element("td", { class: "n", text: known(value) ? what.show(value) + std : "–" });
      })));
      numbers.replaceChildren(element("div", { class: "scroll", role: "region", tabindex: "0", "aria-label": what.title },
        element("table", {}, element("caption", {}, element("span", { text: what.title + (step > 1 ? `, every ${step}th` : "") })), element("thead", {}, head), element("tbody", {}, ...body))));
    }

    function move(by) {
      if (!u) return;
      const xs = u.data[0], { min, max } = u.scales.x;
      const inside = xs.filter((x) => x >= min && x <= max);
      if (!inside.length) return;
      let at = cursor == null ? -1 : inside.reduce((best, x, k) => (Math.abs(x - cursor) < Math.abs(inside[best] - cursor) ? k : best), 0);
      at = Math.min(Math.max(at + by, 0), inside.length - 1);
      const left = u.valToPos(inside[at], "x");
      u.setCursor({ left, top: what.paint ? u.over.clientHeight / 2 : 0 });
      const lines = follow(u);
      if (lines) spoken.textContent = `${lines.head}. ${lines.rows.map((row) => `${row.name}: ${row.value}`).join(", ")}`;
    }

    plot.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const jump = event.shiftKey ? pan : move;
      const act = { ArrowLeft: () => jump(-1), ArrowRight: () => jump(1), "+": () => scale(0.5), "=": () => scale(0.5), "-": () => scale(2), "0": () => setZoom(null), Escape: () => { tip.hidden = true; } }[event.key];
      if (!act) return;
      event.preventDefault();
      act();
    });
    plot.addEventListener("blur", () => { tip.hidden = true; });

    const chart = { draw, fresh: () => { zoom = null; draw(); }, resize: () => { if (Math.floor(root.clientWidth) !== width) draw(); }, root };
    charts.push(chart);
    return chart;
  }

  // ---- curves -------------------------------------------------------------------------------------------------------

  // The first curve that a group has, and in rounds without a value of it the next one's: a method may train personal
  // models after the last round alone.
  function withFallback(group, names) {
    const [first, ...others] = names.map((name) => group.curves[name]).filter(Boolean);
    if (!first || !others.length) return first;
    const have = new Set(first.round), rows = first.round.map((round, j) => [round, first, j]);
    others[0].round.forEach((round, j) => { if (!have.has(round)) rows.push([round, others[0], j]); });
    rows.sort((a, b) => a[0] - b[0]);
    return { round: rows.map((row) => row[0]), mean: rows.map(([, curve, j]) => curve.mean[j]), std: rows.map(([, curve, j]) => curve.std[j]) };
  }

  const roundTick = (value) => (Number.isInteger(value) ? shown(value, 0) : "");

  function curves() {
    const curveKeys = () => new Set(data.groups.flatMap((group) => Object.keys(group.curves)));
    const parts = (place) => [...new Set([...curveKeys()].map((name) => name.split("/")[place]))];
    let chart;
    const again = () => chart.fresh();
    const metric = chooser("Metric", again), model = chooser("Model", again), part = chooser("Data", again), statistic = chooser("Over clients", again), across = chooser("Horizontal axis", again);

    function describe() {
      const measures = [...new Set(data.groups.flatMap((group) => Object.keys(group.measured)))].filter((name) => !name.startsWith("training"));
      const names = parts(2), models = parts(0);
      const m = metric.fill((names.length ? names : [data.metric]).map((name) => [name, capital(about(name).word.replaceAll("_", " "))]), data.metric);
      const best = models.includes("personal") && models.includes("global") ? [["", "personal, else global"]] : [];
      const who = model.fill([...best, ...models.map((name) => [name, name])], "");
      const on = part.fill(parts(1).map((name) => [name, partTitles[name] || name.replaceAll("_", " ")]), "test");
      const over = statistic.fill(Object.entries(titles).filter(([name]) => parts(3).includes(name)), data.statistic);
      const x = across.fill([["round", "Round"], ...measures.map((name) => [name, capital(name)])], "round");
      let seeds = 0;
      const stages = new Set();
      const series = data.groups.map((group, k) => {
        const found = withFallback(group, (who ? [who] : ["personal", "global"]).map((name) => `${name}/${on}/${m}/${over}`));
        const one = { name: group.name, group: k, x: [], y: [], low: [], high: [], std: [] };
        if (!found) return one;
        seeds = Math.max(seeds, group.seeds.length);
        if (group.stage != null) stages.add(group.stage);
        const measured = x === "round" ? null : group.measured[x];
        const at = measured && new Map(measured.round.map((round, j) => [round, measured.mean[j]]));
        const times = about(m).scale;
        found.round.forEach((round, j) => {
          const place = measured ? at.get(round) : round;
          if (!known(place) || (one.x.length && place <= one.x[one.x.length - 1])) return;
          const mean = known(found.mean[j]) ? times * found.mean[j] : null, std = known(found.std[j]) ? times * found.std[j] : null;
          one.x.push(place); one.y.push(mean); one.std.push(std);
          one.low.push(std == null ? mean : mean - std); one.high.push(std == null ? mean : mean + std);
        });
        if (!one.std.some(known)) one.low = one.high = null;
        return one;
      });
      const rounds = x === "round";
      const late = (round) => rounds && stages.has(round);
      return {
        title: `${capital(about(m).word.replaceAll("_", " "))}${unitOf(m)} on ${partTitles[on] || on}, ${titles[over]}`,
        note: [`${who ? `${capital(who)} models` : "Personal models, global ones where a method has no other"}.`, seeds > 1 ? `Lines are means over up to ${seeds} seeds, bands one standard deviation.` : "", rounds && stages.size ? "The last point of some methods is after the last round: what clients do then on their own." : "", "Drag to zoom, double-click for everything."].filter(Boolean).join(" "),
        x: { title: rounds ? "round" : x, whole: rounds, tick: rounds ? (value) => (late(value) ? "then" : roundTick(value)) : plain, show: (value) => (late(value) ? "after the last round" : plain(value)) },
        y: about(m).scale === 100 ? { top: 100 } : {},
        show: (value) => shown(value, about(m).digits),
        series,
      };
    }
    chart = makeChart("curves", describe, [metric, model, part, statistic, across].map((one) => one.whole));
    return chart;
  }

  // ---- the last result over an option that was varied -----------------------------------------------------------------

  function overOption() {
    const option = chooser("Option", () => chart.fresh());
    const chart = makeChart("options", () => {
      if (!data.options.length) return null;
      const chosen = Number(option.fill(data.options.map((one, k) => [k, one.name]), 0));
      const { name, values, lines } = data.options[chosen];
      const m = data.metric, times = about(m).scale;
      const last = (group) => {
        const found = ["personal", "global"].map((model) => group.curves[`${model}/test/${m}/${data.statistic}`]).find(Boolean);
        const at = found ? found.mean.length - 1 : -1;
        return at < 0 || !known(found.mean[at]) ? [null, null] : [times * found.mean[at], known(found.std[at]) ? times * found.std[at] : null];
      };
      return {
        title: `${capital(about(m).word)}${unitOf(m)} after the last round over ${name}`,
        note: "Each line joins runs that differ in this option alone; the values stand at equal distances.",
        x: { title: name, whole: true, range: [-0.3, values.length - 0.7], tick: (value) => values[value] ?? "", show: (value) => values[value] ?? "" },
        show: (value) => shown(value, about(m).digits),
        series: lines.map((line, k) => {
          const members = Object.entries(line).map(([value, group]) => [values.indexOf(value), ...last(data.groups[group])]).sort((a, b) => a[0] - b[0]);
          const std = members.map((one) => one[2]);
          const names = Object.values(line).map((group) => data.groups[group].name);
          return {
            name: shared(names), group: k, x: members.map((one) => one[0]), y: members.map((one) => one[1]), std,
            low: std.some(known) ? members.map((one) => one[1] - (one[2] || 0)) : null, high: std.some(known) ? members.map((one) => one[1] + (one[2] || 0)) : null,
          };
        }),
      };
    }, [option.whole]);
    return chart;
  }

  // Of "alpha=0.1/ditto" and "alpha=1/ditto" what they share: "ditto".
  function shared(names) {
    const pieces = names.map((name) => name.split(/[/_]/));
    const common = pieces[0].filter((piece) => pieces.every((other) => other.includes(piece)));
    return common.length ? common.join("/") : names.join(", ");
  }

  // ---- the clients' distribution ----------------------------------------------------------------------------------------

  // A column of clients: personal, or global where a method has no other.
  function column(run, metric) {
    return ["personal", "global"].map((model) => `${model}/test/${metric}`).find((name) => name in run.clients);
  }

  const isNew = (run, k) => run.clients.new && run.clients.new[k] === "True";
  const clientMetrics = () => [...new Set(data.runs.flatMap((run) => Object.keys(run.clients)).filter((name) => name.includes("/test/")).map((name) => name.split("/")[2]))];

  function distribution() {
    let chart;
    const again = () => chart.fresh();
    const metric = chooser("Metric", again), how = chooser("Shown as", again);
    chart = makeChart("spread", () => {
      const names = clientMetrics();
      const m = metric.fill((names.length ? names : [data.metric]).map((name) => [name, capital(about(name).word.replaceAll("_", " "))]), data.metric);
      const kind = how.fill([["order", "clients from lowest to highest"], ["count", "how many clients have which value"]], "order");
      const times = about(m).scale;
      const found = data.groups.map((_, k) => data.runs.filter((run) => run.group === k).flatMap((run) => {
        const name = column(run, m);
        return name ? run.clients[name].filter((value, at) => known(value) && !isNew(run, at)).map((value) => times * value) : [];
      }).sort((a, b) => a - b));
      const pooled = data.groups.some((group) => group.seeds.length > 1) ? " Clients of all seeds are drawn together." : "";
      const digits = about(m).digits;
      if (kind === "count") {
        const all = found.flat(), low = all.reduce((a, b) => Math.min(a, b), Infinity), high = all.reduce((a, b) => Math.max(a, b), -Infinity);
        const bins = 30, size = (high - low) / bins || 1;
        return {
          title: `How many clients have which ${about(m).word}`, note: `Share of the clients in each of ${bins} equal bins.${pooled}`,
          x: { title: `${about(m).word}${unitOf(m)}`, show: (value) => `${shown(value, 1)} to ${shown(value + size, 1)}` }, show: (value) => `${shown(value, 1)} %`,
          series: found.map((values, k) => {
            const counts = new Array(bins + 1).fill(0);
            values.forEach((value) => counts[Math.min(bins - 1, Math.floor((value - low) / size))]++);
            return { name: data.groups[k].name, group: k, step: true, points: false, fill: data.groups.length === 1, x: values.length ? counts.map((_, j) => low + j * size) : [], y: counts.map((count) => 100 * count / values.length) };
          }),
        };
      }
      return {
        title: `${capital(about(m).word.replaceAll("_", " "))}${unitOf(m)} of the clients in the last evaluation`,
        note: `From the lowest to the highest; the lowest and the top 5 % are shaded.${pooled}`,
        x: { title: "share of the clients (%)", range: [0, 100] }, show: (value) => shown(value, digits),
        y: times === 100 ? { top: 100 } : {},
        shade: (u) => {
          u.ctx.save();
          u.ctx.fillStyle = colours.shade;
          for (const [from, to] of [[0, 5], [95, 100]]) {
            const left = Math.max(u.valToPos(from, "x", true), u.bbox.left), right = Math.min(u.valToPos(to, "x", true), u.bbox.left + u.bbox.width);
            if (right > left) u.ctx.fillRect(left, u.bbox.top, right - left, u.bbox.height);
          }
          u.ctx.restore();
        },
        series: found.map((values, k) => {
          // Client j of n stands for the shares from j/n to (j+1)/n: steps, so that ten clients look like ten.
          const points = Math.min(values.length, 400), x = [], y = [];
          for (let j = 0; j < points; j++) { x.push(Math.round(1e5 * j / points) / 1e3); y.push(values[Math.floor(j * values.length / points)]); }
          if (points) { x.push(100); y.push(values[values.length - 1]); }
          return { name: data.groups[k].name, group: k, step: true, points: false, x, y };
        }),
      };
    }, [metric.whole, how.whole]);
    return chart;
  }

  // ---- what rounds took ----------------------------------------------------------------------------------------------

  function costs() {
    const quantity = chooser("Quantity", () => chart.fresh());
    const chart = makeChart("costs", () => {
      const names = [...new Set(data.groups.flatMap((group) => Object.keys(group.measured)))];
      const chosen = quantity.fill(names.map((name) => [name, capital(name)]), "megabytes, up and down");
      const seeds = Math.max(...data.groups.map((group) => group.seeds.length));
      return {
        title: capital(chosen.replace("training: ", "training: ")), none: "There is nothing to draw yet: no round is over.",
        note: `${chosen.startsWith("training") ? "Means over the clients of each round" : "All rounds until then together"}${seeds > 1 ? "; lines are means over seeds, bands one standard deviation" : ""}.`,
        x: { title: "round", whole: true, tick: roundTick }, show: plain,
        series: data.groups.map((group, k) => {
          const found = group.measured[chosen] || { round: [], mean: [], std: [] };
          const spread = found.std.some(known);
          return {
            name: group.name, group: k, points: false, x: found.round, y: found.mean, std: found.std,
            low: spread ? found.mean.map((value, j) => value - (found.std[j] || 0)) : null, high: spread ? found.mean.map((value, j) => value + (found.std[j] || 0)) : null,
          };
        }),
      };
    }, [quantity.whole]);
    return chart;
  }

  // ---- the partition -------------------------------------------------------------------------------------------------

  function partition() {
    const choice = chooser("Partition", () => chart.fresh());
    let dense = null, denseOf = null;
    const chart = makeChart("partition", () => {
      if (!data.partitions.length) return null;
      const cut = data.partitions[Number(choice.fill(data.partitions.map((one, k) => [k, one.name]), 0))];
      const clients = cut.sizes.train.length;
      if (!cut.held) {
        return {
          title: "Training samples of each client", note: "The classes were not written by this run.", x: { title: "client", whole: true, tick: roundTick }, show: plain,
          series: [{ name: "training samples", group: 0, fill: true, x: cut.sizes.train.map((_, k) => k), y: cut.sizes.train }], table: null,
        };
      }
      const rows = cut.classes.length;
      if (denseOf !== cut) {
        dense = cut.held.map((pairs) => { const full = new Uint32Array(rows); for (let k = 0; k < pairs.length; k += 2) full[pairs[k]] = pairs[k + 1]; return full; });
        denseOf = cut;
      }
      const most = dense.reduce((high, row) => row.reduce((a, b) => Math.max(a, b), high), 1);
      const every = Math.max(1, Math.ceil(rows / 20));
      return {
        title: "Training samples of each class that each client has",
        note: `The stronger the colour, the more samples; the strongest is ${plain(most)}. Drag to zoom in on clients.`,
        height: Math.min(520, Math.max(200, 90 + 22 * Math.min(rows, 20))),
        x: { title: "client", range: [-0.5, clients - 0.5], whole: true, tick: roundTick }, show: plain, table: null,
        y: { range: [-0.5, rows - 0.5], splits: () => cut.classes.map((_, k) => k).filter((k) => k % every === 0), tick: (k) => { const name = cut.classes[k] || ""; return name.length > 14 ? `${name.slice(0, 13)}…` : name; } },
        series: [{ name: "", group: 0, unseen: true, points: false, x: cut.sizes.train.map((_, k) => k), y: cut.sizes.train.map(() => 0) }],
        paint: (u) => {
          const { ctx, bbox } = u;
          ctx.save();
          ctx.beginPath(); ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height); ctx.clip();
          const from = Math.max(0, Math.floor(u.scales.x.min + 0.5)), to = Math.min(clients - 1, Math.ceil(u.scales.x.max - 0.5));
          const left = (k) => Math.round(u.valToPos(k - 0.5, "x", true)), top = (k) => Math.round(u.valToPos(k - 0.5, "y", true));
          const gap = left(from + 1) - left(from) > 6 ? 1 : 0;
          // Clients that share a column of pixels: the most that one of them has.
          for (let k = from; k <= to;) {
            const x = left(k);
            let next = k + 1;
            while (next <= to && left(next) <= x) next++;
            const wide = Math.max(1, left(next) - x - gap);
            for (let c = 0; c < rows; c++) {
              let count = 0;
              for (let j = k; j < next; j++) count = Math.max(count, dense[j][c]);
              if (!count) continue;
              const y = top(c);
              ctx.fillStyle = `rgba(${colours.heat}, ${0.12 + 0.88 * Math.sqrt(count / most)})`;
              ctx.fillRect(x, y, wide, Math.max(1, top(c + 1) - y - (top(c + 1) - y > 4 ? 1 : 0)));
            }
            k = next;
          }
          ctx.restore();
        },
        tip: (u, x, y) => {
          const client = Math.round(x), c = Math.round(y);
          if (!dense[client]) return null;
          const held = [...dense[client]].map((count, k) => [count, k]).filter(([count]) => count).sort((a, b) => b[0] - a[0]);
          const list = held.slice(0, 8).map(([count, k]) => ({ name: cut.classes[k], value: plain(count), near: k === c }));
          if (held.length > 8) list.push({ name: `${held.length - 8} more classes`, value: plain(held.slice(8).reduce((sum, [count]) => sum + count, 0)) });
          return { head: `client ${client}: ${plain(cut.sizes.train[client])} training samples`, rows: list };
        },
      };
    }, [choice.whole]);
    return chart;
  }

  // ---- two runs client by client ----------------------------------------------------------------------------------------

  const placesOf = (run) => {
    if (!run.places) Object.defineProperty(run, "places", { value: new Map((run.clients.client || []).map((client, k) => [client, k])) });
    return run.places;
  };

  const comparable = (a, b) => a !== b && a.partition != null && a.partition === b.partition;

  function differencesOf(a, b, metric) {
    const one = column(a, metric), other = column(b, metric);
    if (!one || !other) return [];
    const there = placesOf(b), found = [];
    a.clients.client.forEach((client, k) => {
      const at = there.get(client), left = a.clients[one][k], right = at === undefined ? null : b.clients[other][at];
      if (known(left) && known(right)) found.push({ client, left, right, apart: left - right });
    });
    return found;
  }

  function pairs() {
    let chart;
    const again = () => chart.fresh();
    const first = chooser("Run", again), second = chooser("Minus", again), metric = chooser("Metric", again);
    chart = makeChart("pairs", () => {
      const able = data.runs.map((run, k) => [k, run.name]).filter(([k]) => data.runs.some((other) => comparable(data.runs[k], other)));
      if (able.length < 2) return null;
      const a = data.runs[Number(first.fill(able, able[0][0]))];
      const others = able.filter(([k]) => comparable(a, data.runs[k]));
      const b = data.runs[Number(second.fill(others, others[0][0]))];
      first.whole.hidden = second.whole.hidden = false;
      const m = metric.fill(clientMetrics().map((name) => [name, capital(about(name).word.replaceAll("_", " "))]), data.metric) || data.metric;
      const { scale: times, digits, word, lower } = about(m);
      const found = differencesOf(a, b, m).sort((p, q) => p.apart - q.apart);
      const better = found.filter((one) => (lower ? -one.apart : one.apart) > 0).length, same = found.filter((one) => one.apart === 0).length;
      const mean = found.reduce((sum, one) => sum + one.apart, 0) / found.length;
      const sign = (value) => (value > 0 ? "+" : "") + shown(value, digits);
      return {
        title: `${capital(word.replaceAll("_", " "))}${times === 100 ? " (percentage points)" : ""} of each client: ${a.name} minus ${b.name}`,
        note: found.length ? `${better} of ${found.length} clients are better with ${a.name}, ${found.length - better - same} with ${b.name}, ${same} equal; in the mean ${sign(times * mean)}. From the lowest to the highest difference.` : "",
        none: "These runs have no evaluated clients in common.",
        x: { title: "clients in order of the difference", whole: true, range: [-0.5, Math.max(found.length - 0.5, 0.5)], tick: roundTick, show: (place) => (found[place] ? `client ${found[place].client}` : "") },
        show: sign, height: 280,
        tip: (u, x) => {
          const one = found[Math.round(x)];
          return one ? { head: `client ${one.client}: ${sign(times * one.apart)}`, rows: [{ name: a.name, value: shown(times * one.left, digits) }, { name: b.name, value: shown(times * one.right, digits) }] } : null;
        },
        series: [{ name: "difference", group: 0, fill: true, points: found.length < 60 ? undefined : false, x: found.map((_, k) => k), y: found.map((one) => times * one.apart) }],
      };
    }, [first.whole, second.whole, metric.whole]);
    return chart;
  }

  // ---- the table of clients -----------------------------------------------------------------------------------------

  function people() {
    const place = byId("table-of-clients");
    const state = { page: 0, size: 25, sort: "client", up: true, open: new Set() };
    const run = chooser("Run", () => { state.page = 0; fill(); });
    const other = chooser("Compared with", () => { state.page = 0; fill(); });
    const size = chooser("Rows", (value) => { state.size = Number(value); state.page = 0; fill(); });
    const every = chooser("Columns", () => fill());
    const search = element("input", { type: "search", id: "client-search", placeholder: "12, accuracy<60, samples>100", autocomplete: "off", spellcheck: "false", "aria-describedby": "client-search-hint" });
    const wait = { timer: 0 };
    search.addEventListener("input", () => { clearTimeout(wait.timer); wait.timer = setTimeout(() => { state.page = 0; fill(); }, 120); });
    const hint = element("p", { class: "hint", id: "client-search-hint", text: "A number finds a client. A word finds clients that hold a class of that name. A condition such as accuracy<60 or samples>100 takes any column; several are joined by spaces. Headings sort." });
    const counted = element("output", { "aria-live": "polite" });
    const back = element("button", { type: "button", text: "Previous", onclick: () => { state.page--; fill(); } });
    const next = element("button", { type: "button", text: "Next", onclick: () => { state.page++; fill(); } });
    const frame = element("div", { class: "scroll", role: "region", tabindex: "0", "aria-label": "Clients" });
    const pages = element("div", { class: "pages" }, counted, back, next);
    place.replaceChildren(element("div", { class: "controls" }, run.whole, other.whole, element("label", { class: "grow", for: search.id }, "Search", search), every.whole, size.whole), hint, frame, pages);

    function columnsOf(one, versus, all) {
      const cut = one.partition == null ? null : data.partitions[one.partition];
      const clients = one.clients.client || [];
      const found = [{ id: "client", title: "Client", of: (k) => clients[k], show: (value) => String(value), words: ["client"] }];
      for (const part of ["train", "validation", "test"]) {
        const own = one.clients[`${part}_samples`];
        if (own || cut) found.push({ id: `${part}_samples`, title: capital(part), long: `${capital(part)} samples`, of: (k) => (own ? own[k] : cut.sizes[part][clients[k]]), show: (value) => shown(value, 0), words: part === "train" ? ["samples", "train"] : [part] });
      }
      if (cut && cut.held) {
        found.push({ id: "classes", title: "Classes", of: (k) => (cut.held[clients[k]] || []).length / 2, show: (value) => shown(value, 0), words: ["classes"] });
        found.push({ id: "strip", title: "Data by class", of: () => null, node: (k) => strip(cut, cut.held[clients[k]]), words: [] });
      }
      const metric = (name) => {
        const [model, part, m] = name.split("/"), { scale: times, digits, word } = about(m);
        const plainName = part === "test" ? `${capital(model)} ${word}` : `${capital(model)} ${part} ${word}`;
        const first = name === column(one, m);
        return { id: name, title: plainName + unitOf(m), of: (k) => (known(one.clients[name][k]) ? times * one.clients[name][k] : null), show: (value) => shown(value, digits), words: first ? [m, name, `${model}_${m}`] : [name, `${model}_${m}`] };
      };
      const names = Object.keys(one.clients), own = column(one, data.metric);
      const measured = names.filter((name) => name.split("/").length === 3);
      const chief = measured.filter((name) => name.endsWith(`/test/${data.metric}`)).sort((a, b) => (b === own) - (a === own));
      found.push(...chief.slice(0, 1).map(metric));
      if (versus) {
        const theirs = column(versus, data.metric), there = placesOf(versus), { scale: times, digits, word } = about(data.metric);
        if (own && theirs) {
          const value = (k) => { const at = there.get(clients[k]); return at !== undefined && known(versus.clients[theirs][at]) ? times * versus.clients[theirs][at] : null; };
          found.push({ id: "other", title: `${capital(word)} with ${versus.name}${unitOf(data.metric)}`, of: value, show: (v) => shown(v, digits), words: ["other"] });
          found.push({ id: "difference", title: "Difference", of: (k) => { const w = value(k), v = one.clients[own][k]; return known(w) && known(v) ? times * v - w : null; }, show: (v) => (v > 0 ? "+" : "") + shown(v, digits), words: ["difference"], colour: (v) => (v ? ((v > 0) !== about(data.metric).lower ? "up" : "down") : "") });
        }
      }
      found.push(...chief.slice(1).map(metric));
      if (all) {
        found.push(...measured.filter((name) => !chief.includes(name)).map(metric));
        for (const name of names) {
          if (["client", "new", "train_samples", "validation_samples", "test_samples"].includes(name) || measured.includes(name)) continue;
          const values = one.clients[name], text = values.some((value) => typeof value === "string");
          found.push({ id: name, title: name.replaceAll("_", " "), of: (k) => values[k], show: text ? (value) => (value == null ? "–" : String(value)) : plain, words: [name], text });
        }
      }
      if (one.clients.new) found.push({ id: "new", title: "Joined late", of: (k) => (isNew(one, k) ? "yes" : "no"), show: String, words: ["new"], text: true });
      return found;
    }

    // A bar a class, always at the same place, so that clients compare at a glance.
    function strip(cut, pairs) {
      const count = cut.classes.length, wide = Math.max(1, Math.min(10, 160 / count)), high = 20;
      const most = Math.max(1, ...(pairs || []).filter((_, k) => k % 2));
      let path = "";
      const words = [];
      for (let k = 0; k < (pairs || []).length; k += 2) {
        const tall = Math.max(2, high * pairs[k + 1] / most);
        path += `M${(pairs[k] * wide).toFixed(1)} ${high}v${(-tall).toFixed(1)}h${Math.max(wide - 1, 0.8).toFixed(1)}v${tall.toFixed(1)}z`;
        if (words.length < 12) words.push(`${cut.classes[pairs[k]]}: ${pairs[k + 1]}`);
      }
      const whole = drawing("svg", { width: Math.ceil(count * wide), height: high + 1, role: "img", "aria-label": words.join(", ") },
        drawing("path", { d: `M0 ${high + 0.5}h${count * wide}`, stroke: "var(--line)" }), drawing("path", { d: path, fill: "var(--c0)" }));
      const title = drawing("title", {});
      title.textContent = words.join(", ") + ((pairs || []).length / 2 > 12 ? ", …" : "");
      whole.prepend(title);
      return whole;
    }

    function matcher(text, columns, one) {
      const cut = one.partition == null ? null : data.partitions[one.partition], wrong = [];
      const tests = text.toLowerCase().replace(/\s*(<=|>=|<|>|=)\s*/g, "$1").split(/\s+/).filter(Boolean).map((word) => {
        const condition = word.match(/^(.+?)(<=|>=|<|>|=)(.+)$/);
        if (condition) {
          const [, name, sign, limit] = condition, value = Number(limit.replace("%", "").replace(",", "."));
          const found = columns.find((c) => c.words.some((w) => w.toLowerCase() === name) || c.title.toLowerCase().replace(/ \(%\)$/, "").replaceAll(" ", "_") === name);
          if (!found || (!found.text && !Number.isFinite(value))) { wrong.push(word); return () => true; }
          if (found.text) return (k) => sign === "=" && String(found.of(k)).toLowerCase() === limit;
          return (k) => { const v = found.of(k); return known(v) && (sign === "<" ? v < value : sign === ">" ? v > value : sign === "<=" ? v <= value : sign === ">=" ? v >= value : Math.abs(v - value) < 1e-9); };
        }
        if (/^\d+$/.test(word)) return (k) => String(one.clients.client[k]) === word;
        const places = cut && cut.held ? cut.classes.map((name, k) => (name.toLowerCase().includes(word) ? k : -1)).filter((k) => k >= 0) : [];
        if (!places.length) { wrong.push(word); return () => true; }
        const set = new Set(places);
        return (k) => { const pairs = cut.held[one.clients.client[k]] || []; for (let j = 0; j < pairs.length; j += 2) if (set.has(pairs[j])) return true; return false; };
      });
      return { test: (k) => tests.every((test) => test(k)), wrong };
    }

    function fill() {
      const able = data.runs.map((one, k) => [k, one.name]).filter(([k]) => (data.runs[k].clients.client || []).length);
      if (!able.length) { frame.replaceChildren(element("p", { class: "empty", text: "No client was evaluated yet." })); counted.textContent = ""; back.disabled = next.disabled = true; return; }
      const one = data.runs[Number(run.fill(able, able[0][0]))];
      const versus = data.runs[Number(other.fill([["-1", "nothing"], ...able.filter(([k]) => comparable(one, data.runs[k]))], "-1"))];
      const all = every.fill([["", "the main ones"], ["all", "all"]], "") === "all";
      state.size = Number(size.fill([[25, "25"], [100, "100"], [500, "500"]], 25));
      const columns = columnsOf(one, versus, all);
      const { test, wrong } = matcher(search.value, columns, one);
      const order = one.clients.client.map((_, k) => k).filter(test);
      const by = columns.find((c) => c.id === state.sort) || columns[0];
      const values = new Map(order.map((k) => [k, by.of(k)]));
      const absent = (v) => v == null || v === "";
      order.sort((p, q) => {
        const a = values.get(p), b = values.get(q);
        if (absent(a) || absent(b)) return absent(a) - absent(b) || p - q; // no value: last, whichever way
        const less = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), undefined, { numeric: true });
        return (state.up ? less : -less) || p - q;
      });
      const last = Math.max(0, Math.ceil(order.length / state.size) - 1);
      state.page = Math.min(Math.max(state.page, 0), last);
      const from = state.page * state.size, shownRows = order.slice(from, from + state.size);

      const head = element("tr", {}, ...columns.map((c) => c.node
        ? element("th", { scope: "col", text: c.title })
        : element("th", { scope: "col", class: c.text ? null : "n", "aria-sort": by.id === c.id ? (state.up ? "ascending" : "descending") : null },
          element("button", { type: "button", "data-sort": c.id, title: c.long || null, text: c.title, onclick: () => {
            state.up = state.sort === c.id ? !state.up : c.id === "client" || c.text; state.sort = c.id; state.page = 0; fill();
            const again = frame.querySelector(`[data-sort="${CSS.escape(c.id)}"]`);
            if (again) again.focus({ preventScroll: true });
          } }))), element("th", { scope: "col" }, element("span", { class: "for-readers", text: "More" })));
      const body = [];
      for (const k of shownRows) {
        const client = one.clients.client[k], open = state.open.has(client);
        body.push(element("tr", {}, ...columns.map((c, j) => {
          if (c.node) return element("td", {}, c.node(k));
          const value = c.of(k), classes = [c.text ? "" : "n", c.colour ? c.colour(value) : ""].filter(Boolean).join(" ");
          return element(j ? "td" : "th", { scope: j ? null : "row", class: classes || null, text: absent(value) ? "–" : c.show(value) });
        }), element("td", {}, element("button", { type: "button", class: "open", "aria-expanded": String(open), "aria-label": `Details of client ${client}`, "data-open": client, text: open ? "Less" : "More", onclick: () => {
          if (!state.open.delete(client)) state.open.add(client);
          fill();
          const again = frame.querySelector(`[data-open="${CSS.escape(String(client))}"]`);
          if (again) again.focus({ preventScroll: true });
        } }))));
        if (open) body.push(element("tr", { class: "detail" }, element("td", { colspan: columns.length + 1 }, detail(one, client))));
      }
      const left = frame.scrollLeft;
      frame.replaceChildren(element("table", { class: "people" }, element("caption", { class: "for-readers", text: `Clients of ${one.name}` }), element("thead", {}, head), element("tbody", {}, ...body)));
      frame.scrollLeft = left;
      const total = one.clients.client.length;
      counted.textContent = (order.length ? `${plain(from + 1)} to ${plain(Math.min(from + state.size, order.length))} of ${plain(order.length)} client${order.length === 1 ? "" : "s"}` : "No client")
        + (order.length < total ? ` (of ${plain(total)} in all)` : "") + (wrong.length ? `. Not understood: ${wrong.join(", ")}` : "");
      back.disabled = state.page === 0;
      next.disabled = state.page === last;
    }

    // What a client holds, and how it fares in every run of the same partition.
    function detail(one, client) {
      const parts = [];
      const cut = one.partition == null ? null : data.partitions[one.partition];
      const frameOf = (caption, head, rows) => element("table", {}, element("caption", { text: caption }), element("thead", {}, element("tr", {}, ...head.map((text, k) => element("th", { scope: "col", class: k ? "n" : null, text })))),
        element("tbody", {}, ...rows.map((cells) => element("tr", {}, ...cells.map((text, k) => element(k ? "td" : "th", { scope: k ? null : "row", class: k ? "n" : null, text }))))));
      if (cut && cut.held && cut.held[client]) {
        const pairs = cut.held[client], items = [];
        for (let k = 0; k < pairs.length; k += 2) items.push(element("li", {}, `${cut.classes[pairs[k]]}: `, element("b", { text: plain(pairs[k + 1]) })));
        const name = `Training samples of client ${client}`;
        parts.push(element("p", { text: name }), element("ul", { class: "holds", "aria-label": name }, ...items));
      }
      const runs = data.runs.filter((other) => (other === one || comparable(one, other)) && placesOf(other).has(client));
      const names = [...new Set(runs.flatMap((other) => Object.keys(other.clients).filter((name) => name.includes("/test/"))))];
      parts.push(frameOf(`Test results of client ${client}`, ["Run", ...names.map((name) => { const [model, , m] = name.split("/"); return `${capital(model)} ${about(m).word}${unitOf(m)}`; })],
        runs.map((other) => [other.name, ...names.map((name) => { const m = name.split("/")[2], at = placesOf(other).get(client), value = name in other.clients ? other.clients[name][at] : null; return known(value) ? shown(about(m).scale * value, about(m).digits) : "–"; })])));
      return element("div", {}, ...parts);
    }
    return { draw: fill };
  }

  // ---- theme --------------------------------------------------------------------------------------------------------

  function theme(changed) {
    const button = byId("theme"), names = ["system", "light", "dark"];
    let stored = null;
    try { stored = localStorage.getItem("pfl_ext-theme"); } catch { /* pages from disk may have no storage */ }
    let at = Math.max(0, names.indexOf(stored));
    const set = () => {
      if (at) document.documentElement.dataset.theme = names[at]; else delete document.documentElement.dataset.theme;
      button.textContent = `Theme: ${names[at]}`;
      readColours();
    };
    button.hidden = false;
    button.addEventListener("click", () => {
      at = (at + 1) % names.length;
      try { localStorage.setItem("pfl_ext-theme", names[at]); } catch { /* as above */ }
      set();
      changed();
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readColours(); changed(); });
    set();
  }

  // ---- live ---------------------------------------------------------------------------------------------------------

  function follow(redraw) {
    const sign = byId("live");
    const say = (text, lost) => { sign.hidden = false; sign.classList.toggle("lost", lost); if (sign.textContent !== text) sign.textContent = text; };
    let tag = null;
    say("live", false);
    async function ask() {
      try {
        const answer = await fetch("/numbers", { cache: "no-store", headers: tag ? { "If-None-Match": tag } : {} });
        if (answer.status === 200) {
          tag = answer.headers.get("ETag");
          const { parts, numbers } = await answer.json();
          for (const [name, html] of Object.entries(parts)) {
            const place = document.querySelector(`[data-part="${CSS.escape(name)}"]`);
            if (place && place.pflText !== html) replace(place, html);
          }
          data = numbers;
          redraw();
          say("live", false);
        } else if (answer.status === 304) say("live", false);
        else say(`not read: ${await answer.text()}`, true);
      } catch {
        say("ended: pfl-ext report is not running", true);
      }
      setTimeout(ask, 2000);
    }
    ask();
  }

  // The server escapes every text of a file; what is open stays open, what was scrolled stays there.
  function replace(place, html) {
    const open = new Set([...place.querySelectorAll("details[open]")].map((one) => one.dataset.key));
    const closed = new Set([...place.querySelectorAll("details:not([open])")].map((one) => one.dataset.key));
    const scrolled = [...place.querySelectorAll(".scroll")].map((one) => one.scrollLeft);
    place.innerHTML = html;
    place.pflText = html;
    place.querySelectorAll("details").forEach((one) => { if (open.has(one.dataset.key)) one.open = true; else if (closed.has(one.dataset.key)) one.open = false; });
    place.querySelectorAll(".scroll").forEach((one, k) => { one.scrollLeft = scrolled[k] || 0; });
  }

  // ---- begin --------------------------------------------------------------------------------------------------------

  theme(() => charts.forEach((chart) => chart.draw()));
  const table = people();
  table.draw();
  curves(); overOption(); distribution(); partition(); costs(); pairs();
  // Only what is seen is drawn at once.
  const seen = new Set();
  const draw = (chart) => { seen.add(chart); chart.draw(); };
  const watcher = new IntersectionObserver((entries) => entries.forEach((entry) => {
    if (!entry.isIntersecting) return;
    const chart = charts.find((one) => one.root === entry.target);
    watcher.unobserve(entry.target);
    draw(chart);
  }), { rootMargin: "400px" });
  charts.forEach((chart) => { if (chart.root.hidden) draw(chart); else watcher.observe(chart.root); });
  addEventListener("beforeprint", () => charts.forEach(draw));
  let resizing = 0;
  addEventListener("resize", () => { clearTimeout(resizing); resizing = setTimeout(() => seen.forEach((chart) => chart.resize()), 80); });
  const links = [...document.querySelectorAll(".bar a")];
  const current = new IntersectionObserver((entries) => entries.forEach((entry) => {
    if (entry.isIntersecting) links.forEach((link) => { if (link.hash === `#${entry.target.id}`) link.setAttribute("aria-current", "true"); else link.removeAttribute("aria-current"); });
  }), { rootMargin: "-20% 0px -70% 0px" });
  document.querySelectorAll("main section").forEach((section) => current.observe(section));
  if (live) follow(() => { table.draw(); seen.forEach((chart) => chart.draw()); });
  document.documentElement.dataset.ready = "yes";
})();
