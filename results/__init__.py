"""Studies and measurements: a page each, most with a plot and a JSON file with the numbers."""
