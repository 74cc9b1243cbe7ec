"""A head as a module: its state dict, its conversion, what it prints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from samplex_cuda._checks import describe
from samplex_cuda.heads.checks import explain_mismatch
from samplex_cuda.heads.host import keep_on_host, make_host_table
from samplex_cuda.heads.sampler import SamplerOfHead
from samplex_cuda.samplers.base import refuse_classes

if TYPE_CHECKING:
    from typing_extensions import Self

    from samplex_cuda.heads.classifier import SampledClassifier

__all__ = ["HeadModule"]


class HeadModule(SamplerOfHead):
    """What `SampledClassifier` has of `nn.Module` and `nn.Linear`."""

    _state_name: str | None

    def linear(self) -> nn.Linear:
        """An `nn.Linear` that shares `weight` and `bias`, for export; it knows no `scale`, `absolute` or `normalize`.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> head = sx.SampledClassifier(4, 50, sx.samplers.Unigram(torch.ones(50)), num_samples=10)
            >>> sorted(head.linear().state_dict())
            ['bias', 'weight']
        """
        # On meta nothing is allocated before the parameters are put in.
        linear = nn.Linear(self.in_features, self.num_classes, bias=self.bias is not None, device="meta")
        linear.weight = self.weight
        if self.bias is not None:
            linear.bias = self.bias
        return linear

    def host_table(self, file: str | Path | None = None, *, compute: str = "device") -> None:
        """Keep the class table on the host, in memory or in a file, for an encoder on another device.

        From then on `.to(device)` and `.cuda()` leave the head and its sampler on the host. `head(h, y)` takes `h` and
        `y` from any device; only touched rows and their gradients cross. Make optimizers afterwards: their state is
        beside the rows, for a file in `<file>.<name of the state>`. Draws are made on the host, or where
        `head.sampler.to(device)` has put a sampler. A head that was made with `device="meta"` gets its first rows
        here. See docs/host_tables.md.

        Args:
            file: a new file that the rows are mapped from (`sx.tables.mapped_table`); None: memory on huge pages, where
                the system has them.
            compute: where the loss of a training step is computed: "device", that of `h`, or "host": then `h` and its
                gradient cross instead of rows.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> head = sx.SampledClassifier(4, 50, sx.samplers.Uniform(50), num_samples=10)
            >>> head.host_table()
            >>> head.to("meta").weight.device
            device(type='cpu')
        """
        self.host = make_host_table(cast("SampledClassifier", self), file, compute)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        if self.host is not None:
            fn = keep_on_host(fn)
        names = ["class_weight"] + ([] if self._state_name is None else [self._state_name])
        exact = {name: self.get_buffer(name) for name in names if self._buffers.get(name) is not None}
        super()._apply(fn, recurse)
        # `.to(bfloat16)` is about the parameters; rounded class weights would shift the loss.
        for name, value in exact.items():
            now = self.get_buffer(name)
            if now.dtype != self._wide():
                setattr(self, name, value.to(device=now.device, dtype=self._wide()))
        return self

    def _wide(self) -> torch.dtype:
        return torch.float64 if self.weight.dtype == torch.float64 else torch.float32

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        # How far the saved sampler lags behind the saved weights, so that a resumed run draws what this one would have.
        if (lag := self.follower.lag()) is not None:
            destination[f"{prefix}sampler_lag"] = lag

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if self.sampler is not None and refuse_classes(self, self.num_classes, state_dict, prefix, args[-1]):
            return
        for name in ("weight", "bias"):
            value = state_dict.get(f"{prefix}{name}")
            if isinstance(value, Tensor) and value.is_complex():  # torch would drop the imaginary parts
                args[-1].append(f"SampledClassifier: {name} of the state dict must be real, got {describe(value)}")
                return
        explain_mismatch(self, state_dict, prefix, *args)
        live = state_dict.get(f"{prefix}live")  # of a head with retired classes
        if live is None:
            self.live = None
        elif isinstance(live, Tensor) and live.shape == (self.num_classes,) and self.live is None:
            self.live = torch.ones(self.num_classes, dtype=torch.bool, device=self.weight.device)
        # A checkpoint of nn.Linear has no `sampler.` entry at all: load it strictly all the same, and keep the sampler.
        without = not any(name.startswith(f"{prefix}sampler.") for name in state_dict)
        if without and self.sampler is not None:
            state_dict.update(self.sampler.state_dict(prefix=f"{prefix}sampler."))
            if self._state_name is not None:
                state_dict.setdefault(f"{prefix}{self._state_name}", self.get_buffer(self._state_name))
        # A checkpoint of this head holds the sampler and its lag; one without a sampler brings rows it has not seen.
        self.follower.restore(state_dict.pop(f"{prefix}sampler_lag", None), self.weight.device)
        if without:
            self.follower.mark()
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.follower.accept()  # what was loaded belongs to the sampler and the lag that come with it

    def extra_repr(self) -> str:
        """What `print(head)` shows; options at their defaults are left out."""
        parts = [
            f"in_features={self.in_features}, num_classes={self.num_classes}, num_samples={self.num_samples}",
            f"loss={self.loss!r}, bias={self.bias is not None}",
        ]
        defaults = {
            "shared": False,
            "stratified": False,
            "scale": 1.0,
            "normalize": False,
            "ignore_index": -100,
            "sparse": True,
            "reduction": "mean",
            "sampler_update": None,
        }
        parts += [f"{name}={getattr(self, name)}" for name, value in defaults.items() if getattr(self, name) != value]
        if self.log_scale is not None:
            parts.append("learn_scale=True")
        if self.class_weight is not None:
            parts.append("class_weight=True")
        return ", ".join(parts)
