"""Work over all classes, cut into chunks: how large they are on each device, and the logits of a chunk.

`chunk_bytes` is the one place that knows how large a chunk of anything is. Call it by way of this module
(`chunking.chunk_bytes`), so that whoever replaces it here replaces it everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from samplex_cuda.ops.predict import predict_buffer

__all__ = [
    "Chunk",
    "KeptLogits",
    "Prior",
    "chunk_bytes",
    "cut",
    "kept_bytes",
    "logit_chunks",
    "row_blocks",
    "wide_dtype",
]

Prior: TypeAlias = Callable[[slice], Tensor]

# On the CPU a chunk stays in the cache between the product that makes it and the pass over it.
_CPU_BYTES = {
    "logits": 2 << 20,  # [B, n] of `logit_chunks`
    "features": 8 << 20,  # [n, D] of a kernel sampler
}
# On a GPU a chunk does not stay in a cache anyway: it is so large that launches take no time beside the products, and
# top-10 of 1,024 rows over a million classes is 32 of them.
_GPU_BYTES = 256 << 20

# An up-cast chunk of weight rows takes at most this many times the memory of a chunk of logits.
_CAST_CHUNKS = 2
# A chunk has at least this many classes, however many rows there are.
_LEAST_CLASSES = 256
# Beyond this many rows a GEMM gains nothing from more of them.
_BLOCK_ROWS = 1024
# A block of rows of a prior holds at most this many elements: it is [rows, C] at once.
_PRIOR_ELEMENTS = 1 << 25


def chunk_bytes(device: torch.device, of: Literal["logits", "features"] = "logits") -> int:
    """Bytes of a chunk on a device; every chunk size of this package that the caller does not give comes from here."""
    return _CPU_BYTES[of] if device.type == "cpu" else _GPU_BYTES


def kept_bytes(device: torch.device) -> int:
    """Bytes of logits that the forward pass of a loss may keep, so that its backward pass need not compute them again.

    On the CPU a fraction of what a table of 100,000 classes takes: it saves a fourth product where classes are few and
    changes nothing about the memory where they are many. On a GPU one chunk.
    """
    return 16 << 20 if device.type == "cpu" else _GPU_BYTES


def _classes_per_chunk(h: Tensor, num_classes: int, dim: int, cast: bool) -> int:
    """Classes per chunk of the logits of `h`; `cast`: the class rows are up-cast, a chunk of them at a time."""
    elements = chunk_bytes(h.device) // h.element_size()
    size = max(_LEAST_CLASSES, elements // max(h.shape[0], 1))
    if cast:
        size = min(size, max(_LEAST_CLASSES, _CAST_CHUNKS * elements // max(dim, 1)))
    if size >= num_classes:
        return num_classes
    # Equal chunks of whole cache lines. Rows of logits a power of two apart would fall into the same few sets of the
    # cache, and the product with the transposed logits would take an eighth longer.
    line, far = 64 // h.element_size(), 1024 // h.element_size()
    size -= size % line
    size -= line if size % far == 0 else 0
    size = -(-num_classes // -(-num_classes // size) // line) * line
    return size + line if size % far == 0 else size


class KeptLogits:
    """Products that a forward pass keeps for its backward pass, as many chunks as fit `kept_bytes`.

    A chunk is taken once: the backward pass overwrites it with its gradient. A second backward pass through the same
    graph computes the products again.
    """

    __slots__ = ("_chunks", "_left")

    def __init__(self, device: torch.device) -> None:
        self._left = kept_bytes(device)
        self._chunks: dict[tuple[int, int], Tensor] = {}

    def make(self, row: int, first: int, like: Tensor, count: int) -> Tensor | None:
        """Memory for the products of the rows `like` with `count` classes; None if they do not fit."""
        nbytes = like.shape[0] * count * like.element_size()
        if nbytes > self._left:
            return None
        self._left -= nbytes
        self._chunks[row, first] = dots = predict_buffer(like, like.shape[0], count)
        return dots

    def take(self, row: int, first: int) -> Tensor | None:
        """The products of a chunk, the caller's to overwrite; None if they are not here."""
        return self._chunks.pop((row, first), None)


def wide_dtype(h: Tensor, weight: Tensor) -> torch.dtype:
    """What logits are computed in: at least fp32."""
    return torch.promote_types(torch.promote_types(h.dtype, weight.dtype), torch.float32)


def row_blocks(h: Tensor, weight: Tensor, prior: Prior | None = None) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Blocks of rows of `h`, up-cast to the dtype the logits are computed in, and their prior."""
    wide = wide_dtype(h, weight)
    size = _BLOCK_ROWS if prior is None else max(1, min(_BLOCK_ROWS, _PRIOR_ELEMENTS // weight.shape[0]))
    for begin in range(0, h.shape[0], size):
        rows = slice(begin, min(begin + size, h.shape[0]))
        yield rows, cut(h, rows).to(wide), None if prior is None else prior(rows)


def cut(x: Tensor, rows: slice) -> Tensor:
    """`x[rows]`, without the cost of a view where that is all of it: batches of one block are the rule."""
    return x if rows.start == 0 and rows.stop == x.shape[0] else x[rows]


class Chunk(NamedTuple):
    """Products of a block of rows with the classes [first, first + n), and how they become logits."""

    first: int
    dots: Tensor  # [rows, n], the caller's to overwrite
    bias: Tensor | None  # [n]
    scale: float
    absolute: bool
    rows: Tensor  # [n, d], the class rows in the dtype of dots

    def logits(self) -> Tensor:
        """The logits in place of the products."""
        if self.bias is not None:
            self.dots.add_(self.bias)
        if self.scale != 1.0:
            self.dots.mul_(self.scale)
        return self.dots.abs_() if self.absolute else self.dots


def logit_chunks(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: float,
    absolute: bool,
    prior: Tensor | None = None,
    chunk_size: int | None = None,
    *,
    row: int = 0,
    keep: KeptLogits | None = None,
    kept: KeptLogits | None = None,
    multiple: int = 1,
) -> Iterator[Chunk]:
    """The chunks of one block of rows, in ascending order of classes. A chunk lives until the next, unless kept.

    Args:
        h: [rows, d] in the dtype the logits are computed in.
        weight: [C, d].
        bias: [C].
        scale: inverse temperature.
        absolute: the logit is the absolute value.
        prior: [rows, C], added to the logits.
        chunk_size: classes per chunk; chosen from the shapes when not given.
        row: first row of the block, the name of its chunks in `keep` and `kept`.
        keep: where to leave products, as far as they fit. Not with `prior`, and the caller must not overwrite them.
        kept: products of a pass before over the same blocks and chunks.
        multiple: every chunk but the last has a multiple of this many classes.
    """
    num_classes, dim = weight.shape
    cast = weight.dtype != h.dtype
    if chunk_size is None:
        chunk_size = _classes_per_chunk(h, num_classes, dim, cast)
    chunk_size = min(max(multiple, chunk_size // multiple * multiple), num_classes)
    rows = torch.empty(chunk_size, dim, dtype=h.dtype, device=h.device) if cast else None
    if bias is not None:
        bias = bias.to(h.dtype).contiguous()
    buffer: Tensor | None = None  # one for all chunks that are not kept
    for begin in range(0, num_classes, chunk_size):
        count = min(chunk_size, num_classes - begin)
        classes = slice(begin, begin + count)
        part = cut(weight, classes)
        if rows is not None:
            part = rows[:count].copy_(part)
        dots = None if kept is None else kept.take(row, begin)
        if dots is None:
            dots = None if keep is None else keep.make(row, begin, h, count)
            if dots is None:
                if buffer is None:
                    buffer = predict_buffer(h, h.shape[0], chunk_size).view(-1)
                dots = buffer[: h.shape[0] * count].view(h.shape[0], count)
            # Not `@`: under autocast that would answer in half precision, and in new memory.
            torch.mm(h, part.t(), out=dots)
        chunk = Chunk(begin, dots, None if bias is None else cut(bias, classes), scale, absolute, part)
        if prior is not None:
            chunk.logits().add_(prior[:, begin : begin + count])
            chunk = Chunk(begin, dots, None, 1.0, False, part)
        yield chunk
