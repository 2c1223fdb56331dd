"""Train a Keras 3 model with K-FAC through `compile` and `fit`, on the JAX backend.

Copy this file. Set the environment variable `KERAS_BACKEND=jax` before the first import of Keras::

    model = KFACModel(inputs, outputs)
    model.compile(KFAC(0.1), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(images, labels, batch_size=256, epochs=10)
    print(model.optimizer.layers)

The training step is Keras's own. `KFAC` holds the optimizer state as Keras variables, one for each array. `KFACModel`
finds the layers in the compiled loss before the first step, and takes statistics whenever they are due.
"""

import jax
import keras
import optax

import kfac


@keras.saving.register_keras_serializable("kfac")
class KFAC(keras.optimizers.Optimizer):
    """Wrap `kfac.kfac` as a Keras optimizer.

    Args:
      learning_rate: a float or a Keras schedule.
      options: further options of `kfac.kfac`, such as `{"damping": 1e-3}`.
      fraction: the `fraction` of `kfac.statistics`.
      find: options of `kfac.find_layers`, such as `{"rules": {"embeddings$": "skip"}}`.
      keras_options: options of `keras.optimizers.Optimizer`, except clipping.
    """

    layers = structure = None  # the layers and the state's tree structure, from the first training step on

    def __init__(self, learning_rate=0.1, options=None, fraction=1 / 4, find=None, **keras_options):
        super().__init__(learning_rate, **keras_options)
        if self.clipnorm or self.clipvalue or self.global_clipnorm:
            raise ValueError("clipping has no effect on the length of K-FAC's steps: leave clipnorm= and the like out")
        self.options, self.fraction, self.find = options or {}, fraction, find or {}
        self.state_variables = []

    def find_layers(self, loss_fn, params, *args):
        """Find the layers of a loss, and create the optimizer state unless a file has brought it."""
        self.layers = kfac.find_layers(loss_fn, params, *args, **self.find)
        init = jax.jit(kfac.kfac(0.1, self.layers, **self.options).init)
        leaves, self.structure = jax.tree.flatten(init(params))
        self.create_state(leaves)
        if [x.shape for x in leaves] != [x.shape for x in self.state_variables]:
            raise ValueError("the file has the state of another optimizer, model or number of devices")

    def create_state(self, leaves):
        """Create a variable for each array, unless they exist. Under a distribution, it lies as the array does."""
        for leaf in [] if self.state_variables else leaves:
            layout = getattr(leaf, "sharding", None) if keras.distribution.distribution() else None
            variable = keras.Variable(leaf, dtype=leaf.dtype, trainable=False, layout=layout, name="kfac")
            self.state_variables.append(variable)

    def opt_state(self, values):
        """Return the state of `kfac.kfac`, given the values of all variables."""
        if self.structure is None:
            raise ValueError(
                "KFAC needs a KFACModel, or KFACMixin as first base, and auto_scale_loss=False with mixed_float16"
            )
        return jax.tree.unflatten(self.structure, values[-len(self.state_variables) :])

    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        params = by_path([variable.value for variable in trainable_variables], trainable_variables)
        opt_state = self.opt_state([variable.value for variable in self.variables])
        tx = kfac.kfac(keras.ops.convert_to_tensor(learning_rate), self.layers, **self.options)
        updates, opt_state = tx.update(by_path(grads, trainable_variables), opt_state, params)
        values = [*optax.apply_updates(params, updates).values(), *jax.tree.leaves(opt_state)]
        for variable, value in zip([*trainable_variables, *self.state_variables], values, strict=True):
            variable.assign(value)

    def load_own_variables(self, store):
        # After the first training step, the variables exist, and this creates none.
        self.create_state([store[str(k)] for k in range(len(self.variables), len(store.keys()))])
        super().load_own_variables(store)

    def get_config(self):
        return {
            **super().get_config(),
            "options": dict(self.options),
            "fraction": self.fraction,
            "find": dict(self.find),
        }


class KFACMixin:
    """Take statistics for `KFAC` in `fit`: `class Mine(KFACMixin, keras.Sequential)`. Other optimizers work as before.

    Keras changes the bases of a class that it calls with inputs and outputs. A class of its own for such models leaves
    the others as they are.
    """

    def _symbolic_build(self, iterator=None, data_batch=None):
        # Keras calls this before it trains or evaluates, and starts the iterator again afterwards.
        data_batch = next(next(iter(iterator))[2]) if data_batch is None else data_batch
        # A function, because Keras wraps dictionaries and lists that are attributes.
        self.example_batch = lambda: data_batch
        super()._symbolic_build(iterator, data_batch)

    def statistics_loss(self, params, batch, state):
        """Return the compiled loss of a batch in training mode, with Keras's training state."""
        x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
        # The loss before Keras scales it.
        return self.compute_loss_and_updates([*params.values()], state[1], state[3], x, y, None, True, state[2])[1][0]

    def observe(self, state, batch):
        """Return Keras's training state with the statistics of a batch."""
        trainable, non_trainable, values, metrics = state
        measure = kfac.statistics(self.statistics_loss, self.optimizer.layers, fraction=self.optimizer.fraction)
        factors = measure(by_path(trainable, self.trainable_variables), batch, state)
        leaves = jax.tree.leaves(kfac.observe(self.optimizer.opt_state(values), factors))
        return trainable, non_trainable, [*values[: -len(leaves)], *leaves], metrics

    def make_train_function(self, force=False):
        if not isinstance(self.optimizer, KFAC):
            return super().make_train_function(force)
        if keras.utils.unpack_x_y_sample_weight(self.example_batch())[2] is not None:
            raise ValueError("KFACModel does not support sample_weight= and class_weight=: leave them out")
        if self.train_function is not None and not force:
            return None
        if not self.jit_compile or self.steps_per_execution != 1 or keras.backend.backend() != "jax":
            raise ValueError("KFAC needs the JAX backend, jit_compile=True, no run_eagerly=, and steps_per_execution=1")
        state = self._get_jax_state(True, True, True, True)
        params = by_path(state[0], self.trainable_variables)
        self.optimizer.find_layers(self.statistics_loss, params, self.example_batch(), state)
        super().make_train_function(force)
        step, observe = self.train_function, jax.jit(self.observe)

        def train_function(state, iterator):
            batch = next(iterator)
            if kfac.statistics_due(self.optimizer.opt_state(state[2])):
                state = observe(state, batch)
            return step(state, iter([batch]))

        self.train_function = train_function


class KFACModel(KFACMixin, keras.Model):
    """A functional model: `KFACModel(inputs, outputs)`."""


def by_path(values, variables):
    """Return values by path. The number in front keeps the variables' order, because JAX sorts the keys."""
    return {f"{number:04}/{x.path}": value for number, (x, value) in enumerate(zip(variables, values, strict=True))}
