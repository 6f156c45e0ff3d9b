"""From what a person names (a file, a folder, a hub data set) to the files that hold rows."""

from __future__ import annotations

import difflib
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fleetune.data.rows import DataFile, listed
from fleetune.spec.errors import UserError, raise_if_any

FORMATS = {
    ".jsonl": "json",
    ".jsonlines": "json",
    ".ndjson": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".txt": "text",
    ".text": "text",
    ".arrow": "arrow",
}
_KNOWN = "jsonl, json, csv, tsv, parquet, txt, arrow"
#: Files that lie beside data and hold none.
_NOT_DATA = {
    "dataset_info.json",
    "dataset_infos.json",
    "dataset_dict.json",
    "state.json",
    "metadata.json",
    "license.txt",
    "readme.txt",
    "notice.txt",
}
#: Keys that make a config.json the description of a cluster (h2oGPT and its like keep it beside the data).
_CLUSTER_KEYS = {"distributed_backend", "node_list"}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?:/[\w./-]+)?(?:@[\w./-]+)?")
TRAINING = re.compile(r"(^|[^a-z])train", re.IGNORECASE)
HELD_OUT = re.compile(r"(^|[^a-z])(test|valid|validation|val|dev|eval)([^a-z]|$)", re.IGNORECASE)


@dataclass(frozen=True)
class Found:
    """Files with rows, in reading order, and what was passed over, with the reason."""

    files: tuple[DataFile, ...]
    passed_over: tuple[str, ...] = ()


def find_files(names: Sequence[str], *, offline: bool) -> Found:
    """The files of every name. Raises one UserError with all problems. Only a hub id that was typed opens a connection."""
    files: list[DataFile] = []
    passed_over: list[str] = []
    problems: list[str] = []
    for source, name in enumerate(names):
        try:
            found = _find(name, source, offline=offline)
        except UserError as error:
            problems += error.problems
            continue
        files += found.files
        passed_over += found.passed_over
    problems += _given_twice(files)
    raise_if_any(problems)
    return Found(tuple(_with_unique_ids(files)), tuple(passed_over))


def _find(name: str, source: int, *, offline: bool) -> Found:
    if re.match(r"[a-z][a-z0-9+.-]*://", name):
        raise UserError(f"data {name!r} is an address: download the file, and give its path")
    if not name.strip():
        raise UserError(f"data {name!r} is no name: give the path of a file or folder")
    path = Path(name).expanduser()
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if _is_hub_id(name):
            from fleetune.data.hub import fetch_data_set

            return _in_folder(fetch_data_set(name, offline=offline), source, name)
        raise UserError(f"data {name!r} does not exist{_did_you_mean(path)}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"data {name!r} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if stat.S_ISDIR(mode):
        return _in_folder(path, source, path.name or path.resolve().name)
    if not stat.S_ISREG(mode):
        raise UserError(f"data {name!r} is neither a file nor a folder: write the rows into a file first")
    return Found((_file(path, path.name, source),))


def _is_hub_id(name: str) -> bool:
    has_suffix = Path(name).suffix.lower() in FORMATS
    return bool(_HUB_ID.fullmatch(name)) and not has_suffix and not Path(name.split("/")[0]).exists()


def _did_you_mean(path: Path) -> str:
    folder = path.parent
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return f": there is no folder {str(folder)!r} either. Check the path"
    close = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    if close:
        return f": did you mean {' or '.join(str(folder / name) for name in close)}?"
    return f" ({folder} has no file of such a name): check the path"


def _file(path: Path, label: str, source: int) -> DataFile:
    kind = FORMATS.get(path.suffix.lower())
    if kind is None:
        raise UserError(f"data {str(path)!r} has a suffix that tells no known format ({_KNOWN}): rename or convert it")
    if cluster := _cluster_keys(path):
        raise UserError(f"data {str(path)!r} describes a cluster ({listed(cluster)}) and holds no rows: give the data file")
    if not os.access(path, os.R_OK):
        raise UserError(f"data {str(path)!r} may not be read by you: change its permissions")
    return DataFile(label, path, kind, (path,), source)


def _cluster_keys(path: Path) -> list[str]:
    """The keys that make `path` a cluster file; empty for any other file."""
    if path.name != "config.json" or path.stat().st_size > 1 << 20:
        return []
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError, OSError):
        return []
    return sorted(_CLUSTER_KEYS & set(value)) if isinstance(value, dict) else []


def _in_folder(folder: Path, source: int, label: str) -> Found:
    """Files of a folder and its sub-folders, sorted by name; an Arrow folder is one file."""
    if (folder / "dataset_dict.json").is_file():
        return _arrow_split(folder, source, label)
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        return Found((_arrow_folder(folder, source, label),))
    files: list[DataFile] = []
    passed_over: list[str] = []
    for path in _walk(folder):
        name = f"{label}/{path.relative_to(folder).as_posix()}"
        if _cluster_keys(path):
            passed_over.append(f"{name}: describes a cluster")
        elif path.suffix.lower() in FORMATS and path.name.lower() not in _NOT_DATA:
            if path.stat().st_size == 0:
                passed_over.append(f"{name}: is empty")
            else:
                files.append(_file(path, name, source))
        elif path.suffix.lower() not in (".md", ".py", ".jinja", ".yaml", ".lock") and path.name.lower() not in _NOT_DATA:
            passed_over.append(f"{name}: not a format of rows")
    place = {file.id: file.path.relative_to(folder).with_suffix("").as_posix() for file in files}
    held_out = [file for file in files if HELD_OUT.search(place[file.id])]
    if any(TRAINING.search(place[file.id]) for file in files):
        passed_over += [f"{file.id}: held-out rows by its name" for file in held_out]
        files = [file for file in files if file not in held_out]
    if not files:
        seen = listed(passed_over) or "it is empty"
        raise UserError(f"data {str(folder)!r} is a folder without files of rows ({_KNOWN}): {seen}. Give the file itself")
    return Found(tuple(files), tuple(passed_over))


def _walk(folder: Path) -> list[Path]:
    found = []
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__")))
        found += [Path(place) / name for name in names if not name.startswith(".")]
    return sorted(path for path in found if path.is_file())


def _arrow_split(folder: Path, source: int, label: str) -> Found:
    """The training split of a folder with several (`DatasetDict.save_to_disk`), or its only one."""
    splits = _read_object(folder / "dataset_dict.json").get("splits")
    if not isinstance(splits, list) or not splits or not all(_is_plain_name(name) for name in splits):
        raise UserError(f"{folder / 'dataset_dict.json'} names no splits: give the folder of one split")
    if "train" not in splits and len(splits) > 1:
        raise UserError(f"data {str(folder)!r} has the splits {listed(splits)} and no 'train': give {folder / splits[0]}, say")
    chosen = "train" if "train" in splits else splits[0]
    others = tuple(f"{label}/{name}: another split" for name in splits if name != chosen)
    return Found((_arrow_folder(folder / chosen, source, f"{label}/{chosen}"),), others)


def _arrow_folder(folder: Path, source: int, label: str) -> DataFile:
    listing = _read_object(folder / "state.json").get("_data_files")
    names = [entry.get("filename") for entry in listing if isinstance(entry, dict)] if isinstance(listing, list) else []
    if not names or not all(_is_plain_name(name) for name in names):
        raise UserError(f"{folder / 'state.json'} names no Arrow files of its own folder: save the data set again")
    parts = tuple(folder / str(name) for name in names)
    if missing := [part.name for part in parts if not part.is_file()]:
        raise UserError(f"data {str(folder)!r} lacks {listed(missing)}, which its state.json names: save the data set again")
    return DataFile(label, folder, "arrow", parts, source)


def _is_plain_name(name: object) -> bool:
    return isinstance(name, str) and bool(name) and name not in (".", "..") and not set(name) & set("/\\\0")


def _read_object(path: Path) -> dict[str, object]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}. Save the data set again") from None
    return value if isinstance(value, dict) else {}


def _given_twice(files: list[DataFile]) -> list[str]:
    seen: set[Path] = set()
    problems = []
    for file in files:
        real = file.path.resolve()
        if real in seen:
            problems.append(
                f"data {str(file.path)!r} is given twice: name it once, and use --data-weights to see it more often"
            )
        seen.add(real)
    return problems


def _with_unique_ids(files: list[DataFile]) -> list[DataFile]:
    """Ids that never clash: a file's name, with more of its path where two are alike. `:`, `#`, `%` and blanks are escaped."""
    labels = [file.id for file in files]
    for depth in range(2, 1 + max((len(file.path.resolve().parts) for file in files), default=0)):
        counts = Counter(labels)
        alike = [index for index, label in enumerate(labels) if counts[label] > 1]
        if not alike:
            break
        for index in alike:
            labels[index] = "/".join(files[index].path.resolve().parts[-depth:])
    escaped = [re.sub(r"[%:#\s]", lambda found: f"%{ord(found.group()):02x}", label) for label in labels]
    return [replace(file, id=label) for file, label in zip(files, escaped)]
