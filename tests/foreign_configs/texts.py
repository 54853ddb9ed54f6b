"""Configurations of six programs in small, as their users write them."""

AXOLOTL = """\
base_model: NousResearch/Llama-2-7b-hf
load_in_4bit: true
adapter: qlora
lora_r: 32
lora_target_linear: true
sequence_len: 4096
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 4
optimizer: adamw_bnb_8bit
bf16: auto
gradient_checkpointing: true
attn_implementation: flash_attention_2
wandb_projct: mine
"""
TRL_JSON = """\
{"model_name_or_path": "meta-llama/Llama-3.1-8B", "max_length": 2048, "per_device_train_batch_size": 4,
 "gradient_accumulation_steps": 8, "bf16": true, "dtype": "bfloat16", "gradient_checkpointing": true,
 "fsdp": "full_shard auto_wrap", "max_steps": 100, "packing": true, "use_liger_kernel": true}
"""
TRL_PYTHON = """\
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer
raise SystemExit("this file is read and never executed")
MODEL = "Qwen/Qwen2.5-7B"
model = AutoModelForCausalLM.from_pretrained(MODEL, torch_dtype=torch.bfloat16, attn_implementation="sdpa")
peft = LoraConfig(r=16, target_modules=["q_proj", "v_proj"])
args = SFTConfig(output_dir="out", per_device_train_batch_size=2, max_length=1024, max_steps=10, bf16=True)
"""
TRL_COMMAND = (
    "torchrun --nproc-per-node 8 sft.py --model_name_or_path meta-llama/Llama-3.1-8B --max_length 2048 "
    "--per_device_train_batch_size 1 --gradient_accumulation_steps 4 --bf16 true --dtype bfloat16 --max_steps 10"
)
TORCHTITAN = """\
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 2
seq_len = 8192
steps = 1000
[parallelism]
tensor_parallel_degree = 2
[activation_checkpoint]
mode = "selective"
[compile]
enable = true
"""
MEGATRON = """\
#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NNODES=${NNODES:-2}
WORLD_SIZE=$(($GPUS_PER_NODE*$NNODES))
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE   # all of a node
    --nnodes $NNODES
    --master_addr $MASTER_ADDR
)
MODEL_ARGS=(
    --num-layers 32 --hidden-size 4096 --num-attention-heads 32
    --ffn-hidden-size 14336 --group-query-attention --num-query-groups 8
    --seq-length 8192 --max-position-embeddings 8192 --swiglu
    --untie-embeddings-and-output-weights --vocab-size 128256
)
TRAINING_ARGS="--micro-batch-size 1 --global-batch-size 128 --bf16 --train-iters 500 \\
    --use-distributed-optimizer --sequence-parallel"
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \\
    ${MODEL_ARGS[@]} $TRAINING_ARGS --tensor-model-parallel-size 2 \\
    --recompute-activations
"""
DEEPSPEED = """\
{"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "bf16": {"enabled": true},
 "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}, "gradient_clipping": "auto"}
"""
LITGPT = """\
checkpoint_dir: checkpoints/meta-llama/Llama-2-7b-hf
precision: bf16-true
quantize: bnb.nf4
devices: 1
lora_r: 32
lora_query: true
lora_value: true
data: {class_path: litgpt.data.Alpaca2k}
train: {global_batch_size: 8, micro_batch_size: 2, epochs: 4, max_seq_length: 512}
optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 0.0002}}
"""
