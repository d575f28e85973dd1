"""The studies and measurements: each page has a table, a plot and a JSON file that holds their numbers."""
