# pyright: reportMissingImports=false
"""The engine's offloading connector, by this package's name."""

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector


class TieredConnector(OffloadingConnector):
    """Pages go to tiers and come back by the engine's own scheduling."""
