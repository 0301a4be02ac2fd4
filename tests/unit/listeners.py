"""A web server and a mail server of this process, which keep what they are told."""

from __future__ import annotations

import contextlib
import json
import socketserver
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Web(ThreadingHTTPServer):
    """Answers with the codes of `answers`, then 200; `posts` are the messages, `hold` is awaited before an answer."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Post)
        self.posts: list[dict[str, Any]] = []
        self.answers: list[int] = []
        self.asked = 0
        self.hold = threading.Event()
        self.hold.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/services/secret"


class _Post(BaseHTTPRequestHandler):
    server: Web

    def do_POST(self) -> None:
        self.server.asked += 1
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.hold.wait(20)
        code = self.server.answers.pop(0) if self.server.answers else 200
        if code == 200:
            self.server.posts.append(json.loads(body))
        self.send_response(code)
        if code == 302:
            self.send_header("Location", "/elsewhere")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


class Mail(socketserver.ThreadingTCPServer):
    """Takes every mail, unless `refused`; with a context it offers STARTTLS, and asks for it before a password."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Smtp)
        self.context = context
        self.mails: list[str] = []
        self.logins: list[str] = []
        self.refused = False

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"


class _Smtp(socketserver.StreamRequestHandler):
    server: Mail

    def handle(self) -> None:
        def answer(text: str) -> None:
            self.wfile.write(f"{text}\r\n".encode())

        secure = False
        answer("220 here")
        while line := self.rfile.readline().decode().strip():
            verb = line.split()[0].upper()
            if verb == "EHLO":
                more = "STARTTLS" if self.server.context and not secure else "AUTH PLAIN"
                answer(f"250-here\r\n250 {more}")
            elif verb == "STARTTLS" and self.server.context:
                answer("220 go on")
                try:
                    self.request = self.server.context.wrap_socket(self.request, server_side=True)
                except ssl.SSLError:
                    return  # it does not trust us
                self.rfile, self.wfile = self.request.makefile("rb"), self.request.makefile("wb", 0)
                secure = True
            elif verb == "AUTH":
                self.server.logins.append(line.split()[-1])
                answer("235 come in")
            elif verb == "RCPT" and self.server.refused:
                answer("550 nobody of that name")
            elif verb == "DATA":
                answer("354 go on")
                lines = iter(lambda: self.rfile.readline().decode().rstrip("\r\n"), ".")
                self.server.mails.append("\n".join(lines))
                answer("250 taken")
            elif verb == "QUIT":
                answer("221 bye")
                return
            else:
                answer("250 well")


@contextlib.contextmanager
def serving(server: Any) -> Iterator[Any]:
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
