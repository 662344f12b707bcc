"""The HTML page about runs: `runs` → `models` → `measures`, `notes` → `figures`, `tables` → `page`.

Only `drawing` and what imports it need matplotlib, only `page` needs Jinja.
"""
