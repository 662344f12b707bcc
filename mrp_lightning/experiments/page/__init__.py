"""The HTML page about runs: `models` → `layer_values`, `scores` → `pictures`, `parts` → `page`."""
