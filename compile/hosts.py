"""The hosts file: which machines and devices run a bundle, in the order of its ranks.

```json
{"hosts": [
  {"name": "node-0", "ip": "10.0.0.1", "devices": [{"id": 0, "ip": "192.168.1.6"}, {"id": 1, "ip": "192.168.1.7"}]},
  {"name": "node-1", "ip": "10.0.0.2", "devices": [{"id": 0, "ip": "192.168.2.6"}, {"id": 1, "ip": "192.168.2.7"}]}
]}
```

Ranks go through the hosts in their order, and through a host's devices in theirs. `"devices": "0-7"` is enough where no
address is needed. Of a device, `id` is its physical id (/dev/davinciN), `ip` that of its network card (/etc/hccn.conf),
`super_id` its SDID (npu-smi info -t spod-info). Of a host, `superpod` says which SuperPoD it is in, and `rootinfo`, on
950, a copy of its /etc/hccl_rootinfo.json, by a path from this file.

Source: rank tables as HCCL's documents describe them, CANN 8.5 to 9.1.
"""

import difflib
import ipaddress
import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from kimi_graph.errors import DeployError
from kimi_graph.files import from_json

from .targets import Target

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # a rank table takes 64 characters; it names a folder too
MOST_DEVICES = 65  # of a host, whatever the target: what a rank table can number


@dataclass(frozen=True, kw_only=True)
class Device:
    """One die, which runs one rank.

    Attributes:
        id: physical, of its host. ip: of its network card, None where none is given. super_id: within its SuperPoD.
    """

    id: int
    ip: str | None = None
    super_id: int | None = None


@dataclass(frozen=True, kw_only=True)
class Host:
    """One machine. `levels`: of 950, what its rootinfo file says of the network of each device, by physical id."""

    name: str
    ip: str
    devices: tuple[Device, ...]
    superpod: str | None = None
    levels: Mapping[int, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Place:
    """Where a rank runs. `local`: which of its host's devices, in their order."""

    rank: int
    host: Host
    device: Device
    local: int


@dataclass(frozen=True)
class Hosts:
    """The machines of a deployment, checked; in the order of ranks."""

    hosts: tuple[Host, ...]

    def places(self) -> list[Place]:
        """By rank."""
        found = ((host, device, i) for host in self.hosts for i, device in enumerate(host.devices))
        return [Place(rank, host, device, i) for rank, (host, device, i) in enumerate(found)]

    @property
    def each(self) -> int:
        """Devices of a host."""
        return len(self.hosts[0].devices)


LOCAL = Hosts((Host(name="localhost", ip="127.0.0.1", devices=(Device(id=0),)),))


def host_size(target: Target) -> int:
    """Devices that a machine of a target has at most."""
    return next((link.dies for link in target.links if link.name == "host"), MOST_DEVICES - 1)


def example(target: Target, ranks: int) -> dict[str, Any]:
    """A hosts file of the right size, with addresses that are to be replaced."""
    each = min(ranks, host_size(target))
    while ranks % each:
        each -= 1
    made = []
    for i in range(ranks // each):
        host: dict[str, Any] = {"name": f"node-{i}", "ip": str(ipaddress.ip_address("10.0.0.1") + i)}
        if target.soc == "950":
            host |= {"devices": f"0-{each - 1}"} | ({"rootinfo": f"node-{i}.json"} if ranks > 1 else {})
        elif target.name == "a3-superpod":
            ids = [{"id": d, "super_id": i * each + d} for d in range(each)]
            host |= {"superpod": "0", "devices": ids}
        elif ranks > each:
            host["devices"] = [
                {"id": d, "ip": str(ipaddress.ip_address("192.168.0.1") + i * each + d)} for d in range(each)
            ]
        else:
            host["devices"] = f"0-{each - 1}"
        made.append(host)
    return {"hosts": made}


def read_hosts(file: Path, target: Target, ranks: int, mesh: str) -> Hosts:
    """The hosts of a file, fit for a bundle.

    Args:
        ranks: of the bundle. mesh: it in words, for errors.

    Raises:
        DeployError: the first thing that is wrong with it.
    """
    try:
        value = from_json(file.read_text())
    except OSError as e:
        raise DeployError(f"{file}: {e.strerror or e}; --example prints a hosts file for this bundle.") from None
    except ValueError as e:
        raise DeployError(f"{file}: not JSON ({e}); --example prints a hosts file for this bundle.") from None
    reader = _Reader(file, target)
    hosts = Hosts(tuple(reader.hosts(value)))
    reader.check_counts(hosts, ranks, mesh)
    reader.check_addresses(hosts)
    reader.check_superpods(hosts)
    reader.check_rootinfo(hosts)
    return hosts


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


@dataclass(frozen=True)
class _Reader:
    file: Path
    target: Target

    def fail(self, what: str) -> NoReturn:
        raise DeployError(f"{self.file}: {what}")

    # ---- one host ----------------------------------------------------------------------------------------------------

    def hosts(self, value: Any) -> Iterable[Host]:
        if not isinstance(value, dict) or not isinstance(value.get("hosts"), list) or not value["hosts"]:
            self.fail('expected {"hosts": [...]} with one host or more; --example prints one for this bundle.')
        self.known("the file", value, ("hosts",))
        for i, entry in enumerate(value["hosts"]):
            yield self.host(f"hosts[{i}]", entry)

    def host(self, where: str, entry: Any) -> Host:
        if not isinstance(entry, dict):
            self.fail(f"{where} is {entry!r}; expected an object with name, ip and devices.")
        self.known(where, entry, ("name", "ip", "devices", "superpod", "rootinfo"))
        name = entry.get("name")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            self.fail(f"{where}: name is {name!r}; expected 1 to 64 letters, digits, '.', '_' or '-'.")
        superpod = entry.get("superpod")
        if superpod is not None and not (isinstance(superpod, str) and superpod):
            self.fail(f"host {name}: superpod is {superpod!r}; expected a text, its id.")
        ip = self.address(f"host {name}", entry.get("ip"))
        if ip.version == 6:
            self.fail(f"host {name}: ip {ip} is IPv6; a rank table takes the IPv4 address of a host.")
        return Host(
            name=name,
            ip=str(ip),
            devices=tuple(self.devices(f"host {name}", entry.get("devices"))),
            superpod=superpod,
            levels=self.levels(f"host {name}", entry.get("rootinfo")),
        )

    def known(self, where: str, entry: Mapping[str, Any], names: tuple[str, ...]) -> None:
        for key in entry.keys() - set(names):
            near = difflib.get_close_matches(key, names, n=1, cutoff=0.0)[0]
            self.fail(f"{where}: no key {key!r} is known; the nearest is {near!r}, all are {', '.join(names)}.")

    def address(self, where: str, text: Any) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
        try:
            if isinstance(text, str):
                return ipaddress.ip_address(text)
        except ValueError:
            pass
        self.fail(f"{where}: ip is {text!r}; expected an address such as 10.0.0.1.")

    def devices(self, where: str, value: Any) -> Iterable[Device]:
        if isinstance(value, str):
            value = self.interval(where, value)
        if not isinstance(value, list) or not value:
            self.fail(f'{where}: devices is {value!r}; expected a list, or a range such as "0-7".')
        seen: set[int] = set()
        for entry in value:
            device = self.device(where, {"id": entry} if isinstance(entry, int) else entry)
            if device.id in seen:
                self.fail(f"{where}: device {device.id} is listed twice.")
            seen.add(device.id)
            yield device

    def interval(self, where: str, text: str) -> list[int]:
        found = re.fullmatch(r"(\d{1,4})-(\d{1,4})", text)
        if found is None or int(found[1]) > int(found[2]):
            self.fail(f'{where}: devices is {text!r}; expected a range such as "0-7".')
        return list(range(int(found[1]), int(found[2]) + 1))

    def device(self, where: str, entry: Any) -> Device:
        if not isinstance(entry, dict):
            self.fail(f"{where}: device {entry!r}; expected a number, or an object with id, ip and super_id.")
        self.known(f"{where}: device", entry, ("id", "ip", "super_id"))
        id_ = self.number(where, "id", entry.get("id"))
        if id_ >= host_size(self.target):
            most = host_size(self.target) - 1
            self.fail(f"{where}: device {id_}; a host of {self.target.name} has devices 0 to {most}.")
        ip = entry.get("ip")
        return Device(
            id=id_,
            ip=None if ip is None else str(self.address(f"{where}: device {id_}", ip)),
            super_id=None if "super_id" not in entry else self.number(where, "super_id", entry["super_id"]),
        )

    def number(self, where: str, key: str, value: Any) -> int:
        if type(value) is not int or not 0 <= value < 2**32:
            self.fail(f"{where}: a device's {key} is {value!r}; expected a number from 0 on.")
        return value

    def levels(self, where: str, path: Any) -> dict[int, Any]:
        """The network of each device, of a copy of /etc/hccl_rootinfo.json."""
        if path is None:
            return {}
        if self.target.soc != "950":
            self.fail(f"{where}: rootinfo is of hosts of 950; {self.target.name} takes ip and super_id of devices.")
        if not isinstance(path, str) or not path:
            self.fail(f"{where}: rootinfo is {path!r}; expected the path of a copy of its /etc/hccl_rootinfo.json.")
        file = self.file.parent / path
        try:
            ranks = from_json(file.read_text())["rank_list"]
            return {rank["device_id"]: rank["level_list"] for rank in ranks}
        except OSError as e:
            self.fail(f"{where}: rootinfo {file}: {e.strerror or e}.")
        except (ValueError, KeyError, TypeError):
            self.fail(f"{where}: rootinfo {file}: expected a rank_list with device_id and level_list of each device.")

    # ---- all hosts ---------------------------------------------------------------------------------------------------

    def check_counts(self, hosts: Hosts, ranks: int, mesh: str) -> None:
        self.unique("name", ((f"hosts[{i}]", host.name) for i, host in enumerate(hosts.hosts)))
        counts = {host.name: len(host.devices) for host in hosts.hosts}
        total, each = sum(counts.values()), hosts.each
        if odd := next((name for name, count in counts.items() if count != each), None):
            first = hosts.hosts[0].name
            self.fail(
                f"host {odd} has {counts[odd]} devices, host {first} has {each}; "
                "HCCL wants the same number of every host."
            )
        if each > host_size(self.target):
            self.fail(f"{each} devices of a host; a host of {self.target.name} has {host_size(self.target)} at most.")
        have = f"{_many(len(counts), 'host')} with {_many(total, 'device')}"
        if total < ranks:
            more = -(-(ranks - total) // each)
            self.fail(
                f"{have}; {mesh} has {ranks:,} ranks and takes as many devices: {ranks - total:,} are missing, "
                f"{_many(more, 'more host')} like these."
            )
        if total > ranks:
            self.fail(f"{have}; {mesh} has {ranks:,} ranks: list the devices that run them, no others.")

    def unique(self, what: str, values: Iterable[tuple[str, Any]]) -> None:
        seen: dict[Any, str] = {}
        for where, value in values:
            if value is not None and value in seen:
                self.fail(f"{what} {value} is that of {seen[value]} and of {where}.")
            seen[value] = where

    def check_addresses(self, hosts: Hosts) -> None:
        """Names and addresses are nobody else's; those of devices are there where ranks need them, and of one kind."""
        places = hosts.places()
        self.unique("ip", ((f"host {host.name}", host.ip) for host in hosts.hosts))
        self.unique("ip", ((f"device {p.device.id} of host {p.host.name}", p.device.ip) for p in places))
        with_ip = [p for p in places if p.device.ip is not None]
        if with_ip and (bare := next((p for p in places if p.device.ip is None), None)):
            self.fail(f"device {bare.device.id} of host {bare.host.name} has no ip, others have one; all or none.")
        families = {ipaddress.ip_address(p.device.ip or "").version for p in with_ip}
        if len(families) > 1:
            self.fail("addresses of devices are IPv4 and IPv6; HCCL listens to one kind.")
        if self._needs_addresses(hosts) and not with_ip:
            self.fail(
                f"{len(hosts.hosts)} hosts of {self.target.name}: each device needs an ip, that of its network card "
                "(cat /etc/hccn.conf)."
            )

    def _needs_addresses(self, hosts: Hosts) -> bool:
        """Devices of several hosts that no SuperPoD joins meet in the network; 950's addresses are in its rootinfo."""
        pods = {host.superpod for host in hosts.hosts}
        return self.target.soc != "950" and len(hosts.hosts) > 1 and (None in pods or len(pods) > 1)

    def check_superpods(self, hosts: Hosts) -> None:
        """SuperPoDs are A3's: all hosts in one, or none; the hosts of one beside each other."""
        places = hosts.places()
        said = [host for host in hosts.hosts if host.superpod is not None]
        with_ids = [p for p in places if p.device.super_id is not None]
        if self.target.soc != "a3":
            if said or with_ids:
                self.fail(f"superpod and super_id are of A3; the bundle is for {self.target.name}.")
            return
        self.all_or_none("superpod", said, [h.name for h in hosts.hosts if h.superpod is None])
        bare = [f"device {p.device.id} of host {p.host.name}" for p in places if p.device.super_id is None]
        self.all_or_none("super_id", with_ids, bare)
        if bool(said) != bool(with_ids):
            given, other = ("superpod", "super_id of every device") if said else ("super_id", "superpod of every host")
            self.fail(f"{given} is given, {other} is not; a SuperPoD needs both (npu-smi info -t spod-info).")
        if self.target.name == "a3-superpod" and len(hosts.hosts) > 1 and not said:
            self.fail("hosts of a3-superpod need superpod, and super_id of every device (npu-smi info -t spod-info).")
        ids = ((f"device {p.device.id} of host {p.host.name}", p) for p in with_ids)
        self.unique("super_id", ((where, f"{p.device.super_id} of SuperPoD {p.host.superpod}") for where, p in ids))
        order = [host.superpod for host in hosts.hosts]
        if said and len(dict.fromkeys(order)) != 1 + sum(a != b for a, b in itertools.pairwise(order)):
            self.fail(f"hosts of a SuperPoD have to stand together; their order is {', '.join(map(str, order))}.")

    def all_or_none(self, what: str, with_it: list[Any], without: list[str]) -> None:
        if with_it and without:
            self.fail(f"{without[0]} has no {what}, others have one; all or none.")

    def check_rootinfo(self, hosts: Hosts) -> None:
        """Ranks of 950 find each other by what their hosts' rootinfo says."""
        if self.target.soc != "950" or len(hosts.places()) == 1:
            return
        for p in hosts.places():
            if p.device.id not in p.host.levels:
                what = f"no device {p.device.id}" if p.host.levels else "no rootinfo"
                self.fail(
                    f"host {p.host.name}: {what}; ranks of {self.target.name} need a copy of its "
                    "/etc/hccl_rootinfo.json."
                )
