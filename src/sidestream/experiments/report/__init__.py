"""Reports: numbers as tables, figures, and the page that holds them. Reads files only."""
