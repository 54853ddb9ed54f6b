"""The recipe: everything that a person can set for a run, on one page.

Only `data.files` is required. Every `"auto"` is derived in planner/resolve/resolve.py and printed once with its reason.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

import tomli_w
from pydantic import Field, field_validator, model_validator

from plait.devices import NamedDevice
from plait.recipe.finetune import FinetuneSection
from plait.recipe.model_section import ModelSection
from plait.recipe.section import RecipeSection
from plait.recipe.values import (
    AmountText,
    Auto,
    Degree,
    DeviceNumbers,
    EveryText,
    Fraction,
    Layers,
    Name,
    Positive,
    SequenceLength,
    Steps,
    StepsText,
    TimeText,
    TokenCount,
)  # fmt: skip

ReportDestination = Literal["tensorboard", "csv", "wandb", "mlflow", "trackio"]


class RunSection(RecipeSection):
    """[run]: what the run is called, its seed, and what of this machine it may use."""

    name: Name | Auto = "auto"
    """Folder under runs/; "auto" takes the recipe file's name."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1
    """Decides the first weights and the order of the data, nothing else."""
    devices: NamedDevice | DeviceNumbers | Auto = "auto"
    """"cpu", "tpu", or GPUs by torch's numbers: "0,2"; "auto" takes all GPUs or TPU chips, else the processor."""
    workers: Degree | Auto = "auto"
    """Worker processes on this machine; on GPUs one for each GPU."""
    threads: Degree | Auto = "auto"
    """Threads of each worker."""


class SourceSection(RecipeSection):
    """One of several sources of text, with its share in the mix."""

    path: str
    """File, glob, or "hf:NAME" for a Hugging Face data set."""
    weight: Annotated[float, Field(gt=0, le=1e12)] | None = None
    """Share of this source in the mix; all or none of the sources have one."""
    field: str = "text"
    """The field or column that holds the text, or the list of messages, in tables, JSONL and Hugging Face rows."""


class DataSection(RecipeSection):
    """[data]: what to learn from, and how it becomes tokens."""

    files: str | tuple[str | SourceSection, ...]
    """What to learn from: text, Markdown, CSV, JSONL, Parquet by path or glob, "hf:NAME"; beside the recipe."""
    tokenizer: str = "auto"
    """A tokenizer.json, a Hugging Face folder, "gpt2", or "bpe": trained on first use ("auto")."""
    holdout: Fraction = 0.05
    """The part kept out of training for evaluation; 0 for none."""
    mask_documents: bool | Auto = "auto"
    """Keep attention inside a document."""
    format: Literal["text", "chat", "prompt-completion", "preference"] | Auto = "auto"
    """What files hold: text, chats, prompts with completions, or pairs of answers; "auto" tells it by the columns."""
    overlong: Literal["refuse", "drop", "cut"] = "refuse"
    """What becomes of a chat that is longer than a window: refused, left out, or cut at the window's end."""
    chat_template: str = "auto"
    """Of chats: a built-in template such as "chatml" or "qwen3", or a Jinja file; "auto": the model's, else plait's."""
    bad_records: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """The fraction of chats, prompts and pairs that may be skipped because nothing can be learned from them."""


class TrainSection(RecipeSection):
    """[train]: how long, and in which batches."""

    budget: AmountText | Auto = "auto"
    """How long: "10 minutes", "500 steps", "20M tokens", "3 epochs"."""
    sequence: SequenceLength | Auto = "auto"
    """Tokens of a training window."""
    batch_tokens: TokenCount | Auto = "auto"
    """Tokens of one optimizer step over all devices: 16384, "512K", "16M"; K is 1,000 and M 1,000,000."""
    precision: Literal["float32", "bf16", "fp16"] | Auto = "auto"
    """bf16 computes in bfloat16 with float32 master weights; fp16 in float16, with a scale of losses that adapts."""
    compile: Literal["on", "off"] | Auto = "auto"
    """Whether layers are compiled on GPUs; "auto" where a C compiler, Triton and Python's headers are there."""
    deterministic: bool = False
    """Whether GPUs use only kernels that give the same bits each time, slower ones; processors always do."""
    matmul_backend: Literal["default", "onednn"] | Auto = "auto"
    """The library that multiplies float32 matrices on processors; "auto" measures which is faster, and as exact."""
    gradient_transfer: Literal["float32", "bf16"] = "float32"
    """bf16 halves what travels where gradients are summed, and changes the numbers: each sum is rounded to 8 bits."""
    stage_transfer: Literal["float32", "bf16"] = "float32"
    """bf16 halves what the stages of a pipeline send each other, and rounds it to 8 bits at each passage."""


class OptimizerSection(RecipeSection):
    """[optimizer]: AdamW, Muon or SGD, and the course of the learning rate."""

    kind: Literal["adamw", "muon", "sgd"] | Auto = "auto"
    """"muon" updates the layers' matrices by Muon, and all else by AdamW; "auto" does so in short runs from scratch."""
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] | Auto = "auto"
    """Peak learning rate; SGD needs one named. Muon's is meant as AdamW's is: its updates have the same size."""
    adamw_lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] | Auto = "auto"
    """Beside Muon: AdamW's peak learning rate, for embedding, head, norms, biases and routers; "auto" is `lr`."""
    warmup_steps: Steps | Auto = "auto"
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] | Auto = "auto"
    """On matrices only."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] | Auto = "auto"
    """AdamW's."""
    momentum: Annotated[float, Field(ge=0, lt=1)] | Auto = "auto"
    """SGD's, or Muon's, which is Nesterov's; 0 for none."""
    clip: Annotated[float, Field(gt=0, allow_inf_nan=False)] | Literal["never"] | Auto = "auto"
    """Largest global norm of the gradient."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] | Auto = "auto"
    """How the learning rate falls: "cosine" to a tenth, "linear" to zero; "wsd" is warm-up, stable, decay."""

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if self.kind in ("auto", "adamw") and self.momentum != "auto":
            raise ValueError('momentum is SGD\'s and Muon\'s; remove it, or write optimizer.kind = "muon" or "sgd"')
        if self.kind != "muon" and self.adamw_lr != "auto":
            raise ValueError('adamw_lr is only for Muon; set optimizer.lr, or write optimizer.kind = "muon"')
        if self.kind == "sgd" and self.betas != "auto":
            raise ValueError("betas are AdamW's; remove them, SGD has optimizer.momentum")
        if self.kind == "sgd" and self.lr == "auto":
            raise ValueError(
                'kind = "sgd" needs a learning rate: plait knows no published rule for SGD with language models; '
                "write for example optimizer.lr = 0.1"
            )
        return self


class LayoutSection(RecipeSection):
    """[layout]: how the work is split over devices."""

    pipeline: Degree | Auto = "auto"
    """Groups of layers one after the other, each on workers of its own (PP). A degree named, those not named are 1."""
    replicate: Degree | Auto = "auto"
    """Full copies of the model, each with its part of every batch (DP)."""
    shard: Degree | Auto = "auto"
    """Workers that split what `shard_what` says, each with its part of every batch (ZeRO, FSDP)."""
    context: Degree | Auto = "auto"
    """Parts of every sequence (CP)."""
    tensor: Degree | Auto = "auto"
    """Parts of every matrix (TP)."""
    expert: Degree | Auto = "auto"
    """Workers of `replicate`, `shard` and `context` that hold a mixture's experts together, each some (EP)."""
    shard_what: Literal["optimizer", "master-weights", "gradients", "parameters"] | Auto = "auto"
    """Split the optimizer's state, or master weights, gradients, parameters as well (ZeRO-1 to 3)."""
    stage_layers: tuple[Layers, ...] | Auto = "auto"
    """Layers of each pipeline stage: [4, 2]; "auto" balances their cost, the head included."""
    virtual_stages: Layers | Auto = "auto"
    """Stages on each pipeline worker, for the interleaved schedule."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] | Auto = "auto"
    """Order in which a pipeline works through the micro-batches."""
    recompute: Literal["none", "selective", "full"] | Auto = "auto"
    """What is computed again in the backward pass instead of being kept in memory."""
    micro_sequences: Positive | Auto = "auto"
    """Sequences a device takes at a time at most; the rest of its part follows by accumulation."""
    shares: tuple[Positive, ...] | Auto = "auto"
    """Sequences of a step for each copy or shard: [11, 5]; with "auto" in proportion to speed where devices differ."""
    devices: Literal["all"] | Auto = "auto"
    """"auto" leaves out GPUs and hosts with which a step takes no less time; "all" uses them as well."""


class BalanceSection(RecipeSection):
    """[balance]: whether shares follow the devices' speeds while the run goes on."""

    every: EveryText | Auto = "auto"
    """How often shares may change: "50 steps", "never"; "auto" is "never" for equal devices on one host."""


class CheckpointSection(RecipeSection):
    """[checkpoint]: how often the run is saved."""

    every: EveryText | Auto = "auto"
    """How often to save: "10 steps", "5 minutes", "never" (then only at the end); "auto": at most 2 % of the time."""
    keep: Positive = 2
    """How many of the newest checkpoints stay."""
    keep_for: TimeText = "never"
    """How long the others stay as well: "6 hours"; "never": they go at once."""


class RecoverSection(RecipeSection):
    """[recover]: what happens when a worker dies or hangs."""

    mode: Literal["auto", "never"] = "auto"
    """"auto" starts the workers again from where the run stood; "never" ends the run."""
    state_every: Positive | Literal["never"] | Auto = "auto"
    """Steps between copies of the state in memory that outlives workers; "auto": with saving at most 2 % of time."""
    give_up_after: Positive = 3
    """Failures without a new checkpoint between them after which the run ends."""


class ReportSection(RecipeSection):
    """[report]: how often the run reports, and where besides metrics.jsonl."""

    to: tuple[ReportDestination, ...] = ("tensorboard",)
    """Where else: "tensorboard" and "csv" in the run's folder; "wandb", "mlflow", "trackio" if installed."""

    every: EveryText | Auto = "auto"
    """How often the scalars are fetched from the devices; every step has its line all the same."""
    evaluate: EveryText | Auto = "auto"
    """How often the held-out loss is measured, besides at the end; in steps."""
    choices: str | None = None
    """File of multiple-choice questions (JSON lines) that are asked whenever the held-out loss is measured."""
    samples: StepsText | Positive = "never"
    """How often the model writes a sample: "100 steps", or 5 for five times over the run; "never"."""
    prompt: str | None = None
    """What samples begin with; in a run on chats a user's message. None: the beginning of the held-out text."""

    @field_validator("to")
    @classmethod
    def _check_once(cls, to: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(to)) < len(to):
            raise ValueError("each destination should be named once")
        return to


class MachineChoiceSection(RecipeSection):
    """[plan]: which machines `plait plan` chooses from a pool; of no effect on training."""

    objective: Literal["fastest", "cheapest", "balanced"] | Auto = "auto"
    """"balanced" takes the least time multiplied by cost; "auto" follows from the bounds."""
    deadline: TimeText = "never"
    """Time within which the run must end: "3 days"."""
    max_cost: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Most that the run may cost, in the pool's currency."""
    min_tokens_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Fewest tokens a second."""


class RunConfig(RecipeSection):
    """A whole recipe, checked."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    finetune: FinetuneSection = FinetuneSection()
    data: DataSection
    train: TrainSection = TrainSection()
    optimizer: OptimizerSection = OptimizerSection()
    layout: LayoutSection = LayoutSection()
    balance: BalanceSection = BalanceSection()
    checkpoint: CheckpointSection = CheckpointSection()
    recover: RecoverSection = RecoverSection()
    report: ReportSection = ReportSection()
    plan: MachineChoiceSection = MachineChoiceSection()

    def __str__(self) -> str:
        """TOML with every key written out, as it is saved with a run; keys that are None are left out."""
        return tomli_w.dumps(self.model_dump(mode="json", by_alias=True, exclude_none=True))
