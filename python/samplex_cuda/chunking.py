"""Work over all classes, cut into chunks: how large they are on each device, and the logits of a chunk.

`chunk_bytes` is the one place that knows how large a chunk of anything is. Call it by way of this module
(`chunking.chunk_bytes`), so that code that replaces it here replaces it everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from samplex_cuda import _device
from samplex_cuda.ops.predict import predict_buffer
from samplex_cuda.ops.sphere import inverse_norms
from samplex_cuda.products import class_factor, needs_copy, product, row_factor

__all__ = [
    "Chunk",
    "KeptLogits",
    "Prior",
    "by_class",
    "chunk_bytes",
    "cut",
    "kept_bytes",
    "logit_chunks",
    "probabilities_at_once",
    "row_blocks",
    "rows_at_once",
]

Prior: TypeAlias = Callable[[slice], Tensor]

# On the CPU a chunk stays in the cache between the product that makes it and the pass over it.
_CPU_BYTES = {
    "logits": 2 << 20,  # [B, n] of `logit_chunks`
    "logits by class": 4 << 20,  # [n, B], which its passes go through in pieces that stay nearer
    "features": 8 << 20,  # [n, D] of a kernel sampler
    "rows": 2 << 20,  # class rows [n, d] that are gathered for a pass over them
    "probabilities": 32 << 20,  # [B, n] of a distribution, in fp64
    "changed features": 2 << 20,  # the same where old and new ones are held, beside the leaves that they change
}
# On a GPU a chunk does not stay in a cache anyway: it is so large that launches take no time beside the products.
# Logits may take a sixteenth more: top-10 of 1,024 rows over a million classes is then 15 chunks of two launches each,
# which leaves two of 32 to convert h and the biases.
_GPU_BYTES = 256 << 20
_GPU_SPARE = 16

# The class rows of a chunk, where a product needs a copy of them, take at most this many times the memory of a chunk of
# logits. On a GPU such a chunk is this many times as large: the copy is one launch more.
_COPY_CHUNKS = 2
# A chunk has at least this many classes, however many rows there are.
_LEAST_CLASSES = 256
# Products of at least this many rows are made as [n, rows].
_LEAST_BY_CLASS = 64
# Beyond this many rows a GEMM gains nothing from more of them.
_BLOCK_ROWS = 1024
# A block of rows of a prior holds at most this many elements: it is [rows, C] at once.
_PRIOR_ELEMENTS = 1 << 25
# On a GPU rows of logits begin at multiples of this many numbers.
_ALIGNED = 16


Kind: TypeAlias = Literal["logits", "logits by class", "features", "changed features", "rows", "probabilities"]


def chunk_bytes(device: torch.device, of: Kind = "logits") -> int:
    """Bytes of a chunk on a device; every chunk size of this package that the caller does not give comes from here."""
    return _CPU_BYTES[of] if device.type == "cpu" else _GPU_BYTES


def rows_at_once(rows: Tensor) -> int:
    """How many rows like those of `rows` [n, d] a pass that gathers class rows takes at a time."""
    return max(1, chunk_bytes(rows.device, "rows") // max(1, rows.shape[1] * rows.element_size()))


def probabilities_at_once(device: torch.device) -> int:
    """How many numbers of the distributions of rows, or of walks that lead to them, are held at a time."""
    return chunk_bytes(device, "probabilities") // 8


def kept_bytes(device: torch.device) -> int:
    """Bytes of logits that the forward pass of a loss may keep, so that its backward pass need not compute them again.

    On the CPU a fraction of what a table of 100,000 classes takes: it saves a fourth product where classes are few and
    changes nothing about the memory where they are many. On a GPU one chunk.
    """
    return 16 << 20 if device.type == "cpu" else _GPU_BYTES


def _classes_per_chunk(rows: int, num_classes: int, like: Tensor, copied: int = 0, of: Kind = "logits") -> int:
    """Classes per chunk of the logits of some rows; `like` has their dtype and device.

    `copied`: bytes of a class row, if a chunk of them is copied for the product.
    """
    total, item = chunk_bytes(like.device, of), like.element_size()
    most = total
    if like.device.type != "cpu":
        most = total * _COPY_CHUNKS if copied else total + total // _GPU_SPARE
    size = max(_LEAST_CLASSES, most // item // max(rows, 1))
    if copied:
        size = min(size, max(_LEAST_CLASSES, _COPY_CHUNKS * total // copied))
    if size >= num_classes:
        return num_classes
    # Equal chunks of whole cache lines. Rows of logits a power of two apart would fall into the same few sets of the
    # cache, and the product with the transposed logits would take an eighth longer.
    line, far = 64 // item, 1024 // item
    size -= size % line
    size -= line if size % far == 0 else 0
    size = -(-num_classes // -(-num_classes // size) // line) * line
    return size + line if size % far == 0 else size


def _row_stride(count: int, like: Tensor) -> int:
    """Numbers from one row of `count` logits to the next.

    On a GPU a multiple of 64 bytes of float32: at 50,257 classes three rows of four would otherwise be read in single
    numbers, and a GEMM would get a leading dimension that no tensor core takes.
    """
    return -(-count // _ALIGNED) * _ALIGNED if _device.aligns_rows(like) else count


class KeptLogits:
    """Products that a forward pass keeps for its backward pass, as many chunks as fit `kept_bytes`.

    A chunk is taken once: the backward pass overwrites it with its gradient. A second backward pass through the same
    graph computes the products again.
    """

    __slots__ = ("_chunks", "_left")

    def __init__(self, device: torch.device) -> None:
        self._left = kept_bytes(device)
        self._chunks: dict[tuple[int, int], Tensor] = {}

    def make(self, row: int, first: int, shape: tuple[int, int], like: Tensor) -> Tensor | None:
        """Memory for the products of some rows with some classes, of dtype as `like`; None if it does not fit."""
        stride = _row_stride(shape[1], like)
        nbytes = shape[0] * stride * like.element_size()
        if nbytes > self._left:
            return None
        self._left -= nbytes
        dots = predict_buffer(like, shape[0], stride)
        self._chunks[row, first] = dots = dots if stride == shape[1] else dots[:, : shape[1]]
        return dots

    def take(self, row: int, first: int) -> Tensor | None:
        """The products of a chunk, the caller's to overwrite; None if they are not here."""
        return self._chunks.pop((row, first), None)


def row_blocks(h: Tensor, weight: Tensor, prior: Prior | None = None) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Blocks of rows of `h` as factors of products with class rows (`products.row_factor`), and their prior."""
    size = _BLOCK_ROWS if prior is None else max(1, min(_BLOCK_ROWS, _PRIOR_ELEMENTS // weight.shape[0]))
    for begin in range(0, h.shape[0], size):
        rows = slice(begin, min(begin + size, h.shape[0]))
        yield rows, row_factor(cut(h, rows), weight), None if prior is None else prior(rows)


def cut(x: Tensor, rows: slice) -> Tensor:
    """`x[rows]`, without the cost of a view where that is all of it: batches of one block are the rule."""
    return x if rows.start == 0 and rows.stop == x.shape[0] else x[rows]


class Chunk(NamedTuple):
    """Products of a block of rows with the classes [first, first + n), and how they become logits."""

    first: int
    dots: Tensor  # [rows, n], on a GPU with aligned rows, or [n, rows] with `by_class`; the caller's to overwrite
    bias: Tensor | None  # [n]
    scale: float
    absolute: bool
    rows: Tensor  # [n, d], the class rows as a factor (`products.class_factor`)
    by_class: bool = False

    def logits(self) -> Tensor:
        """The logits in place of the products."""
        if self.bias is not None:
            self.dots.add_(self.bias)
        if self.scale != 1.0:
            self.dots.mul_(self.scale)
        return self.dots.abs_() if self.absolute else self.dots


def by_class(h: Tensor) -> bool:
    """Whether products of the rows `h` (from `row_blocks`) with class rows are better made as [n, rows].

    The product then vectorizes over the rows and reads class rows as they lie, where [rows, n] has to transpose them on
    the way: 150 GFLOP/s instead of 91 for 256 rows of 128 on two cores of a Zen 4. With few rows it does not pay.
    """
    return h.dtype == torch.float32 and h.shape[0] >= _LEAST_BY_CLASS and _device.passes_by_class(h)


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
    classes_first: bool = False,
    normalize: bool = False,
) -> Iterator[Chunk]:
    """The chunks of one block of rows, in ascending order of classes. A chunk lives until the next, unless kept.

    Args:
        h: the block, from `row_blocks`.
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
        classes_first: make `Chunk.dots` as [n, rows] where that is quicker (`by_class`). Not with `prior`.
        normalize: divide the products by the length of the class row; those of a row of zeros are 0.
    """
    num_classes, copies = weight.shape[0], needs_copy(weight, h)
    like = h if h.element_size() > 2 else h.new_empty(0, dtype=torch.float32)  # of the logits
    turned = classes_first and by_class(h)
    if chunk_size is None:
        copied = max(h.shape[1], 1) * h.element_size() if copies else 0
        chunk_size = _classes_per_chunk(
            h.shape[0], num_classes, like, copied, "logits by class" if turned else "logits"
        )
    chunk_size = min(max(multiple, chunk_size // multiple * multiple), num_classes)
    memory = h.new_empty(chunk_size, h.shape[1]) if copies else None
    if bias is not None:
        bias = bias.to(like.dtype).contiguous()
    buffer: Tensor | None = None  # one for all chunks that are not kept
    for begin in range(0, num_classes, chunk_size):
        count = min(chunk_size, num_classes - begin)
        classes = slice(begin, begin + count)
        part = class_factor(cut(weight, classes), h, memory)
        dots = None if kept is None else kept.take(row, begin)
        if dots is None:
            shape = (count, h.shape[0]) if turned else (h.shape[0], count)
            dots = None if keep is None else keep.make(row, begin, shape, like)
            if dots is None:
                if buffer is None:
                    buffer = predict_buffer(like, h.shape[0], _row_stride(chunk_size, like)).view(-1)
                stride = _row_stride(shape[1], like)
                dots = buffer[: shape[0] * stride].view(shape[0], stride)
                dots = dots if stride == shape[1] else dots[:, : shape[1]]
            if turned:
                product(part, h.t(), dots)
            else:
                product(h, part.t(), dots)
            if normalize:
                inverse = inverse_norms(cut(weight, classes)).to(dots.dtype)
                dots.mul_(inverse.unsqueeze(1) if turned else inverse)
        chunk = Chunk(begin, dots, None if bias is None else cut(bias, classes), scale, absolute, part, turned)
        if prior is not None:
            chunk.logits().add_(prior[:, begin : begin + count])
            chunk = Chunk(begin, dots, None, 1.0, False, part)
        yield chunk
