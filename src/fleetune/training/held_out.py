"""The held-out rows of a run: evaluated in between, and before and after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetune.training.answers import Generate, Reply, Tell, nobody
from fleetune.training.assess import Assessment, answer_all, assessment, held_out_loss

if TYPE_CHECKING:
    from fleetune.data.store import TokenStore
    from fleetune.models.causal import CausalModel
    from fleetune.parallel.engine import Engine
    from fleetune.parallel.whole import WholeModel
    from fleetune.parallel.world import World


@dataclass
class HeldOut:
    """Held-out rows with what is needed to evaluate a live model on them. Every method is called by all ranks.

    tokenizer: gives the tokenizer when replies are decoded. max_new_tokens: None where no exact match was asked for.
    whole: gives the model that replies. tell: hears how far `assess` is.
    max_rows: only the first so many rows; None: all.
    """

    store: TokenStore
    engine: Engine
    whole: WholeModel
    world: World
    micro_batch_tokens: int
    stop_requested: Callable[[], bool]
    tokenizer: Callable[[], Any]
    max_new_tokens: int | None = None
    tell: Tell = nobody
    max_rows: int | None = None
    replies: list[Reply] = field(default_factory=list)

    @staticmethod
    def open(store: str | Path, **parts: Any) -> HeldOut:
        from fleetune.data.store import TokenStore

        return HeldOut(TokenStore.open(Path(store)), **parts)

    def loss(self) -> tuple[float, int]:
        """(mean loss per trained token, trained tokens). Raises `Stopped` when a rank was asked to stop."""
        from fleetune.data.loader import evaluation_batches

        batches = evaluation_batches(
            self.store,
            micro_batch_tokens=self.micro_batch_tokens,
            data_rank=self.world.data_rank,
            data_ranks=self.world.data_ranks,
            max_rows=self.max_rows,
        )
        return held_out_loss(self.engine.evaluate, batches, self.world, self.stop_requested)

    def assess(self) -> Assessment:
        """Loss, perplexity, and exact match where it was asked for; keeps the replies."""
        from fleetune.training.evaluation import end_tokens, questions_of

        count = self.store.num_documents_of(self.max_rows)
        self.tell("held-out loss", 0, count)
        loss, trained_tokens = self.loss()
        self.replies = []
        if self.max_new_tokens is not None:
            questions = questions_of(self.store, max_rows=self.max_rows)
            tokenizer = self.tokenizer()
            engine, stop = self.engine, end_tokens(questions, tokenizer)
            with self.whole() as model:
                self.replies = answer_all(
                    questions,
                    None if model is None else self._replies_of(model, tokenizer, stop),
                    tokenizer,
                    self.world,
                    max_new_tokens=self.max_new_tokens,
                    lockstep=engine.lockstep,
                    tell=self.tell,
                )
        return assessment(loss, trained_tokens, count, self.replies)

    def _replies_of(self, model: CausalModel, tokenizer: Any, stop: set[int]) -> Generate:
        from fleetune.training.generation import greedy

        engine = self.engine
        plain = greedy(model, tokenizer, also_stop_at=stop, lockstep=engine.lockstep)
        model.eval()
        return lambda prompts, longest: engine.live(lambda: plain(prompts, longest))

    def replies_json(self) -> list[dict[str, Any]]:
        return [asdict(reply) for reply in self.replies]
