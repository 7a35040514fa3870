"""Cross-fitting: folds, groups of members, out-of-fold calibration."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tabular.problems import classes_of, classifier, mixed_table, regressor

from embens import EmbeddedEnsemble
from embens.tabular import groups, load
from embens.tabular.groups import assign_folds


def test_folds_have_equal_sizes_and_nearly_equal_classes():
    strata = np.array([0] * 50 + [1] * 27 + [2] * 3)
    folds = assign_folds(80, 4, strata, seed=0).numpy()
    assert np.bincount(folds).tolist() == [20, 20, 20, 20]
    for stratum in range(3):
        sizes = np.bincount(folds[strata == stratum], minlength=4)
        assert sizes.max() - sizes.min() <= 1
    numbers = assign_folds(10, 4, None, seed=0)
    assert sorted(np.bincount(numbers).tolist()) == [2, 2, 3, 3]
    assert not torch.equal(numbers, assign_folds(10, 4, None, seed=1))


@pytest.mark.parametrize("make", [classifier, regressor])
class TestGroups:
    def fit(self, make, **changes):
        X, target = mixed_table()
        y = target
        if make is classifier:
            y = classes_of(target)
        return X, y, make(folds=2, **changes).fit(X, y)

    def test_all_rows_train_and_calibrate(self, make, monkeypatch):
        parts = []
        train = groups.train

        def record(ensemble, prepared, sizes, **options):
            parts.append(prepared)
            return train(ensemble, prepared, sizes, **options)

        monkeypatch.setattr(groups, "train", record)
        X, _, model = self.fit(make, max_epochs=2)
        assert [len(part.train) for part in parts] == [120, 120]
        assert [len(part.validation) for part in parts] == [120, 120]
        held_out = torch.cat([part.validation.numbers for part in parts])
        assert len(held_out.unique(dim=0)) == len(X)  # every row is held out once
        assert len(model.head_.scores) == len(X)

    def test_scores_are_those_of_members_that_have_not_seen_the_row(self, make):
        X, y, model = self.fit(make, max_epochs=2)
        fitted = model.fitted_
        head = fitted.head
        with torch.no_grad():
            from embens.tabular.frames import from_frame

            inputs = fitted.encoder(*fitted.preprocessing.encode(from_frame(X)))
            outputs = fitted.ensemble(inputs)
        target = head.pack(head.values(head.read(y)), torch.ones(len(X)).double(), torch.float32)
        per_group = [head.with_scores(part, target).scores for part in outputs.split(2)]
        is_first = torch.isclose(fitted.head.scores, per_group[0]).all(1)
        is_second = torch.isclose(fitted.head.scores, per_group[1]).all(1)
        assert bool((is_first | is_second).all())
        assert int(is_first.sum()) == pytest.approx(120, abs=2)

    def test_predictions_are_those_of_all_groups(self, make, tmp_path):
        X, _, model = self.fit(make, max_epochs=2)
        assert model.ensemble_.members == model.sizes_.members == len(model.members_) == 4
        assert len(model.held_out_["members"]) == 4
        assert len(model.history_) == 2
        members = model.predict_members(X)
        mean = model.predict(X) if make is regressor else model.predict_proba(X)
        if make is regressor:
            members = members[0]
        np.testing.assert_allclose(members.mean(0), mean, rtol=1e-5, atol=1e-6)
        model.save(tmp_path / "model")
        loaded = load(tmp_path / "model")
        np.testing.assert_array_equal(loaded.predict(X), model.predict(X))
        member = model.ensemble_.member(3)
        assert isinstance(member, torch.nn.Sequential)
        with pytest.raises(IndexError, match="from 0 to 3"):
            model.ensemble_.member(4)
        assert "members" in model.summary()

    def test_the_same_random_state_gives_the_same_model_and_the_groups_differ(self, make):
        X, _, first = self.fit(make, max_epochs=2)
        _, _, second = self.fit(make, max_epochs=2)
        np.testing.assert_array_equal(first.predict(X), second.predict(X))
        weights = [next(group.parameters()) for group in first.ensemble_.groups]
        assert not torch.equal(*weights)

    def test_a_warm_start_continues_all_groups(self, make):
        X, y, model = self.fit(make, max_epochs=2, warm_start=True)
        ensembles = list(model.ensemble_.groups)
        before = model.held_out_["ensemble"]
        model.set_params(max_epochs=10).fit(X, y)

        assert list(model.ensemble_.groups) == ensembles
        assert model.held_out_["ensemble"] < before
        with pytest.raises(ValueError, match="folds cannot become 1"):
            model.set_params(folds=1).fit(X, y)

    def test_a_warm_start_without_a_seed_warns_that_held_out_rows_differ(self, make):
        X, y, model = self.fit(make, max_epochs=1, warm_start=True, random_state=None)

        with pytest.warns(UserWarning, match="other held-out rows.*integer as random_state"):
            model.fit(X, y)

    @pytest.mark.parametrize("index", [-1, 4])
    def test_a_member_that_does_not_exist_is_refused(self, make, index):
        _, _, model = self.fit(make, max_epochs=1, members=4)

        with pytest.raises(IndexError, match="from 0 to 3"):
            model.ensemble_.member(index)

    def test_tiny_tables_have_no_folds(self, make):
        X, target = mixed_table(40)
        y = target if make is regressor else classes_of(target)
        assert make(folds=2, max_epochs=1).fit(X, y).held_out_ is None


def test_folds_can_follow_only_the_same_number_of_folds():
    X, target = mixed_table()
    model = regressor(max_epochs=1, warm_start=True).fit(X, target)
    with pytest.raises(ValueError, match="folds must stay 1"):
        model.set_params(folds=2).fit(X, target)


def test_a_skewed_target_is_transformed_in_all_groups():
    X, target = mixed_table()
    model = regressor(folds=2, tune=True, max_epochs=4).fit(X, np.exp(3 * target))
    assert model.head_.transform in ("none", "log", "quantile")
    assert np.isfinite(model.predict(X)).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"folds": 3}, "folds must divide the number of members, got folds=3 and 4 members"),
        ({"folds": 0}, "folds must be a positive integer"),
        ({"folds": 2, "time_limit": 5}, "time_limit needs one split of the rows"),
        ({"folds": 2, "refit": True}, "refit needs one split of the rows"),
        ({"folds": 2, "keep_members": 2}, "keep_members needs one split of the rows"),
        ({"folds": 2, "validation_fraction": 0.3}, "validation_fraction needs one split"),
    ],
)
def test_arguments_that_contradict_each_other_are_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        classifier(**arguments).fit([[0.0], [1.0]], [0, 1])


@pytest.mark.parametrize("make", [classifier, regressor])
class TestDefaultFolds:
    def fit(self, make, rows=100, **changes):
        X, target = mixed_table(rows)
        y = target if make is regressor else classes_of(target)
        return X, y, make(**{"members": 8, "width": 8, "max_epochs": 2, **changes}).fit(X, y)

    def test_members_are_cross_fitted_in_four_groups(self, make):
        X, _, model = self.fit(make)
        assert len(model.ensemble_.groups) == 4
        assert len(model.head_.scores) == len(X)

    @pytest.mark.parametrize(
        "changes",
        [
            {"members": 6},
            {"members": 4},
            {"time_limit": 60.0},
            {"refit": True},
            {"keep_members": 4},
            {"validation_fraction": 0.3},
            {"rows": 49},
        ],
    )
    def test_one_split_where_folds_are_impossible(self, make, changes):
        _, _, model = self.fit(make, **changes)
        assert isinstance(model.ensemble_, EmbeddedEnsemble)

    @pytest.mark.parametrize("rows", [1, 3, 60])
    def test_partial_fit_continues_the_groups_with_any_number_of_rows(self, make, rows):
        X, y, model = self.fit(make)
        before = model.predict(X[:5])
        model.partial_fit(X[:rows], y[:rows])
        assert len(model.ensemble_.groups) == 4
        if make is regressor:
            assert not np.array_equal(model.predict(X[:5]), before)

    def test_partial_fit_continues_one_split(self, make):
        X, y, model = self.fit(make, rows=40)
        model.partial_fit(X, y)
        assert isinstance(model.ensemble_, EmbeddedEnsemble)
        model = model.partial_fit(*self.fit(make)[:2])
        assert isinstance(model.ensemble_, EmbeddedEnsemble)


def test_an_interval_is_the_mean_of_the_intervals_of_the_groups():
    X, target = mixed_table()
    target = target + 100.0  # far from 0, so that no bound is active
    model = regressor(folds=2, max_epochs=3).fit(X, target)
    quantile = np.sort(model.conformal_scores().squeeze(1).numpy())[int(np.ceil(0.8 * 241)) - 1]
    mean, std = model.predict_mixture(X)
    ends = []
    for part in (slice(0, len(mean) // 2), slice(len(mean) // 2, None)):
        centre = mean[part].mean(0)
        spread = np.sqrt((std[part] ** 2).mean(0) + mean[part].var(0))
        ends.append(np.stack([centre - quantile * spread, centre + quantile * spread], 1))

    np.testing.assert_allclose(model.predict_interval(X, 0.8), np.mean(ends, 0), rtol=1e-5)


class TestWideTables:
    """Columns that are selected by the target of held-out rows would make their losses too low."""

    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 300))
    y = rng.integers(0, 2, 200)

    def test_they_have_one_split_and_honest_held_out_losses(self):
        with pytest.warns(UserWarning, match="Columns ignored"):
            model = classifier(members=8, max_columns=20).fit(self.X, self.y)
        assert isinstance(model.ensemble_, EmbeddedEnsemble)
        # The target is noise: no model is better than log 2 by more than chance.
        assert model.held_out_["ensemble"] > 0.67

    def test_folds_are_refused_unless_all_columns_are_used(self):
        small = {"members": 4, "width": 8, "max_epochs": 1}
        with pytest.raises(ValueError, match=r"300 numeric columns and 200 rows.*max_columns=300"):
            classifier(folds=2, **small).fit(self.X, self.y)
        model = classifier(folds=2, max_columns=300, **small).fit(self.X, self.y)
        assert len(model.ensemble_.groups) == 2


def test_few_calibration_rows_are_warned_of():
    X, target = mixed_table(80)
    model = regressor(folds=2, max_epochs=1).fit(X, target)
    with pytest.warns(UserWarning, match=r"Only 80 held-out rows.*Fit with more rows\.$"):
        model.predict_interval(X)
    X, target = mixed_table(200)
    model = regressor(max_epochs=1).fit(X, target)
    with pytest.warns(UserWarning, match="larger validation_fraction, or folds=4"):
        model.predict_interval(X)


def test_intervals_of_a_constant_target_have_no_width():
    X, _ = mixed_table()
    model = regressor(folds=4, members=8, max_epochs=2).fit(X, np.full(len(X), 3.0))
    assert (model.predict_interval(X, 0.9) == 3).all()
