"""`samplex export`: encoder and top-k of a run as one program that needs neither the run nor its configuration."""

from __future__ import annotations

import contextlib
import json
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from samplex_cuda import samplers
from samplex_cuda.cli.common import OK, Output, UserError, beside, check_writable, checked, read_config
from samplex_cuda.heads import SampledClassifier
from samplex_cuda.training import load_model, models
from samplex_cuda.training.encoders import Encoder

__all__ = ["Served", "export", "inputs_of"]

MOST = 1 << 16  # rows of a batch, and entries of a sparse row
_LOAD = {
    "export": 'import samplex_cuda, torch; run = torch.export.load("{name}").module()',
    "aoti": 'import samplex_cuda, torch; run = torch._inductor.aoti_load_package("{name}")',
}


class Served(nn.Module):
    """Encoder and top-k as one module of positional tensors: what `samplex export` exports.

    Args:
        encoder: of a run, in eval mode.
        head: of a run, in eval mode.
        names: of the inputs in a batch of the encoder.
        k: classes for each row.
        tree: a `Tree` that is searched for candidates; None: all classes.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> from samplex_cuda.cli.export import Served
        >>> from samplex_cuda.training.encoders import Linear
        >>> head = sx.SampledClassifier(4, 50, sx.samplers.Uniform(50), num_samples=5).eval()
        >>> Served(Linear(4).eval(), head, ["x"], k=3)(torch.zeros(2, 4))[1].shape
        torch.Size([2, 3])
    """

    def __init__(self, encoder: Encoder, head: SampledClassifier, names: list[str], k: int, tree: Any = None) -> None:
        super().__init__()
        self.encoder, self.head, self.names, self.k = encoder, head, tuple(names), k
        self.tree = tree

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """(logits [B, k], ids int64 [B, k]), largest first."""
        self.encoder.carry({})  # no state goes from a request to the next
        batch = dict(zip(self.names, inputs, strict=True))
        if "ids" in batch:  # padded rows [B, T]: a place without a feature has weight 0
            ids = batch["ids"]
            batch["offsets"] = torch.arange(ids.shape[0] + 1, device=ids.device) * ids.shape[1]
            batch["values"] = batch["values"].masked_fill(ids < 0, 0.0).reshape(-1)
            batch["ids"] = ids.clamp(min=0).reshape(-1)
        h, features = self.encoder.encode(batch)
        self.encoder.carry({})
        if "tokens" in self.names:  # what follows the last word
            h, features = h[:, -1], None if features is None else features[:, -1]
        h = h.to(self.head.weight.dtype)
        if self.tree is None:
            return self.head.topk(h, self.k, features=features)
        return self.head.topk(h, self.k, features=features, candidates="tree", tree=self.tree)


def inputs_of(kind: str, features: int, length: int, rows: int) -> dict[str, tuple[Tensor, dict[int, str], list[Any]]]:
    """Inputs of a batch of `rows` rows: an example tensor, the open dimensions, and the shape in words, by name.

    Args:
        kind: of the data that the run was trained on.
        features: their width: of rows, of a vocabulary, or the number of items.
        length: items of a history, or tokens of a text.
        rows: of the example.

    Example:
        >>> from samplex_cuda.cli.export import inputs_of
        >>> example, open_dims, shape = inputs_of("dense", 4, 0, rows=2)["x"]
        >>> example.shape, open_dims, shape
        (torch.Size([2, 4]), {0: 'batch'}, ['batch', 4])
    """
    g = torch.Generator().manual_seed(rows)
    if kind == "dense":
        return {"x": (torch.randn(rows, features, generator=g), {0: "batch"}, ["batch", features])}
    if kind == "sparse":
        ids, opened = torch.randint(features, (rows, rows + 2), generator=g), {0: "batch", 1: "most_entries"}
        ids[0, 1:] = -1
        values = torch.rand(ids.shape, generator=g)
        return {name: (t, opened, ["batch", "most_entries"]) for name, t in (("ids", ids), ("values", values))}
    items = torch.randint(features, (rows, length), generator=g)
    if kind == "interactions":
        items[0, : length // 2] = -1
    return {"tokens" if kind == "text" else "history": (items, {0: "batch"}, ["batch", length])}


def export(
    out: Output,
    run_dir: Path,
    *,
    target: Path,
    k: int,
    kind: str,
    candidates: str,
    which: str,
    length: int = 0,
    trust_model: str | None = None,
) -> tuple[dict[str, Any], int]:
    """Writes the program of a run, and what its inputs are; returns the JSON object and the exit code.

    Example:
        >>> from samplex_cuda.cli.export import export
        >>> export(out, Path("runs/mine"), target=Path("served.pt2"), k=10, kind="export", candidates="exact",
        ...        which="best")  # doctest: +SKIP
    """
    about = target.with_suffix(".json")
    if target.suffix != ".pt2":
        raise UserError(f"{target}: --out must end with .pt2, got {target.suffix or 'nothing'}")
    check_writable(target)
    check_writable(about)
    with checked():
        read_config(run_dir)
        with out.busy(f"loading {run_dir} ({which})"):
            encoder, head, config, meta = load_model(run_dir, which, trust_model=trust_model)
        described = meta["data"]
        if k > head.num_classes:
            raise UserError(f"-k must be at most the {head.num_classes} classes of the model, got {k}")
        trees = [part for part in models.parts_of(head.sampler) if isinstance(part, samplers.Tree)]
        tree = trees[0] if trees and candidates == "tree" else None
        if tree is None and candidates == "tree":
            raise UserError(
                f"{run_dir}: --candidates tree needs a model whose sampler has a tree, got {config.sampler.name}"
            )
        data_kind = str(described["kind"])
        if data_kind not in ("dense", "sparse", "text", "interactions"):
            raise UserError(f"{run_dir}: data must be dense, sparse, text or interactions to export, got {data_kind}")
        if (data_kind == "text") != bool(length):
            raise UserError(
                f"{run_dir}: --length must be given for a model of text, and for no other (it is exported for a fixed "
                f"length), got {length or 'nothing'}"
            )
    if not head.loss.needs.prior:
        head.set_sampler(samplers.Uniform(head.num_classes))  # answers do not ask it: its tables stay out
    if data_kind == "interactions":
        length = int(described.get("history") or 50)

    def batch_of(rows: int) -> dict[str, tuple[Tensor, dict[int, str], list[Any]]]:
        return inputs_of(data_kind, int(described["num_features"]), length, rows)

    inputs = batch_of(3)
    served = Served(encoder, head, list(inputs), k, tree).eval()
    with _one_sentence(run_dir), out.busy(f"exporting {run_dir}"), torch.no_grad():
        program = torch.export.export(
            served, tuple(t for t, _, _ in inputs.values()), dynamic_shapes={"inputs": _shapes(inputs)}
        )

    def write(path: Path) -> None:
        with _one_sentence(run_dir), out.busy(f"writing {target}"):
            _write(program, path, kind)
            _compare(served, path, kind, [batch_of(rows) for rows in (1, 5)])

    beside(target, write)
    described_inputs = [
        {"name": name, "dtype": str(t.dtype).removeprefix("torch."), "shape": shape}
        for name, (t, _, shape) in inputs.items()
    ]
    facts = {
        "format": kind, "candidates": candidates, "k": k, "classes": head.num_classes, "inputs": described_inputs,
        "outputs": [
            {"name": "logits", "dtype": str(head.weight.dtype).removeprefix("torch."), "shape": ["batch", k]},
            {"name": "ids", "dtype": "int64", "shape": ["batch", k]},
        ],
        "most_rows": MOST, "load": _LOAD[kind].format(name=target.name), "torch": torch.__version__,
        "step": meta["progress"]["step"], "which": which,
    }  # fmt: skip
    beside(about, lambda new: _put(new, facts))
    out.say(f"{target}: top {k} of {head.num_classes:,} classes, checked against the model; inputs in {about}")
    return {"run_dir": str(run_dir), "out": str(target), "about": str(about), **facts}, OK


def _shapes(inputs: dict[str, tuple[Tensor, dict[int, str], list[Any]]]) -> tuple[dict[int, Any], ...]:
    """Dynamic shapes for torch.export; dimensions of one name are one."""
    dims = {name: torch.export.Dim(name, min=1, max=MOST) for name in ("batch", "most_entries")}
    return tuple({at: dims[name] for at, name in opened.items()} for _, opened, _ in inputs.values())


@contextlib.contextmanager
def _one_sentence(run_dir: Path) -> Iterator[None]:
    """UserError with the first line of what torch says; its warnings are for those who write models."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (UserError, KeyboardInterrupt, OSError, MemoryError):
        raise
    except Exception as error:  # torch raises of many kinds here
        said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UserError(f"{run_dir}: this model cannot be exported: {said}") from error


def _write(program: Any, path: Path, kind: str) -> None:
    if kind == "export":
        with path.open("wb") as file:
            torch.export.save(program, file)
        return
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".tmp-") as folder:
        made = torch._inductor.aoti_compile_and_package(program, package_path=str(Path(folder, "served.pt2")))
        Path(made).replace(path)


def _compare(served: Served, path: Path, kind: str, batches: list[Any]) -> None:
    """UserError where the written program gives other answers than the model."""
    run: Any
    if kind == "export":
        with path.open("rb") as file:
            run = torch.export.load(file).module()
    else:
        run = torch._inductor.aoti_load_package(str(path))
    half = served.head.weight.dtype in (torch.float16, torch.bfloat16)
    close = 0.05 if half else 1e-3
    for batch in batches:
        given = tuple(t for t, _, _ in batch.values())
        with torch.no_grad():
            found, wanted = run(*given)[0].double(), served(*given)[0].double()
        if not torch.allclose(found, wanted, rtol=close, atol=close, equal_nan=True):
            worst = float((found - wanted).abs().max())
            raise UserError(
                f"{path}: logits of the program must be those of the model, got a difference of {worst:.2g}"
            )


def _put(path: Path, facts: dict[str, Any]) -> None:
    path.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
