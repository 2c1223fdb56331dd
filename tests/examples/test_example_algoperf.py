"""Test the AlgoPerf submission with our own loop and workload, without a checkout of AlgoPerf."""

import collections
import importlib
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization

pytestmark = pytest.mark.examples

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "algoperf"


class Lines:
    """Separate two classes by a line, with an AlgoPerf workload's properties and methods."""

    model_params_types = loss_type = metrics_logger = None
    step_hint, eval_period_time_sec = 40, 1000

    def _build_input_queue(self, data_rng, split, data_dir, global_batch_size):
        rng = np.random.default_rng(0)
        while True:
            x = rng.normal(size=(global_batch_size, 3)).astype(np.float32)
            yield {"inputs": x, "targets": (x.sum(1) > 0).astype(np.int32)}

    def init_model_fn(self, rng):
        return {"kernel": 0.1 * jax.random.normal(rng, (3, 2)), "bias": jnp.zeros(2)}, None

    def model_fn(self, params, batch, model_state, mode, rng, update_batch_norm, dropout_rate):
        return batch["inputs"] @ params["kernel"] + params["bias"], None

    def loss_fn(self, label_batch, logits_batch, mask_batch, label_smoothing):
        each = -jnp.take_along_axis(jax.nn.log_softmax(logits_batch), label_batch[:, None], 1)
        return {"summed": each.sum(), "n_valid_examples": len(each), "per_example": each[:, 0]}

    def eval_model(self, size, params, model_state, rng, data_dir, other, step):
        batch = next(self._build_input_queue(None, "validation", "", 500))
        right = np.argmax(self.model_fn(params, batch, None, None, None, False, 0.0)[0], 1) == batch["targets"]
        return {"validation/accuracy": float(right.mean()), "test/accuracy": float(right.mean())}

    def has_reached_validation_target(self, found):
        return found["validation/accuracy"] > 0.95

    has_reached_test_target = has_reached_validation_target


@pytest.fixture(scope="module")
def modules():
    theirs = types.ModuleType("algoperf")
    theirs.spec = types.SimpleNamespace(ForwardPassMode=types.SimpleNamespace(TRAIN=0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "algoperf", theirs)
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module("harness"), importlib.import_module("submission")


def test_it_ends_with_a_score(modules):
    harness, submission = modules
    point = collections.namedtuple("Point", "learning_rate")(0.1)  # the rest is as in the self-tuning ruleset
    found = harness.train(Lines(), submission, point, seed=0, seconds=600, most=30)
    assert found["score"] == found["seconds"]
    assert found["validation accuracy"] > 0.95
    assert found["hyperparameters"] == {"learning_rate": 0.1}


def test_it_goes_on_from_their_checkpoint(modules):
    _, submission = modules
    workload, moved = Lines(), []
    queue = workload._build_input_queue(None, "train", "", 16)
    params, model_state = workload.init_model_fn(jax.random.key(0))
    state = submission.init_optimizer_state(workload, params, model_state, None, jax.random.key(1))

    def update(params, state, batch, step):
        return submission.update_params(
            workload, params, None, None, None, batch, None, state, [], step, jax.random.key(2)
        )

    for step in range(3):
        state, params, _ = update(params, state, next(queue), step)
    batch = next(queue)
    restored = serialization.msgpack_restore(serialization.msgpack_serialize(serialization.to_state_dict(state[0])))
    restarted = submission.init_optimizer_state(workload, params, model_state, None, jax.random.key(1))
    for begun in (state, (restored, restarted[1])):
        moved.append(update(params, begun, batch, 3)[1])
    jax.tree.map(np.testing.assert_array_equal, *moved)


def test_batches_of_variants(modules):
    _, submission = modules
    assert submission.get_batch_size("wmt_post_ln") == submission.get_batch_size("wmt")
    with pytest.raises(ValueError, match=r"workload_name must be one of .* but is 'other'"):
        submission.get_batch_size("other")
