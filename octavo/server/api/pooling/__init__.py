"""Routes whose answers are vectors and scores, in the forms of OpenAI, vLLM and others."""
