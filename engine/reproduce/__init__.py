"""One file or folder a paper: its figures and tables computed by our engine, with the published numbers."""
