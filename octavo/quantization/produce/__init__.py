"""Making quantized weights.

    scheme.py       bits, groups, zeros
    grid.py         what a group of weights can be, and the nearest of that
    calibration.py  text as windows of tokens
    observers.py    a model run layer by layer, and what its linears are handed
    gptq.py         codes that make up for each other's errors
    rotation.py     a checkpoint whose residual stream is rotated, by matrices of hadamard.py
    scaling.py      scales of input channels, folded into the op before
    awq.py          such scales for rounded weights
    smoothquant.py  such scales for rounded weights and activations
    autoround.py    codes and scales of a whole layer, learned together by gradients
    distillation.py how far a model with other weights is from itself, and its gradient
    fake_quant.py   quantized matrices in training
    qat.py          scales of a whole model, trained on what it says itself
    pipeline.py     from a checkpoint to quantized matrices, one after the other
    candidates.py   what a matrix of a mix may become
    sensitivity.py  what that would cost, as KL divergence
    allocation.py   the least cost for a size
    mixture.py      a mix for a target of bits per weight
    tables.py       FP8 and NF4
    resume.py       what is kept of a run that was ended
    recipes.py      methods, formats, defaults
    writers/        the formats
    job.py          from a model to a smaller one on disk
    explore.py      what a scheme makes of some rows, as data; named_schemes.py has the schemes

It computes with PyTorch. What it makes becomes a file elsewhere, and to load that file nothing of
this is needed.
"""
