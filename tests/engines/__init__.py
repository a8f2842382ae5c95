"""The engines' own code compared with ours: `make engines`. A file an engine, each with `rows(folder)`."""
