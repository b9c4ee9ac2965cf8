"""A benchmark of octavo on a GPU, in minutes and without a network: ``scripts/bench-gpu``.

``run.py`` measures the cases of ``cases.py``, the most important first, as time allows; models with
random weights are made by ``random_model.py``, and engines are the workers of ``bench/peers``.
"""
