"use strict";
// Shows the JSON document of the page: charts, claims, tables. Everything is made from text nodes,
// so that no value can be markup.
(function () {
  const entries = JSON.parse(document.getElementById("data").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const KINDS = { "holds": "holds", "does not hold": "fails", "undecided": "open" };
  const MANY = { "holds": "hold", "does not hold": "do not hold", "undecided": "undecided" };
  const MARKS = { "holds": "✓", "does not hold": "✗", "undecided": "?" };
  const charts = [];

  function make(tag, attributes, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value !== null && value !== undefined) node.setAttribute(name, value);
    }
    for (const child of children) {
      if (child === null || child === undefined) continue;
      node.append(child instanceof Node ? child : document.createTextNode(String(child)));
    }
    return node;
  }

  async function unpack(text) {
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  }

  function number(value) {
    if (value === null || value === undefined) return "–";
    const short = Number(value.toPrecision(3));
    return short.toLocaleString("en", { maximumFractionDigits: 12, useGrouping: Math.abs(short) >= 1e4 });
  }

  function colour(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  }

  // On dark ground very dark lines are lightened, on light ground very light ones darkened.
  function visible(hex) {
    const parts = [1, 3, 5].map((k) => parseInt(hex.slice(k, k + 2), 16));
    const light = (0.299 * parts[0] + 0.587 * parts[1] + 0.114 * parts[2]) / 255;
    const mix = (to, part) => "rgb(" + parts.map((p) => Math.round(p + (to - p) * part)).join(",") + ")";
    const grey = new Set(parts).size === 1;
    if (dark.matches && light < 0.35) return mix(255, grey ? 0.9 : 0.55 - light);
    if (!dark.matches && light > 0.75) return mix(0, 0.25);
    return hex;
  }

  function trace(curve) {
    const paint = visible(curve.colour);
    const base = {
      name: curve.label, x: curve.x, y: curve.y, showlegend: Boolean(curve.label),
      text: curve.names,
      hovertemplate: (curve.names?.length ? "%{text} " : "") +
        "%{x:.4g}: %{y:.4g}<extra>" + curve.label.replace(/[<>&]/g, "") + "</extra>",
    };
    if (curve.style === "bars") {
      return { ...base, type: "bar", opacity: 0.6, marker: { color: paint } };
    }
    const few = curve.x.length <= 40;
    return {
      ...base, type: "scatter",
      mode: curve.style === "points" ? "markers" : few ? "lines+markers" : "lines",
      line: { color: paint, width: 2, dash: curve.style === "dash" ? "dash" : "solid" },
      marker: { color: paint, size: 6 },
      error_y: { type: "data", array: curve.error, visible: few && curve.error.length > 0,
                 color: paint, thickness: 1, width: 2 },
    };
  }

  // Ticks of a logarithmic axis: values that were chosen, if they are few, else 1, 2, 5, 10, …
  function ticks(values, chosen) {
    const found = [...new Set(values.filter((v) => v > 0))].sort((a, b) => a - b);
    if (!found.length || (chosen && found.length <= 9)) return found;
    const decades = Math.log10(found[found.length - 1] / found[0]);
    const digits = decades > 4 ? [1] : decades > 2 ? [1, 3] : [1, 2, 5];
    const first = Math.floor(Math.log10(found[0])), count = Math.ceil(decades) + 2;
    return Array.from({ length: count }, (_, k) => digits.map((d) => d * 10 ** (first + k))).flat();
  }

  function axis(label, log, values, chosen) {
    const shown = log ? ticks(values, chosen) : [];
    return {
      title: { text: label, font: { size: 12 } }, type: log ? "log" : "linear",
      gridcolor: colour("--line"), zerolinecolor: colour("--line"), linecolor: colour("--line"),
      automargin: true, exponentformat: "none",
      ...(shown.length ? { tickmode: "array", tickvals: shown, ticktext: shown.map(number) } : {}),
    };
  }

  // Why curves end before others do, each reason once.
  function endings(panel) {
    const place = (value, log) => (log ? Math.log10(value) : value);
    const reasons = new Map(panel.curves.filter((c) => c.ends && c.x.length).map((c) => [c.ends, c]));
    return [...reasons.values()].map((c) => ({
      text: c.ends, x: place(c.x.at(-1), panel.x_log), y: place(c.y.at(-1), panel.y_log),
      showarrow: true, arrowhead: 0, arrowcolor: visible(c.colour), ax: 30, ay: 18, xanchor: "left",
      font: { size: 10, color: visible(c.colour) },
    }));
  }

  // Rows of a legend below a chart, roughly.
  function rows(panel, width) {
    const labels = [...new Set(panel.curves.map((c) => c.label).filter(Boolean))];
    const widest = Math.max(0, ...labels.map((label) => label.length)) * 6 + 45;
    return Math.ceil(labels.length / Math.max(1, Math.floor(width / widest)));
  }

  function layout(panel, height) {
    return {
      title: { text: panel.title, font: { size: 14 }, x: 0.02, xanchor: "left", y: 1, yanchor: "top",
               pad: { t: 12 } },
      autosize: true, annotations: endings(panel), modebar: { orientation: "v" },
      legend: { orientation: "h", x: 0, y: -50 / Math.max(1, height - 150), yanchor: "top",
                font: { size: 10 } },
      paper_bgcolor: colour("--card"), plot_bgcolor: colour("--card"),
      font: { color: colour("--ink"), size: 12 }, barmode: "overlay",
      margin: { l: 55, r: 15, t: 45, b: 20 }, hovermode: "closest", dragmode: "zoom",
      uirevision: "kept",  // choosing curves leaves the zoom alone
      xaxis: axis(panel.x_label, panel.x_log, panel.curves.flatMap((c) => c.x), true),
      yaxis: axis(panel.y_label, panel.y_log, panel.curves.flatMap((c) => c.y), false),
    };
  }

  function draw(chart) {
    const { node, panel, hidden } = chart;
    const height = 320 + 19 * rows(panel, node.clientWidth - 30);
    node.style.height = height + "px";
    const traces = panel.curves.map(trace);
    traces.forEach((t) => { t.visible = hidden.has(t.name) ? "legendonly" : true; });
    Plotly.react(node, traces, layout(panel, height), {
      displaylogo: false, scrollZoom: false,
      modeBarButtons: [["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "autoScale2d", "toImage"]],
    });
    if (chart.drawn) return;
    chart.drawn = true;
    node.on("plotly_legendclick", (event) => {  // a curve is hidden in all panels that have it
      const label = panel.curves[event.curveNumber].label;
      if (!hidden.delete(label)) hidden.add(label);
      charts.filter((c) => c.hidden === hidden && c.drawn).forEach(draw);
      return false;
    });
  }

  const watcher = new IntersectionObserver((seen) => {
    for (const item of seen) {
      if (!item.isIntersecting) continue;
      const chart = charts.find((c) => c.node === item.target);
      if (!chart.drawn) draw(chart);
      watcher.unobserve(item.target);
    }
  }, { rootMargin: "600px" });

  const sizes = new ResizeObserver((changed) => {
    for (const item of changed) {
      const chart = charts.find((c) => c.node === item.target);
      if (chart.drawn && chart.width !== item.target.clientWidth) draw(chart);
      chart.width = item.target.clientWidth;
    }
  });

  function figure(entry) {
    const hidden = new Set();
    const mine = entry.figure.panels.map((panel) => {
      const node = make("div", { class: "chart", role: "img", "aria-label": panel.title });
      return { node, panel, hidden, drawn: false, width: 0 };
    });
    charts.push(...mine);
    return make("div", { class: "charts" }, ...mine.map((chart) => chart.node));
  }

  function measured(c) {
    const value = c.note || number(c.value) + " [" + number(c.low) + ", " + number(c.high) + "]";
    return c.measure + ": " + value + "; holds if " + c.region;
  }

  function claim(c, id) {
    return make("li", { class: KINDS[c.verdict], id },
      make("div", {}, make("span", { class: "verdict" }, c.verdict), ": " + c.statement),
      make("div", { class: "faint" }, measured(c)),
      make("div", { class: "faint" }, "the paper: " + c.paper));
  }

  function fold(title, fill) {
    const node = make("details", {}, make("summary", {}, title));
    node.addEventListener("toggle", async () => {
      if (!node.open || node.dataset.filled) return;
      node.dataset.filled = "yes";
      node.append(await fill());
    });
    return node;
  }

  async function table(entry) {
    const [columns, ...rows] = JSON.parse(await unpack(entry.table));
    const body = make("tbody", {});
    for (const row of rows) body.append(make("tr", {}, ...row.map((v) => make("td", {}, v))));
    const head = make("thead", {}, make("tr", {}, ...columns.map((c) => make("th", {}, c))));
    return make("div", { class: "scroll", tabindex: "0" }, make("table", {}, head, body));
  }

  function setup(manifest) {
    const body = make("tbody", {});
    const hidden = new Set(["title", "about"]);
    const walk = (prefix, value) => {
      if (value !== null && typeof value === "object" && !Array.isArray(value)) {
        for (const [k, v] of Object.entries(value)) {
          if (prefix || !hidden.has(k)) walk(prefix ? prefix + " · " + k : k, v);
        }
      } else if (value !== null && value !== "") {
        body.append(make("tr", {}, make("td", {}, prefix), make("td", {},
          Array.isArray(value) ? value.join(", ") : value)));
      }
    };
    walk("", manifest);
    return make("div", { class: "scroll" }, make("table", { class: "setup" }, body));
  }

  function counts(claims) {
    const node = make("span", {});
    for (const [verdict, kind] of Object.entries(KINDS)) {
      const count = claims.filter((c) => c.verdict === verdict).length;
      const word = count === 1 ? verdict : MANY[verdict];
      if (count) node.append(make("span", { class: "verdict " + kind }, count + " " + word), ". ");
    }
    return node;
  }

  // All verdicts as one picture: a row for each experiment, a square for each claim.
  function squares(entry, id) {
    const row = make("div", { class: "squares" });
    entry.claims.forEach((c, k) => row.append(make("a", {
      href: "#" + id + "-" + k, class: "square " + KINDS[c.verdict],
      title: c.verdict + ": " + c.statement + "\n" + measured(c),
      "aria-label": c.verdict + ": " + c.statement,
    }, MARKS[c.verdict])));
    return row;
  }

  const main = document.getElementById("experiments");
  const verdicts = document.getElementById("verdicts");
  for (const entry of entries) {
    const { manifest } = entry;
    const id = entry.name + "-" + manifest.preset;
    verdicts.append(
      make("a", { href: "#" + id }, entry.name, make("span", { class: "faint" }, " " + manifest.preset)),
      squares(entry, id));
    const seeds = entry.claims.length ? Math.max(...entry.claims.map((c) => c.seeds)) : 0;
    main.append(make("section", { id },
      make("h2", {}, entry.name + ": " + manifest.title),
      make("p", { class: "faint" }, manifest.label + " · preset " + manifest.preset + " · " +
        manifest.cells + " cells" + (manifest.failed ? ", " + manifest.failed + " failed" : "") +
        " · " + seeds + " seeds · bars are standard errors"),
      make("p", { class: "about" }, manifest.about),
      figure(entry),
      make("ul", { class: "claims" }, ...entry.claims.map((c, k) => claim(c, id + "-" + k))),
      fold("table, " + manifest.rows + " rows", () => table(entry)),
      fold("set-up, versions, machine", () => setup(manifest))));
  }
  document.getElementById("summary").append(
    "Each claim is a statistic with a 95 % interval over seeds; its verdict is computed: ",
    counts(entries.flatMap((entry) => entry.claims)),
    "A square is a claim: point at it to read it, or follow it.");
  unpack(document.getElementById("library").textContent).then((source) => {
    const script = make("script", {});
    script.textContent = source;
    document.head.append(script);
    charts.forEach((chart) => { watcher.observe(chart.node); sizes.observe(chart.node); });
    dark.addEventListener("change", () => charts.filter((c) => c.drawn).forEach(draw));
    document.documentElement.dataset.ready = "yes";
  });
})();
