"""The deltas that the codecs are measured on: simulated, read from a channel, or made by a fine-tuning
run.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from benchmarks.codec import simulate
from benchmarks.common import say
from deltasync.channel.reading import ChannelReader
from deltasync.errors import NotPublishedError
from deltasync.following import Replica
from deltasync.stores import open_store
from deltasync.tensors import TensorSpec
from deltasync.tensors.bits import bits_of, spec_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

COLUMNS = 4096  # columns of the simulated matrix

MASTER_RUNS: tuple[tuple[simulate.Master, float], ...] = (
    *(("fp32", 0.0107), ("bf16 start", 0.0107), ("bf16", 0.0107)),
    *(("bf16", 0.0012), ("bf16", 0.04)),  # the fractions that PULSE measured lie between
)
"""Master, and the fraction that one step changes."""

MIDDLE_STEP = 100  # the middle of each compaction, so that a compaction of 8 compares with 8 times this step
COMPACTIONS = (1, 8, 32)  # steps

TUNING_STEPS = 12
TUNING_DELTAS = 2  # last deltas that are measured: Adam's moments have settled by then
TUNING_RUNS = ((1e-6, False), (3e-6, False), (1e-5, False), (3e-6, True))
"""Learning rate, and whether the master starts from the bf16 checkpoint instead of the trained fp32
weights.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Delta:
    """bf16 bit patterns by tensor name, before and after, and the history (see `simulate.update_history`)."""

    old: dict[str, np.ndarray]
    new: dict[str, np.ndarray]
    history: dict[str, np.ndarray]

    @property
    def changed(self) -> int:
        """Number of changed elements of all tensors."""
        return sum(int((self.old[name] != self.new[name]).sum()) for name in self.old)


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """Deltas that are measured together."""

    source: str  # `simulation`, `masters`, `demo` or `finetune`
    label: str  # which deltas of the source
    specs: dict[str, TensorSpec]  # the tensors, all bfloat16
    deltas: list[Delta]  # the deltas; each has all tensors and changes something

    @property
    def element_count(self) -> int:
        """Number of elements of one delta."""
        return sum(spec.element_count for spec in self.specs.values())

    @property
    def changed(self) -> int:
        """Number of changed elements of all deltas."""
        return sum(delta.changed for delta in self.deltas)

    def flat(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return old bits, new bits and history of all deltas, concatenated."""
        pairs = [(delta, name) for delta in self.deltas for name in self.specs]
        return (
            np.concatenate([delta.old[name] for delta, name in pairs]),
            np.concatenate([delta.new[name] for delta, name in pairs]),
            np.concatenate([delta.history[name] for delta, name in pairs]),
        )


def simulation(changed_fraction: float, element_count: int) -> Sample:
    """Return one delta of one matrix of about `element_count` elements; if they make more than one row, whole
    rows.
    """
    spec = _matrix(element_count)
    change = simulate.delta_with_history(changed_fraction, spec.element_count)
    return _simulated("simulation", f"{changed_fraction:.2%}", spec, change)


def masters(element_count: int) -> Iterator[Sample]:
    """Yield one step and compactions of 8 and 32 steps for each of `MASTER_RUNS`, on a matrix like that of
    `simulation`.
    """
    spec = _matrix(element_count)
    first = [MIDDLE_STEP - 1 - steps // 2 for steps in COMPACTIONS]
    spans = [(version, version + steps) for version, steps in zip(first, COMPACTIONS, strict=True)]
    for master, changed_fraction in MASTER_RUNS:
        found = simulate.changes(changed_fraction, spec.element_count, 0, master, spans)
        for steps, change in zip(COMPACTIONS, found, strict=True):
            span = "one step" if steps == 1 else f"compaction of {steps}"
            yield _simulated("masters", f"{master} {changed_fraction:.2%}, {span}", spec, change)


def _matrix(element_count: int) -> TensorSpec:
    columns = min(COLUMNS, element_count)
    return TensorSpec("w", "bfloat16", (element_count // columns, columns))


def _simulated(source: str, label: str, spec: TensorSpec, change: simulate.Change) -> Sample:
    old_N, new_N, history_N = change
    return Sample(source, label, {spec.name: spec}, [Delta({"w": old_N}, {"w": new_N}, {"w": history_N})])


def replaced(element_count: int) -> Sample:
    """Return a delta that replaces a matrix of about `element_count` elements by an unrelated one."""
    old, new = simulation(0.01, element_count), simulate.delta(0.01, element_count, seed=1)[1]
    spec, delta = old.specs["w"], old.deltas[0]
    return Sample(
        "simulation",
        "replaced",
        old.specs,
        [Delta(delta.old, {"w": new[: spec.element_count]}, delta.history)],
    )


def demo(url: str) -> Sample:
    """Return all deltas between a channel's versions, of its bf16 tensors only."""
    replica = Replica(url)

    def states() -> Iterator[dict[str, torch.Tensor]]:
        for version in reversed(list(ChannelReader(open_store(url)).versions())):
            replica.sync(version.version)
            yield replica.state_dict()

    specs, deltas = _differences(states())
    if not deltas:
        raise NotPublishedError(f"{url} holds no two versions that differ, so there is no delta to measure.")
    return Sample("demo", "channel", specs, deltas)


def finetune() -> Iterator[Sample]:
    """Yield deltas of AdamW steps on a small model that is first trained from scratch; takes a minute on two
    cores.

    The model is a Qwen3 of 3.2 million parameters, trained on the demo's demonstrations until it has learned
    them as far as they can be predicted. Then it is trained on at small learning rates, one sample each of
    `TUNING_RUNS`.
    """
    from demo import model as demo_model

    torch.manual_seed(0)
    tokenizer = demo_model.build_tokenizer()
    trained = _small_model(len(tokenizer))
    loss_nats = demo_model.warm_up(trained, tokenizer, seed=0)
    say(f"trained {trained.num_parameters():,} parameters, loss {loss_nats:.3f} nats per token")
    for learning_rate, from_bf16 in TUNING_RUNS:
        model = copy.deepcopy(trained)
        if from_bf16:
            model = model.to(torch.bfloat16).to(torch.float32)
        specs, deltas = _differences(_tuning_states(model, tokenizer, learning_rate))
        label = f"lr {learning_rate:.0e}" + (", from bf16" if from_bf16 else "")
        if len(deltas) == TUNING_STEPS:
            yield Sample("finetune", label, specs, deltas[-TUNING_DELTAS:])
        else:
            say(f"{label}: steps without any change, skipped")


def _small_model(vocabulary: int) -> Qwen3ForCausalLM:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=64 * math.ceil(vocabulary / 64),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def _tuning_states(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, learning_rate: float
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the weights before the first step and after each step."""
    from demo import model as demo_model

    rng = random.Random(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    yield model.state_dict()
    for _ in range(TUNING_STEPS):
        tokens, labels = demo_model.demonstration_batch(tokenizer, rng)
        logits = model(input_ids=tokens).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield model.state_dict()


def _differences(states: Iterator[dict[str, torch.Tensor]]) -> tuple[dict[str, TensorSpec], list[Delta]]:
    """Return the specs, and the deltas between consecutive states that differ; floating tensors become
    bf16.
    """
    specs: dict[str, TensorSpec] = {}
    history: dict[str, np.ndarray] = {}
    old: dict[str, np.ndarray] = {}
    deltas = []
    for state in states:
        served = {
            name: tensor.to(torch.bfloat16) for name, tensor in state.items() if tensor.is_floating_point()
        }
        new = {name: bits_of(tensor).copy() for name, tensor in served.items()}
        if not old:
            specs = {name: spec_of(name, tensor) for name, tensor in served.items()}
            history = {name: np.zeros(bits.size, np.int8) for name, bits in new.items()}
        elif any((old[name] != bits).any() for name, bits in new.items()):
            deltas.append(Delta(old, new, history))
            history = {
                name: simulate.update_history(history[name], old[name], bits) for name, bits in new.items()
            }
        old = new
    return specs, deltas
