"""Sums of products over the rows of inputs and output gradients."""
