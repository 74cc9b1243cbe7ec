"""`Tree`: a probabilistic decision tree over the classes, fitted to data (Bamler & Mandt 2020)."""

from __future__ import annotations

import copy
import json
from typing import Any, cast

import torch
from torch import Tensor

import samplex_cuda.tree_fit as fitting
from samplex_cuda._checks import call, check_data, check_dense, check_int, check_number, describe
from samplex_cuda.draw import Draw
from samplex_cuda.ops import tree as ops
from samplex_cuda.ops import tree_shared
from samplex_cuda.ops.static_sample import build_alias, sort_exclude
from samplex_cuda.rng import Key, key_tensor
from samplex_cuda.samplers.base import Exclude, Sampler, check_int64
from samplex_cuda.samplers.static import Unigram, live_weights
from samplex_cuda.samplers.stored import closed_bias, tree_error, units_error
from samplex_cuda.samplers.tree_change import changed_tree

__all__ = ["Tree"]


class Tree(Sampler):
    """p_n(y | x): a balanced binary tree whose nodes are logistic regressions on a few features of x.

    A draw costs O(k log C). Make one with `Tree.fit`; the constructor takes parameters that exist already. Callers
    always pass the full features: the projection to k is kept inside. The parameters are buffers: `state_dict` holds
    them, `.to(device)` moves them, no optimizer sees them.

    Args:
        weights: [2^depth, k] float, row i for node i of the heap (root 1, children 2i and 2i + 1; row 0 is not used).
        bias: [2^depth]; +inf sends every row right, -inf left.
        leaf_class: [2^depth] int64, the class at each leaf, every class once; -1 for padding. A node with classes on
            one side only sends every row there, whatever its bias.
        mean: [K] of the features; None: features are taken unchanged.
        projection: [K, k]; None with mean None.
        dtype: of the stored nodes, float32 or bfloat16 (half the memory traffic, probabilities of the rounded tree).
        base: a fixed distribution that is mixed in, q = (1 - w) tree + w base, in the same op: class frequencies plus
            one, half and half, keep sampled softmax safe (docs/correction.md). None: the tree alone. `topk` and
            `describe` are of the tree alone in any case.
        base_weight: w in (0, 1]; 1 leaves the tree out of every draw.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> tree = sx.samplers.Tree(torch.zeros(4, 3), torch.zeros(4), torch.tensor([2, 0, 3, 1]))
        >>> draw = tree.sample(torch.randn(5, 3), 8, exclude=torch.tensor([0, 1, 2, 3, 0]))
        >>> draw.ids.shape, draw.log_q[0, 0].exp()
        (torch.Size([5, 8]), tensor(0.3333))
    """

    _op = "tree"
    stratifies = True
    nodes: Tensor
    leaf_class: Tensor
    class_leaf: Tensor
    mean: Tensor
    projection: Tensor
    base_units: Tensor
    base_share: Tensor
    base_table: Tensor | None
    base_prefix: Tensor | None

    def __init__(
        self,
        weights: Tensor,
        bias: Tensor,
        leaf_class: Tensor,
        *,
        mean: Tensor | None = None,
        projection: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        base: Unigram | None = None,
        base_weight: float = 0.5,
    ) -> None:
        super().__init__()
        if dtype not in (torch.float32, torch.bfloat16):
            raise TypeError(f"tree: dtype must be float32 or bfloat16, got {dtype}")
        if not isinstance(weights, Tensor) or weights.dim() != 2 or not weights.is_floating_point():
            raise ValueError(f"tree: weights must be [2^depth, k] floating point, got {describe(weights)}")
        leaves, dim = weights.shape
        if leaves & (leaves - 1) or leaves == 0 or dim == 0:
            raise ValueError(f"tree: weights must be [2^depth, k] with k >= 1, got {describe(weights)}")
        if not isinstance(bias, Tensor) or bias.shape != (leaves,) or not bias.is_floating_point():
            raise ValueError(f"tree: bias must be [{leaves}] floating point, got {describe(bias)}")
        check_int64("tree", "leaf_class", leaf_class)
        for name, t in (("weights", weights), ("bias", bias), ("leaf_class", leaf_class)):
            check_data("tree", name, t)
        if leaf_class.shape != (leaves,):
            raise ValueError(f"tree: leaf_class must be [{leaves}] int64, got {describe(leaf_class)}")
        real = torch.nonzero(leaf_class >= 0).squeeze(1)
        classes = real.shape[0]
        if classes == 0 or not torch.equal(leaf_class[real].sort().values, torch.arange(classes, device=real.device)):
            raise ValueError("tree: leaf_class must hold every class of [0, C) once and -1 elsewhere")
        if bool(weights[1:].isnan().any() | weights[1:].isinf().any() | bias[1:].isnan().any()):
            raise ValueError("tree: weights must be finite and bias not nan")
        bias = closed_bias(leaf_class, bias.detach())
        class_leaf = torch.empty(classes, dtype=torch.int64, device=leaf_class.device)
        class_leaf[leaf_class[real]] = real
        self._dim = dim
        self._fitted: dict[str, Any] = {}
        self._report = ""
        self.register_buffer("nodes", ops.pack_nodes(weights, bias, dtype))
        self.register_buffer("leaf_class", leaf_class.clone())
        self.register_buffer("class_leaf", class_leaf)
        if (mean is None) != (projection is None):
            raise ValueError("tree: mean and projection must be given together")
        if mean is None or projection is None:
            mean, projection = weights.new_zeros(dim), torch.eye(dim, device=weights.device)
            self._identity = True
        else:
            if projection.dim() != 2 or projection.shape[1] != dim or mean.shape != projection.shape[:1]:
                raise ValueError(
                    f"tree: mean must be [K] and projection [K, {dim}], got {describe(mean)} and {describe(projection)}"
                )
            self._identity = False
        # The options of `fit` as JSON, so that `refit` after `load_state_dict` fits as before.
        self.register_buffer("fit_options", torch.empty(0, dtype=torch.uint8, device=weights.device))
        self.register_buffer("mean", mean.detach().to(torch.float32).contiguous().clone())
        self.register_buffer("projection", projection.detach().to(torch.float32).contiguous().clone())
        # Integer weight of each class in the base and its share; empty: none. The tables over the leaves follow.
        self.register_buffer("base_units", torch.empty(0, dtype=torch.int64, device=weights.device))
        self.register_buffer("base_share", torch.zeros((), dtype=torch.float64, device=weights.device))
        self.register_buffer("base_table", None, persistent=False)
        self.register_buffer("base_prefix", None, persistent=False)
        self.set_base(base, base_weight)

    @classmethod
    def fit(
        cls,
        x: Any,
        y: Tensor,
        *,
        num_classes: int,
        dim: int = 16,
        reg: float = 0.1,
        whiten: bool = False,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        progress: bool = True,
        base: Unigram | None = None,
        base_weight: float = 0.5,
        **options: Any,
    ) -> Tree:
        """Fit a tree to features and labels: PCA to `dim`, then the greedy top-down fit of Bamler & Mandt (2020).

        At every node the logistic regression (Newton, Eq. 8 with its regularizer) and the split of the classes into
        halves (Eq. 9, exact) alternate until the split is stable. O(N k^2 log C) time, on all threads.

        Args:
            x: [N, K] features: a dense tensor or array, or sparse CSR (torch or scipy).
            y: [N] int64 labels in [0, num_classes).
            num_classes: C; classes without an example are fine.
            dim: k, the features a node looks at.
            reg: strength of the quadratic regularizer on the weights and bias of a node.
            whiten: scale the principal components to unit variance.
            dtype: of the stored nodes.
            seed: of the randomized PCA.
            progress: show a progress bar on a terminal.
            base: a `Unigram` that is mixed in, as in the constructor: `Unigram(counts + 1)` for sampled softmax.
            base_weight: its share.
            options: passed on to `samplex_cuda.tree_fit.fit_tree`; `unseen=False` gives classes without an example
                probability 0.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> x, y = torch.randn(200, 6), torch.randint(0, 10, (200,))
            >>> tree = sx.samplers.Tree.fit(x, y, num_classes=10, dim=3, progress=False)
            >>> tree.sample(x[:4], 5, exclude=y[:4]).ids.shape
            torch.Size([4, 5])
        """
        with torch.device(x.device if isinstance(x, Tensor) else "cpu"):  # whatever the default device is
            mean, projection = fitting.fit_pca(x, dim, whiten=whiten, seed=seed)
            z = fitting.project(x, mean, projection)
            fitted = fitting.fit_tree(z, y, num_classes, reg=reg, seed=seed, progress=progress, **options)
        tree = cls(
            fitted.weights, fitted.bias, fitted.leaf_class, mean=mean, projection=projection, dtype=dtype, base=base,
            base_weight=base_weight,
        )  # fmt: skip
        tree._set_options({"reg": reg, "whiten": whiten, "seed": seed, **options})
        tree._report = fitting.describe_fit(fitted)
        return tree

    def refit(self, x: Any, y: Tensor, *, progress: bool = True) -> Tree:
        """Fit again to other data, with the options of the first fit; the old tree stays until the new one is there.

        Args:
            x: [N, K] with the K of before, as in `fit`.
            y: [N] int64.
            progress: show a progress bar on a terminal.
        """
        if x.shape[-1] != self.num_features:
            raise ValueError(f"tree: x must be [N, {self.num_features}], got {list(x.shape)}")
        fresh = (
            type(self)
            .fit(
                x,
                y,
                num_classes=self.num_classes,
                dim=self.dim,
                dtype=self.nodes.dtype,
                progress=progress,
                **self._fitted,
            )
            .to(self.nodes.device)
        )
        for name in ("nodes", "leaf_class", "class_leaf", "mean", "projection"):
            setattr(self, name, fresh.get_buffer(name))
        self._fill_leaf_tables()
        self._identity, self._report = False, fresh._report
        return self

    def set_base(self, base: Unigram | None, weight: float = 0.5) -> None:
        """Mix another fixed distribution in from now on, or none.

        Args:
            base: over the same classes; its weights are copied.
            weight: its share w in (0, 1].

        Example:
            >>> import torch, samplex_cuda as sx
            >>> tree = sx.samplers.Tree(torch.zeros(2, 3), torch.zeros(2), torch.tensor([1, 0]))
            >>> tree.set_base(sx.samplers.Unigram([1, 3]), 0.5)
            >>> tree.log_prob_all(torch.zeros(1, 3)).exp()
            tensor([[0.3750, 0.6250]])
        """
        device = self.nodes.device
        if base is None:
            units, share = torch.empty(0, dtype=torch.int64, device=device), 0.0
        else:
            if not isinstance(base, Unigram):
                raise TypeError(
                    f"tree: base must be a Unigram (of equal counts for equal probabilities) or None, got "
                    f"{type(base).__name__}"
                )
            if base.num_classes != self.num_classes:
                raise ValueError(f"tree: base must have num_classes = {self.num_classes}, got {base.num_classes}")
            check_number("tree", "base_weight", weight, 0.0, 1.0, open_low=True)
            units, share = base.prefix.diff(), float(weight)
        self.base_units = units.to(device).clone()
        self.base_share = torch.tensor(share, dtype=torch.float64, device=device)
        self._fill_leaf_tables()

    @property
    def has_base(self) -> bool:
        """Whether a fixed distribution is mixed in."""
        return self.base_units.shape[0] > 0

    def as_mixture(self) -> Sampler:
        """The same distribution as a `Mixture` of a bare tree and a `Unigram`, which draws other classes.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> tree = sx.samplers.Tree(torch.zeros(2, 3), torch.zeros(2), torch.tensor([1, 0]))
            >>> tree.set_base(sx.samplers.Unigram([1, 3]), 0.5)
            >>> tree.as_mixture().log_prob_all(torch.zeros(1, 3)).exp()
            tensor([[0.3750, 0.6250]])
        """
        from samplex_cuda.samplers.mixture import Mixture

        bare = copy.deepcopy(self)
        bare.set_base(None)
        share = float(self.base_share)
        parts: list[tuple[Sampler, float]] = [(bare, 1.0 - share)] if share < 1.0 else []
        if self.has_base:
            parts.append((Unigram(self.base_units.double()).to(self.nodes.device), share))
        return Mixture(parts)

    def _fill_leaf_tables(self) -> None:
        """The base as an alias table over the leaves, which a fit puts into another order."""
        self._weight = float(self.base_share)
        if not self.has_base:
            self.base_table = self.base_prefix = None
            return
        leaf_class = self.leaf_class
        units = torch.where(leaf_class >= 0, self.base_units[leaf_class.clamp_min(0)], 0)
        table, prefix = build_alias(units.double().cpu().numpy())
        self.base_table, self.base_prefix = table.to(leaf_class.device), prefix.to(leaf_class.device)

    @property
    def _base(self) -> tuple[Tensor | None, Tensor | None, float]:
        """What the ops take of the base."""
        buffers = self._buffers
        return buffers["base_table"], buffers["base_prefix"], self._weight

    def _set_options(self, options: dict[str, Any]) -> None:
        self._fitted = options
        text = json.dumps(options).encode()
        self.fit_options = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self.nodes.device)

    def describe(self) -> str:
        """Sizes, and what the last fit reported: mean log p_n against uniform and class frequency, by level."""
        head = f"Tree({self.extra_repr()})"
        return f"{head}\n{self._report}" if self._report else head

    @property
    def num_classes(self) -> int:  # type: ignore[override]
        """C."""
        return self.class_leaf.shape[0]

    @property
    def num_features(self) -> int:
        """K, the size of the features that `sample` and `log_prob` take."""
        return self.projection.shape[0]

    @property
    def dim(self) -> int:
        """k, the size of the projected features."""
        return self._dim

    @property
    def depth(self) -> int:
        """Levels of the tree: ceil(log2 C)."""
        return self.leaf_class.shape[0].bit_length() - 1

    def parameters_of_nodes(self) -> tuple[Tensor, Tensor]:
        """Weights [2^depth, k] and bias [2^depth] of the nodes, float32."""
        return ops.unpack_nodes(self.nodes, self._dim)

    def project(self, x: Tensor | None) -> Tensor:
        """Features [*, K] of any floating dtype to [B, k] float32, what the nodes see."""
        flat = self._features(x)
        return flat if self._identity else call(ops.tree_project, flat, self.mean, self.projection)

    def _features(self, x: Tensor | None) -> Tensor:
        """Features [*, K] of any floating dtype as [B, K] float32."""
        if x is None:
            raise ValueError(f"tree: h must be [*, {self.num_features}], got None")
        buffers = self._buffers
        nodes, projection = cast(Tensor, buffers["nodes"]), cast(Tensor, buffers["projection"])
        width = projection.shape[0]
        if not isinstance(x, Tensor) or x.dim() < 1 or not x.is_floating_point():
            raise ValueError(f"tree: h must be [*, {width}] floating point, got {describe(x)}")
        if x.shape[-1] != width:
            raise ValueError(f"tree: h must be [*, {width}], the features it was fitted on, got {describe(x)}")
        if x.device != nodes.device:
            raise ValueError(f"tree: h must be on {nodes.device}, where the tree is, got {describe(x)}")
        x = x.detach()
        if x.dim() != 2 or x.dtype != torch.float32 or not x.is_contiguous():
            x = check_dense(self._op, "h", x).reshape(-1, width).to(torch.float32).contiguous()
        return x

    def sample(
        self,
        h: Tensor | None,
        num_samples: int,
        *,
        shared: bool = False,
        key: Key | Tensor | None = None,
        exclude: Exclude | None = None,
        context: Tensor | None = None,
        batch_size: int | None = None,
        stratified: bool = False,
    ) -> Draw:
        """Draw `num_samples` classes for each row of the features h [*, K]; see `Sampler.sample`.

        `exclude` is exact: the distribution conditioned on the other classes. `shared` draws come from the mean of the
        rows' distributions, and cost little more for many draws than for few: a node is scored once for all that pass
        it.

        With `stratified` shared draws are no longer independent: one comes from each of m equal parts of the
        distribution, in the order of the leaves. A class comes m q times in expectation, as before, but never two more
        or two fewer times than that, so that every sum of the draws varies less, or at the most as much.
        `Draw.independent` is False, and copies of a class are adjacent.
        """
        count = self._check_count(num_samples)
        self._check_stratified(stratified, shared)
        x = self.project(h)
        self._check_batch(x, batch_size, None)
        if shared:
            self._check_shared(exclude)
            pair = key_tensor(self._op, key, x.device)
            drawn = tree_shared.tree_sample_shared(pair, x, *self._tables(), count, stratified, *self._base)
            return Draw(*drawn, not stratified)
        leaves, offsets = self._excluded_leaves(exclude, x)
        pair = key_tensor(self._op, key, x.device)
        return Draw(*call(ops.tree_sample, pair, x, *self._tables(), count, leaves, offsets, *self._base))

    def log_prob(
        self, h: Tensor | None, ids: Tensor, *, exclude: Exclude | None = None, context: Tensor | None = None
    ) -> Tensor:
        """Log-probability of given ids, the same numbers as the log_q of a draw; see `Sampler.log_prob`."""
        check_int64(self._op, "ids", ids)
        x = self.project(h)
        wanted, squeeze = self._wanted(ids, x.shape[0])
        excluded = self._excluded_leaves(exclude, x)
        out = call(ops.tree_log_prob, x, wanted, *self._tables(), *excluded, *self._base)
        return out.squeeze(1) if squeeze else out

    def log_prob_shared(self, h: Tensor | None, ids: Tensor, *, context: Tensor | None = None) -> Tensor:
        """Log-probability of given ids of any shape under that of shared draws; see `Sampler.log_prob_shared`."""
        check_int64(self._op, "ids", ids)
        wanted = ids.reshape(-1).contiguous()
        out = call(tree_shared.tree_log_prob_shared, self.project(h), wanted, *self._tables(), *self._base)
        return out.reshape(ids.shape)

    def sample_and_score(
        self,
        h: Tensor | None,
        num_samples: int,
        ids: Tensor,
        *,
        shared: bool = False,
        key: Key | Tensor | None = None,
        context: Tensor | None = None,
    ) -> tuple[Draw, Tensor]:
        """`sample` and `log_prob` of given ids with one projection of h; see `Sampler.sample_and_score`."""
        check_int64(self._op, "ids", ids)
        count = self._check_count(num_samples)
        if shared:
            return super().sample_and_score(h, num_samples, ids, shared=True, key=key)
        x = self._features(h)
        if self._identity:
            return self.sample(h, num_samples, key=key), self.log_prob(h, ids)
        wanted = ids.contiguous() if ids.dim() == 1 and ids.shape[0] == x.shape[0] else self._wanted(ids, x.shape[0])[0]
        pair = key_tensor(self._op, key, x.device)
        model = self.mean, self.projection, *self._tables()
        draws, log_q, scores = call(ops.tree_sample_and_score, pair, x, *model, count, wanted, *self._base)
        return Draw(draws, log_q), scores

    def log_prob_all(self, h: Tensor | None = None) -> Tensor:
        """Log-probability of every class, [B, C] float32; of the mixture where there is a base."""
        return call(ops.tree_log_prob_all, self.project(h), *self._tables(), *self._base)

    def topk(self, h: Tensor, k: int, *, beam: int | None = None) -> tuple[Tensor, Tensor]:
        """The k most probable classes by beam search, in O(beam k log C); exact where the beam covers the level.

        Args:
            h: [*, K].
            k: how many.
            beam: nodes kept at each level, up to 512; by default 4 k, at least 64.

        Returns:
            log_p [B, k] float32, descending, and ids [B, k] int64.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> tree = sx.samplers.Tree(torch.zeros(4, 3), torch.tensor([0, 1.0, 0, 0]), torch.tensor([2, 0, 3, 1]))
            >>> tree.topk(torch.randn(1, 3), 2)[1]
            tensor([[1, 3]])
        """
        check_int("tree", "k", k, 1, min(self.num_classes, 512))
        if beam is None:
            beam = min(512, max(64, 4 * k))
        if not k <= beam <= 512:
            raise ValueError(f"tree: beam must be in [k, 512] = [{k}, 512], got {beam!r}")
        return call(ops.tree_topk, self.project(h), *self._tables(), k, beam)

    def over(self, num_classes: int, live: Tensor | None = None) -> Tree:
        """See `Sampler.over`. New classes take leaves without one, in a tree that is a level deeper if none is left.

        A node that gets classes on a side that had none splits by the number of classes on each side, until `refit`;
        other nodes keep what was fitted. A class that is not live passes its part to the classes beside it.
        """
        self._check_size(num_classes, live)
        nodes = changed_tree(*self.parameters_of_nodes(), self.leaf_class, num_classes, live)
        base = None
        if self.has_base:
            weights = live_weights(self.base_units.double().cpu(), num_classes, live)
            base = Unigram(weights).to(self.nodes.device)
        model = {} if self._identity else {"mean": self.mean, "projection": self.projection}
        made = Tree(*nodes, **model, dtype=self.nodes.dtype, base=base, base_weight=float(self.base_share) or 0.5)
        if self._fitted:
            made._set_options(self._fitted)
        return made

    def update(self, ids: Tensor, rows: Tensor) -> None:
        """Nothing to do: the tree does not depend on the class table."""

    def rebuild(self, weight: Tensor) -> None:
        """Nothing to do: the tree does not depend on the class table; `refit` fits it to new data."""

    def _tables(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.nodes, self.leaf_class, self.class_leaf

    def _excluded_leaves(self, exclude: Exclude | None, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Excluded classes of each row as leaves, ascending."""
        exclude = self._check_exclude(exclude, x.device, x.shape[0])
        if exclude is None:
            return None, None
        ids = exclude if isinstance(exclude, Tensor) else exclude[1]
        if not ids.is_cuda and ids.numel() and not bool(((ids >= -1) & (ids < self.num_classes)).all()):
            bad = ids[(ids < -1) | (ids >= self.num_classes)].flatten()[0]
            raise IndexError(f"tree: exclude must be -1 or in [0, {self.num_classes}), got {int(bad)}")
        leaves = torch.where(ids < 0, -1, self.class_leaf[ids.clamp(0, self.num_classes - 1)])
        return sort_exclude(leaves if isinstance(exclude, Tensor) else (exclude[0], leaves))

    @staticmethod
    def reads(names: set[str]) -> bool:
        """Whether entries of a state dict are those of a `Mixture` of a tree and a `Unigram`, which a tree with a base
        reads as its own.

        Example:
            >>> import samplex_cuda as sx
            >>> sx.samplers.Tree.reads({"nodes"})
            False
        """
        first, second = ({name for name in names if name.startswith(f"samplers.{number}.")} for number in (0, 1))
        return (
            "samplers.0.nodes" in first
            and second == {"samplers.1.table", "samplers.1.prefix"}
            and names == first | second | {"weights"}
        )

    def _stored_error(self, found: dict[str, Any]) -> str | None:
        options = found["fit_options"]
        if not isinstance(options, Tensor) or options.dtype != torch.uint8 or options.dim() != 1:
            return f"fit_options must be [n] uint8, got {describe(options)}"
        return tree_error(found) or units_error(found)

    def _stored_classes(self, found: dict[str, Any]) -> int | None:
        return found["class_leaf"].shape[0]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # A tree of another size is as good: the buffers take the shapes of what is loaded.
        names = ("nodes", "leaf_class", "class_leaf", "mean", "projection", "base_units")
        _read_mixture(state_dict, prefix)
        state_dict.setdefault(f"{prefix}base_units", self.base_units.new_empty(0))  # from before there was a base
        state_dict.setdefault(f"{prefix}base_share", torch.zeros_like(self.base_share))
        state_dict.setdefault(f"{prefix}fit_options", self.fit_options)  # checkpoints of 0.1 have none
        if self._refuses(state_dict, prefix, args[-1]):
            return
        options = state_dict[f"{prefix}fit_options"]
        if options.shape != self.fit_options.shape:
            self.fit_options = torch.empty_like(options, device=self.nodes.device)
        if options.numel():
            self._fitted = _read_options(options)
        found = {name: state_dict[prefix + name] for name in names if prefix + name in state_dict}
        if len(found) == len(names):
            for name, value in found.items():
                own = self.get_buffer(name)
                if own.shape != value.shape or own.dtype != value.dtype:
                    setattr(self, name, torch.empty_like(value, device=own.device))
            self._dim = found["projection"].shape[1]
            self._identity = False
        super(Sampler, self)._load_from_state_dict(state_dict, prefix, *args)
        self._fill_leaf_tables()

    def _apply(self, fn: Any, recurse: bool = True) -> Tree:
        self._apply_keeping_dtypes(fn, recurse)
        return self

    def extra_repr(self) -> str:
        """Sizes."""
        return (
            f"num_classes={self.num_classes}, num_features={self.num_features}, dim={self.dim}, depth={self.depth}, "
            f"dtype={str(self.nodes.dtype).removeprefix('torch.')}"
            + (f", base_weight={float(self.base_share):.4g}" if self.has_base else "")
        )


def _read_mixture(state: dict[str, Any], prefix: str) -> None:
    """Entries of a `Mixture` of a tree and a `Unigram` as those of a tree with a base, in place: what the trainer made
    of sampler.base before the tree took one itself."""
    parts = [f"{prefix}samplers.{number}." for number in (0, 1)]
    weights = state.get(f"{prefix}weights")
    counts = state.get(f"{parts[1]}prefix")
    if f"{prefix}nodes" in state or f"{parts[0]}nodes" not in state or f"{parts[1]}table" not in state:
        return
    if not isinstance(weights, Tensor) or weights.shape != (2,) or not isinstance(counts, Tensor) or counts.dim() != 1:
        return
    for name in [name for name in state if name.startswith(parts[0])]:
        state[prefix + name.removeprefix(parts[0])] = state.pop(name)
    for name in ("table", "prefix"):
        state.pop(f"{parts[1]}{name}")
    state.pop(f"{prefix}weights")
    state[f"{prefix}base_units"] = counts.diff()
    state[f"{prefix}base_share"] = weights[1].double().clone()


def _read_options(stored: Tensor) -> dict[str, Any]:
    try:
        options = json.loads(bytes(stored.cpu().tolist()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"tree: fit_options must be JSON as uint8, got {describe(stored)}") from error
    if not isinstance(options, dict):
        raise ValueError(f"tree: fit_options must be a JSON object, got {type(options).__name__}")
    return options
