"""Which families of transformers can carry a channel: those that can are right, the others are refused at once."""

import warnings

import pytest
import torch
import transformers

from families import differ, open_gate, settings, tiny
from sidestream import attach
from sidestream.channels import StreamConfig
from sidestream.lm.models.blocks import check_family

WIDTH = 16
SHARED = dict(
    vocab_size=97,
    hidden_size=WIDTH,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    max_position_embeddings=64,
    initializer_range=0.3,
    bos_token_id=1,
    eos_token_id=None,
    pad_token_id=0,
)
GROUPED = {**SHARED, "num_key_value_heads": 1}
OLDER = dict(vocab_size=97, n_embd=WIDTH, n_layer=1, n_head=2, n_positions=64, bos_token_id=1, eos_token_id=None)
EXPERTS = {**GROUPED, "num_local_experts": 2, "num_experts_per_tok": 1}
LATENT = dict(
    kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8, n_group=1, topk_group=1
)
ACCEPTED = {
    "Llama": GROUPED,
    "Mistral": {**GROUPED, "sliding_window": 5},
    "Mixtral": EXPERTS,
    "Qwen2": GROUPED,
    "Qwen2Moe": {
        **GROUPED,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8,
    },
    "Qwen3": {**GROUPED, "head_dim": 8},
    "Qwen3Moe": {**GROUPED, "head_dim": 8, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8},
    "Gemma": {**GROUPED, "head_dim": 8},
    "Gemma2": {**GROUPED, "head_dim": 8, "sliding_window": 5},
    "Gemma3": {**GROUPED, "head_dim": 8, "sliding_window": 5},
    "Phi": SHARED,
    "Phi3": GROUPED,
    "GPT2": OLDER,
    "GPTBigCode": OLDER,
    "GPTJ": {**OLDER, "rotary_dim": 4},
    "GPTNeo": {**SHARED, "num_layers": 1, "num_heads": 2, "attention_types": [[["local"], 1]], "window_size": 5},
    "GPTNeoX": SHARED,
    "CodeGen": {**OLDER, "n_head": 4, "n_embd": 32, "rotary_dim": 4},
    "Falcon": SHARED,
    "Bloom": {**SHARED, "n_layer": 1, "n_head": 2},
    "Mpt": dict(vocab_size=97, d_model=WIDTH, n_layers=1, n_heads=2, max_seq_len=64),
    "OPT": {**SHARED, "ffn_dim": 24, "word_embed_proj_dim": WIDTH},
    "BioGpt": SHARED,
    "Starcoder2": GROUPED,
    "StableLm": GROUPED,
    "Olmo": GROUPED,
    "Olmo2": GROUPED,
    "Cohere": GROUPED,
    "Cohere2": {**GROUPED, "head_dim": 8, "sliding_window": 5},
    "Exaone4": {**GROUPED, "sliding_window": 5, "layer_types": ["sliding_attention"]},
    "GptOss": {**EXPERTS, "head_dim": 8, "sliding_window": 5},
    "Granite": GROUPED,
    "Glm4": {**GROUPED, "head_dim": 8},
    "SmolLM3": GROUPED,
    "Persimmon": SHARED,
    "Nemotron": {**GROUPED, "head_dim": 8},
    "DeepseekV3": {**SHARED, **LATENT, "n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8},
}
HYBRID = {**GROUPED, "head_dim": 8, "layer_types": ["linear_attention"], "linear_num_key_heads": 2}
REFUSED = {
    "Rwkv": dict(vocab_size=97, hidden_size=WIDTH, num_hidden_layers=2, attention_hidden_size=WIDTH),
    "xLSTM": dict(vocab_size=97, hidden_size=WIDTH, num_hidden_layers=1, num_heads=2),
    "RecurrentGemma": {**GROUPED, "lru_width": WIDTH, "head_dim": 8, "block_types": ["recurrent", "attention"]},
    "MiniMax": {**EXPERTS, "head_dim": 8, "block_size": 4, "layer_types": ["linear_attention"]},
    "Qwen3Next": {**HYBRID, "num_experts": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8},
    "Qwen3_5": HYBRID,
    "OlmoHybrid": {**HYBRID, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "Lfm2": {**GROUPED, "layer_types": ["conv"]},
    "Bamba": {**GROUPED, "mamba_n_heads": 2, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8},
    "Jamba": {**GROUPED, "num_experts": 2, "mamba_d_state": 8},
    "Mamba": dict(vocab_size=97, hidden_size=WIDTH, num_hidden_layers=1, state_size=8),
    "OpenAIGPT": dict(vocab_size=97, n_embd=WIDTH, n_layer=1, n_head=2, n_positions=64),
    "Gemma3n": {
        **{**GROUPED, "num_hidden_layers": 2, "intermediate_size": [24] * 2, "head_dim": 8, "num_kv_shared_layers": 0},
        **dict(vocab_size_per_layer_input=97, hidden_size_per_layer_input=8, laurel_rank=4),
        **dict(layer_types=["sliding_attention", "full_attention"], activation_sparsity_pattern=[0.0] * 2),
    },
    "Bart": dict(
        vocab_size=97, d_model=WIDTH, encoder_layers=1, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=24
    ),
    "Moshi": {**GROUPED, "head_dim": 8, "ffn_dim": 24},
}
CLASSES = {"GPT2": "GPT2LMHeadModel", "OpenAIGPT": "OpenAIGPTLMHeadModel"}
CONFIGS = {
    "Gemma3": "Gemma3TextConfig",
    "Gemma3n": "Gemma3nTextConfig",
    "Qwen3_5": "Qwen3_5TextConfig",
    "RecurrentGemma": "RecurrentGemmaConfig",
}


def made(family, config):
    """A random model of one block; skipped where this version of transformers does not know the family."""
    name = CLASSES.get(family, f"{family}ForCausalLM")
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # what a family's file does when it is imported
        torch.manual_seed(0)
        if not hasattr(transformers, name):
            pytest.skip(f"transformers {transformers.__version__} has no {name}")
        settings = getattr(transformers, CONFIGS.get(family, f"{family}Config"))
        return getattr(transformers, name)(settings(**config)).eval()


IDS = torch.randint(2, 97, (2, 7), generator=torch.Generator().manual_seed(1))
MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]])
GOALS = [[5, 6, 7], [9, 8]]


@pytest.mark.parametrize("family", ACCEPTED)
def test_generate_is_repeated_forwards(family):
    """A padded batch of two goals, against each row alone with its whole text read anew for every token."""
    model = open_gate(attach(made(family, ACCEPTED[family]), goal=settings("static")), scale=1.0)
    options = dict(max_new_tokens=3, do_sample=False, pad_token_id=0, eos_token_id=None)
    found = model.generate(IDS * MASK, attention_mask=MASK, goal=GOALS, **options)
    with torch.no_grad():
        for row, goal in enumerate(GOALS):
            text = IDS[row : row + 1][:, MASK[row].bool()]
            for token in found[row, 7:]:
                scores = model(text, goal=[goal]).logits[0, -1]
                assert scores.max() - scores[token] <= 1e-4 * scores.abs().max(), family  # equal up to a tie
                text = torch.cat([text, token[None, None]], 1)
        differ(model(text, goal=[GOALS[1]]).logits, model(text).logits, 1e-4)


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_no_cache_of_ours_can_carry_is_refused(family):
    model = made(family, REFUSED[family])
    with pytest.raises(ValueError, match=r"cannot carry a channel, .*cache|no FiLM site"):
        attach(model, goal=settings("static"))
    with pytest.raises(ValueError, match="cannot carry a channel"):
        attach(model, stream=StreamConfig())
    assert not model._forward_pre_hooks


def test_an_encoder_that_follows_the_text_is_held_to_the_same():
    reader = made("Rwkv", REFUSED["Rwkv"])
    with pytest.raises(ValueError, match="RwkvForCausalLM cannot carry"):
        attach(tiny("llama"), goal=settings("dynamic"), encoder=reader)


def test_what_a_model_keeps_is_named():
    with pytest.raises(ValueError, match="RwkvForCausalLM .*its forward takes no cache"):
        check_family(made("Rwkv", REFUSED["Rwkv"]))
    with pytest.raises(ValueError, match="its layers keep LinearAttentionLayer"):
        check_family(made("Lfm2", REFUSED["Lfm2"]))
    check_family(tiny("gpt2"))
