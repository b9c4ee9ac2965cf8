"""Cost model: the memory a model needs and the time its steps take, on any hardware.

The planner, the simulator, benchmarks, speculation and the live engine compute with these same
functions, so that their answers agree. Pure Python: no torch, no numpy, no weights.

A model is known by its shape (`model_spec`), which becomes what one rank holds of it (`rank_model`)
by a precision (`precision`) and a layout (`parallel`). A step of it (`step_cost`) takes time on a
device (`hardware`) as an engine would run it (`engine_profile`); memory (`memory`) is of the same
parts. Every figure that is not exact is a `Prediction`.
"""
