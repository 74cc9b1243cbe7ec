"""Generators of the public functions, samplers, heads, row optimizers and metrics."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import samplex_cuda as sx
from samplex_cuda import functional, metrics
from samplex_cuda.ops.tree import unpack_nodes
from samplex_fuzz.call import Args, Call, Dice, PoisonedError, generator
from samplex_fuzz.ops_loss import WORDS, Inputs, compare_loss, full_rows, make_inputs, size_of, softmax_rows, usual_rows
from samplex_fuzz.ops_static import alias_counts
from samplex_fuzz.ops_tree import make_tree
from samplex_fuzz.oracle import acc, all_ordinary, close, drawn, expect, has_form, is_meta, near, ordinary

_REDUCTIONS = ("none", "mean", "sum")


def _grads(a: Args) -> None:
    """Asks for gradients of h, weight and bias, as training does."""
    for name in ("h", "weight", "bias"):
        t = a.get(name)
        if isinstance(t, Tensor) and t.is_floating_point() and not t.requires_grad and t.layout is torch.strided:
            a[name] = t.detach().requires_grad_()


def _with_backward(function: Callable[..., Any], backward: bool) -> Callable[[Args], Any]:
    def run(a: Args) -> Any:
        if not backward:
            return function(**a)
        a = Args(a)
        _grads(a)
        out = function(**a)
        loss = out[0] if isinstance(out, tuple) else out
        if loss.requires_grad and not loss.is_meta:
            loss.sum().backward()
        return out

    return run


def _loss_args(d: Dice, x: Inputs) -> dict[str, Any]:
    return {
        "h": x.h, "weight": x.weight, "target": x.target, "ids": x.ids, "log_q": x.log_q, "bias": x.bias,
        "scale": d.pick((1.0, 2.0)), "reduction": d.pick(_REDUCTIONS), "class_weight": x.class_weight,
        "ignore_index": x.ignore_index, "positives": x.positives, "sparse": d.maybe(0.7),
    }  # fmt: skip


def _flat(a: Args) -> Inputs | None:
    """The inputs of a loss in the form the references take; None for leading dimensions and other rare forms."""
    if a.h.dim() != 2 or a.ids.dim() > 2:
        return None
    log_q = a.log_q
    if log_q is None:  # uncorrected: each draw counts with its plain score
        log_q = torch.full(a.ids.shape, -math.log(max(a.ids.shape[-1], 1)), dtype=acc(a.weight.dtype))
    return Inputs(a.h, a.weight, a.target, a.ids, log_q, a.bias, a.class_weight, a.positives, int(a.ignore_index))


@generator("functional.sampled_softmax", 2.0)
def _sampled_softmax(d: Dice) -> Call:
    args = {
        **_loss_args(d, make_inputs(d)), "absolute": d.maybe(0.2), "label_smoothing": d.pick((0.0, 0.1)),
        "return_lse": d.maybe(0.3),
    }  # fmt: skip

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        loss = out[0] if isinstance(out, tuple) else out
        if is_meta(loss) or not all_ordinary(float(a.scale), float(a.label_smoothing)) or (x := _flat(a)) is None:
            return
        wide = acc(a.weight.dtype)
        rows = usual_rows(x)
        options = {"scale": float(a.scale), "absolute": bool(a.absolute), "label_smoothing": float(a.label_smoothing)}
        truth, same = (softmax_rows(x, dtype, **options) for dtype in (torch.float64, wide))
        code = _REDUCTIONS.index(a.reduction)
        has_form("loss", loss, () if code else (a.h.shape[0],), wide)
        compare_loss(loss.detach(), truth[::2], same[::2], code, size_of(x, float(a.scale), rows), rows)

    return Call(Args(args), _with_backward(functional.sampled_softmax, d.maybe(0.5)), check, words=WORDS)


def _entry(name: str) -> Callable[[Dice], Call]:
    def make(d: Dice) -> Call:
        x = make_inputs(d)
        args = _loss_args(d, x)
        if name in ("negative_sampling", "nce"):
            args["target_log_q"] = d.uniform(*x.target.shape, low=-4.0, high=-1.0, dtype=acc(x.h.dtype))
        if name == "negative_sampling":
            args["reg"] = d.pick((0.0, 0.1))
        if name == "augment_reduce":
            args["log_eta"] = d.uniform(x.h.shape[0], low=4.0, high=6.0, dtype=acc(x.h.dtype))

        def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
            loss = out[0] if isinstance(out, tuple) else out
            if not is_meta(loss):
                has_form("loss", loss, () if a.reduction != "none" else a.h.shape[:-1], acc(a.weight.dtype))
                if all_ordinary(*a.values()) and not changed and x.h.abs().max().item() < 8 if x.h.numel() else False:
                    expect(bool(loss.isfinite().all()), f"loss of ordinary inputs must be finite, got {loss.tolist()}")

        return Call(Args(args), _with_backward(getattr(functional, name), d.maybe(0.5)), check, words=WORDS)

    return make


for _name in ("negative_sampling", "nce", "one_vs_each", "augment_reduce"):
    generator(f"functional.{_name}")(_entry(_name))


@generator("functional.full_softmax")
def _full_softmax(d: Dice) -> Call:
    x = make_inputs(d)
    args = {
        "h": x.h, "weight": x.weight, "target": x.target, "bias": x.bias, "scale": d.pick((1.0, 2.0)),
        "reduction": d.pick(_REDUCTIONS), "absolute": d.maybe(0.2), "label_smoothing": d.pick((0.0, 0.1)),
        "class_weight": x.class_weight, "ignore_index": x.ignore_index, "chunk_size": d.pick((None, 1, 3)),
    }  # fmt: skip

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if is_meta(out) or a.h.dim() != 2 or a.reduction != "none" or not all_ordinary(*a.values()):
            return
        has_form("loss", out, (a.h.shape[0],), acc(a.weight.dtype))
        x = Inputs(
            a.h, a.weight, a.target, a.target[:0].flatten(), torch.zeros(0), a.bias, a.class_weight, None,
            int(a.ignore_index),
        )  # fmt: skip
        options = (float(a.scale), float(a.label_smoothing), bool(a.absolute))
        both = [full_rows(x, t, *options) for t in (torch.float64, acc(a.weight.dtype))]
        close("loss", out.detach(), *both, size_of(x, float(a.scale), torch.ones(len(a.h), dtype=torch.bool)))

    return Call(Args(args), _with_backward(functional.full_softmax, d.maybe(0.5)), check, words=WORDS)


@generator("functional.attention_pool")
def _attention_pool(d: Dice) -> Call:
    size, dim = d.int(1, 9), d.width()
    ids = d.ids(size, d.size(), d.int(0, 5))
    args = {
        "ids": ids, "embedding": d.normal(size, dim), "p": d.normal(dim), "v": d.normal(dim),
        "mask": d.uniform(*ids.shape) < 0.7 if d.maybe(0.4) else None, "sparse": d.maybe(0.5),
    }  # fmt: skip

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if not is_meta(out):
            expect(tuple(out.shape) == tuple(a.ids.shape[:-1]), f"result must be {list(a.ids.shape[:-1])}")

    return Call(Args(args), lambda a: functional.attention_pool(**a), check, words=WORDS)


@generator("functional.contrastive")
def _contrastive(d: Dice) -> Call:
    batch, n, dim = d.size(), d.int(2, 8), d.width()
    bank = d.maybe(0.6)
    args: dict[str, Any] = {
        "queries": d.normal(batch, dim), "keys": d.normal(n if bank else batch, dim),
        "positives": d.ids(n, batch) if bank else None, "negatives": None, "log_q": None,
        "num_negatives": d.pick((None, 1)), "sampler": None, "key": sx.Key(d.int(0, 99)), "scale": d.pick((1.0, 5.0)),
        "symmetric": not bank and d.maybe(0.3), "reduction": d.pick(_REDUCTIONS),
    }  # fmt: skip
    if bank and d.maybe(0.5):
        args["negatives"], args["num_negatives"] = d.ids(n, batch, 3), None
    if d.maybe(0.5):
        lengths = torch.tensor([0, *(d.int(0, 3) for _ in range(batch))])
        args["key_ids"] = d.ids(5, n if bank else batch)
        args["known_positives"] = lengths.cumsum(0), d.ids(5, int(lengths.sum()))

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if not is_meta(out) and not changed:
            expect(bool(out.isfinite().all()), f"loss of ordinary inputs must be finite, got {out.tolist()}")

    run = functools.partial(lambda a: functional.contrastive(**a))
    return Call(Args(args), run, check, words=("keys", "queries", "positives", "exact"))


@generator("rff.features")
def _features(d: Dice) -> Call:
    kind, dim = d.pick(("rff", "orf", "positive", "quadratic")), d.width()
    omega = None if kind == "quadratic" else d.normal(d.int(1, 6), dim)
    args = {
        "x": d.normal(d.size(), dim, scale=0.3), "omega": omega, "kind": kind,
        "nu": 1.0 if kind == "positive" else None, "alpha": d.pick((1.0, 100.0)),
        "gaussian": kind == "positive" and d.maybe(0.3), "shift": 0.0,
    }  # fmt: skip

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if not is_meta(out) and not changed:
            expect(bool(out.isfinite().all()), "features of ordinary rows must be finite")

    return Call(Args(args), lambda a: sx.rff.features(**a), check, words=WORDS)


# ------------------------------------------------------------------------------------------------ samplers
_DIM = 5


def _bigram(d: Dice, classes: int) -> sx.samplers.Bigram:
    rows = [sorted({d.int(0, classes - 1) for _ in range(d.int(0, 3))}) for _ in range(3)]
    offsets = torch.tensor([0, *torch.tensor([len(row) for row in rows]).cumsum(0).tolist()])
    ids = torch.tensor([k for row in rows for k in row], dtype=torch.int64)
    return sx.samplers.Bigram(
        offsets, ids, d.uniform(len(ids), low=1.0, high=9.0), d.uniform(classes, low=0.5, high=9.0)
    )


def _tree(d: Dice, classes: int) -> sx.samplers.Tree:
    nodes, leaf_class, _ = make_tree(d, _DIM)
    return sx.samplers.Tree(*unpack_nodes(nodes, _DIM), leaf_class)


_SAMPLERS: dict[str, Callable[[Dice, int], Any]] = {
    "Uniform": lambda d, c: sx.samplers.Uniform(c),
    "LogUniform": lambda d, c: sx.samplers.LogUniform(c),
    "Unigram": lambda d, c: sx.samplers.Unigram(torch.tensor(alias_counts(d, c))),
    "Bigram": _bigram,
    "Tree": _tree,
    "Quadratic": lambda d, c: sx.samplers.Quadratic(d.normal(c, _DIM)),
    "RandomFourier": lambda d, c: sx.samplers.RandomFourier(
        d.normal(c, _DIM), num_features=8, kind=d.pick(("rff", "positive", "orf"))
    ),
    "MIDX": lambda d, c: sx.samplers.MIDX(d.normal(c, _DIM), 4, kind=d.pick(("residual", "product"))),
    "Softmax": lambda d, c: sx.samplers.Softmax(d.normal(c, _DIM)),
    "Quartic": lambda d, c: sx.samplers.Quartic(d.normal(c, _DIM)),
    "Mixture": lambda d, c: sx.samplers.Mixture(
        [(sx.samplers.LogUniform(c), 0.5), (sx.samplers.Softmax(d.normal(c, _DIM)), 0.5)]
    ),
}
_OF_ROWS = ("Quadratic", "RandomFourier", "MIDX", "Softmax", "Quartic", "Mixture", "Tree")


def _context(name: str, d: Dice, batch: int) -> Tensor | None:
    return d.ids(4, batch) - 1 if name == "Bigram" else None


def _exclude(d: Dice, batch: int, classes: int) -> Any:
    kind = d.int(0, 4)
    if kind <= 1 or classes < 2:
        return None
    if kind == 2:
        return d.ids(classes, batch)
    if kind == 3:
        made = d.ids(classes, batch, 3)
        made[d.uniform(batch, 3) < 0.4] = -1
        return made
    counts = torch.randint(0, 3, (batch,), generator=d.g)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    return offsets, d.ids(classes, int(counts.sum()))


def _floats(h: Any) -> bool:
    return isinstance(h, Tensor) and h.layout is torch.strided and h.is_floating_point()


def _sample(name: str) -> Callable[[Dice], Call]:
    def make(d: Dice) -> Call:
        batch = d.size()
        sampler = _SAMPLERS[name](d, d.int(1, 12))
        classes, shared = sampler.num_classes, d.maybe(0.3)
        args: dict[str, Any] = {
            "h": d.normal(batch, _DIM) if name != "Bigram" else None, "num_samples": d.int(0, 5), "shared": shared,
            "key": d.key(), "exclude": None if shared else _exclude(d, batch, classes),
            "context": _context(name, d, batch),
        }  # fmt: skip

        def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
            if is_meta(*a.values(), *out[:2]) or (a.h is None and name != "Bigram"):
                return
            ids, log_q = out.ids, out.log_q
            if a.h is not None and not _floats(a.h):
                return  # a static sampler looks at the number of rows alone
            rows = a.context.numel() if a.h is None else math.prod(a.h.shape[:-1])
            shape = (int(a.num_samples),) if a.shared else (rows, int(a.num_samples))
            fine = a.h is None or name not in _OF_ROWS or bool(ordinary(a.h).all())
            # Without a row that has a distribution there is nothing to draw from.
            drawn(ids, log_q if fine and rows else None, shape, classes)
            if fine and rows and ids.numel():
                if a.shared:
                    again = sampler.log_prob_shared(a.h, ids, context=a.context)
                else:
                    again = sampler.log_prob(a.h, ids, exclude=a.exclude, context=a.context)
                known = again.isfinite()  # a row with no class left: its stand-in has log_q 0
                near("log_q against log_prob", log_q[known], again[known], 1e-3 * (1 + float(log_q.abs().max())))

        return Call(
            Args(args),
            lambda a: sampler.sample(**a),
            check,
            words=("samples", "rows", "ids", "offsets", "exclude_offsets"),
        )

    return make


def _log_prob(name: str) -> Callable[[Dice], Call]:
    def make(d: Dice) -> Call:
        batch = d.size()
        sampler = _SAMPLERS[name](d, d.int(1, 12))
        classes, shared = sampler.num_classes, d.maybe(0.3)
        args: dict[str, Any] = {
            "h": d.normal(batch, _DIM) if name != "Bigram" else None, "ids": d.ids(classes, batch, d.int(0, 5)),
            "context": _context(name, d, batch),
        }  # fmt: skip
        if shared:
            args["ids"] = d.ids(classes, d.int(0, 5))
        else:
            args["exclude"] = _exclude(d, batch, classes)

        def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
            if is_meta(*a.values(), out) or (a.h is None and name != "Bigram"):
                return
            expect(out.dtype == torch.float32, f"log_prob must be float32, got {out.dtype}")
            expect(not bool((out > 1e-4).any()), f"log_prob must be at most 0, got {out.tolist()}")
            if a.h is not None and (not _floats(a.h) or a.h.dim() != 2 or not bool(ordinary(a.h).all())):
                return
            if not shared and a.exclude is None and a.ids.dim() == 2 and a.ids.shape[0]:
                every = sampler.log_prob_all(a.h, context=a.context) if name == "Bigram" else sampler.log_prob_all(a.h)
                near("sum of the distribution", every.double().exp().sum(1), torch.ones(every.shape[0]).double(), 1e-3)
                if every.shape[0] == 1:
                    every = every.expand(a.ids.shape[0], -1)
                near("log_prob", out, every.gather(1, a.ids), 1e-3 * (1 + float(every[every.isfinite()].abs().max())))

        call = sampler.log_prob_shared if shared else sampler.log_prob
        return Call(Args(args), lambda a: call(**a), check, words=("rows", "offsets", "exclude_offsets"))

    return make


def _load(name: str) -> Callable[[Dice], Call]:
    """Loads a state dict with altered tables, then draws: nothing may be read outside of the buffers."""

    def make(d: Dice) -> Call:
        sampler = _SAMPLERS[name](d, d.int(1, 12))
        args = {key: value.clone() for key, value in sampler.state_dict().items() if isinstance(value, Tensor)}
        if not args:
            args = {"extra": torch.zeros(1)}
        h, key = None if name == "Bigram" else d.normal(3, _DIM), d.key()
        context = _context(name, d, 3)
        before = sampler.sample(h, 4, key=key, context=context)

        def run(a: Args) -> Any:
            try:
                sampler.load_state_dict(dict(a))
            except Exception as refused:
                try:
                    sampler.sample(h, 4, key=key, context=context)
                except Exception as error:
                    text = f"load_state_dict refused ({refused}), then sample raised {type(error).__name__}: {error}"
                    raise PoisonedError(text) from None
                raise
            draw = sampler.sample(h, 4, key=key, context=context)
            return draw, sampler.log_prob(h, draw.ids, context=context)

        def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
            draw, again = out
            drawn(draw.ids, draw.log_q, (3, 4), sampler.num_classes)
            near("log_q against log_prob", draw.log_q, again, 1e-3 * (1 + float(draw.log_q.abs().max())))
            if not changed:
                expect(torch.equal(draw.ids, before.ids), "the same tables must draw the same ids")

        words = ("state_dict", "load_state_dict", "h", "table", "tables", "weight", "rows", "nodes")
        return Call(Args(args), run, check, words=words)

    return make


for _name in _SAMPLERS:
    generator(f"samplers.{_name}.sample", 0.6)(_sample(_name))
    generator(f"samplers.{_name}.log_prob", 0.5)(_log_prob(_name))
    if _name not in ("Uniform", "LogUniform"):
        generator(f"samplers.{_name}.load_state_dict", 0.5)(_load(_name))


# ------------------------------------------------------------------------------------------------ heads
def _head(d: Dice) -> sx.SampledClassifier:
    name = d.pick(("Uniform", "LogUniform", "Unigram", "Quadratic", "RandomFourier", "Softmax"))
    classes = d.int(2, 12)
    sampler = _SAMPLERS[name](d, classes)
    if name == "Unigram":  # NCE of a target without probability is nan by definition
        sampler = sx.samplers.Unigram(d.uniform(classes, low=0.5, high=9.0))
    loss = d.pick(("sampled_softmax", "sampled_softmax", "negative_sampling", "nce", "one_vs_each"))
    return sx.SampledClassifier(
        _DIM, classes, sampler, num_samples=d.int(1, 5), loss=loss, bias=name not in _OF_ROWS and d.maybe(0.5),
        shared=(name not in _OF_ROWS or loss == "sampled_softmax") and d.maybe(0.3),
    )  # fmt: skip


@generator("SampledClassifier.forward", 2.0)
def _forward(d: Dice) -> Call:
    head, batch = _head(d), d.size()
    fused = d.maybe(0.3)
    if fused:
        head.fuse_optimizer(sx.optim.RowAdagrad(head.parameters(), lr=0.1))
    args: dict[str, Any] = {"h": d.normal(batch, _DIM), "y": d.ids(head.num_classes, batch), "key": d.key()}
    if d.maybe(0.2):
        args["sample_weight"] = d.uniform(batch)
    good = (d.normal(3, _DIM), d.ids(head.num_classes, 3))

    def run(a: Args) -> Any:
        try:
            loss = head(**a)
            if loss.requires_grad:
                loss.backward()
        except Exception as refused:
            try:
                head(*good, key=torch.zeros(2, dtype=torch.int64)).backward()
                head.update_sampler()
                head.state_dict()
            except Exception as error:
                text = f"refused ({refused}), then an ordinary step raised {type(error).__name__}: {error}"
                raise PoisonedError(text) from None
            raise
        return loss.detach()

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        has_form("loss", out, (), torch.float32)
        if all_ordinary(a.h, a.get("sample_weight")):
            expect(bool(out.isfinite()), f"loss of ordinary inputs must be finite, got {float(out)}")
            grad = head.weight.grad
            if grad is not None:
                values = grad.coalesce().values() if grad.is_sparse else grad
                expect(bool(values.isfinite().all()), "weight.grad of ordinary inputs must be finite")

    return Call(Args(args), run, check, words=("rows", "targets", "target", "row"))


def _answers(method: str) -> Callable[[Dice], Call]:
    def make(d: Dice) -> Call:
        head = _head(d).eval()
        args: dict[str, Any] = {"h": d.normal(d.size(), _DIM)}
        if method == "topk":
            args["k"] = d.int(1, head.num_classes)
        if method == "forward":
            args["y"] = d.ids(head.num_classes, args["h"].shape[0])

        def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
            if a.h.dim() != 2 or not all_ordinary(a.h) or not a.h.shape[0] or head.loss.name == "negative_sampling":
                return
            bias = 0.0 if head.bias is None else head.bias.double()
            s = a.h.double() @ head.weight.double().T + bias
            size = 1e-4 * (1 + float(s.abs().max()))
            if method == "forward" and a.y.dim() == 1:
                want = torch.nn.functional.cross_entropy(s, a.y, reduction="none")
                want = want[a.y != -100].mean() if bool((a.y != -100).any()) else s.new_zeros(())
                near("loss", out, want, size)
            elif method == "log_prob":
                near("log_prob", out, s.log_softmax(1), size)
            elif method == "predict":
                near("logit of the prediction", s.gather(1, out.unsqueeze(1)).squeeze(1), s.amax(1), size)
            elif method == "topk":
                near("values", out[0].double(), s.topk(int(a.k), 1).values, size)
                near("logits of the ids", s.gather(1, out[1]), out[0].double(), size)

        return Call(Args(args), lambda a: getattr(head, method)(**a), check, words=("rows", "target", "targets"))

    return make


for _name in ("forward", "log_prob", "predict", "topk"):
    generator("SampledClassifier.eval" if _name == "forward" else f"SampledClassifier.{_name}", 0.5)(_answers(_name))


# ------------------------------------------------------------------------------------------------ optimizers, metrics
def _step(name: str) -> Callable[[Dice], Call]:
    def make(d: Dice) -> Call:
        classes, dim, n = d.int(2, 8), d.width(), d.int(0, 5)
        start = d.normal(classes, dim)
        weight = torch.nn.Parameter(start.clone())
        optimizer = getattr(sx.optim, name)([weight], lr=0.1)
        ids = torch.tensor(sorted({d.int(0, classes - 1) for _ in range(n)}), dtype=torch.int64)
        args = {"ids": ids, "rows": d.normal(len(ids), dim)}

        def run(a: Args) -> Any:
            try:
                weight.grad = torch.sparse_coo_tensor(a.ids.unsqueeze(0), a.rows, weight.shape, check_invariants=True)
            except Exception:
                return None  # torch itself does not make such a gradient
            optimizer.step()
            return weight.detach().clone()

        def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
            if out is None or not all_ordinary(torch.as_tensor(a.rows)):
                return
            expect(bool(out.isfinite().all()), "rows must stay finite")
            rest = torch.ones(classes, dtype=torch.bool)
            rest[a.ids.long()] = False
            expect(torch.equal(out[rest], start[rest]), "rows without a gradient must not change")

        return Call(Args(args), run, check, words=("grad", "gradient", "weight", "parameter", "param"))

    return make


for _name in ("RowSGD", "RowAdagrad", "RowAdam"):
    generator(f"optim.{_name}.step", 0.5)(_step(_name))


def _metric(name: str) -> Callable[[Dice], Call]:
    def make(d: Dice) -> Call:
        batch, k = d.size(), d.int(1, 5)
        args: dict[str, Any] = {
            "ids": torch.rand(batch, 9, generator=d.g).argsort(1)[:, :k], "targets": d.ids(9, batch, d.int(1, 3))
        }  # fmt: skip
        if name.endswith("_at_k"):
            args["k"] = d.int(1, k)

        def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
            if not changed and batch:
                expect(0.0 <= float(out) <= 1.0 + 1e-6, f"{name} must be in [0, 1], got {out}")

        return Call(Args(args), lambda a: getattr(metrics, name)(**a), check, words=("rows",))

    return make


for _name in ("precision_at_k", "recall_at_k", "ndcg_at_k", "mrr", "accuracy"):
    generator(f"metrics.{_name}", 0.25)(_metric(_name))
