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


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout, and everything else to stderr.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Set a key of the configuration; repeatable."),
]
RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Run folder of samplex train.")]
WhichOption = Annotated[Which, typer.Option(help="Use the weights of the best evaluation, or the latest ones.")]
Device = Annotated[str, typer.Option(help="Device to run on: cpu or cuda.")]
Trust = Annotated[
    str | None,
    typer.Option(
        "--trust-model",
        metavar="MODULE:CLASS",
        help="Allow the model named in config.toml to be imported and executed; use only for code that you trust.",
    ),
]


@app.command(
    epilog="Example: samplex train --data builtin:classes=1000,examples=20000 --model linear --sampler tree "
    "--out runs/first --set training.epochs=3"
)
def train(
    config: Annotated[
        Path | None, typer.Argument(help="Configuration file in TOML; `samplex config` prints one.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Training data: a file, a folder or builtin:... (sets data.path).")
    ] = None,
    valid: Annotated[str | None, typer.Option(help="Validation data (sets data.valid).")] = None,
    data_format: Annotated[
        str | None, typer.Option("--format", help="Format of the data files (sets data.format).")
    ] = None,
    skip_bad: Annotated[int | None, typer.Option(min=0, help="Skip up to this many malformed lines.")] = None,
    model: Annotated[str | None, typer.Option(help="Encoder (sets model.name).")] = None,
    sampler: Annotated[str | None, typer.Option(help="Sampler of the negatives (sets sampler.name).")] = None,
    loss: Annotated[str | None, typer.Option(help="Loss function (sets head.loss).")] = None,
    shard: Annotated[
        Shard | None,
        typer.Option(help="Distribute the class table over the ranks of torchrun (sets training.shard)."),
    ] = None,
    setting: Set = None,
    out: Annotated[Path | None, typer.Option(help="Run folder to create; default: runs/run-NNN.")] = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN_DIR", help="Resume this run.")] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="With --resume: start again from step 0 if every checkpoint is damaged.")
    ] = False,
    grow: Annotated[
        bool, typer.Option("--grow", help="With --resume: allow data with additional rows and classes.")
    ] = False,
    trust_model: Trust = None,
    as_json: Json = False,
) -> None:
    """Train a model and write a run folder with configuration, metrics, learning curves and checkpoints.

    Ctrl-C saves a checkpoint and prints how to resume.

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
    data: Annotated[str | None, typer.Option(help="File to evaluate on; default: the run's validation data.")] = None,
    data_format: Annotated[str | None, typer.Option("--format", help="Format of the file.")] = None,
    part: Annotated[
        Part, typer.Option(help="Part of the run's data to evaluate on if --data is not given.")
    ] = Part.valid,
    metrics: Annotated[
        str | None,
        typer.Option(
            help="Metrics, separated by commas: nll, perplexity, accuracy, mrr, precision@K, recall@K, ndcg@K, psp@K."
        ),
    ] = None,
    which: WhichOption = Which.best,
    rows: Annotated[int, typer.Option(min=0, help="Evaluate only this many examples from the start; 0: all.")] = 0,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Number of examples per batch.")] = None,
    exclude_history: Annotated[
        bool | None,
        typer.Option(help="Leave out items that a user already knows (interactions); default: as in the run."),
    ] = None,
    propensity_a: Annotated[
        float | None,
        typer.Option(help="Parameter A of psp@K; default: as in the run (0.5 for Wikipedia, 0.6 for Amazon data)."),
    ] = None,
    propensity_b: Annotated[
        float | None,
        typer.Option(help="Parameter B of psp@K; default: as in the run (0.4 for Wikipedia, 2.6 for Amazon data)."),
    ] = None,
    device: Device = "cpu",
    trust_model: Trust = None,
    as_json: Json = False,
) -> None:
    """Compute exact metrics of a trained model, over all classes."""
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
            metavar="INPUT",
            help="Input data: an npy, npz or parquet file, any format that training accepts, or builtin:.... "
            "Labels are not needed.",
        ),
    ],
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="Output file, with the extension .jsonl, .npz, .npy or .parquet.")
    ],
    k: Annotated[int, typer.Option("-k", min=1, help="Number of classes per row.")] = 5,
    data_format: Annotated[str | None, typer.Option("--format", help="Format of INPUT.")] = None,
    which: WhichOption = Which.best,
    batch_size: Annotated[int, typer.Option(min=1, help="Number of rows per batch.")] = 256,
    exclude_history: Annotated[
        bool | None,
        typer.Option(help="Leave out items that a user already knows (interactions); default: as in the run."),
    ] = None,
    device: Device = "cpu",
    trust_model: Trust = None,
    as_json: Json = False,
) -> None:
    """Predict the most probable classes of each row of a file, with their probabilities."""
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
    out: Annotated[Path, typer.Option(metavar="FILE.pt2", help="Output file; FILE.json describes its inputs.")],
    k: Annotated[int, typer.Option("-k", min=1, help="Number of classes per row.")] = 10,
    kind: Annotated[
        ProgramKind,
        typer.Option(
            "--as", help="Write a program of torch.export, or a package compiled by AOTInductor for this machine."
        ),
    ] = ProgramKind.export,
    candidates: Annotated[
        Candidates, typer.Option(help="Search all classes, or only candidates from the model's tree.")
    ] = Candidates.exact,
    length: Annotated[int, typer.Option(min=0, help="Fixed number of tokens of a prompt (required for text).")] = 0,
    which: WhichOption = Which.best,
    trust_model: Trust = None,
    as_json: Json = False,
) -> None:
    """Export encoder and top-k of a run as one program with a dynamic batch size."""
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
    data: Annotated[str, typer.Option(help="Dense or sparse rows with labels: a file, a folder or builtin:....")],
    out: Annotated[Path, typer.Option(metavar="FILE|FOLDER", help="Output file name.safetensors, or a folder for it.")],
    data_format: Annotated[str | None, typer.Option("--format", help="Format of the file.")] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="NAME=VALUE", help="Option of the reader, for example labels=smallest."),
    ] = None,
    dim: Annotated[int, typer.Option(min=1, help="Number of features per node.")] = 16,
    reg: Annotated[float, typer.Option(min=0.0, help="Regularization strength of the nodes.")] = 0.1,
    rows: Annotated[int, typer.Option(min=1, help="Maximum number of examples to use.")] = 200_000,
    held_out: Annotated[
        float, typer.Option(min=0.0, max=0.9, help="Fraction of the examples that is held out for the report.")
    ] = 0.1,
    seed: Annotated[int, typer.Option(help="Random seed of the split and of the choice of examples.")] = 0,
    unseen: Annotated[
        bool, typer.Option(help="Give classes without an example a small probability, or probability 0.")
    ] = True,
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
    data: Annotated[str | None, typer.Option(help="Data to examine; default: the run's validation data.")] = None,
    data_format: Annotated[str | None, typer.Option("--format", help="Format of the file.")] = None,
    rows: Annotated[int, typer.Option(min=1, help="Number of rows to examine.")] = 256,
    num_samples: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Number of draws to try; repeatable [default: 16 64 256 1024]."),
    ] = None,
    which: WhichOption = Which.latest,
    tree_rows: Annotated[
        int, typer.Option(min=0, help="Number of training examples to fit a candidate tree to; 0: no tree.")
    ] = 20_000,
    timed: Annotated[bool, typer.Option(help="Measure the time per step of every sampler.")] = True,
    seed: Annotated[int, typer.Option(help="Random seed of the choice of rows and of the draws.")] = 0,
    device: Device = "cpu",
    trust_model: Trust = None,
    as_json: Json = False,
) -> None:
    """Compare samplers and numbers of draws on a model: bias and variance of the gradient, and time per step."""
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
        list[int] | None,
        typer.Option(min=2, help="Number of classes; repeatable [default: 1000 10000 100000]."),
    ] = None,
    dim: Annotated[int, typer.Option(min=1, help="Width of the class rows.")] = 64,
    batch_size: Annotated[int, typer.Option(min=1, help="Number of rows per step.")] = 256,
    num_samples: Annotated[int, typer.Option(min=1, help="Number of draws per row.")] = 64,
    seconds: Annotated[float, typer.Option(min=0.0, help="Seconds per measurement.")] = 0.5,
    as_json: Json = False,
) -> None:
    """Measure the time of a training step on this machine, compared with eager torch."""
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
        str,
        typer.Argument(metavar="NAME", help="Paper: adversarial, kernel, rff, attention, contrastive, or all."),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write NAME/ and index.html to.")] = Path("runs/reproduce"),
    full: Annotated[bool, typer.Option("--full", help="Use the size of the paper, which takes hours.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Use a tiny size, which takes a few seconds, to check that it runs.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder with eurlex4k/, wikitext2/, imdb/ and gowalla/; parts without their data are skipped."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run the experiments of a paper and compare the results with those of the paper, with figures."""
    from samplex_cuda.reproduce.command import reproduce as work

    common.run(
        "reproduce",
        as_json,
        lambda o: work(o, name, folder=out, full=full, quick=quick, seed=seed, data=data),
    )


@app.command(epilog="Example: samplex info --json")
def info(as_json: Json = False) -> None:
    """Show what was built and which devices and SIMD levels are available."""
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
    quick: Annotated[
        bool, typer.Option("--quick", help="Take only a few seconds: 5,000 classes, 2 s per run.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder to write the plot and the results to.")] = Path("runs/demo"),
    as_json: Json = False,
) -> None:
    """Train with the full and the sampled softmax and compare them, like `make demo`.

    Further options are passed to samplex_cuda.demo.
    """
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
    comments: Annotated[bool, typer.Option(help="Add a comment with the meaning of each key.")] = True,
    as_json: Json = False,
) -> None:
    """Print a configuration in TOML, with the default and the meaning of every key."""
    from samplex_cuda.cli.tools import show_config

    common.run("config", as_json, lambda out: show_config(out, setting or [], comments))
