"""`fleetune presets`: the models that have a short name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from fleetune.cli.flags import Flags, switch
from fleetune.cli.words import table
from fleetune.models.presets import Preset, all_presets, find_preset, refuse_moved, similar_presets
from fleetune.spec.errors import EXIT_DONE, UserError

ABOUT = """List the presets, or show one: where its weights come from, and the defaults it gives.

A suffix says how a model is trained: NAME_lora, NAME_lora_int8 (an adapter on a base in 8 bits), NAME_lora_kbit (in 4). It may
follow the name of every preset that is not from xTuring; those have the variants that are listed."""


def flags() -> Flags:
    return Flags("presets", ABOUT, usage="[NAME] [FLAGS]", own=[switch("--json", "Print as JSON.")])


def run(words: Sequence[str]) -> int:
    typed = flags().read(words)
    if typed is None:
        return EXIT_DONE
    if len(typed.words) > 1:
        raise UserError(f"{' '.join(typed.words)}: one preset is shown at a time")
    chosen = [found(name) for name in typed.words] or all_presets()
    if typed.own["json"]:
        values = [as_json(preset) for preset in chosen]
        print(json.dumps(values[0] if typed.words else values, ensure_ascii=False))
    elif typed.words:
        print("\n".join(table(shown(chosen[0]))))
    else:
        print("\n".join(table([(preset.name, preset.about) for preset in chosen])))
    return EXIT_DONE


def found(name: str) -> Preset:
    preset = find_preset(name)
    if preset is None:
        refuse_moved(name)
        near = similar_presets(name)
        hint = f"did you mean {near[0]}?" if near else "fleetune presets lists them"
        raise UserError(f"there is no preset {name!r}: {hint}")
    return preset


def as_json(preset: Preset) -> dict[str, Any]:
    package = preset.package
    return {
        "name": preset.name,
        "about": preset.about,
        "hub": preset.hub,
        "revision": preset.revision,
        "package": package.name if package else None,
        "installed": bool(package and package.find()),
        "values": preset.values,
        "generation": preset.generation,
        "origin": preset.origin,
    }


def shown(preset: Preset) -> list[tuple[str, str]]:
    rows = [
        ("preset", preset.name),
        ("about", preset.about),
        ("hub", (preset.hub or "any model: --preset") + (f"@{preset.revision}" if preset.revision else "")),
    ]
    if preset.package:
        state = "installed" if preset.package.find() else f"not installed: {preset.package.install}"
        rows.append(("package", f"{preset.package.name} {preset.package.version} ({state})"))
    rows += [(name, str(value)) for name, value in preset.values.items()] or [("defaults", "those of fleetune train")]
    rows += [(f"generation {name}", str(value)) for name, value in preset.generation.items()]
    return [*rows, ("origin", preset.origin)]
