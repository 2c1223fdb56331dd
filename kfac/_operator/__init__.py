"""Curvature as an object: what is known of a Fisher matrix, as a linear operator on trees of parameters."""
