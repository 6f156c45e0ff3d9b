"""Fine-tune a Hugging Face language model on whatever machines you have.

    import fleetune
    run = fleetune.train(model="smollm2-135m", data="rows.jsonl", validation_share=0.1)
    run.evaluate(data="held_out.jsonl"); run.generate("Hello!"); run.export("merged")

`fleetune.main([...])` is the command line, for programs that say other words in those of fleetune.

Importing this costs nothing: what is needed is imported when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fleetune.cli.main import main
    from fleetune.cli.run_object import Run, plan, train

__version__ = "0.1.0"
__all__ = ["Run", "main", "plan", "train"]


def __getattr__(name: str) -> Any:
    if name == "main":
        from fleetune.cli.main import main

        return main
    if name in __all__:
        from fleetune.cli import run_object

        return getattr(run_object, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
