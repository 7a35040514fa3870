"""One HTML page of all results in a folder, with charts to look at, and no network needed."""
