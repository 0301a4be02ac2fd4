"""A human is told: by which means, how often it is tried, and that a failing notifier costs a line and nothing else."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # so that the helper beside it is found
from listeners import Mail, Web, serving

from lightkeeper.errors import UsageError
from lightkeeper.events.of_supervisor import Notified, NotNotified
from lightkeeper.supervisor.notify import notifier as notifier_module
from lightkeeper.supervisor.notify.events import event_of
from lightkeeper.supervisor.notify.message import LINE_CHARS_MAX, LINES_MAX, Message
from lightkeeper.supervisor.notify.notifier import QUEUE_MAX, Notifier, Outcome, pause_s
from lightkeeper.supervisor.notify.sending import SendError, send
from lightkeeper.supervisor.notify.settings import Command, Smtp, Webhook, read_settings

MESSAGE = Message("crash_loop", "llama", "failed 3 times at step 12", "/runs/a", "cuda_oom", "/runs/a/inc", ("x", "y"))


@pytest.fixture
def web() -> Iterator[Web]:
    with serving(Web()) as server:
        yield server


@pytest.fixture
def mail() -> Iterator[Mail]:
    with serving(Mail()) as server:
        yield server


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifier_module, "PAUSE_S", 0.001)
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def outcomes(settings: list, message: Message = MESSAGE, within_s: float = 20.0, **given: object) -> list[Outcome]:
    found: list[Outcome] = []
    notifier = Notifier(settings, found.append, **given)  # type: ignore[arg-type]
    notifier.tell(message)
    notifier.close(within_s)
    return found


# --- the message


def test_a_message_holds_all_and_is_bounded() -> None:
    assert MESSAGE.subject == "job llama: fails again and again, and was stopped"
    for part in ("failed 3 times at step 12", "/runs/a", "cuda_oom", "/runs/a/inc", "  y"):
        assert part in MESSAGE.text
    assert json.loads(MESSAGE.json)["text"] == MESSAGE.text
    long = Message("failed", "j\nk", "s" * 5000, lines=tuple(f"\x1b[1m{'z' * 900}{i}" for i in range(500)))
    assert long.job == "j k" and len(long.summary) == 1000
    assert len(long.lines) == LINES_MAX and all(len(line) <= LINE_CHARS_MAX + 20 for line in long.lines)
    assert "\x1b" not in long.text
    with pytest.raises(ValueError, match="no 'meteor' can happen"):
        Message("meteor", "j", "s")


# --- settings


def test_settings_are_read_from_tables() -> None:
    hook, command, smtp = read_settings(
        [
            {"kind": "webhook", "url": "https://h.example/x", "on": ["failed"], "tries": 1},
            {"kind": "command", "argv": ["page", "-x"], "timeout_s": 3},
            {"kind": "smtp", "to": "a@b.c", "smtp": "h:25"},
        ]
    )
    assert hook == Webhook(url="https://h.example/x", on=("failed",), tries=1)
    assert command == Command(argv=("page", "-x"), timeout_s=3.0)
    assert smtp == Smtp(to=("a@b.c",), smtp="h:25")
    assert hook.wants("failed") and not hook.wants("finished") and command.wants("finished")
    assert "/x" not in hook.via, "the path of such a URL is its password"


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"kind": "webhok", "url": "http://h"}, "no kind 'webhok' (did you mean webhook?)"),
        ({"url": "http://h"}, "kind is missing (there are: webhook, command, smtp)"),
        ({"kind": "webhook", "urll": "http://h"}, "no key 'urll' (did you mean url?)"),
        ({"kind": "webhook"}, "url is missing"),
        ({"kind": "webhook", "url": "ftp://h"}, "url must be http://"),
        ({"kind": "webhook", "url": "http://h", "tries": 0}, "tries must be within 1..10"),
        ({"kind": "webhook", "url": "http://h", "tries": True}, "notify[0].tries: must be a number"),
        ({"kind": "webhook", "url": "http://h", "timeout_s": 1e9}, "timeout_s must be within"),
        ({"kind": "webhook", "url": "http://h", "on": ["finshed"]}, "no event 'finshed' (did you mean finished?)"),
        ({"kind": "command", "argv": "rm -rf"}, "must be a list of texts"),
        ({"kind": "command", "argv": []}, "argv must be a program"),
        ({"kind": "smtp", "to": ["a b"], "smtp": "h:25"}, "'a b' is no address"),
        ({"kind": "smtp", "to": ["a@b"], "smtp": "h"}, "notify[0]: "),
        ({"kind": "smtp", "to": ["a@b"], "smtp": "h:1", "user": "u"}, "user and password go together"),
        ({"kind": "smtp", "to": ["a@b"], "smtp": "h:1", "user": "u", "password": "p"}, "password must be env:NAME"),
        ({"kind": "smtp", "to": ["a@b"], "smtp": "h:1", "user": "u", "password": "env:P"}, "not sent in the clear"),
        ({"kind": "smtp", "to": ["a@b"], "smtp": "h:1", "security": "ssl"}, "security"),
    ],
)
def test_a_wrong_setting_is_told_in_one_line(table: dict, said: str) -> None:
    with pytest.raises(UsageError) as told:
        read_settings([table])
    assert said in str(told.value) and "\n" not in str(told.value)
    with pytest.raises(UsageError, match="two brackets"):
        read_settings(table)


# --- sending


def test_webhook(web: Web) -> None:
    (one,) = outcomes([Webhook(url=web.url)])
    assert one.reason == "" and one.tries == 1
    (post,) = web.posts
    assert post["what"] == "crash_loop" and post["lines"] == ["x", "y"] and post["text"].startswith("job llama: fails")
    event = event_of(one)
    assert isinstance(event, Notified) and (event.what, event.via) == ("crash_loop", "webhook 127.0.0.1")


def test_a_busy_server_is_tried_again_and_one_that_refuses_is_not(web: Web, capfd: pytest.CaptureFixture[str]) -> None:
    web.answers = [503, 429]
    (one,) = outcomes([Webhook(url=web.url)])
    assert one.reason == "" and one.tries == 3 and web.asked == 3
    web.answers = [404]
    (one,) = outcomes([Webhook(url=web.url)])
    assert one.tries == 1 and "answered 404" in one.reason
    web.answers = [302]
    (one,) = outcomes([Webhook(url=web.url)])
    assert "answered 302" in one.reason, "a redirected POST becomes a GET, and nobody is told"
    web.answers = [500] * 5
    (one,) = outcomes([Webhook(url=web.url, tries=2)])
    assert one.tries == 2
    event = event_of(one)
    assert isinstance(event, NotNotified) and "answered 500" in event.reason
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 3 and all(line.startswith("lightkeeper: nobody was told by webhook 127.0") for line in lines)
    assert "secret" not in "".join(lines)


def test_a_server_that_hangs_is_bounded_twice(web: Web) -> None:
    web.hold.clear()
    with pytest.raises(SendError, match="no answer in time"):
        send(Webhook(url=web.url, timeout_s=0.1), MESSAGE)
    (one,) = outcomes([Webhook(url=web.url)], within_s=0.05)
    assert one.reason == "it took longer than the 0.05 s that there were"
    web.hold.set()


def test_what_has_no_bound_of_its_own_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifier_module, "BEYOND_S", 0.0)
    hangs = threading.Event()
    setting = Command(argv=("x",), timeout_s=0.1, tries=2)
    (one,) = outcomes([setting], one_try=lambda *_: hangs.wait(20))
    assert one.reason == "no answer within 0.1 s" and one.tries == 2
    hangs.set()


def test_a_secret_url_is_read_when_it_is_needed(web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "url").write_text(web.url + "\n")
    monkeypatch.setenv("HOOK", web.url)
    done = outcomes([Webhook(url=f"file:{tmp_path / 'url'}"), Webhook(url="env:HOOK"), Webhook(url="env:NO_HOOK")])
    assert sorted(one.reason for one in done) == ["", "", "env:NO_HOOK: that variable is not set"]
    assert len(web.posts) == 2


def test_command_gets_the_message_twice(tmp_path: Path) -> None:
    code = (
        "import json, os, sys; m = json.load(sys.stdin); assert m == json.loads(os.environ['LIGHTKEEPER_MESSAGE']);"
        "open(sys.argv[1], 'w').write(m['what'] + os.environ['LIGHTKEEPER_MESSAGE_WHAT'])"
    )
    (one,) = outcomes([Command(argv=(sys.executable, "-c", code, str(tmp_path / "got")))])
    assert one.reason == "" and (tmp_path / "got").read_text() == "crash_loopcrash_loop"


def test_commands_that_fail(tmp_path: Path) -> None:
    fails = Command(argv=("sh", "-c", "echo no >&2; exit 3"), tries=2)
    none = Command(argv=("no-such-program",))
    hangs = Command(argv=("sh", "-c", f"echo $$ > {tmp_path / 'pid'}; sleep 100 & wait"), timeout_s=3, tries=1)
    done = {one.via: one for one in outcomes([none, hangs])}
    assert done["command no-such-program"].tries == 1
    assert "was killed" in done["command sh"].reason
    (one,) = outcomes([fails])
    assert one.reason == "it exited 3: no" and one.tries == 2
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


def test_mail(mail: Mail, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAIL_PASSWORD", "pw")
    given = Smtp(to=("a@b.c", "d@e.f"), smtp=mail.address, user="u", password="env:MAIL_PASSWORD")
    (one,) = outcomes([given])
    assert one.reason == ""
    (text,) = mail.mails
    assert "Subject: job llama: fails again and again, and was stopped" in text and "To: a@b.c, d@e.f" in text
    assert "failed 3 times at step 12" in text and "Date: " in text
    assert base64.b64decode(mail.logins[0]) == b"\0u\0pw"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is needed to make a certificate")
def test_mail_by_starttls_to_a_server_that_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, certificate = tmp_path / "key", tmp_path / "certificate"
    words = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "9",
    ]
    words += ["-subj", "/CN=h", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(words, check=True, capture_output=True, timeout=30)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    monkeypatch.setenv("MAIL_PASSWORD", "pw")
    with serving(Mail(context)) as server:
        given = Smtp(
            to=("a@b.c",), smtp=server.address, security="starttls", user="u", password="env:MAIL_PASSWORD", tries=1
        )
        (one,) = outcomes([given])
        assert "certificate verify failed" in one.reason.lower() and not server.logins, "nobody trusts it yet"
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        (one,) = outcomes([given])
        assert one.reason == "" and len(server.mails) == 1
        assert base64.b64decode(server.logins[0]) == b"\0u\0pw"


def test_mails_that_fail(mail: Mail) -> None:
    (one,) = outcomes([Smtp(to=("a@b.c",), smtp=mail.address, security="starttls")])
    assert one.tries == 1 and "STARTTLS" in one.reason, "never sent in the clear instead"
    mail.refused = True
    (one,) = outcomes([Smtp(to=("a@b.c",), smtp=mail.address)])
    assert "a@b.c: the server answered 550 nobody of that name" in one.reason
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]  # bound, so that nobody else has it, and not listening
        (one,) = outcomes([Smtp(to=("a@b.c",), smtp=f"127.0.0.1:{port}")])
    assert one.reason == "Connection refused" and one.tries == 3
    assert mail.mails == []


# --- the notifier


def test_tell_never_waits_and_never_raises() -> None:
    held, found = threading.Event(), list[Outcome]()
    notifier = Notifier([Command(argv=("x",))], found.append, one_try=lambda *_: held.wait(20))
    for _ in range(QUEUE_MAX + 5):
        notifier.tell(MESSAGE)
    assert len(found) in (4, 5) and all("messages wait for it already" in one.reason for one in found)
    held.set()
    assert notifier.close(20)
    assert len(found) == QUEUE_MAX + 5
    notifier.tell(MESSAGE)
    assert found[-1].reason == "it is closed already"


def test_a_bug_in_a_sender_is_shown_and_ends_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    def bug(*_: object) -> None:
        raise TypeError("oops")

    (one,) = outcomes([Command(argv=("x",))], one_try=bug)
    assert one.reason == "a bug in lightkeeper: TypeError: oops"
    assert "Traceback" in capfd.readouterr().err


def test_only_what_is_wanted_is_told() -> None:
    assert outcomes([Command(argv=("x",), on=("finished",))]) == []


def test_pauses_grow_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert [pause_s(n) for n in (1, 2, 3, 20)] == [0.5, 1.0, 2.0, 30.0]
