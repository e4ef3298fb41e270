# Flat flags of before, in a text that deepspeed gets.
read -r -d '' training_commands <<EOF
openrlhf.cli.train_dpo \
   --save_path out/dpo \
   --train_batch_size 256 \
   --micro_train_batch_size 1 \
   --pretrain model \
   --bf16 \
   --max_epochs 1 \
   --max_len 1024 \
   --learning_rate 5e-7 \
   --beta 0.1 \
   --dataset rows.jsonl \
   --chosen_key better \
   --rejected_key worse \
   --flash_attn \
   --gradient_checkpointing
EOF
deepspeed --module $training_commands
