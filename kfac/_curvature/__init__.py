"""Stacks of curvature blocks: compute their preconditioners, apply these to gradients, and handle failures."""
