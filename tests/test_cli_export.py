"""`samplex export`: programs of runs give the answers of `load_model`."""

from __future__ import annotations

import json
import random
import shutil

import pytest
import torch
from cli_cases import one_thread, samplex  # noqa: F401

import samplex_cuda as sx
from samplex_cuda.training import load_model

DENSE = "builtin:classes=40,dim=4,examples=200"
# Data, options of the run, options of the export.
CASES = {
    "dense": (DENSE, ["--model", "mlp"], []),
    "tree": (DENSE, ["--model", "mlp", "--sampler", "tree"], ["--candidates", "tree"]),
    "prior": (DENSE, ["--loss", "negative_sampling", "--sampler", "tree"], ["--candidates", "tree"]),
    "bag": ("rows.svm", ["--model", "embedding_bag"], []),
    "pca": ("rows.svm", ["--set", "model.pca=4"], []),
    "text": ("words.txt", ["--format", "text", "--model", "lstm", "--set", "training.batch_size=4"], ["--length", "5"]),
    "two_tower": ("clicks.csv", ["--model", "two_tower"], []),
    "attention": ("clicks.csv", ["--model", "sequence", "--set", "model.pooling=attention"], []),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("export")
    r = random.Random(0)
    lines = [f"{r.randrange(20)} " + " ".join(f"{f}:1.5" for f in sorted(r.sample(range(1, 30), 4))) for _ in range(99)]
    (made / "rows.svm").write_text("\n".join(lines))
    (made / "words.txt").write_text("\n".join(" ".join(r.choices("abcdefgh", k=20)) for _ in range(30)))
    clicks = [f"{user},{r.randrange(25)},{time}" for user in range(30) for time in range(5)]
    (made / "clicks.csv").write_text("\n".join(["user,item,time", *clicks]))
    return made


def run_of(folder, name):
    data, options, _ = CASES[name]
    run = folder / name
    if not run.exists():
        path = data if data.startswith("builtin") else folder / data
        small = ["training.epochs=1", "training.plot=false", "head.num_samples=8", "model.dim=8"]
        small += ["data.options.history=6"] if "clicks" in data else []
        settings = [word for setting in small for word in ("--set", setting)]
        samplex("train", "--data", path, "--out", run, *settings, *options)
    return run


def requests(name, facts, rows):
    """Inputs by the file beside the program, and the batch of the encoder that they stand for."""
    g = torch.Generator().manual_seed(rows)
    kind = facts["inputs"][0]["name"]
    if kind == "x":
        x = torch.randn(rows, facts["inputs"][0]["shape"][1], generator=g)
        return (x,), {"x": x}
    if kind == "ids":  # rows of 1 to 3 features, padded
        counts = torch.arange(rows) % 3 + 1
        ids = torch.randint(29, (rows, 3), generator=g)
        values = torch.rand(rows, 3, generator=g)
        there = torch.arange(3) < counts[:, None]
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        batch = {"ids": ids[there], "values": values[there], "offsets": offsets}
        return (ids.masked_fill(~there, -1), values), batch
    t = torch.randint(10, (rows, facts["inputs"][0]["shape"][1]), generator=g)
    if kind == "history":
        t[0, :3] = -1
        t[-1] = -1
    return (t,), {kind: t}


@pytest.mark.parametrize("name", CASES)
def test_programs_answer_as_the_model(name, folder, tmp_path):
    run, out = run_of(folder, name), tmp_path / "served.pt2"
    found = json.loads(samplex("export", run, "--out", out, "-k", "4", "--json", *CASES[name][2]).stdout)
    facts = json.loads((tmp_path / "served.json").read_text())
    assert {key: found[key] for key in facts} == facts
    assert sorted(p.name for p in tmp_path.iterdir()) == ["served.json", "served.pt2"]
    scope: dict = {}
    exec(facts["load"].replace("served.pt2", str(out)), scope)  # the line that a person copies
    encoder, head, _, _ = load_model(run)
    for rows in (1, 2, 9):
        given, batch = requests(name, facts, rows)
        assert [str(t.dtype).removeprefix("torch.") for t in given] == [i["dtype"] for i in facts["inputs"]]
        logits, ids = scope["run"](*given)
        with torch.no_grad():
            encoder.carry({})
            h, features = encoder.encode(batch)
            h, features = (h[:, -1], features) if "tokens" in batch else (h, features)
            tree = "tree" if facts["candidates"] == "tree" else None
            parts = sx.training.models.parts_of(head.sampler)
            tree_of = next((p for p in parts if isinstance(p, sx.samplers.Tree)), None) if tree else None
            want, want_ids = head.topk(h, 4, features=features, candidates=tree, tree=tree_of)
        torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-4)
        assert logits.shape == (rows, 4)
        assert float((ids == want_ids).float().mean()) > 0.9  # equal logits except for rounding may change places


def test_the_tables_of_a_sampler_stay_out(folder, tmp_path):
    samplex("export", run_of(folder, "tree"), "--out", tmp_path / "a.pt2", "-k", "4")
    program = torch.export.load(tmp_path / "a.pt2")
    assert not [name for name in program.state_dict if "sampler" in name]


REFUSED = {
    "must end with .pt2": ("dense", ["--out", "x.onnx"]),
    "-k must be at most the 40 classes": ("dense", ["-k", "41"]),
    "needs a model whose sampler has a tree": ("dense", ["--candidates", "tree"]),
    "for torch.export, prior must be None, got a loss with one; export with candidates='tree'": ("prior", []),
    "--length must be given for a model of text": ("text", []),
    "and for no other": ("dense", ["--length", "3"]),
    "there is no folder": ("dense", ["--out", "no/such/x.pt2"]),
}


@pytest.mark.parametrize("said", REFUSED)
def test_refused_in_one_sentence(said, folder, tmp_path, monkeypatch):
    name, options = REFUSED[said]
    run = run_of(folder, name)
    monkeypatch.chdir(tmp_path)
    options = options if "--out" in options else [*options, "--out", "x.pt2"]
    error = json.loads(samplex("export", run, "--json", *options, code=1).stdout)["error"]
    assert said in error
    assert "\n" not in error
    assert not list(tmp_path.iterdir())


def test_links_out_of_a_run_are_refused(folder, tmp_path):
    """As in the other commands (tests/test_security.py has the models by import path)."""
    run, outside = tmp_path / "theirs", tmp_path / "outside"
    shutil.copytree(run_of(folder, "dense"), run)
    shutil.move(run / "checkpoints", outside)
    (run / "checkpoints").symlink_to(outside)
    out = tmp_path / "x.pt2"
    assert "link" in json.loads(samplex("export", run, "--out", out, "--json", code=1).stdout)["error"]
    assert not out.exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["tree", "bag", "attention"])
def test_packages_answer_as_the_model(name, folder, tmp_path):
    """AOTInductor: the command itself compares a package with the model before it puts it in place."""
    out = tmp_path / "served.pt2"
    samplex("export", run_of(folder, name), "--out", out, "-k", "4", "--as", "aoti", *CASES[name][2])
    run = torch._inductor.aoti_load_package(str(out))
    given, _ = requests(name, json.loads((tmp_path / "served.json").read_text()), 7)
    assert run(*given)[1].shape == (7, 4)
