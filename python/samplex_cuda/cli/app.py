"""The commands and their options; what they do is in the other modules."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout; everything else goes to stderr.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Set a key of the configuration; may be given many times."),
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
    setting: Set = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; by default runs/run-NNN.")] = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN_DIR", help="Go on with this run.")] = None,
    as_json: Json = False,
) -> None:
    """Train a model and keep a run folder: configuration, metrics, curves, checkpoints.

    Ctrl-C saves a checkpoint and says how to go on.
    """
    from samplex_cuda.cli.train import settings_of
    from samplex_cuda.cli.train import train as work

    if resume is not None and (config is not None or out is not None or model or sampler or loss):
        raise typer.BadParameter(
            "goes with --set, --data and --valid only: the rest is in the run folder", param_hint="--resume"
        )
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
    )
    common.run(
        "train",
        as_json,
        lambda o: work(o, config=config, settings=settings + (setting or []), run_dir=out, resume=resume),
    )


@app.command(epilog="Example: samplex config > run.toml && samplex train run.toml --data train.txt --out runs/mine")
def config(
    setting: Set = None,
    comments: Annotated[bool, typer.Option(help="Say what each key means.")] = True,
    as_json: Json = False,
) -> None:
    """Print a configuration: every key with its default and its meaning, as TOML."""
    from samplex_cuda.cli.extras import show_config

    common.run("config", as_json, lambda out: show_config(out, setting or [], comments))
