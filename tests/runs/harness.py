"""Starts jobs of real processes: a lighthouse, and trainers from a fork server that has imported torch already.

Each trainer's rank 0 starts its own manager process, as without a launcher; `Job.launch` goes through `lightkeeper
launch` instead. Everything waits for events or exits with a bound, nothing sleeps for a while and hopes.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import multiprocessing
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import psutil
from facts import Facts, Gold, Traced, read_trace

from lightkeeper.errors import RunFolderError
from lightkeeper.events import schema
from lightkeeper.events.pretty import line
from lightkeeper.events.reader import read_run
from lightkeeper.manager.folders import SOCKET, make_folder
from lightkeeper.manager.spawn import PARENT_VARIABLE, SOCKET_VARIABLE

T = TypeVar("T", bound=schema.Event)

HERE = Path(__file__).parent
LISTENING = re.compile(r"listening on (\S+?),")
RUN_S_MAX = 120.0  # a bound, reached only where something hangs, also on a busy machine
END_S_MAX = 15.0  # what is kept of a loss is written before a manager ends; below the budget, which nobody waits for
OUTAGE_BUDGET_S = 20
LISTENS_S_MAX = 60.0
ASKED_S_MAX = 120.0
TOKEN = "a-token-for-tests"
POLL_S = 0.02

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(
    [
        "torch",
        "torch._dynamo",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "lightkeeper.manager.trainer",
        "lightkeeper.manager.gloo",
        "lightkeeper.checkpoint.checkpoints",
    ]
)


def port_below_ephemeral() -> int:
    """A free port that no outgoing connection takes while the lighthouse that had it is away, nor a test beside."""
    beside = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    mine = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    for port in random.sample(range(20_000 + mine, 30_000, beside), 100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise AssertionError("no free port")


class Job:
    """One job and its run folder.

    Args:
        folder: the run's folder, to be made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lighthouse = "127.0.0.1:1"
        self.trainers: dict[str, BaseProcess] = {}
        self.launchers: dict[str, subprocess.Popen[bytes]] = {}
        self.lighthouses: list[subprocess.Popen[bytes]] = []
        self.started: set[int] = set()
        self.settings: dict[str, Any] = {}
        self.heal_options: dict[str, Any] = {}
        self.variables: dict[str, str] = {}  # of every process's environment
        folder.mkdir(parents=True)

    # ------------------------------------------------------------ starting

    def start_lighthouse(
        self,
        *words: str,
        port: int = 0,
        env: dict[str, str] | None = None,
        log: str = "log",
        bind: str = "127.0.0.1",
    ) -> str:
        """Starts a lighthouse, with its log in a folder of this name; returns its address once it listens."""
        number, port = len(self.lighthouses), port or port_below_ephemeral()
        path = self.folder / f"lighthouse-{number}.out"
        command = [
            sys.executable,
            "-m",
            "lightkeeper",
            "lighthouse",
            "--bind",
            f"{bind}:{port}",
            "--log",
            str(self.folder / log),
        ]
        command += ["--run-folder", str(self.folder), *(words or ("--lease-s", "1"))]
        with path.open("wb") as output:
            child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=self._environment(env or {}))
        self.lighthouses.append(child)
        self.started.add(child.pid)

        def listening() -> bool:
            assert child.poll() is None, path.read_text()
            return LISTENING.search(path.read_text()) is not None

        self.until(listening, "the lighthouse listens", LISTENS_S_MAX)
        found = LISTENING.search(path.read_text())
        assert found is not None
        self.lighthouse = found.group(1)
        return self.lighthouse

    def kill_lighthouse(self, number: int = -1) -> int:
        """Kills one (the newest, if none is named); returns its port."""
        child = self.lighthouses[number]
        child.send_signal(signal.SIGKILL)
        child.wait()
        path = self.folder / f"lighthouse-{self.lighthouses.index(child)}.out"
        found = LISTENING.search(path.read_text())
        assert found is not None
        return int(found.group(1).rpartition(":")[2])

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Runs a command of the operator's."""
        done = subprocess.run(
            [sys.executable, "-m", "lightkeeper", *words],
            env=self._environment({"COLUMNS": "200"}), capture_output=True, text=True, check=False, timeout=ASKED_S_MAX,
        )  # fmt: skip
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def start(
        self,
        group: str,
        fault: str = "",
        settings: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
        **options: Any,
    ) -> BaseProcess:
        """Starts one trainer.

        Args:
            group: name of the group.
            fault: as in ``LIGHTKEEPER_FAULT``.
            settings: fields of `Settings` that differ from the job's.
            env: further environment variables.
            options: of `loops.run`.
        """
        name = group if group not in self.trainers else f"{group}-again"
        while name in self.trainers:
            name += "-again"
        options = {"trace": str(self.folder / f"trace-{name}"), **options}
        environment = self._group_environment(group, fault, settings, env)
        return self._fork(name, options, environment)

    def _fork(self, name: str, options: dict[str, Any], environment: dict[str, str]) -> BaseProcess:
        child = _processes.Process(target=_trainer, args=(options, environment, str(self.output(name))), name=name)
        child.start()
        self.trainers[name] = child
        assert child.pid is not None
        self.started.add(child.pid)
        return child

    def start_ranks(
        self,
        group: str,
        ranks: int = 2,
        fault: str = "",
        settings: dict[str, Any] | None = None,
        **options: Any,
    ) -> subprocess.Popen[bytes]:
        """Starts one group of several ranks: its manager, known by the group's name, and ranks named ``g0.1``.

        Args:
            group: name of the group.
            ranks: their number.
            fault: as in ``LIGHTKEEPER_FAULT``.
            settings: fields of `Settings` that differ from the job's.
            options: of `loops.run`.
        """
        name = group
        while name in self.launchers:
            name += "-again"
        socket_path = make_folder() / SOCKET
        given = {"ranks": ranks, **(settings or {})}
        environment = self._group_environment(group, fault, given, {SOCKET_VARIABLE: str(socket_path)})
        with self.output(name).open("wb") as output:
            manager = subprocess.Popen(
                [sys.executable, "-m", "lightkeeper.manager.main"],
                stdout=output, stderr=subprocess.STDOUT, env={**environment, PARENT_VARIABLE: str(os.getpid())},
                start_new_session=True,
            )  # fmt: skip
        self.launchers[name] = manager
        self.started.add(manager.pid)
        self.until(socket_path.exists, f"the manager of {group}")
        meet = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port_below_ephemeral())}
        for rank in range(ranks):
            options = {"loop": "sharded", **options, "trace": str(self.folder / f"trace-{name}.{rank}")}
            own = {**environment, **meet, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            self._fork(f"{name}.{rank}", options, own)
        return manager

    def start_all(
        self, count: int = 3, fault: str = "", only: dict[str, dict[str, Any]] | None = None, **options: Any
    ) -> None:
        """A lighthouse, if there is none yet, and `count` groups alike; `only` names options of single groups."""
        self.settings.setdefault("groups", count)
        if not self.lighthouses:
            self.start_lighthouse()
        for i in range(count):
            self.start(f"g{i}", fault, **{**options, **(only or {}).get(f"g{i}", {})})

    def launch(
        self,
        group: str,
        fault: str = "",
        settings: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
        **options: Any,
    ) -> subprocess.Popen[bytes]:
        """Starts one group by `lightkeeper launch`, which does not start it again unless `env` says so."""
        options = {"trace": str(self.folder / f"trace-{group}"), **options}
        return self.start_command(group, [str(HERE / "script.py"), json.dumps(options)], fault, settings, env)

    def start_command(
        self,
        group: str,
        command: list[str],
        fault: str = "",
        settings: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
    ) -> subprocess.Popen[bytes]:
        """Starts any script (or ``-m`` and a module) as a group by `lightkeeper launch`."""
        words = [sys.executable, "-m", "lightkeeper", "launch", "--group", group, "--", *command]
        with self.output(group).open("wb") as output:
            child = subprocess.Popen(
                words,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=self._group_environment(group, fault, settings, {"LIGHTKEEPER_RESTARTS": "0", **(env or {})}),
                start_new_session=True,
                cwd=cwd,
            )
        self.launchers[group] = child
        self.started.add(child.pid)
        return child

    def _group_environment(
        self, group: str, fault: str, settings: dict[str, Any] | None, env: dict[str, str] | None
    ) -> dict[str, str]:
        given = {
            "lighthouse": self.lighthouse,
            "group": group,
            "token": TOKEN,
            "run_folder": str(self.folder),
            "outage_budget_s": OUTAGE_BUDGET_S,
            "fingerprint_every": 1,
            "bucket_mb": 0.001,
            **self.settings,
            **(settings or {}),
        }
        budget_s = (env or {}).get("LIGHTKEEPER_OUTAGE_BUDGET_S", given["outage_budget_s"])
        if float(budget_s) >= 20:  # on a busy machine a rank may well do nothing for five seconds
            given.setdefault("stall_floor_s", 15)
        variables = {f"LIGHTKEEPER_{name.upper()}": str(value) for name, value in given.items()}
        return self._environment({**variables, **({"LIGHTKEEPER_FAULT": fault} if fault else {}), **(env or {})})

    def _environment(self, more: dict[str, str]) -> dict[str, str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("LIGHTKEEPER_")}
        return {
            **clean,
            "LIGHTKEEPER_TOKEN": TOKEN,
            "RUN_OF_TEST": str(self.folder),
            "PYTHONUNBUFFERED": "1",
            **self.variables,
            **more,
        }

    def start_healing(
        self, count: int = 3, fault: str = "", only: dict[str, dict[str, Any]] | None = None, **options: Any
    ) -> None:
        """`start_all` with the loop that heals: slow steps until `hurry`; the work dealt evenly unless told otherwise.

        On a busy machine groups differ in speed, and an epoch of new shares would stand among those that heal.
        """
        self.settings.setdefault("deal", "even")
        self.heal_options = {
            "loop": "healing", "warm_up": 12, "steps": 150, **self.lingering(0.08), **options,
        }  # fmt: skip
        self.start_all(count, fault, only, **self.heal_options)

    def return_of(self, group: str, fault: str = "", env: dict[str, str] | None = None, **options: Any) -> BaseProcess:
        """Starts the group again, as soon as its process has ended."""
        ended = [process for name, process in self.trainers.items() if name.split("-")[0] == group][-1]
        self.until(lambda: ended.exitcode is not None, f"the end of {group}")
        return self.start(group, fault, env=env, **{**self.heal_options, **options})

    def await_rejoin(self, *groups: str, within_s: float = RUN_S_MAX) -> None:
        """Returns once the newest incarnation of each of these groups is a member; then the loops hurry."""
        for group in groups:
            pid = [process.pid for name, process in self.trainers.items() if name.split("-")[0] == group][-1]
            self.wait_for(schema.Rejoined, within_s, group=group, pid=pid)
        self.hurry()

    def lingering(self, delay: float) -> dict[str, Any]:
        """Options of a loop that takes its time over each microbatch until `hurry`."""
        return {"delay": delay, "hurry": str(self.folder / "hurry")}

    def hurry(self) -> None:
        """From now on the loops do not linger over a microbatch."""
        (self.folder / "hurry").touch()

    # ------------------------------------------------------------ looking

    def output(self, name: str) -> Path:
        """The file that a trainer (and its manager) prints to."""
        return self.folder / f"{name}.out"

    def said(self, name: str) -> str:
        """What it has printed so far."""
        path = self.output(name)
        return path.read_text(errors="replace") if path.exists() else ""

    def trace(self, name: str) -> Traced:
        """A trainer's own account so far."""
        return read_trace(self.folder / f"trace-{name}")

    def events(self) -> list[schema.Event]:
        """All events so far, in order."""
        try:
            return read_run(self.folder).events
        except RunFolderError:
            return []

    def until(self, holds: Callable[[], bool], what: str, within_s: float = RUN_S_MAX) -> None:
        """Returns once `holds()`; fails after `within_s` seconds."""
        end = time.monotonic() + within_s
        while not holds():
            assert time.monotonic() < end, f"not within {within_s:g} s: {what}"
            time.sleep(POLL_S)

    def wait_for(self, kind: type[T], within_s: float = RUN_S_MAX, **fields: Any) -> T:
        """The first event of this kind with these fields, as soon as it is there."""
        found: list[T] = []

        def there() -> bool:
            found.extend(
                e for e in self.events() if isinstance(e, kind) and all(getattr(e, n) == v for n, v in fields.items())
            )
            return bool(found)

        self.until(there, f"{kind.__name__} {fields}", within_s)
        return found[0]

    def manager_pid(self, group: str) -> int:
        """The pid of the group's (newest) manager."""
        pids = [e.pid for e in self.events() if e.process == f"manager {group}"]
        assert pids, f"no manager of {group} has written an event"
        return pids[-1]

    def wait(self, *groups: str, within_s: float = RUN_S_MAX) -> dict[str, int | None]:
        """Exit codes of these trainers (all if none is named), once they have ended; negative for a signal."""
        names = groups or tuple(self.trainers)
        self.until(
            lambda: all(self._code(name) is not None for name in names), f"the end of {', '.join(names)}", within_s
        )
        return {name: self._code(name) for name in names}

    def _code(self, name: str) -> int | None:
        if name in self.launchers:
            return self.launchers[name].poll()
        return self.trainers[name].exitcode

    def left_over(self, lighthouses: bool = False) -> list[str]:
        """Processes of this job that live: those we started by pid, their children by environment."""
        mark = f"RUN_OF_TEST={self.folder}\0".encode()
        spared = set() if lighthouses else {child.pid for child in self.lighthouses}
        alive = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                mine = process.pid in self.started or mark in Path(f"/proc/{process.pid}/environ").read_bytes()
                if mine and process.pid not in spared and process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(f"{process.pid} {' '.join(process.cmdline())[-120:]}")
        return alive

    # ------------------------------------------------------------ ending

    def finish(self, within_s: float = RUN_S_MAX) -> Facts:
        """Waits for all trainers, ends the lighthouses in order, and asserts that no process is left; the facts."""
        names = (*self.trainers, *self.launchers)
        codes = self.wait(*names, within_s=within_s) if names else {}
        if any(child.poll() is None for child in self.lighthouses):  # managers may have something to say to one yet
            self.until(lambda: not self.left_over(), "the managers have ended", END_S_MAX)
        for child in self.lighthouses:
            if child.poll() is None:
                child.send_signal(signal.SIGTERM)
        ends = [child.wait(timeout=RUN_S_MAX) for child in self.lighthouses]
        assert all(code in (0, -signal.SIGKILL) for code in ends), f"a lighthouse ended with {ends}"
        self.until(lambda: not self.left_over(lighthouses=True), "nothing is left running", END_S_MAX)
        log = read_run(self.folder)
        traces = {name: read_trace(self.folder / f"trace-{name}") for name in names}
        traces |= {path.name.removeprefix("trace-"): read_trace(path) for path in self.folder.glob("trace-*-again")}
        pids = {name: process.pid or 0 for name, process in self.trainers.items()}
        return Facts(log.events, log.torn, codes, traces, {name: self.said(name) for name in names}, pids)

    def end(self) -> None:
        """Kills whatever is left of the job."""
        for text in self.left_over(lighthouses=True):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(text.split()[0]), signal.SIGKILL)
        for child in (*self.lighthouses, *self.launchers.values()):
            child.wait(timeout=END_S_MAX)
        for process in self.trainers.values():
            process.join(END_S_MAX)

    def printed(self) -> str:
        """All outputs, for a failing test."""
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-6000:]}" for path in sorted(self.folder.glob("*.out"))
        )

    def told(self) -> str:
        """All events but the commits, for a failing test."""
        kept = [event for event in self.events() if not isinstance(event, schema.Committed)]
        return "\n".join(line(event) for event in kept[-200:])


def run_gold(folder: Path, options: dict[str, Any]) -> Gold:
    """The plain loop in a process of its own, under the same circumstances as a trainer."""
    path = folder / "trace-gold"
    child = _processes.Process(
        target=_trainer,
        args=({"loop": "gold", **options, "trace": str(path)}, dict(os.environ), str(folder / "gold.out")),
    )
    child.start()
    child.join(RUN_S_MAX)
    assert child.exitcode == 0, (folder / "gold.out").read_text()
    return Gold(read_trace(path))


def _trainer(options: dict[str, Any], environment: dict[str, str], output: str) -> None:
    """The forked process, made to look like one that Python has just started with a script."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    import loops

    code = 0
    try:
        loops.run(options)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]  # multiprocessing would print it itself
        code = 1
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def names(count: int) -> list[str]:
    return [f"g{i}" for i in range(count)]


def only(group: str, groups: Iterable[str]) -> set[str]:
    return set(groups) - {group}
