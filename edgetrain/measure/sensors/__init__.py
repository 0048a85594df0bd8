"""What this machine can tell of itself: one file a source, each under a root folder that tests replace."""
