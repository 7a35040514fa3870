"""HTML pages: a report of results, and an explorer of the infinite-width theory."""
