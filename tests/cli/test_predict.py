"""``embens predict`` names the column that a file lacks."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from estimators.problems import mixed_table, regressor

from embens.cli import main


def test_predict_names_the_column_that_is_missing(tmp_path, capsys):
    model = regressor(max_epochs=1).fit(pd.DataFrame({"a": np.arange(60.0)}), np.arange(60.0))
    model.save(tmp_path / "model")
    mixed_table(20)[0].to_parquet(tmp_path / "table.parquet")
    with pytest.raises(SystemExit):
        main(["predict", str(tmp_path / "model"), str(tmp_path / "table.parquet")])
    assert "no column 'a', which the model needs" in capsys.readouterr().err
