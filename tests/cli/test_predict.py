"""``embens predict`` names the column that a file lacks."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from estimators.problems import mixed_table, regressor

from embens.cli import main
from embens.estimators import pipeline


def test_predict_names_the_column_that_is_missing(tmp_path, capsys):
    model = regressor(max_epochs=1).fit(pd.DataFrame({"a": np.arange(60.0)}), np.arange(60.0))
    model.save(tmp_path / "model")
    mixed_table(20)[0].to_parquet(tmp_path / "table.parquet")
    with pytest.raises(SystemExit):
        main(["predict", str(tmp_path / "model"), str(tmp_path / "table.parquet")])
    assert "no column 'a', which the model needs" in capsys.readouterr().err


def test_rows_keep_their_ids_as_written_and_parts_give_what_the_whole_file_does(
    tmp_path, monkeypatch
):
    X, target = mixed_table(120)
    model = regressor(max_epochs=2).fit(X, target)
    model.save(tmp_path / "model")
    ids = [f"00{i % 7}" for i in range(119)] + ["NA"]
    X.assign(key=ids).to_csv(tmp_path / "rows.csv", index=False)
    command = ["predict", str(tmp_path / "model"), str(tmp_path / "rows.csv"), "--out"]
    assert main([*command, str(tmp_path / "whole.csv")]) == 0
    monkeypatch.setattr(pipeline, "BLOCK", 25)
    assert main([*command, str(tmp_path / "parts.parquet"), "--id", "key"]) == 0
    whole = pd.read_csv(tmp_path / "whole.csv", dtype={"key": str}, keep_default_na=False)
    parts = pd.read_parquet(tmp_path / "parts.parquet")
    assert whole["key"].tolist() == parts["key"].tolist() == ids
    np.testing.assert_allclose(parts["prediction"], whole["prediction"], rtol=1e-5)
    np.testing.assert_allclose(parts["prediction"], model.predict(X), rtol=1e-5)
