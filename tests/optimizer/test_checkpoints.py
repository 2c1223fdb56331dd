"""Test checkpoints that are cut short or come from another model, another version or another number of devices.

Each gives an error, and the checkpoint is not lost.
"""

import gc
import shutil
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, PartitionSpec

import kfac
from problem import (
    assert_close,
    assert_equal,
    batch,
    field_of,
    initial,
    layers,
    loss_fn,
    measured,
    plain_kfac,
    run,
    stepper,
)

TX = plain_kfac(0.1, layers())


# The fixture below explains the warnings, which come from orbax.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def what_orbax_leaves_behind():
    """Collect the coroutines that orbax leaves unfinished when a restore fails.

    Python warns when it collects them, which would otherwise happen in some later test.
    """
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        gc.collect()


@pytest.fixture(scope="module")
def trained():
    params, state, _ = run(TX, steps=2)
    return {"params": params, "opt_state": state}


@pytest.fixture(scope="module")
def saved(trained, tmp_path_factory):
    """Save the same checkpoint for steps 1 and 2."""
    folder = tmp_path_factory.mktemp("run")
    with ocp.StandardCheckpointer() as checkpointer:
        for step in ("1", "2"):
            checkpointer.save(folder / step, trained)
            checkpointer.wait_until_finished()
    return folder


def restore(path, target):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, target)


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("files", ["d/*", "manifest.ocdbt", "_METADATA"])
def test_a_truncated_checkpoint_is_refused_and_the_one_before_it_is_good(saved, trained, tmp_path, files):
    folder = tmp_path / "run"
    shutil.copytree(saved, folder)
    cut = [path for path in (folder / "2").glob(files) if path.is_file()]
    assert cut
    for path in cut:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    before = contents(folder)
    with pytest.raises(Exception, match=r"Error|OUT_OF_RANGE|DATA_LOSS|Unterminated|Expecting|NOT_FOUND"):
        restore(folder / "2", trained)
    assert contents(folder) == before
    assert_equal(restore(folder / "1", trained), trained)


def test_a_checkpoint_of_a_process_that_was_stopped_half_way_is_not_taken_for_one(saved, trained, tmp_path):
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, args=ocp.args.StandardSave(trained))
        manager.wait_until_finished()
    # orbax renames a folder after writing all of it.
    shutil.copytree(saved / "2", tmp_path / "run" / "2.orbax-checkpoint-tmp-0")
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        assert manager.latest_step() == 1
        assert_equal(manager.restore(1, args=ocp.args.StandardRestore(trained)), trained)


def test_a_checkpoint_of_another_model_is_refused(saved):
    params = {**initial(), "out": {"kernel": jnp.ones((4, 5))}}
    other = kfac.find_layers(loss_fn, params, batch(0), rules={"temperature": "skip"})
    target = {"params": params, "opt_state": plain_kfac(0.1, other).init(params)}
    before = contents(saved)
    with pytest.raises(ValueError, match=r"structures do not match[\s\S]*kronecker_5x4"):
        restore(saved / "1", target)
    assert contents(saved) == before
    # A state from elsewhere is refused, too.
    message = "not one for these layers: its blocks kronecker_4x4 are none; the layers need 2 of first, out"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda state: TX.update(measured(0)[0], state, initial()), target["opt_state"])


def test_a_checkpoint_of_renamed_layers_is_refused_by_their_names(saved):
    """Rename `first` to `z`: the blocks of `z` and `out` have the same shape, but they change their order."""

    def loss(params, batch):
        return loss_fn({"first": params["z"], **{k: v for k, v in params.items() if k != "z"}}, batch)

    params = {"z" if name == "first" else name: value for name, value in initial().items()}
    renamed = plain_kfac(0.1, kfac.find_layers(loss, params, batch(0), rules={"temperature": "skip"}))
    target = {"params": initial(), "opt_state": renamed.init(params)}
    with pytest.raises(ValueError, match=r"structures do not match[\s\S]*first, out"):
        restore(saved / "1", target)
    state = TX.init(initial())
    with pytest.raises(ValueError, match=r"its blocks kronecker_4x4 are 2 of first, out; the layers need 2 of out, z"):
        renamed.update(params, state, params)


def test_a_checkpoint_of_another_version_of_the_state_names_what_differs(trained, tmp_path):
    """Check the error for a field that an earlier version did not have."""
    fields = trained["opt_state"][0]._asdict()
    del fields["unitwise_damping_scale"]
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "earlier", {**trained, "opt_state": [fields, *trained["opt_state"][1:]]})
        checkpointer.wait_until_finished()
    target = {**trained, "opt_state": [trained["opt_state"][0]._asdict(), *trained["opt_state"][1:]]}
    with pytest.raises(ValueError, match=r"structures do not match[\s\S]*unitwise_damping_scale"):
        restore(tmp_path / "earlier", target)


@pytest.mark.slow
def test_a_checkpoint_of_another_number_of_devices_is_refused_unless_it_is_gathered(trained, tmp_path):
    mesh = jax.make_mesh((4,), ("devices",), axis_types=(AxisType.Auto,))
    tx = plain_kfac(0.1, layers(), distribution=kfac.Distribution("devices"))
    specs = kfac.state.state_specs(tx, initial(), "devices")
    state = jax.jit(jax.shard_map(tx.init, mesh=mesh, in_specs=PartitionSpec(), out_specs=specs))(initial())
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "four", {"opt_state": state})
        checkpointer.save(tmp_path / "gathered", {"opt_state": jax.device_get(kfac.state.gather_state(state))})
        checkpointer.wait_until_finished()
    fresh = {"opt_state": TX.init(initial())}
    with pytest.raises(ValueError, match="tree structures do not match"):
        restore(tmp_path / "four", fresh)
    restored = restore(tmp_path / "gathered", fresh)
    assert jax.tree.structure(restored) == jax.tree.structure(fresh)
    jax.tree.map(np.testing.assert_array_equal, restored, fresh)


@pytest.mark.slow
def test_a_checkpoint_of_the_averages_alone_gets_its_inverses_from_observe(tmp_path):
    """Restore half of a state: running averages and their weights. This state has no momentum."""
    tx = kfac.scale_by_kfac(layers())
    params, state, _ = run(tx, steps=2)

    def averages(blocks):
        return {"factors": blocks.factors, "weight": blocks.weight}

    def with_averages(blocks, kept):
        return blocks._replace(**kept)

    kept = {name: averages(blocks) for name, blocks in state.blocks.items()}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "half", kept)
        checkpointer.wait_until_finished()
        kept = checkpointer.restore(tmp_path / "half", kept)
    fresh = tx.init(params)
    fresh = fresh._replace(
        blocks={name: with_averages(blocks, kept[name]) for name, blocks in fresh.blocks.items()},
    )
    step, refresh = stepper(tx), jax.jit(kfac.observe)
    for statistics in (measured(2)[1], None):  # `observe` inverts with or without statistics
        _, expected, right = step(measured(2)[0], state, params, statistics)
        start = fresh if statistics is not None else refresh(fresh)
        _, found, updates = step(measured(2)[0], start, params, statistics)
        assert_close(updates, right, 1e-5)
        assert_close(field_of(found, "preconditioner"), field_of(expected, "preconditioner"), 1e-5)
        assert_equal(field_of(found, "factors"), field_of(expected, "factors"))
