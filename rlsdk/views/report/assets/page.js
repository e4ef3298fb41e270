// Draws the curves of a report and filters its samples. Reads data as text only: nothing in it becomes markup or code.
"use strict";
(() => {
  const COLORS = ["#3b82c4", "#e07b39", "#4fa35c", "#b25fae", "#c2a12f", "#3fa7b5", "#c9504e", "#8b7fd1", "#8c6d5a", "#888888"];
  const SPARSE = 1 / 3; // a curve with fewer of the steps is one of evaluations: points, never smoothed
  const SPANS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800]; // between ticks, seconds
  const BARS = 60; // steps up to which time by phase is drawn as bars
  const html = document.documentElement;
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const css = (name) => getComputedStyle(html).getPropertyValue(name).trim();
  let data = read("data");
  let smoothing = 0, axis = "step";
  const drawn = new Map(); // key of the chart -> its uPlot

  const problems = [];
  const failed = (text) => { problems.push(String(text)); html.dataset.problems = problems.join("\n"); };
  addEventListener("error", (event) => failed(event.message));
  document.addEventListener("securitypolicyviolation", (event) => failed("blocked: " + event.violatedDirective));

  function number(value) {
    const size = Math.abs(value);
    if (value === 0) return "0";
    if (size >= 1e9) return trimmed(value / 1e9) + "G";
    if (size >= 1e6) return trimmed(value / 1e6) + "M";
    if (size >= 1e4) return trimmed(value / 1e3) + "k";
    if (size < 1e-3) return value.toExponential(1).replace(/\.0(?=e)/, "");
    return trimmed(value);
  }
  const trimmed = (value) => String(+value.toPrecision(4));
  const shown = (value, unit) => (value == null ? "\u2013" : number(value) + unit);

  function smooth(values, weight) {
    let mean = 0, count = 0;
    return values.map((value) => {
      if (value == null) return null;
      mean = mean * weight + value * (1 - weight);
      count += 1;
      return mean / (1 - Math.pow(weight, count)); // as Adam corrects its moments: the first value counts in full
    });
  }

  const isSparse = (values) => values.filter((v) => v != null).length < values.length * SPARSE || values.length === 1;
  // A chart shows the steps from its first value to its last one.
  const stepsOf = (chart) => data.steps.slice(chart.first, chart.first + (chart.series[0]?.values.length ?? 0));
  // The points of a chart on the chosen axis: its places, and one list of values for each curve.
  function placed(chart) {
    if (axis === "step") return [stepsOf(chart), ...chart.series.map((curve) => curve.values)];
    return uPlot.join(chart.series.map((curve) => {
      const at = data.axes[axis][curve.color ?? 0];
      const known = curve.values.map((value, index) => [at[chart.first + index], value]).filter(([x, y]) => x != null && y != null);
      return [known.map(([x]) => x), known.map(([, y]) => y)];
    }));
  }
  const units = { step: (v) => String(v), time: duration, tokens: number };
  function duration(seconds) {
    if (seconds < 120) return trimmed(seconds) + " s";
    return seconds < 7200 ? trimmed(seconds / 60) + " min" : trimmed(seconds / 3600) + " h";
  }
  const head = (places) => ({ label: axis, value: (u, v) => units[axis](v == null ? last(places) : v) });
  // Without a pointer the newest value; of a curve that ends before the others, with the place where it ends.
  function newest(places, values, unit) {
    let at = values.length - 1;
    while (at >= 0 && values[at] == null) at -= 1;
    if (at < 0) return shown(null, unit);
    return shown(values[at], unit) + (at < values.length - 1 ? " at " + units[axis](places[at]) : "");
  }
  const last = (values) => { for (let i = values.length - 1; i >= 0; i--) if (values[i] != null) return values[i]; return null; };

  function lines(chart) {
    const [places, ...values] = placed(chart);
    const columns = [places], series = [head(places)];
    chart.series.forEach((curve, index) => {
      const own = values[index];
      const color = COLORS[(curve.color ?? index) % COLORS.length];
      const sparse = isSparse(curve.values);
      const common = { stroke: color, spanGaps: true, points: { show: sparse, size: 5, fill: color } };
      const value = (u, v, at, step) => (step == null ? newest(places, own, chart.unit) : shown(own[step], chart.unit));
      if (!sparse && smoothing > 0) {
        columns.push(own, smooth(own, smoothing));
        series.push({ ...common, label: curve.label, class: "raw", width: 1, alpha: 0.28 });
        series.push({ ...common, label: curve.label, width: 2, value });
      } else {
        columns.push(own);
        series.push({ ...common, label: curve.label, width: sparse ? 1.5 : 2, value, dash: curve.dash ? [6, 4] : undefined });
      }
    });
    return { columns, series, bands: [] };
  }

  function stack(chart) {
    const steps = axis === "step" ? stepsOf(chart) : stepsOf(chart).map((_, at) => data.axes[axis][0][chart.first + at]);
    const sum = steps.map(() => 0), columns = [steps], bands = [], series = [head(steps)];
    chart.series.forEach((part, index) => {
      const color = COLORS[index % COLORS.length];
      part.values.forEach((value, at) => { sum[at] += value ?? 0; });
      columns.push(sum.map((value, at) => (part.values[at] == null && value === 0 ? null : value)));
      series.push({
        label: part.label, stroke: color, fill: color, width: 1, points: { show: steps.length === 1 },
        paths: steps.length <= BARS && axis === "step" ? uPlot.paths.bars({ size: [0.8, 60] }) : undefined,
        value: (u, v, at, step) => shown(step == null ? last(part.values) : part.values[step], chart.unit),
      });
    });
    // Drawn from the top down, so that each part covers the one above it down to its own height.
    const order = [0, ...chart.series.map((_, index) => chart.series.length - index)];
    return { columns: order.map((at) => columns[at]), series: order.map((at) => series[at]), bands };
  }

  function options(chart, made, width) {
    const line = { stroke: css("--quiet"), grid: { stroke: css("--grid"), width: 1 }, ticks: { stroke: css("--grid"), width: 1, size: 4 }, font: "12px system-ui, sans-serif" };
    const labels = (u, splits) => splits.map((value) => (value == null ? "" : number(value) + chart.unit));
    return {
      width, height: width < 420 ? 200 : 230, padding: [10, 12, 0, 0],
      cursor: { sync: { key: "steps", setSeries: false }, drag: { x: true, y: false }, points: { size: 7 } },
      scales: {
        x: { time: false, range: (u, low, high) => (chart.kind === "stack" && axis === "step" && u.data[0].length <= BARS ? [low - 0.5, high + 0.5] : [low, high]) },
        y: { range: (u, low, high) => scale(chart, low, high) },
      },
      legend: { live: true, markers: { width: 3 } },
      axes: [
        { ...line, ...(axis === "time" ? { incrs: SPANS } : {}), size: 28, space: axis === "time" ? 80 : 60, values: (u, splits) => splits.map((value) => (axis !== "step" || Number.isInteger(value) ? (axis === "step" ? number : units[axis])(value) : "")) },
        { ...line, values: labels, space: 34, size: (u, values) => 16 + 7 * Math.max(2, ...(values ?? []).map((text) => String(text).length)) },
      ],
      series: made.series, bands: made.bands,
    };
  }

  function scale(chart, low, high) {
    if (low == null || high == null) return [0, 1];
    if (chart.kind === "stack") return [0, high * 1.05 || 1];
    if (chart.unit === "%" && low >= 0 && high <= 100 && (high === 0 || high - low > 20)) return [0, 100];
    const size = Math.max(Math.abs(low), Math.abs(high));
    const flat = high - low <= size * 1e-6; // smoothing leaves a constant with differences of rounding
    if (flat && size === 0) return [0, 1]; // an axis of rounding errors says nothing
    // Curves that hardly move stay calm: their noise would look like a trend if it filled the chart.
    const least = chart.unit === "%" ? Math.max(10, 0.1 * size) : 0.2 * size;
    const grow = Math.max(0, least - (high - low)) / 2;
    const pad = Math.max(high - low, least) * 0.06;
    const bottom = low - grow - pad, top = high + grow + pad;
    if (chart.unit === "%" && low >= 0 && high <= 100) return [Math.max(0, bottom), Math.min(100, top)];
    return [low >= 0 && bottom < 0 ? 0 : bottom, top];
  }

  function draw(place) {
    const chart = data.charts[place.dataset.chart];
    const old = drawn.get(place);
    if (old) { old.destroy(); drawn.delete(place); }
    if (!chart || !place.clientWidth) return;
    const made = chart.kind === "stack" ? stack(chart) : lines(chart);
    drawn.set(place, new uPlot(options(chart, made, place.clientWidth), made.columns, place));
    html.dataset.charts = drawn.size;
    place.tabIndex = 0;
    place.setAttribute("role", "group");
    place.setAttribute("aria-label", (place.closest("figure")?.querySelector("h3")?.textContent ?? "chart") + ": arrow keys go from step to step");
    place.onkeydown = (event) => { if (moved(drawn.get(place), event.key)) event.preventDefault(); };
  }

  // What the pointer does, by keys: from step to step, to either end, away.
  function moved(plot, key) {
    const places = plot.data[0], end = places.length - 1, at = plot.cursor.idx;
    const next = { ArrowLeft: at == null ? end : at - 1, ArrowRight: at == null ? 0 : at + 1, Home: 0, End: end }[key];
    if (key === "Escape") plot.setCursor({ left: -10, top: -10 });
    else if (next !== undefined) plot.setCursor({ left: plot.valToPos(places[Math.min(Math.max(next, 0), end)], "x"), top: 0 });
    return key === "Escape" || next !== undefined;
  }

  // Only what is in view is drawn: a long report opens at once.
  const seen = new IntersectionObserver((entries) => entries.forEach((entry) => {
    if (entry.isIntersecting && !drawn.has(entry.target)) draw(entry.target);
  }), { rootMargin: "600px" });
  const sized = new ResizeObserver((entries) => entries.forEach((entry) => {
    const plot = drawn.get(entry.target);
    if (plot && entry.contentRect.width && plot.width !== Math.floor(entry.contentRect.width)) draw(entry.target);
  }));
  const redraw = () => [...drawn.keys()].forEach(draw);
  const watch = () => document.querySelectorAll("[data-chart]").forEach((place) => { seen.observe(place); sized.observe(place); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

  function controls() {
    const slider = document.getElementById("smoothing"), said = document.getElementById("smoothing-value");
    if (!slider) return;
    const apply = () => { smoothing = Number(slider.value); said.textContent = smoothing ? smoothing.toFixed(2) : "off"; redraw(); };
    slider.addEventListener("input", apply);
    const choice = document.getElementById("axis");
    if (choice) choice.addEventListener("change", () => { axis = choice.value; redraw(); });
    axis = choice?.value ?? "step";
    apply();
    find();
  }

  // Curves by a part of their title or of the metric's name; what is closed opens where it has some.
  function find() {
    const field = document.getElementById("find"), kept = document.getElementById("kept");
    if (!field) return;
    const opened = new Set();
    const apply = () => {
      const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
      let count = 0;
      document.querySelectorAll("figure[data-names]").forEach((figure) => {
        figure.hidden = !words.every((word) => figure.dataset.names.includes(word));
        count += !figure.hidden;
      });
      document.querySelectorAll("details:has(figure[data-names])").forEach((box) => {
        const any = words.length > 0 && box.querySelector("figure[data-names]:not([hidden])") !== null;
        if (any && !box.open) { box.open = true; opened.add(box); }
        if (!any && opened.has(box)) { box.open = false; opened.delete(box); }
      });
      kept.textContent = words.length ? count + (count === 1 ? " chart" : " charts") : "";
    };
    field.addEventListener("input", apply);
    apply();
  }

  // How long ago the newest step was, by the server's clock.
  const ahead = Number(document.body.dataset.now || 0) - Date.now() / 1000;
  function age() {
    const place = document.getElementById("age");
    if (place) place.textContent = duration(Math.max(0, Math.round(Date.now() / 1000 + ahead - Number(place.dataset.at)))) + " ago";
  }

  // Samples: filters work on attributes that the page was written with.
  function filters() {
    const form = document.getElementById("filters");
    if (!form) return;
    const field = (name) => form.elements[name];
    const apply = () => {
      const text = field("text").value.toLowerCase(), kind = field("kind").value;
      const from = field("from").value === "" ? -Infinity : Number(field("from").value);
      const to = field("to").value === "" ? Infinity : Number(field("to").value);
      let count = 0;
      document.querySelectorAll(".prompt").forEach((box) => {
        let any = false;
        box.querySelectorAll(".sample").forEach((card) => {
          const step = Number(card.dataset.step), score = card.dataset.score === "" ? NaN : Number(card.dataset.score);
          const advantage = card.dataset.advantage === "" ? NaN : Number(card.dataset.advantage);
          const kept = step >= from && step <= to && (kind === "all" || (kind === "best" && score >= Number(data.best)) ||
            (kind === "zero" && score <= Number(data.worst)) || (kind === "better" && advantage > 0) || (kind === "worse" && advantage < 0))
            && (text === "" || card.textContent.toLowerCase().includes(text) || box.querySelector(".ask").textContent.toLowerCase().includes(text));
          card.hidden = !kept;
          any = any || kept;
        });
        box.hidden = !any;
        count += any;
      });
      const more = document.querySelector("details.more"); // what is found there is shown
      if (more && (text !== "" || kind !== "all" || from !== -Infinity || to !== Infinity)) more.open = true;
      document.getElementById("found").textContent = count + (count === 1 ? " prompt" : " prompts");
    };
    form.addEventListener("input", apply);
    form.addEventListener("submit", (event) => event.preventDefault());
    apply();
  }

  function tokens() {
    const choice = document.getElementById("colors");
    const apply = () => { if (choice) document.body.dataset.colors = choice.value; };
    if (choice) choice.addEventListener("change", apply);
    apply();
    document.querySelectorAll(".sample .text:has(.t)").forEach((text) => {
      text.tabIndex = 0;
      text.onkeydown = (event) => {
        const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key], all = [...text.querySelectorAll(".t")];
        if (!step) return;
        const at = all.findIndex((token) => token.classList.contains("on"));
        tell(all[Math.min(Math.max(at < 0 ? 0 : at + step, 0), all.length - 1)]);
        event.preventDefault();
      };
    });
  }
  function tell(token) {
    token.closest(".sample").querySelector(".token").textContent = token.title;
    document.querySelectorAll(".t.on").forEach((other) => other.classList.remove("on"));
    token.classList.add("on");
  }
  document.body.addEventListener("click", (event) => {
    const token = event.target.closest(".t");
    if (token) tell(token);
  });

  function ready() { watch(); controls(); filters(); tokens(); age(); }
  setInterval(age, 1000);
  ready();
  html.dataset.ready = "yes";

  // A page that `rlsdk watch` serves asks for what is new; one in a file has no such place.
  const live = document.body.dataset.live;
  if (live) {
    let mark = document.body.dataset.mark;
    const ask = async () => {
      try {
        const answer = await fetch(live + "?after=" + encodeURIComponent(mark), { cache: "no-store" });
        if (answer.status === 200) {
          const fresh = await answer.json();
          mark = fresh.mark;
          replace(fresh);
        }
        document.body.classList.toggle("lost", !answer.ok && answer.status !== 304);
      } catch { document.body.classList.add("lost"); }
      setTimeout(ask, 2000);
    };
    setTimeout(ask, 2000);
  }

  function replace(fresh) {
    // Markup that the server wrote as it wrote this page, every text in it escaped; the policy of the page holds for it.
    const typed = new Map([...document.querySelectorAll("#filters [name], #smoothing, #colors, #axis, #find")].map((e) => [e.name || e.id, e.value]));
    drawn.forEach((plot) => plot.destroy());
    drawn.clear();
    data = fresh.data;
    document.getElementById("main").innerHTML = fresh.main;
    document.querySelectorAll("#filters [name], #smoothing, #colors, #axis, #find").forEach((e) => { if (typed.has(e.name || e.id)) e.value = typed.get(e.name || e.id); });
    ready();
    html.dataset.updates = Number(html.dataset.updates || 0) + 1;
  }
})();
