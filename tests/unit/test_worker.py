"""One worker's share of a replica, over small models: what it proves before it writes, and what it makes anew
after it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deltasync import open_store
from deltasync.channel.documents import sha256_hex
from deltasync.channel.reading import ChannelReader
from deltasync.errors import CommitError, ConfigError, DeltaSyncError, ModelMismatchError
from deltasync.following import Cursor
from deltasync.following.identify import identify
from deltasync.kernels import native
from deltasync.kernels.backend import Backend
from deltasync.live import model_fingerprint
from deltasync.serve import derived, engine, load_plan
from deltasync.serve.engine import Failure, handed
from deltasync.serve.load_plan import LoadPlan
from deltasync.serve.mirror import Mirror, _together, mirrored
from deltasync.serve.shard import Shard
from deltasync.tensors import TensorSpec
from tests import driving as tests_driving
from tests.channels import Made
from tests.faults import flipped
from vllm_plugin import logger
from vllm_plugin import worker as extension
from vllm_plugin.load import layers
from vllm_plugin.load.reload import VllmLayers

PATIENCE_S = 60.0

Weights = dict[str, torch.Tensor]


def record(model: torch.nn.Module, specs: dict[str, TensorSpec]) -> LoadPlan:
    return load_plan.record(model, specs, layers.LOADER)


class Model(torch.nn.Module):
    """Two matrices, and vLLM's loader of them; `shuffled` swaps the halves of one after loading, as
    FlashInfer wants it.
    """

    def __init__(self, shuffled: bool = False) -> None:
        super().__init__()
        for seed, name in enumerate(("plain", "experts")):
            weight = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
            self.register_parameter(name, torch.nn.Parameter(weight, requires_grad=False))
        if shuffled:
            self.experts.data = self.experts.data.roll(4, 0)

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            getattr(self, name).copy_(tensor)


def checkpoint() -> Weights:
    return {name: tensor.clone() for name, tensor in Model().state_dict().items()}


def replica(model: torch.nn.Module, url: str) -> Shard:
    return extension.open_shard(tests_driving.runner_of(lambda: model), url)


def proven(of: Shard, url: str) -> int | None:
    """Audit, compare and identify, as the driver does at first; the version that is live."""
    of.verify()
    of.prove()
    of.audit([])
    cursor = Cursor(ChannelReader(open_store(url)))
    found = identify(cursor.reader, cursor.locate(), model_fingerprint(of.weights.memory.fingerprints))
    of.identified(None if found is None else handed([found])[0])
    return None if of.weights.version is None else of.weights.version.version


@pytest.fixture
def url(memory_url: str) -> str:
    """A channel whose first version is the checkpoint's weights plus one ulp here and there."""
    weights = checkpoint()
    weights["experts"].view(torch.int16)[0, 0] += 1
    channel = Made(open_store(memory_url))
    channel.create(weights)
    channel.anchor(weights)
    return memory_url


class TestProof:
    def test_a_shuffle_that_keeps_the_shape_does_not_prove_itself(
        self, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The checkpoint that vLLM loaded lacks the shuffled tensor, and the weights are no version: nobody
        can tell.
        """
        monkeypatch.setattr(layers, "checkpoint", lambda _: iter([("plain", checkpoint()["plain"])]))
        with pytest.raises(ModelMismatchError, match="1 tensors, such as experts, are not in the checkpoint"):
            proven(replica(Model(shuffled=True), url), url)

    def test_nor_does_a_tensor_of_another_shape(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        held = checkpoint() | {"experts": checkpoint()["experts"].reshape(6, 8)}
        monkeypatch.setattr(layers, "checkpoint", lambda _: iter(held.items()))
        with pytest.raises(ModelMismatchError, match="experts"):
            proven(replica(Model(), url), url)

    def test_weights_that_are_a_version_need_no_checkpoint(
        self, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(layers, "checkpoint", lambda _: iter(()))
        model = Model()
        model.experts.data.view(torch.int16)[0, 0] += 1
        assert proven(replica(model, url), url) == 1

    def test_weights_that_are_the_checkpoint_need_not_be_a_version(
        self, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(layers, "checkpoint", lambda _: iter(checkpoint().items()))
        assert proven(replica(Model(), url), url) is None

    def test_two_tensors_in_one_place_are_refused(self) -> None:
        class Tied(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embed = torch.nn.Parameter(torch.randn(4, 3), requires_grad=False)

            def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
                for name, tensor in weights:
                    self.embed[2 if name == "row" else slice(None)].copy_(tensor)

        specs = {name: TensorSpec(name, "float32", (4, 3)) for name in ("embed", "head")}
        for other in (specs["head"], TensorSpec("row", "float32", (3,))):
            with pytest.raises(ModelMismatchError, match=f"embed and {other.name} into the same memory"):
                record(Tied(), {"embed": specs["embed"], other.name: other})


class Loader(torch.nn.Module):
    """A model with one parameter of each kind, and a loader that a test replaces."""

    def __init__(self, load: Any) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(6, 2), requires_grad=False)
        self.register_buffer("derived", torch.randn(2))
        self.load = load

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.load(self, name, tensor)


def composed(model: Loader, name: str, tensor: torch.Tensor) -> None:
    model.w.copy_(tensor)
    model.w.copy_(-torch.exp(model.w))


def made_anew(model: Loader, name: str, tensor: torch.Tensor) -> None:
    model.w = torch.nn.Parameter(torch.empty_like(model.w), requires_grad=False)
    model.w.copy_(tensor)


def in_another_dtype(model: Loader, name: str, tensor: torch.Tensor) -> None:
    model.w.data = model.w.data.to(torch.float64)
    model.w.data.copy_(tensor)


def summed(model: Loader, name: str, tensor: torch.Tensor) -> None:
    model.w.copy_(tensor)
    model.derived.copy_(model.w.sum(0))


def padded(model: Loader, name: str, tensor: torch.Tensor) -> None:
    model.w.zero_()
    model.w[:4].copy_(tensor[:4])
    model.w[4:].fill_(0)


def erased(model: Loader, name: str, tensor: torch.Tensor) -> None:
    model.w.copy_(tensor)
    model.w[5:].fill_(0)


def through_memory_of_its_own(model: Loader, name: str, tensor: torch.Tensor) -> None:
    held = torch.empty(6, 2)
    held.copy_(tensor)
    model.w.copy_(held * model.w)


def kept_as_attribute(model: Loader, name: str, tensor: torch.Tensor) -> None:
    model.scaled = tensor * 2


def kept_outside(model: Loader, name: str, tensor: torch.Tensor) -> None:
    OUTSIDE.copy_(tensor)


OUTSIDE = torch.randn(6, 2)
COMPUTES = "vLLM's loader computes with it"


class TestRecord:
    @pytest.mark.parametrize(
        ("load", "reason"),
        [
            (composed, COMPUTES),
            (in_another_dtype, "vLLM's loader makes another tensor for it"),
            (summed, COMPUTES),
            (erased, COMPUTES),
            (through_memory_of_its_own, COMPUTES),
            (made_anew, None),
            (padded, None),
            (kept_as_attribute, ModelMismatchError),
            (kept_outside, ModelMismatchError),
        ],
    )
    def test_nothing_is_written_whatever_the_loader_does(self, load: Any, reason: Any) -> None:
        model = Loader(load)
        before = {
            id(tensor): (name, tensor.clone(), tensor.data_ptr())
            for name, tensor in model.state_dict().items()
        }
        before[0] = "outside", OUTSIDE.clone(), OUTSIDE.data_ptr()
        attributes, specs = dict(vars(model)), {"w": TensorSpec("w", "float32", (6, 2))}
        if reason is ModelMismatchError:
            with pytest.raises(
                ModelMismatchError, match=r"w float32\[6, 2\] cannot be updated: .* no layer of vLLM loads"
            ):
                record(model, specs)
        else:
            plan = record(model, specs)
            assert plan.reasons == ({} if reason is None else {"w": reason})
            assert plan.layers == {"w": {model}}
            assert [segment.live.data_ptr() for segment in plan.segments["w"]] == [model.w.data_ptr()] * (
                reason is None
            )
        assert dict(vars(model)) == attributes
        for (name, old, address), now in zip(
            before.values(), [*model.state_dict().values(), OUTSIDE], strict=True
        ):
            assert torch.equal(now, old), name
            assert now.data_ptr() == address

    def test_tensors_that_the_loader_joins_are_patched_where_each_of_them_goes(self) -> None:
        """As DeepSeek's q_a_proj and kv_a_proj_with_mqa; of a part of what was joined it is not known whose
        it is.
        """
        held: dict[str, torch.Tensor] = {}

        def joined(model: Loader, name: str, tensor: torch.Tensor) -> None:
            held[name] = tensor
            if len(held) == 3:
                whole = torch.cat([torch.cat([held["a"], held["b"]], dim=1), held["c"]])
                (model.w if keeps_all else model.w[1:]).copy_(whole if keeps_all else whole[1:])

        specs = {
            name: TensorSpec(name, "float32", shape)
            for name, shape in {"a": (4, 1), "b": (4, 1), "c": (2, 2)}.items()
        }
        for keeps_all in (True, False):
            held.clear()
            model = Loader(joined)
            plan, places = (
                record(model, specs),
                {"a": model.w[:4, :1], "b": model.w[:4, 1:], "c": model.w[4:]},
            )
            assert plan.reasons == ({} if keeps_all else dict.fromkeys(specs, COMPUTES))
            for name, place in places.items() if keeps_all else ():
                (segment,) = plan.segments[name]
                assert (segment.live.data_ptr(), segment.live.stride()) == (place.data_ptr(), place.stride())
                assert (segment.live.shape, segment.offset) == (place.shape, 0)

    def test_a_refusal_names_the_tensor_and_both_shapes(
        self, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        held = {name: tensor[:7] for name, tensor in checkpoint().items() if name == "experts"}
        monkeypatch.setattr(layers, "checkpoint", lambda _: iter(held.items()))
        model = Model()
        model.experts = torch.nn.Parameter(held["experts"].clone(), requires_grad=False)

        def load_weights(weights: Iterator[tuple[str, torch.Tensor]]) -> None:
            for name, tensor in weights:
                assert getattr(model, name).shape == tensor.shape

        model.load_weights = load_weights  # type: ignore[method-assign]
        told = r"experts bfloat16\[8, 6\] has shape \(7, 6\) in the checkpoint .* refuses .* at experts"
        with pytest.raises(ModelMismatchError, match=told):
            replica(model, url)

    def test_a_mirrored_tensor_must_be_in_the_checkpoint(self, url: str) -> None:
        plan = record(Loader(composed), {"w": TensorSpec("w", "float32", (6, 2))})
        for held in ({}, {"w": torch.zeros(6, 1)}):
            with pytest.raises(
                ModelMismatchError, match=r"has no w float32\[6, 2\], and vLLM's loader computes with it"
            ):
                mirrored(plan, {"w": TensorSpec("w", "float32", (6, 2))}, held.items())


class Ignoring(Model):
    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        super().load_weights((name, tensor) for name, tensor in weights if name in ("plain", "experts"))


class Drafting(torch.nn.Module):
    """A draft, whose loader takes a matrix of its own by this name, and embeddings."""

    def __init__(self, own: str) -> None:
        super().__init__()
        self.fc = torch.nn.Parameter(torch.randn(8, 6).to(torch.bfloat16), requires_grad=False)
        self.embed = torch.nn.Linear(6, 8, bias=False, dtype=torch.bfloat16)
        self.own = own

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == self.own:
                self.fc.copy_(tensor)
            elif name == self.own.replace("fc", "embed"):
                self.embed.weight.copy_(tensor)


class TestCoverage:
    def follow(
        self, model: torch.nn.Module, url: str, versions: int, **runner: Any
    ) -> list[tuple[int, dict[str, str]]]:
        engine = tests_driving.Engine()
        engine.model = model
        vars(engine.worker.model_runner).update(runner)
        reader = ChannelReader(open_store(url))
        target = tests_driving.target_of(
            lambda method, *args: [getattr(engine.worker, method)(*args)], reader
        )
        found = []
        target.open(lambda _: None)
        self.draft = target.draft
        for number in range(1, versions + 1):
            staged = target.stage([reader.numbered(number)])
            assert staged is not None
            target.commit(staged)
            target.settle()
            assert target.version == reader.numbered(number).version
            found.append((number, target.digest()))
        return found

    @pytest.mark.parametrize(
        ("own", "method", "followed"),
        [
            ("layers.2.fc", "mtp", True),
            ("draft.fc", "eagle", True),
            ("plain", "eagle", False),
            ("draft.fc", None, False),
        ],
    )
    def test_a_draft_is_followed_if_the_channel_has_it_and_never_by_equal_names(
        self, own: str, method: str | None, followed: bool, memory_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its embeddings are the model's, so the channel's copy of them goes nowhere."""
        model, draft = Ignoring(), Drafting(own.removeprefix("draft."))
        model.embed, before = draft.embed, [each.detach().clone() for each in draft.parameters()]
        first = (
            {own: before[0]}
            | checkpoint()
            | ({own.replace("fc", "embed"): torch.zeros(8, 6).bfloat16()} if followed else {})
        )
        held = {name: tensor for name, tensor in first.items() if not name.startswith("draft.")}
        drafted = [
            (name.removeprefix("draft."), tensor) for name, tensor in first.items() if name not in held
        ]
        monkeypatch.setattr(layers, "checkpoint", lambda _: iter(held.items()))
        monkeypatch.setattr(layers, "draft_checkpoint", lambda _: iter(drafted))
        derived._built.update({each: (frozenset([""]), {}) for each in (model, draft)})
        path, drafter = (
            "/no/checkpoint" if method == "mtp" else "/a/draft",
            SimpleNamespace(model=draft) if method else None,
        )
        config = SimpleNamespace(method=method, draft_model_config=SimpleNamespace(model=path))
        channel = Made(open_store(memory_url))
        channel.create(first)
        channel.anchor(second := {name: tensor * 2 for name, tensor in first.items()})
        ((_, digest),) = self.follow(model, memory_url, 1, drafter=drafter, speculative_config=config)
        assert torch.equal(draft.fc, second[own] if followed else before[0])
        assert torch.equal(draft.embed.weight, before[1])
        assert torch.equal(model.experts, second["experts"])
        assert digest.keys() == checkpoint().keys() | ({own} if followed else set())
        words = {True: "followed as a part of the model", False: "keeps the weights that it was loaded with"}
        assert self.draft is None if method is None else words[followed] in str(self.draft)

    @pytest.mark.parametrize("complete", [True, False])
    def test_what_the_loader_ignores_is_not_served(
        self,
        memory_url: str,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        complete: bool,
    ) -> None:
        weights = checkpoint() | {"post_layernorm": torch.randn(6).to(torch.bfloat16)}
        held = {name: tensor.clone() for name, tensor in weights.items()}
        monkeypatch.setattr(layers, "checkpoint", lambda _: iter(held.items()))
        monkeypatch.setattr(logger, "propagate", True)
        channel = Made(open_store(memory_url))
        channel.create(weights)
        channel.anchor(weights)
        for tensor in weights.values():
            tensor.view(torch.int16).reshape(-1)[0] += 1
        channel.delta(weights)
        model = Ignoring()
        gone = [] if complete else ["dropped"]
        derived._built[model] = (frozenset(["", *gone]), {})
        if not complete:
            with pytest.raises(ModelMismatchError, match=r"post_layernorm bfloat16\[6\], cannot be updated"):
                self.follow(model, memory_url, 2)
            return
        (_, first), (_, second) = self.follow(model, memory_url, 2)
        assert first.keys() == second.keys() == {"plain", "experts"}, (
            "no proof is of what nobody computes with"
        )
        assert torch.equal(model.plain, weights["plain"])
        assert caplog.text.count("post_layernorm, ...) are not served") == 1

    def test_what_neither_model_nor_checkpoint_has_is_refused(
        self, memory_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(layers, "checkpoint", lambda _: iter(checkpoint().items()))
        weights = checkpoint() | {"plain_bias": torch.randn(8).to(torch.bfloat16)}
        channel = Made(open_store(memory_url))
        channel.create(weights)
        channel.anchor(weights)
        model = Ignoring()
        derived._built[model] = (frozenset([""]), {})
        with pytest.raises(
            ModelMismatchError, match=r"plain_bias bfloat16\[8\], are neither in the model that"
        ):
            self.follow(model, memory_url, 1)

    def test_an_engine_of_another_dtype_is_told_both_and_the_cures(self, memory_url: str) -> None:
        channel = Made(open_store(memory_url))
        channel.create(checkpoint())
        channel.anchor(checkpoint())
        runner = tests_driving.runner_of(lambda: Model().half())
        runner.model_config.dtype = torch.float16
        told = "weights are bfloat16, and vLLM computes with float16, .* --dtype bfloat16, or publish with dtype='float16'"
        with pytest.raises(ModelMismatchError, match=told):
            extension.open_shard(runner, memory_url)

    def test_what_the_channel_lacks_is_refused(
        self, memory_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        held = checkpoint() | {"inv_freq": torch.zeros(3)}  # which the loader ignores
        monkeypatch.setattr(layers, "checkpoint", lambda _: iter(held.items()))
        weights = {"plain": checkpoint()["plain"]}
        channel = Made(open_store(memory_url))
        channel.create(weights)
        channel.anchor(weights)
        model = Ignoring()
        with pytest.raises(
            ModelMismatchError, match="1 tensors of the model, such as experts, are not in the channel"
        ):
            self.follow(model, memory_url, 1)
        assert all(torch.equal(held, checkpoint()[name]) for name, held in model.state_dict().items())


class TestHanded:
    """What the driver hands over is held to its digest again, and what is wrong with it is told by key."""

    @pytest.fixture
    def of(self, url: str, monkeypatch: pytest.MonkeyPatch) -> Shard:
        monkeypatch.setattr(layers, "checkpoint", lambda _: iter(checkpoint().items()))
        of = replica(Model(), url)
        assert proven(of, url) is None
        return of

    def test_bytes_or_none_are_taken_alike(self, of: Shard, url: str) -> None:
        stored = ChannelReader(open_store(url)).numbered(1)
        for data in (stored.data, None):
            assert of.stage([(stored.key, stored.sha256, data)])
        of.commit(alone=True)
        assert of.weights.version == stored.version

    def test_damage_is_told_with_the_key_of_the_record(self, of: Shard, url: str) -> None:
        def blamed(*record: Any) -> tuple[str, str | None]:
            with pytest.raises(DeltaSyncError) as caught:
                of.stage([record])
            failure = Failure.of(caught.value)
            return failure.kind, failure.key

        store = open_store(url)
        stored = ChannelReader(store).numbered(1)
        assert stored.data is not None
        assert blamed(stored.key, stored.sha256, flipped(stored.data)) == ("CorruptDataError", stored.key)
        (weights,) = stored.record.payload_files
        store.put(weights.key, flipped(store.read(weights.key, 1 << 30)))
        assert blamed(*handed([stored])[0])[1] == stored.key
        store.delete(stored.key)
        assert blamed(stored.key, stored.sha256, None) == ("MissingVersionError", stored.key)

    def test_bits_that_nobody_knows_are_settled_first(self, of: Shard, url: str) -> None:
        stored = ChannelReader(open_store(url)).numbered(1)
        of.weights.settled = False
        assert of.stage(handed([stored])) is False


def test_a_copy_for_a_loader_that_restores_layers_itself_leaves_them_as_they_are() -> None:
    """A model has hundreds of layers, and one of them is loaded at a time."""
    model = torch.nn.Sequential(Model(), Model())
    model[1].load_weights = lambda _: None
    restored = list[torch.nn.Module]()
    loader = load_plan.Loader("test", lambda twin, module: restored.append(module))
    loaded, originals = loader.as_loaded(model, restored=False)
    assert restored == [model[1]]
    assert {*originals.values()} == {*model.modules()} and not {*originals} & {*model.modules()}
    assert loaded[0].plain is model[0].plain
    del loaded[0]._parameters["plain"]
    loaded[0].added = 1
    assert "plain" in model[0]._parameters and not hasattr(model[0], "added")
    restored.clear()
    loader.as_loaded(model)
    assert {*restored} == {*model.modules()}


class Impl:
    """As FlashInfer's attention: a copy of the sinks in float32, made anew in place, or not."""

    def __init__(self, source: torch.Tensor, in_place: bool) -> None:
        self._sinks_source = source
        self._in_place = in_place
        self.scale = torch.tensor(1.0)
        self.sinks = source.to(torch.float32)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        assert act_dtype == torch.bfloat16
        if self._in_place:
            self.sinks.copy_(self._sinks_source)
        else:
            self.sinks = self._sinks_source.to(torch.float32)


class Attention(torch.nn.Module):
    def __init__(self, source: torch.Tensor, in_place: bool) -> None:
        super().__init__()
        self.impl = Impl(source, in_place)
        self.kv_cache = torch.arange(8.0)


class WithSinks(Model):
    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.sinks = torch.nn.Parameter(torch.randn(8).to(torch.bfloat16), requires_grad=False)
        self.attention = Attention(self.sinks, in_place)


class TestDerivedCopies:
    def test_a_copy_that_is_made_anew_in_place_is_found_and_refreshed(self) -> None:
        model = WithSinks(in_place=True)
        before = model.attention.impl.sinks.clone()
        copies = derived.find(model, set(), set())
        assert [str(copy) for copy in copies] == ["Impl.sinks"]
        held = model.attention.impl.sinks
        assert torch.equal(held, before)
        model.sinks.data.add_(1)
        derived.refresh(copies)
        assert model.attention.impl.sinks is held
        assert torch.equal(held, model.sinks.float())

    def test_an_audit_finds_a_copy_that_somebody_wrote(self) -> None:
        model = WithSinks(in_place=True)
        opened = extension.WorkerEngine(tests_driving.runner_of(lambda: model))
        opened.prove(set())
        model.sinks.data.add_(1)
        opened.refresh({"sinks"})
        assert opened.is_intact()
        made, sinks = opened.made(), model.attention.impl.sinks
        assert made == {"attention.impl.sinks": sha256_hex(sinks.numpy().tobytes())}
        sinks[3], sinks[4] = sinks[4], sinks[3].clone()  # the sum of all bits stays
        assert not opened.is_intact() and opened.made() != made
        opened.refresh(())
        assert opened.is_intact() and opened.made() == made
        assert torch.equal(sinks, model.sinks.float())

    def test_copies_are_compared_by_their_bits(self) -> None:
        model = WithSinks(in_place=True)
        model.sinks.data[-2:] = torch.tensor([0.0, torch.nan])
        impl = model.attention.impl
        impl.sinks.copy_(model.sinks)
        assert len(derived.find(model, set(), set())) == 1
        impl.process_weights_after_loading = lambda _: impl.sinks.copy_(  # type: ignore[method-assign]
            torch.where(model.sinks == 0, -0.0, model.sinks)
        )
        with pytest.raises(ModelMismatchError, match=r"Impl\.sinks"):
            derived.find(model, set(), set())

    def test_a_copy_that_is_made_elsewhere_is_refused_and_left_as_it_was(self) -> None:
        model = WithSinks(in_place=False)
        held, before = model.attention.impl.sinks, model.attention.impl.sinks.clone()
        with pytest.raises(
            ModelMismatchError, match=r"made from a weight in Impl\.sinks and does not make it again in place"
        ):
            derived.find(model, set(), set())
        assert model.attention.impl.sinks is held
        assert torch.equal(held, before)

    def test_a_buffer_that_is_made_elsewhere_is_refused_and_left_as_it_was(self) -> None:
        model = WithSinks(in_place=True)
        attention = model.attention
        attention.register_buffer("sinks", model.sinks.detach().float(), persistent=False)
        held, before = attention.sinks, attention.sinks.clone()
        attention.process_weights_after_loading = lambda _: setattr(
            attention, "sinks", model.sinks.detach().float()
        )
        with pytest.raises(ModelMismatchError, match=r"Attention\.sinks"):
            derived.find(model, set(), set())
        assert attention.sinks is held
        assert torch.equal(held, before)

    def test_a_copy_without_anybody_who_makes_it_anew_is_refused(self) -> None:
        models = Model(), Model(), Model()
        copy = models[0].plain.float().clone()
        models[0].cached = copy
        models[1].register_buffer("cached", copy, persistent=False)
        models[2].cached = (torch.ones(3), copy)
        for model in models:
            with pytest.raises(ModelMismatchError, match=r"Model\.cached"):
                derived.find(model, set(), set())

    def test_what_the_model_around_it_makes_again_is_refreshed_unless_that_writes_weights(self) -> None:
        """As SGLang's latent attention, which keeps products of `kv_b_proj`."""
        model, others = torch.nn.Sequential(Model()), list[torch.Tensor]()
        inner, held = model[0], model[0].plain.detach().T.contiguous()
        inner.product = held

        def post_load_weights() -> None:
            inner.product.copy_(inner.plain.T)
            for other in others:
                other.zero_()

        inner.post_load_weights = post_load_weights
        derived._made[model] = {(id(inner), "product")}
        covered = {each.untyped_storage().data_ptr() for each in inner.parameters()}
        (copy,) = derived.find(model, covered)
        inner.plain.data.add_(1)
        derived.refresh([copy])
        assert inner.product is held and torch.equal(held, inner.plain.T)
        others.append(inner.experts)
        before = inner.experts.detach().clone()
        with pytest.raises(ModelMismatchError, match=r"Model\.product"):
            derived.find(model, covered)
        assert torch.equal(inner.experts, before)

    def test_weights_in_a_row_and_a_part_of_one_are_refused(self) -> None:
        model = Model()
        rows = torch.cat([model.plain.data, torch.randn(2, 6).to(torch.bfloat16)])
        for made in (rows.float(), model.plain.data[:3].clone()):
            model.made = made
            with pytest.raises(ModelMismatchError, match=r"Model\.made"):
                derived.find(model, set(), set())

    def test_few_numbers_that_are_alike_are_no_copy(self) -> None:
        model = Model()
        model.few = model.plain.data.reshape(-1)[:15].clone()
        model.ones = torch.nn.Parameter(torch.ones(32), requires_grad=False)
        model.cosines = torch.cat([torch.ones(32), torch.zeros(32)])
        assert derived.find(model, set(), set()) == []

    @pytest.mark.parametrize("name", sorted(layers.LATER))
    def test_what_the_first_request_makes_is_known_before(self, name: str) -> None:
        holder = SimpleNamespace(**{name: None})
        model = Model()
        model.finalize = holder
        with pytest.raises(ModelMismatchError, match=name):
            derived.find(model, set(), later=layers.LATER)
        if (asked := layers.LATER[name]) is not None:
            setattr(holder, asked, False)
            assert derived.find(model, set(), later=layers.LATER) == []

    def test_what_loading_made_or_changed_in_any_form_is_seen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(derived, "_built", weakref.WeakKeyDictionary())
        monkeypatch.setattr(derived, "_made", weakref.WeakKeyDictionary())
        for register in (False, True, None):
            model = Model()
            model.cosines = torch.randn(8)
            model.register_buffer("filled", torch.randn(8), persistent=False)
            derived._built[model] = (frozenset([""]), derived._sums(model))
            made = model.plain.data.sum(dim=1)
            if register is None:
                model.filled.copy_(made)
            else:
                model.register_buffer("made", made, persistent=False) if register else setattr(
                    model, "made", [made]
                )
            derived.note_loaded(model)
            model.later = torch.randn(8)  # by a warm-up
            with pytest.raises(ModelMismatchError, match=r"Model\.(made|filled)"):
                derived.find(model, set(), set())
            covered = {made.untyped_storage().data_ptr(), model.filled.untyped_storage().data_ptr()}
            assert derived.find(model, covered, set()) == derived.find(model, set(), {model}) == []

    def test_views_of_parameters_and_scales_are_no_copies(self) -> None:
        model = Model()
        model.view = model.plain.data.T
        model.scale = torch.ones(48)
        model.plain.data.fill_(1.0)
        model.workspace = torch.zeros(48, dtype=torch.uint8)
        model.kv_cache = torch.empty(1 << 40, device="meta")  # nobody looks at what lies in it
        model.register_buffer("loaded", torch.randn(8, 6).to(torch.bfloat16))
        model.experts.data.copy_(model.loaded)
        assert derived.find(model, set(), set()) == []

    def test_commits_and_what_undoes_them_refresh_it(
        self, memory_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        torch.manual_seed(0)
        model = WithSinks(in_place=True)
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        monkeypatch.setattr(layers, "checkpoint", lambda _: iter(()))
        channel = Made(open_store(memory_url))
        channel.create(weights)
        channel.anchor(weights)
        of = replica(model, memory_url)
        assert proven(of, memory_url) == 1
        before = model.attention.impl.sinks.clone()
        weights["sinks"].add_(1)
        way = handed([channel.delta(weights)])
        for keep in (False, True):
            assert of.stage(way)
            of.commit(alone=keep)
            assert torch.equal(model.attention.impl.sinks, weights["sinks"].float())
            if not keep:
                of.undo()
                assert torch.equal(model.attention.impl.sinks, before)
                of.weights.settled = True

    @pytest.mark.parametrize(
        ("path", "pattern"),
        [
            ("v1/attention/backends/flashinfer.py", r"self\._sinks_source = sinks"),
            ("v1/attention/backends/flashinfer.py", r"self\.sinks\.copy_\(source_sinks\)"),
            ("v1/attention/backends/flashinfer.py", r"def process_weights_after_loading\(self, act_dtype"),
            (
                "model_executor/layers/attention/attention.py",
                r"self\.impl\.process_weights_after_loading\(act_dtype\)",
            ),
            (
                "model_executor/layers/fused_moe/runner/moe_runner.py",
                r"if self\._combined_gate_weight is None:",
            ),
            (
                "model_executor/layers/fused_moe/runner/moe_runner.py",
                r"self\._fse_fuse_gate = gate is not None and shared",
            ),
            ("models/glm5next/common/kda.py", r"self\._merged_conv_weight: torch\.Tensor \| None = None"),
            ("models/glm5next/common/attention.py", r"self\._wp_fp32: torch\.Tensor \| None = None"),
        ],
    )
    def test_vllm_has_them_where_these_tests_say(self, path: str, pattern: str) -> None:
        spec = importlib.util.find_spec("vllm")
        if spec is None or spec.origin is None:
            pytest.skip("no vLLM")
        assert re.search(pattern, Path(spec.origin).parent.joinpath(path).read_text())


class TestUnsettled:
    """What computes is what is asserted, whoever touches the weights."""

    def test_after_a_reload_that_failed_no_version_is_named_until_one_succeeds(
        self, memory_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        weights = checkpoint()
        monkeypatch.setattr(layers, "checkpoint", lambda _: iter(checkpoint().items()))
        channel = Made(open_store(memory_url))
        channel.create(weights)
        channel.anchor(weights)
        model = Model(shuffled=True)
        fails = False

        def reload(mirror: Mirror, names: Any) -> float:
            """In the place of vLLM's own, as it loads a shuffled layer."""
            layers = mirror.dirty | {layer for name in names for layer in mirror._layers.get(name, ())}
            mirror.dirty = layers
            if layers:
                model.experts.data.copy_(mirror._tensors["experts"].roll(4, 0))
                model.plain.data.copy_(mirror._tensors["plain"])
                if fails:
                    model.plain.data.zero_()
                    raise RuntimeError("out of memory")
            mirror.dirty = set()
            return 0.0

        monkeypatch.setattr(Mirror, "reload", reload)
        of = replica(model, memory_url)
        assert proven(of, memory_url) == 1
        before = model.state_dict()["plain"].clone()
        weights["plain"].add_(1)
        assert of.stage(handed([channel.delta(weights)]))
        total = model_fingerprint(of.weights.memory.fingerprints)
        fails = True
        for body in (lambda: of.commit(alone=True), lambda: of.settle(total)):
            with pytest.raises((RuntimeError, CommitError)):
                body()
            assert not of.settled()
            of.audit()  # reads the mirror, which was rolled back
            assert model_fingerprint(of.weights.memory.fingerprints) == total
        fails = False
        live = of.settle(total)
        assert (live and live.version, of.settled()) == (1, True)
        assert torch.equal(model.plain, before)

    def test_what_is_replaced_is_put_back_before_the_next_step_and_audited(
        self, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(layers, "checkpoint", lambda _: iter(checkpoint().items()))
        model, steps = Model(), []
        vllm_worker = extension.DeltaSyncWorkerExtension()
        vllm_worker.model_runner = tests_driving.runner_of(
            lambda: model, reload_weights=lambda: steps.append("reloaded")
        )
        vllm_worker.execute_model = lambda: steps.append(model.plain.sum().item())
        assert vllm_worker.deltasync_open(url) == {"result": None}
        of = vllm_worker._deltasync_shard
        proven(of, url)
        wanted = model.plain.sum().item()
        for replace in (
            lambda: setattr(model, "plain", torch.nn.Parameter(-model.plain, requires_grad=False)),
            lambda: setattr(model.plain, "data", -model.plain.data),
        ):
            replace()
            assert of.settled()
            vllm_worker.execute_model()
            assert (steps.pop(), of.settled()) == (wanted, False)
            of.weights.settled = True
        for load in (vllm_worker.model_runner.reload_weights, model.load_weights):
            with pytest.raises(ConfigError, match="Nothing was loaded"):
                load({})
        assert steps == []

    def test_weights_that_sleep_before_the_first_version_are_left_alone(
        self, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class VllmWorker:
            model_runner = tests_driving.runner_of(Model)

            def sleep(self, level: int = 1) -> None: ...

            def wake_up(self, tags: list[str] | None = None) -> None: ...

        monkeypatch.setenv("DELTASYNC_CHANNEL", url)
        monkeypatch.setenv("VLLM_PLUGINS", "deltasync")
        of = type("Worker", (VllmWorker, extension.DeltaSyncWorkerExtension), {})()
        of.sleep(1)
        assert of.deltasync_open(url)["error"]["kind"] == "SleepingError"
        of.wake_up(["kv_cache"])
        assert of.deltasync_open(url)["error"]["kind"] == "SleepingError"
        of.wake_up()
        assert of.deltasync_open(url) == {"result": None}
        of.sleep(2)
        assert of.deltasync_call("stage", [])["error"]["kind"] == "SleepingError"


class TestMirror:
    def test_layers_are_proven_one_after_the_other(self, monkeypatch: pytest.MonkeyPatch) -> None:
        layers = [torch.nn.Linear(3, 3, bias=False, dtype=torch.bfloat16) for _ in range(3)]
        tensors = {f"{number}": layer.weight.detach().clone() for number, layer in enumerate(layers)}
        mirror = Mirror(
            torch.nn.Identity(), VllmLayers(None), {name: {layers[int(name)]} for name in tensors}, tensors
        )
        reloaded = []

        def reload(names: Any) -> float:
            reloaded.append(sorted(names))
            for name in names:
                layers[int(name)].weight.data.copy_(tensors[name])
            return 0.0

        monkeypatch.setattr(mirror, "reload", reload)
        before = [layer.weight.detach().clone() for layer in layers]
        mirror.prove()
        assert reloaded == [["0"], ["0"], ["0"], ["1"], ["1"], ["2"], ["2"]]  # one by one in the first
        assert all(torch.equal(layer.weight, old) for layer, old in zip(layers, before, strict=True))

        layers[1].weight.data.mul_(2)  # the mirror would give something else
        found = layers[1].weight.detach().clone()
        with pytest.raises(ModelMismatchError, match=r"gives another Linear\.weight"):
            mirror.prove()
        assert torch.equal(layers[1].weight, found)

    def test_a_reload_that_fails_leaves_no_trace(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As vLLM's does where the attention has freed a weight to keep it packed for AMX."""
        layer = torch.nn.Linear(3, 3, bias=False, dtype=torch.bfloat16)
        tensors = {"weight": layer.weight.detach().clone()}
        layer.weight = freed = torch.nn.Parameter(torch.empty(0, dtype=torch.bfloat16), requires_grad=False)
        mirror = Mirror(torch.nn.Identity(), VllmLayers(None), {"weight": {layer}}, tensors)

        def reload(_: Any) -> float:
            layer.weight = torch.nn.Parameter(tensors["weight"].clone(), requires_grad=False)
            freed.data.copy_(layer.weight)
            return 0.0

        monkeypatch.setattr(mirror, "reload", reload)
        for _ in range(2):
            with pytest.raises(ModelMismatchError, match="having it load them again fails"):
                mirror.prove()
            assert layer.weight is freed
            assert freed.numel() == 0

    def test_layers_that_share_a_tensor_are_proven_together(self) -> None:
        a, b, c = (torch.nn.Identity() for _ in range(3))
        groups = _together({"1": {a}, "2": {b}, "3": {a, c}, "4": {c}})
        assert [(layers, names) for layers, names in groups] == [({b}, {"2"}), ({a, c}, {"1", "3", "4"})]

    def test_a_mirror_is_on_the_host_wherever_the_loader_puts_the_checkpoint(self) -> None:
        loaded = torch.empty((2, 2), device="meta")
        copied = []

        class Loaded(torch.Tensor):
            def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
                if args[0] != "cpu":
                    return self
                copied.append((args, kwargs))
                return torch.zeros(2, 2)

        plan = LoadPlan({"w": []}, {"w": {torch.nn.Identity()}}, {"w": "packed"})
        specs = {"w": TensorSpec("w", "float32", (2, 2))}
        assert mirrored(plan, specs, [("w", loaded.as_subclass(Loaded))])["w"].device.type == "cpu"
        assert copied == [(("cpu",), {"copy": True, "memory_format": torch.contiguous_format})]


class TestThreads:
    @pytest.fixture(autouse=True)
    def _unlimited(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(native, "_most", None)
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    @pytest.mark.parametrize(
        ("given", "expected"), [("1", 1), ("3", 3), ("2,4", 2), ("", None), ("none", None), ("0", None)]
    )
    def test_vllms_number_of_threads_is_kept_to(
        self, given: str, expected: int | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine.limit_threads(given, None)
        assert native._most == expected

    def test_workers_without_a_number_share_the_cores(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
        engine.limit_threads("", 4)
        assert native._most == 4

    def test_kernels_use_no_more_than_that(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
        for most, wanted in ((None, 8), (3, 3), (1, 1)):
            monkeypatch.setattr(native, "_most", most)
            assert (native.threads(1 << 30), native.threads(100)) == (wanted, 1)


class TestWarmUp:
    def test_kernels_are_compiled_before_vllm_watches_for_compilations(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        told: list[object] = []
        monkeypatch.setattr(Backend, "warm_up", lambda self, dtype: told.append((self.device.type, dtype)))
        monkeypatch.setattr(extension, "backend_of", Backend)
        model = torch.nn.Module()
        model.a = torch.nn.Parameter(torch.empty(2, dtype=torch.bfloat16, device="meta"), requires_grad=False)
        model.b = torch.nn.Parameter(torch.empty((), dtype=torch.float32, device="meta"), requires_grad=False)
        model.c = torch.nn.Parameter(torch.empty(2), requires_grad=False)
        vllm_worker = SimpleNamespace(
            model_runner=tests_driving.runner_of(lambda: model),
            compile_or_warm_up_model=lambda: told.append("vLLM's") or 1.5,
        )
        extension.warm_up_first(vllm_worker)
        assert vllm_worker.compile_or_warm_up_model() == 1.5
        assert set(told[:2]) == {("meta", torch.int16), ("meta", torch.int32)}
        assert told[2:] == ["vLLM's"]
        extension.warm_up_first(SimpleNamespace())  # a platform's worker without it

    def test_the_staging_thread_uses_the_models_device(
        self, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        used = []
        monkeypatch.setattr(torch.accelerator, "set_device_index", used.append)
        of = replica(Model(), url)
        of._use_device()
        assert used == []  # the host needs none
        of._device = torch.device("cuda", 3)
        of._use_device()
        assert used == [torch.device("cuda", 3)]
