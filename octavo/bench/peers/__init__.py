"""Octavo beside other engines, on one machine, in turns.

`contenders.py` starts each engine, `child.py` stops those that wait, `workers/` holds the scripts
that run inside them, `llama_bench.py` parses llama.cpp's own programs; `compare.py` gives all of
them their turns, and `report.py` computes figures and ratios.
"""
