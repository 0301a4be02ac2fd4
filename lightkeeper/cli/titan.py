"""`lightkeeper launch --torchtitan`: torchtitan's own arguments, as the command that trains its config in a group.

torchtitan itself resolves what is said of module and config; here they are only renamed, so nothing of it is imported.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightkeeper.errors import UsageError

MODULE = "lightkeeper.integrations.torchtitan"
SUFFIX = "_ft"  # how that module's names of configs end
USAGE = "lightkeeper launch ... --torchtitan -- --module llama3 --config llama3_8b ARGS"


def command_of(arguments: Sequence[str]) -> tuple[str, ...]:
    """``-m``, a module and its arguments.

    Args:
        arguments: as for `torchtitan.train`; without ``--module`` the config is one that torchtitan ships.

    Raises:
        UsageError: torchtitan is not installed, or another than the integration knows; the arguments name no config, or
            are none of torchtitan's.
    """
    import lightkeeper.integrations.torchtitan  # noqa: F401  # refuses a torchtitan that cannot be used

    module, config, rest = _named(list(arguments))
    if not config:
        raise UsageError(f"--torchtitan: the arguments name no config: {USAGE}")
    if module not in ("", MODULE):
        config = f"{module}.{config}{SUFFIX}"
    elif not config.endswith(SUFFIX):
        config += SUFFIX
    return ("-m", "torchtitan.train", "--module", MODULE, "--config", config, *rest)


def _named(arguments: list[str]) -> tuple[str, str, list[str]]:
    """Module, config (the last one that is given counts, as for torchtitan; empty if there is none), and the rest."""
    found, rest = {"--module": "", "--config": ""}, list[str]()
    if arguments and not arguments[0].startswith("-"):
        raise UsageError(f"--torchtitan: {arguments[0]!r} is no argument of torchtitan.train, which is run: {USAGE}")
    while arguments:
        name, equals, value = arguments.pop(0).partition("=")
        if name not in found:
            rest.append(name + equals + value)
            continue
        if not equals:
            value = arguments.pop(0) if arguments else ""
        if not value or value.startswith("-"):
            raise UsageError(f"--torchtitan: {name} has no value: {USAGE}")
        found[name] = value
    return found["--module"], found["--config"], rest
