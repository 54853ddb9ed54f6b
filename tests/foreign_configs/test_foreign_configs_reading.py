"""What six formats say of a run, and the sentences where they cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.errors import PlaitError
from plait.foreign_configs.reading import OVERRIDES, is_configuration, read_configuration
from plait.layout import Layout
from tests.foreign_configs import texts

READ = {
    "axolotl.yaml": (
        texts.AXOLOTL,
        {"program": "axolotl", "model": "NousResearch/Llama-2-7b-hf", "sequence": 4096, "micro_sequences": 2,
         "accumulation": 4, "adapter_rank": 32, "quantized_bits": 4, "recompute": "full", "weights": "16 bits",
         "optimizer": "adamw_bnb_8bit", "unknown": ("wandb_projct (is it wandb_project?)",)},
    ),
    "trl.json": (
        texts.TRL_JSON,
        {"program": "transformers", "sharded": "parameters", "micro_sequences": 4, "accumulation": 8, "steps": 100,
         "weights": "16 bits", "precision": "bf16", "loss": "in pieces", "unknown": ()},
    ),
    "trl.py": (
        texts.TRL_PYTHON,
        {"program": "transformers", "model": "Qwen/Qwen2.5-7B", "adapter_rank": 16, "sequence": 1024, "steps": 10,
         "adapter_targets": ("attention.q", "attention.v"), "weights": "16 bits", "recompute": "none"},
    ),
    "titan.toml": (
        texts.TORCHTITAN,
        {"program": "torchtitan", "model": "llama3-8B", "sequence": 8192, "micro_sequences": 2,
         "layout": Layout(tensor=2),
         "sharded": "parameters", "recompute": "selective", "compiled": True, "unknown": ()},
    ),
    "megatron.sh": (
        texts.MEGATRON,
        {"program": "megatron", "devices": 16, "per_node": 8, "layout": Layout(tensor=2),
         "batch_sequences": 128, "sequence": 8192,
         "sharded": "optimizer", "recompute": "selective", "sequence_parallel": True, "steps": 500, "unknown": ()},
    ),
    "ds.json": (
        texts.DEEPSPEED,
        {"program": "deepspeed", "model": None, "sequence": None, "micro_sequences": 4, "accumulation": 2,
         "sharded": "parameters", "offloads_optimizer": True, "has_master_weights": True, "unknown": ()},
    ),
    "litgpt.yaml": (
        texts.LITGPT,
        {"program": "litgpt", "model": "meta-llama/Llama-2-7b-hf", "devices": 1, "adapter_rank": 32,
         "quantized_bits": 4, "sequence": 512, "samples": 1900, "epochs": 4.0, "unknown": ()},
    ),
}  # fmt: skip


@pytest.mark.parametrize("file", READ)
def test_each_format_is_recognised_and_read(file: str, tmp_path: Path) -> None:
    text, expected = READ[file]
    (tmp_path / file).write_text(text)
    _, run = read_configuration(str(tmp_path / file))
    assert {name: getattr(run, name) for name in expected} == expected


def test_a_command_line_alone_is_read_with_its_launchers_devices() -> None:
    name, run = read_configuration(texts.TRL_COMMAND)
    assert (run.devices, run.micro_sequences, run.accumulation, run.weights) == (8, 1, 4, "16 bits")
    assert name.startswith("TrainingArguments")


def test_a_commands_own_options_count_more_than_its_files(tmp_path: Path) -> None:
    (tmp_path / "titan.toml").write_text(texts.TORCHTITAN)
    script = tmp_path / "run.sh"
    script.write_text("torchrun --nproc_per_node=8 train.py --job.config_file titan.toml --training.seq_len 4096\n")
    _, run = read_configuration(str(script))
    assert (run.sequence, run.micro_sequences, run.devices) == (4096, 2, 8)


def test_the_launchers_file_says_what_is_sharded(tmp_path: Path) -> None:
    command = (
        "accelerate launch --config_file acc.yaml sft.py --per_device_train_batch_size 2 --use_peft --max_steps 3\n"
    )
    script = tmp_path / "run.sh"
    script.write_text(command)
    with pytest.raises(PlaitError, match=r"acc\.yaml, which does not exist; give sharded="):
        read_configuration(str(script))
    (tmp_path / "acc.yaml").write_text(
        "distributed_type: FSDP\nnum_processes: 4\nfsdp_config: {fsdp_offload_params: true}\n"
    )
    _, run = read_configuration(str(script))
    assert (run.sharded, run.offloads_parameters, run.devices) == ("parameters", True, 4)


def test_what_a_person_says_counts_more_than_the_file(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(texts.DEEPSPEED)
    _, run = read_configuration(str(file), ["model=gpt2", "sequence=1024", "micro_sequences=8", "recompute=full"])
    assert (run.model, run.sequence, run.micro_sequences, run.recompute) == ("gpt2", 1024, 8, "full")


def test_aliases_of_yaml_and_values_of_the_shell_are_followed(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("base_model: gpt2\nsequence_len: &n 512\nmicro_batch_size: 1\neval_sequence_len: *n\n")
    assert read_configuration(str(file))[1].sequence == 512


BAD = {
    "empty.yaml": ("", "is empty"),
    "list.yaml": ("- 1\n- 2\n", "contains no keys"),
    "other.yaml": ("services: {web: {image: nginx}}\n", "no format that plait knows.*it reads: Axolotl YAML"),
    "tag.yaml": ("base_model: !!python/object/apply:os.system ['true']\n", "would create an object"),
    "twice.yaml": ("base_model: a\nbase_model: b\n", "base_model is given twice"),
    "broken.yaml": ("base_model: [a\n", "not valid YAML"),
    "documents.yaml": ("base_model: a\n---\nbase_model: b\n", "several documents"),
    "broken.toml": ("[model\n", "is not TOML"),
    "broken.json": ("{", "is not JSON"),
    "both.yaml": ("base_model: gpt2\nsequence_len: 8\nbf16: true\nfp16: true\n", "bf16 and fp16 are both on"),
    "bits.yaml": ("base_model: gpt2\nload_in_4bit: true\nload_in_8bit: true\n", "contradict each other"),
    "frozen.yaml": ("base_model: gpt2\nload_in_4bit: true\n", "none would be trained"),
    "placeholder.yaml": ("base_model: gpt2\nsequence_len: ${LENGTH}\n", "known only when it runs"),
    "word.yaml": ("base_model: gpt2\nsequence_len: long\n", "is not a whole number"),
    "both.json": ('{"output_dir": "o", "fsdp": "full_shard", "deepspeed": "zero3.json"}', "fsdp and deepspeed"),
    "lengths.json": ('{"output_dir": "o", "max_length": 8, "max_seq_length": 9}', "contradict each other"),
    "none.py": ("x = 1\n", "has neither a call"),
    "broken.py": ("def (", "is not valid Python"),
    "nothing.sh": ("echo hello\n", "starts no program"),
    "branch.sh": ("if [ $1 == a ]; then\nTP=1\nelse\nTP=2\nfi\npython pretrain_gpt.py --num-layers 2 --hidden-size 64 "
                  "--num-attention-heads 2 --micro-batch-size 1 --tensor-model-parallel-size $TP\n",
                  "depends-on-a-condition"),
    "unsaid.sh": ("python pretrain_gpt.py --num-layers 2 --micro-batch-size 1\n", "no --hidden-size, --num-attention"),
    "then.sh": ("TP=1\nif [ x ]; then TP=2; fi\npython pretrain_gpt.py --num-layers 2 --hidden-size 64 "
                "--num-attention-heads 2 --micro-batch-size 1 --tensor-model-parallel-size $TP\n",
                "depends-on-a-condition"),
    "and.sh": ('TP=1\n[ -z "$X" ] && TP=2\npython pretrain_gpt.py --num-layers 2 --hidden-size 64 '
               "--num-attention-heads 2 --micro-batch-size 1 --tensor-model-parallel-size $TP\n",
               "depends-on-a-condition"),
    "or.sh": ('[[ "$X" == "a && b" ]] &&\n  export TP=2 || TP=4\npython pretrain_gpt.py --num-layers 2 '
              "--hidden-size 64 --num-attention-heads 2 --micro-batch-size 1 --tensor-model-parallel-size $TP\n",
              "depends-on-a-condition"),
    "group.sh": ("TP=1\ntest -n a && { echo b; TP=2; }\npython pretrain_gpt.py --num-layers 2 --hidden-size 64 "
                 "--num-attention-heads 2 --micro-batch-size 1 --tensor-model-parallel-size $TP\n",
                 "depends-on-a-condition"),
    "large.sh": (f"A=$(({'*'.join(['9' * 18] * 300)}))\npython pretrain_gpt.py --num-layers $A --hidden-size 64 "
                 "--num-attention-heads 2 --micro-batch-size 1\n", "known only when it runs"),
    "doubled.sh": ("A=xx\n" + 'A="$A$A"\n' * 60 + "python a.py --num-layers $A\n", "more than 1,000,000 characters"),
    "large.yaml": (f"base_model: gpt2\nsequence_len: 0x{'f' * 5000}\n", "a number of 20,000 bits"),
    "large.py": (f"a = SFTConfig(max_steps=0x{'f' * 5000})\n", "max_steps is 'an expression'"),
    "stage.json": ('{"zero_optimization": {"stage": 2.0}}', "stage = 2.0 is not 0, 1, 2 or 3"),
    "processes.sh": ("accelerate launch --config_file acc.yaml sft.py --max_steps 3\n", "num_processes = 0 is too"),
    "twice.sh": ("python pretrain_gpt.py --num-layers 2 --num-layers 3 --micro-batch-size 1\n", "--num-layers twice"),
}  # fmt: skip


@pytest.mark.parametrize("file", BAD)
def test_what_cannot_be_read_is_one_sentence(file: str, tmp_path: Path) -> None:
    text, sentence = BAD[file]
    (tmp_path / file).write_text(text)
    (tmp_path / "acc.yaml").write_text("num_processes: 0\n")
    with pytest.raises(PlaitError, match=sentence) as raised:
        read_configuration(str(tmp_path / file))
    assert "\n" not in str(raised.value)


def test_no_file_a_folder_and_bytes_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    for name, sentence in (
        ("none.yaml", "there is no file"),
        ("", "cannot be read"),
        ("bytes.yaml", "not a text in UTF-8"),
    ):
        with pytest.raises(PlaitError, match=sentence):
            read_configuration(str(tmp_path / name))


def test_few_lines_of_aliases_do_not_become_billions(tmp_path: Path) -> None:
    lines = ["a0: &a0 {x: 1, y: 2, z: 3}"]
    lines += [f"a{i}: &a{i} {{b: *a{i - 1}, c: *a{i - 1}, d: *a{i - 1}}}" for i in range(1, 25)]
    (tmp_path / "bomb.yaml").write_text("\n".join(lines))
    with pytest.raises(PlaitError, match=r"more than 20,000 values"):
        read_configuration(str(tmp_path / "bomb.yaml"))
    merged = [f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}" for i in range(1, 12)]
    (tmp_path / "merged.yaml").write_text("\n".join([lines[0], *merged]))
    with pytest.raises(PlaitError, match="no format that plait knows"):
        read_configuration(str(tmp_path / "merged.yaml"))


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ("colour=red", "not one of the values"),
        ("sharded=some", "choose nothing"),
        ("steps=0", "too small"),
        ("steps", "not one of"),
    ],
)
def test_what_cannot_be_said_is_one_sentence(said: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(texts.AXOLOTL)
    with pytest.raises(PlaitError, match=sentence):
        read_configuration(str(tmp_path / "a.yaml"), [said])


def test_programs_are_told_from_configurations() -> None:
    assert all(is_configuration(one) for one in ("a.yaml", "b.toml", "c.JSON", "run.sh", "python a.py --x 1"))
    assert not any(is_configuration(one) for one in ("torchrun", "python", "./train", "accelerate", "train.py"))
    assert is_configuration("args.py", names_machines=True) and is_configuration("args.py", ["model=gpt2"])
    assert not is_configuration("args.py", ["--epochs=2"])


def test_every_word_that_can_be_said_is_in_the_guide() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guide-check.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in guide for name in OVERRIDES)


MEGATRON = (
    "pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 64 --micro-batch-size 1"
)
SCRIPTS = {
    "variables set for one command": (
        f"export A=1 B=2\nCUDA_VISIBLE_DEVICES=0,1 NAME='a b' torchrun --nproc-per-node 2 {MEGATRON}\n",
        {"devices": 2},
    ),
    "a sum, products first": (
        f"A=2\nB=$(( A + 3 * (A + 1) ))\ntorchrun {MEGATRON} --global-batch-size $B\n", {"batch_sequences": 11},
    ),
    "nodes that only the cluster knows": (
        f"torchrun --nnodes $SLURM_NNODES --nproc-per-node 2 {MEGATRON}\n", {"devices": None},
    ),
    "a declared array": (
        f"declare -a A=(\n  {MEGATRON[15:]}\n)\ntorchrun pretrain_gpt.py ${{A[@]}}\n", {"sequence": 64},
    ),
    "words that look like variables": (
        f"A=${{NAME:-a b}} B=$(date +'%Y') C=\\a\\b torchrun --nproc-per-node 2 {MEGATRON}\n", {"devices": 2},
    ),
    "commands and groups that set nothing": (
        f"TP=1; cd /a || {{ echo 'no && yes'; exit 1; }}\nTP=2 && N=2\nA=3 && cd /b && torchrun --nproc-per-node $N "
        f"{MEGATRON} --tensor-model-parallel-size $TP\n",
        {"devices": 2, "layout": Layout(tensor=2)},
    ),
    "a variable that only a condition sets": (
        f'[ -z "$N" ] && N=2\ntorchrun --nproc-per-node $N {MEGATRON}\n', {"devices": 2},
    ),
    "options of accelerate": (
        "accelerate launch --mixed_precision bf16 --use_deepspeed --zero_stage 3 sft.py --max_steps 3\n",
        {"precision": "bf16", "sharded": "parameters"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_read_as_a_shell_reads_them(name: str, tmp_path: Path) -> None:
    text, expected = SCRIPTS[name]
    (tmp_path / "run.sh").write_text(text)
    _, run = read_configuration(str(tmp_path / "run.sh"))
    assert {field: getattr(run, field) for field in expected} == expected


def test_a_command_longer_than_a_files_name_is_read() -> None:
    _, run = read_configuration(f"torchrun --nproc-per-node 2 {MEGATRON} --save /somewhere/{'x' * 300}")
    assert run.devices == 2


AXOLOTL_VALUES = {
    "fsdp_version: 2\nfsdp_config: {activation_checkpointing: false}\n": {"recompute": "none"},
    "deepspeed: {zero_optimization: {stage: 2}}\n": {"sharded": "gradients"},
    "deepspeed: deepspeed_configs/zero3_bf16_cpuoffload_params.json\n": {
        "sharded": "parameters", "offloads_parameters": True, "offloads_optimizer": False,
    },
    "deepspeed: deepspeed_configs/zero3_bf16_cpuoffload_all.json\n": {
        "offloads_parameters": True, "offloads_optimizer": True,
    },
    "bf16: auto\nfp16: auto\n": {"precision": "bf16"},
    "mid: &mid {<<: {micro_batch_size: 2}, micro_batch_size: 3}\n<<: *mid\n": {"micro_sequences": 3},
}  # fmt: skip


@pytest.mark.parametrize("lines", AXOLOTL_VALUES)
def test_values_of_yaml(lines: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("base_model: gpt2\nsequence_len: 64\n" + lines)
    _, run = read_configuration(str(tmp_path / "a.yaml"))
    assert {field: getattr(run, field) for field in AXOLOTL_VALUES[lines]} == AXOLOTL_VALUES[lines]


@pytest.mark.parametrize(("devices", "sharded"), [("devices: auto\n", "parameters"), ("", "nothing")])
def test_litgpt_shards_where_it_takes_all_devices(devices: str, sharded: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(texts.LITGPT.replace("devices: 1\n", devices))
    _, run = read_configuration(str(tmp_path / "a.yaml"))
    assert (run.sharded, run.devices) == (sharded, None if devices else 1)
    _, run = read_configuration(str(tmp_path / "a.yaml"), ["devices=4"])
    assert (run.sharded, run.recompute, run.devices) == ("parameters", "full", 4)


def test_options_of_a_command_count_with_either_dash(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("base_model: gpt2\nsequence_len: 64\nmicro_batch_size: 1\n")
    (tmp_path / "run.sh").write_text("axolotl train a.yaml --micro-batch-size 4\n")
    _, run = read_configuration(str(tmp_path / "run.sh"))
    assert (run.micro_sequences, run.unknown) == (4, ())


def test_a_stage_that_a_person_says_is_not_assumed(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("base_model: gpt2\nsequence_len: 64\ndeepspeed: mine.json\n")
    _, run = read_configuration(str(tmp_path / "a.yaml"), ["sharded=parameters"])
    assert run.sharded == "parameters" and not any("ZeRO" in line for line in run.assumed)
