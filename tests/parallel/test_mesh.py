"""The mesh as a value: what it is parsed from, its axes, and which ranks stand together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_graph.errors import ShardingError
from kimi_graph.parallel.mesh import FLAGS, Mesh, divisors, nearest

sizes = st.sampled_from([1, 2, 3, 4, 6])


@st.composite
def meshes(draw) -> Mesh:
    whole = Mesh(pipe=draw(sizes), data=draw(sizes), context=draw(sizes), tensor=draw(sizes))
    return Mesh(
        pipe=whole.pipe,
        data=whole.data,
        context=whole.context,
        tensor=whole.tensor,
        experts=draw(st.sampled_from(whole.expert_sizes)),
    )


@given(meshes())
def test_a_mesh_is_parsed_from_its_own_text(mesh):
    assert Mesh.parse(str(mesh)) == mesh
    assert hash(Mesh.parse(str(mesh))) == hash(mesh)


@given(meshes())
def test_atomic_axes_multiply_to_the_sizes_that_were_asked_for(mesh):
    for name in FLAGS.values():
        assert mesh.size(mesh.atoms(name)) == getattr(mesh, name)
    assert mesh.world == mesh.size(tuple(mesh.axes))


@given(meshes(), st.data())
def test_groups_share_out_all_ranks_and_differ_along_their_axes_alone(mesh, data):
    axes = tuple(data.draw(st.permutations(list(mesh.axes))))[: data.draw(st.integers(0, len(mesh.axes)))]
    groups = mesh.groups(axes)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.world))
    for group in groups[:3]:
        assert [mesh.index(rank, axes) for rank in group] == list(range(mesh.size(axes)))
        rest = [{a: at for a, at in mesh.coordinates(rank).items() if a not in axes} for rank in group]
        assert all(place == rest[0] for place in rest)


def test_tensor_neighbours_are_neighbouring_ranks_and_stages_are_ranges():
    mesh = Mesh.parse("pp=2,dp=2,tp=4")
    assert mesh.groups(["tensor"])[0] == [0, 1, 2, 3]
    assert mesh.groups(["pipe"])[0] == [0, 8]
    assert mesh.coordinates(13) == {"pipe": 1, "data": 1, "context": 1 - 1, "tensor": 1}
    assert str(mesh.stage) == "dp=2,tp=4"


@pytest.mark.parametrize(
    "text, axes, experts",
    [
        ("dp=4,tp=8", {"pipe": 1, "data": 4, "context": 1, "tensor": 8}, ("data", "tensor")),
        ("tp=8,ep=8", {"pipe": 1, "data": 1, "context": 1, "tensor": 8}, ("data", "tensor")),
        ("dp=4,tp=8,ep=8", {"pipe": 1, "data": 4, "context": 1, "tensor": 8}, ("tensor",)),
        ("dp=4,tp=8,ep=1", {"pipe": 1, "data": 4, "context": 1, "tensor": 8}, ()),
        (
            "dp=4,cp=2,tp=8,ep=16",
            {"pipe": 1, "data_outer": 2, "data_inner": 2, "context": 2, "tensor": 8},
            ("data_inner", "tensor"),
        ),
        (
            "dp=4,tp=8,ep=2",
            {"pipe": 1, "data": 4, "context": 1, "tensor_outer": 4, "tensor_inner": 2},
            ("tensor_inner",),
        ),
    ],
)
def test_experts_take_the_inner_part_of_data_x_tensor_and_split_an_axis_where_they_must(text, axes, experts):
    mesh = Mesh.parse(text)
    assert list(mesh.axes.items()) == list(axes.items())
    assert tuple(a for a in mesh.atoms("experts") if mesh.axes[a] > 1) == tuple(a for a in experts if axes[a] > 1)


def test_experts_take_all_of_data_x_tensor_unless_told():
    assert Mesh.parse("dp=4,tp=8") == Mesh.parse("tp=8,dp=4,ep=32")
    assert str(Mesh.parse("dp=4,tp=8,ep=32")) == "dp=4,tp=8"
    assert Mesh.parse("pipe=2, tensor=4") == Mesh.parse("pp=2,tp=4")


@pytest.mark.parametrize(
    "text, words",
    [
        ("sp=2", "unknown axis 'sp'; there are pp (pipe), dp (data)"),
        ("tp=0", "expected tp=N with N of 1 or more"),
        ("tp=-2", "expected tp=N"),
        ("tp=²", "expected tp=N"),
        ("tp", "expected tp=N"),
        ("tp=2,tensor=2", "tensor is given twice"),
        ("", "names no axis"),
        ("dp=2,tp=6,ep=4", "Legal: 1, 2, 3, 6, 12; nearest 3"),
        ("tp=8,ep=16", "nearest 8"),
        ("dp=1000000,tp=2", "2,000,000 ranks, at most 1,048,576"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused_in_plain_words(text, words):
    with pytest.raises(ShardingError) as e:
        Mesh.parse(text)
    assert words in str(e.value)
    assert "\n" not in str(e.value)


def test_a_size_below_one_and_a_rank_outside_are_refused():
    with pytest.raises(ShardingError, match="dp=0, expected 1 or more"):
        Mesh(data=0)
    with pytest.raises(ShardingError, match="there are 0 to 3"):
        Mesh(tensor=4).coordinates(4)
    with pytest.raises(ShardingError, match="no axis 'sequence'"):
        Mesh(tensor=4).atoms("sequence")


@given(st.integers(1, 5000))
def test_divisors_are_those_that_divide(n):
    assert divisors(n) == [d for d in range(1, n + 1) if n % d == 0]


def test_the_nearest_of_two_is_the_smaller():
    assert nearest(64, divisors(96)) == 48
    assert nearest(5, [4, 6]) == 4
