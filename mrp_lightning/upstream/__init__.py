"""Private names of other packages that are needed because there is no public way.

Only this folder uses such names. Each function says in which version the name was seen, why it is
needed, and what replaces it once upstream offers a public way. Packages are imported inside the
functions, so that code that needs only torch loads only torch.
"""
