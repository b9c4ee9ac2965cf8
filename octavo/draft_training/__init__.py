"""Training heads that draft, in place: on the user's machine, on what his model says itself.

    prompts.py        what it is asked by those who have no data
    data.py           its answers
    hidden_states.py  what its head sees, by the engine's own kernels
    shortlist.py      the tokens that may be guessed
    examples.py       positions of answers as batches
    pieces.py         the same for heads with attention, with the context before them
    heads.py          what is trained: heads without attention
    eagle.py          and the one with a decoder layer
    loop.py           how; state.py has it as arrays, to go on from
    evaluation.py     how often it is right
    tree.py           which combinations of Medusa's guesses are worth a row
    kinds.py          the folders of heads
    workfolder.py     what an ended run has done
    job.py            from a model to heads on disk

It computes with PyTorch. To draft with what it makes nothing of this is needed.
"""
