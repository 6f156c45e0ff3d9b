"""The process that has imported what the workers need, and forks them: a restart costs a fork instead of seconds of imports.

It starts no thread, no CUDA and no process group, and outlives every attempt. Requests come over a socket, each one JSON line
with, where the new process reports to the supervisor, the descriptor of that pipe. What happens is told on a pipe of its own.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from fleetune.launch import lifeline, pulse
from fleetune.launch.child import Call, parse
from fleetune.launch.processes import open_log

_MAX_READ = 1 << 16


def main(arguments: list[str]) -> int:
    """Serve until the supervisor closes the socket. The run folder among the arguments only serves to name this process."""
    parser = argparse.ArgumentParser(prog="fleetune.launch.fork_server")
    parser.add_argument("folder")
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--report-fd", type=int, required=True)
    options = parser.parse_args(arguments)
    control = socket.socket(fileno=options.control_fd)
    wake, waking = os.pipe()
    for end in (wake, waking):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
    gc.collect()
    gc.freeze()  # the collector would otherwise write to, and so copy, every page that the forked processes share
    running: dict[int, int] = {}
    ended: dict[int, int] = {}
    pending, pipes = b"", list[int]()
    private = (control.fileno(), wake, waking, options.report_fd)
    while True:
        ready, _, _ = select.select([control.fileno(), wake], [], [])
        if control.fileno() in ready:
            data, came, _, _ = socket.recv_fds(control, _MAX_READ, 16)
            if not data:
                return 0
            pipes += came
            *lines, pending = (pending + data).split(b"\n")
            for request in map(json.loads, lines):
                if "reap" in request:
                    _reap(ended.pop(int(request["reap"]), None))
                    continue
                pipe = pipes.pop(0) if request["reports"] else None
                pid = _fork(request, pipe, private)
                running[int(request["number"])] = pid
                _tell(options.report_fd, {"forked": request["number"], "pid": pid})
                if pipe is not None:
                    os.close(pipe)
        if wake in ready:
            with suppress(BlockingIOError):
                os.read(wake, 4096)
        for number, pid in [*running.items()]:
            code = _exit_code(pid)
            if code is not None:
                ended[number] = running.pop(number)
                _tell(options.report_fd, {"ended": number, "code": code})


def _tell(report_fd: int, row: dict[str, Any]) -> None:
    os.write(report_fd, json.dumps(row).encode() + b"\n")


def _exit_code(pid: int) -> int | None:
    """How a child ended (negative: by that signal), None while it runs. It stays a zombie until the supervisor has let go of
    its number, which must not come to mean another process before."""
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _reap(pid: int | None) -> None:
    if pid is not None:
        os.waitpid(pid, 0)


def _fork(request: dict[str, Any], pipe: int | None, private: tuple[int, ...]) -> int:
    """The number of a new process, once it leads a process group of its own, which can then be killed whole."""
    parent = os.getpid()
    ready, is_ready = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setsid()
            os.close(ready)
            os.close(is_ready)
            code = _become(request, pipe, private, parent)
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):
                    stream.flush()
            os._exit(code)
    os.close(is_ready)
    os.read(ready, 1)  # the end of the file: the child has closed its copy, or has died
    os.close(ready)
    return pid


def _become(request: dict[str, Any], pipe: int | None, private: tuple[int, ...], parent: int) -> int:
    """In the new process: its own log, its tie to the supervisor, its variables; then the module's `main`."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for descriptor in private:
        os.close(descriptor)
    log = open_log(Path(request["log"]))
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    call = parse(request["argv"])
    os.environ.update(request["variables"])
    if pipe is not None:
        os.environ[pulse.VARIABLE] = str(pipe)
    if must_not_fork():
        _start_afresh(call, pipe)
    lifeline.watch(with_thread=not call.single_threaded)
    if os.getppid() != parent:
        return 1  # it died before the kernel was asked to tell
    return int(importlib.import_module(call.module).main([*call.arguments]))


def must_not_fork() -> bool:
    """Whether a forked process could not use what this one has started: CUDA (an import may have done it), or macOS's own."""
    torch = sys.modules.get("torch")
    return sys.platform == "darwin" or (torch is not None and torch.cuda.is_initialized())


def _start_afresh(call: Call, pipe: int | None) -> None:
    """Replace this process by one that imports everything itself, which takes longer."""
    print("started afresh, which takes longer: the process that has the imports cannot be forked", file=sys.stderr, flush=True)
    for descriptor in (pipe, int(os.environ[lifeline.VARIABLE])):
        if descriptor is not None:
            os.set_inheritable(descriptor, True)
    os.execv(sys.executable, [sys.executable, "-m", "fleetune.launch.child", *call.argv()])
