"""What updates a model with an `LMHead` in transformers' Trainer: one optimizer, and a callback that fuses it."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel, TrainerCallback

from samplex_cuda.heads import SampledClassifier
from samplex_cuda.integrations.hf_head import LMHead
from samplex_cuda.optim import Combined, RowAdam, split_parameters

__all__ = ["FusedRows", "make_optimizer"]


def make_optimizer(
    model: PreTrainedModel,
    lr: float = 5e-5,
    weight_decay: float = 0.0,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    row_lr: float | None = None,
) -> Combined:
    """AdamW for the model and `RowAdam` for its class tables, for `Trainer(optimizers=(optimizer, None))`.

    Args:
        model: with an `LMHead`.
        lr: of the model.
        weight_decay: decoupled; not for biases and norms.
        betas: of both.
        eps: of both.
        row_lr: of the class tables; `lr` by default.

    Example:
        >>> import transformers, samplex_cuda as sx
        >>> config = transformers.GPT2Config(vocab_size=1000, n_embd=16, n_layer=1, n_head=2, n_positions=32)
        >>> model = transformers.GPT2LMHeadModel(config)
        >>> head = sx.integrations.hf.replace_lm_head(model, sx.samplers.LogUniform(1000), 64)
        >>> optimizer = sx.integrations.hf.make_optimizer(model, lr=1e-3)
        >>> [list(p.shape) for p in optimizer.rows.param_groups[0]["params"]]
        [[1000, 16]]
    """
    if not isinstance(head := model.get_output_embeddings(), LMHead):
        raise TypeError(f"make_optimizer: model must have an LMHead, got {type(head).__name__}: call replace_lm_head")
    rest, tables = split_parameters(model)
    groups = [
        {"params": [p for p in rest if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in rest if p.dim() <= 1], "weight_decay": 0.0},
    ]
    dense = torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=betas, eps=eps)
    rows = RowAdam(
        tables, lr=lr if row_lr is None else row_lr, betas=betas, eps=eps, weight_decay=weight_decay,
        decoupled_weight_decay=True,
    )  # fmt: skip
    return Combined(dense=dense, rows=rows)


class _WithSampler(Combined):
    """`Combined` with the state of a head's sampler, for which a Trainer's checkpoint of the model has no place."""

    head: LMHead

    def state_dict(self) -> dict[str, Any]:
        state = SampledClassifier.state_dict(self.head)
        return {**super().state_dict(), "sampler": {k: v for k, v in state.items() if k.startswith("sampler")}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        rest = dict(state_dict)
        sampler = rest.pop("sampler", {})
        super().load_state_dict(rest)
        if sampler:
            own = {name: p.detach() for name, p in self.head.named_parameters(recurse=False)}
            self.head.load_state_dict({**own, **sampler})


class FusedRows(TrainerCallback):
    """A Trainer callback that owns the optimizer of a model with an `LMHead` and fuses it where that is possible.

    `callback.optimizer` goes to the Trainer: it knows all parameters, so scheduler and checkpoints do too. With
    `max_grad_norm=0` the class rows are updated inside backward, or at the last backward of
    `gradient_accumulation_steps`, and no gradient of theirs is stored. Where the Trainer clips (its default is 1.0),
    where the table is tied to the embedding, and in fp16, whose GradScaler may leave a step out, the rows wait for
    `step()`: `callback.waits` says why. A table tied to an embedding is updated once, with the sum of both gradients.

    On several processes with DistributedDataParallel it calls `sx.distributed.replicate` when the Trainer is made:
    every process keeps the whole class table, and all make the same update of it.

    Args:
        model: with an `LMHead`.
        options: of `make_optimizer`.

    Example:
        >>> import transformers, samplex_cuda as sx
        >>> config = transformers.GPT2Config(vocab_size=1000, n_embd=16, n_layer=1, n_head=2, n_positions=32)
        >>> model = transformers.GPT2LMHeadModel(config)
        >>> head = sx.integrations.hf.replace_lm_head(model, sx.samplers.LogUniform(1000), 64)
        >>> rows = sx.integrations.hf.FusedRows(model, lr=1e-3)
        >>> args = transformers.TrainingArguments("run", report_to=[], use_cpu=True, max_grad_norm=0)
        >>> trainer = transformers.Trainer(model, args, optimizers=(rows.optimizer, None), callbacks=[rows])
    """

    def __init__(self, model: PreTrainedModel, **options: Any) -> None:
        made = make_optimizer(model, **options)
        self.optimizer = _WithSampler(made.dense, made.rows)
        self.model = model
        self.head: LMHead = model.get_output_embeddings()
        self.optimizer.head = self.head
        self.tied = getattr(model.get_input_embeddings(), "weight", None) is self.head.weight
        self.waits: str | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """On several processes: replicates the class tables, before the Trainer wraps the model."""
        kind = args.parallel_mode.value
        if args.deepspeed or args.fsdp:
            kind = "DeepSpeed" if args.deepspeed else "FSDP"
        elif kind == "distributed":
            if not args.average_tokens_across_devices:
                raise ValueError(
                    "FusedRows: args.average_tokens_across_devices must be True on several processes, whose tokens "
                    "make one mean, got False"
                )
            if self.head._replica is None:
                from samplex_cuda.distributed import replicate

                replicate(self.model, encoder="average", batch_capacity="grow")
            return
        if kind != "not_parallel":
            raise ValueError(
                f"FusedRows: the Trainer must use one device per process and DistributedDataParallel, got {kind}"
            )

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Fuses the head, or leaves it to `step()`."""
        if args.world_size > 1 and self.head._replica is None:
            raise ValueError(
                "FusedRows: on several processes the Trainer must have callbacks=[callback] when it is made, got a "
                "callback that was added later: the class tables are not replicated"
            )
        used = given.get("optimizer")
        used = getattr(used, "optimizer", used)  # as accelerate wraps it
        if used is not None and used is not self.optimizer:
            raise ValueError(
                f"FusedRows: the Trainer must have optimizers=(callback.optimizer, None), got a {type(used).__name__}"
            )
        self.waits = None
        if self.tied:
            self.waits = "the class table is tied to the embedding, whose gradient comes later"
        elif args.max_grad_norm:
            self.waits = f"max_grad_norm={args.max_grad_norm:g} needs the norm of all gradients first"
        elif args.fp16:
            self.waits = "the GradScaler of fp16 may leave a step out"
        self.head.fuse_optimizer(None if self.waits else self.optimizer, args.gradient_accumulation_steps)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """The last step of an epoch may have fewer batches than the others."""
        if self.head.fused is not None:
            self.head.fused.flush()

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Leaves the head as it was."""
        self.head.fuse_optimizer(None)
