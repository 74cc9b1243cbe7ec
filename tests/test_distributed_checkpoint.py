"""Checkpoints of sharded heads: other numbers of ranks, plain heads, damage."""

from __future__ import annotations

import json
import shutil

import pytest

CASES = {"adagrad": {}, "adam": {"rule": "adam"}, "spread": {"order": "spread"}, "no bias": {"head": {"bias": False}},
         "examples": {"name": "augment and reduce"}, "learned scale": {"name": "learned arcface"},
         "in batch": {"name": "mixed negatives"}, "codes": {"name": "midx", "order": "spread"}}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_saved_on_four_ranks_and_resumed_on_fewer(ranks, tmp_path, case):
    options = CASES[case]
    folder = str(tmp_path / "step_3")
    wanted = ranks.run(4, "save", folder, options)[0]
    for world in (4, 3, 2, 1):
        for found in ranks.run(world, "resume", folder, options):
            assert found == pytest.approx(wanted, rel=1e-5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_3"]


def test_saved_on_one_rank_and_resumed_on_three(ranks, tmp_path):
    folder = str(tmp_path / "step_3")
    (wanted,) = ranks.run(1, "save", folder, {})
    for found in ranks.run(3, "resume", folder, {}):
        assert found == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("order", ["class", "spread"])
@pytest.mark.parametrize("world", [1, 3])
def test_state_of_plain_and_sharded_heads(ranks, world, order):
    assert all(ranks.run(world, "through_plain", order))


def _damage(folder, what):
    """What every rank must say."""
    files = sorted(folder.glob("*.safetensors"))
    if what == "bytes":
        data = bytearray(files[0].read_bytes())
        data[-3] ^= 1
        files[0].write_bytes(data)
        return "is damaged"
    if what == "missing file":
        files[1].unlink()
        return "must hold"
    if what == "no manifest":
        (folder / "manifest.json").unlink()
        return "incomplete"
    if what == "edited manifest":
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["extra"]["step"] = 7
        (folder / "manifest.json").write_text(json.dumps(manifest))
        return "was changed"
    shutil.rmtree(folder)
    return "is not a checkpoint"


@pytest.mark.parametrize("what", ["bytes", "missing file", "no manifest", "edited manifest", "no folder"])
def test_damage_is_refused_on_every_rank(ranks, tmp_path, what):
    folder = tmp_path / "step_3"
    ranks.run(3, "save", str(folder), {})
    wanted = _damage(folder, what)
    for message in ranks.run(3, "load_message", str(folder), {}):
        assert message.startswith("CheckpointError: load_checkpoint: rank ")
        assert wanted in message


def test_another_order_is_refused(ranks, tmp_path):
    folder = tmp_path / "step_3"
    ranks.run(2, "save", str(folder), {})
    for message in ranks.run(2, "load_message", str(folder), {"order": "spread"}):
        assert "must be sharded with order='class' as it was saved, got 'spread'" in message
