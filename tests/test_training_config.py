"""Configurations: TOML in and out, and errors that name file, table, key, wanted and got."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from samplex_cuda.training import config
from samplex_cuda.training.config import Config, ConfigError


def test_toml_round_trip(tmp_path):
    run = config.override(
        Config(),
        [
            "data.path=C:\\data\\a \"b\" é.txt",
            "data.options.window=20",
            "data.options.names=[\"x\", \"y\"]",
            "optimizer.lr=1e-05",
            "optimizer.fused=false",
            "sampler.name=mixture",
            'sampler.components=["tree", "uniform"]',
            "sampler.weights=[0.9, 0.1]",
            "sampler.update=20",
            "training.average=ema",
        ],
    )  # fmt: skip
    (tmp_path / "run.toml").write_text(config.dumps(run))
    again = config.load(tmp_path / "run.toml")
    assert again == run
    assert again.data.options == {"window": 20, "names": ["x", "y"]}
    assert again.sampler.update == 20
    assert again.optimizer.fused is False
    assert type(again.training.average_decay) is float


def test_the_writer_writes_toml():
    tables = pytest.importorskip("tomllib").loads(config.dumps(Config()))
    assert tables == dataclasses.asdict(Config())


def test_overrides_keep_the_original():
    run = Config()
    other = config.override(run, ["training.epochs=3", "data.path=2024"])
    assert (run.training.epochs, other.training.epochs, other.data.path) == (10, 3, "2024")


BAD = [
    ("[optimzer]\nlr = 1", r'has no table \[optimzer\] \(did you mean "optimizer"\?\)'),
    ("[optimizer]\nlearning_rate = 1", r"\[optimizer\] has no key learning_rate; there are name, lr, "),
    ("[optimizer]\nlr = 0", r"\[optimizer\] lr must be a number above 0, got 0"),
    ('[optimizer]\nlr = "1"', r'\[optimizer\] lr must be a number above 0, got "1"'),
    ("[optimizer]\nlr = nan", r"\[optimizer\] lr must be a number above 0, got NaN"),
    ("[training]\nepochs = 2.5", r"\[training\] epochs must be an int at least 1, got 2.5"),
    ("[training]\nepochs = true", r"\[training\] epochs must be an int at least 1, got true"),
    ("[training]\nclip_head = 1", r"\[training\] clip_head must be true or false, got 1"),
    ('[training]\nmetrics = "nll"', r'\[training\] metrics must be a list of strings, got "nll"'),
    ("[model]\ndropout = 1", r"\[model\] dropout must be a number at least 0 and below 1, got 1"),
    ('[model]\nname = "transformer"', r'\[model\] name must be one of linear, .*, or "package.module:Class", got'),
    ('[head]\nloss = "hinge"', r'\[head\] loss must be one of "sampled_softmax", .*, got "hinge"'),
    (
        '[sampler]\nupdate = "often"',
        r'\[sampler\] update must be an int at least 1 or "auto" or "step" or "epoch", got',
    ),
    (
        '[sampler]\nname = "mixture"',
        r"\[sampler\] components must be two or more of uniform, .* for a mixture, got \[\]",
    ),
    (
        '[sampler]\nname = "mixture"\ncomponents = ["tree", "uniform"]\nweights = [1]',
        r"\[sampler\] weights must be 2 numbers above 0, one for each component, got \[1\]",
    ),
    (
        '[sampler]\nname = "tree"\n[head]\nshared = true\nloss = "negative_sampling"',
        r'\[head\] shared must be false with loss = "negative_sampling" and the sampler tree',
    ),
    (
        '[sampler]\nname = "tree"\n[head]\nstratified = true',
        r'\[head\] stratified must be false with loss = "sampled_softmax", shared = false and the sampler tree: ',
    ),
    (
        "[head]\nshared = true\nstratified = true",
        r"\[head\] stratified must be false with .* and the sampler unigram",
    ),
    (
        '[optimizer]\nfused = true\n[head]\nloss = "full_softmax"',
        r'\[optimizer\] fused must be false or "auto" with head.loss = "full_softmax", got true',
    ),
    ("[model]\ntied = true", r"\[model\] tied must be false with the model linear, got true"),
    ("[training]\nclip_head = true", r"\[training\] clip_norm must be above 0 with clip_head, got 0"),
    ("[data]\noptions = 3", r"\[data\] options must be a table, got 3"),
    ("optimizer = 3", r"\[optimizer\] must be a table, got 3"),
    ("[data\npath = 1", r"is not valid TOML: .*line 1"),
]


@pytest.mark.parametrize(("text", "message"), BAD)
def test_errors_name_file_table_key_wanted_got(tmp_path, text, message):
    path = tmp_path / "my run.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"config: .*my run\.toml: " + message):
        config.load(path)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("optimizer.lr", "a setting must be table.key=value"),
        ("lr=1", "a setting must be table.key=value"),
        (
            "optimizer.lr=fast",
            r'command line: optimizer.lr=fast: \[optimizer\] lr must be a number above 0, got "fast"',
        ),
        ("optimizer.rate=1", r"\[optimizer\] has no key rate"),
        ("optimzer.lr=1", r'has no table \[optimzer\] \(did you mean "optimizer"\?\)'),
        ("model.options.a.b=1", r"\[model\] has no key options.a.b"),
        ("head.options.a=1", r"\[head\] has no key options.a"),
    ],
)
def test_errors_of_overrides(setting, message):
    with pytest.raises(ConfigError, match=message):
        config.override(Config(), [setting])


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"config: .*none\.toml: does not exist"):
        config.load(tmp_path / "none.toml")


def test_without_a_toml_reader_the_extra_is_named(tmp_path, monkeypatch):
    (tmp_path / "run.toml").write_text("")
    monkeypatch.setitem(sys.modules, "tomllib", None)
    monkeypatch.setitem(sys.modules, "tomli", None)
    with pytest.raises(ImportError, match=r"tomli .* pip install samplex-cuda\[cli\]"):
        config.load(tmp_path / "run.toml")


def test_a_config_made_in_python_is_checked():
    run = Config()
    run.training.batch_size = 0
    with pytest.raises(ConfigError, match=r"\[training\] batch_size must be an int at least 1, got 0"):
        run.check()


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"name": "constant"}, {0: 1.0, 99: 1.0}),
        ({"name": "constant", "warmup": 4}, {0: 0.25, 3: 1.0, 50: 1.0}),
        ({"name": "linear"}, {0: 1.0, 25: 0.75, 100: 0.0, 150: 0.0}),
        ({"name": "linear", "final": 0.5, "warmup": 10}, {9: 1.0, 10: 1.0, 55: 0.75, 100: 0.5}),
        ({"name": "cosine"}, {0: 1.0, 50: 0.5, 100: 0.0}),
        ({"name": "step", "step_size": 30, "gamma": 0.5}, {0: 1.0, 29: 1.0, 30: 0.5, 60: 0.25}),
    ],
)
def test_schedules(options, steps):
    schedule = config.Schedule(**options)
    for step, wanted in steps.items():
        assert schedule.factor(step, 100) == pytest.approx(wanted)


def test_fused_is_chosen_where_it_can_be():
    assert Config().fused
    for settings in (["head.loss=full_softmax"], ["model.name=lstm", "model.tied=true"], ["optimizer.fused=false"],
                     ["training.clip_head=true", "training.clip_norm=1"]):  # fmt: skip
        assert not config.override(Config(), settings).fused


def test_the_page_lists_every_key():
    page = (Path(__file__).parents[1] / "docs" / "training.md").read_text()
    assert config.describe() in page, "docs/training.md: write the tables of config.describe() again"
