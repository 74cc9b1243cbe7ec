"""The commands and their options; what they do is in the other modules."""

from __future__ import annotations

import contextlib
import enum
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from samplex_cuda.cli import common

__all__ = ["app"]

app = typer.Typer(
    name="samplex",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train and use classifiers over very many classes with sampled softmax.",
    epilog="Example: samplex train --data builtin:classes=1000 --out runs/first",
)


class Which(str, enum.Enum):
    """Which weights of a run."""

    best = "best"
    latest = "latest"


class Shard(str, enum.Enum):
    """What is spread over ranks."""

    none = "none"
    classes = "classes"


class ProgramKind(str, enum.Enum):
    """What is written."""

    export = "export"
    aoti = "aoti"


class Candidates(str, enum.Enum):
    """How classes are searched."""

    exact = "exact"
    tree = "tree"


class Part(str, enum.Enum):
    """Which part of the data of a run."""

    valid = "valid"
    train = "train"


Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout; everything else goes to stderr.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Set a key of the configuration; may be given many times."),
]
RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The folder of a run of samplex train.")]
WhichOption = Annotated[Which, typer.Option(help="The weights of the best evaluation, or the latest ones.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Trust = Annotated[
    str | None,
    typer.Option(
        "--trust-model",
        metavar="MODULE:CLASS",
        help="Import and run this model, which the run names in config.toml: only code that you know.",
    ),
]


@app.command(
    epilog="Example: samplex train --data builtin:classes=1000,examples=20000 --model linear --sampler tree "
    "--out runs/first --set training.epochs=3"
)
def train(
    config: Annotated[Path | None, typer.Argument(help="A TOML file; `samplex config` prints one.")] = None,
    data: Annotated[str | None, typer.Option(help="File, folder, or builtin:...: data.path.")] = None,
    valid: Annotated[str | None, typer.Option(help="Validation data: data.valid.")] = None,
    data_format: Annotated[str | None, typer.Option("--format", help="Of the files: data.format.")] = None,
    skip_bad: Annotated[int | None, typer.Option(min=0, help="Malformed lines that may be left out.")] = None,
    model: Annotated[str | None, typer.Option(help="The encoder: model.name.")] = None,
    sampler: Annotated[str | None, typer.Option(help="Where negatives come from: sampler.name.")] = None,
    loss: Annotated[str | None, typer.Option(help="The loss: head.loss.")] = None,
    shard: Annotated[
        Shard | None, typer.Option(help="Spread the class table over the ranks of torchrun: training.shard.")
    ] = None,
    setting: Set = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; by default runs/run-NNN.")] = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN_DIR", help="Go on with this run.")] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="With --resume: begin at step 0 if every checkpoint is damaged.")
    ] = False,
    grow: Annotated[
        bool, typer.Option("--grow", help="With --resume: the data may have grown, by rows and by new classes.")
    ] = False,
    trust_model: Trust = None,
    as_json: Json = False,
) -> None:
    """Train a model and keep a run folder: configuration, metrics, curves, checkpoints.

    Ctrl-C saves a checkpoint and says how to go on.

    On several ranks: torchrun --nproc_per_node 4 --no-python samplex train --shard classes --out RUN_DIR ...
    """
    from samplex_cuda.cli.train import settings_of
    from samplex_cuda.cli.train import train as work

    fixed = (config, out, model, sampler, loss, data_format, skip_bad)
    if resume is not None and any(given is not None for given in fixed):
        raise typer.BadParameter(
            "works with --set, --data, --valid, --restart, --grow and --trust-model only: the other settings are in "
            "the run folder",
            param_hint="--resume",
        )
    if restart and resume is None:
        raise typer.BadParameter("works with --resume only", param_hint="--restart")
    if grow and resume is None:
        raise typer.BadParameter("works with --resume only", param_hint="--grow")
    if resume is None and config is None and data is None and not any(s.startswith("data.path") for s in setting or []):
        raise typer.BadParameter("give CONFIG.toml, --data, or --resume", param_hint="CONFIG")
    settings = settings_of(
        data__path=data,
        data__valid=valid,
        data__format=data_format,
        data__options__skip_bad=skip_bad,
        model__name=model,
        sampler__name=sampler,
        head__loss=loss,
        training__shard=None if shard is None else shard.value,
    )
    common.run(
        "train",
        as_json,
        lambda o: work(
            o,
            config=config,
            settings=settings + (setting or []),
            run_dir=out,
            resume=resume,
            restart=restart,
            grow=grow,
            trust_model=trust_model,
        ),
    )


@app.command(epilog="Example: samplex evaluate runs/first --metrics nll,accuracy,precision@5")
def evaluate(
    run_dir: RunDir,
    data: Annotated[str | None, typer.Option(help="File to measure on; by default the run's validation data.")] = None,
    data_format: Annotated[str | None, typer.Option("--format", help="Of the file.")] = None,
    part: Annotated[Part, typer.Option(help="Of the run's data, without --data.")] = Part.valid,
    metrics: Annotated[
        str | None,
        typer.Option(help="nll, perplexity, accuracy, mrr, precision@K, recall@K, ndcg@K, psp@K, with commas between."),
    ] = None,
    which: WhichOption = Which.best,
    rows: Annotated[int, typer.Option(min=0, help="Only so many first examples; 0: all.")] = 0,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Examples at a time.")] = None,
    exclude_history: Annotated[
        bool | None, typer.Option(help="Interactions: known items are not answers; by default as in the run.")
    ] = None,
    propensity_a: Annotated[
        float | None, typer.Option(help="psp@K: A; by default as in the run (0.5 Wikipedia, 0.6 Amazon).")
    ] = None,
    propensity_b: Annotated[
        float | None, typer.Option(help="psp@K: B; by default as in the run (0.4 Wikipedia, 2.6 Amazon).")
    ] = None,
    device: Device = "cpu",
    trust_model: Trust = None,
    as_json: Json = False,
) -> None:
    """Exact metrics of a trained model: over all classes, nothing sampled."""
    from samplex_cuda.cli.predict import evaluate as work

    common.run(
        "evaluate",
        as_json,
        lambda o: work(
            o,
            run_dir,
            path=data,
            form=data_format,
            part=part.value,
            metrics=metrics,
            which=which.value,
            rows=rows,
            batch_size=batch_size,
            exclude_history=exclude_history,
            propensity=(propensity_a, propensity_b),
            device=device,
            trust_model=trust_model,
        ),
    )


@app.command(epilog="Example: samplex predict runs/first rows.npy --out top.jsonl -k 5")
def predict(
    run_dir: RunDir,
    source: Annotated[
        str,
        typer.Argument(
            metavar="INPUT", help="npy, npz, parquet, any format of training, or builtin:...; no labels needed."
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Ends with .jsonl, .npz, .npy or .parquet.")],
    k: Annotated[int, typer.Option("-k", min=1, help="Classes for each row.")] = 5,
    data_format: Annotated[str | None, typer.Option("--format", help="Of INPUT.")] = None,
    which: WhichOption = Which.best,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows at a time.")] = 256,
    exclude_history: Annotated[
        bool | None, typer.Option(help="Interactions: known items are not answers; by default as in the run.")
    ] = None,
    device: Device = "cpu",
    trust_model: Trust = None,
    as_json: Json = False,
) -> None:
    """The most probable classes of each row of a file, with their probabilities."""
    from samplex_cuda.cli.predict import predict as work

    common.run(
        "predict",
        as_json,
        lambda o: work(
            o,
            run_dir,
            source,
            form=data_format,
            target=out,
            k=k,
            which=which.value,
            batch_size=batch_size,
            exclude_history=exclude_history,
            device=device,
            trust_model=trust_model,
        ),
    )


@app.command(epilog="Example: samplex export runs/first --out served.pt2 -k 10")
def export(
    run_dir: RunDir,
    out: Annotated[Path, typer.Option(metavar="FILE.pt2", help="The program; FILE.json says what it takes.")],
    k: Annotated[int, typer.Option("-k", min=1, help="Classes for each row.")] = 10,
    kind: Annotated[
        ProgramKind,
        typer.Option(
            "--as", help="A program of torch.export, or a package that AOTInductor compiles for this machine."
        ),
    ] = ProgramKind.export,
    candidates: Annotated[
        Candidates, typer.Option(help="Search all classes, or those that the model's tree names.")
    ] = Candidates.exact,
    length: Annotated[int, typer.Option(min=0, help="Text: the tokens of a prompt, always so many.")] = 0,
    which: WhichOption = Which.best,
    trust_model: Trust = None,
    as_json: Json = False,
) -> None:
    """Encoder and top classes of a run as one program with an open batch size."""
    from samplex_cuda.cli.export import export as work

    common.run(
        "export",
        as_json,
        lambda o: work(
            o,
            run_dir,
            target=out,
            k=k,
            kind=kind.value,
            candidates=candidates.value,
            which=which.value,
            length=length,
            trust_model=trust_model,
        ),
    )


@app.command(
    "fit-tree", epilog="Example: samplex fit-tree --data builtin:classes=1000,examples=20000 --out tree.safetensors"
)
def fit_tree(
    data: Annotated[str, typer.Option(help="File, folder, or builtin:...: dense or sparse rows with labels.")],
    out: Annotated[Path, typer.Option(metavar="FILE|FOLDER", help="name.safetensors, or a folder for it.")],
    data_format: Annotated[str | None, typer.Option("--format", help="Of the file.")] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", metavar="NAME=VALUE", help="Of the reader, e.g. labels=smallest.")
    ] = None,
    dim: Annotated[int, typer.Option(min=1, help="Features that a node looks at.")] = 16,
    reg: Annotated[float, typer.Option(min=0.0, help="Strength of the regularizer of a node.")] = 0.1,
    rows: Annotated[int, typer.Option(min=1, help="Examples that are used, at most.")] = 200_000,
    held_out: Annotated[float, typer.Option(min=0.0, max=0.9, help="Part that is kept for the report.")] = 0.1,
    seed: Annotated[int, typer.Option(help="Of the split and the choice of rows.")] = 0,
    unseen: Annotated[bool, typer.Option(help="Classes without an example keep a small probability; else 0.")] = True,
    as_json: Json = False,
) -> None:
    """Fit a tree sampler to data, report how well it fits, and save it."""
    from samplex_cuda.cli.tools import fit_tree as work

    common.run(
        "fit-tree",
        as_json,
        lambda o: work(
            o,
            data,
            form=data_format,
            options=option or [],
            target=out,
            dim=dim,
            reg=reg,
            rows=rows,
            held_out=held_out,
            seed=seed,
            unseen=unseen,
        ),
    )


@app.command(epilog="Example: samplex diagnose runs/first --rows 256 --num-samples 16 --num-samples 64")
def diagnose(
    run_dir: RunDir,
    data: Annotated[str | None, typer.Option(help="Rows to look at; by default the run's validation data.")] = None,
    data_format: Annotated[str | None, typer.Option("--format", help="Of the file.")] = None,
    rows: Annotated[int, typer.Option(min=1, help="How many.")] = 256,
    num_samples: Annotated[
        list[int] | None,
        typer.Option(min=1, help="A number of draws to try; may be given many times [16 64 256 1024]."),
    ] = None,
    which: WhichOption = Which.latest,
    tree_rows: Annotated[
        int, typer.Option(min=0, help="Training examples that a candidate tree is fitted on; 0: no tree.")
    ] = 20_000,
    timed: Annotated[bool, typer.Option(help="Time a step of every sampler.")] = True,
    seed: Annotated[int, typer.Option(help="Of the choice of rows and the draws.")] = 0,
    device: Device = "cpu",
    trust_model: Trust = None,
    as_json: Json = False,
) -> None:
    """Which sampler and how many draws: bias, variance and time of the candidates on this model."""
    from samplex_cuda.cli.tools import diagnose as work

    common.run(
        "diagnose",
        as_json,
        lambda o: work(
            o,
            run_dir,
            path=data,
            form=data_format,
            rows=rows,
            num_samples=num_samples or [16, 64, 256, 1024],
            which=which.value,
            tree_rows=tree_rows,
            timed=timed,
            seed=seed,
            device=device,
            trust_model=trust_model,
        ),
    )


@app.command(epilog="Example: samplex bench --classes 10000 --classes 100000")
def bench(
    classes: Annotated[
        list[int] | None, typer.Option(min=2, help="May be given many times [1000 10000 100000].")
    ] = None,
    dim: Annotated[int, typer.Option(min=1, help="Width of the class rows.")] = 64,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows of a step.")] = 256,
    num_samples: Annotated[int, typer.Option(min=1, help="Draws per row.")] = 64,
    seconds: Annotated[float, typer.Option(min=0.0, help="For each measurement.")] = 0.5,
    as_json: Json = False,
) -> None:
    """Time a training step on this machine: this library against eager torch."""
    from samplex_cuda.cli.tools import bench as work

    common.run(
        "bench",
        as_json,
        lambda o: work(
            o, classes or [1000, 10_000, 100_000], dim=dim, batch=batch_size, draws=num_samples, seconds=seconds
        ),
    )


@app.command(epilog="Example: samplex reproduce kernel --out runs/reproduce")
def reproduce(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="adversarial, kernel, rff, attention, contrastive, or all.")
    ],
    out: Annotated[Path, typer.Option(help="NAME/ and index.html go there.")] = Path("runs/reproduce"),
    full: Annotated[bool, typer.Option("--full", help="The paper's size: hours.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A few seconds, to see that it runs.")] = False,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
    data: Annotated[
        Path | None,
        typer.Option(help="Folder with eurlex4k/, wikitext2/, imdb/, gowalla/; what is not there is left out."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run the experiments of a paper: what it says beside what is measured here, with figures."""
    from samplex_cuda.reproduce.command import reproduce as work

    common.run(
        "reproduce",
        as_json,
        lambda o: work(o, name, folder=out, full=full, quick=quick, seed=seed, data=data),
    )


@app.command(epilog="Example: samplex info --json")
def info(as_json: Json = False) -> None:
    """What was built and what runs here."""
    from samplex_cuda.info import format_info, gather_info

    def work(out: common.Output) -> tuple[dict[str, Any], int]:
        found = gather_info()
        if not out.as_json:
            out.say(format_info(found))
        return found, common.OK

    common.run("info", as_json, work)


@app.command(
    epilog="Example: samplex demo --quick --out runs/demo",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def demo(
    context: typer.Context,
    quick: Annotated[bool, typer.Option("--quick", help="A few seconds only: 5,000 classes, 2 s per run.")] = False,
    out: Annotated[Path, typer.Option(help="Where the picture and the figures go.")] = Path("runs/demo"),
    as_json: Json = False,
) -> None:
    """Full and sampled softmax side by side, as `make demo`; further options are those of samplex_cuda.demo."""
    from samplex_cuda.demo import main as work

    def body(output: common.Output) -> tuple[dict[str, Any], int]:
        words = ["--out", str(out), *(["--quick"] if quick else []), *context.args]
        if not output.as_json:
            return {}, work(words)
        with contextlib.redirect_stdout(sys.stderr):
            code = work(words)
        return json.loads((out / "results.json").read_text()) if code == 0 else {"status": "error"}, code

    common.run("demo", as_json, body)


@app.command(epilog="Example: samplex config > run.toml && samplex train run.toml --data train.txt --out runs/mine")
def config(
    setting: Set = None,
    comments: Annotated[bool, typer.Option(help="Say what each key means.")] = True,
    as_json: Json = False,
) -> None:
    """Print a configuration: every key with its default and its meaning, as TOML."""
    from samplex_cuda.cli.tools import show_config

    common.run("config", as_json, lambda out: show_config(out, setting or [], comments))
