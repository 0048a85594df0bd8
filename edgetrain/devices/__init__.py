"""Devices as data: one small TOML file each, every number with its source."""
