"""Guarded memory: tensors that end, or begin, at a page that must not be touched."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

_PAGE = mmap.PAGESIZE
_DATA = 4 * _PAGE
_CANARY = 0xA5
_VIEWS = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8)
_libc = ctypes.CDLL(None, use_errno=True)


class Arena:
    """Four pages of memory between two pages without access. Holds one tensor at a time."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, _DATA + 2 * _PAGE)
        whole = ctypes.c_char.from_buffer(self._map)
        start = ctypes.addressof(whole)
        for guard in (start, start + _PAGE + _DATA):
            if _libc.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(_PAGE), 0) != 0:
                raise OSError(ctypes.get_errno(), "mprotect failed")
        self._address = start + _PAGE
        self._views = {
            dtype: torch.frombuffer(self._map, dtype=torch.uint8, count=_DATA, offset=_PAGE).view(dtype)
            for dtype in _VIEWS
        }
        self._before = b""
        self.held: Tensor | None = None

    def place(self, t: Tensor, at_end: bool, shift: int) -> Tensor | None:
        """A copy of `t` with its strides in here; None if it does not fit. `shift` elements lie behind or before it."""
        view = self._views.get(t.dtype)
        if view is None:
            return None
        span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
        if (span + shift) * t.element_size() > _DATA:
            return None
        offset = view.numel() - span - shift if at_end else shift
        ctypes.memset(self._address, _CANARY, _DATA)
        placed = view.as_strided(t.shape, t.stride(), offset)
        if t.numel():
            # Elements of an expanded tensor share memory: write through the distinct ones.
            distinct = tuple(slice(0, 1) if s == 0 else slice(None) for s in t.stride())
            placed[distinct].copy_(t[distinct])
        self._before = ctypes.string_at(self._address, _DATA)
        self.held = placed
        return placed

    def unchanged(self, mutable: bool) -> bool:
        """Whether every byte is as `place` left it; of a mutable tensor only the bytes around it count."""
        after = ctypes.string_at(self._address, _DATA)
        if after == self._before or not mutable or self.held is None:
            return after == self._before
        # Put the old values back where the tensor lies: what still differs lies outside of it.
        old = torch.frombuffer(bytearray(self._before), dtype=torch.uint8).view(self.held.dtype)
        with torch.no_grad():
            self.held.detach().copy_(old.as_strided(self.held.shape, self.held.stride(), self.held.storage_offset()))
        same = ctypes.string_at(self._address, _DATA) == self._before
        ctypes.memmove(self._address, after, _DATA)
        return same


class Pool:
    """Arenas for one call; `reset` frees them for the next."""

    def __init__(self) -> None:
        self._arenas: list[Arena] = []
        self._used = 0

    def reset(self) -> None:
        """Every tensor of the last call is given up."""
        self._used = 0

    def place(self, t: Tensor, at_end: bool, shift: int = 0) -> tuple[Tensor, Arena | None]:
        """`t` in guarded memory and its arena, or `t` itself where that cannot be."""
        if t.layout is not torch.strided or t.device.type != "cpu" or any(s < 0 for s in t.stride()):
            return t, None
        if self._used == len(self._arenas):
            self._arenas.append(Arena())
        arena = self._arenas[self._used]
        placed = arena.place(t.detach(), at_end, shift)
        if placed is None:
            return t, None
        self._used += 1
        return placed.requires_grad_() if t.requires_grad else placed, arena
