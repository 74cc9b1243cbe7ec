"""`samplex config`."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any

from samplex_cuda.cli.common import OK, Output
from samplex_cuda.training import config as configs

__all__ = ["show_config"]


def show_config(out: Output, settings: list[str], comments: bool) -> tuple[dict[str, Any], int]:
    """The default configuration with some keys set, as TOML with what each key means.

    Example:
        >>> from samplex_cuda.cli.common import Output
        >>> from samplex_cuda.cli.extras import show_config
        >>> found, code = show_config(Output(True), ["training.epochs=3"], comments=False)
        >>> found["config"]["training"]["epochs"]
        3
    """
    chosen = configs.override(configs.Config(), settings)
    lines = []
    for table in dataclasses.fields(chosen):
        part = getattr(chosen, table.name)
        lines.append(f"[{table.name}]")
        for field in dataclasses.fields(part):
            if comments:
                meaning = f"{field.metadata['doc']} ({configs._wanted(field)})"
                lines += [f"# {line}" for line in textwrap.wrap(meaning, 100, break_long_words=False)]
            lines.append(f"{field.name} = {configs._toml(getattr(part, field.name))}")
        lines.append("")
    if not out.as_json:
        out.say("\n".join(lines).rstrip())
    return {"config": chosen.as_dict()}, OK
