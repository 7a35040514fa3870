"""The first layer by tables is the product with the encoded row."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from tabular.problems import mixed_table
from torch.nn.functional import linear

from embens.tabular.columns import learn_columns
from embens.tabular.defaults import Arguments
from embens.tabular.first_layer import EncodedFirstLayer, FirstLayer
from embens.tabular.frames import from_frame
from embens.tabular.perceptron import Encoder

NEW = [0.0, -1e300, 1e300, np.nan, -5.0, 5.0, 1.0, 2.0]


def check(frame, rows, arguments, *, with_bins=True):
    """Compare both first layers on rows of a table, with random weights."""
    preprocessing = learn_columns(from_frame(frame), arguments, None, None)
    encoder = Encoder(preprocessing, bins=with_bins)
    numbers, codes = preprocessing.encode(from_frame(rows))
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(7, encoder.inputs, generator=generator)
    bias = torch.randn(7, generator=generator)
    expected = linear(encoder(numbers, codes), weight, bias)
    result = FirstLayer(encoder, weight, bias)(numbers, codes)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
    layer = EncodedFirstLayer(encoder, [torch.nn.Identity()], [weight], [bias])
    torch.testing.assert_close(layer(numbers, codes), expected)


@pytest.mark.parametrize("with_bins", [True, False])
def test_rows_with_numbers_text_and_missing_values(with_bins):
    X, _ = mixed_table()
    check(X, X, Arguments(), with_bins=with_bins)


@pytest.mark.parametrize("bins", ["auto", 1, 3, 100])
def test_numbers_outside_the_fitted_range_and_on_bin_edges(bins):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "normal": rng.normal(size=200),
            "few": rng.integers(0, 3, 200).astype(float),
            "missing": np.where(np.arange(200) % 5 == 0, np.nan, rng.normal(size=200)),
            "constant": 1.0,
        }
    )
    values = np.concatenate([NEW, frame["normal"], frame["few"]])
    rows = {name: np.roll(values, shift) for shift, name in enumerate(frame)}
    check(frame, pd.DataFrame(rows), Arguments(bins=bins))


def test_a_table_without_numbers_has_no_bins():
    frame = pd.DataFrame({"colour": list("rgb") * 20, "constant": 1.0})
    preprocessing = learn_columns(from_frame(frame), Arguments(), None, None)
    assert not FirstLayer.has_bins(Encoder(preprocessing))
