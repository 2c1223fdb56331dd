"""The state of the optimizer, a step, and the optax transformations around it."""
