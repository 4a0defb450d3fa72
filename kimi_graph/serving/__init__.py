"""Serving on an existing engine: adapters that call the library's own forward with the engine's caches as its state.

Continuous batching, paged caches, prefix reuse, scheduling and the OpenAI interface are the engine's; nothing here
computes a layer. `plugin` registers the adapter with vLLM, `engine` and `pictures` are the adapter, `rows` turns a step
of an engine into the library's batches and knows no engine, `ranks` places a model on the engine's ranks, `compat` holds
what differs between releases, `launch` starts a server. Importing this package imports no engine.
"""
