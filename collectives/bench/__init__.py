"""``python -m collectives.bench``: collectives measured against each other and against the libraries' own calls.

All contenders run in one set of processes and take turns, call by call, so that whatever else happens on the machine
happens to all of them. A figure is the median over iterations of the slowest rank's time. Every result is verified.
"""
