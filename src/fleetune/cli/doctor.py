"""`fleetune doctor`: can this machine, or these machines together, train?"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fleetune.cli.flags import Flags, switch
from fleetune.cli.words import table
from fleetune.launch import checks
from fleetune.launch.checks import Finding, gigabytes, speed
from fleetune.launch.facts import disk_facts, machine_facts
from fleetune.launch.fleet import Fleet
from fleetune.launch.meeting import meet
from fleetune.launch.shares import common_device
from fleetune.launch.survey import Survey, survey_fleet
from fleetune.models.cache import cache_folder
from fleetune.spec.cluster_file import choose_cluster
from fleetune.spec.errors import EXIT_CHECK_FAILED, EXIT_DONE, UserError
from fleetune.spec.given import environment_given
from fleetune.spec.read import resolve

ABOUT = """Look whether this machine, or several together (--hosts, --cluster), can train: versions, devices, memory, disks,
and every way between two machines, with a sum over all of them as training makes it. Nothing is loaded and nothing
stays. Exit code 3 where something will not work."""

FIELDS = ("nodes", "hosts", "cluster", "on", "ssh_config", "device", "allow_public_address", "run")
_LEVELS = ("error", "warning", "note")


def flags() -> Flags:
    return Flags(
        "doctor",
        ABOUT,
        usage="[--hosts A,B] [FLAGS]",
        fields=FIELDS,
        own=[switch("--json", "Print everything that was found as JSON.")],
    )


def run(words: Sequence[str]) -> int:
    typed = flags().read(words)
    if typed is None:
        return EXIT_DONE
    if typed.words:
        raise UserError(f"{' '.join(typed.words)}: machines are named with --hosts a,b")
    given = environment_given(os.environ)
    spec = resolve(flags=typed.source(), environment=given, file=None, earlier=None, preset=None, required=()).spec
    folder = Path(spec.output.run or "runs").absolute()
    cluster = choose_cluster(spec.machines, Path.cwd())
    asked = spec.machines
    fleet = None
    if cluster is not None:
        fleet = Fleet.connect(
            cluster, ssh_config=asked.ssh_config, on=asked.on, allow_public_address=asked.allow_public_address
        )
    if fleet is None:
        survey = look_here(folder)
    else:
        try:
            survey = survey_fleet(fleet, folder)
            if not survey.errors:
                survey.meeting = meet(fleet, common_device(fleet, spec.layout.device))
                survey.findings += survey.meeting.findings()
        finally:
            fleet.close()
    if typed.own["json"]:
        print(json.dumps(as_json(survey), ensure_ascii=False))
    else:
        show(survey)
    return EXIT_CHECK_FAILED if survey.errors else EXIT_DONE


def look_here(folder: Path) -> Survey:
    """This machine alone."""
    facts = machine_facts()
    facts["disks"] = [disk_facts(place) for place in (folder, cache_folder())]
    found = Survey(machines={facts["host"]: facts})
    found.findings += checks.check_machine(facts["host"], facts)
    found.findings += checks.check_disks(facts["host"], facts["disks"])
    return found


def as_json(survey: Survey) -> dict[str, Any]:
    return {
        "ok": not survey.errors,
        "findings": [asdict(finding) for finding in survey.findings],
        "machines": survey.machines,
        "pairs": survey.pairs,
        "all_reduce": survey.meeting.to_json() if survey.meeting is not None else None,
    }


def show(survey: Survey) -> None:
    """What was found, for a person, on standard output."""
    for host, facts in survey.machines.items():
        print(host)
        for line in table(described(facts)):
            print(f"  {line}")
    for way, measured in survey.pairs.items():
        if "error" not in measured:
            print(f"{way}: {speed(measured['bytes_per_s'])}, round trip {1000 * measured['rtt_s']:.2f} ms")
    if survey.meeting is not None and survey.meeting.seconds is not None:
        print(survey.meeting.line())
    for finding in sorted(survey.findings, key=lambda finding: _LEVELS.index(finding.level)):
        print(f"{finding.level}: {finding.line()}")
    print(verdict(survey.findings, len(survey.machines)))


def described(facts: dict[str, Any]) -> list[tuple[str, str]]:
    packages = facts["packages"]
    gpus = [f"{gpu['name']} {gigabytes(gpu['memory_bytes'])}" for gpu in facts["gpus"]]
    addresses = [f"{entry['name']} {entry['addresses'][0]}" for entry in facts["interfaces"]]
    rows = [
        ("system", f"{facts['distribution']}, {facts['system']}"),
        ("software", ", ".join(f"{name} {version}" for name, version in {"Python": facts["python"], **packages}.items())),
        ("CUDA", f"{facts['cuda'] or 'none'} in torch, driver {facts['driver'] or 'none'}"),
        ("GPUs", ", ".join(gpus) or f"{facts['visible_gpus'] or 'none'}"),
        ("CPU", f"{facts['cores']} cores"),
        ("memory", f"{gigabytes(facts['available_bytes'])} free of {gigabytes(facts['memory_bytes'])}"),
        ("network", ", ".join(addresses)),
    ]
    if "shm_bytes" in facts:
        rows.append(("/dev/shm", f"{gigabytes(facts['shm_free_bytes'])} free of {gigabytes(facts['shm_bytes'])}"))
    for disk in facts.get("disks", ()):
        rows.append(("disk", f"{disk['folder']}: {gigabytes(disk['free_bytes'])} free, {disk['type']}"))
    if "clock_skew_s" in facts:
        rows.append(("clock", f"{facts['clock_skew_s']:+.3f} s from this machine's"))
    return rows


def verdict(findings: Sequence[Finding], num_machines: int) -> str:
    errors = sum(finding.level == "error" for finding in findings)
    warnings = sum(finding.level == "warning" for finding in findings)
    what = "this machine" if num_machines == 1 else f"these {num_machines} machines together"
    if errors:
        return f"{what} cannot train before {errors} error{'s are' if errors > 1 else ' is'} mended"
    return f"{what} can train" + (f" ({warnings} warning{'s' if warnings > 1 else ''})" if warnings else "")
