"""`python -m edgetrain`: the same as `edgetrain`."""

from edgetrain.cli import main

main()
