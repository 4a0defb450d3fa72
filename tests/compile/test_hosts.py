"""Hosts files: what is read, and the one line that says what is wrong with a file."""

import json
import re

import pytest

from kimi_graph.compile.hosts import example, host_size, read_hosts
from kimi_graph.compile.targets import TARGETS, target
from kimi_graph.errors import DeployError


def host(i, devices="0-1", **more):
    return {"name": f"node-{i}", "ip": f"10.0.0.{i + 1}", "devices": devices, **more}


def cards(i, count=2, **more):
    return [{"id": d, "ip": f"192.168.{i}.{d + 6}", **more} for d in range(count)]


def read(folder, value, ranks=4, name="a3"):
    file = folder / "hosts.json"
    file.write_text(value if isinstance(value, str) else json.dumps(value))
    return read_hosts(file, target(name), ranks, "pp=2,tp=2")


def test_ranks_go_through_hosts_and_devices_in_their_order(tmp_path):
    found = read(tmp_path, {"hosts": [host(0, cards(0)), host(1, cards(1)[::-1])]})
    assert [(p.rank, p.host.name, p.device.id, p.local) for p in found.places()] == [
        (0, "node-0", 0, 0),
        (1, "node-0", 1, 1),
        (2, "node-1", 1, 0),
        (3, "node-1", 0, 1),
    ]


@pytest.mark.parametrize("devices", ["4-7", [4, 5, 6, 7], [{"id": d} for d in (4, 5, 6, 7)]], ids=str)
def test_devices_of_one_host_need_no_addresses(tmp_path, devices):
    found = read(tmp_path, {"hosts": [host(0, devices)]})
    assert [p.device.id for p in found.places()] == [4, 5, 6, 7]
    assert {p.device.ip for p in found.places()} == {None}


def test_addresses_of_devices_may_be_ipv6_if_all_are(tmp_path):
    six = [[{"id": d, "ip": f"fd00::{i}:{d}"} for d in range(2)] for i in range(2)]
    found = read(tmp_path, {"hosts": [host(0, six[0]), host(1, six[1])]})
    assert found.places()[3].device.ip == "fd00::1:1"
    with pytest.raises(DeployError, match="addresses of devices are IPv4 and IPv6"):
        read(tmp_path, {"hosts": [host(0, six[0]), host(1, cards(1))]})


POD = {"superpod": "7"}
TWO = [host(0, cards(0)), host(1, cards(1))]
WRONG = {
    "not json": ("{", "not JSON"),
    "a list": ([], r'expected \{"hosts"'),
    "no host": ({"hosts": []}, "one host or more"),
    "key of the file": ({"hosts": TWO, "port": 1}, "no key 'port' is known; the nearest is 'hosts'"),
    "key of a host": ({"hosts": [host(0, "0-3", addr=1)]}, r"hosts\[0\]: no key 'addr' is known"),
    "key of a device": ({"hosts": [host(0, [{"id": 0, "superid": 1}])]}, "no key 'superid' .* nearest is 'super_id'"),
    "no name": ({"hosts": [{"ip": "10.0.0.1", "devices": "0-3"}]}, r"hosts\[0\]: name is None; expected 1 to 64"),
    "name that leads out": ({"hosts": [host(0, "0-3") | {"name": "../x"}]}, r"name is '\.\./x'"),
    "name twice": ({"hosts": [TWO[0], TWO[1] | {"name": "node-0"}]}, r"name node-0 is that of hosts\[0\] and of"),
    "address twice": ({"hosts": [TWO[0], TWO[1] | {"ip": "10.0.0.1"}]}, "ip 10.0.0.1 is that of host node-0 and"),
    "address of a card twice": (
        {"hosts": [TWO[0], host(1, cards(0))]},
        "ip 192.168.0.6 is that of device 0 of host node-0 and of device 0 of host node-1",
    ),
    "no address": ({"hosts": [host(0, "0-3") | {"ip": "node"}]}, "host node-0: ip is 'node'; expected an address"),
    "IPv6": ({"hosts": [host(0, "0-3") | {"ip": "fd00::1"}]}, "host node-0: ip fd00::1 is IPv6; a rank table takes"),
    "device twice": ({"hosts": [host(0, [0, 1, 2, 2])]}, "host node-0: device 2 is listed twice"),
    "device that no host has": ({"hosts": [host(0, "14-17")]}, "device 16; a host of a3 has devices 0 to 15"),
    "range the wrong way": ({"hosts": [host(0, "3-0")]}, "devices is '3-0'; expected a range"),
    "device that is no number": ({"hosts": [host(0, [True, 1])]}, "a device's id is True; expected a number from 0 on"),
    "no devices": ({"hosts": [host(0, [])]}, "devices is \\[\\]; expected a list"),
    "too few": ({"hosts": [host(0, "0-2")]}, "1 host with 3 devices; .* 4 ranks .*: 1 are missing, 1 more host l"),
    "too many": ({"hosts": [host(0, "0-7")]}, "1 host with 8 devices; pp=2,tp=2 has 4 ranks: list the devices"),
    "uneven": ({"hosts": [host(0, cards(0, 3)), host(1, cards(1, 1))]}, "node-1 has 1 devices, host node-0 has 3;"),
    "no addresses": ({"hosts": [host(0), host(1)]}, "2 hosts of a3: each device needs an ip"),
    "one without address": (
        {"hosts": [TWO[0], host(1, [{"id": 0, "ip": "192.168.1.6"}, {"id": 1}])]},
        "device 1 of host node-1 has no ip, others have one; all or none",
    ),
    "pod without numbers": ({"hosts": [host(0, cards(0), **POD), host(1, cards(1), **POD)]}, "super_id of every"),
    "number without pod": ({"hosts": [host(0, cards(0, 4, super_id=1))]}, "superpod of every host is not"),
    "one host without pod": ({"hosts": [host(0, cards(0), **POD), TWO[1]]}, "node-1 has no superpod, others have one"),
    "number twice": (
        {"hosts": [host(0, [{"id": d, "super_id": 3} for d in range(4)], **POD)]},
        "super_id 3 of SuperPoD 7 is that of device 0 of host node-0 and of device 1",
    ),
    "rootinfo of another chip": ({"hosts": [host(0, "0-3", rootinfo="x")]}, "rootinfo is of hosts of 950; a3 takes ip"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_file_that_cannot_be_is_one_clear_line(tmp_path, what):
    value, words = WRONG[what]
    with pytest.raises(DeployError, match=words) as error:
        read(tmp_path, value)
    assert str(error.value).startswith(f"{tmp_path / 'hosts.json'}: ") and "\n" not in str(error.value)


def test_hosts_of_a_superpod_stand_together(tmp_path):
    def pods(*names):
        each = [[{"id": 0, "ip": f"192.168.{i}.6", "super_id": i}] for i in range(4)]
        return {"hosts": [host(i, each[i], superpod=name) for i, name in enumerate(names)]}

    assert len(read(tmp_path, pods("a", "a", "b", "b"), name="a3-superpod").hosts) == 4
    with pytest.raises(DeployError, match="hosts of a SuperPoD have to stand together; their order is a, b, a, b"):
        read(tmp_path, pods("a", "b", "a", "b"), name="a3-superpod")
    with pytest.raises(DeployError, match="superpod and super_id are of A3; the bundle is for a2"):
        read(tmp_path, pods("a", "a", "b", "b"), name="a2")


def test_a_superpod_needs_no_addresses_within_itself_and_needs_them_between(tmp_path):
    def pods(*names):
        each = [[{"id": d, "super_id": 2 * i + d} for d in range(2)] for i in range(2)]
        return {"hosts": [host(i, each[i], superpod=name) for i, name in enumerate(names)]}

    assert read(tmp_path, pods("a", "a"), name="a3-superpod").places()[3].device.super_id == 3
    with pytest.raises(DeployError, match="each device needs an ip"):
        read(tmp_path, pods("a", "b"), name="a3-superpod")
    plain = {"hosts": [host(0, cards(0)), host(1, cards(1))]}
    with pytest.raises(DeployError, match="hosts of a3-superpod need superpod"):
        read(tmp_path, plain, name="a3-superpod")


def rootinfo(file, devices):
    levels = [{"net_layer": 0, "net_type": "TOPO_FILE_DESC", "rank_addr_list": [{"addr_type": "EID", "addr": "0"}]}]
    file.write_text(json.dumps({"rank_list": [{"device_id": d, "level_list": levels} for d in range(devices)]}))


def test_ranks_of_950_find_each_other_by_what_their_hosts_know(tmp_path):
    given = {"hosts": [host(0, rootinfo="n0.json"), host(1, rootinfo="n1.json")]}
    with pytest.raises(DeployError, match=r"host node-0: rootinfo .*n0\.json: No such file"):
        read(tmp_path, given, name="950dt")
    rootinfo(tmp_path / "n0.json", 2)
    rootinfo(tmp_path / "n1.json", 1)
    with pytest.raises(
        DeployError, match="host node-1: no device 1; ranks of 950dt need a copy of its /etc/hccl_rootinfo"
    ):
        read(tmp_path, given, name="950dt")
    rootinfo(tmp_path / "n1.json", 2)
    assert set(read(tmp_path, given, name="950dt").hosts[1].levels) == {0, 1}
    (tmp_path / "n1.json").write_text("[]")
    with pytest.raises(DeployError, match="expected a rank_list with device_id and level_list"):
        read(tmp_path, given, name="950dt")
    with pytest.raises(DeployError, match="host node-0: no rootinfo; ranks of 950dt need"):
        read(tmp_path, {"hosts": [host(0), host(1)]}, name="950dt")


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("ranks", [1, 4, 24, 128])
def test_the_example_of_every_target_is_a_file_that_can_be(tmp_path, name, ranks):
    made = example(target(name), ranks)
    for entry in made["hosts"]:
        if "rootinfo" in entry:
            rootinfo(tmp_path / entry["rootinfo"], 64)
    found = read(tmp_path, made, ranks, name)
    assert len(found.places()) == ranks and found.each <= host_size(target(name))


def test_a_missing_file_says_how_to_get_one(tmp_path):
    with pytest.raises(DeployError, match=re.escape("--example prints a hosts file for this bundle")):
        read_hosts(tmp_path / "none.json", target("a3"), 4, "tp=4")
