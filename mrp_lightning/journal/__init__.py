"""A journal keeps each pruned block of an unfinished run; a fingerprint tells runs apart."""
