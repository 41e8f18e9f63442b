"""Checks of weights: engines of any split and fusion that hold what was sent pass, all others are named."""

import pytest
import torch

from trainermon.rl import names
from trainermon.rl.digest import WeightDigest, digest_tensors
from trainermon.rl.files import read_held, read_sent, sent_versions, write_digest
from trainermon.rl.holding import hold
from trainermon.rl.weights import check_weights, wholes_of

HEADS, KV_HEADS, SIZE, HIDDEN, VOCAB = 8, 2, 16, 64, 50


def weights(seed=0, *, tied=False):
    torch.manual_seed(seed)
    layer = {
        "self_attn.q_proj.weight": (HEADS * SIZE, HIDDEN),
        "self_attn.k_proj.weight": (KV_HEADS * SIZE, HIDDEN),
        "self_attn.v_proj.weight": (KV_HEADS * SIZE, HIDDEN),
        "self_attn.q_proj.bias": (HEADS * SIZE,),
        "self_attn.k_proj.bias": (KV_HEADS * SIZE,),
        "self_attn.v_proj.bias": (KV_HEADS * SIZE,),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * SIZE),
        "mlp.gate_proj.weight": (96, HIDDEN),
        "mlp.up_proj.weight": (96, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, 96),
        "input_layernorm.weight": (HIDDEN,),
    }
    shapes = {f"model.layers.{n}.{name}": shape for n in range(2) for name, shape in layer.items()}
    found = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    found["model.embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN).bfloat16()
    found["lm_head.weight"] = found["model.embed_tokens.weight"] if tied else torch.randn(VOCAB, HIDDEN).bfloat16()
    return found


def engine_rank(sent, rank, size, *, vocab=VOCAB):
    """Yield what rank `rank` of `size` of an engine holds: fused, split by rows or columns, the vocabulary padded."""
    kv_copies = max(1, size // KV_HEADS)
    for name, tensor in sent.items():
        if ".q_proj." in name:
            parts = [tensor.chunk(size)[rank]]
            parts += [
                sent[name.replace("q_proj", p)].chunk(size // kv_copies)[rank // kv_copies]
                for p in ("k_proj", "v_proj")
            ]
            yield name.replace("q_proj", "qkv_proj"), torch.cat(parts)
        elif ".gate_proj." in name:
            yield (
                name.replace("gate_proj", "gate_up_proj"),
                torch.cat([tensor.chunk(size)[rank], sent[name.replace("gate", "up")].chunk(size)[rank]]),
            )
        elif "o_proj" in name or "down_proj" in name:
            yield name, tensor.chunk(size, dim=1)[rank]
        elif "embed" in name or "lm_head" in name:
            padded = torch.cat([tensor, torch.zeros(vocab - VOCAB, HIDDEN).bfloat16()])
            yield name, padded.chunk(size)[rank]
        elif not any(part in name for part in ("k_proj", "v_proj", "up_proj")):
            yield name, tensor


def check(sent, held, *, size=1, version=1, older=(), vocab=VOCAB, knows_sent=True):
    """Return the check of an engine that holds `held`, against what was sent."""
    whole = wholes_of([WeightDigest(version=version, tensors=digest_tensors(sent))])
    ranks = [
        hold(
            engine_rank(held, rank, size, vocab=vocab),
            version=version,
            name_map=names.hf_to_vllm,
            sent=whole if knows_sent else None,
            shard=rank,
            num_shards=size,
        )
        for rank in range(size)
    ]
    before = {v: wholes_of([WeightDigest(version=v, tensors=digest_tensors(w))]) for v, w in older}
    return check_weights(version, whole, {"vllm": wholes_of(ranks)}, name_map=names.hf_to_vllm, others=before)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("vocab", [VOCAB, 64])
def test_what_was_sent_is_found_in_any_split(size, vocab):
    if vocab % size:
        pytest.skip("engines pad the vocabulary to a multiple of their ranks")
    sent = weights()

    found = check(sent, sent, size=size, vocab=vocab)

    assert found.is_equal, found
    assert (found.equal, found.unexpected) == (len(sent), ())


def test_fused_tensors_are_compared_as_sums_where_what_was_sent_is_not_known():
    sent = weights()

    found = check(sent, sent, knows_sent=False)

    assert found.is_equal
    assert set(found.unordered) == {name for name in sent if names.hf_to_vllm(name) != name}
    assert "folder=" in found.advice


@pytest.mark.parametrize("knows_sent", [True, False])
@pytest.mark.parametrize("order", [sorted, lambda found: sorted(found, reverse=True)])
def test_the_order_of_sending_does_not_matter(order, knows_sent):
    sent = weights()

    found = check({name: sent[name] for name in order(sent)}, sent, size=2, knows_sent=knows_sent)

    assert found.is_equal, found.differing


EXPERTS = 12


def experts():
    """Return the tensors of experts one by one, in the order of their names as texts, which is not that of numbers."""
    torch.manual_seed(5)
    shapes = {"gate_proj": (6, 8), "up_proj": (6, 8), "down_proj": (8, 6)}
    found = {
        f"model.layers.0.mlp.experts.{number}.{part}.weight": torch.randn(shape).bfloat16()
        for number in range(EXPERTS)
        for part, shape in shapes.items()
    }
    return dict(sorted(found.items()))


def stacked(of, rank=0, size=1, *, by_expert=False):
    """Return w13 and w2 as an engine's rank holds them: a share of each expert, or whole experts."""

    def part(number, name, dim):
        tensor = of[f"model.layers.0.mlp.experts.{number}.{name}.weight"]
        return tensor if by_expert else tensor.chunk(size, dim)[rank]

    numbers = range(rank * EXPERTS // size, (rank + 1) * EXPERTS // size) if by_expert else range(EXPERTS)
    w13 = [torch.cat([part(number, "gate_proj", 0), part(number, "up_proj", 0)]) for number in numbers]
    return {
        "model.layers.0.mlp.experts.w13_weight": torch.stack(w13),
        "model.layers.0.mlp.experts.w2_weight": torch.stack([part(number, "down_proj", 1) for number in numbers]),
    }


def exchanged(of, one, other):
    """Return tensors of which those whose names hold `one` and `other` have changed places."""
    place = {name: name.replace(one, "@").replace(other, one).replace("@", other) for name in of}
    return {name: of[place[name]] for name in of}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("by_expert", [False, True])
@pytest.mark.parametrize("pair", [None, (".2.", ".10."), ("gate", "up")])
def test_experts_and_their_halves_have_places_in_stacked_weights(size, by_expert, pair):
    sent = experts()
    held = exchanged(sent, *pair) if pair else sent
    whole = wholes_of([WeightDigest(version=1, tensors=digest_tensors(sent))])
    ranks = [
        hold(stacked(held, rank, size, by_expert=by_expert), version=1, name_map=names.hf_to_vllm, sent=whole,
             shard=rank, num_shards=size)
        for rank in range(size)
    ]  # fmt: skip

    found = check_weights(1, whole, {"vllm": wholes_of(ranks)}, name_map=names.hf_to_vllm, others={})

    assert {each.name for each in found.differing} == {name for name in sent if pair and held[name] is not sent[name]}
    assert (found.unordered, found.missing, found.unexpected) == ((), (), ())


def test_halves_in_each_others_place_within_stacked_experts_are_seen():
    sent = stacked(experts())
    name = "model.layers.0.mlp.experts.w13_weight"
    held = {**sent, name: sent[name].roll(6, 1)}
    transposed = {**sent, name: sent[name].transpose(1, 2).contiguous()}
    whole = wholes_of([WeightDigest(version=1, tensors=digest_tensors(sent))])
    engines = {
        name: wholes_of([hold(tensors, version=1, sent=whole)])
        for name, tensors in {"swapped": held, "transposed": transposed}.items()
    }

    found = check_weights(1, whole, engines, name_map=names.same, others={})

    assert [(each.name, each.engine) for each in found.differing] == [(name, "swapped")]
    of_transposed = check_weights(1, whole, {"t": engines["transposed"]}, name_map=names.same, others={})
    assert (of_transposed.differing, of_transposed.unordered) == ((), (name,))


def test_a_version_that_is_newer_than_the_counter_says_is_named():
    old, new = weights(1), weights(2)

    differing = check(old, new, version=0, older=[(1, new)]).differing

    assert {(each.version, each.found) for each in differing} == {(1, "already those of version 1")}


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", sorted(weights()))
def test_one_changed_element_is_named(size, name):
    sent, held = weights(), weights()
    held[name] = held[name].clone()
    held[name].view(torch.int16).view(-1)[5] ^= 1

    found = check(sent, held, size=size, vocab=52)

    assert [each.name for each in found.differing] == [name]
    assert not found.is_equal


@pytest.mark.parametrize("knows_sent", [True, False])
def test_k_and_v_in_each_others_place_are_seen_where_places_are_known(knows_sent):
    sent, held = weights(), weights()
    k, v = "model.layers.1.self_attn.k_proj.weight", "model.layers.1.self_attn.v_proj.weight"
    held[k], held[v] = held[v], held[k]

    found = check(sent, held, knows_sent=knows_sent)

    assert [each.name for each in found.differing] == ([k, v] if knows_sent else [])


def test_heads_in_another_order_are_seen():
    sent, held = weights(), weights()
    name = "model.layers.0.self_attn.q_proj.weight"
    held[name] = held[name].view(HEADS, SIZE, HIDDEN).flip(0).reshape(HEADS * SIZE, HIDDEN)

    (difference,) = check(sent, held, size=2, vocab=52).differing

    assert (difference.name, difference.found) == (name, "the same numbers in rows of another order")


def test_the_version_that_an_engine_still_has_is_said():
    old, new = weights(1), weights(2)
    held = {**new, "model.layers.1.mlp.down_proj.weight": old["model.layers.1.mlp.down_proj.weight"]}

    (difference,) = check(new, held, version=12, older=[(9, old), (11, weights(3))]).differing

    assert (difference.version, difference.found) == (9, "still those of version 9")


def test_missing_and_unexpected_names_are_listed():
    sent = weights()
    held = {name: tensor for name, tensor in sent.items() if "layers.1.mlp.down" not in name} | {"extra": torch.ones(3)}

    found = check(sent, held)

    assert (found.missing, found.unexpected) == (("model.layers.1.mlp.down_proj.weight",), ("extra",))
    assert not found.is_equal


def test_a_tied_output_layer_may_be_missing():
    sent = weights(tied=True)

    assert check(sent, {name: tensor for name, tensor in sent.items() if name != "lm_head.weight"}).is_equal


def test_an_output_layer_that_is_not_tied_may_not_be_missing():
    sent = weights()

    assert check(sent, {n: t for n, t in sent.items() if n != "lm_head.weight"}).missing == ("lm_head.weight",)


@pytest.mark.parametrize("knows_sent", [True, False])
def test_tensors_of_another_type_are_not_called_different(knows_sent):
    sent = weights()
    held = {name: tensor.float() for name, tensor in sent.items()}

    found = check(sent, held, knows_sent=knows_sent)

    assert (found.equal, found.differing, found.has_difference, found.is_equal) == (0, (), False, False)
    assert sorted(found.uncompared) == sorted(sent)
    assert found.advice.endswith('rl.Watch(dtype="float32")')


def test_tensors_of_another_type_do_not_hide_what_is_known_of_the_others():
    sent = weights()
    norm, zeros, moved = (
        "model.layers.0.input_layernorm.weight",
        "lm_head.weight",
        "model.layers.1.mlp.down_proj.weight",
    )
    held = {**sent, norm: sent[norm].float(), zeros: torch.zeros(VOCAB, HIDDEN), moved: sent[moved].flip(0)}

    found = check(sent, held)

    assert {each.name: each.found for each in found.differing} == {
        zeros: "all zeros",
        moved: "the same numbers in rows of another order",
    }
    assert (found.uncompared, found.uncompared_types, found.equal) == ((norm,), ("float32",), len(sent) - 3)


def test_every_tensor_is_counted_once_however_many_engines_hold_another_one():
    names_sent = "qkvab"
    sent = {name: torch.randn(4, 4).bfloat16() for name in names_sent}
    whole = wholes_of([WeightDigest(version=1, tensors=digest_tensors(sent))])
    stale = {"qkv": torch.randn(12, 4).bfloat16(), "a": torch.randn(4, 4).bfloat16(), "b": sent["b"]}
    other_type = {"qkv": torch.randn(12, 4), "a": torch.randn(4, 4), "b": sent["b"]}
    engines = {
        name: wholes_of([WeightDigest(version=1, tensors=digest_tensors(held))])
        for name, held in {"1": stale, "2": stale, "3": other_type}.items()
    }

    found = check_weights(1, whole, engines, name_map=lambda name: "qkv" if name in "qkv" else name, others={})

    assert [each.name for each in found.differing] == ["q + k + v", "a"] * 2
    assert (found.equal, found.num_tensors) == (1, len(names_sent))


def test_a_check_that_saw_no_tensor_does_not_pass():
    whole = wholes_of([])

    assert not check_weights(1, whole, {"vllm": {}}, name_map=names.same, others={}).is_equal


def test_digests_come_back_from_files_and_old_ones_go(tmp_path):
    sent = digest_tensors(weights())
    for version in range(12):
        write_digest(tmp_path, WeightDigest(version=version, tensors=sent))
        write_digest(tmp_path, WeightDigest(version=version, tensors=sent, engine="v/llm 3", shard=1, num_shards=2))

    assert read_sent(tmp_path, 11) == [WeightDigest(version=11, tensors=sent)]
    assert read_held(tmp_path, 11)["v/llm 3"][0].tensors == sent
    assert sent_versions(tmp_path) == list(range(4, 12))


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("module.model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.qkv_proj.weight"),
        ("_fsdp_wrapped_module.model.0._fsdp_wrapped_module.mlp.up_proj.weight", "model.0.mlp.gate_up_proj.weight"),
        ("model.layers.3.mlp.experts.17.down_proj.weight", "model.layers.3.mlp.experts.w2_weight"),
        ("model.layers.3.mlp.experts.17.up_proj.weight", "model.layers.3.mlp.experts.w13_weight"),
        ("_orig_mod.model.norm.weight", "model.norm.weight"),
        ("base_model.model.model.0.attn.k_proj.base_layer.weight", "model.0.attn.qkv_proj.weight"),
    ],
)  # fmt: skip
def test_names_lose_their_wrappers_and_are_fused(name, engine):
    assert names.hf_to_vllm(name) == engine
