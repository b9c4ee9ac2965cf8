"""Settings for a load and its limits: searched in simulation, confirmed live, and explained.

space       what may be set, and which settings are tried
outcome     what a load made of some settings, and which of two outcomes is the better one
objective   what is asked for: a given load served best, or the highest rate
search      successive halving; changes that bring nothing put back; what the others bring
simulated   a load on a simulated engine of some settings
study       all of these put together
live        the best few on real engines, in turns
explain     why, in a few sentences
config_text what `octavo serve --config` reads
"""
