"""What cannot be combined, in one place: each rule says what collides, why, and what works instead.

Refusals at the start of a run, of `fleetune plan`, and the table in docs/layouts.md are all made from these rules. Each room
of rules is a list of its own, so that an engine's rules stand together; a rule looks at plain values and never at torch.
"""

from __future__ import annotations

from fleetune.planning.pipeline_rules import PIPELINE_RULES
from fleetune.planning.rule import Asked, Rule
from fleetune.planning.zero import zero_of
from fleetune.planning.zero_rules import ZERO_RULES


def _heads_that_do_not_divide(asked: Asked) -> str | None:
    tensor, shape = asked.layout.tensor, asked.shape
    if shape is None or (shape.num_heads % tensor == 0 and shape.num_kv_heads % tensor == 0):
        return None
    return (
        f"tensor {tensor} does not divide the model's {shape.num_heads} attention heads and {shape.num_kv_heads} heads of keys "
        "and values"
    )


def _seen_later(asked: Asked) -> str | None:
    """Of what only the model's classes tell: the engine looks, before a weight is read."""
    return None


NO_TENSOR_PLAN = Rule(
    what="`--tensor N` and a family for which transformers has no tensor-parallel plan of column and row cuts (gpt2, falcon, "
    "bloom, opt, gptj, gpt_oss, mixtures of experts, ...)",
    collides=_seen_later,
    why="only the plan says which layers belong together",
    instead="give --shard instead of --tensor: it divides any model",
)
OWN_DROPOUT_UNDER_TENSOR = Rule(
    what="`--tensor N` and a model with dropout of its own (`attention_dropout` and the like above 0 in config.json)",
    collides=_seen_later,
    why="each rank sees only some of the heads that the dropout is drawn for",
    instead="give --shard instead of --tensor, or set the dropouts in config.json to 0",
)
WHOLE_ONLY = Rule(
    what="`--shard` or `--tensor` above 1 and weights that are stored in a way that transformers puts together while it reads "
    "(experts that are stored one by one can be read)",
    collides=_seen_later,
    why="their pieces cannot be read alone",
    instead="give --shard 1 and --tensor 1, or save the model once with transformers' save_pretrained and give that folder",
)

EXPERTS_OF_LORA = Rule(
    what="`--lora-targets` that name stacked experts, and `--adapter dora` or `--lora-dropout` above 0",
    collides=_seen_later,
    why="PEFT's format has no norms and no dropout for stacked experts",
    instead="give --adapter lora or rslora and --lora-dropout 0, or leave the experts out of --lora-targets",
)

LAYOUT_RULES = (
    Rule(
        what="`--tensor N` and a model whose attention heads, or heads of keys and values, do not divide by N",
        collides=_heads_that_do_not_divide,
        why="each rank computes whole heads",
        instead="give a --tensor that divides both, or --shard, which divides anything",
    ),
)


def _quantised_in_pieces(asked: Asked) -> str | None:
    quantize, layout = asked.spec.adaptation.quantize, asked.layout
    split = [f"{axis} {size}" for axis, size in layout.to_json().items() if axis != "replicate" and size > 1]
    split += ["zero_stage 3"] if asked.engine == "deepspeed" and zero_of(asked.spec).stage == 3 else []
    return f"quantize {quantize} with {' and '.join(split)}" if quantize != "none" and split else None


def _quantised_and_trained(asked: Asked) -> str | None:
    adaptation = asked.spec.adaptation
    return f"quantize {adaptation.quantize} with method full" if _is_quantised(asked) and adaptation.method == "full" else None


def _is_quantised(asked: Asked) -> bool:
    return asked.spec.adaptation.quantize != "none"


QUANTISATION_RULES = (
    Rule(
        what="`--quantize int8|nf4` and `--method full`",
        collides=_quantised_and_trained,
        why="quantised weights have no gradient and cannot be trained",
        instead="give --method lora, or leave --quantize out",
    ),
    Rule(
        what="`--quantize int8|nf4` (`--method qlora`) and any layout but `--replicate`, or `--zero-stage 3`",
        collides=_quantised_in_pieces,
        why="a quantised weight is packed bytes with scales of their own, which no cut of the model into pieces keeps together",
        instead="give --replicate (or --zero-stage 2), under which only the adapters travel, or leave --quantize out",
    ),
)


def _strict_and_not_replicated(asked: Asked) -> str | None:
    if asked.spec.health.determinism != "strict" or asked.engine in ("", "replicated"):
        return None
    return f"determinism strict and {asked.layout.describe()} under the engine {asked.engine}"


def _strict_and_threads(asked: Asked) -> str | None:
    threads = asked.spec.layout.threads
    if asked.spec.health.determinism != "strict" or asked.device != "cpu" or threads in (None, 1):
        return None
    return f"determinism strict and threads {threads}"


def _strict_and_dynamic(asked: Asked) -> str | None:
    both = asked.spec.health.determinism == "strict" and asked.spec.health.dynamic_batch_size
    return "determinism strict and dynamic_batch_size" if both else None


DETERMINISM_RULES = (
    Rule(
        what="`--determinism strict` and `--dynamic-batch-size`",
        collides=_strict_and_dynamic,
        why="a micro-batch of another size gives other last bits",
        instead="leave out one of them, and give a --micro-batch-size that fits",
    ),
    Rule(
        what="`--determinism strict` and a model that is cut into pieces",
        collides=_strict_and_not_replicated,
        why="its gradients are summed by the library underneath, in an order that changes with the number of ranks",
        instead="leave out --shard, --tensor, --pipeline and --engine, or --determinism",
    ),
    Rule(
        what="`--determinism strict` and `--threads` above 1 on a CPU",
        collides=_strict_and_threads,
        why="matrix products are cut up differently for another number of threads, which changes the last bits",
        instead="leave out --threads, or --determinism",
    ),
)

#: Every rule, in the order of the table.
RULES: tuple[Rule, ...] = (
    *LAYOUT_RULES,
    NO_TENSOR_PLAN,
    OWN_DROPOUT_UNDER_TENSOR,
    WHOLE_ONLY,
    EXPERTS_OF_LORA,
    *QUANTISATION_RULES,
    *ZERO_RULES,
    *PIPELINE_RULES,
    *DETERMINISM_RULES,
)


def refusals(asked: Asked) -> list[str]:
    """Everything about a run that cannot be combined; empty where all of it can."""
    return [problem for rule in RULES if (problem := rule.refusal(asked)) is not None]


def as_table() -> str:
    """The rules as a table in Markdown, for docs/layouts.md."""
    lines = ["| what | why not | instead |", "|---|---|---|"]
    lines += [f"| {rule.what} | {rule.why} | {rule.instead} |" for rule in RULES]
    return "\n".join(lines) + "\n"
