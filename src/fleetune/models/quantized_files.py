"""Quantised weights as files: made once a node, kept in the cache by content, memory-mapped by every process.

Beside an ordinary model folder (which still gives embeddings, norms, biases and the head), a folder holds
`quantized.json` and one safetensors file for each block, with the parts of each of its linear layers.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetune.models.cache import cache_folder, lock
from fleetune.models.weight_files import read_weights_header
from fleetune.models.weight_writer import Planned, write_weights
from fleetune.spec.errors import UserError
from fleetune.spec.quantized import SCHEMES, is_quantizable, quantized_bytes
from fleetune.spec.run_folder import read_json, write_json

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fleetune.models.anatomy import Anatomy

LIST_FILE = "quantized.json"
#: Lies beside an adapter that was trained on a quantised base: what the base was.
BASE_FILE = "base_quantization.json"
#: Raised whenever the same weights would be quantised into other bytes or files.
_CODE_VERSION = 1
_SPARE_BYTES = 16 << 20
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class QuantizedWeights:
    """The quantised weights of a model. layers: name in the model -> (shape [out, in], the file of its parts)."""

    folder: Path
    scheme: str
    layers: dict[str, tuple[tuple[int, int], Path]]

    @staticmethod
    def open(folder: Path) -> QuantizedWeights:
        """Read the list. Raises UserError where it is absent or not ours."""
        try:
            values = read_json(folder / LIST_FILE)
            layers = {name: ((int(out), int(into)), folder / file) for name, (out, into, file) in values["layers"].items()}
            return QuantizedWeights(folder, str(values["scheme"]), layers)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{folder} holds no quantised weights of fleetune's ({error}): remove it and start again") from None

    def parts(self) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        """(name, parts) of each layer, file by file; on the CPU and memory-mapped: never write into them."""
        from safetensors import safe_open

        from fleetune.models.quantization import PARTS

        for path in dict.fromkeys(path for _, path in self.layers.values()):
            with safe_open(path, framework="pt") as file:
                for name, (_, own) in self.layers.items():
                    if own == path:
                        yield name, {part: file.get_tensor(f"{name}.{part}") for part in PARTS[self.scheme]}

    def dense(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The weight [out, in] of one layer in `dtype`."""
        from safetensors import safe_open

        from fleetune.models.quantization import PARTS, dequantize

        shape, path = self.layers[name]
        with safe_open(path, framework="pt") as file:
            parts = {part: file.get_tensor(f"{name}.{part}") for part in PARTS[self.scheme]}
        return dequantize(parts, shape, self.scheme, dtype)


@dataclass(frozen=True)
class QuantisedUnder:
    """How the base of an adapter was quantised: its scheme, and the precision of the weights that it was made from."""

    quantize: str
    precision: str

    def write(self, adapter: Path) -> None:
        write_json(adapter / BASE_FILE, {"quantize": self.quantize, "precision": self.precision})

    @staticmethod
    def read(adapter: Path) -> QuantisedUnder | None:
        """None where the adapter says nothing: its base was not quantised. Raises UserError for a damaged file."""
        path = adapter / BASE_FILE
        try:
            values = read_json(path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read ({error}): export the adapter again") from None
        if values.get("quantize") not in SCHEMES or values.get("precision") not in ("fp32", "bf16", "fp16"):
            raise UserError(f"{path} names no quantisation of fleetune's: export the adapter again")
        return QuantisedUnder(values["quantize"], values["precision"])


def prepare_quantized(folder: Path, *, scheme: str, fingerprint: str, dtype: str, allow_remote_code: bool = False) -> Path:
    """The folder in the cache that holds the quantised linear layers of the model in `folder`; made if it is not there.

    folder: a prepared model in `dtype` (fp32, bf16, fp16), of which `fingerprint` tells the content. Once a node; several
    processes may call it at once. One tensor at a time is in memory. Raises UserError: no bitsandbytes, a full disk.
    """
    models = cache_folder("models")
    name = f"{fingerprint[:32]}-{dtype}-{scheme}-{_CODE_VERSION}-bitsandbytes-{_installed_version()}"
    made = models / (f"{name}-code" if allow_remote_code else name)
    if _is_whole(made):
        return made
    with lock(models / f".{made.name}.lock"):
        if _is_whole(made):  # another process made it while we waited
            return made
        for stale in models.glob(f".{made.name}.*.tmp"):  # nobody works on it: we hold the lock
            shutil.rmtree(stale, ignore_errors=True)
        began = time.monotonic()
        _log.info("quantising %s to %s, once: it is kept in %s", folder, scheme, made)
        aside = models / f".{made.name}.{os.getpid()}.tmp"
        aside.mkdir(mode=0o700)
        try:
            quantize_folder(folder, aside, scheme=scheme, dtype=dtype, allow_remote_code=allow_remote_code)
            if made.exists():
                shutil.rmtree(made)  # what is there is not whole: somebody deleted files of it
            os.rename(aside, made)
            _sync(models)
        except OSError as error:
            raise UserError(
                f"the quantised weights could not be written in {models} ({error.strerror or error}): make room there, or set "
                "FLEETUNE_CACHE to a folder you can write to"
            ) from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        _log.info("quantised in %.1f s", time.monotonic() - began)
    return made


def quantize_folder(source: Path, folder: Path, *, scheme: str, dtype: str, allow_remote_code: bool = False) -> None:
    """Quantise the linear layers of the model in `source` into the existing, empty `folder`."""
    from fleetune.models.anatomy import Anatomy
    from fleetune.models.build import PRECISIONS, empty_module

    module = empty_module(source, dtype=PRECISIONS[dtype], allow_remote_code=allow_remote_code)
    anatomy = Anatomy.of(module)
    layers = quantized_linears(module, anatomy)
    if not layers:
        raise UserError(
            f"{type(module).__name__} has no plain linear layers in its blocks, so that nothing of it can be quantised: leave "
            "--quantize out"
        )
    needed = sum(quantized_bytes(scheme, *shape) for shape in layers.values()) + _SPARE_BYTES
    if needed > (free := shutil.disk_usage(folder).free):
        raise UserError(
            f"quantising the model to {scheme} needs {needed / 1e9:.2f} GB, and {folder.parent} has {free / 1e9:.2f} GB free: "
            "make room, or set FLEETUNE_CACHE to a folder on a larger disk"
        )
    files = {
        name: f"{number:05d}.safetensors"
        for number, block in enumerate(anatomy.block_names())
        for name in layers
        if name.startswith(f"{block}.")
    }
    _write_blocks(folder, module, _reader(source, module, layers), files, scheme)
    listed = {name: [*shape, files[name]] for name, shape in layers.items()}
    write_json(folder / LIST_FILE, {"scheme": scheme, "layers": listed})
    _sync(folder)


def quantized_linears(module: nn.Module, anatomy: Anatomy) -> dict[str, tuple[int, int]]:
    """Name -> [out, in] of the layers that are quantised: the blocks' linear layers, Conv1D too.

    Not those whose weight is read past the layer (`bypassed`) or that the family keeps in fp32; never embedding and head,
    whose errors go straight into the logits, nor stacked experts, which are no layers of their own.
    """
    from fleetune.models.anatomy import is_conv1d
    from fleetune.models.build import kept_in_fp32

    kept = kept_in_fp32(module, next(module.parameters()).dtype)
    modules = dict(module.named_modules())
    found: dict[str, tuple[int, int]] = {}
    for block in anatomy.block_names():
        for inner in anatomy.linears:
            layer: Any = modules.get(name := f"{block}.{inner}")
            if layer is None or kept(f"{name}.weight") or f".{inner}".endswith(tuple(f".{one}" for one in anatomy.bypassed)):
                continue
            num_out, num_in = layer.weight.shape
            if is_conv1d(layer):
                num_out, num_in = num_in, num_out
            if is_quantizable(num_out, num_in):
                found[name] = (num_out, num_in)
    return found


def place_quantized(module: nn.Module, weights: QuantizedWeights, dtype: torch.dtype) -> None:
    """Put quantised layers, on the CPU, in the places of the linear layers; biases go over to them as they are."""
    from fleetune.models.anatomy import is_conv1d
    from fleetune.models.quantized_linear import QuantizedLinear

    for name, parts in weights.parts():
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        linear: Any = getattr(owner, leaf)
        layer = QuantizedLinear(
            parts, weights.layers[name][0], weights.scheme, dtype=dtype, bias=linear.bias, was_conv1d=is_conv1d(linear)
        )
        setattr(owner, leaf, layer.train(linear.training))


def _write_blocks(
    folder: Path, module: nn.Module, read: Callable[[str], torch.Tensor], files: dict[str, str], scheme: str
) -> None:
    """Quantise block by block: one weight and one block's parts are in memory at a time. files: layer -> its file's name."""
    from fleetune.models.anatomy import is_conv1d
    from fleetune.models.quantization import quantize

    for file in dict.fromkeys(files.values()):
        tensors: dict[str, torch.Tensor] = {}
        for name in (name for name, own in files.items() if own == file):
            weight = read(name)
            try:
                parts = quantize(weight.t() if is_conv1d(module.get_submodule(name)) else weight, scheme)
            except UserError as error:
                raise UserError(f"the weight {name} cannot be quantised to {scheme}: {error}") from None
            tensors.update({f"{name}.{part}": value for part, value in parts.items()})
        formats = {name: str(value.dtype).removeprefix("torch.") for name, value in tensors.items()}
        planned = [Planned(name, formats[name], tuple(value.shape)) for name, value in tensors.items()]
        write_weights(folder / file, planned, tensors.__getitem__)


def _reader(source: Path, module: nn.Module, layers: Iterable[str]) -> Callable[[str], torch.Tensor]:
    """name of a layer -> its weight as it is stored, memory-mapped.

    Where transformers makes a layer's weight of several stored ones, the model is read as a whole, by transformers.
    """
    from safetensors import safe_open

    from fleetune.models.build import read_module
    from fleetune.models.stored import StoredWeights, naming

    stored = StoredWeights.open(source)
    name_of = naming(module)
    direct = {name: own for own in stored.files for name, converted in (name_of(own),) if not converted}
    if any(f"{name}.weight" not in direct for name in layers):
        whole = read_module(source, dtype=next(module.parameters()).dtype, device="cpu", trainable=False)
        return lambda name: whole.get_parameter(f"{name}.weight").detach()

    def read(name: str) -> torch.Tensor:
        own = direct[f"{name}.weight"]
        with safe_open(stored.files[own], framework="pt") as file:
            return file.get_tensor(own)

    return read


def _installed_version() -> str:
    """Of bitsandbytes, without importing it. Raises UserError naming the extra."""
    try:
        return metadata.version("bitsandbytes")
    except metadata.PackageNotFoundError:
        raise UserError(
            "a quantised base needs the package bitsandbytes, which is not installed here: pip install 'fleetune[quant]', or "
            "leave --quantize out"
        ) from None


def _is_whole(folder: Path) -> bool:
    """A folder appears by one rename, so it is whole unless somebody deleted from it (a cleaner of caches)."""
    if not (folder / LIST_FILE).is_file():
        return False
    try:
        for path in {path for _, path in QuantizedWeights.open(folder).layers.values()}:
            read_weights_header(path)
    except (OSError, UserError):
        return False
    return True


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
