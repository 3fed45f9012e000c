"""A tiny random Llama with a tokenizer of its own, saved as users keep theirs: what `sidestream train` is given."""

import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sidestream.tasks.base import write_jsonl
from sidestream.tasks.needle import needles

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer(vocabulary: int = 400) -> PreTrainedTokenizerFast:
    """Byte-level BPE of the needle task's text, with a chat template."""
    texts = [text for item in needles("train", 60, words=(10, 20)) for text in (item.goal, item.trajectory)]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|im_end|>", "<|im_start|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=special, initial_alphabet=alphabet)
    )
    made = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|im_end|>")
    made.chat_template = TEMPLATE
    return made


def llama(vocabulary: int, *, seed: int = 0, layers: int = 3) -> LlamaForCausalLM:
    """Random, wide enough in its weights for a channel to have something to steer."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            initializer_range=0.2,
            bos_token_id=None,
            eos_token_id=0,
            pad_token_id=0,
        )
        return LlamaForCausalLM(config).eval()


def save(directory: Path, *, seed: int = 0) -> Path:
    """Model and tokenizer in a folder."""
    words = tokenizer()
    llama(len(words), seed=seed).save_pretrained(directory)
    words.save_pretrained(directory)
    return directory


def write_goals(path: Path, count: int = 24, split: str = "train", **settings) -> Path:
    """A JSONL file of needles."""
    write_jsonl(needles(split, count, **{"words": (4, 30), **settings}), path)  # type: ignore[arg-type]
    return path


def shuffled_tokens(count: int, vocabulary: int, seed: int = 0) -> list[int]:
    """Ids that are no special tokens."""
    rng = random.Random(seed)
    return [rng.randrange(2, vocabulary) for _ in range(count)]
