"""`torch.export` of encoder and top-k with an open batch size; AOTInductor packages of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import samplex_cuda as sx

C, D = 300, 16


class Server(nn.Module):
    """Encoder and top-k."""

    def __init__(self, candidates=None, loss="sampled_softmax", dtype=torch.float32, **options) -> None:
        super().__init__()
        torch.manual_seed(0)
        tree = candidates == "tree"
        x, y = torch.randn(500, D), torch.randint(C, (500,))
        sampler = sx.samplers.Tree.fit(x, y, num_classes=C, dim=8) if tree else sx.samplers.Uniform(C)
        self.encoder = nn.Linear(8, D)
        self.head = sx.SampledClassifier(D, C, sampler, 10, loss, **options)
        self.candidates = candidates
        self.to(dtype).eval()

    def forward(self, x):
        return self.head.topk(self.encoder(x), 5, candidates=self.candidates)


CASES = {
    "exact": {},
    "exact_scaled": {"scale": -0.5},
    "exact_no_bias": {"bias": False},
    "exact_bfloat16": {"dtype": torch.bfloat16},
    "tree": {"candidates": "tree"},
    "tree_with_prior": {"candidates": "tree", "loss": "negative_sampling"},
}


def exported(model):
    x = torch.randn(3, 8, dtype=model.encoder.weight.dtype)
    with torch.no_grad():  # no switches of the gradient mode in the program
        return torch.export.export(model, (x,), dynamic_shapes={"x": {0: torch.export.Dim("batch", min=1, max=4096)}})


def compare(model, run):
    for batch in (1, 3, 70):
        x = torch.randn(batch, 8, dtype=model.encoder.weight.dtype)
        logits, ids = run(x)
        want_logits, want_ids = model(x)
        torch.testing.assert_close(logits, want_logits, rtol=1e-5, atol=1e-5)
        assert torch.equal(ids, want_ids)


@pytest.mark.parametrize("case", CASES)
def test_export_with_an_open_batch(case, tmp_path):
    model = Server(**CASES[case])
    program = exported(model)
    compare(model, program.module())
    torch.export.save(program, tmp_path / "model.pt2")
    compare(model, torch.export.load(tmp_path / "model.pt2").module())


def test_chunks_of_an_exported_program(monkeypatch):
    """Several chunks of classes; equal logits stay in ascending order of ids."""
    from samplex_cuda import prediction

    monkeypatch.setattr(prediction, "_EXPORTED_CLASSES", 64)
    model = Server()
    with torch.no_grad():
        model.head.weight[100:200] = model.head.weight[:100]
        model.head.bias[100:200] = model.head.bias[:100]
    compare(model, exported(model).module())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", ["exact", "tree", "tree_with_prior"])
def test_aot_inductor_package(case, tmp_path):
    model = Server(**CASES[case])
    path = torch._inductor.aoti_compile_and_package(exported(model), package_path=str(tmp_path / "model.pt2"))
    compare(model, torch._inductor.aoti_load_package(path))


def test_refused():
    with pytest.raises(NotImplementedError, match=r"for torch.export, prior must be None"):
        exported(Server(loss="negative_sampling"))
