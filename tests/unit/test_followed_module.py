"""What a followed module computes with besides the weights that are proven, who else can write these, and its
gate.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.metadata
import os
import signal
import threading
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from deltasync import ModuleReplica, Publisher, follow
from deltasync.errors import ApplyError, ConfigError, ModelMismatchError
from deltasync.serve import kept
from deltasync.serve import module as followed
from tests.waiting import wait_until

pytestmark = pytest.mark.filterwarnings(
    "ignore:`?torch.nn.utils.weight_norm", "ignore:torch.ao.quantization", "ignore:torch.quantize_per"
)

PATIENCE_S = 60.0
X = torch.linspace(-1, 1, 16).reshape(2, 8)


def move(module: nn.Module, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=source))


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().requires_grad_(False).eval()


@contextlib.contextmanager
def following(
    url: str, make: Callable[[], nn.Module], published: Any = None, **options: Any
) -> Iterator[tuple[nn.Module, nn.Module, Publisher, ModuleReplica]]:
    """A module that follows a trainer's, at version 1."""
    trainer, live = seeded(make), seeded(make)
    with Publisher(url, dtype="keep", retention=None) as publisher:
        publisher.publish(published or trainer).wait(PATIENCE_S)
        with follow(live, url, **{"background": False, **options}) as replica:
            yield live, trainer, publisher, replica


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    @property
    def made(self) -> torch.Tensor:
        return self.lin.weight.t().contiguous()


class Flagged(Base):
    is_ready, kept = False, None

    def __init__(self) -> None:
        super().__init__()
        self.is_ready, self.kept = False, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_ready:
            self.kept, self.is_ready = self.made, True
        return x @ self.kept


class Cached(Base):
    @functools.cached_property
    def kept(self) -> torch.Tensor:
        return self.made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.kept


class Memoized(Base):
    @functools.lru_cache  # noqa: B019 - as users write it
    def kept(self) -> torch.Tensor:
        return self.made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.kept()


class InDict(Base):
    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.kept.setdefault(len(x), self.made)


class InObject(Base):
    def __init__(self) -> None:
        super().__init__()
        self.state = types.SimpleNamespace(kept=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.state.kept is None:
            self.state.kept = self.made
        return x @ self.state.kept


class InBuffer(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "kept"):
            self.register_buffer("kept", self.made, persistent=False)
        return x @ self.kept


class InClosure(Base):
    def __init__(self) -> None:
        super().__init__()
        self.call: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.call is None:
            kept = self.made
            self.call = lambda x: x @ kept
        return self.call(x)


class InArray(Base):
    def __init__(self) -> None:
        super().__init__()
        self.kept: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.made.numpy().copy() if self.kept is None else self.kept
        return x @ torch.from_numpy(self.kept)


class InSparse(Base):
    def __init__(self) -> None:
        super().__init__()
        self.kept: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.made.to_sparse() if self.kept is None else self.kept
        return x @ self.kept.to_dense()


class AsNumber(Base):
    def __init__(self) -> None:
        super().__init__()
        self.scale: float | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale = float(self.lin.weight.abs().max()) if self.scale is None else self.scale
        return self.lin(x) / self.scale


class Quantized(Base):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.kept = None, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kept is None:
            self.scale = self.lin.weight.abs().max() / 127
            self.kept = (self.lin.weight / self.scale).round().to(torch.int8)
        return x @ (self.kept.float() * self.scale).t()


class AsModule(Base):
    def __init__(self) -> None:
        super().__init__()
        self.copies: list[Any] = [None]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.copies[0] = self.copies[0] or copy.deepcopy(self.lin)
        return self.copies[0](x)


class Constant(Base):
    """With a table that has nothing to do with weights, in a module without any."""

    def __init__(self) -> None:
        super().__init__()
        self.rope = nn.Module()
        self.rope.register_buffer("table", torch.arange(8.0).cos(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x * self.rope.table)


def shared() -> nn.Module:
    part = nn.Linear(8, 8)
    return nn.Sequential(part, nn.ReLU(), part)


@pytest.mark.parametrize(
    "make",
    [
        Flagged,
        Cached,
        Memoized,
        InDict,
        InObject,
        InBuffer,
        InClosure,
        InArray,
        InSparse,
        AsNumber,
        Quantized,
        AsModule,
        Constant,
        shared,
        lambda: nn.utils.weight_norm(nn.Linear(8, 8)),
        lambda: nn.utils.spectral_norm(nn.Linear(8, 8)),
        lambda: prune.l1_unstructured(nn.Linear(8, 8), "weight", 0.5),
        lambda: parametrizations.weight_norm(nn.Linear(8, 8)),
        lambda: parametrizations.spectral_norm(nn.Linear(8, 8)),
        lambda: parametrizations.orthogonal(nn.Linear(8, 8)),
    ],
)
def test_what_calls_make_of_weights_is_made_again_with_each_version(
    memory_url: str, make: Callable[[], nn.Module]
) -> None:
    with following(memory_url, make) as (live, trainer, publisher, replica), torch.no_grad():
        before = None
        for version in (1, 2, 3):
            assert replica.sync() == version
            found = [live(X), live(X)]
            fresh = seeded(make)
            fresh.load_state_dict(trainer.state_dict())
            expected = fresh(X)
            assert all(torch.equal(each, expected) for each in found)
            assert before is None or not torch.equal(before, expected), (
                "no version changed anything, which proves nothing"
            )
            before = expected
            move(trainer, version)
            publisher.publish(trainer).wait(PATIENCE_S)


class Late(Base):
    """Makes a part that keeps something at the first call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "part"):
            self.part = nn.Module()
            self.part.register_buffer("kept", self.made, persistent=False)
        return x @ self.part.kept


class Unregistered(Base):
    """Keeps something in a module that it has in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[Any] = [nn.Module()]
        self.parts[0].kept = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.parts[0].kept is None:
            self.parts[0].kept = self.made
        return x @ self.parts[0].kept


def _count_inside(monkeypatch: pytest.MonkeyPatch, replica: ModuleReplica) -> list[object]:
    """Return a list that gets each value which is looked at, rather than compared, while the gate is closed
    for a commit.
    """
    seen: list[object] = []
    look = kept._tensors

    def counted(value: Any, *rest: Any) -> Any:
        if replica._gate._closed:
            seen.append(value)
        return look(value, *rest)

    monkeypatch.setattr(kept, "_tensors", counted)
    return seen


@pytest.mark.parametrize("called", [None, 0, 7], ids=["quiet", "first", "middle"])
def test_the_pause_looks_only_at_what_calls_have_kept_since_the_version_was_staged(
    memory_url: str, monkeypatch: pytest.MonkeyPatch, called: int | None
) -> None:
    kinds = [InDict, InObject, Flagged, Cached, InClosure, AsModule, InBuffer, InArray]
    make = lambda: nn.Sequential(*(kind() for kind in kinds * 8))  # noqa: E731
    with following(memory_url, make) as (live, trainer, publisher, replica), torch.no_grad():
        live(X)
        move(trainer, 1)
        publisher.publish(trainer).wait(PATIENCE_S)
        target = replica._follow.target
        seen, stage = _count_inside(monkeypatch, replica), target.stage

        def then_called(chain: Any) -> Any:
            staged = stage(chain)
            target._kept.drop()  # as before a first call
            target._kept.scan()
            if called is not None:
                live[called](X)
            return staged

        monkeypatch.setattr(target, "stage", then_called)
        assert replica.sync() == 2
        assert len(seen) <= (0 if called is None else 8), "of 64 layers"
        assert torch.equal(live(X), trainer(X))


@pytest.mark.parametrize("make", [Late, Unregistered, Cached, InObject, InClosure])
def test_what_a_call_keeps_between_staging_and_commit_is_seen(
    memory_url: str, monkeypatch: pytest.MonkeyPatch, make: Callable[[], nn.Module]
) -> None:
    with following(memory_url, make) as (live, trainer, publisher, replica), torch.no_grad():
        move(trainer, 1)
        publisher.publish(trainer).wait(PATIENCE_S)
        target, before = replica._follow.target, []
        stage = target.stage

        def then_called(chain: Any) -> Any:
            staged = stage(chain)
            before.append(live(X))
            return staged

        monkeypatch.setattr(target, "stage", then_called)
        if make in (Late, Unregistered):
            with pytest.raises(ModelMismatchError, match=r"^(part.kept|parts) was made by a forward call"):
                replica.sync()
            assert replica.version == 1 and torch.equal(live(X), before[0])
        else:
            assert replica.sync() == 2
            assert torch.equal(live(X), trainer(X))


def test_what_a_replaced_layer_keeps_is_made_again(memory_url: str) -> None:
    make = lambda: nn.Sequential(InDict(), Cached())  # noqa: E731
    with following(memory_url, make) as (live, trainer, publisher, replica), torch.no_grad():
        live[1] = seeded(Cached)
        for version in (1, 2, 3):
            assert replica.sync() == version
            assert torch.equal(live(X), X @ trainer[0].made @ trainer[1].made)
            move(trainer, version)
            publisher.publish(trainer).wait(PATIENCE_S)


def test_what_parametrize_caches_over_versions_is_of_none(memory_url: str) -> None:
    make = lambda: parametrizations.weight_norm(nn.Linear(8, 8))  # noqa: E731
    with (
        following(memory_url, make) as (live, trainer, publisher, replica),
        torch.no_grad(),
        parametrize.cached(),
    ):
        for version in (1, 2):
            assert replica.sync() == version
            expected = nn.functional.linear(X, trainer.parametrizations.weight(), trainer.bias)
            assert torch.equal(live(X), expected)
            move(trainer, version)
            publisher.publish(trainer).wait(PATIENCE_S)


class Derived(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("twice", self.lin.weight.detach() * 2, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.twice.t()


class WithChild(Base):
    """Keeps what it makes in a module without weights."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Module()
        self.child.kept = None  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.child.kept is None:
            self.child.kept = self.made
        return x @ self.child.kept


class Filled(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(8, 8), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.kept.any():
            self.kept.copy_(self.made)
        return x @ self.kept


def test_a_buffer_that_may_be_made_of_weights_is_refused_by_name_unless_it_is_said_not_to_be(
    memory_url: str,
) -> None:
    trainer, live = seeded(Derived), seeded(Derived)
    with Publisher(memory_url, dtype="keep", retention=None) as publisher:
        publisher.publish(trainer).wait(PATIENCE_S)
        with pytest.raises(
            ModelMismatchError, match=r"^twice is no weight of the channel and may be made of weights"
        ):
            follow(live, memory_url, background=False)
        with follow(live, memory_url, background=False, names={"twice": None}) as replica:
            assert replica.version == 1


@pytest.mark.parametrize(
    ("make", "said"),
    [(WithChild, "child.kept was made by a forward"), (Filled, "kept was changed by a forward")],
)
def test_what_cannot_be_made_again_keeps_the_version_that_it_was_made_of(
    memory_url: str, make: Callable[[], nn.Module], said: str
) -> None:
    with following(memory_url, make) as (live, trainer, publisher, replica), torch.no_grad():
        before = live(X)
        move(trainer, 1)
        publisher.publish(trainer).wait(PATIENCE_S)
        with pytest.raises(ModelMismatchError, match=said):
            replica.sync()
        assert replica.version == 1 and replica.status.state == "failed" and said in (replica.error or "")
        assert torch.equal(live(X), before)


class Rescaled(Base):
    """Divides its weights at the first call."""

    by_autograd = True

    def __init__(self) -> None:
        super().__init__()
        self.is_rescaled = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_rescaled:
            weight = self.lin.weight if self.by_autograd else self.lin.weight.data
            weight.div_(2)
            self.is_rescaled = True
        return 2 * self.lin(x)


class RescaledUnseen(Rescaled):
    by_autograd = False


def normed() -> nn.Module:
    return nn.Embedding(8, 8, max_norm=0.5)


@pytest.mark.parametrize("make", [Rescaled, RescaledUnseen, normed, lambda: nn.BatchNorm1d(8)])
def test_a_module_that_writes_its_own_weights_is_refused(
    memory_url: str, make: Callable[[], nn.Module]
) -> None:
    with following(memory_url, make) as (live, trainer, publisher, replica), torch.no_grad():
        live.train()
        live(torch.arange(8) if make is normed else X)
        for _ in range(2):
            with pytest.raises(ApplyError, match="wrote into its own weights"):
                live(X)
            with pytest.raises(ModelMismatchError, match="wrote into its own weights"):
                replica.sync()
            assert replica.status.state == "failed" and "wrote into its own" in (replica.not_ready or "")
            move(trainer, 1)
            publisher.publish(trainer).wait(PATIENCE_S)


def test_a_module_keeps_its_own_statistics_where_names_say_so(memory_url: str) -> None:
    make = lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))  # noqa: E731
    own = dict.fromkeys(("1.running_mean", "1.running_var", "1.num_batches_tracked"))
    with following(memory_url, make, names=own) as (live, trainer, publisher, replica), torch.no_grad():
        live.train()
        for version in (1, 2, 3):
            assert replica.sync() == version
            live(X)
            assert live[1].num_batches_tracked == version
            assert torch.equal(live[0].weight, trainer[0].weight)
            trainer[1].running_mean += 1
            move(trainer, version)
            publisher.publish(trainer).wait(PATIENCE_S)
        assert sorted(replica.status.ignored) == sorted(own)


def _by_data(module: Any) -> None:
    module.weight.data.add_(1)


def _by_numpy(module: Any) -> None:
    module.weight.numpy()[0, 0] += 1


def _by_inference(module: Any) -> None:
    with torch.inference_mode():
        module.weight.add_(1)


@pytest.mark.parametrize("write", [_by_data, _by_numpy, _by_inference])
@pytest.mark.parametrize("is_new", [False, True], ids=["sync", "version"])
@pytest.mark.parametrize("background", [False, True], ids=["caller", "thread"])
def test_writes_that_torch_does_not_count_are_found_by_all_bits(
    memory_url: str, write: Callable[[Any], None], is_new: bool, background: bool
) -> None:
    make = lambda: nn.Linear(8, 8)  # noqa: E731
    options = {"background": background, "poll_interval_s": 0.02}
    with following(memory_url, make, **options) as (live, trainer, publisher, replica), torch.no_grad():
        live(X)
        write(live)
        if is_new:  # that changes another tensor
            trainer.bias += 1
            publisher.publish(trainer).wait(PATIENCE_S)
        version = replica.wait(2, PATIENCE_S) if is_new and background else replica.sync()
        assert version == 1 + is_new
        assert torch.equal(live.weight, trainer.weight) and torch.equal(live(X), trainer(X))


def test_writes_before_the_first_call_are_found_in_it(memory_url: str) -> None:
    with following(memory_url, lambda: nn.Linear(8, 8)) as (live, trainer, _, replica), torch.no_grad():
        _by_data(live)
        with pytest.raises(ApplyError, match="something else wrote"):
            live(X)
        assert replica.sync() == 1
        assert torch.equal(live(X), trainer(X))


def test_comparing_all_bits_can_be_turned_down(memory_url: str) -> None:
    options = {"audit_s": 3600.0}
    with (
        following(memory_url, lambda: nn.Linear(8, 8), **options) as (live, trainer, _, replica),
        torch.no_grad(),
    ):
        live(X)
        _by_data(live)
        assert replica.sync() == 1
        assert not torch.equal(live.weight, trainer.weight)


def test_a_merged_adapter_is_refused_at_once_and_lost_in_no_version(memory_url: str) -> None:
    peft = pytest.importorskip("peft")
    trainer = seeded(LinearNet)
    adapted = peft.get_peft_model(
        seeded(LinearNet), peft.LoraConfig(r=2, target_modules=["lin"], init_lora_weights=False)
    )
    adapted.requires_grad_(False)
    with Publisher(memory_url, dtype="keep", retention=None) as publisher, torch.no_grad():
        publisher.publish(trainer).wait(PATIENCE_S)
        with follow(adapted, memory_url, background=False) as replica:
            own = adapted(X) - trainer(X)
            adapted.merge_adapter()
            with pytest.raises(ApplyError):
                adapted(X)
            move(trainer, 1)
            publisher.publish(trainer).wait(PATIENCE_S)
            with pytest.raises(ModelMismatchError, match=r"An adapter is merged .*unmerge_adapter\(\)"):
                replica.sync()
            adapted.unmerge_adapter()
            assert replica.sync() == 2
            torch.testing.assert_close(adapted(X) - trainer(X), own)
        adapted.merge_adapter()
        with pytest.raises(ModelMismatchError, match="An adapter is merged"):
            follow(adapted, memory_url, background=False)


@pytest.mark.parametrize("names", [{}, {"names": lambda own: _saved_by_peft(own)}], ids=["PEFT's", "given"])
def test_an_adapter_follows_in_place_over_a_base_that_stays(memory_url: str, names: dict[str, Any]) -> None:
    peft = pytest.importorskip("peft")
    from trl_callback import adapter

    def adapted() -> Any:
        return peft.get_peft_model(seeded(LinearNet), peft.LoraConfig(r=2, target_modules=["lin"])).eval()

    trainer, live = adapted(), adapted()
    with (
        Publisher(memory_url, dtype="keep", model_files=adapter.files(trainer)) as publisher,
        torch.no_grad(),
    ):
        publisher.publish(adapter.tensors(trainer)).wait(PATIENCE_S)
        with follow(live, memory_url, background=False, **names) as replica:
            for version in (2, 3):
                for param in trainer.parameters():
                    if param.requires_grad:
                        param += torch.randn_like(param)
                publisher.publish(adapter.tensors(trainer)).wait(PATIENCE_S)
                assert replica.sync() == version
                assert torch.equal(live(X), trainer(X)) and not torch.equal(live(X), seeded(LinearNet)(X))
            live.merge_adapter()
            with pytest.raises(ApplyError):
                live(X)


def _saved_by_peft(name: str) -> str | None:
    return name.replace(".default", "") if ".lora_" in name else None


class LinearNet(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x)


class WithState(Base):
    def __init__(self, state: Any) -> None:
        super().__init__()
        self._state = state

    def get_extra_state(self) -> Any:
        return self._state

    def set_extra_state(self, state: Any) -> None:
        self._state = state


def dynamic() -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(
        nn.Sequential(nn.Linear(8, 8)), {nn.Linear}, dtype=torch.qint8
    )


@pytest.mark.parametrize("make", [lambda: WithState({"scale": 2.0}), dynamic], ids=["extra", "packed"])
def test_what_is_no_tensor_is_refused_by_both_sides(memory_url: str, make: Callable[[], nn.Module]) -> None:
    module = make()
    tensors = {name: value for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)}
    with Publisher(memory_url, dtype="keep", retention=None) as publisher:
        with pytest.raises(ModelMismatchError, match="in the module's state_dict is no tensor but a"):
            publisher.publish(module)
        publisher.publish(tensors).wait(PATIENCE_S)
        with pytest.raises(ModelMismatchError, match=r"state_dict is (no tensor|a copy)"):
            follow(module, memory_url, background=False)


def _copying(names: tuple[str, ...]) -> nn.Module:
    module = nn.Linear(8, 8)

    def copies(_: Any, state: dict[str, Any], prefix: str, __: Any) -> None:
        state.update({name: state[name].clone() for name in names})

    module.register_state_dict_post_hook(copies)
    return module


def _expanded() -> nn.Module:
    module = nn.Module()
    module.register_buffer("scale", torch.ones(1).expand(6))
    return module


def _overlapping(first: Any, second: Any) -> nn.Module:
    module, memory = nn.Module(), torch.arange(96.0).reshape(12, 8)
    module.first, module.second = nn.Parameter(memory[first]), nn.Parameter(memory[second])
    return module


def _transposed() -> nn.Module:
    module, memory = nn.Module(), torch.arange(64.0).reshape(8, 8)
    module.first, module.second = nn.Parameter(memory), nn.Parameter(memory.t())
    return module


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: nn.Linear(8, 8).share_memory(), "is in memory that other processes may read"),
        (lambda: WithState(torch.ones(2)), "^_extra_state in the module's state_dict is a copy"),
        (lambda: _copying(("weight", "bias")), "^weight in the module's state_dict is a copy"),
        (lambda: _copying(("bias",)), "^bias in the module's state_dict is a copy"),
        (_expanded, "^scale overlaps itself"),
        (lambda: _overlapping(slice(0, 8), slice(4, 12)), "first and second overlap"),
        (lambda: _overlapping(slice(0, 8), slice(0, 4)), "first and second overlap"),
        (
            lambda: _overlapping((slice(None), slice(0, 5)), (slice(None), slice(4, 8))),
            "first and second overlap",
        ),
        (_transposed, "first and second overlap"),
    ],
)
def test_memory_that_cannot_be_written_alone_is_refused_by_name(
    memory_url: str, make: Callable[[], nn.Module], said: str
) -> None:
    module = make().requires_grad_(False)
    tensors = {name: value.clone() for name, value in module.state_dict().items()}
    with Publisher(memory_url, dtype="keep", retention=None) as publisher:
        publisher.publish(tensors).wait(PATIENCE_S)
        with pytest.raises(ModelMismatchError, match=said):
            follow(module, memory_url, background=False)


PLAIN = torch.arange(64.0).reshape(8, 8)
UNEVEN = [torch.ones(2, 8), torch.ones(3, 8)]


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning", "ignore:Sparse C.. tensor:UserWarning")
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (PLAIN.to_sparse, "is a Parameter of layout sparse_coo, which has no memory"),
        (PLAIN.to_sparse_csr, "is a Parameter of layout sparse_csr, which has no memory"),
        (PLAIN.to_mkldnn, "is a Parameter of layout _mkldnn, which has no memory"),
        (lambda: torch.nested.nested_tensor(UNEVEN), "is a nested tensor, which has no memory"),
        (
            lambda: torch.nested.nested_tensor(UNEVEN, layout=torch.jagged),
            "is a nested tensor, which has no memory",
        ),
        (lambda: torch._efficientzerotensor(8, 8), "is a ZeroTensor, which has no memory"),
        (lambda: torch.complex(PLAIN, PLAIN).conj().imag, "is a view whose memory has the negated values"),
    ],
)
def test_tensors_of_other_layouts_are_refused_by_name(
    memory_url: str, make: Callable[[], Any], said: str
) -> None:
    module = seeded(lambda: nn.Linear(8, 8))
    with Publisher(memory_url, dtype="keep", retention=None) as publisher:
        publisher.publish(module).wait(PATIENCE_S)
        module.weight = nn.Parameter(make(), requires_grad=False)
        with pytest.raises(ModelMismatchError, match=f"^weight {said}"):
            follow(module, memory_url, background=False)


def test_columns_of_one_matrix_are_apart(memory_url: str) -> None:
    make = lambda: _overlapping((slice(None), slice(0, 4)), (slice(None), slice(4, 8)))  # noqa: E731
    with following(memory_url, make) as (live, trainer, publisher, replica):
        move(trainer, 1)
        publisher.publish(trainer).wait(PATIENCE_S)
        assert replica.sync() == 2
        assert torch.equal(live.first, trainer.first) and torch.equal(live.second, trainer.second)


def test_compiled_parts_at_any_depth_have_the_names_of_their_modules(memory_url: str) -> None:
    trainer = seeded(Constant)
    live = seeded(Constant)
    live.lin = torch.compile(live.lin, backend="eager")
    with Publisher(memory_url, dtype="keep", retention=None) as publisher:
        publisher.publish(trainer).wait(PATIENCE_S)
        with follow(live, memory_url, background=False) as replica:
            assert replica.version == 1


def test_a_whole_graph_is_refused_with_the_way_that_works(memory_url: str) -> None:
    with (
        following(memory_url, lambda: nn.Linear(8, 8)) as (live, _, _, _),
        torch.no_grad(),
        pytest.raises(Exception, match=r"call module.compile\(fullgraph=True\) before deltasync.follow"),
    ):
        torch.compile(live, backend="eager", fullgraph=True)(X)
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_scripted_module_is_refused(memory_url: str) -> None:
    module = torch.jit.trace(nn.Linear(8, 8), X)
    with Publisher(memory_url, dtype="keep", retention=None) as publisher:
        publisher.publish(nn.Linear(8, 8)).wait(PATIENCE_S)
        with pytest.raises(ConfigError, match="scripted or traced"):
            follow(module, memory_url, background=False)


def test_a_backward_over_a_commit_raises(memory_url: str) -> None:
    with following(memory_url, lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))) as (
        live,
        trainer,
        publisher,
        replica,
    ):
        live.requires_grad_(True)
        given = X.clone().requires_grad_(True)
        with replica.hold():
            loss = live(given).sum()
            torch.autograd.grad(loss, given, retain_graph=True)
        move(trainer, 1)
        publisher.publish(trainer).wait(PATIENCE_S)
        assert replica.sync() == 2
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(loss, given)
        with replica.hold():
            torch.autograd.grad(live(given).sum(), given)


def _in_thread(action: Callable[[], Any]) -> None:
    thread = threading.Thread(target=action)
    thread.start()
    thread.join()


class Net(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x)


def with_attribute() -> nn.Module:
    module = seeded(Net)
    own = module.forward
    module.forward = lambda x: own(x) + 1  # type: ignore[method-assign]
    return module


@pytest.mark.parametrize(
    "how",
    [
        *("call", "forward", "attribute", "set attribute", "bound", "call_impl"),
        *("shallow", "shallow forward", "shallow attribute", "shallow attribute forward"),
    ],
)
def test_each_way_to_call_waits_for_a_commit(memory_url: str, how: str) -> None:
    live = seeded(Net) if "attribute" not in how or how == "set attribute" else with_attribute()
    bound, own, before = live.__call__, live.forward, vars(live).get("forward")
    with Publisher(memory_url, dtype="keep", retention=None) as publisher:
        publisher.publish(live).wait(PATIENCE_S)
        with follow(live, memory_url, background=False) as replica, torch.no_grad():
            if how == "set attribute":
                live.forward = before = lambda x: own(x) + 1  # type: ignore[method-assign]
            other = copy.copy(live)
            calls: dict[str, Any] = {
                "call": live,
                "forward": live.forward,
                "attribute": live.forward,
                "bound": bound,
            }
            calls |= {"call_impl": live._call_impl, "shallow": other, "shallow forward": other.forward}
            calls |= {"set attribute": live.forward}
            calls |= {"shallow attribute": other, "shallow attribute forward": other.forward}
            expected = live(X)
            with ThreadPoolExecutor(1) as pool:
                with replica._gate.alone():
                    answer = pool.submit(calls[how], X)
                    assert not wait([answer], 0.2).done, "it would compute while weights change"
                assert torch.equal(answer.result(PATIENCE_S), expected)
            deep = copy.deepcopy(live)
            assert type(deep) is Net
            with replica._gate.alone():
                assert torch.equal(deep(X), expected)
    for each in (live, other):
        assert type(each) is Net and torch.equal(each(X), expected)
    assert vars(live).get("forward") is before
    with follow(other, memory_url, background=False) as replica:
        assert replica.version == 1


def test_a_hold_may_end_in_another_thread(memory_url: str) -> None:
    with following(memory_url, lambda: nn.Linear(8, 8)) as (_, trainer, publisher, replica):
        hold = replica.hold()
        _in_thread(hold.__enter__)
        _in_thread(lambda: hold.__exit__(None, None, None))
        move(trainer, 1)
        publisher.publish(trainer).wait(PATIENCE_S)
        assert replica.sync() == 2


def test_an_older_pool_computes_inside_of_a_hold_that_a_commit_waits_for(memory_url: str) -> None:
    options = {"background": True, "poll_interval_s": 0.02}
    with ThreadPoolExecutor(1) as pool:
        pool.submit(time.sleep, 0).result()  # its thread is older than the hold
        with following(memory_url, lambda: nn.Linear(8, 8), **options) as (live, trainer, publisher, replica):
            expected = live(X)
            with replica.hold() as version:
                move(trainer, 1)
                publisher.publish(trainer).wait(PATIENCE_S)
                wait_until(lambda: replica._gate.waits_since_s is not None)
                assert torch.equal(pool.submit(live, X).result(PATIENCE_S), expected) and version == 1
            assert replica.wait(2, PATIENCE_S) == 2
            assert torch.equal(live(X), trainer(X))


def _forked(action: Callable[[], object]) -> int:
    """Return how a fork of this process ends that runs an action: 0 if it is true."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        os._exit(0 if action() else 1)
    return os.waitpid(child, 0)[1]


def _is_refused(live: nn.Module, replica: ModuleReplica) -> bool:
    calls = (lambda: live(X), lambda: replica.hold().__enter__(), replica.sync, lambda: replica.wait(99, 1))
    for call in calls:
        with contextlib.suppress(ConfigError):
            call()
            return False
    said = [replica.error, replica.not_ready, replica.status.error]
    return replica.status.state == "failed" and all("is a fork" in (each or "") for each in said)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_neither_computes_with_old_weights_nor_hangs(memory_url: str) -> None:
    options = {"background": True, "poll_interval_s": 0.01}
    stop = threading.Event()
    with following(memory_url, lambda: nn.Linear(8, 8), **options) as (live, trainer, publisher, replica):

        def publish() -> None:
            while not stop.is_set():
                trainer.weight.add_(1)
                publisher.publish(trainer).wait(PATIENCE_S)

        thread = threading.Thread(target=publish)
        thread.start()
        try:
            assert {_forked(lambda: _is_refused(live, replica)) for _ in range(20)} == {0}
            assert _forked(lambda: True) == 0, "one that does not touch the module"
        finally:
            stop.set()
            thread.join()

        def follows_anew() -> bool:
            replica.close()
            return bool(np.isfinite(live(X).numpy()).all())

        assert _forked(follows_anew) == 0


FRAME = followed.ModuleTarget, followed._gating


def test_what_follows_a_frameworks_modules_is_found_by_its_entry_point(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = "deltasync.modules"
    entry = importlib.metadata.EntryPoint("frame", f"{__name__}:FRAME", group)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **asked: {group: [entry]}[asked["group"]])
    made = {name: type("Made", (), {"__module__": f"{name}.nn"})() for name in ("frame", "other")}
    assert followed._adapter(made["frame"]) == FRAME
    with pytest.raises(ConfigError, match=r"takes a torch\.nn\.Module or"):
        followed._adapter(made["other"])
