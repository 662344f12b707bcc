"""Run sweeps, and make tables, pictures and an HTML page of results."""
