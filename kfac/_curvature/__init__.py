"""Stacks of curvature blocks: inverting them, applying the inverses, and what happens when one fails."""
