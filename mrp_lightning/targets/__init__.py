"""A model → what can be pruned in it: its blocks, its layers, and the plan. Needs torch alone."""
