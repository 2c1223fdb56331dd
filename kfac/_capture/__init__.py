"""From a loss function to layers, and to gradients with statistics: the only room that reads jaxprs."""
