"""Serving on an existing engine: adapters that call the library's own schedule with the engine's caches as its state.

Continuous batching, paged caches, prefix reuse, scheduling and the OpenAI interface are the engine's; nothing here
computes a layer. `plugin` registers the adapter with vLLM; `engine`, `caches` and `pictures` are the adapter; `rows`
makes batches of a step and knows no engine; `ranks` places a model on the engine's ranks; `compat` holds what differs
between releases of the engine. Importing this package imports no engine.
"""
