"""What outlives an attempt: the tie to this process, the process with the imports, the store in which ranks find each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import final

from fleetune.launch.lifeline import Lifeline
from fleetune.launch.liveness import Liveness
from fleetune.launch.nursery import Nursery
from fleetune.launch.processes import Surroundings
from fleetune.launch.request import Launch, device_variables, environment_of
from fleetune.launch.size import Size
from fleetune.launch.team import CrewPlace, Store, Team, start_crew, start_solo
from fleetune.spec.run_folder import RunFolder


@final
class Ground:
    """Makes teams of the size that the run has now. warn: gets a line for the person where the threads are too many."""

    def __init__(self, folder: RunFolder, launch: Launch, size: Size, warn: Callable[[str], None]) -> None:
        self._folder, self._launch, self._size, self._warn = folder, launch, size, warn
        self._lifeline = Lifeline()
        self._nursery: Nursery | None = None
        self._store: Store | None = None
        self._told: str | None = None

    @property
    def surroundings(self) -> Surroundings:
        """Of every process of the run at its present size: the share of threads depends on it."""
        environment, warning = environment_of(dataclasses.replace(self._launch, num_processes=self._size.num_processes))
        if warning is not None and warning != self._told:
            self._told = warning
            self._warn(f"warning: {warning}")
        return Surroundings(environment, self._lifeline)

    @property
    def _has_agent(self) -> bool:
        return self._size.num_processes > 1 or self._launch.num_nodes > 1

    def ready(self) -> None:
        """See to it that the process with the imports lives, and the store where several ranks will need one.

        Libraries read their number of threads when they are imported: another one needs another process.
        """
        surroundings, commands = self.surroundings, self._launch.commands
        nursery = self._nursery
        if nursery is None or not nursery.lives or nursery.surroundings.environment != surroundings.environment:
            if nursery is not None:
                nursery.close()
            several = (commands.agent,) if self._has_agent else ()
            self._nursery = Nursery(self._folder, (*several, *commands.preload), surroundings)
        if (
            self._has_agent
            and self._launch.num_nodes == 1
            and (self._store is None or self._store.process.exit_code is not None)
        ):
            if self._store is not None:
                self._store.close()
            self._store = Store(commands, self._folder, surroundings)

    def endpoint(self, beat: Callable[[], None], insisted: Callable[[], bool]) -> str | None:
        """Where the store is, empty where none is needed; None where it has ended instead of telling its address."""
        if self._size.num_processes == 1:
            return ""
        assert self._store is not None
        while self._store.endpoint is None:
            if self._store.process.exit_code is not None or insisted():
                return None
            beat()
        return self._store.endpoint

    def start(self, attempt: int, store: str) -> Team:
        """The team of an attempt, of the present size, on the devices that are in use."""
        assert self._nursery is not None
        launch, number = self._launch, self._size.num_processes
        liveness = Liveness(launch.patience.hang_s)
        is_whole = self._size.devices == tuple(range(number))
        on = {} if launch.device != "cuda" or is_whole else device_variables(self._size.devices, self.surroundings.environment)
        if not self._has_agent:
            return start_solo(self._nursery, launch.commands, self._folder, attempt, liveness, variables=on)
        return start_crew(
            self._nursery,
            launch.commands,
            self._folder,
            attempt,
            liveness,
            place=CrewPlace(range(launch.first_rank, launch.first_rank + number), launch.node, launch.num_nodes),
            store=store,
            variables=on,
        )

    def close(self) -> None:
        """Nothing that was started here outlives this."""
        for part in (self._nursery, self._store):
            if part is not None:
                part.close()
        self._lifeline.close()
