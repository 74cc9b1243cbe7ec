"""`make gpu`, as far as it can be tested without a GPU."""

from __future__ import annotations

import getpass
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from test_packaging import script

ROOT = Path(__file__).resolve().parents[1]
DEVICE = {
    "name": "Some GPU",
    "capability": "9.0",
    "memory": 80 * 2**30,
    "kernels": "machine code",
    "kernels_arch": "sm_90",
}


@pytest.fixture
def gpu():
    return script("gpu_report")


def start(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "gpu_report.py"), *arguments]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=folder, env=environment, check=False, capture_output=True, text=True)


def test_says_that_there_is_no_gpu(tmp_path):
    done = start(folder=tmp_path)
    assert done.returncode == 2
    assert "there is no GPU to run on" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_dry_run_names_every_stage(tmp_path):
    done = start("--dry-run", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("tests:", "gate:", "steps:", "bench step:", "bench full_softmax:", "not installed"):
        assert name in done.stdout
    assert "nothing can run" in done.stdout
    assert start("--dry-run", "--only", "bench", folder=tmp_path).stdout.startswith("bench step:")


def test_stages_exist(gpu, tmp_path):
    for stage in gpu.stages("9.0", tmp_path, quick=False):
        if stage.command[1] != "-m":
            assert (ROOT / stage.command[1]).exists(), stage.name
    by_name = {stage.name: stage for stage in gpu.stages("12.1", tmp_path, quick=True)}
    assert "sm_121" in by_name["gate"].why_not or "nvcc" in by_name["gate"].why_not
    assert "--quick" in by_name["bench step"].command


def fake_info(gpu) -> dict:
    from samplex_cuda.info import gather_info

    info = gather_info()
    info["machine"].update(cuda_devices=[DEVICE], driver="580.65.06")
    return info


def test_report_holds_results_and_no_names(gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(platform, "node", lambda: "secretbox.lab.example")
    monkeypatch.setattr(getpass, "getuser", lambda: "mallory")
    monkeypatch.setattr(Path, "home", lambda: Path("/folders/mallory"))
    done = gpu.Stage(
        "tests", ["pytest"], 12.0, 1, f"{ROOT}/x.py failed on secretbox of mallory in /folders/mallory/a\n"
    )
    left_out = gpu.Stage("gate", ["x"], why_not="nvcc is not on PATH")
    steps = {
        "bandwidth": 3.0e12,
        "model": "H100 SXM",
        "steps": [
            {
                "step": "per row, m = 64",
                "milliseconds": {"ours": 0.05, "ours, graph": 0.04, "eager torch": 0.9},
                "computed": 0.052,
                "notes": ["FBGEMM not measured"],
            },
            {"step": "shared, m = 64", "error": "RuntimeError: out of\nmemory at /folders/mallory/b"},
        ],
        "profile": {"launches": 10.0, "kernels": [{"name": "k<float>", "per_step": 1.0, "microseconds": 14.2}]},
    }
    text = gpu.report(fake_info(gpu), [done, left_out], steps)
    for name in ("mallory", "secretbox", str(ROOT)):
        assert name not in text
    assert "<project>/x.py failed on <host> of <user> in <home>/a" in text
    assert "| tests | FAILED (1) | 12 |" in text
    assert "left out: nvcc is not on PATH" in text
    assert "| per row, m = 64 | 0.050 ms | 0.040 ms | 0.052 ms | eager torch 0.900 ms (FBGEMM not measured) |" in text
    assert "failed: RuntimeError: out of memory" in text
    assert "| `k<float>` | 1 | 14.2 |" in text
    assert "Some GPU, compute 9.0" in text


def test_names_go_only_as_whole_words(gpu):
    assert gpu.without("root-mean-square of root, box and boxes", {"root": "<user>", "box": "<host>"}) == (
        "root-mean-square of <user>, <host> and boxes"
    )


def test_runs_the_stages_where_there_is_a_gpu(gpu, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu, "why_not", lambda: "")
    info = fake_info(gpu)
    monkeypatch.setattr("samplex_cuda.info.gather_info", lambda: info)

    def planned(capability, work, *, quick):
        assert capability == "9.0"
        (work / "steps.json").write_text(json.dumps({"bandwidth": 1e12, "model": "x", "steps": []}))
        good = gpu.Stage("steps", [sys.executable, "-c", "print('good')"])
        return [good, gpu.Stage("bad", [sys.executable, "-c", "print('said'); raise SystemExit(3)"])]

    monkeypatch.setattr(gpu, "stages", planned)
    assert gpu.main([]) == 1
    text = (tmp_path / "gpu_report.md").read_text()
    assert "| steps | passed |" in text
    assert "| bad | FAILED (3) |" in text
    assert "said" in text
    assert "Copy bandwidth 1.00 TB/s" in text
    assert "failed: bad" in capfd.readouterr().out
    assert gpu.main(["--only", "steps", "--output", str(tmp_path / "other.md")]) == 0


def test_steps_are_measured(tmp_path):
    """On the CPU, tiny: the sides, the refcheck and the profile work."""
    out = tmp_path / "steps.json"
    sizes = ["--classes", "500", "--batch", "4", "--dim", "128"]
    command = [sys.executable, "bench/gpu_steps.py", "--device", "cpu", *sizes]
    command += ["--seconds", "0.01", "--only", "per row, m = 64", "--json", str(out)]
    environment = {**os.environ, "PATH": str(tmp_path), "CXX": ""}  # no compiler: torch.compile is left out, for time
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    fp32, bf16 = found["steps"]
    assert "error" not in fp32, fp32
    assert "error" not in bf16, bf16
    assert {"ours", "eager torch"} <= set(fp32["milliseconds"])
    assert fp32["computed"] > 0
    assert any(row["name"].startswith("samplex::") for row in found["profile"]["kernels"])
