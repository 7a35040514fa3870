"""One ONNX file goes from raw columns to the prediction."""

from __future__ import annotations

import json

import numpy as np
import pytest
from estimators.problems import fitted, mixed_table, regressor

from embens.estimators.tables import from_frame


class TestOnnx:
    def run(self, model, X, path):
        onnxruntime = pytest.importorskip("onnxruntime")
        model.to_onnx(path)
        session = onnxruntime.InferenceSession(path)
        table = from_frame(X)
        feed = {"numbers": table.block(model.preprocessing_.numeric, model.preprocessing_.parts)}
        if model.preprocessing_.categorical:
            feed["codes"] = model.preprocessing_.encode(table)[1].numpy()
        return session, session.run(None, feed)

    @pytest.mark.parametrize("family", ["batch_ensemble", "independent"])
    def test_one_file_goes_from_raw_columns_to_probabilities(self, family, tmp_path):
        model, X, _ = fitted("classifier", family)
        session, (found,) = self.run(model, X, tmp_path / "model.onnx")
        np.testing.assert_allclose(found, model.predict_proba(X), atol=1e-5)
        notes = session.get_modelmeta().custom_metadata_map
        assert json.loads(notes["classes"]) == [model.classes_.tolist()]
        assert json.loads(notes["numeric"]) == ["size", "time"]

    def test_numbers_alone_need_no_codes_and_any_number_of_rows_works(self, tmp_path):
        X, target = mixed_table(100)
        X = X[["size", "time"]].copy()
        X.loc[3, "size"] = -1e300  # further than float32 can hold
        model = regressor("last_layer_dropout", max_epochs=3).fit(X, target)
        _, (mean, std) = self.run(model, X, tmp_path / "model.onnx")
        expected = model.predict(X, return_std=True)
        np.testing.assert_allclose(mean[:, 0], expected[0], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(std[:, 0], expected[1], rtol=1e-5)
