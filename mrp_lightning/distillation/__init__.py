"""Train the kept weights of a pruned model until it predicts as its dense model does."""
