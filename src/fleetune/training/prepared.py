"""What preparation found, handed from `prepare` (once a node) to every worker through `prepared.json`."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from fleetune.spec.run_folder import RunFolder, read_json, write_json


@dataclass(frozen=True)
class Prepared:
    """Everything a worker needs that costs time or a network to find.

    model_folder: an ordinary model folder, weights in the dtype they are used in. hub_id: the hub's name of the model, where
    it came from there. adapter_folder: an adapter to go on with. store, validation_store: token stores.
    data_fingerprint: content of data, tokenizer, template, options and code version.
    precision: `fp32`, `bf16` or `fp16`, resolved. has_conversations: whether any row was written with a chat template.
    quantized_folder: quantised weights of the linear layers, or None. system: what every conversation begins with, or "".
    """

    model_folder: str
    model_name: str
    hub_id: str | None
    model_fingerprint: str
    adapter_folder: str | None
    store: str
    validation_store: str | None
    data_fingerprint: str
    precision: str
    device: str
    num_sequences: int
    has_conversations: bool
    quantized_folder: str | None = None
    system: str = ""

    def write(self, folder: RunFolder, node: int = 0) -> None:
        write_json(folder.prepared_on(node), asdict(self))

    @staticmethod
    def read(folder: RunFolder, node: int = 0) -> Prepared:
        """node: the number of this machine: each has caches of its own, and so paths of its own."""
        values = read_json(folder.prepared_on(node))
        values.pop("version")
        return Prepared(**values)
