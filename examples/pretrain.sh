#!/bin/sh
# Pre-trains a small BERT on the text that this Python installation has, in about five minutes on two CPU cores:
#
#     sh examples/pretrain.sh [FOLDER]
#
# Then FOLDER/run has the checkpoints, which transformers loads, and curves.png. Rerun the command to resume an
# interrupted run. Three million words show that the model learns; they do not make a good model.
set -eu

here=$(dirname "$0")
folder=${1:-pretraining}
python=${PYTHON:-python}
mkdir -p "$folder"

test -f "$folder/text.jsonl" || "$python" "$here/python_text.py" "$folder/text.jsonl"
test -d "$folder/tokenizer" ||
    "$python" -m fastbert train-tokenizer "$folder/text.jsonl" --vocab-size 2000 --output "$folder/tokenizer"
test -d "$folder/shards" ||
    "$python" -m fastbert prepare "$folder/text.jsonl" --tokenizer "$folder/tokenizer" --output "$folder/shards"

# BERT's recipe, in fewer, shorter and faster steps. A small vocabulary, so that each token is seen often
"$python" -m fastbert pretrain --data "$folder/shards" --model "$here/bert-small.json" --recipe bert \
    --steps 5000 --batch-size 32 --max-length 64 --lr 1e-3 --warmup 0.1 --dtype bf16 \
    --log-every 20 --save-every 500 --output "$folder/run"
