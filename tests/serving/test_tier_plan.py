"""What `--tiers` means, and what it is not; needs no engine."""

import json
import shutil
from pathlib import Path

import pytest

from kimi_graph.errors import KimiGraphError
from kimi_graph.parallel import Mesh
from kimi_graph.serving.launch import Launch
from kimi_graph.serving.tiers import plan, precision
from kimi_graph.serving.tiers.plan import Tiers, mark_of, size_of


def test_sizes_are_decimal_unless_they_have_an_i():
    assert [size_of(x) for x in ("1000000B", "4GB", "1.5 mb", "512MiB")] == [10**6, 4 * 10**9, 1_500_000, 2**29]


def test_a_specification_is_read_in_any_order():
    tiers = Tiers.parse("policy=arc, file=build/some:where:100GB ,host=4GB")
    assert tiers == Tiers(host=4 * 10**9, policy="arc", files=Path("build/some:where"), most=10**11)
    assert Tiers.parse("host=1GiB") == Tiers(host=2**30)
    assert Tiers.parse("host=1GiB,file=a,low=fp8") == Tiers(host=2**30, files=Path("a"), low="fp8")


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "is not host="),
        ("host", "is not host="),
        ("host=1GB,disk=a", "'disk=a' is not host="),
        ("host=1GB,host=2GB", "host= twice"),
        ("file=a", "no host="),
        ("host=4XB", "'4XB'; expected 1MB"),
        ("host=4", "'4'; expected 1MB"),
        ("host=1KB", "expected 1MB or more"),
        ("host=0GB", "'0GB'; expected 1MB"),
        ("host=-1GB", "'-1GB'; expected 1MB"),
        ("host=1GB,file=a:much", "'much'; expected 1MB"),
        ("host=1GB,policy=oldest", "expected one of lru, arc"),
        ("host=1GB,file=a,low=int4", "expected one of int8, fp8"),
        ("host=1GB,low=int8", "expected file=DIR beside it"),
        (f"host=1GB,file={__file__}", "a file; expected a folder"),
    ],
)
def test_what_is_none_is_refused_with_what_can_be(text, words):
    with pytest.raises(KimiGraphError, match=words):
        Tiers.parse(text)


def test_the_servers_command_has_the_engines_own_configuration(tiny):
    tiers = Tiers.parse("host=1GB,file=pages:2GB,policy=arc")
    launch = Launch(folder=tiny, name="t", host="127.0.0.1", port=1, max_len=None, mesh=Mesh(), tiers=tiers)
    found = json.loads(launch.command[launch.command.index("--kv-transfer-config") + 1])
    assert found["kv_connector"] == "OffloadingConnector"
    extra = found["kv_connector_extra_config"]
    assert extra["spec_module_path"] == "kimi_graph.serving.tiers.host"
    assert (extra["cpu_bytes_to_use"], extra["eviction_policy"]) == (10**9, "arc")
    (tier,) = extra["secondary_tiers"]
    assert Path(tier["root_dir"]).parent == Path("pages").resolve()
    assert tier["most"] == 2 * 10**9


def test_every_code_can_be_asked_for():
    assert tuple(precision.CODES) == plan.CODES


def test_files_in_fewer_bits_lie_elsewhere_and_are_of_one_stage(tiny):
    tiers = [Tiers.parse(f"host=1GB,file=pages{low}") for low in ("", ",low=int8", ",low=fp8")]
    roots = [t.engine_config(tiny)["kv_connector_extra_config"]["secondary_tiers"][0]["root_dir"] for t in tiers]
    assert len(set(roots)) == 3
    with pytest.raises(KimiGraphError, match="one pipeline stage alone"):
        Launch(folder=tiny, name="t", host="::1", port=1, max_len=None, mesh=Mesh(pipe=2), tiers=tiers[1])


def test_caches_of_other_weights_lie_elsewhere(tiny, tmp_path):
    """Where one number of the weights differs, of the same names and sizes."""
    for name in ("same", "other"):
        shutil.copytree(tiny, tmp_path / name)
    weights = next((tmp_path / "other").glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert mark_of(tmp_path / "same") == mark_of(tiny) != mark_of(tmp_path / "other")
