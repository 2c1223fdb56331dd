"""Stacks of curvature blocks: compute their inverses, apply these to gradients, and handle failures."""
