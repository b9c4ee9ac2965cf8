"""Engine folders: a model made ready by ``octavo build``, so that a start has little to do.

    octavo.json         the manifest: what this is, and the step's program
    weights.packed      the weights as the native kernels read them, mapped; of no instruction set
    constants.bin       what else the program needs of the model: norms, biases
    ...                 what the tokenizer is made of

    manifest.py         what is said of the whole: format, versions, files with digests, settings
    model_config.py     the model's config
    program.py          the fused ops of a step
    tokenizer_files.py  the tokenizer
    writer.py           makes a folder of a model
    folder.py           `EngineFolder`, which is one more kind of model

A folder may come from anybody. It is data: nothing of it is executed, and no size that it tells
reaches the kernels before it has been held against the bytes that are there.
"""
