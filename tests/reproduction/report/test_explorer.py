"""The explorer shows the theory's numbers, between the points of its grid too."""

from __future__ import annotations

import html
import json
import re

import pytest
import torch
from pages import NEEDS_CHROMIUM, in_chromium

from reproduction.report import explorer

FAMILY = "BatchEnsemble, signs with mean p"
CLICKS = """
<script>
addEventListener("load", () => setTimeout(() => {
  const seen = [document.documentElement.dataset.numbers];
  for (const [id, value] of [["p", 0.93], ["members", 3], ["width", 9]]) {
    const dial = document.getElementById(id);
    dial.value = value;
    dial.dispatchEvent(new Event("input", { bubbles: true }));
    seen.push(document.documentElement.dataset.numbers);
  }
  const element = document.createElement("pre");
  element.id = "seen"; element.textContent = JSON.stringify(seen.map((s) => JSON.parse(s)));
  document.body.append(element);
}, 1500));
</script>
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Return a page with few positions of the dials, so that it is made in a moment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(explorer, "FAMILIES", (FAMILY,))
        patch.setattr(explorer, "ACTIVATIONS", {"relu": explorer.ACTIVATIONS["relu"]})
        patch.setattr(explorer, "DEPTHS", (2,))
        return explorer.write(tmp_path_factory.mktemp("explorer") / "page.html")


def theory(p):
    generator = torch.Generator().manual_seed(4)
    normals = torch.randn(1 + explorer.DRAWN_MEMBERS, explorer.POINTS, generator=generator).double()
    return explorer.compute(explorer.build_ensemble(FAMILY, "relu", 2, p), normals)


def test_it_loads_nothing_from_elsewhere(page):
    assert not re.search(r"(src|href)\s*=|@import|https?://", page.read_text())


def test_its_numbers_are_those_of_the_theory():
    result = theory(0.0)
    assert result["coupling"] == pytest.approx(0, abs=1e-12)
    assert result["M8"]["gamma"] == pytest.approx(8)
    assert result["M8"]["correlation"] == pytest.approx(0, abs=1e-9)
    # independent members: the variance of a mean of eight is an eighth
    member, mean = (torch.tensor(result["M8"][k]) for k in ("member", "ensemble"))
    assert torch.allclose(mean, member / 8**0.5, atol=1e-6)
    assert theory(1.0)["M8"]["error"] == pytest.approx(theory(1.0)["M8"]["ensemble_error"])


def test_numbers_do_not_depend_on_what_is_drawn():
    couplings = set()
    for seed in range(8):  # of two members, whose signs are often the same, some were one model
        torch.manual_seed(seed)
        couplings.add(round(theory(0.9925)["coupling"], 9))
    assert len(couplings) == 1


@NEEDS_CHROMIUM
@pytest.mark.parametrize("p", [0.05, 0.43, 0.79, 0.955, 0.9925])
def test_the_page_interpolates_to_half_a_per_cent(page, tmp_path, p):
    text = in_chromium(f"{page.as_uri()}#f=0&a=0&d=0&m=2&p={p}", tmp_path)
    shown = json.loads(html.unescape(re.search(r'data-numbers="(.*?)"', text)[1]))["now"]
    truth = theory(p)

    def close(ours, theirs):
        ours, theirs = torch.tensor(ours).double(), torch.tensor(theirs).double()
        assert (ours - theirs).abs().max() <= 0.005 * max(1.0, float(theirs.abs().max()))

    for name in ("coupling", "width", "kernels"):
        close(shown[name], truth[name])
    for name in truth["M8"]:
        close(shown["after"][name], truth["M8"][name])


@NEEDS_CHROMIUM
def test_turning_a_dial_changes_the_numbers(page, tmp_path):
    copy = tmp_path / "page.html"
    copy.write_text(page.read_text().replace("</main>", CLICKS + "</main>"))
    text = in_chromium(copy.as_uri(), tmp_path / "profile")
    seen = json.loads(html.unescape(re.search(r'<pre id="seen">(.*?)</pre>', text)[1]))
    start, shifted, many, wide = seen

    assert start["dials"]["p"] == 0
    assert shifted["now"]["coupling"] > start["now"]["coupling"]
    assert many["dials"]["m"] == 32
    assert many["now"]["after"]["gamma"] != shifted["now"]["after"]["gamma"]
    assert wide["dials"]["width"] == 512
