"""What tables and pictures call arms and metrics, and which metrics are fractions."""

_AGCLR = {
    "no_cot": "No CoT",
    "cot": "CoT",
    "icot": "iCoT",
    "pause": "Pause tokens",
    "pause_multi": "Pause tokens, curriculum",
    "coconut": "CoCoNuT",
    "agclr": "AGCLR",
    "coconut_sim": "CoCoNuT + SIM-CoT's step decoder",
    "agclr_sim": "AGCLR + SIM-CoT's step decoder",
    "agclr_no_read": "AGCLR, no read gate",
    "agclr_no_write": "AGCLR, no write gate",
    "agclr_no_forget": "AGCLR, no forget gate",
    "agclr_write2": "AGCLR, write gate frozen after pass 2 (at test)",
    "agclr_random_gates": "AGCLR, random gates",
    "agclr_first": "AGCLR, stream repeats pass 1",
    "agclr_identity": "AGCLR, identity at the start",
    "coconut_mlp": "CoCoNuT + MLP of the stream's size",
}
ARMS = {
    "lsar.table1": {
        "baseline": "AR baseline",
        "static_faithful": "LS-AR Static (faithful)",
        "static_scored": "+ loss on the answer only",
        "static_pooling": "+ first-block pooling, standardised",
        "static": "LS-AR Static (ours)",
    },
    "lsar.table2": {
        "static": "LS-AR Static",
        "large": "AR baseline, 20 blocks",
        "small": "unconditioned decoder, 4 blocks",
    },
    "lsar.table4": {
        "dynamic": "LS-AR Dynamic",
        "large": "AR baseline, 10 blocks",
        "small": "unconditioned decoder, 4 blocks",
    },
    "lsar.table3": {
        "baseline": "AR baseline",
        "static": "LS-AR Static",
        "dynamic": "LS-AR Dynamic",
        "baseline_whole": "AR baseline, whole texts only",
        "dynamic_no_stage2": "LS-AR Dynamic, no stage 2",
        "alpha_zero": "LS-AR Dynamic, alpha frozen at 0",
        "random_film": "Random FiLM (Static)",
        "random_film_dynamic": "Random FiLM (Dynamic)",
        "baseline_pool": "AR baseline, our data",
        "baseline_pool_whole": "AR baseline, our data, whole texts only",
        "static_pool": "LS-AR Static, our data",
        "dynamic_pool": "LS-AR Dynamic, our data",
        "dynamic_replace": "+ latest update only",
        "dynamic_state": "LS-AR Dynamic (ours): + state read from the vector",
    },
    "lsar.table5": {
        "baseline": "AR baseline",
        "standard": "Standard",
        "latent_forced": "Latent-Forced",
        "ball": "Latent-Forced + adversarial training in a ball",
        "hardened": "Latent-Forced + overrides in training",
        "dynamic": "Latent-Forced, Dynamic",
    },
    "audit": {
        "standard": "Standard",
        "ball": "Latent-Forced + adversarial training in a ball",
        "hardened": "Latent-Forced + overrides in training",
        "dynamic": "Latent-Forced, Dynamic",
        "model": "the model",
        "latent_forced-p0.3": "Latent-Forced, p = 0.3",
    },
    "goals.needle": {
        "closed": "no goal",
        "sinks": "first 4 tokens kept (attention sinks)",
        "in_text": "goal's text put back every W tokens",
        "swapped": "another record's goal in the channel",
        "channel": "goal in the channel",
    },
    **{
        f"goals.{kind}": {
            "channel": "goal in the channel",
            "in_text": "goal's text in the window",
            "vector": "nearest vector",
            "words": "shared words (TF-IDF)",
        }
        for kind in ("webshop", "tau", "webshop_vector", "tau_vector")
    },
    **{f"agclr.{kind}": _AGCLR for kind in ("table1", "prosqa", "ablations", "retention", "controls")},
}
"""Table -> arm -> what tables and pictures call it. One name may stand for different arms in different tables."""
METRICS = {
    "item_exact": "Item, exact match",
    "code_exact": "Passcode, whole code",
    "code_token": "Passcode, by sub-word token",
    "success": "Goal reached",
    "goal_a": "Goal A reached",
    "goal_b": "Goal B reached",
    "neither": "Neither reached",
    "mixed": "Of these: one goal's item, the other's passcode",
    "utility": "Utility: right answers, no attack",
    "fidelity": "Fidelity: right answers under attack",
    "attack_success": "Attack success: the attacker's answer",
    "refused": "Refused",
    "accepted": "Sealed goals accepted",
    "certified": "Certified: nothing that near changes the goal",
    "accuracy": "Answer right",
    "number": "Answer right as a number",
    "em": "Answer, exact match",
    "f1": "Answer, F1",
    "last": "Last value of the answer",
    "early": "Early value of the answer",
    "top1": "Right goal ranked first",
}
"""Metrics that are fractions: checked to lie in 0..1 and printed in percent. Any other metric is a ratio."""
HEADLINE_ATTACKS = (
    "any override",
    "token search",
    "prompt replaced",
    "PGD 0.1",
    "PGD 0.5",
    "swap",
    "unbounded",
    "both replaced",
)
"""Of an audit's attacks those that stand in its table; the report has all of them besides."""
UTILITY_COLUMN = "right answers, no attack"
CHANCE = {"item_exact": 1 / 12}
"""What guessing gives: Treasure Hunt hides one of 12 items."""


def arm_name(arm: str, table: str) -> str:
    """What tables and pictures of `table` call an arm; one we have no name for keeps its own words."""
    return ARMS.get(table, {}).get(arm, arm.replace("_", " "))
