"""The curriculum and training of latent reasoning: rows, schedules, resets, resume, and that each method can learn."""

import gc
import json
import random
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from sidestream.evaluation.latent import batches, generate_answers
from sidestream.lm.attach import attach
from sidestream.lm.decoding.layout import UNSCORED, Layout
from sidestream.lm.decoding.passes import PassConfig, latent_passes
from sidestream.lm.models.backbones import Backbone
from sidestream.papers.agclr.settings import ARMS
from sidestream.papers.agclr.work import TextForm
from sidestream.tasks.hops import HopsConfig, problems, words
from sidestream.training import loop as loop_module
from sidestream.training.curriculum import (
    Curriculum,
    CurriculumRows,
    Problem,
    collator,
    latent_row,
    plain_row,
    prompt,
)
from sidestream.training.latent import LatentLM, StepDecoder, train_curriculum
from sidestream.training.loop import LoopConfig


@pytest.fixture(scope="module", autouse=True)
def frozen():
    """Every call's Trainer collects garbage; what the libraries hold need not be looked at each time."""
    gc.freeze()
    yield
    gc.unfreeze()


STOP, START, LATENT, END, PAD = 9, 10, 11, 12, 13
LAYOUT = Layout(start_id=START, latent_id=LATENT, end_id=END)
BARE = replace(LAYOUT, markers=False)
PROBLEM = Problem((1, 2), ((3,), (4, 5), (6,)), (7, STOP))


# ---------------------------------------------------------------- rows


def test_stages_replace_steps_by_latents():
    curriculum = Curriculum(latents_per_step=2, max_stage=2, drop_all=True)
    tails = {0: [START, END, 3, 4, 5, 6], 1: [START, 11, 11, END, 4, 5, 6], 2: [START, 11, 11, 11, 11, END, 6]}
    tails[3] = [START, 11, 11, 11, 11, END]
    for stage, tail in tails.items():
        row = latent_row(PROBLEM, stage, curriculum, LAYOUT).row
        assert row.ids == [1, 2, *tail, 7, STOP]
        unscored = row.ids.index(END) + 1
        assert row.labels == [UNSCORED] * unscored + row.ids[unscored:]
        start = prompt(PROBLEM, "latent", stage, curriculum, LAYOUT)
        assert start == row.ids[:unscored]
    assert latent_row(PROBLEM, 1, curriculum, BARE).row.ids == [1, 2, 11, 11, 4, 5, 6, 7, STOP]


def test_short_problems_get_the_stages_latents_or_their_own():
    short = Problem((1,), ((3,),), (7, STOP))
    padded = Curriculum(max_stage=3, drop_all=True)
    own = replace(padded, pad_to_max=False)
    assert latent_row(short, 4, padded, BARE).row.ids.count(LATENT) == 3
    assert latent_row(short, 4, own, BARE).row.ids.count(LATENT) == 1
    assert prompt(short, "latent", 3, padded, BARE).count(LATENT) == 3
    assert prompt(short, "latent", 3, own, BARE).count(LATENT) == 1


def test_rows_without_latents_carry_no_marks():
    cot, none = plain_row(PROBLEM, 0, LAYOUT).row, plain_row(PROBLEM, 99, LAYOUT).row
    assert cot.ids == [1, 2, 3, 4, 5, 6, 7, STOP] and cot.labels == [UNSCORED] * 2 + cot.ids[2:]
    assert none.ids == [1, 2, 7, STOP] and plain_row(PROBLEM, 2, LAYOUT).row.ids == [1, 2, 5, 6, 7, STOP]
    for text in ("cot", "no_cot", "icot"):
        assert prompt(PROBLEM, text, 3, Curriculum(), LAYOUT) == [1, 2]
    assert prompt(PROBLEM, "pause", 3, Curriculum(), LAYOUT).count(LATENT) == 3


def rows(curriculum, text="latent", *, steps=60, batch_size=4, call=None, seed=0, given=(PROBLEM,) * 8):
    call = call or replace(curriculum, reset="never").calls(steps, 1)[0]
    return CurriculumRows(given, text, curriculum, BARE, batch_size=batch_size, steps=steps, call=call, seed=seed)


def test_a_row_depends_on_its_place_alone():
    """However the training is cut, step s sees the same rows; another seed sees others."""
    given = [Problem((k, 2), ((3,), (4, 5), (6,)), (7, STOP)) for k in range(8)]
    curriculum = Curriculum(max_stage=3, mix="proportional", first_length=2)
    whole = rows(curriculum, given=given)
    everything = [whole[i] for i in range(len(whole))]
    for reset in ("stage", "epoch", "never"):
        cut = replace(curriculum, reset=reset)
        parts = [rows(cut, call=call, given=given) for call in cut.calls(60, 7)]
        assert [part[i] for part in parts for i in range(len(part))] == everything
    assert [r[5] for r in (rows(curriculum, given=given), whole)] == [everything[5]] * 2, "asked out of order"
    assert [rows(curriculum, given=given, seed=1)[i] for i in range(len(whole))] != everything


def test_calls_cover_the_training_once():
    curriculum = Curriculum(max_stage=3, drop_all=True, first_length=3, last_length=2)
    assert curriculum.ends(80) == [30, 40, 50, 60, 80]
    for reset, count in (("stage", 5), ("epoch", 3 + 1 + 1 + 1 + 2), ("never", 1)):
        calls = replace(curriculum, reset=reset).calls(80, 10)
        assert len(calls) == len({call.name for call in calls}) == count
        assert [call.first for call in calls] == [0, *(call.first + call.steps for call in calls)][:-1]
        assert sum(call.steps for call in calls) == 80
        assert [call.stage for call in calls if call.ends_stage] == ([4] if reset == "never" else [0, 1, 2, 3, 4])
    with pytest.raises(ValueError, match="3 steps do not give each of 5 stages one"):
        curriculum.ends(3)


def test_icot_removes_tokens_one_by_one():
    curriculum = Curriculum(max_stage=3, first_length=2, stage_length=2, last_length=3)
    ends = curriculum.ends(900)
    removed = [curriculum.removed(step, 900, 8) for step in range(900)]
    assert set(removed[: ends[0]]) == {0} and set(removed[ends[2] :]) == {8}
    assert all(0 <= later - earlier <= 1 for earlier, later in zip(removed, removed[1:], strict=False))
    assert sorted(set(removed)) == list(range(9)), "every number of tokens is trained at"
    counts = Counter(removed[ends[0] : ends[2]])
    assert max(counts.values()) - min(counts.values()) <= 1, "each as long"
    seen = rows(curriculum, "icot", steps=900)
    lengths = [len(seen[i].row.ids) for i in range(len(seen))]
    assert set(lengths[: 4 * ends[0]]) == {8} and set(lengths[4 * ends[2] :]) == {4}
    exact = [8 - curriculum.removed(i // 4, 900, 4) for i in range(len(seen))]
    fewer = sum(a < b for a, b in zip(lengths, exact, strict=True))
    assert 0 < fewer < 0.05 * len(seen), "smoothing: a few rows are ahead"
    assert all(a <= b for a, b in zip(lengths, exact, strict=True))


def test_stages_are_mixed_in_the_proportions_asked_for():
    def shares(curriculum, stage):
        rng = random.Random(0)
        drawn = Counter(curriculum.drawn_stage(stage, 3, rng) for _ in range(6000))
        return {k: n / 6000 for k, n in drawn.items()}

    plain = Curriculum(max_stage=4)
    assert shares(plain, 2) == {2: 1.0}
    assert shares(replace(plain, mix="proportional"), 2) == pytest.approx({0: 1 / 6, 1: 2 / 6, 2: 3 / 6}, abs=0.02)
    # As the published code draws: from 0 to the problem's steps, later stages too.
    wanted = {0: 0.1, 1: 0.1, 2: 0.7, 3: 0.1}
    assert shares(replace(plain, uniform_prob=0.4), 2) == pytest.approx(wanted, abs=0.02)
    seen = rows(replace(plain, max_stage=2, mix="proportional"), steps=300)
    late = Counter(seen[i].row.ids.count(LATENT) for i in range(4 * 200, 4 * 300))
    assert {k: n / 400 for k, n in late.items()} == pytest.approx({0: 1 / 6, 1: 2 / 6, 2: 3 / 6}, abs=0.08)


@pytest.mark.parametrize(
    ("setting", "part"),
    [
        ({"max_stage": 0}, "max_stage is 0"),
        ({"uniform_prob": 1.5}, "uniform_prob is 1.5"),
        ({"mix": "some"}, "mix is 'some'"),
        ({"reset": "daily"}, "reset is 'daily'"),
        ({"last_length": 0.0}, "last_length is 0.0"),
    ],
)
def test_settings_that_make_no_sense(setting, part):
    with pytest.raises(ValueError, match=part):
        Curriculum(**setting)


# ---------------------------------------------------------------- the step decoder


def model(*, stream=None, sees="all", slots="hidden", decoder=0, layers=1, width=32, size=14, latent_id=LATENT):
    torch.manual_seed(0)
    shape = Backbone(layers=layers, width=width, heads=2, family="llama")
    lm = shape.build(vocabulary=size, window=64, pad_id=size - 1)
    blocks = replace(shape, layers=1).build(vocabulary=1, window=64, pad_id=0) if decoder else None
    step_decoder = StepDecoder(blocks, decoder) if blocks is not None else None
    return LatentLM(
        lm if stream is None else attach(lm, stream=stream),
        PassConfig(latent_id=latent_id, sees=sees, slots=slots),
        step_decoder=step_decoder,
    )


def test_step_decoder_must_say_each_step_from_its_own_latents():
    """The batch's loss is that of each step alone; its gradient reaches the model through the latents."""
    curriculum = Curriculum(latents_per_step=2, max_stage=2)
    short = Problem((1,), ((3,),), (7, STOP))
    given = [latent_row(PROBLEM, 2, curriculum, BARE), latent_row(short, 2, curriculum, BARE)]
    assert given[0].spoken == ((0, (3,)), (2, (4, 5))) and given[1].spoken == ((0, (3,)),)
    batch = collator(BARE, pad_id=PAD, stop_id=STOP, spoken=True)(given)
    assert batch["step_ids"].tolist() == [[3, STOP, PAD], [4, 5, STOP], [3, STOP, PAD]]
    module = model(decoder=2)
    out = module(**batch)
    passes = latent_passes(module.lm, batch["input_ids"], module.pass_config, attention_mask=batch["attention_mask"])
    decoder, losses = module.step_decoder, []
    assert decoder is not None
    for row, first, step in ((0, 0, [3, STOP]), (0, 2, [4, 5, STOP]), (1, 0, [3, STOP])):
        for n, token in enumerate(step):
            embeds = module.lm.get_input_embeddings()(torch.tensor([step[:n]], dtype=torch.long))
            before = torch.cat([passes.latents[row : row + 1, first : first + 2], embeds], dim=1)
            hidden = decoder.blocks(inputs_embeds=before).last_hidden_state[:, -1]
            losses.append(F.cross_entropy(module.lm.get_output_embeddings()(hidden), torch.tensor([token])))
    assert torch.allclose(out["step_loss"], torch.stack(losses).mean(), atol=1e-5)
    plain = {name: value for name, value in batch.items() if not name.startswith("step")}
    assert torch.allclose(out["loss"], module(**plain)["loss"] + out["step_loss"])
    assert torch.autograd.grad(out["step_loss"], [passes_weight(module)])[0].abs().sum() > 0
    assert set(collator(BARE, pad_id=PAD, stop_id=STOP, spoken=False)(given)) == set(plain)
    explicit = [latent_row(PROBLEM, 0, curriculum, BARE)]
    assert "step_ids" not in collator(BARE, pad_id=PAD, stop_id=STOP, spoken=True)(explicit), "no latents, no steps"


def passes_weight(module):
    return module.lm.base_model.layers[0].mlp.up_proj.weight


# ---------------------------------------------------------------- resets and resume


def fit(module, given, directory, *, text="latent", curriculum, loop, seed=0):
    train_curriculum(module, given, text, curriculum, BARE, loop, directory, seed=seed, pad_id=PAD, stop_id=STOP)


@pytest.mark.parametrize("reset", ["stage", "epoch", "never"])
def test_a_reset_leaves_nothing_of_the_optimiser(reset, tmp_path, monkeypatch):
    counted, warm = [], []

    class Spy(loop_module._StageTrainer):
        def train(self, *args, **kwargs):
            out = super().train(*args, **kwargs)
            assert self.optimizer is not None
            states = self.optimizer.state.values()
            counted.append({int(state["step"]) for state in states if "step" in state})
            return out

    monkeypatch.setattr(loop_module, "_StageTrainer", Spy)
    curriculum = Curriculum(max_stage=1, reset=reset, first_length=2)
    loop = LoopConfig(steps=6, batch_size=4, learning_rate=1e-2, warmup=0.5, log_every=1)
    fit(model(width=16), [PROBLEM] * 8, tmp_path, curriculum=curriculum, loop=loop)
    for call in curriculum.calls(6, 2):
        lines = (tmp_path / call.name / "metrics.jsonl").read_text().splitlines()
        warm.append(json.loads(lines[0])["learning_rate"])
    lengths = {"stage": [4, 2], "epoch": [2, 2, 2], "never": [6]}[reset]
    assert counted == [{length} for length in lengths], "a fresh optimiser has counted its own steps only"
    assert all(rate < 1e-2 for rate in warm), "and the schedule warms up again"


class Killed(BaseException):
    pass


SLOW = pytest.mark.slow


@pytest.mark.parametrize("killed_at", [pytest.param(1, marks=SLOW), 5, pytest.param(8, marks=SLOW)])
def test_a_killed_training_ends_with_the_same_bits(killed_at, tmp_path, monkeypatch):
    """Three stages of AGCLR with the step decoder; killed in the first, the second and the third."""
    given = [Problem((k % 3, 2), ((3,), (4, k % 5), (6,)), (k % 8, STOP)) for k in range(12)]
    curriculum = Curriculum(max_stage=2, mix="proportional")
    loop = LoopConfig(steps=9, batch_size=4, learning_rate=1e-2, save_every=1, log_every=1)

    def fresh():
        return model(stream=ARMS["agclr"].stream, decoder=1, width=16)

    whole = fresh()
    fit(whole, given, tmp_path / "whole", curriculum=curriculum, loop=loop)
    forward, calls = LatentLM.forward, []

    def dying(self, **batch):
        calls.append(1)
        if len(calls) == killed_at + 1:
            raise Killed
        return forward(self, **batch)

    with monkeypatch.context() as patch:
        patch.setattr(LatentLM, "forward", dying)
        with pytest.raises(Killed):
            fit(fresh(), given, tmp_path / "run", curriculum=curriculum, loop=loop)
    again = fresh()
    fit(again, given, tmp_path / "run", curriculum=curriculum, loop=loop)
    ours, theirs = again.state_dict(), whole.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    start = fresh().state_dict()
    assert any(not torch.equal(start[name], theirs[name]) for name in theirs), "it did train"
    for stage in ("stage0", "stage1", "stage2"):
        left, right = (load_file(tmp_path / run / stage / "final" / "model.safetensors") for run in ("run", "whole"))
        assert all(torch.equal(left[name], right[name]) for name in right)


# ---------------------------------------------------------------- learning


def hops(variant="last", n=8):
    """Eight problems of two hops, whose form and ids are those of the task."""
    config = HopsConfig(symbols=6, hops=(2,), variant=variant, last_step=variant == "retain", pair_ends=False)
    examples = [problem.example for problem in islice(problems(config, "train"), n)]
    form = TextForm.words(words(config), markers=False)
    return form, [form.encode(example) for example in examples]


def learnt(arm, directory, *, sees="all", variant="last", steps=120, width=32, layers=1):
    """An arm trained on eight problems: (module, form, problems, prompts of the last stage)."""
    spec, (form, given) = ARMS[arm], hops(variant)
    module = model(
        stream=spec.stream,
        slots="pause_multi" if spec.slots == "pause" and sees != "all" else spec.slots,
        decoder=1 if spec.step_decoder else 0,
        sees=sees,
        size=form.size,
        latent_id=form.layout.latent_id,
        width=width,
        layers=layers,
    )
    curriculum = Curriculum(max_stage=len(given[0].steps), last_length=2)
    loop = LoopConfig(steps=steps, batch_size=8, learning_rate=4e-3, optimizer="muon", save_every=1000)
    ids = {"pad_id": form.pad_id, "stop_id": form.stop_id}
    train_curriculum(module, given, spec.text, curriculum, form.layout, loop, directory, seed=0, **ids)
    prompts = [prompt(problem, spec.text, curriculum.last_stage, curriculum, form.layout) for problem in given]
    return module, form, given, prompts


def right(module, form, given, prompts):
    said = generate_answers(module.model, prompts, module.pass_config, max_new_tokens=6, stop_id=form.stop_id)
    return sum(tuple(ids[-len(p.answer) + 1 :]) == p.answer[:-1] for ids, p in zip(said, given, strict=True))


LONG = [pytest.param(arm, marks=SLOW) for arm in ARMS if arm != "agclr"]


@pytest.mark.parametrize("arm", ["agclr", *LONG])
def test_each_method_overfits_eight_problems(arm, tmp_path):
    module, form, given, prompts = learnt(arm, tmp_path)
    assert right(module, form, given, prompts) == 8
    shuffled = prompts[1:] + prompts[:1]
    assert right(module, form, given, shuffled) < 8, "it reads the question"


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["coconut", "agclr", "agclr_first"])
def test_latents_carry_what_cannot_be_seen(arm, tmp_path):
    """With nothing but the latest latent in view, another's latents give another's answer, and none the right one."""
    module, form, given, prompts = learnt(arm, tmp_path, sees="last", variant="retain", steps=400, width=48, layers=2)
    ask = {"max_new_tokens": 6, "stop_id": form.stop_id}
    clean = generate_answers(module.model, prompts, module.pass_config, **ask)
    assert right(module, form, given, prompts) >= 7
    for kind in ("zero", "noise", "mean"):
        changed = generate_answers(module.model, prompts, module.pass_config, intervention=kind, **ask)
        assert sum(a != b for a, b in zip(changed, clean, strict=True)) >= 4, kind
    (order,) = batches(prompts, form.layout.latent_id, 100)
    moved = generate_answers(module.model, prompts, module.pass_config, intervention="other", **ask)
    assert [moved[place] for place in order] == [clean[place] for place in order[-1:] + order[:-1]]
    whole = replace(module.pass_config, depth=2)
    assert generate_answers(module.model, prompts, whole, **ask) == clean, "the first two of two are all"
    blind = learnt("pause_multi", tmp_path / "pause", sees="last", variant="retain", steps=400, width=48, layers=2)
    assert right(*blind) <= 3, "the control: a pause token carries nothing"


def test_trained_module_is_loaded_and_not_trained_again(tmp_path, monkeypatch):
    curriculum = Curriculum(max_stage=1)
    loop = LoopConfig(steps=4, batch_size=4, learning_rate=1e-2)
    first, second = model(width=16), model(width=16)
    fit(first, [PROBLEM] * 8, tmp_path, curriculum=curriculum, loop=loop)
    monkeypatch.setattr(LatentLM, "forward", lambda *_, **__: pytest.fail("it trains again"))
    fit(second, [PROBLEM] * 8, Path(tmp_path), curriculum=curriculum, loop=loop)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not second.training
