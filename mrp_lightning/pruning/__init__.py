"""Hessians → pruned layers, all of them in order, written and reported. Needs torch alone."""
