"""Many questions about one text: its KV is computed once and shared."""

from octavo import LLM, SamplingParams

TEXT = "The harbour of Aldmere has one lighthouse, built in 1871 and still in use. " * 12
QUESTIONS = ["When was the lighthouse built?", "Is it in use?", "How many are there?"]


def ask(llm: LLM, questions: list[str]) -> None:
    params = SamplingParams(temperature=0, max_tokens=16)
    for question in questions:
        (output,) = llm.generate(f"{TEXT}\nQ: {question}\nA:", params)
        metrics = output.metrics
        print(
            f"  {question:<34} {metrics.num_cached_tokens:>4} of {len(output.prompt_token_ids)} "
            f"prompt tokens cached, first token after {metrics.ttft * 1e3:6.1f} ms"
        )


def main() -> None:
    for caching in (False, True):
        print(f"prefix caching {'on' if caching else 'off'}:")
        with LLM("smollm2-135m", enable_prefix_caching=caching) as llm:
            ask(llm, QUESTIONS)


if __name__ == "__main__":
    main()
