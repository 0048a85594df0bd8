"""From a graph to another one: one file a rewrite."""
