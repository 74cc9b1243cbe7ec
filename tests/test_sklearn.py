"""`SampledSoftmaxClassifier` under scikit-learn's own checks, and in its tools."""

from __future__ import annotations

import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

sklearn = pytest.importorskip("sklearn")

from scipy import sparse  # noqa: E402
from sklearn.base import clone  # noqa: E402
from sklearn.datasets import make_blobs  # noqa: E402
from sklearn.linear_model import LogisticRegression  # noqa: E402
from sklearn.model_selection import GridSearchCV, cross_val_score  # noqa: E402
from sklearn.pipeline import make_pipeline  # noqa: E402
from sklearn.preprocessing import StandardScaler  # noqa: E402
from sklearn.utils.estimator_checks import parametrize_with_checks  # noqa: E402

from samplex_cuda.sklearn import SampledSoftmaxClassifier  # noqa: E402

# What scikit-learn expects to fail for its own stochastic classifiers: a weight of 2 is not an example seen twice when
# the order of the examples is drawn.
EXPECTED = {
    "check_sample_weight_equivalence_on_dense_data": "examples are drawn in a random order",
    "check_sample_weight_equivalence_on_sparse_data": "examples are drawn in a random order",
}
SAMPLERS = ["uniform", "frequency", "tree", "full"]


@parametrize_with_checks(
    [SampledSoftmaxClassifier(num_samples=4, max_iter=8, batch_size=32, learning_rate=0.5)],
    expected_failed_checks=lambda estimator: EXPECTED,
)
def test_scikit_learn_checks(estimator, check):
    check(estimator)


@pytest.mark.slow
@parametrize_with_checks(
    [SampledSoftmaxClassifier(sampler=name) for name in SAMPLERS], expected_failed_checks=lambda estimator: EXPECTED
)
def test_scikit_learn_checks_of_every_sampler(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def blobs():
    x, y = make_blobs(400, 6, centers=8, cluster_std=1.5, random_state=0)
    names = np.array([f"class {i}" for i in range(8)])
    return StandardScaler().fit_transform(x), names[y]


@pytest.mark.parametrize(
    ("sampler", "loss"),
    [
        *((name, "sampled_softmax") for name in SAMPLERS),
        ("frequency", "negative_sampling"),
        ("tree", "negative_sampling"),
    ],
)
def test_learns_with_every_sampler(blobs, sampler, loss):
    x, y = blobs
    model = SampledSoftmaxClassifier(sampler=sampler, num_samples=4, loss=loss, max_iter=20, random_state=0).fit(x, y)
    assert model.score(x, y) > 0.9
    assert list(model.classes_) == sorted(set(y))
    assert model.n_features_in_ == 6
    probabilities = model.predict_proba(x)
    np.testing.assert_allclose(probabilities.sum(1), 1.0, atol=1e-12)
    np.testing.assert_allclose(np.log(probabilities), model.predict_log_proba(x), atol=1e-9)
    assert np.array_equal(model.classes_[probabilities.argmax(1)], model.predict(x))


def test_the_full_softmax_is_logistic_regression(blobs):
    x, y = blobs
    ours = SampledSoftmaxClassifier(
        sampler="full", alpha=0.01, learning_rate=0.3, max_iter=150, batch_size=400, fit_intercept=False
    ).fit(x, y)
    theirs = LogisticRegression(C=1 / (0.01 * len(y)), max_iter=500, fit_intercept=False).fit(x, y)
    np.testing.assert_allclose(ours.predict_proba(x), theirs.predict_proba(x), atol=0.01)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_sparse_input_gives_the_same_model(blobs, sampler):
    x, y = blobs
    x = np.where(np.abs(x) > 0.7, x, 0.0)
    dense, by_rows = (
        SampledSoftmaxClassifier(sampler=sampler, num_samples=4, max_iter=3, random_state=0).fit(data, y)
        for data in (x, sparse.csr_matrix(x))
    )
    tolerance = 1e-3 if sampler == "tree" else 1e-6  # another way to the principal components
    np.testing.assert_allclose(dense.coef_, by_rows.coef_, atol=tolerance)
    np.testing.assert_allclose(dense.predict_proba(x), by_rows.predict_proba(sparse.csr_array(x)), atol=tolerance)


def test_random_state(blobs):
    x, y = blobs
    make = lambda seed: SampledSoftmaxClassifier(num_samples=3, max_iter=2, random_state=seed).fit(x, y)  # noqa: E731
    assert np.array_equal(make(1).coef_, make(1).coef_)
    assert not np.array_equal(make(1).coef_, make(2).coef_)
    before = torch.get_rng_state()
    make(1)
    assert torch.equal(before, torch.get_rng_state())


def test_warm_start_and_partial_fit(blobs):
    x, y = blobs
    model = SampledSoftmaxClassifier(num_samples=4, max_iter=2, warm_start=True, random_state=0).fit(x, y)
    first, head = model.coef_.copy(), model.head_
    model.fit(x, y)
    assert model.head_ is head
    assert not np.array_equal(first, model.coef_)
    with pytest.raises(ValueError, match="y must hold labels of classes_ only, got 'another'"):
        model.fit(x, np.where(y == y[0], "another", y))
    # Two passes at once, or one and one.
    whole = SampledSoftmaxClassifier(num_samples=4, max_iter=2, random_state=0).fit(x, y)
    parts = SampledSoftmaxClassifier(num_samples=4, random_state=0)
    for _ in range(2):
        parts.partial_fit(x, y, classes=np.unique(y))
    assert np.array_equal(whole.coef_, parts.coef_)
    with pytest.raises(ValueError, match="classes must be those of the first call"):
        parts.partial_fit(x, y, classes=["other"])
    with pytest.raises(ValueError, match="classes must be passed on the first call"):
        clone(parts).partial_fit(x, y)


def test_classes_that_come_later(blobs):
    x, y = blobs
    early = y < "class 4"
    model = SampledSoftmaxClassifier(sampler="frequency", num_samples=4, random_state=0)
    model.partial_fit(x[early], y[early], classes=np.unique(y))
    assert model.predict_proba(x).shape == (400, 8)
    for _ in range(30):
        model.partial_fit(x, y)
    assert model.score(x[~early], y[~early]) > 0.5


def test_sample_weight(blobs):
    x, y = blobs
    only = y < "class 4"
    model = SampledSoftmaxClassifier(num_samples=4, random_state=0).fit(x, y, sample_weight=only.astype(float))
    assert set(model.predict(x[only])) == {f"class {i}" for i in range(4)}
    assert model.score(x[~only], y[~only]) < 0.1  # never seen, only pushed down


def test_pipeline_grid_search_and_cross_validation(blobs):
    x, y = blobs
    pipe = make_pipeline(StandardScaler(), SampledSoftmaxClassifier(num_samples=4, max_iter=10, random_state=0))
    assert cross_val_score(pipe, x, y, cv=3).mean() > 0.85
    grid = {"sampledsoftmaxclassifier__sampler": ["uniform", "frequency"]}
    search = GridSearchCV(pipe, grid, cv=2).fit(x, y)
    assert search.best_score_ > 0.85


def test_pickle_and_clone(blobs):
    x, y = blobs
    model = SampledSoftmaxClassifier(sampler="tree", num_samples=4, max_iter=3, random_state=0).fit(x, y)
    again = pickle.loads(pickle.dumps(model))
    assert np.array_equal(again.predict_proba(x), model.predict_proba(x))
    assert np.array_equal(again.partial_fit(x, y).coef_, model.partial_fit(x, y).coef_)
    fresh = clone(model)
    assert fresh.get_params() == model.get_params()
    assert not hasattr(fresh, "head_")
    assert fresh.set_params(num_samples=9).num_samples == 9


@pytest.mark.parametrize(
    "wrong", [{"sampler": "zipf"}, {"num_samples": 0}, {"learning_rate": 0.0}, {"loss": "hinge"}, {"max_iter": 0}]
)
def test_bad_parameters(blobs, wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"'{name}' parameter of SampledSoftmaxClassifier"):
        SampledSoftmaxClassifier(**wrong).fit(*blobs)


def test_the_package_does_not_import_scikit_learn():
    code = "import sys, samplex_cuda; assert not {'sklearn', 'faiss', 'scipy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
