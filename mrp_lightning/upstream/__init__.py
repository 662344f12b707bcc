"""Names that other packages keep to themselves, and that there is no public way around.

No other room uses such a name. Each function says in which version it was seen, why it is needed,
and what takes its place once upstream offers it. Packages are imported inside the functions: who
needs torch alone loads torch alone.
"""
