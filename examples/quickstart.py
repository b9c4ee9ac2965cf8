"""Complete two prompts at once, and show how long it took."""

from octavo import LLM, SamplingParams

PROMPTS = ["The capital of France is", "Water boils at"]


def main() -> None:
    params = SamplingParams(temperature=0, max_tokens=24)
    with LLM("smollm2-135m") as llm:
        for output in llm.generate(PROMPTS, params):
            answer = output.outputs[0]
            print(f"{output.prompt}{answer.text}")
            print(
                f"  [{len(answer.token_ids)} tokens, ended by {answer.finish_reason}, "
                f"first token after {output.metrics.ttft * 1e3:.0f} ms]"
            )


if __name__ == "__main__":
    main()
