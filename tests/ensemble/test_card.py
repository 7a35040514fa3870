"""A folder with an ensemble and its card."""

from __future__ import annotations

import re

import pytest
import torch
from embens.ensemble.storage import CARD, FILE
from torch import nn

import embens


def reference(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3)
    )


@pytest.mark.parametrize("by", ["modulations", "low_rank", "head"])
def test_the_members_numbers_are_kept_and_join_the_trained_network_again(by, tmp_path):
    net, x = reference(), torch.randn(30, 4)
    ensemble = embens.adapt(net, 3, by=by, trunk="frozen")
    embens.fit(ensemble, (x, torch.arange(30) % 3), epochs=2, lr=0.1, progress=False)
    ensemble.save_pretrained(tmp_path / "new" / "folder", base="somebody/network: v2")
    card = (tmp_path / "new" / "folder" / CARD).read_text()
    assert 'base_model: "somebody/network: v2"\n' in card  # a string in YAML, whatever is in it
    folder = tmp_path / "new" / "folder"
    assert {path.name for path in folder.iterdir()} == {FILE, CARD}
    other_head = reference()
    nn.init.zeros_(other_head[4].weight)  # members have heads of their own
    again = embens.load(folder, other_head)
    torch.testing.assert_close(again(x), ensemble(x))
    ensemble.save(tmp_path / "whole")
    if by == "head":
        assert (folder / FILE).stat().st_size < 0.5 * (tmp_path / "whole").stat().st_size
    with pytest.raises(Exception, match="the reference has other weights"):
        embens.load(folder, reference(1))


def test_the_card_says_what_it_is_and_its_code_runs(tmp_path, monkeypatch):
    net = reference()
    ensemble = embens.adapt(net, 3, by="modulations", trunk="trained")
    ensemble.save_pretrained(tmp_path / "mine", results={"log loss": 0.12345})
    text = (tmp_path / "mine" / CARD).read_text()
    assert text.startswith("---\nlibrary_name: embens\ntags: [ensemble, uncertainty, adapt]\n---\n")
    for part in ("# 3 members in one Sequential\n", "| log loss | 0.12345 |", "own '4'"):
        assert part in text
    own, shared = (
        sum(p.numel() for p in parameters())
        for parameters in (ensemble.individual_parameters, ensemble.shared_parameters)
    )
    assert f"| {own:,} |" in text
    assert f"| {shared:,}, in the file |" in text
    assert "Normal(mean=1.0, std=" in text
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL).group(1)
    monkeypatch.chdir(tmp_path)
    names = {"inputs": torch.ones(2, 4), "net": net, "folder": "mine"}
    exec(code.replace("reference = ...", "reference = net"), names)
    expected = embens.predict(ensemble, torch.ones(2, 4)).probabilities
    torch.testing.assert_close(names["prediction"].probabilities, expected)
