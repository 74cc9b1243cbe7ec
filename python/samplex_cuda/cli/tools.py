"""`samplex fit-tree`, `samplex diagnose`, `samplex bench` and `samplex config`."""

from __future__ import annotations

import dataclasses
import math
import textwrap
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor

import samplex_cuda as sx
from samplex_cuda import data, samplers
from samplex_cuda import tree_fit as fitting
from samplex_cuda.cli.common import OK, Output, UserError, beside, check_device, check_writable, checked, read_config
from samplex_cuda.cli.inputs import open_labelled
from samplex_cuda.training import checkpoint, load_model, models, open_data
from samplex_cuda.training import config as configs

__all__ = ["bench", "diagnose", "fit_tree", "show_config"]

TREE_UP_TO = 1 << 21  # classes for which `diagnose` fits a tree of its own
TREE_DIM = 16


# ---------------------------------------------------------------------------------------------------- config
def show_config(out: Output, settings: list[str], comments: bool) -> tuple[dict[str, Any], int]:
    """The default configuration with some keys set, as TOML with what each key means.

    Example:
        >>> from samplex_cuda.cli.common import Output
        >>> from samplex_cuda.cli.tools import show_config
        >>> found, code = show_config(Output(True), ["training.epochs=3"], comments=False)
        >>> found["config"]["training"]["epochs"]
        3
    """
    chosen = configs.override(configs.Config(), settings)
    lines = []
    for table in dataclasses.fields(chosen):
        part = getattr(chosen, table.name)
        lines.append(f"[{table.name}]")
        for field in dataclasses.fields(part):
            if comments:
                meaning = f"{field.metadata['doc']} ({configs.checks.allowed_values(field)})"
                lines += [f"# {line}" for line in textwrap.wrap(meaning, 100, break_long_words=False)]
            lines.append(f"{field.name} = {configs.files.to_toml(getattr(part, field.name))}")
        lines.append("")
    if not out.as_json:
        out.say("\n".join(lines).rstrip())
    return {"config": chosen.as_dict()}, OK


# ---------------------------------------------------------------------------------------------------- fit-tree
def _examples(dataset: data.Dataset, limit: int, seed: int) -> tuple[Tensor, Tensor]:
    """(x, y) of some rows, x dense [n, K] or sparse CSR; a row with several labels comes once for each."""
    rows = torch.arange(len(dataset))
    if len(rows) > limit:
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randperm(len(dataset), generator=generator)[:limit].sort()[0]
    dense, ids, values, lengths, labels = [], [], [], [], []
    for some in rows.split(4096):
        batch = dataset.batch(some)
        y = batch["y"].reshape(len(some), -1)
        row, column = (y >= 0).nonzero(as_tuple=True)
        labels.append(y[row, column])
        if "x" in batch:
            dense.append(batch["x"][row])
            continue
        begins, sizes = batch["offsets"][:-1][row], batch["offsets"].diff()[row]
        where = torch.repeat_interleave(begins - (sizes.cumsum(0) - sizes), sizes) + torch.arange(int(sizes.sum()))
        ids.append(batch["ids"][where])
        values.append(batch["values"][where])
        lengths.append(sizes)
    y = torch.cat(labels)
    if dense:
        return torch.cat(dense), y
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cat(lengths).cumsum(0)])
    size = (len(y), dataset.num_features)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", UserWarning
        )  # torch calls its CSR tensors beta; the reader has checked the rows
        return torch.sparse_csr_tensor(ends, torch.cat(ids), torch.cat(values), size, check_invariants=False), y


def fit_tree(
    out: Output,
    path: str,
    *,
    form: str | None,
    options: list[str],
    target: Path,
    dim: int,
    reg: float,
    rows: int,
    held_out: float,
    seed: int,
    unseen: bool = True,
) -> tuple[dict[str, Any], int]:
    """Fits a tree sampler to the features and labels of a file; returns the JSON object and the exit code.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from samplex_cuda.cli.common import Output
        >>> from samplex_cuda.cli.tools import fit_tree
        >>> with tempfile.TemporaryDirectory() as folder:  # doctest: +ELLIPSIS
        ...     found, code = fit_tree(
        ...         Output(False), "builtin:classes=20,dim=6,examples=300", form=None, options=[], dim=4, reg=0.1,
        ...         target=Path(folder, "tree.safetensors"), rows=200, held_out=0.1, seed=0,
        ...     )
        reading the data of builtin:classes=20,dim=6,examples=300...
        >>> found["num_classes"], found["depth"]
        (20, 5)
    """
    file = target if target.suffix == ".safetensors" else target / "tree.safetensors"
    settings = [f"data.path={path}", f"data.format={form or ''}", "data.valid_fraction=0"]
    chosen = configs.override(configs.Config(), [*settings, *(f"data.options.{option}" for option in options)])
    with checked():
        with out.busy(f"reading the data of {path}"):
            dataset, _ = open_data(chosen)
            if dataset.kind not in ("dense", "sparse"):
                raise UserError(f"{path}: a tree is fitted to features, dense or sparse; got {dataset.kind} data")
            for note in dataset.notes:
                out.warn(note)
            file.parent.mkdir(parents=True, exist_ok=True)
            check_writable(file)
            train, test = dataset, None
            if held_out:
                train, test = data.split(dataset, (1.0 - held_out, held_out), seed=seed)
            x, y = _examples(train, rows, seed)
        begin = time.perf_counter()
        with out.busy(f"fitting a tree over {dataset.num_classes:,} classes to {len(y):,} examples"):
            mean, projection = fitting.fit_pca(x, min(dim, dataset.num_features), seed=seed)
            fitted = fitting.fit_tree(
                fitting.project(x, mean, projection), y, dataset.num_classes, reg=reg, seed=seed, unseen=unseen,
                progress=False,
            )  # fmt: skip
        seconds = time.perf_counter() - begin
        other: tuple[Tensor, ...] = ()
        if test is not None:
            held_x, held_y = _examples(test, rows, seed)
            # Without `unseen`, the examples of a class that training lacks have log-probability -inf.
            known = torch.nonzero(fitted.class_counts[held_y] > 0).squeeze(1) if not unseen else slice(None)
            other = (fitting.project(held_x, mean, projection)[known], held_y[known])
            other = other if len(other[1]) else ()
        report = fitting.describe_fit(fitted, *other)
        parts = {"weights": fitted.weights, "bias": fitted.bias, "leaf_class": fitted.leaf_class}
        about = {"data": path, "fingerprint": dataset.fingerprint(), "reg": str(reg), "examples": str(len(y))}
        checkpoint.write_tensors(file, {**parts, "mean": mean, "projection": projection}, about)
    out.say(report)
    out.say(f"saved in {file} after {seconds:.1f} s. Train with it:")
    used = "" if fitted.weights.shape[1] == configs.Sampler().dim else f" --set sampler.dim={fitted.weights.shape[1]}"
    out.say(f"  samplex train ... --sampler tree --set sampler.path={file}{used}")
    out.say(f"In Python: samplex_cuda.training.models.read_tree({str(file)!r})")
    payload = {"out": str(file), "num_classes": fitted.num_classes, "depth": fitted.depth, "examples": len(y)}
    payload |= {"seconds": round(seconds, 3), "train_log_prob": fitted.train_log_prob, "report": report}
    if other:
        payload["held_out_log_prob"] = fitted.mean_log_prob(*other)
    return payload, OK


# ---------------------------------------------------------------------------------------------------- diagnose
def diagnose(
    out: Output,
    run_dir: Path,
    *,
    path: str | None,
    form: str | None,
    rows: int,
    num_samples: list[int],
    which: str,
    tree_rows: int,
    timed: bool,
    seed: int,
    device: str,
    trust_model: str | None = None,
) -> tuple[dict[str, Any], int]:
    """`sx.diagnostics.diagnose` on validation rows of a run; returns the JSON object and the exit code.

    Example:
        >>> from samplex_cuda.cli.tools import diagnose
        >>> diagnose(out, Path("runs/mine"), path=None, form=None, rows=256, num_samples=[16, 64], which="latest",
        ...          tree_rows=20_000, timed=True, seed=0, device="cpu")  # doctest: +SKIP
    """
    with checked():
        read_config(run_dir)
        check_device(device)
        with out.busy(f"loading {run_dir} ({which}) and its data"):
            encoder, head, config, meta = load_model(run_dir, which, device=device, trust_model=trust_model)
            train, valid = open_data(config)
            dataset = valid if path is None else open_labelled(config, meta, path, form, "valid")
            dataset = train if dataset is None else dataset
            counts = train.class_counts()
    h, features, y, context = _some_rows(encoder, head, dataset, rows, seed)
    candidates: dict[str, Any] = dict(sx.diagnostics.default_candidates(head, counts, seed=seed))
    # Without features the head's own sampler is none that has a tree, or one that looks at h.
    if tree_rows and features is None and head.num_classes <= TREE_UP_TO and not _has_tree(head.sampler):
        with out.busy("a tree of training examples"):
            candidates |= _tree_candidate(out, encoder, head, train, tree_rows, seed)
    own = {name: one for name, one in candidates.items() if isinstance(one, samplers.Sampler)}
    candidates |= sx.diagnostics.other_ways(head, own)
    with out.busy(f"{len(h):,} rows"):
        found = sx.diagnostics.diagnose(
            head,
            h,
            candidates=candidates,
            features=features,
            y=y,
            context=context,
            num_samples=num_samples,
            timed=timed,
            seed=seed,
        )
    out.say(found.table())
    folder = run_dir / "plots"
    folder.mkdir(exist_ok=True)
    target = run_dir / "diagnosis.json"
    found.save(target)
    files = {"json": str(target)}
    try:
        beside(folder / "diagnosis.png", found.plot)
        files["plot"] = str(folder / "diagnosis.png")
    except ImportError as error:
        out.warn(f"no plot: {error}")
    out.say("   ".join(f"{name}: {where}" for name, where in files.items()))
    return {"run_dir": str(run_dir), "step": meta["progress"]["step"], "files": files, **found.as_dict()}, OK


def _has_tree(sampler: Any) -> bool:
    return any(isinstance(part, samplers.Tree) for part in ([] if sampler is None else sampler.modules()))


def _tree_candidate(out: Output, encoder: Any, head: Any, train: data.Dataset, rows: int, seed: int) -> dict[str, Any]:
    """A tree fitted to h of training examples, with the uniform part that sampled softmax wants beside it.

    Where h does not change in training, also stratified draws of the tree alone.
    """
    h, _, y, _ = _some_rows(encoder, head, train, rows, seed)
    keep = (y >= 0) & h.isfinite().all(1)
    h, y = h[keep].float().cpu(), y[keep].cpu()
    if not len(y):
        out.warn("no tree among the candidates: no training example has a target and an h of numbers")
        return {}
    classes, dim = head.num_classes, min(TREE_DIM, h.shape[1], len(y))
    tree = samplers.Tree.fit(h, y, num_classes=classes, dim=dim, seed=seed, progress=False)
    mixed = samplers.Mixture([(tree, 0.9), (samplers.Uniform(classes), 0.1)])
    found: dict[str, Any] = {"Tree + Uniform": mixed.to(head.weight.device)}
    if not any(p.requires_grad for p in encoder.parameters()) and head.loss.needs.weighted_draws:
        found["Tree, stratified"] = sx.diagnostics.Candidate(tree, True, True)
    return found


@torch.no_grad()
def _some_rows(
    encoder: Any, head: Any, dataset: Any, rows: int, seed: int
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """h [n, d], what the sampler looks at, targets and context of some examples."""
    if dataset.ordered:  # whole batches from the start, so that a state is carried as in training
        chosen = torch.arange(len(dataset)).split(dataset.columns)
        windows = math.ceil(rows / (dataset.columns * dataset.window))
        pieces = list(chosen[:windows])
    else:
        order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed))
        pieces = list(order[:rows].sort()[0].split(1024))
    found: list[tuple[Tensor, Tensor | None, Tensor, Tensor | None]] = []
    encoder.carry({})
    for piece in pieces:
        batch = {name: t.to(head.weight.device) for name, t in dataset.batch(piece).items()}
        h, features = encoder.encode(batch)
        y = batch["y"]
        y = y.reshape(-1, y.shape[-1]) if y.dim() == h.dim() else y.reshape(-1)
        if y.dim() == 2:  # the first target of each row, so that batches have one shape
            y = y[:, 0]
        flat = h.to(head.weight.dtype).reshape(-1, h.shape[-1])
        seen = None if features is None else features.reshape(-1, features.shape[-1])
        found.append((flat, seen, y, models.context_of(batch)))
    first = found[0]

    def joined(place: int) -> Any:
        return None if first[place] is None else torch.cat([part[place] for part in found])[:rows]  # type: ignore

    return joined(0), joined(1), joined(2), joined(3)


# ---------------------------------------------------------------------------------------------------- bench
def _torch_sampled(h: Tensor, weight: Tensor, bias: Tensor, y: Tensor, ids: Tensor, log_q: Tensor) -> Tensor:
    """Sampled softmax as one writes it in torch: gather, multiply, cross-entropy."""
    classes = torch.cat([y[:, None], ids], 1)
    rows = F.embedding(classes, weight, sparse=True)
    logits = torch.einsum("bd,bmd->bm", h, rows) + F.embedding(classes, bias, sparse=True)[..., 0]
    shift = torch.cat([torch.zeros_like(log_q[:, :1]), log_q + math.log(ids.shape[1])], 1)
    return F.cross_entropy(logits - shift, torch.zeros_like(y))


def _median(step: Callable[[], object], seconds: float) -> float:
    """Median milliseconds of a call, after two that do not count."""
    for _ in range(2):
        step()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or (time.perf_counter() < end and len(times) < 1000):
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    return 1e3 * sorted(times)[len(times) // 2]


def _bench_one(classes: int, dim: int, batch: int, draws: int, seconds: float) -> dict[str, Any]:
    """A training step (forward, backward, Adagrad) of three ways, from the same values; checked before it is timed."""
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(batch, dim, generator=generator)
    y = torch.randint(0, classes, (batch,), generator=generator)
    start = torch.randn(classes, dim, generator=generator) / math.sqrt(dim)
    sampler = samplers.Uniform(classes)

    head = sx.SampledClassifier(dim, classes, sampler, draws)
    with torch.no_grad():
        head.weight.copy_(start)
        head.get_parameter("bias").zero_()
    table, bias = start.clone().requires_grad_(), torch.zeros(classes, 1, requires_grad=True)
    drawn = sampler.sample(h, draws, exclude=y, key=sx.Key(1))
    ours = sx.functional.sampled_softmax(h, head.weight, y, drawn.ids, drawn.log_q, head.bias)
    theirs = _torch_sampled(h, table, bias, y, drawn.ids, drawn.log_q)
    ours.backward()  # type: ignore[union-attr]
    theirs.backward()
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    mine, other = head.weight.grad, table.grad
    assert mine is not None
    assert other is not None
    a, b = mine.coalesce(), other.coalesce()
    assert torch.equal(a.indices(), b.indices())
    torch.testing.assert_close(a.values(), b.values(), rtol=1e-3, atol=1e-6)
    head.zero_grad(set_to_none=True)
    table.grad = bias.grad = None

    row_optimizer = sx.optim.RowAdagrad(head.parameters(), lr=0.1)
    head.fuse_optimizer(row_optimizer)
    inputs = h.clone().requires_grad_()
    sparse_optimizer = torch.optim.Adagrad([table, bias], lr=0.1)
    full, full_bias = start.clone().requires_grad_(), torch.zeros(classes, requires_grad=True)
    full_optimizer = torch.optim.Adagrad([full, full_bias], lr=0.1)

    def our_step() -> None:
        head(inputs, y).backward()

    def torch_sampled_step() -> None:
        ids = torch.randint(0, classes, (batch, draws))
        _torch_sampled(inputs, table, bias, y, ids, torch.full((batch, draws), -math.log(classes))).backward()
        sparse_optimizer.step()
        sparse_optimizer.zero_grad(set_to_none=True)

    def torch_full_step() -> None:
        F.cross_entropy(torch.addmm(full_bias, inputs, full.T), y).backward()
        full_optimizer.step()
        full_optimizer.zero_grad(set_to_none=True)

    found: dict[str, Any] = {"classes": classes, "ours_ms": _median(our_step, seconds)}
    found["torch_sampled_ms"] = _median(torch_sampled_step, seconds)
    found["torch_full_ms"] = _median(torch_full_step, seconds) if batch * classes * 4 <= 1 << 31 else None
    return found


def bench(
    out: Output, classes: list[int], *, dim: int, batch: int, draws: int, seconds: float
) -> tuple[dict[str, Any], int]:
    """A training step of this library against eager torch, on this machine.

    Example:
        >>> from samplex_cuda.cli.common import Output
        >>> from samplex_cuda.cli.tools import bench
        >>> found, code = bench(Output(True), [100], dim=8, batch=4, draws=5, seconds=0.01)
        >>> found["results"][0]["classes"]
        100
    """
    results = []
    for count in classes:
        with out.busy(f"{count:,} classes"), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of torch, about its own sparse Adagrad
            results.append(_bench_one(count, dim, batch, draws, seconds))
    about = f"batch {batch}, d = {dim}, {draws} uniform draws, Adagrad, {torch.get_num_threads()} threads"
    out.say(f"median ms of a training step: {about}")
    table = Table()
    for name in ("classes", "samplex", "torch, sampled", "torch, full softmax", "faster than sampled", "than full"):
        table.add_column(name, justify="right")
    for r in results:
        full = r["torch_full_ms"]
        table.add_row(
            f"{r['classes']:,}",
            f"{r['ours_ms']:.3g}",
            f"{r['torch_sampled_ms']:.3g}",
            "too large" if full is None else f"{full:.3g}",
            f"{r['torch_sampled_ms'] / r['ours_ms']:.1f}x",
            "-" if full is None else f"{full / r['ours_ms']:.1f}x",
        )
    out.console.print(table)
    out.say(
        "Loss and gradients of both sampled ways were the same before the clock ran. `make bench` measures with care."
    )
    settings = {"dim": dim, "batch_size": batch, "num_samples": draws, "threads": torch.get_num_threads()}
    return {"settings": settings, "results": results}, OK
