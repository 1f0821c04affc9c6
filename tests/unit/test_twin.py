"""What twins of layers make, staged and exchanged in live memory."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Mapping, Set
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from deltasync.errors import FingerprintMismatchError, ModelMismatchError, StageError
from deltasync.serve.mirror import Mirror
from deltasync.serve.shard import Shard
from deltasync.serve.twin import Made, Separate, Twins, other_values, overlaps, tensors_of, values
from deltasync.tensors.bits import bits_of
from vllm_plugin.load import layers
from vllm_plugin.load.reload import VllmLayers, _kept_attributes
from vllm_plugin.worker import WorkerEngine


class Scaled(torch.nn.Module):
    """A weight kept transposed in 8 bits, and its scale, as vLLM's online FP8 keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(quantized(torch.zeros(4, 6)), requires_grad=False)
        self.scale = torch.zeros(())


MADE = {"weight", "scale"}


def quantized(weight: torch.Tensor) -> torch.Tensor:
    return weight.to(torch.float8_e4m3fn).t()


def made_by(layers: Set[torch.nn.Module], weights: Mapping[str, torch.Tensor]) -> Made:
    return {layer: {"weight": quantized(weights["w"]), "scale": weights["w"].max()} for layer in layers}


def test_what_a_twin_makes_is_exchanged_in_place_and_back() -> None:
    layer = Scaled()
    twins = Twins(layer, [({layer: MADE}, {"w"})], made_by)
    place, stride = layer.weight.data_ptr(), layer.weight.stride()
    first, second = torch.arange(24.0).view(4, 6), torch.arange(24.0).view(4, 6)
    second[1, 3] = 300
    for weight in (first, second):  # most elements, then two
        twins.stage({"w"}, lambda _, given=weight: given)
        twins.exchange()
        assert torch.equal(layer.weight.float(), quantized(weight).float())
        assert float(layer.scale) == float(weight.max())
        assert twins.is_intact()
    twins.exchange()
    assert torch.equal(layer.weight.float(), quantized(first).float())
    assert (layer.weight.data_ptr(), layer.weight.stride()) == (place, stride)
    assert twins.is_intact()


def test_live_memory_that_somebody_wrote_is_not_committed_over() -> None:
    layer, one = Scaled(), torch.zeros(4, 6)
    one[0, 0] = 1
    twins = Twins(layer, [({layer: MADE}, {"w"})], made_by)
    twins.stage({"w"}, lambda _: one)
    layer.weight.data.view(torch.int8)[0, 0] = 7
    assert not twins.is_intact()
    with pytest.raises(StageError):
        twins.exchange()
    assert int(layer.weight.data.view(torch.int8)[0, 0]) == 7


def test_views_of_one_storage_that_differ_cannot_be_exchanged_one_by_one() -> None:
    layer = torch.nn.Module()
    layer.register_buffer("whole", torch.zeros(4, 4))
    assert not overlaps([layer])
    layer.register_buffer("part", layer.whole[:2])
    assert overlaps([layer])


class Failing:
    """Makes what `made_by` makes of layers but those in `broken`, whose twins fail."""

    def __init__(self, *broken: torch.nn.Module) -> None:
        self.broken = broken

    def __call__(self, layers: Set[torch.nn.Module], weights: Mapping[str, torch.Tensor]) -> Made:
        if layers & {*self.broken}:
            raise RuntimeError("out of memory")
        (weight,) = weights.values()
        return made_by(layers, {"w": weight})


def mirror_of(
    model: torch.nn.ModuleList,
    make: Failing,
    monkeypatch: pytest.MonkeyPatch,
    without: Set[str] = frozenset(),
) -> Mirror:
    """The mirror of layers that each have a twin, but those of the weights `without`, with a reload in the place
    of vLLM's own.
    """
    tensors = {f"w{number}": torch.zeros(4, 6) for number in range(len(model))}
    layers = {name: {layer} for name, layer in zip(tensors, model, strict=True)}
    mirror = Mirror(model, VllmLayers(None), layers, tensors)
    groups = [(dict.fromkeys(of, MADE), {name}) for name, of in layers.items()]
    mirror.twins = Twins(model, groups, make, without)

    def reload(names: Iterable[str]) -> float:
        for name, of in layers.items():
            if name in names or of & mirror.dirty:
                for layer, made in made_by(of, {"w": tensors[name]}).items():
                    layer.weight.data.copy_(made["weight"])
                    layer.scale.copy_(made["scale"])
        mirror.dirty = set()
        return 1.0 if names else 0.0

    monkeypatch.setattr(mirror, "reload", reload)
    return mirror


def committed(mirror: Mirror, value: float) -> float:
    """Stage and write a version in which every mirrored weight has this value. Returns the time of reloads."""
    bits = {name: bits_of(torch.full((4, 6), float(value))) for name in mirror._tensors}
    mirror.stage(bits, bits.keys())
    for name, bits_N in bits.items():
        bits_of(mirror._tensors[name])[:] = bits_N
    return mirror.refresh(bits)


def test_a_layer_whose_twin_fails_later_is_loaded_again_for_that_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = torch.nn.ModuleList([Scaled(), Scaled()])
    make = Failing()
    mirror = mirror_of(model, make, monkeypatch)
    assert committed(mirror, 1) == 0
    make.broken = (model[1],)
    assert committed(mirror, 2) == 1
    assert [float(layer.weight.float().max()) for layer in model] == [2, 2]
    assert mirror.audit()
    for tensor in mirror._tensors.values():  # the version is undone
        tensor.fill_(1)
    assert mirror.refresh(mirror._tensors) == 1
    assert [float(layer.weight.float().min()) for layer in model] == [1, 1]
    assert mirror.audit()
    make.broken = ()
    assert committed(mirror, 3) == 0
    assert [float(layer.weight.float().max()) for layer in model] == [3, 3]


def test_a_reload_that_fails_undoes_twins_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers with twins and others are of one version, whichever of them fails."""
    model = torch.nn.ModuleList([Scaled(), Scaled()])
    make = Failing()
    mirror = mirror_of(model, make, monkeypatch)
    committed(mirror, 1)
    make.broken = (model[1],)
    reload, fails = mirror.reload, [False, False, True]

    def failing(names: Iterable[str]) -> float:
        if fails.pop():
            mirror.dirty = {model[1]}
            raise RuntimeError("out of memory")
        return reload(names)

    monkeypatch.setattr(mirror, "reload", failing)
    with pytest.raises(RuntimeError):
        committed(mirror, 2)
    for tensor in mirror._tensors.values():
        tensor.fill_(1)
    mirror.refresh(mirror._tensors)
    assert fails == []
    assert [float(layer.weight.float().max()) for layer in model] == [1, 1]
    assert mirror.audit()


def test_what_a_layer_without_a_twin_has_after_a_reload_is_audited(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.ModuleList([Scaled(), Scaled()])
    mirror = mirror_of(model, Failing(model[1]), monkeypatch, without={"w1"})
    assert mirror.twins.names == {"w0"}
    assert committed(mirror, 1) == 1
    assert mirror.audit()
    model[1].scale += 1
    assert not mirror.audit()
    mirror.refresh(())
    assert float(model[1].scale) == 1
    assert mirror.audit()


def test_a_reload_that_gives_other_bits_the_second_time_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.ModuleList([Scaled(), Scaled()])
    mirror = mirror_of(model, Failing(), monkeypatch, without={"w1"})
    committed(mirror, 1)
    reload, added = mirror.reload, [0, 1]

    def varying(names: Iterable[str]) -> float:
        reload_s = reload(names)
        model[1].scale += added.pop() if added else 0
        return reload_s

    monkeypatch.setattr(mirror, "reload", varying)
    with pytest.raises(FingerprintMismatchError, match="layers of w1 twice"):
        committed(mirror, 2)
    assert mirror.dirty == {model[1]}
    for tensor in mirror._tensors.values():
        tensor.fill_(1)
    mirror.refresh(mirror._tensors)
    assert [float(layer.scale) for layer in model] == [1, 1]
    assert mirror.audit()


def test_an_expanded_tensor_is_exchanged_once() -> None:
    layer = Scaled()
    layer.scale = torch.zeros(1).expand(4)

    def make(layers: Set[torch.nn.Module], weights: Mapping[str, torch.Tensor]) -> Made:
        made = made_by(layers, weights)[layer]
        return {layer: {**made, "scale": made["scale"].reshape(1).expand(4)}}

    twins = Twins(layer, [({layer: MADE}, {"w"})], make)
    twins.stage({"w"}, lambda _: torch.ones(4, 6))
    twins.exchange()
    assert layer.scale.tolist() == [1] * 4
    assert twins.is_intact()


def test_a_repair_loads_damaged_layers_and_exchanges_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.ModuleList([Scaled(), Scaled()])
    mirror = mirror_of(model, Failing(), monkeypatch)
    committed(mirror, 1)
    bits = {name: bits_of(torch.full((4, 6), 2.0)) for name in mirror._tensors}
    mirror.stage(bits, bits.keys())  # a version that is never committed
    model[0].weight.data.view(torch.int8)[0, 0] = 7
    assert not mirror.audit()
    mirror.refresh(())
    assert mirror.audit()
    assert [float(layer.weight.float().max()) for layer in model] == [1, 1]
    assert committed(mirror, 3) == 0


@pytest.mark.parametrize("level", [1, 2])
def test_layers_are_a_fresh_server_s_after_sleep_which_ends_what_is_staged(
    level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM sleeps: with level 1 weights come back, with level 2 their memory is there without its bits."""

    def loaded(value: float) -> dict[str, str]:
        """Return what layers hold that are loaded from weights of this value, without twins."""
        model = torch.nn.ModuleList([Scaled(), Scaled()])
        mirror = mirror_of(model, Failing(), monkeypatch, without={"w0", "w1"})
        committed(mirror, value)
        return mirror.made()

    model = torch.nn.ModuleList([Scaled(), Scaled()])
    mirror = mirror_of(model, Failing(), monkeypatch)
    config = SimpleNamespace(runner_type="generate", dtype=torch.float32)
    engine = WorkerEngine(SimpleNamespace(get_model=lambda: model, model_config=config))
    engine._mirror = mirror
    shard = Shard(None, engine)  # type: ignore[arg-type]
    committed(mirror, 1)
    if level == 2:
        bits = {name: bits_of(torch.full((4, 6), 2.0)) for name in mirror._tensors}
        engine.stage(bits, bits.keys())  # a version that is never committed
    assert mirror.twins._ready or mirror.twins._done
    shard.fall_asleep()
    assert mirror.twins._ready == mirror.twins._done == []
    if level == 2:
        for layer in model:
            layer.weight.data.view(torch.int8).fill_(0x5A)
            layer.scale.fill_(9)
    shard.wake_up()
    assert engine.is_intact() == (level == 1)
    engine.refresh(())
    assert engine.is_intact()
    assert engine.made() == loaded(1)
    assert committed(mirror, 3) == 0
    assert engine.made() == loaded(3)


@pytest.mark.parametrize("wrong", [torch.zeros(2, 2), torch.zeros(6, 4), None])
def test_a_twin_that_makes_other_tensors_than_live_memory_has_fails(
    wrong: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = Scaled()

    def make(layers: Set[torch.nn.Module], weights: Mapping[str, torch.Tensor]) -> Made:
        made = made_by(layers, weights)[layer]
        return {layer: {"scale": made["scale"]} if wrong is None else made | {"weight": wrong}}

    twins = Twins(layer, [({layer: MADE}, {"w"})], make)
    twins.stage({"w"}, lambda _: torch.ones(4, 6))
    assert twins.failed == {"w"}
    twins.exchange()
    assert float(layer.weight.float().max()) == float(layer.scale) == 0


def test_a_tensor_that_layers_of_two_groups_share_may_not_change_with_one() -> None:
    first, second = Scaled(), Scaled()
    second.scale = first.scale
    twins = Twins(
        torch.nn.ModuleList([first, second]), [({first: MADE}, {"w"}), ({second: MADE}, {"v"})], Failing()
    )
    twins.stage({"v"}, lambda _: torch.zeros(4, 6))
    assert twins.failed == set()
    twins.stage({"v"}, lambda _: torch.ones(4, 6))
    assert twins.failed == {"v"}


class Kernel:
    """An object of vLLM's that holds a tensor and a number made from a layer's weights."""

    __module__ = "vllm.model_executor.kernels"

    def __init__(self, weight: torch.Tensor) -> None:
        self.bound, self.largest = weight.max().clone(), float(weight.max())


class Method:
    __module__ = "vllm.model_executor.layers"

    def __init__(self, weight: torch.Tensor) -> None:
        self.kernel = Kernel(weight)


class Deep(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.quant_method = Method(torch.zeros(4, 6))


def test_tensors_and_numbers_of_kernels_belong_to_their_layer() -> None:
    layer = Deep()
    assert set(tensors_of(layer)) == {"weight", "scale", "quant_method.kernel.bound"}
    assert values(layer)["quant_method.kernel.largest[0]"] == 0
    bound = layer.quant_method.kernel.bound

    def make(layers: Set[torch.nn.Module], weights: Mapping[str, torch.Tensor]) -> Made:
        return {layer: {**made_by(layers, weights)[layer], "quant_method.kernel.bound": weights["w"].max()}}

    twins = Twins(layer, [({layer: {*tensors_of(layer)}}, {"w"})], make)
    twins.stage({"w"}, lambda _: torch.ones(4, 6))
    twins.exchange()
    assert float(bound) == 1


def test_each_of_several_kernels_belongs_to_its_layer() -> None:
    layer = Deep()
    layer.quant_method.kernel = [Kernel(torch.ones(2)), Kernel(torch.zeros(2))]  # type: ignore[assignment]
    assert {name for name in tensors_of(layer) if "bound" in name} == {
        "quant_method.kernel.0.bound",
        "quant_method.kernel.1.bound",
    }


def test_what_no_weight_changed_at_the_start_is_scratch_until_one_does() -> None:
    layer = Deep()
    bound, made = layer.quant_method.kernel.bound, torch.zeros(())

    def make(layers: Set[torch.nn.Module], weights: Mapping[str, torch.Tensor]) -> Made:
        return {layer: {**made_by(layers, weights)[layer], "quant_method.kernel.bound": made}}

    twins = Twins(layer, [({layer: MADE}, {"w"})], make)
    twins.stage({"w"}, lambda _: torch.ones(4, 6))
    bound += 1  # as a kernel writes while it computes
    twins.exchange()
    assert twins.is_intact()
    assert twins.failed == set()
    twins.stage({"w"}, lambda _: torch.ones(4, 6))
    assert twins.failed == {"w"}


def test_a_reload_keeps_the_tensors_of_kernels_where_they_are() -> None:
    layer = Deep()
    bound = layer.quant_method.kernel.bound
    with _kept_attributes([layer]):
        layer.quant_method.kernel = Kernel(torch.ones(4, 6))
    assert layer.quant_method.kernel.bound is bound
    assert float(bound) == layer.quant_method.kernel.largest == 1


def test_a_twin_has_kernels_of_its_own() -> None:
    layer = Deep()
    twin = copy.copy(layer)
    Separate({layer: twin}).module(twin, layer)
    kernel = twin.quant_method.kernel
    assert kernel is not layer.quant_method.kernel
    kernel.bound += 1
    assert float(layer.quant_method.kernel.bound) == 0


class Handle:
    """Memory outside of torch, which its owner frees."""

    __module__ = "vllm.model_executor.kernels"

    def __del__(self) -> None:
        self.is_free = True


def test_a_handle_of_packed_weights_is_neither_copied_nor_taken_for_another() -> None:
    layer = Deep()
    layer.quant_method.kernel.handle = handle = Handle()
    twin = copy.copy(layer)
    Separate({layer: twin}).module(twin, layer)
    assert twin.quant_method.kernel.handle is handle
    before = values(layer)
    assert other_values(twin, before) == []
    twin.quant_method.kernel.handle = Handle()  # as a kernel packs weights
    assert other_values(twin, before) == ["quant_method.kernel.handle[0]"]


class Packed:
    """Another library's object, which has a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensors = {"weight": tensor}


def closed(tensor: torch.Tensor) -> object:
    return lambda x: x @ tensor


def test_a_function_is_the_same_if_it_has_the_same_code_over_the_same_values() -> None:
    layer, weight = torch.nn.Module(), torch.zeros(4, 6)
    layer.linear = closed(weight)
    before = values(layer)
    layer.linear = closed(weight)  # as vLLM makes one at each load
    assert other_values(layer, before) == []
    layer.linear = closed(weight.clone())
    assert other_values(layer, before) == ["linear[0]"]


@pytest.mark.parametrize("keep", [Packed, closed])
@pytest.mark.parametrize("is_kept", [False, True])
def test_weights_in_objects_that_are_no_parts_of_a_layer_are_refused_and_untouched(
    keep: Callable[[torch.Tensor], object], is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another library packs them: a reload makes another object, or writes into that which there is."""
    layer, tensors, own = Scaled(), {"w": torch.zeros(4, 6)}, torch.zeros(4, 6)
    layer.packed = packed = keep(own)
    mirror = Mirror(layer, VllmLayers(None), {"w": {layer}}, tensors)

    def reload(_: Iterable[str]) -> float:
        layer.weight.data.copy_(quantized(tensors["w"]))
        layer.scale.copy_(tensors["w"].max())
        if is_kept:
            own.copy_(tensors["w"])
        else:
            layer.packed = keep(tensors["w"].clone())
        return 0.0

    monkeypatch.setattr(mirror, "reload", reload)
    with pytest.raises(
        ModelMismatchError, match=r"another Scaled\.packed\[0\], which has weights where nothing"
    ):
        mirror.prove()
    assert layer.packed is packed
    assert not own.any()


def test_a_version_that_makes_another_number_of_weights_is_taken_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Captured graphs and compiled code have it as a constant."""
    layer, tensors = Scaled(), {"w": torch.zeros(4, 6)}
    layer.scale_float = 0.0
    mirror = Mirror(layer, VllmLayers(None), {"w": {layer}}, tensors)

    def reload(_: Iterable[str]) -> float:
        layer.weight.data.copy_(quantized(tensors["w"]))
        layer.scale.copy_(tensors["w"].max())
        layer.scale_float = float(layer.scale)
        return 1.0

    monkeypatch.setattr(mirror, "reload", reload)
    mirror.prove()
    tensors["w"][0, 0] = -1  # the largest stays
    assert mirror.refresh({"w"}) > 0
    tensors["w"][0, 0] = 2
    with pytest.raises(FingerprintMismatchError, match=r"Scaled\.scale_float\[0\] another number"):
        mirror.refresh({"w"})
    tensors["w"][0, 0] = -1
    assert mirror.refresh({"w"}) > 0


def test_a_model_whose_reload_packs_weights_outside_of_torch_is_refused_and_untouched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As oneDNN's handles of int8 weights, which keep the address of scales that vLLM's reload frees."""
    layer = Deep()
    layer.quant_method.kernel.handle = handle = Handle()
    tensors = {"w": torch.zeros(4, 6)}
    mirror = Mirror(layer, VllmLayers(None), {"w": {layer}}, tensors)

    def reload(_: Iterable[str]) -> float:
        layer.weight.data.copy_(quantized(tensors["w"]))
        layer.scale.copy_(tensors["w"].max())
        layer.quant_method.kernel.handle = Handle()
        return 0.0

    monkeypatch.setattr(mirror, "reload", reload)
    with pytest.raises(ModelMismatchError, match=r"another Deep\.quant_method\.kernel\.handle"):
        mirror.prove()
    assert layer.quant_method.kernel.handle is handle


def test_a_model_whose_workers_exchange_scales_while_they_load_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As online FP8 under tensor parallelism, where a collective of a twin would meet those of the steps."""
    layer, tensors = Scaled(), {"w": torch.zeros(4, 6)}
    mirror = Mirror(layer, VllmLayers(None), {"w": {layer}}, tensors)

    def reload(_: Iterable[str]) -> float:
        largest = tensors["w"].max()
        torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
        layer.weight.data.copy_(quantized(tensors["w"]))
        layer.scale.copy_(largest)
        return 0.0

    monkeypatch.setattr(mirror, "reload", reload)
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        with pytest.raises(ModelMismatchError, match="its workers exchange scales"):
            mirror.prove()
    finally:
        torch.distributed.destroy_process_group()
    assert float(layer.scale) == float(layer.weight.float().max()) == 0


def test_a_worker_finds_the_largest_value_of_a_divided_layer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(amax: torch.Tensor, is_sharded: bool) -> torch.Tensor:
        raise AssertionError("asks other workers")

    online = SimpleNamespace(amax_for_tp_weight_quant=ask)
    monkeypatch.setitem(sys.modules, "vllm.model_executor.layers.quantization.online.fp8", online)
    rng = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(4, 6, generator=rng).to(torch.bfloat16) for _ in range(2))
    with layers.alone([gate, torch.full((4,), 9.0)]):
        by_row = online.amax_for_tp_weight_quant(torch.zeros(4, 1, dtype=torch.bfloat16), True)
        kept = online.amax_for_tp_weight_quant(torch.ones(1), False)
    with layers.alone([gate, up]):
        of_both = online.amax_for_tp_weight_quant(torch.zeros(1, dtype=torch.bfloat16), True)
    assert torch.equal(by_row, gate.abs().amax(1, keepdim=True))
    assert kept.tolist() == [1]
    assert torch.equal(of_both, torch.cat([gate, up]).abs().max().reshape(1))
    assert online.amax_for_tp_weight_quant is ask
