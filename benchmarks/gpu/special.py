"""Checks that need a GPU: captured graphs, streams, and a device without free memory."""

from __future__ import annotations

import statistics
import threading

import torch

from benchmarks.gpu.machine import Machine, Row, random_bits
from benchmarks.gpu.model import Run
from deltasync.live import Staged

_ANCHOR_ROOM_BYTES = 256 << 20
_GPU_ALONE = "needs a GPU"


def captured_graph(machine: Machine, run: Run) -> None:
    """Check that a captured graph computes with the new weights after a commit: it reads them where they
    are.
    """
    if machine.interpreted:
        machine.rows.append(Row(what="captured graph", seconds=0.0, note=_GPU_ALONE))
        return
    (segment,) = next(iter(run.model.segments.values()))
    weight = segment.live.reshape(-1)[: 1 << 24]
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
    committed = run.memory.commit(run.memory.stage(run.on_device))
    graph.replay()
    assert torch.equal(result, weight) and not torch.equal(result, before), (
        "a captured graph does not see a commit"
    )
    run.memory.rollback(committed)
    graph.replay()
    assert torch.equal(result, before), "a captured graph does not see a rollback"
    note = "reads the new weights after a commit, the old ones after a rollback"
    machine.rows.append(Row(what="captured graph", seconds=0.0, note=note))


def staging_beside_work(machine: Machine, run: Run) -> None:
    """Measure how much longer work on another stream takes while a version is staged, and how long staging
    takes.
    """
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
        staged_beside_s = machine.seconds(lambda: [run.memory.stage(run.changed) for _ in range(10)]) / 10
    finally:
        ended.set()
        worker.join()
    slower = statistics.median(beside) / alone_s
    note = f"alone {staged_alone_s:.3f} s; the work beside it took {slower:.2f} times as long"
    machine.rows.append(Row(what="staging beside a busy stream", seconds=staged_beside_s, note=note))


def anchor(machine: Machine, run: Run) -> None:
    """Load full weights whose bits nearly all differ, on a device without room for a second copy; then the
    old ones.
    """
    model, memory = run.model, run.memory
    most = max(spec.element_count for spec in model.specs.values())
    source = random_bits(most + (1 << 16), machine.device, 5)
    # all tensors are pieces of it, so that the host needs no second model
    on_host = source.cpu().numpy().view("u2")
    first = {name: 64 * number % (1 << 16) for number, name in enumerate(model.specs)}
    weights = [
        (name, on_host[first[name] : first[name] + spec.element_count], None)
        for name, spec in model.specs.items()
    ]
    held = model.live.clone()
    versions: list[Staged] = []
    committed: list[Staged] = []

    def stage() -> None:
        versions.append(memory.stage_weights(weights))

    def back() -> None:
        if committed:
            memory.rollback(committed.pop())

    _leave_room(machine)
    try:
        machine.rows.append(
            Row(what="anchor: stage, first: pinned memory is made", seconds=machine.seconds(stage))
        )
        versions.clear()
        row = machine.measure("anchor: stage", stage, versions.clear)
        row.rate = model.live.nbytes / row.seconds
        machine.bar("anchor: stage, s", row.seconds, 1.5)
        machine.bar("anchor: stage, extra device memory in MB", (row.peak_bytes or 0) / 1e6, 256)
        row = machine.measure("anchor: commit", lambda: committed.append(memory.commit(versions[0])), back)
        row.rate = model.live.nbytes / row.seconds
        machine.bar("anchor: commit, s", row.seconds, 0.32)
        machine.bar("anchor: commit, extra device memory in MB", (row.peak_bytes or 0) / 1e6, 256)
    finally:
        if not machine.interpreted:
            torch.cuda.set_per_process_memory_fraction(1.0, machine.device)
    for name, spec in model.specs.items():
        (segment,) = model.segments[name]
        wanted = source[first[name] : first[name] + spec.element_count]
        assert torch.equal(segment.live.reshape(-1), wanted), f"the anchor left other bits in {name}"
    parts = memory.known_parts.tolist()
    memory.audit()
    assert memory.known_parts.tolist() == parts, "the audit found other fingerprints than the anchor's commit"
    back()
    assert torch.equal(model.live, held), "rolling the anchor back left other bits"


def _leave_room(machine: Machine) -> None:
    """Limit PyTorch's memory to what it holds now, and a little for the anchor."""
    if machine.interpreted:
        return
    torch.cuda.empty_cache()
    total_bytes = torch.cuda.mem_get_info(machine.device)[1]
    allowed_bytes = torch.cuda.memory_reserved(machine.device) + _ANCHOR_ROOM_BYTES
    torch.cuda.set_per_process_memory_fraction(min(1.0, allowed_bytes / total_bytes), machine.device)
