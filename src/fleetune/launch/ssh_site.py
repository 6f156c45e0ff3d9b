"""Nodes that are reached by ssh: the person's own ssh, with their keys, agents and configuration.

What ssh is given for the other side is one line that the login shell there reads. It holds only the interpreter, our module's
name and PYTHONPATH, each quoted; everything else travels as data through the connection. ssh never asks here: where it would
need a password or a decision about a host's key, it fails, and the reason is told.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import final

from fleetune.launch.link import Link
from fleetune.launch.local_site import PipeConnection
from fleetune.launch.site import NODE_MODULE
from fleetune.spec.errors import UserError

#: Seconds until a machine that does not answer is given up, and between two signs of life of the connection itself.
CONNECT_S = 6
ALIVE_S = 5

_OPTIONS = (
    "-T",  # no terminal: it would alter what is sent
    "-a",
    "-x",
    *("-o", "BatchMode=yes"),
    *("-o", f"ConnectTimeout={CONNECT_S}"),
    *("-o", f"ServerAliveInterval={ALIVE_S}"),
    *("-o", "ServerAliveCountMax=3"),
    *("-o", "ClearAllForwardings=yes"),
    *("-o", "PermitLocalCommand=no"),
    *("-o", "EscapeChar=none"),
)

#: What ssh says -> what it means and how to mend it; {host} and {line} are filled in.
_MEANINGS = (
    (
        r"Permission denied",
        "refuses the key: see that `ssh {host} true` works without a question, and mend the key or the user",
    ),
    (r"Host key verification failed", "is not known to ssh, or its key has changed: log in once by hand with `ssh {host}`"),
    (r"REMOTE HOST IDENTIFICATION HAS CHANGED", "has another host key than before: make sure that it is the right machine"),
    (r"Connection refused", "has no ssh server on that port: start sshd there, or mend the port in the ssh configuration"),
    (r"timed out|No route to host|Network is unreachable", "does not answer: check the address, the cable and the firewall"),
    (r"Could not resolve hostname", "has no address: check the spelling, or add it to /etc/hosts or the ssh configuration"),
    (r"Can't open user config file", "cannot be reached, because the ssh configuration cannot be read: mend --ssh-config"),
    (
        r"No such file or directory|not found",
        "has no Python where this machine has it ({python}): install the same environment there",
    ),
    (r"No module named", "lacks a package ({line}): install the same environment there"),
)


@final
class SshSite:
    """Starts a node's process over ssh. config: a file to use instead of the person's own configuration."""

    def __init__(self, config: str | None = None) -> None:
        ssh = shutil.which("ssh")
        if ssh is None:
            raise UserError(
                "the program ssh is not installed here, and other machines are reached by it: install openssh-client"
            )
        if config is not None and not os.access(config, os.R_OK):
            raise UserError(f"ssh_config {config!r} cannot be read: give another file, or leave it out")
        self._begin = [ssh, *(("-F", str(Path(config).absolute())) if config is not None else ())]

    def argv(self, host: str) -> list[str]:
        """The words of one connection. The last one is read by a shell on the other side."""
        words = [sys.executable, "-m", NODE_MODULE]
        path = os.environ.get("PYTHONPATH")
        if path:
            words = ["env", f"PYTHONPATH={path}", *words]
        return [*self._begin, *_OPTIONS, "--", host, "exec " + shlex.join(words)]

    def reach(self, host: str, log: Path) -> SshConnection:
        return SshConnection(host, PipeConnection(self.argv(host), log))

    def address_name(self, host: str) -> str:
        """What ssh's own configuration calls the machine: an alias may stand for an address."""
        argv = [*self._begin, "-G", "--", host]
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=10, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return host
        found = re.search(r"^hostname (\S+)$", done.stdout, re.MULTILINE)
        return found[1] if found else host


@final
class SshConnection:
    """A node behind ssh."""

    def __init__(self, host: str, pipe: PipeConnection) -> None:
        self._host, self._pipe = host, pipe

    @property
    def link(self) -> Link:
        return self._pipe.link

    def failure(self) -> str | None:
        plain = self._pipe.failure()
        if plain is None:
            return None
        said = self._pipe.said()
        for pattern, meaning in _MEANINGS:
            line = next((line for line in said if re.search(pattern, line)), None)
            if line is not None:
                return f"{meaning.format(host=self._host, line=line, python=sys.executable)} (ssh says: {line})"
        if self._pipe.exit_code is None:
            return plain
        return f"the ssh connection ended with code {self._pipe.exit_code}" + (f" ({said[-1]})" if said else "")

    def close(self) -> None:
        self._pipe.close()
