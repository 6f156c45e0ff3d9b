"""Settings that could have no effect in a run: what nobody would read is refused instead of being taken without a word."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fleetune.spec.declared import declared
from fleetune.spec.read import Resolved
from fleetune.spec.run_spec import RunSpec

_OF_ADAPTERS = ("adapter", "lora_rank", "lora_alpha", "lora_dropout", "lora_targets")
_OF_HELD_OUT = ("exact_match", "evaluate_every", "early_stop")
#: Keys of PEFT's adapter_config.json that say what a field of ours says.
_IN_CONFIG = {"lora_rank": "r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout"}


def without_effect(resolved: Resolved) -> list[str]:
    """Problems of a run's settings among each other.

    Flags and arguments of this start must have an effect. A file may hold what suits several runs, so of its settings
    only those are refused that promise something which cannot come.
    """
    return [*_without_held_out(resolved), *_of_another_kind(resolved), *_of_a_trial(resolved)]


def _of_a_trial(resolved: Resolved) -> Iterator[str]:
    output = resolved.spec.output
    if output.smoke and output.resume:
        yield "smoke tries a new run out, and resume goes on with one: leave out one of them"


def _without_held_out(resolved: Resolved) -> Iterator[str]:
    spec, values = resolved.spec, resolved.spec.flat()
    if not spec.rows.validation and not spec.rows.validation_share:
        for name in _OF_HELD_OUT:
            if values[name] and not resolved.origins[name].startswith("preset "):
                yield (
                    f"{name} {_said(values[name])} ({resolved.origins[name]}) needs held-out rows, and there are none: give "
                    "--validation DATA or --validation-share 0.1, or leave it out"
                )
    elif spec.output.early_stop and not spec.output.evaluate_every:
        yield (
            f"early_stop {spec.output.early_stop} ({resolved.origins['early_stop']}) counts evaluations, and evaluate_every 0 "
            "makes none in between: give --evaluate-every"
        )


def _of_another_kind(resolved: Resolved) -> Iterator[str]:
    spec = resolved.spec
    if spec.adaptation.method == "full":
        yield from _typed(resolved, _OF_ADAPTERS, "says what an adapter is, and method full trains none: leave it out")
    if not spec.output.exact_match:
        yield from _typed(resolved, ("max_new_tokens",), "bounds answers, and none are asked for: give --exact-match too")
    if spec.optimization.warmup_steps is not None:
        yield from _typed(resolved, ("warmup",), "and warmup_steps both say how long the rate rises: give one of them")
    if (spec.layout.pipeline or 1) == 1:
        yield from _typed(resolved, ("pipeline_schedule",), "orders the stages of a pipeline: give --pipeline too")
    if (spec.layout.shard or 1) == 1 and not _asks_for_deepspeed(spec):
        why = "is how ranks that keep pieces of gradients sum them, and none do: give --shard or --zero-stage 2"
        yield from _typed(resolved, ("accumulate",), why)
    if "rewind" not in (spec.health.on_nonfinite, spec.health.on_spike):
        why = "is what a rewind leaves out, and nothing rewinds: give --on-spike rewind or --on-nonfinite rewind"
        yield from _typed(resolved, ("skip_window",), why)
    if not (spec.machines.hosts or spec.machines.cluster or spec.machines.on == "ssh"):
        yield from _typed(resolved, ("ssh_config",), "is read to reach other machines, and there are none: give --hosts")
    if spec.optimization.schedule == "constant":
        why = "is where the rate ends, and schedule constant stays at its peak: leave it out"
        yield from _typed(resolved, ("final_learning_rate_share",), why)


def _asks_for_deepspeed(spec: RunSpec) -> bool:
    zero = spec.zero
    asked = zero.use_deepspeed or zero.deepspeed is not None or zero.zero_stage is not None or zero.offload != "none"
    return asked or zero.engine == "deepspeed"


def _typed(resolved: Resolved, names: tuple[str, ...], why: str) -> Iterator[str]:
    """Problems of those fields that were given at this start, by hand."""
    for name in names:
        if resolved.origins[name].startswith(("flag ", "argument ")):
            yield f"{declared()[name].shown} {_said(resolved.spec.flat()[name])} ({resolved.origins[name]}) {why}"


def optimizer_elsewhere(resolved: Resolved, device: str) -> list[str]:
    """Problems of an optimizer that computes elsewhere than the model."""
    if resolved.spec.optimization.optimizer != "cpu_adam" or device == "cpu":
        return []
    return [
        f"optimizer cpu_adam ({resolved.origins['optimizer']}) keeps its state on the CPU, and the model computes on {device}, "
        "where this engine keeps both: give --optimizer adamw, or --use_deepspeed"
    ]


def against_adapter(resolved: Resolved, config: Mapping[str, object]) -> list[str]:
    """Problems of what was given about an adapter when training goes on with one that has its own shape.

    config: the adapter's adapter_config.json.
    """
    values = resolved.spec.flat()
    kind = "dora" if config.get("use_dora") else "rslora" if config.get("use_rslora") else "lora"
    own = {"adapter": kind, **{name: config.get(key) for name, key in _IN_CONFIG.items()}}
    problems = []
    for name in _OF_ADAPTERS:
        is_given = resolved.origins[name].startswith(("flag ", "argument ", "environment ", "file "))
        has_own = name in own and own[name] is not None
        said = f"{name} {_said(values[name])} ({resolved.origins[name]})"
        mend = "leave it out, or begin with the base model"
        if is_given and has_own and values[name] != own[name]:
            problems.append(f"{said} differs from the {_said(own[name])} of the adapter that training goes on with: {mend}")
        elif is_given and name == "lora_targets" and values[name]:
            problems.append(f"{said} is given, and the adapter that training goes on with has its own: {mend}")
    return problems


def _said(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}"
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
