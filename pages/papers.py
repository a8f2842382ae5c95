"""The Papers page: the published results of the five papers, and ours."""

from app import header, papers

header.show("Papers", "What did the papers get, and what do we?")
papers.show()
