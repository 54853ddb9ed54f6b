"""The machines of a run at its begin: this one, or all hosts that were asked for, once they have joined."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from plait.commands.hosts.invitation import HostsRequest
from plait.commands.membership.one_machine import OneMachine
from plait.commands.membership.run_hosts import RunHosts, run_hosts
from plait.commands.membership.run_on_hosts import PlanFor, RunOnHosts
from plait.commands.preparing.corpus import prepared_corpus
from plait.machines.machine import Machine
from plait.planner.plan import Plan
from plait.planner.resolve.named import named_workers
from plait.probing.survey import survey_machine
from plait.workers import refuse_torchrun, worker_pool


@contextmanager
def open_workers(
    hosts: HostsRequest, run: RunOnHosts, plan_for: PlanFor, begun: Plan | None
) -> Iterator[RunHosts | OneMachine]:
    """The workers of this machine, or of all hosts once they have joined, numbered as in the plan of a `begun` run.
    `plan_for` makes the plans for those that are there later.

    Raises PlaitError for an error in the recipe's text, before anybody is invited.
    """
    if hosts.n_hosts == 1:
        with worker_pool(run.working, run.entries) as workers:

            def survey() -> Machine:
                return survey_machine(workers, named_workers(run.config), "as known").machine

            yield OneMachine(workers, survey, plan_for)
        return
    refuse_torchrun()
    prepared_corpus(run.config, run.working, run.screen)
    previous = (
        [(share.mark, share.name) for share in (*begun.machines.hosts, *begun.machines.left_out)] if begun else []
    )
    with run_hosts(hosts, run, plan_for, previous) as elastic:
        yield elastic
