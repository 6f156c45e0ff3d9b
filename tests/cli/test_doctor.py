from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fleetune.cli import doctor
from fleetune.cli.main import main
from fleetune.launch.checks import Finding
from fleetune.launch.meeting import Meeting


def test_this_machine_is_described_without_importing_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from fleetune.cli.main import main; code = main(['doctor', '--json', '--on', 'local']); "
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    found = json.loads(done.stdout)
    assert done.returncode == (0 if found["ok"] else 3), done.stderr
    (facts,) = found["machines"].values()
    assert facts["packages"]["torch"] and facts["memory_bytes"] > 1e8 and facts["disks"][0]["folder"] == str(tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


@pytest.mark.claim(
    "H8",
    command="fleetune doctor --hosts a,b",
    seen="bandwidth and round trip of every way between two machines, and a real all-reduce",
)
def test_two_machines_are_measured_and_really_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--hosts", "127.0.0.1,127.0.0.2", "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["pairs"].keys() == {"127.0.0.1 to 127.0.0.2", "127.0.0.2 to 127.0.0.1"}
    assert (
        found["all_reduce"]["seconds"] > 0 and found["all_reduce"]["backend"] == "gloo" and found["all_reduce"]["pairs"] == {}
    )
    (shared,) = [entry for entry in found["findings"] if "share the file system" in entry["text"]]
    assert shared["level"] == "note" and list(tmp_path.iterdir()) == []
    assert all(abs(facts["clock_skew_s"]) < 5 for facts in found["machines"].values())


def test_a_machine_that_cannot_be_reached_is_the_persons_to_mend(capsys) -> None:  # type: ignore[no-untyped-def]
    assert main(["doctor", "--hosts", "127.0.0.1,no-such-host.invalid"]) == 2
    assert "no-such-host.invalid has no address" in capsys.readouterr().err


@pytest.mark.claim(
    "H33",
    command="fleetune doctor --hosts a,b",
    seen="the pair that cannot talk is named, with the cause and a fix",
)
def test_a_pair_that_cannot_sum_is_named_and_what_follows_from_it_is_not() -> None:
    meeting = Meeting(pairs={"a and c": "Connection refused"})
    (finding,) = meeting.findings()
    assert finding.level == "error" and finding.about == "a and c" and "Connection refused" in finding.text and finding.fix


def test_the_verdict_counts_what_is_to_be_mended() -> None:
    error, warning = Finding("error", "a", "x"), Finding("warning", "a", "y")
    assert doctor.verdict([error, warning], 2) == "these 2 machines together cannot train before 1 error is mended"
    assert doctor.verdict([warning], 1) == "this machine can train (1 warning)"
