"""The size of a run, from its budget and its text: the model's shape, vocabulary, sequence length, batch and training
FLOPs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Literal

from plait.data.index import SampleLayout
from plait.data.samples.sizes import CorpusSizes, Overlong
from plait.errors import PlaitError
from plait.model.names import LAYER_TABLE
from plait.model.parts.objectives import OBJECTIVE_KEYS, objectives_of_keys
from plait.model.requested_size import named_size, parameters_of_size, shape_of_size
from plait.model.shape import ModelShape, parameter_count, weight_sizes
from plait.model.sizes import MODEL_SIZES, explicit_shape, nearest_size
from plait.planner.derive import published_rules
from plait.planner.derive.adapters import adapter_for, saved_modules
from plait.planner.derive.derived import Derived
from plait.planner.derive.published_rules import EPOCHS, EPOCHS_AFTER, examples_batch_tokens
from plait.planner.problem.model_words import mixture_reasons, objective_reasons
from plait.recipe.finetune import ADAPTER_METHODS, FinetuneSection
from plait.recipe.schema import RunConfig
from plait.units import Amount, counted, format_count, format_si, parse_amount, power_of_ten

GUESSED_PEAK_FLOPS = 100e12
"""Arithmetic peak, in FLOP/s, that an unknown GPU is assumed to have while the model is sized."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseFacts:
    """What the plan must know of the model that a run goes on from."""

    folder: str
    shape: ModelShape
    """Its `sequence` is the longest that the model takes."""
    fingerprint: str = ""
    """Tells it from every other model; empty where nobody asks."""
    reasons: tuple[str, ...] = ()
    """What is to be said of it once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusFacts:
    """What the plan must know of the prepared data, and of the model that learns from it where there is one already."""

    folder: str
    content_hash: str
    vocabulary: int
    train_tokens: int
    longest_sequence: int
    heldout_tokens: int
    documents: int
    base: BaseFacts | None = None
    layout: SampleLayout = "stream"
    sizes: CorpusSizes | None = None
    """How long the examples are; None where the text was not looked at."""
    added_tokens: int = 0
    """How many of the tokenizer's last entries were added after it was trained; asked where the model has fewer."""

    def __str__(self) -> str:
        """One line, as `plait data` prints it."""
        held_out = f"{format_count(self.train_tokens)} training tokens, {format_count(self.heldout_tokens)} held out"
        what = {"stream": "document", "whole": "example", "pairs": "pair"}[self.layout]
        documents = f"{format_count(self.documents)} {what}{'s' if self.documents != 1 else ''}"
        return f"data     {held_out}; {documents}, vocabulary {self.vocabulary}"

    @property
    def tokens_per_document(self) -> float:
        """On average, at least 1."""
        return max(1.0, self.train_tokens / max(1, self.documents))

    def epoch_tokens(self, sequence: int, overlong: Overlong) -> int:
        """Tokens of the windows of one pass."""
        if self.sizes is None:
            return max(1, self.train_tokens // sequence) * sequence
        return self.sizes.epoch_windows(sequence, overlong) * sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRate:
    """How fast a run of a time budget is expected to train."""

    flops_per_s: float
    """Training FLOPs (6 for each parameter and token) per second, all devices together."""
    source: Literal["assumed", "forecast"]
    size: str = ""
    """The named size that trains at it, where plait has chosen one; empty: the size follows from the rate."""
    too_large: str = ""
    """The smallest named size that was found to fit no layout; empty where none was."""

    def __str__(self) -> str:
        return f"{format_si(self.flops_per_s, 'FLOP/s')} {'as forecast' if self.source == 'forecast' else 'assumed'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSize:
    """How large a run is: its budget, the model, and the tokens and FLOPs of training.

    Tokens and FLOPs are a first guess where the budget is time, or steps of an open batch.
    """

    budget: Amount
    shape: ModelShape
    tokens: float
    flops: float
    most_tokens: int | None = None
    """Tokens after which a run of a time budget stops, as its text has nothing left to teach; None: no such limit."""


def budget_of(config: RunConfig) -> Amount:
    """The recipe's budget; else the usual epochs of tuning, 20 tokens a parameter of a named size, or 10 minutes."""
    if config.train.budget != "auto":
        return parse_amount(config.train.budget)
    if config.finetune.method != "auto":
        return Amount(EPOCHS[config.finetune.objective], "epochs")
    if config.model.size != "auto":
        parameters = parameters_of_size(config.model.size, vocabulary=32768)
        return Amount(published_rules.TOKENS_PER_PARAMETER * parameters, "tokens")
    return Amount(600, "seconds")


def derive_run_size(config: RunConfig, corpus: CorpusFacts, rate: TrainingRate) -> Derived[RunSize]:
    """Settle budget and shape, and with them the size of the run."""
    budget, why = budget_of(config), list[str]()
    if corpus.base is not None:
        return _size_of_base(config, corpus, corpus.base, rate, budget)
    vocabulary = fitting_vocabulary(config.model.vocabulary, corpus.vocabulary)
    if config.train.budget == "auto":
        named = config.model.size != "auto"
        what = "20 tokens a parameter (Hoffmann 2022)" if named else "no model size or budget was asked for"
        why.append(f"budget {budget}: {what}")
    chosen = chosen_size(config, corpus, rate) if has_open_size(config, corpus) else None
    found = _model_shape(config, chosen or config.model.size, vocabulary, corpus)
    run = _run_size(config, corpus, found.value, budget, rate)
    why += found.reasons
    if chosen:
        why.append(f"model {format_count(parameter_count(run.shape))} parameters: {_size_reason(config, corpus, rate)}")
        if budget.unit == "seconds":
            run = _ending_with_its_text(run, corpus.train_tokens)
    return Derived(value=run, reasons=tuple(why))


def has_open_size(config: RunConfig, corpus: CorpusFacts) -> bool:
    """Whether the model's size is plait's to choose."""
    return corpus.base is None and config.model.size == "auto" and "auto" in (config.model.layers, config.model.width)


def smaller_size(config: RunConfig, corpus: CorpusFacts, rate: TrainingRate) -> str:
    """The next smaller named size than a rate leads to; empty where there is none, or the size is not plait's to
    choose."""
    return _neighbour(config, corpus, rate, -1)


def larger_size(config: RunConfig, corpus: CorpusFacts, rate: TrainingRate) -> str:
    """The next larger named size, unless the text could not train it or it was found to fit no layout; else empty."""
    larger = _neighbour(config, corpus, rate, 1)
    is_useful = chosen_size(config, corpus, rate) != _largest_useful_size(config, corpus)
    return larger if is_useful and larger != rate.too_large else ""


def expected_loss(config: RunConfig, corpus: CorpusFacts, shape: ModelShape, tokens_per_s: float) -> float:
    """What a time budget leaves of the loss that training can take away, by the law of repeated text."""
    tokens = min(budget_of(config).value * tokens_per_s, published_rules.useful_tokens(corpus.train_tokens))
    return published_rules.reducible_loss(parameter_count(shape), tokens, corpus.train_tokens)


def _neighbour(config: RunConfig, corpus: CorpusFacts, rate: TrainingRate, step: Literal[-1, 1]) -> str:
    if not has_open_size(config, corpus):
        return ""
    sizes = list(MODEL_SIZES)
    at = sizes.index(chosen_size(config, corpus, rate)) + step
    return sizes[at] if 0 <= at < len(sizes) else ""


def chosen_size(config: RunConfig, corpus: CorpusFacts, rate: TrainingRate) -> str:
    """The named size that was chosen, or the one that should learn most at this rate."""
    return rate.size or _nearest_size(config, corpus, _best_parameter_count(config, corpus, rate))


def _largest_useful_size(config: RunConfig, corpus: CorpusFacts) -> str:
    return _nearest_size(config, corpus, published_rules.useful_parameters(corpus.train_tokens))


def _nearest_size(config: RunConfig, corpus: CorpusFacts, parameters: float) -> str:
    return nearest_size(parameters, fitting_vocabulary(config.model.vocabulary, corpus.vocabulary))


def _size_reason(config: RunConfig, corpus: CorpusFacts, rate: TrainingRate) -> str:
    if rate.too_large and _neighbour(config, corpus, rate, 1) == rate.too_large:
        return f"the largest that fits (no layout holds {rate.too_large})"
    if chosen_size(config, corpus, rate) == _largest_useful_size(config, corpus):
        return f"more would learn nothing from {format_count(corpus.train_tokens)} tokens of text (Muennighoff 2023)"
    timed = f" and repeated text counts less, {rate}" if budget_of(config).unit == "seconds" else ""
    return f"learns most within the budget (20 tokens a parameter{timed})"


def _ending_with_its_text(run: RunSize, unique_tokens: int) -> RunSize:
    """The run, over at the latest when its text teaches nothing more."""
    most = ceil(published_rules.useful_tokens(unique_tokens))
    share = min(1.0, most / run.tokens)
    return replace(run, tokens=run.tokens * share, flops=run.flops * share, most_tokens=most)


def _run_size(config: RunConfig, corpus: CorpusFacts, shape: ModelShape, budget: Amount, rate: TrainingRate) -> RunSize:
    if budget.unit == "epochs":
        budget = replace(budget, epoch_tokens=corpus.epoch_tokens(shape.sequence, config.data.overlong))
    per_token = published_rules.training_flops_of_weights(shape)
    tokens = _training_tokens(config, budget, rate.flops_per_s / per_token, shape.sequence)
    return RunSize(budget=budget, shape=shape, tokens=tokens, flops=per_token * tokens)


def _size_of_base(
    config: RunConfig, corpus: CorpusFacts, base: BaseFacts, rate: TrainingRate, budget: Amount
) -> Derived[RunSize]:
    """The size of a run that goes on from a model; raises PlaitError where text and model do not fit each other."""
    grown = grown_shape(base.shape, corpus.vocabulary, corpus.added_tokens, config.finetune)
    shape, why = grown.value, [*grown.reasons]
    if config.train.budget == "auto":
        tuned = f"the usual passes over the data in fine-tuning ({EPOCHS_AFTER[config.finetune.objective]})"
        why.append(f"budget {budget}: {'none was asked for' if config.finetune.method == 'auto' else tuned}")
    why += base.reasons
    window = _sequence(config, parameter_count(shape), corpus, longest_of_model=shape.sequence)
    sequence, why = window.value, [*why, *window.reasons]
    if sequence > shape.sequence:
        raise PlaitError(
            f"train.sequence = {sequence} is longer than the {shape.sequence} tokens that the model was made for; "
            f"choose at most {shape.sequence}"
        )
    shape = replace(shape, sequence=sequence)
    if config.finetune.method in ADAPTER_METHODS:
        learned = corpus.documents if config.finetune.learns_pairs else corpus.train_tokens
        adapter = adapter_for(config.finetune, shape, learned)
        shape, why = replace(shape, adapter=adapter.value), [*why, *adapter.reasons]
    return Derived(value=_run_size(config, corpus, shape, budget, rate), reasons=tuple(why))


def _best_parameter_count(config: RunConfig, corpus: CorpusFacts, rate: TrainingRate) -> float:
    """Parameters that suit the budget and the text: the size that learns most in a time, or that the budget's tokens
    are enough to train."""
    budget, unique = budget_of(config), corpus.train_tokens
    if budget.unit == "seconds":
        flops = rate.flops_per_s * budget.value
        return published_rules.compute_optimal_parameters(flops=flops, unique_tokens=unique)
    parameters, flops = 1e6, 1e12
    for _ in range(50):  # size, FLOPs and batch depend on each other; this settles within a few rounds
        each = {"tokens": 1.0, "epochs": float(unique)}.get(budget.unit) or _batch_tokens(config, flops)
        tokens = budget.value * each
        parameters = max(published_rules.parameters_for_tokens(tokens), 1e5)
        flops = 6 * parameters * tokens
    return min(parameters, published_rules.useful_parameters(unique))


def _batch_tokens(config: RunConfig, flops: float) -> float:
    requested = config.train.batch_tokens
    return published_rules.usual_batch_tokens(flops) if requested == "auto" else float(requested)


def _training_tokens(config: RunConfig, budget: Amount, tokens_per_s: float, sequence: int) -> float:
    if budget.unit == "tokens":
        return budget.value
    if budget.unit == "epochs":
        return budget.value * budget.epoch_tokens
    if budget.unit == "seconds":
        return budget.value * tokens_per_s
    batch = 16384 if (requested := config.train.batch_tokens) == "auto" else requested
    return budget.value * max(batch, sequence)


def _model_shape(config: RunConfig, size: str, vocabulary: int, corpus: CorpusFacts) -> Derived[ModelShape]:
    requested = config.model.model_dump(exclude={"from_", "size", "vocabulary"})
    # A size is that of the model alone, whatever it learns from beside its next token.
    explicit: dict[str, Any] = {k: v for k, v in requested.items() if v != "auto" and k not in OBJECTIVE_KEYS}
    why: list[str] = []
    if size == "auto":
        provisional = explicit_shape(vocabulary=vocabulary, sequence=1024, **explicit)
    else:
        provisional = shape_of_size(size, vocabulary=vocabulary, sequence=1024, **explicit)
        if not named_size(size):
            why.append(
                f"model {format_count(parameter_count(provisional))} parameters, {provisional.layers} layers of width "
                f"{provisional.width}: as wide for its depth as published models of its size (GPT-3, Llama)"
            )
    window = _sequence(config, parameter_count(provisional), corpus)
    shape = replace(provisional, sequence=window.value, objectives=objectives_of_keys(requested))
    reasons = (*why, *window.reasons, *mixture_reasons(shape), *objective_reasons(shape))
    return Derived(value=shape, reasons=reasons)


def _sequence(
    config: RunConfig, parameters: int, corpus: CorpusFacts, longest_of_model: int | None = None
) -> Derived[int]:
    if corpus.layout != "stream" and corpus.sizes:
        step_tokens = _example_step_tokens(config, corpus)
        return example_sequence(
            config, parameters, corpus.sizes, longest_of_model=longest_of_model, step_tokens=step_tokens
        )
    return stream_sequence(
        config,
        parameters,
        train_tokens=corpus.train_tokens,
        longest=corpus.longest_sequence,
        longest_of_model=longest_of_model,
    )


def _example_step_tokens(config: RunConfig, corpus: CorpusFacts) -> float | None:
    """Tokens of a step, where neither the model's size nor a window's length decides about them."""
    method, requested = config.finetune.method, config.train.batch_tokens
    if requested != "auto":
        return requested
    return None if method == "auto" else examples_batch_tokens(method, corpus.tokens_per_document)


def batch_sequences(config: RunConfig, run_size: RunSize) -> Derived[int]:
    """Sequences of a step."""
    sequence, flops = run_size.shape.sequence, run_size.flops
    requested = config.train.batch_tokens
    if requested != "auto":
        if requested < sequence:
            raise PlaitError(
                f"train.batch_tokens = {requested} is less than one sequence of {sequence} tokens; "
                f"choose at least {sequence}, or a shorter train.sequence"
            )
        whole = f"batch {requested // sequence * sequence} tokens: the whole sequences in {requested}"
        return Derived(value=requested // sequence, reasons=(whole,) if requested % sequence else ())
    usual = published_rules.usual_batch_tokens(flops)
    least = usual if run_size.budget.unit == "steps" else published_rules.short_run_batch_tokens(run_size.tokens)
    sequences = published_rules.divisible_batch(min(usual, least) / sequence)
    reason = f"suits {power_of_ten(flops)} training FLOPs (DeepSeek LLM 2024)"
    if least < usual:
        reason = f"small, so that a short run has some {published_rules.LEAST_STEPS_OF_A_RUN:,} steps"
    return Derived(value=sequences, reasons=(f"batch {sequences * sequence} tokens: {reason}",))


_MULTIPLE = 64
"""Windows that are as long as the longest example are rounded up to it."""
WINDOWS_PER_STEP = 8
"""Where a step of the usual size fills fewer windows, they are made shorter: up to eight workers can share it then, and
it comes nearer to that size. What is learned is the same, as the examples in a window do not see each other."""
FULL_SHARE = 0.95
"""Windows are not made so short that packing fills less of them, if there is a choice."""


def stream_sequence(
    config: RunConfig, parameters: int, *, train_tokens: int, longest: int, longest_of_model: int | None
) -> Derived[int]:
    """For a stream of text: the usual length, or all that the text (`longest`) or the model allows. Raises PlaitError
    for a longer one."""
    requested = config.train.sequence
    if requested != "auto":
        if requested > longest:
            raise PlaitError(
                f"train.sequence = {requested} is longer than the data allow ({format_count(train_tokens)} "
                f"training tokens); choose at most {longest}"
            )
        return Derived(value=requested)
    usual = published_rules.usual_sequence_length(parameters)
    if longest_of_model is not None and longest_of_model < min(usual, longest):
        reason = f"sequence {longest_of_model}: the longest that the model was made for"
        return Derived(value=longest_of_model, reasons=(reason,))
    sequence = usual if usual <= longest else max(2, longest // 16 * 16 or longest)
    reason = f"sequence {sequence}: {'usual for this size' if sequence == usual else 'all that the data allow'}"
    return Derived(value=sequence, reasons=(reason,))


def example_sequence(
    config: RunConfig,
    parameters: int,
    sizes: CorpusSizes,
    *,
    longest_of_model: int | None,
    step_tokens: float | None,
) -> Derived[int]:
    """For whole examples: the usual length, longer where the longest example needs it, shorter where a step of
    `step_tokens` (None: not known yet) would have few windows. Raises PlaitError for examples that do not fit, unless
    the recipe says what becomes of them."""
    requested, overlong, why = config.train.sequence, config.data.overlong, list[str]()
    usual = published_rules.usual_sequence_length(parameters)
    needed = usual if overlong != "refuse" else max(usual, _rounded_up(sizes.longest_example))
    sequence = longest = min(needed, longest_of_model or needed) if requested == "auto" else requested
    sizes.check_overlong(longest, overlong)
    if requested == "auto":
        reason = "usual for this size" if longest == usual else f"the longest {sizes.unit} fits into it"
        reason = reason if longest == needed else "the longest that the model was made for"
        if step_tokens is not None and (shorter := _shorter_window(sizes, longest, step_tokens, overlong)) < longest:
            sequence, number = shorter, round(step_tokens / shorter)
            reason = f"{sizes.unit}s are short, and a step has {counted(number, 'such window')}"
        why.append(f"sequence {sequence}: {reason}")
    packed = sizes.packed(sequence, overlong)
    why.append(
        f"windows {packed.share:.1%} full: whole {sizes.unit}s, packed by best fit into {packed.windows:,} of them"
    )
    if packed.overlong:
        what = "left out" if overlong == "drop" else "cut at a window's end"
        why.append(f"{counted(packed.overlong, sizes.unit)} of more than {sequence} tokens {what} (data.overlong)")
    return Derived(value=sequence, reasons=tuple(why))


def _shorter_window(sizes: CorpusSizes, longest: int, step_tokens: float, overlong: Overlong) -> int:
    """The shortest window that is as full as windows should be and loses nothing, where a step has few of the longest;
    else the longest."""
    if overlong == "cut" and sizes.longest_example > longest:  # a shorter window would cut more
        return longest
    shortest = max(_rounded_up(sizes.longest_within(longest)), _rounded_up(step_tokens / WINDOWS_PER_STEP))
    choices = []
    while shortest < longest:
        choices.append(shortest)
        shortest *= 2
    shares: dict[int, float] = {}
    for sequence in (*choices, longest):
        shares[sequence] = sizes.packed(sequence, overlong).share if choices else 1.0
        if shares[sequence] >= FULL_SHARE:
            return sequence
    return max(shares, key=lambda sequence: shares[sequence])


def _rounded_up(tokens: float) -> int:
    return max(1, ceil(tokens / _MULTIPLE)) * _MULTIPLE


def fitting_vocabulary(requested: int | Literal["auto"], entries: int) -> int:
    """Vocabulary of a new model for a tokenizer of this many entries; raises PlaitError if fewer are requested."""
    if requested == "auto":
        return ceil(entries / 64) * 64
    if requested < entries:
        raise PlaitError(
            f"the tokenizer has {entries} entries, more than model.vocabulary = {requested}; "
            f'choose at least {entries}, or "auto"'
        )
    return requested


def grown_shape(shape: ModelShape, entries: int, added: int, finetune: FinetuneSection) -> Derived[ModelShape]:
    """A trained model's shape with rows for all of the tokenizer's entries, of which the last `added` were added to it
    after it was trained. Raises PlaitError where the others are more than the model has, and where new rows could not
    learn because their tables are frozen."""
    new, has = entries - shape.vocabulary, f"the tokenizer has {entries} entries and the model {shape.vocabulary}"
    if new <= 0:
        return Derived(value=shape)
    if new > added:
        raise PlaitError(
            f"{has}: it is not the model's own; take data.tokenizer out, or name the tokenizer that the model was "
            "trained with"
        )
    saved = saved_modules(finetune.modules_to_save, shape)
    if finetune.method in ADAPTER_METHODS and len(saved) < (1 if shape.tied else 2):
        tables = '["embed_tokens"]' if shape.tied else '["embed_tokens", "lm_head"]'
        raise PlaitError(
            f"{has}: adapters leave the embedding as it is, so that new tokens would never be learned; write "
            f"finetune.modules_to_save = {tables}, or take the added tokens out of the tokenizer"
        )
    if finetune.method in ADAPTER_METHODS and LAYER_TABLE in weight_sizes(shape):
        raise PlaitError(
            f"{has}: this model has a table of tokens for its layers, too, which stays frozen beside adapters; write "
            'finetune.method = "full", or take the added tokens out of the tokenizer'
        )
    reason = (
        f"vocabulary {entries}: {counted(new, 'row')} for tokens that were added to the tokenizer, each the mean of "
        f"the model's {shape.vocabulary} at first (Hewitt 2021)"
    )
    return Derived(value=replace(shape, vocabulary=entries), reasons=(reason,))
