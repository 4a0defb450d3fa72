# pyright: reportMissingImports=false
"""What a connector of the engine is told of each attention layer in a step: its pages are about to be read, or written.

The engine's own attention layers tell it the same, so that pages can come and go layer by layer while others compute.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from kimi_graph.models.decoder import Use


class Transfers:
    """Of one step, whose groups of rows are computed one after another.

    Attributes:
        connector: that wants to be told; None where there is none, or the engine's offloading, which brings the pages
            of a request before it is computed.
        caches: of the attention layers.
    """

    def __init__(self, caches: Mapping[int, Any]) -> None:
        found = get_kv_transfer_group() if has_kv_transfer_group() else None
        self.connector: Any = None if isinstance(found, OffloadingConnector) else found
        self.caches = caches
        self.expected = dict(caches)

    def awaited(self, uses: Sequence[Use]) -> Iterator[Sequence[Use]]:
        """The parts in order, those of a layer when its pages are there; a layer is waited for once in a step."""
        if self.connector is None:
            yield uses
            return
        for layer, own in itertools.groupby(uses, key=lambda use: use.layer):
            if layer in self.expected:
                self.connector.wait_for_layer_load(self.expected.pop(layer).name)
            yield list(own)

    def written(self, told: Mapping[int, Any]) -> None:
        """All groups are computed. `told`: what the engine said of the step, by layer."""
        if self.connector is not None:
            for layer, cache in self.caches.items():
                self.connector.save_kv_layer(cache.name, cache.kv_cache, told[layer])
