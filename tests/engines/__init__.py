"""The engines' own code beside ours: `make engines`. A file an engine, each with `rows(folder)`."""
