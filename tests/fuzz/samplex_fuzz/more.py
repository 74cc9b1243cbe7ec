"""Generators of what changes objects or makes them: sampler updates, state dicts of heads, constructors, helpers."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import samplex_cuda as sx
from samplex_cuda import losses, metrics, rff, tables
from samplex_fuzz.call import Args, Call, Dice, PoisonedError, generator
from samplex_fuzz.oracle import all_ordinary, drawn, expect, has_form, is_meta, near
from samplex_fuzz.public import _DIM, _SAMPLERS, _head

_MOST = 1 << 22  # numbers: larger tables are legal, and only take long


def _small(*sizes: Any) -> bool:
    return math.prod(s for s in sizes if isinstance(s, int)) <= _MOST


_FOLLOW = ("Quadratic", "RandomFourier", "MIDX", "Softmax", "Quartic")


def _still_draws(sampler: Any, h: Tensor, refused: Exception) -> None:
    try:
        draw = sampler.sample(h, 3, key=torch.zeros(2, dtype=torch.int64))
        drawn(draw.ids, draw.log_q, (len(h), 3), sampler.num_classes)
    except Exception as error:
        raise PoisonedError(f"refused ({refused}), then sample gave {type(error).__name__}: {error}") from None


# ------------------------------------------------------------------------------------------------ samplers
def _follow(name: str, method: str) -> Callable[[Dice], Call]:
    """`update` of some rows or `rebuild` from a whole table, then a draw."""

    def make(d: Dice) -> Call:
        sampler = _SAMPLERS[name](d, d.int(2, 12))
        classes, h = sampler.num_classes, d.normal(3, _DIM)
        if method == "rebuild":
            args: dict[str, Any] = {"weight": d.normal(classes, _DIM)}
        else:
            ids = torch.tensor(sorted({d.int(0, classes - 1) for _ in range(d.int(1, 4))}), dtype=torch.int64)
            args = {"ids": ids, "rows": d.normal(len(ids), _DIM)}

        def run(a: Args) -> Any:
            try:
                getattr(sampler, method)(**a)
            except Exception as refused:
                _still_draws(sampler, h, refused)
                raise
            return sampler.sample(h, 4, key=torch.ones(2, dtype=torch.int64))

        def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
            if is_meta(*a.values()) or not all_ordinary(*a.values()):
                return
            drawn(out.ids, out.log_q, (3, 4), classes)
            again = sampler.log_prob(h, out.ids)
            near("log_q against log_prob", out.log_q, again, 1e-3 * (1 + float(out.log_q.abs().max())))

        return Call(Args(args), run, check, words=("table", "features", "numbers"))

    return make


for _name in _FOLLOW:
    for _method in ("update", "rebuild"):
        generator(f"samplers.{_name}.{_method}", 0.3)(_follow(_name, _method))


@generator("diagnostics.leak", 0.3)
def _leak(d: Dice) -> Call:
    head, rows = _head(d), d.size()
    args: dict[str, Any] = {"h": d.normal(rows, _DIM), "num_samples": d.int(1, 50)}
    if d.maybe(0.5):
        args["y"] = d.ids(head.num_classes, rows)

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if is_meta(*a.values()) or not all_ordinary(*a.values()):
            return
        has_form("leak", out, a.h.shape[:-1], torch.float64)
        expect(bool(((out >= 0) & (out <= 1.0001)).all()), f"leak must be a share, got {out}")

    return Call(Args(args), lambda a: sx.diagnostics.leak(head, **a), check)


@generator("samplers.Unigram", 0.4)
def _unigram(d: Dice) -> Call:
    args = {"counts": d.uniform(d.int(1, 9), low=0.0, high=9.0), "power": d.pick((1.0, 0.75, 0.0))}

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        counts = torch.as_tensor(a.counts).double()
        if is_meta(counts) or not all_ordinary(counts) or not 0 <= float(a.power) < 20:
            return
        want = counts.pow(float(a.power)) * (counts > 0)
        near("law", out.log_prob_all()[0].double().exp(), want / want.sum(), 1e-6)

    return Call(Args(args), lambda a: sx.samplers.Unigram(a.counts, a.power), check, words=("weights", "num_classes"))


def _sizes(name: str) -> Callable[[Dice], Call]:
    def make(d: Dice) -> Call:
        args = {"num_classes": d.pick((1, 2, 17, 1 << 20, 1 << 40))}

        def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
            draw = out.sample(None, 3, batch_size=2, key=torch.zeros(2, dtype=torch.int64))
            drawn(draw.ids, draw.log_q, (2, 3), out.num_classes)

        return Call(Args(args), lambda a: getattr(sx.samplers, name)(**a), check)

    return make


for _name in ("Uniform", "LogUniform"):
    generator(f"samplers.{_name}", 0.2)(_sizes(_name))


@generator("samplers.Uniform.subset", 0.3)
def _subset(d: Dice) -> Call:
    batch, classes = d.size(), d.int(2, 12)
    sampler = sx.samplers.Uniform(classes)
    exclude = d.ids(classes, batch) if d.maybe(0.5) else None
    args = {"num_samples": d.int(0, classes - 1), "exclude": exclude, "key": d.key(), "batch_size": batch}

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if is_meta(*a.values()):
            return
        drawn(out.ids, out.log_q, (int(a.batch_size), int(a.num_samples)), classes)
        expect(all(len(set(row)) == len(row) for row in out.ids.tolist()), "ids of a row must be distinct")

    return Call(Args(args), lambda a: sampler.subset(**a), check, words=("rows",), fixed=frozenset({"batch_size"}))


# ------------------------------------------------------------------------------------------------ heads
@generator("SampledClassifier.load_state_dict", 1.0)
def _load_head(d: Dice) -> Call:
    """Altered tables into a head, then a step: nothing may be read outside of the buffers."""
    head = _head(d)
    args = {key: value.clone() for key, value in head.state_dict().items() if isinstance(value, Tensor)}
    h, y = d.normal(3, _DIM), d.ids(head.num_classes, 3)
    key = torch.zeros(2, dtype=torch.int64)

    def run(a: Args) -> Any:
        try:
            head.load_state_dict(dict(a))
        except Exception as refused:
            try:
                head(h, y, key=key).backward()
            except Exception as error:
                if not bool(head.weight.isfinite().all()) or float(head.weight.detach().abs().max()) > 1e3:
                    raise refused from None  # torch loads what it can: the weights are new, and no sampler takes them
                text = f"load_state_dict refused ({refused}), then a step raised {type(error).__name__}: {error}"
                raise PoisonedError(text) from None
            raise
        return head(h, y, key=key).detach()

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if (
            not is_meta(*a.values())
            and all_ordinary(*a.values())
            and not any(n.startswith("sampler.") for n in changed)
        ):
            expect(bool(out.isfinite()), f"the loss of ordinary tables must be finite, got {float(out)}")

    words = ("state_dict", "load_state_dict", "sampler", "weight", "bias", "table", "tables", "rows", "features")
    return Call(Args(args), run, check, words=words)


@generator("SampledClassifier.scores", 0.3)
def _scores(d: Dice) -> Call:
    head = _head(d).eval()
    args = {"h": d.normal(d.size(), _DIM), "corrected": d.maybe(0.5), "chunk_size": d.pick((None, 1, 5))}

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if is_meta(a.h) or a.h.dim() != 2 or not all_ordinary(a.h) or head.loss.name == "negative_sampling":
            return
        want = a.h.double() @ head.weight.double().T + (0.0 if head.bias is None else head.bias.double())
        near("scores", out, want, 1e-4 * (1 + float(want.abs().max() if want.numel() else 0.0)))

    return Call(Args(args), lambda a: head.scores(**a), check, words=("rows",))


@generator("SampledClassifier", 0.5)
def _make_head(d: Dice) -> Call:
    classes = d.int(1, 9)
    args = {
        "in_features": d.int(1, 9), "num_classes": classes, "sampler": sx.samplers.Uniform(classes),
        "num_samples": d.int(1, 5), "loss": d.pick(("sampled_softmax", "nce", "full_softmax", losses.OneVsEach())),
        "bias": d.maybe(0.5), "shared": d.maybe(0.3), "scale": d.pick((1.0, 0.5)), "ignore_index": d.pick((-100, 0)),
        "sparse": d.maybe(0.7), "reduction": d.pick(("mean", "sum", "none")),
    }  # fmt: skip

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if out is not None:
            has_form("weight", out.weight.detach(), (int(a.num_classes), int(a.in_features)), torch.float32)

    def run(a: Args) -> Any:
        return sx.SampledClassifier(**a) if _small(a.num_classes, a.in_features) else None

    return Call(Args(args), run, check, words=("update", "sampler_update"))


# ------------------------------------------------------------------------------------------------ losses
def _loss(name: str, options: dict[str, Any]) -> Callable[[Dice], Call]:
    def make(d: Dice) -> Call:
        args = {key: d.pick(values) for key, values in options.items()}

        def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
            for option, value in a.items():
                if isinstance(value, float) and option != "absolute":  # any object is true or false
                    expect(math.isfinite(value), f"{option} must be refused, got {value}")

        return Call(Args(args), lambda a: getattr(losses, name)(**a), check)

    return make


for _name, _options in (
    ("SampledSoftmax", {"label_smoothing": (0.0, 0.1, 1.0), "absolute": (False, True)}),
    ("NegativeSampling", {"reg": (0.0, 0.5)}),
    ("AugmentReduce", {"num_examples": (1, 50), "rate": (0.1, 1.0)}),
    ("FullSoftmax", {"label_smoothing": (0.0, 0.1), "absolute": (False, True)}),
    ("Margin", {"m1": (1.0, 4.0), "m2": (0.0, 0.5), "m3": (0.0, 0.35)}),
    ("ArcFace", {"m": (0.0, 0.5)}),
    ("CosFace", {"m": (0.0, 0.35)}),
):
    generator(f"losses.{_name}", 0.1)(_loss(_name, _options))


# ------------------------------------------------------------------------------------------------ the rest
@generator("rff.frequencies", 0.3)
def _frequencies(d: Dice) -> Call:
    args = {
        "dim": d.int(1, 9), "num_features": d.int(1, 20), "nu": d.pick((0.5, 1.0, 4.0)),
        "kind": d.pick(("rff", "orf", "positive")), "key": d.key(),
    }  # fmt: skip

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if out is None:
            return
        has_form("frequencies", out, (int(a.num_features), int(a.dim)), torch.float32)
        expect(bool(out.isfinite().all()), "frequencies must be finite")

    def run(a: Args) -> Any:
        return rff.frequencies(**a) if _small(a.dim, a.num_features) else None

    return Call(Args(args), run, check)


@generator("rff.num_numbers", 0.1)
def _num_numbers(d: Dice) -> Call:
    args = {"kind": d.pick(rff.KINDS), "dim": d.int(1, 9), "num_features": d.int(1, 9)}

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if not isinstance(a.num_features, int):
            return  # "quadratic" does not look at it
        wanted = {"quadratic": a.dim * (a.dim + 1) // 2 + 1, "positive": a.num_features}
        expect(out == wanted.get(a.kind, 2 * a.num_features), f"num_numbers is wrong: {out}")

    return Call(Args(args), lambda a: rff.num_numbers(**a), check)


@generator("tables.mapped_table", 0.1)
def _mapped_table(d: Dice) -> Call:
    args = {"rows": d.int(1, 9), "width": d.int(1, 9), "dtype": d.pick((None, torch.float32, torch.bfloat16))}

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if out is not None:
            has_form("table", out, (int(a.rows), int(a.width)), a.dtype or torch.float32)
            expect(not out.any(), "a new file must hold zeros")

    def run(a: Args) -> Any:
        if not _small(a.rows, a.width):
            return None
        with tempfile.TemporaryDirectory() as folder:
            return tables.mapped_table(f"{folder}/table", a.rows, a.width, dtype=a.dtype)

    return Call(Args(args), run, check, words=("num_classes", "dim"))


@generator("tables.empty_table", 0.2)
def _empty_table(d: Dice) -> Call:
    args = {"rows": d.int(0, 9), "width": d.int(0, 9), "dtype": d.pick((None, torch.float32, torch.bfloat16))}

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if out is not None:
            has_form("table", out, (int(a.rows), int(a.width)), a.dtype or torch.float32)

    def run(a: Args) -> Any:
        return tables.empty_table(a.rows, a.width, dtype=a.dtype) if _small(a.rows, a.width) else None

    return Call(Args(args), run, check, words=("num_classes", "dim"))


@generator("tables.share", 0.2)
def _share(d: Dice) -> Call:
    args = {"tensor": d.normal(d.int(0, 5), 3)}

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        expect(isinstance(out, int) and out >= 0, f"share must give bytes, got {out!r}")

    return Call(Args(args), lambda a: tables.share(a.tensor), check, words=("owners", "owner"))


@generator("optim.clip_grad_norm_", 0.3)
def _clip(d: Dice) -> Call:
    weight = torch.nn.Parameter(d.normal(6, 3))
    weight.grad = torch.sparse_coo_tensor(torch.tensor([[1, 4]]), d.normal(2, 3), weight.shape, is_coalesced=True)
    norm = float(weight.grad.to_dense().norm())
    args = {"max_norm": d.pick((0.1, 1.0, 100.0)), "norm_type": 2.0}

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if a.norm_type == 2.0:
            near("norm", torch.as_tensor(out), torch.tensor(norm), 1e-4 * (1 + norm))

    return Call(Args(args), lambda a: sx.optim.clip_grad_norm_([weight], **a), check)


@generator("metrics.propensities", 0.2)
def _propensities(d: Dice) -> Call:
    args = {"counts": d.ids(50, d.int(1, 9)), "num_examples": d.int(1, 1000), "a": 0.55, "b": 1.5}

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if not changed:
            expect(bool(((out > 0) & (out <= 1)).all()), f"propensities must be in (0, 1], got {out.tolist()}")

    return Call(Args(args), lambda a: metrics.propensities(**a), check)


@generator("metrics.psp_at_k", 0.2)
def _psp(d: Dice) -> Call:
    batch, k = d.int(1, 5), d.int(1, 5)
    args = {
        "ids": torch.rand(batch, 9, generator=d.g).argsort(1)[:, :k], "targets": d.ids(9, batch, d.int(1, 3)),
        "k": d.int(1, k), "propensities": d.uniform(9, low=0.1, high=1.0),
    }  # fmt: skip

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if not changed:
            expect(0.0 <= float(out) <= 1.0 + 1e-6, f"psp must be in [0, 1], got {out}")

    return Call(Args(args), lambda a: metrics.psp_at_k(**a), check, words=("rows",))


@generator("metrics.perplexity", 0.1)
def _perplexity(d: Dice) -> Call:
    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        if not changed:
            expect(math.isclose(out, math.exp(a.nll)), f"perplexity must be exp(nll), got {out}")

    return Call(Args({"nll": d.pick((0.0, 1.0, 5.5))}), lambda a: metrics.perplexity(**a), check)


@generator("Key", 0.1)
def _key(d: Dice) -> Call:
    args = {"seed": d.r.getrandbits(40), "offset": d.int(0, 9)}

    def check(a: Args, out: Any, after: Args, changed: set[str]) -> None:
        expect(out.reserve().dtype == torch.int64, "a key must be int64")

    return Call(Args(args), lambda a: sx.Key(**a), check)
