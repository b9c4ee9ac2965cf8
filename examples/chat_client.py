"""A chat in the terminal, on the Python API alone. Ctrl-D ends it."""

import sys

from octavo import LLM, SamplingParams


def main() -> None:
    params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=256)
    messages = [{"role": "system", "content": "You are a helpful, brief assistant."}]
    with LLM(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m") as llm:
        while True:
            try:
                question = input("> ")
            except EOFError:
                break
            messages.append({"role": "user", "content": question})
            answer = ""
            # The prefix cache has the KV of the conversation so far: a turn computes what is new.
            for chunk in llm.stream_chat(messages, params):
                print(chunk.text, end="", flush=True)
                answer += chunk.text
            print(f"\n[{chunk.output.metrics.num_cached_tokens} prompt tokens came from the cache]")
            messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    main()
