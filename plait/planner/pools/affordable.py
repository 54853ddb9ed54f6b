"""From a budget of money to a model: the largest worth training, and its expected loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from plait.errors import PlaitError
from plait.machines.pool import Pool
from plait.model.shape import parameter_count
from plait.model.sizes import nearest_size
from plait.planner.derive.model_size import CorpusFacts, fitting_vocabulary, has_open_size
from plait.planner.derive.published_rules import (
    TOKENS_PER_PARAMETER,
    compute_optimal_parameters,
    predicted_losses,
    useful_tokens,
)
from plait.planner.pools.answer import PoolJob, pool_job
from plait.planner.pools.choice import Aims, PoolChoice, best_choice
from plait.planner.pools.choice_words import money_text
from plait.planner.pools.exploring import explore
from plait.planner.pools.pricing import PoolPricer
from plait.recipe.schema import RunConfig
from plait.units import format_count, format_days

ROUNDS = 4
"""At most this many sizes are tried, each at the cost of its own layouts."""
SPARED = 0.98
"""Share of the affordable tokens to plan with: steps are whole, and the batch depends on the number of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AffordableModel:
    """A model and an amount of training that a budget of money pays for."""

    config: RunConfig
    """The recipe with this size and these tokens."""
    size: str
    parameters: int
    tokens: int
    losses: dict[str, float]
    """By published scaling law, in nats per token of web text."""

    def sentence(self, aims: Aims, pool: Pool) -> str:
        """A sentence on what the budget pays for, and how certain the loss is."""
        low, high = min(self.losses.values()), max(self.losses.values())
        assert aims.max_cost is not None
        within = f" within {format_days(aims.deadline_s)}" if aims.deadline_s else ""
        return (
            f"{money_text(aims.max_cost, pool.currency)} on these machines{within}: the largest model worth training "
            f"is {self.size} ({format_count(self.parameters)} parameters) on {format_count(self.tokens)} tokens, "
            f"{self.tokens / self.parameters:.0f} a parameter; its loss should be {low:.2f} to {high:.2f} nats a token "
            f"on web text (the spread of the scaling laws of {', '.join(self.losses)}; it differs for other text)"
        )


def asks_for_model(config: RunConfig, corpus: CorpusFacts) -> bool:
    """Whether a recipe gives money but neither a model nor an amount of training."""
    return config.plan.max_cost is not None and config.train.budget == "auto" and has_open_size(config, corpus)


def affordable_model(config: RunConfig, corpus: CorpusFacts, pool: Pool, aims: Aims) -> AffordableModel:
    """The model that learns the most for the money within the recipe's bounds; raises PlaitError if the money is too
    little."""
    assert aims.max_cost is not None
    vocabulary = fitting_vocabulary(config.model.vocabulary, corpus.vocabulary)
    size, tried = "125M", dict[str, tuple[float, RunConfig, int, int]]()
    for _ in range(ROUNDS):
        sized = config.model_copy(update={"model": config.model.model_copy(update={"size": size})})
        job = pool_job(sized, corpus, pool)
        parameters = parameter_count(job.sized.job.shape)
        choices = _explored(job, corpus, pool, aims)
        tokens = SPARED * _most_tokens(choices, aims)
        tokens = min(tokens, useful_tokens(corpus.train_tokens))
        loss = min(predicted_losses(parameters, tokens, corpus.train_tokens).values())
        tried[size] = loss, sized, int(tokens), parameters
        best = compute_optimal_parameters(flops=6 * parameters * tokens, unique_tokens=corpus.train_tokens)
        size = nearest_size(best, vocabulary)
        if size in tried:
            break
    size = min(tried, key=lambda one: tried[one][0])
    _, sized, tokens, parameters = tried[size]
    if tokens < parameters:
        amount = "less than one token" if tokens == 0 else f"{format_count(tokens)} token{'s' if tokens > 1 else ''}"
        raise PlaitError(
            f"plan.max_cost = {aims.max_cost:g} pays for training a {size} model on {amount}, too few to learn "
            f"from ({TOKENS_PER_PARAMETER} per parameter are usual); raise it, or name a smaller model.size"
        )
    sized = sized.model_copy(update={"train": config.train.model_copy(update={"budget": f"{tokens} tokens"})})
    return AffordableModel(
        config=sized,
        size=size,
        parameters=parameter_count(pool_job(sized, corpus, pool).sized.job.shape),
        tokens=tokens,
        losses=predicted_losses(parameters, tokens, corpus.train_tokens),
    )


def _explored(job: PoolJob, corpus: CorpusFacts, pool: Pool, aims: Aims) -> list[PoolChoice]:
    pricer = PoolPricer(job.config, corpus, job.sized, pool, job.steps)
    return explore(pool, pricer.price, pricer.price_bound, replace(aims, deadline_s=None, max_cost=None))


def _most_tokens(choices: Sequence[PoolChoice], aims: Aims) -> float:
    """The tokens that the bounds pay for: with a deadline, on the choice that trains most; else on the best choice."""
    if aims.deadline_s is not None:
        return max(_tokens_within(choice, aims) for choice in choices)
    return _tokens_within(best_choice(choices, replace(aims, max_cost=None)), aims)


def _tokens_within(choice: PoolChoice, aims: Aims) -> float:
    """Tokens that a choice trains within the bounds."""
    assert choice.cost is not None and aims.max_cost is not None
    share = aims.max_cost / choice.cost if choice.cost else 1.0
    if aims.deadline_s is not None:
        share = min(share, aims.deadline_s / choice.wall_s)
    return share * choice.work.tokens
