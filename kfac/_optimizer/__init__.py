"""What is kept between steps, one step, and the optax transformations around it."""
