"""Compiled goals: a file that is loaded in place of reading the text, and refuses what it does not belong to."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from sidestream import attach
from sidestream.lm.goals.goalfile import load_goal, save_goal
from sidestream.lm.goals.signing import HmacKey
from tiny_model import llama, tokenizer

TOKENIZER = tokenizer()
GOAL = "Answer in French, and name the city."


def model(seed=0, words=TOKENIZER):
    return attach(llama(len(TOKENIZER), seed=seed), tokenizer=words)


def said(attached, goal):
    ids = torch.arange(5, 17)[None]
    with torch.no_grad():
        return attached(ids, goal=goal).logits


@pytest.fixture(scope="module")
def pinned():
    attached = model()
    return attached, attached.encode_goal({"policy": GOAL, "wish": "A quiet place"})


@pytest.mark.parametrize("precision, apart", [("float32", 0.0), ("bfloat16", 0.2), ("int8", 0.5)])
def test_a_goal_comes_back_from_its_file(pinned, tmp_path, precision, apart):
    attached, state = pinned
    path = tmp_path / "goal.safetensors"
    save_goal(attached, state, path, precision=precision)
    again = load_goal(model(), path)
    assert again.part_names == ("policy", "wish")
    difference = (said(attached, state) - said(attached, again)).abs().max()
    assert difference <= apart and (precision == "float32" or difference > 0)
    assert (said(attached, state) - said(attached, None)).abs().max() > 1
    cache = attached.new_cache(again)
    attached.update_goal(cache, {"wish": None})
    assert int(cache.goal.entries.sum()) == len(TOKENIZER(GOAL + "\n")["input_ids"])


def test_the_file_is_smaller_in_fewer_bits(pinned, tmp_path):
    sizes = []
    for precision in ("float32", "bfloat16", "int8"):
        save_goal(*pinned, tmp_path / precision, precision=precision)
        sizes.append((tmp_path / precision).stat().st_size)
    assert sizes[0] > sizes[1] > sizes[2]


def altered(path, change):
    tensors = load_file(path)
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata())
    change(tensors, metadata)
    save_file(tensors, path, metadata=metadata)


def test_what_does_not_belong_is_refused_in_one_line(pinned, tmp_path):
    attached, state = pinned
    path, key = tmp_path / "goal.safetensors", HmacKey(b"k" * 32)
    save_goal(attached, state, path)
    with pytest.raises(ValueError, match="is not signed, and a key was given"):
        load_goal(attached, path, key=key)
    with pytest.raises(ValueError, match="compiled for another base: LlamaForCausalLM"):
        load_goal(model(seed=1), path)
    other = tokenizer(vocabulary=390)
    with pytest.raises(ValueError, match="compiled with another tokenizer"):
        load_goal(model(words=other), path)
    with pytest.raises(ValueError, match="there is no such goal file"):
        load_goal(attached, tmp_path / "none")
    altered(path, lambda tensors, _: tensors["keys"].mul_(2))
    with pytest.raises(ValueError, match="is damaged or was altered"):
        load_goal(attached, path)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ValueError, match="is no goal file"):
        load_goal(attached, path)


def test_a_signature_covers_the_entries_and_what_they_belong_to(pinned, tmp_path):
    attached, state = pinned
    path, key = tmp_path / "goal.safetensors", HmacKey(b"k" * 32)
    save_goal(attached, state, path, key=key)
    assert torch.equal(load_goal(attached, path, key=key).keys, state.keys)
    assert torch.equal(load_goal(attached, path).keys, state.keys)
    with pytest.raises(ValueError, match="signed with another key"):
        load_goal(attached, path, key=HmacKey(b"o" * 32))

    def forge(tensors, metadata):  # entries and their digest changed together
        from sidestream.lm.goals.goalfile import _digest

        tensors["keys"].mul_(2)
        about = json.loads(metadata["goal"])
        about["sha256"] = _digest(tensors)
        metadata["goal"] = json.dumps(about, sort_keys=True)

    altered(path, forge)
    load_goal(attached, path)  # without a key nobody can tell
    with pytest.raises(ValueError, match="or altered since"):
        load_goal(attached, path, key=key)


def test_only_a_pinned_goal_of_one_row_is_saved(pinned, tmp_path):
    attached, _ = pinned
    with pytest.raises(ValueError, match="holds one pinned goal"):
        save_goal(attached, attached.encode_goal([[5, 6], [7]]), tmp_path / "two")
    with pytest.raises(ValueError, match="precision is 'fp8'"):
        save_goal(*pinned, tmp_path / "fp8", precision="fp8")
