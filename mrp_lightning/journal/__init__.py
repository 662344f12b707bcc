"""The journal of an unfinished run: a record of each finished block, and a fingerprint."""
