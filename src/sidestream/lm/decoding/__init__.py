"""The cache, the window, and every way to decode."""
