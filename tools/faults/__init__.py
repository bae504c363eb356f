"""`make faults`: a seeded search for faults in the whole program, and `make mutations`, which
judges the tests.

A case is a kind and a number; with the seed it says all that happens. `campaign` runs cases in
forked processes and keeps what came out; the other modules hold the kinds.
"""
