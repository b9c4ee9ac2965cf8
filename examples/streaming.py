"""Print an answer while it is generated; stop early by leaving the loop."""

from contextlib import closing

from octavo import LLM, SamplingParams

MESSAGES = [{"role": "user", "content": "Tell me a story about a lighthouse."}]
ENOUGH = 400  # characters


def main() -> None:
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=512)
    with LLM("smollm2-135m") as llm:
        length = 0
        # Closing the stream aborts the request, and its KV blocks are free again.
        with closing(llm.stream_chat(MESSAGES, params)) as stream:
            for chunk in stream:
                print(chunk.text, end="", flush=True)
                length += len(chunk.text)
                if length > ENOUGH:
                    print(" …")
                    break


if __name__ == "__main__":
    main()
