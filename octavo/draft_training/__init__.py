"""Trains draft heads (ReDrafter, Medusa, EAGLE-3) on a model's own answers, on the user's machine.

    prompts.py           built-in prompts, for users without data
    model_answers.py     the model's answers to prompts
    sequence_states.py   hidden states of these, computed by the engine's own kernels
    shortlist.py         the tokens that heads can draft
    examples.py          positions of answers as training batches
    context_examples.py  the same with the context before them, for heads with attention
    stateless_heads.py   the heads without attention: ReDrafter and Medusa
    eagle.py             the EAGLE-3 head
    training_loop.py     the loss and the optimizer; training_state.py saves and restores them
    evaluation.py        acceptance on held-out answers
    medusa_tree.py       the static draft tree of Medusa
    head_kinds.py        how each kind is made, and its folder
    training_job.py      from a model to a folder of heads

It computes with PyTorch. To draft with the heads nothing of this package is needed.
"""
