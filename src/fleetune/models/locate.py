"""From the words that name a model to the place where its weights lie. No torch, no transformers.

A name is looked up in this order: a preset; a path that exists (a run folder, an adapter, a model folder, a `.gguf` file);
an installed package that carries one `.gguf` file; an id of the hub (`ORG/NAME`). `./NAME` always means a path.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import re
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Literal

from fleetune.models.cache import content_hash
from fleetune.models.config import CONFIG_FILE, read_config, read_json_object
from fleetune.models.hub import fetch, is_hub_id
from fleetune.models.presets import Preset, find_preset, refuse_moved, similar_presets
from fleetune.models.weight_files import ADAPTER_CONFIG, ADAPTER_FILE, companion_files
from fleetune.spec.errors import UserError
from fleetune.spec.run_folder import RunFolder, read_json
from fleetune.spec.safetensors_header import INDEX_FILE, SINGLE_FILE, weight_files

_GGUF_MAGIC = b"GGUF"
#: An adapter may lie on a run whose model was a run, and so on; a circle of names ends here.
_MAX_DEPTH = 8


@dataclass(frozen=True)
class Located:
    """A model that exists on this machine.

    kind: what `path` is. name: short, fit for a run folder's name. source: where it came from, for people. adapter: a PEFT
    adapter folder to put on top. revision: the hub commit, where it came from the hub. precision: what a run was trained in:
    its result is read in it too, so that its figures are found again.
    """

    kind: Literal["folder", "gguf"]
    path: Path
    name: str
    source: str
    adapter: Path | None = None
    revision: str | None = None
    preset: Preset | None = None
    precision: str | None = None

    @cached_property
    def base_fingerprint(self) -> str:
        """Hash of the content without the adapter: weights, config, tokenizer. The first time it reads the whole files."""
        if self.kind == "gguf":
            return content_hash([("gguf", self.path)])
        files = ((path.name, path) for path in _model_files(self.path))
        return content_hash(files, hub_cache=self.revision is not None)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the whole content, the adapter included."""
        if self.adapter is None:
            return self.base_fingerprint
        adapter = content_hash((name, self.adapter / name) for name in (ADAPTER_CONFIG, ADAPTER_FILE))
        return hashlib.sha256(f"{self.base_fingerprint} {adapter}".encode()).hexdigest()


@dataclass(frozen=True)
class _Request:
    """How a name may be looked up. depth: how many adapters and runs lie above it."""

    revision: str | None = None
    offline: bool = False
    code: bool = False
    depth: int = 0


def locate(
    model: str | Path, *, revision: str | None = None, offline: bool = False, allow_remote_code: bool = False
) -> Located:
    """Find a model by whatever names it, downloading a hub id that is not here yet unless `offline`. Once a node.

    allow_remote_code: also fetch the Python files of a hub model. Raises UserError, which says what to write instead.
    """
    text = str(model).strip()
    if not text:
        raise UserError("no model is given: say which with --model, as a preset (fleetune presets), a hub id or a folder")
    try:
        found = _locate(text, _Request(revision, offline, allow_remote_code))
    except OSError as error:
        raise UserError(f"model {text!r} cannot be read: {error}: check the path and its permissions") from error
    if revision is not None and found.revision is None:
        raise UserError(
            f"revision {revision!r} is given, and model {text!r} is {found.source}, which has no revisions: leave it out"
        )
    return found


def _locate(text: str, request: _Request) -> Located:
    path = Path(text).expanduser()
    preset = find_preset(text)
    if preset is not None:
        return _locate_preset(preset, request)
    if _exists(path):
        return _locate_path(path, request)
    if (packaged := _packaged_gguf(text)) is not None:
        return _check_gguf(packaged, name=_short(text), source=f"the installed package {text}")
    if is_hub_id(text):
        try:
            return _locate_hub(text, request)
        except UserError as error:
            if not (near := _similar_paths(path)):
                raise
            raise UserError(f"{error}; or did you mean the folder {near[0]}?") from error
    refuse_moved(text)
    raise UserError(_not_found(text, path))


def _locate_preset(preset: Preset, request: _Request) -> Located:
    if preset.hub is None:
        raise UserError(
            f"preset {preset.name} is values alone, for any model: give --preset {preset.name} and the model with --model"
        )
    package = preset.package
    file = package.find() if package and request.revision is None else None
    if package and file is not None:
        source = f"preset {preset.name} (package {package.name} {package.installed_version()})"
        return dataclasses.replace(_check_gguf(file, name=_short(preset.name), source=source), preset=preset)
    try:
        found = _locate_hub(preset.hub, dataclasses.replace(request, revision=request.revision or preset.revision))
    except UserError as error:
        if package is None or request.revision is not None:
            raise UserError(*(f"preset {preset.name}: {problem}" for problem in error.problems)) from error
        raise UserError(
            f"preset {preset.name} takes its weights from the package {package.name}, which is not installed: run "
            f"`{package.install}` (else they come from the hub, and there: {error.problems[0]})"
        ) from error
    source = f"preset {preset.name} ({found.source})"
    return dataclasses.replace(found, name=_short(preset.name), source=source, preset=preset)


def _locate_hub(hub_id: str, request: _Request) -> Located:
    snapshot = fetch(hub_id, revision=request.revision, offline=request.offline, code=request.code)
    folder, source = snapshot.folder, f"{hub_id} of the hub at {snapshot.commit[:12]}"
    if (folder / ADAPTER_CONFIG).is_file() and not (folder / CONFIG_FILE).is_file():
        found = _locate_adapter(folder, request, name=_short(hub_id), source=source)
    elif not (folder / CONFIG_FILE).is_file():
        raise UserError(f"model {hub_id} has no {CONFIG_FILE} in {folder}: give a model that transformers can load")
    elif not any((folder / name).is_file() for name in (SINGLE_FILE, INDEX_FILE)):
        raise UserError(
            f"model {hub_id} has no safetensors weights in {folder}, and fleetune fetches no pickles (.bin): look on its page "
            "for a branch that has safetensors (often refs/pr/NUMBER) and give it as --revision"
        )
    else:
        found = _check_folder(folder, name=_short(hub_id), source=source)
    return dataclasses.replace(found, revision=snapshot.commit)


def _locate_path(path: Path, request: _Request) -> Located:
    if path.is_file():
        return _check_gguf(path, name=_short(path.stem), source=f"the file {path}")
    if (path / "run.yaml").is_file():
        return _locate_run(path, request)
    named = path.resolve()
    name = _short(named.parent.name if named.name in ("model", "adapter") else named.name)
    if (path / ADAPTER_CONFIG).is_file():
        return _locate_adapter(path, request, name=name, source=f"the adapter {path}")
    return _check_folder(path, name=name, source=f"the folder {path}")


def _locate_run(path: Path, request: _Request) -> Located:
    """The result of a run: its best checkpoint if it was validated, else its last (whichever the run gave back)."""
    run = RunFolder(path)
    name, source = _short(path.resolve().name), f"the run {path}"
    precision = read_json(run.prepared)["precision"] if run.prepared.is_file() else None
    if run.model.is_dir():
        return dataclasses.replace(_check_folder(run.model, name=name, source=source), precision=precision)
    if not (run.adapter / ADAPTER_CONFIG).is_file():
        raise UserError(
            f"the run {path} has no result yet (neither adapter/ nor model/ is there): let it end, with "
            f"fleetune train {run.spec} --resume"
        )
    from fleetune.spec.read import read_run

    weights = read_run(run).spec.weights
    base = _locate_base(weights.model, request, revision=weights.revision, asked_by=f"the run {path}")
    return dataclasses.replace(_with_adapter(base, run.adapter, name=name, source=source), precision=precision)


def _locate_adapter(folder: Path, request: _Request, *, name: str, source: str) -> Located:
    values = read_json_object(folder / ADAPTER_CONFIG)
    base, revision = values.get("base_model_name_or_path"), values.get("revision")
    if not isinstance(base, str) or not base.strip():
        raise UserError(f"{folder / ADAPTER_CONFIG} does not say which model it adapts: write its base_model_name_or_path in")
    asked_by = f"the adapter {folder}"
    found = _locate_base(base, request, revision=revision if isinstance(revision, str) else None, asked_by=asked_by)
    if found.adapter is not None:
        raise UserError(f"{asked_by} lies on {found.source}, which is itself an adapter: merge that one first")
    return _with_adapter(found, folder, name=name, source=source)


def _locate_base(model: str, request: _Request, *, revision: str | None, asked_by: str) -> Located:
    """The model below an adapter. Nobody typed its name just now, so it is never downloaded: it must be here."""
    if request.depth >= _MAX_DEPTH:
        raise UserError(f"{asked_by} lies on {model!r}, {_MAX_DEPTH} models deep: is it made of itself? Name another model")
    try:
        return _locate(model.strip(), _Request(revision, offline=True, code=request.code, depth=request.depth + 1))
    except UserError as error:
        hint = f" (fetch it first: hf download {model})" if is_hub_id(model) else ""
        raise UserError(*(f"{asked_by} was trained on {model!r}{hint}: {problem}" for problem in error.problems)) from error


def _with_adapter(base: Located, adapter: Path, *, name: str, source: str) -> Located:
    if not (adapter / ADAPTER_FILE).is_file():
        pickled = " (adapter_model.bin is a pickle, which is never read)" if (adapter / "adapter_model.bin").exists() else ""
        raise UserError(f"{adapter} has no {ADAPTER_FILE}{pickled}: save the adapter again with a recent peft")
    return dataclasses.replace(base, adapter=adapter, name=name, source=f"{source}, on {base.source}")


def _check_folder(folder: Path, *, name: str, source: str) -> Located:
    if not (folder / CONFIG_FILE).is_file():
        raise UserError(_no_config(folder))
    read_config(folder)
    weight_files(folder)
    return Located("folder", folder, name, source)


def _check_gguf(path: Path, *, name: str, source: str) -> Located:
    with open(path, "rb") as file:
        magic = file.read(4)
    if magic != _GGUF_MAGIC:
        raise UserError(
            f"{path} is a file and no GGUF: give a .gguf file, or the folder that holds config.json and the weights "
            f"({path.parent})"
        )
    return Located("gguf", path, name, source)


def _no_config(folder: Path) -> str:
    ggufs = sorted(folder.glob("*.gguf"))
    if ggufs:
        return f"{folder} is a folder with {len(ggufs)} .gguf files: give the file itself, for instance {ggufs[0]}"
    inner = sorted({path.parent for depth in ("*", "*/*") for path in folder.glob(f"{depth}/{CONFIG_FILE}")})
    if inner:
        return f"{folder} has no {CONFIG_FILE}: give the folder that holds it, for instance {inner[0]}"
    return f"{folder} has no {CONFIG_FILE}, so it is no model folder: give one that transformers saved"


def _model_files(folder: Path) -> list[Path]:
    index = [folder / INDEX_FILE] if (folder / INDEX_FILE).is_file() else []
    return [*weight_files(folder), *index, *companion_files(folder), *folder.glob("*.py")]


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that no file system could hold
        return False


def _packaged_gguf(name: str) -> Path | None:
    """The one .gguf file of an installed distribution, or None. The package is not imported."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        return None
    try:
        files = [file for file in metadata.files(name) or [] if file.name.endswith(".gguf")]
    except metadata.PackageNotFoundError:
        return None
    return Path(str(files[0].locate())) if len(files) == 1 else None


def _not_found(text: str, path: Path) -> str:
    presets = similar_presets(text)
    near = [f"the preset {name}" for name in presets[:2]] + _similar_paths(path)
    meant = f"did you mean {' or '.join(near)}?" if near else "fleetune presets lists the presets"
    return (
        f"model {text!r} is no preset, no path that exists, no installed package with a .gguf file and no hub id (ORG/NAME): "
        f"{meant}"
    )


def _similar_paths(path: Path) -> list[str]:
    """Paths beside `path` whose names are like its own."""
    if not path.parent.is_dir():
        return []
    names = sorted(entry.name for entry in path.parent.iterdir() if not entry.name.startswith("."))
    return [str(path.parent / name) for name in difflib.get_close_matches(path.name, names, n=2, cutoff=0.7)]


def _short(text: str) -> str:
    """A name for folders: the last part of an id or path, lower case, plain characters, at most 40."""
    plain = re.sub(r"[^a-z0-9.]+", "-", text.rpartition("/")[2].lower()).strip("-.")
    return plain[:40].strip("-.") or "model"
