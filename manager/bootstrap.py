"""What a rank's process runs first: it serves the store of the group's own collectives (rank 0), then it is the script.

`python -m lightkeeper.manager.bootstrap STORE SCRIPT ARGS`, or `... STORE -m MODULE ARGS`; STORE is the descriptor of a
listening socket, or "-". The script cannot tell it from a plain `python SCRIPT ARGS`: it is `__main__`, its folder
leads `sys.path`, and a traceback begins in it.

With `wait DESCRIPTOR MODULES` for STORE it first imports these modules, when the machine has nothing else to do, and
waits at a socket until there is a rank to be: `warm.py` is the other end.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import runpy
import signal
import socket
import sys
import threading
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType
from typing import Any

from lightkeeper.manager.owngroups import set_default
from lightkeeper.manager.settings import read_settings

PING, IMPORTS, READY, BECOME = b"?i!b"  # first bytes of what is said at the socket of a process that waits

_served: list[Any] = []  # the store lives as long as this process


def run(store: int | None, command: list[str]) -> None:
    """Serves the store, if this rank is the one that does, and runs the script.

    Args:
        store: descriptor of the socket that listens at ``MASTER_PORT``.
        command: the script and its arguments, or ``-m``, a module and its arguments.

    Raises:
        BaseException: what ended the script; unless it is a `SystemExit`, it has been shown already.
    """
    try:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            set_default(read_settings().timeouts.collective_timeout_s)
        if store is not None:
            serve_store(store)
        if command[0] == "-m":
            _run_module(command[1:])
        else:
            _run_script(command)
    except SystemExit:
        raise
    except BaseException as error:
        trace = _without_this_file(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.excepthook = _silent  # Python ends as it always does after an exception: its code, its exit handlers
        raise


def serve_store(descriptor: int) -> None:
    """The store over which the ranks of this group find each other; it dies with this process, and so with the group.

    The ranks are told to be clients (``TORCHELASTIC_USE_AGENT_STORE``): who calls before it is here waits in the
    socket's queue.
    """
    from torch.distributed import TCPStore

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    _served.append(TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor))


def wait(control: socket.socket, modules: list[str]) -> int | None:
    """Imports modules and waits until there is a rank to be; then this process has that rank's environment.

    The imports run in a thread that gets what nobody else wants of processor and disk. Only a privileged process could
    take that back, so the main thread, which will train, never has it; nor may any other thread that is left.

    Args:
        control: the socket at which the launcher pings, and says which rank to be.
        modules: what to import.

    Returns:
        The descriptor for `serve_store`, if this rank is the one that does.
    """
    if "torch" in modules:
        _import("numpy")  # here, for its threads stay
    thread = threading.Thread(target=_import_idly, args=(modules,), name="imports")
    thread.start()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 16, 4)
        if not message:
            os._exit(0)  # the launcher is gone
        if message[0] == BECOME:
            break
        control.send(bytes((IMPORTS if thread.is_alive() or _idle_threads() else READY, message[1])))
    with open(descriptors[0], "rb") as file:
        environment = json.load(file)
    control.close()
    store = descriptors[1] if message[1] else None
    if message[2]:
        for stream, descriptor in zip((1, 2), descriptors[-2:], strict=True):
            os.dup2(descriptor, stream)
            os.close(descriptor)
    importlib.invalidate_caches()
    os.environ.clear()
    os.environ.update(environment)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # as in every rank before its `Manager` takes them
    return store


def _import_idly(modules: list[str]) -> None:
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    try:
        for name in modules:
            _import(name)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)


def _import(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name or name != "numpy":
            raise


def _idle_threads() -> list[int]:
    """Threads that would train as the imports ran; a thread of the imports that is about to end counts too."""
    idle = []
    for name in os.listdir("/proc/self/task"):
        try:
            if os.sched_getscheduler(int(name)) == os.SCHED_IDLE:
                idle.append(int(name))
        except ProcessLookupError:
            continue
    return idle


def _run_script(command: list[str]) -> None:
    sys.argv = command
    path = os.path.abspath(command[0])
    if not sys.flags.safe_path:
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    with io.open_code(path) as file:
        source = file.read()
    main = _new_main()
    main.__file__, main.__loader__ = path, SourceFileLoader("__main__", path)
    main.__dict__["__cached__"] = None
    exec(compile(source, path, "exec"), main.__dict__)


def _run_module(command: list[str]) -> None:
    sys.argv = command
    if not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())
    _new_main()
    runpy._run_module_as_main(command[0])  # type: ignore[attr-defined]  # what `python -m` itself calls


def _new_main() -> ModuleType:
    main = ModuleType("__main__")
    main.__dict__.update(__builtins__=sys.modules["builtins"], __annotations__={}, __spec__=None)
    sys.modules["__main__"] = main
    return main


def _without_this_file(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def _silent(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    pass


def main() -> None:
    """Runs what the command line says."""
    if not sys.flags.safe_path:
        del sys.path[0]  # the folder in which `python -m` was typed has no say in what a script imports
    store, *command = sys.argv[1:]
    if store == "wait":
        descriptor, modules, *command = command
        run(wait(socket.socket(fileno=int(descriptor)), modules.split(",")), command)
    else:
        run(None if store == "-" else int(store), command)


if __name__ == "__main__":
    main()
