#!/bin/sh
# The main job, start to end: make the data, train, export. `make quickstart` calls it with the folders it should use.
set -eu

mkdir -p "$DATA"
"$BIN/python" examples/home_control/make.py --seed 0 --rows 500 --out "$DATA/train.jsonl"
"$BIN/python" examples/home_control/make.py --seed 1 --rows 100 --out "$DATA/validation.jsonl"

# An older quickstart makes room; a folder that is no run is left alone.
if [ -f "$RUN/run.yaml" ]; then rm -rf "$RUN"; fi
"$BIN/fleetune" train --model smollm2-135m --data "$DATA/train.jsonl" --validation "$DATA/validation.jsonl" \
    --method lora --lora-rank 16 --lora-alpha 32 --learning-rate 2e-3 \
    --sequence-length 192 --global-batch-size 1 --exact-match --max-new-tokens 40 --run "$RUN"
"$BIN/fleetune" export "$RUN" --to merged

cat <<END

The adapter is in $RUN/adapter, the whole model in $RUN/export/merged, all figures in $RUN/summary.json.

Ask it:
  $BIN/fleetune generate $RUN --system "You control a home. Reply in JSON." "dim the hall light to forty percent at 9 pm"
Your own data:
  $BIN/fleetune data inspect YOUR.jsonl --model smollm2-135m
  $BIN/fleetune train --model smollm2-135m --data YOUR.jsonl --validation-share 0.1 --run runs/mine
END
