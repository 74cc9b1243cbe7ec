"""transformers' Trainer on two processes, with DistributedDataParallel, against a loop on one."""

from __future__ import annotations

import contextlib
import functools
import sys
from pathlib import Path

import pytest
import torch

import samplex_cuda as sx

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
hf = sx.integrations.hf

V, LENGTH, EXAMPLES, BATCH = 300, 8, 32, 4
RATES = {"lr": 1e-2, "eps": 0.01}  # with this eps the size of a gradient matters to Adam
# Whether the table is tied, max_grad_norm, gradient_accumulation_steps.
CASES = {"tied": (True, 0.5, 1), "clipped": (False, 0.5, 2), "fused": (False, 0.0, 2)}
STEPS = 3


def model_of(tied: bool):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=V, n_embd=16, n_layer=1, n_head=2, n_positions=LENGTH, tie_word_embeddings=tied, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    hf.replace_lm_head(model, sx.samplers.LogUniform(V), 32)
    return model


class Uneven(torch.utils.data.Dataset):
    """Sequences of which a different number of tokens counts."""

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(5)
        self.ids = torch.randint(V, (EXAMPLES, LENGTH), generator=g)
        self.labels = self.ids.clone()
        for row in range(EXAMPLES):
            self.labels[row, 2 + row % 6 :] = -100

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.labels[i]}


@contextlib.contextmanager
def keyed(seen, keys):
    """Within it, heads take the keys in turn, and what they are called with is stored."""
    before = hf.LMHead.forward

    def forward(self, h, y=None, **options):
        if y is not None and self.training:
            options["key"] = next(keys)
        return before(self, h, y, **options)

    hf.LMHead.forward = forward
    inside = transformers.GPT2LMHeadModel.forward

    @functools.wraps(inside)  # the Trainer reads its signature
    def model_forward(self, *args, **kwargs):
        seen.append(kwargs["input_ids"].clone())
        return inside(self, *args, **kwargs)

    transformers.GPT2LMHeadModel.forward = model_forward
    try:
        yield
    finally:
        hf.LMHead.forward, transformers.GPT2LMHeadModel.forward = before, inside


def trainer(model, folder, clip, accumulate, **options):
    args = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=BATCH, report_to=[], use_cpu=True, disable_tqdm=True,
        seed=3, max_grad_norm=clip, gradient_accumulation_steps=accumulate, logging_steps=1,
        dataloader_pin_memory=False, prediction_loss_only=True, lr_scheduler_type="constant", ddp_backend="gloo",
        **{"save_strategy": "no", "max_steps": STEPS, **options},
    )  # fmt: skip
    rows = hf.FusedRows(model, **RATES)
    data = Uneven()
    return transformers.Trainer(
        model, args, train_dataset=data, eval_dataset=data, optimizers=(rows.optimizer, None), callbacks=[rows]
    ), rows


def on_a_rank(folder: Path) -> None:
    """What each process does: all cases, their parameters and losses to a file."""
    rank, found = None, {}
    for name, (tied, clip, accumulate) in CASES.items():
        model, seen = None, []
        with keyed(seen, (sx.Key(7, step) for step in range(99))):
            model = model_of(tied)
            run, rows = trainer(model, folder / name, clip, accumulate)
            rank = run.args.process_index
            run.train()
        found[name] = {
            "parameters": {key: p.detach() for key, p in model.named_parameters()},
            "batches": seen,
            "waits": rows.waits,
            "first": int(run._loss_shifts_labels),  # whether the Trainer counts the first token of a row
            "losses": [entry["loss"] for entry in run.state.log_history if "loss" in entry],
            "eval_loss": run.evaluate()["eval_loss"],
        }
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    whole, again = model_of(True), model_of(True)
    trainer(whole, folder / "saved", 0.5, 1, **options)[0].train()
    run, _ = trainer(again, folder / "saved", 0.5, 1, **options)
    run.train(resume_from_checkpoint=str(folder / "saved" / "checkpoint-2"))
    found["resumed"] = [{key: p.detach() for key, p in model.named_parameters()} for model in (whole, again)]
    late, rows = model_of(False), None
    run, rows = trainer(late, folder / "late", 0.0, 1)
    late.lm_head._replica = None
    try:
        run.train()
    except ValueError as error:
        found["late"] = str(error)
    try:
        trainer(model_of(False), folder / "local", 0.0, 1, average_tokens_across_devices=False)
    except ValueError as error:
        found["local"] = str(error)
    torch.save(found, folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    from rank_processes import run_ranks

    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(__file__, folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def by_hand(tied, clip, accumulate, batches, first):
    """The same steps on one process: the batches of both ranks, with the same shared draws."""
    model, data, losses = model_of(tied), Uneven(), []
    optimizer = hf.make_optimizer(model, **RATES)
    number = 0
    for step in range(STEPS):
        parts = []
        for micro in range(accumulate):
            at = step * accumulate + micro
            parts += [(batches[rank][at], torch.tensor([7, at])) for rank in range(2)]
        rows = [[int((data.ids == row).all(1).nonzero()) for row in ids] for ids, _ in parts]
        labels = [data.labels[r] for r in rows]
        total = sum(int((one[:, first:] != -100).sum()) for one in labels)
        losses.append(0.0)
        for (ids, key), one in zip(parts, labels, strict=True):
            with keyed([], iter([key])):
                loss = model.train()(input_ids=ids, labels=one, num_items_in_batch=total).loss
            loss.backward()
            losses[-1] += float(loss.detach())
            number += 1
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return model, losses


@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_as_one(case, ranks):
    one, two = (found[case] for found in ranks)
    assert (one["waits"] is None) == (case == "fused")
    assert not torch.equal(one["batches"][0], two["batches"][0])
    model, losses = by_hand(*CASES[case], [one["batches"], two["batches"]], one["first"])
    for name, want in model.named_parameters():
        assert torch.equal(one["parameters"][name], two["parameters"][name]), name
        torch.testing.assert_close(
            one["parameters"][name], want.detach(), rtol=2e-3, atol=2e-5, msg=lambda said, name=name: f"{name}: {said}"
        )
    assert one["losses"] == pytest.approx(losses, abs=1e-3)
    data = Uneven()
    with torch.no_grad():
        exact = model.eval()(input_ids=data.ids, labels=data.labels).loss
    assert one["eval_loss"] == pytest.approx(two["eval_loss"])
    counted = [int((data.labels[:, skip:] != -100).sum()) for skip in (1, one["first"])]
    want = float(exact) * counted[0] / counted[1]
    assert one["eval_loss"] == pytest.approx(want, rel=0.05)  # a mean over batches, not tokens


def test_two_processes_resume_with_the_same_bits(ranks):
    for found in ranks:
        whole, again = found["resumed"]
        for name, value in whole.items():
            assert torch.equal(value, again[name]), name
            assert torch.equal(value, ranks[0]["resumed"][0][name]), name


def test_refused(ranks):
    for found in ranks:
        assert "FusedRows: on several processes the Trainer must have callbacks=[callback]" in found["late"]
        assert "FusedRows: args.average_tokens_across_devices must be True on several processes" in found["local"]


@pytest.mark.parametrize("how", ["FSDP", "not_distributed"])
def test_other_ways_of_several_devices_are_refused(how, tmp_path):
    rows = hf.FusedRows(model_of(False))
    args = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    if how == "FSDP":
        args.fsdp = ["full_shard"]
    else:
        args.__class__ = type("Args", (transformers.TrainingArguments,), {"n_gpu": 2})
    with pytest.raises(ValueError, match=f"one device per process and DistributedDataParallel, got {how}"):
        rows.on_init_end(args, None, None)


if __name__ == "__main__":  # a rank
    on_a_rank(Path(sys.argv[1]))
