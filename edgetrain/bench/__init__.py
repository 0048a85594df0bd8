"""Studies: each file is one question, measured on this machine and kept in a run folder."""
