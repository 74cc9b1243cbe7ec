"""The losses for sentence-transformers on two processes, in the library's trainer."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
import torch
from test_sentence_transformers import WORDS, features, model

import samplex_cuda as sx

st = pytest.importorskip("sentence_transformers")
datasets = pytest.importorskip("datasets")
adapter = sx.integrations.sentence_transformers


def run(made, loss, data, folder, optimizer=None):
    args = st.SentenceTransformerTrainingArguments(
        output_dir=str(folder), max_steps=3, per_device_train_batch_size=4, report_to=[], disable_tqdm=True,
        learning_rate=0.05, save_strategy="no", use_cpu=True, seed=1, ddp_backend="gloo",
    )  # fmt: skip
    options = {} if optimizer is None else {"optimizers": (optimizer, None)}
    trainer = st.SentenceTransformerTrainer(made, args, train_dataset=data, loss=loss, **options)
    trainer.train()
    return trainer.args.process_index


def batch_of(rank):
    """Anchors, positives, negatives and labels of a process."""
    which = torch.tensor([0, 3, 1, 3, 2, 0, 4, 3])[4 * rank : 4 * rank + 4]
    return [[WORDS[start + int(i)] for i in which] for start in (0, 20, 30)], which


def gathered(made, rank, **options):
    """Loss and gradient of the batch of all processes, as DistributedDataParallel would average it."""
    texts, labels = batch_of(rank)
    loss = adapter.InBatchLoss(made, gather_across_devices=True, **options)([features(made, t) for t in texts], labels)
    made.zero_grad()
    loss.backward()
    both = torch.cat([loss.detach().reshape(1), made[0].embedding.weight.grad.reshape(-1)])
    torch.distributed.all_reduce(both)
    return both / 2


def ways():
    """Options of the loss."""
    return {
        "plain": {},
        "counts": {"counts": torch.arange(1.0, 6.0), "symmetric": True},
        "frequency": {"frequency": sx.samplers.StreamingFrequency(5)},
    }


def on_a_rank(folder: Path) -> None:
    warnings.simplefilter("ignore")
    found, made = {}, model()
    data = datasets.Dataset.from_dict({"text": WORDS, "label": list(range(40))})
    loss = adapter.SampledSoftmaxLoss(made, 50, sx.samplers.Uniform(50), 20)
    before = loss.head.weight.detach().clone()
    rank = run(made, loss, data, folder / "sampled", adapter.make_optimizer(loss, lr=0.05, row_lr=0.05))
    found["sampled"] = [p.detach() for p in loss.head.parameters()] + [p.detach() for p in made.parameters()]
    found["moved"] = float((loss.head.weight - before).detach().abs().max())
    made = model()
    pairs = datasets.Dataset.from_dict({"a": WORDS[:20], "b": WORDS[20:], "label": [i % 5 for i in range(20)]})
    loss = adapter.InBatchLoss(made, frequency=sx.samplers.StreamingFrequency(5), gather_across_devices=True)
    run(made, loss, pairs, folder / "batch")
    found["in_batch"] = [p.detach() for p in made.parameters()] + list(loss.frequency.buffers())
    found["gathered"] = {name: gathered(model(), rank, **options) for name, options in ways().items()}
    torch.save(found, folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    from rank_processes import run_ranks

    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(__file__, folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("kind", ["sampled", "in_batch"])
def test_processes_stay_equal(kind, ranks):
    for one, two in zip(*(found[kind] for found in ranks), strict=True):
        assert torch.equal(one, two)
    assert ranks[0]["moved"] > 0.01
    assert int(ranks[0]["in_batch"][1]) == 3 * 8  # examples of both processes


@pytest.mark.parametrize("way", ["plain", "counts", "frequency"])
def test_the_gathered_batch_is_that_of_one_process(way, ranks):
    made = model()
    (texts, labels), (more, other) = batch_of(0), batch_of(1)
    loss = adapter.InBatchLoss(made, **ways()[way])
    whole = [features(made, a + b) for a, b in zip(texts, more, strict=True)]
    value = loss(whole, torch.cat([labels, other]))
    value.backward()
    want = torch.cat([value.detach().reshape(1), made[0].embedding.weight.grad.reshape(-1)])
    for found in ranks:
        torch.testing.assert_close(found["gathered"][way], want, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":  # a rank
    on_a_rank(Path(sys.argv[1]))
