"""`python -m kimi_graph` is `kimi-graph`."""

from .cli import main

main()
