"""Telling once, by each of the three means. All that may go wrong comes out as a `SendError`."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

from lightkeeper.supervisor.notify.message import Message
from lightkeeper.supervisor.notify.settings import Command, Setting, Smtp, Webhook, check_url, resolve
from lightkeeper.wire import split_address
from lightkeeper.words import shown

REASON_CHARS_MAX = 200
REPLY_BYTES_MAX = 4096
ENVIRONMENT_BYTES_MAX = 100_000  # the kernel takes 128 KiB in one variable
BUSY = (408, 425, 429)  # answers of the 400s after which it may be tried again


class SendError(Exception):
    """Nobody was told; `permanent`: it would be the same the next time."""

    def __init__(self, reason: str, permanent: bool = False) -> None:
        super().__init__(shown(" ".join(reason.split()), REASON_CHARS_MAX))
        self.permanent = permanent


def send(setting: Setting, message: Message) -> None:
    """Tells of it once. Bounded by the setting's `timeout_s` for each wait on the other side.

    Raises:
        SendError: it did not work.
    """
    _BY_KIND[setting.kind](setting, message)


def _secret(text: str) -> str:
    try:
        return resolve(text)
    except ValueError as error:
        raise SendError(str(error), permanent=True) from None


def _post(setting: Webhook, message: Message) -> None:
    import http.client
    import urllib.error
    import urllib.request

    url = _secret(setting.url)
    try:
        check_url(url)
    except ValueError as error:
        raise SendError(str(error), permanent=True) from None

    class NoRedirect(urllib.request.HTTPRedirectHandler):
        """A POST that is sent elsewhere becomes a GET, and the message is lost: better an error."""

        def redirect_request(self, *_: Any) -> None:
            return None

    head = {"Content-Type": "application/json", "User-Agent": "lightkeeper"}
    request = urllib.request.Request(url, data=message.json.encode(), headers=head, method="POST")
    try:
        with urllib.request.build_opener(NoRedirect).open(request, timeout=setting.timeout_s) as reply:
            reply.read(REPLY_BYTES_MAX)
    except urllib.error.HTTPError as error:
        with error:
            permanent = error.code < 500 and error.code not in BUSY
            raise SendError(f"the server answered {error.code} {error.reason}", permanent) from None
    except urllib.error.URLError as error:
        raise SendError(_why(error.reason)) from None
    except (OSError, http.client.HTTPException) as error:
        raise SendError(_why(error)) from None


def _run(setting: Command, message: Message) -> None:
    told = message.json
    environment = {**os.environ, "LIGHTKEEPER_MESSAGE": told}
    if len(told.encode()) > ENVIRONMENT_BYTES_MAX:
        environment["LIGHTKEEPER_MESSAGE"] = ""  # standard input has it
    environment.update(LIGHTKEEPER_MESSAGE_WHAT=message.what, LIGHTKEEPER_MESSAGE_SUBJECT=message.subject)
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as output:
        stdin.write(told.encode())  # from a file: a command that does not read it blocks nobody
        stdin.seek(0)
        try:
            process = subprocess.Popen(
                setting.argv, stdin=stdin, stdout=output, stderr=output, env=environment, start_new_session=True
            )
        except (FileNotFoundError, PermissionError, NotADirectoryError) as error:
            raise SendError(f"{setting.argv[0]}: {error.strerror}", permanent=True) from None
        except OSError as error:
            raise SendError(f"{setting.argv[0]}: {error.strerror or error}") from None
        try:
            code = process.wait(setting.timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # not reaped yet, so its session is still its own
            process.wait()
            raise SendError(f"it did not end within {setting.timeout_s:g} s and was killed") from None
        if code != 0:
            output.seek(max(0, output.seek(0, os.SEEK_END) - REPLY_BYTES_MAX))
            said = output.read(REPLY_BYTES_MAX).decode("utf-8", "replace").strip().splitlines()
            ended = f"exited {code}" if code > 0 else f"was killed by signal {-code}"
            raise SendError(f"it {ended}" + (f": {said[-1]}" if said else ""))


def _mail(setting: Smtp, message: Message) -> None:
    import smtplib
    import ssl
    from email.message import EmailMessage
    from email.utils import formatdate, make_msgid

    host, port = split_address(setting.smtp)
    mail = EmailMessage()
    name = socket.gethostname() or "localhost"
    mail["From"] = setting.sender or f"lightkeeper@{name}"
    mail["To"], mail["Subject"] = ", ".join(setting.to), message.subject
    mail["Date"], mail["Message-ID"] = formatdate(message.wall or time.time()), make_msgid(domain=name)
    mail.set_content(message.text)
    password = _secret(setting.password) if setting.password else ""
    try:
        context = ssl.create_default_context()
        if setting.security == "tls":
            server: smtplib.SMTP = smtplib.SMTP_SSL(host, port, timeout=setting.timeout_s, context=context)
        else:
            server = smtplib.SMTP(host, port, timeout=setting.timeout_s)
        with server:
            if setting.security == "starttls":
                server.starttls(context=context)
            if setting.user:
                server.login(setting.user, password)
            refused = server.send_message(mail)
    except smtplib.SMTPNotSupportedError as error:
        raise SendError(str(error), permanent=True) from None
    except smtplib.SMTPRecipientsRefused as error:
        permanent = all(code >= 500 for code, _ in error.recipients.values())
        raise SendError(_each(error.recipients), permanent) from None
    except smtplib.SMTPResponseException as error:
        raise SendError(_answer(error.smtp_code, error.smtp_error), error.smtp_code >= 500) from None
    except (OSError, smtplib.SMTPException) as error:  # SMTPException is an OSError; said for the reader
        raise SendError(_why(error)) from None
    if refused:
        raise SendError(f"some were told, not all: {_each(refused)}", permanent=True)


def _each(refused: Mapping[str, tuple[int, bytes]]) -> str:
    return "; ".join(f"{who}: {_answer(*said)}" for who, said in refused.items())


def _answer(code: int, said: bytes | str) -> str:
    text = said.decode("utf-8", "replace") if isinstance(said, bytes) else said
    return f"the server answered {code} {text}"


def _why(error: object) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return str(getattr(error, "strerror", None) or error) or type(error).__name__


_BY_KIND: dict[str, Callable[[Any, Message], None]] = {"webhook": _post, "command": _run, "smtp": _mail}
