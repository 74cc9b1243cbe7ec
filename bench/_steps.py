"""The sides of a training step of a class table: draw, loss, gradient of h, Adagrad update.

  Ours      a SampledClassifier, its RowAdagrad fused into backward or not, any sampler by name
  Eager     torch alone: torch.randint, a sparse embedding, bmm or matmul, cross_entropy, torch.optim.Adagrad
  Compiled  the same with the loss under torch.compile; gather and optimizer stay outside
  Fbgemm    the same with FBGEMM's table (SplitTableBatchedEmbeddingBagsCodegen, EXACT_ADAGRAD), if it is installed
  Full      all classes: F.linear, cross_entropy, a dense gradient, torch.optim.Adagrad

Every side has `step(h, y)`, `parameters()` and `sums()`. `refcheck` runs one step of each side on the same draws and
compares it with fp64.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import shutil
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as nnf
from _harness import Side, check_close, make_table
from torch import Tensor

import samplex_cuda as sx
from samplex_cuda.products import product

SETS, RATE, EPS = 8, 0.05, 1e-10
FBGEMM = "fbgemm-gpu-cpu==1.8.0"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What a step is measured at."""

    classes: int
    dim: int = 128
    batch: int = 256
    m: int = 64
    shared: bool = False
    bias: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def draws(self) -> tuple[int, ...]:
        """Shape of the draws."""
        return (self.m,) if self.shared else (self.batch, self.m)

    @property
    def config(self) -> dict[str, Any]:
        """The configuration stored with a row, without default values."""
        config: dict[str, Any] = {"C": self.classes, "d": self.dim, "B": self.batch, "m": self.m}
        if self.shared:
            config["shared"] = True
        if self.bias:
            config["bias"] = True
        if self.dtype is not torch.float32:
            config["dtype"] = str(self.dtype).removeprefix("torch.")
        return config


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Rotating batches: hidden [B, d], targets [B] and contexts [B]."""

    h: list[Tensor]
    y: list[Tensor]
    context: list[Tensor]


@dataclasses.dataclass(frozen=True)
class Draws:
    """Negatives [B, m] or [m] with their log_q."""

    ids: Tensor
    log_q: Tensor


def make_inputs(sizes: Sizes, device: torch.device) -> Inputs:
    """Eight batches, so that a step does not find its rows in the cache from the step before."""
    ids = [torch.randint(sizes.classes, (2, sizes.batch), device=device) for _ in range(SETS)]
    h = [torch.randn(sizes.batch, sizes.dim, device=device).to(sizes.dtype).requires_grad_(True) for _ in range(SETS)]
    return Inputs(h, [pair[0] for pair in ids], [pair[1] for pair in ids])


def make_parameters(sizes: Sizes, device: torch.device) -> list[torch.nn.Parameter]:
    """A table [C, d], and a bias [C] if the sizes ask for one."""
    table = make_table(sizes.classes, sizes.dim, device=device, dtype=sizes.dtype)
    made = [torch.nn.Parameter(table)]
    if sizes.bias:
        made.append(torch.nn.Parameter((torch.randn(sizes.classes, device=device) * 0.1).to(sizes.dtype)))
    return made


def make_sampler(name: str, classes: int, device: torch.device) -> torch.nn.Module:
    """uniform, log-uniform, unigram (counts like 1 / rank) or bigram (eight pairs per context)."""
    if name == "uniform":
        sampler: torch.nn.Module = sx.samplers.Uniform(classes)
    elif name == "log-uniform":
        sampler = sx.samplers.LogUniform(classes)
    else:
        counts = 1e6 / torch.arange(1, classes + 1, dtype=torch.float64)
        if name == "unigram":
            sampler = sx.samplers.Unigram(counts)
        elif name == "bigram":
            offsets = torch.arange(classes + 1) * 8
            after = torch.randint(classes, (classes * 8,))
            sampler = sx.samplers.Bigram(offsets, after, torch.ones(classes * 8), unigram=counts)
        else:
            raise ValueError(f"make_sampler: name must be uniform, log-uniform, unigram or bigram, got {name!r}")
    return sampler.to(device)


# ----------------------------------------------------------------------------------------------------- the loss
def loss_of_rows(h: Tensor, rows: Tensor, bias: Tensor | None, y: Tensor, ids: Tensor, log_q: Tensor) -> Tensor:
    """Sampled softmax of gathered rows: corrected by log_q + log m; a draw that hits the target is masked.

    Per row: rows [B, 1 + m, d] with the target first, one bmm. Shared: rows [B + m, d] with the targets first, one
    matmul for the negatives and a product per row for the positives. `bias` holds the values at the same places.
    """
    m = ids.shape[-1]
    if ids.dim() == 2:
        logits = torch.bmm(rows, h.unsqueeze(2)).squeeze(2)
        logits = logits if bias is None else logits + bias
        positives, negatives = logits[:, :1], logits[:, 1:]
    else:
        batch = y.shape[0]
        positives, negatives = (h * rows[:batch]).sum(1, keepdim=True), h @ rows[batch:].T
        if bias is not None:
            positives, negatives = positives + bias[:batch, None], negatives + bias[batch:]
    negatives = negatives - (log_q + math.log(m)).to(negatives.dtype)
    negatives = negatives.masked_fill(ids == y[:, None], -math.inf)
    return nnf.cross_entropy(torch.cat([positives, negatives], 1), torch.zeros_like(y))


def row_ids(y: Tensor, ids: Tensor) -> Tensor:
    """Targets and draws in the order that `loss_of_rows` wants."""
    return torch.cat([y[:, None], ids], 1) if ids.dim() == 2 else torch.cat([y, ids])


# ----------------------------------------------------------------------------------------------------- the sides
class Stepper(Protocol):
    """A side."""

    name: str

    def step(self, h: Tensor, y: Tensor) -> Tensor: ...


class Ours:
    """A head and its optimizer."""

    def __init__(
        self,
        sizes: Sizes,
        device: torch.device,
        sampler: str = "uniform",
        *,
        fused: bool = True,
        rowwise: bool = False,
        stochastic_rounding: bool = False,
    ) -> None:
        self.name = "ours" if fused else "unfused"
        self.sizes, self.fused = sizes, fused
        source = make_sampler(sampler, sizes.classes, device)
        with torch.device("meta"):
            self.head = sx.SampledClassifier(
                sizes.dim, sizes.classes, source, sizes.m, bias=sizes.bias, shared=sizes.shared, dtype=sizes.dtype
            )
        self.head.weight, *rest = make_parameters(sizes, device)
        if rest:
            self.head.bias = rest[0]
        self.optimizer = sx.optim.RowAdagrad(
            self.head.parameters(), lr=RATE, eps=EPS, rowwise=rowwise, stochastic_rounding=stochastic_rounding
        )
        if fused:
            self.head.fuse_optimizer(self.optimizer)

    def step(self, h: Tensor, y: Tensor, key: sx.Key | None = None, context: Tensor | None = None) -> Tensor:
        h.grad = None
        loss = self.head(h, y, key=key, context=context)
        loss.backward()
        if not self.fused:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.detach()

    def draw(self, h: Tensor, y: Tensor, key: sx.Key, context: Tensor | None = None) -> Draws:
        """What `step` draws with this key."""
        exclude = None if self.sizes.shared else y
        sampler: Any = self.head.sampler
        got = sampler.sample(
            h.detach(), self.sizes.m, shared=self.sizes.shared, key=key, exclude=exclude, context=context
        )
        return Draws(got.ids, got.log_q)

    def parameters(self) -> list[Tensor]:
        return list(self.head.parameters())

    def sums(self) -> list[Tensor]:
        return [self.optimizer.state[p]["sum"] for p in self.head.parameters()]


class Eager:
    """What a person writes with torch alone."""

    name = "eager torch"

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.sizes, self.device = sizes, device
        self.log_q = torch.full(sizes.draws, -math.log(sizes.classes), device=device)
        self.loss: Callable[..., Tensor] = loss_of_rows
        self.make_state()

    def make_state(self) -> None:
        self.weight, *rest = make_parameters(self.sizes, self.device)
        # As nn.Embedding(C, 1): a view of a [C] parameter cannot pass a sparse gradient on.
        self.bias = torch.nn.Parameter(rest[0].detach().unsqueeze(1)) if rest else None
        self.optimizer = torch.optim.Adagrad(self.parameters(), lr=RATE, eps=EPS)

    def gather(self, at: Tensor) -> tuple[Tensor, Tensor | None]:
        """Rows of the table and values of the bias."""
        rows = nnf.embedding(at, self.weight, sparse=True)
        if self.bias is None:
            return rows, None
        return rows, nnf.embedding(at, self.bias, sparse=True).squeeze(-1)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, h: Tensor, y: Tensor, draws: Draws | None = None) -> Tensor:
        h.grad = None
        if draws is None:
            draws = Draws(torch.randint(self.sizes.classes, self.sizes.draws, device=self.device), self.log_q)
        rows, bias = self.gather(row_ids(y, draws.ids))
        loss = self.loss(h, rows, bias, y, draws.ids, draws.log_q)
        loss.backward()
        self.update()
        return loss.detach()

    def parameters(self) -> list[Tensor]:
        """The table [C, d], and the bias [C, 1] where there is one."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    def sums(self) -> list[Tensor]:
        return [self.optimizer.state[p]["sum"] for p in self.parameters()]


class Compiled(Eager):
    """`Eager` with its loss under torch.compile: forward and backward are one kernel each, apart from the GEMMs."""

    name = "compiled loss"

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        super().__init__(sizes, device)
        self.loss = torch.compile(loss_of_rows, dynamic=False, fullgraph=True)

    @staticmethod
    def missing() -> str:
        """Why this side cannot run here; empty if it can."""
        found = any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++") if name)
        return "" if found else "compiled loss not measured: torch.compile needs a C++ compiler"


class Fbgemm(Eager):
    """`Eager` with FBGEMM's table, which updates its rows inside backward. No bias."""

    name = "FBGEMM"

    def __init__(self, sizes: Sizes, device: torch.device, *, compiled: bool = False) -> None:
        if sizes.bias or sizes.dtype is not torch.float32:
            raise ValueError(f"Fbgemm: sizes must be fp32 without a bias, got {sizes}")
        super().__init__(sizes, device)
        if compiled:
            self.name = "FBGEMM, compiled loss"
            self.loss = torch.compile(loss_of_rows, dynamic=False, fullgraph=True)

    @staticmethod
    def missing() -> str:
        """Why this side cannot run here; empty if it can."""
        found = importlib.util.find_spec("fbgemm_gpu") is not None
        return "" if found else f"FBGEMM not measured: {FBGEMM} is not installed"

    def make_state(self) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        sizes, cpu = self.sizes, self.device.type == "cpu"
        place = (EmbeddingLocation.HOST, ComputeDevice.CPU) if cpu else (EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
        self.tables = SplitTableBatchedEmbeddingBagsCodegen(
            [(sizes.classes, sizes.dim, *place)],
            optimizer=EmbOptimType.EXACT_ADAGRAD,
            learning_rate=RATE,
            eps=EPS,
        )
        # The same memory as the other sides have: on huge pages where the system gives them.
        (table,) = make_parameters(sizes, self.device)
        setattr(self.tables, "weights_host" if cpu else "weights_dev", torch.nn.Parameter(table.detach().view(-1)))
        self.weight, self.bias = self.tables.split_embedding_weights()[0], None
        if self.weight.data_ptr() != table.data_ptr():
            raise AssertionError("Fbgemm: the table must be the one that was given")
        # A bag of one row for each id: the pooled output is the gather.
        rows = sizes.batch + sizes.m if sizes.shared else sizes.batch * (1 + sizes.m)
        self.offsets = torch.arange(rows + 1, device=self.device)

    def gather(self, at: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.tables(at.reshape(-1), self.offsets).view(*at.shape, self.sizes.dim), None

    def update(self) -> None:
        """Nothing to do: backward has made the update."""

    def sums(self) -> list[Tensor]:
        return [self.tables.split_optimizer_states()[0][0].view(self.sizes.classes, -1)]


class Full:
    """All classes, dense."""

    name = "full softmax"

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.weight, *rest = make_parameters(sizes, device)
        self.bias = rest[0] if rest else None
        self.optimizer = torch.optim.Adagrad([self.weight, *rest], lr=RATE, eps=EPS)

    def step(self, h: Tensor, y: Tensor) -> Tensor:
        h.grad = None
        loss = nnf.cross_entropy(nnf.linear(h, self.weight, self.bias), y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def refcheck(self, h: Tensor, y: Tensor) -> str:
        """Loss of one step against fp64."""
        w, x = self.weight.detach().double(), h.detach().double()
        logits = nnf.linear(x, w, None if self.bias is None else self.bias.detach().double())
        want = (torch.logsumexp(logits, 1) - logits.gather(1, y[:, None]).squeeze(1)).mean()
        del logits
        return f"full softmax loss: {check_close('full softmax loss', self.step(h, y), want, 1e-5):.1e}"


class Gemms:
    """The three matrix products that no step with shared draws can do without, by torch or by this library."""

    def __init__(self, sizes: Sizes, device: torch.device, own: bool) -> None:
        self.name = "our three GEMMs" if own else "torch's three GEMMs"
        self.multiply = product if own else lambda a, b, out: torch.mm(a, b, out=out)
        rows = torch.randn(sizes.m, sizes.dim, device=device, dtype=sizes.dtype)
        self.rows, self.d_rows = rows, torch.empty_like(rows)
        self.logits = torch.empty(sizes.batch, sizes.m, device=device, dtype=sizes.dtype)
        self.d_h = torch.empty(sizes.batch, sizes.dim, device=device, dtype=sizes.dtype)

    def step(self, h: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            self.multiply(h, self.rows.T, self.logits)
            self.multiply(self.logits, self.rows, self.d_h)
            self.multiply(self.logits.T, h, self.d_rows)
        return self.d_rows


class RawOps:
    """The ops of a step inside an empty autograd Function: no module, no checks, no optimizer.

    What Python around the ops could at best be cut to: the floor of a step's overhead. The key comes from torch's
    generator, as in a step. Without `fused`, autograd accumulates the sparse gradient, and the update reads it.
    """

    name = "raw ops"

    def __init__(self, sizes: Sizes, device: torch.device, fused: bool = True) -> None:
        ours = Ours(sizes, device, fused=fused)
        weight, sampler = ours.head.weight, ours.head.sampler
        ours.step(
            torch.randn(sizes.batch, sizes.dim, device=device),
            torch.zeros(sizes.batch, dtype=torch.int64, device=device),
        )
        at: Any = ours.optimizer.begin(weight)
        law: Any = sampler.law()  # type: ignore[union-attr, operator]
        key = torch.tensor([1, 2], device=device)
        draw, update = torch.ops.samplex.sampled_softmax_static.default, torch.ops.samplex.loss_update_.default
        below = torch._C._AutoDispatchBelowAutograd
        rows_of, apply = torch.ops.samplex.sampled_softmax_bwd.default, torch.ops.samplex.row_apply_.default
        coo = torch.ops.aten._sparse_coo_tensor_unsafe.default

        class Step(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, h: Tensor, y: Tensor, table: Tensor) -> Tensor:
                key.random_((1 << 63) - 1)
                with below():
                    loss, ids, saved, d_h = draw(h, table, y, key, sizes.m, law.number, sizes.shared, None, fused)
                ctx.kept = h, y, ids, saved
                ctx.d_h = [d_h]
                return loss

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
                h, y, ids, saved = ctx.kept
                if not fused:
                    d_h, row_ids, rows, _, count = rows_of(
                        grad, None, h, y, ids, saved, sizes.classes, 1, False, True, False
                    )
                    n = count.item()
                    return d_h, None, coo(row_ids.as_strided((1, n), (n, 1)), rows.narrow(0, 0, n), weight.shape)
                with below():
                    update(weight, grad, h, y, ids, saved, at.rule, at.state0)
                return ctx.d_h.pop(), None, None

        self._apply = super(torch.autograd.Function, Step).apply
        self._table = weight

        def update_from_grad() -> None:
            grad, weight.grad = weight.grad, None
            with below():
                apply(
                    weight, at.state0, None, grad._indices()[0].contiguous(), grad._values(), None, None, at.rule
                )  # fmt: skip

        self._update = None if fused else update_from_grad

    def step(self, h: Tensor, y: Tensor) -> Tensor:
        h.grad = None
        loss = self._apply(h, y, self._table)
        loss.backward()
        if self._update is not None:
            self._update()
        return loss.detach()


def rivals(sizes: Sizes, device: torch.device) -> tuple[list[Eager], str]:
    """The other sides that this machine can run, and a note on those that it cannot."""
    sides: list[Eager] = [Eager(sizes, device)]
    missing = [Compiled.missing()]
    if not missing[0]:
        sides.append(Compiled(sizes, device))
    if sizes.dtype is torch.float32 and not sizes.bias:
        missing.append(Fbgemm.missing())
        if not missing[1]:
            sides.append(Fbgemm(sizes, device))
            if not missing[0]:
                sides.append(Fbgemm(sizes, device, compiled=True))
    return sides, "; ".join(text for text in missing if text)


def timed(side: Stepper, inputs: Inputs, name: str | None = None) -> Side:
    """A side over the rotating batches."""
    return Side(name or side.name, lambda i: side.step(inputs.h[i % SETS], inputs.y[i % SETS]))


# ----------------------------------------------------------------------------------------------------- checks
# Of the loss, d_hidden, the sums and the change of a row. bf16: half a step of a weight near 0.5 is 0.001, 2 % of what
# the first step of Adagrad moves.
_TOLERANCES = {torch.float32: (1e-5, 1e-4, 1e-4, 1e-2), torch.bfloat16: (1e-4, 2**-8, 1e-2, 2.5e-2)}


def refcheck(sides: Sequence[Ours | Eager], of_draw: Ours, h: Tensor, y: Tensor, context: Tensor | None = None) -> str:
    """One step of each side with the draws of one key: loss, d_hidden, updated rows and sums against fp64."""
    # A key moves on with each use, so every draw gets a new one.
    draws = of_draw.draw(h, y, sx.Key(11), context)
    batch = y.shape[0]
    touched, at = torch.unique(torch.cat([y, draws.ids.reshape(-1)]), return_inverse=True)
    target, ids = at[:batch], at[batch:].reshape(draws.ids.shape)
    where = row_ids(target, ids)
    worst = 0.0
    for side in sides:
        of_loss, of_h, of_sums, of_change = _TOLERANCES[side.sizes.dtype]
        before, sums = _at(side.parameters(), touched), _at(side.sums(), touched)
        exact = [p.clone().requires_grad_(True) for p in before]
        exact_h = h.detach().double().requires_grad_(True)
        bias = exact[1][where] if len(exact) > 1 else None
        want = loss_of_rows(exact_h, exact[0][where], bias, target, ids, draws.log_q)
        want.backward()
        got = side.step(h, y, sx.Key(11), context) if isinstance(side, Ours) else side.step(h, y, draws)
        assert h.grad is not None
        assert exact_h.grad is not None
        name = side.name
        worst = max(
            worst,
            check_close(f"{name} loss", got, want.detach(), of_loss),
            check_close(f"{name} d_hidden", h.grad, exact_h.grad, of_h),
        )
        after, new_sums = _at(side.parameters(), touched), _at(side.sums(), touched)
        for i, part in enumerate(["rows", "bias"][: len(exact)]):
            grad = exact[i].grad
            assert grad is not None
            by_row = sums[i].dim() < grad.dim()
            total = sums[i] + (grad.square().mean(1) if by_row else grad.square())
            moved = -RATE * grad / ((total.unsqueeze(1) if by_row else total).sqrt() + EPS)
            # Adagrad's first step is the sign of the gradient: near 0 it depends on the last bit, so skip those.
            clear = grad.abs() > 1e-5 * grad.abs().max()
            worst = max(
                worst,
                check_close(f"{name} sums of the {part}", new_sums[i], total, of_sums),
                check_close(f"{name} change of the {part}", (after[i] - before[i])[clear], moved[clear], of_change),
            )
    return f"loss, d_hidden, updated rows and sums of each side vs fp64: {worst:.1e}"


def _at(tables: Sequence[Tensor], rows: Tensor) -> list[Tensor]:
    """Rows of each table in fp64; a bias [C, 1] as [C]."""
    return [t.detach()[rows].double().reshape(rows.shape[0], *[n for n in t.shape[1:] if n > 1]) for t in tables]
