"""A head that is one tensor with the embeddings where it is served, and may be another one where it is
trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from deltasync import open_store
from deltasync.channel.documents import VersionId, sha256_hex
from deltasync.channel.reading import ChannelReader
from deltasync.errors import StageError
from deltasync.serve import derived
from deltasync.tensors.bits import bits_of
from tests.channels import Made
from tests.driving import runner_of, target_of
from vllm_plugin.load import layers
from vllm_plugin.worker import DeltaSyncWorkerExtension

ROWS, COLUMNS = 64, 48
HEAD, EMBEDDINGS, BODY = "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"

Weights = dict[str, torch.Tensor]


def trained() -> Weights:
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.randn(ROWS, COLUMNS, generator=generator).to(torch.bfloat16)
    return {HEAD: embeddings.clone(), EMBEDDINGS: embeddings, BODY: torch.ones(COLUMNS, dtype=torch.bfloat16)}


class Part(torch.nn.Module):
    """A worker's rows of a model with tied embeddings. Its loader takes one name for each parameter, as
    vLLM's does.
    """

    def __init__(self, rows: slice, has_head: bool) -> None:
        super().__init__()
        self.rows, weights = rows, trained()
        self.model = torch.nn.Module()
        self.model.embed_tokens, self.model.norm = torch.nn.Module(), torch.nn.Module()
        self.model.embed_tokens.weight = torch.nn.Parameter(
            weights[EMBEDDINGS][rows].clone(), requires_grad=False
        )
        self.model.norm.weight = torch.nn.Parameter(weights[BODY].clone(), requires_grad=False)
        if has_head:  # others compute logits with the embeddings, and have no such module
            self.lm_head = torch.nn.Module()
            self.lm_head.weight = self.model.embed_tokens.weight

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            if name in parameters:
                parameters[name].copy_(tensor[self.rows] if name == EMBEDDINGS else tensor)


class Engine:
    def __init__(self, models: list[Part]) -> None:
        self.workers = [DeltaSyncWorkerExtension() for _ in models]
        for worker, model in zip(self.workers, models, strict=True):
            derived._built[model] = (frozenset([""]), {})
            worker.model_runner = runner_of(lambda model=model: model)
        self.calls: list[Any] = []

    def call(self, method: str, *args: Any) -> list[Any]:
        self.calls.append(args[0])
        return [getattr(worker, method)(*args) for worker in self.workers]


class Server:
    def __init__(self, url: str, workers: int, has_head: bool) -> None:
        size = ROWS // workers
        self.models = [Part(slice(at * size, (at + 1) * size), has_head) for at in range(workers)]
        self.reader, self.engine = ChannelReader(open_store(url)), Engine(self.models)
        self.target = target_of(self.engine.call, self.reader)

    def open(self) -> None:
        self.target.open(lambda _: None)

    def take(self, *versions: int) -> None:
        staged = self.target.stage([self.reader.numbered(version) for version in versions])
        assert staged is not None
        self.target.commit(staged)

    def settled(self) -> VersionId | None:
        self.target.settle()
        return self.target.version

    def live(self) -> torch.Tensor:
        return torch.cat([model.model.embed_tokens.weight for model in self.models])


@pytest.fixture(params=[(1, True), (1, False), (2, True)], ids=["one parameter", "no head", "two workers"])
def server(request: Any, memory_url: str, monkeypatch: pytest.MonkeyPatch) -> Server:
    held = {name: tensor for name, tensor in trained().items() if name != HEAD}
    monkeypatch.setattr(layers, "checkpoint", lambda _: iter(held.items()))
    return Server(memory_url, *request.param)


@pytest.fixture
def channel(memory_url: str) -> Made:
    return Made(open_store(memory_url))


def changed(weights: Weights, *names: str, at: int = 5) -> Weights:
    """Weights in which a few elements of these tensors are others, the same in each."""
    found = {name: tensor.clone() for name, tensor in weights.items()}
    for name in names:
        found[name].view(torch.int16).view(-1)[at::97] += 3
    return found


@pytest.mark.parametrize("codec", ["packed", "context", "raw"])
def test_a_head_that_stays_equal_is_served_and_proven_in_the_place_of_the_embeddings(
    server: Server, channel: Made, memory_url: str, codec: str
) -> None:
    channel.codec_name, weights = codec, trained()
    channel.create(weights)
    channel.anchor(weights)
    for at in (1, 2):
        weights = changed(weights, HEAD, EMBEDDINGS, BODY, at=at)
        channel.delta(weights)
    weights = changed(weights, HEAD, EMBEDDINGS, at=3)
    channel.anchor(weights)
    server.open()
    assert (server.target.ignored, server.target.ties) == ([], {HEAD: EMBEDDINGS})
    assert server.target.patched_count == 2
    for chain in ((1,), (2,), (3,), (4,)):
        server.take(*chain)
    assert torch.equal(server.live(), weights[HEAD])
    assert server.target.digest() == {
        name: sha256_hex(bits_of(tensor).data) for name, tensor in weights.items()
    }
    assert server.settled() == server.reader.numbered(4).version


@pytest.mark.parametrize("as_anchor", [False, True], ids=["delta", "anchor"])
@pytest.mark.parametrize(
    "names", [(HEAD,), (EMBEDDINGS,), (EMBEDDINGS, BODY)], ids=["head", "embeddings", "all but head"]
)
def test_a_version_in_which_they_differ_is_refused_and_the_one_before_stays(
    server: Server, channel: Made, memory_url: str, names: tuple[str, ...], as_anchor: bool
) -> None:
    weights = trained()
    channel.create(weights)
    channel.anchor(weights)
    unequal = changed(weights, *names)
    (channel.anchor if as_anchor else channel.delta)(unequal)
    equal = changed(unequal, *{HEAD, EMBEDDINGS} - {*names})
    channel.delta(equal)
    server.open()
    server.take(1)
    for _ in range(2):
        with pytest.raises(
            StageError, match=f"{HEAD} and {EMBEDDINGS} are one tensor in the model, and differ in version 2"
        ):
            server.take(2)
        assert torch.equal(server.live(), weights[EMBEDDINGS])
        assert server.settled() == server.reader.numbered(1).version
    assert server.engine.calls.count("commit") == 2, "generation is paused for it once"
    server.take(2, 3)
    assert torch.equal(server.live(), equal[HEAD])
    assert server.settled() == server.reader.numbered(3).version


def test_a_trainer_that_begins_with_another_head_is_refused_at_its_first_version(
    server: Server, channel: Made, memory_url: str
) -> None:
    weights = changed(trained(), HEAD)
    channel.create(weights)
    channel.anchor(weights)
    server.open()
    with pytest.raises(StageError, match="differ in version 1"):
        server.take(1)
    assert torch.equal(server.live(), trained()[EMBEDDINGS])
