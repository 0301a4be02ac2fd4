"""`lightkeeper bench NAME`: ratios against the peer, both run in the same call.

Each file `bench/NAME.py` with a function `run()` is a bench. It returns
`{"bench", "ours", "peer", "ratio", "target", "met"}`, with named figures in `ours` and `peer`, and says what
it is doing on standard error.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.resources import files
from inspect import signature
from itertools import zip_longest
from typing import Annotated, Any

import typer

from lightkeeper.errors import UsageError


def command(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Which bench; `list` names them all.")],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Measure this runtime against its peer, in one call on this machine, and print the ratio.

    Some benches take more: `lightkeeper bench chaos --interval 15 --minutes 5`, `lightkeeper bench titan --peer DIR`.
    """
    known = benches()
    if name == "list":
        for known_name, what in known.items():
            typer.echo(f"{known_name:12} {what}")
        return 0
    if name not in known:
        raise UsageError(f"no bench {name!r} (there are: {', '.join(known) or 'none'})")
    bench = import_module(f"lightkeeper.bench.{name}").run
    result = bench(**options(name, bench, context.args))
    if json:
        import msgspec

        sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
    else:
        show(result)
    return 0


def options(name: str, bench: Callable[..., Any], words: Sequence[str]) -> dict[str, float | str]:
    """What `--OPTION VALUE` gives for the parameters of a bench: a number, or text for one whose default is text.

    Raises:
        UsageError: for one that it does not have, one without a value, or what should be a positive number and is not.
    """
    known = signature(bench).parameters
    given: dict[str, float | str] = {}
    for option, value in zip_longest(words[::2], words[1::2]):
        parameter = option.removeprefix("--").replace("-", "_")
        if not option.startswith("--") or parameter not in known:
            takes = ", ".join(f"--{k.replace('_', '-')}" for k in known) or "no options of its own"
            raise UsageError(f"bench {name} does not know {option} (it takes {takes})")
        text = isinstance(known[parameter].default, str)
        if text and not value:
            raise UsageError(f"{option}: give a value")
        given[parameter] = value if text else _positive(option, value or "")
    return given


def _positive(option: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        raise UsageError(f"{option} {value}: give a number") from None
    if not 0 < number < float("inf"):
        raise UsageError(f"{option} {value}: give a number above 0")
    return number


def benches() -> dict[str, str]:
    """Names of the benches, and the first line of each file's docstring. Nothing is imported."""
    found = {}
    for entry in sorted(files("lightkeeper").joinpath("bench").iterdir(), key=lambda entry: entry.name):
        if not entry.name.endswith(".py") or entry.name.startswith("_"):
            continue
        tree = ast.parse(entry.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in tree.body):
            found[entry.name.removesuffix(".py")] = (ast.get_docstring(tree) or "").split("\n")[0]
    return found


def show(result: dict[str, Any]) -> None:
    """Print a bench's result as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"bench {result.get('bench', '')}")
    for column in ("figure", "ours", "peer"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    ours, peer = result.get("ours") or {}, result.get("peer") or {}
    for figure in [*ours, *(name for name in peer if name not in ours)]:
        table.add_row(figure, _text(ours.get(figure)), _text(peer.get(figure)))
    console = Console()
    console.print(table)
    for field in ("ratio", "target", "met"):
        console.print(f"{field}: {_text(result.get(field))}", highlight=False)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(part)}" for name, part in value.items())
    return str(value)
