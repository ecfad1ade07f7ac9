#!/usr/bin/env bash
# Score a small local task through lm-eval's local-completions: echo, prompt logprobs, text and token-id prompts.
#   scripts/check_lm_eval.sh URL TOKENIZER_FOLDER [MODEL]
# Needs pip install 'lm-eval[api]' and transformers (LM_EVAL names another lm-eval); benchmarks/mlx_lm_folder.py writes
# a folder with SmolLM2's tokenizer. Prints the accuracy with prompts as text and as ids, which must be the same, and
# compares every log-likelihood with LLM's own, in a process of its own.
set -euo pipefail
cd "$(dirname "$0")/.."
url=$1 tokenizer=$2 model=${3:-smollm2}
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
for tokenized in False True; do
  echo "tokenized_requests=$tokenized"
  OPENAI_API_KEY=${OPENAI_API_KEY:-none} HF_HUB_OFFLINE=1 "${LM_EVAL:-lm-eval}" run --model local-completions \
    --model_args "base_url=$url/v1/completions,model=$model,tokenizer=$tokenizer,tokenizer_backend=huggingface,tokenized_requests=$tokenized,num_concurrent=4,max_retries=1" \
    --tasks capitals --include_path scripts/lm_eval_tasks --batch_size 2 --log_samples --output_path "$out/$tokenized" |
    grep -A 4 "^|"
done
mapfile -t samples < <(find "$out" -name 'samples_*.jsonl')
python3 scripts/compare_loglikelihoods.py "$model" "${samples[@]}"
