"""Private names of other packages, used where no public name exists.

No other folder uses such names. Each docstring states the version in which the name was seen, why
it is needed, and its replacement once upstream offers a public one. Packages are imported inside
functions, so that code that needs only torch imports only torch.
"""
