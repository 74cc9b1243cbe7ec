"""Training data in which every class counts alike: for a tree that is searched, not drawn from."""

from __future__ import annotations

import torch
from torch import Tensor

from samplex_cuda._checks import check_int, describe

__all__ = ["balance"]


def balance(
    x: Tensor, y: Tensor, num_classes: int, *, least: int = 4, most: int = 200, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """The first `most` examples of each class; where there are fewer than `least`, more are made around the class mean.

    A tree fitted to data as they come spends its depth on the frequent classes and splits the rare ones by one or two
    noisy examples. As noise distribution that is right. To find candidates (`head.topk(..., candidates="tree")`) the
    rare classes must be found, too: the head ranks them anyway. Made examples are the mean of the class plus Gaussian
    noise of the spread that classes have on average, estimated from the data.

    Args:
        x: [N, K] floating point, dense.
        y: int64 [N] in [0, num_classes).
        num_classes: C. Classes without an example stay without.
        least: examples of a class in the result, at least.
        most: and at most.
        seed: of the noise.

    Returns:
        x [n, K] float32 and y [n], ascending.

    Example:
        >>> import torch
        >>> from samplex_cuda.tree_fit import balance
        >>> x, y = balance(torch.randn(6, 3), torch.tensor([0, 0, 0, 2, 0, 0]), 4, least=2, most=3)
        >>> x.shape, y.tolist()
        (torch.Size([5, 3]), [0, 0, 0, 2, 2])
    """
    if not isinstance(x, Tensor) or x.dim() != 2 or not x.is_floating_point():
        raise ValueError(f"balance: x must be [N, K] floating point, got {describe(x)}")
    if not isinstance(y, Tensor) or y.dtype != torch.int64 or y.shape != x.shape[:1]:
        raise ValueError(f"balance: y must be [{x.shape[0]}] int64, got {describe(y)}")
    check_int("balance", "least", least)
    check_int("balance", "most", most, least)
    if y.numel() and not 0 <= int(y.min()) <= int(y.max()) < num_classes:
        got = int(y.min()) if int(y.min()) < 0 else int(y.max())
        raise IndexError(f"balance: y must be in [0, {num_classes}), got {got}")
    order = y.argsort(stable=True)
    count = torch.bincount(y, minlength=num_classes)
    begin = count.cumsum(0) - count
    rank = torch.arange(len(y), device=y.device) - begin[y[order]]
    kept = order[rank < most]
    total = torch.zeros(num_classes, x.shape[1], dtype=torch.float32, device=x.device).index_add_(0, y, x.float())
    mean = total / count.clamp(min=1).unsqueeze(1)
    # Within classes: sum |x - mean|^2 = sum |x|^2 - sum n |mean|^2, in fp64 as the two may be close.
    squares = sum(float(part.double().square().sum()) for part in x.split(1 << 16))
    within = squares - float((count.double() * mean.double().square().sum(1)).sum())
    freedom = len(y) - int((count > 0).sum())
    spread = (max(within, 0.0) / (max(freedom, 1) * x.shape[1])) ** 0.5
    missing = torch.where(count > 0, (least - count).clamp(min=0), 0)
    made = torch.repeat_interleave(torch.arange(num_classes, device=y.device), missing)
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(len(made), x.shape[1], generator=generator).to(x.device)
    both_y = torch.cat([y[kept], made])
    both_x = torch.cat([x[kept].float(), mean[made] + spread * noise])
    order = both_y.argsort(stable=True)
    return both_x[order], both_y[order]
