"""Text to tokens and back: tokenizers, prompts, chats."""
