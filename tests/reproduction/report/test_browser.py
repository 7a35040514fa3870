"""The page in a real browser: Chromium, headless, from a file, without a network."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest

from reproduction.figures import transition
from reproduction.report import page
from tests.reproduction.report import results

BROWSER = next(
    (b for b in ("chromium", "chromium-browser", "google-chrome") if shutil.which(b)), ""
)
pytestmark = pytest.mark.skipif(
    not BROWSER,
    reason="there is no Chromium; `make test` installs it as root on Debian, "
    "elsewhere install it yourself to run these tests",
)

PROBE = """
<script>
(async function () {
  const observed = {};
  const pause = (ms) => new Promise((done) => setTimeout(done, ms));
  const until = (test) => new Promise((done) => {  // unpacking takes no virtual time
    const look = () => { if (test()) { watcher.disconnect(); done(); } };
    const watcher = new MutationObserver(look);
    watcher.observe(document, { subtree: true, childList: true, attributes: true });
    look();
  });
  try {
    await until(() => document.documentElement.dataset.ready);
    const section = document.querySelector("section");
    document.documentElement.style.scrollBehavior = "auto";
    section.scrollIntoView();  // charts are drawn when they are seen
    await pause(1500);
    const charts = [...section.querySelectorAll(".chart")];
    const chart = charts[1];  // against M
    observed.ready = document.documentElement.dataset.ready;
    observed.sections = document.querySelectorAll("section").length;
    observed.charts = charts.length;
    observed.drawn = charts.filter((c) => c.querySelector("svg.main-svg")).length;
    observed.claims = section.querySelectorAll(".claims li").length;
    observed.verdicts = [...section.querySelectorAll(".claims .verdict")].map((v) => v.textContent);
    observed.squares = [...document.querySelectorAll(".square")].map((s) => s.title.split(":")[0]);
    const all = document.querySelectorAll(".claims .verdict");
    observed.all = [...all].map((v) => v.textContent);
    document.querySelectorAll(".square")[3].click(); await pause(300);
    observed.target = document.querySelector(".claims li:target").textContent;
    const lines = () => charts.map((c) => c.querySelectorAll("g.trace.scatter").length);
    const choose = () => chart.emit("plotly_legendclick", { curveNumber: 0 });
    observed.legends = charts.map((c) => c.querySelectorAll("g.legend g.traces").length);
    observed.curves = charts.map((c) => c.data?.length ?? 0);
    const ticks = section.querySelectorAll(".xtick text, .ytick text");
    observed.ticks = [...ticks].map((t) => t.textContent);
    observed.endings = [...chart.querySelectorAll(".annotation-text")].map((t) => t.textContent);
    observed.before = lines();
    choose(); await pause(300);
    observed.hidden = lines();
    choose(); await pause(300);
    observed.shown = lines();
    const range = () => chart.layout.xaxis.range.slice();
    observed.range = range();
    await Plotly.relayout(chart, { "xaxis.range": [0, 0.5] });
    observed.zoomed = range();
    choose(); await pause(300); choose(); await pause(300);
    observed.kept = range();
    Plotly.Fx.hover(chart, [{ curveNumber: 0, pointNumber: 1 }]); await pause(300);
    observed.hover = chart.querySelectorAll("g.hovertext").length;
    for (const fold of section.querySelectorAll("details")) fold.open = true;
    await until(() => section.querySelectorAll("details table").length === 2);
    observed.rows = section.querySelectorAll("details table tbody tr").length;
    observed.setup = section.querySelector(".setup").textContent.includes("torch");
    observed.background = getComputedStyle(document.body).backgroundColor;
    observed.ink = getComputedStyle(document.body).color;
    observed.width = document.documentElement.scrollWidth;
    observed.window = window.innerWidth;
    observed.chartwidth = chart.querySelector("svg.main-svg").getBoundingClientRect().right;
  } catch (error) { observed.error = String(error); }
  const node = document.createElement("pre");
  node.id = "probe"; node.textContent = JSON.stringify(observed);
  document.body.append(node);
})();
</script>
"""


def browse(path, *options):
    """Return the DOM after scripts have run, and the messages of the console."""
    result = subprocess.run(
        [
            BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--hide-scrollbars", "--no-first-run", "--enable-logging=stderr",
            "--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=20000",
            f"--user-data-dir={path.parent / 'profile'}", "--dump-dom", *options, path.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    console = [line for line in result.stderr.splitlines() if "CONSOLE" in line]
    return result.stdout, console


@pytest.fixture(scope="module")
def probed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    results.make(folder / "results", "transition", "gradients")
    text = page.write(folder / "results").read_text()
    path = folder / "page.html"
    path.write_text(text.replace("</body>", PROBE + "</body>"))
    return path


def probe(path, *options):
    dom, console = browse(path, *options)
    observed = re.search(r'<pre id="probe">(.*?)</pre>', dom, re.S)
    assert observed, dom[-2000:]
    values = json.loads(observed[1].replace("&amp;", "&").replace("&gt;", ">"))
    assert "error" not in values, values["error"]
    return values, console


def test_charts_can_be_zoomed_pointed_at_and_chosen_from_without_errors(probed):
    observed, console = probe(probed, "--window-size=1400,1000")
    assert "error" not in observed, observed
    assert console == []
    assert observed["ready"] == "yes"
    assert observed["sections"] == 2
    assert (
        observed["drawn"] == observed["charts"] == 9
    )  # four panels for each law, and one for both
    assert observed["claims"] == len(observed["verdicts"]) == len(transition.CLAIMS)
    assert set(observed["verdicts"]) <= {"holds", "does not hold", "undecided"}
    assert observed["squares"] == observed["all"]  # one picture of all verdicts
    assert observed["target"].startswith(observed["verdicts"][3])
    assert observed["legends"] == observed["curves"]
    assert observed["endings"] == ["8 were trained"]
    assert all(re.fullmatch(r"[−-]?[\d.,]+", tick) for tick in observed["ticks"]), observed["ticks"]
    assert observed["before"] == observed["shown"]
    less = [a - b for a, b in zip(observed["before"], observed["hidden"], strict=True)]
    # The panel against p comes first and has other curves.
    assert less == [0] + [1] * 8
    assert observed["zoomed"] == [0, 0.5] != observed["range"]
    assert observed["kept"] == observed["zoomed"]  # choosing curves does not undo a zoom
    assert observed["hover"] == 1
    assert observed["rows"] > 100
    assert observed["setup"]


def test_it_fits_a_phone(probed):
    observed, console = probe(probed, "--window-size=390,844")
    assert console == []
    assert observed["window"] <= 500
    assert observed["width"] <= observed["window"]
    assert observed["chartwidth"] <= observed["window"]


def brightness(colour):
    return sum(int(v) for v in re.findall(r"\d+", colour)[:3])


def test_it_is_dark_where_the_reader_wants_it_dark(probed):
    light, _ = probe(probed, "--blink-settings=preferredColorScheme=1")
    dark, console = probe(probed, "--blink-settings=preferredColorScheme=0")
    assert console == []
    assert brightness(light["background"]) > 600 > 200 > brightness(dark["background"])
    assert brightness(light["ink"]) < 200 < 600 < brightness(dark["ink"])


def test_an_error_on_the_console_would_be_seen(tmp_path):
    path = tmp_path / "broken.html"
    path.write_text("<script>undefinedFunction()</script>")
    _, console = browse(path)
    assert any("undefinedFunction" in line for line in console)
