"""Tuning of settings for a load and its limits, in simulation and live.

space                the settings that are searched, and the candidates
outcome              latencies and goodput of a load under some settings, and how they compare
objective            the goal: the best service of a given load, or the highest rate
search               successive halving; changes without effect undone; ablations of the others
simulated_engines    a load on a simulated engine with some settings
study                all of these put together
live_confirmation    the best few on real engines, in turns
explain              the reasons, in a few sentences
config_text          the file that `octavo serve --config` reads
"""
