"""`python -m millstream` is the `millstream` command."""

from millstream.fleet.cli import main

main()
