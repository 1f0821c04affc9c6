"""Checks that need a GPU: captured graphs, streams, and a device without free memory."""

from __future__ import annotations

import statistics
import threading

import torch

from benchmarks.gpu.machine import Machine, Row
from benchmarks.gpu.model import Run
from deltasync.live import Staged

_ANCHOR_ROOM_BYTES = 256 << 20
_GPU_ALONE = "needs a GPU"


def captured_graph(machine: Machine, run: Run) -> None:
    """Check that a captured graph computes with the new weights after a commit: it reads them where they are."""
    if machine.interpreted:
        machine.rows.append(Row(what="captured graph", seconds=0.0, note=_GPU_ALONE))
        return
    (segment,) = run.model.segments[next(iter(run.changed.fingerprints))]
    weight = segment.live.reshape(-1)
    result = torch.empty_like(weight)
    stream = torch.cuda.Stream(machine.device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result.copy_(weight)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result.copy_(weight)
    graph.replay()
    before = result.clone()
    assert torch.equal(before, weight)
    committed = run.memory.commit(run.memory.stage(run.changed))
    graph.replay()
    assert torch.equal(result, weight) and not torch.equal(result, before), "a captured graph does not see a commit"
    run.memory.rollback(committed)
    graph.replay()
    assert torch.equal(result, before), "a captured graph does not see a rollback"
    note = "reads the new weights after a commit, the old ones after a rollback"
    machine.rows.append(Row(what="captured graph", seconds=0.0, note=note))


def staging_beside_work(machine: Machine, run: Run) -> None:
    """Measure how much longer work on another stream takes while a version is staged, and how long staging takes."""
    if machine.interpreted:
        machine.rows.append(Row(what="staging beside a busy stream", seconds=0.0, note=_GPU_ALONE))
        return
    matrix = torch.randn(4096, 4096, dtype=torch.bfloat16, device=machine.device)
    stream = torch.cuda.Stream(machine.device)  # of the priority that an engine's has, too

    def work() -> float:
        """Return the seconds of a matrix product, by events on its stream."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            start.record()
            for _ in range(50):
                torch.mm(matrix, matrix)
            end.record()
        end.synchronize()
        return start.elapsed_time(end) / 50e3

    work()
    alone_s = statistics.median(work() for _ in range(5))
    staged_alone_s = machine.median_s(lambda: run.memory.stage(run.changed))
    beside: list[float] = []
    ended = threading.Event()

    def keep_busy() -> None:
        while not ended.is_set():
            beside.append(work())

    worker = threading.Thread(target=keep_busy)
    worker.start()
    try:
        staged_beside_s = machine.seconds(lambda: run.memory.stage(run.changed))
    finally:
        ended.set()
        worker.join()
    slower = statistics.median(beside) / alone_s
    note = f"alone {staged_alone_s:.3f} s; the work beside it took {slower:.2f} times as long"
    machine.rows.append(Row(what="staging beside a busy stream", seconds=staged_beside_s, note=note))


def anchor_without_room(machine: Machine, run: Run) -> None:
    """Load full weights whose bits all differ, on a device without room for a second copy; then load the old ones."""
    model, memory = run.model, run.memory
    other = {name: (~tensor.view(torch.int16)).cpu().numpy().reshape(-1) for name, tensor in model.weights.items()}
    weights = [(name, bits_N.view("u2"), None) for name, bits_N in other.items()]
    held = model.live.cpu().clone()
    versions: list[Staged] = []
    committed: list[Staged] = []

    def back() -> None:
        if committed:
            memory.rollback(committed.pop())

    _leave_room(machine)
    try:
        row = machine.measure("anchor: stage", lambda: versions.append(memory.stage_weights(weights)), versions.clear)
        machine.bar("anchor: stage, extra device memory in MB", (row.peak_bytes or 0) / 1e6, 256)
        row = machine.measure("anchor: commit", lambda: committed.append(memory.commit(versions[0])), back)
        row.rate = 2 * model.live.nbytes / row.seconds
        machine.bar("anchor: commit, extra device memory in MB", (row.peak_bytes or 0) / 1e6, 256)
        for name, tensor in model.weights.items():
            (segment,) = model.segments[name]
            assert torch.equal(segment.live, ~tensor.view(torch.int16)), f"the anchor left other bits in {name}"
        back()
        assert torch.equal(model.live.cpu(), held), "rolling the anchor back left other bits"
    finally:
        if not machine.interpreted:
            torch.cuda.set_per_process_memory_fraction(1.0, machine.device)


def _leave_room(machine: Machine) -> None:
    """Limit PyTorch's memory to what it holds now, and a little for the anchor."""
    if machine.interpreted:
        return
    torch.cuda.empty_cache()
    total_bytes = torch.cuda.mem_get_info(machine.device)[1]
    allowed_bytes = torch.cuda.memory_reserved(machine.device) + _ANCHOR_ROOM_BYTES
    torch.cuda.set_per_process_memory_fraction(min(1.0, allowed_bytes / total_bytes), machine.device)
