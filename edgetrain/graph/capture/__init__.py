"""From a model, a loss and an optimizer to the graph of one training step, and whether it still is that graph."""
