"""A connector that brings the pages of each layer when that layer is reached, and not before; for attention alone."""

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

BLOCK = 128
KEPT: dict[tuple[int, ...], dict[str, Any]] = {}  # pages of each layer, by the prefix that they hold
CALLS: list[tuple[str, str]] = []


@dataclass
class Plan(KVConnectorMetadata):
    """Prefixes to load and to store in a step, and the engine's pages of each."""

    loads: list[tuple[tuple[int, ...], list[int]]] = field(default_factory=list)
    stores: list[tuple[tuple[int, ...], list[int]]] = field(default_factory=list)


class ByLayer(KVConnectorBase_V1):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.plan = Plan()

    # ---- in the scheduler ----

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        whole = (len(request.prompt_token_ids) - 1) // BLOCK * BLOCK
        known = whole if tuple(request.prompt_token_ids[:whole]) in KEPT else 0
        return max(known - num_computed_tokens, 0), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            count = num_external_tokens // BLOCK
            prefix = tuple(request.prompt_token_ids[:num_external_tokens])
            self.plan.loads.append((prefix, blocks.get_block_ids()[0][:count]))

    def build_connector_meta(self, scheduler_output: Any) -> Plan:
        plan, self.plan = self.plan, Plan()
        for new in scheduler_output.scheduled_new_reqs:
            count = (len(new.prompt_token_ids) - 1) // BLOCK
            plan.stores.append((tuple(new.prompt_token_ids[: count * BLOCK]), new.block_ids[0][:count]))
        return plan

    # ---- in the worker ----

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        CALLS.append(("start", ""))

    def wait_for_layer_load(self, layer_name: str) -> None:
        CALLS.append(("wait", layer_name))
        for prefix, blocks in self._get_connector_metadata().loads:  # type: ignore[attr-defined]
            self.caches[layer_name][blocks] = KEPT[prefix][layer_name]

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        CALLS.append(("save", layer_name))
        for prefix, blocks in self._get_connector_metadata().stores:  # type: ignore[attr-defined]
            KEPT.setdefault(prefix, {})[layer_name] = kv_layer[blocks].clone()

    def wait_for_save(self) -> None:
        CALLS.append(("end", ""))
