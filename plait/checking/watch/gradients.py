"""Records what each backward pass of a rank added to each weight before any communication, how its loss was normalized,
and which gradient the optimizer finally got."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from plait.checking.watch.call_site import call_path, call_site
from plait.checking.watch.journal import Journal, as_dense, sampled
from plait.checking.watch.loss_terms import (
    compares_samples,
    find_terms,
    gathers_in_graph,
    joins_constants,
    record_coefficients,
)

WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""Prefixes that wrappers add to the names of weights."""
_HASHED_AT_MOST = 1 << 20


class GradientWatch:
    """Records the forward and backward passes of one rank until `steps` optimizer steps are recorded.

    It uses torch's hooks, except for backward itself and gradient clipping, which have none.
    """

    def __init__(
        self, journal: Journal, steps: int, *, stop_after: int | None = None, keeps_states: bool = False
    ) -> None:
        """After `stop_after` optimizer steps the process sends itself SIGTERM, once; with `keeps_states` the
        optimizers' states are recorded before each step."""
        self._journal, self._steps = journal, steps
        self._stop_after, self._keeps_states = stop_after, keeps_states
        self._states: dict[str, Any] = {}
        self._roots: dict[int, nn.Module] = {}
        self._hooked: dict[int, Tensor] = {}
        self._sharded_of: dict[int, int] = {}
        """The id of the parameter that an optimizer holds, by the id of the gathered one that FSDP2 computes with."""
        self._names: dict[int, str] = {}
        self._contributions: dict[int, list[tuple[int, Tensor]]] = {}
        """By id of an optimizer's parameter: (number of the backward pass, its gradient from that pass), since its
        gradient was last empty."""
        self._unused: dict[int, list[tuple[int, Tensor]]] = {}
        """By parameter: contributions that were cleared before any step used them."""
        self._computed: dict[int, list[tuple[int, Tensor]]] = {}
        """By parameter: results of torch.autograd.grad since its optimizer's last step, which the program puts into its
        gradient by itself."""
        self._in_grad = 0
        self._backwards: dict[int, dict[str, Any]] = {}
        self._stepped: set[tuple[int, int]] = set()
        """(optimizer, backward pass) for which that optimizer has used the gradients in a step."""
        self._clips: list[dict[str, Any]] = []
        self._before_clip: dict[int, Tensor] = {}
        self._weights: dict[int, Tensor] = {}
        self._optimizers: list[Optimizer] = []
        self._steps_of: dict[int, int] = {}
        self._first_root: nn.Module | None = None
        self._depth = 0
        self._in_backward = 0
        self._in_step = 0
        self._is_light, self._has_ended = False, False
        self._current: int | None = None
        self._outputs: list[Any] = []
        self._rows = 0
        self._rng = ""
        self._schedulers: list[weakref.ref[Any]] = []
        self._batch_norms: set[str] = set()
        self._resumed: set[int] = set()
        """Ids of optimizers that had state before their first step, as after a checkpoint was loaded."""

    @property
    def is_over(self) -> bool:
        """Whether all steps to be checked are recorded."""
        taken = self._steps_of.values()
        return bool(taken) and (min(taken) >= self._steps or max(taken) >= 2 * self._steps)

    def install(self) -> None:
        register_module_forward_pre_hook(self._before_module)
        register_module_forward_hook(self._after_module, with_kwargs=True, always_call=True)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        _wrap(torch.autograd, "backward", self._watched_backward)
        _wrap(torch.autograd, "grad", self._watched_grad)
        _wrap(torch.Tensor, "register_hook", self._hook_ours_first)
        _wrap(Optimizer, "add_param_group", self._see_group)
        _wrap(torch.nn.utils, "clip_grad_norm_", self._watched_clip("norm"))
        _wrap(torch.nn.utils, "clip_grad_value_", self._watched_clip("value"))
        torch.nn.utils.clip_grad.clip_grad_norm_ = torch.nn.utils.clip_grad_norm_
        _wrap(torch.optim.lr_scheduler.LRScheduler, "__init__", self._see_scheduler)

    @property
    def depth(self) -> int:
        """The nesting depth of the modules' forward passes in progress."""
        return self._depth

    @property
    def in_backward(self) -> bool:
        return self._in_backward > 0

    def holds_gradient(self, tensor: Tensor) -> bool:
        """Whether a tensor is the gradient of a watched parameter."""
        pointer = tensor.data_ptr()
        return any(one.grad is not None and one.grad.data_ptr() == pointer for one in self._hooked.values())

    # Modules.

    def _before_module(self, module: nn.Module, inputs: Any) -> None:
        self._depth += 1
        if self._depth > 1 or self._in_backward:
            self._see_first_root()
            return
        self._stop_if_due()
        if id(module) not in self._roots:
            self._roots[id(module)] = module
            self._learn_names(module)
            if not self.is_over:
                for part in module.modules():
                    if hasattr(part, "unshard") and hasattr(part, "reshard"):  # FSDP2 gathers in a hook before ours
                        part.register_forward_pre_hook(self._after_unshard)
                        self._first_root = module  # whose hooks of this call are chosen already
        if not self.is_over:
            self._watch_parameters(module.parameters())
            self._see_batch_norms(module)
        self._rng = _digest(torch.get_rng_state()) if module.training else ""

    def _stop_if_due(self) -> None:
        """Signal this process in the middle of a step, where a scheduler's signal is most likely to arrive: its own
        handler, if it has one, runs now."""
        taken = self._steps_of.values()
        if self._stop_after is not None and taken and min(taken) >= self._stop_after and torch.is_grad_enabled():
            self._stop_after = None
            self._journal.write("stopping", site=call_site())
            os.kill(os.getpid(), signal.SIGTERM)

    def _see_first_root(self) -> None:
        root, self._first_root = self._first_root, None
        if root is not None:
            self._after_unshard(root, ())

    def _after_module(self, module: nn.Module, inputs: Any, *rest: Any) -> None:
        """`rest` is keywords and output, or after an exception (which ends a checkpoint's recomputation) only part of
        them."""
        self._see_first_root()
        self._depth -= 1
        if self._depth > 0 or self._in_backward or len(rest) < 2:
            return
        keywords, output = rest
        given = [one for one in _tensors((inputs, keywords)) if one.dim() > 0]
        rows = given[0].shape[0] if given else 0
        if torch.is_grad_enabled():
            self._outputs = [*self._outputs, *(one.grad_fn for one in _tensors(output) if one.grad_fn is not None)]
            self._rows = rows
        drew = bool(self._rng) and not self.is_over and _digest(torch.get_rng_state()) != self._rng
        self._journal.write(
            "forward",
            training=module.training,
            grad=torch.is_grad_enabled(),
            rows=rows,
            inputs=_digest(*given) if given else "",
            rng=self._rng if drew else "",
            site=call_site(),
        )

    def _after_unshard(self, module: nn.Module, inputs: Any) -> None:
        """FSDP2 has put gathered weights into the module: watch them."""
        if self.is_over:
            return
        path = next((path for root in self._roots.values() for path, one in _paths(root) if one is module), "")
        sharded = {name: key for key, name in self._names.items()}
        for name, gathered in _named(module):
            held = sharded.get(f"{path}.{name}" if path else name)
            if held is not None and id(gathered) not in self._hooked and not isinstance(gathered, DTensor):
                self._sharded_of[id(gathered)] = held
                self._watch_parameters([gathered])

    def _learn_names(self, module: nn.Module) -> None:
        for name, parameter in _named(module):
            self._names.setdefault(id(parameter), name)
            self._hooked.setdefault(-id(parameter), parameter)  # kept alive, so that no other tensor gets its id
        if any(type(part).__name__ == "FullyShardedDataParallel" for part in module.modules()):
            self._journal.write("fsdp1")

    def _see_batch_norms(self, module: nn.Module) -> None:
        """Record layers that use batch statistics. Checked in every pass, because a program may evaluate first."""
        for name, part in module.named_modules() if module.training else ():
            is_batch_norm = isinstance(part, nn.modules.batchnorm._BatchNorm) and not isinstance(part, nn.SyncBatchNorm)
            if is_batch_norm and part.training and _bare(name) not in self._batch_norms:
                self._batch_norms.add(_bare(name))
                self._journal.write("batch_norm", name=_bare(name))

    # Gradients.

    def _see_group(self, original: Callable[..., Any], optimizer: Optimizer, group: Any) -> Any:
        answer = original(optimizer, group)
        for one in optimizer.param_groups:
            self._watch_parameters(one["params"])
        return answer

    def _watch_parameters(self, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            if id(parameter) in self._hooked or not parameter.requires_grad or isinstance(parameter, DTensor):
                continue
            if not parameter.is_leaf:
                continue
            self._hooked[id(parameter)] = parameter
            _ORIGINALS["register_hook"](parameter, self._gradient_hook(id(parameter)))

    def _hook_ours_first(self, original: Callable[..., Any], tensor: Tensor, hook: Callable[..., Any]) -> Any:
        """Make our hook run first: the program may sum gradients over ranks in its own."""
        if not self.is_over and isinstance(tensor, nn.Parameter):
            self._watch_parameters([tensor])
        return original(tensor, hook)

    def _gradient_hook(self, key: int) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            if self.is_over or self._current is None:
                return
            held = self._sharded_of.get(key, key)
            into = self._computed if self._in_grad else self._contributions
            into.setdefault(held, []).append((self._current, sampled(gradient)))

        return hook

    def _watched_grad(
        self, original: Callable[..., Any], outputs: Any, inputs: Any, *arguments: Any, **keywords: Any
    ) -> Any:
        """Record gradients of weights that the program computes without backward; others, such as a penalty's, do not
        count."""
        wanted = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        if keywords.get("create_graph") or not any(id(one) in self._hooked for one in wanted):
            return original(outputs, wanted, *arguments, **keywords)
        self._in_grad += 1
        try:
            return self._watched_backward(
                lambda roots, *rest, **more: original(roots, wanted, *rest, **more), outputs, *arguments, **keywords
            )
        finally:
            self._in_grad -= 1

    def _watched_backward(self, original: Callable[..., Any], tensors: Any, *arguments: Any, **keywords: Any) -> Any:
        if self._in_backward or self.is_over:
            return original(tensors, *arguments, **keywords)
        roots = [
            one for one in ([tensors] if isinstance(tensors, Tensor) else list(tensors)) if isinstance(one, Tensor)
        ]
        self._forget_emptied()
        terms = [term for root in roots for term in find_terms(root)]
        remove = record_coefficients(terms)
        contrastive = any(compares_samples(root, self._outputs, self._rows) for root in roots)
        gathers = any(gathers_in_graph(root) for root in roots)
        joins = any(joins_constants(root, self._outputs) for root in roots)
        losses = [float(root.detach()) for root in roots if root.numel() == 1]
        site = call_site()
        number = self._current = self._journal.write("backward_begins", site=site)
        callers = call_path()
        depth = self._depth
        self._in_backward += 1
        try:
            return original(tensors, *arguments, **keywords)
        finally:
            self._in_backward -= 1
            self._current, self._depth = None, depth
            remove()
            about = {
                "backward": number,
                "site": site,
                "callers": callers,
                "loss": sum(losses),
                "rows": self._rows,
                "terms": [term.described() for term in terms],
                "contrastive": contrastive,
                "gathers": gathers,
                "joins_constants": joins,
            }
            self._backwards[number] = about
            self._outputs = []
            self._journal.write("backward", **about)

    def _forget_emptied(self) -> None:
        """Drop contributions to gradients that were cleared since; keep those that no step has used apart."""
        for key, parameter in list(self._hooked.items()):
            held = self._sharded_of.get(key, key)
            if key < 0 or held not in self._contributions:
                continue
            holder = self._hooked.get(-held, parameter)
            gradient = holder.grad
            if gradient is None:
                gradient = getattr(parameter, "grad", None)
            if gradient is None or not bool(as_dense(_local(gradient)).any()):
                for number, gradient in self._contributions.pop(held):
                    if self._in_step:
                        continue  # a closure that an optimizer such as LBFGS evaluates several times
                    if all((index, number) not in self._stepped for index in range(len(self._optimizers))):
                        self._unused.setdefault(held, []).append((number, gradient))

    # Clipping.

    def _watched_clip(self, kind: str) -> Callable[..., Any]:
        def clip(original: Callable[..., Any], parameters: Any, *arguments: Any, **keywords: Any) -> Any:
            if self.is_over or self._in_backward:
                return original(parameters, *arguments, **keywords)
            clipped = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            before = {id(one): sampled(_whole(one.grad)) for one in clipped if one.grad is not None}
            norm = original(clipped, *arguments, **keywords)
            for key, gradient in before.items():
                self._before_clip.setdefault(key, gradient)
            limit = arguments[0] if arguments else keywords.get("max_norm", keywords.get("clip_value"))
            norm_type = arguments[1] if len(arguments) > 1 else keywords.get("norm_type", 2.0)
            self._clips.append(
                {
                    "what": kind,
                    "site": call_site(),
                    "limit": float(limit),  # pyright: ignore[reportArgumentType]
                    "norm_type": float(norm_type),
                    "norm": float(_whole(norm)) if isinstance(norm, Tensor) else None,
                    "parameters": [id(one) for one in clipped],
                    "event": self._journal.write("clip", site=call_site()),
                }
            )
            return norm

        return clip

    # Steps.

    def _see_scheduler(self, original: Callable[..., Any], scheduler: Any, *arguments: Any, **keywords: Any) -> Any:
        self._schedulers.append(weakref.ref(scheduler))
        return original(scheduler, *arguments, **keywords)

    def scheduler_states(self) -> list[dict[str, Any]]:
        """Where each schedule is, and for how many steps it was made, if it says so."""
        alive = [one() for one in self._schedulers]
        return [
            {
                "name": type(one).__name__,
                "at": int(getattr(one, "last_epoch", 0)),
                "total": _planned_steps(one),
                "accelerate": _uses_accelerate(),
            }
            for one in alive
            if one is not None and isinstance(getattr(one, "last_epoch", None), int)
        ]

    def _before_step(self, optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
        self._in_step += 1
        if self._in_step > 1:  # ZeroRedundancyOptimizer's own optimizer, a wrapper's inner one
            return
        if id(optimizer) not in self._steps_of:
            self._steps_of[id(optimizer)] = 0
            self._optimizers.append(optimizer)
            if _has_state(optimizer):
                self._resumed.add(id(optimizer))
        self._is_light = self.is_over or self._steps_of[id(optimizer)] >= self._steps
        if self._is_light:
            return
        self._weights = {id(one): sampled(_whole(one)) for one in _parameters_of(optimizer)}
        self._states = _state_facts(optimizer) if self._keeps_states else {}

    def _after_step(self, optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
        self._in_step -= 1
        if self._in_step > 0:
            return
        step = self._steps_of[id(optimizer)]
        self._steps_of[id(optimizer)] = step + 1
        rates = [float(group.get("lr", 0.0)) for group in optimizer.param_groups]
        index = self._optimizers.index(optimizer)
        if self._is_light:
            self._journal.write(
                "light_step", optimizer=index, step=step, rates=rates, schedules=self.scheduler_states()
            )
            self._end_if_over()
            return
        held = list(_parameters_of(optimizer))
        rank_of = {id(one): position for position, one in enumerate(held)}
        tensors: dict[str, Tensor] = {}
        contributions: dict[int, list[int]] = {}
        for position, one in enumerate(held):
            key = id(one)
            tensors[f"before/{position}"] = self._weights[key]
            tensors[f"after/{position}"] = sampled(_whole(one))
            if one.grad is not None:
                tensors[f"gradient/{position}"] = sampled(_whole(one.grad))
            if key in self._before_clip:
                tensors[f"unclipped/{position}"] = self._before_clip[key]
            merged: dict[int, Tensor] = {}
            kept = self._contributions.get(key) or self._computed.get(key, [])
            sites = {self._backwards[number]["callers"] for number, _ in kept if number in self._backwards}
            # From the same loss, these are lost micro-batches; from another loss, leftovers of an adversary's pass.
            lost = [one for one in self._unused.pop(key, []) if self._backwards[one[0]]["callers"] in sites]
            for number, gradient in [*lost, *kept]:
                merged[number] = merged[number] + gradient if number in merged else gradient
            for number, gradient in merged.items():
                tensors[f"local/{number}/{position}"] = gradient
                contributions.setdefault(number, []).append(position)
        file = self._journal.write_tensors(f"step-{index}-{step}", tensors)
        self._journal.write(
            "step",
            optimizer=index,
            step=step,
            optimizer_kind=_class_name(getattr(optimizer, "optim", optimizer)),  # ZeroRedundancyOptimizer holds one
            site=call_site(),
            resumed=id(optimizer) in self._resumed,
            state=self._states,
            file=file,
            parameters=[
                {
                    "name": self._names.get(id(one), f"parameter {position}"),
                    "shape": list(one.shape),
                    "dtype": str(one.dtype).removeprefix("torch."),
                    "sharded": isinstance(one, DTensor),
                    "trained": one.requires_grad,
                }
                for position, one in enumerate(held)
            ],
            groups=[_group_facts(group, rank_of) for group in optimizer.param_groups],
            rates=rates,
            backwards={str(number): self._backwards[number] for number in contributions if number in self._backwards},
            stale=sorted(number for number in contributions if (index, number) in self._stepped),
            clips=[
                {**clip, "parameters": [rank_of[key] for key in clip["parameters"] if key in rank_of]}
                for clip in self._clips
                if any(key in rank_of for key in clip["parameters"])
            ],
            schedules=self.scheduler_states(),
        )
        self._stepped |= {(index, number) for number in contributions}
        self._clips = [clip for clip in self._clips if not any(key in rank_of for key in clip["parameters"])]
        for one in held:
            self._before_clip.pop(id(one), None)
            self._computed.pop(id(one), None)
        self._end_if_over()

    def _end_if_over(self) -> None:
        if self.is_over and not self._has_ended:
            self._has_ended = True
            for held in (self._contributions, self._unused, self._computed):
                held.clear()
            self._journal.write("checked", steps=self._steps)


_ORIGINALS: dict[str, Callable[..., Any]] = {}


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a function of torch in this watched process: `around` gets the original and its arguments."""
    original = getattr(owner, name)
    _ORIGINALS[name] = original

    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        return around(original, *arguments, **keywords)

    wrapped.__name__ = name
    wrapped.__wrapped__ = original  # pyright: ignore[reportFunctionMemberAccess]
    setattr(owner, name, wrapped)


def _parameters_of(optimizer: Optimizer) -> Iterable[Tensor]:
    return (one for group in optimizer.param_groups for one in group["params"])


def _class_name(optimizer: Any) -> str:
    """With its module, since a program's own class may be called AdamW, too."""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _has_state(optimizer: Optimizer) -> bool:
    """Whether an optimizer has state from earlier steps; some create empty state before their first step."""
    states = getattr(optimizer, "optim", optimizer).state.values()
    return any(isinstance(one, Tensor) and bool(_local(one).any()) for state in states for one in state.values())


def _state_facts(optimizer: Optimizer) -> dict[str, dict[str, list[float]]]:
    """For each parameter's state: the norm and sum of each tensor, or the number itself."""
    state = getattr(optimizer, "optim", optimizer).state
    found: dict[str, dict[str, list[float]]] = {}
    for position, parameter in enumerate(_parameters_of(optimizer)):
        facts: dict[str, list[float]] = {}
        for key, value in state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                values = _local(value).detach().double()
                facts[str(key)] = (
                    [float(values)] if values.numel() == 1 else [float(values.norm()), float(values.sum())]
                )
            elif isinstance(value, int | float):
                facts[str(key)] = [float(value)]
        if facts:
            found[str(position)] = facts
    return found


def _named(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    return ((_bare(name), one) for name, one in module.named_parameters())


def _paths(module: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    return ((_bare(name), one) for name, one in module.named_modules())


def _bare(name: str) -> str:
    """A name without the prefixes that wrappers add."""
    for wrapper in WRAPPERS:
        name = name.removeprefix(wrapper).replace(f".{wrapper}", ".") if wrapper != "module." else name
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name if name != "module" else ""


def _whole(tensor: Tensor) -> Tensor:
    """The whole tensor; a sharded one is gathered from all ranks, which must all call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _tensors(values: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists, dicts and outputs with attributes."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        return [one for value in values.values() for one in _tensors(value)]
    if isinstance(values, list | tuple):
        return [one for value in values for one in _tensors(value)]
    return []


def _digest(*tensors: Tensor) -> str:
    """A short hash of the tensors' values; of very large ones, of the beginning."""
    found = hashlib.blake2b(digest_size=8)
    for one in tensors:
        flat = as_dense(_local(one).detach()).reshape(-1)[:_HASHED_AT_MOST].contiguous()
        found.update(str(tuple(one.shape)).encode())
        found.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    return found.hexdigest()


def _uses_accelerate() -> bool:
    """Whether this process uses Accelerate, whose schedules intentionally step once per process."""
    state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    return bool(getattr(state, "_shared_state", None))


def _planned_steps(scheduler: Any) -> int | None:
    """The number of steps that a schedule was made for; None if it does not say."""
    for name in ("total_steps", "T_max", "total_iters"):
        if isinstance(getattr(scheduler, name, None), int):
            return int(getattr(scheduler, name))
    for function in getattr(scheduler, "lr_lambdas", []):
        planned = getattr(function, "keywords", {}).get("num_training_steps")
        if isinstance(planned, int):
            return planned
    return None


def _group_facts(group: dict[str, Any], rank_of: dict[int, int]) -> dict[str, Any]:
    plain = {key: value for key, value in group.items() if isinstance(value, bool | int | float | None)}
    pairs = {
        key: list(value)
        for key, value in group.items()
        if isinstance(value, tuple) and all(isinstance(one, float | int) for one in value)
    }
    tensors = {key: float(value) for key, value in group.items() if isinstance(value, Tensor) and value.numel() == 1}
    return {**plain, **pairs, **tensors, "params": [rank_of[id(one)] for one in group["params"]]}
