"""Configurations in and out: tables of keys, settings of a command line, TOML, and the list of keys for docs."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from samplex_cuda.training.config.checks import ConfigError, allowed_values, check_together, check_value, kind_of, shown
from samplex_cuda.training.config.tables import Config

__all__ = ["describe", "dumps", "from_dict", "load", "override", "parse_toml", "stored", "to_toml"]


def _tables() -> dict[str, Any]:
    return {field.name: field.default_factory for field in dataclasses.fields(Config)}


def _near(name: str, known: Iterable[str]) -> str:
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1)
    return f' (did you mean "{close[0]}"?)' if close else f"; there are {', '.join(known)}"


def from_dict(tables: Mapping[str, Any], source: str = "config") -> Config:
    """A `Config` of tables of keys; what is not given has its default.

    Args:
        tables: as TOML gives them.
        source: what errors call it, e.g. the name of the file.

    Example:
        >>> from samplex_cuda.training import config
        >>> config.from_dict({"training": {"epochs": 3}}).training.epochs
        3
    """
    result = Config()
    for table, keys in tables.items():
        if table not in _tables():
            raise ConfigError(f"config: {source}: has no table [{table}]{_near(table, _tables())}")
        if not isinstance(keys, Mapping):
            raise ConfigError(f"config: {source}: [{table}] must be a table, got {shown(keys)}")
        part = getattr(result, table)
        fields = {field.name: field for field in dataclasses.fields(part)}
        for name, value in keys.items():
            if name not in fields:
                raise ConfigError(f"config: {source}: [{table}] has no key {name}{_near(name, fields)}")
            setattr(part, name, check_value(source, table, fields[name], value))
    check_together(source, result)
    return result


def override(config: Config, settings: Iterable[str], source: str = "command line") -> Config:
    """A copy with some keys set, as on a command line: `optimizer.lr=0.1`.

    Args:
        config: what to change.
        settings: `table.key=value`. Numbers, true, false, "text" and [lists] are read as such, anything else is text.
        source: what errors call it.

    Example:
        >>> from samplex_cuda.training import config
        >>> run = config.override(config.Config(), ["optimizer.lr=1", "sampler.name=uniform", "data.options.window=20"])
        >>> run.optimizer.lr, run.sampler.name, run.data.options
        (1.0, 'uniform', {'window': 20})
    """
    tables = config.as_dict()
    for setting in settings:
        path, equals, text = setting.partition("=")
        parts = path.strip().split(".")
        if not equals or len(parts) < 2 or not all(parts):
            raise ConfigError(f"config: {source}: a setting must be table.key=value, got {shown(setting)}")
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = text.strip()
        where = f"{source}: {setting}"
        part = tables.get(parts[0])
        if part is None:
            raise ConfigError(f"config: {where}: has no table [{parts[0]}]{_near(parts[0], tables)}")
        if len(parts) > 2:
            if parts[1] != "options" or len(parts) > 3 or "options" not in part:
                raise ConfigError(f"config: {where}: [{parts[0]}] has no key {'.'.join(parts[1:])}")
            part["options"] = {**part["options"], parts[2]: value}
        else:
            fields = {f.name: f for f in dataclasses.fields(getattr(config, parts[0]))}
            if parts[1] not in fields:
                raise ConfigError(f"config: {where}: [{parts[0]}] has no key {parts[1]}{_near(parts[1], fields)}")
            if kind_of(fields[parts[1]]) == "str" and not isinstance(value, str):
                value = text.strip()  # a file may be called 2024
            part[parts[1]] = check_value(where, parts[0], fields[parts[1]], value)
    return from_dict(tables, source)


# Keys that runs of earlier versions do not have, with what those did.
_BEFORE = {"sampler": {"base": "none"}}


def stored(tables: Mapping[str, Any], source: str) -> Config:
    """As `from_dict`, for what a run folder holds: a key that is missing there is older than the key.

    Example:
        >>> from samplex_cuda.training import config
        >>> config.files.stored({"sampler": {"name": "tree"}}, "runs/old").sampler.base
        'none'
    """
    known = {name: dict(keys) if isinstance(keys, Mapping) else keys for name, keys in tables.items()}
    for name, keys in _BEFORE.items():
        part = known.setdefault(name, {})
        if isinstance(part, dict):
            known[name] = keys | part
    return from_dict(known, source)


def load(path: str | Path, settings: Iterable[str] = (), *, of_run: bool = False) -> Config:
    """Reads a TOML file.

    Args:
        path: of the file.
        settings: as in `override`.
        of_run: whether it is that of a run folder: keys that it lacks are as they were before they existed.

    Example:
        >>> import tempfile, pathlib
        >>> from samplex_cuda.training import config
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "run.toml")
        ...     _ = path.write_text('[model]\\nname = "mlp"\\n')
        ...     config.load(path, ["model.dim=32"]).model.dim
        32
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"config: {path}: does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config: {path}: cannot be read ({error})") from None
    make = stored if of_run else from_dict
    return override(make(parse_toml(text, str(path)), str(path)), settings)


def parse_toml(text: str, source: str) -> dict[str, Any]:
    """Tables of keys from TOML; `ConfigError` if it is invalid."""
    for name in ("tomllib", "tomli"):
        try:
            toml = importlib.import_module(name)
            break
        except ImportError:
            continue
    else:
        raise ImportError(
            "config.load: Python below 3.11 needs the package tomli to read TOML: pip install samplex-cuda[cli]"
        )
    try:
        return toml.loads(text)
    except toml.TOMLDecodeError as error:
        raise ConfigError(f"config: {source}: is not valid TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"config: {source}: must not be nested so deeply") from None


def to_toml(value: Any) -> str:
    """A value as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        if not math.isfinite(value):
            return "nan" if value != value else ("inf" if value > 0 else "-inf")
        text = repr(value)
        return text if any(c in text for c in ".e") else text + ".0"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        # A TOML basic string takes JSON's escapes; DEL is the one character JSON leaves and TOML does not.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(to_toml(v) for v in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_name(k)} = {to_toml(v)}" for k, v in value.items()) + "}"
    raise ConfigError(f"config: a value must be a bool, number, string, list or table, got {type(value).__name__}")


def _name(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key)


def dumps(config: Config) -> str:
    """The configuration as TOML, every key written out; `load` gives the same configuration back.

    Example:
        >>> from samplex_cuda.training import config
        >>> config.dumps(config.Config()).splitlines()[:3]
        ['[data]', 'path = ""', 'format = ""']
    """
    parts = []
    for table, keys in config.as_dict().items():
        parts.append("\n".join([f"[{table}]", *(f"{name} = {to_toml(value)}" for name, value in keys.items())]))
    return "\n\n".join(parts) + "\n"


def describe() -> str:
    """Every key with its default and meaning, as Markdown tables.

    Example:
        >>> from samplex_cuda.training import config
        >>> config.describe().splitlines()[0]
        '### `[data]`'
    """
    lines = []
    for table, make in _tables().items():
        part = make()
        lines += [f"### `[{table}]`", "", "| key | default | values | meaning |", "|---|---|---|---|"]
        for field in dataclasses.fields(part):
            wanted = allowed_values(field).replace("|", "\\|")
            lines.append(
                f"| `{field.name}` | `{to_toml(getattr(part, field.name))}` | {wanted} | {field.metadata['doc']} |"
            )
        lines.append("")
    return "\n".join(lines)
