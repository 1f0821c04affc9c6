"""Layers of plain quantizers: their changes give the bits that quantizing the whole weight again gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set

import numpy as np
import pytest
import torch

from deltasync.errors import FingerprintMismatchError, StageError
from deltasync.kernels import native
from deltasync.serve.twin import Made, Twins, memory_order
from deltasync.tensors import Delta, Layout, TensorSpec
from deltasync.tensors.bits import bits_of, tensor_of
from deltasync.tensors.delta import joined, of_tensor
from deltasync.tensors.fingerprint import tensor_key
from vllm_plugin.load.plain import ElementChanges, PlainLayer, Quantize, WeightPart

ROWS, COLUMNS = 12, 20
FIRST = 7  # rows of the first of two tensors; the second has more columns, of which the weight has some
NAMES = "one", "two"


def quantize(
    value_N: torch.Tensor, most_G: torch.Tensor, group_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize elements beside the largest magnitudes of their groups."""
    scale_G = (most_G.float() / 448).clamp_min(1e-6)
    return (value_N / scale_G[group_N]).clamp(-448, 448).to(torch.float8_e4m3fn), scale_G


def quantized(weight: torch.Tensor, group: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a whole weight, group by group."""
    made, scales = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), list[torch.Tensor]()
    for row in range(0, ROWS, group[0]):
        for column in range(0, COLUMNS, group[1]):
            here = slice(row, row + group[0]), slice(column, column + group[1])
            block = weight[here]
            one = torch.zeros(block.numel(), dtype=torch.int64)
            made_N, scale_G = quantize(block.reshape(-1), block.abs().max()[None], one)
            made[here] = made_N.view(block.shape)
            scales.append(scale_G[0])
    return made, torch.stack(scales)


class Bench:
    """A layer whose weight is made of a tensor and of some columns of another, with its live memory."""

    def __init__(self, weight: torch.Tensor, group: tuple[int, int], *, is_transposed: bool = True) -> None:
        self.group = group
        self.specs = {
            "one": TensorSpec("one", "bfloat16", (FIRST, COLUMNS)),
            "two": TensorSpec("two", "bfloat16", (ROWS - FIRST, COLUMNS + 3)),
        }
        self.layout = Layout(self.specs)
        self.mirror = self.split(weight)
        self.parts = [
            WeightPart("one", self.mirror["one"], 0, COLUMNS, 0, FIRST, COLUMNS),
            WeightPart("two", self.mirror["two"], 2, COLUMNS + 3, FIRST * COLUMNS, ROWS - FIRST, COLUMNS),
        ]
        made, scale = quantized(weight, group)
        self.live = {"weight": made.t() if is_transposed else made, "scale": scale}
        self.plain = PlainLayer(self.live, torch.empty_like(weight), self.parts, quantize, group)
        self.plain._few = 2 * weight.numel()  # by itself it leaves what changes much to the twin

    def split(self, weight: torch.Tensor) -> dict[str, np.ndarray]:
        """Return the bits of the two tensors that this weight is loaded from."""
        wide = torch.ones(ROWS - FIRST, COLUMNS + 3, dtype=weight.dtype)
        wide[:, 2 : 2 + COLUMNS] = weight[FIRST:]
        return {"one": bits_of(weight[:FIRST].clone()), "two": bits_of(wide)}

    def delta(self, weight: torch.Tensor) -> Delta:
        """Return what leads from the mirror to this weight."""
        found = []
        for name, new_N in self.split(weight).items():
            at_K = np.flatnonzero(new_N != self.mirror[name])
            found.append(of_tensor(self.layout, name, at_K, new_N[at_K] - self.mirror[name][at_K]))
        return joined(found, self.layout)

    def take(self, weight: torch.Tensor) -> dict[str, ElementChanges]:
        """Commit a version, and return what it changed. Live memory is then what the whole weight gives."""
        delta = self.delta(weight)
        found = self.plain.stage(delta)
        assert found is not None
        steps, self.plain.most_G = found
        for name in NAMES:
            delta.apply(name, self.mirror[name])
        for wanted, (name, each) in zip(quantized(weight, self.group), steps.items(), strict=True):
            live, key = self.live[name], tensor_key(name)
            live = live.permute(memory_order(live))
            before_N = bits_of(live).copy()
            assert (before_N[each.at_N] == each.old_N).all() and (np.diff(each.at_N) > 0).all()
            after_N = before_N.copy()
            after_N[each.at_N] = each.new_N
            assert each.after(name, native.fingerprint(key, before_N)) == native.fingerprint(key, after_N)
            spec = TensorSpec(name, str(live.dtype).removeprefix("torch."), tuple(live.shape))
            live.copy_(tensor_of(after_N, spec))
            assert (bits_of(live) == bits_of(wanted)).all()
        return steps


GROUPS = pytest.mark.parametrize("group", [(1, COLUMNS), (5, 8), (ROWS, COLUMNS)])


def some(seed: int) -> torch.Tensor:
    return (0.02 * torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed))).bfloat16()


@GROUPS
@pytest.mark.parametrize("is_transposed", [True, False])
def test_versions_of_any_steps_leave_what_the_whole_weight_gives(
    group: tuple[int, int], is_transposed: bool
) -> None:
    weight, rng = some(0), np.random.default_rng(0)
    bench = Bench(weight, group, is_transposed=is_transposed)
    assert bench.plain.prove()
    for share in (0.0, 0.01, 0.05, 0.3, 1.0, 0.05, 0.05, 0.02):
        bits_N = bits_of(weight)
        at_K = np.flatnonzero(rng.random(bits_N.size) < share)
        bits_N[at_K] += rng.choice(np.array([1, 2, 0x8000, 0xFFFF], np.uint16), at_K.size)
        bench.take(weight)
    most_G = bench.plain.most_G
    assert bench.plain.prove() and (bench.plain.most_G == most_G).all()


def falls(weight: torch.Tensor) -> None:
    weight[weight.abs() == weight.abs().amax(1, keepdim=True)] = 0


def ties(weight: torch.Tensor) -> None:
    weight[:, 3] = -weight.abs().amax(1)


def vanishes(weight: torch.Tensor) -> None:
    weight[2] = 0
    weight[9, ::2] = -0.0


def shrinks(weight: torch.Tensor) -> None:
    weight[4] *= 1e-38


@GROUPS
@pytest.mark.parametrize("change", [falls, ties, vanishes, shrinks])
def test_groups_whose_largest_element_falls_ties_or_vanishes_and_return(
    group: tuple[int, int], change: Callable[[torch.Tensor], None]
) -> None:
    weight = some(1)
    bench = Bench(weight, group)
    other = weight.clone()
    change(other)
    one_of_two = other.clone()
    one_of_two[:, 3] = 0.0
    for version in (other, one_of_two, weight, other):
        bench.take(version)


def test_a_scale_that_stays_has_one_new_element_for_each_that_changes() -> None:
    weight = some(2)
    bench = Bench(weight, (1, COLUMNS))
    small = int(weight[3].abs().argmin())
    weight[3, small] = weight[3].abs().max() / 2
    steps = bench.take(weight)
    assert [each.at_N.size for each in steps.values()] == [1, 0]


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_is_left_to_the_twin(value: float) -> None:
    weight = some(3)
    bench = Bench(weight, (1, COLUMNS))
    bench.take(weight)
    weight[5, 5] = value
    assert bench.plain.stage(bench.delta(weight)) is None
    assert not Bench(weight, (1, COLUMNS)).plain.prove()


def test_a_layer_that_is_not_what_its_mirror_makes_is_left_to_the_twin() -> None:
    for name in ("weight", "scale"):
        bench = Bench(some(4), (1, COLUMNS))
        bits_N = bench.live[name].view(torch.uint8)
        bits_N[1] ^= 1
        assert not bench.plain.prove() and bench.plain.has_failed
        assert bench.plain.stage(bench.delta(some(5))) is None


def test_what_changes_much_is_left_to_the_twin() -> None:
    weight = some(6)
    bench = Bench(weight, (1, COLUMNS))
    bench.plain._few = ROWS * COLUMNS // 8
    weight[:2, :7] *= 0.5
    bench.take(weight)
    weight *= 0.5
    assert bench.plain.stage(bench.delta(weight)) is None


class Layer(torch.nn.Module):
    def __init__(self, live: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in live.items():
            self.register_buffer(name, tensor)


class Served:
    """A layer whose twin and whose plain quantizer write into the same memory."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.bench = Bench(weight, (1, COLUMNS))
        self.model = torch.nn.Sequential(Layer(self.bench.live))
        self.twins_made = 0
        groups = [({self.model[0]: {*self.bench.live}}, {*NAMES})]
        assert self.bench.plain.prove()
        self.twins = Twins(self.model, groups, self.made, plain={self.model[0]: self.bench.plain})

    def made(self, layers: Set[torch.nn.Module], weights: Mapping[str, torch.Tensor]) -> Made:
        self.twins_made += 1
        one, two = (weights[name].view(self.bench.specs[name].shape) for name in NAMES)
        made, scale = quantized(torch.cat([one, two[:, 2 : 2 + COLUMNS]]), self.bench.group)
        return {layer: {"weight": made.t(), "scale": scale} for layer in layers}

    def old(self, name: str) -> torch.Tensor:
        return tensor_of(self.bench.mirror[name], self.bench.specs[name]).clone()

    def stage(self, weight: torch.Tensor) -> Delta:
        delta = self.bench.delta(weight)

        def new(name: str) -> torch.Tensor:
            tensor = self.old(name)
            delta.apply(name, bits_of(tensor))
            return tensor

        self.twins.stage({*NAMES}, new, delta)
        return delta

    def commit(self, weight: torch.Tensor) -> None:
        delta = self.stage(weight)
        for name in NAMES:
            delta.apply(name, self.bench.mirror[name])
        self.twins.exchange()

    def serves(self, weight: torch.Tensor) -> bool:
        made, scale = quantized(weight, self.bench.group)
        live = self.bench.live
        return bool(
            (bits_of(live["weight"].t()) == bits_of(made)).all()
            and (bits_of(live["scale"]) == bits_of(scale)).all()
        )


def test_versions_by_elements_and_by_twins_alternate_and_are_rolled_back() -> None:
    weight = some(7)
    served = Served(weight)
    served.bench.plain._few = ROWS * COLUMNS // 4
    for number in range(6):
        before, mirror = weight.clone(), {name: held.copy() for name, held in served.bench.mirror.items()}
        weight[number % 4, number] = 0.1 * number
        if number == 3:
            weight *= 0.5  # by its twin
        served.commit(weight)
        assert served.serves(weight) and served.twins.is_intact()
        assert served.twins_made == (number >= 3)
        if number % 2:
            served.twins.exchange()
            for name, bits_N in mirror.items():
                served.bench.mirror[name][:] = bits_N
            weight = before
            assert served.serves(weight) and served.twins.is_intact()
    assert not served.twins.distrust(served.old)


def test_largest_magnitudes_that_are_wrong_are_found_by_the_commit_and_read_again() -> None:
    weight = some(8)
    served = Served(weight)
    served.bench.plain.most_G += 9
    before = weight.clone()
    weight[2, 2] = 0.03
    served.stage(weight)
    with pytest.raises((FingerprintMismatchError, StageError)):
        served.twins.exchange()
    assert served.serves(before) and served.twins.is_intact()
    served.commit(weight)
    assert served.serves(weight) and not served.twins_made


def negates(value_N: torch.Tensor, *groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return quantize(-value_N, *groups)


def test_an_audit_finds_a_layer_that_is_not_what_its_twin_is() -> None:
    weight = some(9)
    served = Served(weight)
    served.bench.plain._quantize = negates
    weight[4, 4] = 0.01
    served.stage(weight)
    with pytest.raises(FingerprintMismatchError):  # the old bits are others
        served.twins.exchange()
    assert not served.twins.distrust(served.old)
    assert served.twins.remark is None
    served.bench.mirror["one"][0] ^= 0x40
    assert served.twins.distrust(served.old)
    made = served.twins_made
    served.commit(weight)
    assert served.serves(weight) and served.twins_made == made + 1
    served.twins.reloaded({served.model[0]})
    assert served.twins.remark is not None and not served.twins.distrust(served.old)


def fails(*_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    raise RuntimeError("out of memory")


@pytest.mark.parametrize("problem", [fails, negates])
def test_a_layer_that_failed_takes_its_twin_until_vllm_loads_it(problem: Quantize) -> None:
    weight, asked = some(10), list[int]()
    served = Served(weight)
    plain = served.bench.plain

    def counted(*given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        asked.append(given[0].numel())
        return problem(*given)

    plain.most_G, plain._quantize = None, counted
    for number in range(3):
        weight[1, number] += 0.01
        served.commit(weight)
        assert served.serves(weight) and served.twins_made == number + 1
        assert len(asked) == 1 and "1 of 1 layers" in (served.twins.remark or "")
    plain._quantize = quantize
    served.twins.reloaded({served.model[0]})
    assert served.twins.remark is None
    weight[1, 4] += 0.01
    served.commit(weight)
    assert served.serves(weight) and served.twins_made == 3
