"""How ranks find each other: HCCL's rank table, the groups of each rank, and the files of CANN up to 8.3.

A rank table has one of three forms. 1.0 lists hosts and the network addresses of their devices; 1.2 adds SuperPoDs and
the number of each device in its own; 2.0, of 950, lists ranks with their addresses on each level of the network, which
the hosts know (/etc/hccl_rootinfo.json) and nobody else.

Sources: HCCL's documents of rank tables (CANN 8.5 to 9.1); GE's HCCL adaptor, which reads `ge.exec.hcomGrouplist`; fact
sheet of Ascend, D.3, for what `atc` took up to CANN 8.3.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kimi_graph.errors import BundleError, DeployError

from .hosts import Hosts, Place
from .targets import Target

LONGEST_GROUP = 127  # characters of a group's name, HCCL's limit
WORLD = "hccl_world_group"  # HCCL's own, of all ranks

# Releases whose `atc` took the files of `cluster_files`, by chip: the fact sheet's table of support.
CLUSTER_BUILDS = {"a2": ("8.0", "8.1", "8.2", "8.3"), "a3": ("8.1",)}


def table_version(hosts: Hosts, target: Target) -> str:
    """The form of rank table that these hosts and this chip take.

    Raises:
        DeployError: the release has none for the chip.
    """
    if target.soc == "950":
        if _release(target.cann) < (9, 0):
            raise DeployError(f"CANN {target.cann} has no rank table for {target.name}; the nearest that has is 9.1.")
        return "2.0"
    return "1.2" if hosts.hosts[0].superpod is not None else "1.0"


def rank_table(hosts: Hosts, target: Target) -> dict[str, Any]:
    """The rank table of a deployment.

    Raises:
        DeployError: see `table_version`.
    """
    version = table_version(hosts, target)
    if version == "2.0":
        places = hosts.places()
        ranks = [_rank(place) for place in places]
        return {"status": "completed", "version": version, "rank_count": len(ranks), "rank_list": ranks}
    table: dict[str, Any] = {
        "status": "completed",
        "version": version,
        "server_count": str(len(hosts.hosts)),
        "server_list": _servers(hosts, target),
    }
    if version == "1.2":
        pods = dict.fromkeys(host.superpod for host in hosts.hosts)
        table["super_pod_list"] = [
            {"super_pod_id": pod, "server_list": [{"server_id": h.name} for h in hosts.hosts if h.superpod == pod]}
            for pod in pods
        ]
    return table


def _servers(hosts: Hosts, target: Target) -> list[dict[str, Any]]:
    devices: dict[str, list[dict[str, str]]] = {}
    for place in hosts.places():
        device = {"device_id": str(place.device.id)}
        if place.device.super_id is not None:
            device["super_device_id"] = str(place.device.super_id)
        if place.device.ip is not None:
            device["device_ip"] = place.device.ip
        devices.setdefault(place.host.name, []).append(device | {"rank_id": str(place.rank)})
    host_ip = target.soc == "a3"  # A2's tables have none
    return [
        {"server_id": host.name} | ({"host_ip": host.ip} if host_ip else {}) | {"device": devices[host.name]}
        for host in hosts.hosts
    ]


def _rank(place: Place) -> dict[str, Any]:
    return {
        "rank_id": place.rank,
        "local_id": place.device.id,
        "device_id": place.device.id,
        "level_list": place.host.levels[place.device.id],
    }


# ---- groups ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Communicator:
    """A group that a rank is in.

    Attributes:
        group: its name in the graphs. name: HCCL's, which no other list of ranks has. ranks: in order.
    """

    group: str
    name: str
    ranks: tuple[int, ...]


def communicators(groups: Mapping[str, Sequence[Sequence[int]]]) -> list[Communicator]:
    """All groups of a bundle, by name: the order in which every rank makes those it is in.

    Graphs of all ranks name a group alike, "tensor"; where several lists of ranks have that name, each gets its own,
    as frameworks that have run on devices do it: what HCCL does with two groups of one name on a host nobody says.

    Args:
        groups: the rank lists of each name, as the manifest has them.

    Raises:
        BundleError: a name HCCL does not take, or a group whose ranks do not count up: a rank's place in a group is
            its place in this list, and HCCL knows no other order.
    """
    found = []
    for name, lists in sorted(groups.items()):
        if len(name) + 8 > LONGEST_GROUP or name == WORLD:
            raise BundleError(f"group {name!r}: HCCL takes names of up to {LONGEST_GROUP} characters, but {WORLD}.")
        for i, ranks in enumerate(lists):
            if list(ranks) != sorted(set(ranks)):
                raise BundleError(f"group {name!r}: its ranks are {list(ranks)}; HCCL takes them in ascending order.")
            found.append(Communicator(name, name if len(lists) == 1 else f"{name}.{i}", tuple(ranks)))
    return found


# ---- CANN up to 8.3 --------------------------------------------------------------------------------------------------


def builds_clusters(target: Target, cann: str) -> bool:
    """Whether the `atc` of a release makes an offline model of many ranks for a chip."""
    return cann in CLUSTER_BUILDS.get(target.soc, ())


def cluster_files(
    hosts: Hosts, target: Target, groups: Sequence[Communicator], models: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """model_relation_config.json and numa_config.json, which `atc --distributed_cluster_build=1` reads.

    Args:
        models: file of each rank's graph.
    """
    nodes = {host.name: i for i, host in enumerate(hosts.hosts)}
    places = hosts.places()
    relation = {
        "deploy_config": [
            {"submodel_name": model, "deploy_device_id_list": f"0:{nodes[p.host.name]}:{p.local}"}
            for model, p in zip(models, places, strict=True)
        ],
        "model_name_to_instance_id": [
            {"submodel_name": model, "model_instance_id": rank} for rank, model in enumerate(models)
        ],
        "comm_group": [{"group_name": c.name, "group_rank_list": json.dumps(list(c.ranks))} for c in groups],
        "rank_table": [{"rank_id": p.rank, "model_instance_id": p.rank} for p in places],
    }
    return {"model_relation_config.json": relation, "numa_config.json": _numa(hosts, target)}


def _numa(hosts: Hosts, target: Target) -> dict[str, Any]:
    node_type, item_type = "ATLAS900", target.soc_version
    nodes = [
        {
            "node_id": i,
            "node_type": node_type,
            "ipaddr": host.ip,
            "port": 2509,
            "is_local": i == 0,
            "item_list": [
                {"item_id": n, "device_id": d.id} | ({} if d.ip is None else {"ipaddr": d.ip})
                for n, d in enumerate(host.devices)
            ],
        }
        for i, host in enumerate(hosts.hosts)
    ]
    every = list(range(len(hosts.places())))
    topology = {"type": "star", "protocol": "RDMA:200Gb", "topos": [{"plane_id": 0, "devices": every}]}
    pairs = [[a, b] for a in range(hosts.each) for b in range(a + 1, hosts.each)]
    return {
        "cluster": [{"cluster_nodes": nodes, "nodes_topology": topology}],
        "node_def": [
            {
                "node_type": node_type,
                "resource_type": "Aarch",
                "support_links": "[HCCS,PCIE,ROCE]",
                "item_type": item_type,
                "inter_item_memory_access_mode": "[NUMA]",
                "item_topology": [{"links_mode": "HCCS", "links": pairs}],
            }
        ],
        "item_def": [
            {
                "item_type": item_type,
                "resource_type": "Ascend",
                "memory": f"[DDR:{target.memory_bytes >> 30}GB]",
                "aic_type": "[DAVINCI_V100:32]",  # as the documents' example of every A2 has it
            }
        ],
    }


def _release(cann: str) -> tuple[int, ...]:
    return tuple(map(int, cann.split(".")))
