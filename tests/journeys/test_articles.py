"""What the two articles write, typed as they write it: tiny random models of the same architectures in a local hub cache."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import hub_cache
import tiny
from deepspeed_article import ARTICLE
from journeys.journey import environment_of, fleetune, losses, rows_of, samples, write_rows

#: Whole programs, many times over: too long for every change.
pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
MODELS = {
    "h2oai/h2ogpt-oig-oasst1-256-6_9b": "gpt_neox",
    "daryl149/llama-2-7b-chat-hf": "llama",
    "openai/gpt-oss-20b": "gpt_oss",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with data/ (rows and their question-and-answer files) and a hub cache with the articles' models."""
    folder = tmp_path_factory.mktemp("articles")
    (folder / "data").mkdir()
    write_rows(folder / "data" / "rows.jsonl", 24)
    for hub_id, family in MODELS.items():
        hub_cache.put(folder / "hub", hub_id, tiny.write_model(folder / "made" / family, family))
    snapshot = folder / "hub" / "datasets--h2oai--openassistant_oasst1_h2ogpt"
    (snapshot / "snapshots" / hub_cache.COMMIT).mkdir(parents=True)
    rows = [{"input": f"<human>: What is {n}?\n<bot>: It is {n}.\n<human>:", "source": "oasst"} for n in range(24)]
    (snapshot / "snapshots" / hub_cache.COMMIT / "rows.json").write_text(json.dumps(rows))
    (snapshot / "refs").mkdir()
    (snapshot / "refs" / "main").write_text(hub_cache.COMMIT)
    return folder


def python(script: str, *words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *([str(ROOT / script)] if script else []), *words],
        cwd=cwd,
        env=environment_of({**hub_cache.environment(cwd / "hub"), **environment}),
        text=True,
        capture_output=True,
        timeout=280,
    )


ARTICLE_1 = [
    "--base_model=h2oai/h2ogpt-oig-oasst1-256-6_9b",
    "--per_device_train_batch_size=4",
    "--gradient_accumulation_steps=8",
    "--learning_rate=2e-5",
    "--max_steps=10000",
]


@pytest.mark.claim(
    "H32",
    command=(
        "python finetune.py --base_model=h2oai/h2ogpt-oig-oasst1-256-6_9b --per_device_train_batch_size=4 "
        "--gradient_accumulation_steps=8 --learning_rate=2e-5 --max_steps=10000 --node_rank=0"
    ),
    seen="number 0 leads the run; others are refused or have nothing to do",
)
@pytest.mark.claim(
    "H28",
    command=(
        "python finetune.py --base_model=h2oai/h2ogpt-oig-oasst1-256-6_9b --per_device_train_batch_size=4 "
        "--gradient_accumulation_steps=8 --learning_rate=2e-5 --max_steps=10000 --use_deepspeed"
    ),
    seen="trains, with DeepSpeed's ZeRO optimizer",
)
@pytest.mark.claim(
    "H27",
    command=(
        "python finetune.py --base_model=h2oai/h2ogpt-oig-oasst1-256-6_9b --per_device_train_batch_size=4 "
        "--gradient_accumulation_steps=8 --learning_rate=2e-5 --max_steps=10000 --dynamic_batch_size"
    ),
    seen="trains; the micro-batch is halved where memory runs out, and the global batch stays",
)
@pytest.mark.claim(
    "H15",
    command=(
        "python finetune.py --base_model=h2oai/h2ogpt-oig-oasst1-256-6_9b --per_device_train_batch_size=4 "
        "--gradient_accumulation_steps=8 --learning_rate=2e-5 --max_steps=10000"
    ),
    seen="a random GPT-NeoX under that hub id, from the local cache, is trained",
)
@pytest.mark.claim(
    "H17",
    command=(
        "python finetune.py --base_model=h2oai/h2ogpt-oig-oasst1-256-6_9b --per_device_train_batch_size=4 "
        "--gradient_accumulation_steps=8 --learning_rate=2e-5 --max_steps=10000"
    ),
    seen="micro_batch_size 4 in the plan",
)
@pytest.mark.claim(
    "H18",
    command=(
        "python finetune.py --base_model=h2oai/h2ogpt-oig-oasst1-256-6_9b --per_device_train_batch_size=4 "
        "--gradient_accumulation_steps=8 --learning_rate=2e-5 --max_steps=10000"
    ),
    seen="32 sequences in each step of one process",
)
@pytest.mark.claim(
    "H19",
    command=(
        "python finetune.py --base_model=h2oai/h2ogpt-oig-oasst1-256-6_9b --per_device_train_batch_size=4 "
        "--gradient_accumulation_steps=8 --learning_rate=2e-5 --max_steps=10000"
    ),
    seen="the rates of metrics.jsonl rise to 2e-5",
)
@pytest.mark.claim(
    "H20",
    command=(
        "python finetune.py --base_model=h2oai/h2ogpt-oig-oasst1-256-6_9b --per_device_train_batch_size=4 "
        "--gradient_accumulation_steps=8 --learning_rate=2e-5 --max_steps=10000 --max_steps=2"
    ),
    seen="the run ends after that many steps; the last of two flags wins",
)
@pytest.mark.claim(
    "H22",
    command=(
        "python finetune.py --base_model=h2oai/h2ogpt-oig-oasst1-256-6_9b --per_device_train_batch_size=4 "
        "--gradient_accumulation_steps=8 --learning_rate=2e-5 --max_steps=10000 --lora"
    ),
    seen="an adapter that PEFT reads",
)
@pytest.mark.claim(
    "H23",
    command=(
        "python finetune.py --base_model=h2oai/h2ogpt-oig-oasst1-256-6_9b --per_device_train_batch_size=4 "
        "--gradient_accumulation_steps=8 --learning_rate=2e-5 --max_steps=10000 --gradient_checkpointing"
    ),
    seen="trains",
)
@pytest.mark.claim(
    "H24",
    command=(
        "python finetune.py --base_model=h2oai/h2ogpt-oig-oasst1-256-6_9b --per_device_train_batch_size=4 "
        "--gradient_accumulation_steps=8 --learning_rate=2e-5 --max_steps=10000 --fp16"
    ),
    seen="trains, with a loss scale",
)
@pytest.mark.claim(
    "H25",
    command=(
        "python finetune.py --base_model=h2oai/h2ogpt-oig-oasst1-256-6_9b --per_device_train_batch_size=4 "
        "--gradient_accumulation_steps=8 --learning_rate=2e-5 --max_steps=10000 --bf16"
    ),
    seen="trains",
)
@pytest.mark.claim(
    "H29",
    command=(
        "python finetune.py --base_model=h2oai/h2ogpt-oig-oasst1-256-6_9b --per_device_train_batch_size=4 "
        "--gradient_accumulation_steps=8 --learning_rate=2e-5 --max_steps=10000 --tensorboard"
    ),
    seen="event files in the run folder",
)
@pytest.mark.claim(
    "H30",
    command=(
        "python finetune.py --base_model=h2oai/h2ogpt-oig-oasst1-256-6_9b --per_device_train_batch_size=4 "
        "--gradient_accumulation_steps=8 --learning_rate=2e-5 --max_steps=10000 --log_level=info"
    ),
    seen="a line of loss, rate, tokens/s, memory and time left for each step",
)
@pytest.mark.claim(
    "X22",
    command=(
        "python finetune.py --base_model=h2oai/h2ogpt-oig-oasst1-256-6_9b --per_device_train_batch_size=4 "
        "--gradient_accumulation_steps=8 --learning_rate=2e-5 --max_steps=10000"
    ),
    seen="4 x 8 x world, told before the start and in plan.json",
)
@pytest.mark.parametrize(
    "flags",
    [
        ["--lora", "--bf16", "--log_level=info", "--tensorboard"],
        pytest.param(["--gradient_checkpointing"], marks=pytest.mark.long),
        pytest.param(["--fp16"], marks=pytest.mark.long),
        ["--dynamic_batch_size", "--node_rank=0"],
        ["--use_deepspeed"],
    ],
    ids=lambda flags: flags[0][2:],
)
def test_the_command_of_article_1_trains(flags, place):
    run = place / f"run{flags[0]}"
    done = python("finetune.py", *ARTICLE_1, *flags, "--max_steps=2", f"--output_dir={run}", "--offline", cwd=place)
    assert done.returncode == 0, done.stderr
    spec = json.loads(fleetune("plan", run / "run.yaml", "--json", cwd=place, **hub_cache.environment(place / "hub")).stdout)
    assert (spec["micro_batch_size"], spec["global_batch_size"]) == (4, 32)
    assert spec["engine"] == ("deepspeed" if "--use_deepspeed" in flags else "replicated")
    settings = (run / "run.yaml").read_text()
    assert ("dynamic_batch_size: true" in settings) == ("--dynamic_batch_size" in flags)
    rates = [row["learning_rate"] for row in rows_of(run / "metrics.jsonl") if "learning_rate" in row]
    assert rates == pytest.approx([2e-5 / 101, 4e-5 / 101]), "the warmup of h2oGPT's finetune.py"
    assert len(samples(run)[0]) == 32
    assert (run / "adapter" / "adapter_config.json").is_file()
    if "--tensorboard" in flags:
        assert list((run / "tensorboard").glob("events.out.tfevents.*"))
        assert "step 1/2" in done.stderr


@pytest.mark.claim(
    "H32",
    command=(
        "python finetune.py --base_model=h2oai/h2ogpt-oig-oasst1-256-6_9b --num_nodes=4 "
        "--per_device_train_batch_size=4 --gradient_accumulation_steps=8 --learning_rate=2e-5 "
        "--max_steps=10000 --node_rank=1"
    ),
    seen="machine 1 is led by machine 0; 4 of 4 is out of range",
)
@pytest.mark.claim(
    "H16",
    command=(
        "python finetune.py --base_model=h2oai/h2ogpt-oig-oasst1-256-6_9b --num_nodes=4 "
        "--per_device_train_batch_size=4 --gradient_accumulation_steps=8 --learning_rate=2e-5 "
        "--max_steps=10000"
    ),
    seen="4 nodes of data/config.json, one process each, a step of 4 x 8 x 4 sequences",
)
def test_num_nodes_from_plain_python_trains_on_the_machines_of_the_cluster_file(place, tmp_path):
    # Four addresses of this machine stand for four machines; nodes on other ones are reached by ssh in test_machines.py.
    shutil.copytree(place / "hub", tmp_path / "hub", symlinks=True)
    (tmp_path / "data").mkdir()
    hosts = [f"127.0.0.{number}" for number in range(1, 5)]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    cluster = {"distributed_backend": "gloo", "node_list": hosts, "master_addr": hosts[0], "master_port": port}
    (tmp_path / "data" / "config.json").write_text(json.dumps(cluster))
    words = [*ARTICLE_1[:1], "--num_nodes=4", *ARTICLE_1[1:], "--max_steps=1", "--cutoff_len=64", "--output_dir=run"]
    done = python("finetune.py", *words, "--offline", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (start,) = [row for row in rows_of(tmp_path / "run" / "events.jsonl") if "num_nodes" in row]
    assert (start["num_nodes"], start["num_processes"]) == (4, 4)
    assert len(samples(tmp_path / "run")[0]) == 4 * 8 * 4, "micro-batch 4, accumulation 8, four processes"
    second = python("finetune.py", *words, "--node_rank=1", "--offline", cwd=tmp_path)
    assert second.returncode == 0 and "machine 1 (127.0.0.2) is led by machine 0 (127.0.0.1)" in second.stderr
    wrong = python("finetune.py", *words, "--node_rank=4", "--offline", cwd=tmp_path)
    assert wrong.returncode == 2 and "node_rank 4 is out of range" in wrong.stderr


def test_a_flag_that_cannot_be_met_is_one_error_by_name_and_nothing_is_left(place):
    done = python("finetune.py", *ARTICLE_1, "--val_metrics=['meteor']", "--prompt_type=nonsense", "--run=none", cwd=place)
    assert done.returncode == 2
    assert "--val_metrics meteor is not computed here" in done.stderr and "prompt_type 'nonsense'" in done.stderr
    assert not (place / "none").exists()


def torchrun(
    place: Path, *words: str, nnodes: int = 1, nproc: int = 2, **environment: str
) -> list[subprocess.CompletedProcess[str]]:
    """The article's command on each of `nnodes` nodes, which are processes of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "torch.distributed.run", f"--nnodes={nnodes}", f"--nproc_per_node={nproc}", "--rdzv_id=12345",
        "--rdzv_backend=c10d", f"--rdzv_endpoint=localhost:{port}", *words,
    ]  # fmt: skip
    more = {**hub_cache.environment(place / "hub"), "GLOO_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false"}
    started = [
        subprocess.Popen(command, cwd=place, env=environment_of({**more, **environment}), text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(nnodes)
    ]  # fmt: skip
    ended = []
    for process in started:
        out, err = process.communicate(timeout=280)
        ended.append(subprocess.CompletedProcess(command, process.returncode, out, err))
    return ended


SHORT = {"FLEETUNE_MAX_STEPS": "3", "FLEETUNE_GLOBAL_BATCH_SIZE": "4", "FLEETUNE_SEQUENCE_LENGTH": "64"}


@pytest.mark.claim(
    "H1",
    command=(
        "python -m torch.distributed.run --nnodes=2 --nproc_per_node=4 --rdzv_id=12345 --rdzv_backend=c10d "
        "--rdzv_endpoint=node1:29500 train_distributed.py"
    ),
    seen="2 nodes of 2 CPU processes train the samples and losses of one process",
)
@pytest.mark.claim(
    "X9",
    command=(
        "python -m torch.distributed.run --nnodes=2 --nproc_per_node=4 --rdzv_id=12345 --rdzv_backend=c10d "
        "--rdzv_endpoint=node1:29500 train_distributed.py"
    ),
    seen="the same script on one process, and on 2 nodes",
)
@pytest.mark.claim(
    "X18",
    command=(
        "python -m torch.distributed.run --nnodes=2 --nproc_per_node=4 --rdzv_id=12345 --rdzv_backend=c10d "
        "--rdzv_endpoint=node1:29500 train_distributed.py"
    ),
    seen="the article's command on CPU processes: losses and samples of one process",
)
@pytest.mark.parametrize(("nnodes", "nproc"), [(1, 2), pytest.param(2, 2, marks=pytest.mark.long)])
def test_the_torchrun_command_of_article_2_trains_what_one_process_trains(nnodes, nproc, place):
    for run in (place / "saved_model", place / "alone"):
        shutil.rmtree(run, ignore_errors=True)
    ended = torchrun(place, str(ROOT / "train_distributed.py"), nnodes=nnodes, nproc=nproc, **SHORT)
    assert [done.returncode for done in ended] == [0] * nnodes, "\n".join(done.stderr[-3000:] for done in ended)
    run = place / "saved_model" / "llama2_lora"
    starts = [row for row in rows_of(run / "events.jsonl") if row["event"] == "start" and "world_size" in row]
    assert starts[-1]["world_size"] == nnodes * nproc
    assert "step 3/3" in "".join(done.stderr for done in ended)
    alone = fleetune(
        "train", "--model_name", "llama2_lora", "--dataset_path", "data", "--run", "alone", "--gpus", "1",
        cwd=place, **hub_cache.environment(place / "hub"), **SHORT,
    )  # fmt: skip
    assert alone.returncode == 0, alone.stderr
    assert samples(run) == samples(place / "alone")
    one, many = ([float.fromhex(loss) for loss in losses(folder)] for folder in (place / "alone", run))
    assert many == pytest.approx(one, rel=2e-2)
    assert (run / "adapter" / "adapter_model.safetensors").is_file() and (run / "summary.json").is_file()


def test_a_wrong_request_under_torchrun_is_said_once_and_ends_every_rank(place):
    (done,) = torchrun(place, str(ROOT / "train_distributed.py"), "--data=nowhere.jsonl", **SHORT)
    assert done.returncode != 0
    assert done.stderr.count("error: data 'nowhere.jsonl' does not exist") == 1


@pytest.mark.claim(
    "X20",
    command="model.finetune(dataset=dataset, num_gpus=2)",
    seen="perplexity falls by more than 30 %; saved, loaded, same replies",
)
@pytest.mark.claim(
    "X21",
    command="create_model(name).finetune(dataset=research_data, num_gpus=2)",
    seen="each model in a run folder of its own",
)
@pytest.mark.claim(
    "X49",
    command="create_model(name).finetune(...)",
    seen="models one after the other, each evaluated",
)
def test_the_loop_of_article_2_finetunes_evaluates_generates_saves_and_loads(place, monkeypatch):
    script = """
from fleetune.bridges.xturing.models import BaseModel, create_model
from fleetune.bridges.xturing.datasets import InstructionDataset

research_data = InstructionDataset({
    "instruction": [f"Count {n}." for n in range(16)], "text": [""] * 16, "target": [f"{n} clips" for n in range(16)],
})
model = create_model("llama2_lora")
config = model.finetuning_config()
config.max_length, config.num_train_epochs, config.learning_rate, config.warmup_steps = 64, 6, 2e-2, 0
before = model.evaluate(research_data)
run = model.finetune(dataset=research_data, num_gpus=2)
after = model.evaluate(research_data)
model.generation_config().max_new_tokens = 8
said = model.generate(texts=["Count 3.", "Count 4."], batch_size=2)
model.save("kept")
again = BaseModel.load("kept")
assert again.finetuning_config().num_train_epochs == 6
assert abs(again.evaluate(research_data) - after) < 1e-3 * after
assert again.generate("Count 3.") == said[:1]
print(before, after, run.folder)
"""
    (place / "loop.py").write_text(script)
    done = python("", "loop.py", cwd=place)
    assert done.returncode == 0, done.stderr
    before, after, run = done.stdout.split()[-3:]
    assert float(after) < 0.7 * float(before)
    assert Path(run).parent.name == "saved_model"
    assert os.path.exists(place / "kept" / "xturing.json")


@pytest.mark.claim(
    "X16",
    command="fleetune train --model_name llama2 --dataset_path ./data --num_gpus 4 --use_deepspeed --batch_size 8",
    seen="4 CPU processes under DeepSpeed, micro-batch 8 each, all weights trained",
)
@pytest.mark.timeout(700)  # DeepSpeed compiles the preset's cpu_adam at its first use on a machine: two minutes
def test_the_command_of_article_2_trains_a_llama_on_four_processes(place):
    done = fleetune(
        "train", "--model_name", "llama2", "--dataset_path", "./data", "--num_gpus", "4", "--use_deepspeed",
        "--batch_size", "8", "--max_steps", "1", "--max_length", "64", "--threads", "1", "--run", "full", "--json",
        cwd=place, timeout=600, **hub_cache.environment(place / "hub"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["method"] == "full" and summary["steps"] == 1
    assert json.loads((place / "full" / "plan.json").read_text())["engine"] == "deepspeed"
    assert len(samples(place / "full")[0]) == 32, "micro-batch 8 on each of 4 processes"
    assert (place / "full" / "model" / "config.json").is_file()


@pytest.mark.claim(
    "X17",
    command="fleetune train --model_name llama2_lora_int8 --use_deepspeed --num_gpus 4",
    seen=("without data one clear error; with --dataset_path an adapter on int8 weights under DeepSpeed, and its loss falls"),
)
@pytest.mark.timeout(700)
def test_the_command_of_article_2_trains_an_adapter_on_8_bits_on_four_processes(place):
    words = ["train", "--model_name", "llama2_lora_int8", "--use_deepspeed", "--num_gpus", "4"]
    offline = hub_cache.environment(place / "hub")
    without = fleetune(*words, cwd=place, **offline)
    assert without.returncode == 2 and without.stderr.startswith("error: no data is given: give --data"), without.stderr
    done = fleetune(
        *words, "--dataset_path", "./data", "--max_steps", "3", "--max_length", "64", "--threads", "1",
        "--validation-share", "0.2", "--run", "int8", "--json", cwd=place, timeout=600, **offline,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["method"] == "lora" and summary["base"]["quantize"] == "int8"
    assert summary["base"]["bytes"] < summary["base"]["unquantized_bytes"]
    assert summary["after"]["loss"] < summary["before"]["loss"]
    assert json.loads((place / "int8" / "plan.json").read_text())["engine"] == "deepspeed"


@pytest.mark.claim(
    "X33",
    command=(
        'model.finetune(dataset=dataset, use_deepspeed=True, deepspeed_config_path="./deepspeed_config.json", num_gpus=2)'
    ),
    seen="the article's JSON as it is, from Python too",
)
@pytest.mark.claim(
    "X20",
    command=(
        "GPTOSS20B().finetune(dataset=dataset, use_deepspeed=True, "
        'deepspeed_config_path="./deepspeed_config.json", num_gpus=16)'
    ),
    seen="2 processes train a small gpt_oss; 16 are refused, since 32 / (4 x 16) is no whole micro-batch",
)
def test_the_python_of_article_2_trains_with_deepspeed_and_its_json_as_it_is(place):
    """GPTOSS20B() of the article, whose experts DeepSpeed trains as an adapter here: the model is small, not the way."""
    (place / "deepspeed_config.json").write_text(ARTICLE)
    script = """
from fleetune.bridges.xturing.models import GPTOSS20B
from fleetune.bridges.xturing.datasets import InstructionDataset

dataset = InstructionDataset({
    "instruction": [f"Count {n}." for n in range(40)], "text": [""] * 40, "target": [f"{n} clips" for n in range(40)],
})
model = GPTOSS20B()
config = model.finetuning_config()
config.max_length = 64
run = model.finetune(
    dataset=dataset, use_deepspeed=True, deepspeed_config_path="./deepspeed_config.json", num_gpus=NUM, max_steps=1,
)
print(run.folder)
"""
    # 32 = micro-batch x 4 x 16 has no whole answer: the article's own numbers collide, and that is said before anything loads.
    (place / "gptoss.py").write_text(script.replace("NUM", "16"))
    refused = python("", "gptoss.py", cwd=place)
    assert refused.returncode != 0 and "does not divide by gradient_accumulation_steps 4" in refused.stderr, refused.stderr
    (place / "gptoss.py").write_text(script.replace("NUM", "2"))
    done = python("", "gptoss.py", cwd=place)
    assert done.returncode == 0, done.stderr
    run = Path(done.stdout.split()[-1])
    plan = json.loads((run / "plan.json").read_text())
    assert (plan["engine"], plan["global_batch_size"], plan["method"]) == ("deepspeed", 32, "full")
    assert (run / "deepspeed.json").read_text() == ARTICLE
