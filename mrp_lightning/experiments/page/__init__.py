"""The HTML page about runs: `models` → `layers`, `scores` → `pictures`, `parts` → `page`."""
