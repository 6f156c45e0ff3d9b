"""Row 31: memory runs out, as an error in one rank or by the kernel's kill. It is called by its name; with
--dynamic-batch-size the run goes on in smaller micro-batches, the same samples in the same steps, losses equal to 1e-5."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from faults.poison import events_of
from faults.with_faults import command, environment, fleetune_with
from journeys.journey import SMALL, fleetune, losses, rows_of, samples, write_rows

WORDS = [*SMALL, "--data", "rows.jsonl", "--precision", "fp32", "--lora-dropout", "0.1", "--checkpoint-every", "3"]
#: Enough for the run itself; what the fault takes comes on top.
LIMIT_BYTES = 1_800_000_000


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    folder = tmp_path_factory.mktemp("row-31")
    write_rows(folder / "rows.jsonl")
    done = fleetune("train", "--model", tiny_llama, *WORDS, "--micro-batch-size", "1", "--run", "golden", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def check_equal(place: Path, run: str) -> None:
    assert samples(place / run) == samples(place / "golden")
    mine, theirs = ([float.fromhex(loss) for loss in losses(place / name)] for name in (run, "golden"))
    assert mine == pytest.approx(theirs, rel=1e-5)
    verified = fleetune("verify", run, "--against", "golden", cwd=place)
    assert verified.returncode == 0 and "lost 0, repeated 0" in verified.stdout


@pytest.mark.claim(
    "H27",
    command="fleetune train --dynamic-batch-size",
    seen=("after running out of memory the step is taken in smaller micro-batches, with the losses of the undisturbed run"),
)
@pytest.mark.long
def test_an_error_before_the_ranks_have_talked_is_undone_in_place(place: Path, tiny_llama: Path):
    words = ["train", "--model", tiny_llama, *WORDS, "--micro-batch-size", "2", "--gpus", "2", "--dynamic-batch-size"]
    faults = [{"kind": "no_memory", "rank": 1, "sequences": 1}]
    done = fleetune_with(faults, *words, "--run", "in-place", cwd=place)
    assert done.returncode == 0, done.stderr
    (told,) = events_of(place / "in-place", "out_of_memory")
    assert told["step"] == 1 and told["micro_batch_size"] == 1 and told["cause"].startswith("rank 1 (node 0): MemoryError")
    assert not events_of(place / "in-place", "failure")
    ledger = rows_of(place / "in-place" / "ledger.jsonl")
    assert [row["step"] for row in ledger] == list(range(1, len(ledger) + 1)), "no step was made twice"
    check_equal(place, "in-place")


def sizes_tried(run: Path) -> list[int]:
    return [row["micro_batch_size"] for row in events_of(run, "rehearsal")]


@pytest.mark.claim(
    "H27",
    command="fleetune train --dynamic-batch-size",
    seen="before the first step the micro-batch grows to what fits; the losses are those of that size given",
)
@pytest.mark.long
@pytest.mark.parametrize(("limit", "tried", "taken"), [(4, [1, 2, 4], 4), (2, [1, 2, 4, 2], 2)], ids=["all fits", "two fit"])
def test_at_the_start_the_micro_batch_grows_to_what_fits(
    place: Path, tiny_llama: Path, limit: int, tried: list[int], taken: int
):
    # Sequences this long make a micro-batch of one by default: the tokens of a default micro-batch are one sequence's.
    words = ["train", "--model", tiny_llama, *WORDS, "--sequence-length", "1024", "--no-packing", "--dynamic-batch-size"]
    run = f"grown-{limit}"
    done = fleetune_with([{"kind": "no_memory", "sequences": limit}], *words, "--run", run, cwd=place)
    assert done.returncode == 0, done.stderr
    assert sizes_tried(place / run) == tried
    assert len(events_of(place / run, "out_of_memory")) == (limit < 4) and not events_of(place / run, "failure")
    plain = fleetune("train", *words[1:-1], "--micro-batch-size", str(taken), "--run", f"plain-{limit}", cwd=place)
    assert plain.returncode == 0, plain.stderr
    assert losses(place / run) == losses(place / f"plain-{limit}"), "what was tried has left a trace in the numbers"


@pytest.mark.long
def test_the_longest_row_is_tried_before_the_first_step_wherever_it_comes(tiny_llama: Path, tmp_path: Path):
    write_rows(tmp_path / "rows.jsonl", 40)
    with open(tmp_path / "rows.jsonl", "a", encoding="utf-8") as file:
        file.write('{"question": "How many?", "answer": "' + "many clips, " * 28 + '"}\n')
    words = ["train", "--model", tiny_llama, *WORDS, "--sequence-length", "128", "--no-packing", "--micro-batch-size", "4"]
    faults = [{"kind": "no_memory", "tokens": 160}]
    done = fleetune_with(faults, *words, "--dynamic-batch-size", "--run", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (told,) = events_of(tmp_path / "run", "out_of_memory")
    assert told["step"] == 1 and told["micro_batch_size"] == 2
    first = next(row for row in rows_of(tmp_path / "run" / "metrics.jsonl") if "loss" in row)
    assert told["time"] < first["time"], "it was found in the middle of training"


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A control group of version 1 with a memory limit; whoever writes its pid into `tasks` is in it, with its children."""
    group = Path(f"/sys/fs/cgroup/memory/fleetune-test-{os.getpid()}")
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
    except OSError as error:
        pytest.skip(f"no memory control group of version 1 can be made here: {error}")
    yield group
    group.rmdir()


@pytest.mark.long
def test_a_kill_by_the_kernel_is_called_so_and_the_next_attempt_takes_half(place: Path, tiny_llama: Path, memory_group: Path):
    words = ["train", "--model", tiny_llama, *WORDS, "--micro-batch-size", "2", "--gpus", "2", "--dynamic-batch-size"]
    faults = [{"kind": "eat_memory", "rank": 1, "sequences": 1}]
    enter = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(memory_group / "tasks")]
    done = subprocess.run(
        [*enter, *command(*words, "--run", "killed")],
        cwd=place,
        env=environment(faults),
        text=True,
        capture_output=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    (failure,) = events_of(place / "killed", "failure")
    assert failure["rank"] == 1 and "SIGKILL" in failure["cause"]
    (told,) = events_of(place / "killed", "out_of_memory")
    assert told["cause"] == "the kernel killed rank 1 for lack of memory" and told["micro_batch_size"] == 1
    check_equal(place, "killed")


@pytest.mark.long
def test_where_nothing_is_left_to_try_the_person_is_told_what_to_do(place: Path, tiny_llama: Path):
    words = ["train", "--model", tiny_llama, *WORDS, "--micro-batch-size", "1", "--dynamic-batch-size", "--run", "never"]
    done = fleetune_with([{"kind": "no_memory", "sequences": 0}], *words, cwd=place)
    assert done.returncode == 2
    assert "not even with gradient checkpointing" in done.stderr and "--sequence-length" in done.stderr
    assert "Traceback" not in done.stderr
    assert [row["gradient_checkpointing"] for row in events_of(place / "never", "out_of_memory")] == [True]


@pytest.mark.long
def test_without_the_flag_the_cause_is_named(place: Path, tiny_llama: Path):
    words = ["train", "--model", tiny_llama, *WORDS, "--micro-batch-size", "2", "--run", "plain"]
    done = fleetune_with([{"kind": "no_memory", "sequences": 1}], *words, cwd=place)
    assert done.returncode == 2, "every restart ends in the same place: that is for the person to mend"
    assert all(row["cause"].startswith("out of memory: MemoryError") for row in events_of(place / "plain", "failure"))
    assert "--dynamic-batch-size" in done.stderr
