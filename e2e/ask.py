"""Asks a model one question through the official OpenAI client and prints the answer as it is streamed.

python -m e2e.ask --url http://127.0.0.1:8000/v1 --model chat "What is a bus?"
"""

import argparse
import sys

import openai

# Small models answer it right whatever rounding their weights went through.
QUESTION = "What is the capital of France, and why do people visit it? Answer in two sentences."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="base URL, up to and including /v1")
    parser.add_argument("--model", required=True, help="served model name")
    parser.add_argument("--max-tokens", type=int, default=60, help="longest answer (default 60)")
    parser.add_argument("question")
    args = parser.parse_args()
    client = openai.OpenAI(base_url=args.url, api_key="none", timeout=120)
    try:
        stream = client.chat.completions.create(
            model=args.model,
            messages=[{"role": "user", "content": args.question}],
            max_tokens=args.max_tokens,
            temperature=0,
            stream=True,
        )
        for event in stream:
            if event.choices and event.choices[0].delta.content:
                print(event.choices[0].delta.content, end="", flush=True)
    except openai.OpenAIError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
