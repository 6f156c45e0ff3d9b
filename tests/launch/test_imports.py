from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

from fleetune.launch.request import Commands


def test_launching_needs_no_torch_and_none_of_the_heavy_libraries() -> None:
    code = (
        "import sys; import fleetune.launch.supervisor, fleetune.launch.devices, fleetune.launch.child; "
        "print([m for m in ('torch', 'numpy', 'transformers', 'pydantic', 'psutil') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_every_module_that_is_started_or_imported_ahead_of_time_exists() -> None:
    commands = Commands()
    for name in (commands.prepare, commands.worker, commands.agent, commands.store, *commands.preload):
        assert find_spec(name) is not None, name
