"""The quickstart: a small model and a data set of short word problems, without a model hub."""
