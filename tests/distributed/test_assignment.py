"""Test which device owns each block and when it is inverted.

ResNet-50's figures are counted from compiled programs. Other tests use internals of `_distributed`: assignments and
rounds are arithmetic on shapes.
"""

import functools
import itertools
import json
import pathlib
import subprocess
import sys
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

import kfac
import messages
import problem
import resnet50_step
from kfac._curvature.blocks import group_layers
from kfac._distributed.owners import BlockAssignment, assign_blocks, lay_out_rounds

SCRIPT = pathlib.Path(__file__).parents[1] / "resnet50_step.py"


def equal_layers(count, width=6):
    params = {f"layer{k}": jnp.zeros((width, width)) for k in range(count)}

    def loss(params, x):
        for k in range(count):
            x = jnp.tanh(x @ params[f"layer{k}"])
        return jnp.mean(x)

    return kfac.find_layers(loss, params, jnp.zeros((2, width)))


@pytest.mark.parametrize("devices", [1, 2, 3, 5, 8, 64])
@pytest.mark.parametrize("blocks", [1, 4, 5, 8, 17])
def test_block_assignment_has_one_slot_for_every_block(blocks, devices):
    rest = blocks % devices
    assignment = BlockAssignment(blocks, devices, first=devices - rest)
    assert len(set(assignment.block_to_slot.tolist())) == blocks
    assert assignment.slot_to_block[assignment.block_to_slot].tolist() == list(range(blocks))
    mask = assignment.slot_mask
    assert mask.shape == (devices, -(-blocks // devices))
    held = [blocks // devices] * (devices - rest) + [blocks // devices + 1] * rest
    assert mask.sum(axis=1).tolist() == held
    for row, count in zip(mask, held, strict=True):
        assert row[:count].all()


class Group(NamedTuple):
    """A group's properties that `assign_blocks` depends on."""

    name: str
    size: int
    work: int


def random_groups():
    """Yield numbers of devices with groups of any size."""
    rng = np.random.default_rng(0)
    for devices, groups in itertools.product((2, 3, 8, 40), (1, 3, 9)):
        yield devices, [Group(str(k), int(rng.integers(1, 20)), int(rng.integers(1, 99))) for k in range(groups)]


def test_assign_blocks_deals_at_most_one_block_per_round_and_device():
    for devices, random in random_groups():
        assignments = assign_blocks(random, devices)
        rounds = {}
        for group in random:
            assignment = assignments[group.name]
            held = rounds.setdefault(assignment.round, np.zeros(devices, int))
            held[assignment.owners] += 1
            assert held.sum() <= devices
        for held in rounds.values():
            assert max(held) <= 1
        # The first round has the most expensive remainder, and no round could take the first block of the next one.
        remainders = [group for group in random if group.size % devices]
        if remainders:
            largest = min(remainders, key=lambda group: (-group.work, group.name))
            assert assignments[largest.name].round == 0 and assignments[largest.name].first == 0


def test_assign_blocks_fills_a_round_before_it_starts_another():
    four = [Group("large", 1, 9), Group("middle", 3, 8), Group("small", 5, 7), Group("least", 12, 6)]
    assignments = assign_blocks(four, 8)
    places = {name: (x.round, x.owners.start, x.owners.stop) for name, x in assignments.items()}
    assert places == {"large": (0, 0, 1), "middle": (0, 1, 4), "small": (1, 3, 8), "least": (0, 4, 8)}


def test_lay_out_rounds_holds_every_block_once():
    for devices, random in random_groups():
        assignments = assign_blocks(random, devices)
        sizes = {group.name: group.work for group in random if group.size % devices}
        places, length = lay_out_rounds(assignments, sizes)
        used = np.zeros((devices, length), int)
        for name, place in places.items():
            assert place.stop - place.start == sizes[name]
            used[assignments[name].owners, place] += 1
        assert used.max(initial=0) <= 1
        widest = {}
        for name, size in sizes.items():
            widest.setdefault(assignments[name].round, []).append(size)
        assert length == sum(map(max, widest.values()))


# In the GPT, the table's `G` takes 0.015 times the largest block's work. All devices invert it, because they share the
# table's rows.
CRITICAL = [("resnet50", 8, 1.16, 0), ("resnet50", 64, 1.0, 0), ("gpt", 8, 0, 1.2), ("gpt", 64, 1.016, 0)]


@pytest.mark.parametrize(("model", "devices", "of_largest", "of_mean"), CRITICAL)
def test_devices_hardly_wait_for_each_other(model, devices, of_largest, of_mean, resnet50_layers):
    """Compare the busiest device in a refresh with the largest block, or with the mean work per device."""
    groups = group_layers(resnet50_layers if model == "resnet50" else gpt_layers(), kfac.SOAP())
    assignments = assign_blocks(groups, devices)
    work = sum(group.work * assignments[group.name].slot_mask.sum(1) for group in groups)
    largest, mean = max(group.work for group in groups), np.mean(work)
    print(max(work) / largest, max(work) / mean)
    assert max(work) <= max(of_largest * largest, of_mean * mean) * (1 + 1e-9)


@pytest.mark.parametrize(("model", "devices", "most"), [("resnet50", 8, 1.09), ("resnet50", 64, 1.1), ("gpt", 8, 1.02)])
def test_preconditioned_gradients_are_hardly_padded(model, devices, most, resnet50_layers):
    """Check that a step with local gradients sends about as much as SGD.

    The bytes come from a plan. Another test compares a plan with compiled programs.
    """
    layers = resnet50_layers if model == "resnet50" else gpt_layers()
    sent = kfac.planning.estimate(layers, devices=devices, preconditioner=kfac.Cholesky()).messages
    # An all-reduce consists of a reduce-scatter and such a gather.
    assert sent["preconditioning"] <= (2 * most - 1) * sent["gradients"] / 2


# Each row has the number of devices and `max_factor_dim`, then two bounds relative to a single device. The first bounds
# the refresh work of the busiest device. The second bounds each device's state, including its momentum.
BOUNDED = [(8, 8192, 0.25, 0.152), (64, 8192, 0.22, 0.106), (8, 1024, 0.02, 0.081), (64, 1024, 0.005, 0.017)]


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "max_factor_dim", "path", "state"), BOUNDED)
def test_no_layer_is_the_floor_where_factors_are_cut(devices, max_factor_dim, path, state, resnet50_layers):
    loss, params, batch, _ = messages.resnet50(1, 224)
    cut = kfac.find_layers(loss, params, batch, max_factor_dim=max_factor_dim)
    plan = kfac.planning.estimate(cut, devices=devices)
    one = kfac.planning.estimate(resnet50_layers, devices=1)
    print(plan.flops["refresh"] / one.flops["refresh"], plan.memory["state"] / one.memory["state"])
    assert plan.flops["refresh"] <= path * one.flops["refresh"]
    assert plan.memory["state"] <= state * one.memory["state"]


def test_a_plan_for_thousands_of_devices_takes_no_time(resnet50_layers):
    began = time.process_time()
    assign_blocks([Group(str(k), 7 + k, k**3) for k in range(1, 21)], 4096)
    assert time.process_time() - began < 0.1  # this once took minutes
    assign_blocks(group_layers(resnet50_layers, kfac.SOAP()), 4096)
    assert time.process_time() - began < 2


def gpt_layers():
    loss, params, batch, find = messages.gpt(2, size=8)
    return kfac.find_layers(loss, params, batch, max_factor_dim=8192, **find)


@pytest.fixture(scope="module")
def resnet50_layers():
    params, images = resnet50_step.parameters(), jax.ShapeDtypeStruct((1, 4, 4, 3), jnp.float32)
    return kfac.find_layers(resnet50_step.loss_fn, params, images, max_factor_dim=8192)


@functools.cache
def counted(devices, *options):
    result = subprocess.run(
        [sys.executable, str(SCRIPT), str(devices), *options], capture_output=True, text=True, check=True
    )
    return json.loads(result.stdout)


@pytest.mark.slow
def test_the_program_does_not_grow_with_devices():
    """Count lines, because the text of each message lists its devices. On few devices, no share has padding."""
    grads, factors = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), problem.measured(0))
    tx = kfac.scale_by_kfac(problem.layers(), distribution=kfac.Distribution("devices"))
    same, specs = PartitionSpec(), kfac.state.state_specs(tx, grads, "devices")

    def lines(devices):
        mesh = AbstractMesh((devices,), ("devices",))
        state = jax.eval_shape(jax.shard_map(tx.init, mesh=mesh, in_specs=same, out_specs=specs), grads)
        step = jax.shard_map(
            lambda g, s, f: tx.update(g, kfac.observe(s, f)),
            mesh=mesh,
            in_specs=(same, specs, same),
            out_specs=(same, specs),
        )
        lowered = jax.jit(step).trace(grads, state, factors).lower(lowering_platforms=("cpu",))
        return lowered.as_text().count("\n")

    assert lines(512) == lines(64)


@pytest.mark.slow
def test_the_program_of_resnet50_does_not_grow_with_devices():
    """Check devices from 64 on, where every group has fewer blocks than there are devices, so programs are alike."""
    text = {devices: counted(devices)["text"] for devices in (64, 512)}
    assert abs(text[512] / text[64] - 1) < 0.05


@pytest.mark.slow
def test_resnet50_on_eight_devices_counted_from_compiled_programs():
    one, eight = counted(1, "compile"), counted(8, "compile")
    assert eight["state_bytes"] <= 0.40 * one["state_bytes"]
    full, ordinary = eight["messages"], eight["messages_without_statistics"]
    added = {kind: full[kind] - ordinary.get(kind, 0) for kind in full}
    assert added["sent"] <= 0.7 * eight["packed_bytes"]
    # An all-reduce of `n` bytes sends `2 * 7 / 8 * n`.
    sent = {part: size / 2 * 8 / 7 for part, size in eight["predicted_messages"].items()}
    assert abs(added["sent"] - sent["statistics"]) < 0.01 * added["sent"]
    # The gradients arrive averaged, so a step sends only preconditioned gradients.
    assert abs(ordinary["sent"] - sent["preconditioning"]) < 0.01 * ordinary["sent"]
    assert abs(eight["state_bytes_with_momentum"] - eight["predicted_state_bytes"]) < 1000
