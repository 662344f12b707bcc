"""What an unfinished run keeps of each pruned block, and what tells one run from another."""
