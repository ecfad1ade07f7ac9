"""lm-eval's log-likelihoods over HTTP against LLM's prompt log-probabilities of the same strings, in this process.

    python scripts/compare_loglikelihoods.py MODEL SAMPLES.jsonl...

SAMPLES are what `lm-eval run --log_samples --output_path` writes. Prints the largest difference of a file; the
status is 1 where one is above 1e-4, or where an answer was called greedy on one side alone.
"""

from __future__ import annotations

import json
import pathlib
import sys

from mlxcel_ext.llm import LLM
from mlxcel_ext.sampling_params import SamplingParams

TOLERANCE = 1e-4


def pairs(path: pathlib.Path) -> list[tuple[str, str, float, bool]]:
    """Context, continuation, log-likelihood and whether it is the greedy answer, of every choice in the file."""
    found = []
    for line in path.read_text().splitlines():
        sample = json.loads(line)
        arguments = sample["arguments"]
        asked = arguments.values() if isinstance(arguments, dict) else arguments
        for one, ((told, greedy), *_) in zip(asked, sample["resps"], strict=True):
            context, continuation = one.values() if isinstance(one, dict) else one
            found.append((context, continuation, float(told), str(greedy) == "True"))
    return found


def scored(llm: LLM, context: str, continuation: str) -> tuple[float, bool]:
    """Sum over the continuation's tokens, cut from the whole as lm-eval cuts it."""
    encode = llm.tokenizer.encode
    whole, start = encode(context + continuation), len(encode(context))
    [completion] = llm.generate([whole], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1))
    entries = (completion.prompt_logprobs or [])[start:]
    assert len(entries) == len(whole) - start
    known = [entry for entry in entries if entry is not None]
    return sum(entry.logprob for entry in known), all(entry.rank == 1 for entry in known)


def main() -> int:
    model, *files = sys.argv[1:]
    within = True
    with LLM(model) as llm:
        for file in files:
            differences = []
            for context, continuation, told, greedy in pairs(pathlib.Path(file)):
                own, own_greedy = scored(llm, context, continuation)
                differences.append(abs(told - own) if greedy == own_greedy else float("inf"))
            print(f"{len(differences)} log-likelihoods, largest difference {max(differences):.3g}: {file}")
            within = within and all(d <= TOLERANCE for d in differences)  # a NaN is not
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
