import pytest

from kimi_graph.compile.targets import CANN_VERSIONS, GIB, PROVIDERS, PROVIDERS_DEFAULT, TARGETS, target
from kimi_graph.errors import CompileError


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("cann", CANN_VERSIONS)
def test_every_target_names_a_chip_a_family_and_the_source_of_its_memory(name, cann):
    t = target(name, cann=cann)
    assert (t.name, t.cann) == (name, cann)
    assert t.soc in ("a2", "a3", "950")
    assert t.soc_version in t.soc_versions
    assert t.memory_source


@pytest.mark.parametrize(
    "name, variant, gib", [("a3", None, 64), ("950dt", None, 144), ("950pr", "Ascend950PR_958b", 112)]
)
def test_memory_is_that_of_one_die_of_the_variant(name, variant, gib):
    assert target(name, soc_version=variant).memory_bytes == gib * GIB


def test_a_bare_910b_is_no_variant_because_ge_takes_it_for_the_old_chip():
    with pytest.raises(CompileError, match=r"'Ascend910B' is not known; the nearest is 'Ascend910B\d"):
        target("a2", soc_version="Ascend910B")


@pytest.mark.parametrize(
    "given, nearest", [("A3", "a3"), ("a-3", "a3"), ("950d", "950dt"), ("a3superpod", "a3-superpod")]
)
def test_an_unknown_target_is_refused_with_the_nearest(given, nearest):
    with pytest.raises(CompileError, match=f"target {given!r} is not known; it may be {nearest}[, ]"):
        target(given)


def test_a_target_like_no_chip_that_is_sold_is_refused_with_the_nearest_name():
    with pytest.raises(CompileError, match="target 'q2' is not known; the nearest is 'a2'"):
        target("q2")


def test_an_unknown_cann_release_is_refused_with_the_nearest():
    with pytest.raises(CompileError, match=r"CANN release '9\.0' is not known; the nearest is '9\.1'"):
        target("a3", cann="9.0")


@pytest.mark.parametrize(
    "given, message",
    [
        (("builtin", "vllm"), "provider 'vllm' is not known; the nearest is 'vllm-ascend'"),
        (("own", "composed"), "providers own,composed: most operators come with CANN alone; name it too"),
        (("builtin", "own", "own"), "own is named twice; name each once"),
    ],
    ids=str,
)
def test_a_list_of_providers_that_cannot_be_is_refused(given, message):
    with pytest.raises(CompileError, match=message):
        target("a3", providers=given)


def test_providers_that_need_nothing_installed_or_somebody_elses_package_are_asked_first_and_on_request():
    assert target("a3").providers == PROVIDERS_DEFAULT == tuple(p for p in PROVIDERS if p != "vllm-ascend")
