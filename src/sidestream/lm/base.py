"""Where `sidestream.lm.models.base` stood in earlier versions, kept so that scripts still run."""

from sidestream.lm.models.base import chat_template, load_base, load_tokenizer, offsets

__all__ = ["chat_template", "load_base", "load_tokenizer", "offsets"]
