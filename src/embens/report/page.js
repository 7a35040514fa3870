"use strict";
// Shows the JSON document of the page: charts, claims, tables. Everything is made from text nodes,
// so that no value can be markup.
(function () {
  const entries = JSON.parse(document.getElementById("data").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const KINDS = { "holds": "holds", "does not hold": "fails", "undecided": "open" };
  const MANY = { "holds": "hold", "does not hold": "do not hold", "undecided": "undecided" };
  const charts = [];
  const swatches = [];

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

  function number(value) {
    if (value === null || value === undefined) return "–";
    return Math.abs(value) >= 1e5 || (value !== 0 && Math.abs(value) < 1e-3)
      ? value.toExponential(2) : String(Number(value.toPrecision(3)));
  }

  function colour(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  }

  // On dark ground very dark lines are lightened, on light ground very light ones darkened.
  function visible(hex) {
    const parts = [1, 3, 5].map((k) => parseInt(hex.slice(k, k + 2), 16));
    const light = (0.299 * parts[0] + 0.587 * parts[1] + 0.114 * parts[2]) / 255;
    const mix = (to, part) => "rgb(" + parts.map((p) => Math.round(p + (to - p) * part)).join(",") + ")";
    if (dark.matches && light < 0.35) return mix(255, 0.55 - light);
    if (!dark.matches && light > 0.75) return mix(0, 0.25);
    return hex;
  }

  function trace(curve) {
    const paint = visible(curve.colour);
    const base = {
      name: curve.label, x: curve.x, y: curve.y, showlegend: false,
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

  function axis(label, log, values) {
    const ticks = [...new Set(values)].sort((a, b) => a - b);
    const own = log && ticks.length <= 9 && ticks.length > 0;
    return {
      title: { text: label, font: { size: 12 } }, type: log ? "log" : "linear",
      gridcolor: colour("--line"), zerolinecolor: colour("--line"), linecolor: colour("--line"),
      automargin: true, exponentformat: "power",
      ...(own ? { tickmode: "array", tickvals: ticks, ticktext: ticks.map(number) } : {}),
    };
  }

  function layout(panel) {
    return {
      title: { text: panel.title, font: { size: 14 }, x: 0.02, xanchor: "left" }, autosize: true,
      paper_bgcolor: colour("--card"), plot_bgcolor: colour("--card"),
      font: { color: colour("--ink"), size: 12 }, barmode: "overlay",
      margin: { l: 55, r: 15, t: 50, b: 45 }, hovermode: "closest", dragmode: "zoom",
      uirevision: "kept",  // choosing curves leaves the zoom alone
      xaxis: axis(panel.x_label, panel.x_log, panel.curves.flatMap((c) => c.x)),
      yaxis: axis(panel.y_label, panel.y_log, []),
    };
  }

  function draw(chart) {
    const traces = chart.panel.curves.map(trace);
    traces.forEach((t) => { t.visible = !chart.hidden.has(t.name); });
    Plotly.react(chart.node, traces, layout(chart.panel), {
      displaylogo: false, scrollZoom: false,
      modeBarButtons: [["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "autoScale2d", "toImage"]],
    });
    chart.drawn = true;
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
      if (chart.drawn) Plotly.Plots.resize(chart.node);
    }
  });

  function figure(entry) {
    const hidden = new Set();
    const mine = entry.figure.panels.map((panel) => {
      const node = make("div", { class: "chart", role: "img", "aria-label": panel.title });
      return { node, panel, hidden, drawn: false };
    });
    charts.push(...mine);
    const labels = new Map();
    for (const { panel } of mine) {
      for (const c of panel.curves) if (c.label && !labels.has(c.label)) labels.set(c.label, c);
    }
    const choices = make("div", { class: "choices", role: "group", "aria-label": "curves" });
    for (const [label, c] of labels) {
      const box = make("input", { type: "checkbox", checked: "" });
      box.addEventListener("change", () => {
        if (box.checked) hidden.delete(label); else hidden.add(label);
        mine.filter((chart) => chart.drawn).forEach(draw);
      });
      const swatch = make("span", { class: "swatch" + (c.style === "dash" ? " dash" : "") });
      swatch.style.borderColor = visible(c.colour);
      swatches.push(() => { swatch.style.borderColor = visible(c.colour); });
      choices.append(make("label", {}, box, swatch, label));
    }
    const grid = make("div", { class: "charts" }, ...mine.map((chart) => chart.node));
    mine.forEach((chart) => { watcher.observe(chart.node); sizes.observe(chart.node); });
    return [choices, grid];
  }

  function claim(c) {
    const measured = c.note || number(c.value) + " [" + number(c.low) + ", " + number(c.high) + "]";
    return make("li", { class: KINDS[c.verdict] },
      make("div", {}, make("span", { class: "verdict" }, c.verdict), ": " + c.statement),
      make("div", { class: "faint" }, c.measure + ": " + measured + "; holds if " + c.region),
      make("div", { class: "faint" }, "the paper: " + c.paper));
  }

  function fold(title, fill) {
    const node = make("details", {}, make("summary", {}, title));
    node.addEventListener("toggle", () => {
      if (node.open && node.children.length === 1) node.append(fill());
    });
    return node;
  }

  function table(entry) {
    const { columns, rows } = entry.table;
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
      if (count) node.append(make("span", { class: "verdict " + kind }, count + " " + word), " ");
    }
    return node;
  }

  const main = document.getElementById("experiments");
  const contents = document.getElementById("contents");
  for (const entry of entries) {
    const { manifest } = entry;
    const id = entry.name + "-" + manifest.preset;
    contents.append(make("span", {}, make("a", { href: "#" + id }, entry.name), " (" +
      manifest.preset + ") ", counts(entry.claims)));
    const seeds = entry.claims.length ? Math.max(...entry.claims.map((c) => c.seeds)) : 0;
    main.append(make("section", { id },
      make("h2", {}, entry.name + ": " + manifest.title),
      make("p", { class: "faint" }, manifest.label + " · preset " + manifest.preset + " · " +
        manifest.cells + " cells" + (manifest.failed ? ", " + manifest.failed + " failed" : "") +
        " · " + seeds + " seeds · bars are standard errors"),
      make("p", { class: "about" }, manifest.about),
      ...figure(entry),
      make("ul", { class: "claims" }, ...entry.claims.map(claim)),
      entry.picture ? fold("picture", () => make("img", { src: entry.picture, alt: manifest.title }))
        : null,
      fold("table, " + entry.table.rows.length + " rows", () => table(entry)),
      fold("set-up, versions, machine", () => setup(manifest))));
  }
  document.getElementById("summary").append(
    "Each claim is a statistic with a 95 % interval over seeds; its verdict is computed. ",
    counts(entries.flatMap((entry) => entry.claims)));
  dark.addEventListener("change", () => {
    charts.filter((c) => c.drawn).forEach(draw);
    swatches.forEach((paint) => paint());
  });
  document.documentElement.dataset.ready = "yes";
})();
