"""A recipe as the planner takes it on a cluster that need not be there."""

from __future__ import annotations

from plait.commands.preparing.usual_corpus import corpus_facts_or_usual
from plait.machines.cluster import Cluster
from plait.planner.derive.resources import on_paper
from plait.planner.resolve.request import Request, request_of
from plait.recipe.schema import RunConfig


def paper_request(config: RunConfig, cluster: Cluster) -> Request:
    """The planner's request, with what is usual of text that nobody has prepared."""
    corpus, _ = corpus_facts_or_usual(config)
    return request_of(config, corpus, on_paper(cluster))
