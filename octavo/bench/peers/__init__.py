"""Octavo beside other engines, on one machine, in turns.

`contenders.py` knows the engines and how each is set going, `child.py` keeps those that wait
stopped, `workers/` holds what runs inside them, `llama_bench.py` reads llama.cpp's own programs;
`compare.py` gives all of them their turns, and `report.py` makes figures and ratios of it.
"""
