"""Search: what fits, what is refused and with which words; every mesh that is printed can be compiled."""

import dataclasses
import functools
import json
import re
import shlex
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from kimi_graph import cli
from kimi_graph.compile.driver import compile_model
from kimi_graph.compile.targets import target
from kimi_graph.compile.torchair_host import Host
from kimi_graph.config import ModelConfig
from kimi_graph.errors import CompileError, ConfigError, KimiGraphError, ShardingError
from kimi_graph.fixture import make_fixture
from kimi_graph.parallel import Mesh
from kimi_graph.plan.buffers import full_ledger
from kimi_graph.plan.factors import Factors
from kimi_graph.plan.html import page
from kimi_graph.plan.ledger import make_ledger
from kimi_graph.plan.search import Ask, Plan, PlanError, base_request, dies, make_plan
from kimi_graph.plan.sieve import LONG, Choice, Sieve, like, whole_up
from kimi_graph.read_config import load_config
from tests.compile.family import small_model

TIMES = re.compile(r"\d\s?(ms|us|s)\b|TTFT|TPOT")


def ask(name: str = "kimi-k3", chip: str = "a3", **given) -> Ask:
    return Ask(model=name, config=load_config(name), target=target(chip), **given)


def small_ask(name: str, **given) -> Ask:
    return Ask(model=name, config=small_model(name), target=target("a3"), max_len=256, page=16, **given)


def spoken(plan: Plan) -> str:
    """The text of a plan with its lines joined."""
    return " ".join(plan.text().split())


@functools.cache
def on_950() -> Plan:
    return make_plan(ask(chip="950dt", devices=32, batch=32, max_len=16384))


# ---- the plan --------------------------------------------------------------------------------------------------------


def test_k3_fits_32_dies_of_950dt_as_released():
    plan = on_950()
    assert plan.base.weights_format == "native" and plan.best.request.form == "mxfp4"
    assert plan.best.room > 0 and plan.devices == plan.best.choice.mesh.world == 32
    assert [o.ttft * o.tpot for o in plan.options] == sorted(o.ttft * o.tpot for o in plan.options)


def test_the_text_tells_the_mesh_its_bounds_formats_and_the_command():
    text = on_950().text()
    assert "kimi-graph compile kimi-k3 --target 950dt --mesh" in text and "--weights-format native" in text
    assert "bound by" in text and "prefill alone" in text and "even/median/p90 routing" in text
    assert "int8-g32" in text and "NO: GroupedMatmul with 8-bit weights" in text


@pytest.mark.parametrize("chip, more", [("a3", "33% more queries"), ("950dt", "")])
def test_queries_that_an_operator_pads_are_said_with_their_share(chip, more):
    """Public case M7: where the operator takes powers of two 12 heads are 16; sparse attention on 950 takes 12."""
    text = spoken(make_plan(ask("kimi-k3.1-pro", chip, mesh=Mesh.parse("pp=16,tp=8"))))
    said = f"heads attention of a rank: 12 heads padded to 16, a power of two, and stripped: {more}"
    assert said in text if more else "more queries" not in text


def test_json_lists_every_line_with_name_bytes_and_derivation():
    found = json.loads(json.dumps(on_950().to_json()))
    stage = found["options"][0]["ledger"]["stages"][0]
    assert sum(line["bytes"] for line in stage["lines"]) == stage["bytes"]["all"]
    assert all(line["name"] and line["derivation"] for line in stage["lines"])
    assert found["options"][0]["prefill"]["equal_at"] > 0


def test_the_sieve_counts_what_the_ledger_counts():
    wanted = ask("kimi-k3.1-pro", "a3-superpod", devices=96, batch=96, max_len=LONG)
    sieve = Sieve(base_request(wanted), Factors())
    choices = list(sieve.all_choices(96))
    some = {(c.kind, c.exchange, c.split_cache): c for c in choices}  # one of each sort
    assert len(some) > 8
    for choice in some.values():
        stages = make_ledger(sieve.request(choice)).stages
        assert sieve.held(choice) == max(s.of("weights") + s.of("states") for s in stages)


@pytest.mark.parametrize("mesh", ["dp=8,tp=2", "tp=16"])
def test_the_sieve_has_room_for_what_attention_to_all_tokens_reads(mesh):
    """Keys and values of all that many caches hold outweigh rows of experts; a fifth is for what it leaves out."""
    request = base_request(ask("kimi-linear-48b", batch=512, max_len=131_072))
    sieve = Sieve(request, Factors())
    choice = sieve.roomy(Choice(mesh=Mesh.parse(mesh), split_cache=True, chunk=128))
    needs = full_ledger(sieve.request(choice), Factors()).fullest.of("buffers") - 2 * 2**30
    assert 0.8 < sieve._working(choice) / needs < 1.1


def test_the_report_is_one_file_that_loads_nothing():
    document = page(on_950())
    assert document.count("<svg") == 6
    assert not re.search(r"(src|href)=|https?://|@import|<script", document)
    assert "Ledger of the fullest rank" in document


def test_other_efficiencies_give_other_times():
    slow = make_plan(
        ask(chip="950dt", mesh=on_950().best.choice.mesh, batch=32, max_len=16384, factors=Factors(memory=0.35))
    )
    assert slow.best.tpot > on_950().best.tpot
    with pytest.raises(ConfigError, match="--factor memroy=1: unknown; the nearest is 'memory', all are"):
        Factors.parse(["memroy=1"])
    with pytest.raises(ConfigError, match="a part, above 0 and at most 1"):
        Factors.parse(["memory=2"])


def test_the_fewest_devices_come_with_the_reason_why_fewer_do_not_do():
    plan = make_plan(ask("kimi-linear-48b", "a3", batch=1, max_len=8192))
    assert plan.devices == 2
    assert "shared out evenly, would not fit fewer" in plan.fewer or "of a die at least" in plan.fewer


def test_planning_imports_neither_torchair_nor_what_torch_takes_long_to_import():
    code = (
        "import sys; from tests.plan.test_search import ask; from kimi_graph.plan.search import make_plan\n"
        "make_plan(ask('kimi-linear-48b', 'a3', devices=2, batch=2)).text()\n"
        "assert not {'torchair', 'torch._dynamo', 'sympy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_tensor_across_hosts_shows_what_its_sums_cost_beside_those_within_one():
    text = spoken(make_plan(ask("kimi-linear-48b", mesh=Mesh(tensor=32), batch=8)))
    found = re.search(
        r"tensor 32 goes over package, host, network: .* ([\d.]+) us .*on network; of 16 in one host ([\d.]+) us", text
    )
    assert found and float(found[1]) > float(found[2])
    assert re.search(r"[\d.]+ a die, [\d.]+ a card of 2 with all stages busy", text)


def test_times_of_what_a_rank_has_no_room_for_say_so():
    plan = make_plan(ask("kimi-linear-48b", mesh=Mesh.parse("pp=2,tp=2"), batch=32))
    o, rows = plan.best, plan.base.rows
    assert o.lacks(rows, plan.base.max_len) == 0  # it was planned for
    one, more = (make_ledger(like(o.request, rows=n, max_len=1_048_576)) for n in (rows, 3 * rows))
    for ledger, lacks in ((one, o.lacks(rows, 1_048_576)), (more, o.lacks(3 * rows, 1_048_576))):
        full = max(
            s.total - s.of("states") + x.of("states") for s, x in zip(o.ledger.stages, ledger.stages, strict=True)
        )
        assert lacks == full - o.request.target.memory_bytes > 0
    text = plan.text()
    assert re.search(r"\n  32 +1,048,576 .*no room: [\d.]+ GiB too many", text)
    assert not re.search(r"\n  32 +4,096 .*no room", text)


def test_a_plan_has_sentences_within_100_columns_and_commands_in_one_line():
    for line in on_950().text().splitlines():
        ledger = line.startswith(("ledger", "weights", "states", "buffers", "all "))  # a column for each stage
        assert len(line) <= 100 or line.startswith("compile") or ledger, line


def test_dies_are_told_in_the_machines_that_they_are_had_in():
    a3, dt, superpod = (target(name) for name in ("a3", "950dt", "950-superpod"))
    assert [dies(n, a3) for n in (1, 2, 32)] == ["1 die", "2 dies (1 package)", "32 dies (2 hosts)"]
    assert [dies(12, dt), dies(64, superpod)] == ["12 dies", "64 dies"]


def test_the_fewest_dies_are_whole_packages_and_whole_hosts():
    a3, superpod, dt = (target(name) for name in ("a3", "a3-superpod", "950dt"))
    assert [whole_up(a3, n) for n in (1, 2, 15, 16, 17, 92)] == [2, 2, 16, 16, 32, 96]
    assert whole_up(superpod, 770) == 784 and [whole_up(dt, n) for n in (3, 9)] == [3, 16]


@pytest.mark.slow
def test_dies_that_could_only_be_had_one_by_one_are_told_apart():
    plan = make_plan(ask("kimi-k3.1-pro", "a3", max_len=1_000_000, batch=1))
    assert plan.devices % 16 == 0 and plan.bare < plan.devices
    text = spoken(plan)
    assert f"{plan.bare} dies would do, but dies of a3 come in packages of 2 and hosts of 16" in text


def test_so_many_dies_as_are_no_whole_hosts_are_evaluated_and_that_is_said():
    text = spoken(make_plan(ask("kimi-linear-48b", "a3", devices=20, batch=20)))
    assert "20 dies cannot be had alone: dies of a3 come in" in text and "the next whole number is 32" in text


@pytest.mark.parametrize("kind", ["context", "pad", "copies"])
def test_what_costs_something_beside_is_taken_or_not_with_a_reason(kind):
    assert re.match(
        r"(taken|not taken|traced|not traced|not tried|no |there are no|does not fit)", on_950().tried[kind]
    )


@pytest.mark.slow
def test_copies_of_experts_are_taken_where_the_busiest_rank_is_waited_for():
    plan = make_plan(ask("kimi-k3.1-pro", "a3-superpod", devices=768))
    assert plan.best.choice.copies and plan.tried["copies"].startswith("taken: ")
    others = [o for o in plan.options if o.choice.kind == "plain"]
    assert others and all(plan.best.ttft * plan.best.tpot < o.ttft * o.tpot for o in others)


@pytest.mark.slow
def test_context_parallelism_is_taken_where_rows_do_not_fill_the_ranks_of_a_long_prefill():
    plan = make_plan(ask("kimi-linear-48b", "a3-superpod", devices=256, batch=1, max_len=1_048_576))
    assert plan.best.choice.mesh.context > 1 and plan.tried["context"].startswith("taken: ")


# ---- refusals --------------------------------------------------------------------------------------------------------


def refusal(wanted: Ask) -> str:
    with pytest.raises(KimiGraphError) as caught:
        make_plan(wanted)
    return str(caught.value)


def test_k3_on_8_devices_of_64_gb_is_refused_with_its_bytes_and_the_smallest_fit():
    words = refusal(ask(devices=8))
    assert "needs 1,453.66 GiB of weights as released" in words and "there are 512.00 GiB" in words
    assert re.search(r"The smallest fit is \d+ dies", words)
    assert not TIMES.search(words)


def test_what_states_alone_make_too_large_is_refused_with_their_bytes_and_as_many_sequences_as_fit():
    words = refusal(ask("kimi-linear-48b", devices=4, batch=512, max_len=131_072))
    # 7 layers of 576 numbers of 2 bytes a token; 20 of 32 heads x 128 x 128 in float32 with windows of 3 x 12,288
    states = 512 * (131_072 * 7 * 576 * 2 + 20 * (32 * 128 * 128 * 4 + 3 * 12_288 * 2))
    found = re.search(r"([\d.,]+) GiB of states for 512 sequences of 131,072 tokens", words)
    assert found and float(found[1].replace(",", "")) == pytest.approx(states / 2**30, rel=1e-3)
    rows = re.search(r"As many dies hold \d+ sequences of 131,072 tokens: --batch (\d+), ", words)
    assert rows and make_plan(ask("kimi-linear-48b", devices=4, batch=int(rows[1]), max_len=131_072)).best.room > 0


@pytest.mark.parametrize(
    "devices, words",
    [
        (29, r"kimi-linear-48b cannot be on 29 dies: no mesh on which all sizes divide. .*--devices (28|27|26)\."),
        (8193, r"--devices 8,193: at most 8,192 are planned for"),
    ],
)
def test_numbers_of_dies_without_a_mesh_are_refused_with_the_nearest(devices, words):
    assert re.search(words, refusal(ask("kimi-linear-48b", devices=devices, batch=1)))


def test_tp64_is_refused_with_the_legal_degrees():
    words = refusal(ask(mesh=Mesh(tensor=64)))
    assert "heads=96 does not divide over 64" in words
    assert "Legal tp: 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96; nearest 48" in words


def test_64_ranks_are_fine_as_dp4_tp16():
    plan = make_plan(ask(chip="950dt", mesh=Mesh.parse("dp=4,tp=16"), batch=4, max_len=8192))
    assert plan.best.room > 0


@pytest.mark.parametrize(
    "given, words",
    [
        ({"batch": 31, "exchange": True}, r"--batch.* token=31 does not divide over 32"),
        ({"batch": 32, "page": 120}, r"--page 120: .*multiples of 16 up to 1,024"),
        ({"batch": 31, "mesh": Mesh.parse("dp=2,tp=16")}, r"batch=31 does not divide over 2"),
    ],
)
def test_rows_and_pages_that_cannot_be_are_refused(given, words):
    with pytest.raises((ShardingError, CompileError), match=words):
        make_plan(ask(chip="950dt", **{"mesh": Mesh.parse("tp=32"), "max_len": 4096} | given))


def test_batch_32_and_page_128_pass():
    plan = make_plan(ask(chip="950dt", mesh=Mesh.parse("tp=32"), batch=32, page=128, max_len=4096, exchange=True))
    assert plan.best.request.exchange


def test_a_length_is_rounded_to_whole_pages_and_one_over_the_limit_refused():
    whole = ask("kimi-linear-48b", mesh=Mesh(tensor=8), batch=1, max_len=1_000_000)
    assert "(1,000,064 in pages of 128)" in spoken(make_plan(whole))
    assert "(1,000,320 in pages of 384)" in spoken(make_plan(dataclasses.replace(whole, page=384)))
    shared = make_plan(dataclasses.replace(whole, split_cache=True))
    assert "(1,000,064 in pages of 128, 1,000,448 on the 8 ranks that share a sequence)" in spoken(shared)
    assert "found 1,048,577, expected 1 to 1,048,576" in refusal(ask(devices=128, max_len=1_048_577))


def test_times_that_cannot_be_kept_are_refused_with_what_can_be_asked_for():
    words = refusal(ask("kimi-linear-48b", devices=8, batch=8, tpot=1e-5))
    nearest = re.search(r"Nearest that can be asked for: --tpot (\d+)", words)
    assert nearest
    plan = make_plan(ask("kimi-linear-48b", devices=8, batch=8, tpot=int(nearest[1]) / 1e3))
    assert plan.best.tpot <= int(nearest[1]) / 1e3


@pytest.mark.slow
def test_more_devices_are_taken_until_times_are_kept_and_the_best_keeps_them():
    plan = make_plan(ask("kimi-linear-48b", batch=8, tpot=6e-3))
    assert plan.devices > 2 and plan.best.tpot <= 6e-3
    assert plan.fewer.endswith("no mesh keeps --tpot 6")


def test_within_a_host_no_smaller_number_of_dies_keeps_the_times():
    plan = make_plan(ask("kimi-linear-48b", "a2", batch=1, tpot=5e-3))
    assert plan.fewer == f"{plan.devices - 1}: no mesh keeps --tpot 5"
    refusal(ask("kimi-linear-48b", "a2", batch=1, tpot=5e-3, devices=plan.devices - 1))


def test_experts_of_one_exchange_stay_within_what_the_pair_takes():
    """896 experts with their copies are at most 1,024, their ranks at most 768 on A3."""
    wanted = ask("kimi-k3", "a3-superpod", devices=896, batch=896)
    sieve = Sieve(base_request(wanted), Factors())
    sent = [c for c in sieve.all_choices(896) if c.exchange]
    assert sent and all(c.mesh.experts <= 768 and 896 + c.copies <= 1024 for c in sent)


# ---- every mesh can be compiled --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name, devices", [("kimi-linear-48b", 4), ("kimi-k3.1-pro", 8)])
def test_every_mesh_that_a_plan_prints_compiles(host: Host, name, devices):
    plan = make_plan(small_ask(name, devices=devices, batch=8), traced=6)
    assert plan.options
    for o in plan.options:
        r = o.request
        compile_model(
            small_model(name), target=r.target, out=None, mesh=r.mesh, batch=r.rows, chunk=r.chunk, max_len=r.max_len,
            page=r.page, exchange=r.exchange, split_cache=r.split_cache, moe_chunks=o.choice.chunks, pad=r.pad,
            redundant_experts=o.choice.copies,
            weights_format=r.weights_format, phases=("prefill", "decode"), cache_dir=host.root.parent,
        )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name, chip", [("kimi-linear-48b", "a3"), ("kimi-k3", "950dt")])
def test_the_commands_that_a_plan_prints_run(host: Host, tmp_path, name, chip):
    """As they are printed, but for where the bundle goes: with --dry-run nothing is written."""
    fixture = make_fixture(load_config(name), tmp_path / "tiny", quantised=name == "kimi-k3")
    wanted = Ask(model=str(fixture.folder), config=load_config(str(fixture.folder)), target=target(chip), devices=4,
                 batch=8, max_len=256, page=16)  # fmt: skip
    text = make_plan(wanted).text()
    found = [line.removeprefix("compile   ") for line in text.splitlines() if line.startswith("compile   ")]
    assert len(found) == 2
    for line in found:
        words = shlex.split(line, comments=True)
        more = ["--dry-run", "--cache-dir", str(host.root.parent)]
        result = CliRunner().invoke(cli.app, [*words[1:], *more])
        assert words[0] == "kimi-graph" and result.exit_code == 0, result.output


def test_the_commands_name_a_folder_with_spaces_whole_and_write_beside_the_model_into_two_folders():
    text = make_plan(dataclasses.replace(small_ask("kimi-linear-48b", batch=2), model="build/my model")).text()
    words = [shlex.split(x, comments=True) for x in re.findall(r"^compile +(kimi-graph .*)$", text, re.M)]
    folders = [w[w.index("-o") + 1] for w in words]
    assert [w[2] for w in words] == ["build/my model"] * 2
    assert folders[1] == f"{folders[0]}-prefill" and folders[0].endswith("-a3")


@pytest.mark.slow
@pytest.mark.parametrize("devices, length", [(96, 1_048_576), (768, 4096)])
def test_every_choice_of_a_sieve_is_legal(devices, length):
    """What is tried for the full model passes all checks that compile makes before it traces."""
    wanted = ask("kimi-k3.1-pro", "a3-superpod", devices=devices, max_len=length)
    sieve = Sieve(base_request(wanted), Factors())
    found = list(sieve.all_choices(devices))
    for choice in found[::4]:
        sieve.request(choice).check()
    kinds = {"plain", "pad", "copies"} | ({"context"} if length > LONG else set())
    assert {choice.kind for choice in found} == kinds


def test_a_request_on_another_mesh_is_another_request():
    base = base_request(small_ask("kimi-linear-48b", batch=4))
    made = like(base, mesh=Mesh(tensor=2))
    assert made.layout is not None and base.layout is None and made.native == base.native
    assert dataclasses.replace(made, mesh=None) == base
    assert isinstance(base.config, ModelConfig) and str(Choice(mesh=Mesh(tensor=2), exchange=True)) == "tp=2 --exchange"


def test_what_does_not_fit_one_mesh_names_the_rank_and_what_it_holds():
    with pytest.raises(PlanError, match=r"does not fit pp=2,tp=16 of a3: a rank of stage \d needs .* of weights"):
        make_plan(ask(mesh=Mesh.parse("pp=2,tp=16"), batch=1))
