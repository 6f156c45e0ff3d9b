"""The store in which the ranks of all machines find each other: on node 0, on the address by which the others know it."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from fleetune.launch.ending import describe_exit, first_error
from fleetune.launch.processes import Surroundings
from fleetune.launch.request import Commands
from fleetune.launch.team import Store
from fleetune.spec.run_folder import RunFolder


@final
class FleetStore:
    """It outlives every attempt, and is started again where it has ended. port: None for any free one."""

    def __init__(
        self, commands: Commands, folder: RunFolder, surroundings: Surroundings, *, address: str, port: int | None
    ) -> None:
        self._commands, self._folder, self._surroundings = commands, folder, surroundings
        self._address, self._port = address, port or 0
        self._store: Store | None = None

    def start(self) -> None:
        if self._store is not None:
            if self._store.process.exit_code is None:
                return
            self._store.close()
        self._store = Store(self._commands, self._folder, self._surroundings, host=self._address, port=self._port)

    def endpoint(self, beat: Callable[[], None], insisted: Callable[[], bool]) -> str | None:
        """`host:port`; None where its process ended instead of telling it, or somebody insists on an end."""
        assert self._store is not None
        while self._store.endpoint is None:
            if self._store.process.exit_code is not None or insisted():
                return None
            beat()
        return self._store.endpoint

    def failure(self) -> str:
        code = self._store.process.exit_code if self._store is not None else None
        why = first_error(self._folder.logs / "store.log") or describe_exit(code)
        return f"the store on {self._address} failed: {why}"

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
