"""What a GPU makes of octavo, in minutes and without a network: ``scripts/bench-gpu``.

``run.py`` measures the cases of ``cases.py``, the most important first, as far as its time goes;
models are made up by ``random_model.py``, and engines are the workers of ``bench/peers``.
"""
