import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trainermon.core.values import Coordinates
from trainermon.exporters.prometheus.budget import REST, SeriesBudget, outermost, roll_up, share

parts = st.sampled_from(["h", "0", "1", "2", "10", "attn", "mlp", "w", ""])
names = st.lists(parts, min_size=1, max_size=5).map(".".join)
trees = st.dictionaries(names, st.integers(0, 1_000_000), max_size=40)


def llama(num_layers: int) -> dict[str, int]:
    """Names and sizes of a Llama with `num_layers`; 80 layers are the 723 tensors of the 70 B model."""
    sizes = {f"self_attn.{name}_proj.weight": 8192 * 8192 for name in "qkvo"}
    sizes |= {f"mlp.{name}_proj.weight": 8192 * 28672 for name in ("gate", "up", "down")}
    sizes |= {"input_layernorm.weight": 8192, "post_attention_layernorm.weight": 8192}
    layers = {f"model.layers.{i}.{name}": size for i in range(num_layers) for name, size in sizes.items()}
    return {"model.embed_tokens.weight": 128256 * 8192, **layers, "model.norm.weight": 8192, "lm_head.weight": 1 << 30}


@given(trees, st.integers(0, 50))
def test_roll_up_keeps_to_the_limit_and_loses_no_name(elements: dict[str, int], limit: int):
    labels = roll_up(elements, limit)

    assert len(set(labels.values())) <= limit
    assert set(labels) == (set(elements) if limit else set())


@given(trees, st.integers(1, 50), st.randoms())
def test_roll_up_does_not_depend_on_the_order_of_registration(elements: dict[str, int], limit: int, random):
    shuffled = list(elements.items())
    random.shuffle(shuffled)

    assert roll_up(dict(shuffled), limit) == roll_up(elements, limit)


@given(trees, st.integers(1, 50))
@example(dict.fromkeys(("h", "h.h", "h.0", "0.h", "1.0", "0", "1", "2", "1.1"), 0), 8)
def test_a_label_is_the_name_a_parent_a_range_or_the_rest(elements: dict[str, int], limit: int):
    for name, label in roll_up(elements, limit).items():
        parent, _, last = label.rpartition(".")
        is_parent = name == label or name.startswith(f"{label}.")
        is_range = "-" in last and name.startswith(f"{parent}.")
        assert is_parent or is_range or label == REST


def test_all_names_are_shown_when_they_fit():
    elements = llama(2)

    assert roll_up(elements, len(elements)) == {name: name for name in elements}


def test_modules_are_merged_to_one_depth_as_deep_as_fits():
    labels = roll_up({f"h.{i}.{module}.{end}": 1 for i in range(4) for module in ("a", "b") for end in "wb"}, 8)

    assert set(labels.values()) == {f"h.{i}.{module}" for i in range(4) for module in ("a", "b")}


def test_what_is_left_shows_the_largest_in_more_detail():
    elements = {f"h.{i}.{end}": 10 + i for i in range(4) for end in "wb"}

    labels = set(roll_up(elements, 6).values())

    assert labels == {"h.0", "h.1", "h.2.w", "h.2.b", "h.3.w", "h.3.b"}


def test_layers_that_do_not_fit_become_ranges_over_the_whole_depth():
    labels = list(dict.fromkeys(roll_up(llama(80), 23).values()))

    ranges = [f"model.layers.{i}-{i + 3}" for i in range(0, 80, 4)]
    assert labels == ["model.embed_tokens.weight", *ranges, "model.norm.weight", "lm_head.weight"]
    assert roll_up(dict(reversed(llama(80).items())), 23) == roll_up(llama(80), 23)


def test_members_of_a_too_wide_top_level_are_the_largest_and_the_rest():
    labels = roll_up({"a": 1, "b": 5, "c": 3, "d": 4}, 3)

    assert labels == {"a": REST, "b": "b", "c": REST, "d": "d"}


def test_a_name_that_is_also_a_module_keeps_its_own_place():
    labels = roll_up({"h": 1, "h.a": 1, "h.b.w": 1, "h.b.x": 1}, 3)

    assert labels == {"h": "h", "h.a": "h.a", "h.b.w": "h.b", "h.b.x": "h.b"}


@given(st.sets(names, max_size=40), st.integers(0, 50))
def test_outermost_keeps_to_the_limit_and_prefers_shallow_names(given_names: set[str], limit: int):
    chosen = outermost(given_names, limit)

    assert len(chosen) <= limit
    assert set(chosen) <= given_names
    deepest = max((name.count(".") for name in chosen), default=math.inf)
    assert all(name in chosen for name in given_names if name.count(".") < deepest or len(given_names) <= limit) or (
        limit == 0
    )


def test_outermost_spaces_the_layers_that_it_keeps_evenly():
    assert outermost((f"h.{i}" for i in range(12)), 4) == ["h.0", "h.3", "h.6", "h.9"]


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 500), max_size=12), st.integers(0, 400))
def test_shares_are_fair_and_use_what_there_is(demands: dict[str, int], limit: int):
    granted = share(demands, limit)

    assert granted.keys() == demands.keys()
    assert sum(granted.values()) == min(limit, sum(demands.values()))
    cut = [granted[name] for name in demands if granted[name] < demands[name]]
    assert all(granted[name] <= min(cut, default=500) + 1 for name in demands)


@pytest.mark.parametrize(
    ("world_size", "local_world_size", "expected"),
    [(1, 1, 250), (8, 8, 293), (64, 64, 77), (1024, 8, 90), (4096, 8, 17), (100_000, 8, 0)],
)
def test_a_rank_bears_its_part_of_the_job_the_node_and_the_agent(world_size, local_world_size, expected):
    place = Coordinates(world_size=world_size, local_world_size=local_world_size)

    assert SeriesBudget().of_rank(place, node_series=50) == expected


@given(st.integers(1, 1500), st.integers(1, 128), st.integers(0, 60))
def test_nodes_and_jobs_stay_within_their_limits(num_nodes: int, local_world_size: int, node_series: int):
    budget = SeriesBudget()
    place = Coordinates(world_size=num_nodes * local_world_size, local_world_size=local_world_size)

    of_node = local_world_size * budget.of_rank(place, node_series=node_series) + node_series

    assert of_node <= max(budget.per_node, node_series)
    assert of_node * num_nodes <= budget.per_job or of_node == node_series


def test_ranks_that_the_launcher_did_not_announce_count_too():
    place = Coordinates(world_size=1, local_world_size=1)

    assert SeriesBudget(per_node=100).of_rank(place, node_series=0, num_local=10) == 10
