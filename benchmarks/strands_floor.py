"""What no strand can beat on a machine: its multiplications and its bytes at the rates that the machine reaches."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.strands_work import Work
from plait.model.shape import ModelShape, parameter_count
from plait.model.weights import training_flops_per_token
from plait.partition.pipeline_schedule import schedule_actions
from plait.partition.pipeline_simulation import equal_times, simulate

RANKS = 2
NUMBER_BYTES = 4
LOOPBACK_BYTES = 2**28


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """Seconds of a step: of its matrix products, with the wait that a pipeline cannot avoid, and of its bytes."""

    products_s: float
    bytes_s: float


def floor_of(strand: str, work: Work, *, ranks: int, matmul_flops: float, loopback_bytes_s: float) -> Floor:
    """The floor of a strand on so many ranks; the rate is that of two. Of attention's square the lower half counts."""
    flops = training_flops_per_token(work.shape, work.sequence, "causal") * work.tokens
    return Floor(
        products_s=flops / (matmul_flops * ranks / RANKS) / (1 - _idle(strand, work)),
        bytes_s=TRAFFIC[strand](work.shape, work) / loopback_bytes_s,
    )


def _idle(strand: str, work: Work) -> float:
    if not strand.startswith("pipeline"):
        return 0.0
    schedule = "gpipe" if "GPipe" in strand else "1f1b"
    lists = schedule_actions(schedule, ranks=RANKS, virtual=1, micros=work.sequences)
    return simulate(lists, equal_times(RANKS)).bubble


def _gradient_sum(shape: ModelShape, work: Work) -> float:
    """A ring's sum is a scatter and a gather: each sends every number but its own part's, twice."""
    return 2 * _whole_model(shape, work)


def _whole_model(shape: ModelShape, work: Work) -> float:
    """Each rank sends its part of a sum, or of the weights, to the others."""
    return (RANKS - 1) / RANKS * NUMBER_BYTES * parameter_count(shape)


def _split_parameters(shape: ModelShape, work: Work) -> float:
    """Weights before forward and before backward, gradients after it."""
    return 3 * _whole_model(shape, work)


def _tensor(shape: ModelShape, work: Work) -> float:
    """Four ways a layer and two outside of them, forward and backward, each with half of the stream's rows."""
    stream = work.tokens * shape.width * NUMBER_BYTES
    return 2 * (4 * shape.layers + 2) * stream * (RANKS - 1) / RANKS


def _pipeline(shape: ModelShape, work: Work) -> float:
    """The whole stream forward, and as much backward the other way at the same time."""
    return work.tokens * shape.width * NUMBER_BYTES


def _context(shape: ModelShape, work: Work) -> float:
    """A layer's keys and values, forward and backward, and their gradients; the sum of all gradients."""
    own = 2 * work.tokens / RANKS * shape.size_of("kv_heads") * NUMBER_BYTES
    return 3 * shape.layers * own * (RANKS - 1) + _gradient_sum(shape, work)


TRAFFIC: dict[str, Callable[[ModelShape, Work], float]] = {
    "replicate": _gradient_sum,
    "shard, optimizer": _gradient_sum,
    "shard, parameters": _split_parameters,
    "tensor": _tensor,
    "pipeline, 1F1B": _pipeline,
    "pipeline, GPipe": _pipeline,
    "context": _context,
    "model alone": lambda shape, work: 0.0,
}
"""Bytes that the busiest rank sends in a step."""


def loopback_rate() -> float:
    """Bytes a second through a TCP connection of this machine with itself, one way."""
    block = bytearray(2**20)
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = threading.Thread(target=_send, args=(server.getsockname()[1], block))
        sender.start()
        connection, _ = server.accept()
        with connection:
            began_s, received = time.perf_counter(), 0
            while number := connection.recv_into(block):
                received += number
            seconds = time.perf_counter() - began_s
        sender.join()
    return received / seconds


def _send(port: int, block: bytearray) -> None:
    payload = bytes(block)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        for _ in range(LOOPBACK_BYTES // len(payload)):
            connection.sendall(payload)
