"""Errors name op, argument, what was wanted and what came, on every layer."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch
from head_cases import C, D, batch, make

import samplex_cuda as sx
from samplex_cuda import functional as F

B, M = 3, 5
H, W, Y = torch.randn(B, D), torch.randn(C, D), torch.tensor([1, 2, 3])
IDS, LOG_Q = torch.arange(B * M).reshape(B, M) + 5, torch.full((B, M), -3.0)


def sampled(**changed):
    args = {"h": H, "weight": W, "target": Y, "ids": IDS, "log_q": LOG_Q} | changed
    return F.sampled_softmax(**args)


WORDS = [
    (lambda: sampled(weight=W.to_sparse()), TypeError, r"sampled_softmax: weight must be a dense tensor .*sparse_coo"),
    (lambda: sampled(h=H.to_sparse()), TypeError, "sampled_softmax: h must be a dense tensor"),
    (lambda: sampled(target=Y.to_sparse()), TypeError, "sampled_softmax: target must be a dense tensor"),
    (lambda: sampled(scale="x"), ValueError, "sampled_softmax: scale must be finite, got 'x'"),
    (lambda: sampled(scale=None), ValueError, "sampled_softmax: scale must be finite, got None"),
    (lambda: sampled(scale=float("nan")), ValueError, "sampled_softmax: scale must be finite, got nan"),
    (lambda: sampled(ignore_index="x"), ValueError, "sampled_softmax: ignore_index must be an int"),
    (lambda: F.one_vs_each(H, W, Y, IDS, LOG_Q, scale="x"), ValueError, "one_vs_each: scale must be finite"),
    (lambda: F.full_softmax(H, W, Y, scale="x"), ValueError, "full_softmax: scale must be finite, got 'x'"),
    (lambda: F.full_softmax(H, W, Y, ignore_index=1.5), ValueError, "full_softmax: ignore_index must be an int"),
    (lambda: F.full_softmax(H.to_sparse(), W, Y), TypeError, "full_softmax: h must be a dense tensor"),
    (lambda: F.contrastive(H, H, sampler=5), TypeError, "contrastive: sampler must be a sampler .* got 5"),
    (lambda: F.contrastive(H, H, scale="x"), ValueError, "contrastive: scale must be finite, got 'x'"),
    (lambda: F.attention_pool(IDS, W.to_sparse(), H[0], H[1]), TypeError, "embedding must be a dense tensor"),
    (lambda: sx.rff.features(H.to_sparse(), W), TypeError, "rff.features: x must be a dense tensor"),
    (lambda: sx.rff.features(H, W, kind="positive", nu=1.0, shift="x"), ValueError, "shift must be finite, got 'x'"),
    (lambda: sx.SampledClassifier(D, C), TypeError, r"sampler must be .*got None; take sx.samplers.LogUniform\(97\)"),
    (lambda: sx.SampledClassifier(D, C, num_samples=4), TypeError, "sampler must be a sampler"),
    (lambda: make(num_samples=None), ValueError, "num_samples must be an int of at least 1, got None"),
    (lambda: make(ignore_index="x"), ValueError, "SampledClassifier: ignore_index must be an int"),
    (lambda: make(class_weight=3), ValueError, r"class_weight must be \[97\] float32, got 3"),
    (lambda: make(dtype="x"), TypeError, "dtype must be floating point, got 'x'"),
    (lambda: make()(H.to_sparse(), Y), TypeError, "SampledClassifier.*: h must be a dense tensor"),
    (lambda: make()(H, Y.to_sparse()), ValueError, r"y must be \[3\] .*got \[3\] int64 sparse_coo"),
]


@pytest.mark.parametrize(("call", "kind", "words"), WORDS)
def test_words(call, kind, words):
    with pytest.raises(kind, match=words) as caught:
        call()
    assert len(str(caught.value).splitlines()) == 1


def fitted() -> sx.samplers.Tree:
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(200, D, generator=g), torch.randint(0, C, (200,), generator=g)
    return sx.samplers.Tree.fit(x, y, num_classes=C, dim=3, progress=False)


SAMPLERS = {
    "uniform": lambda: sx.samplers.Uniform(C),
    "unigram": lambda: sx.samplers.Unigram(torch.ones(C)),
    "quadratic": lambda: sx.samplers.Quadratic(W),
    "softmax": lambda: sx.samplers.Softmax(W),
    "tree": fitted,
    "mixture": lambda: sx.samplers.Mixture([(sx.samplers.Uniform(C), 1), (sx.samplers.Unigram(torch.ones(C)), 1)]),
}


@pytest.mark.parametrize("loss", ["sampled_softmax", "nce"])
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_bad_target_is_blamed_on_y(name, loss):
    head = make(sampler=SAMPLERS[name](), bias=False, loss=loss, sampler_update=None)
    h, y = batch()
    y[2] = C + 4
    with pytest.raises(
        IndexError, match=rf"SampledClassifier: y must be in \[0, {C}\) or ignore_index=-100, got {C + 4}$"
    ):
        head(h, y)


def test_a_bad_exclude_of_the_callers_is_not():
    with pytest.raises(IndexError, match="exclude must be"):
        sx.samplers.Uniform(C).sample(H, 3, exclude=Y + C)


# ------------------------------------------------------------------------------------------------ state dicts
def test_another_sampler_in_a_state_dict():
    head, other = make(sampler=sx.samplers.Unigram(torch.ones(C))), make(sampler=SAMPLERS["quadratic"](), bias=True)
    with pytest.raises(RuntimeError, match=r"holds another sampler, with rows, .*this head has a Unigram.*linear\(\)"):
        head.load_state_dict(other.state_dict())
    head.load_state_dict(other.linear().state_dict())
    assert torch.equal(head.weight, other.weight)


def test_another_size_in_a_state_dict():
    head, other = make(), make(num_classes=C + 3, dim=D + 1)
    words = rf"has {C + 3} classes of width {D + 1}, this head has {C} of width {D}: make it with SampledClassifier\("
    with pytest.raises(RuntimeError, match=words):
        head.load_state_dict(other.state_dict())


def test_states_that_fit_are_not_commented():
    for name, sampler in SAMPLERS.items():
        head = make(sampler=sampler(), bias=False)
        head.load_state_dict(head.state_dict())
        old = {k: t for k, t in head.state_dict().items() if not k.endswith("fit_options")}  # as of 0.1
        head.load_state_dict(old)
        assert name


# ------------------------------------------------------------------------------------------------ raw ops
NONE_FOR_EACH = """
import re, sys, torch, samplex_cuda
from samplex_cuda.ops import attention_pool, bigram_sample, entry_loss, full_softmax, kernel_tree, predict, rff  # noqa
from samplex_cuda.ops import row_rules, sampled_softmax, subset_sample, tree, tree_shared  # noqa
checked = 0
for name in torch._C._dispatch_get_all_op_names():
    if not name.startswith("samplex::"):
        continue
    packet = getattr(torch.ops.samplex, name.removeprefix("samplex::").split(".")[0])
    for overload in packet.overloads():
        op = getattr(packet, overload)
        kinds = [str(a.type) for a in op._schema.arguments]
        tensors = [i for i, kind in enumerate(kinds) if kind == "Tensor"]
        plain = {"Tensor": torch.ones(2, 2), "int": 1, "float": 1.0, "bool": False, "List[float]": [0.0] * 8}
        given = [plain.get(kind) for kind in kinds]
        for at in tensors if len(tensors) > 1 else ():
            args = list(given)
            args[at] = None
            try:
                op(*args)
                sys.exit(f"{name} takes None for {op._schema.arguments[at].name}")
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                text = str(error).splitlines()[0]
            if not re.match(r"((Type|Value|Index)Error: )?[a-z_]+: ", text) or "originally from" in text:
                sys.exit(f"{name}, {op._schema.arguments[at].name} = None: {text}")
            checked += 1
print(checked)
"""


def test_ops_refuse_none_in_their_own_words():
    """In a separate process, because a C++ exception across the stable ABI prints its stack to stderr."""
    done = subprocess.run([sys.executable, "-c", NONE_FOR_EACH], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-600:]
    assert int(done.stdout) > 60
    assert "frame #" not in done.stderr


def test_sizes_of_backward_ops_are_checked():
    ops = torch.ops.samplex
    tail = (None, None, None, None, 1.0, 0.0, -100, 1, False, True, False, True, True)
    saved = ops.sampled_softmax(H, W, Y, IDS, LOG_Q, *tail)[2]
    one = torch.tensor(1.0)
    with pytest.raises(RuntimeError, match="ValueError: sampled_softmax_bwd: num_classes must be at least 0, got -5"):
        ops.sampled_softmax_bwd(one, None, H, Y, IDS, saved, -5, 1, False, True, False)
    with pytest.raises(RuntimeError, match="ValueError: nce_bwd: num_classes must be at least 0, got -5"):
        ops.entry_loss_bwd(one, H, Y, IDS, saved, 1, -5, 1, True, False)
    target = Y[:, None]
    for changed, words in (
        ({"chunk_size": -5}, "chunk_size must be an int of at least 0, got -5"),
        ({"hidden": H[:, :2]}, re.escape(f"hidden must be [B, {D}]")),
        ({"target": target.float()}, "target must be .* int64"),
        ({"weight": W.to_sparse()}, "weight must be a dense tensor"),
        ({"weight": W[:0]}, "weight must be .* with C >= 1"),
        ({"bias": torch.zeros(3)}, "bias must be"),
    ):
        args = {"hidden": H, "weight": W, "target": target, "bias": None, "class_weight": None, "scale": 1.0}
        args |= {"label_smoothing": 0.0, "ignore_index": -100, "absolute": False, "chunk_size": 0} | changed
        with pytest.raises((ValueError, TypeError), match=f"full_softmax: {words}"):
            ops.full_softmax(**args)
