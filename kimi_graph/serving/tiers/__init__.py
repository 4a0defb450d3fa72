"""Tiers below the engine's own cache: the node's shared memory, and files that outlive the server.

The engine's offloading interface moves, looks up and counts; everything here is named to it by configuration. `plan`
reads `--tiers` and writes that configuration, and needs no engine; `host` copies pages to and from shared memory where
the engine's own copies need a GPU; `files` is the engine's file tier with a bound, and with `precision` in fewer bits.
`layers` tells a connector which layer is about to read its pages.
"""
