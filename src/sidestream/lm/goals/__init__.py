"""Goals: read, encoded, pinned, kept in files, signed."""
