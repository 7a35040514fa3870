"""Run all benchmarks: `make bench`, or `make bench ARGS=--quick`."""

from benchmarks.embed import main

main()
