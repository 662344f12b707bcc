"""Many runs of `predict`, one after another: methods × settings × seeds, and the tables of them."""
