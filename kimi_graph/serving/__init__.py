"""Serving on an existing engine: adapters that call the library's own schedule with the engine's caches as its state.

Continuous batching, paged caches, prefix reuse, scheduling and the OpenAI interface are the engine's; nothing here
computes a layer. `plugin` registers the adapter with vLLM; `engine`, `caches` and `pictures` are the adapter; `compat`
holds what differs between its releases. `sglang` is the adapter for SGLang. `rows` makes batches of a step, `views`
states of caches; they know no engine. `ranks` places a model on the engine's ranks. Importing this package imports no
engine.
"""
