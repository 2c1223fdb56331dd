"""Test `examples/trainers/keras_kfac.py`: Keras trains like a plain loop, also on four devices, and resumes."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from sklearn.datasets import load_digits

import kfac

os.environ.setdefault("KERAS_BACKEND", "jax")
keras = pytest.importorskip("keras")

pytestmark = [
    pytest.mark.examples,
    # Files and comparisons read Keras's variables as arrays.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

FOLDER = Path(__file__).parents[2] / "examples" / "trainers"
STEPS = 24


def load(name):
    """Import a script of the folder, which imports its neighbours by name."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(FOLDER)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return module


adapter = load("keras_kfac")
CROSS_ENTROPY = "sparse_categorical_crossentropy"


@pytest.fixture(scope="module")
def data():
    images, labels = load_digits(return_X_y=True)
    return (images[:512] / 16).astype(np.float32), labels[:512].astype(np.int32)


class Losses(keras.callbacks.Callback):
    """Record the loss of each batch. Keras reports means over the epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        self.sums = [0.0]

    def on_train_begin(self, logs=None):
        self.losses = []

    def on_train_batch_end(self, batch, logs=None):
        self.sums.append(float(logs["loss"]) * (batch + 1))
        self.losses.append(self.sums[-1] - self.sums[-2])


def perceptron(optimizer, **options):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((64,))
    hidden = keras.layers.Dense(32, "tanh", name="hidden")(inputs)
    model = adapter.KFACModel(inputs, keras.layers.Dense(10, name="output")(hidden))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, **options)
    return model


def convolutions(optimizer):
    """Return a model with batch norm and dropout."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((64,))
    x = keras.layers.Reshape((8, 8, 1))(inputs)
    x = keras.layers.Conv2D(8, 3, use_bias=False)(x)
    x = keras.layers.ReLU()(keras.layers.BatchNormalization(momentum=0.9)(x))
    x = keras.layers.Dropout(0.2)(keras.layers.Flatten()(x))
    model = adapter.KFACModel(inputs, keras.layers.Dense(10, "softmax")(x))
    model.compile(optimizer, CROSS_ENTROPY, metrics=["accuracy"])
    return model


def fit(model, data, epochs=3, **options):
    record = Losses()
    options = {"batch_size": 64, "shuffle": False, "verbose": 0, **options}
    model.fit(*data, epochs=epochs, callbacks=[record], **options)
    return record.losses


def plain_loop(params, data, rate):
    def loss_fn(params, batch):
        x, labels = batch
        hidden = jnp.tanh(x @ params["hidden"]["kernel"] + params["hidden"]["bias"])
        logits = hidden @ params["output"]["kernel"] + params["output"]["bias"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    step = kfac.train_step(loss_fn, rate, verbose=False)
    batches = [tuple(part[k : k + 64] for part in data) for k in range(0, 512, 64)] * (STEPS // 8)
    opt_state = step.init(params, batches[0])
    losses = []
    for batch in batches:
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize("schedule", ["constant", "keras"])
def test_fit_is_a_plain_loop(schedule, data):
    ours, plain = 0.1, 0.1
    if schedule == "keras":
        ours = keras.optimizers.schedules.PolynomialDecay(0.1, STEPS, end_learning_rate=0.0)
        plain = optax.linear_schedule(0.1, 0.0, STEPS)
    model = perceptron(adapter.KFAC(ours))
    layers = {"hidden": model.get_layer("hidden"), "output": model.get_layer("output")}
    params = {k: {"kernel": jnp.array(x.kernel), "bias": jnp.array(x.bias)} for k, x in layers.items()}
    found = fit(model, data)
    np.testing.assert_allclose(found, plain_loop(params, data, plain), rtol=0.01, atol=1e-4)
    assert found[-1] < found[0] / 5
    scalars = kfac.diagnostics(model.optimizer.opt_state([x.value for x in model.optimizer.variables]))
    assert scalars["statistics_age"] < 16


@pytest.mark.parametrize("way", ["save", "save_weights", "new process"])
def test_training_resumes_bit_for_bit(way, data, tmp_path):
    def start():
        return convolutions(adapter.KFAC(keras.optimizers.schedules.PolynomialDecay(0.1, STEPS)))

    whole = start()
    fit(whole, data, epochs=2)
    half = start()
    fit(half, data, epochs=1)
    if way == "save":
        half.save(tmp_path / "model.keras")
        resumed = keras.saving.load_model(tmp_path / "model.keras", {"KFACModel": adapter.KFACModel})
    else:
        half.save_weights(tmp_path / "model.weights.h5")
        resumed = start()
        resumed.load_weights(tmp_path / "model.weights.h5")
    resumed.save_weights(tmp_path / "again.weights.h5")  # also before the layers are known
    if way == "new process":
        resumed = start()
        resumed.load_weights(tmp_path / "again.weights.h5")
    # Keras does not save the state of dropout's random numbers, with any optimizer.
    for old, new in zip(half.non_trainable_variables, resumed.non_trainable_variables, strict=True):
        if "seed_generator" in old.path:
            new.assign(old)
    fit(resumed, data, epochs=1)
    for expected, found in zip(whole.variables, resumed.variables, strict=True):
        np.testing.assert_array_equal(expected, found, err_msg=expected.path)
    for expected, found in zip(whole.optimizer.variables, resumed.optimizer.variables, strict=True):
        np.testing.assert_array_equal(expected, found, err_msg=expected.path)


def test_four_devices_train_like_one(data):
    """Split the batch and the blocks of the optimizer state over four devices."""
    expected = fit(perceptron(adapter.KFAC(0.1)), data)
    devices = keras.distribution.list_devices()[:4]
    with keras.distribution.DataParallel(devices=devices, auto_shard_dataset=False).scope():
        model = perceptron(adapter.KFAC(0.1))
        found = fit(model, data)
    np.testing.assert_allclose(found, expected, rtol=0.01, atol=1e-4)
    assert not all(x.value.sharding.is_fully_replicated for x in model.optimizer.variables)


def test_kernels_split_over_devices_train_like_one(data):
    expected = fit(perceptron(adapter.KFAC(0.1)), data)
    mesh = keras.distribution.DeviceMesh((2, 2), ["batch", "model"], keras.distribution.list_devices()[:4])
    layouts = keras.distribution.LayoutMap(mesh)
    layouts["hidden/kernel"] = (None, "model")
    layouts["hidden/bias"] = ("model",)
    parallel = keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch", auto_shard_dataset=False)
    with parallel.scope():
        model = perceptron(adapter.KFAC(0.1))
        found = fit(model, data)
    np.testing.assert_allclose(found, expected, rtol=0.01, atol=1e-4)
    assert not model.get_layer("hidden").kernel.value.sharding.is_fully_replicated


def test_a_callback_validation_and_the_rest_of_keras_work(data):
    model = convolutions(adapter.KFAC(0.1, weight_decay=0.01, use_ema=True))
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch: [0.1, 0.05, 0.02][epoch])
    model.evaluate(*data, verbose=0)  # before the layers are known
    # The last batch has 32 examples.
    model.fit(*data, batch_size=60, epochs=3, validation_data=data, callbacks=[schedule], verbose=0)
    assert model.history.history["val_accuracy"][-1] > 0.8
    np.testing.assert_allclose(model.optimizer.learning_rate, 0.02)


def test_a_subclass_with_dictionaries_is_built_by_fit(data):
    class Network(adapter.KFACMixin, keras.Model):
        def __init__(self):
            super().__init__()
            self.output_layer = keras.layers.Dense(10, "softmax", kernel_regularizer="l2")

        def call(self, inputs):
            return {"digit": self.output_layer(inputs["pixels"])}

    keras.utils.set_random_seed(0)
    model = Network()
    model.compile(adapter.KFAC(0.1), {"digit": CROSS_ENTROPY})
    found = fit(model, ({"pixels": data[0]}, {"digit": data[1]}))
    assert found[-1] < found[0] / 2


def test_a_sequential_model_trains_on_single_batches(data):
    class Sequential(adapter.KFACMixin, keras.Sequential):
        pass

    keras.utils.set_random_seed(0)
    model = Sequential([keras.layers.Dense(10, "softmax")])
    model.compile(adapter.KFAC(0.1), CROSS_ENTROPY)
    losses = [float(np.asarray(model.train_on_batch(data[0][:64], data[1][:64]))) for _ in range(12)]
    assert losses[-1] < losses[0] / 2


def test_accumulated_gradients_are_one_larger_batch(data):
    whole = perceptron(adapter.KFAC(0.1, fraction=1))
    parts = perceptron(adapter.KFAC(0.1, fraction=1, gradient_accumulation_steps=2))
    whole.train_on_batch(data[0][:64], data[1][:64])
    before = parts.get_weights()
    parts.train_on_batch(data[0][:32], data[1][:32])
    np.testing.assert_array_equal(parts.get_weights()[0], before[0])
    parts.train_on_batch(data[0][32:64], data[1][32:64])
    assert not np.array_equal(parts.get_weights()[0], before[0])


def test_other_optimizers_are_as_without_the_class(data):
    found = []
    for cls in (adapter.KFACModel, keras.Model):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((64,))
        model = cls(inputs, keras.layers.Dense(10, "softmax")(inputs))
        model.compile(keras.optimizers.AdamW(1e-2), CROSS_ENTROPY)
        found.append(fit(model, data, epochs=1, shuffle=True))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "options, fitting, message",
    [
        ({"run_eagerly": True}, {}, "jit_compile=True"),
        ({"jit_compile": False}, {}, "jit_compile=True"),
        ({"steps_per_execution": 2}, {}, "steps_per_execution=1"),
        ({}, {"sample_weight": np.ones(512)}, "sample_weight="),
        ({}, {"class_weight": dict.fromkeys(range(10), 1.0)}, "class_weight="),
    ],
)
def test_refused(options, fitting, message, data):
    model = perceptron(adapter.KFAC(0.1), **options)
    with pytest.raises(ValueError, match=message):
        fit(model, data, **fitting)


def test_weights_in_a_later_fit_leave_the_model_as_it_is(data):
    model = perceptron(adapter.KFAC(0.1))
    fit(model, data, epochs=1)
    before = model.get_weights()
    with pytest.raises(ValueError, match="sample_weight="):
        fit(model, data, sample_weight=np.ones(512))
    for x, y in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(x, y)


def test_an_evaluation_before_fit_does_not_decide_the_layers(data):
    model = perceptron(adapter.KFAC(0.1))
    model.evaluate(data[0][:3], data[1][:3], sample_weight=np.ones(3), verbose=0)
    fit(model, data, epochs=1, batch_size=64)
    assert model.optimizer.layers.num_examples == 64


@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
def test_a_generator_loses_no_batch(data):
    model = perceptron(adapter.KFAC(0.1))
    for count in (1, 2):
        model.fit(((data[0][k : k + 32], data[1][k : k + 32]) for k in range(0, 192, 32)), shuffle=False, verbose=0)
        assert int(model.optimizer.iterations) == 6 * count


def test_a_masked_loss_has_exact_layers():
    """Average the loss over all tokens except 0, whose positions have no gradient."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6,))
    x = keras.layers.Embedding(5, 4, mask_zero=True)(inputs)
    model = adapter.KFACModel(inputs, keras.layers.Dense(5, "softmax")(x))
    model.compile(adapter.KFAC(0.1), CROSS_ENTROPY)
    tokens = np.random.default_rng(0).integers(0, 5, (512, 6))
    found = fit(model, (tokens, tokens))
    assert found[-1] < found[0] / 5
    assert [layer.kind for layer in model.optimizer.layers] == ["embedding", "dense"]


def test_more_is_refused(data):
    with pytest.raises(ValueError, match="clipping"):
        adapter.KFAC(0.1, clipnorm=1.0)
    inputs = keras.Input((64,))
    plain = keras.Model(inputs, keras.layers.Dense(10, "softmax")(inputs))
    plain.compile(adapter.KFAC(0.1), CROSS_ENTROPY)
    with pytest.raises(ValueError, match="needs a KFACModel"):
        fit(plain, data)
    with pytest.raises(TypeError, match="dampling"):
        fit(perceptron(adapter.KFAC(0.1, options={"dampling": 1e-3})), data)
    small = adapter.KFACModel(inputs, keras.layers.Dense(10, "softmax")(inputs))
    small.compile(adapter.KFAC(0.1), CROSS_ENTROPY)
    fit(small, data, epochs=1)
    store = {str(k): np.asarray(x.value) for k, x in enumerate(small.optimizer.variables)}
    model = perceptron(adapter.KFAC(0.1))
    model.optimizer.load_own_variables(store)
    with pytest.raises(ValueError, match="another optimizer, model"):
        fit(model, data)


@pytest.fixture(scope="module")
def script():
    return load("keras_fit")


def test_runs_are_kept_and_reported(script, tmp_path, capsys):
    results = tmp_path / "results.jsonl"
    kept = ["--results", str(results)]
    script.main(["run", "--task", "digits", *kept])
    for rate in ("0.001", "0.01"):
        script.main(["run", "--task", "digits", "--method", "adamw", "--rate", rate, *kept])
    records = [json.loads(line) for line in results.read_text().splitlines()]
    ours, *theirs = [record["loss"] for record in records]
    assert ours < min(theirs)
    capsys.readouterr()
    script.main(["report", *kept])
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split(" | ")[1:5] for row in rows] == [["adamw", "0.01", "2", "1"], ["kfac", "0.1", "1", "1"]]


def test_the_transformer_has_exact_layers(script):
    model = script.miniature_gpt(96, 16, width=8)
    model.compile(adapter.KFAC(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    tokens = np.random.default_rng(0).integers(0, 96, (64, 17))
    model.fit(tokens[:, :-1], tokens[:, 1:], verbose=0)
    assert {layer.kind for layer in model.optimizer.layers} == {"dense", "embedding", "unitwise", "diagonal"}


def test_the_images_must_be_there(script, tmp_path):
    with pytest.raises(SystemExit, match="dataset-fashion-mnist"):
        script.main(["run", "--task", "images", "--data-dir", str(tmp_path)])


def test_the_table_is_that_of_the_readme(script, capsys):
    script.main(["report"])
    assert capsys.readouterr().out in (FOLDER / "README.md").read_text()
