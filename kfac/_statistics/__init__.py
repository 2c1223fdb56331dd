"""Sums of products over the rows of layer inputs and output gradients."""
