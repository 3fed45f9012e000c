"""Ten families from attach to generated text; `generate` in all its forms; `sidestream generate` and its mistakes."""

import pytest
import torch
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    TextIteratorStreamer,
    Trainer,
    TrainingArguments,
    pipeline,
)

import sidestream
from families import FAMILIES, VOCABULARY, tiny
from sidestream import cli
from sidestream.lm.decoding.cache import CACHE_NAME, Window
from sidestream.lm.models.base import load_tokenizer
from sidestream.tasks.goals import Tokens
from sidestream.training.finetune import FinetuneConfig, GoalLM, GoalRows, attach_channel, collate_goals, pooled_goals
from tiny_model import llama, save, tokenizer

MORE = {
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "phi3": (Phi3ForCausalLM, Phi3Config, {}),
    "olmo2": (Olmo2ForCausalLM, Olmo2Config, {}),
    "falcon": (FalconForCausalLM, FalconConfig, {"new_decoder_architecture": True, "num_kv_heads": 2}),
}
CONFIG = FinetuneConfig(window=12, width=8, steps=2, batch_size=4)


def build(family):
    if family in FAMILIES:
        return tiny(family)
    model, config, own = MORE[family]
    common = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    shared = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
    gated = {"intermediate_size": 64, "num_key_value_heads": 2} if family != "falcon" else {"ffn_hidden_size": 64}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return model(config(**common, **shared, **gated, **own, initializer_range=0.2)).eval()


def ids(*shape, seed=0):
    return torch.randint(2, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", [*FAMILIES, *MORE])
def test_attach_train_save_load_generate(family, tmp_path):
    """Two steps by hand, as any loop or trainer would: the loss falls on the rows it saw, the base stays."""
    lm = build(family)
    before = {name: tensor.clone() for name, tensor in lm.state_dict().items()}
    model = attach_channel(lm, CONFIG, None)
    goals = ids(4, 5, seed=1).tolist()
    texts = [(tuple(row), (False, *[True] * 11)) for row in ids(4, 12, seed=2).tolist()]
    rows = GoalRows(
        [Tokens(*text) for text in texts], pooled_goals(model, goals), window=12, batch_size=4, steps=1, seed=0
    )
    batch = collate_goals([rows[index] for index in range(4)])
    objective = GoalLM(model, 4).train()
    optimizer = torch.optim.AdamW([p for p in objective.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(3):
        loss = objective(**batch)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[0] - 1e-2, losses
    assert all(torch.equal(tensor, before[name]) for name, tensor in lm.state_dict().items())
    model.eval()
    model.save_pretrained(tmp_path)
    again = sidestream.load(tmp_path, build(family))
    prompts, mask = ids(4, 9, seed=3), torch.ones(4, 9, dtype=torch.long)
    said = [
        m.generate(prompts, attention_mask=mask, goal=torch.tensor(goals), window=8, max_new_tokens=6, do_sample=False)
        for m in (model, again)
    ]
    assert torch.equal(*said) and said[0].shape == (4, 15)
    with torch.no_grad():
        opened, closed = model(prompts, goal=torch.tensor(goals)).logits, model(prompts).logits
    assert (opened - closed).abs().max() > 1e-3, "the channel does nothing"


# ---------------------------------------------------------------- generate, in all its forms


@pytest.fixture(scope="module")
def words():
    return tokenizer()


@pytest.fixture(scope="module")
def model(words):
    return opened(llama(len(words)), words)


def opened(lm, words):
    """A channel that is open and tells goals apart: random FiLM, standardised goals."""
    made = attach_channel(lm, FinetuneConfig(width=8), words)
    goals = ["The trip goes to Oslo.", "The code word is apple.", "The suitcase is red."]
    made.channel.encoder.calibrate(pooled_goals(made, [words(goal).input_ids for goal in goals]))
    with torch.no_grad():
        for parameter in made.channel.film.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(1))
    return made


GOALS = ["The trip goes to Oslo.", "The code word is apple."]


def text_of(words, out, prompt):
    return words.decode(out[0, prompt.shape[1] :], skip_special_tokens=True)


def test_pipeline_and_streamer_carry_the_goal(model, words):
    prompt = words("Where does the trip go?", return_tensors="pt").input_ids
    plain = model.generate(prompt, goal=GOALS[0], max_new_tokens=8, do_sample=False)
    pipe = pipeline("text-generation", model=model.lm, tokenizer=words)
    options = {"max_new_tokens": 8, "do_sample": False, "return_full_text": False}
    said = pipe("Where does the trip go?", **{CACHE_NAME: model.new_cache(GOALS[0])}, **options)
    assert said[0]["generated_text"] == text_of(words, plain, prompt)
    assert pipe("Where does the trip go?", **options)[0]["generated_text"] != said[0]["generated_text"]
    streamer = TextIteratorStreamer(words, skip_prompt=True, skip_special_tokens=True)
    model.generate(prompt, goal=GOALS[0], max_new_tokens=8, do_sample=False, streamer=streamer)
    assert "".join(streamer) == text_of(words, plain, prompt)


def test_batches_sampling_beams_and_turns(model, words):
    prompt = words(["Where does the trip go?"] * 2, return_tensors="pt").input_ids
    greedy = {"max_new_tokens": 6, "do_sample": False}
    both = model.generate(prompt, goal=GOALS, **greedy)
    for row, goal in enumerate(GOALS):
        assert torch.equal(both[row : row + 1], model.generate(prompt[:1], goal=goal, **greedy))
    assert not torch.equal(both[0], both[1])
    for options in ({"do_sample": True, "num_return_sequences": 3}, {"num_beams": 3, "do_sample": False}):
        torch.manual_seed(0)
        first = model.generate(prompt, goal=GOALS, max_new_tokens=6, **options)
        torch.manual_seed(0)
        assert torch.equal(first, model.generate(prompt, goal=GOALS, max_new_tokens=6, **options))
        torch.manual_seed(0)
        assert not torch.equal(first, model.generate(prompt, goal=GOALS[::-1], max_new_tokens=6, **options))
    turn = model.generate(prompt, goal=GOALS, return_dict_in_generate=True, **greedy)
    cache = getattr(turn, CACHE_NAME)
    longer = torch.cat([turn.sequences, prompt], dim=1)
    second = model.generate(longer, **{CACHE_NAME: cache}, **greedy)
    assert torch.equal(second, model.generate(longer, goal=GOALS, **greedy)), "the second turn lost the goal"
    assert not torch.equal(second, model.generate(longer, **greedy))


# ---------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def saved(words, tmp_path_factory):
    folder = tmp_path_factory.mktemp("generate")
    base = save(folder / "base")
    made = opened(llama(len(words)), words)
    made.lm.config._name_or_path = str(base)
    made.save_pretrained(folder / "run")
    return folder


def say(saved, capsys, *more):
    capsys.readouterr()
    status = cli.main(["generate", "--model", str(saved / "run"), "--max_new_tokens", "8", *more])
    return status, capsys.readouterr()


def test_generate_prints_what_the_model_says(saved, words, capsys):
    asked = ["--prompt", "Where does the trip go?", "--window", "8"]
    status, said = say(saved, capsys, *asked, "--goal", GOALS[0])
    assert status == 0
    model = sidestream.load(saved / "run")
    prompt = words("Where does the trip go?", return_tensors="pt").input_ids
    window = Window(size=8, policy="reindex")
    out = model.generate(prompt, goal=GOALS[0], window=window, max_new_tokens=8, do_sample=False)
    assert said.out == text_of(words, out, prompt) + "\n"
    assert say(saved, capsys, *asked, "--goal", GOALS[1])[1].out != said.out
    assert say(saved, capsys, *asked)[1].out != said.out, "no goal and a goal say the same"
    assert say(saved, capsys, *asked, "--goal", GOALS[0], "--chat", "true")[1].out != said.out
    drawn = ["--goal", GOALS[0], "--temperature", "1", "--seed"]
    first = say(saved, capsys, *asked, *drawn, "1")[1].out
    assert first == say(saved, capsys, *asked, *drawn, "1")[1].out != say(saved, capsys, *asked, *drawn, "2")[1].out
    (saved / "prompt.txt").write_text("Where does the trip go?")
    from_file = ["--prompt_file", str(saved / "prompt.txt"), "--window", "8", "--goal", GOALS[0]]
    assert say(saved, capsys, *from_file)[1].out == said.out


@pytest.mark.parametrize(
    "words_given, complaint",
    [
        (["--prompt", ""], "--prompt is empty"),
        ([], "--prompt is missing"),
        (["--prompt", "\udce9"], r"--prompt is not UTF-8 text: '\udce9'"),
        (["--prompt", "x", "--goal", " "], "--goal is empty; leave it out"),
        (["--prompt", "x", "--goal", "far " * 300], "a goal has"),
        (["--prompt", "x", "--policy", "rolling"], "--policy says how a window moves; give --window"),
        (["--prompt", "x", "--top_p", "0.5"], "--top_p is about drawing"),
        (["--prompt", "x", "--seed", "99999999999999999999"], "--seed is 99999999999999999999; it must be"),
        (["--prompt", "x", "--window", "1"], "Window.size is 1 tokens"),
        (["--prompt", "x", "--window", "8", "--policy", "slide"], "window policy 'slide' is unknown"),
        (["--prompt", "x", "--temperature", "-1"], "--temperature must be 0 or above"),
        (["--prompt_file", "nowhere.txt"], "nowhere.txt: there is no such file"),
        (["--prompt_file", "/dev/null"], "/dev/null is empty"),
        (["--prompt_file", ""], "--prompt_file is empty"),
        (["--prompt", "x", "--prompt_file", "p.txt"], "--prompt and --prompt_file exclude each other"),
        (
            ["--prompt", "--goal", "Go to Oslo."],
            "--prompt has no text: --goal follows it; where that is the text, write",
        ),
        (["--goal", "--prompt=x"], "--goal has no text: --prompt=x follows it"),
        (["--prompt", "x", "--base", "nowhere"], "cannot load the model 'nowhere': there is no such folder here"),
        (["--prompt", "x", "--base", "./no/such/folder"], "./no/such/folder: there is no such folder"),
        (["--prompt", "x", "--base", "package:no_such_package"], "the package is not installed"),
    ],
)
def test_generate_says_what_is_wrong(saved, capsys, words_given, complaint):
    status, said = say(saved, capsys, *words_given)
    (line,) = [line for line in said.err.split("\n") if line and "Loading weights" not in line]
    assert status == 2 and complaint in line


def test_a_base_without_a_tokenizer_is_told_of(saved, capsys, tmp_path):
    made = attach_channel(llama(400), FinetuneConfig(width=8), None)
    made.lm.save_pretrained(tmp_path / "bare")
    made.lm.config._name_or_path = str(tmp_path / "bare")
    made.save_pretrained(tmp_path / "run")
    assert cli.main(["generate", "--model", str(tmp_path / "run"), "--prompt", "x"]) == 2
    assert "comes without a tokenizer" in capsys.readouterr().err
    with pytest.raises(ValueError, match="cannot load the tokenizer"):
        load_tokenizer(tmp_path / "bare")


def test_the_stock_trainer_takes_it_as_any_module(words, tmp_path):
    lm = llama(len(words))
    made = attach_channel(lm, CONFIG, words)
    read = [Tokens(tuple(row), (False, *[True] * 11)) for row in ids(4, 12, seed=2).tolist()]
    pooled = pooled_goals(made, ids(4, 5, seed=1).tolist())
    rows = GoalRows(read, pooled, window=12, batch_size=4, steps=3, seed=0)
    options = {"max_steps": 3, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "report_to": []}
    arguments = TrainingArguments(
        output_dir=str(tmp_path), remove_unused_columns=False, use_cpu=True, disable_tqdm=True,
        dataloader_pin_memory=False, save_strategy="no", **options,
    )  # fmt: skip
    before = {name: tensor.clone() for name, tensor in lm.state_dict().items()}
    Trainer(model=GoalLM(made, 4), args=arguments, train_dataset=rows, data_collator=collate_goals).train()
    assert made.channel.film.projection.weight.abs().max() > 1e-3
    assert all(torch.equal(tensor, before[name]) for name, tensor in lm.state_dict().items())
