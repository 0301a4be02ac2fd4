"""The options that say who is told, shared by `notify` and `watch`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightkeeper.errors import UsageError

if TYPE_CHECKING:
    from lightkeeper.supervisor.notify.settings import Setting

SETTINGS_BYTES_MAX = 1 << 20


def notifiers(
    webhooks: Sequence[str] = (),
    commands: Sequence[str] = (),
    mail_to: Sequence[str] = (),
    smtp: str = "",
    mail_from: str = "",
    security: str = "",
    user: str = "",
    password: str = "",
    file: str = "",
) -> tuple[Setting, ...]:
    """The notifiers that the options name, and those in the settings file.

    Raises:
        UsageError: one of them cannot be used; the line names the option.
    """
    for value, option in ((smtp, "--smtp"), (mail_from, "--mail-from"), (user, "--smtp-user")):
        if value and not mail_to:
            raise UsageError(f"{option} is of no use without --mail-to")
    if (security or password) and not mail_to:
        raise UsageError(f"{'--smtp-security' if security else '--smtp-password'} is of no use without --mail-to")
    if not (webhooks or commands or mail_to or file):
        return ()
    import shlex

    from lightkeeper.supervisor.notify.settings import Command, Smtp, Webhook, checked

    found: list[Setting] = [checked(Webhook, "--webhook", url=url) for url in webhooks]
    for text in commands:
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise UsageError(f"--command: {error}: {text}") from None
        found.append(checked(Command, "--command", argv=tuple(words)))
    if mail_to:
        if not smtp:
            raise UsageError("--mail-to needs --smtp HOST:PORT, the mail server")
        given: dict[str, Any] = {"security": security} if security else {}
        given.update(sender=mail_from, user=user, password=password)
        found.append(checked(Smtp, "--mail-to", to=tuple(mail_to), smtp=smtp, **given))
    return (*found, *_of_file(file))


def _of_file(file: str) -> tuple[Setting, ...]:
    if not file:
        return ()
    import tomllib

    from lightkeeper.supervisor.notify.settings import read_settings
    from lightkeeper.words import unknown

    try:
        with open(file, "rb") as opened:
            data = tomllib.loads(opened.read(SETTINGS_BYTES_MAX).decode("utf-8"))
    except OSError as error:
        raise UsageError(f"--settings {file}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--settings {file}: {error}") from None
    for key in data:
        if key != "notify":
            raise UsageError(f"--settings {file}: {unknown('key', key, ['notify'])}")
    return read_settings(data.get("notify", []), f"{file}: notify")
