"""Every kind of state is taken apart and put back bit by bit, in place; what cannot be is refused by name."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from state_objects import RANGE_BYTES, Averages, Training, move, name_of

from lightkeeper.errors import UsageError
from lightkeeper.manager.state import layout as layout_module
from lightkeeper.manager.state.codec import StateRefused
from lightkeeper.manager.state.layout import Layout, LayoutError, layout_of
from lightkeeper.manager.state.registry import StateRegistry, leaves_in
from lightkeeper.manager.state.restore import StateDoesNotFit, Target
from lightkeeper.manager.state.segments import checksum_ranges, dense_bytes


def test_a_whole_training_state_arrives_bit_by_bit():
    donor, joiner = Training(0, steps=3), Training(1)
    assert donor.fingerprint() != joiner.fingerprint()
    addresses = [p.data_ptr() for p in joiner.model.parameters()]
    move(donor.registry, joiner.registry)
    assert joiner.fingerprint() == donor.fingerprint()
    assert [p.data_ptr() for p in joiner.model.parameters()] == addresses
    assert joiner.model.head.weight is joiner.model.embed.weight
    assert joiner.model.seen == 3 and joiner.scheduler.last_epoch == 3
    assert joiner.scheduler.milestones == donor.scheduler.milestones
    assert joiner.optimizer.param_groups[0]["lr"] == donor.optimizer.param_groups[0]["lr"]
    assert joiner.averages.inner[7] == {"x": 0} and type(joiner.averages.inner["counts"][2]) is tuple
    assert not torch.equal(joiner.model.cache, donor.model.cache)  # not persistent: stays out


def test_moments_of_bf16_parameters_stay_fp32():
    donor, joiner = Training(0, steps=2), Training(1)
    move(donor.registry, joiner.registry)
    weight, there = joiner.model.body.weight, donor.model.body.weight
    moment, theirs = joiner.optimizer.state[weight]["exp_avg"], donor.optimizer.state[there]["exp_avg"]
    assert weight.dtype == torch.bfloat16 and moment.dtype == torch.float32
    assert torch.equal(moment, theirs) and not torch.equal(moment, moment.bfloat16().float())


def test_existing_optimizer_state_is_written_in_place_and_training_goes_on_alike():
    donor, joiner = Training(0, steps=4), Training(1, steps=2)
    moments = {p: s["exp_avg"].data_ptr() for p, s in joiner.optimizer.state.items()}
    move(donor.registry, joiner.registry)
    assert {p: s["exp_avg"].data_ptr() for p, s in joiner.optimizer.state.items()} == moments
    for one in (donor, joiner):
        torch.manual_seed(9)
        one.step()
    assert donor.fingerprint() == joiner.fingerprint()


def test_state_that_the_donor_has_not_is_removed():
    donor, joiner = Training(0), Training(1, steps=2)
    move(donor.registry, joiner.registry)
    assert not joiner.optimizer.state
    assert joiner.fingerprint() == donor.fingerprint()


@pytest.mark.parametrize("range_bytes", [64, 128, 1 << 20])
def test_any_size_of_range(range_bytes):
    donor, joiner = Training(0, steps=2), Training(1)
    move(donor.registry, joiner.registry, range_bytes)
    assert joiner.fingerprint() == donor.fingerprint()


def test_many_small_tensors_share_a_range():
    def registry(seed: int) -> StateRegistry:
        torch.manual_seed(seed)
        made = StateRegistry()
        made.register("model", nn.ParameterList([nn.Parameter(torch.randn(3)) for _ in range(300)]))
        return made

    donor, joiner = registry(0), registry(1)
    move(donor, joiner, 1 << 20)
    assert donor.fingerprint() == joiner.fingerprint()


SCHEDULERS = torch.optim.lr_scheduler


@pytest.mark.parametrize(
    "make",
    [
        lambda o: SCHEDULERS.LambdaLR(o, lambda step: min(1.0, step / 10)),
        lambda o: SCHEDULERS.CosineAnnealingLR(o, 20),
        lambda o: SCHEDULERS.OneCycleLR(o, 0.1, 30),
        lambda o: SCHEDULERS.SequentialLR(o, [SCHEDULERS.LinearLR(o), SCHEDULERS.ExponentialLR(o, 0.9)], [3]),
        lambda o: SCHEDULERS.ReduceLROnPlateau(o),
    ],
)
def test_schedulers(make):
    def training(seed: int) -> tuple[StateRegistry, torch.optim.Optimizer, object]:
        torch.manual_seed(seed)
        optimizer = torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.3 + seed, momentum=0.9)
        scheduler = make(optimizer)
        registry = StateRegistry()
        registry.register("optimizer", optimizer)
        registry.register("scheduler", scheduler)
        return registry, optimizer, scheduler

    (donor, mine, schedule), (joiner, theirs, other) = training(0), training(1)
    plateau = isinstance(schedule, SCHEDULERS.ReduceLROnPlateau)
    for i in range(5):
        mine.step()
        schedule.step(*([1.0 / (i + 1)] if plateau else []))
    move(donor, joiner)
    assert mine.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]
    mine.step(), theirs.step()
    schedule.step(*([0.1] if plateau else [])), other.step(*([0.1] if plateau else []))
    assert donor.fingerprint() == joiner.fingerprint()


def test_a_learning_rate_that_is_a_tensor_is_kept_in_place():
    def registry(lr: float) -> tuple[StateRegistry, torch.optim.Optimizer]:
        optimizer = torch.optim.AdamW(nn.Linear(3, 2).parameters(), lr=torch.tensor(lr))
        made = StateRegistry()
        made.register("optimizer", optimizer)
        return made, optimizer

    (donor, _), (joiner, optimizer) = registry(0.5), registry(0.1)
    lr = optimizer.param_groups[0]["lr"]
    move(donor, joiner)
    assert optimizer.param_groups[0]["lr"] is lr and float(lr) == 0.5


def test_exports_are_read_fresh():
    training = Training(0, steps=1)
    before, first = training.fingerprint(), training.registry.layout().to_bytes()
    training.step()
    assert training.fingerprint() != before
    assert training.registry.layout().to_bytes() != first  # the schedule's scalars
    training.averages.inner = {"mean": torch.zeros(2), "counts": []}
    assert training.registry.layout().digest != Layout.from_bytes(first).digest


@pytest.mark.parametrize(
    "place", ["model.embed.weight", "optimizer.state.2.exp_avg_sq", "averages.inner.mean", "offset"]
)
def test_one_flipped_bit_changes_the_fingerprint(place):
    training = Training(0, steps=1)
    before = training.fingerprint()
    tensor = {leaf.path: leaf.tensor for leaf in leaves_in(training.registry.capture())}[place]
    dense_bytes(tensor)[3] ^= 1
    assert training.fingerprint() != before


def test_the_fingerprint_does_not_depend_on_the_number_of_threads():
    captured = Training(0, steps=2).registry.capture()
    layout = layout_of(name_of(0), captured, 128)
    sums = [checksum_ranges(layout, leaves_in(captured), threads=threads) for threads in (1, 2, 5)]
    assert sums[0] == sums[1] == sums[2] and len(sums[0]) == layout.ranges


def test_group_scope_and_excluded_names_stay_out():
    training = Training(0)
    norm = nn.BatchNorm1d(4)
    training.registry.register("counter", object(), scope="group")
    training.registry.register("norm", norm, exclude=["running_*", "num_batches_tracked"])
    paths = [t.path for t in training.registry.layout().tensors]
    assert "norm.weight" in paths and not any("running" in path or "num_batches" in path for path in paths)
    before = training.fingerprint()
    norm(torch.randn(3, 4))
    assert training.fingerprint() == before and list(training.registry.group) == ["counter"]


def test_statistics_of_batch_norm_stay_out_without_being_asked():
    registry, model = StateRegistry(), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    registry.register("model", model)
    assert [t.path for t in registry.layout().tensors] == [f"model.{i}.{n}" for i in "01" for n in ("weight", "bias")]
    before = registry.fingerprint()
    model(torch.randn(3, 4))
    assert registry.fingerprint() == before


class Own:
    def __init__(self, state: object) -> None:
        self.state = state

    def state_dict(self) -> object:
        return self.state

    def load_state_dict(self, state: object) -> None:
        self.state = state


class OwnOptimizer(torch.optim.SGD):
    def state_dict(self):
        return {}


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("obj", "says"),
    [
        (Own({"a": [1, {"b": object()}]}), r"thing\.a\.1\.b is an object"),
        (Own({"f": lambda: 1}), r"thing\.f is a function"),
        (Own({"t": torch.ones(2).to_sparse()}), r"thing\.t is a torch.sparse_coo tensor"),
        (Own({"t": torch.ones(2, device="meta")}), r"thing\.t is on device meta"),
        (Own({1: torch.ones(2), "1": torch.ones(2)}), r"thing\.1 names two tensors"),
        (torch.ones(3).as_subclass(Subclass), "thing is a Subclass, which does not say"),
        (nn.LazyLinear(3), r"thing\.weight is an UninitializedParameter"),
        (OwnOptimizer([nn.Parameter(torch.ones(1))], lr=1.0), "state_dict.. of its own"),
        (object(), "thing is an object: it has no state_dict"),
        (3, "thing is an int"),
    ],
)
def test_what_cannot_be_copied_is_refused_at_register_by_path_and_type(obj, says):
    registry = StateRegistry()
    with pytest.raises(StateRefused, match=says):
        registry.register("thing", obj)
    assert not registry.shared


@pytest.mark.parametrize("name", ["", "a.b", "a b", "x" * 65])
def test_names_that_are_not_allowed(name):
    with pytest.raises(UsageError, match="cannot be the name"):
        StateRegistry().register(name, torch.ones(1))


def test_options_of_register_that_cannot_be_right():
    registry = StateRegistry()
    registry.register("x", torch.ones(1))
    with pytest.raises(UsageError, match="registered already"):
        registry.register("x", torch.ones(1), scope="group")
    with pytest.raises(UsageError, match="scope 'global'"):
        registry.register("y", torch.ones(1), scope="global")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="exclude is for modules"):
        registry.register("y", torch.ones(1), exclude=["*"])


# --- what does not fit the joiner ---


def target_for(donor: StateRegistry, joiner: StateRegistry, **options) -> Target:
    return Target(joiner, Layout.from_bytes(donor.layout(name_of(4)).to_bytes()), **options)


def test_a_state_that_does_not_fit_is_named_before_anything_is_overwritten():
    donor, joiner = Training(0, steps=1, width=24), Training(1)
    before = joiner.fingerprint()
    with pytest.raises(StateDoesNotFit, match=r"model\.body\.weight is bfloat16\[16, 16\] here and bfloat16\[16, 24\]"):
        target_for(donor.registry, joiner.registry)
    assert joiner.fingerprint() == before


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda r: r.register("more", torch.ones(1)), "'more' is tensor here and missing there"),
        (lambda r: r.shared["model"].register_parameter("bias", nn.Parameter(torch.ones(2))), "model.bias is float32"),
        (lambda r: r.shared["model"].to(torch.float64), r"model\.embed\.weight is float64"),
        (lambda r: r.shared["optimizer"].add_param_group({"params": [nn.Parameter(torch.ones(1))]}), "groups have"),
    ],
)
def test_what_does_not_fit_is_named(change, says):
    donor, joiner = Training(0, steps=1), Training(1)
    change(joiner.registry)
    with pytest.raises(StateDoesNotFit, match=says):
        target_for(donor.registry, joiner.registry)


def test_moments_of_another_dtype_do_not_fit():
    donor, joiner = Training(0, steps=1), Training(1, steps=1)
    state = joiner.optimizer.state[joiner.model.body.weight]
    state["exp_avg"] = state["exp_avg"].bfloat16()
    with pytest.raises(StateDoesNotFit, match=r"optimizer\.state\.\d\.exp_avg is bfloat16.* here and float32"):
        target_for(donor.registry, joiner.registry)


def test_the_size_is_bounded():
    donor, joiner = Training(0), Training(1)
    with pytest.raises(StateDoesNotFit, match="at most 1000 are taken here"):
        target_for(donor.registry, joiner.registry, bytes_max=1000)


class Forgetful(Averages):
    def load_state_dict(self, state):
        self.inner["counts"] = [0]


class Rounding(Averages):
    def load_state_dict(self, state):
        self.inner = {**state["inner"], "mean": state["inner"]["mean"] + 1e-7}


@pytest.mark.parametrize(("kind", "says"), [(Forgetful, "does not take back"), (Rounding, "bytes are others")])
def test_an_object_that_does_not_take_its_state_back_is_found(kind, says):
    def registry(seed: int) -> StateRegistry:
        made = StateRegistry()
        made.register("averages", kind(seed))
        return made

    with pytest.raises(StateDoesNotFit, match=says):
        move(registry(0), registry(1))


# --- tensors in tensors ---


class Scaled(torch.Tensor):
    """A subclass of two inner tensors."""

    @staticmethod
    def __new__(cls, data, scale, bits):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)

    def __init__(self, data, scale, bits):
        self.data8, self.scale, self.bits = data, scale, bits

    def __tensor_flatten__(self):
        return ["data8", "scale"], {"bits": self.bits, "device": torch.device("cpu")}

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].data8, args[0].scale, args[0].bits)
        raise NotImplementedError(func)


def scaled(seed: int, bits: int = 8) -> nn.Module:
    torch.manual_seed(seed)
    module = nn.Module()
    data = torch.randint(-100, 100, (6, 4), dtype=torch.int8)
    module.weight = nn.Parameter(Scaled(data, torch.randn(6), bits), requires_grad=False)
    return module


def test_a_tensor_subclass_travels_as_its_inner_tensors():
    donor, joiner = StateRegistry(), StateRegistry()
    mine, theirs = scaled(0), scaled(1)
    donor.register("model", mine)
    joiner.register("model", theirs)
    layout = move(donor, joiner)
    assert [t.path for t in layout.tensors] == ["model.weight.data8", "model.weight.scale"]
    assert torch.equal(mine.weight.data8, theirs.weight.data8) and torch.equal(mine.weight.scale, theirs.weight.scale)


def test_a_tensor_subclass_with_other_settings_does_not_fit():
    donor, joiner = StateRegistry(), StateRegistry()
    donor.register("model", scaled(0))
    joiner.register("model", scaled(0, bits=4))
    with pytest.raises(StateDoesNotFit, match=r"model\.weight\.data8 is int8\[6, 4\] in .*Scaled.*4"):
        target_for(donor, joiner)


# --- the layout as data from a peer ---


def test_offsets_are_aligned_and_the_layout_survives_json():
    layout = Training(0, steps=1).registry.layout(name_of(4), RANGE_BYTES)
    assert all(t.offset % 64 == 0 for t in layout.tensors)
    back = Layout.from_bytes(layout.to_bytes())
    assert back.tensors == layout.tensors and back.digest == layout.digest and back.name == layout.name
    assert [layout.bounds(i) for i in range(layout.ranges)][-1][1] == layout.nbytes


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(bytes=d["bytes"] + 1),
        lambda d: d.update(range_bytes=63),
        lambda d: d.update(range_bytes=1 << 40),
        lambda d: d.update(state={"epoch": 1}),
        lambda d: d["state"].update(step=-2),
        lambda d: d["tensors"][0].__setitem__(1, "pickle"),
        lambda d: d["tensors"][0].__setitem__(2, [-1]),
        lambda d: d["tensors"][0].__setitem__(2, [1 << 62, 1 << 62]),
        lambda d: d["tensors"][0].__setitem__(6, "meta"),
        lambda d: d["tensors"][1].__setitem__(0, d["tensors"][0][0]),
        lambda d: d["tensors"][0].pop(),
        lambda d: d["objects"][0].__setitem__(1, "eval"),
        lambda d: d.update(tensors=5),
        lambda d: d.pop("objects"),
    ],
)
def test_a_malformed_layout_is_refused(change):
    data = json.loads(Training(0).registry.layout(name_of(4)).to_bytes())
    change(data)
    with pytest.raises(LayoutError):
        Layout.from_bytes(json.dumps(data).encode())


def test_the_layouts_size_is_limited(monkeypatch):
    layout = Training(0).registry.layout(name_of(4))
    text = layout.to_bytes()
    monkeypatch.setattr(layout_module, "LAYOUT_BYTES_MAX", 100)
    with pytest.raises(LayoutError, match="at most 100"):
        layout.to_bytes()
    with pytest.raises(LayoutError, match="at most 100"):
        Layout.from_bytes(text)


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"[" * 100_000, b"{}", b"\xff"])
def test_what_is_no_layout_is_refused(data):
    with pytest.raises(LayoutError):
        Layout.from_bytes(data)


def test_a_tree_that_names_other_tensors_does_not_fit():
    data = json.loads(Training(0, steps=1).registry.layout(name_of(4)).to_bytes())
    text = json.dumps(data).replace('["tensor", "optimizer.state.0.step"]', '["tensor", "optimizer.state.0.other"]')
    with pytest.raises(StateDoesNotFit, match="is not among the tensors"):
        Target(Training(1).registry, Layout.from_bytes(text.encode()))


# --- sharded state ---


@pytest.fixture
def mesh():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_sharded_parameters_and_their_lazy_moments_travel_by_local_shard(mesh):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    def training(seed: int, steps: int) -> tuple[StateRegistry, nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        registry = StateRegistry()
        registry.register("model", model)
        registry.register("optimizer", optimizer)
        for _ in range(steps):
            model(torch.randn(4, 5)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return registry, model, optimizer

    (donor, mine, _), (joiner, theirs, optimizer) = training(0, 2), training(1, 0)
    layout = move(donor, joiner)
    assert layout.tensors[0].placements == ("S(0)",) or "Shard" in layout.tensors[0].placements[0]
    moment = optimizer.state[theirs[0].weight]["exp_avg"]
    assert isinstance(moment, DTensor) and moment.placements == theirs[0].weight.placements
    inputs = torch.randn(4, 5)
    assert torch.equal(mine(inputs), theirs(inputs))
    theirs(inputs).sum().backward()
    optimizer.step()  # the moments are ones that the optimizer can go on with


def test_a_sharded_state_does_not_fit_an_unsharded_model(mesh):
    from torch.distributed.fsdp import fully_shard

    sharded, plain = nn.Linear(4, 4), nn.Linear(4, 4)
    fully_shard(sharded, mesh=mesh)
    donor, joiner = StateRegistry(), StateRegistry()
    donor.register("model", sharded)
    joiner.register("model", plain)
    with pytest.raises(
        StateDoesNotFit, match=r"model\.weight is float32\[4, 4\] here and float32\[4, 4\] of \[4, 4\] placed"
    ):
        target_for(donor, joiner)


def test_a_distributed_tensor_in_a_users_object_is_refused(mesh):
    from torch.distributed.tensor import distribute_tensor

    with pytest.raises(StateRefused, match=r"thing\.t is a DTensor: register the module"):
        StateRegistry().register("thing", Own({"t": distribute_tensor(torch.ones(4), mesh)}))


def test_an_optimizer_takes_the_donors_keys_in_their_order():
    """A checkpoint that the donor has loaded may have changed it; a state is compared as text."""
    donor, joiner = Training(0, steps=2), Training(1)
    for group in donor.optimizer.param_groups:
        items = sorted(group.items(), reverse=True)
        group.clear()
        group.update(items)
    move(donor.registry, joiner.registry)
    assert joiner.fingerprint() == donor.fingerprint()
