"""Studies and measurements: each page has a table, a plot and a JSON file with their numbers."""
