"""Attacks on both channels: measured by greedy decoding, gradients right, costs counted, controls that fail."""

import functools

import pytest
import torch
import torch.nn.functional as F

from families import attached, close, tokens
from sidestream import GoalConfig, LatentState, Window, attach
from sidestream.channels.codes import GoalCodes
from sidestream.evaluation.attacks import Cost, Objective
from sidestream.evaluation.attacks_text import OVERRIDES, TokenSearchConfig, insert, search_tokens
from sidestream.evaluation.attacks_vector import (
    EmbeddingConfig,
    PGDConfig,
    cross_codes,
    embedding_attack,
    interpolate,
    pgd,
    random_directions,
    relative_distance,
    swap,
    swap_order,
)
from sidestream.lm.decoding.decode import greedy
from sidestream.lm.models.backbones import Backbone
from sidestream.tasks import treasure

# ---------------------------------------------------------------- the objective


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("mode", ["static", "dynamic"])
def test_a_hit_is_what_generate_says(mode, window):
    model = attached("llama", mode)
    texts = [tokens(length, seed=length).tolist() for length in (4, 9, 12)]
    vectors = model.encode_goal(tokens(3, 3, seed=1)).goal
    said = []
    for row, text in enumerate(texts):
        out = model.generate(
            torch.tensor([text]),
            goal=LatentState(goal=vectors[row : row + 1]),
            window=None if window is None else Window(size=window, policy="reindex"),
            max_new_tokens=3,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        said.append(out[0, len(text) :].tolist())
    objective = Objective(model, said, window=window)
    assert objective.measure(texts, vectors).hit.tolist() == [True] * 3
    # Texts of 4, 9 and 12 tokens and 2 of the target: what fits into the window is one sequence, else one a token.
    assert objective.counts() == (3 if window is None else 1 + 3 + 3, 0)
    for place in range(3):  # the last token matters as much as the first
        wrong = [[(token + 1) % 97 if k == place else token for k, token in enumerate(row)] for row in said]
        assert not Objective(model, wrong, window=window).measure(texts, vectors).hit.any()
    assert not objective.measure(texts, -vectors).hit.all() and not objective.measure(texts).hit.all()


def test_a_row_is_measured_as_if_alone():
    model = attached("gpt2", "static")
    texts = [tokens(length, seed=length).tolist() for length in (3, 8, 11, 5)]
    targets = [[7], [8, 9, 10], [11, 12], [13]]
    vectors = model.encode_goal(tokens(4, 3)).goal
    together = Objective(model, targets, window=7).measure(texts, vectors)
    by_two = Objective(model, targets, window=7, batch_size=2).measure(texts, vectors)
    alone = [Objective(model, [targets[k]], window=7).measure([texts[k]], vectors[k : k + 1]).loss[0] for k in range(4)]
    close(together.loss, by_two.loss)
    close(together.loss, torch.stack(alone))
    again = Objective(model, targets, window=7).measure([texts[2], texts[2]], vectors[[2, 2]], rows=[2, 0])
    close(again.loss[0], together.loss[2])
    assert again.loss[1] != again.loss[0]


def test_a_bare_model_can_be_attacked_through_its_text():
    model = attached("llama", "static")
    texts, targets = tokens(2, 6).tolist(), [[5], [6]]
    closed = Objective(model, targets).measure(texts)
    bare = Objective(model.detach(), targets)
    close(bare.measure(texts).loss, closed.loss)
    with pytest.raises(ValueError, match="without a goal channel"):
        bare.measure(texts, torch.ones(2, 16))


@pytest.mark.parametrize(
    "family, mode, own", [("llama", "static", None), ("gemma3", "static", None), ("llama", "dynamic", False)]
)
def test_token_gradients_are_those_of_the_embeddings(family, mode, own):
    """Moving a token's embedding towards another's moves the loss as the gradient says, in decoder and encoder."""
    model = attached(family, mode, own_encoder=own).double()
    embedding = model.lm.get_input_embeddings()
    embedding.weight = torch.nn.Parameter(embedding.weight.detach().clone())  # the head of a tied model stays
    text = [3, 40, 9, 41, 42, 8]  # 9 and 8 are triggers; 40, 41 and 42 occur once
    objective = Objective(model, [[50, 51]], window=5)
    vectors = model.encode_goal([[4, 6]]).goal
    _, gradient = objective.token_gradient([text], vectors, [3], 2, [0])
    weight, step = embedding.weight, 1e-3
    for place, token, other in ((0, 41, 60), (1, 42, 77)):
        original, losses = weight[token].clone(), []
        for sign in (1, -1):
            with torch.no_grad():
                weight[token] = original + sign * step * weight[other]
            losses.append(float(objective.measure([text], vectors).loss))
        with torch.no_grad():
            weight[token] = original
        slope = (losses[0] - losses[1]) / (2 * step)
        assert abs(slope) > 1e-3
        assert float(gradient[0, place, other]) == pytest.approx(slope, rel=0.02, abs=1e-3)
    assert objective.backwards == 2 and all(parameter.grad is None for parameter in model.parameters())


def test_evicted_tokens_reach_a_dynamic_vector_only():
    texts, targets = [tokens(12).tolist()], [[50]]
    for mode, reaches in (("static", False), ("dynamic", True)):
        model = attached("llama", mode)
        vectors = model.encode_goal([[4, 6]]).goal
        config = TokenSearchConfig(length=3, steps=3, candidates=8, top_k=20, stop_at_hit=False)
        found = search_tokens(Objective(model, targets, window=5), texts, [1], config, vectors)
        assert bool(found.history[-1] < found.history[0] - 1e-3) is reaches
        found = search_tokens(Objective(model, targets, window=5), texts, [1], config)
        close(found.history[-1], found.history[0])  # with the channel closed nobody reads them


def test_asking_leaves_the_model_as_it_was():
    model = attached("gpt2", "static").train()
    hooks = len(model.lm.get_input_embeddings()._forward_hooks)
    objective = Objective(model, [[5]], penalty=lambda texts, vectors: torch.ones(len(texts)))
    vectors = model.encode_goal([[4]]).goal
    free = Objective(model, [[5]])
    close(objective.measure([[3, 4]], vectors).loss, free.measure([[3, 4]], vectors).loss + 1)
    said = greedy(model, [[3, 4]], new_tokens=1, window=9, goal=LatentState(goal=vectors))
    assert Objective(model, said).measure([[3, 4]], vectors).hit.all()
    noticed = Objective(model, said, penalty=objective.penalty)
    assert not noticed.measure([[3, 4]], vectors).hit.any()
    noticed.token_gradient([[3, 4]], vectors, [0], 1, [0])
    noticed.vector_gradient([[3, 4]], vectors)
    assert model.training and model.lm.training and len(model.lm.get_input_embeddings()._forward_hooks) == hooks
    assert all(parameter.grad is None for parameter in model.parameters())


def test_objectives_name_mistakes():
    model = attached("llama", "static")
    for targets in ([], [[5], []]):
        with pytest.raises(ValueError, match="target is empty"):
            Objective(model, targets)
    with pytest.raises(ValueError, match="window is 0"):
        Objective(model, [[5]], window=0)
    with pytest.raises(ValueError, match="2 texts, 1 vectors and 1 targets"):
        Objective(model, [[5]]).measure([[3], [4]], torch.ones(1, 16))
    with pytest.raises(ValueError, match="text is empty"):
        Objective(model, [[5]]).measure([[]])


# ---------------------------------------------------------------- override sentences


@pytest.mark.parametrize(
    "place, displaced, grown",
    [
        ("front", "XX234567??", "XX01234567??"),
        ("middle", "234XX567??", "0123XX4567??"),
        ("end", "234567XX??", "01234567XX??"),
        ("repeated", "XX6XX7XX??", "XX0123XX4567XX??"),
    ],
)
def test_where_overrides_stand(place, displaced, grown):
    context, override = [ord(c) for c in "01234567??"], [ord("X")] * 2
    for displace, wanted in ((True, displaced), (False, grown)):
        found = insert(context, override, place, tail=2, displace=displace)
        assert "".join(map(chr, found.ids)) == wanted
        assert all(list(found.ids[start : start + 2]) == override for start in found.starts)
        assert len(found.starts) == (3 if place == "repeated" else 1)


def test_overrides_stand_between_sentences():
    context = [ord(c) for c in "ab.cdef.g"]
    found = insert(context, [ord("X")], "middle", displace=False, sentence_ends={ord(".")})
    assert "".join(map(chr, found.ids)) == "ab.Xcdef.g"


def test_override_sentences_name_the_attackers_goal():
    fields = {"goal": "The passcode 4821 guards the golden key.", "trigger": treasure.TRIGGER, "answer": " 4821 key."}
    filled = {name: template.format(**fields) for name, template in OVERRIDES.items()}
    assert all("4821" in text and text[0] == " " for text in filled.values())
    assert len(set(filled.values())) == len(OVERRIDES)


def test_insert_names_mistakes():
    for given, words in (
        (([1, 2], [9], "back"), "place is 'back'"),
        (([1, 2], [], "end"), "nothing to insert"),
        (([1], [9, 9], "end"), "do not fit into 1"),
    ):
        with pytest.raises(ValueError, match=words):
            insert(*given)
    with pytest.raises(ValueError, match="tail is 3"):
        insert([1], [9], "end", tail=3)
    with pytest.raises(ValueError, match="at least 2"):
        insert([1] * 9, [9], "repeated", copies=1)


# ---------------------------------------------------------------- a trained model

VOCABULARY, GOALS, FILLERS, QUESTION = 64, range(2, 26), range(26, 60), 60


def draw(goals, seed):
    """Nine tokens: fillers, the goal at a random place, the question at the end."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(FILLERS.start, FILLERS.stop, (len(goals), 9), generator=generator)
    place = torch.randint(0, 8, (len(goals), 1), generator=generator)
    ids.scatter_(1, place, goals.unsqueeze(1))
    ids[:, -1] = QUESTION
    return ids


@functools.cache
def trained():
    """A model that must name the goal: with the channel closed the text's, with a vector the vector's, whatever the
    text says. Both channels have full authority, one at a time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        size = {"vocabulary": VOCABULARY, "window": 16, "pad_id": 0}
        lm, encoder = (Backbone(layers=2, width=32, heads=4, family="llama").build(**size) for _ in range(2))
        torch.nn.init.normal_(encoder.get_input_embeddings().weight, std=1.0)
        goal = GoalConfig(width=32, encoder_hidden=64, pool_layer=0)
        model = attach(lm, goal=goal, encoder=encoder)
        optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=7e-3)
        for step in range(130):
            wanted = torch.randint(GOALS.start, GOALS.stop, (2, 32))
            closed = model.hidden(draw(wanted[0], 2 * step))[:, -1]
            state = model.encode_goal(wanted[1].unsqueeze(1))
            steered = model.hidden(draw(wanted[1].flip(0), 2 * step + 1), goal=state)[:, -1]
            loss = F.cross_entropy(lm.get_output_embeddings()(torch.cat([closed, steered])), wanted.flatten())
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    return model.eval().requires_grad_(False)


@functools.cache
def scene():
    """16 honest texts and vectors of one goal a row, and the attacker's other goal."""
    goals = torch.arange(GOALS.start, GOALS.start + 16)
    order = swap_order(16, seed=0)
    others = goals[order]
    vectors = trained().encode_goal(goals.unsqueeze(1)).goal
    return draw(goals, 99).tolist(), vectors, goals.unsqueeze(1).tolist(), others.unsqueeze(1).tolist(), order


def rate(hit):
    return float(hit.float().mean())


@pytest.mark.slow
def test_the_trained_model_obeys_one_channel_at_a_time():
    texts, vectors, goals, others, _ = scene()
    honest, attacked = Objective(trained(), goals), Objective(trained(), others)
    assert rate(honest.measure(texts).hit) >= 0.9 and rate(honest.measure(texts, vectors).hit) == 1
    assert rate(attacked.measure(texts).hit) == rate(attacked.measure(texts, vectors).hit) == 0


def test_overrides_take_a_model_that_obeys_its_text_and_no_other():
    texts, vectors, _, others, _ = scene()
    attacked = [
        list(insert(text, other, "repeated", tail=1, displace=False).ids)
        for text, other in zip(texts, others, strict=True)
    ]
    objective = Objective(trained(), others)
    assert rate(objective.measure(attacked).hit) >= 0.5
    assert rate(objective.measure(attacked, vectors).hit) == 0


def placed():
    texts, vectors, _, others, _ = scene()
    return [[*text[:4], 30, 30, *text[4:]] for text in texts], vectors, others


def test_gcg_beats_random_search_of_the_same_cost():
    texts, _, others = placed()
    found = {}
    for proposal in ("gradient", "random"):
        config = TokenSearchConfig(
            length=2, steps=4, candidates=4, top_k=4, proposal=proposal, stop_at_hit=False, seed=1
        )
        found[proposal] = search_tokens(Objective(trained(), others), texts, [4] * 16, config)
    gcg, random = found["gradient"], found["random"]
    assert gcg.cost == Cost(steps=4, forwards=16 * 4 * 5, backwards=16 * 4)
    assert random.cost == Cost(steps=4, forwards=16 * 4 * 5)
    for attack in (gcg, random):
        assert attack.history.shape == (5, 16) and (attack.history.diff(dim=0) <= 0).all()
        close(attack.history[-1], attack.loss)
        close(Objective(trained(), others).measure(attack.texts).loss, attack.loss)  # the texts are those measured
        for text, before in zip(attack.texts, texts, strict=True):
            assert text[:4] + text[6:] == before[:4] + before[6:]  # nothing but the slots has changed
    assert gcg.loss.mean() < 0.5 * gcg.history[0].mean()
    assert gcg.loss.mean() < random.loss.mean() - 0.5
    assert rate(gcg.hit) > rate(random.hit)


def test_token_search_is_settled_by_its_seed():
    texts, _, others = placed()
    config = {"length": 2, "steps": 2, "candidates": 3, "proposal": "random", "allowed": tuple(FILLERS)}
    found = [
        search_tokens(Objective(trained(), others), texts, [4] * 16, TokenSearchConfig(seed=seed, **config))
        for seed in (0, 0, 1)
    ]
    assert found[0].texts == found[1].texts != found[2].texts
    assert all(token in FILLERS for text in found[0].texts for token in text[4:6])
    assert rate(found[0].hit) == 0  # fillers name no goal


def test_token_search_stops_at_a_hit_and_cannot_move_a_vector():
    texts, vectors, others = placed()
    config = TokenSearchConfig(length=2, steps=4, candidates=8, top_k=4)
    stopped = search_tokens(Objective(trained(), others), texts, [4] * 16, config)
    assert rate(stopped.hit) >= 0.25 and stopped.cost.forwards < 16 * 4 * 9
    held = search_tokens(Objective(trained(), others), texts, [4] * 16, config, vectors)
    assert rate(held.hit) == 0  # a vector with authority: the text attack fails
    with pytest.raises(ValueError, match="do not lie within"):
        search_tokens(Objective(trained(), others), texts, [10] * 16, config)


# ---------------------------------------------------------------- vectors


def test_swap_and_interpolation():
    texts, vectors, goals, others, order = scene()
    assert sorted(order) == list(range(16)) and all(row != other for row, other in enumerate(order))
    objective, honest = Objective(trained(), others), Objective(trained(), goals)
    swapped = swap(objective, texts, vectors[order])
    assert rate(swapped.hit) == 1 and swapped.cost == Cost(steps=1, forwards=16)
    along = [interpolate(objective, texts, vectors, vectors[order], t) for t in (0.0, 0.25, 0.75, 1.0)]
    assert rate(along[0].hit) == 0 and torch.equal(along[0].vectors, vectors)
    assert torch.equal(along[3].vectors, swapped.vectors)
    assert along[0].loss.mean() > along[1].loss.mean() > along[2].loss.mean() > along[3].loss.mean()
    assert rate(interpolate(honest, texts, vectors, vectors[order], 0.05).hit) == 1
    with pytest.raises(ValueError, match="t is 1.5"):
        interpolate(objective, texts, vectors, vectors, 1.5)
    with pytest.raises(ValueError, match="1 row cannot swap"):
        swap_order(1, 0)


def test_pgd_beats_random_directions_inside_its_ball():
    texts, vectors, _, others, _ = scene()
    losses = []
    for radius in (0.0, 0.3, 1.0):
        found = pgd(Objective(trained(), others), texts, vectors, PGDConfig(radius=radius, steps=12))
        assert (relative_distance(found.vectors, vectors) <= radius).all()
        assert found.cost == Cost(steps=12, forwards=16 * 13, backwards=16 * 12)
        again = Objective(trained(), others).measure(texts, found.vectors)
        close(again.loss, found.loss)
        assert torch.equal(again.hit, found.hit)
        losses.append(float(found.loss.mean()))
        drawn = random_directions(Objective(trained(), others), texts, vectors, radius=radius, tries=13)
        assert drawn.cost == Cost(steps=13, forwards=16 * 13)
        if radius:
            close(relative_distance(drawn.vectors, vectors), torch.full((16,), radius), 1e-4)
            assert found.loss.mean() < drawn.loss.mean() - 0.1
    assert losses[0] > losses[1] > losses[2]
    assert rate(found.hit) >= 0.4 > rate(drawn.hit) + 0.2
    honest = Objective(trained(), others).measure(texts, vectors)
    assert losses[0] == pytest.approx(float(honest.loss.mean()))


def test_an_attacker_who_has_the_encoder_starts_at_the_swap():
    texts, vectors, _, others, order = scene()
    found = {}
    for radius in (0.3, 3.0):
        config = PGDConfig(radius=radius, steps=2)
        for towards in (None, vectors[order]):
            attack = pgd(Objective(trained(), others), texts, vectors, config, towards=towards)
            assert (relative_distance(attack.vectors, vectors) <= radius).all()
            assert attack.cost.forwards == 16 * 3 * (1 if towards is None else 2)
            found[radius, towards is None] = rate(attack.hit)
    assert found[3.0, False] == 1 > found[3.0, True] and found[0.3, False] < 0.5


def test_pgd_starts_are_settled_by_the_seed():
    texts, vectors, _, others, _ = scene()
    found = [
        pgd(Objective(trained(), others), texts, vectors, PGDConfig(radius=0.5, steps=1, starts=starts, seed=seed))
        for starts, seed in ((1, 0), (3, 0), (3, 0), (3, 1))
    ]
    assert torch.equal(found[1].vectors, found[2].vectors) and not torch.equal(found[1].vectors, found[3].vectors)
    assert (found[1].hit | (found[1].loss <= found[0].loss)).all()
    assert found[1].cost.forwards == 3 * found[0].cost.forwards


def test_the_unbounded_attack_says_anything():
    texts, vectors, _, others, _ = scene()
    config = EmbeddingConfig(steps=80, learning_rate=0.1)
    found = embedding_attack(Objective(trained(), others), texts, vectors, config)
    assert rate(found.hit) >= 0.6 and found.cost == Cost(steps=80, forwards=16 * 81, backwards=16 * 80)
    few = [embedding_attack(Objective(trained(), others), texts, vectors, EmbeddingConfig(steps=3)) for _ in range(2)]
    assert torch.equal(few[0].vectors, few[1].vectors) and rate(few[0].hit) < 0.5


def test_a_closed_channel_cannot_be_attacked_by_its_vector():
    """The control: FiLM at its zero start has no gradient, and every vector leaves the loss where it was."""
    model = attached("llama", "static")
    torch.nn.init.zeros_(model.channel.film.projection.weight)
    texts, targets, vectors = tokens(3, 6).tolist(), [[50], [51], [52]], torch.ones(3, 16)
    before = Objective(model, targets).measure(texts, vectors).loss
    for found in (
        pgd(Objective(model, targets), texts, vectors, PGDConfig(radius=1.0, steps=2)),
        embedding_attack(Objective(model, targets), texts, vectors, EmbeddingConfig(steps=2)),
        swap(Objective(model, targets), texts, -vectors),
    ):
        close(found.loss, before)
        assert not found.vectors.isnan().any()


def test_a_dynamic_channel_is_attacked_at_its_start():
    model = attached("llama", "dynamic")
    texts, targets = tokens(4, 12).tolist(), tokens(4, 1, seed=3).tolist()
    vectors = model.encode_goal(tokens(4, 3, seed=1)).goal
    objective = Objective(model, targets, window=5)
    found = pgd(objective, texts, vectors, PGDConfig(radius=0.5, steps=5))
    drawn = random_directions(Objective(model, targets, window=5), texts, vectors, radius=0.5, tries=6)
    assert found.loss.mean() < drawn.loss.mean() < objective.measure(texts, vectors).loss.mean()


# ---------------------------------------------------------------- attacks that know the defence


def test_snapping_stops_what_does_not_know_it():
    texts, vectors, goals, others, _ = scene()
    codes = GoalCodes(vectors)
    radius = 0.9 * float((codes.margin(vectors) / vectors.norm(dim=1)).min())
    blind = pgd(Objective(trained(), others), texts, vectors, PGDConfig(radius=1.0, steps=8))
    near = into_margin(blind.vectors, vectors, radius)
    defended = Objective(trained(), others, defence=codes)
    assert rate(defended.measure(texts, near).hit) == 0
    assert rate(Objective(trained(), goals, defence=codes).measure(texts, near).hit) == 1  # and nothing is lost
    # Inside the certified radius no attack gets through, whatever it knows.
    for found in (
        pgd(defended, texts, vectors, PGDConfig(radius=radius, steps=4, starts=2)),
        cross_codes(defended, texts, vectors, codes, torch.tensor(scene()[4]), radius=radius),
    ):
        assert rate(found.hit) == 0
        close(found.loss, defended.measure(texts, vectors).loss)


def into_margin(attacked, vectors, radius):
    return vectors + (attacked - vectors) * radius / relative_distance(attacked, vectors).unsqueeze(1)


def test_attacks_that_know_the_codes_cross_to_them():
    texts, vectors, _, others, order = scene()
    codes = GoalCodes(vectors)
    defended = Objective(trained(), others, defence=codes)
    crossed = cross_codes(defended, texts, vectors, codes, torch.tensor(order), radius=3.0)
    assert rate(crossed.hit) == 1 and crossed.cost == Cost(steps=2, forwards=32)
    climbed = pgd(defended, texts, vectors, PGDConfig(radius=1.5, steps=12))
    assert climbed.loss.mean() < defended.measure(texts, vectors).loss.mean() - 0.5
    # The control: with the gradient of the true, piecewise constant, snapping nothing moves.
    masked = Objective(trained(), others, defence=lambda v: codes(v.detach()) + 0 * v)
    stuck = pgd(masked, texts, vectors, PGDConfig(radius=1.5, steps=3))
    assert torch.equal(stuck.vectors, vectors)
