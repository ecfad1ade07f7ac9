#!/usr/bin/env bash
# Load a running server with guidellm's own client: synchronous, then concurrent.
#   scripts/check_guidellm.sh URL TOKENIZER_FOLDER [MODEL] [OUT_FOLDER]
# Needs pip install guidellm (it brings torch); benchmarks/mlx_lm_folder.py writes a folder with SmolLM2's tokenizer.
set -euo pipefail
url=$1 tokenizer=$2 model=${3:-smollm2} out=${4:-guidellm-results}
mkdir -p "$out"
for profile in kind=synchronous kind=concurrent,streams=4; do
  HF_HUB_OFFLINE=1 "${GUIDELLM:-guidellm}" run --backend "kind=openai_http,target=$url,model=$model" \
    --profile "$profile" --constraint kind=max_requests,count=8 --tokenizer "kind=hf_auto,model=$tokenizer" \
    --data kind=synthetic_text,prompt_tokens=32,output_tokens=16 \
    --output "kind=json,path=$out/${profile//[=,]/-}.json"
done
