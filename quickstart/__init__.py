"""A first run that needs no hub: a small model and a data set of short word problems."""
