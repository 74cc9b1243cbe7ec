"""`SampledSoftmaxClassifier`: a linear softmax model for scikit-learn, trained on sampled classes.

Needs the extra `sklearn`. Nothing else of the package imports this module.
"""

from __future__ import annotations

from collections.abc import Iterator
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

try:
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.utils import check_random_state
    from sklearn.utils._param_validation import Interval, StrOptions
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
except ImportError as error:
    raise ImportError(
        "samplex_cuda.sklearn: scikit-learn >= 1.6 must be installed: pip install 'samplex-cuda[sklearn]'"
    ) from error

from samplex_cuda import losses
from samplex_cuda.heads import SampledClassifier
from samplex_cuda.optim import RowAdagrad
from samplex_cuda.rng import Key
from samplex_cuda.samplers import Tree, Uniform, Unigram

__all__ = ["SampledSoftmaxClassifier"]

# Losses over draws that keep no number per example.
_LOSSES = {name for name in losses.names() if "num_examples" not in losses.by_name(name).options()}
_LOSSES = {name for name in _LOSSES if losses.from_name(name).needs.draws}
# Rows that are made dense at a time.
_PREDICT_ROWS = 1024


class SampledSoftmaxClassifier(ClassifierMixin, BaseEstimator):
    """Multinomial logistic regression whose training step costs O(num_samples), for any number of classes.

    Trained by Adagrad on minibatches; only the rows of the classes that were touched are updated. Predictions are exact
    over all classes and deterministic.

    Args:
        sampler: where the other classes of a step come from: "uniform"; "frequency", in proportion to how often they
            occur (plus one); "tree", an adversarial tree fitted to the data (Bamler & Mandt 2020); or "full", all of
            them: no sampling, O(C) a step.
        num_samples: draws per example.
        loss: short name of a loss that draws and keeps nothing per example, such as "sampled_softmax" or
            "negative_sampling" (`samplex_cuda.losses`); not used with sampler "full".
        learning_rate: of Adagrad.
        alpha: strength of the L2 penalty on the rows that a step touches.
        max_iter: passes over the data of `fit`.
        batch_size: examples per step.
        fit_intercept: whether there is a bias per class.
        tree_dim: features that a node of the tree looks at.
        warm_start: `fit` continues from the last solution; the classes must be the same.
        random_state: of the order of examples and the draws.

    Attributes:
        classes_: labels, in the order of the columns of `predict_proba`.
        n_features_in_: number of features.
        n_iter_: passes over the data that the last `fit` made.
        coef_: [C, n_features] float32.
        intercept_: [C] float32.
        head_: the `SampledClassifier` behind it.

    Example:
        >>> import numpy as np
        >>> from samplex_cuda.sklearn import SampledSoftmaxClassifier
        >>> rng = np.random.default_rng(0)
        >>> y = rng.choice(["ant", "bee", "cat"], 300)
        >>> x = rng.normal(size=(300, 2)) + 4 * np.array([{"ant": [0, 1], "bee": [1, 0], "cat": [1, 1]}[k] for k in y])
        >>> model = SampledSoftmaxClassifier(num_samples=5, random_state=0).fit(x, y)
        >>> bool(model.score(x, y) > 0.9), model.predict_proba(x[:2]).shape
        (True, (2, 3))
    """

    classes_: np.ndarray
    head_: SampledClassifier

    _parameter_constraints: dict[str, list[Any]] = {  # noqa: RUF012  scikit-learn reads it from the class
        "sampler": [StrOptions({"uniform", "frequency", "tree", "full"})],
        "num_samples": [Interval(Integral, 1, None, closed="left")],
        "loss": [StrOptions(_LOSSES)],
        "learning_rate": [Interval(Real, 0, None, closed="neither")],
        "alpha": [Interval(Real, 0, None, closed="left")],
        "max_iter": [Interval(Integral, 1, None, closed="left")],
        "batch_size": [Interval(Integral, 1, None, closed="left")],
        "fit_intercept": ["boolean"],
        "tree_dim": [Interval(Integral, 1, None, closed="left")],
        "warm_start": ["boolean"],
        "random_state": ["random_state"],
    }

    def __init__(
        self,
        *,
        sampler: str = "uniform",
        num_samples: int = 64,
        loss: str = "sampled_softmax",
        learning_rate: float = 0.1,
        alpha: float = 0.0,
        max_iter: int = 50,
        batch_size: int = 64,
        fit_intercept: bool = True,
        tree_dim: int = 16,
        warm_start: bool = False,
        random_state: Any = None,
    ) -> None:
        self.sampler = sampler
        self.num_samples = num_samples
        self.loss = loss
        self.learning_rate = learning_rate
        self.alpha = alpha
        self.max_iter = max_iter
        self.batch_size = batch_size
        self.fit_intercept = fit_intercept
        self.tree_dim = tree_dim
        self.warm_start = warm_start
        self.random_state = random_state

    # ------------------------------------------------------------------------------------------------ training
    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> SampledSoftmaxClassifier:
        """Train on all of the data, `max_iter` times over.

        Args:
            X: [n, n_features], dense or sparse (CSR).
            y: [n] labels, of any type.
            sample_weight: [n].
        """
        self._validate_params()
        again = self.warm_start and hasattr(self, "head_")
        X, y, weights = self._check(X, y, sample_weight, reset=not again)
        classes, target = np.unique(y, return_inverse=True)
        if again:
            target = self._known(y)
        else:
            self._start(X, target, weights, classes)
        self.n_iter_ = 0
        for _ in range(self.max_iter):
            self._epoch(X, target, weights)
            self.n_iter_ += 1
        return self

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> SampledSoftmaxClassifier:
        """Train once over a part of the data.

        The samplers "frequency" and "tree" are made from the data of the first call.

        Args:
            X: [n, n_features], dense or sparse (CSR).
            y: [n] labels, all of them in `classes`.
            classes: every label there will be; must be given at the first call.
            sample_weight: [n].
        """
        self._validate_params()
        first = not hasattr(self, "head_")
        if first and classes is None:
            raise ValueError("partial_fit: classes must be passed on the first call, got None")
        if not first and classes is not None and not np.array_equal(np.unique(classes), self.classes_):
            raise ValueError(
                f"partial_fit: classes must be those of the first call, {self.classes_!r}, got {classes!r}"
            )
        X, y, weights = self._check(X, y, sample_weight, reset=first)
        if first:
            self.classes_ = np.unique(classes)
            self._start(X, self._known(y), weights, self.classes_)
        self._epoch(X, self._known(y), weights)
        self.n_iter_ = 1
        return self

    def _check(self, X: Any, y: Any, sample_weight: Any, *, reset: bool) -> tuple[Any, np.ndarray, np.ndarray | None]:
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=[np.float64, np.float32], reset=reset)
        check_classification_targets(y)
        if sample_weight is not None:
            sample_weight = _check_sample_weight(sample_weight, X, dtype=np.float32)
        return X, y, sample_weight

    def _known(self, y: np.ndarray) -> np.ndarray:
        """Places of labels in `classes_`."""
        place = np.searchsorted(self.classes_, y).clip(0, len(self.classes_) - 1)
        strange = self.classes_[place] != y
        if strange.any():
            raise ValueError(
                f"SampledSoftmaxClassifier: y must hold labels of classes_ only, got {str(y[strange][0])!r}"
            )
        return place

    def _start(self, X: Any, target: np.ndarray, weights: np.ndarray | None, classes: np.ndarray) -> None:
        """A new model for these classes."""
        count, width = len(classes), X.shape[1]
        seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        full = self.sampler == "full"
        sampler: Any = None
        if self.sampler == "uniform" or (count == 1 and not full):
            sampler = Uniform(count)
        elif self.sampler == "frequency":
            # One more each, so that a class without an example can still be pushed down.
            seen = np.bincount(target, weights=weights, minlength=count).clip(min=0)
            sampler = Unigram(torch.from_numpy(seen + 1.0))
        elif self.sampler == "tree":
            features = X if not isinstance(X, np.ndarray) else torch.from_numpy(np.array(X, dtype=np.float32))
            dim = min(self.tree_dim, width, X.shape[0])
            labels = torch.from_numpy(target.astype(np.int64))
            sampler = Tree.fit(features, labels, num_classes=count, dim=dim, seed=seed, progress=False)
        self.classes_ = classes
        with torch.random.fork_rng(devices=[]):  # the head's own first values, which the zeros replace
            self.head_ = SampledClassifier(
                width,
                count,
                sampler,
                None if full else int(self.num_samples),
                loss="full_softmax" if full else self.loss,
                bias=bool(self.fit_intercept),
            )
        for parameter in self.head_.parameters():
            torch.nn.init.zeros_(parameter)  # the problem is convex
        self._optimizer = RowAdagrad(self.head_.parameters(), lr=self.learning_rate)
        self._seed, self._steps = seed, 0

    def _epoch(self, X: Any, target: np.ndarray, weights: np.ndarray | None) -> None:
        """One pass over the data, in an order of its own."""
        generator = torch.Generator().manual_seed(self._seed + self._steps)
        order = torch.randperm(X.shape[0], generator=generator).numpy()
        head = self.head_.train()
        self._optimizer.param_groups[0].update(lr=float(self.learning_rate), weight_decay=float(self.alpha))
        for begin in range(0, len(order), self.batch_size):
            some = np.sort(order[begin : begin + self.batch_size])
            rows = _dense(X[some]).to(torch.float32)
            labels = torch.from_numpy(target[some].astype(np.int64))
            weight = None if weights is None else torch.from_numpy(weights[some])
            loss = head(rows, labels, sample_weight=weight, key=Key(self._seed, self._steps))
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._steps += 1
        head.eval()

    # ------------------------------------------------------------------------------------------------ prediction
    def predict(self, X: Any) -> np.ndarray:
        """The most probable label of each row, [n]; of equal ones the first of `classes_`.

        Args:
            X: [n, n_features], dense or sparse.
        """
        rows = list(self._rows(X))
        found = [self.head_.predict(block) for block in rows]
        return self.classes_[torch.cat(found).numpy()]

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Log-probabilities, [n, C] float64, exact: normalized over all classes.

        Args:
            X: [n, n_features], dense or sparse.
        """
        return torch.cat([self.head_.log_prob(block) for block in self._rows(X)]).numpy()

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities, [n, C] float64.

        Args:
            X: [n, n_features], dense or sparse.
        """
        return np.exp(self.predict_log_proba(X))

    def _rows(self, X: Any) -> Iterator[Tensor]:
        """Blocks of rows in float64: in float32 a row's last bits would depend on the rows beside it."""
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", dtype=[np.float64, np.float32], reset=False)
        for begin in range(0, X.shape[0], _PREDICT_ROWS):
            yield _dense(X[begin : begin + _PREDICT_ROWS]).to(torch.float64)

    @property
    def coef_(self) -> np.ndarray:
        """Weights, [C, n_features] float32."""
        return self.head_.weight.detach().numpy()

    @property
    def intercept_(self) -> np.ndarray:
        """Biases, [C] float32; zeros without `fit_intercept`."""
        bias = self.head_.bias
        return np.zeros(len(self.classes_), np.float32) if bias is None else bias.detach().numpy()

    def __sklearn_is_fitted__(self) -> bool:
        """Whether there is a model."""
        return hasattr(self, "head_")

    def __sklearn_tags__(self) -> Any:
        """Sparse input is fine."""
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags


def _dense(rows: Any) -> Tensor:
    """A part of X as a tensor of its own."""
    return torch.from_numpy(np.array(rows.toarray() if hasattr(rows, "toarray") else rows))
