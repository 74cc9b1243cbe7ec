"""One call: made from (seed, number), placed in guarded memory, run, judged."""

from __future__ import annotations

import dataclasses
import os
import re
import warnings
from typing import Any

import torch
from torch import Tensor

from samplex_fuzz.arena import Arena, Pool
from samplex_fuzz.call import GENERATORS, WEIGHTS, Args, Call, Dice, PoisonedError
from samplex_fuzz.mutate import mutate
from samplex_fuzz.oracle import is_meta

VERDICTS = ("ok", "refused", "crash", "silent", "bare")
_REFUSALS = (ValueError, TypeError, IndexError, MemoryError, NotImplementedError, RuntimeError)
_NAMED = re.compile(r"(?:(?:Value|Type|Index)Error: )?(?P<name>[A-Za-z_][\w.]*(?:\([^)]*\))?): (?P<text>.*)", re.DOTALL)
_SCHEMA = re.compile(r"samplex::\w+\(\) ")
# Sparse tensors and None for every tensor: torch finds no kernel, and names the op.
_DISPATCH = re.compile(
    r"Could not run 'samplex::|There were no tensor arguments to this function .* samplex::", re.DOTALL
)
_TRACE = re.compile(r"Exception raised from|frame #\d+|\.cpp:\d+|\.h:\d+")
_MEMORY = re.compile(r"can't allocate memory|not enough memory|out of memory|Storage size calculation overflowed")
_DIFFERENT = "changed, although the call must not write to it"


@dataclasses.dataclass
class Outcome:
    """What one call came to."""

    name: str
    verdict: str
    text: str


def draw_call(seed: int, number: int, only: list[str] | None = None) -> tuple[str, Call, dict[str, str], Dice]:
    """The call of this number, and what the mutator did to it."""
    d = Dice(seed, number)
    names = only or list(GENERATORS)
    name = d.r.choices(names, weights=[WEIGHTS[n] for n in names])[0]
    torch.default_generator.manual_seed(number)  # not torch.manual_seed: that formats a traceback
    call = GENERATORS[name](d)
    return name, call, mutate(call, d), d


def _copy(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.detach().clone() if x.layout is torch.strided else x
    if isinstance(x, tuple):
        return tuple(map(_copy, x))
    return x


class _Placed:
    """The arguments of a call in guarded memory."""

    def __init__(self, call: Call, d: Dice, pool: Pool) -> None:
        pool.reset()
        self.call, self.pool, self.d = call, pool, d
        self.arenas: list[tuple[str, Arena]] = []
        self.at_end, self.plain = d.maybe(0.8), d.maybe(0.1)
        self.before = Args((name, _copy(x)) for name, x in call.args.items())
        self.args = Args((name, self._place(name, x)) for name, x in call.args.items())

    def _place(self, name: str, x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(self._place(name, y) for y in x)
        if not isinstance(x, Tensor) or self.plain or type(x) is not Tensor:
            return x
        placed, arena = self.pool.place(x, self.at_end, self.d.pick((0, 0, 0, 1)))
        if arena is not None:
            self.arenas.append((name, arena))
        return placed

    def written(self, refused: bool) -> str | None:
        """The name of an argument that changed and must not have; of a refused call none may."""
        for name, arena in self.arenas:
            if not arena.unchanged(name in self.call.mutable and not refused):
                return name
        return None


def named_argument(text: str, call: Call) -> bool:
    """Whether a message speaks of an argument of the call."""
    words = set(re.findall(r"[A-Za-z_]\w*", text))
    return any(name in words for name in (*call.args, *call.words))


def judge_error(error: BaseException, call: Call) -> tuple[str, str]:
    """Verdict and text of an exception."""
    text = str(error)
    said = f"{type(error).__name__}: {text}"
    if is_meta(*call.args.values()):  # a fake has refused it, or torch that devices differ
        return "refused", said
    if not isinstance(error, _REFUSALS):
        return "bare", said
    if _MEMORY.search(text) or isinstance(error, torch.OutOfMemoryError):
        return "refused", said
    if _SCHEMA.match(text) or text.startswith("Error(s) in loading state_dict for "):
        return "refused", said
    if (
        "must be given, got None" in text or _DISPATCH.match(text) or is_meta(*call.args.values())
    ):  # torch's own words: no op of ours has been reached
        return "refused", said
    found = _NAMED.match(text)
    if found is None or _TRACE.search(text) or not named_argument(found["text"], call):
        return "bare", said
    return "refused", said


def run_call(call: Call, done: dict[str, str], d: Dice, pool: Pool) -> tuple[str, str, Args, Any]:
    """Verdict, text, the arguments as given and the result."""
    placed = _Placed(call, d, pool)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = call.run(placed.args)
    except PoisonedError as error:
        return "silent", str(error), placed.before, error
    except Exception as error:
        verdict, text = judge_error(error, call)
        wrote = placed.written(refused=True)
        if wrote is not None:
            return "silent", f"refused ({text}), yet {wrote} {_DIFFERENT}", placed.before, error
        return verdict, text, placed.before, error
    wrote = placed.written(refused=False)
    if wrote is not None:
        return "silent", f"{wrote} {_DIFFERENT}", placed.before, out
    for name in done:  # torch takes a bool for an int, the reference does not
        if isinstance(placed.before[name], bool) and type(call.args.get(name)) is bool:
            placed.before[name] = int(placed.before[name])
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call.check(placed.before, out, placed.args, set(done))
    except AssertionError as error:
        return "silent", str(error), placed.before, out
    except OverflowError:  # a float of the op that Python has as a larger int
        return "ok", "", placed.before, out
    except Exception as error:
        text = f"succeeded with arguments the reference cannot take: {type(error).__name__}: {error}"
        return "silent", text, placed.before, out
    return "ok", "", placed.before, out


class Runner:
    """Runs calls in this process. What a call writes to stderr counts as a bare error."""

    def __init__(self, seed: int, only: list[str] | None = None, watch_stderr: bool = True) -> None:
        self.seed, self.only, self.pool = seed, only, Pool()
        self._watch = watch_stderr
        self._written = os.fstat(2).st_size if watch_stderr else 0

    def __call__(self, number: int, started: Any = None) -> Outcome:
        """Make and judge the call of this number; `started` gets its name before it runs."""
        name, call, done, d = draw_call(self.seed, number, self.only)
        if started is not None:
            started(name)
        verdict, text, _, _ = run_call(call, done, d, self.pool)
        if self._watch:
            size = os.fstat(2).st_size
            if size != self._written:
                with open("/proc/self/fd/2", "rb") as f:
                    f.seek(self._written)
                    noise = f.read(400).decode(errors="replace")
                self._written = size
                if verdict in ("ok", "refused") and not _of_the_allocator(noise):
                    verdict, text = "bare", f"text on stderr: {noise!r}"
        return Outcome(name, verdict, text)


def _of_the_allocator(noise: str) -> bool:
    """Whether AddressSanitizer said no more than that it has no memory of that size; torch raises the error."""
    return all(re.search(r"AddressSanitizer failed to allocate", line) for line in noise.splitlines())
