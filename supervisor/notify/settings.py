"""Who is told, and how: one typed dataclass per kind of notifier, read from a TOML table `[[notify]]`.

A secret (a webhook's URL is one) may be given as `env:NAME` or `file:PATH`, and is read when it is needed; a password
may not be given in any other way.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, TypeAlias, get_type_hints
from urllib.parse import urlsplit

from lightkeeper.errors import UsageError
from lightkeeper.supervisor.notify.message import WHAT
from lightkeeper.wire import split_address
from lightkeeper.words import unknown

SECRET_BYTES_MAX = 4096
SETTINGS_MAX = 20
TIMEOUT_S_MAX, TRIES_MAX = 120.0, 10
SECURITY = ("none", "starttls", "tls")


@dataclass(frozen=True, kw_only=True)
class Common:
    """What every notifier has.

    Attributes:
        on: of what it tells, of `WHAT`; empty: of everything.
        timeout_s: bound of one try, in seconds.
        tries: how often it is tried, with pauses that grow.
    """

    on: tuple[str, ...] = ()
    timeout_s: float = 10.0
    tries: int = 3

    kind: ClassVar[str] = ""

    @property
    def via(self) -> str:
        """Which notifier it is, for a log: nothing secret."""
        raise NotImplementedError

    def wants(self, what: str) -> bool:
        """Whether it tells of this."""
        return not self.on or what in self.on

    def check(self) -> None:
        """Raises ValueError with what is wrong."""
        for what in self.on:
            if what not in WHAT:
                raise ValueError(f"on: {unknown('event', what, WHAT)}")
        if not 0.1 <= self.timeout_s <= TIMEOUT_S_MAX:
            raise ValueError(f"timeout_s must be within 0.1..{TIMEOUT_S_MAX:g}, got {self.timeout_s:g}")
        if not 1 <= self.tries <= TRIES_MAX:
            raise ValueError(f"tries must be within 1..{TRIES_MAX}, got {self.tries}")


@dataclass(frozen=True, kw_only=True)
class Webhook(Common):
    """An HTTP POST of the message as JSON; `text` in it is what Slack and its like show."""

    url: str

    kind: ClassVar[str] = "webhook"

    @property
    def via(self) -> str:
        """Its host alone: the path of such a URL is its password."""
        return f"webhook {self.url if is_reference(self.url) else urlsplit(self.url).hostname}"

    def check(self) -> None:
        """Raises ValueError with what is wrong."""
        super().check()
        if not is_reference(self.url):
            check_url(self.url)


@dataclass(frozen=True, kw_only=True)
class Command(Common):
    """A command that gets the message as JSON on standard input and in the environment (`LIGHTKEEPER_MESSAGE`)."""

    argv: tuple[str, ...]

    kind: ClassVar[str] = "command"

    @property
    def via(self) -> str:
        """The program, without its arguments."""
        return f"command {self.argv[0]}"

    def check(self) -> None:
        """Raises ValueError with what is wrong."""
        super().check()
        if not self.argv or not self.argv[0] or any("\0" in word for word in self.argv):
            raise ValueError("argv must be a program and its arguments")


@dataclass(frozen=True, kw_only=True)
class Smtp(Common):
    """A mail.

    Attributes:
        to: addresses.
        smtp: ``HOST:PORT`` of the mail server.
        sender: its address; empty: ``lightkeeper@`` this host.
        security: ``none``, ``starttls``, or ``tls`` (from the first byte on, port 465).
        user: for servers that ask for one.
        password: ``env:NAME`` or ``file:PATH``.
    """

    to: tuple[str, ...]
    smtp: str
    sender: str = ""
    security: str = "none"
    user: str = ""
    password: str = ""

    kind: ClassVar[str] = "smtp"

    @property
    def via(self) -> str:
        """Who gets it."""
        return f"mail to {', '.join(self.to)}"

    def check(self) -> None:
        """Raises ValueError with what is wrong."""
        super().check()
        split_address(self.smtp)
        if self.security not in SECURITY:
            raise ValueError(f"security: {unknown('security', self.security, SECURITY)}")
        if not self.to:
            raise ValueError("to needs at least one address")
        for address in (*self.to, *((self.sender,) if self.sender else ())):
            if "@" not in address or not address.isprintable() or any(one in address for one in " ,;<>"):
                raise ValueError(f"{address!r} is no address")
        if bool(self.user) != bool(self.password):
            raise ValueError("user and password go together")
        if self.password and not is_reference(self.password):
            raise ValueError(
                "password must be env:NAME or file:PATH, so that it stands in no process list and no job file"
            )
        if (
            self.user
            and self.security == "none"
            and split_address(self.smtp)[0] not in ("127.0.0.1", "localhost", "::1")
        ):
            raise ValueError("a password is not sent in the clear: security must be starttls or tls")


Setting: TypeAlias = Webhook | Command | Smtp
KINDS: dict[str, type[Setting]] = {kind.kind: kind for kind in (Webhook, Command, Smtp)}


def read_settings(tables: object, where: str = "notify") -> tuple[Setting, ...]:
    """The notifiers of a list of TOML tables.

    Args:
        tables: what stands under `[[notify]]`.
        where: what it is called in an error.

    Raises:
        UsageError: one of them cannot be used; the line names the key, and the nearest known one for an unknown.
    """
    if isinstance(tables, Mapping):
        raise UsageError(f"{where}: write [[notify]], with two brackets: there may be several")
    if not isinstance(tables, list | tuple) or not all(isinstance(table, Mapping) for table in tables):
        raise UsageError(f"{where}: must be tables, [[notify]]")
    if len(tables) > SETTINGS_MAX:
        raise UsageError(f"{where}: at most {SETTINGS_MAX}, got {len(tables)}")
    return tuple(read_setting(table, f"{where}[{i}]") for i, table in enumerate(tables))


def read_setting(table: Mapping[str, Any], where: str = "notify") -> Setting:
    """One notifier of one TOML table.

    Raises:
        UsageError: it cannot be used.
    """
    kind = table.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        said = "kind is missing" if kind is None else unknown("kind", str(kind), KINDS)
        raise UsageError(f"{where}: {said}" + (f" (there are: {', '.join(KINDS)})" if kind is None else ""))
    known = {field.name: field for field in fields(KINDS[kind])}
    hints = get_type_hints(KINDS[kind])
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key == "kind":
            continue
        if key not in known:
            raise UsageError(f"{where}: {unknown('key', key, known)}")
        values[key] = _typed(value, hints[key], f"{where}.{key}")
    for name, field in known.items():
        if field.default is MISSING and name not in values:
            raise UsageError(f"{where}: {name} is missing (kind {kind})")
    return checked(KINDS[kind], where, **values)


def checked(kind: type[Setting], where: str, **values: Any) -> Setting:
    """A setting that holds what its kind asks for.

    Raises:
        UsageError: it does not.
    """
    setting = kind(**values)
    try:
        setting.check()
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from None
    return setting


def _typed(value: object, hint: object, where: str) -> Any:
    if hint == tuple[str, ...]:
        listed = [value] if isinstance(value, str) and not where.endswith(".argv") else value
        if isinstance(listed, list | tuple) and all(isinstance(one, str) for one in listed):
            return tuple(listed)
        raise UsageError(f"{where}: must be a list of texts, got {value!r}")
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if (hint is str and isinstance(value, str)) or (hint is int and type(value) is int):
        return value
    raise UsageError(f"{where}: must be {'a text' if hint is str else 'a number'}, got {value!r}")


# ---------------------------------------------------------------- secrets


def is_reference(text: str) -> bool:
    """Whether it says where a secret is, and is none itself."""
    return text.startswith(("env:", "file:"))


def resolve(text: str) -> str:
    """The secret that a reference names; any other text is itself.

    Raises:
        ValueError: there is none; the secret is not in the line.
    """
    if text.startswith("env:"):
        value = os.environ.get(text.removeprefix("env:"), "").strip()
        if not value:
            raise ValueError(f"{text}: that variable is not set")
        return value
    if text.startswith("file:"):
        path = Path(text.removeprefix("file:")).expanduser()
        try:
            if not path.is_file():
                raise ValueError(f"{text}: {'not a regular file' if path.exists() else 'no such file'}")
            with path.open("rb") as file:
                data = file.read(SECRET_BYTES_MAX + 1)
            value = data.decode("utf-8").strip()
        except OSError as error:
            raise ValueError(f"{text}: {error.strerror or error}") from None
        except UnicodeDecodeError:
            raise ValueError(f"{text}: is no text") from None
        if not value or len(data) > SECRET_BYTES_MAX:
            raise ValueError(f"{text}: {'is empty' if not value else f'more than {SECRET_BYTES_MAX} bytes'}")
        return value
    return text


def check_url(url: str) -> None:
    """Raises ValueError if nothing can be posted there; the URL is not in the line."""
    try:
        parts = urlsplit(url)
        port_is_fine = parts.port is None or parts.port > 0
    except ValueError:
        port_is_fine = False
    if (
        not port_is_fine
        or parts.scheme not in ("http", "https")
        or not parts.hostname
        or not url.isascii()
        or " " in url
    ):
        raise ValueError("url must be http://HOST/... or https://HOST/..., or env:NAME or file:PATH with it")
