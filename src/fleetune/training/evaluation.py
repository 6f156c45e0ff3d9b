"""`fleetune evaluate`: a model's loss, perplexity and exact match on a data file, in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fleetune.spec.errors import UserError
from fleetune.spec.records import MicroBatch
from fleetune.training.answers import Question, question_of
from fleetune.training.assess import Assessment, answer_all, assessment, held_out_loss
from fleetune.training.sources import ModelRequest, ModelSource, prepare_source, rows_fingerprint, tokenizer_of

if TYPE_CHECKING:
    from fleetune.data.store import TokenStore
    from fleetune.models.causal import CausalModel


@dataclass(frozen=True)
class EvaluateOptions:
    """How a model is evaluated. The rows are read as the training reads held-out rows; lengths in tokens."""

    max_rows: int | None = None
    exact_match: bool = False
    max_new_tokens: int = 128
    sequence_length: int = 1024
    train_on: str = "assistant"
    data_shape: str = "auto"
    columns: dict[str, str] = field(default_factory=dict)
    revision: str | None = None
    precision: str = "auto"
    chat_template: str | None = None
    offline: bool = False
    allow_remote_code: bool = False
    device: str = "cpu"
    threads: int | None = None


class OneRank:
    """The only rank there is: what `assess` needs to know of the others."""

    data_rank = 0
    data_ranks = 1

    def any(self, flag: bool) -> bool:
        return flag

    def gather_json(self, value: Any) -> list[Any]:
        return [value]


def request_of(model: str, options: EvaluateOptions) -> ModelRequest:
    return ModelRequest(
        model=model,
        revision=options.revision,
        offline=options.offline,
        allow_remote_code=options.allow_remote_code,
        precision=options.precision,
        chat_template=options.chat_template,
    )


def load_for_reading(source: ModelSource, request: ModelRequest, *, device: str, threads: int | None = None) -> CausalModel:
    """The model with its adapter, frozen, on one device, ready to read and to reply."""
    import torch

    from fleetune.models.adapters import load_adapter
    from fleetune.models.build import load_model

    if threads:
        torch.set_num_threads(threads)
    model = load_model(
        source.folder,
        dtype=source.precision,
        device=torch.device(device),
        trainable=False,
        allow_remote_code=request.allow_remote_code,
        quantized=source.quantized,
    )
    if source.adapter is not None:
        model = load_adapter(model, source.adapter, trainable=False)
    model.eval()
    return model


def forward_only(model: CausalModel) -> Callable[[Sequence[MicroBatch]], tuple[float, int]]:
    """(sum of the loss, trained tokens) of micro-batches, without gradients."""
    import torch

    from fleetune.models.objective import TokenLoss

    objective = TokenLoss()

    def evaluate(micro_batches: Sequence[MicroBatch]) -> tuple[float, int]:
        total, count = 0.0, 0
        with torch.no_grad():
            for micro_batch in micro_batches:
                laid_out = model.lay_out(micro_batch)
                loss_sum, weight = objective(model.hidden(laid_out), laid_out, model.head)
                total, count = total + float(loss_sum), count + weight
        return total, count

    return evaluate


def questions_of(store: TokenStore, *, max_rows: int | None = None) -> list[Question]:
    """The held-out rows as questions, in reading order; rows without a prompt (plain text) are left out."""
    from fleetune.data.loader import evaluation_batches

    found: list[Question] = []
    for batch in evaluation_batches(store, micro_batch_tokens=4096, data_rank=0, data_ranks=1, max_rows=max_rows):
        for number, sample in enumerate(batch.samples):
            start, end = int(batch.document_bounds[number]), int(batch.document_bounds[number + 1])
            question = question_of(sample, batch.tokens[start:end], batch.trained[start:end])
            if question is not None:
                found.append(question)
    return found


def end_tokens(questions: Sequence[Question], tokenizer: Any) -> set[int]:
    """The control tokens that end the wanted answers: what the model was trained to stop with."""
    return {question.answer[-1] for question in questions} & set(tokenizer.all_special_ids)


def evaluate_model(model: str, data: tuple[str, ...], *, options: EvaluateOptions) -> Assessment:
    """Evaluate a model (by any name that --model takes, a run folder too) on rows. Raises UserError."""
    from fleetune.data.loader import evaluation_batches
    from fleetune.training.generation import greedy

    request = request_of(model, options)
    source = prepare_source(request, device=options.device)
    store, rows = open_rows(data, source, request, options)
    loaded = load_for_reading(source, request, device=options.device, threads=options.threads)
    batches = evaluation_batches(
        store, micro_batch_tokens=options.sequence_length, data_rank=0, data_ranks=1, max_rows=options.max_rows
    )
    loss, trained_tokens = held_out_loss(forward_only(loaded), batches, OneRank())
    replies = None
    if options.exact_match:
        questions = questions_of(store, max_rows=options.max_rows)
        if not questions:
            raise UserError(f"no row of {', '.join(data)} has a prompt and an answer: leave --exact-match out")
        tokenizer = tokenizer_of(source, request)
        generate = greedy(loaded, tokenizer, also_stop_at=end_tokens(questions, tokenizer))
        replies = answer_all(questions, generate, tokenizer, OneRank(), max_new_tokens=options.max_new_tokens)
    return assessment(loss, trained_tokens, min(rows, options.max_rows or rows), replies)


def open_rows(
    data: tuple[str, ...], source: ModelSource, request: ModelRequest, options: EvaluateOptions
) -> tuple[TokenStore, int]:
    """The rows as an unpacked token store in reading order, and how many rows it holds."""
    from fleetune.data.prepare import prepare_data
    from fleetune.data.request import DataRequest
    from fleetune.data.store import TokenStore

    asked = DataRequest(
        data=data,
        tokenizer_fingerprint=rows_fingerprint(source, request),
        data_shape=options.data_shape,
        columns=options.columns,
        sequence_length=options.sequence_length,
        packing=False,
        train_on=options.train_on,
        offline=options.offline,
    )
    prepared = prepare_data(asked, lambda: tokenizer_of(source, request))
    return TokenStore.open(prepared.store), prepared.report.rows
