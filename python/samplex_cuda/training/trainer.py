"""The trainer: from a configuration and data to a model, and back from a kill to the same bits.

Every random number of a run is a function of the seed and a counter that the checkpoint holds: draws of classes come
from the key (seed, step), the order of the data from (seed, epoch), dropout from torch's generator, whose state is
saved. A checkpoint is a step boundary. So a run that was stopped at any moment and resumed ends with the parameters of
one that was not. docs/training.md says what is needed for that.
"""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from samplex_cuda.data import Batches, Dataset
from samplex_cuda.training import checkpoint, models
from samplex_cuda.training import config as configs
from samplex_cuda.training.averaging import averaged_parameters, swapped, update_average
from samplex_cuda.training.checkpoint import CheckpointError
from samplex_cuda.training.chooser import Chooser
from samplex_cuda.training.config import Config
from samplex_cuda.training.evaluation import evaluate, propensities_of
from samplex_cuda.training.growing import extending, write_vocabulary
from samplex_cuda.training.interrupts import Interrupts, own_generators
from samplex_cuda.training.opening import check_fit, check_monitor, from_anywhere, open_data
from samplex_cuda.training.ranks import join
from samplex_cuda.training.result import Result, raise_non_finite
from samplex_cuda.training.run_folder import (
    VOCABULARY,
    RunError,
    append_record,
    begin,
    check_links,
    clean,
    newest,
    open_board,
    plot_curves,
    replace_config,
    set_aside,
    sync_metrics,
    trim_metrics,
    unwritable,
    write_board,
)
from samplex_cuda.training.sampler_factory import refit_epochs
from samplex_cuda.training.state import Progress, about, environment
from samplex_cuda.training.step import Stepper
from samplex_cuda.training.watch import check_model

__all__ = ["Trainer"]

_DRAWS = 0x5A3D_0000_0000_0000  # keys of draws meet those of nothing else under the same seed


class _InterruptedError(Exception):
    """A signal came while something was under way that will be done again."""


class Trainer:
    """Trains what a configuration says and keeps a run folder.

        run/
            config.toml        the configuration, every key
            environment.json   versions, machine, what was built
            costs.json         with `sampler.choose_every`: milliseconds of a step of each way to draw
            choices.json       the choices made, with their reasons
            metrics.jsonl      a record every `log_every` steps and for each evaluation
            checkpoints/       the last `keep`
            best/              the weights of the best evaluation
            plots/curves.png   learning curves
            nan/               batches whose loss was not finite
            damaged/           checkpoints that a resume refused

    Args:
        config: the configuration.
        train: the training data; None: opened from `config.data`.
        valid: the validation data; None with `train` given: no evaluation.
        run_dir: the run folder; must not hold a run yet (`Trainer.resume` continues with one).
        trust_model: `model.name` again, where it is an import path; see `build`.
        on_event: called with a dict for everything that happens: event = "start", "progress" (each step), "train" (a
            record), "eval", "eval_progress", "checkpoint", "checkpoint_failed", "refused" (a damaged checkpoint),
            "damaged" (where it was moved to), "cleaned", "nan", "best", "epoch", "fit", "choice",
            "warning", "interrupted", "end".

    Example:
        >>> import tempfile, torch
        >>> from samplex_cuda import data
        >>> from samplex_cuda.training import Config, Trainer, config
        >>> train = data.Dense(torch.randn(64, 6), torch.randint(0, 9, (64,)))
        >>> run = config.override(Config(), ["training.epochs=2", "training.batch_size=16", "head.num_samples=4"])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     result = Trainer(run, train, train, f"{folder}/run").fit()
        >>> result.status, result.step
        ('finished', 8)
    """

    grow = False  # whether the data of a checkpoint may have been others

    def __init__(
        self,
        config: Config,
        train: Dataset | None = None,
        valid: Dataset | None = None,
        run_dir: str | Path = "run",
        *,
        trust_model: str | None = None,
        on_event: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self._prepare(config, train, valid, run_dir, trust_model, on_event)
        self.ranks.lead(self._begin_folder)
        self.make(fit=True)

    def _begin_folder(self) -> None:
        def words() -> None:
            write_vocabulary(self.run_dir, self.train)

        begin(self.run_dir, self.config, self._surroundings, words)

    @classmethod
    def resume(
        cls,
        run_dir: str | Path,
        train: Dataset | None = None,
        valid: Dataset | None = None,
        *,
        settings: Iterable[str] = (),
        trust_model: str | None = None,
        restart: bool = False,
        grow: bool = False,
        on_event: Callable[[dict[str, Any]], None] | None = None,
    ) -> Trainer:
        """A trainer that continues from the newest whole checkpoint of a run; from the start if it never saved one.

        Newer checkpoints that are damaged are moved to `damaged/`. If every checkpoint is damaged, it raises `RunError`
        and leaves the folder unchanged.

        Args:
            run_dir: the run folder.
            train: the training data of before, or with `grow` those that it has become; None: opened from the
                configuration.
            valid: the validation data of before.
            settings: keys to change, as in `config.override`: e.g. `training.epochs=20`. The old configuration is kept
                beside the new one.
            trust_model: as in the class.
            restart: begin at step 0 where every checkpoint is damaged; they are moved to `damaged/`.
            grow: the training data may be others, with the same ids and maybe more classes: their rows and optimizer
                state are initialized, all others are kept; a new epoch begins. See docs/changing_classes.md.
            on_event: as in the class.

        Example:
            >>> from samplex_cuda.training import Trainer
            >>> Trainer.resume("runs/mine").fit()  # doctest: +SKIP
        """
        run_dir = Path(run_dir)
        path = run_dir / "config.toml"
        if not path.exists():
            raise RunError(f"trainer: {run_dir}: has no config.toml, so there is no run to resume")
        old = configs.load(path, of_run=True)
        config = configs.override(old, settings)
        self = cls.__new__(cls)
        check_links(run_dir)
        of_words = grow and train is None and (run_dir / VOCABULARY).is_file()
        if of_words:
            config = extending(config, run_dir)
        self._prepare(config, train, valid, run_dir, trust_model, on_event)
        if of_words:  # the vocabulary will have all of them
            del self.config.data.options["extend"]
        self.grow = grow
        try:
            with self.ranks.lock(run_dir):
                found, refused = self.ranks.lead(lambda: self._find(restart))
                if found is None:
                    self.make(fit=True)
                elif changed := self._store.restore(found):
                    self._event("warning", message=f"the rest of the run may differ in the last bits: {changed}")
                # Only now: a resume that is refused leaves the run as it was.
                self.ranks.lead(lambda: self._tidy(old, refused))
        except OSError as error:
            raise unwritable(run_dir, error) from None
        if found is not None:
            self._event("resumed", step=self.progress.step, path=str(found))
        return self

    def _find(self, restart: bool) -> tuple[Path | None, list[tuple[Path, str]]]:
        """The newest whole checkpoint (None if there is none), and the damaged ones that are newer."""
        found, refused = newest(self.run_dir, restart)
        for path, reason in refused:
            self._refused(path, reason, "training begins at step 0" if found is None else f"{found.name} is used")
        return found, refused

    def _tidy(self, old: Config, refused: list[tuple[Path, str]]) -> None:
        """Removes what a kill left, sets damaged checkpoints aside, and writes a configuration that has changed."""
        p, run_dir = self.progress, self.run_dir
        for removed in clean(run_dir):
            self._event("cleaned", path=str(removed))
        for path, reason in refused:
            self._event("damaged", path=str(set_aside(run_dir, path)), reason=reason)
        if self.grow:
            write_vocabulary(run_dir, self.train)
        replace_config(run_dir, old, self.config, p.step)
        trim_metrics(run_dir, p.last_log, p.last_eval)

    # ------------------------------------------------------------------------------------------ making
    def _prepare(
        self,
        config: Config,
        train: Dataset | None,
        valid: Dataset | None,
        run_dir: str | Path,
        trust_model: str | None,
        on_event: Callable[[dict[str, Any]], None] | None,
    ) -> None:
        config = config.check().resolved()
        models.check_trusted(config.model.name, trust_model)
        self.trust_model = trust_model
        check_monitor(config.training)
        self.ranks = join(config)
        self.config, self.run_dir, self.on_event = config, Path(run_dir), on_event if self.ranks.leads else None
        if train is None:
            train, valid = self.ranks.in_turn(lambda: open_data(config))
            from_anywhere(config)
        if len(train) < 1:
            raise ValueError("trainer: train must have at least 1 example, got none")
        self.ranks.agree({"run folder": str(self.run_dir), "training data": train.fingerprint()})
        self.train, self.valid = train, valid
        check_fit(config, train, valid)
        t = config.training
        if t.threads:
            torch.set_num_threads(t.threads)
        self.device = torch.device(t.device)
        self.progress = Progress()
        self.metrics: dict[str, float] = {}
        self.warnings: list[str] = []  # of the last evaluation
        self.leak: float | None = None  # of the last evaluation: what of the softmax the draws cannot push down
        self._last_loss: float | None = None
        self.average: dict[str, Tensor] = {}
        self.rng = self.first_rng()
        self._interrupts = Interrupts()
        self._signal = 0  # that ends the run
        self._board: Any = None
        self._watch = time.perf_counter()
        size = int(getattr(train, "columns", t.batch_size)) if train.ordered else t.batch_size
        self.epoch_batches = len(Batches(train, size))
        self.batch_size = size
        self.steps_per_epoch = math.ceil(self.epoch_batches / t.accumulate)
        self.total_steps = t.epochs * self.steps_per_epoch
        if t.steps:
            self.total_steps = min(self.total_steps, t.steps)
        self.keys = torch.tensor([t.seed ^ _DRAWS, 0], dtype=torch.int64)
        self._stepper = Stepper(config, train, size, self.keys, self.run_dir, self.ranks)
        self._store = self.ranks.store(self)
        every = config.sampler.choose_every
        self.chooser = Chooser(config, train, size, self.run_dir) if every else None

    def make(self, fit: bool) -> None:
        """Makes model and optimizers; without `fit` a checkpoint brings what would be fitted to the data."""
        if fit:
            self._event("fit", sampler=self.config.sampler.name)
        self.encoder, self.head = self.ranks.build(
            self.config, self.train, self.batch_size, fit=fit, trust_model=self.trust_model
        )
        self.optimizers = models.optimizers(self.config, self.encoder, self.head)
        self._rates = {name: [g["lr"] for g in o.param_groups] for name, o in self.optimizers.items()}
        if self.config.fused:
            row_optimizer: Any = self.optimizers["head"]
            self.head.fuse_optimizer(row_optimizer, self.config.training.accumulate)

    def first_rng(self) -> dict[str, Tensor]:
        """States of torch's generators at the start of a run."""
        return {"cpu": torch.Generator().manual_seed(self.config.training.seed + 0xD409).get_state()}

    def _surroundings(self) -> dict[str, Any]:
        from samplex_cuda.info import gather_info

        return {**gather_info(), "bits": environment(self.device), "data": about(self.train)}

    def _event(self, event: str, **fields: Any) -> None:
        if self.on_event is not None:
            self.on_event({"event": event, **fields})

    def _refused(self, path: Path, reason: str, instead: str) -> None:
        self._event("refused", path=str(path), reason=reason, instead=instead)
        if self.on_event is None and self.ranks.leads:
            warnings.warn(f"{reason}; {instead}", stacklevel=4)

    # ------------------------------------------------------------------------------------------ files
    def _record(self, record: dict[str, Any]) -> None:
        if not self.ranks.leads:
            return
        try:
            append_record(self.run_dir, record)
        except OSError as error:
            reason = str(unwritable(self.run_dir / "metrics.jsonl", error))
            if self.config.training.on_save_error == "stop":
                raise RunError(reason) from None
            self._event("warning", message=f"{reason}; the record of step {record['step']} is lost")
        if self._board is not None:
            write_board(self._board, record)

    def save(self) -> Path | None:
        """Writes a checkpoint now; None if that failed and `on_save_error` is "continue"."""
        p = self.progress
        self._stepper.forget_index()
        path = self.run_dir / "checkpoints" / checkpoint.directory_name(p.step)
        begin = time.perf_counter()
        self._count_time()
        try:
            if self.ranks.leads:
                sync_metrics(self.run_dir)
            self._store.save(path)
        except (CheckpointError, OSError) as error:
            self._save_failed(path, error)
            return None
        self._event("checkpoint", step=p.step, path=str(path), seconds=time.perf_counter() - begin)
        self._watch = time.perf_counter()
        return path

    def _save_failed(self, path: Path, error: CheckpointError | OSError) -> None:
        if isinstance(error, OSError):
            error = CheckpointError(f"checkpoint: {path}: could not be saved: {error.strerror}")
        self._event("checkpoint_failed", step=self.progress.step, reason=str(error))
        if self.config.training.on_save_error == "stop":
            raise error

    def _save_best(self) -> None:
        with self._averaged():
            folder = self.run_dir / "best"
            try:
                folder.mkdir(exist_ok=True)
                self._store.save_best(folder / checkpoint.directory_name(self.progress.step))
            except (CheckpointError, OSError) as error:
                self._save_failed(folder, error)
                return
        self._event("best", step=self.progress.step, value=self.progress.best)

    def _count_time(self) -> None:
        now = time.perf_counter()
        self.progress.seconds += now - self._watch
        self._watch = now

    # ------------------------------------------------------------------------------------------ a step
    def averages(self) -> dict[str, nn.Parameter]:
        """The parameters that are averaged, where there is an average."""
        self.ranks.part_weights(self.encoder)
        return averaged_parameters(self.encoder, self.head, self.config.training)

    @contextlib.contextmanager
    def _averaged(self) -> Iterator[None]:
        """The averaged weights in place of the current ones."""
        with swapped(self.average, self.averages()):
            try:
                yield
            finally:
                self.ranks.part_weights(self.encoder)

    def _update_average(self) -> None:
        t, p = self.config.training, self.progress
        if t.average != "none" and p.step >= t.average_start and p.step % t.average_every == 0:
            update_average(self.average, self.averages(), t, p.averaged)
            p.averaged += 1

    def _begin_epoch(self) -> None:
        """What happens before the first batch of an epoch; a checkpoint between two epochs is before it."""
        p, s = self.progress, self.config.sampler
        self.encoder.carry({})
        if self.head.sampler_update == "epoch" and p.step:
            self.head.mark_changed()
        every = refit_epochs(self.config, self.train, self.encoder) if s.refit_every else 0
        if every and p.epoch and p.epoch % every == 0:
            self._refit()
        self._event("epoch", epoch=p.epoch, step=p.step)

    def _refit(self) -> None:
        if self.head.sampler is None:  # full_softmax: whatever [sampler] says, there is none
            return
        self._event("fit", sampler=self.config.sampler.name, step=self.progress.step)
        with torch.random.fork_rng(devices=[]):
            self.ranks.refit(self.config, self.train, self.encoder, self.head)

    def _set_rates(self) -> float:
        factor = self.config.schedule.factor(self.progress.step, self.total_steps)
        for name, optimizer in self.optimizers.items():
            for group, rate in zip(optimizer.param_groups, self._rates[name], strict=True):
                group["lr"] = rate * factor
        return self.config.optimizer.lr * factor

    def _take_step(self) -> None:
        p = self.progress
        if p.batch == 0:
            self._begin_epoch()
        every = self.config.sampler.refit_steps
        if every and p.step and p.step % every == 0:  # a checkpoint of this step is before it
            self._refit()
        if self.chooser is not None and (chosen := self.chooser.step(p.step, self.encoder, self.head)):
            self._event("choice", step=p.step, message=f"draws from here on: {chosen}")
        self._set_rates()
        found = self._stepper.take(p, self.encoder, self.head, self.optimizers)
        if found.problem:
            self._dropped(found.problem)
        else:
            p.loss_sum += found.loss
            p.loss_count += 1
            p.skipped_in_a_row = 0
        p.step += 1
        p.batch += found.batches
        if p.batch >= self.epoch_batches:
            p.epoch, p.batch = p.epoch + 1, 0
        if not found.problem:
            self._update_average()
        self._event(
            "progress",
            step=p.step,
            steps=self.total_steps,
            epoch=p.epoch if p.batch else p.epoch - 1,
            loss=None if found.problem else found.loss,
            stale=self.head.follower.steps,
        )

    def _dropped(self, problem: str) -> None:
        """A step whose loss or gradient was not finite, of which nothing stayed."""
        p, t = self.progress, self.config.training
        p.skipped += 1
        p.skipped_in_a_row += 1
        self._event("nan", step=p.step, message=problem, action=t.on_nan)
        if t.on_nan == "stop" or p.skipped_in_a_row > t.max_skipped:
            raise_non_finite(p.step, problem, self.run_dir, 0 if t.on_nan == "stop" else t.max_skipped)

    # ------------------------------------------------------------------------------------------ between steps
    def _log(self) -> None:
        p, t = self.progress, self.config.training
        if p.last_log == p.step or not (p.step % t.log_every == 0 or self._done()):
            return
        self._count_time()
        stale = self.head.staleness()
        record: dict[str, Any] = {
            "kind": "train",
            "step": p.step,
            "epoch": p.epoch,
            "loss": p.loss_sum / p.loss_count if p.loss_count else None,
            "lr": self.config.optimizer.lr * self.config.schedule.factor(p.step - 1, self.total_steps),
            "seconds": round(p.seconds, 3),
        }
        if self.head.sampler_update is not None:
            record["stale_steps"], record["stale_rows"] = stale.steps, stale.rows
        if p.skipped:
            record["skipped"] = p.skipped
        self._record(record)
        self._last_loss = record["loss"]
        p.loss_sum, p.loss_count, p.last_log = 0.0, 0, p.step
        rate = self._rate()
        self._event("train", **record, steps_per_second=rate, eta=(self.total_steps - p.step) / rate if rate else None)

    def _rate(self) -> float:
        return self.progress.step / self.progress.seconds if self.progress.seconds > 0 else 0.0

    def _done(self) -> bool:
        return self.progress.step >= self.total_steps or self.progress.status == "early_stop"

    def _due(self, every: int) -> bool:
        p = self.progress
        return p.step > 0 and (p.step % every == 0 if every else p.batch == 0)

    def evaluate(self, dataset: Dataset | None = None) -> dict[str, float]:
        """Metrics on the validation data (or others), with the averaged weights where there is an average."""
        t = self.config.training
        dataset = self.valid if dataset is None else dataset
        if dataset is None:
            raise ValueError("Trainer.evaluate: dataset must be given if there are no validation data, got None")

        def on_batch(done: int, count: int) -> None:
            self._event("eval_progress", done=done, count=count)
            if self._stopped():
                raise _InterruptedError

        with self._averaged(), torch.random.fork_rng(devices=[]):
            return evaluate(
                self.encoder,
                self.head,
                dataset,
                batch_size=t.eval_batch_size or self.batch_size,
                metrics=t.metrics,
                rows=t.eval_rows,
                exclude_history=t.exclude_history,
                propensities=propensities_of(self.config.training, self.train),
                on_batch=on_batch,
                ranks=self.ranks,
            )

    def _watch_model(self) -> None:
        """Notes what is wrong with the model, if anything: a falling loss does not prove that it learns."""
        p = self.progress
        sampled = p.loss_sum / p.loss_count if p.loss_count else self._last_loss
        numbers: dict[str, float] = {}
        with self._averaged(), torch.random.fork_rng(devices=[]):
            self.warnings = check_model(
                self.encoder,
                self.head,
                self.train,
                self.batch_size,
                sampled=sampled if self.head.loss.joins else None,
                nll=self.metrics.get("nll"),
                ranks=self.ranks,
                numbers=numbers,
            )
        self.leak = numbers.get("leak")

    def _evaluate(self) -> None:
        p, t = self.progress, self.config.training
        if self.valid is None or p.last_eval == p.step or not (self._due(t.eval_every) or self._done()):
            return
        self._count_time()
        begin = time.perf_counter()
        self.metrics = self.evaluate()
        self._watch_model()
        seconds = time.perf_counter() - begin
        self._watch = time.perf_counter()
        p.last_eval = p.step
        better = p.judge(self.metrics, t)
        record = {"kind": "eval", "step": p.step, "epoch": p.epoch, **self.metrics, "seconds": round(p.seconds, 3)}
        if self.leak is not None:
            record["leak"] = round(self.leak, 6)
        self._record(record)
        useless = self.metrics.get("nll", 0.0) > math.log(self.head.num_classes)
        self._event("eval", **record, best=better, eval_seconds=seconds, worse_than_equal=useless)
        for message in self.warnings:
            self._event("warning", message=f"step {p.step:,}: {message}")
            if self.on_event is None and self.ranks.leads:
                warnings.warn(f"trainer: step {p.step:,}: {message}", stacklevel=5)
        if better and t.keep_best:
            self._save_best()
        if t.patience and p.bad >= t.patience:
            p.status = "early_stop"

    # ------------------------------------------------------------------------------------------ the run
    def fit(self) -> Result:
        """Trains to the end, to early stopping, or until SIGINT (Ctrl-C) or SIGTERM comes: then a checkpoint is saved.

        A second signal ends it at once. Signals are handled only where this is the main thread.
        """
        seed = self.config.training.seed
        with (
            self.ranks.lock(self.run_dir),
            self._interrupts.handled(),
            own_generators(self.rng, self.device, seed),
            self.ranks.alive(lambda: bool(self._interrupts.number)),
        ):
            if self.config.training.tensorboard and self.ranks.leads:
                self._board = open_board(self.run_dir, self.progress.step)
            self._event(
                "start",
                step=self.progress.step,
                steps=self.total_steps,
                epochs=self.config.training.epochs,
                run_dir=str(self.run_dir),
                fused=self.config.fused,
            )
            try:
                with self.ranks.watch("starting"):
                    return self._loop()
            finally:
                if self._board is not None:
                    self._board.close()
                    self._board = None

    def _loop(self) -> Result:
        p, t = self.progress, self.config.training
        if p.status != "running":
            return self._result(p.status)
        self.encoder.train()
        nn.Module.train(self.head, True)
        self._watch = time.perf_counter()
        fresh = True  # whether this step's checkpoint is what we started from
        while True:
            try:
                self._log()
                self._evaluate()
            except _InterruptedError:
                return self._interrupted()
            if self._done():
                break
            if not fresh and self._due(t.checkpoint_every):
                self.save()
            if self._stopped():
                return self._interrupted()
            fresh = False
            self._take_step()
        if p.status == "running":
            p.status = "finished"
        self.save()
        return self._result(p.status)

    def _stopped(self) -> bool:
        """Whether a signal has come, to any rank."""
        self._signal = self.ranks.most(self._interrupts.number)
        return self._signal != 0

    def _interrupted(self) -> Result:
        self.save()
        step = self.progress.step
        message = (
            f"step {step} is saved; continue with samplex_cuda.training.Trainer.resume({str(self.run_dir)!r}).fit()"
        )
        self._event("interrupted", step=step, signal=self._signal, message=message)
        result = self._result("interrupted", message)
        result.signal = self._signal
        return result

    def _result(self, status: str, message: str = "") -> Result:
        p = self.progress
        if self.config.training.plot and self.ranks.leads:
            try:
                plot_curves(self.run_dir)
            except (ImportError, OSError) as error:
                self._event("warning", message=f"no learning curves: {error}")
        if status == "early_stop":
            message = (
                f"no better {self.config.training.monitor} in {p.bad} evaluations; the best was at step {p.best_step}"
            )
        self._event("end", status=status, step=p.step, metrics=self.metrics, best=p.best, best_step=p.best_step)
        return Result(status, p.step, dict(self.metrics), p.best, p.best_step, message, warnings=list(self.warnings))
