"""`fleetune plan`: what a run would be. Nothing is written or started, and no torch is needed."""

from __future__ import annotations

import json
from collections.abc import Sequence

from fleetune.cli.flags import Flags
from fleetune.cli.intent import Intent, work_out
from fleetune.cli.train import file_of
from fleetune.cli.words import table
from fleetune.planning.explain import explain
from fleetune.spec.declared import declared
from fleetune.spec.errors import EXIT_DONE

ABOUT = """Tell what a run would be: the division of a step, parameters, memory on each rank, and everything that cannot be.

It takes what fleetune train takes. Nothing is written or started; it works on a machine without torch."""


def flags() -> Flags:
    return Flags("plan", ABOUT, usage="[RUN.yaml] --model MODEL [FLAGS]", fields=declared())


def run(words: Sequence[str]) -> int:
    typed = flags().read(words)
    if typed is None:
        return EXIT_DONE
    intent = work_out(typed.source(), file_of(typed.words), is_start=False)
    if intent.spec.output.json_output:
        print(json.dumps({**intent.plan.to_json(), "model": intent.located.source, "settings": settings(intent)}))
    else:
        first, *rest = explain(intent.plan)
        print("\n".join(table([first, ("from", intent.located.source), *rest])))
    return EXIT_DONE


def settings(intent: Intent) -> dict[str, dict[str, object]]:
    """Every field: its value and where it came from."""
    return {name: {"value": value, "origin": intent.resolved.origins[name]} for name, value in intent.spec.flat().items()}
