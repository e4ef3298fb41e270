#!/bin/bash
# Eight devices; the batch is written once and used twice.
DEVICES=${DEVICES:-8}
BATCH=4
LENGTH=$((2 * 256))
COMMON=(--per_device_train_batch_size $BATCH --max_length "$LENGTH")

accelerate launch --num_processes "$DEVICES" --mixed_precision bf16 \
    sft.py \
    --model_name_or_path model \
    --dataset_name rows.jsonl \
    "${COMMON[@]}" \
    --gradient_accumulation_steps 2 \
    --learning_rate 2.0e-5 \
    --warmup_steps 10 \
    --max_steps 200 \
    --packing \
    --no_remove_unused_columns \
    --lora_r 16 \
    --optim adamw_torch \
    --eval_strategy steps --eval_steps 50 \
    --run_name "sft-$USER_TAG" \
    --output_dir out/sft  # a comment
