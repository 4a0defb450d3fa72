import subprocess
import sys

import pytest

from kimi_graph.compile.targets import TARGETS, target
from kimi_graph.errors import CompileError
from kimi_graph.plan.profiles import numbers, profiles


@pytest.mark.parametrize("name", TARGETS)
def test_every_number_says_how_it_is_known_and_where_from(name):
    for n in numbers(target(name)).values():
        assert n.value > 0 and n.how in ("published", "derived", "assumed") and len(n.source) > 4


@pytest.mark.parametrize(
    "name, variant, dtype, teraflops",
    [
        ("a2", "Ascend910B2", "bf16", 353.9),
        ("a3", "Ascend910_9391", "bf16", 363.7),
        ("a3", "Ascend910_9381", "int8", 708),
        ("950pr", "Ascend950PR_9589", "fp4", 1730),
        ("950pr", "Ascend950PR_9579", "fp8", 757),
        ("950dt", "Ascend950DT_9581", "bf16", 432.5),
    ],
)
def test_cube_rates_are_those_of_the_platform_files(name, variant, dtype, teraflops):
    assert target(name, soc_version=variant).die.cube[dtype].value == pytest.approx(teraflops * 1e12, rel=1e-3)


def test_the_36_cores_of_a_950dt_make_its_published_total_with_the_vector_units():
    die = target("950dt").die
    assert die.cube["bf16"].value + die.vector.value == pytest.approx(547e12, rel=1e-3)


def test_a3_has_no_eight_bit_floats():
    assert set(target("a3").die.cube) == {"fp32", "bf16", "int8", "int4"}


@pytest.mark.parametrize(
    "name, dies", [("a2", [8]), ("a3", [2, 16]), ("a3-superpod", [2, 16, 768]), ("950-superpod", [8192])]
)
def test_links_grow_outwards_and_the_last_joins_all(name, dies):
    links = target(name).links
    assert [link.dies for link in links] == [*dies, 0]
    speeds = [link.bandwidth.value for link in links]
    assert speeds == sorted(speeds, reverse=True)


def test_the_overview_names_all_and_one_target_tells_its_sources():
    assert all(name in profiles().text() for name in TARGETS)
    text = profiles("a3").text()
    assert "assumed" in text and "derived" in text and "platform files" in text
    assert profiles("a3").to_json()[0]["numbers"]["bandwidth"]["value"] == 1.6e12
    with pytest.raises(CompileError, match="nearest is 'a3'"):
        profiles("a4")


@pytest.mark.parametrize(
    "sold, meant",
    [
        ("910B", "a2"),
        ("Ascend 910C", "a3 or a3-superpod"),
        ("Atlas 800 A3", "a3"),
        ("950", "950pr or 950dt or 950-superpod"),
    ],
)
def test_the_name_that_a_chip_is_sold_by_leads_to_its_targets(sold, meant):
    with pytest.raises(CompileError, match=f"it may be {meant}, all are"):
        target(sold)


def test_the_overview_fits_100_columns():
    assert max(map(len, profiles().text().splitlines())) <= 100


def test_targets_are_shown_without_torch():
    show = "from kimi_graph.plan.profiles import profiles; profiles().text()"
    code = f"{show}\nimport sys\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
