from __future__ import annotations

import subprocess
import sys


def test_launching_needs_no_torch_and_none_of_the_heavy_libraries() -> None:
    code = (
        "import sys; import fleetune.launch.supervisor, fleetune.launch.devices, fleetune.launch.child; "
        "print([m for m in ('torch', 'numpy', 'transformers', 'pydantic', 'psutil') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
