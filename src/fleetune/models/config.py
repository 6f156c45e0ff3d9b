"""`config.json` of a stranger's model: data, never code.

What transformers does with a config can be steered by keys that name code: `auto_map` (files to run),
`_attn_implementation*` and `kernel_config` (kernels fetched from the hub; CVE-2026-4372 ran code that way), or any new key
that some modeling file happens to trust (CVE-2026-5241). So a config is not read by transformers: we read it, keep the
fields that the family's config class declares, keep of the rest only what cannot name anything (numbers and flags), and
build the class from that.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fleetune.spec.errors import UserError

CONFIG_FILE = "config.json"
MAX_JSON_BYTES = 16 << 20
#: Number formats that weights may be declared or stored in.
DTYPES = ("float64", "float32", "float16", "bfloat16")

#: Never read, at any depth: each names code, a kernel, a hub repository or a file.
_DANGEROUS = frozenset(
    {
        "auto_map",
        "attn_implementation",
        "experts_implementation",
        "kernel_config",
        "use_kernels",
        "custom_pipelines",
        "custom_generate",
        "trust_remote_code",
        "name_or_path",
    }
)
#: Read although no config class declares them: the family's name, and old spellings that transformers itself translates.
_OLD_SPELLINGS = frozenset(
    {"model_type", "rope_scaling", "rope_parameters", "torch_dtype", "dtype", "architectures", "per_layer_config"}
)
#: JSON has no infinity: transformers writes {"__float__": "Infinity"}.
_SPECIAL_FLOATS = {"Infinity": float("inf"), "-Infinity": float("-inf"), "NaN": float("nan")}

_log = logging.getLogger(__name__)


def load_config(folder: Path, *, allow_remote_code: bool = False) -> Any:
    """The transformers config of a model folder, built from checked values only. Opens no connection.

    With `allow_remote_code` the folder's own Python files may define the config class and the model; their names are
    logged first. Raises UserError: no config, not JSON, an unknown family, code that nobody allowed, quantised weights.
    """
    values = read_config(folder)
    if "auto_map" in values and allow_remote_code:
        return _load_with_code(folder, values)
    return build_config(values, where=folder / CONFIG_FILE)


def build_config(values: Mapping[str, Any], *, where: Path) -> Any:
    """The transformers config that `values` describe. `where` they came from is for the errors."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    family = values.get("model_type")
    if not isinstance(family, str) or family not in CONFIG_MAPPING:
        import transformers

        raise UserError(_unknown_family(family, "auto_map" in values, where, transformers.__version__))
    config_class = CONFIG_MAPPING[family]
    kept, dropped = allowed_values(values, _declared(config_class))
    if dropped:
        _log.info("%s: not read, because no %s model declares them: %s", where, family, ", ".join(sorted(dropped)))
    try:
        return config_class.from_dict(kept)
    except (StrictDataclassError, ImportError, TypeError, ValueError, AttributeError, KeyError) as error:
        raise UserError(f"{where} is no valid config of a {family} model: {error}: download the model again") from error


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json` as plain values, with nothing of it acted upon. Raises UserError for what no base model may have."""
    path = folder / CONFIG_FILE
    values = read_json_object(path)
    quantization = values.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "?") if isinstance(quantization, Mapping) else "?"
        raise UserError(
            f"{path} says that the weights are quantised ({method}), and fleetune trains on plain weights: give the "
            "unquantised model"
        )
    for key in ("dtype", "torch_dtype"):
        dtype = values.get(key)
        if dtype is not None and (not isinstance(dtype, str) or dtype.removeprefix("torch.") not in (*DTYPES, "auto")):
            raise UserError(f"{path} has {key} {dtype!r}, and weights are one of {', '.join(DTYPES)}: give another model")
    return values


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON file of a model folder. Raises UserError: missing, too large, not JSON, not an object."""
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise UserError(f"{path} has {size:,} bytes, and no honest model needs more than {MAX_JSON_BYTES:,} there")
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: give a folder that holds a whole model") from None
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON ({error}): download the model again") from error
    if not isinstance(values, dict):
        raise UserError(f"{path} holds no JSON object: download the model again")
    return values


def allowed_values(values: Mapping[str, Any], declared: frozenset[str]) -> tuple[dict[str, Any], set[str]]:
    """What of a config may be read, and the names of what may not.

    Declared names are read, without dangerous keys inside of them. Of undeclared ones only numbers, flags and lists of
    them are: a number can name no file, no class and no repository.
    """
    kept: dict[str, Any] = {}
    dropped: set[str] = set()
    for key, value in values.items():
        if is_dangerous(key):
            dropped.add(key)
        elif key in declared or key in _OLD_SPELLINGS or _is_numeric(value):
            kept[key] = without_dangerous_keys(value)
        else:
            dropped.add(key)
    return kept, dropped


def without_dangerous_keys(value: Any) -> Any:
    """`value` without the keys that name code, at any depth, and with transformers' tagged floats as floats."""
    if isinstance(value, Mapping):
        if set(value) == {"__float__"} and value["__float__"] in _SPECIAL_FLOATS:
            return _SPECIAL_FLOATS[value["__float__"]]
        return {key: without_dangerous_keys(inner) for key, inner in value.items() if not is_dangerous(key)}
    if isinstance(value, list):
        return [without_dangerous_keys(inner) for inner in value]
    return value


def is_dangerous(key: str) -> bool:
    return key.startswith("_") or key in _DANGEROUS


def code_files(folder: Path) -> list[Path]:
    """The Python files that allowing remote code of this folder would run."""
    return sorted(folder.glob("*.py"))


def _is_numeric(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_numeric(inner) for inner in value)
    return value is None or isinstance(value, (bool, int, float))


def _declared(config_class: Any) -> frozenset[str]:
    """Names that a config class takes: its fields (transformers 5 has dataclasses), its arguments, its old names."""
    names = set(getattr(config_class, "attribute_map", {}))
    if dataclasses.is_dataclass(config_class):
        names |= {field.name for field in dataclasses.fields(config_class)}
    for cls in config_class.__mro__:
        if "__init__" in vars(cls):
            names |= set(inspect.signature(cls.__init__).parameters)
    return frozenset(names - {"self", "args", "kwargs"})


def _unknown_family(family: object, has_code: bool, where: Path, version: str) -> str:
    if has_code:
        files = ", ".join(path.name for path in code_files(where.parent)) or "none of them is here"
        return (
            f"{where} asks to run Python code that comes with the model ({files}): give --allow-remote-code if you trust "
            "whoever wrote it with everything you can do on this machine"
        )
    if not isinstance(family, str):
        return f"{where} has no model_type, so nobody can tell what it is: give a folder that transformers saved"
    return f"{where} is a {family!r} model, which transformers {version} does not know: upgrade transformers, or give another"


def _load_with_code(folder: Path, values: Mapping[str, Any]) -> Any:
    """Let the folder's own code define the config. The person has allowed it; what will run is said before it does."""
    from transformers import AutoConfig

    for name, target in _code_references(values):
        if "--" in target:
            repository = target.partition("--")[0]
            raise UserError(
                f"{folder / CONFIG_FILE} takes its {name} from another repository ({repository}), whose code is not here: "
                "download that repository's Python files into this folder and name them in auto_map, or give another model"
            )
    files = code_files(folder)
    if not files:
        raise UserError(
            f"{folder / CONFIG_FILE} names code to run, and there is no Python file beside it: download the model again "
            "with --allow-remote-code"
        )
    _log.warning("running code that comes with the model: %s", ", ".join(str(path) for path in files))
    return AutoConfig.from_pretrained(folder, trust_remote_code=True, local_files_only=True)


def _code_references(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    entries = values.get("auto_map")
    pairs = entries.items() if isinstance(entries, Mapping) else [("auto_map", entries)]
    return [
        (name, str(target)) for name, given in pairs for target in (given if isinstance(given, list) else [given]) if target
    ]
