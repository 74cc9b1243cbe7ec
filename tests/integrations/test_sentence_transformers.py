"""Losses for sentence-transformers, beside its own, on a model made on the spot."""

from __future__ import annotations

import pytest
import torch

import samplex_cuda as sx

st = pytest.importorskip("sentence_transformers")
datasets = pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")
pytestmark = pytest.mark.filterwarnings("ignore")
adapter = sx.integrations.sentence_transformers

WORDS = [f"w{i}" for i in range(40)]


def model():
    torch.manual_seed(0)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(["?", *WORDS])}, "?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    static = st.sentence_transformer.modules.StaticEmbedding(words, embedding_dim=16)
    return st.SentenceTransformer(modules=[static], device="cpu")


def train(made, loss, data, folder, optimizer=None, steps=60):
    args = st.SentenceTransformerTrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=8, report_to=[], disable_tqdm=True,
        learning_rate=0.05, save_strategy="no", use_cpu=True, seed=1,
    )  # fmt: skip
    options = {} if optimizer is None else {"optimizers": (optimizer, None)}
    st.SentenceTransformerTrainer(made, args, train_dataset=data, loss=loss, **options).train()


def test_sampled_softmax(tmp_path):
    made = model()
    data = datasets.Dataset.from_dict({"text": WORDS * 3, "label": list(range(40)) * 3})
    loss = adapter.SampledSoftmaxLoss(made, 1000, sx.samplers.Uniform(1000), 100)
    h, y = made.encode(WORDS, convert_to_tensor=True), torch.arange(40)
    before = float(loss.head.eval()(h, y))
    train(made, loss.train(), data, tmp_path, adapter.make_optimizer(loss, lr=0.05, row_lr=0.05))
    h = made.encode(WORDS, convert_to_tensor=True)
    assert float(loss.head.eval()(h, y)) < before - 2
    assert float((loss.head.predict(h) == y).float().mean()) > 0.9
    assert loss.get_config_dict()["num_classes"] == 1000


def run_of(folder, steps=8):
    """A new model, loss and trainer that saves every four steps."""
    made = model()
    data = datasets.Dataset.from_dict({"text": WORDS * 3, "label": list(range(40)) * 3})
    loss = adapter.SampledSoftmaxLoss(made, 60, sx.samplers.Uniform(60), 20)
    args = st.SentenceTransformerTrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=8, report_to=[], disable_tqdm=True,
        save_strategy="steps", save_steps=4, use_cpu=True, seed=1,
    )  # fmt: skip
    optimizer = adapter.make_optimizer(loss, lr=0.05, row_lr=0.05)
    return loss, st.SentenceTransformerTrainer(
        made, args, train_dataset=data, eval_dataset=data, loss=loss, optimizers=(optimizer, None)
    )


def test_resumes_with_the_same_bits(tmp_path):
    """The library's checkpoint has the model alone: class vectors come back with the optimizer."""
    whole, run = run_of(tmp_path)
    run.train()
    again, run = run_of(tmp_path)
    with torch.no_grad():
        again.head.weight.fill_(7.0)
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    for (name, p), q in zip(whole.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q), name
    assert int(again.head.num_classes) == 60


def test_their_trainer_evaluates_exactly(tmp_path):
    """It puts the model in evaluation mode, not the loss."""
    loss, run = run_of(tmp_path)
    got = [run.evaluate()["eval_loss"] for _ in range(2)]
    h, y = loss.model.encode(WORDS, convert_to_tensor=True), torch.arange(40)
    with torch.no_grad():
        want = float(torch.nn.functional.cross_entropy(h @ loss.head.weight.T + loss.head.bias, y))
    assert got == [pytest.approx(want, abs=1e-5)] * 2
    loss.train()
    loss.model.train()
    assert float(loss([features(loss.model, WORDS)], y)) != pytest.approx(want, abs=1e-5)
    assert loss.head.training


def pairs():
    """Anchor w_i goes with positive w_(20 + i % 20), the first of them far more often."""
    g = torch.Generator().manual_seed(0)
    which = (20 ** torch.rand(240, generator=g)).long().clamp(max=20) - 1
    return which, datasets.Dataset.from_dict(
        {
            "anchor": [WORDS[int(i)] for i in which],
            "positive": [WORDS[20 + int(i)] for i in which],
            "label": which.tolist(),
        }
    )


def features(made, texts):
    return made.preprocess(texts)


def test_in_batch_is_theirs_without_counts():
    made = model()
    anchors, positives = [features(made, WORDS[i : i + 6]) for i in (0, 20)]
    theirs = st.sentence_transformer.losses.MultipleNegativesRankingLoss(made)([anchors, positives], None)
    ours = adapter.InBatchLoss(made)([anchors, positives], None)
    torch.testing.assert_close(ours, theirs)


def test_in_batch_correction():
    """log Q lowers the logits of the negatives by the log of their frequency, and masks equal positives."""
    made = model()
    counts = torch.arange(1.0, 21.0)
    ids = torch.tensor([3, 7, 3, 19])
    texts = [[WORDS[i] for i in ids], [WORDS[20 + i] for i in ids]]
    got = adapter.InBatchLoss(made, counts)([features(made, t) for t in texts], ids)
    a, p = (torch.nn.functional.normalize(made.encode(t, convert_to_tensor=True), dim=1) for t in texts)
    logits = 20 * a @ p.T
    log_q = (counts / counts.sum()).log()[ids]
    off = ~torch.eye(4, dtype=torch.bool)
    corrected = torch.where(off, logits - log_q - torch.log(torch.tensor(3.0)), logits)
    corrected[(ids[:, None] == ids) & off] = -torch.inf
    want = (corrected.logsumexp(1) - logits.diagonal()).mean()
    torch.testing.assert_close(got, want)


def test_known_positives_are_no_negatives_in_the_batch():
    made = model()
    counts = torch.arange(1.0, 21.0)
    ids, known = torch.tensor([3, 7, 3, 19]), torch.tensor([[7, 2], [-100, -100], [-100, 19], [-100, -100]])
    texts = [[WORDS[i] for i in ids], [WORDS[20 + i] for i in ids]]
    labels = torch.cat([ids[:, None], known], 1)
    got = adapter.InBatchLoss(made, counts)([features(made, t) for t in texts], labels)
    a, p = (torch.nn.functional.normalize(made.encode(t, convert_to_tensor=True), dim=1) for t in texts)
    logits = 20 * a @ p.T
    off = ~torch.eye(4, dtype=torch.bool)
    log_q = (counts / counts.sum()).log()[ids]
    corrected = torch.where(off, logits - log_q - torch.log(torch.tensor(3.0)), logits)
    out = (ids[:, None] == ids) | (known[:, :, None] == ids).any(1)
    corrected[out & off] = -torch.inf
    torch.testing.assert_close(got, (corrected.logsumexp(1) - logits.diagonal()).mean())


@pytest.mark.parametrize("columns", [2, 4])
@pytest.mark.parametrize("symmetric", [False, True])
def test_in_batch_with_negatives_is_theirs_without_counts(columns, symmetric):
    made = model()
    texts = [features(made, WORDS[i : i + 6]) for i in (0, 20, 10, 30)[:columns]]
    directions = ("query_to_doc", "doc_to_query") if symmetric else ("query_to_doc",)
    kind = st.sentence_transformer.losses.MultipleNegativesRankingLoss
    theirs = kind(made, directions=directions, partition_mode="per_direction")(texts, None)
    grads = []
    for loss in (theirs, adapter.InBatchLoss(made, symmetric=symmetric)(texts, torch.arange(6))):
        made.zero_grad()
        loss.backward()
        grads.append(made[0].embedding.weight.grad.clone())
        torch.testing.assert_close(loss, theirs)
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("labeled", [False, True])
def test_negatives_beside_the_correction(labeled):
    """Draws of the batch are corrected and divided by their number; each further text counts once."""
    made, counts = model(), torch.arange(1.0, 41.0)
    ids, hard = torch.tensor([3, 7, 3, 19]), torch.tensor([7, 5, 6, 3])
    texts = [[WORDS[i] for i in which] for which in (ids, 20 + ids % 20, hard)]
    labels = torch.stack([ids, hard], 1) if labeled else ids
    got = adapter.InBatchLoss(made, counts)([features(made, t) for t in texts], labels)
    a, p, n = (torch.nn.functional.normalize(made.encode(t, convert_to_tensor=True), dim=1) for t in texts)
    off = ~torch.eye(4, dtype=torch.bool)
    own = 20 * a @ p.T
    batch = torch.where(off, own - (counts / counts.sum()).log()[ids] - torch.log(torch.tensor(3.0)), own)
    batch[(ids[:, None] == ids) & off] = -torch.inf
    further = 20 * a @ n.T
    if labeled:
        further[ids[:, None] == hard] = -torch.inf
    want = (torch.cat([batch, further], 1).logsumexp(1) - own.diagonal()).mean()
    torch.testing.assert_close(got, want)


def test_frequency_learns_the_counts():
    """After a while the estimate is close to the true shares; evaluation does not count."""
    made, counts = model(), torch.tensor([8.0, 4.0, 2.0, 1.0, 1.0])
    frequency = sx.samplers.StreamingFrequency(5, rate=0.01)
    ours, right = adapter.InBatchLoss(made, frequency=frequency), adapter.InBatchLoss(made, counts)
    g = torch.Generator().manual_seed(0)
    for _ in range(60):
        ids = torch.multinomial(counts, 32, replacement=True, generator=g)
        texts = [features(made, [WORDS[start + int(i)] for i in ids]) for start in (0, 20)]
        found = ours(texts, ids)
    learned = frequency.log_q(torch.arange(5))
    assert float((learned.exp() - counts / counts.sum()).abs().max()) < 0.08
    right.log_q = learned
    torch.testing.assert_close(found, right(texts, ids))
    clock = int(frequency.clock)
    assert clock == 60 * 32
    with torch.no_grad():
        ours(texts, ids)
    assert int(ours.frequency.clock) == clock
    assert "frequency.gap" in ours.state_dict()
    assert ours.get_config_dict()["log_q"] == "frequency"


def test_in_batch_training_beside_theirs(tmp_path):
    """Both losses learn the pairs of the same data; ours also runs in the library's trainer."""
    which, data = pairs()
    counts = torch.bincount(which, minlength=20).clamp(min=1)
    losses = {
        "ours": lambda made: adapter.InBatchLoss(made, counts),
        "theirs": st.sentence_transformer.losses.MultipleNegativesRankingLoss,
    }
    right = {}
    for name, make in losses.items():
        made = model()
        loss, optimizer = make(made), torch.optim.Adam(made.parameters(), lr=0.05)
        g = torch.Generator().manual_seed(0)
        for _ in range(200):
            rows = which[torch.randint(240, (8,), generator=g)]
            texts = ([WORDS[int(i)] for i in rows], [WORDS[20 + int(i)] for i in rows])
            optimizer.zero_grad()
            loss([features(made, t) for t in texts], rows).backward()
            optimizer.step()
        a, p = (made.encode(t, convert_to_tensor=True, normalize_embeddings=True) for t in (WORDS[:20], WORDS[20:]))
        right[name] = float(((a @ p.T).argmax(1) == torch.arange(20))[which].float().mean())
    assert right["ours"] > 0.9, right
    assert right["theirs"] > 0.9, right
    train(made, adapter.InBatchLoss(made, counts), data, tmp_path, steps=3)


def test_refused():
    made = model()
    one = features(made, WORDS[:3])
    with pytest.raises(ValueError, match="InBatchLoss: the data must have at least two columns of texts, got 1"):
        adapter.InBatchLoss(made)([one], None)
    with pytest.raises(ValueError, match="InBatchLoss: counts must be"):
        adapter.InBatchLoss(made, torch.zeros(3))
    with pytest.raises(ValueError, match="InBatchLoss: frequency must be None with counts, got both"):
        adapter.InBatchLoss(made, torch.ones(3), frequency=sx.samplers.StreamingFrequency(3))
    with pytest.raises(TypeError, match="InBatchLoss: frequency must be a StreamingFrequency or None, got"):
        adapter.InBatchLoss(made, frequency=sx.samplers.Uniform(3))
    counted = adapter.InBatchLoss(made, torch.ones(3))
    for labels, got in ((None, "None"), (torch.arange(4), r"\[4\]"), (torch.zeros(4, 1), r"\[4, 1\]")):
        with pytest.raises(ValueError, match=rf"InBatchLoss: labels must be \[3\] or \[3, 1\] with counts .*{got}"):
            counted([one, one], labels)
    with pytest.raises(IndexError, match=r"InBatchLoss: labels must be in \[0, 3\), got 3"):
        counted([one, one], torch.tensor([0, 1, 3]))
    loss = adapter.SampledSoftmaxLoss(made, 10, sx.samplers.Uniform(10), 5)
    with pytest.raises(ValueError, match="SampledSoftmaxLoss: the data must have one column of texts, got 2"):
        loss([one, one], torch.arange(3))
