"""`python -m kimi_graph` is `kimi-graph`."""

from .cli import main

if __name__ == "__main__":  # a process of `verify --processes` imports this module too
    main()
