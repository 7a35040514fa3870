"""Save and load, joblib and ONNX reproduce the fitted estimator."""

from __future__ import annotations

import json

import joblib
import numpy as np
import pytest
from tabular.problems import classes_of, classifier, fitted, mixed_table, regressor

from embens import laws
from embens.files import Refused, read_tree, write_tree
from embens.tabular import EmbeddedEnsembleClassifier, EmbeddedEnsembleRegressor, load
from embens.tabular.defaults import FAMILIES
from embens.tabular.frames import from_frame
from embens.tabular.storage import FORMAT


def predictions(model, X):
    if isinstance(model, EmbeddedEnsembleClassifier):
        return model.predict_proba(X)
    return np.column_stack([*model.predict(X, return_std=True), model.predict_interval(X)])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_learns_and_is_the_same_after_save_and_load(family, tmp_path):
    model, X, y = fitted("classifier", family)
    assert model.score(X, y) > 0.6
    model.save(tmp_path / "model")
    again = load(tmp_path / "model")
    np.testing.assert_array_equal(again.predict_proba(X), model.predict_proba(X))
    assert again.get_params() == model.get_params()


def test_a_regressor_is_the_same_after_save_and_load_with_intervals(tmp_path):
    model, X, _ = fitted("regressor")
    model.save(tmp_path / "model")
    again = EmbeddedEnsembleRegressor.load(tmp_path / "model")

    np.testing.assert_array_equal(predictions(again, X), predictions(model, X))
    assert again.history_.equals(model.history_)
    assert again.members_.equals(model.members_)
    with pytest.raises(ValueError, match="holds an EmbeddedEnsembleRegressor"):
        EmbeddedEnsembleClassifier.load(tmp_path / "model")


def test_label_types_laws_and_masks_are_saved(tmp_path):
    X, target = mixed_table(80)
    for y in (np.where(target > 0, 3, -7), target > 0, classes_of(target).astype(object)):
        model = classifier("mc_dropout", law=laws.Bernoulli(0.8), max_epochs=2).fit(X, y)
        model.save(tmp_path / "model")
        again = load(tmp_path / "model")
        assert again.predict(X).dtype == model.predict(X).dtype
        np.testing.assert_array_equal(again.predict(X), model.predict(X))
        assert again.law == laws.Bernoulli(0.8)


def test_several_labels_and_a_fit_without_held_out_rows_are_saved(tmp_path):
    X, target = mixed_table(40)
    y = np.stack([target > 0, target > 1], 1).astype(int)
    model = classifier(max_epochs=2).fit(X, y)
    model.save(tmp_path / "model")
    np.testing.assert_array_equal(load(tmp_path / "model").predict_proba(X), model.predict_proba(X))
    numbers = regressor(max_epochs=2).fit(X, target)
    numbers.save(tmp_path / "model")
    again = load(tmp_path / "model")
    np.testing.assert_array_equal(again.predict(X), numbers.predict(X))
    with pytest.raises(ValueError, match="held out none"):
        again.predict_interval(X)


def test_a_loaded_model_continues_with_a_warm_start(tmp_path):
    X, target = mixed_table(120)
    model = regressor(max_epochs=3, warm_start=True).fit(X, target)
    model.save(tmp_path / "model")
    again = load(tmp_path / "model")
    np.testing.assert_array_equal(again.fit(X, target).predict(X), model.fit(X, target).predict(X))


def test_other_files_are_errors(tmp_path):
    (tmp_path / "text").write_text("nothing")
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        load(tmp_path / "text")
    with pytest.raises(FileNotFoundError, match="there is no file"):
        load(tmp_path / "nowhere")
    fitted()[0].ensemble_.save(tmp_path / "ensemble")
    with pytest.raises(ValueError, match="is an 'embens ensemble' file; expected"):
        load(tmp_path / "ensemble")
    with pytest.raises(FileNotFoundError, match="folder"):
        fitted()[0].save(tmp_path / "no" / "folder")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h["sizes"].update(predict=1), "sizes has an unknown field 'predict'"),
        (lambda h: h["head"].update(predict=1), "head has an unknown field 'predict'"),
        (lambda h: h["sizes"].update(width=10**6), "weights do not fit into the"),
        (lambda h: h["arguments"].update(surprise=1), "surprise"),
        (lambda h: h.pop("ensembles"), "has no field 'ensembles'"),
        (lambda h: h.update(ensembles=[h["ensembles"][0][:-1]]), "not a whole safetensors file"),
        (lambda h: h.update({"class": "object"}), "holds an object"),
        (lambda h: h.update(columns=None), "columns must be a dictionary, got None"),
    ],
)
def test_a_manipulated_header_is_an_error(change, message, tmp_path):
    fitted()[0].save(tmp_path / "model")
    tree = read_tree(tmp_path / "model", FORMAT)
    change(tree)
    write_tree(tmp_path / "model", FORMAT, tree)
    with pytest.raises(Refused, match=message):
        load(tmp_path / "model")


def test_a_flipped_bit_is_detected(tmp_path):
    path, model = tmp_path / "model", fitted()[0]
    model.save(path)
    content, places, refused = path.read_bytes(), 0, 0
    for place in range(0, len(content), len(content) // 60):
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        path.write_bytes(changed)
        places += 1
        try:
            again = load(path)
        except Refused:
            refused += 1
        else:  # the last of many digits of a number
            assert repr(vars(again.run_)) == repr(vars(model.run_))  # NaN is not equal to NaN

    assert refused >= places - 3


@pytest.mark.parametrize("kind", ["classifier", "regressor"])
def test_joblib_reproduces_the_estimator(kind, tmp_path):
    model, X, _ = fitted(kind)
    joblib.dump(model, tmp_path / "model")
    again = joblib.load(tmp_path / "model")
    np.testing.assert_array_equal(predictions(again, X), predictions(model, X))


@pytest.mark.parametrize("several", [False, True])
def test_class_weights_keep_the_types_of_their_keys(several, tmp_path):
    X, target = mixed_table(80)
    y, weights = np.where(target > 0, 3, -7), {3: 2.0, -7: 0.5}
    if several:
        y, weights = np.stack([y, target > 1], 1), [weights, {0: 1.0, 1: 3.0}]
    model = classifier(class_weight=weights, max_epochs=1).fit(X, y)
    model.save(tmp_path / "model")
    again = load(tmp_path / "model")

    assert again.class_weight == weights
    np.testing.assert_array_equal(again.fit(X, y).predict(X), model.predict(X))


class TestOnnx:
    def run(self, model, X, path):
        onnxruntime = pytest.importorskip("onnxruntime")
        model.to_onnx(path)
        session = onnxruntime.InferenceSession(path)
        table = from_frame(X)
        columns = [table.numbers(c.position, c.part) for c in model.preprocessing_.numeric]
        return session, session.run(None, {"numbers": np.column_stack(columns)})

    @pytest.mark.parametrize("family", ["batch_ensemble", "mc_dropout", "independent"])
    def test_the_file_maps_raw_numbers_to_probabilities(self, family, tmp_path):
        X, target = mixed_table(100)
        X = X[["size", "time"]]
        model = classifier(family, max_epochs=3).fit(X, classes_of(target))
        session, (probabilities,) = self.run(model, X, tmp_path / "model.onnx")
        np.testing.assert_allclose(probabilities, model.predict_proba(X), atol=1e-5)
        metadata = session.get_modelmeta().custom_metadata_map
        assert json.loads(metadata["classes"]) == [model.classes_.tolist()]
        assert json.loads(metadata["numeric"]) == ["size", "time"]

    def test_categorical_columns_are_an_error_that_names_them(self, tmp_path):
        with pytest.raises(ValueError, match=r"'colour'.* are categorical"):
            fitted()[0].to_onnx(tmp_path / "model.onnx")

    def test_extreme_numbers_in_any_number_of_rows_are_predicted(self, tmp_path):
        X, target = mixed_table(100)
        X = X[["size", "time"]].copy()
        X.loc[3, "size"] = -1e300  # further than float32 can hold
        model = regressor("last_layer_dropout", max_epochs=3).fit(X, target)
        _, (mean, std) = self.run(model, X, tmp_path / "model.onnx")
        expected = model.predict(X, return_std=True)

        np.testing.assert_allclose(mean[:, 0], expected[0], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(std[:, 0], expected[1], rtol=1e-5)
