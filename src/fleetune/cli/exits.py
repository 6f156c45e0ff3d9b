"""From whatever a command raises to one clear line and an exit code."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress

from fleetune.spec.errors import (
    EXIT_CHECK_FAILED,
    EXIT_CRASH,
    EXIT_DONE,
    EXIT_PREEMPTED,
    EXIT_USER,
    CheckFailed,
    Preempted,
    UserError,
)

#: Ctrl-C where nothing is saved: the shells' own number for it.
EXIT_INTERRUPTED = 130

#: Faults of a place, and not of the program: full, read-only, forbidden, taken by something else.
_MENDABLE = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.EFBIG,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENAMETOOLONG,
)

#: Packages that fleetune needs and a login node may lack.
_INSTALL = {
    "torch": "torch",
    "transformers": "transformers",
    "peft": "peft",
    "tensorboard": "'fleetune[track]'",
    "wandb": "'fleetune[track]'",
}


def guarded(command: Callable[[], int]) -> int:
    """Run a command; returns its exit code, or that of what it raised after saying it on standard error."""
    try:
        code = command()
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        leave_stdout()
        return EXIT_DONE  # whoever read our output had enough of it
    except KeyboardInterrupt:
        say_error("interrupted")
        return EXIT_INTERRUPTED
    except UserError as error:
        for problem in error.problems:
            say_error(problem)
        return EXIT_USER
    except CheckFailed as error:
        say_error(str(error))
        return EXIT_CHECK_FAILED
    except Preempted as error:
        _say(str(error))
        return EXIT_PREEMPTED
    except ModuleNotFoundError as error:
        return _absent_module(error)
    except OSError as error:
        return _system_error(error)
    except MemoryError as error:
        return _unexpected(error, "the memory of this machine is used up")
    except Exception as error:
        return _unexpected(error, f"{type(error).__name__}: {error}".rstrip(": "))


def say_error(text: str) -> None:
    """One problem on one line of standard error, without secrets, and without characters that steer a terminal."""
    from fleetune.monitor.logs import redact

    line = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in redact(text))
    _say(f"error: {line}")


def _say(text: str) -> None:
    with suppress(OSError, ValueError):  # nobody may read any more
        print(text, file=sys.stderr, flush=True)


def _absent_module(error: ModuleNotFoundError) -> int:
    name = (error.name or "").partition(".")[0]
    if name not in _INSTALL:
        return _unexpected(error, str(error))
    say_error(f"this needs the package {name}, which is not installed: pip install {_INSTALL[name]}")
    return EXIT_USER


def _system_error(error: OSError) -> int:
    """A full or read-only disk, missing rights: the person's to mend. Anything else is unexpected."""
    if error.errno in _MENDABLE:
        try:
            sys.stdout.flush()
        except OSError:
            leave_stdout()  # it was our output that had no place
        where = f"{error.filename}: " if error.filename is not None else ""
        say_error(f"{where}{error.strerror}: make room or give another place")
        return EXIT_USER
    return _unexpected(error, f"{type(error).__name__}: {error}")


def _unexpected(error: BaseException, what: str) -> int:
    """One line for the person; the whole traceback goes to a file of theirs alone."""
    from fleetune.monitor.logs import redact

    text = redact("".join(traceback.format_exception(error)))
    try:
        descriptor, path = tempfile.mkstemp(prefix="fleetune-error-", suffix=".log")
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        where = f"the whole traceback is in {path}"
    except OSError:
        _say(text)
        where = "the whole traceback stands above"
    say_error(f"{what.splitlines()[0]} (unexpected, so a fault of fleetune or of a library): {where}")
    return EXIT_CRASH


def leave_stdout() -> None:
    """Python flushes standard output once more at its end, and would complain again."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
