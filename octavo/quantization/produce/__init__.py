"""Making quantized weights.

    grid.py         what a group of weights can be, and the nearest of that
    calibration.py  text as windows of tokens
    observers.py    a model run layer by layer, and what its linears are handed
    gptq.py         codes that make up for each other's errors
    autoround.py    codes and scales of a whole layer, learned together by gradients
    pipeline.py     from a checkpoint to quantized matrices, one after the other

It computes with PyTorch. What it makes becomes a file elsewhere, and to load that file nothing of
this is needed.
"""
