"""What is written of an attached model, and its card."""
